//! Several ranks in threads of one process, with a small network.

mod durable;
mod elastic;
mod handing;
mod harness;
mod later;
mod model;
mod saving;
mod steps;

use std::time::Duration;

use super::trainer::{Aside, in_place};
use super::*;
use crate::collective::{Group, GroupConfig, Sharing};
use crate::data::{Batch, SamplerConfig, Tail};
use crate::env::WorkerEnv;
use crate::gradient::compress::{Codec, Shape};
use crate::live::{Share, Training};
use crate::schedule::{Base, Scaling, Schedule, Span};
use crate::testing::{HeldPort, on_ranks_with};
use model::{Faults, Net};
use muster_protocol::Digest;

pub(super) const SAMPLES: u64 = 50;
pub(super) const STEPS: u64 = 200;

pub(super) fn config() -> Config {
    let sampler = SamplerConfig {
        samples: SAMPLES,
        seed: 3,
        batch: Batch::Global(12),
        microbatch: 2,
        tail: Tail::Keep,
    };
    let schedule = Schedule {
        rate: 0.01,
        base: Base::Constant,
        scaling: Scaling::None,
        warm_up: None,
    };
    Config::new(sampler, Span::Steps(STEPS), schedule)
}

fn all_codecs() -> Vec<Codecs> {
    let shape = |rows, columns| Shape { rows, columns };
    let power = |shapes| Codec::PowerSgd { rank: 2, shapes };
    vec![
        Codecs::All(Codec::None),
        Codecs::All(Codec::Fp16),
        Codecs::All(Codec::Bf16),
        Codecs::All(Codec::Int8 {
            block: 8,
            feedback: true,
        }),
        Codecs::All(Codec::TopK {
            density: 0.2,
            momentum: None,
        }),
        Codecs::Each(vec![
            Codec::None,
            Codec::TopK {
                density: 0.2,
                momentum: Some(0.5),
            },
            power(vec![shape(5, 6), shape(5, 1)]),
        ]),
    ]
}

/// One that reduces beside backward, as on machines with enough cores: ranks are killed at points of that.
fn overlapping(net: Net, feed: Feed<u64>, config: &Config) -> Parallel<Net> {
    let mut training = Parallel::new(net, feed, config.clone()).unwrap();
    training.beside = Some(true);
    training
}

fn parallel(config: &Config, faults: Faults) -> Parallel<Net> {
    overlapping(Net::new(1, faults), Feed::indices(), config)
}

fn all(world: u32, rank: u32) -> Share {
    Share {
        entered: (0..world).collect(),
        rank,
        world,
    }
}

/// Runs `body` on each of these in a new group that shares memory; what it returns, in order.
fn on_ranks<A: Send, T: Send>(ranks: Vec<A>, body: impl Fn(A, &mut Group) -> T + Sync) -> Vec<T> {
    let sharing = |config| GroupConfig {
        sharing: Sharing::Auto,
        ..config
    };
    on_ranks_with(ranks, sharing, |what, mut group| body(what, &mut group))
}

/// Does steps until so many are over. All ranks have samples.
fn train(training: &mut Parallel<Net>, group: &mut Group, steps: u64) -> Vec<Report> {
    let share = all(group.world(), group.rank());
    while training.steps() < steps {
        let step = training.progress.transactions;
        let results = training.results(step, &share, group).unwrap();
        let bytes = training.encode_results(&results);
        let copy = training.decode_results(&bytes).unwrap();
        // Not the values: NaN differs from itself.
        assert_eq!(training.encode_results(&copy), bytes);
        training.commit(step, &results);
        training.recycle(results);
    }
    let reports = training.take_news().filter_map(|news| match news {
        News::Step(report) => Some(report),
        _ => None,
    });
    reports.collect()
}

/// The loop of [`Trainer`] at this place.
fn run_at<H: Hooks<Net>>(
    training: Parallel<Net>,
    hooks: H,
    options: Options,
    (rank, world, port): (u32, u32, u16),
) -> Result<(Ending, Parallel<Net>), RunError> {
    let env = WorkerEnv {
        rank,
        world,
        local_rank: rank,
        master: Some(("127.0.0.1".to_owned(), port)),
        restart: 0,
        generation: 1,
        digest: Digest([5; 32]),
    };
    in_place(training, Aside::new(hooks, options), None, &env)
}
