//! Outcomes of a live worker, its time limits, and its errors.

use std::time::{Duration, SystemTime};

use muster_protocol::control::Reason;
use muster_protocol::control::live::Assignment;
use muster_protocol::live::Error as RuleError;

use super::hand::FetchError;
use super::training::Fault;
use crate::collective::GroupError;
use crate::session::SessionError;

/// Outcome of one call of [`Worker::advance`](super::Worker::advance).
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// A step's results are here; they are committed, unless this rank still waits for its copy.
    Stepped { step: u64, committed: u64 },
    /// This rank is in a new generation.
    Regrouped {
        place: Assignment,
        /// Steps that are committed here; for a newcomer, where its copy begins.
        committed: u64,
        /// This rank kept its state.
        survived: bool,
        /// From the end of the generation before, as this rank saw it, to now.
        took: Duration,
    },
    /// A newcomer's copy is here, and what it missed is committed.
    CaughtUp { committed: u64, took: Duration },
    /// The generation is over for this rank; the next call waits for the next one.
    Ended {
        /// Worth a line in a log: when workers lose each other and no process dies, nobody else knows it.
        why: String,
        /// The rank that this one missed first.
        lost: Option<u32>,
    },
    /// All ranks stop before this step, for the node of one of them goes, or others come. The state
    /// may be saved; the next call leaves the generation and waits for the next.
    Boundary {
        step: u64,
        reason: Reason,
        deadline: Option<SystemTime>,
    },
    /// Somebody wants a checkpoint, and all ranks are before this step. The rank that
    /// [`Worker::saver`](super::Worker::saver) names saves, and, if there is one, every rank says
    /// [`Worker::saved`](super::Worker::saved); the next call goes on.
    Checkpoint { step: u64 },
    /// The states of the ranks were compared, and these hold another one than the majority
    /// ([`Worker::compare_every`](super::Worker::compare_every)): they are newcomers now, and copy the state of the
    /// others, who go on. Nothing that was computed from the deviating state is committed.
    Quarantined { ranks: Vec<u32>, step: u64 },
    /// Still no generation for this rank. Call again.
    Waiting,
}

/// How long a live worker waits for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// For all ranks of a new generation.
    pub form: Duration,
    /// For one operation. A rank's work between two steps, such as saving the state, must take less: the others
    /// wait for it in the next one. Inside a step, once all ranks are in it and some were measured, an operation has
    /// [`Patience::STEPS`] times what the slowest of the last ones took from there on, but not less than a tenth of
    /// this. Where ranks hear from each other in the step's first operation, that one has both times.
    pub operation: Duration,
    /// For results or a state from survivors.
    pub copy: Duration,
    /// The longest that a call waits for the next generation before it returns
    /// [`Outcome::Waiting`].
    pub assignment: Duration,
}

impl Patience {
    /// An operation may take so many times the slowest step that was measured.
    pub const STEPS: u32 = 30;
}

impl Default for Patience {
    fn default() -> Patience {
        Patience {
            form: Duration::from_secs(30),
            operation: Duration::from_secs(60),
            copy: Duration::from_secs(600),
            assignment: Duration::from_secs(1),
        }
    }
}

/// A live worker cannot go on; its process should end, and be started again from a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum LiveError {
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Rule(#[from] RuleError),
    #[error(transparent)]
    Group(#[from] GroupError),
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error("the training cannot go on: {0}")]
    Training(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error(
        "what rank {rank} said at the start of the generation is no report; are all workers of one release?"
    )]
    NoReport { rank: u32 },
    #[error("the {what} that came from another rank cannot be used; do all ranks train the same?")]
    Useless { what: &'static str },
    #[error("rank {rank} begins step {theirs} and this one step {ours}: restore a checkpoint")]
    OutOfStep { rank: u32, theirs: u64, ours: u64 },
    #[error(
        "before step {step} the ranks hold different states, and none of these more than half of them: {groups:?}; restore a checkpoint, and look for a rank that computes differently"
    )]
    StatesDiffer { step: u64, groups: Vec<Vec<u32>> },
    #[error("cannot start what a live worker needs: {0}")]
    Io(#[from] std::io::Error),
}

impl From<Fault> for LiveError {
    fn from(fault: Fault) -> LiveError {
        match fault {
            Fault::Group(error) => LiveError::Group(error),
            Fault::Training(error) => LiveError::Training(error),
        }
    }
}

/// Whether another generation mends it.
pub(super) fn passes(error: &GroupError) -> bool {
    matches!(
        error,
        GroupError::PeerLost { .. }
            | GroupError::Incomplete { .. }
            | GroupError::MasterUnreachable { .. }
            | GroupError::Refused { .. }
            | GroupError::Aborted { .. }
            | GroupError::Bind { .. }
    )
}
