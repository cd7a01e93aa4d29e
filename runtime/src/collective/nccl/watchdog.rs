//! The thread that ends a communicator when something is wrong: NCCL waits without end for a rank that is
//! gone, and only an abort in this process makes it return.
//!
//! Two threads: one looks, and one calls what may never return (the making and the abort), so that the
//! first can give up on it. The owner is told only when the abort has returned: until then kernels may
//! read its inputs and write its outputs.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cudarc::nccl::sys as nc;

use super::super::error::LossCause;
use super::super::{Aborter, Over, Seen, Vigil};
use super::error::NcclError;
use super::library::IN_PROGRESS;
use super::state::{Phase, Shared, Trouble, trouble_of};
use super::{Config, StuckCall};
use crate::cuda::sys::{Code, SUCCESS};

/// How often the watchdog looks at NCCL. Bytes on a connection wake it at once.
const TICK: Duration = Duration::from_millis(5);
/// How long a rank that has left may have done its part of an operation that still runs here.
const PARTING: Duration = Duration::from_millis(50);
/// How long the control plane may take to name the rank behind an error of NCCL.
const WORD: Duration = Duration::from_millis(200);

/// Jobs of the second thread.
enum Job {
    Make {
        id: nc::ncclUniqueId,
        rank: c_int,
        world: c_int,
    },
    Abort(Comm),
}

/// A communicator on its way between threads.
struct Comm(nc::ncclComm_t);

// SAFETY: NCCL lets a communicator be used by several threads, one at a time.
unsafe impl Send for Comm {}

/// Result of a job.
struct Done {
    comm: Comm,
    result: Result<(), NcclError>,
}

/// The thread for calls that may never return.
struct Caller {
    jobs: Sender<Job>,
    done: Receiver<Done>,
    thread: JoinHandle<()>,
}

impl Caller {
    fn start(shared: &Arc<Shared>) -> Result<Caller, NcclError> {
        let (jobs, todo) = channel();
        let (told, done) = channel();
        let shared = shared.clone();
        let thread = std::thread::Builder::new()
            .name("muster-nccl-call".into())
            .spawn(move || {
                for job in todo {
                    // Nobody listens any more after a call that took too long.
                    let _heard = told.send(carry_out(&shared, job));
                }
            });
        Ok(Caller {
            jobs,
            done,
            thread: thread.map_err(NcclError::Thread)?,
        })
    }
}

fn carry_out(shared: &Shared, job: Job) -> Done {
    let library = shared.library();
    let mut comm = std::ptr::null_mut();
    let entered = shared.device.enter().map_err(NcclError::from);
    let result = entered.and_then(|_current| match job {
        Job::Make { id, rank, world } => {
            let mut config = config();
            // SAFETY: the pointers are to live places; NCCL copies the config.
            let code =
                unsafe { (library.nccl.init)(&raw mut comm, world, id, rank, &raw mut config) };
            library.check_nccl("ncclCommInitRankConfig", code)
        }
        Job::Abort(Comm(comm)) => {
            // SAFETY: made above, and aborted once.
            let code = unsafe { (library.nccl.abort)(comm) };
            library.check_nccl("ncclCommAbort", code)
        }
    });
    Done {
        comm: Comm(comm),
        result,
    }
}

/// Not blocking; everything else as NCCL sees fit. NCCL reads as much of it as its size says, and
/// newer versions fill in what came after theirs.
fn config() -> nc::ncclConfig_t {
    nc::ncclConfig_t {
        size: size_of::<nc::ncclConfig_t>(),
        magic: 0xcafe_beef,
        version: super::library::LEAST_VERSION.0,
        blocking: 0,
        cgaClusterSize: i32::MIN,
        minCTAs: i32::MIN,
        maxCTAs: i32::MIN,
        netName: std::ptr::null(),
        splitShare: i32::MIN,
    }
}

/// Whether it is this rank's own, so that nobody else knows more of it.
fn is_own(trouble: &Trouble) -> bool {
    !matches!(trouble, Trouble::Late { .. } | Trouble::TimedOut { .. })
}

/// The watchdog's side of a communicator.
pub(super) struct Watchdog {
    rank: u32,
    shared: Arc<Shared>,
    vigil: Vigil,
    /// Rung when the owner has failed, or is done; `None` once it was heard.
    bell: Option<Aborter>,
    config: Config,
    caller: Caller,
    /// Until when it is to be formed.
    until: Instant,
    /// The making has not returned.
    making: bool,
    /// Something is wrong, but not yet who is to blame.
    suspect: Option<(Instant, Trouble)>,
}

