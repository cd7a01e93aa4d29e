//! Memory that is given back: by a thread, for the kernel takes its time over gigabytes, and whoever lets them go may
//! hold a lock, or be the driver.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use muster_checkpoint::slot::{Replica, Room, View};

use super::parities::Piece;
use super::serve::lock;

/// Memory that nobody needs any more.
#[derive(Debug)]
pub(super) enum Freed {
    Room(Room),
    Copy(Arc<Replica>),
    Parity(Vec<Arc<Mutex<Piece>>>),
    /// Content of slots that were given up for others.
    Slot(View),
}

/// Where that goes.
#[derive(Clone, Debug)]
pub struct Freeing {
    queue: Sender<Freed>,
    /// How much of it is still there.
    left: Arc<(Mutex<usize>, Condvar)>,
}

impl Freeing {
    /// With a thread that gives back what comes.
    ///
    /// # Errors
    /// No thread is left.
    pub(super) fn start() -> std::io::Result<Freeing> {
        let (freeing, queue) = Freeing::new();
        let left = freeing.left.clone();
        let thread = std::thread::Builder::new().name("freed".into());
        thread.spawn(move || {
            for freed in queue {
                free(freed, &left);
            }
        })?;
        Ok(freeing)
    }

    fn new() -> (Freeing, Receiver<Freed>) {
        let (queue, freed) = channel();
        let left = Arc::default();
        (Freeing { queue, left }, freed)
    }

    /// With nobody who gives anything back but the test, by [`Kept::free`].
    #[cfg(test)]
    pub(super) fn by_hand() -> (Freeing, Kept) {
        let (freeing, queue) = Freeing::new();
        let left = freeing.left.clone();
        (freeing, Kept { queue, left })
    }

    pub(super) fn free(&self, freed: Freed) {
        *lock(&self.left.0) += 1;
        // Without its thread, which nothing ends: at once.
        if let Err(back) = self.queue.send(freed) {
            free(back.0, &self.left);
        }
    }

    /// Waits until what was let go so far is back, for so long at most: who makes new memory in its place comes behind
    /// it.
    pub fn settle(&self, longest: Duration) {
        let until = Instant::now() + longest;
        let (left, changed) = &*self.left;
        let mut left = lock(left);
        while *left > 0 {
            let wait = until.saturating_duration_since(Instant::now());
            if wait.is_zero() {
                return;
            }
            let waited = changed.wait_timeout(left, wait);
            left = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

fn free(freed: Freed, left: &(Mutex<usize>, Condvar)) {
    match freed {
        Freed::Room(room) => drop(room),
        Freed::Copy(copy) => drop(copy),
        Freed::Parity(pieces) => drop(pieces),
        Freed::Slot(view) => drop(view),
    }
    *lock(&left.0) -= 1;
    left.1.notify_all();
}

/// Memory that was let go, and is not given back yet.
#[cfg(test)]
pub(super) struct Kept {
    queue: Receiver<Freed>,
    left: Arc<(Mutex<usize>, Condvar)>,
}

#[cfg(test)]
impl Kept {
    /// Gives it all back; how many things that were.
    pub(super) fn free(&self) -> usize {
        let all: Vec<Freed> = self.queue.try_iter().collect();
        let count = all.len();
        all.into_iter().for_each(|freed| free(freed, &self.left));
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_goes_on_when_all_is_given_back() {
        const LONG: Duration = Duration::from_secs(60);
        let (freeing, kept) = Freeing::by_hand();
        freeing.settle(LONG);
        freeing.free(Freed::Room(Room::create(1 << 20).unwrap()));
        freeing.settle(Duration::from_millis(1));
        assert_eq!(*lock(&freeing.left.0), 1, "it is bounded");
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| freeing.settle(LONG));
            assert_eq!(kept.free(), 1);
            waits.join().unwrap();
        });
        assert_eq!(*lock(&freeing.left.0), 0);
        let freeing = Freeing::start().unwrap();
        for _ in 0..20 {
            freeing.free(Freed::Room(Room::create(1 << 20).unwrap()));
        }
        freeing.settle(LONG);
        assert_eq!(*lock(&freeing.left.0), 0);
    }
}
