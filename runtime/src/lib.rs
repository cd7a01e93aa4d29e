//! The library that a worker links: the agreed stop step, collectives between ranks, live membership, and the needs of
//! a training loop around them ([`data`], [`schedule`], [`gradient`]), with the loop itself ([`train`]).
//!
//! The runtime talks to its launcher through one page of shared memory ([`session`]) and to other
//! ranks over TCP ([`collective`]), or between GPUs by NCCL. It installs no signal handler, and exits the
//! process only where NCCL cannot be made to let go: every other failure, the loss of a peer among
//! them, is a value that the caller gets. Only [`live`], [`train`],
//! [`data::Loader`] and a communicator of NCCL start threads, which end with their owner.

pub mod checkpoint;
pub mod collective;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod data;
pub mod demo;
pub mod env;
pub mod gradient;
pub mod live;
pub mod memory;
mod page;
mod random;
pub mod saving;
pub mod schedule;
pub mod session;
#[cfg(feature = "torch")]
pub mod torch;
pub mod train;
mod wide;

pub use env::{EnvError, WorkerEnv};
pub use session::{Directive, Metrics, Session, SessionError, Waits};

#[cfg(test)]
mod needs_torch;
#[cfg(test)]
mod testing;
