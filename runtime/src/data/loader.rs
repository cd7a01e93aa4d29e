//! Loads this rank's samples ahead of time, on threads of its own.
//!
//! Each call of [`Loader::step`] says anew what is wanted: the step's microbatches, and those of the steps
//! that follow if the world stays as it is. Microbatches that are loaded or on their way and still wanted are kept, the
//! rest are discarded; so a change of the share, a redone step and a restored checkpoint need no call of their own.

use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::sampler::{Plan, Sampler};
use crate::live::Share;

/// How many steps ahead are looked at, for who has no samples in most of them.
const MOST_STEPS_AHEAD: usize = 64;

/// How much is loaded ahead, by how many threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoaderConfig {
    /// One at least. A microbatch is loaded by one thread.
    pub threads: usize,
    /// Microbatches beyond the current step's that are in memory or on their way.
    pub ahead: usize,
}

impl Default for LoaderConfig {
    fn default() -> LoaderConfig {
        LoaderConfig {
            threads: 2,
            ahead: 4,
        }
    }
}

/// One microbatch of a step, in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Microbatch<S> {
    /// Its number within the step's [`Plan`].
    pub number: usize,
    /// In the order of [`Plan::indices`].
    pub samples: Vec<S>,
}

/// This rank's part of a step.
#[derive(Clone, Debug)]
pub struct Loaded<S> {
    pub plan: Plan,
    /// In order; none, if this rank has no part.
    pub microbatches: Vec<Microbatch<S>>,
    /// How long this call waited for samples.
    pub waited: Duration,
}

/// Totals of a loader since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub steps: u64,
    /// How long [`Loader::step`] waited in all.
    pub waited: Duration,
    /// Microbatches that were begun, or complete, when they were no longer wanted.
    pub discarded: u64,
}

/// A sample did not come. The same step may be asked for again, and is then loaded anew.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("sample {index} of the data set cannot be loaded")]
    Sample {
        index: u64,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("loading sample {index} of the data set panicked: {what}")]
    Panicked { index: u64, what: String },
    #[error("no thread can be started to load samples; is the limit on processes reached?")]
    Threads(#[source] io::Error),
}

/// Identity of a microbatch: the epoch, and the places in its order.
type Key = (u64, Range<u64>);

#[derive(Debug)]
enum Stage<S> {
    Queued(Vec<u64>),
    Running,
    Done(Result<Vec<S>, LoadError>),
}

#[derive(Debug)]
struct Entry<S> {
    key: Key,
    /// Set when it is wanted no longer; also tells it from a later one with the same key.
    dropped: Arc<AtomicBool>,
    stage: Stage<S>,
}

#[derive(Debug)]
struct Board<S> {
    /// Microbatches that are wanted, the most urgent first.
    entries: VecDeque<Entry<S>>,
    over: bool,
}

#[derive(Debug)]
struct Shared<S> {
    board: Mutex<Board<S>>,
    /// For the threads: something is queued, or all is over.
    work: Condvar,
    /// For the caller: something is done.
    done: Condvar,
}

