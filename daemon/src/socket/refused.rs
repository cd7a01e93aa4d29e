//! Connections that are not taken. Data that lies in one goes with its last descriptor, and a thread that closes that
//! waits for the files that were sent with it.
//!
//! From Linux 6.16 on nothing of the kind lies there: the listener bars descriptors (`SO_PASSRIGHTS`), a connection
//! has that from the listener, and it is lifted from those that are taken. They are closed at once then, without a
//! thread.
//!
//! Before, no system call throws such a message away without waiting, nor says who calls before the connection is
//! there. So each user has one thread that closes his, one after the other, and those behind it stay as they are: a
//! descriptor each, up to [`Refused::places`] of all users together. Nobody else waits for them until these are taken;
//! then nothing is accepted until one is closed. A user gets there by having as many descriptors under way: the kernel
//! counts them against his own limit (`RLIMIT_NOFILE`, hard) as long as nobody touches them, so a lower one for users
//! rules it out.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::process::{Resource, getrlimit};
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::received::{Left, by_thread, left_in};

/// The part of the descriptors that this process may open which refused connections take, and the most.
const PART_OF_LIMIT: u64 = 4;
const MOST: usize = 16_384;

/// A place for one, taken before it is accepted.
pub(super) type Place = OwnedSemaphorePermit;

/// Those that cannot be closed at once.
#[derive(Debug)]
pub(super) struct Refused {
    places: Arc<Semaphore>,
    users: Users,
}

type Users = Arc<Mutex<BTreeMap<u32, User>>>;

/// Connections of one user that are to be closed.
#[derive(Debug, Default)]
struct User {
    waiting: VecDeque<(OwnedFd, Place)>,
    /// A thread closes them; it has one that waits no more.
    thread: bool,
}

impl Refused {
    pub(super) fn new() -> Refused {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let part = usize::try_from(limit / PART_OF_LIMIT).unwrap_or(MOST);
        Refused::with(part.clamp(1, MOST))
    }

    pub(super) fn with(places: usize) -> Refused {
        Refused {
            places: Arc::new(Semaphore::new(places)),
            users: Users::default(),
        }
    }

    /// Waits while as many as may be are not closed yet.
    pub(super) async fn place(&self) -> Option<Place> {
        // An error is impossible, for nobody closes it.
        Arc::clone(&self.places).acquire_owned().await.ok()
    }

    /// Closes it, when those of its user before it are closed.
    pub(super) fn close(&self, uid: u32, stream: UnixStream, place: Place) {
        let Left::Something(fd) = left_in(stream) else {
            return;
        };
        let mut users = lock(&self.users);
        let user = users.entry(uid).or_default();
        user.waiting.push_back((fd, place));
        if !user.thread {
            let all = Arc::clone(&self.users);
            // Without one they wait for the thread of the next.
            user.thread = by_thread(move || close_all(&all, uid));
        }
    }

    #[cfg(test)]
    fn places(&self) -> usize {
        self.places.available_permits()
    }

    /// How many of this user's his thread has not come to; none without a thread.
    #[cfg(test)]
    fn waiting(&self, uid: u32) -> Option<usize> {
        let users = lock(&self.users);
        users.get(&uid).map(|user| user.waiting.len())
    }
}

fn close_all(users: &Users, uid: u32) {
    loop {
        let mut all = lock(users);
        let Some(next) = all.get_mut(&uid).and_then(|user| user.waiting.pop_front()) else {
            all.remove(&uid);
            return;
        };
        drop(all);
        drop(next);
    }
}

fn lock(users: &Users) -> MutexGuard<'_, BTreeMap<u32, User>> {
    users.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
