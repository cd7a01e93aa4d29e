//! The simulation: many agents, virtual time, one seed.
//!
//! ```text
//! setup      what a run begins with, and its faults: drawn from the seed, as `focus` says
//! conductor  draws when and whether things happen, and turns that into steps
//! step       one concrete thing that happens
//! world      carries a step out: agents, disks, launchers, store
//! trace      steps as lines, for people
//! truth      what is really so
//! invariants what must be so after every step; liveness at the end
//! log        steps in a file, and their replay
//! ```
//!
//! Nothing below the conductor draws a number, so a log of steps can be replayed without it.

pub mod clock;
pub mod conductor;
pub mod coverage;
mod faults;
pub mod focus;
pub mod invariants;
pub mod launcher;
pub mod liveness;
pub mod log;
pub mod net;
pub mod rng;
pub mod run;
pub mod setup;
pub mod step;
pub mod store;
pub mod trace;
pub mod truth;
pub mod world;
