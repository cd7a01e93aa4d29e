//! A model on all ranks, as a live training: what a step is, and what its results change.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use super::config::{Codecs, Config, TrainError, check};
use super::feed::Feed;
use super::held_out::HeldOut;
use super::lane::{self, Lane};
use super::made::{Made, Outline};
use super::model::{BoxError, Measured, Micro, Model, Update};
use super::progress::Progress;
use super::report::{Best, Evaluation, News, Report, Times};
use super::reserve::Reserve;
use super::restore::{self, Store};
use super::results::{Results, Totals};
use super::saves::Saves;
use super::sums::Sums;
use crate::collective::Group;
use crate::data::{Plan, Sampler};
use crate::gradient::compress::{Bucket, Codec, Own, Reduced};
use crate::gradient::{Scaler, Verdict, clip};
use crate::live::{Fault, Frozen, Landing, Share, Training};
use crate::random::seed_of;
use crate::schedule::{At, Rate};

/// One rank's part of a data-parallel training, for [`live::Worker`](crate::live::Worker) or any other loop that
/// keeps to the rule of the live step. [`Trainer`](super::Trainer) is such a loop.
///
/// A step's batch is dealt to the ranks by microbatches. Each adds up the gradients of its own; a bucket is
/// reduced while backward goes on with the next ones; the sums are divided by the reduced number of samples,
/// clipped, and given to the model's optimizer at commit.
///
/// **Lasting state** is the same everywhere: the model, sampler, learning rate, loss scale, the codecs' shared part,
/// counters, and the best evaluation. The part of its gradients that a rank has not sent yet (residuals of error
/// feedback) is its own. It goes with a rank that is lost, and stays in the world when ranks leave in good order.
pub struct Parallel<M: Model> {
    pub(super) model: Made<M>,
    pub(super) config: Config,
    pub(super) ranges: Vec<Range<usize>>,
    extras: usize,
    feed: Feed<M::Sample>,
    pub(super) held_out: Option<HeldOut<M::Sample>>,
    pub(super) sampler: Sampler,
    pub(super) rate: Rate,
    pub(super) scaler: Option<Scaler>,
    pub(super) buckets: Vec<Bucket>,
    pub(super) progress: Progress,
    pub(super) sums: Sums,
    /// Whether buckets are reduced beside backward; none: where that pays.
    pub(super) beside: Option<bool>,
    pub(super) store: Option<Box<dyn Store>>,
    /// In a job with a store, which takes the place of the one above.
    pub(super) saves: Option<Saves>,
    /// The ranks that work on the step whose results were computed last.
    pub(super) share: Option<Share>,
    /// As far as this rank knows it.
    pub(super) latest: Option<Evaluation>,
    pub(super) best_model: Option<Vec<u8>>,
    /// At a planned boundary: what all ranks had kept back, by bucket.
    pub(super) kept_back: Option<Vec<Own>>,
    /// Memory for a second state, and how much that is, once it is known.
    pub(super) reserve: Reserve,
    pub(super) room: Option<usize>,
    /// Memory of results that are not needed any more.
    spare: Vec<Reduced>,
    scratch: Vec<f32>,
    pub(super) news: VecDeque<News>,
    /// Of the step whose results were computed last, and when it began.
    timed: Option<(u64, Instant, Times)>,
    /// A commit cannot fail; what went wrong in it is told by the next step.
    pub(super) fault: Option<TrainError>,
}

impl<M: Model> std::fmt::Debug for Parallel<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parallel")
            .field("config", &self.config)
            .field("progress", &self.progress)
            .finish_non_exhaustive()
    }
}

impl<M: Model> Parallel<M> {
    /// At the beginning of a training.
    ///
    /// # Errors
    /// A size is zero, the model's buckets do not cover its parameters, or a codec cannot work with them.
    pub fn new(model: M, feed: Feed<M::Sample>, config: Config) -> Result<Self, TrainError> {
        let outline = Outline::of(&model);
        Parallel::with(Made::already(model), outline, feed, config)
    }

