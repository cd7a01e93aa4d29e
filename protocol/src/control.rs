//! The control page: one page of memory between a launcher and one worker.
//!
//! The launcher creates a memfd per worker, writes [`fresh_page`] into it, seals it against shrinking (so that neither
//! side can be hit by SIGBUS), and lets the worker inherit the descriptor, whose number stands in the environment as
//! [`FD_ENV`]. Every word is a little-endian, naturally aligned `u64`, accessed as an atomic with sequentially
//! consistent order. This module knows offsets, encodings and rules; it maps no memory.
//!
//! # The writer of each word
//!
//! | word | writer | meaning |
//! |---|---|---|
//! | [`word::CHECKPOINT`] | launcher | the confirmed step is a checkpoint, after which the worker goes on ([`encode_step`]). Before STOP |
//! | [`word::PROGRESS`] | worker | the step it is about to enter ([`encode_step`]) |
//! | [`word::STOP`] | launcher | [`Stop`], packed |
//! | [`word::ACK`] | worker | the step at which it stopped, after its save ([`encode_step`]) |
//! | [`word::DEADLINE`] | launcher | end of the grace, milliseconds since the Unix epoch; 0: none. Before STOP |
//! | [`word::REASON`] | launcher | [`Reason`]. Before STOP |
//! | [`word::SAVED`] | worker | the newest step before which it has saved for a checkpoint ([`encode_step`]) |
//! | [`word::LINKED`] | worker | 1 while a runtime is attached: a stop step can be used instead of a signal |
//! | [`word::PID`] | worker | the attached process, as it sees itself |
//!
//! # The rule
//!
//! *Stop at S* means: steps 0..S-1 are complete and step S is not begun.
//!
//! 1. A worker about to begin step s stores PROGRESS = s, **then** loads STOP and obeys
//!    [`worker_decision`]. While it is told to wait it loads STOP again and again; it begins nothing.
//! 2. A launcher that is asked to install S stores STOP = installed(S), **then** loads PROGRESS and
//!    reports [`Gate::install`]'s answer: the lowest step that this worker has not begun and will not
//!    begin while it is gated. This is Dekker's argument: of the two loads, at least one sees the
//!    other side's store, so a worker that has already begun step p is seen at p, and S becomes p + 1.
//! 3. The leader takes the highest answer of all ranks as S and has every launcher store
//!    STOP = confirmed(S). No second round is needed: every rank is gated at or below S. A launcher
//!    may also raise an installed step ([`Gate::install`] again), which lets the worker go on to it.
//! 4. Given up: STOP = cancelled. A later stop starts again at 2 with a fresh load of PROGRESS.
//!
//! 5. *Checkpoint at S* is a stop that lets the worker go on: CHECKPOINT = S is stored before STOP =
//!    confirmed(S). A worker that is told to stop there reads STOP, CHECKPOINT, and STOP again: if STOP has
//!    changed it begins anew. It saves, stores SAVED, and goes on, once for each such word. The launcher
//!    stores STOP = cancelled **before** it clears CHECKPOINT, so nobody takes a checkpoint for a stop.
//!
//! A worker that has not yet reported a step (it restores its state) counts as not having begun
//! any. All ranks of a generation begin with the same step r; when S turns out to lie at or below
//! r, nobody has begun r, and all stop at r. A worker acknowledges where it stands: max(S, r). A
//! worker whose work ends before S exits with 0 and acknowledges nothing.
//!
//! A worker that lives through a change of its generation uses more words: see [`live`]. How it
//! trains it tells by those of [`report`], where its checkpoints go by those of [`slots`], and how its saves
//! and its restore went by those of [`saving`].

pub mod live;
pub mod report;
pub mod saving;
pub mod slots;

use serde::{Deserialize, Serialize};

use std::fmt;

/// Length of the page in bytes.
pub const PAGE_LEN: usize = 4096;

/// First word of the page.
pub const MAGIC: u64 = u64::from_le_bytes(*b"MUSTERCP");

/// Version of the layout, in the second word. Another number is another layout: refuse it.
pub const LAYOUT: u64 = 1;

/// The environment variable that holds the number of the inherited descriptor.
pub const FD_ENV: &str = "MUSTER_CONTROL_FD";

/// The highest step that the page can hold.
pub const MAX_STEP: u64 = (1 << 62) - 2;

/// Offsets of the words, in bytes. The launcher's words and the worker's lie on different cache
/// lines, so that a worker's store each step does not slow the launcher's polling of its own line.
pub mod word {
    pub const MAGIC: usize = 0;
    pub const LAYOUT: usize = 8;

    pub const STOP: usize = 128;
    pub const DEADLINE: usize = 136;
    pub const REASON: usize = 144;
    pub const CHECKPOINT: usize = 152;

    pub const PROGRESS: usize = 256;
    pub const ACK: usize = 264;
    pub const LINKED: usize = 272;
    pub const PID: usize = 280;
    pub const SAVED: usize = 312;

    /// Every word there is.
    pub const ALL: [usize; 11] = [
        MAGIC, LAYOUT, STOP, DEADLINE, REASON, CHECKPOINT, PROGRESS, ACK, LINKED, PID, SAVED,
    ];
}

/// Whether a word of this or of a module below begins at this offset.
pub fn is_word(at: usize) -> bool {
    word::ALL.contains(&at)
        || (live::word::all().chain(report::word::all()))
            .chain(slots::word::all())
            .chain(saving::word::all())
            .any(|word| word == at)
}

