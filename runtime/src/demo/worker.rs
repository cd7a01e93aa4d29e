//! The demo worker's life: form, restore, train, and stop when told.

use super::args::WorkerArgs;
use super::data::{DataError, Digits};
use super::events::{Event, EventLog};
use super::live;
use super::train::{Outcome, State, StepError, Trainer};
use crate::checkpoint::{self, CheckpointError};
use crate::collective::{Group, GroupConfig, GroupError};
use crate::env::{EnvError, WorkerEnv};
use crate::live::LiveError;
use crate::session::{Directive, Session, SessionError};

/// How a worker ended that did what it was asked to.
#[derive(Clone, Debug, PartialEq)]
pub enum Ending {
    /// The training is complete.
    Done(Outcome),
    /// Stopped at an agreed step, saved and acknowledged.
    Stopped { step: u64 },
}

#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error(transparent)]
    Env(#[from] EnvError),
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Group(#[from] GroupError),
    #[error(transparent)]
    Live(#[from] LiveError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Step(StepError),
    #[error("cannot write events; check the directory given by --events")]
    Events(#[from] std::io::Error),
    #[error(
        "the checkpoint of step {step} is not of this training (seed {seed}); use another --checkpoints directory"
    )]
    ForeignCheckpoint { step: u64, seed: u64 },
}

impl From<StepError> for WorkerError {
    fn from(error: StepError) -> WorkerError {
        match error {
            StepError::Group(error) => WorkerError::Group(error),
            other => WorkerError::Step(other),
        }
    }
}

/// The whole of a demo worker; the result is the process's exit code. 0: done, or stopped as agreed; 1: a failure, such
/// as the loss of a peer, with one line on stderr; 2: wrong arguments or environment.
pub fn worker(args: &WorkerArgs) -> u8 {
    let place = WorkerEnv::from_env().map_err(WorkerError::from);
    let session = Session::from_env().map_err(WorkerError::from);
    let outcome = match (place, session) {
        (Ok(env), Ok(mut session)) => {
            run(args, &env, session.as_mut()).map_err(|error| (Some(env.rank), error))
        }
        (Err(error), _) | (_, Err(error)) => Err((None, error)),
    };
    match outcome {
        Ok(_) => 0,
        Err((rank, error)) => {
            let who = rank.map_or_else(String::new, |rank| format!(" (rank {rank})"));
            let mut causes = String::new();
            let mut source = std::error::Error::source(&error);
            while let Some(cause) = source {
                causes.push_str(&format!(": {cause}"));
                source = cause.source();
            }
            eprintln!("demo worker{who}: {error}{causes}");
            if rank.is_some() { 1 } else { 2 }
        }
    }
}

/// Trains at the given place until the end, or until the session says stop.
///
/// # Errors
/// See [`WorkerError`]; checkpoints that were saved before stay valid.
pub fn run(
    args: &WorkerArgs,
    env: &WorkerEnv,
    mut session: Option<&mut Session>,
) -> Result<Ending, WorkerError> {
    let digits = Digits::load()?;
    if let Some(session) = session.as_mut().filter(|_| args.live)
        && let Some(ending) = live::run(args, session, &digits)?
    {
        return Ok(ending);
    }
    let mut log = EventLog::open(&args.events, env.generation, env.rank)?;
    let mut group = Group::form(&GroupConfig::from_env(env))?;
    let (state, restored_from) = restore(args, &mut group)?;
    log.write(Event::Start {
        step: state.step,
        world: env.world,
        restart: env.restart,
        restored_from,
        linked: session.is_some(),
    })?;
    let mut run = Run {
        args,
        group,
        log,
        trainer: Trainer::new(&digits, state)?,
        saved: None,
    };
    let ending = run.train(session, &digits);
    if let Err(WorkerError::Group(GroupError::PeerLost { rank, .. })) = &ending {
        let (step, peer) = (run.trainer.state.step, *rank);
        run.log.write(Event::Lost { step, peer })?;
    }
    ending
}

/// The newest state that any rank holds, on every rank. Each looks in its own directory, which
/// need not be shared; the lowest rank that has the newest hands it out.
pub(super) fn restore(
    args: &WorkerArgs,
    group: &mut Group,
) -> Result<(State, Option<u64>), WorkerError> {
    let (own, skipped) = checkpoint::load_newest(&args.checkpoints)?;
    for skipped in skipped {
        let (path, why) = (skipped.path.display(), skipped.why);
        eprintln!(
            "demo worker (rank {}): passed over {path}: {why}",
            group.rank()
        );
    }
    let held = own.as_ref().map_or(0, |own| own.step + 1);
    let all = group.all_gather_bytes(&held.to_le_bytes())?;
    let mut newest = (0, 0);
    for (rank, bytes) in (0..).zip(&all) {
        let held = bytes.as_slice().try_into().map_or(0, u64::from_le_bytes);
        if held > newest.0 {
            newest = (held, rank);
        }
    }
    let (held, owner) = newest;
    if held == 0 {
        return Ok((State::new(args.seed), None));
    }
    let payload = own.map_or_else(Vec::new, |own| own.payload);
    let payload = group.broadcast_bytes(owner, &payload)?;
    match State::decode(&payload) {
        Some(state) if state.seed == args.seed && state.step + 1 == held => {
            let step = state.step;
            Ok((state, Some(step)))
        }
        _ => Err(WorkerError::ForeignCheckpoint {
            step: held - 1,
            seed: args.seed,
        }),
    }
}

struct Run<'a> {
    args: &'a WorkerArgs,
    group: Group,
    log: EventLog,
    trainer: Trainer<'a>,
    /// The newest step that this process has put on disk.
    saved: Option<u64>,
}

