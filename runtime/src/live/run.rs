//! The live loop: one step or one change of the generation at a time.

mod form;
mod newcomer;
mod step;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use muster_protocol::control::live::Assignment;
use muster_protocol::live::{Event, Live};

use self::form::Formed;
use self::newcomer::Copying;
use self::step::Stepped;
use super::outcome::{LiveError, Outcome, Patience, passes};
use super::seat::Seat;
use super::training::{Fault, Share, Training};
use crate::collective::{Group, GroupError};
use crate::session::{Directive, Metrics, Session};

/// A rank that lives through changes of its generation.
pub struct Worker<'a, T: Training> {
    session: &'a mut Session,
    seat: Seat,
    pub(super) place: Assignment,
    pub(super) live: Live,
    /// Counts the times that this generation's ranks began anew in place.
    pub(super) turn: u64,
    /// The ranks' states are compared before each step that is a multiple of this.
    pub(super) compare_every: Option<u64>,
    /// Before this step of the generation they were compared last.
    pub(super) compared: Option<u64>,
    pub training: T,
    patience: Patience,
    pub(super) formed: Option<Formed>,
    pub(super) kept: BTreeMap<u64, T::Results>,
    /// The step that comes next.
    pub(super) next: Option<u64>,
    copying: Option<Copying>,
    say_ready: bool,
    /// A boundary at which all stop.
    stopped_at: Option<u64>,
    /// The first assignment is taken up without waiting.
    fresh: bool,
    over_since: Option<Instant>,
    /// The slowest of the last steps, decaying. Time between two steps does not count.
    slowest: Duration,
}

impl<T: Training> std::fmt::Debug for Worker<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker")
            .field("place", &self.place)
            .field("live", &self.live)
            .finish_non_exhaustive()
    }
}

impl<'a, T: Training> Worker<'a, T> {
    /// Takes the process's seat. `None` where the launcher restarts workers with every generation;
    /// the training is given back.
    pub fn join(session: &'a mut Session, training: T, patience: Patience) -> Result<Self, T> {
        let Some((seat, place)) = Seat::take(session) else {
            return Err(training);
        };
        Ok(Worker {
            session,
            seat,
            live: Live::new(place.lineage),
            place,
            turn: 0,
            compare_every: None,
            compared: None,
            training,
            patience,
            formed: None,
            kept: BTreeMap::new(),
            next: None,
            copying: None,
            say_ready: false,
            stopped_at: None,
            fresh: true,
            over_since: None,
            slowest: Duration::ZERO,
        })
    }

    /// Steps that are committed here.
    pub fn committed(&self) -> u64 {
        self.live.committed()
    }

    /// This rank's place in the newest generation.
    pub fn place(&self) -> &Assignment {
        &self.place
    }

    /// The ranks that work on the step that comes next: the same on every rank, between two steps.
    pub fn share(&self) -> Share {
        Share {
            entered: self.live.entered().collect(),
            rank: self.place.rank,
            world: self.place.world,
        }
    }

    /// The rank that saves, if the state is to be saved between two steps: the first of those that train. The same
    /// on every rank; a rank that has not caught up yet is none.
    pub fn saver(&self) -> Option<u32> {
        self.live.entered().next()
    }

    /// Whether that is this rank.
    pub fn saves(&self) -> bool {
        self.is_settled() && self.saver() == Some(self.place.rank)
    }

    /// The collectives of the generation, while there is one. Between two steps each may take
    /// [`Patience::operation`].
    pub fn group(&mut self) -> Option<&mut Group> {
        self.formed.as_mut().map(|f| &mut f.group)
    }

    /// Tells the launcher that this rank has saved for [`Outcome::Checkpoint`], or has nothing to save.
    pub fn saved(&self, step: u64) {
        self.session.saved(step);
    }

    /// Tells how this rank trains ([`Session::report`]).
    pub fn report(&mut self, metrics: &Metrics) {
        self.session.report(metrics);
    }

    /// Whether this rank holds the state of its generation.
    pub fn is_settled(&self) -> bool {
        self.live.is_settled()
    }

