//! Saves go before reads that verify older checkpoints: both take the same memory's and disk's time, and
//! training waits for the first.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// So long a reader waits before each chunk at most: about 40 MB/s are read while saves follow without a break.
const PATIENCE: Duration = Duration::from_millis(100);

/// Counts what is being saved.
#[derive(Clone, Debug, Default)]
pub(super) struct Way(Arc<Count>);

#[derive(Debug, Default)]
struct Count {
    saving: AtomicUsize,
    lock: Mutex<()>,
    over: Condvar,
}

/// Something is saved, until this is dropped.
#[derive(Debug)]
pub(super) struct Taken(Arc<Count>);

impl Way {
    pub(super) fn take(&self) -> Taken {
        self.0.saving.fetch_add(1, Ordering::SeqCst);
        Taken(Arc::clone(&self.0))
    }

    #[cfg(test)]
    pub(super) fn is_taken(&self) -> bool {
        self.0.saving.load(Ordering::SeqCst) > 0
    }

    /// Waits until nothing is saved, for a while.
    pub(super) fn give(&self) {
        let writes = || self.0.saving.load(Ordering::SeqCst) > 0;
        if writes() {
            let held = self.0.lock.lock().unwrap_or_else(PoisonError::into_inner);
            let over = &self.0.over;
            let _waited = over.wait_timeout_while(held, PATIENCE, |()| writes());
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.saving.fetch_sub(1, Ordering::SeqCst);
        // Whoever has looked and does not wait yet has the lock.
        drop(self.0.lock.lock());
        self.0.over.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_reader_waits_for_what_is_written_and_not_for_ever() {
        let way = Way::default();
        let began = Instant::now();
        way.give();
        assert!(began.elapsed() < PATIENCE, "nothing is written");
        let (first, second) = (way.take(), way.take());
        let began = Instant::now();
        way.give();
        assert!(began.elapsed() >= PATIENCE, "both are written");
        drop(first);
        let began = Instant::now();
        way.give();
        assert!(began.elapsed() >= PATIENCE, "one is still written");
        let reader = std::thread::spawn({
            let way = way.clone();
            move || {
                while way.0.saving.load(Ordering::SeqCst) > 0 {
                    way.give();
                }
            }
        });
        drop(second);
        reader.join().unwrap();
    }
}
