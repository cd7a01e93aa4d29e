//! Inputs and outputs of the log's core.

use super::{Entry, EntryError, Snapshot, Why};
use crate::ids::Digest;
use crate::record::{CommitRef, Record};
use crate::time::Time;

/// Rules left out on purpose. For the tests that check that the checker finds planted bugs, and for
/// nothing else: a real log takes the default, which leaves out none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flaws {
    /// After an unknown outcome and an empty read, the slot counts as free: the append is given up
    /// and its data may be deleted, though it can still land.
    pub skip_r12: bool,
    /// A COMMIT of any decided generation is valid, and a claim restores what was the newest commit
    /// when it was asked for.
    pub skip_r13: bool,
}

/// Result of an operation on the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Read {
        op: u64,
        slot: u64,
        outcome: ReadOutcome,
    },
    Created {
        op: u64,
        slot: u64,
        outcome: CreateOutcome,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadOutcome {
    Found(Vec<u8>),
    /// The store answered that there is no such object.
    Absent,
    /// No answer, or an error: nothing is known.
    Failed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreateOutcome {
    Won,
    /// The object was there already.
    Exists,
    /// A timeout, a conflict, an error: the object may be there, now or later.
    Unknown,
}

/// An operation for the driver to carry out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    Read { op: u64, slot: u64 },
    Create { op: u64, slot: u64, bytes: Vec<u8> },
}

impl Effect {
    /// The event for this operation where nothing is known of what became of it.
    pub fn unknown(&self) -> Event {
        match *self {
            Effect::Read { op, slot } => Event::Read {
                op,
                slot,
                outcome: ReadOutcome::Failed,
            },
            Effect::Create { op, slot, .. } => Event::Created {
                op,
                slot,
                outcome: CreateOutcome::Unknown,
            },
        }
    }
}

/// News for the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// An entry was read, in the order of slots, each once. Invalid ones are to be ignored.
    Entry {
        seq: u64,
        entry: Entry,
        digest: Digest,
        valid: bool,
    },
    /// Reading began behind this snapshot: what the slots below say and that still matters. Said once, before any
    /// entry.
    Began { seq: u64, snapshot: Box<Snapshot> },
    /// The outcome of an append; once for each id, except that an append whose outcome is unknown
    /// when the log breaks has none until it is mended.
    Appended { id: u64, outcome: Outcome },
    /// The store said that nothing follows the last entry read, in answer to a read issued at this
    /// time: until then no newer generation was decided (the lease under a store, R16).
    TailConfirmed { asked_at: Time },
    /// The log is damaged: this agent has stopped reading and writing it, but for a look now and then. Said once,
    /// unless another damage is found.
    Broken { why: Damage },
    /// It is not: what was missing is there.
    Mended,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It stands in this slot, valid, and was read back.
    Won { seq: u64 },
    /// The claim in this slot came first; this append was not and will not be written.
    Overtaken { by: u64 },
    /// It would be invalid and was not written.
    Invalid(Why),
}

/// Faults of the log on the store. Nothing on the store was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    #[error(
        "log slot {slot} is missing while slot {} exists: an object was deleted; restore it from a copy, or start the job under another id",
        slot + 1
    )]
    Gap { slot: u64 },
    #[error("the store says that log slot {slot} exists, but reads nothing there: was it deleted?")]
    Vanished { slot: u64 },
    #[error("log slot {slot} is not an entry: {error}")]
    Entry { slot: u64, error: EntryError },
    #[error("log slot {slot} holds the entry of slot {holds}: a copied or renamed object")]
    Slot { slot: u64, holds: u64 },
    #[error("the snapshot in log slot {slot} says something else than the slots below it")]
    Snapshot { slot: u64 },
    #[error("log slot {slot} does not continue slot {}: the log was mixed with another", slot - 1)]
    Chain { slot: u64 },
}

/// Why an event was refused. The log's state has not changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("operation {op} is not the one in flight: an answer came twice or too late")]
    NotInFlight { op: u64 },
}

/// The end of the log as far as it has been read.
#[derive(Clone, Copy, Debug)]
pub struct Tail<'a> {
    /// The first slot that has not been read.
    pub next: u64,
    /// Whether the store said that `next` was empty after everything below it was read.
    pub complete: bool,
    /// The latest valid claim, its record's digest, and its slot.
    pub claim: Option<(&'a Record, Digest, u64)>,
    /// The newest commit that may be restored, and its slot.
    pub commit: Option<(CommitRef, u64)>,
    /// When this agent last read a new entry.
    pub last_changed: Time,
}