    pub(super) fn with(
        model: Made<M>,
        outline: Outline,
        feed: Feed<M::Sample>,
        config: Config,
    ) -> Result<Self, TrainError> {
        let ranges = outline.buckets;
        check(&ranges, outline.parameters)?;
        let codecs: Vec<Codec> = match &config.codecs {
            Codecs::All(codec) => vec![codec.clone(); ranges.len()],
            Codecs::Each(codecs) => codecs.clone(),
        };
        if codecs.len() != ranges.len() {
            return Err(TrainError::Codecs {
                codecs: codecs.len(),
                buckets: ranges.len(),
            });
        }
        let seed = config.sampler.seed;
        let mut buckets = Vec::with_capacity(ranges.len());
        for (bucket, (codec, range)) in codecs.into_iter().zip(&ranges).enumerate() {
            let new = Bucket::new(codec, range.len(), seed_of(&[seed, bucket as u64]));
            buckets.push(new.map_err(|source| TrainError::Codec { bucket, source })?);
        }
        let sampler = Sampler::new(config.sampler)?;
        let batch = config.sampler.batch.over(1).min(config.sampler.samples);
        Ok(Parallel {
            extras: outline.extras,
            model,
            feed,
            held_out: None,
            rate: Rate::new(config.schedule.clone(), batch, config.ramp),
            scaler: config.mixed.map(Scaler::new),
            sampler,
            buckets,
            progress: Progress::default(),
            sums: Sums::new(&ranges),
            beside: None,
            store: None,
            saves: None,
            share: None,
            latest: None,
            best_model: None,
            kept_back: None,
            reserve: Reserve::new(config.reserve),
            room: None,
            spare: Vec::new(),
            scratch: Vec::new(),
            news: VecDeque::new(),
            timed: None,
            fault: None,
            config,
            ranges,
        })
    }

    /// Goes through held-out samples every so often, and at the end.
    #[must_use]
    pub fn evaluated_by(mut self, held_out: HeldOut<M::Sample>) -> Self {
        self.held_out = Some(held_out);
        self
    }

    /// Where to look for a state when no rank holds one, and where one rank saves it: in a job that has no store of its
    /// own (`muster run --store`), such as one that torchrun starts.
    #[must_use]
    pub fn restored_from(mut self, store: impl Store + 'static) -> Self {
        self.store = Some(Box::new(store));
        self
    }

    /// Waits for it, should it still be made.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// The model, when the training is over.
    pub fn into_model(self) -> M {
        self.model.into_inner()
    }

    /// Steps that are over, skipped ones included.
    pub fn steps(&self) -> u64 {
        self.progress.steps
    }

    /// Epochs that are over, with the part of the one under way.
    pub fn epochs(&self) -> f64 {
        self.sampler.epochs()
    }

    /// The best evaluation so far.
    pub fn best(&self) -> Option<Best> {
        let evaluation = self.progress.best.clone()?;
        Some(Best {
            evaluation,
            model: self.best_model.clone(),
        })
    }

    /// News of commits since the last call.
    pub fn take_news(&mut self) -> impl Iterator<Item = News> + use<M> {
        std::mem::take(&mut self.news).into_iter()
    }

    /// Whether nothing is left to do for a world in which so many ranks have samples: all steps are over, and
    /// the last evaluation is done.
    pub fn is_complete(&self, ranks: usize) -> bool {
        self.is_over(ranks) && !self.evaluation_is_due(ranks)
    }

    fn is_over(&self, ranks: usize) -> bool {
        self.progress
            .reaches(self.config.until, &self.sampler.plan(ranks), &self.sampler)
    }

    pub(super) fn evaluation_is_due(&self, ranks: usize) -> bool {
        let Some(held_out) = &self.held_out else {
            return false;
        };
        let plan = self.sampler.plan(ranks);
        let (steps, done) = (self.progress.steps, self.progress.evaluated);
        let every = held_out.every;
        steps > 0
            && done != Some(steps)
            && (self.is_over(ranks) || self.progress.passes(every, &plan, &self.sampler))
    }

