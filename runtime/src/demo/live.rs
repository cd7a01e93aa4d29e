//! The demo worker on live membership: it stays in its process while the generations change.

use super::args::WorkerArgs;
use super::data::Digits;
use super::events::{Event, EventLog};
use super::train::{State, Sums, Trainer};
use super::worker::{Ending, WorkerError, restore};
use crate::checkpoint;
use crate::collective::Group;
use crate::live::{Fault, Outcome, Patience, Share, Training, Worker};
use crate::session::Session;

/// The digits as a live training.
#[derive(Debug)]
struct Live<'a> {
    args: &'a WorkerArgs,
    trainer: Trainer<'a>,
    /// What was committed since it was last looked at: steps that are complete, and their loss.
    committed: Vec<(u64, f32)>,
    restored_from: Option<u64>,
}

impl Training for Live<'_> {
    type Results = Sums;

    fn results(&mut self, step: u64, share: &Share, group: &mut Group) -> Result<Sums, Fault> {
        self.trainer
            .sums(step, share, group)
            .map_err(|error| match WorkerError::from(error) {
                WorkerError::Group(error) => Fault::Group(error),
                other => Fault::Training(other.into()),
            })
    }

    fn commit(&mut self, _step: u64, sums: &Sums) {
        self.trainer.commit(sums);
        let done = self.trainer.state.step;
        self.committed.push((done, sums.mean_loss()));
    }

    fn encode_results(&self, sums: &Sums) -> Vec<u8> {
        sums.encode()
    }

    fn decode_results(&self, bytes: &[u8]) -> Option<Sums> {
        Sums::decode(bytes)
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
        trainer: Trainer::new(digits, State::new(args.seed)),
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
        loop {
            match self.worker.advance()? {
                Outcome::Regrouped {
                    place, survived, ..
                } => {
                    let (events, number) = (&self.args.events, place.term.number());
                    self.log = Some(EventLog::open(events, number, place.rank)?);
                    self.first = true;
                    let step = self.worker.committed();
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
                Outcome::Stepped { .. } => {
                    self.stepped()?;
                    if self.worker.is_settled() && self.worker.committed() >= self.args.steps {
                        return self.done(digits);
                    }
                    if !self.args.pause.is_zero() {
                        std::thread::sleep(self.args.pause);
                    }
                }
                Outcome::CaughtUp { .. } => self.stepped()?,
                // Its state is compared with nobody's.
                Outcome::Waiting | Outcome::Quarantined { .. } => {}
                Outcome::Checkpoint { step } => {
                    self.save()?;
                    self.worker.saved(step);
                }
                Outcome::Ended { why: _, lost } => {
                    let step = self.worker.committed();
                    if let Some(peer) = lost {
                        self.write(Event::Lost { step, peer })?;
                    }
                }
                Outcome::Boundary { step, reason, .. } => {
                    self.save()?;
                    let reason = reason.to_string();
                    self.write(Event::Stop { step, reason })?;
                }
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
        if self.worker.committed().is_multiple_of(self.args.save_every) {
            self.save()?;
        }
        Ok(())
    }

    /// Rank 0 writes the state, for the day when every rank dies.
    fn save(&mut self) -> Result<(), WorkerError> {
        let step = self.worker.committed();
        let settled = self.worker.is_settled();
        if self.worker.place().rank != 0 || !settled || self.saved == Some(step) {
            return Ok(());
        }
        let state = self.worker.training.encode_state();
        checkpoint::save(&self.args.checkpoints, step, &state)?;
        self.saved = Some(step);
        self.write(Event::Saved { step })
    }

    fn done(mut self, digits: &Digits) -> Result<Ending, WorkerError> {
        self.save()?;
        if let Some(group) = self.worker.group() {
            // Nobody leaves while another is still in the last step. Who is gone by then had all.
            let _gone = group.barrier();
        }
        let state = &self.worker.training.trainer.state;
        let (step, outcome) = (state.step, state.outcome(digits));
        self.write(Event::Done {
            step,
            outcome: outcome.clone(),
        })?;
        Ok(Ending::Done(outcome))
    }
}
