//! Where a reader that knows nothing of a log begins: at the newest snapshot that it finds.
//!
//! The log is dense, so that of the slots in which snapshots stand those up to some slot exist, and none beyond. That
//! one is found in a few rounds, each of several reads at once. A slot that seems empty and is not (a cached answer),
//! or that holds another entry, costs a longer walk and nothing else.

use std::collections::{BTreeSet, VecDeque};

/// How many slots are looked at in one round.
const ROUND: u64 = 15;

/// How many reads may fail before slots that cannot be read are left out: about ten seconds.
const MAX_FAILURES: u32 = 10;

/// The search for the last of the slots in which snapshots stand.
#[derive(Clone, Debug)]
pub(super) struct Search {
    every: u64,
    /// Slots that this round still has to read.
    wanted: VecDeque<u64>,
    /// Those that are being read.
    under_way: BTreeSet<u64>,
    /// In multiples of `every`: the last that is known to exist, and the first above it that seemed not to.
    there: u64,
    absent: Option<u64>,
    failures: u32,
    /// Slots that could not be read.
    left_out: BTreeSet<u64>,
}

impl Search {
    pub(super) fn new(every: u64) -> Search {
        Search {
            every,
            wanted: VecDeque::from([every]),
            under_way: BTreeSet::new(),
            there: 0,
            absent: None,
            failures: 0,
            left_out: BTreeSet::new(),
        }
    }

    /// The next slot to read now.
    pub(super) fn take(&mut self) -> Option<u64> {
        let slot = self.wanted.pop_front()?;
        self.under_way.insert(slot);
        Some(slot)
    }

    /// Nothing is left to be read.
    pub(super) fn is_over(&self) -> bool {
        self.wanted.is_empty() && self.under_way.is_empty()
    }

    pub(super) fn found(&mut self, slot: u64) {
        self.there = self.there.max(slot / self.every);
        self.answered(slot);
    }

    pub(super) fn absent(&mut self, slot: u64) {
        let at = slot / self.every;
        self.absent = Some(self.absent.map_or(at, |known| known.min(at)));
        self.answered(slot);
    }

    /// It is read again, a few times.
    pub(super) fn failed(&mut self, slot: u64) {
        self.failures += 1;
        if self.failures > MAX_FAILURES {
            self.left_out.insert(slot);
            return self.answered(slot);
        }
        if self.under_way.remove(&slot) {
            self.wanted.push_front(slot);
        }
    }

    fn answered(&mut self, slot: u64) {
        self.under_way.remove(&slot);
        if self.is_over() {
            self.round();
        }
    }

    fn round(&mut self) {
        let there = self.there;
        let points: Vec<u64> = match self.absent.filter(|at| *at > there) {
            Some(_) if there == 0 => return,
            Some(absent) => {
                let step = (absent - there).div_ceil(ROUND + 1).max(1);
                let all = (1..=ROUND).map(|k| there.saturating_add(k * step));
                all.take_while(|at| *at < absent).collect()
            }
            None => {
                // An empty slot below one that is there was a cached answer.
                self.absent = None;
                (1..=ROUND)
                    .filter_map(|k| there.max(1).checked_mul(1 << k))
                    .collect()
            }
        };
        let slots = points.iter().filter_map(|at| at.checked_mul(self.every));
        let slots = slots.filter(|slot| !self.left_out.contains(slot));
        self.wanted.extend(slots);
    }
}
