//! A few agents with hundreds of jobs: real agents (`Agent`) and real launchers' cores, whose workers are
//! those of [`crate::sim`]. Messages take a millisecond each and none is lost: what befalls a job is that its
//! launchers end in some way, and what befalls a node that it is down, and what it finds when it is back.

mod judge;
mod world;

pub use judge::{Broken, Judge};
pub use world::{Disk, Fate, Fleet, Job, Node, Traffic, secs};
