//! The loop around a training, with Muster or without.

mod in_place;

pub(super) use self::in_place::in_place;
use super::config::TrainError;
use super::hooks::{Boundary, Hooks, Place};
use super::model::{BoxError, Model};
use super::parallel::Parallel;
use super::report::News;
use super::reserve::Reserve;
use super::saves::{Saves, node_of_job, store_of_job};
use crate::collective::GroupError;
use crate::env::{EnvError, WorkerEnv};
use crate::live::{Fault, LiveError, Outcome, Patience, Seat, Worker};
use crate::session::{Metrics, Session, SessionError};

/// How often, beside the training itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// The state is saved each time so many steps are over. In any case it is at planned boundaries, where
    /// `muster checkpoint` asks for it, when an evaluation is the best one, and at the end.
    ///
    /// In a job with a store (`muster run --store`) all ranks save, each its part, into memory that outlives them
    /// ([`saving`](crate::saving)). Else one rank, the first that trains, saves all of it, if it has a
    /// [`Store`](super::Store), and not for an evaluation; the others wait for it, [`Patience::operation`] at most.
    pub save_every: Option<u64>,
    /// All ranks compare their states each so many steps, and one that deviates gets the state of the others.
    /// So they do at each save, so that the newest checkpoint is the majority's. Each time costs a digest of the
    /// whole state.
    pub compare_every: Option<u64>,
    /// How long is waited for what. Without live membership, only how long an operation may take counts.
    pub patience: Patience,
}

/// A training that did not end as it should.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Train(#[from] TrainError),
    #[error(transparent)]
    Live(#[from] LiveError),
    #[error(transparent)]
    Group(#[from] GroupError),
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Env(#[from] EnvError),
    #[error("the launcher took this worker's seat back; start the worker again")]
    Seat,
    #[error("a hook ended the training")]
    Hook(#[source] BoxError),
    #[error("the state of step {step} cannot be saved")]
    Save {
        step: u64,
        #[source]
        source: BoxError,
    },
}

impl From<Fault> for RunError {
    fn from(fault: Fault) -> RunError {
        match fault {
            Fault::Group(error) => RunError::Group(error),
            Fault::Training(error) => match error.downcast() {
                Ok(error) => RunError::Train(*error),
                Err(error) => RunError::Live(LiveError::Training(error)),
            },
        }
    }
}

/// How a training ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    Complete,
    /// All ranks stopped as agreed, with the state saved: this launcher starts them again.
    Stopped,
}

/// A training with its loop.
///
/// A whole worker, which finds the line through points (x, 3x + 1). `muster run --nproc-per-node 2 -- ./worker` trains
/// it on two ranks, `torchrun` too, and `./worker` alone:
///
/// ```
/// use std::error::Error;
///
/// use muster_runtime::Session;
/// use muster_runtime::data::{Batch, SamplerConfig, Tail};
/// use muster_runtime::schedule::{Base, Scaling, Schedule, Span};
/// use muster_runtime::train::optim::Sgd;
/// use muster_runtime::train::{
///     BoxError, Config, Ending, Feed, Gradients, Measured, Micro, Model, Parallel, Trainer, Update,
/// };
///
/// struct Line {
///     parameters: [f32; 2],
///     optimizer: Sgd,
/// }
///
/// impl Model for Line {
///     type Sample = (f32, f32);
///
///     fn parameters(&self) -> usize {
///         2
///     }
///
///     /// What is reduced together: here all of it.
///     fn buckets(&self) -> Vec<std::ops::Range<usize>> {
///         vec![0..2]
///     }
///
///     fn backward(&mut self, micro: &Micro<(f32, f32)>, into: &mut Gradients<'_>) -> Result<Measured, BoxError> {
///         let [a, b] = self.parameters;
///         let gradient = into.bucket(0);
///         for (x, y) in &micro.samples {
///             let error = a * x + b - y;
///             gradient[0] += micro.scale * 2.0 * error * x;
///             gradient[1] += micro.scale * 2.0 * error;
///         }
///         into.ready(0);
///         self.evaluate(micro)
///     }
///
///     fn evaluate(&mut self, micro: &Micro<(f32, f32)>) -> Result<Measured, BoxError> {
///         let [a, b] = self.parameters;
///         let losses = micro.samples.iter().map(|(x, y)| f64::from(a * x + b - y).powi(2));
///         Ok(Measured { loss: losses.sum(), samples: micro.samples.len() as u64, extra: Vec::new() })
///     }
///
///     fn update(&mut self, update: &Update<'_>) {
///         self.optimizer.step(&mut self.parameters, &update.gradient[0], update.rate);
///     }
///
///     fn encode(&self) -> Vec<u8> {
///         let mut bytes = self.optimizer.encode();
///         bytes.extend(self.parameters.iter().flat_map(|p| p.to_le_bytes()));
///         bytes
///     }
///
///     fn decode(&mut self, bytes: &[u8]) -> bool {
///         let Some((optimizer, last)) = bytes.split_last_chunk::<8>() else {
///             return false;
///         };
///         let fits = self.optimizer.decode(optimizer);
///         if fits {
///             let (parameters, _) = last.as_chunks();
///             self.parameters = [0, 1].map(|i| f32::from_le_bytes(parameters[i]));
///         }
///         fits
///     }
/// }
///
/// fn main() -> Result<(), Box<dyn Error>> {
///     // 64 samples, 16 a step over all ranks, dealt to them by four.
///     let sampler = SamplerConfig { samples: 64, seed: 7, batch: Batch::Global(16), microbatch: 4, tail: Tail::Keep };
///     let schedule = Schedule { rate: 0.1, base: Base::Constant, scaling: Scaling::None, warm_up: None };
///     let config = Config::new(sampler, Span::Epochs(50.0), schedule);
///     let feed = Feed::direct(|index| {
///         let x = index as f32 / 64.0;
///         Ok((x, 3.0 * x + 1.0))
///     });
///     let line = Line { parameters: [0.0; 2], optimizer: Sgd::new(2).momentum(0.9) };
///     let trainer = Trainer::new(Parallel::new(line, feed, config)?);
///
///     // None without Muster.
///     let mut session = Session::from_env()?;
///     let (ending, training) = trainer.run(session.as_mut())?;
///     if ending == Ending::Complete {
///         let [a, b] = training.model().parameters;
///         println!("y = {a:.2} x + {b:.2}");
/// #       assert!((a - 3.0).abs() < 0.05 && (b - 1.0).abs() < 0.05);
///     }
///     Ok(())
/// }
/// ```
pub struct Trainer<M: Model, H = ()> {
    training: Parallel<M>,
    aside: Aside<H>,
}

impl<M: Model, H> std::fmt::Debug for Trainer<M, H> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trainer")
            .field("training", &self.training)
            .finish_non_exhaustive()
    }
}

