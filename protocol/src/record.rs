//! A generation's record: the unit of agreement. Everything that two nodes must see alike about a
//! generation is in it, and its digest is its name.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::codec;
use crate::ids::{Digest, JobKey, LauncherId, NodeId, StateId, StoreUuid};
use crate::spec::{JobSpec, MAX_MEMBERS};

/// The most voters of one generation. Beyond it the members of the lowest ranks vote for all, so
/// that the cost of a decision and of the leases grows linearly.
pub const MAX_VOTERS: usize = 63;

/// Voters that a small job is filled up to with witnesses (R4).
pub const WITNESSED_VOTERS: usize = 3;

/// The most workers of one node.
pub const MAX_SLOTS: u16 = 1_024;

/// Where a node sits, as two hashes (zone, switch); zero for unknown. Nodes of one place become
/// neighbours in rank order.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Place {
    pub zone: [u8; 2],
    pub switch: [u8; 2],
}

impl Place {
    /// From names, an empty one for unknown.
    pub fn of(zone: &str, switch: &str) -> Place {
        Place {
            zone: short_hash(zone),
            switch: short_hash(switch),
        }
    }
}

/// Two bytes of BLAKE3 over a name; zero stands for unknown, so a name never hashes to it.
pub fn short_hash(name: &str) -> [u8; 2] {
    if name.is_empty() {
        return [0; 2];
    }
    match *blake3::hash(name.as_bytes()).as_bytes() {
        [0, 0, ..] => [0, 1],
        [a, b, ..] => [a, b],
    }
}

/// One node's part in a job.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Member {
    pub node: NodeId,
    pub state: StateId,
    pub launcher: LauncherId,
    /// Workers on this node.
    pub slots: u16,
    /// The launcher's guard port, on the address by which peers reach the launcher.
    pub guard: SocketAddr,
    pub place: Place,
}

impl Member {
    pub fn voter(&self) -> Voter {
        Voter {
            node: self.node,
            state: self.state,
        }
    }
}

/// A voter on the next generation: an agent with the state directory in which it holds this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Voter {
    pub node: NodeId,
    pub state: StateId,
}

/// The authority that decides the generation after this one. Never falls back from one kind to the other (R3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Arbiter {
    Members,
    Store(StoreUuid),
}

/// Effect of a record on the job (R9).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// A generation that trains.
    Next,
    /// All ranks exited 0, or the user stopped the job.
    End { cancelled: bool },
    /// The restart budget is spent; the root cause's own exit code.
    Failed { code: i32 },
    /// Every node left on purpose; a later start goes on from here.
    Dormant,
    /// Another lineage of the same key won; this one's nodes join it (R10).
    Tombstone { winner: Digest },
    /// The generation of this digest goes on as it is, with other witnesses: a change of who votes on what follows
    /// it. The changes of a generation are counted from 1.
    Voters { generation: Digest, change: u32 },
}

impl Kind {
    pub fn is_terminal(self) -> bool {
        !matches!(self, Kind::Next | Kind::Voters { .. })
    }
}

/// Why a generation was decided. Lists are capped by the record's own limits.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Cause {
    Formed,
    NodesLost {
        nodes: Vec<NodeId>,
    },
    NodesLeft {
        nodes: Vec<NodeId>,
    },
    NodesJoined {
        nodes: Vec<NodeId>,
    },
    /// Two-way links were missing between members; these were dropped (R19).
    LinksLost {
        nodes: Vec<NodeId>,
    },
    /// These did not acknowledge their start in time (R19).
    StartFailed {
        nodes: Vec<NodeId>,
    },
    WorkerFailed {
        node: NodeId,
        rank: u32,
        code: i32,
    },
    /// Another lineage of the same key is taken in (R10).
    Merged {
        other: Digest,
    },
    Finished,
    Cancelled,
    /// A birth with which the job goes on, by an operator's word, without these nodes.
    Continued {
        nodes: Vec<NodeId>,
    },
    /// A worker that made no progress, and for whom the others waited, was ended.
    WorkerHung {
        node: NodeId,
        rank: u32,
        code: i32,
    },
    /// A rank found the checkpoint of this step, which the generation began with, damaged: it is
    /// rejected.
    Damaged {
        node: NodeId,
        rank: u32,
        step: u64,
    },
    /// Ranks on these nodes found the checkpoint of this step damaged, and another node has read all of it:
    /// the nodes are at fault.
    Misread {
        nodes: Vec<NodeId>,
        step: u64,
    },
    /// The workers of these had stopped for a reason that is gone: all start again.
    Resumed {
        nodes: Vec<NodeId>,
    },
    /// The leases of these ran out, and with them their workers' right to train (R16): a launcher was stopped, or it
    /// reached neither a majority nor the store.
    LeasesLost {
        nodes: Vec<NodeId>,
    },
}

