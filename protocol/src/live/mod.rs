//! The live step: how ranks that survive a loss go on in their own process and lose nothing.
//!
//! A step is a transaction. Inside it nothing that is registered changes; all its collectives
//! happen, out of place; then it is committed, deterministically and without collectives. The
//! results of step s are kept until the first collective of s + 1 to which every rank contributes
//! completes, for a rank may commit s and begin s + 1 while another still waits for bytes of one
//! that died. After a loss all ranks of the new generation exchange a [`Report`] and come to the
//! same [`verdict`]: if any survivor holds all results of s, all commit exactly those; else s is
//! done again. No step mixes generations, no committed step is undone, and no vote is paid per step.
//!
//! A newcomer listens from boundary s0 of its first generation on: it takes part in every collective
//! with no samples and keeps the results, while it copies a frozen s0 from survivors; then it
//! commits what it kept, and enters at the next boundary that all ranks see alike. When it is too
//! slow it holds up a collective, and so the survivors wait for it by themselves.
//!
//! [`Live`] is one rank's part. It has no clock: deadlines belong to the collectives, whose failure
//! is [`Event::Lost`]. It is driven like the other cores; effects are to be carried out in order.

mod verdict;

#[cfg(test)]
mod tests;

use std::collections::VecDeque;

pub use verdict::{Disagreement, History, Report, Verdict, verdict};

use crate::ids::Digest;

/// Events at this rank. `number` is the generation that it belongs to; one of an older generation is ignored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A generation starts in which this process has rank `rank`. Anything that the one before has not finished is
    /// over.
    Assigned { number: u64, rank: u32 },
    /// Every rank's report, in rank order.
    Reported { number: u64, reports: Vec<Report> },
    /// The results that [`Effect::Fetch`] asked for are here, whole and verified.
    Fetched { number: u64 },
    /// The state that [`Effect::CopyState`] asked for is here, whole and verified.
    Copied { number: u64 },
    /// The restore that [`Effect::Restore`] asked for is done: all ranks have the same state, of so many steps.
    Restored { number: u64, committed: u64 },
    /// The first collective of the step to which every rank contributes is complete here. These
    /// ranks said in it that they have caught up.
    UnderWay {
        number: u64,
        step: u64,
        ready: Vec<u32>,
    },
    /// All results of the step are here.
    Complete { number: u64, step: u64 },
    /// A collective failed; nothing of this generation will complete here any more.
    Lost { number: u64 },
}

/// Effects to be carried out, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Exchange reports with all ranks of the generation.
    Exchange(Report),
    /// Drop what there is of results that nobody will commit.
    Discard,
    /// Give the kept results of this step to these ranks.
    HandResults { step: u64, to: Vec<u32> },
    /// Get all results of this step from that rank.
    Fetch { step: u64, from: u32 },
    /// Change the state by the results of this step, and keep these unmodified.
    Commit { step: u64 },
    /// Drop the kept results of this step.
    Release { step: u64 },
    /// Freeze a copy of the state at this boundary, for these ranks to copy while the training
    /// goes on.
    HandState { boundary: u64, to: Vec<u32> },
    /// Copy the frozen state of this boundary from these ranks, in parallel, and forget any other.
    CopyState { boundary: u64, from: Vec<u32> },
    /// Nobody holds any state: all load the same checkpoint, or begin anew.
    Restore,
    /// Keep the results of this step for later: the state is not here yet.
    Keep { step: u64 },
    /// Say in the next step's first collective that this rank has caught up.
    SayReady,
    /// Do the collectives of this step: with the samples that it is dealt, or with none.
    Begin { step: u64, with_samples: bool },
}

/// The driver and the core disagree about what comes next: a defect, never a fault of the network.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Disagreement(#[from] Disagreement),
    #[error("{what} of step {step} came while step {expected} was awaited")]
    OutOfOrder {
        what: &'static str,
        step: u64,
        expected: u64,
    },
    #[error("{what} came in a phase that does not await it")]
    Unexpected { what: &'static str },
    #[error("rank {rank} is not among {ranks} reports")]
    NotThere { rank: u32, ranks: usize },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// In no generation: whatever was under way is over.
    Parked,
    Exchanging,
    /// Survivors may wait for results; `next` is the generation's first step, `history` what is committed before it.
    Fetching {
        next: u64,
        history: History,
    },
    Restoring,
    InStep {
        step: u64,
        under_way: bool,
    },
}

