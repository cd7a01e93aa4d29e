//! The stop barrier (R20): every rank of a generation stops at one step, or none does. Two pure
//! cores, the leader's and each node's; neither reads a clock or sends anything by itself.
//!
//! The leader asks every node to install step S. A node answers when all of its ranks will wait at
//! S, or at a later step where one was already past it; the leader raises S to the greatest answer
//! and asks again. When every node has installed the same S, it confirms. A rank that reaches an
//! installed step waits for confirm, raise, or cancel, so nobody can run past a step that is
//! confirmed elsewhere. The leader sends either confirms or cancels for one barrier, never both.
//!
//! A checkpoint ([`Reason::Checkpoint`]) is agreed on in the same way, but the ranks go on behind it and
//! further barriers may follow. A drain opens its own barrier then, once every node knows of the
//! checkpoint's decision; one that is not decided yet makes way for it.
//!
//! Barriers are numbered, upwards. A leader that does not know the newest number is told it by the first
//! node that does, and begins above it.
//!
//! A leader whose agent was restarted, or in whose place another has led, does not know what was
//! confirmed. It asks every node what it holds, under a number that none has heard of, and a node that
//! answers takes nothing any more that was said under a lower one. When all have answered, nothing else
//! can be confirmed behind the leader's back: what one of them holds as confirmed is confirmed
//! everywhere (all had installed it, and nothing was opened behind it before all knew), and everything
//! else is void. So ranks that wait go on within a round trip. A node never gives up on its own: ranks
//! that wait end with the generation.
//!
//! A cancel voids what is not confirmed, and nothing else: a node, and its launcher, then hold again the
//! checkpoint that was confirmed before. So whoever never heard of the cancelled barrier holds the same.
//!
//! A node whose agent was restarted learns from its launcher what that holds, and its leader by its
//! status. The confirm of a checkpoint counts as known there only once the launcher has it,
//! and a launcher that is told again of one that it knows answers again.

mod leader;
mod node;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use crate::control::Reason;
use crate::ids::Digest;
use crate::time::Span;

pub use leader::{Effect as LeaderEffect, Event as LeaderEvent, GivenUp, Leader, Outcome};
pub use node::{Effect as NodeEffect, Event as NodeEvent, Node};

/// The most steps that a first proposal lies ahead of the furthest rank.
const MAX_AHEAD: u64 = 1_000;

/// From the leader to a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ToNode {
    Install {
        digest: Digest,
        barrier: u32,
        step: u64,
        /// Time left until the deadline, when this is sent.
        grace_ms: u32,
        reason: Reason,
    },
    Confirm {
        digest: Digest,
        barrier: u32,
        step: u64,
        reason: Reason,
    },
    Cancel {
        digest: Digest,
        barrier: u32,
    },
    /// Say what you hold, and take nothing under a lower number any more.
    Ask {
        digest: Digest,
        barrier: u32,
    },
}

impl ToNode {
    /// Why the ranks are told to stop by this; none where they save and go on. A cancel tells nothing by itself: what
    /// comes in place of a stop does.
    pub fn stop_reason(&self) -> Option<Reason> {
        match self {
            ToNode::Install { reason, .. } | ToNode::Confirm { reason, .. } => {
                (*reason != Reason::Checkpoint).then_some(*reason)
            }
            ToNode::Cancel { .. } | ToNode::Ask { .. } => None,
        }
    }
}

/// State that a node, or its launcher, holds of the newest barrier that was installed or confirmed there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Held {
    pub barrier: u32,
    pub step: u64,
    pub reason: Reason,
    /// The ranks were told to stop, or to save, at this step; else they wait at it.
    pub confirmed: bool,
}

/// From a node to the leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ToLeader {
    /// No rank of this node runs past this step until the barrier raises or cancels it.
    Installed {
        digest: Digest,
        barrier: u32,
        step: u64,
    },
    /// The confirm or the cancel arrived.
    Settled { digest: Digest, barrier: u32 },
    /// The leader's message was not taken: this node has heard of this barrier, with a greater number.
    Newer { digest: Digest, barrier: u32 },
    /// The answer to [`ToNode::Ask`].
    Holds {
        digest: Digest,
        barrier: u32,
        held: Option<Held>,
    },
}

/// Why a message was refused. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the message is about generation {theirs}, this barrier is of generation {ours}")]
    OtherGeneration { ours: Digest, theirs: Digest },
    #[error("barrier {barrier} is not open: an older message, or one of another boot")]
    NotOpen { barrier: u32 },
    #[error("the node is not part of this generation")]
    NotAMember,
    #[error("step {step} is confirmed, but step {installed:?} is installed here")]
    NotInstalled { step: u64, installed: Option<u64> },
}

/// The step to propose first: behind the furthest rank by what it will run until the answers are
/// in. Too early costs one more round, too late costs training time before the deadline.
///
/// `progress` holds the last step begun by each rank; `step_time` zero means unknown.
pub fn first_step(
    progress: impl IntoIterator<Item = u64>,
    step_time: Span,
    round_trip: Span,
) -> u64 {
    let furthest = progress.into_iter().max().unwrap_or(0);
    let ahead = match step_time.0 {
        0 => 1,
        step => round_trip.0.div_ceil(step),
    };
    furthest.saturating_add(1 + ahead.min(MAX_AHEAD))
}
