//! Nodes as sets of processes: started, found by a mark in their environment, signalled, followed,
//! and ended at the latest when the test is.

mod asking;
mod bed;
mod events;
mod follow;
mod hosts;
mod points;
mod procs;
mod store;

pub(crate) use bed::Bed;
pub(crate) use events::{Group, Noted};
pub(crate) use follow::{Follow, Trained, python};
pub(crate) use hosts::Hosts;
pub(crate) use procs::started;
pub(crate) use store::{committed, metrics};

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

/// Nanoseconds of the clock that the workers note.
pub(crate) fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    u64::try_from(since.as_nanos()).unwrap()
}

/// A file of the project.
pub(crate) fn project(path: &str) -> String {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let full = PathBuf::from(root).join(path).canonicalize().unwrap();
    full.to_str().unwrap().to_owned()
}
