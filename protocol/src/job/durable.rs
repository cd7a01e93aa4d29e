//! What a job's core must find again after a crash.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Continues;
use crate::checkpoint::{LeaderState, NodeState};
use crate::codec::{self, CodecError};
use crate::ids::{Boot, Digest, JobKey};
use crate::paxos::Acceptor;
use crate::record::{CommitRef, Record};

/// The most ends of earlier lineages that are kept; such records are small.
const MAX_ENDED: usize = 16;

/// The most forfeited votes that are remembered. One is added only when a whole first generation
/// turns out dead, and matters only as long as somebody still holds that generation.
const MAX_FORFEITED: usize = 64;

/// The most lineages of one job that are remembered as superseded.
const MAX_SUPERSEDED: usize = 16;

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
    /// Whoever comes back with one of them learns it here.
    pub superseded: Vec<(Digest, u64)>,
    /// What the next birth goes on from, by an operator's word.
    pub continues: Option<Continues>,
    /// The newest save of the head's generation.
    pub saves: Saved,
}

/// What the cores of saving find again.
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
        }
    }

    pub fn encode(&self) -> Result<Vec<u8>, CodecError> {
        codec::encode_frame(self)
    }

    pub fn decode(bytes: &[u8]) -> Result<Durable, CodecError> {
        codec::decode_frame(bytes)
    }

    /// Makes `record` the head; whatever was voted about the one before is settled with it.
    pub fn install(&mut self, record: Arc<Record>, boot: Boot) {
        if let Some(old) = self.head.take()
            && old.kind.is_terminal()
        {
            self.ended.push(old);
            let surplus = self.ended.len().saturating_sub(MAX_ENDED);
            self.ended.drain(..surplus);
        }
        self.head = Some(record);
        self.learned = boot;
        self.bound = None;
        self.continues = None;
        self.acceptor = Acceptor::default();
        self.sent = None;
        self.saves = Saved::default();
    }

    /// Gives the head up, and with it the vote on what follows it, for good.
    pub fn leave(&mut self) {
        let mut forfeited = std::mem::take(&mut self.forfeited);
        if let Some(head) = &self.head {
            let (lineage, number) = (head.lineage(), head.number);
            forfeited.retain(|(l, n)| *l != lineage || *n > number);
            forfeited.push((lineage, number));
        }
        let surplus = forfeited.len().saturating_sub(MAX_FORFEITED);
        forfeited.drain(..surplus);
        *self = Durable {
            ended: std::mem::take(&mut self.ended),
            forfeited,
            superseded: std::mem::take(&mut self.superseded),
            continues: self.continues.take(),
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
        list.drain(..surplus);
    }

    /// Up to which generation this lineage was given up, if a holder of this number is to leave it.
    pub fn superseded(&self, lineage: Digest, number: u64) -> Option<u64> {
        let mut list = self.superseded.iter();
        let (_, up_to) = list.find(|(l, up_to)| *l == lineage && number <= *up_to)?;
        Some(*up_to)
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
        // Bounded: the oldest go.
        (3..3 + MAX_SUPERSEDED as u8).for_each(|n| durable.supersede(Digest([n; 32]), 1));
        assert_eq!((durable.superseded.len(), of(&durable, 1)), (16, None));
    }
}
