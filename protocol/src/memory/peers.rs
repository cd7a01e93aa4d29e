//! The other holders of a job's checkpoints in memory, as a launcher is told them, and its workers by it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::{Key, parity};
use crate::ids::{Digest, LauncherId, NodeId};
use crate::record::{Place, Record};
use crate::spec::MAX_MEMBERS;

/// The most peers that a launcher, or a worker, is told of: all other members. A process that restores asks no more of
/// them than it needs.
pub const MAX_PEERS: usize = MAX_MEMBERS;

/// Another member's launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// Which it is, whatever leads to it.
    pub launcher: LauncherId,
    /// Its guard, which tells where it listens.
    pub guard: SocketAddr,
}

/// Information to a launcher about the others at a generation's start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peers {
    pub key: Key,
    /// The other members'. The first is the one that holds this node's copies.
    pub others: Vec<Peer>,
    /// With which this node shares parity, the next one in the group first; none where its launcher asked for none.
    pub group: Vec<Peer>,
    /// Of the newest commit: the generation that saved it, and its step.
    pub committed: Option<(Digest, u64)>,
}

impl Peers {
    /// Of a member of a generation, whose launcher asked for parity over so many nodes (0: for none).
    pub fn of(record: &Record, me: NodeId, cluster: Key, over: u8) -> Peers {
        let members = &record.members;
        let here = members.iter().position(|m| m.node == me);
        let places: Vec<Place> = members.iter().map(|m| m.place).collect();
        let (mut others, mut group) = (Vec::new(), Vec::new());
        if let Some(here) = here {
            let peer = |at: usize| {
                let member = members.get(at % members.len())?;
                Some(Peer {
                    launcher: member.launcher,
                    guard: member.guard,
                })
            };
            let first = here + shift(&places);
            let all = (first..).take(members.len());
            let all = all.filter(|at| at % members.len() != here);
            others.extend(all.filter_map(peer));
            if over > 0 {
                let mates = parity::mates(&places, over, here);
                group.extend(mates.into_iter().filter_map(peer));
            }
        }
        Peers {
            key: cluster.of_job(record.lineage()),
            others,
            group,
            committed: record
                .restore
                .map(|commit| (commit.generation, commit.step)),
        }
    }

    /// All others, in the order in which a worker asks them: first who most likely holds what a lost node had.
    pub fn by_use(&self) -> Vec<Peer> {
        let first = self.others.iter().take(1).chain(&self.group);
        let mut known = BTreeSet::new();
        first
            .chain(&self.others)
            .filter(|peer| known.insert(peer.launcher))
            .copied()
            .collect()
    }
}

/// How far from a node its copies are held, in a ring of the members in their order: each holds those of one other.
/// Members of one place are neighbours, so a shift by the largest place's size leads to another place, as long as no
/// place has more than half of them.
fn shift(places: &[Place]) -> usize {
    let mut sizes: BTreeMap<Place, usize> = BTreeMap::new();
    for place in places.iter().filter(|p| **p != Place::default()) {
        *sizes.entry(*place).or_default() += 1;
    }
    let largest = sizes.values().copied().max().unwrap_or(1);
    if 2 * largest <= places.len() {
        largest
    } else {
        1
    }
}

/// Information to a worker by [`MEMORY_ENV`](super::MEMORY_ENV).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Whom {
    pub key: Key,
    /// The port of its own launcher, on loopback, and which that is.
    pub own: u16,
    pub launcher: LauncherId,
    /// The others.
    pub others: Vec<Peer>,
}

impl Whom {
    /// As the variable's value.
    pub fn encode(&self) -> String {
        let one = |peer: &Peer| format!("{}@{}", peer.launcher.hex(), peer.guard);
        let others: Vec<String> = self.others.iter().map(one).collect();
        let (key, launcher) = (self.key.hex(), self.launcher.hex());
        format!("{key}/{launcher}@{}/{}", self.own, others.join(","))
    }

    /// The inverse; `None` for anything else.
    pub fn decode(text: &str) -> Option<Whom> {
        let mut parts = text.splitn(3, '/');
        let (key, own, others) = (parts.next()?, parts.next()?, parts.next()?);
        let (launcher, own) = named(own)?;
        let others = others.split(',').filter(|text| !text.is_empty());
        let others: Option<Vec<Peer>> = others
            .map(|text| {
                let (launcher, guard) = named(text)?;
                Some(Peer { launcher, guard })
            })
            .collect();
        Some(Whom {
            key: Key::from_hex(key)?,
            own,
            launcher,
            others: others.filter(|list| list.len() <= MAX_PEERS)?,
        })
    }
}

