use proptest::prelude::*;

use super::*;

fn config(samples: u64, batch: Batch, microbatch: u64, tail: Tail) -> SamplerConfig {
    SamplerConfig {
        samples,
        seed: 11,
        batch,
        microbatch,
        tail,
    }
}

fn share(world: u32, rank: u32) -> Share {
    Share {
        entered: (0..world).collect(),
        rank,
        world,
    }
}

/// The samples that all ranks of a world train on in a step.
fn all_ranks(plan: &Plan, world: u32) -> Vec<u64> {
    let parts = (0..world).flat_map(|rank| plan.part(&share(world, rank)));
    parts
        .flat_map(|i| plan.indices(i).collect::<Vec<_>>())
        .collect()
}

/// Events between two steps, or in the middle of one.
#[derive(Clone, Debug)]
enum Turn {
    Commit,
    /// The step is begun, then a loss ends it.
    Abort,
    Resize(u32),
    /// From a checkpoint, with another size of microbatches.
    Resume(u64),
}

fn turns() -> impl Strategy<Value = Vec<Turn>> {
    let turn = prop_oneof![
        6 => Just(Turn::Commit),
        1 => Just(Turn::Abort),
        2 => (1u32..9).prop_map(Turn::Resize),
        1 => (1u64..7).prop_map(Turn::Resume),
    ];
    prop::collection::vec(turn, 1..120)
}

fn batches() -> impl Strategy<Value = Batch> {
    prop_oneof![
        (1u64..50).prop_map(Batch::Global),
        (1u64..12).prop_map(Batch::PerRank)
    ]
}

proptest! {
    #[test]
    fn every_sample_is_seen_once_an_epoch_whatever_the_world_does(
        samples in 1u64..120, batch in batches(), microbatch in 1u64..7, drop: bool, turns in turns(),
    ) {
        let tail = if drop { Tail::Drop } else { Tail::Keep };
        let mut sampler = Sampler::new(config(samples, batch, microbatch, tail)).unwrap();
        let (mut world, mut epoch, mut seen) = (1, 0, Vec::new());
        for turn in turns {
            match turn {
                Turn::Commit => {
                    let plan = sampler.plan(world as usize);
                    if plan.epoch() != epoch {
                        // The epoch before is over: all of it, or all but less than a batch.
                        prop_assert_eq!(plan.epoch(), epoch + 1);
                        let left = samples - seen.len() as u64;
                        let most = match tail {
                            Tail::Keep => 0,
                            Tail::Drop => batch.over(world as usize).min(samples) - 1,
                        };
                        prop_assert!(left <= most, "{} left", left);
                        seen.clear();
                        epoch = plan.epoch();
                    }
                    let step = all_ranks(&plan, world);
                    prop_assert_eq!(step.len() as u64, plan.samples());
                    prop_assert!(plan.samples() <= batch.over(world as usize));
                    seen.extend(step);
                    let mut once = seen.clone();
                    once.sort_unstable();
                    once.dedup();
                    prop_assert_eq!(once.len(), seen.len(), "a sample came twice");
                    prop_assert!(once.iter().all(|index| *index < samples));
                    sampler.commit(&plan).unwrap();
                }
                Turn::Abort => {
                    let (before, plan) = (sampler.state(), sampler.plan(world as usize));
                    let _begun = all_ranks(&plan, world);
                    prop_assert_eq!(sampler.state(), before);
                }
                Turn::Resize(to) => world = to,
                Turn::Resume(microbatch) => {
                    let state = State::decode(&sampler.state().encode()).unwrap();
                    prop_assert_eq!(state, sampler.state());
                    let config = SamplerConfig { microbatch, ..*sampler.config() };
                    sampler = Sampler::resume(config, state).unwrap();
                }
            }
        }
    }

    #[test]
    fn a_global_batch_is_the_same_in_every_world(
        samples in 1u64..9000, batch in 1u64..300, microbatch in 1u64..40, steps in 0usize..40,
    ) {
        let config = config(samples, Batch::Global(batch), microbatch, Tail::Keep);
        let mut sampler = Sampler::new(config).unwrap();
        for _ in 0..steps {
            let plan = sampler.plan(3);
            sampler.commit(&plan).unwrap();
        }
        let (one, many) = (sampler.plan(1), sampler.plan(7));
        prop_assert_eq!(all_ranks(&one, 1), all_ranks(&many, 7));
        prop_assert_eq!(one.positions(), many.positions());
        for i in 0..one.microbatches() {
            prop_assert_eq!(one.seed_of(i), many.seed_of(i));
            let len = one.indices(i).count() as u64;
            let last = i + 1 == one.microbatches();
            prop_assert!(len == microbatch || last && (1..microbatch).contains(&len));
        }
        prop_assert_eq!(one.indices(one.microbatches()).count(), 0);
    }

    /// So the sums of whole microbatches that survivors have finished are of use in a smaller world.
    #[test]
    fn the_batch_of_a_smaller_world_begins_that_of_a_larger_one(
        per_rank in 1u64..20, microbatch in 1u64..9, world in 2usize..9,
    ) {
        let sampler =
            Sampler::new(config(1000, Batch::PerRank(per_rank), microbatch, Tail::Keep)).unwrap();
        let (small, large) = (sampler.plan(world - 1), sampler.plan(world));
        prop_assert_eq!(small.samples(), per_rank * (world as u64 - 1));
        for i in 0..small.microbatches() {
            let (s, l): (Vec<_>, Vec<_>) = (small.indices(i).collect(), large.indices(i).collect());
            prop_assert!(l.starts_with(&s));
            prop_assert_eq!(small.seed_of(i), large.seed_of(i));
        }
    }

    #[test]
    fn damaged_states_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..60), flip in 0usize..40) {
        if let Some(state) = State::decode(&bytes) {
            prop_assert_eq!(&state.encode()[..], &bytes[..]);
        }
        let state = State { seed: 1, samples: 100, epoch: 2, position: 30 };
        let mut encoded = state.encode();
        encoded[flip] ^= 0x80;
        prop_assert!(State::decode(&encoded) != Some(state));
        prop_assert_eq!(State::decode(&state.encode()[..flip]), None);
    }
}