impl Cause {
    /// A short stable word for logs, metrics and JSON.
    pub fn word(&self) -> &'static str {
        match self {
            Cause::Formed => "formed",
            Cause::NodesLost { .. } => "nodes_lost",
            Cause::NodesLeft { .. } => "nodes_left",
            Cause::NodesJoined { .. } => "nodes_joined",
            Cause::LinksLost { .. } => "links_lost",
            Cause::StartFailed { .. } => "start_failed",
            Cause::WorkerFailed { .. } => "worker_failed",
            Cause::Merged { .. } => "merged",
            Cause::Finished => "finished",
            Cause::Cancelled => "cancelled",
            Cause::Continued { .. } => "continued",
            Cause::WorkerHung { .. } => "worker_hung",
            Cause::Damaged { .. } => "checkpoint_damaged",
            Cause::Misread { .. } => "checkpoint_misread",
            Cause::Resumed { .. } => "resumed",
            Cause::LeasesLost { .. } => "leases_lost",
        }
    }
}

/// Names a checkpoint that was committed, or asked to be: the generation that wrote it, its number
/// within the job (dense, growing), the step, and its manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CommitRef {
    pub generation: Digest,
    pub number: u64,
    pub step: u64,
    pub manifest: Digest,
}

/// One generation (R3). The first member is the leader, and rank 0 is on it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Record {
    pub key: JobKey,
    /// The birth record's digest; zero in the birth record itself.
    pub birth: Digest,
    pub number: u64,
    /// The record that this one follows; for a birth, the terminal record of the lineage before,
    /// or zero.
    pub parent: Digest,
    pub kind: Kind,
    /// In rank order; empty when the kind is terminal.
    pub members: Vec<Member>,
    /// Voters that are not members.
    pub witnesses: Vec<Voter>,
    pub arbiter: Arbiter,
    pub spec: JobSpec,
    /// Script faults charged to the job so far.
    pub restarts_used: u32,
    pub cause: Cause,
    /// The commit that the generation restores.
    pub restore: Option<CommitRef>,
    /// Makes two births of the same nodes different records.
    pub nonce: u64,
}

impl Record {
    /// BLAKE3 of the canonical encoding. A record that is too long for a frame has no digest; the
    /// limits on its parts keep that from happening, and the zero digest is never accepted.
    pub fn digest(&self) -> Digest {
        match codec::encode_body(self) {
            Ok(bytes) => Digest(*blake3::hash(&bytes).as_bytes()),
            Err(_) => Digest::ZERO,
        }
    }

    /// The lineage: the digest of the birth record.
    pub fn lineage(&self) -> Digest {
        if self.number == 1 && self.change_of_voters() == 0 {
            self.digest()
        } else {
            self.birth
        }
    }

    /// The generation that this record is, or whose voters it changes.
    pub fn generation(&self) -> Digest {
        match self.kind {
            Kind::Voters { generation, .. } => generation,
            _ => self.digest(),
        }
    }

    /// The same generation with other witnesses, decided by the voters that this record names.
    pub fn with_witnesses(&self, witnesses: Vec<Voter>) -> Record {
        let change = self.change_of_voters().saturating_add(1);
        Record {
            birth: self.lineage(),
            parent: self.digest(),
            kind: Kind::Voters {
                generation: self.generation(),
                change,
            },
            witnesses,
            ..self.clone()
        }
    }

    /// How often the voters of its generation were changed up to this record.
    pub fn change_of_voters(&self) -> u32 {
        match self.kind {
            Kind::Voters { change, .. } => change,
            _ => 0,
        }
    }

    /// Whether `self` may change the voters that `before` names: all else stays.
    pub fn changes_voters_of(&self, before: &Record) -> bool {
        let next = before.with_witnesses(self.witnesses.clone());
        self.kind == next.kind && self.parent == next.parent && self.is_of(before)
    }

    /// Whether `self` is a change of the voters of the generation that `other` is or belongs to, the next one or
    /// another.
    pub fn is_of(&self, other: &Record) -> bool {
        let same = Record {
            restore: self.restore,
            kind: self.kind,
            parent: self.parent,
            ..other.with_witnesses(self.witnesses.clone())
        };
        let changes = self.change_of_voters() > 0 && self.generation() == other.generation();
        changes && *self == same && !other.kind.is_terminal()
    }

    pub fn leader(&self) -> Option<NodeId> {
        self.members.first().map(|m| m.node)
    }

    pub fn member(&self, node: NodeId) -> Option<&Member> {
        self.members.iter().find(|m| m.node == node)
    }

    pub fn has(&self, node: NodeId) -> bool {
        self.member(node).is_some()
    }