impl Run<'_> {
    fn train(
        &mut self,
        mut session: Option<&mut Session>,
        digits: &Digits,
    ) -> Result<Ending, WorkerError> {
        let first = self.trainer.state.step;
        while self.trainer.state.step < self.args.steps {
            let step = self.trainer.state.step;
            if let Some(session) = session.as_mut() {
                match session.step(step) {
                    Ok(Directive::Continue) => {}
                    Ok(Directive::Checkpoint { step }) => {
                        self.save_together()?;
                        session.saved(step);
                    }
                    Ok(Directive::Stop { reason, .. }) => {
                        self.save_together()?;
                        let reason = reason.to_string();
                        self.log.write(Event::Stop { step, reason })?;
                        session.acknowledge(step);
                        return Ok(Ending::Stopped { step });
                    }
                    Err(error) => {
                        // Step `step` was not begun, so the state is whole; whether the others
                        // stop here is unknown, so nobody is waited for.
                        self.save_alone()?;
                        return Err(error.into());
                    }
                }
            }
            let loss = self.trainer.step(&mut self.group)?;
            let done = step + 1;
            if step == first {
                self.log.write(Event::FirstStep { step: done, loss })?;
            }
            if done.is_multiple_of(self.args.report_every) {
                self.log.write(Event::Step { step: done, loss })?;
            }
            if done.is_multiple_of(self.args.save_every) {
                self.save_together()?;
            }
            if !self.args.pause.is_zero() {
                std::thread::sleep(self.args.pause);
            }
        }
        self.save_together()?;
        let outcome = self.trainer.state.outcome(digits);
        self.log.write(Event::Done {
            step: self.trainer.state.step,
            outcome: outcome.clone(),
        })?;
        Ok(Ending::Done(outcome))
    }

    /// Rank 0 writes the state, which is the same everywhere; all go on when it is on disk.
    fn save_together(&mut self) -> Result<(), WorkerError> {
        self.save_alone()?;
        self.group.barrier()?;
        Ok(())
    }

    fn save_alone(&mut self) -> Result<(), WorkerError> {
        let step = self.trainer.state.step;
        if self.group.rank() != 0 || self.saved == Some(step) {
            return Ok(());
        }
        checkpoint::save(&self.args.checkpoints, step, &self.trainer.state.encode())?;
        self.saved = Some(step);
        self.log.write(Event::Saved { step })?;
        Ok(())
    }
}
