//! The demo worker on live membership: it stays in its process while the generations change.

use std::time::Duration;

use super::args::WorkerArgs;
use super::data::Digits;
use super::events::{Event, EventLog};
use super::train::{State, Sums, Trainer};
use super::worker::{Ending, WorkerError, restore};
use crate::checkpoint;
use crate::collective::Group;
use crate::live::{Fault, Outcome, Patience, Share, Training, Worker};
use crate::session::Session;

/// Steps that nobody has to compute come no faster than this.
const BETWEEN_IDLE: Duration = Duration::from_millis(1);

/// The digits as a live training.
#[derive(Debug)]
struct Live<'a> {
    args: &'a WorkerArgs,
    trainer: Trainer<'a>,
    /// Commits since the last look: steps that are complete, and their loss.
    committed: Vec<(u64, f32)>,
    restored_from: Option<u64>,
}

impl Training for Live<'_> {
    /// None of a step after the last one: such steps pass while a newcomer has yet to catch up.
    type Results = Option<Sums>;

    fn results(
        &mut self,
        step: u64,
        share: &Share,
        group: &mut Group,
    ) -> Result<Option<Sums>, Fault> {
        if step >= self.args.steps {
            std::thread::sleep(BETWEEN_IDLE);
            return Ok(None);
        }
        self.trainer
            .sums(step, share, group)
            .map(Some)
            .map_err(|error| match WorkerError::from(error) {
                WorkerError::Group(error) => Fault::Group(error),
                other => Fault::Training(other.into()),
            })
    }

    fn commit(&mut self, _step: u64, sums: &Option<Sums>) {
        let Some(sums) = sums else { return };
        self.trainer.commit(sums);
        let done = self.trainer.state.step;
        self.committed.push((done, sums.mean_loss()));
    }

    fn encode_results(&self, sums: &Option<Sums>) -> Vec<u8> {
        sums.as_ref().map(Sums::encode).unwrap_or_default()
    }

    fn decode_results(&self, bytes: &[u8]) -> Option<Option<Sums>> {
        match bytes {
            [] => Some(None),
            bytes => Sums::decode(bytes).map(Some),
        }
    }

    fn encode_state(&self) -> Vec<u8> {
        self.trainer.state.encode()
    }

    fn decode_state(&mut self, bytes: &[u8]) -> bool {
        let state = State::decode(bytes).filter(|state| state.seed == self.args.seed);
        let Some(state) = state else { return false };
        self.trainer.state = state;
        true
    }

    fn restore(&mut self, group: &mut Group) -> Result<u64, Fault> {
        let (state, from) = restore(self.args, group).map_err(|error| match error {
            WorkerError::Group(error) => Fault::Group(error),
            other => Fault::Training(other.into()),
        })?;
        self.restored_from = from;
        self.trainer.state = state;
        Ok(self.trainer.state.step)
    }
}

/// Trains until the end. `Ok(None)`: this launcher restarts workers with every generation.
///
/// # Errors
/// See [`WorkerError`]; checkpoints that were saved before stay valid.
pub(super) fn run(
    args: &WorkerArgs,
    session: &mut Session,
    digits: &Digits,
) -> Result<Option<Ending>, WorkerError> {
    let training = Live {
        args,
        trainer: Trainer::new(digits, State::new(args.seed))?,
        committed: Vec::new(),
        restored_from: None,
    };
    match Worker::join(session, training, Patience::default()) {
        Ok(worker) => Run {
            worker,
            args,
            log: None,
            first: false,
            saved: None,
        }
        .train(digits)
        .map(Some),
        Err(_) => Ok(None),
    }
}

struct Run<'a, 'b> {
    worker: Worker<'a, Live<'b>>,
    args: &'b WorkerArgs,
    /// Of the generation that this rank is in.
    log: Option<EventLog>,
    /// The generation's first step is yet to come.
    first: bool,
    saved: Option<u64>,
}

impl Run<'_, '_> {
    fn train(mut self, digits: &Digits) -> Result<Ending, WorkerError> {
        let mut instead = None;
        loop {
            let outcome = match instead.take() {
                Some(outcome) => outcome,
                None => self.worker.advance()?,
            };
            let stepped = matches!(outcome, Outcome::Stepped { .. });
            match outcome {
                Outcome::Regrouped {
                    place, survived, ..
                } => {
                    let (events, number) = (&self.args.events, place.term.number());
                    self.log = Some(EventLog::open(events, number, place.rank)?);
                    self.first = true;
                    let step = self.worker.committed().min(self.args.steps);
                    let kept = survived && step > 0;
                    let restored = self.worker.training.restored_from.take();
                    self.write(Event::Start {
                        step,
                        world: place.world,
                        restart: place.restarts.into(),
                        restored_from: restored
                            .or(kept.then_some(step))
                            .or((!survived).then_some(step)),
                        linked: true,
                    })?;
                }
                Outcome::Stepped { .. } | Outcome::CaughtUp { .. } => self.stepped()?,
                // Its state is compared with nobody's.
                Outcome::Waiting | Outcome::Quarantined { .. } => {}
                Outcome::Checkpoint { step } => {
                    self.save()?;
                    if self.worker.saver().is_some() {
                        self.worker.saved(step);
                    }
                }
                Outcome::Ended { why: _, lost } => {
                    let step = self.worker.committed().min(self.args.steps);
                    if let Some(peer) = lost {
                        self.write(Event::Lost { step, peer })?;
                    }
                }
                Outcome::Boundary { step, reason, .. } => {
                    self.save()?;
                    let reason = reason.to_string();
                    self.write(Event::Stop { step, reason })?;
                    continue;
                }
            }
            // All ranks see this alike: nobody ends while a newcomer still has to catch up.
            let share = self.worker.share();
            let all = self.worker.group().is_some() && share.entered.len() == share.world as usize;
            if all && self.worker.committed() >= self.args.steps {
                instead = self.worker.finish()?;
                if instead.is_none() {
                    return self.done(digits);
                }
            } else if stepped && !self.args.pause.is_zero() {
                std::thread::sleep(self.args.pause);
            }
        }
    }

    fn write(&mut self, event: Event) -> Result<(), WorkerError> {
        if let Some(log) = &mut self.log {
            log.write(event)?;
        }
        Ok(())
    }

    fn stepped(&mut self) -> Result<(), WorkerError> {
        for (step, loss) in std::mem::take(&mut self.worker.training.committed) {
            if std::mem::take(&mut self.first) {
                self.write(Event::FirstStep { step, loss })?;
            }
            if step.is_multiple_of(self.args.report_every) {
                self.write(Event::Step { step, loss })?;
            }
        }
        let done = self.worker.training.trainer.state.step;
        if done.is_multiple_of(self.args.save_every) {
            self.save()?;
        }
        Ok(())
    }

    /// One rank writes the state, for the day when every rank dies.
    fn save(&mut self) -> Result<(), WorkerError> {
        let step = self.worker.training.trainer.state.step;
        if !self.worker.saves() || self.saved == Some(step) {
            return Ok(());
        }
        let state = self.worker.training.encode_state();
        checkpoint::save(&self.args.checkpoints, step, &state)?;
        self.saved = Some(step);
        self.write(Event::Saved { step })
    }

    fn done(mut self, digits: &Digits) -> Result<Ending, WorkerError> {
        self.save()?;
        let state = &self.worker.training.trainer.state;
        let (step, outcome) = (state.step, state.outcome(digits));
        self.write(Event::Done {
            step,
            outcome: outcome.clone(),
        })?;
        Ok(Ending::Done(outcome))
    }
}