/// State of a trainer beside the steps.
#[derive(Debug)]
pub(super) struct Aside<H> {
    pub(super) hooks: H,
    pub(super) options: Options,
    /// The steps of the newest state that this process saved.
    pub(super) saved: Option<u64>,
    /// Before this step states were compared last, in one generation.
    compared: Option<u64>,
    /// Metrics that the agent shows of this rank: sums since the process began.
    pub(super) metrics: Metrics,
}

impl<M: Model> Trainer<M> {
    pub fn new(training: Parallel<M>) -> Trainer<M> {
        Trainer {
            training,
            aside: Aside::new((), Options::default()),
        }
    }
}

impl<M: Model, H: Hooks<M>> Trainer<M, H> {
    /// Tells these hooks, instead of those before.
    #[must_use]
    pub fn hooks<T: Hooks<M>>(self, hooks: T) -> Trainer<M, T> {
        Trainer {
            training: self.training,
            aside: Aside::new(hooks, self.aside.options),
        }
    }

    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.aside.options = options;
        self
    }

    /// Trains until the end.
    ///
    /// - With the session of a launcher that keeps workers alive: stays in this process while nodes come and go.
    /// - With another session: forms the generation's group, resumes from the newest checkpoint, stops where
    ///   all ranks agree to, and ends with an error when a rank is lost, to be started again.
    /// - Without one: the same at the place that the environment names (as torchrun sets it), or else alone.
    ///
    /// # Errors
    /// See [`RunError`]. The process should end, and start again from a checkpoint.
    pub fn run(self, session: Option<&mut Session>) -> Result<(Ending, Parallel<M>), RunError> {
        let Trainer {
            mut training,
            aside,
        } = self;
        let patience = aside.options.patience;
        if let (Some(session), Some(store)) = (&session, store_of_job()) {
            let fixed = match Seat::is_offered(session) {
                true => None,
                false => Some((WorkerEnv::from_env()?, node_of_job())),
            };
            training.saves = Some(Saves::new(session.page(), store, fixed));
        }
        if let Some(saves) = &mut training.saves {
            // Others may wait for this rank meanwhile, in the operation that comes next.
            saves.wait = patience.operation / 2;
        }
        match session {
            Some(session) if Seat::is_offered(session) => {
                match Worker::join(session, training, patience) {
                    Ok(worker) => live(worker, aside),
                    // Taken back between the two questions.
                    Err(_) => Err(RunError::Seat),
                }
            }
            session => in_place(training, aside, session, &WorkerEnv::from_env()?),
        }
    }
}

