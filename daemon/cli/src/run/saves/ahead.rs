//! A file is written while its worker still fills the slot: what disks take then, nobody waits for later.
//!
//! Nothing is told of it. It is begun when a fill is seen, goes on when that is sealed, and waits, without a name, for
//! the ask to write it. Where that never comes, or the fill was given up, it is forgotten.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use muster_checkpoint::persist::{self, Fault};
use muster_checkpoint::place::Place as _;
use muster_checkpoint::slot::Slot;

use super::Place;

/// A file that is written ahead, until this is dropped.
#[derive(Debug)]
pub(super) struct Ahead {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    thread: Option<JoinHandle<Option<persist::Ahead>>>,
}

impl Ahead {
    /// For a slot that is being filled; by one part in `share` of a file's threads. None where no thread is left.
    pub(super) fn start(place: &Place, slot: &Arc<Slot>, share: usize) -> Option<Ahead> {
        let following = slot.follow()?;
        let (stop, done) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (store, options) = (place.store.clone(), place.io.options());
        let threads = (options.threads / share.max(1)).max(1);
        let (stops, counts) = (Arc::clone(&stop), Arc::clone(&done));
        let write = move || {
            let begun = store.begin_ahead(following, options)?;
            let written = begun.follow(threads, &stops, &counts);
            // It is written from the sealed slot. A fault that does not show again there makes saves slow.
            let failed = |fault: &Fault| match fault {
                Fault::Cancelled => {}
                fault => tracing::warn!(?fault, "a checkpoint's file was begun in vain"),
            };
            written.inspect_err(failed).ok()
        };
        let thread = std::thread::Builder::new().name("ahead".into());
        let thread = Some(thread.spawn(write).ok()?);
        Some(Ahead { stop, done, thread })
    }

    /// The flag that stops it, and the count of its bytes.
    pub(super) fn watched(&self) -> (Arc<AtomicBool>, Arc<AtomicU64>) {
        (Arc::clone(&self.stop), Arc::clone(&self.done))
    }

    /// Waits until all is written; none if it came to nothing.
    pub(super) fn wait(mut self) -> Option<persist::Ahead> {
        let written = self.thread.take()?.join().ok().flatten();
        if written.is_none() {
            self.done.store(0, Ordering::Relaxed);
        }
        written
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.stop.store(true, Ordering::Relaxed);
        }
    }
}
