//! Saving a job's state so that it outlives every process of the job. Pure cores: none reads a clock,
//! opens a file or sends anything by itself.
//!
//! A rank copies its state into one of its two *slots* (shared memory) and seals it; that is all that
//! training waits for. The agent's [`Node`] has the sealed copies written. The generation's [`Leader`]
//! opens a [`Save`], waits until the files of every rank are durable, has the manifest made, and then
//! commits by one record: in the job's log where a store decides (R13), by a majority of the voters
//! else (R8). The [`Keeper`] retires and deletes what is needed no more.
//!
//! ```text
//! slot: Free -> Filling -> Sealed -> Writing -> Durable -> Free
//!                            ^----------'----------'        (the attempt is over, the copy is still needed)
//! ```
//!
//! Leader and nodes tell each other whole states ([`ToNode`], [`ToLeader`]) and say them again until
//! the other side shows that it knows, so a message that is lost, late or repeated changes nothing, and
//! a leader whose agent was restarted learns from the nodes how far they are. Only the record's leader
//! opens saves. The commit must be unique, and that is not decided here: a leader whose
//! generation is not the latest is refused by the log, or finds no majority.
//!
//! The rules that keep what is committed whole:
//! - A node says [`Part::Prepared`] when its files and their names are durable, and has made durable
//!   that it says so. A file has a name of its own for each attempt, and none is ever overwritten.
//! - COMMIT is asked for when all ranks are prepared and the manifest is durable, and the leader has
//!   made durable which manifest: after a restart it asks for the very same one.
//! - A sealed copy is freed when the leader has decided that it is not needed ([`ToNode::keep`],
//!   [`Outcome`]), or when nobody leads it any more and its lease or the node's budget ends; and never
//!   while a writer reads it.
//! - Data is deleted after its RETIRE was read in the log, or when a later CLAIM fences the generation
//!   that left it behind.

mod choice;
mod interval;
mod keeper;
mod leader;
mod node;
mod pace;
mod slots;
#[cfg(test)]
mod tests;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use choice::{Choice, Chosen, Pending, Situation, Speeds, choose};
pub use interval::{Bounds, Interval, Measured, Rhythm, interval, mean_time_between_failures};
pub use keeper::{
    Decision, Effect as KeeperEffect, Event as KeeperEvent, Item, Keeper, Refused, Standing, State,
};
pub use leader::{
    Effect as LeaderEffect, Event as LeaderEvent, GivenUp, Laggard, Lags, Leader, LeaderState,
    Notice as LeaderNotice, Progress, Wants,
};
pub use node::{
    Effect as NodeEffect, Event as NodeEvent, Node, NodeState, Notice as NodeNotice, Settings,
};
pub(crate) use pace::Meter;
pub use pace::Pace;
pub use slots::{Busy, Copy, Found, Occupied, Slot, SlotId};

use crate::ids::Digest;

/// The most bytes that a writer says of one file to who makes the manifest: digests, not lists. A
/// longer summary lies beside the file.
pub const MAX_SUMMARY: usize = 64;

/// The most sealed steps that a node names: each rank has two slots.
pub const MAX_SEALED: usize = 4;

/// Names one attempt to save one step. Each opening has an attempt of its own within its generation.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Save {
    pub generation: Digest,
    /// From 1.
    pub attempt: u32,
    /// The ranks saved before they began this step.
    pub step: u64,
}

impl Save {
    /// Its folder below the job's: `data/<step>-<generation>-<attempt>`, with the first 16 hexadecimal
    /// digits of the generation's digest.
    pub fn folder(&self) -> String {
        let mut generation = self.generation.hex();
        generation.truncate(16);
        format!("data/{}-{generation}-{}", self.step, self.attempt)
    }

    /// The file of the `k`-th rank of the node at this place in the record, below the job's folder.
    pub fn file(&self, node: u32, k: u16) -> String {
        format!("{}/n{node}-{k}.safetensors", self.folder())
    }
}

impl fmt::Display for Save {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the save of step {} (attempt {})",
            self.step, self.attempt
        )
    }
}

/// Why a save is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Cause {
    /// So many steps have passed.
    Steps,
    /// So much time has passed.
    Seconds,
    /// The metric is the best so far.
    Best,
    /// Somebody asked for it.
    Ordered,
    /// Nodes wait to join.
    Join,
    /// A node has to go.
    Preemption,
}

