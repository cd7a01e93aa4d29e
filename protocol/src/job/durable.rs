//! State that a job's core must find again after a crash.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Continues;
use crate::checkpoint::{LeaderState, NodeState};
use crate::codec::{self, CodecError};
use crate::ids::{Boot, Digest, JobKey, NodeId};
use crate::paxos::Acceptor;
use crate::record::{CommitRef, Record};
use crate::time::{Span, Time};
use crate::wire::Timeouts;

/// The most ends of earlier lineages that are kept; such records are small.
const MAX_ENDED: usize = 16;

/// The most forfeited votes that are remembered. One is added only when a whole first generation
/// turns out dead, and matters only as long as somebody still holds that generation.
const MAX_FORFEITED: usize = 64;

/// The most lineages of one job that are remembered as superseded.
const MAX_SUPERSEDED: usize = 16;

/// The most lineages of one job that are remembered by name alone.
const MAX_PAST: usize = 1_024;

/// A lineage is given up whatever its generation's number.
pub(super) const EVERY_NUMBER: u64 = u64::MAX;

/// The durable state of one job on one agent. Written whole, before anything that depends on it is
/// said to anybody.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Durable {
    pub key: JobKey,
    /// The newest record known to be decided.
    pub head: Option<Arc<Record>>,
    /// How the lineages before this one ended, the newest last: whoever comes back with a
    /// generation of one of them learns it here, though nobody else may still hold it.
    pub ended: Vec<Arc<Record>>,
    /// Lineages that this agent left, each with the number of the newest record that it held there. It
    /// will not vote again on what follows that one or an earlier one: with the record it forgot what
    /// it had promised, accepted and acknowledged, and may be taught an earlier one anew.
    pub forfeited: Vec<(Digest, u64)>,
    /// The boot in which the head was learnt (R7).
    pub learned: Boot,
    /// An undecided birth that this agent has accepted (R2).
    pub bound: Option<Arc<Record>>,
    /// The vote on what follows the head.
    pub acceptor: Acceptor,
    /// The newest commit that this agent, as the head's leader, has sent out (R8).
    pub sent: Option<CommitRef>,
    /// Lineages that were given up, the newest last, each with the number of the newest generation
    /// that is meant: all by an operator's word (`EVERY_NUMBER`), else that which nothing can follow.
    /// A node that comes back with one of them learns it here.
    pub superseded: Vec<(Digest, u64)>,
    /// The lineage from which the next birth goes on, by an operator's word.
    pub continues: Option<Continues>,
    /// The newest save of the head's generation.
    pub saves: Saved,
    /// Lineages that ended, or were given up, so long ago that nothing else is kept of them, the newest
    /// last, each with the number up to which nobody votes or trains in it any more.
    pub past: Vec<(Digest, u64)>,
    /// How long a start of the head waits for those who may still be training, counted from [`Self::held_from`].
    pub held_ms: u32,
    /// When workers of the head were adopted whose lease nobody has confirmed since: no further start of
    /// the agent gives them more time.
    pub adopted: Option<Time>,
    /// The longest times that a member of the head keeps, as far as this agent has heard.
    pub timeouts: Timeouts,
    /// When `held_ms` was counted, by the clock of the boot of then; none: not known.
    pub held_from: Option<Time>,
    /// The newest change of the head's voters.
    pub voters: Option<Arc<Record>>,
    /// For whom a start of the head waits, and for how long for each, as `held_ms`; none: that is not known.
    pub held_for: Vec<(NodeId, u32)>,
}

/// State that the cores of saving find again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Saved {
    pub node: NodeState,
    pub leader: LeaderState,
}

impl Durable {
    pub fn new(key: JobKey) -> Durable {
        Durable {
            key,
            head: None,
            ended: Vec::new(),
            forfeited: Vec::new(),
            learned: Boot::default(),
            bound: None,
            acceptor: Acceptor::default(),
            sent: None,
            superseded: Vec::new(),
            continues: None,
            saves: Saved::default(),
            past: Vec::new(),
            held_ms: 0,
            adopted: None,
            timeouts: Timeouts::default(),
            held_from: None,
            voters: None,
            held_for: Vec::new(),
        }
    }

