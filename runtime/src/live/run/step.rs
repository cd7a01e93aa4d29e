//! One step, and what the rule wants done.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use muster_protocol::live::{Effect, Error as RuleError, Event};

use super::Worker;
use super::form::Formed;
use crate::live::hand::{Thing, fetch};
use crate::live::outcome::{LiveError, Patience};
use crate::live::training::{Share, Training};

/// Bits in what a rank says of a step, below the step.
const FLAGS: u32 = 1;
/// This rank has caught up.
const READY: u64 = 1;

/// How a step ended that was not lost.
pub(super) enum Stepped {
    Complete,
    /// It is not done: these ranks held another state, and are newcomers now.
    Quarantined(Vec<u32>),
}

impl<T: Training> Worker<'_, T> {
    /// How long an operation inside a step may take. Between two steps, until all ranks are in the next, it is
    /// [`Patience::operation`]: a rank saves meanwhile, takes in a copy, or tells its hooks.
    fn operation(&self) -> Duration {
        let most = self.patience.operation;
        match self.slowest {
            _ if self.training.has_long_steps() => most,
            Duration::ZERO => most,
            slowest => (slowest * Patience::STEPS).clamp(most / 10, most),
        }
    }

    pub(super) fn step(&mut self, step: u64) -> Result<Stepped, LiveError> {
        let number = self.number();
        let share = self.share();
        let operation = self.operation();
        let light = self.is_light();
        if !light {
            self.announce(step);
            self.under_way(step, &share)?;
        }
        if self.compares_at(step)
            && let Some(ranks) = self.set_apart(step)?
        {
            return Ok(Stepped::Quarantined(ranks));
        }
        if light {
            self.announce(step);
        }
        let began = Instant::now();
        let Some(formed) = &mut self.formed else {
            return Ok(Stepped::Complete);
        };
        // Whoever comes first waits for what another does before the step and in it.
        let patience = self.patience.operation;
        formed
            .group
            .set_op_within(patience.saturating_add(operation));
        formed.group.set_op_within_once_told(operation);
        let results = self.training.results(step, &share, &mut formed.group)?;
        // What a rank did before it came does not count.
        let took = formed.group.told_for().unwrap_or(began.elapsed());
        let took = took.min(began.elapsed());
        formed.group.set_op_within(patience);
        if light {
            self.under_way(step, &share)?;
        }
        self.kept.insert(step, results);
        self.live.handle(Event::Complete { number, step })?;
        self.carry_out()?;
        self.slowest = (self.slowest * 15 / 16).max(took);
        Ok(Stepped::Complete)
    }

    /// Whether all ranks hear from each other inside the step, in operations that it has anyway, and not before: then
    /// nobody waits, and the results of two steps are held for a while.
    fn is_light(&self) -> bool {
        let few = |bytes: usize| bytes <= T::LIGHT;
        let flat = |formed: &Formed| formed.group.is_flat();
        self.training.results_len().is_some_and(few) && self.formed.as_ref().is_some_and(flat)
    }

    /// From now on this rank says that it is in this step, and so holds all results of the one before.
    fn announce(&mut self, step: u64) {
        let Some(formed) = &mut self.formed else {
            return;
        };
        let mut word = step << FLAGS;
        if std::mem::take(&mut self.say_ready) {
            word |= READY;
        }
        formed.group.say(word);
    }

    /// All ranks are in this step, or are waited for: what they say with that.
    fn under_way(&mut self, step: u64, share: &Share) -> Result<(), LiveError> {
        let Some(formed) = &mut self.formed else {
            return Ok(());
        };
        let mut ready = Vec::new();
        for (rank, word) in (0..).zip(formed.group.words()?) {
            if word >> FLAGS != step {
                return Err(LiveError::OutOfStep {
                    rank,
                    theirs: word >> FLAGS,
                    ours: step,
                });
            }
            if word & READY != 0 {
                ready.push(rank);
            }
        }
        if share.entered.len() == share.world as usize {
            // All have what they asked for, and no frozen copy is needed any more.
            formed.hand.withdraw_all();
        }
        self.live.handle(Event::UnderWay {
            number: self.number(),
            step,
            ready,
        })?;
        self.carry_out()
    }

    pub(in crate::live) fn carry_out(&mut self) -> Result<(), LiveError> {
        while let Some(effect) = self.live.poll_effect() {
            self.effect(effect)?;
        }
        Ok(())
    }

    fn effect(&mut self, effect: Effect) -> Result<(), LiveError> {
        let number = self.number();
        match effect {
            // Done before the group was formed.
            Effect::Exchange(_) | Effect::Discard => {}
            // Kept by the step already.
            Effect::Keep { .. } => {}
            Effect::Begin { step, .. } => self.next = Some(step),
            Effect::SayReady => self.say_ready = true,
            Effect::Commit { step } => {
                // Skipped in silence, it would leave this rank another state than the core counts.
                let results = self.kept.get(&step).ok_or(RuleError::Unexpected {
                    what: "a commit without results",
                })?;
                self.training.commit(step, results);
                self.unharmed()?;
            }
            Effect::Release { step } => {
                if let Some(results) = self.kept.remove(&step) {
                    self.training.recycle(results);
                }
            }
            Effect::HandResults { step, .. } => {
                if let (Some(formed), Some(results)) = (&self.formed, self.kept.get(&step)) {
                    let bytes = self.training.encode_results(results);
                    formed.hand.offer(Thing::Results(step), bytes);
                }
            }
            Effect::HandState { boundary, .. } => {
                if let Some(formed) = &self.formed {
                    let state = self.training.freeze();
                    if let Some(error) = self.training.fault() {
                        return Err(LiveError::Training(error));
                    }
                    formed.hand.offer(Thing::State(boundary), state);
                }
            }
            Effect::Fetch { step, from } => {
                let Some(formed) = &self.formed else {
                    return Ok(());
                };
                let thing = Thing::Results(step);
                let from: Vec<SocketAddr> = formed
                    .peers
                    .get(from as usize)
                    .copied()
                    .into_iter()
                    .collect();
                let (token, within) = (formed.token, self.patience.copy);
                let mut bytes = Vec::new();
                fetch(thing, &from, token, within, &formed.over, &mut bytes)?;
                let results = self
                    .training
                    .decode_results(&bytes)
                    .ok_or(LiveError::Useless { what: "results" })?;
                self.kept.insert(step, results);
                self.live.handle(Event::Fetched { number })?;
            }
            Effect::CopyState { boundary, from } => {
                self.kept.clear();
                self.copying = self.copying_from(boundary, &from);
                self.begin_copy()?;
            }
            Effect::Restore => {
                self.kept.clear();
                let Some(formed) = &mut self.formed else {
                    return Ok(());
                };
                let committed = self.training.restore(&mut formed.group)?;
                // A newcomer has listened to later steps, perhaps.
                self.session.begin_anew();
                self.live.handle(Event::Restored { number, committed })?;
            }
        }
        Ok(())
    }

    /// A state that is not what was committed is neither trained on, handed out, nor saved.
    pub(super) fn unharmed(&mut self) -> Result<(), LiveError> {
        self.training
            .fault()
            .map_or(Ok(()), |error| Err(LiveError::Training(error)))
    }
}