    /// This rank's microbatches of the step, and how long they took to load.
    #[expect(
        clippy::type_complexity,
        reason = "places with what lies there, used once"
    )]
    fn load(
        &mut self,
        plan: &Plan,
        share: &Share,
    ) -> Result<(Vec<(Range<u64>, Micro<M::Sample>)>, Duration), TrainError> {
        let numbers = plan.part(share);
        let places: Vec<Range<u64>> = numbers
            .clone()
            .map(|number| plan.positions_of(number..number + 1))
            .collect();
        let done = self
            .sums
            .begin(self.progress.transactions, plan.epoch(), &places);
        if done == places.len() {
            return Ok((Vec::new(), Duration::ZERO));
        }
        let (loaded, waited) = self.feed.step(&self.sampler, share)?;
        let last = numbers.end.saturating_sub(1);
        let scale = self.scaler.as_ref().map_or(1.0, Scaler::scale);
        let micros = places.into_iter().zip(loaded).skip(done);
        let micros = micros.map(|(places, loaded)| {
            let micro = Micro {
                step: self.progress.steps,
                epoch: plan.epoch(),
                number: loaded.number,
                indices: plan.indices(loaded.number).collect(),
                samples: loaded.samples,
                seed: plan.seed_of(loaded.number),
                scale,
                last: loaded.number == last,
            };
            (places, micro)
        });
        Ok((micros.collect(), waited))
    }

    /// The part of a rank that has a state.
    fn own(&mut self, step: u64, share: &Share, group: &mut Group) -> Result<Results, Fault> {
        let transactions = self.progress.transactions;
        if transactions != step {
            return Err(fault(TrainError::OutOfStep {
                ours: transactions,
                theirs: step,
            }));
        }
        let ranks = share.entered.len();
        let mut totals = Totals::default();
        if self.evaluation_is_due(ranks)
            && let Some(held_out) = &mut self.held_out
        {
            let (steps, epoch) = (self.progress.steps, self.sampler.state().epoch);
            let evaluated = held_out.evaluate(&mut *self.model, share, steps, epoch);
            (totals.held_out, totals.evaluated) = evaluated.map_err(fault)?;
        }
        let began = Instant::now();
        let mut times = Times::default();
        let plan = self.sampler.plan(ranks);
        let over = self.is_over(ranks);
        let micros = if over {
            self.sums.begin(step, plan.epoch(), &[]);
            Vec::new()
        } else {
            let (micros, waited) = self.load(&plan, share).map_err(fault)?;
            times.loading = waited;
            micros
        };
        let done = AtomicUsize::new(0);
        let pays = || lane::pays(group.layout(), lane::cores());
        let beside = self.beside.unwrap_or_else(pays);
        let mut reduced = std::mem::take(&mut self.spare);
        reduced.resize_with(self.buckets.len(), Reduced::default);
        let outcome = lane::step(
            &mut *self.model,
            &self.ranges,
            &micros,
            &mut self.sums,
            Lane {
                group: &mut *group,
                buckets: &mut self.buckets,
                reduced: &mut reduced,
                scaler: self.scaler.as_ref(),
                with_norm: self.config.max_norm.is_some(),
                scratch: &mut self.scratch,
                done: &done,
                beside,
                seen: lane::Seen::default(),
            },
        );
        let (seen, took) = match outcome {
            Ok((Ok(seen), took)) => (seen, took),
            Ok((Err(error), _)) => {
                self.spare = reduced;
                return Err(error.into());
            }
            Err(error) => {
                self.sums.forget();
                return Err(fault(error));
            }
        };
        let given = self.sums.measured.extra.len();
        if given != self.extras && !micros.is_empty() {
            return Err(fault(TrainError::Extras {
                got: given,
                expected: self.extras,
            }));
        }
        totals.placed = self.sums.samples();
        totals.measured = self.sums.measured.clone();
        let waiting = Instant::now();
        let totals = totals.reduce(group, self.extras)?;
        let waited = waiting.elapsed();
        times.computing = took.computing;
        times.communicating = took.communicating + waited;
        times.exposed = took.exposed + waited;
        self.timed = Some((step, began, times));
        let expected = if over { 0 } else { plan.samples() };
        if totals.placed != expected {
            return Err(fault(TrainError::Samples {
                step,
                got: totals.placed,
                expected,
            }));
        }
        Ok(Results {
            ranks: u32::try_from(ranks).unwrap_or(u32::MAX),
            buckets: reduced,
            seen,
            totals,
        })
    }

    /// The part of a rank that has no state yet: it contributes nothing, and keeps the results.
    fn listen(&mut self, share: &Share, group: &mut Group) -> Result<Results, Fault> {
        // The others do not wait for it any more.
        self.model.start();
        // Of a state that it held before, if any.
        self.buckets.iter_mut().for_each(Bucket::clear_own);
        let done = AtomicUsize::new(0);
        let mut reduced = vec![Reduced::default(); self.buckets.len()];
        let mut lane = Lane {
            group: &mut *group,
            buckets: &mut self.buckets,
            reduced: &mut reduced,
            scaler: None,
            with_norm: self.config.max_norm.is_some(),
            scratch: &mut self.scratch,
            done: &done,
            // It computes nothing.
            beside: false,
            seen: lane::Seen::default(),
        };
        let seen = lane::all(&mut lane, None)?;
        let totals = Totals::default().reduce(group, self.extras)?;
        Ok(Results {
            ranks: u32::try_from(share.entered.len()).unwrap_or(u32::MAX),
            buckets: reduced,
            seen,
            totals,
        })
    }

    /// Takes in an evaluation of the model as it is; whether that is the best one.
    fn evaluated(&mut self, measured: &Measured) -> bool {
        let steps = self.progress.steps;
        self.progress.evaluated = Some(steps);
        let mut evaluation = Evaluation {
            step: steps,
            epochs: self.sampler.epochs(),
            measured: measured.clone(),
            best: false,
        };
        evaluation.best = self
            .progress
            .best
            .as_ref()
            .is_none_or(|best| self.config.better.prefers(measured, &best.measured));
        self.latest = Some(evaluation.clone());
        if evaluation.best {
            self.progress.best = Some(evaluation.clone());
            let encoded = self.config.keep_best.then(|| self.model.encode());
            self.best_model = encoded.filter(|model| !model.is_empty());
        }
        let best = evaluation.best;
        self.news.push_back(News::Evaluated(evaluation));
        best
    }

    /// The mean gradient, clipped, goes to where backward's sums were. Its norm before, if it is clipped.
    fn mean(&mut self, results: &Results) -> Option<f64> {
        let samples = results.totals.measured.samples as f64;
        let norm = self.config.max_norm.map(|most| {
            let norm = results.seen.squares.sqrt() / samples;
            (norm, clip::factor(norm, most).unwrap_or(0.0))
        });
        let factor = norm.map_or(1.0, |(_, factor)| f64::from(factor)) / samples;
        let factor = factor as f32;
        for (to, from) in self.sums.buffers.iter_mut().zip(&results.buckets) {
            for (to, from) in to.iter_mut().zip(&from.sum) {
                *to = from * factor;
            }
        }
        norm.map(|(norm, _)| norm)
    }
}

