//! Nodes as sets of processes: started, found by a mark in their environment, signalled, followed,
//! and ended at the latest when the test is.

mod bed;
mod events;
mod follow;
mod hosts;
mod procs;

pub(crate) use bed::Bed;
pub(crate) use events::Group;
pub(crate) use follow::{Follow, Trained, python};
pub(crate) use hosts::Hosts;
pub(crate) use procs::started;

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The bound of every wait that has no other. The usual time is well under a tenth of it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(40);

/// Polls until there is something, and returns it.
pub(crate) fn eventually<T>(limit: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Nanoseconds of the clock that the workers note.
pub(crate) fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    u64::try_from(since.as_nanos()).unwrap()
}

/// A program of the workspace, beside the tests.
pub(crate) fn program(name: &str) -> String {
    let test = std::env::current_exe().unwrap();
    let path: PathBuf = test.parent().unwrap().parent().unwrap().join(name);
    assert!(
        path.is_file(),
        "{} is missing: run tests/run, or first cargo build --workspace --bins",
        path.display()
    );
    path.to_str().unwrap().to_owned()
}

/// A file of the project.
pub(crate) fn project(path: &str) -> String {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let full = PathBuf::from(root).join(path).canonicalize().unwrap();
    full.to_str().unwrap().to_owned()
}
