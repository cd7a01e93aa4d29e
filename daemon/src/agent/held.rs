//! The checkpoint slots of this node's launchers, as descriptors: they outlive their launcher for a lease, and its
//! job's next launcher here gets them. Never maps a slot, and never looks into one: what is in it is the heir's to
//! judge.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use muster_protocol::{JobKey, LauncherId, Time};
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};

use crate::socket::{NoRoom, Received};

/// Ranks whose slots are kept: of one user, so that he leaves some to others, and of all.
const MAX_PER_USER: usize = 64;
const MAX_PER_NODE: usize = 128;

/// Slots of a rank.
const SLOTS: usize = 2;

/// The most bytes that a slot of so many bytes has besides them: its head, sums of its chunks, and a note.
const fn most_besides(capacity: u64) -> u64 {
    (65 << 20) + capacity / (256 << 10)
}

/// Why slots are not kept for an heir. The job goes on, and has no heir for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refused {
    #[error("{0} descriptors came for the two slots of a rank")]
    Count(usize),
    #[error("a descriptor is no memory whose size is sealed")]
    Foreign,
    #[error("a slot said to have {said} bytes is memory of {found}")]
    Size { said: u64, found: u64 },
    #[error(
        "the slots of {} ranks of one user, or {} of all, are kept already",
        MAX_PER_USER,
        MAX_PER_NODE
    )]
    TooMany,
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
}

/// A rank's slots.
#[derive(Debug)]
struct Rank {
    launcher: LauncherId,
    /// An heir's frame may still wait to be sent with them.
    slots: Arc<Received>,
    bytes: u64,
    /// Its launcher is gone: until when they wait for the next one.
    until: Option<Time>,
}

/// A job's slots that wait, or waited.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Left {
    pub(super) key: JobKey,
    pub(super) ranks: usize,
    pub(super) bytes: u64,
}

/// All that are kept.
#[derive(Debug, Default)]
pub(super) struct Held(BTreeMap<(JobKey, u16), Rank>);

impl Held {
    /// A launcher's slots of a local rank, each with room for an image of so many bytes.
    pub(super) fn keep(
        &mut self,
        key: &JobKey,
        launcher: LauncherId,
        k: u16,
        capacity: u64,
        mut slots: Received,
    ) -> Result<(), Refused> {
        let at = (key.clone(), k);
        // Those that it had are given up by their launcher, whatever these are.
        self.0.remove(&at);
        if slots.len() != SLOTS {
            return Err(Refused::Count(slots.len()));
        }
        let mut bytes = 0u64;
        for slot in slots.iter() {
            bytes = bytes.saturating_add(size(slot, capacity)?);
        }
        let of_user = self.0.keys().filter(|(other, _)| other.owner == key.owner);
        if of_user.count() >= MAX_PER_USER || self.0.len() >= MAX_PER_NODE {
            return Err(Refused::TooMany);
        }
        slots.settle();
        let until = None;
        let rank = Rank {
            launcher,
            slots: Arc::new(slots),
            bytes,
            until,
        };
        self.0.insert(at, rank);
        Ok(())
    }

    /// This launcher has no slots of the rank any more. It says so on each link: what another one left waits on, for
    /// this one may be its heir.
    pub(super) fn give_up(&mut self, key: &JobKey, launcher: LauncherId, k: u16) {
        let at = (key.clone(), k);
        if self
            .0
            .get(&at)
            .is_some_and(|rank| rank.launcher == launcher)
        {
            self.0.remove(&at);
        }
    }

    /// Whether the rank's slots that are kept are this launcher's.
    pub(super) fn is_of(&self, key: &JobKey, launcher: LauncherId, k: u16) -> bool {
        let kept = self.0.get(&(key.clone(), k));
        kept.is_some_and(|rank| rank.launcher == launcher)
    }

    /// A rank's slots are not taken in.
    pub(super) fn refuse(&mut self, key: &JobKey, k: u16) {
        self.0.remove(&(key.clone(), k));
    }

    /// The job's launcher here was told that all is over for it.
    pub(super) fn end(&mut self, key: &JobKey) {
        self.0.retain(|(other, _), _| other != key);
    }

    /// Jobs of which something is kept.
    pub(super) fn jobs(&self) -> Vec<JobKey> {
        let mut jobs: Vec<JobKey> = self.0.keys().map(|(key, _)| key.clone()).collect();
        jobs.dedup();
        jobs
    }

