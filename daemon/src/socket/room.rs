//! Room that users share on the socket: one of them has a part of it at most, and some is kept for root and the
//! agent's own user. Connections take of it, and descriptors that came on one and are neither kept nor closed yet.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::process::{Resource, getrlimit};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::wire::CARRIED;
use super::{MAX_FDS, UNSETTLED, UNSETTLED_OF_ALL, UNSETTLED_PER_USER};

/// Of [`UNSETTLED_OF_ALL`], for root and the agent's own user.
const UNSETTLED_RESERVED: usize = 8;
/// The part of the descriptors that this process may open which others' unsettled ones take.
const PART_OF_LIMIT: usize = 4;

/// Descriptors that come with one frame at most: what it may have, and a message that it may not.
const MOST: usize = MAX_FDS + CARRIED;

/// Places of one kind.
#[derive(Debug)]
pub(super) struct Shares {
    all: Arc<Semaphore>,
    others: Arc<Semaphore>,
    per_user: usize,
    /// Of each user who has any, or had.
    users: Mutex<BTreeMap<u32, Arc<Semaphore>>>,
}

/// Of which places there are none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Full {
    User,
    Others,
    All,
}

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Full::User => "this user has half of all places",
            Full::Others => "the other places are reserved",
            Full::All => "all places are taken",
        })
    }
}

impl Shares {
    /// So many; so many of them for root and the agent's own user; so many for one of the others at most.
    pub(super) fn new(all: usize, reserved: usize, per_user: usize) -> Shares {
        Shares {
            all: Arc::new(Semaphore::new(all)),
            others: Arc::new(Semaphore::new(all.saturating_sub(reserved))),
            per_user,
            users: Mutex::default(),
        }
    }

    /// A place for this user, or why there is none.
    pub(super) fn try_take(&self, uid: u32) -> Result<Vec<OwnedSemaphorePermit>, Full> {
        let of = self.of(uid).into_iter();
        of.map(|(level, places)| places.try_acquire_owned().map_err(|_| level))
            .collect()
    }

    /// The pools from which a place of this user is taken, the narrowest first.
    fn of(&self, uid: u32) -> Vec<(Full, Arc<Semaphore>)> {
        let all = (Full::All, Arc::clone(&self.all));
        if uid == 0 || uid == rustix::process::geteuid().as_raw() {
            return vec![all];
        }
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        // Whoever has a place, or may wait for one, has it.
        users.retain(|_, places| Arc::strong_count(places) > 1);
        let own = users
            .entry(uid)
            .or_insert_with(|| Arc::new(Semaphore::new(self.per_user)));
        let own = (Full::User, Arc::clone(own));
        vec![own, (Full::Others, Arc::clone(&self.others)), all]
    }

    fn places_of(&self, uid: u32) -> Vec<Arc<Semaphore>> {
        self.of(uid).into_iter().map(|(_, places)| places).collect()
    }
}

/// Room for descriptors that are neither kept nor closed yet. Frames that have any are counted, for each may take a
/// thread to close them; and the descriptors, so that others' never use up what this process may open: it could not
/// take in a message's then, and would wait while the kernel closes them.
#[derive(Debug)]
pub(super) struct Room {
    frames: Shares,
    descriptors: Shares,
}

impl Room {
    /// By what this process may open now.
    pub(super) fn new() -> Room {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let part = usize::try_from(limit).unwrap_or(usize::MAX) / PART_OF_LIMIT;
        // However little that is: all frames of a user, and one that is read, must find room, and one of the
        // operator's.
        let least = MOST + 2 * (UNSETTLED_PER_USER * MAX_FDS + MOST);
        let all = part.clamp(least, UNSETTLED_OF_ALL * MOST);
        Room {
            frames: Shares::new(UNSETTLED_OF_ALL, UNSETTLED_RESERVED, UNSETTLED_PER_USER),
            descriptors: Shares::new(all, MOST, (all - MOST) / 2),
        }
    }

