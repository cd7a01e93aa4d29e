//! In which order what was sealed is brought to other nodes, and what is passed over when saves come faster than that.
//! Never waits, and reads no clock.
//!
//! A save that was begun is finished, of all ranks here, before a newer one is: else only the first stripes of each
//! would ever be sent. Of those that wait the newest is the next. Parity of a save is worth something when all nodes of
//! a group send it, and none knows how fast the others are; so a node that is behind sends only saves whose step is one
//! in two, four, or more, the same ones that any other node that is behind sends, too.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use muster_protocol::Digest;
use muster_protocol::local::{Replicated, SaveNews};

/// After a failure, and how often something is tried.
const AGAIN: Duration = Duration::from_secs(1);
const TRIES: u32 = 60;

/// A node that is behind sends one save in so many, as a power of two, at most.
const MAX_LEVEL: u32 = 4;

/// Saves that have to be whole in a row before it sends more of them.
const EASED: u32 = 8;

/// Saves of which something is remembered.
const REMEMBERED: usize = 64;

/// How the saves of this node get on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Newest saves in a row of which other nodes do not hold all that they are to.
    pub behind: u64,
    /// Such saves since the beginning, and those of them that came too fast.
    pub missed: u64,
    pub slow: u64,
    /// The newest step of which they hold all.
    pub whole: Option<u64>,
}

impl Standing {
    /// As the agent is told.
    pub fn news(self) -> SaveNews {
        SaveNews::Replicas(Replicated {
            behind: self.behind,
            missed: self.missed,
            whole: self.whole,
        })
    }
}

/// Something that is to be brought: with others of its image, and of its save.
#[derive(Clone, Debug)]
pub(super) struct Item<J> {
    pub(super) job: J,
    pub(super) generation: Digest,
    pub(super) step: u64,
    pub(super) file: String,
    /// How many there are of this image.
    pub(super) all: usize,
    /// It is of use only if other nodes send theirs of the same save.
    pub(super) shared: bool,
}

/// Why something is not in the queue any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    Held,
    /// Newer ones came, or it was overwritten, before it was sent.
    Slow,
    /// The node that is to hold it does not.
    Failed,
    /// Nobody wants it: its generation is over.
    Over,
}

#[derive(Debug)]
struct Waiting<J> {
    item: Item<J>,
    tries: u32,
    at: Instant,
}

#[derive(Debug, Default)]
struct Progress {
    /// Items in the queue, or being brought.
    left: usize,
    /// Of each image, how much is held of how much.
    images: BTreeMap<String, (usize, usize)>,
    missed: Option<Left>,
    /// The local ranks that have sealed it, and how many there are.
    sealed: BTreeSet<u16>,
    ranks: u16,
}

impl Progress {
    /// Whether every rank here has sealed it, and all of that is held.
    fn is_whole(&self) -> bool {
        let held = |(held, all): &(usize, usize)| held >= all;
        self.sealed.len() >= usize::from(self.ranks) && self.images.values().all(held)
    }
}

#[derive(Debug)]
pub(super) struct Queue<J> {
    /// In the order in which it came.
    waiting: Vec<Waiting<J>>,
    generation: Digest,
    /// The step that was begun, as long as some of it was not tried.
    begun: Option<u64>,
    /// By step.
    saves: BTreeMap<u64, Progress>,
    standing: Standing,
    /// Steps that were counted as missed.
    missed: BTreeSet<u64>,
    level: u32,
    eased: u32,
}

/// Whether a save is one that all nodes send that are so far behind.
fn is_chosen(step: u64, level: u32) -> bool {
    // SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): steps that are saved are multiples of something.
    let mut mixed = step.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed ^ (mixed >> 31)).trailing_zeros() >= level
}

impl<J> Queue<J> {
    pub(super) fn new() -> Queue<J> {
        Queue {
            waiting: Vec::new(),
            generation: Digest::ZERO,
            begun: None,
            saves: BTreeMap::new(),
            standing: Standing::default(),
            missed: BTreeSet::new(),
            level: 0,
            eased: 0,
        }
    }

    pub(super) fn standing(&self) -> Standing {
        self.standing
    }

    /// Whether nothing was too slow for some time.
    pub(super) fn is_at_ease(&self) -> bool {
        self.level == 0
    }

    /// When there is something to do.
    pub(super) fn next_at(&self) -> Option<Instant> {
        self.waiting.iter().map(|waiting| waiting.at).min()
    }

    /// Takes this in. An older item of the same rank that waits goes, unless its save was begun.
    pub(super) fn add(&mut self, item: Item<J>, now: Instant) {
        if item.generation != self.generation {
            self.begin(item.generation);
        }
        // A rank that has nothing to bring may have sealed it first.
        let known = self.saves.get(&item.step);
        let known = known.is_some_and(|save| !save.images.is_empty());
        if item.shared && !known && !is_chosen(item.step, self.level) {
            self.saves.remove(&item.step);
            self.misses(item.step, true);
            return;
        }
        let begun = self.begun;
        let older = |waiting: &mut Waiting<J>| {
            let finishes = begun == Some(waiting.item.step) && waiting.tries == 0;
            waiting.item.file == item.file && waiting.item.step < item.step && !finishes
        };
        let gone: Vec<Waiting<J>> = self.waiting.extract_if(.., older).collect();
        for Waiting { item, tries, .. } in gone {
            let why = match tries {
                0 => Left::Slow,
                _ => Left::Failed,
            };
            self.leave(&item, why);
        }
        let progress = self.saves.entry(item.step).or_default();
        progress.left += 1;
        let image = progress.images.entry(item.file.clone());
        image.or_insert((0, 0)).1 = item.all;
        self.forget();
        self.waiting.push(Waiting {
            item,
            tries: 0,
            at: now,
        });
    }