    /// Does the next step, or takes part in the next change.
    ///
    /// # Errors
    /// This process cannot go on; see [`LiveError`].
    pub fn advance(&mut self) -> Result<Outcome, LiveError> {
        if let Some(step) = self.stopped_at.take() {
            self.session.acknowledge(step);
            self.leave();
        }
        if self.formed.is_none() {
            return self.regroup();
        }
        if self.seat.has_ended() {
            return Ok(self.ended("the launcher ended it".into(), None));
        }
        if let Some(outcome) = self.copied()? {
            return Ok(outcome);
        }
        let Some(step) = self.next else {
            return Ok(self.ended("no step is to be done".into(), None));
        };
        match self.session.step(step)? {
            Directive::Continue => {}
            Directive::Checkpoint { step } => return Ok(Outcome::Checkpoint { step }),
            Directive::Stop { deadline, reason } => {
                // Before anything is handed over or saved; who deviates stops before the same step, in the next call.
                match self.set_apart(step) {
                    Ok(Some(ranks)) => return Ok(Outcome::Quarantined { ranks, step }),
                    Ok(None) | Err(LiveError::Group(_)) => {}
                    Err(error) => return Err(error),
                }
                self.stopped_at = Some(step);
                if let Some(formed) = &mut self.formed {
                    match self.training.boundary(&mut formed.group) {
                        // Whoever is lost now would have left anyway.
                        Ok(()) | Err(Fault::Group(_)) => {}
                        Err(fault) => return Err(fault.into()),
                    }
                }
                return Ok(Outcome::Boundary {
                    step,
                    reason,
                    deadline,
                });
            }
        }
        match self.step(step) {
            Ok(Stepped::Complete) => Ok(Outcome::Stepped {
                step,
                committed: self.live.committed(),
            }),
            Ok(Stepped::Quarantined(ranks)) => Ok(Outcome::Quarantined { ranks, step }),
            Err(LiveError::Group(error)) if passes(&error) => Ok(self.ended_by(&error)),
            Err(error) => Err(error),
        }
    }

    /// The last thing that a training does, once it is over on every rank ([`share`](Self::share) tells whether all
    /// train): waits until all have got here, so that nobody leaves while another is still in the last step. States
    /// are compared first, if they ever are. `None`: all are here, and the process may end. Otherwise
    /// what went on instead, as of [`advance`](Self::advance), which is to be called again: a rank that was lost may
    /// have left another without the last results, which this one holds.
    ///
    /// # Errors
    /// This process cannot go on; see [`LiveError`].
    pub fn finish(&mut self) -> Result<Option<Outcome>, LiveError> {
        let Some(step) = self.next.filter(|_| self.formed.is_some()) else {
            return Ok(Some(self.ended("no step is to be done".into(), None)));
        };
        match self.last_barrier(step) {
            Ok(None) => Ok(None),
            Ok(Some(ranks)) => Ok(Some(Outcome::Quarantined { ranks, step })),
            Err(LiveError::Group(error)) if passes(&error) => Ok(Some(self.ended_by(&error))),
            Err(error) => Err(error),
        }
    }

    fn last_barrier(&mut self, step: u64) -> Result<Option<Vec<u32>>, LiveError> {
        if let Some(ranks) = self.set_apart(step)? {
            return Ok(Some(ranks));
        }
        if let Some(formed) = &mut self.formed {
            formed.group.barrier()?;
        }
        Ok(None)
    }

    /// Leaves the generation for good.
    fn leave(&mut self) {
        // Dropped first: nothing of this generation is sent once the seat is parked.
        self.formed = None;
        self.forget_copy();
        self.next = None;
        self.over_since.get_or_insert_with(Instant::now);
        self.seat.park();
    }

    pub(super) fn ended_by(&mut self, error: &GroupError) -> Outcome {
        let lost = match error {
            GroupError::PeerLost { rank, .. } => Some(*rank),
            _ => None,
        };
        self.ended(error.to_string(), lost)
    }

    fn ended(&mut self, why: String, lost: Option<u32>) -> Outcome {
        let number = self.number();
        self.leave();
        // Cannot fail: a loss is expected in every phase.
        let _parked = self.live.handle(Event::Lost { number });
        Outcome::Ended { why, lost }
    }
}
