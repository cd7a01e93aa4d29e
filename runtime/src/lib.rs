//! What a worker links: the agreed stop step, collectives between ranks, live membership, and what a
//! training loop needs around them ([`data`], [`schedule`], [`gradient`]), with the loop itself ([`train`]).
//!
//! The runtime talks to its launcher through one page of shared memory ([`session`]) and to other
//! ranks over TCP ([`collective`]). It installs no signal handler and never exits the process: every
//! failure, the loss of a peer among them, is a value that the caller gets. Only [`live`], [`train`] and
//! [`data::Loader`] start threads, which end with their owner.

pub mod checkpoint;
pub mod collective;
pub mod data;
pub mod demo;
pub mod env;
pub mod gradient;
pub mod live;
mod page;
mod random;
pub mod schedule;
pub mod session;
#[cfg(feature = "torch")]
pub mod torch;
pub mod train;

pub use env::{EnvError, WorkerEnv};
pub use session::{Directive, Session, SessionError};

#[cfg(test)]
mod needs_torch;
