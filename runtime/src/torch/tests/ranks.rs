//! Data-parallel training over several ranks: the same bits on all of them, whatever happens.

use super::*;
use crate::data::{Batch, SamplerConfig, Tail};
use crate::gradient::ScalerConfig;
use crate::gradient::compress::Codec;
use crate::live::{Share, Training};
use crate::schedule::{Base, Scaling, Schedule, Span};
use crate::train::{Codecs, Config, Feed, HeldOut, News, Parallel};

const STEPS: u64 = 9;

fn config() -> Config {
    let sampler = SamplerConfig {
        samples: SAMPLES.unsigned_abs(),
        seed: 3,
        batch: Batch::Global(20),
        microbatch: 3,
        tail: Tail::Keep,
    };
    let schedule = Schedule {
        rate: 0.05,
        base: Base::Constant,
        scaling: Scaling::None,
        warm_up: None,
    };
    Config::new(sampler, Span::Steps(STEPS), schedule)
}

fn training(
    seed: u64,
    overlap: Overlap,
    adjust: impl FnOnce(&TorchModel<()>, Config) -> Config,
) -> Parallel<TorchModel<()>> {
    let model = model(seed, overlap);
    let config = adjust(&model, config());
    let in_memory = || Feed::direct(|_| Ok(()));
    let held_out = HeldOut::new(in_memory(), 30, 7, Span::Steps(4));
    Parallel::new(model, in_memory(), config)
        .unwrap()
        .evaluated_by(held_out)
}

fn share(group: &Group) -> Share {
    Share {
        entered: (0..group.world()).collect(),
        rank: group.rank(),
        world: group.world(),
    }
}

fn step(training: &mut Parallel<TorchModel<()>>, step: u64, group: &mut Group) {
    let results = training.results(step, &share(group), group).unwrap();
    training.commit(step, &results);
    training.recycle(results);
}

/// Losses of the steps, and right answers of the evaluations.
fn heard(training: &mut Parallel<TorchModel<()>>) -> (Vec<f64>, Vec<f64>) {
    let news: Vec<News> = training.take_news().collect();
    let mut losses = Vec::new();
    let mut right = Vec::new();
    for news in news {
        match news {
            News::Step(report) => losses.push(report.training_loss),
            News::Evaluated(evaluation) => {
                right.extend(training.model().scores(&evaluation.measured));
            }
            News::Epoch(_) | News::Saved(_) | News::NotSaved { .. } => {}
        }
    }
    (losses, right)
}

/// All steps on so many ranks, each with its own initial values and its own way through backward.
fn train(
    world: u32,
    adjust: impl Fn(&TorchModel<()>, Config) -> Config + Sync,
) -> Vec<(Vec<u8>, Vec<f64>, Vec<f64>)> {
    on_ranks(world, |mut group| {
        let ways = [Overlap::Hooks, Overlap::Staged, Overlap::None];
        let rank = group.rank();
        let mut training = training(u64::from(rank), ways[rank as usize % 3], &adjust);
        assert_eq!(training.restore(&mut group).unwrap(), 0);
        for number in 0..STEPS {
            step(&mut training, number, &mut group);
        }
        let (losses, right) = heard(&mut training);
        (training.encode_state(), losses, right)
    })
}

#[test]
fn all_ranks_hold_the_same_bits() {
    let all = train(3, |_, config| config);
    assert!(all.iter().all(|rank| *rank == all[0]));
    let (_, losses, right) = &all[0];
    assert_eq!((losses.len(), right.len()), (STEPS as usize, 2));
    assert!(losses[8] < losses[0], "{losses:?}");
    assert!(
        right
            .iter()
            .all(|right| right.fract() == 0.0 && *right <= 30.0)
    );
}

#[test]
fn compression_and_loss_scaling_keep_the_bits_the_same() {
    let all = train(2, |model, config| {
        let codec = |bucket| Codec::PowerSgd {
            rank: 2,
            shapes: model.shapes(bucket),
        };
        Config {
            codecs: Codecs::Each((0..model.buckets().len()).map(codec).collect()),
            mixed: Some(ScalerConfig {
                initial: 1024.0,
                ..ScalerConfig::default()
            }),
            max_norm: Some(1.0),
            ..config
        }
    });
    assert_eq!(all[0], all[1]);
}

/// With a last stage that computes in 16 bits.
fn net_with_sixteen_bits(seed: u64) -> Net {
    let mut net = net(seed);
    net.stage("sixteen", |path| {
        let weight = path.var_copy("weight", &noise(&[4, 4], 9));
        move |x, _train| {
            let short = |tensor: &Tensor| tensor.to_kind(Kind::BFloat16);
            let product = short(x).matmul(&short(&weight));
            assert_eq!(product.kind(), Kind::BFloat16);
            product.to_kind(Kind::Float)
        }
    });
    net
}

#[test]
fn a_stage_that_casts_computes_in_sixteen_bits() {
    let all = on_ranks(2, |mut group| {
        let rank = group.rank();
        let options = Options {
            buckets: [10, 200],
            overlap: [Overlap::Hooks, Overlap::Staged][rank as usize],
            ..Options::new(Rule::momentum(0.9))
        };
        let parts = parts(net_with_sixteen_bits(u64::from(rank)));
        let model = TorchModel::new(parts, &options).unwrap();
        let config = Config {
            mixed: Some(ScalerConfig {
                initial: 1024.0,
                ..ScalerConfig::default()
            }),
            ..config()
        };
        let mut training = Parallel::new(model, Feed::direct(|_| Ok(())), config).unwrap();
        assert_eq!(training.restore(&mut group).unwrap(), 0);
        for number in 0..STEPS {
            step(&mut training, number, &mut group);
        }
        let (losses, _) = heard(&mut training);
        (training.encode_state(), losses)
    });
    assert_eq!(all[0], all[1]);
    let (_, losses) = &all[0];
    assert_eq!(losses.len(), STEPS as usize);
    assert!(losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
}

#[test]
fn survivors_redo_the_step_and_go_on_alike() {
    let held = testing::HeldPort::new();
    let next = held.port();
    let states = on_ranks(3, |group| survive(group, next));
    let [Some(one), Some(two), None] = &states[..] else {
        panic!("rank 2 is the one that is lost")
    };
    assert_eq!(one, two);
    // The samples are those of an undisturbed training, in another grouping; so is the loss, but for rounding.
    let (_, alone, _) = &train(1, |_, config| config)[0];
    for (got, expected) in one.1.iter().zip(alone) {
        assert!(
            (got - expected).abs() < 0.02 * expected,
            "{got}, not {expected}"
        );
    }
}

/// Rank 2 is lost in step 4. The others form the next group at this port.
fn survive(mut group: Group, next: u16) -> Option<(Vec<u8>, Vec<f64>)> {
    let rank = group.rank();
    // The seed of the training that is compared with is rank 0's.
    let mut training = training(u64::from(rank), Overlap::Hooks, |_, config| config);
    training.restore(&mut group).unwrap();
    for number in 0..4 {
        step(&mut training, number, &mut group);
    }
    if rank == 2 {
        return None;
    }
    let before = training.encode_state();
    let lost = training.results(4, &share(&group), &mut group);
    assert!(lost.is_err());
    assert_eq!(
        training.encode_state(),
        before,
        "the step was not committed"
    );
    let next = GroupConfig {
        sharing: Sharing::Auto,
        ..testing::group_config(rank, 2, next)
    };
    let mut group = Group::form(&next).unwrap();
    for number in 4..STEPS {
        step(&mut training, number, &mut group);
    }
    let (losses, _) = heard(&mut training);
    Some((training.encode_state(), losses))
}
