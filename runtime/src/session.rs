//! A worker's side of the control page: one cheap question a step.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use muster_protocol::control::report;
use muster_protocol::control::saving::{self, Failure};
use muster_protocol::control::{
    self, Decision, LAYOUT, MAX_STEP, Reason, Stop, decode_step, encode_step, word, worker_decision,
};

use crate::page::Page;

pub use muster_protocol::control::report::Metrics;

/// How long a worker waits at an installed stop step when the launcher gave no deadline.
pub const WAIT_WITHOUT_DEADLINE: Duration = Duration::from_secs(60);

/// A deadline further away than this is taken for a mistake, and this is waited instead.
pub const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);

/// Order to a worker at a step's boundary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Directive {
    /// Begin the step.
    Continue,
    /// Do not begin the step: every rank stops here. Save, [`acknowledge`](Session::acknowledge) this
    /// step, exit 0.
    Stop {
        /// When the process may be killed; `None` when no limit was given.
        deadline: Option<SystemTime>,
        reason: Reason,
    },
    /// Save what belongs to the beginning of this step, which every rank does, say
    /// [`saved`](Session::saved), and begin it.
    Checkpoint {
        /// The step that was announced: those before it are complete, it is not begun.
        step: u64,
    },
}

/// Why a session cannot be had, or cannot say what to do.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    #[error(
        "{} is {value:?}, not a descriptor's number; unset it, or start the worker with `muster run`",
        control::FD_ENV
    )]
    BadVariable { value: String },
    #[error(
        "descriptor {fd} of {} cannot be used; only the process that `muster run` starts may attach, and it must not close inherited descriptors",
        control::FD_ENV
    )]
    Descriptor {
        fd: RawFd,
        #[source]
        source: io::Error,
    },
    #[error(
        "the descriptor in {} is not a control page ({len} bytes); unset the variable",
        control::FD_ENV
    )]
    NotAControlPage { len: u64 },
    #[error(
        "the control page has layout {layout}, this runtime knows {LAYOUT}; use a runtime and a `muster` of the same release"
    )]
    Layout { layout: u64 },
    #[error("process {pid} is already attached to this control page; keep one session per worker")]
    AlreadyAttached { pid: u64 },
    #[error("step {step} after step {last}: steps are announced in order; nothing was announced")]
    StepBackwards { step: u64, last: u64 },
    #[error("step {step} is beyond {MAX_STEP}")]
    StepTooLarge { step: u64 },
    #[error(
        "a stop at or before step {step} was announced, but neither confirmed nor cancelled until its deadline; step {step} was not begun: the state may be saved, then exit with a failure"
    )]
    Undecided { step: u64 },
}

/// The attachment of this process to its launcher.
///
/// While it lives the launcher uses an agreed stop step instead of a signal; dropping it gives that
/// up.
#[derive(Debug)]
pub struct Session {
    page: Arc<Page>,
    pid: u32,
    last: Option<u64>,
    /// The word of the checkpoint that was asked for last, while it stands.
    checkpoint: Option<u64>,
    /// The step of a checkpoint that was asked for, until the worker goes on.
    saves: Option<u64>,
}

impl Session {
    /// Attaches to the launcher that started this process. `Ok(None)`: not started by Muster.
    ///
    /// # Errors
    /// The variable is there, but no control page that this runtime understands, or another
    /// session holds it. Nothing was changed.
    pub fn from_env() -> Result<Option<Session>, SessionError> {
        let Some(value) = std::env::var_os(control::FD_ENV) else {
            return Ok(None);
        };
        let fd = value.to_str().and_then(|text| text.trim().parse().ok());
        match fd {
            Some(fd) => Self::attach(Page::from_fd(fd)?).map(Some),
            None => Err(SessionError::BadVariable {
                value: value.to_string_lossy().into_owned(),
            }),
        }
    }