    /// A generation of fewer nodes than the job wants: it records who left, runs nothing, and waits for
    /// others.
    pub fn is_short(&self) -> bool {
        self.kind == Kind::Next && self.members.len() < usize::from(self.spec.min_nodes)
    }

    /// The store whose log decides, if one does.
    pub fn store(&self) -> Option<StoreUuid> {
        match self.arbiter {
            Arbiter::Members => None,
            Arbiter::Store(uuid) => Some(uuid),
        }
    }

    /// The number of ranks.
    pub fn world(&self) -> u32 {
        self.members.iter().map(|m| u32::from(m.slots)).sum()
    }

    /// The first global rank of a node and its number of ranks.
    pub fn ranks_of(&self, node: NodeId) -> Option<(u32, u16)> {
        let mut first = 0;
        for m in &self.members {
            if m.node == node {
                return Some((first, m.slots));
            }
            first += u32::from(m.slots);
        }
        None
    }

    /// The voters on the next generation, rank 0's first.
    pub fn voters(&self) -> impl Iterator<Item = Voter> + '_ {
        self.members
            .iter()
            .take(MAX_VOTERS)
            .map(Member::voter)
            .chain(self.witnesses.iter().copied())
    }

    pub fn is_voter(&self, voter: Voter) -> bool {
        self.voters().any(|v| v == voter)
    }

    /// Whether these nodes are a majority of the voters; at an exact tie the half with rank 0's
    /// voter is one (R4). Any two majorities share a voter.
    pub fn is_majority(&self, has: impl Fn(NodeId) -> bool) -> bool {
        let (mut all, mut yes, mut first) = (0usize, 0usize, false);
        for (i, v) in self.voters().enumerate() {
            all += 1;
            if has(v.node) {
                yes += 1;
                first |= i == 0;
            }
        }
        all > 0 && 2 * yes + usize::from(first) > all
    }

    /// Whether the record's own parts fit together. Says nothing about whether it was decided.
    pub fn check(&self) -> Result<(), RecordError> {
        if !self.key.is_valid() {
            return Err(RecordError::Key);
        }
        if self.members.len() > MAX_MEMBERS {
            return Err(RecordError::TooManyMembers(self.members.len()));
        }
        if self.witnesses.len() > WITNESSED_VOTERS {
            return Err(RecordError::TooManyWitnesses(self.witnesses.len()));
        }
        if matches!(self.kind, Kind::Voters { change: 0, .. }) {
            return Err(RecordError::Voters);
        }
        let born = self.number == 1 && self.change_of_voters() == 0;
        if self.number == 0 || born != self.birth.is_zero() {
            return Err(RecordError::Number);
        }
        if !born && self.parent.is_zero() {
            return Err(RecordError::Number);
        }
        if self.kind.is_terminal() != self.members.is_empty() {
            return Err(RecordError::Members);
        }
        let mut nodes: Vec<NodeId> = self.voters_and_members().collect();
        nodes.sort_unstable();
        if nodes.windows(2).any(|w| w[0] == w[1]) {
            return Err(RecordError::Twice);
        }
        if let Some(m) = self
            .members
            .iter()
            .find(|m| !(1..=MAX_SLOTS).contains(&m.slots))
        {
            return Err(RecordError::Slots(m.slots));
        }
        self.spec.check().map_err(RecordError::Spec)
    }

    pub(crate) fn voters_and_members(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.members
            .iter()
            .map(|m| m.node)
            .chain(self.witnesses.iter().map(|w| w.node))
    }

    /// Whether `self` may follow `parent` within one lineage.
    pub fn follows(&self, parent: &Record) -> bool {
        self.number == parent.number.wrapping_add(1)
            && self.parent == parent.digest()
            && self.birth == parent.lineage()
            && self.key == parent.key
            && self.arbiter == parent.arbiter
            && self.spec == parent.spec
            && self.change_of_voters() == 0
            && !parent.kind.is_terminal()
    }
}

/// Faults of a record that arrived.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    #[error("the job's key is empty, too long, or has control characters")]
    Key,
    #[error("{0} members, the limit is {MAX_MEMBERS}")]
    TooManyMembers(usize),
    #[error("{0} witnesses, the limit is {WITNESSED_VOTERS}")]
    TooManyWitnesses(usize),
    #[error("the generation number does not fit its birth and parent")]
    Number,
    #[error("a record that trains needs members, a terminal one has none")]
    Members,
    #[error("a change of voters where a generation belongs")]
    Voters,
    #[error("a node stands in the record twice")]
    Twice,
    #[error("a member has {0} slots, and has 1 to {MAX_SLOTS}")]
    Slots(u16),
    #[error(transparent)]
    Spec(crate::spec::SpecError),
}

