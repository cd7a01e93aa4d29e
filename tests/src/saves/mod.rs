//! Saving, committing, retiring and restoring, as it may go wrong: the checkpoint cores of several
//! agents over one store and its log, in virtual time, from one seed. Agents crash between any two
//! effects and come back with what they persisted; machines lose what was not synced; the store is slow,
//! loses answers and lands puts late; two leaders are at work at once. After every event the invariants
//! are judged against what really lies in the store, by rules written down a second time.

mod agent;
mod claims;
mod disk;
mod drive;
mod log;
mod truth;
mod world;

pub use truth::Violation;
pub use world::{Counts, Drill, Plant, Report, run, run_with};