    /// The pools from which a connection of this user takes its places.
    pub(super) fn of(&self, uid: u32) -> Places {
        Places {
            frames: self.frames.places_of(uid),
            descriptors: self.descriptors.places_of(uid),
            ..Places::alone()
        }
    }
}

/// The pools from which one connection takes places for its unsettled descriptors.
#[derive(Debug)]
pub(super) struct Places {
    own: Arc<Semaphore>,
    frames: Vec<Arc<Semaphore>>,
    descriptors: Vec<Arc<Semaphore>>,
}

impl Places {
    /// Of a connection that shares with nobody.
    pub(super) fn alone() -> Places {
        Places {
            own: Arc::new(Semaphore::new(UNSETTLED)),
            frames: Vec::new(),
            descriptors: Vec::new(),
        }
    }

    /// Waits for the place of one frame, whatever comes with it. Always in one order, and nobody who waits here has one
    /// already that he waits with, so somebody goes on whenever something is closed.
    pub(super) async fn take(&self) -> Place {
        let mut place = Place::default();
        for of in std::iter::once(&self.own).chain(&self.frames) {
            // An error is impossible, for nobody closes it.
            place.frame.extend(Arc::clone(of).acquire_owned().await);
        }
        for of in &self.descriptors {
            let most = u32::try_from(MOST).unwrap_or(u32::MAX);
            let taken = Arc::clone(of).acquire_many_owned(most).await;
            place.descriptors.extend(taken);
        }
        place
    }
}

/// The place of a frame's descriptors, until it is dropped.
#[derive(Debug, Default)]
pub(super) struct Place {
    frame: Vec<OwnedSemaphorePermit>,
    descriptors: Vec<OwnedSemaphorePermit>,
}

impl Place {
    /// Gives back what is not needed for so many descriptors.
    pub(super) fn shrink(&mut self, came: usize) {
        for taken in &mut self.descriptors {
            drop(taken.split(taken.num_permits().saturating_sub(came)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No users of this process, nor root.
    const ONE: u32 = 65_501;
    const TWO: u32 = 65_502;

    #[test]
    fn a_user_takes_his_part_and_leaves_the_others_theirs() {
        let shares = Shares::new(10, 2, 4);
        let mut taken = Vec::new();
        for uid in [ONE, TWO] {
            for _ in 0..4 {
                taken.push(shares.try_take(uid).unwrap());
            }
            assert_eq!(shares.try_take(uid).unwrap_err(), Full::User);
        }
        assert_eq!(shares.try_take(65_503).unwrap_err(), Full::Others);
        for _ in 0..2 {
            taken.push(shares.try_take(0).unwrap());
        }
        assert_eq!(shares.try_take(0).unwrap_err(), Full::All);
        // Given back, and with the last of a user's nothing of him is left.
        taken.drain(..4);
        drop(shares.try_take(ONE).unwrap());
        assert_eq!(shares.try_take(TWO).unwrap_err(), Full::User);
        assert!(!shares.users.lock().unwrap().contains_key(&ONE));
    }

    #[tokio::test]
    async fn descriptors_count_as_many_as_came_and_leave_room_for_other_users() {
        let room = Room::new();
        let free = || room.descriptors.all.available_permits();
        let all = free();
        let mut place = room.of(ONE).take().await;
        assert_eq!(free(), all - MOST);
        place.shrink(2);
        assert_eq!(free(), all - 2);
        drop(place);
        assert_eq!(free(), all);
        // As many as one user gets.
        let (one, mut taken) = (room.of(ONE), Vec::new());
        loop {
            let more = tokio::time::timeout(std::time::Duration::from_millis(50), async {
                // Each on a connection of its own.
                room.of(ONE).take().await
            });
            match more.await {
                Ok(place) => taken.push(place),
                Err(_) => break,
            }
        }
        assert!((1..=UNSETTLED_PER_USER).contains(&taken.len()));
        for uid in [TWO, 0] {
            drop(room.of(uid).take().await);
        }
        taken.pop();
        drop(one.take().await);
    }
}
