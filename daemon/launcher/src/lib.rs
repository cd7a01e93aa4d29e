//! Decisions of a launcher, without the processes, sockets and clocks that it decides about. The
//! driver is `daemon/cli/src/run/drive.rs`; the simulation has another.

mod report;
mod session;
pub mod signal;
pub mod slots;

pub use session::{Effect, Event, Left, Session, is_said_once, patience};
