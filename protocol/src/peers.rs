//! An agent's knowledge of the other agents: the view that every job's core is shown.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use crate::ids::{Home, NodeId, StateId};
use crate::membership::{Guard, Membership, State as PeerState};
use crate::time::{Span, Time};
use crate::wire::{Advert, Hello, Leave, Timeouts};

/// Peers that are remembered, connected ones and watched ones apart.
pub const MAX_PEERS: usize = 2_048;

/// One other agent.
#[derive(Clone, Debug, Default)]
pub struct Peer {
    pub connected: bool,
    pub addr: Option<SocketAddr>,
    /// This node's own address as the peer sees it.
    pub observed: Option<IpAddr>,
    /// Its last hello, perhaps over an earlier connection.
    pub hello: Option<Hello>,
    /// When its newest hello came over the present connection.
    pub greeted: Option<Time>,
    /// When it is asked for a hello that did not come.
    pub hello_due: Time,
    /// For people: the best that the failure detector believes of it, of any job's launcher there.
    pub state: Option<PeerState>,
    /// When the peer was last heard, or its connection last changed.
    pub seen: Time,
    /// It announced that it goes, and when at the latest.
    pub leaving: Option<(Leave, Time)>,
}

impl Peer {
    /// The state directory that it has now. A hello over an earlier connection says nothing of it:
    /// it may have come back with another.
    pub fn state_dir(&self) -> Option<StateId> {
        let hello = self.hello.as_ref().filter(|_| self.greeted.is_some());
        hello.map(|h| h.state)
    }

    /// Whether it is here with another state directory than this one.
    pub fn has_lost(&self, state: StateId) -> bool {
        self.state_dir().is_some_and(|s| s != state)
    }

    /// Where its state directory lies, if it says so. Hosts of one name may have the same paths.
    fn home(&self) -> Option<Home> {
        let home = self.hello.as_ref().map(|h| h.home);
        home.filter(|h| !h.is_zero())
    }

    /// Whether another one that is there has the place of its state directory, or at least its address.
    fn gives_way_to(&self, other: &Peer) -> bool {
        match self.home().zip(other.home()) {
            Some((was, is)) => was == is && self.ip() == other.ip(),
            None => self.addr == other.addr,
        }
    }

    /// The IP address of its host. All of loopback is one host.
    fn ip(&self) -> Option<IpAddr> {
        match self.addr?.ip() {
            ip if ip.is_loopback() => Some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
            ip => Some(ip),
        }
    }

    /// Its announcement to go, unless it is still here long after the time that it named: then that
    /// was taken back, or was the word of an agent that went and came again.
    pub fn leaves(&self, now: Time, patience: Span) -> Option<&Leave> {
        let (leave, until) = self.leaving.as_ref()?;
        (!self.connected || now < *until + patience).then_some(leave)
    }
}

/// All other agents.
#[derive(Clone, Debug, Default)]
pub struct Peers {
    /// This agent, its state directory, and its host, to be called by the same name here as everywhere.
    pub me: Option<(NodeId, StateId, String)>,
    pub map: BTreeMap<NodeId, Peer>,
    /// Hosts of agents as earlier runs of this one heard them, for people alone: a node that died before this
    /// run has a name, too.
    pub hosts: BTreeMap<NodeId, String>,
}

impl Peers {
    /// Forgets those that have been away the longest, so that identities which come and go do not
    /// add up.
    pub fn prune(&mut self) {
        while self.map.len() > MAX_PEERS {
            let gone = self
                .map
                .iter()
                .filter(|(_, p)| !p.connected && p.state.is_none());
            let Some(oldest) = gone.min_by_key(|(_, p)| p.seen).map(|(n, _)| *n) else {
                return;
            };
            self.map.remove(&oldest);
        }
    }

    pub fn get(&self, node: NodeId) -> Option<&Peer> {
        self.map.get(&node)
    }

    pub fn connected(&self, node: NodeId) -> bool {
        self.map.get(&node).is_some_and(|p| p.connected)
    }

    /// Whether another agent of its host has the place of the state directory of this one, which is not connected: one
    /// that lost its directory comes back under another identity, and inside a launcher often at another port. Of
    /// agents that do not say where that is the address tells.
    pub fn has_successor(&self, node: NodeId) -> bool {
        self.is_followed(node, Peer::gives_way_to)
    }

    /// Those of which this agent is the successor.
    pub fn before(&self, node: NodeId) -> Vec<NodeId> {
        let Some(new) = self.get(node).filter(|p| p.connected) else {
            return Vec::new();
        };
        let gone = self
            .map
            .iter()
            .filter(|(_, p)| !p.connected && p.addr.is_some());
        let before = gone.filter(|(_, p)| p.gives_way_to(new));
        let before = before.map(|(n, _)| *n);
        before
            .filter(|n| self.host(*n) == self.host(node))
            .collect()
    }

