//! One single-decree consensus per generation (R5 to R8): the acceptor and the proposer, as plain
//! state. Paxos, Lamport, "Paxos Made Simple", 2001; round 0 is the leader's and needs no promises,
//! as in "Fast Paxos" section 2.2 for a fixed first leader.
//!
//! Nothing here sends or stores: the caller makes a changed acceptor durable before it answers.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::ids::{Boot, NodeId};
use crate::record::{CommitRef, Record};
use crate::wire::Ballot;

/// Promises and acceptances of one voter about the generation that follows one record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Acceptor {
    pub promised: Ballot,
    pub accepted: Option<(Ballot, Arc<Record>)>,
    /// The newest checkpoint commit that this voter acknowledged (R8).
    pub acked: Option<CommitRef>,
}

impl Acceptor {
    /// The highest ballot that this voter has answered.
    fn bar(&self) -> Ballot {
        let accepted = self.accepted.as_ref().map_or(Ballot::default(), |a| a.0);
        self.promised.max(accepted)
    }

    /// Promises to accept nothing below `ballot`; on refusal the ballot to beat. Asking again is
    /// harmless.
    pub fn prepare(&mut self, ballot: Ballot) -> Result<(), Ballot> {
        if ballot.round == 0 || ballot < self.bar() {
            return Err(self.bar());
        }
        self.promised = ballot;
        Ok(())
    }

    /// Accepts `record`; on refusal the ballot to beat. At one ballot only one value is accepted.
    pub fn accept(&mut self, ballot: Ballot, record: &Arc<Record>) -> Result<(), Ballot> {
        let bar = self.bar();
        if ballot < bar || (ballot.round == 0 && self.promised.round > 0) {
            return Err(bar);
        }
        match &self.accepted {
            Some((b, r)) if *b == ballot && r != record => Err(bar),
            _ => {
                self.accepted = Some((ballot, record.clone()));
                Ok(())
            }
        }
    }

    /// Acknowledges a checkpoint commit of the present generation: only while nothing about the
    /// next one was promised or accepted (R8).
    pub fn ack(&mut self, commit: CommitRef, skip_r8: bool) -> bool {
        let free = self.bar().round == 0 && self.accepted.is_none();
        if !free && !skip_r8 {
            return false;
        }
        if self.acked.is_none_or(|a| a.number < commit.number) {
            self.acked = Some(commit);
        }
        true
    }
}

/// One attempt to have a value accepted.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Proposer {
    pub ballot: Ballot,
    stage: Stage,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Stage {
    Preparing {
        promised: BTreeSet<NodeId>,
        highest: Option<(Ballot, Arc<Record>)>,
        acked: Option<CommitRef>,
    },
    Accepting {
        value: Arc<Record>,
        accepted: BTreeSet<NodeId>,
    },
}

/// Obligation of the proposer by a majority of promises.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prepared {
    /// Propose this value: it may have been decided already.
    Adopt(Arc<Record>),
    /// Any value is free; it restores at least this commit.
    Free { acked: Option<CommitRef> },
}

impl Proposer {
    /// The leader's ballot 0 (R7). The caller makes sure that it is the leader's first and only,
    /// in the boot in which it learned the parent.
    pub fn at_zero(node: NodeId, boot: Boot, value: Arc<Record>) -> Proposer {
        Proposer {
            ballot: Ballot {
                round: 0,
                node,
                boot,
            },
            stage: Stage::Accepting {
                value,
                accepted: BTreeSet::new(),
            },
        }
    }

    pub fn prepare(ballot: Ballot) -> Proposer {
        Proposer {
            ballot,
            stage: Stage::Preparing {
                promised: BTreeSet::new(),
                highest: None,
                acked: None,
            },
        }
    }

    /// The value out for acceptance, if it has come to that.
    pub fn value(&self) -> Option<&Arc<Record>> {
        match &self.stage {
            Stage::Accepting { value, .. } => Some(value),
            Stage::Preparing { .. } => None,
        }
    }

    /// The voters that have answered the present stage.
    pub fn answered(&self) -> &BTreeSet<NodeId> {
        match &self.stage {
            Stage::Preparing { promised, .. } => promised,
            Stage::Accepting { accepted, .. } => accepted,
        }
    }

    /// Takes a promise in. `Some` once a majority of `parent`'s voters has promised; the caller
    /// then calls [`propose`](Self::propose).
    pub fn on_promise(
        &mut self,
        parent: &Record,
        from: NodeId,
        ballot: Ballot,
        accepted: Option<(Ballot, Arc<Record>)>,
        acked_by: Option<CommitRef>,
    ) -> Option<Prepared> {
        let Stage::Preparing {
            promised,
            highest,
            acked,
        } = &mut self.stage
        else {
            return None;
        };
        if ballot != self.ballot || !promised.insert(from) {
            return None;
        }
        if let Some((b, r)) = accepted
            && highest.as_ref().is_none_or(|(h, _)| *h < b)
        {
            *highest = Some((b, r));
        }
        *acked = newest(*acked, acked_by);
        if !parent.is_majority(|n| promised.contains(&n)) {
            return None;
        }
        Some(match highest {
            Some((_, value)) => Prepared::Adopt(value.clone()),
            None => Prepared::Free { acked: *acked },
        })
    }

    /// Moves on to acceptance with the value that [`Prepared`] allows.
    pub fn propose(&mut self, value: Arc<Record>) {
        self.stage = Stage::Accepting {
            value,
            accepted: BTreeSet::new(),
        };
    }

    /// Takes an acceptance in; the decided value once a majority has accepted at this ballot.
    pub fn on_accepted(
        &mut self,
        parent: &Record,
        from: NodeId,
        ballot: Ballot,
    ) -> Option<Arc<Record>> {
        let Stage::Accepting { value, accepted } = &mut self.stage else {
            return None;
        };
        if ballot != self.ballot {
            return None;
        }
        accepted.insert(from);
        parent
            .is_majority(|n| accepted.contains(&n))
            .then(|| value.clone())
    }
}

/// The later of two commits.
pub fn newest(a: Option<CommitRef>, b: Option<CommitRef>) -> Option<CommitRef> {
    match (a, b) {
        (Some(a), Some(b)) => Some(if b.number > a.number { b } else { a }),
        (a, b) => a.or(b),
    }
}