#[test]
fn epochs_and_seeds_shuffle_differently() {
    for samples in [100u64, 10_000] {
        let sampler = |seed| {
            let config = config(samples, Batch::Global(samples), 1000, Tail::Keep);
            Sampler::new(SamplerConfig { seed, ..config }).unwrap()
        };
        let (mut a, b) = (sampler(1), sampler(2));
        let first = all_ranks(&a.plan(1), 1);
        assert_ne!(first, all_ranks(&b.plan(1), 1));
        a.commit(&a.plan(1)).unwrap();
        assert_eq!((a.state().epoch, a.state().position), (1, 0));
        let second = all_ranks(&a.plan(1), 1);
        let fixed = first.iter().zip(&second).filter(|(a, b)| a == b).count();
        // One on average.
        assert!(fixed < 12, "{fixed} samples of {samples} stay in place");
    }
}

#[test]
fn mistakes_are_named() {
    let good = config(10, Batch::Global(4), 2, Tail::Keep);
    for (bad, what) in [
        (
            SamplerConfig { samples: 0, ..good },
            "the number of samples",
        ),
        (
            SamplerConfig {
                microbatch: 0,
                ..good
            },
            "the microbatch",
        ),
        (
            SamplerConfig {
                batch: Batch::PerRank(0),
                ..good
            },
            "the batch",
        ),
    ] {
        assert_eq!(Sampler::new(bad).unwrap_err(), SamplerError::Zero { what });
    }
    let mut sampler = Sampler::new(good).unwrap();
    let plan = sampler.plan(1);
    sampler.commit(&plan).unwrap();
    let error = sampler.commit(&plan).unwrap_err();
    assert!(
        matches!(
            error,
            SamplerError::OutOfOrder {
                theirs: 0,
                ours: 4,
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(sampler.state().position, 4);
    let other = State {
        seed: 12,
        ..sampler.state()
    };
    assert!(matches!(
        sampler.restore(other),
        Err(SamplerError::Other { .. })
    ));
    let outside = State {
        position: 10,
        ..sampler.state()
    };
    assert!(matches!(
        sampler.restore(outside),
        Err(SamplerError::Outside { .. })
    ));
    assert_eq!(sampler.epochs(), 0.4);
}

#[test]
fn a_batch_larger_than_the_data_set_is_the_data_set() {
    for tail in [Tail::Keep, Tail::Drop] {
        let mut sampler = Sampler::new(config(10, Batch::Global(64), 3, tail)).unwrap();
        for epoch in 0..3 {
            let plan = sampler.plan(2);
            assert_eq!(
                (plan.epoch(), plan.samples(), plan.microbatches()),
                (epoch, 10, 4)
            );
            sampler.commit(&plan).unwrap();
        }
    }
}