impl<M: Model> Training for Parallel<M> {
    type Results = Results;

    fn results(&mut self, step: u64, share: &Share, group: &mut Group) -> Result<Results, Fault> {
        if let Some(error) = self.fault.take() {
            return Err(fault(error));
        }
        self.share = Some(share.clone());
        let results = if share.is_entered() {
            self.own(step, share, group)?
        } else {
            self.listen(share, group)?
        };
        if !results.seen.finite && self.config.mixed.is_none() {
            return Err(fault(TrainError::NotFinite { step }));
        }
        Ok(results)
    }

    fn commit(&mut self, step: u64, results: &Results) {
        let timed = self.timed.take().filter(|(of, _, _)| *of == step);
        if results.totals.held_out > 0 {
            let best = self.evaluated(&results.totals.evaluated);
            self.save_evaluated(step, best);
        }
        self.progress.transactions = step + 1;
        self.kept_back = None;
        if results.totals.placed == 0 {
            self.saved_already(step);
            // The training is over; only the evaluation was left.
            self.buckets.iter_mut().for_each(Bucket::skip);
            return;
        }
        let began = Instant::now();
        let plan = self.sampler.plan(results.ranks as usize);
        let at = At {
            step: self.progress.steps,
            epoch: self.sampler.epochs(),
        };
        let sampler = self.sampler.config();
        let batch = sampler.batch.over(results.ranks as usize);
        let batch = batch.min(sampler.samples);
        if self.progress.steps == 0 {
            self.rate = Rate::new(self.config.schedule.clone(), batch, self.config.ramp);
        }
        self.rate.set_batch(batch, at);
        let rate = self.rate.at(at);
        let scale = self.scaler.as_ref().map(Scaler::scale);
        let verdict = if results.seen.finite {
            Verdict::Apply
        } else {
            Verdict::Skip
        };
        if let Some(scaler) = &mut self.scaler {
            scaler.commit(verdict);
        }
        let measured = &results.totals.measured;
        let skipped = verdict == Verdict::Skip || measured.samples == 0;
        let mut norm = None;
        if skipped {
            self.buckets.iter_mut().for_each(Bucket::skip);
        } else {
            norm = self.mean(results);
            for (bucket, reduced) in self.buckets.iter_mut().zip(&results.buckets) {
                bucket.commit(reduced);
            }
            self.model.update(&Update {
                step: self.progress.steps,
                rate,
                gradient: &self.sums.buffers,
                measured,
            });
            self.ask_model();
        }
        self.sums.forget();
        self.progress.trained(&plan);
        if let Err(error) = self.sampler.commit(&plan) {
            // Cannot happen: the plan is the sampler's own.
            self.fault = Some(error.into());
        }
        self.news.push_back(News::Step(Report {
            step: self.progress.steps,
            epochs: self.sampler.epochs(),
            ranks: results.ranks,
            samples: results.totals.placed,
            training_loss: measured.mean_loss(),
            rate,
            scale,
            skipped,
            norm,
            times: timed.map(|(_, since, times)| Times {
                total: since.elapsed(),
                updating: began.elapsed(),
                ..times
            }),
        }));
        let next = self.sampler.plan(results.ranks as usize).epoch();
        if next > self.progress.told {
            self.progress.told = next;
            self.news.push_back(News::Epoch(next));
        }
    }