impl<S> Shared<S> {
    fn lock(&self) -> MutexGuard<'_, Board<S>> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Loads a data set's samples by their index. Dropping it ends its threads, each after the sample that it
/// is loading.
#[derive(Debug)]
pub struct Loader<S> {
    shared: Arc<Shared<S>>,
    threads: Vec<JoinHandle<()>>,
    ahead: usize,
    totals: Totals,
}

impl<S: Send + 'static> Loader<S> {
    /// Starts the threads. `load` is called from all of them.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn new<E>(
        config: LoaderConfig,
        load: impl Fn(u64) -> Result<S, E> + Send + Sync + 'static,
    ) -> Result<Loader<S>, LoadError>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let shared = Arc::new(Shared {
            board: Mutex::new(Board {
                entries: VecDeque::new(),
                over: false,
            }),
            work: Condvar::new(),
            done: Condvar::new(),
        });
        let load = Arc::new(move |index| load(index).map_err(Into::into));
        let mut loader = Loader {
            shared,
            threads: Vec::new(),
            ahead: config.ahead,
            totals: Totals::default(),
        };
        for _ in 0..config.threads.max(1) {
            let (shared, load) = (loader.shared.clone(), load.clone());
            let thread = std::thread::Builder::new()
                .name("muster-load".into())
                .spawn(move || work(&shared, &*load));
            // Dropped on an error, so the others end.
            loader.threads.push(thread.map_err(LoadError::Threads)?);
        }
        Ok(loader)
    }

    /// This rank's part of the step that comes next, and then, in the background, of the ones after it.
    ///
    /// # Errors
    /// A sample cannot be loaded. Nothing is lost: call again.
    pub fn step(&mut self, sampler: &Sampler, share: &Share) -> Result<Loaded<S>, LoadError> {
        let began = Instant::now();
        let plan = sampler.plan(share.entered.len());
        let mine = plan.part(share);
        let wanted = wanted(sampler, share, mine.len() + self.ahead);
        let mut board = self.shared.lock();
        self.totals.discarded += board.want(wanted);
        self.shared.work.notify_all();

        let mut ready = Vec::with_capacity(mine.len());
        while ready.len() < mine.len() {
            match board.take_first() {
                Some(Ok(samples)) => ready.push(samples),
                Some(Err(error)) => return Err(error),
                None => {
                    board = (self.shared.done.wait(board)).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
        drop(board);
        let waited = began.elapsed();
        self.totals.steps += 1;
        self.totals.waited += waited;
        Ok(Loaded {
            plan,
            microbatches: mine
                .zip(ready)
                .map(|(number, samples)| Microbatch { number, samples })
                .collect(),
            waited,
        })
    }

    pub fn totals(&self) -> Totals {
        self.totals
    }
}

impl<S> Drop for Loader<S> {
    fn drop(&mut self) {
        let mut board = self.shared.lock();
        board.over = true;
        for entry in &board.entries {
            entry.dropped.store(true, Ordering::Release);
        }
        drop(board);
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            let _ended = thread.join();
        }
    }
}

impl<S> Board<S> {
    /// Makes `wanted` all that is wanted, and keeps what there is of it. How many others were begun.
    fn want(&mut self, wanted: Vec<(Key, Vec<u64>)>) -> u64 {
        let mut before = std::mem::take(&mut self.entries);
        for (key, indices) in wanted {
            let at = before.iter().position(|entry| entry.key == key);
            let entry = at.and_then(|at| before.remove(at));
            self.entries.push_back(entry.unwrap_or_else(|| Entry {
                key,
                dropped: Arc::default(),
                stage: Stage::Queued(indices),
            }));
        }
        let begun = |entry: &&Entry<S>| !matches!(entry.stage, Stage::Queued(_));
        for entry in &before {
            entry.dropped.store(true, Ordering::Release);
        }
        before.iter().filter(begun).count() as u64
    }

    /// Takes the microbatch that is wanted first, if it is done.
    fn take_first(&mut self) -> Option<Result<Vec<S>, LoadError>> {
        if !matches!(self.entries.front()?.stage, Stage::Done(_)) {
            return None;
        }
        match self.entries.pop_front()?.stage {
            Stage::Done(result) => Some(result),
            Stage::Queued(_) | Stage::Running => None,
        }
    }

    /// The most urgent one that nobody works on.
    fn begin(&mut self) -> Option<(Vec<u64>, Arc<AtomicBool>)> {
        self.entries.iter_mut().find_map(|entry| {
            let Stage::Queued(indices) = &mut entry.stage else {
                return None;
            };
            let indices = std::mem::take(indices);
            entry.stage = Stage::Running;
            Some((indices, entry.dropped.clone()))
        })
    }
}

/// The next `count` microbatches of this rank, if the world stays as it is.
fn wanted(sampler: &Sampler, share: &Share, count: usize) -> Vec<(Key, Vec<u64>)> {
    let mut ahead = sampler.clone();
    let mut wanted = Vec::with_capacity(count);
    for _ in 0..MOST_STEPS_AHEAD {
        let plan = ahead.plan(share.entered.len());
        for i in plan.part(share).take(count - wanted.len()) {
            let key = (plan.epoch(), plan.positions_of(i..i + 1));
            wanted.push((key, plan.indices(i).collect()));
        }
        if wanted.len() == count || ahead.commit(&plan).is_err() {
            break;
        }
    }
    wanted
}

type Load<'a, S> = &'a (dyn Fn(u64) -> Result<S, Box<dyn std::error::Error + Send + Sync>> + Sync);

fn work<S>(shared: &Shared<S>, load: Load<'_, S>) {
    let mut board = shared.lock();
    while !board.over {
        let Some((indices, dropped)) = board.begin() else {
            board = (shared.work.wait(board)).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(board);
        let result = load_all(&indices, &dropped, load);
        board = shared.lock();
        let mut entries = board.entries.iter_mut();
        let entry = entries.find(|entry| Arc::ptr_eq(&entry.dropped, &dropped));
        if let Some(entry) = entry {
            entry.stage = Stage::Done(result);
            shared.done.notify_all();
        }
    }
}

/// Stops early, with too few samples, when nobody wants them any more.
fn load_all<S>(
    indices: &[u64],
    dropped: &AtomicBool,
    load: Load<'_, S>,
) -> Result<Vec<S>, LoadError> {
    let mut samples = Vec::with_capacity(indices.len());
    for index in indices.iter().copied() {
        if dropped.load(Ordering::Acquire) {
            break;
        }
        match catch_unwind(AssertUnwindSafe(|| load(index))) {
            Ok(Ok(sample)) => samples.push(sample),
            Ok(Err(source)) => return Err(LoadError::Sample { index, source }),
            Err(payload) => {
                let what = message(&*payload);
                return Err(LoadError::Panicked { index, what });
            }
        }
    }
    Ok(samples)
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message").to_owned()
}

#[cfg(test)]
mod tests;