/// A launcher, and where it is.
fn named<T: std::str::FromStr>(text: &str) -> Option<(LauncherId, T)> {
    let (launcher, at) = text.split_once('@')?;
    Some((LauncherId::from_hex(launcher)?, at.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::StateId;
    use crate::record::Member;

    fn place(zone: &str, switch: &str) -> Place {
        Place::of(zone, switch)
    }

    #[test]
    fn copies_go_to_another_place_and_each_node_holds_those_of_one() {
        let rack = |n: usize, of: &str| vec![place("z", of); n];
        for (sizes, apart) in [
            (vec![2, 2], true),
            (vec![3, 1, 2], true),
            (vec![3, 1], false),
        ] {
            let names = ["a", "b", "c"];
            let places: Vec<Place> = (sizes.iter().zip(names))
                .flat_map(|(n, name)| rack(*n, name))
                .collect();
            let by = shift(&places);
            let holder = |at: usize| (at + by) % places.len();
            let mut holders: Vec<usize> = (0..places.len()).map(holder).collect();
            let all_apart = (0..places.len()).all(|at| places[at] != places[holder(at)]);
            assert_eq!(all_apart, apart, "{sizes:?}");
            assert!((0..places.len()).all(|at| at != holder(at)));
            holders.sort_unstable();
            assert_eq!(holders, (0..places.len()).collect::<Vec<_>>());
        }
        assert_eq!(shift(&[Place::default(); 5]), 1);
        assert_eq!(shift(&[]), 1);
    }

    #[test]
    fn a_worker_reads_what_its_launcher_wrote() {
        let peer = |n, guard: &str| Peer {
            launcher: LauncherId([n; 8]),
            guard: guard.parse().unwrap(),
        };
        let whom = Whom {
            key: Key::of_cluster(Some(b"s")),
            own: 7,
            launcher: LauncherId([1; 8]),
            others: vec![peer(2, "10.0.0.1:5"), peer(3, "[::1]:6")],
        };
        assert_eq!(Whom::decode(&whom.encode()), Some(whom.clone()));
        let alone = Whom {
            others: vec![],
            ..whom
        };
        assert_eq!(Whom::decode(&alone.encode()), Some(alone));
        let (key, id) = ("0".repeat(64), "0".repeat(16));
        assert!(Whom::decode(&format!("{key}/{id}@1/")).is_some());
        for text in [
            "",
            "x/1/",
            "00/1/",
            "/1/2",
            &format!("{key}/{id}@70000/"),
            &format!("{key}/1/"),
            &format!("{key}/00@1/"),
            &format!("{key}/{id}@1/10.0.0.1:5"),
            &format!("{key}/{id}@1/{id}@10.0.0.1"),
        ] {
            assert_eq!(Whom::decode(text), None, "{text}");
        }
    }

    fn member(number: u16) -> Member {
        let mut id = [0; 32];
        id[..2].copy_from_slice(&number.to_be_bytes());
        let guard = format!("[2001:db8:1000:1000:1000:1000:1000:{number:x}]:65535");
        Member {
            node: NodeId(id),
            state: StateId([2; 8]),
            launcher: LauncherId([255, 255, 255, 255, 255, 255, id[0], id[1]]),
            slots: 8,
            guard: guard.parse().unwrap(),
            place: Place::default(),
        }
    }

    #[test]
    fn each_node_knows_all_others_however_many_there_are() {
        for nodes in [2, 65, 66, 200, MAX_MEMBERS] {
            let record = Record::first((0..nodes as u16).map(member).collect());
            let all: BTreeSet<LauncherId> = record.members.iter().map(|m| m.launcher).collect();
            for here in [0, nodes / 2, nodes - 1] {
                let me = &record.members[here];
                let peers = Peers::of(&record, me.node, Key::default(), 2);
                let asked = peers.by_use();
                let mut known: BTreeSet<LauncherId> = asked.iter().map(|p| p.launcher).collect();
                assert_eq!(known.len(), asked.len(), "each once");
                assert!(known.insert(me.launcher), "itself it need not ask");
                assert!(known == all, "{nodes} nodes, of {here}");
                // Who holds copies of this node's, then who shares parity with it.
                assert_eq!(asked[0], peers.others[0]);
                let next = &asked[..=peers.group.len().min(asked.len() - 1)];
                assert!(peers.group.iter().all(|mate| next.contains(mate)));
                // A frame, and an environment variable (MAX_ARG_STRLEN), have room for them.
                let frame = crate::codec::encode_frame(&peers).unwrap();
                assert!(frame.len() < crate::codec::MAX_FRAME / 2, "{}", frame.len());
                let whom = Whom {
                    key: peers.key,
                    own: u16::MAX,
                    launcher: me.launcher,
                    others: asked,
                };
                let text = whom.encode();
                assert!(text.len() < 100_000, "{}", text.len());
                assert_eq!(Whom::decode(&text), Some(whom));
            }
        }
    }
}