impl<H> Aside<H> {
    pub(super) fn new(hooks: H, options: Options) -> Aside<H> {
        Aside {
            hooks,
            options,
            saved: None,
            compared: None,
            metrics: Metrics {
                data_seconds: 0.0,
                compute_seconds: 0.0,
                communication_seconds: 0.0,
                gradient_sync_seconds: 0.0,
                ..Metrics::default()
            },
        }
    }

    /// Tells of a generation, once the model is there that is shown with it.
    fn begun<M: Model>(
        &mut self,
        training: &Parallel<M>,
        begun: &mut Option<Place>,
    ) -> Result<(), RunError>
    where
        H: Hooks<M>,
    {
        match begun.take_if(|_| training.model.is_done()) {
            Some(place) => {
                training.model.wait()?;
                let told = self.hooks.on_regroup(training.model(), &place);
                told.map_err(RunError::Hook)
            }
            None => Ok(()),
        }
    }

    /// Passes on what was committed and saved.
    fn news<M: Model>(&mut self, training: &mut Parallel<M>) -> Result<(), RunError>
    where
        H: Hooks<M>,
    {
        for news in training.take_news() {
            if let News::Step(report) = &news {
                report.add_to(&mut self.metrics);
            }
            let model = training.model();
            let told = match &news {
                News::Step(report) => self.hooks.on_step(model, report),
                News::Epoch(epochs) => self.hooks.on_epoch(model, *epochs),
                News::Evaluated(evaluation) => self.hooks.on_evaluate(model, evaluation),
                News::Saved(save) => self.hooks.on_save(model, save),
                News::NotSaved { step, why } => self.hooks.on_not_saved(*step, why),
            };
            told.map_err(RunError::Hook)?;
            let best = matches!(&news, News::Evaluated(evaluation) if evaluation.best);
            if let Some(best) = training.best().filter(|_| best) {
                self.hooks.on_best(&best).map_err(RunError::Hook)?;
            }
        }
        Ok(())
    }

    /// Whether the state is to be saved after this many steps.
    fn is_due(&self, steps: u64) -> bool {
        let every = self.options.save_every.filter(|every| *every > 0);
        every.is_some_and(|every| steps > 0 && steps.is_multiple_of(every))
    }

    /// Saves the whole state to this rank's [`Store`](super::Store). Whether it was saved just now.
    fn save<M: Model>(&mut self, training: &mut Parallel<M>) -> Result<bool, RunError> {
        let step = training.steps();
        if self.saved == Some(step) || training.store.is_none() || training.saves.is_some() {
            return Ok(false);
        }
        let state = training.whole()?;
        if let Some(store) = &mut training.store {
            let saved = store.save(step, &state);
            saved.map_err(|source| RunError::Save { step, source })?;
        }
        self.saved = Some(step);
        Ok(true)
    }
}