    /// Attaches to the control page behind an open descriptor.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_fd(fd: RawFd) -> Result<Session, SessionError> {
        Self::attach(Page::from_fd(fd)?)
    }

    fn attach(page: Page) -> Result<Session, SessionError> {
        let pid = std::process::id();
        page.claim(word::PID, u64::from(pid))
            .map_err(|pid| SessionError::AlreadyAttached { pid })?;
        page.store(word::LINKED, 1);
        Ok(Session {
            page: Arc::new(page),
            pid,
            last: None,
            checkpoint: None,
            saves: None,
        })
    }

    pub(crate) fn page(&self) -> Arc<Page> {
        self.page.clone()
    }

    /// Announces that `step` is about to begin, and asks whether it may. Usually two atomic
    /// accesses; while a stop is being agreed on, waits for the outcome, until the deadline at most.
    ///
    /// # Errors
    /// The step is lower than an earlier one, or no agreement came until the deadline.
    #[inline]
    pub fn step(&mut self, step: u64) -> Result<Directive, SessionError> {
        if let Some(last) = self.last.filter(|last| step < *last) {
            return Err(SessionError::StepBackwards { step, last });
        }
        if step > MAX_STEP {
            return Err(SessionError::StepTooLarge { step });
        }
        if self.last.is_none_or(|last| step > last) {
            // Each step counts its own: ranks that began at different times compare within a step.
            // Nobody waits at a boundary, so the count is even as it has to be.
            self.page.store(report::word::OPERATION, 0);
        }
        let first = self.last.replace(step).is_none();
        if let Some(step) = self.saves.take() {
            // It goes on, so whatever it wanted to save is saved.
            self.saved(step);
        }
        self.page.store(word::PROGRESS, encode_step(Some(step)));
        if first {
            self.wait_for_all();
        }
        let stop = Stop::decode(self.page.load(word::STOP));
        match worker_decision(stop, step) {
            Decision::Go => {
                self.checkpoint = None;
                Ok(Directive::Continue)
            }
            Decision::Wait | Decision::StopHere => self.at_the_gate(step),
        }
    }

    /// Nobody begins the first step before all ranks have loaded what they begin with: one may find it
    /// damaged. The launcher, without which this process does not live, says when that is.
    #[cold]
    fn wait_for_all(&self) {
        while self.page.load(saving::word::HOLD) == 1 {
            (self.page).wait_while(saving::word::HOLD, 1, Duration::from_millis(100));
        }
    }

    /// The slow path: waits until the stop is decided.
    #[cold]
    fn at_the_gate(&mut self, step: u64) -> Result<Directive, SessionError> {
        let mut wait = Wait::new(self.page.load(word::DEADLINE));
        let mut pause = Duration::from_micros(100);
        loop {
            let asked = self.page.load(word::STOP);
            let stop = Stop::decode(asked);
            match worker_decision(stop, step) {
                Decision::Go => {
                    self.checkpoint = None;
                    return Ok(Directive::Continue);
                }
                Decision::StopHere => {
                    let checkpoint = decode_step(self.page.load(word::CHECKPOINT));
                    let deadline = self.page.load(word::DEADLINE);
                    if self.page.load(word::STOP) != asked {
                        // What was read may belong to the next word.
                        continue;
                    }
                    if checkpoint.is_some_and(|at| stop == Stop::Confirmed(at)) {
                        let known = self.checkpoint.replace(asked) == Some(asked);
                        return Ok(match known {
                            true => Directive::Continue,
                            false => {
                                self.saves = Some(step);
                                Directive::Checkpoint { step }
                            }
                        });
                    }
                    return Ok(Directive::Stop {
                        deadline: (deadline != 0)
                            .then(|| UNIX_EPOCH.checked_add(Duration::from_millis(deadline)))
                            .flatten(),
                        reason: Reason::decode(self.page.load(word::REASON)),
                    });
                }
                Decision::Wait => {}
            }
            if wait.is_over(self.page.load(word::DEADLINE)) {
                return Err(SessionError::Undecided { step });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    /// A state was restored that may be older than what this process has seen: steps are announced from there.
    pub(crate) fn begin_anew(&mut self) {
        self.last = None;
        self.page.store(word::PROGRESS, encode_step(None));
    }

    /// Tells the launcher that this rank stopped before `step` and that its state is saved. The
    /// process then exits with 0.
    pub fn acknowledge(&self, step: u64) {
        self.page.store(word::ACK, encode_step(Some(step)));
    }

    /// Tells the launcher that this rank has saved for the checkpoint before `step`. Going on to the
    /// next [`step`](Self::step) says so, too.
    pub fn saved(&self, step: u64) {
        self.page.store(word::SAVED, encode_step(Some(step)));
    }

    /// Tells the launcher that this rank could not save for the checkpoint before `step`, and why: whoever
    /// ordered it learns that, and waits no more. The training may go on.
    pub fn failed_to_save(&self, step: u64, why: &str) {
        let failure = Failure {
            step,
            why: why.to_owned(),
        };
        let (words, length) = failure.encode();
        for (at, value) in saving::word::failure().zip(words) {
            self.page.store(at, value);
        }
        self.page.store(saving::word::FAILED, length);
        self.saved(step);
    }
}

impl Session {
    /// Tells how this rank trains: the agent of its node shows it on `/metrics`, every two seconds or
    /// so the newest. Costs some ten stores to memory, never a system call, so it may be called every
    /// step.
    pub fn report(&mut self, metrics: &Metrics) {
        self.page.report(metrics);
    }

    /// The mark by which others see whether this rank waits for the others. Without it a rank that
    /// hangs inside a step may not be told from those that wait for it.
    pub fn waits(&self) -> Waits {
        Waits {
            page: self.page.clone(),
        }
    }

    /// Says that this rank is busy with something long inside a step (an evaluation, a save), and gets
    /// on: call it now and then, on all ranks alike, so that they do not count as hung. A rank that
    /// calls it alone is waited for: the others are not blamed meanwhile.
    pub fn alive(&mut self) {
        self.page.add(report::word::OPERATION, report::ALIVE);
    }
}

/// Marks the times at which this rank waits for others, for whoever looks for one that hangs.
#[derive(Clone, Debug)]
pub struct Waits {
    page: Arc<Page>,
}

impl Waits {
    /// The rank enters an operation in which it waits for others, until this is dropped. One at a
    /// time: of several at once, as on several threads, nobody could tell which is behind.
    #[must_use = "the rank waits until this is dropped"]
    pub fn enter(&self) -> Waiting<'_> {
        self.page.add(report::word::OPERATION, 1);
        Waiting { page: &self.page }
    }
}

/// This rank waits for others, until this is dropped.
#[derive(Debug)]
pub struct Waiting<'a> {
    page: &'a Page,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.page.add(report::word::OPERATION, 1);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // A forked child that drops its copy must not detach its parent.
        if self.pid == std::process::id() {
            self.page.store(word::LINKED, 0);
            self.page.store(word::PID, 0);
        }
    }
}

/// The end of a wait, kept on the monotonic clock, so that a jump of the wall clock after the
/// deadline was read changes nothing.
struct Wait {
    deadline_ms: u64,
    until: Instant,
}

impl Wait {
    fn new(deadline_ms: u64) -> Wait {
        let length = match deadline_ms {
            0 => WAIT_WITHOUT_DEADLINE,
            ms => UNIX_EPOCH
                .checked_add(Duration::from_millis(ms))
                .and_then(|end| end.duration_since(SystemTime::now()).ok())
                .unwrap_or_default()
                .min(LONGEST_WAIT),
        };
        Wait {
            deadline_ms,
            until: Instant::now() + length,
        }
    }

    fn is_over(&mut self, deadline_ms: u64) -> bool {
        if deadline_ms != self.deadline_ms {
            *self = Wait::new(deadline_ms);
        }
        Instant::now() >= self.until
    }
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
