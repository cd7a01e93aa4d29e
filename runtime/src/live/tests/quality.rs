//! Cost of compression and faults for a training that matters to somebody: the digits, held-out accuracy, seed by
//! seed beside an undisturbed training without compression.

use std::sync::{Arc, OnceLock};

use super::super::*;
use super::bed::Job;
use crate::collective::{Group, Op};
use crate::data::{Batch, Sampler, SamplerConfig, State, Tail};
use crate::demo::Digits;
use crate::demo::model::{PARAMETERS, backward, correct, initial};
use crate::gradient::compress::{Bucket, Codec, Reduced};
use crate::random::SplitMix;
use crate::schedule::{At, Base, Scaling, Schedule, Span};

const WORLD: usize = 3;
const FAULTS: usize = 5;
/// A value is sent about once in a hundred steps, and so a training has to have many hundreds.
const STEPS: u64 = 900;
const MOMENTUM: f32 = 0.9;

/// From 0.05 down to nothing: what was kept back comes late, and should do no harm at the end.
fn schedule() -> Schedule {
    Schedule {
        rate: 0.05,
        base: Base::Cosine {
            period: Span::Steps(STEPS),
            floor: 0.0,
            growth: None,
        },
        scaling: Scaling::None,
        warm_up: None,
    }
}

fn digits() -> &'static Digits {
    static DIGITS: OnceLock<Digits> = OnceLock::new();
    DIGITS.get_or_init(|| Digits::load().unwrap())
}

/// Settings of a training.
#[derive(Clone, Debug)]
struct Recipe {
    seed: u64,
    codec: Codec,
}

/// The digits as a live training, with everything that a user would have: a sampler, a compressed bucket, SGD.
struct Digit {
    recipe: Arc<Recipe>,
    /// Where this rank dies: in this step, before or after its reduction.
    dies: Option<(u64, bool)>,
    sampler: Sampler,
    bucket: Bucket,
    parameters: Box<[f32; PARAMETERS]>,
    velocity: Vec<f32>,
}

struct Sums {
    reduced: Reduced,
    samples: u64,
}

impl Digit {
    fn new(recipe: &Arc<Recipe>, dies: Option<(u64, bool)>) -> Digit {
        let config = SamplerConfig {
            samples: digits().train.len() as u64,
            seed: recipe.seed,
            batch: Batch::Global(96),
            microbatch: 8,
            tail: Tail::Keep,
        };
        Digit {
            recipe: recipe.clone(),
            dies,
            sampler: Sampler::new(config).unwrap(),
            bucket: Bucket::new(recipe.codec.clone(), PARAMETERS, recipe.seed).unwrap(),
            parameters: Box::new(initial(recipe.seed)),
            velocity: vec![0.0; PARAMETERS],
        }
    }

    fn die_at(&self, step: u64, after: bool) {
        if self.dies == Some((step, after)) {
            std::panic::resume_unwind(Box::new("killed"));
        }
    }
}

impl Training for Digit {
    type Results = Sums;

    fn results(&mut self, step: u64, share: &Share, group: &mut Group) -> Result<Sums, Fault> {
        let mut reduced = Reduced::default();
        let mut samples = [0];
        if step >= STEPS {
            // Trained; the others may not be there yet.
            group.barrier()?;
            std::thread::sleep(std::time::Duration::from_millis(1));
            return Ok(Sums {
                reduced,
                samples: 0,
            });
        }
        self.die_at(step, false);
        if share.entered.contains(&share.rank) {
            let plan = self.sampler.plan(share.entered.len());
            let mut gradient = Box::new([0.0; PARAMETERS]);
            let mut own = 0;
            for i in plan.part(share) {
                let batch: Vec<_> = plan
                    .indices(i)
                    .map(|index| &digits().train[index as usize])
                    .collect();
                backward(&self.parameters, &batch, &mut gradient);
                own += batch.len() as u64;
            }
            self.bucket
                .reduce(group, gradient.as_slice(), &mut reduced)?;
            self.die_at(step, true);
            group.all_reduce(Op::Sum, &[own], &mut samples)?;
        } else {
            self.bucket.listen(group, &mut reduced)?;
            group.all_reduce(Op::Sum, &[0], &mut samples)?;
        }
        let [samples] = samples;
        Ok(Sums { reduced, samples })
    }

    fn commit(&mut self, step: u64, sums: &Sums) {
        if sums.samples == 0 {
            return;
        }
        let epoch = self.sampler.epochs();
        let rate = schedule().at(At { step, epoch }, sums.samples) as f32;
        self.bucket.commit(&sums.reduced);
        let all = self.parameters.iter_mut().zip(&mut self.velocity);
        for ((parameter, velocity), sum) in all.zip(&sums.reduced.sum) {
            *velocity = MOMENTUM * *velocity + sum / sums.samples as f32;
            *parameter -= rate * *velocity;
        }
        let plan = self.sampler.plan(1);
        assert_eq!(plan.samples(), sums.samples, "each sample once an epoch");
        self.sampler.commit(&plan).unwrap();
    }