/// Stays in this process, whatever becomes of the others.
fn live<M: Model, H: Hooks<M>>(
    mut worker: Worker<'_, Parallel<M>>,
    mut aside: Aside<H>,
) -> Result<(Ending, Parallel<M>), RunError> {
    worker.compare_every(aside.options.compare_every);
    let (mut instead, mut saver, mut begun) = (None, None, None);
    loop {
        let outcome = match instead.take() {
            Some(outcome) => outcome,
            None => {
                saver = worker.saver();
                worker.advance()?
            }
        };
        let saves = worker.saves();
        aside.begun(&worker.training, &mut begun)?;
        match outcome {
            Outcome::Regrouped {
                place,
                committed,
                survived,
                took,
            } => {
                begun = Some(Place {
                    rank: place.rank,
                    world: place.world,
                    local_rank: place.local_rank,
                    generation: place.term.number(),
                    digest: place.digest,
                    steps: if survived {
                        worker.training.steps()
                    } else {
                        committed
                    },
                    survived,
                    took: Some(took),
                });
                aside.begun(&worker.training, &mut begun)?;
                aside.news(&mut worker.training)?;
            }
            Outcome::Stepped { step, .. } => {
                aside.news(&mut worker.training)?;
                worker.report(&aside.metrics);
                // Not by what this rank has committed: one that listens has none of it.
                if aside.is_due(step + 1) {
                    saver = None;
                    instead = save(&mut worker, &mut aside, step + 1, When::Evaluated)?;
                }
            }
            Outcome::CaughtUp { .. } => {
                aside.news(&mut worker.training)?;
                worker.report(&aside.metrics);
            }
            Outcome::Quarantined { ranks, .. } => {
                save_over(&mut worker, &mut aside, saver, &ranks)?;
                aside.hooks.on_quarantine(&ranks).map_err(RunError::Hook)?;
            }
            Outcome::Boundary {
                step,
                reason,
                deadline,
            } => {
                if saves {
                    aside.save(&mut worker.training)?;
                }
                // They were compared already.
                let share = worker.share();
                worker.training.save_part(step, &share)?;
                aside.news(&mut worker.training)?;
                worker.training.saves.iter_mut().for_each(Saves::end);
                let boundary = Boundary { reason, deadline };
                let told = aside.hooks.on_boundary(worker.training.model(), &boundary);
                told.map_err(RunError::Hook)?;
                continue;
            }
            Outcome::Checkpoint { step } => {
                saver = None;
                instead = save(&mut worker, &mut aside, step, When::Now)?;
                // The same on every rank: with nobody who could save, nobody says that it is done.
                let ended = matches!(instead, Some(Outcome::Ended { .. }));
                if worker.saver().is_some() && !ended {
                    worker.saved(step);
                }
                continue;
            }
            Outcome::Ended { why, lost } => {
                worker.training.saves.iter_mut().for_each(Saves::end);
                aside.hooks.on_ended(&why, lost).map_err(RunError::Hook)?;
                continue;
            }
            Outcome::Waiting => continue,
        }
        let share = worker.share();
        if worker.group().is_some() {
            worker.training.prepare_saves(&share)?;
        }
        // All ranks see this alike: nobody ends while a newcomer still has to catch up.
        let ranks = share.entered.len();
        if instead.is_none()
            && ranks == share.world as usize
            && share.is_entered()
            && worker.training.is_complete(ranks)
            && worker.group().is_some()
        {
            saver = worker.saver();
            instead = worker.finish()?;
            if instead.is_none() {
                if worker.saves() {
                    aside.save(&mut worker.training)?;
                }
                let (share, step) = (worker.share(), worker.committed());
                worker.training.save_part(step, &share)?;
                aside.news(&mut worker.training)?;
                // Nobody comes any more.
                worker.training.reserve = Reserve::new(false);
                return Ok((Ending::Complete, worker.training));
            }
        }
    }
}

/// These ranks held another state than most do. The state that one of them saved last, as the saver, is not that of the
/// others, whose state becomes the newest checkpoint now.
fn save_over<M: Model, H: Hooks<M>>(
    worker: &mut Worker<'_, Parallel<M>>,
    aside: &mut Aside<H>,
    saver: Option<u32>,
    ranks: &[u32],
) -> Result<(), RunError> {
    if saver.is_some_and(|saver| ranks.contains(&saver)) {
        aside.saved = None;
        if worker.saves() {
            aside.save(&mut worker.training)?;
        }
    }
    Ok(())
}

/// When a state is saved whose evaluation comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    Now,
    /// When the result is known.
    Evaluated,
}

/// Saves the state before `step`; every rank calls it, between the same two steps. Other outcomes are as those of
/// [`Worker::advance`].
fn save<M: Model, H: Hooks<M>>(
    worker: &mut Worker<'_, Parallel<M>>,
    aside: &mut Aside<H>,
    step: u64,
    when: When,
) -> Result<Option<Outcome>, RunError> {
    if worker.training.saves.is_none() {
        let saver = worker.saver();
        if worker.saves() {
            aside.save(&mut worker.training)?;
        }
        // By one rank: should its state deviate, another one saves over it, before anybody goes on.
        let instead = worker.compare_now()?;
        if let Some(Outcome::Quarantined { ranks, .. }) = &instead {
            save_over(worker, aside, saver, ranks)?;
        }
        return Ok(instead);
    }
    // What the ranks write has to be parts of one state.
    let instead = worker.compare_now()?;
    let share = worker.share();
    let ended = matches!(instead, Some(Outcome::Ended { .. }));
    let later =
        !ended && when == When::Evaluated && worker.training.saves_with_evaluation(step, &share);
    if !ended && !later {
        worker.training.save_part(step, &share)?;
        aside.news(&mut worker.training)?;
    }
    Ok(instead)
}
