//! Copies for `train::Parallel` whose sources break off.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::*;
use crate::data::{Batch, SamplerConfig, Tail};
use crate::schedule::{Base, Scaling, Schedule, Span};
use crate::testing::eventually;
use crate::train::optim::Sgd;
use crate::train::{
    BUCKET_SIZES, BoxError, Config, Feed, Gradients, Layout, Load, Measured, Micro, Model, Named,
    Parallel, Results, Update, buckets_of,
};

/// Parameters: with their velocity, three parts of a copy and a bit.
const VALUES: usize = (6 << 20) / 4;
/// Steps after which there is nothing to train any more.
const LONG: u64 = 1 << 40;

/// Many parameters, of which a step moves few.
struct Much {
    layout: Layout,
    values: Vec<f32>,
    optimizer: Sgd,
}

impl Much {
    fn new(first: f32) -> Much {
        let half = [VALUES as u64 / 2];
        Much {
            layout: Layout::new([("one", &half[..]), ("two", &half)]),
            values: vec![first; VALUES],
            optimizer: Sgd::new(VALUES).momentum(0.9),
        }
    }
}

/// Number of values that are reduced.
const FEW: usize = 100;

impl Model for Much {
    type Sample = u64;

    fn parameters(&self) -> usize {
        FEW
    }

    fn buckets(&self) -> Vec<Range<usize>> {
        buckets_of(&[FEW], BUCKET_SIZES)
    }

    fn backward(
        &mut self,
        micro: &Micro<u64>,
        into: &mut Gradients<'_>,
    ) -> Result<Measured, BoxError> {
        let sum: u64 = micro.indices.iter().sum();
        into.bucket(0).iter_mut().for_each(|to| *to += sum as f32);
        // So that a thousand steps are not over before a copy has begun.
        std::thread::sleep(std::time::Duration::from_millis(1));
        self.evaluate(micro)
    }

    fn evaluate(&mut self, micro: &Micro<u64>) -> Result<Measured, BoxError> {
        Ok(Measured {
            samples: micro.samples.len() as u64,
            ..Measured::default()
        })
    }

    fn update(&mut self, update: &Update<'_>) {
        let parts = [0, VALUES / 3, VALUES - FEW].map(|at| (at..at + FEW, &update.gradient[0][..]));
        self.optimizer
            .step_parts(&mut self.values, parts, update.rate);
    }

    fn encode(&self) -> Vec<u8> {
        [bytemuck::cast_slice(&self.values), &self.optimizer.encode()].concat()
    }

    fn decode(&mut self, bytes: &[u8]) -> bool {
        let (values, optimizer) = bytes.split_at(4 * VALUES);
        self.values = floats(values);
        self.optimizer.decode(optimizer)
    }

    fn tensors(&self) -> Result<Vec<Named<'_>>, BoxError> {
        let mut all: Vec<Named<'_>> = self.layout.model(&self.values).collect();
        all.extend(self.optimizer.tensors(&self.layout));
        Ok(all)
    }

    fn load(&mut self, from: &mut Load<'_>) -> Result<(), BoxError> {
        from.fill(self.layout.model_rooms(&mut self.values))?;
        Ok(self.optimizer.load(&self.layout, from)?)
    }
}

/// That, and what goes wrong with it.
struct Fragile {
    inner: Parallel<Much>,
    /// The state that it hands out has nothing before this byte: of a copy, whose last parts are asked for first, much
    /// comes.
    breaks_before: usize,
    /// So often it has broken off.
    breaks: Arc<AtomicUsize>,
    landings: Arc<AtomicUsize>,
    /// The state that it began with, when nobody held one.
    restored: Arc<Mutex<Option<Vec<u8>>>>,
}

fn fragile(first: f32) -> Fragile {
    let sampler = SamplerConfig {
        samples: 1000,
        seed: 1,
        batch: Batch::Global(4),
        microbatch: 1,
        tail: Tail::Drop,
    };
    let schedule = Schedule {
        rate: 1e-3,
        base: Base::Constant,
        scaling: Scaling::None,
        warm_up: None,
    };
    let config = Config::new(sampler, Span::Steps(LONG), schedule);
    Fragile {
        inner: Parallel::new(Much::new(first), Feed::indices(), config).unwrap(),
        breaks_before: 0,
        breaks: Arc::default(),
        landings: Arc::default(),
        restored: Arc::default(),
    }
}

struct Breaking(Box<dyn Frozen>, usize, Arc<AtomicUsize>);

impl Frozen for Breaking {
    fn total(&self) -> usize {
        self.0.total()
    }

    fn piece(&self, byte: usize) -> &[u8] {
        if byte < self.1 {
            self.2.fetch_add(1, Ordering::AcqRel);
            return &[];
        }
        self.0.piece(byte)
    }
}