impl Watchdog {
    /// Starts both threads, and the making.
    pub(super) fn start(
        shared: &Arc<Shared>,
        vigil: Vigil,
        bell: &Aborter,
        config: Config,
        id: nc::ncclUniqueId,
        (rank, world): (u32, u32),
    ) -> Result<JoinHandle<()>, NcclError> {
        let caller = Caller::start(shared)?;
        let number = |rank: u32| c_int::try_from(rank).unwrap_or(c_int::MAX);
        let make = Job::Make {
            id,
            rank: number(rank),
            world: number(world),
        };
        let watchdog = Watchdog {
            rank,
            shared: shared.clone(),
            vigil,
            bell: Some(bell.clone()),
            until: Instant::now() + config.form_within,
            config,
            caller,
            making: true,
            suspect: None,
        };
        std::thread::Builder::new()
            .name("muster-nccl-watch".into())
            .spawn(move || watchdog.run(make))
            .map_err(NcclError::Thread)
    }

    fn run(mut self, make: Job) {
        // The other thread listens until the sender is dropped.
        let _sent = self.caller.jobs.send(make);
        let trouble = loop {
            let bell = self.bell.as_ref();
            let seen = self.vigil.look(bell, Instant::now() + TICK);
            let trouble = match seen {
                Ok(seen) => self.judge(seen),
                Err(_) => Some(Trouble::Group(Over::Broken)),
            };
            if let Some(trouble) = trouble {
                break trouble;
            }
        };
        self.end(trouble);
    }

    /// Why to end, if there is a reason.
    fn judge(&mut self, seen: Option<Seen>) -> Option<Trouble> {
        if let Some(seen) = seen {
            return Some(match seen {
                Seen::Lost(rank) => Trouble::Group(Over::Lost(rank, LossCause::Reported)),
                Seen::Aborted { by: None } => Trouble::Group(Over::Aborted),
                Seen::Aborted { by: Some(rank) } => Trouble::Group(Over::AbortedBy(rank)),
                Seen::GaveUp(by) => Trouble::GivenUp { by },
                Seen::Left => Trouble::Left,
                Seen::Nonsense(rank) => Trouble::Group(Over::Protocol(rank, "an unknown notice")),
                Seen::Failed => Trouble::Group(Over::Broken),
            });
        }
        let (busy, forming) = {
            let mut state = self.shared.state();
            if let Some(failed) = state.failed.take() {
                if is_own(&failed) {
                    return Some(failed);
                }
                self.bell = None;
                self.suspect.get_or_insert((Instant::now(), failed));
            }
            if let Err(error) = state.advance() {
                return Some(trouble_of(error));
            }
            (state.busy(), matches!(state.phase, Phase::Forming))
        };
        if let Some((rank, since, cause)) = self.vigil.gone()
            && (forming || self.suspect.is_some() || busy.is_some())
            && since.elapsed() >= PARTING
        {
            return Some(Trouble::Group(Over::Lost(rank, cause)));
        }
        if self.suspect.is_none() {
            let wrong = if forming {
                self.form()
            } else {
                self.look_at_nccl(busy.map_or("NCCL", |(what, _)| what))
            };
            let wrong = wrong.or_else(|| self.overdue(busy, forming));
            self.suspect = wrong.map(|wrong| (Instant::now(), wrong));
        }
        let (since, trouble) = self.suspect.as_ref()?;
        (is_own(trouble) || since.elapsed() >= WORD).then(|| trouble.clone())
    }

    /// Goes on with the forming.
    fn form(&mut self) -> Option<Trouble> {
        if self.making {
            let done = self.caller.done.try_recv().ok()?;
            if let Some(trouble) = self.made(done) {
                return Some(trouble);
            }
        }
        let calls = self.shared.calls();
        match self.shared.async_error(&calls) {
            Ok(SUCCESS) => {
                self.shared.state().phase = Phase::Ready;
                self.shared.changed.notify_all();
                None
            }
            Ok(IN_PROGRESS) => None,
            Ok(code) => Some(self.late("the forming of a communicator", code)),
            Err(error) => Some(trouble_of(error)),
        }
    }