    /// One of so many local ranks has sealed a save, and what of it is to be brought was added. A save is whole once
    /// that is true of all of them.
    pub(super) fn sealed(&mut self, generation: Digest, step: u64, rank: u16, ranks: u16) {
        if generation != self.generation {
            self.begin(generation);
        }
        if self.missed.contains(&step) {
            return;
        }
        let progress = self.saves.entry(step).or_default();
        progress.sealed.insert(rank);
        progress.ranks = ranks;
        self.forget();
        self.settle(step);
    }

    fn forget(&mut self) {
        while self.saves.len() > REMEMBERED {
            self.saves.pop_first();
        }
    }

    /// The item to be brought now, and how often that was tried. It is over with [`leave`](Self::leave), or not with
    /// [`again`](Self::again).
    pub(super) fn take(&mut self, now: Instant) -> Option<(Item<J>, u32)> {
        let new = |waiting: &Waiting<J>| waiting.tries == 0;
        let of_begun = |waiting: &Waiting<J>| new(waiting) && Some(waiting.item.step) == self.begun;
        let at = self.waiting.iter().position(of_begun).or_else(|| {
            let steps = self.waiting.iter().filter(|waiting| new(waiting));
            let newest = steps.map(|waiting| waiting.item.step).max()?;
            let is_it = |waiting: &Waiting<J>| new(waiting) && waiting.item.step == newest;
            self.waiting.iter().position(is_it)
        });
        let at = match at {
            Some(at) => {
                self.begun = self.waiting.get(at).map(|waiting| waiting.item.step);
                at
            }
            None => {
                self.begun = None;
                self.waiting.iter().position(|waiting| waiting.at <= now)?
            }
        };
        let Waiting { item, tries, .. } = self.waiting.remove(at);
        Some((item, tries))
    }

    /// It was tried in vain.
    pub(super) fn again(&mut self, item: Item<J>, tries: u32, now: Instant) {
        let tries = tries + 1;
        if tries >= TRIES {
            return self.leave(&item, Left::Failed);
        }
        let at = now + AGAIN;
        self.waiting.push(Waiting { item, tries, at });
    }

    /// Nothing of it is to be done any more.
    pub(super) fn leave(&mut self, item: &Item<J>, why: Left) {
        if item.generation != self.generation {
            return;
        }
        let Some(progress) = self.saves.get_mut(&item.step) else {
            return;
        };
        progress.left = progress.left.saturating_sub(1);
        match why {
            Left::Held => {
                if let Some((held, _)) = progress.images.get_mut(&item.file) {
                    *held += 1;
                }
            }
            Left::Over => drop(self.saves.remove(&item.step)),
            Left::Slow | Left::Failed => {
                progress.missed.get_or_insert(why);
            }
        }
        self.settle(item.step);
    }

    /// Counts a save of which nothing is to be done any more.
    fn settle(&mut self, step: u64) {
        let Some(progress) = self.saves.get(&step).filter(|save| save.left == 0) else {
            return;
        };
        if let Some(why) = progress.missed {
            self.saves.remove(&step);
            let slow = why == Left::Slow;
            if self.misses(step, slow) && slow {
                self.eased = 0;
                self.level = (self.level + 1).min(MAX_LEVEL);
            }
        } else if self.missed.contains(&step) {
            // What a later rank sealed of it.
            self.saves.remove(&step);
        } else if progress.is_whole() {
            self.saves.remove(&step);
            self.is_whole(step);
        }
    }

    /// Of this save something does not get there. Whether that is news.
    fn misses(&mut self, step: u64, slow: bool) -> bool {
        // Each rank's images are asked for by themselves.
        if !self.missed.insert(step) {
            return false;
        }
        while self.missed.len() > REMEMBERED {
            self.missed.pop_first();
        }
        self.standing.behind += u64::from(Some(step) > self.standing.whole);
        self.standing.missed += 1;
        self.standing.slow += u64::from(slow);
        true
    }

    fn is_whole(&mut self, step: u64) {
        if Some(step) > self.standing.whole {
            self.standing.whole = Some(step);
            let newer = self.missed.range(step..).count();
            self.standing.behind = u64::try_from(newer).unwrap_or(u64::MAX);
        }
        self.eased += 1;
        if self.eased >= EASED {
            self.eased = 0;
            self.level = self.level.saturating_sub(1);
        }
    }

    pub(super) fn begin(&mut self, generation: Digest) {
        let standing = Standing {
            behind: 0,
            whole: None,
            ..self.standing
        };
        *self = Queue {
            generation,
            standing,
            ..Queue::new()
        };
    }
}

#[cfg(test)]
mod tests;
