//! State that a communicator's owner and its watchdog share.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cudarc::nccl::sys as nc;

use super::super::{GroupError, Over};
use super::error::NcclError;
use super::library::{IN_PROGRESS, Library};
use crate::cuda::sys::{Code, SUCCESS};
use crate::cuda::{CudaError, Device, Event};

/// Why a communicator is over.
#[derive(Clone, Debug)]
pub(super) enum Trouble {
    /// Its owner is done with it.
    Closed,
    Group(Over),
    TimedOut {
        what: &'static str,
        within: Duration,
    },
    Late {
        what: &'static str,
        code: Code,
        text: String,
    },
    /// A call of NCCL or of the driver refused.
    Nccl {
        call: &'static str,
        code: Code,
        text: String,
    },
    Cuda {
        call: &'static str,
        code: Code,
        text: String,
    },
    GivenUp {
        by: u32,
    },
    Left,
    Stuck {
        call: &'static str,
        waited: Duration,
    },
}

impl From<Trouble> for NcclError {
    fn from(trouble: Trouble) -> NcclError {
        match trouble {
            Trouble::Closed | Trouble::Left => NcclError::Left,
            Trouble::Group(over) => GroupError::from(over).into(),
            Trouble::TimedOut { what, within } => NcclError::TimedOut { what, within },
            Trouble::Late { what, code, text } => NcclError::Late { what, code, text },
            Trouble::Nccl { call, code, text } => NcclError::Nccl { call, code, text },
            Trouble::Cuda { call, code, text } => CudaError::Call { call, code, text }.into(),
            Trouble::GivenUp { by } => NcclError::GivenUp { by },
            Trouble::Stuck { call, waited } => NcclError::Stuck { call, waited },
        }
    }
}

/// `ncclInvalidArgument` and `ncclInvalidUsage`: a mistake of this process, which comes again in the next
/// generation.
const MISTAKES: [Code; 2] = [
    nc::ncclResult_t::ncclInvalidArgument as Code,
    nc::ncclResult_t::ncclInvalidUsage as Code,
];

/// The trouble that an error of a call means, with a communicator that was formed: a call also reports
/// what went wrong in the background, for example that another rank is gone.
pub(super) fn trouble_of(error: NcclError) -> Trouble {
    match error {
        NcclError::Nccl { call, code, text } if MISTAKES.contains(&code) => {
            Trouble::Nccl { call, code, text }
        }
        NcclError::Nccl { call, code, text } => Trouble::Late {
            what: call,
            code,
            text,
        },
        NcclError::Cuda(CudaError::Call { call, code, text }) => Trouble::Cuda { call, code, text },
        // Calls have no other errors.
        _ => Trouble::Group(Over::Broken),
    }
}

/// How far a communicator has come.
#[derive(Clone, Debug)]
pub(super) enum Phase {
    Forming,
    Ready,
    /// Being aborted: what completes on the device now is worth nothing.
    Ending,
    Over(Trouble),
}

/// An operation in the stream.
#[derive(Debug)]
pub(super) struct Issued {
    pub(super) what: &'static str,
    pub(super) since: Instant,
    pub(super) done: Event,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) phase: Phase,
    /// The call of NCCL that the owner is in.
    pub(super) calling: Option<(&'static str, Instant)>,
    /// In the order of the stream.
    pub(super) issued: VecDeque<Issued>,
    /// Operations that were called, and that have completed.
    pub(super) launched: u64,
    pub(super) completed: u64,
    /// Events to be used again.
    pub(super) free: Vec<Event>,
    /// Trouble of the owner, for the watchdog.
    pub(super) failed: Option<Trouble>,
    /// When the operation before the first of `issued` completed.
    since: Instant,
}

impl State {
    /// Counts the operations that have completed.
    pub(super) fn advance(&mut self) -> Result<(), NcclError> {
        if !matches!(self.phase, Phase::Ready) {
            return Ok(());
        }
        while let Some(first) = self.issued.front() {
            if !first.done.has_passed()? {
                break;
            }
            if let Some(first) = self.issued.pop_front() {
                self.free.push(first.done);
            }
            self.completed += 1;
            self.since = Instant::now();
        }
        Ok(())
    }

    /// The operation that is waited for on the device or in a call, and since when.
    pub(super) fn busy(&self) -> Option<(&'static str, Instant)> {
        let first = self.issued.front();
        first
            .map(|first| (first.what, first.since.max(self.since)))
            .or(self.calling)
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Shared {
    library: Arc<Library>,
    pub(super) device: Arc<Device>,
    /// Null before it is made, and after it is aborted.
    pub(super) comm: AtomicPtr<nc::ncclComm>,
    /// Held in every call with the communicator but its abort.
    pub(super) calls: Mutex<()>,
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
}

impl Shared {
    pub(super) fn new(library: &Arc<Library>, device: Arc<Device>) -> Arc<Shared> {
        Arc::new(Shared {
            library: library.clone(),
            device,
            comm: AtomicPtr::default(),
            calls: Mutex::default(),
            state: Mutex::new(State {
                phase: Phase::Forming,
                calling: None,
                issued: VecDeque::new(),
                launched: 0,
                completed: 0,
                free: Vec::new(),
                failed: None,
                since: Instant::now(),
            }),
            changed: Condvar::new(),
        })
    }

    pub(super) fn library(&self) -> &Arc<Library> {
        &self.library
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn calls(&self) -> MutexGuard<'_, ()> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn comm(&self) -> nc::ncclComm_t {
        self.comm.load(Ordering::Acquire)
    }

    /// State of the background work: nothing, something, or an error. Called with `calls` held,
    /// and not after the abort has begun.
    pub(super) fn async_error(&self, _calls: &MutexGuard<'_, ()>) -> Result<Code, NcclError> {
        let library = self.library();
        // As an integer, because NCCL may say what cudarc's enum does not have.
        let mut told = SUCCESS;
        // SAFETY: the communicator is there while `calls` is held; the pointer is to a live integer of
        // the size and alignment of the enum.
        let code = unsafe { (library.nccl.async_error)(self.comm(), (&raw mut told).cast()) };
        library.check_nccl("ncclCommGetAsyncError", code)?;
        Ok(told)
    }

    /// Whether what was called is in the stream by now.
    pub(super) fn has_settled(&self, call: &'static str) -> Result<bool, NcclError> {
        let calls = self.calls();
        if !matches!(self.state().phase, Phase::Ready) {
            // The abort has begun: nothing more is asked.
            return Ok(true);
        }
        match self.async_error(&calls)? {
            SUCCESS => Ok(true),
            IN_PROGRESS => Ok(false),
            code => {
                let text = self.library().nccl_text(code);
                Err(NcclError::Nccl { call, code, text })
            }
        }
    }
}
