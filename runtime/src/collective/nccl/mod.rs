//! Collectives between GPUs by NCCL, for the ranks of a [`Group`](super::Group).
//!
//! NCCL and the CUDA driver are loaded at run time ([`Library`]); nothing of them is needed to build.
//! The group stays the control plane: over it ranks agree on a [`Communicator`], and by it they learn who is
//! lost, which NCCL never says.
//!
//! - **Out of place, asynchronous.** An operation is put into a stream of the communicator's own, after what
//!   is in the caller's stream. [`Communicator::wait`] returns when it is complete on the device.
//! - **Nothing waits without end.** A watchdog aborts the communicator when a rank is lost, when the group is
//!   aborted or dropped, when NCCL reports an error, or when an operation takes longer than the group's
//!   operations may ([`Group::set_op_within`](super::Group::set_op_within); zero means no limit). The owner
//!   gets an error once the abort has returned: inputs are as they were, and the communicator is over.
//! - **An abort that does not return within [`Config::abort_within`] ends the process**, with exit code
//!   [`STUCK_EXIT`], and so never holds up the job. [`Config::on_stuck`] may do something else.
//! - The order of summation is NCCL's: all ranks hold the same bits, but another world, another machine or
//!   another version may hold others, and no [`Layout`](super::Layout) computes them.
//!
//! # In a live training
//!
//! A [`Training`](crate::live::Training) gets the generation's group in `results`. It keeps a communicator
//! for the group that it belongs to ([`Communicator::is_of`]), and forms one when the group is another. The
//! worker's own watch aborts the group when its launcher ends the generation, and drops it before it
//! parks; both abort the communicator. The step's results are complete, and may be kept and committed,
//! when `wait_all` has returned.
//!
//! ```no_run
//! use std::sync::Arc;
//! use muster_runtime::collective::nccl::{Communicator, Config, Elements, Library, NcclError, RawStream};
//! use muster_runtime::collective::{Group, Op};
//! use muster_runtime::live::Fault;
//!
//! struct Gpu {
//!     library: Arc<Library>,
//!     communicator: Option<Communicator>,
//! }
//!
//! impl Gpu {
//!     fn reduce(
//!         &mut self,
//!         group: &mut Group,
//!         buckets: &[(Elements, Elements)],
//!         stream: RawStream,
//!     ) -> Result<(), NcclError> {
//!         if !self.communicator.as_ref().is_some_and(|c| c.is_of(group)) {
//!             self.communicator = None;
//!             let formed = Communicator::form(&self.library, 0, group, Config::default())?;
//!             self.communicator = Some(formed);
//!         }
//!         let Some(nccl) = &mut self.communicator else { return Ok(()) };
//!         let mut reduced = Ok(());
//!         for (gradients, sums) in buckets {
//!             reduced = reduced.and_then(|_| {
//!                 nccl.all_reduce(Op::Mean, *gradients, *sums, stream).map(drop)
//!             });
//!         }
//!         reduced
//!             .and_then(|_| nccl.wait_all())
//!             .map_err(|error| nccl.blame(error, group))
//!     }
//! }
//!
//! // In `Training::results`:
//! fn fault(error: NcclError) -> Fault {
//!     match error.into_group() {
//!         Ok(passes) => Fault::Group(passes),
//!         Err(error) => Fault::Training(Box::new(error)),
//!     }
//! }
//! ```

mod communicator;
mod elements;
mod error;
mod forming;
mod library;
mod state;
mod sys;
mod watchdog;

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

pub use crate::cuda::{CudaError, Device, LibraryError, Memory, RawStream, Stream};
pub use communicator::{Communicator, Ticket};
pub use elements::Elements;
pub use error::{NcclError, Version};
pub use library::{LEAST_VERSION, Library};

/// The exit code of a process in which a call of NCCL never returned (`EX_OSERR`).
pub const STUCK_EXIT: i32 = 71;

/// A call of NCCL that did not return.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StuckCall {
    pub call: &'static str,
    pub waited: Duration,
    /// Why the communicator was to end.
    pub why: String,
}

impl std::fmt::Display for StuckCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} has not returned for {:?}, after: {}",
            self.call, self.waited, self.why
        )
    }
}

/// Handler of a call that does not return.
pub type OnStuck = Arc<dyn Fn(&StuckCall) + Send + Sync>;

/// How long a communicator waits for what.
#[derive(Clone)]
pub struct Config {
    /// For all ranks to form it.
    pub form_within: Duration,
    /// For an abort. NCCL waits in it for its own threads, and for the kernels of this process.
    pub abort_within: Duration,
    /// Called by the watchdog when that time is over. By default it ends the process. If it returns, the
    /// communicator is over with [`NcclError::Stuck`], and what the call holds is never freed.
    pub on_stuck: OnStuck,
}

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Config")
            .field("form_within", &self.form_within)
            .field("abort_within", &self.abort_within)
            .finish_non_exhaustive()
    }
}

impl Default for Config {
    fn default() -> Config {
        Config {
            form_within: Duration::from_secs(60),
            abort_within: Duration::from_secs(10),
            on_stuck: Arc::new(exit),
        }
    }
}

/// Ends the process at once. No handlers run: CUDA's own would wait for the device.
fn exit(stuck: &StuckCall) {
    // Nobody may be there to read it.
    let _written = writeln!(
        std::io::stderr(),
        "muster: {stuck}; this process ends, and the job goes on without it"
    );
    // SAFETY: it has no preconditions.
    unsafe { libc::_exit(STUCK_EXIT) }
}