/// One rank's part in live training.
#[derive(Clone, Debug)]
pub struct Live {
    lineage: Digest,
    number: u64,
    rank: u32,
    phase: Phase,
    settled: Option<u64>,
    committed: u64,
    holds: Option<u64>,
    /// The names of what is committed, and of what was before the newest step.
    history: History,
    before: History,
    /// A newcomer whose copy is not here yet: the steps that it has listened to.
    listening: Option<VecDeque<u64>>,
    /// By rank: whose samples count in the next step that begins.
    entered: Vec<bool>,
    /// Ranks of this generation that came without a state.
    newcomers: Vec<u32>,
    effects: VecDeque<Effect>,
}

impl Live {
    /// A process that holds no state yet.
    pub fn new(lineage: Digest) -> Live {
        Live {
            lineage,
            number: 0,
            rank: 0,
            phase: Phase::Parked,
            settled: None,
            committed: 0,
            holds: None,
            history: History::default(),
            before: History::default(),
            listening: None,
            entered: Vec::new(),
            newcomers: Vec::new(),
            effects: VecDeque::new(),
        }
    }

    /// Steps that are committed to this rank's state.
    pub fn committed(&self) -> u64 {
        self.committed
    }

    /// Whether this rank holds the state of its generation.
    pub fn is_settled(&self) -> bool {
        self.settled == Some(self.number)
    }