    /// Launchers of the job are gone: their slots wait for the next one from now on. None where they do already.
    pub(super) fn orphan(
        &mut self,
        key: &JobKey,
        gone: impl Fn(LauncherId) -> bool,
        until: Time,
    ) -> Option<Left> {
        let mut left = Left {
            key: key.clone(),
            ranks: 0,
            bytes: 0,
        };
        let live = self.of(key).filter(|rank| rank.until.is_none());
        for rank in live.filter(|rank| gone(rank.launcher)) {
            rank.until = Some(until);
            left.ranks += 1;
            left.bytes = left.bytes.saturating_add(rank.bytes);
        }
        (left.ranks > 0).then_some(left)
    }

    /// Slots that wait for this job's next launcher, by local rank. They wait on until that launcher has brought them
    /// back as its own. No descriptor is made for this: however many launchers ask and do not read, they cost none.
    pub(super) fn inherit(&self, key: &JobKey) -> Vec<(u16, Arc<Received>)> {
        let waiting = self.0.iter();
        let waiting = waiting.filter(|((of, _), rank)| of == key && rank.until.is_some());
        waiting
            .map(|((_, k), rank)| (*k, Arc::clone(&rank.slots)))
            .collect()
    }

    /// Slots that wait for a launcher no longer need to: the job is over.
    pub(super) fn over(&mut self, key: &JobKey) -> Option<Left> {
        self.drop_waiting(|of, _| of == key).pop()
    }

    /// The leases that are over.
    pub(super) fn expire(&mut self, now: Time) -> Vec<Left> {
        self.drop_waiting(|_, until| until <= now)
    }

    /// The first end of a lease.
    pub(super) fn due(&self) -> Option<Time> {
        self.0.values().filter_map(|rank| rank.until).min()
    }

    /// Bytes that wait.
    pub(super) fn waiting(&self) -> u64 {
        let waiting = self.0.values().filter(|rank| rank.until.is_some());
        waiting.map(|rank| rank.bytes).fold(0, u64::saturating_add)
    }

    /// Gives up what waits beyond so many bytes, job by job, whose lease ends first.
    pub(super) fn fit(&mut self, room: u64) -> Vec<Left> {
        let mut gone = Vec::new();
        while self.waiting() > room {
            let waiting = self.0.iter();
            let waiting = waiting.filter_map(|((key, _), rank)| Some((rank.until?, key.clone())));
            let Some((_, first)) = waiting.min() else {
                break;
            };
            gone.extend(self.over(&first));
        }
        gone
    }

    fn of(&mut self, key: &JobKey) -> impl Iterator<Item = &mut Rank> {
        let all = self.0.iter_mut();
        all.filter(move |((of, _), _)| of == key)
            .map(|(_, rank)| rank)
    }

    fn drop_waiting(&mut self, goes: impl Fn(&JobKey, Time) -> bool) -> Vec<Left> {
        let mut gone: Vec<Left> = Vec::new();
        self.0.retain(|(key, _), rank| {
            if !rank.until.is_some_and(|until| goes(key, until)) {
                return true;
            }
            match gone.last_mut().filter(|left| left.key == *key) {
                Some(left) => {
                    left.ranks += 1;
                    left.bytes = left.bytes.saturating_add(rank.bytes);
                }
                None => gone.push(Left {
                    key: key.clone(),
                    ranks: 1,
                    bytes: rank.bytes,
                }),
            }
            false
        });
        gone
    }
}

/// The bytes of a slot's memory.
fn size(slot: &OwnedFd, capacity: u64) -> Result<u64, Refused> {
    // Only memory of the kernel's own has seals, so nothing that is asked here waits for a user's file system.
    let seals = fcntl_get_seals(slot).map_err(|_| Refused::Foreign)?;
    if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
        return Err(Refused::Foreign);
    }
    let stat = fstat(slot.as_fd()).map_err(|_| Refused::Foreign)?;
    let found = u64::try_from(stat.st_size).unwrap_or(0);
    let besides = found.checked_sub(capacity);
    match besides.filter(|besides| *besides <= most_besides(capacity)) {
        Some(_) => Ok(found),
        None => Err(Refused::Size {
            said: capacity,
            found,
        }),
    }
}

#[cfg(test)]
mod tests;
