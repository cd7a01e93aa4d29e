//! The slots of one node's ranks: two each, so that one can be filled while the other is written.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Written;
use crate::ids::Digest;

/// One of the two slots of a local rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SlotId {
    /// The rank's place on its node, from 0.
    pub k: u16,
    /// 0 or 1.
    pub side: u8,
}

impl fmt::Display for SlotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.k, self.side)
    }
}

/// A sealed copy of a rank's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Copy {
    /// The generation whose state it is: an earlier generation's copy of the same step is another state.
    pub generation: Digest,
    /// It was made before the rank began this step.
    pub step: u64,
    pub bytes: u64,
    /// Of the bytes, made while they were copied.
    pub digest: Digest,
}

/// The state by a slot's own state word when it is registered: after a restart of the agent, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Found {
    Free,
    Filling { step: u64 },
    Sealed(Copy),
}

/// Behaviour of a rank that finds both of its slots occupied. Either is told to people.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Busy {
    /// Training waits until one is free.
    #[default]
    Wait,
    /// This save is left out.
    Skip,
}

/// A slot's state.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Slot {
    Free,
    /// Its rank copies into it.
    Filling {
        step: u64,
    },
    Sealed(Copy),
    /// Writers read it.
    Writing {
        copy: Copy,
        attempt: u32,
        /// Bytes written.
        done: u64,
        /// The writers were told to stop; the slot is theirs until they have.
        stopping: bool,
    },
    /// Its file is durable.
    Durable {
        copy: Copy,
        attempt: u32,
        written: Written,
    },
}

impl Slot {
    pub(super) fn found(found: Found) -> Slot {
        match found {
            Found::Free => Slot::Free,
            Found::Filling { step } => Slot::Filling { step },
            Found::Sealed(copy) => Slot::Sealed(copy),
        }
    }

    /// The sealed copy in it, if there is one.
    pub fn copy(&self) -> Option<Copy> {
        match self {
            Slot::Free | Slot::Filling { .. } => None,
            Slot::Sealed(copy) | Slot::Writing { copy, .. } | Slot::Durable { copy, .. } => {
                Some(*copy)
            }
        }
    }

    /// Its occupation, for people.
    pub(super) fn occupied(&self) -> Option<Occupied> {
        Some(match self {
            Slot::Free => return None,
            Slot::Filling { step } => Occupied::Filling { step: *step },
            Slot::Sealed(copy) => Occupied::Sealed { step: copy.step },
            Slot::Writing { copy, done, .. } => Occupied::Writing {
                step: copy.step,
                left: copy.bytes.saturating_sub(*done),
            },
            Slot::Durable { copy, .. } => Occupied::Durable { step: copy.step },
        })
    }
}

/// Occupation of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Occupied {
    Filling {
        step: u64,
    },
    Sealed {
        step: u64,
    },
    /// So many bytes are left to write.
    Writing {
        step: u64,
        left: u64,
    },
    Durable {
        step: u64,
    },
}

impl fmt::Display for Occupied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Occupied::Filling { step } => write!(f, "step {step} is being copied"),
            Occupied::Sealed { step } => write!(f, "step {step} waits to be written"),
            Occupied::Writing { step, left } => {
                write!(f, "step {step} is being written, {left} bytes are left")
            }
            Occupied::Durable { step } => write!(f, "step {step} waits for its commit"),
        }
    }
}

/// A local rank.
#[derive(Clone, Debug)]
pub(super) struct Rank {
    pub(super) rank: u32,
    /// Bytes of each slot.
    pub(super) capacity: u64,
    pub(super) slots: [Slot; 2],
    /// A step that it waits with for a free slot.
    pub(super) wants: Option<u64>,
    /// The newest step that it left out.
    pub(super) skipped: Option<u64>,
}

impl Rank {
    /// The sides of its slots, and their states.
    pub(super) fn sides(&self) -> impl Iterator<Item = (u8, &Slot)> {
        (0..).zip(&self.slots)
    }

    pub(super) fn free_side(&self) -> Option<u8> {
        let mut sides = self.sides();
        sides.find(|(_, s)| **s == Slot::Free).map(|(side, _)| side)
    }

    pub(super) fn holds(&self, step: u64) -> bool {
        self.slots
            .iter()
            .any(|s| s.copy().is_some_and(|c| c.step == step))
    }
}