    /// Whether this node's agent is here with another state directory than this one.
    pub fn has_lost(&self, node: NodeId, state: StateId) -> bool {
        match self.me.as_ref().filter(|(me, ..)| *me == node) {
            Some((_, mine, _)) => *mine != state,
            None => self.map.get(&node).is_some_and(|p| p.has_lost(state)),
        }
    }

    /// Whether another agent of its host has the address of this one, which is not connected.
    pub fn has_lost_address(&self, node: NodeId) -> bool {
        self.is_followed(node, |gone, p| gone.addr == p.addr)
    }

    /// Whether another agent of its host is there in place of this one, which is not connected.
    fn is_followed(&self, node: NodeId, there: impl Fn(&Peer, &Peer) -> bool) -> bool {
        let gone = self
            .map
            .get(&node)
            .filter(|p| !p.connected && p.addr.is_some());
        gone.is_some_and(|gone| {
            let mut others = self
                .map
                .iter()
                .filter(|(_, p)| p.connected && there(gone, p));
            others.any(|(other, _)| self.host(*other) == self.host(node))
        })
    }

    pub fn connected_nodes(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.map
            .iter()
            .filter(|(_, p)| p.connected)
            .map(|(n, _)| *n)
    }

    /// Whether the node that was last at this address said that it goes, and went.
    pub fn has_left(&self, addr: SocketAddr) -> bool {
        let there = self.map.values().filter(|p| p.addr == Some(addr));
        let last = there.max_by_key(|p| p.seen);
        last.is_some_and(|p| !p.connected && p.leaving.is_some())
    }

    /// The jobs of which connected agents told last, each with the agent that told.
    pub fn adverts(&self) -> impl Iterator<Item = (NodeId, &Advert)> {
        let peers = self.map.iter().filter(|(_, p)| p.connected);
        peers.flat_map(|(node, p)| {
            let jobs = p.hello.iter().flat_map(|hello| &hello.jobs);
            jobs.map(|advert| (*node, advert))
        })
    }

    /// The last words of agents that were heard since then, are not connected, and did not say goodbye.
    pub fn last_adverts(&self, since: Time) -> impl Iterator<Item = (NodeId, &Advert)> {
        let gone = move |p: &Peer| !p.connected && p.leaving.is_none() && p.seen >= since;
        let peers = self.map.iter().filter(move |(_, p)| gone(p));
        peers.flat_map(|(node, p)| {
            let jobs = p.hello.iter().flat_map(|hello| &hello.jobs);
            jobs.map(|advert| (*node, advert))
        })
    }

    /// The longest times that any agent keeps of which this one has heard.
    pub fn timeouts(&self) -> Timeouts {
        let hellos = self.map.values().filter_map(|p| p.hello.as_ref());
        hellos.fold(Timeouts::default(), |most, h| most.max(h.timeouts))
    }

    /// The host of another agent, as it said last.
    pub fn host(&self, node: NodeId) -> Option<&str> {
        let remembered = || self.hosts.get(&node).map(String::as_str);
        self.heard_host(node).or_else(remembered)
    }

    /// The host of another agent, as it said in this run. A host that was installed anew is another node: only such
    /// a name may pick one.
    pub fn heard_host(&self, node: NodeId) -> Option<&str> {
        let hello = self.map.get(&node).and_then(|p| p.hello.as_ref());
        hello.map(|h| h.host.as_str())
    }

    /// Name of a node for people.
    pub fn name(&self, node: NodeId) -> String {
        let mine = self.me.iter().find(|(me, ..)| *me == node);
        match mine.map(|(_, _, host)| &**host).or(self.host(node)) {
            Some(host) => format!("{host} ({node})"),
            None => node.to_string(),
        }
    }
}

/// The other agents as one job sees them: with what became of its own launchers there.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    pub all: &'a Peers,
    /// The failure detector's verdicts on nodes that it watches for this job, those alone that are not
    /// alive.
    pub unwell: &'a BTreeMap<NodeId, PeerState>,
    /// Since when agents are away whose launchers of this job answered then. Nothing heard since says
    /// that an agent came back, nor that the launcher is gone.
    pub away: &'a BTreeMap<NodeId, Time>,
    pub detector: &'a Membership,
    /// The launchers that the failure detector watches for this job, by node.
    pub guards: &'a BTreeMap<NodeId, (Guard, bool)>,
}

impl std::ops::Deref for View<'_> {
    type Target = Peers;

    fn deref(&self) -> &Peers {
        self.all
    }
}

