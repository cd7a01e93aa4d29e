//! Never fewer than two that are known to be good: the keeper beside a model of a few lines, over many random
//! histories with pins, rejections, damage and what cannot be read. Each follows from its seed.

use std::collections::BTreeMap;

use super::*;
use crate::record::CommitRef;
use crate::rng::Rng;
use crate::storelog::Body;

const SEEDS: u64 = 2_000;
const EVENTS: usize = 60;

/// State of a commit by the log and the store.
#[derive(Clone, Debug, Default)]
struct Known {
    good: bool,
    unreadable: bool,
    pinned: bool,
    rejected: bool,
    /// Its REJECT or RETIRE is on its way.
    rejecting: bool,
    retiring: bool,
    retired: bool,
    in_use: bool,
}

impl Known {
    fn counts(&self) -> bool {
        self.good && !(self.rejected || self.rejecting || self.retired || self.retiring)
    }
}

/// By slot.
type Model = BTreeMap<u64, Known>;

fn counting(model: &Model) -> usize {
    model.values().filter(|k| k.counts()).count()
}

/// Whether this one may go, as it is said in the handbook.
fn may_go(model: &Model, seq: u64) -> bool {
    let Some(of) = model.get(&seq) else {
        return false;
    };
    let mut after = model.clone();
    after.remove(&seq);
    let leaves_two = counting(&after) >= 2;
    let free = !(of.retired || of.retiring || of.pinned || of.in_use);
    free && (of.rejected || !of.unreadable && leaves_two)
}

fn commit(seq: u64) -> CommitRef {
    CommitRef {
        generation: Digest([1; 32]),
        number: seq,
        step: 10 * seq,
        manifest: Digest([seq as u8; 32]),
    }
}

struct Case {
    keeper: Keeper,
    model: Model,
    rng: Rng,
    generations: u8,
    retired: usize,
}

impl Case {
    fn new(seed: u64) -> Case {
        Case {
            keeper: Keeper::new(Flaws::default()),
            model: Model::new(),
            rng: Rng::new(seed),
            generations: 0,
            retired: 0,
        }
    }

    /// Any slot, or one that holds no commit.
    fn any(&mut self) -> u64 {
        self.rng.below(self.model.len() as u64 + 1)
    }

    fn known(&mut self, seq: u64, change: impl FnOnce(&mut Known)) {
        if let Some(known) = self.model.get_mut(&seq) {
            change(known);
        }
    }

    fn event(&mut self) {
        let seq = self.any();
        let why = || String::from("cut");
        match self.rng.below(16) {
            0 => {
                self.generations += 1;
                let restore = self.model.contains_key(&seq).then(|| commit(seq));
                let generation = Digest([self.generations; 32]);
                (self.model.iter_mut()).for_each(|(of, k)| k.in_use = *of == seq);
                self.keeper.handle(KeeperEvent::Claimed {
                    generation,
                    restore,
                });
            }
            1 => {
                let generation = Digest([self.generations; 32]);
                self.model.values_mut().for_each(|k| k.in_use = false);
                self.keeper.handle(KeeperEvent::Loaded { generation });
            }
            2..=4 => {
                let seq = self.model.len() as u64;
                self.model.insert(seq, Known::default());
                let commit = commit(seq);
                self.keeper.handle(KeeperEvent::Committed { seq, commit });
            }
            5..=8 => self.checked(seq, State::Verified),
            9 => self.checked(seq, State::Unchecked),
            10 => self.checked(seq, State::Unreadable { why: why() }),
            11 => self.checked(seq, State::Damaged { why: why() }),
            12 => {
                // Also by a person.
                self.known(seq, |k| (k.rejected, k.rejecting) = (true, false));
                self.keeper.handle(KeeperEvent::Rejected { seq });
            }
            13 => {
                self.known(seq, |k| k.pinned = true);
                self.keeper.handle(KeeperEvent::Pinned { seq });
            }
            14 => {
                self.known(seq, |k| k.pinned = false);
                self.keeper.handle(KeeperEvent::Unpinned { seq });
            }
            _ => {
                // A RETIRE that came to nothing.
                self.known(seq, |k| (k.retiring, k.rejecting) = (false, false));
                self.keeper.handle(KeeperEvent::NotAppended { seq });
            }
        }
        self.effects();
    }

    fn checked(&mut self, seq: u64, state: State) {
        let (good, unreadable) = (
            state == State::Verified,
            matches!(state, State::Unreadable { .. }),
        );
        let damaged = matches!(state, State::Damaged { .. });
        self.known(seq, |k| {
            (k.good, k.unreadable) = (good, unreadable);
            k.rejecting |= damaged && !(k.rejected || k.retired);
        });
        self.keeper.handle(KeeperEvent::Checked { seq, state });
    }

    /// Somebody wants all of these gone, the ones that stay among them.
    fn decide(&mut self) {
        let all: Vec<u64> = (0..=self.model.len() as u64).collect();
        let retire: Vec<u64> = (all.into_iter())
            .filter(|_| self.rng.below(3) > 0)
            .collect();
        let mut wanted = Vec::new();
        for seq in &retire {
            if may_go(&self.model, *seq) {
                self.known(*seq, |k| k.retiring = true);
                wanted.push(*seq);
            }
        }
        let delete = Vec::new();
        self.keeper
            .handle(KeeperEvent::Decided(Decision { retire, delete }));
        let went = self.effects();
        assert_eq!(went, wanted, "{:#?}", self.model);
    }

    /// Slots whose RETIRE is asked for. Some of what is asked for is read in the log at once.
    fn effects(&mut self) -> Vec<u64> {
        let mut went = Vec::new();
        for effect in drain(|| self.keeper.poll_effect()) {
            let KeeperEffect::Append(Body::Retire { seq, good }) = effect else {
                continue;
            };
            // It names who is left: others that are known to be good.
            let of = |at: u64| self.model.get(&at).filter(|k| k.good && !k.rejected);
            match good {
                Some(two) => {
                    assert!(two[0] < two[1] && !two.contains(&seq), "{two:?}");
                    assert!(two.iter().all(|at| of(*at).is_some()), "{two:?}");
                }
                None => assert!(self.model.get(&seq).is_some_and(|k| k.rejected)),
            }
            went.push(seq);
            self.retired += 1;
            if self.rng.below(2) == 0 {
                self.known(seq, |k| (k.retired, k.retiring) = (true, false));
                self.keeper.handle(KeeperEvent::Retired { seq });
            }
        }
        went
    }
}

#[test]
fn whatever_happens_only_what_leaves_two_good_ones_or_is_rejected_goes() {
    let (mut retired, mut spared) = (0, 0);
    for seed in 0..SEEDS {
        let mut case = Case::new(seed);
        for _ in 0..EVENTS {
            case.event();
            if case.rng.below(4) == 0 {
                let (before, good) = (case.retired, counting(&case.model));
                case.decide();
                retired += case.retired - before;
                // Nothing that is decided takes the second one.
                let left = counting(&case.model);
                assert!(
                    left >= good.min(2),
                    "seed {seed}: {left} of {good} are left"
                );
                spared += usize::from(good > 0 && left == good.min(2));
                let known: Vec<u64> = case.keeper.verified().collect();
                assert_eq!(known.len(), left, "seed {seed}");
            }
        }
    }
    // The histories are such that it matters.
    assert!(retired > 1_000 && spared > 1_000, "{retired} and {spared}");
}