    /// The ranks whose samples count in the next step that begins, in order. The same on all ranks
    /// at the same [`Effect::Begin`].
    pub fn entered(&self) -> impl Iterator<Item = u32> + '_ {
        (0..)
            .zip(&self.entered)
            .filter(|(_, entered)| **entered)
            .map(|(rank, _)| rank)
    }

    pub fn report(&self) -> Report {
        Report {
            lineage: self.lineage,
            settled: self.settled,
            committed: self.committed,
            holds: self.holds,
            history: self.history,
            before: self.before,
        }
    }

    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// # Errors
    /// The reports contradict each other, or the driver is out of step. Nothing has changed, and
    /// nothing may be committed any more: a checkpoint is to be restored.
    pub fn handle(&mut self, event: Event) -> Result<(), Error> {
        match event {
            Event::Assigned { number, rank } => {
                if number > self.number {
                    self.assigned(number, rank);
                }
                Ok(())
            }
            Event::Reported { number, .. }
            | Event::Fetched { number }
            | Event::Copied { number }
            | Event::Restored { number, .. }
            | Event::UnderWay { number, .. }
            | Event::Complete { number, .. }
            | Event::Lost { number }
                if number != self.number || self.phase == Phase::Parked =>
            {
                Ok(())
            }
            Event::Reported { reports, .. } => self.reported(&reports),
            Event::Fetched { .. } => self.fetched(),
            Event::Copied { .. } => self.copied(),
            Event::Restored { committed, .. } => self.restored(committed),
            Event::UnderWay { step, ready, .. } => self.under_way(step, &ready),
            Event::Complete { step, .. } => self.complete(step),
            Event::Lost { .. } => {
                self.phase = Phase::Parked;
                Ok(())
            }
        }
    }

    fn assigned(&mut self, number: u64, rank: u32) {
        (self.number, self.rank) = (number, rank);
        if self.listening.take().is_some() {
            // Part of a state is no state.
            (self.settled, self.committed, self.holds) = (None, 0, None);
        }
        self.phase = Phase::Exchanging;
        self.effects.push_back(Effect::Discard);
        self.effects.push_back(Effect::Exchange(self.report()));
    }

    fn reported(&mut self, reports: &[Report]) -> Result<(), Error> {
        if self.phase != Phase::Exchanging {
            return Err(Error::Unexpected { what: "a report" });
        }
        if reports.len() <= self.rank as usize {
            return Err(Error::NotThere {
                rank: self.rank,
                ranks: reports.len(),
            });
        }
        let verdict = verdict(self.lineage, reports)?;
        self.entered = vec![verdict.survivors.is_empty(); reports.len()];
        for rank in &verdict.survivors {
            if let Some(entered) = self.entered.get_mut(*rank as usize) {
                *entered = true;
            }
        }
        if verdict.survivors.is_empty() {
            self.phase = Phase::Restoring;
            self.effects.push_back(Effect::Restore);
            return Ok(());
        }
        self.newcomers = (0..)
            .take(reports.len())
            .filter(|rank| !verdict.is_survivor(*rank))
            .collect();
        let next = verdict.next;
        if !verdict.is_survivor(self.rank) {
            (self.settled, self.committed, self.holds) = (None, next, None);
            (self.history, self.before) = verdict.history;
            self.listening = Some(VecDeque::new());
            self.effects.push_back(Effect::CopyState {
                boundary: next,
                from: verdict.survivors,
            });
            self.begin(next);
            return Ok(());
        }
        let from_here = |rank: &u32| verdict.holder_for(*rank) == Some(self.rank);
        let to: Vec<u32> = verdict.behind.iter().copied().filter(from_here).collect();
        if let Some(step) = next.checked_sub(1).filter(|_| !to.is_empty()) {
            self.effects.push_back(Effect::HandResults { step, to });
        }
        if self.committed < next {
            let from = verdict.holder_for(self.rank).unwrap_or(self.rank);
            let step = self.committed;
            self.effects.push_back(Effect::Fetch { step, from });
            let history = verdict.history.0;
            self.phase = Phase::Fetching { next, history };
            return Ok(());
        }
        self.settle(next);
        Ok(())
    }

    fn fetched(&mut self) -> Result<(), Error> {
        let Phase::Fetching { next, history } = self.phase else {
            return Err(Error::Unexpected { what: "results" });
        };
        self.commit(self.committed, history);
        self.settle(next);
        Ok(())
    }

    /// The verdict is carried out here.
    fn settle(&mut self, next: u64) {
        self.settled = Some(self.number);
        if !self.newcomers.is_empty() {
            self.effects.push_back(Effect::HandState {
                boundary: next,
                to: self.newcomers.clone(),
            });
        }
        self.begin(next);
    }

    fn restored(&mut self, committed: u64) -> Result<(), Error> {
        if self.phase != Phase::Restoring {
            return Err(Error::Unexpected { what: "a state" });
        }
        (self.committed, self.holds) = (committed, None);
        (self.history, self.before) = (History::restored(self.number), History::default());
        self.settled = Some(self.number);
        self.begin(committed);
        Ok(())
    }

    fn copied(&mut self) -> Result<(), Error> {
        let Some(kept) = self.listening.take() else {
            return Err(Error::Unexpected { what: "a copy" });
        };
        for step in kept {
            self.commit(step, self.history.and(self.number));
        }
        self.settled = Some(self.number);
        self.effects.push_back(Effect::SayReady);
        Ok(())
    }

    fn under_way(&mut self, step: u64, ready: &[u32]) -> Result<(), Error> {
        let expected = self.in_step("the first collective", step)?;
        if let Some(held) = self.holds.filter(|held| *held < expected) {
            self.holds = None;
            self.effects.push_back(Effect::Release { step: held });
        }
        self.phase = Phase::InStep {
            step,
            under_way: true,
        };
        // They count from the next step on: this one's samples are dealt already.
        for rank in ready {
            if let Some(entered) = self.entered.get_mut(*rank as usize) {
                *entered = true;
            }
        }
        Ok(())
    }

    fn complete(&mut self, step: u64) -> Result<(), Error> {
        self.in_step("all results", step)?;
        if !matches!(
            self.phase,
            Phase::InStep {
                under_way: true,
                ..
            }
        ) {
            return Err(Error::Unexpected {
                what: "a result before the step's first collective",
            });
        }
        match &mut self.listening {
            Some(kept) => {
                kept.push_back(step);
                self.effects.push_back(Effect::Keep { step });
            }
            None => self.commit(step, self.history.and(self.number)),
        }
        self.begin(step + 1);
        Ok(())
    }

    fn in_step(&self, what: &'static str, step: u64) -> Result<u64, Error> {
        match self.phase {
            Phase::InStep { step: expected, .. } if step == expected => Ok(expected),
            Phase::InStep { step: expected, .. } => Err(Error::OutOfOrder {
                what,
                step,
                expected,
            }),
            _ => Err(Error::Unexpected { what }),
        }
    }

    fn commit(&mut self, step: u64, history: History) {
        self.before = std::mem::replace(&mut self.history, history);
        if let Some(held) = self.holds.filter(|held| *held != step) {
            self.effects.push_back(Effect::Release { step: held });
        }
        self.holds = Some(step);
        self.committed = step + 1;
        self.effects.push_back(Effect::Commit { step });
    }

    fn begin(&mut self, step: u64) {
        self.phase = Phase::InStep {
            step,
            under_way: false,
        };
        let with_samples = self.entered.get(self.rank as usize) == Some(&true);
        self.effects.push_back(Effect::Begin { step, with_samples });
    }
}