impl View<'_> {
    /// The belief about a node; none about one that is well, or that is not watched.
    pub fn unwell(&self, node: NodeId) -> Option<PeerState> {
        self.unwell.get(&node).copied()
    }

    /// Judged lost by the failure detector; `Some(true)` when its death is confirmed.
    pub fn lost(&self, node: NodeId) -> Option<bool> {
        match self.unwell(node) {
            Some(PeerState::Lost { confirmed }) => Some(confirmed),
            _ => None,
        }
    }

    /// Since when an agent is away that may not have come back.
    pub fn away_since(&self, node: NodeId) -> Option<Time> {
        self.away.get(&node).copied()
    }

    /// When it was known last that a launcher there went on without a running agent.
    pub fn alone_at(&self, node: NodeId) -> Option<Time> {
        let (guard, _) = self.guards.get(&node)?;
        self.detector.peer(node, *guard)?.alone
    }

    /// The agent is absent though its launcher answers (a crash, an upgrade).
    pub fn away(&self, node: NodeId) -> bool {
        matches!(self.unwell(node), Some(PeerState::Away { .. }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Boot;

    fn peer(host: &str, port: u16, connected: bool) -> Peer {
        let hello = Hello {
            host: host.into(),
            version: "1".into(),
            state: StateId([1; 8]),
            home: Home::of(host.as_bytes()),
            boot: Boot(1),
            timeouts: Timeouts::default(),
            unstored: None,
            embedded: false,
            jobs: Vec::new(),
        };
        Peer {
            connected,
            addr: Some(SocketAddr::from(([10, 0, 0, 1], port))),
            hello: Some(hello),
            ..Peer::default()
        }
    }

    #[test]
    fn a_node_left_its_address_where_it_said_so_and_went() {
        let leave = Leave {
            grace_ms: 1000,
            reason: String::new(),
        };
        let at = |port| SocketAddr::from(([10, 0, 0, 1], port));
        let peer = |connected, leaves: bool, seen| Peer {
            leaving: leaves.then(|| (leave.clone(), Time::ZERO)),
            seen: Time(seen),
            ..peer("a", 7970, connected)
        };
        let left = |all: &[Peer]| {
            let mut peers = Peers::default();
            let ids = (1..).map(|id| NodeId([id; 32]));
            peers.map.extend(ids.zip(all.iter().cloned()));
            peers.has_left(at(7970))
        };
        assert!(left(&[peer(false, true, 5)]));
        assert!(!left(&[peer(true, true, 5)]));
        assert!(!left(&[peer(false, false, 5)]));
        assert!(!left(&[]));
        // One that came after it there, and is lost, is missed.
        assert!(!left(&[peer(false, true, 5), peer(false, false, 6)]));
        assert!(left(&[peer(false, true, 6), peer(false, false, 5)]));
    }

    #[test]
    fn an_agent_is_replaced_by_another_one_of_its_host_at_its_address() {
        let [gone, other] = [1, 2].map(|id| NodeId([id; 32]));
        let is_replaced = |was: Peer, is: Peer| {
            let mut peers = Peers::default();
            peers.map.extend([(gone, was), (other, is)]);
            peers.has_successor(gone)
        };
        let was = |connected| peer("a", 7970, connected);
        assert!(is_replaced(was(false), peer("a", 7970, true)));
        assert!(!is_replaced(was(true), peer("a", 7970, true)));
        assert!(!is_replaced(was(false), peer("a", 7970, false)));
        // In the place of its state directory, at whatever port.
        assert!(is_replaced(was(false), peer("a", 7971, true)));
        let moved = |home: &[u8], ip: [u8; 4]| {
            let mut other = peer("a", 7971, true);
            other.addr = Some(SocketAddr::from((ip, 7971)));
            other.hello.as_mut().unwrap().home = Home::of(home);
            other
        };
        assert!(!is_replaced(was(false), moved(b"b", [10, 0, 0, 1])));
        // Another one took its port before it came back, which is no loss of its state.
        let mut taken = moved(b"b", [10, 0, 0, 1]);
        taken.addr = was(false).addr;
        assert!(!is_replaced(was(false), taken));
        // Hosts may have one name, and the same paths.
        assert!(!is_replaced(was(false), moved(b"a", [10, 0, 0, 2])));
        // Behind one source address there may be agents of several hosts.
        assert!(!is_replaced(was(false), peer("b", 7970, true)));
        // One that does not say where its state is.
        let silent = |port, connected| {
            let mut peer = peer("a", port, connected);
            peer.hello.as_mut().unwrap().home = Home::ZERO;
            peer
        };
        assert!(is_replaced(silent(7970, false), silent(7970, true)));
        assert!(!is_replaced(silent(7970, false), silent(7971, true)));
    }
}