impl Training for Fragile {
    type Results = Results;

    fn results(&mut self, step: u64, share: &Share, group: &mut Group) -> Result<Results, Fault> {
        self.inner.results(step, share, group)
    }

    fn commit(&mut self, step: u64, results: &Results) {
        self.inner.commit(step, results);
    }

    fn encode_results(&self, results: &Results) -> Vec<u8> {
        self.inner.encode_results(results)
    }

    fn decode_results(&self, bytes: &[u8]) -> Option<Results> {
        self.inner.decode_results(bytes)
    }

    fn encode_state(&self) -> Vec<u8> {
        self.inner.encode_state()
    }

    fn decode_state(&mut self, _: &[u8]) -> bool {
        panic!("nothing is handed over by its encoding");
    }

    fn freeze(&mut self) -> Box<dyn Frozen> {
        let frozen = self.inner.freeze();
        Box::new(Breaking(frozen, self.breaks_before, self.breaks.clone()))
    }

    fn landing(&mut self) -> Option<Box<dyn Landing>> {
        let landing = self.inner.landing()?;
        self.landings.fetch_add(1, Ordering::AcqRel);
        Some(landing)
    }

    fn adopt_state(&mut self, landing: Box<dyn Landing>) -> bool {
        self.inner.adopt_state(landing)
    }

    fn restore(&mut self, group: &mut Group) -> Result<u64, Fault> {
        let committed = self.inner.restore(group)?;
        *self.restored.lock().unwrap() = Some(self.inner.encode());
        Ok(committed)
    }

    fn fault(&mut self) -> Option<Box<dyn std::error::Error + Send + Sync>> {
        self.inner.fault()
    }

    fn recycle(&mut self, results: Results) {
        self.inner.recycle(results);
    }

    fn boundary(&mut self, group: &mut Group) -> Result<(), Fault> {
        self.inner.boundary(group)
    }

    fn regrouped(&mut self, group: &mut Group, survived: bool) -> Result<(), Fault> {
        self.inner.regrouped(group, survived)
    }
}

/// Ends all at a boundary: those that have committed as much hold the same.
fn finish(mut job: Job<Fragile>) -> Vec<Fragile> {
    let then = job.newest() + 5;
    job.until(then);
    job.ranks.iter().for_each(Rank::end);
    let ends = job.ranks.into_iter().map(|rank| {
        drop(rank.orders);
        rank.thread.join().expect("lives")
    });
    let ends: Vec<Fragile> = ends.collect();
    let newest = ends.iter().map(|end| end.inner.steps()).max().unwrap_or(0);
    // The last step's results may be with some only: the next generation would hand them on.
    let whole: Vec<&Fragile> = (ends.iter())
        .filter(|end| end.inner.steps() == newest)
        .collect();
    let state = whole[0].inner.encode();
    assert!(whole.iter().all(|end| end.inner.encode() == state));
    assert!(ends.iter().all(|end| end.inner.steps() + 1 >= newest));
    ends
}

#[test]
fn a_source_that_breaks_off_is_made_up_for_by_others() {
    let mut first = [fragile(0.0), fragile(0.0), fragile(0.0)];
    first[1].breaks_before = 3 << 20;
    let mut job = Job::of(first.into(), || fragile(7.0));
    job.until(3);
    job.regroup(1);
    let ends = finish(job);
    assert_eq!(ends[3].landings.load(Ordering::Acquire), 1);
    assert!(ends[3].restored.lock().unwrap().is_none());
}

#[test]
fn a_newcomer_whose_only_source_dies_half_way_begins_with_its_own_first_values() {
    let mut only = fragile(0.0);
    only.breaks_before = 3 << 20;
    let breaks = only.breaks.clone();
    let mut job = Job::of(vec![only], || fragile(0.0));
    job.until(3);
    let newcomer = fragile(7.0);
    let restored = newcomer.restored.clone();
    let began = newcomer.inner.encode();
    job.regroup_with(vec![newcomer]);
    // All but the first part is there by now, and comes again.
    eventually("it has tried twice", || breaks.load(Ordering::Acquire) > 3);
    let source = job.ranks.remove(0);
    source.end();
    drop(source.orders);
    source.thread.join().expect("leaves");
    job.regroup(0);
    eventually("it begins", || restored.lock().unwrap().is_some());
    // Nothing of what has come is in it.
    assert!(restored.lock().unwrap().take() == Some(began));
    // Another one gets what it then holds.
    job.regroup(1);
    let ends = finish(job);
    assert!(ends[1].restored.lock().unwrap().is_none());
    assert_eq!(ends[1].landings.load(Ordering::Acquire), 1);
}