impl Cause {
    /// A short stable word for logs, metrics and JSON.
    pub fn word(self) -> &'static str {
        match self {
            Cause::Steps => "steps",
            Cause::Seconds => "seconds",
            Cause::Best => "best",
            Cause::Ordered => "ordered",
            Cause::Join => "join",
            Cause::Preemption => "preemption",
        }
    }

    /// Whether an earlier save that is still being written makes way for it.
    pub fn is_urgent(self) -> bool {
        self == Cause::Preemption
    }
}

/// From the leader to a node: all that it wants about the newest attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ToNode {
    pub save: Save,
    /// Grows with each change of what is said about this attempt.
    pub number: u32,
    /// The one step before the save's whose sealed copies are still needed; all other earlier ones may
    /// be freed.
    pub keep: Option<u64>,
    pub stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Stage {
    /// Write what your ranks seal for this step.
    Write,
    /// All have. Make a copy of this manifest durable on your own disk (where directories are not
    /// shared).
    Hold { manifest: Digest, bytes: u32 },
    /// Nothing more is to be done for this attempt.
    Over(Outcome),
}

/// Result of a save that is over, for its sealed copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Outcome {
    /// It is committed: the copies are free.
    Committed,
    /// It is not, but every rank has sealed its copy: they stay, as the newest sealed ones.
    Kept,
    /// It is not, and not every rank has sealed one: those that are there are free.
    Dropped,
}

/// A rank's file, durable under its name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Written {
    pub rank: u32,
    /// Its length.
    pub bytes: u64,
    /// For who makes the manifest, of at most [`MAX_SUMMARY`] bytes; opaque here.
    pub summary: Vec<u8>,
}

/// From a node to the leader: all that it knows of its own part.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ToLeader {
    pub generation: Digest,
    /// The newest attempt heard of, and the newest number about it; 0 for none.
    pub attempt: u32,
    pub number: u32,
    /// Steps of which all local ranks hold a sealed copy, ascending.
    pub sealed: Vec<u64>,
    /// A step that a local rank has no free slot for.
    pub busy: Option<u64>,
    /// The local rank with the oldest copies of those that have ended with 0, while others may train on.
    pub ended: Option<Ended>,
    pub part: Part,
}

/// A rank that saves nothing any more: what other ranks have sealed and it has not is no checkpoint of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Ended {
    pub rank: u32,
    /// The newest step that may still be whole on its node: all ranks that have ended there hold it, and the others do, or
    /// nothing newer.
    pub newest: Option<u64>,
    /// The newest step of which some rank of its node holds a sealed copy.
    pub beside: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Part {
    /// No attempt was heard of.
    Idle,
    /// These ranks have not sealed a copy of the step.
    Waiting { ranks: Vec<u32> },
    /// All have; so many of their bytes are written.
    Writing { done: u64, bytes: u64 },
    /// All files are durable.
    Prepared { files: Vec<Written> },
    /// And so is the manifest, on this node.
    Holding { manifest: Digest },
    /// This node cannot write them.
    Failed { why: String },
    /// It was heard what became of the attempt.
    Settled(Outcome),
}

/// Why a message or an event was refused. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the message is about generation {theirs}, this is generation {ours}")]
    OtherGeneration { ours: Digest, theirs: Digest },
    #[error("the node is not part of this generation")]
    NotAMember,
    #[error("the generation is over: nothing new is saved in it")]
    Over,
    #[error("step {step} is not newer than step {newest}, which was saved already")]
    NotNewer { step: u64, newest: u64 },
    #[error("there is no slot {0}: its rank has registered none")]
    NoSlot(SlotId),
    #[error("slot {slot} is not {wanted}: an event that came twice or too late")]
    NotInState { slot: SlotId, wanted: &'static str },
    #[error("rank {rank} is not one of this node's")]
    NotMine { rank: u32 },
    #[error("rank {rank} holds a sealed copy of step {step} already")]
    Sealed { rank: u32, step: u64 },
    #[error("{len} bytes do not fit into a slot of {capacity}")]
    TooLong { len: u64, capacity: u64 },
    #[error("a summary of {0} bytes, the limit is {MAX_SUMMARY}")]
    Summary(usize),
}

/// Rules left out on purpose. For the tests that check that the checker finds planted bugs, and for
/// nothing else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flaws {
    /// The leader does not wait for the last rank that is not prepared.
    pub skip_last_rank: bool,
    /// A decision to delete is carried out before its RETIRE was read in the log.
    pub skip_retire: bool,
    /// A node frees a sealed copy as soon as its rank wants another.
    pub skip_decision: bool,
    /// Left-behind data is deleted without a later CLAIM that fences it.
    pub skip_fence: bool,
}