    fn encode_results(&self, sums: &Sums) -> Vec<u8> {
        let mut out = sums.samples.to_le_bytes().to_vec();
        out.extend(sums.reduced.encode());
        out
    }

    fn decode_results(&self, bytes: &[u8]) -> Option<Sums> {
        let (samples, rest) = bytes.split_first_chunk()?;
        Some(Sums {
            samples: u64::from_le_bytes(*samples),
            reduced: Reduced::decode(rest)?,
        })
    }

    fn encode_state(&self) -> Vec<u8> {
        let mut out = self.sampler.state().encode().to_vec();
        out.extend_from_slice(bytemuck::cast_slice(self.parameters.as_slice()));
        out.extend_from_slice(bytemuck::cast_slice(&self.velocity));
        out
    }

    fn decode_state(&mut self, bytes: &[u8]) -> bool {
        let Some((sampler, rest)) = bytes.split_at_checked(40) else {
            return false;
        };
        let numbers: Vec<f32> = super::floats(rest);
        let Some(state) = State::decode(sampler).filter(|_| numbers.len() == 2 * PARAMETERS) else {
            return false;
        };
        self.parameters.copy_from_slice(&numbers[..PARAMETERS]);
        self.velocity.copy_from_slice(&numbers[PARAMETERS..]);
        self.bucket.clear_own();
        self.sampler.restore(state).is_ok()
    }

    fn restore(&mut self, group: &mut Group) -> Result<u64, Fault> {
        group.barrier()?;
        *self = Digit::new(&self.recipe.clone(), self.dies);
        Ok(0)
    }
}

/// Trains with so many faults: each kills a rank at any point of a step, and another comes in its place. The
/// held-out images that are right in the end.
fn train(recipe: Recipe, faults: usize) -> usize {
    let mut random = SplitMix::new(recipe.seed ^ 0xfa17);
    let part = STEPS / (faults as u64 + 1);
    // In order, and apart, so that whoever comes has its copy before the next one goes.
    let deaths: Vec<(u64, bool)> = (1..=faults as u64)
        .map(|i| (i * part + random.below(part / 2), random.below(2) == 1))
        .collect();
    let recipe = Arc::new(recipe);
    let of = |i: usize| Digit::new(&recipe, deaths.get(i).copied());
    let mut job = Job::of((0..WORLD).map(of).collect(), || {
        unreachable!("all are made here")
    });
    for i in 0..faults {
        job.until_dead(1);
        job.regroup_with(vec![of(WORLD + i)]);
    }
    job.until(STEPS);
    job.ranks.iter().for_each(|rank| rank.end());
    let ends = job.ranks.into_iter().map(|rank| {
        drop(rank.orders);
        rank.thread.join().expect("lives").parameters
    });
    let ends: Vec<_> = ends.collect();
    assert!(
        ends.iter().all(|end| *end == ends[0]),
        "one model on all ranks"
    );
    correct(&ends[0], &digits().held_out)
}

/// For each way of training the mean of its differences to the undisturbed one, in points of accuracy.
fn compare(seeds: u64) -> Vec<(&'static str, f64)> {
    let topk = Codec::TopK {
        density: 0.01,
        momentum: None,
    };
    let ways = [
        ("top-k 1 %", topk.clone(), 0),
        ("five faults", Codec::None, FAULTS),
        ("top-k 1 %, five faults", topk, FAULTS),
    ];
    let point = 100.0 / digits().held_out.len() as f64;
    let mut sums = ways.clone().map(|(name, ..)| (name, 0.0));
    for seed in 1..=seeds {
        let recipe = |codec: &Codec| Recipe {
            seed,
            codec: codec.clone(),
        };
        let plain = train(recipe(&Codec::None), 0);
        println!(
            "{{\"seed\": {seed}, \"way\": \"undisturbed\", \"accuracy\": {:.3}}}",
            plain as f64 * point
        );
        for ((name, codec, faults), sum) in ways.iter().zip(&mut sums) {
            let right = train(recipe(codec), *faults);
            let difference = (right as f64 - plain as f64) * point;
            println!(
                "{{\"seed\": {seed}, \"way\": \"{name}\", \"accuracy\": {:.3}, \"difference\": {difference:.3}}}",
                right as f64 * point
            );
            sum.1 += difference / seeds as f64;
        }
    }
    sums.to_vec()
}

#[test]
fn compression_and_faults_cost_little() {
    for (way, points) in compare(2) {
        // Two seeds: an image is a seventh of a point in their mean.
        assert!(points > -2.5, "{way}: {points} points");
    }
}

mod long {
    /// `benches/run quality` may ask for fewer.
    #[test]
    fn half_a_point_at_most_over_ten_seeds() {
        let seeds =
            std::env::var("MUSTER_TEST_QUALITY_SEEDS").map_or(10, |seeds| seeds.parse().unwrap());
        for (way, points) in super::compare(seeds) {
            assert!(points >= -0.5, "{way}: {points} points");
        }
    }
}