    fn made(&mut self, done: Done) -> Option<Trouble> {
        self.making = false;
        self.shared.comm.store(done.comm.0, Ordering::Release);
        // Nobody else is needed for this call: what is wrong is wrong here.
        Some(match done.result.err()? {
            NcclError::Nccl { call, code, text } => Trouble::Nccl { call, code, text },
            error => trouble_of(error),
        })
    }

    fn late(&self, what: &'static str, code: Code) -> Trouble {
        let text = self.shared.library().nccl_text(code);
        Trouble::Late { what, code, text }
    }

    fn look_at_nccl(&self, what: &'static str) -> Option<Trouble> {
        // While the owner is in a call, it asks itself.
        let calls = self.shared.calls.try_lock().ok()?;
        match self.shared.async_error(&calls) {
            Ok(SUCCESS | IN_PROGRESS) => None,
            Ok(code) => Some(self.late(what, code)),
            Err(error) => Some(trouble_of(error)),
        }
    }

    fn overdue(&self, busy: Option<(&'static str, Instant)>, forming: bool) -> Option<Trouble> {
        if forming {
            return (Instant::now() >= self.until).then_some(Trouble::TimedOut {
                what: "the forming of a communicator",
                within: self.config.form_within,
            });
        }
        let (what, since) = busy?;
        let within = self.vigil.op_within();
        (!within.is_zero() && since.elapsed() >= within)
            .then_some(Trouble::TimedOut { what, within })
    }

    /// Aborts the communicator, and tells the owner and the other ranks.
    fn end(mut self, trouble: Trouble) {
        let idle = {
            let mut state = self.shared.state();
            let before = std::mem::replace(&mut state.phase, Phase::Ending);
            matches!(before, Phase::Ready) && state.issued.is_empty()
        };
        self.shared.changed.notify_all();
        match &trouble {
            // Nothing is left undone here.
            Trouble::Closed if idle => {}
            // Who leaves the group is seen to do so.
            Trouble::Left => {}
            Trouble::Group(Over::Lost(rank, _)) => self.vigil.tell_lost(*rank),
            // NCCL wants all ranks of a host to abort (pytorch/pytorch pull request 118692).
            Trouble::GivenUp { by } => self.vigil.tell_gave_up(*by),
            _ => self.vigil.tell_gave_up(self.rank),
        }
        let began = Instant::now();
        let stuck = self.abort(began);
        let trouble = match stuck {
            None => trouble,
            Some(call) => {
                let waited = began.elapsed();
                (self.config.on_stuck)(&StuckCall {
                    call,
                    waited,
                    why: NcclError::from(trouble).to_string(),
                });
                Trouble::Stuck { call, waited }
            }
        };
        {
            let mut state = self.shared.state();
            state.phase = Phase::Over(trouble);
            state.failed = None;
            if stuck.is_some() {
                // Never to be called again with what a stuck call may hold.
                std::mem::forget((
                    std::mem::take(&mut state.issued),
                    std::mem::take(&mut state.free),
                ));
            } else {
                state.issued.clear();
                state.free.clear();
            }
        }
        self.shared.changed.notify_all();
        let Caller { jobs, thread, .. } = self.caller;
        drop(jobs);
        if stuck.is_none() {
            let _ended = thread.join();
        }
    }

    /// The call that did not return in time.
    fn abort(&mut self, began: Instant) -> Option<&'static str> {
        let until = began + self.config.abort_within;
        let left = || until.saturating_duration_since(Instant::now());
        if self.making {
            match self.caller.done.recv_timeout(left()) {
                // What else is wrong is known already.
                Ok(done) => drop(self.made(done)),
                Err(_) => return Some("ncclCommInitRankConfig"),
            }
        }
        let comm = self.shared.comm();
        if comm.is_null() {
            return None;
        }
        // An owner in a call has half of the time to leave it. Then the abort is what makes it leave: it
        // is waiting for a device that waits for a rank.
        let half = began + self.config.abort_within / 2;
        let calls = loop {
            match self.shared.calls.try_lock() {
                Err(std::sync::TryLockError::WouldBlock) if Instant::now() < half => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                other => break other.ok(),
            }
        };
        self.shared
            .comm
            .store(std::ptr::null_mut(), Ordering::Release);
        drop(calls);
        let _sent = self.caller.jobs.send(Job::Abort(Comm(comm)));
        match self.caller.done.recv_timeout(left()) {
            // An abort that reports something has ended all the same.
            Ok(_) => None,
            Err(_) => Some("ncclCommAbort"),
        }
    }
}