/// A fresh page, as the launcher writes it into the memfd before the worker starts.
pub fn fresh_page() -> [u8; PAGE_LEN] {
    let mut page = [0; PAGE_LEN];
    for (at, value) in [(word::MAGIC, MAGIC), (word::LAYOUT, LAYOUT)] {
        page[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
    page
}

/// The launcher's word to the worker about stopping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stop {
    /// Nothing was asked.
    None,
    /// Do not begin this step or a later one until more is known.
    Installed(u64),
    /// Every rank stops at this step.
    Confirmed(u64),
    /// The last request is void: go on.
    Cancelled,
}

impl Stop {
    /// State in the two low bits, step above. A step beyond [`MAX_STEP`] is stored as
    /// [`MAX_STEP`], which no worker reaches.
    pub const fn encode(self) -> u64 {
        match self {
            Stop::None => 0,
            Stop::Installed(step) => clamp(step) << 2 | 1,
            Stop::Confirmed(step) => clamp(step) << 2 | 2,
            Stop::Cancelled => 3,
        }
    }

    /// The inverse of [`encode`](Self::encode), total.
    pub const fn decode(word: u64) -> Stop {
        match word & 3 {
            1 => Stop::Installed(word >> 2),
            2 => Stop::Confirmed(word >> 2),
            3 => Stop::Cancelled,
            _ => Stop::None,
        }
    }
}

const fn clamp(step: u64) -> u64 {
    if step > MAX_STEP { MAX_STEP } else { step }
}

/// PROGRESS and ACK hold the step plus one, because a fresh page is zero and step 0 exists.
pub const fn encode_step(step: Option<u64>) -> u64 {
    match step {
        None => 0,
        Some(step) => clamp(step) + 1,
    }
}

/// The inverse of [`encode_step`], total.
pub const fn decode_step(word: u64) -> Option<u64> {
    word.checked_sub(1)
}

/// Why the job is asked to stop. For people and logs; no rule depends on it.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub enum Reason {
    #[default]
    Unknown,
    /// A cloud's notice that a node will be taken away.
    Preemption,
    /// A node is drained.
    Drain,
    /// SIGTERM to an agent or a launcher.
    Terminated,
    /// Nodes wait to join.
    Join,
    /// The user stopped the job (Ctrl-C).
    Interrupted,
    /// Nobody stops: the ranks save at one step and go on.
    Checkpoint,
}

impl Reason {
    const ALL: [Reason; 7] = [
        Reason::Unknown,
        Reason::Preemption,
        Reason::Drain,
        Reason::Terminated,
        Reason::Join,
        Reason::Interrupted,
        Reason::Checkpoint,
    ];

    pub const fn encode(self) -> u64 {
        self as u64
    }

    /// A word that this version does not know is [`Reason::Unknown`].
    pub fn decode(word: u64) -> Reason {
        Self::ALL
            .into_iter()
            .find(|reason| reason.encode() == word)
            .unwrap_or_default()
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            Reason::Unknown => "unknown",
            Reason::Preemption => "preemption",
            Reason::Drain => "drain",
            Reason::Terminated => "terminated",
            Reason::Join => "join",
            Reason::Interrupted => "interrupted",
            Reason::Checkpoint => "checkpoint",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A worker's decision at a step's boundary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Decision {
    /// Begin the step.
    Go,
    /// Begin nothing; look again.
    Wait,
    /// Save, acknowledge the step that was about to begin, exit 0.
    StopHere,
}

/// The worker's side of the rule: `stop` must have been loaded after PROGRESS = `next` was stored.
pub const fn worker_decision(stop: Stop, next: u64) -> Decision {
    match stop {
        Stop::None | Stop::Cancelled => Decision::Go,
        Stop::Installed(at) if next >= at => Decision::Wait,
        Stop::Confirmed(at) if next >= at => Decision::StopHere,
        Stop::Installed(_) | Stop::Confirmed(_) => Decision::Go,
    }
}

/// The launcher's side of the rule, for a worker that was not gated before: the lowest step, not
/// below `proposed`, that the worker has not begun. `progress` must have been loaded after
/// STOP = installed(`proposed`) was stored.
pub const fn launcher_install(progress: Option<u64>, proposed: u64) -> u64 {
    match progress {
        // It may have begun step p, or wait before it: from here the two look the same.
        Some(p) if p >= proposed => p + 1,
        _ => proposed,
    }
}

/// A launcher's memory of one worker's gate.
///
/// Once gated, a worker that shows PROGRESS = p + 1 waits there; asking PROGRESS again would take it
/// for having begun, and each raise would call for another, for ever. So the bound is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Gate {
    bound: Option<u64>,
}

impl Gate {
    /// The step to report after STOP = installed(`proposed`) was stored; `progress` is PROGRESS,
    /// loaded after that store. Also for a raise, and idempotent for a repeated request.
    pub fn install(&mut self, progress: Option<u64>, proposed: u64) -> u64 {
        let bound = match self.bound {
            None => launcher_install(progress, proposed),
            Some(bound) => bound.max(proposed),
        };
        self.bound = Some(bound);
        bound
    }

    /// Whether confirmed(`step`) may be stored: only on a gated worker, and only at or above what
    /// was reported for it.
    pub fn may_confirm(&self, step: u64) -> bool {
        self.bound.is_some_and(|bound| step >= bound)
    }

    /// Call after STOP = cancelled was stored.
    pub fn cancel(&mut self) {
        self.bound = None;
    }
}

#[cfg(test)]
#[path = "control_tests.rs"]
mod tests;
