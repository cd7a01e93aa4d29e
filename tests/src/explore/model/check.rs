//! Invariants of every state that is explored.

use std::collections::{BTreeMap, BTreeSet};

use muster_protocol::wire::Ballot;

use super::{Ack, Message, Model, State, Value};

/// Violations of the invariants.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    #[error("I1: two values were chosen after generation {number}")]
    TwoValues { number: u64 },
    #[error("I5: two values at one ballot after generation {number}")]
    TwoAtOneBallot { number: u64 },
    #[error(
        "I6: commit {commit} of generation {number} was acknowledged, what follows restores {restores}"
    )]
    LostCommit {
        number: u64,
        commit: u64,
        restores: u64,
    },
}

impl Model {
    /// The invariants; on success, after which generations a value is decided.
    pub fn check(&self, state: &State) -> Result<[bool; 2], Broken> {
        let mut values: BTreeMap<(u64, Ballot), Value> = BTreeMap::new();
        let mut zeros: BTreeMap<u64, Value> = BTreeMap::new();
        let mut votes: BTreeMap<(u64, Ballot), BTreeSet<u8>> = BTreeMap::new();
        let mut acks: BTreeMap<(u64, Ack), BTreeSet<u8>> = BTreeMap::new();
        for message in &state.messages {
            match message {
                Message::Accept {
                    parent,
                    ballot,
                    value,
                } => {
                    let number = *parent;
                    let other = *values.entry((number, *ballot)).or_insert(*value);
                    let zero = match ballot.round {
                        0 => *zeros.entry(number).or_insert(*value),
                        _ => *value,
                    };
                    if other != *value || zero != *value {
                        return Err(Broken::TwoAtOneBallot { number });
                    }
                }
                Message::Accepted {
                    from,
                    parent,
                    ballot,
                } => {
                    votes.entry((*parent, *ballot)).or_default().insert(*from);
                }
                Message::Acked { from, parent, ack } => {
                    acks.entry((*parent, *ack)).or_default().insert(*from);
                }
                _ => {}
            }
        }
        let mut chosen: BTreeMap<u64, Value> = BTreeMap::new();
        for ((parent, ballot), from) in &votes {
            let Some(value) = values.get(&(*parent, *ballot)) else {
                continue;
            };
            // The voters are the same in every generation here; who leads weighs more at a tie.
            let leader = chosen.get(&(parent - 1)).map_or(0, |v| v.leader);
            if !self.is_majority(from, leader) {
                continue;
            }
            if chosen
                .insert(*parent, *value)
                .is_some_and(|other| other != *value)
            {
                return Err(Broken::TwoValues { number: *parent });
            }
        }
        for ((parent, ack), from) in &acks {
            let leader = chosen.get(&(parent - 1)).map_or(0, |v| v.leader);
            let Some(value) = chosen.get(parent) else {
                continue;
            };
            let restores = value.restore.map_or(0, |a| a.number);
            if self.is_majority(from, leader) && restores < ack.number {
                let (number, commit) = (*parent, ack.number);
                return Err(Broken::LostCommit {
                    number,
                    commit,
                    restores,
                });
            }
        }
        Ok([chosen.contains_key(&1), chosen.contains_key(&2)])
    }
}