    /// As they are without compression.
    fn results_len(&self) -> Option<usize> {
        let values: usize = self.ranges.iter().map(Range::len).sum();
        Some(size_of::<f32>().saturating_mul(values))
    }

    fn encode_results(&self, results: &Results) -> Vec<u8> {
        results.encode()
    }

    fn decode_results(&self, bytes: &[u8]) -> Option<Results> {
        Results::decode(bytes, self.ranges.iter().map(Range::len))
    }

    fn has_long_steps(&self) -> bool {
        self.held_out.is_some()
    }

    fn recycle(&mut self, results: Results) {
        self.spare = results.buckets;
    }

    fn encode_state(&self) -> Vec<u8> {
        self.encode()
    }

    fn decode_state(&mut self, bytes: &[u8]) -> bool {
        self.decode(bytes)
    }

    fn freeze(&mut self) -> Box<dyn Frozen> {
        Box::new(self.hand_over())
    }

    fn landing(&mut self) -> Option<Box<dyn Landing>> {
        let landing: Box<dyn Landing> = Box::new(self.land()?);
        Some(landing)
    }

    fn adopt_state(&mut self, landing: Box<dyn Landing>) -> bool {
        self.adopt(landing)
    }

    fn fault(&mut self) -> Option<BoxError> {
        self.ask_model();
        self.fault.take().map(Into::into)
    }

    fn quarantined(&mut self) {
        self.forget_own();
    }

    fn restore(&mut self, group: &mut Group) -> Result<u64, Fault> {
        restore::restore(self, group)
    }

    fn boundary(&mut self, group: &mut Group) -> Result<(), Fault> {
        Ok(self.keep_back(group)?)
    }

    fn regrouped(&mut self, group: &mut Group, survived: bool) -> Result<(), Fault> {
        if let Some(saves) = &mut self.saves {
            saves.begin(group)?;
        }
        self.take_up(group, survived)?;
        self.prepare_to_hand_over().map_err(fault)
    }
}

pub(super) fn fault(error: TrainError) -> Fault {
    Fault::Training(error.into())
}