#[cfg(test)]
impl Record {
    /// A job's first generation, of these, as tests want one.
    pub(crate) fn first(members: Vec<Member>) -> Record {
        Record {
            key: JobKey {
                cluster: "c".into(),
                owner: "0".into(),
                id: "j".into(),
            },
            birth: Digest::ZERO,
            number: 1,
            parent: Digest::ZERO,
            kind: Kind::Next,
            members,
            witnesses: Vec::new(),
            arbiter: Arbiter::Members,
            spec: JobSpec::default(),
            restarts_used: 0,
            cause: Cause::Formed,
            restore: None,
            nonce: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(n: u8) -> Member {
        Member {
            node: NodeId([n; 32]),
            state: StateId([n; 8]),
            launcher: LauncherId([n; 8]),
            slots: 2,
            guard: SocketAddr::from(([127, 0, 0, 1], 1000 + u16::from(n))),
            place: Place::default(),
        }
    }

    fn record(members: u8) -> Record {
        Record::first((1..=members).map(member).collect())
    }

    #[test]
    fn any_two_majorities_share_a_voter() {
        for n in 1..=7u8 {
            let r = record(n);
            let sets: Vec<u32> = (0..1u32 << n)
                .filter(|set| r.is_majority(|node| set >> (node.0[0] - 1) & 1 == 1))
                .collect();
            assert!(!sets.is_empty());
            for a in &sets {
                for b in &sets {
                    assert_ne!(a & b, 0, "{n} voters: {a:b} and {b:b}");
                }
            }
        }
    }

    #[test]
    fn rank_zero_breaks_the_tie_of_two() {
        let r = record(2);
        assert!(r.is_majority(|n| n.0[0] == 1));
        assert!(!r.is_majority(|n| n.0[0] == 2));
    }

    #[test]
    fn a_change_of_voters_changes_nothing_else() {
        let first = record(2);
        let witness = |n: u8| Voter {
            node: NodeId([n; 32]),
            state: StateId([n; 8]),
        };
        let one = first.with_witnesses(vec![witness(8)]);
        let two = one.with_witnesses(Vec::new());
        assert_eq!(
            [&first, &one, &two].map(|r| r.change_of_voters()),
            [0, 1, 2]
        );
        for r in [&one, &two] {
            assert_eq!(r.check(), Ok(()));
            assert_eq!(
                (r.lineage(), r.generation()),
                (first.digest(), first.digest())
            );
            assert!(!r.kind.is_terminal() && !r.follows(&first));
        }
        assert!(one.changes_voters_of(&first) && two.changes_voters_of(&one));
        assert!(!two.changes_voters_of(&first) && !first.changes_voters_of(&first));
        assert_eq!(one.voters().count(), 3);
        let mut other = one.clone();
        other.members.pop();
        assert!(!other.changes_voters_of(&first));
        // What follows names the generation, whoever decided it.
        let next = Record {
            number: 2,
            birth: first.digest(),
            parent: first.digest(),
            ..first.clone()
        };
        assert!(next.follows(&first) && !next.follows(&one));
    }

    #[test]
    fn a_thousand_members_fit_a_frame() {
        let mut r = record(1);
        let one = r.members[0].clone();
        r.members = (0..MAX_MEMBERS as u32)
            .map(|i| {
                let mut m = one.clone();
                m.node.0[..4].copy_from_slice(&i.to_le_bytes());
                m.guard = "[2001:db8::1]:65535".parse().unwrap();
                m
            })
            .collect();
        r.spec.max_nodes = MAX_MEMBERS as u16;
        assert!(codec::encode_frame(&r).is_ok());
        assert!(r.check().is_ok());
        assert_ne!(r.digest(), Digest::ZERO);
    }

    #[test]
    fn ranks_are_dense_and_owned_once() {
        let mut r = record(3);
        r.members[1].slots = 3;
        assert_eq!(r.world(), 7);
        assert_eq!(r.ranks_of(NodeId([1; 32])), Some((0, 2)));
        assert_eq!(r.ranks_of(NodeId([2; 32])), Some((2, 3)));
        assert_eq!(r.ranks_of(NodeId([3; 32])), Some((5, 2)));
        assert_eq!(r.ranks_of(NodeId([4; 32])), None);
    }

    #[test]
    fn a_record_that_lies_is_refused() {
        let mut twice = record(2);
        twice.members[1] = twice.members[0].clone();
        assert_eq!(twice.check(), Err(RecordError::Twice));
        let mut number = record(1);
        number.number = 2;
        assert_eq!(number.check(), Err(RecordError::Number));
        let mut empty = record(1);
        empty.members.clear();
        assert_eq!(empty.check(), Err(RecordError::Members));
    }
}