    /// From `now` on a start of the head waits for so long, for these nodes, each with its own time; no nodes: for
    /// whom is not known.
    pub fn hold(&mut self, ms: u32, nodes: Vec<(NodeId, u32)>, now: Time) {
        self.held_ms = ms;
        self.held_from = (ms > 0).then_some(now);
        self.held_for = nodes;
    }

    /// Forgets when the wait began, by another clock: of a boot before this one, or of another host, where the
    /// directory was moved. The wait begins anew. Returns whether there was one.
    pub fn forget_moments(&mut self) -> bool {
        self.held_from.take().is_some()
    }

    /// The rest of that wait for an agent that was started anew.
    pub fn held(&self, now: Time) -> Span {
        self.left_of(self.held_ms, now)
    }

    /// The same for each node, where they are known.
    pub fn held_each(&self, now: Time) -> impl Iterator<Item = (NodeId, Span)> + '_ {
        let nodes = self.held_for.iter();
        let nodes = nodes.map(move |(node, ms)| (*node, self.left_of(*ms, now)));
        nodes.filter(|(_, left)| *left > Span::ZERO)
    }

    fn left_of(&self, ms: u32, now: Time) -> Span {
        let held = Span::from_millis(ms.into());
        let passed = self.held_from.map_or(Span::ZERO, |from| now.since(from));
        Span(held.0.saturating_sub(passed.0))
    }

    pub fn encode(&self) -> Result<Vec<u8>, CodecError> {
        codec::encode_stored(self)
    }

    pub fn decode(bytes: &[u8]) -> Result<Durable, CodecError> {
        // Format 4 ended before `held_for`.
        codec::decode_stored(bytes, &[0])
    }

    /// Makes `record` the head; whatever was voted about the one before is settled with it.
    pub fn install(&mut self, record: Arc<Record>, boot: Boot) {
        if let Some(old) = self.head.take()
            && old.kind.is_terminal()
        {
            self.ended.push(old);
            let surplus = self.ended.len().saturating_sub(MAX_ENDED);
            let oldest = self.ended.drain(..surplus);
            let oldest: Vec<_> = oldest.map(|end| (end.lineage(), end.number)).collect();
            self.is_past(oldest);
        }
        self.head = Some(record);
        self.learned = boot;
        self.bound = None;
        self.continues = None;
        self.acceptor = Acceptor::default();
        self.voters = None;
        self.sent = None;
        self.saves = Saved::default();
        self.hold(0, Vec::new(), Time::ZERO);
        self.adopted = None;
        self.timeouts = Timeouts::default();
    }

    /// Others vote on what follows the head; the vote that led to it is settled.
    pub fn change_voters(&mut self, record: Arc<Record>) {
        self.voters = Some(record);
        self.acceptor = Acceptor::default();
    }

    fn is_past(&mut self, lineages: Vec<(Digest, u64)>) {
        self.past.extend(lineages);
        let surplus = self.past.len().saturating_sub(MAX_PAST);
        self.past.drain(..surplus);
    }

    /// Gives the head up, and with it the vote on what follows it, for good.
    pub fn leave(&mut self) {
        if let Some((lineage, number)) = self.head.as_ref().map(|h| (h.lineage(), h.number)) {
            self.forfeit(lineage, number);
        }
        *self = Durable {
            ended: std::mem::take(&mut self.ended),
            forfeited: std::mem::take(&mut self.forfeited),
            superseded: std::mem::take(&mut self.superseded),
            continues: self.continues.take(),
            past: std::mem::take(&mut self.past),
            ..Durable::new(self.key.clone())
        };
    }

    /// Remembers that this lineage is given up, up to the generation of this number.
    pub fn supersede(&mut self, lineage: Digest, number: u64) {
        let list = &mut self.superseded;
        match list.iter_mut().find(|(l, _)| *l == lineage) {
            Some((_, up_to)) => *up_to = number.max(*up_to),
            None => list.push((lineage, number)),
        }
        let surplus = list.len().saturating_sub(MAX_SUPERSEDED);
        let oldest = list.drain(..surplus).collect();
        self.is_past(oldest);
    }

    /// Up to which generation this lineage was given up, if a holder of this number is to leave it.
    pub fn superseded(&self, lineage: Digest, number: u64) -> Option<u64> {
        let mut list = self.superseded.iter().chain(&self.past);
        let (_, up_to) = list.find(|(l, up_to)| *l == lineage && number <= *up_to)?;
        Some(*up_to)
    }

    /// Whether this agent remembers with whose word this generation was given up: nothing follows its end.
    pub fn has_given_up(&self, lineage: Digest, number: u64) -> bool {
        let mut list = self.superseded.iter();
        list.any(|(l, up_to)| *l == lineage && number <= *up_to)
    }

    /// Whether this life of the job is known to be over.
    pub fn has_ended(&self, lineage: Digest) -> bool {
        let head = self.head.iter().filter(|h| h.kind.is_terminal());
        head.chain(&self.ended).any(|e| e.lineage() == lineage)
    }

    /// Every lineage in which this agent may have voted, with the newest generation known of it, and
    /// whether it is over.
    pub fn lineages(&self) -> impl Iterator<Item = (Digest, u64, bool)> + '_ {
        let head = self.head.iter().chain(&self.ended);
        let head = head.map(|r| (r.lineage(), r.number, r.kind.is_terminal()));
        let over = self.superseded.iter().chain(&self.past);
        let over = over.map(|(lineage, number)| (*lineage, *number, true));
        let left = self.forfeited.iter();
        let left = left.map(|(lineage, number)| (*lineage, *number, false));
        head.chain(over).chain(left)
    }

    /// Gives up the vote on what follows this generation of a lineage, and the ones before it.
    pub fn forfeit(&mut self, lineage: Digest, number: u64) {
        let forfeited = &mut self.forfeited;
        forfeited.retain(|(l, n)| *l != lineage || *n > number);
        forfeited.push((lineage, number));
        let surplus = forfeited.len().saturating_sub(MAX_FORFEITED);
        forfeited.drain(..surplus);
    }

    /// Whether this agent may still vote on what follows the head.
    pub fn may_vote(&self) -> bool {
        let Some(head) = self.head.as_ref().filter(|_| !self.forfeited.is_empty()) else {
            return true;
        };
        let lineage = head.lineage();
        let left = |(l, n): &(Digest, u64)| *l == lineage && head.number <= *n;
        !self.forfeited.iter().any(left)
    }

    /// Whether this agent once held a newer record of the same lineage, and left it.
    pub fn left_later(&self, record: &Record) -> bool {
        let lineage = record.lineage();
        let mut left = self.forfeited.iter();
        left.any(|(l, n)| *l == lineage && record.number < *n)
    }

    pub fn head_digest(&self) -> Digest {
        self.head.as_ref().map_or(Digest::ZERO, |r| r.digest())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_generation_is_not_given_up_with_an_earlier_one() {
        let [a, b] = [1, 2].map(|n| Digest([n; 32]));
        let mut durable = Durable::new(JobKey {
            cluster: "c".into(),
            owner: "o".into(),
            id: "j".into(),
        });
        durable.supersede(a, 3);
        let of = |d: &Durable, number| d.superseded(a, number);
        assert_eq!([2, 3, 4].map(|n| of(&durable, n)), [Some(3), Some(3), None]);
        assert_eq!(durable.superseded(b, 1), None);
        // It only grows, and an operator means all.
        durable.supersede(a, 2);
        assert_eq!(of(&durable, 3), Some(3));
        durable.supersede(a, EVERY_NUMBER);
        assert_eq!(of(&durable, 4), Some(EVERY_NUMBER));
        assert_eq!(durable.superseded.len(), 1);
        // Of the oldest only the names are kept, and all of that has a bound.
        (3..3 + MAX_SUPERSEDED as u8).for_each(|n| durable.supersede(Digest([n; 32]), 1));
        assert_eq!(durable.superseded.len(), 16);
        assert_eq!(of(&durable, 1), Some(EVERY_NUMBER));
        let of_number = |n: u64| Digest(*blake3::hash(&n.to_le_bytes()).as_bytes());
        (0..2_000).for_each(|n| durable.supersede(of_number(n), 1));
        assert_eq!((durable.past.len(), of(&durable, 1)), (MAX_PAST, None));
    }
}
