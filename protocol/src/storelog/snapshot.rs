//! The log's statements up to a slot, in one entry: a reader that begins there needs nothing below it.
//!
//! Snapshots stand in slots that are multiples of [`Compaction::every`], so that a reader finds the newest one by
//! looking at a few slots, without a pointer that could be stale. Their content is a function of the slots below: each
//! reader that has read these compares it with its own view. From a snapshot on, all readers go by what it holds,
//! whether they began at it or not: what it left out is forgotten by all of them at the same slot.

use super::rules::Rules;
use crate::ids::Digest;
use crate::record::{CommitRef, Record};

/// When a snapshot is due, and how much of what is over it holds. All who write and read one log go by the same:
/// only tests set others than the default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compaction {
    /// Each multiple of this is the slot of a snapshot; at least 2.
    pub every: u64,
    /// Generations that were decided, the newest.
    pub claims: usize,
    /// Checkpoints that are retired, the newest: their data may still have to be deleted.
    pub retired: usize,
}

impl Default for Compaction {
    fn default() -> Compaction {
        Compaction {
            every: 256,
            claims: 512,
            retired: 128,
        }
    }
}

/// All that the slots below say and that still matters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The latest valid claim.
    pub claim: Record,
    /// Slots and digests of the newest generations, the oldest first, that claim's last.
    pub claims: Vec<(u64, Digest)>,
    /// The greatest number of a valid commit so far.
    pub last_number: u64,
    /// The valid commits that are not retired, and the newest of those that are; the oldest first.
    pub commits: Vec<Standing>,
    /// The rules on what the job keeps.
    pub rules: Option<Rules>,
}

/// A valid COMMIT, and what was said of it since.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    pub seq: u64,
    pub commit: CommitRef,
    pub pinned: bool,
    /// The slot of its RETIRE.
    pub retired: Option<u64>,
    /// Why it was rejected.
    pub rejected: Option<String>,
}

impl Standing {
    /// Whether a claim may restore it.
    pub fn in_force(&self) -> bool {
        self.retired.is_none() && self.rejected.is_none()
    }
}
