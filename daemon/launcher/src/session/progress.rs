//! Workers that stand still, and those that save for a checkpoint.

use muster_protocol::barrier::Held;
use muster_protocol::control::Reason;
use muster_protocol::local::ToAgent;
use muster_protocol::wire::Saved;
use muster_protocol::{Digest, Span, Time};

use super::{Current, Effect, Session};

/// How long workers may save for a checkpoint before they are judged again: about as long as the leader
/// waits for it.
pub(super) const SAVING: Span = Span::from_secs(600);

/// How long workers may wait at most for a stop step to be agreed on.
const AGREEING: Span = Span::from_secs(600);

/// The time to agree on a stop step, of which this much is left until the worker's end; zero: no end
/// was given.
pub(super) fn agreeing(grace: Span) -> Span {
    match grace {
        Span::ZERO => AGREEING,
        grace => grace.min(AGREEING),
    }
}

/// A stop step that is being agreed on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Installed {
    pub(super) reason: Reason,
    /// A worker that waits at it longer than this hangs.
    pub(super) until: Time,
}

/// A checkpoint that workers save for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Saves {
    pub(super) step: u64,
    /// All have saved or gone on without.
    pub(super) passed: bool,
    /// A worker that saves for longer than this hangs, and holds up neither a stop nor those who look for it.
    pub(super) until: Time,
}

impl Current {
    /// Some worker may still be saving for a checkpoint.
    pub(super) fn is_saving(&self, now: Time) -> bool {
        self.saves.is_some_and(|s| !s.passed && now < s.until)
    }

    /// Workers may wait for a stop step to be agreed on.
    pub(super) fn is_agreeing(&self, now: Time) -> bool {
        self.installed.is_some_and(|i| now < i.until)
    }

    /// The stop step that is being agreed on is void.
    pub(super) fn cancelled(&mut self) {
        self.installed = None;
        if self.held.is_some_and(|h| !h.confirmed) {
            self.held = self.passed;
        }
    }
}

impl Session {
    /// The generation whose workers do steps, if they may.
    pub fn trains(&self) -> Option<Digest> {
        let current = self.current.as_ref().filter(|c| c.trains());
        current.map(|c| c.start.digest)
    }

    /// Whether the job saves after so many steps.
    pub fn counts_steps(&self) -> bool {
        self.register.spec.triggers.steps > 0
    }

    /// Whether workers that make no progress do so by themselves.
    pub fn expects_progress(&self, now: Time) -> bool {
        let current = self.current.as_ref().filter(|c| c.trains());
        current.is_some_and(|c| !c.is_agreeing(now) && !c.is_saving(now) && !c.confirmed)
    }

    /// The step of the checkpoint that workers are saving for.
    pub fn saves(&self) -> Option<u64> {
        let current = self.current.as_ref().filter(|c| c.trains())?;
        current.saves.map(|s| s.step)
    }

    /// All workers took this stop step.
    pub(super) fn stop_held(&mut self, barrier: u32, step: u64) {
        if let Some(current) = &mut self.current
            && let Some(Installed { reason, .. }) = current.installed
        {
            current.held = Some(Held {
                barrier,
                step,
                reason,
                confirmed: false,
            });
        }
    }

    /// Every rank of the generation stops at this step, or saves and goes on.
    pub(super) fn stop_confirmed(&mut self, held: Held, now: Time) {
        let Held { step, reason, .. } = held;
        let goes_on = reason == Reason::Checkpoint;
        // A checkpoint once only: an agent that was restarted meanwhile, or a new leader, tells it again.
        let Some(current) = self
            .current
            .as_mut()
            .filter(|c| !goes_on || c.installed.is_some_and(|i| i.reason == reason))
        else {
            return self.say_saved(step);
        };
        current.installed = None;
        current.held = Some(held);
        if goes_on {
            current.passed = current.held;
            current.saves = Some(Saves {
                step,
                passed: false,
                until: now + SAVING,
            });
            self.effects.push_back(Effect::ConfirmCheckpoint { step });
            // The agent has to know that it was heard.
            self.saved(Vec::new(), false, false, None);
        } else {
            current.confirmed = true;
            self.effects.push_back(Effect::ConfirmStop { step });
        }
    }

    pub(super) fn saved(
        &mut self,
        ranks: Vec<u32>,
        all: bool,
        passed: bool,
        failed: Option<String>,
    ) {
        let (Some(digest), Some(step)) = (self.trains(), self.saves()) else {
            return;
        };
        let saved = Saved {
            step,
            ranks,
            all,
            failed,
        };
        let frame = ToAgent::Saved { digest, saved };
        if !self.facts.contains(&frame) {
            self.facts.retain(|f| !matches!(f, ToAgent::Saved { .. }));
            self.fact(frame);
        }
        let Some(current) = &mut self.current else {
            return;
        };
        if let Some(saves) = &mut current.saves {
            saves.passed = passed;
        }
        if all {
            current.saves = None;
            self.effects.push_back(Effect::CancelStop);
        }
    }

    /// Says again how far the workers are with the newest checkpoint, if it is this one: whoever waits
    /// for an answer to its confirm has it by that.
    fn say_saved(&mut self, step: u64) {
        let trains = self.trains();
        let about = |f: &&ToAgent| match f {
            ToAgent::Saved { digest, saved } => trains == Some(*digest) && saved.step == step,
            _ => false,
        };
        if let Some(frame) = self.facts.iter().find(about).cloned() {
            self.send(frame);
        }
    }

    pub(super) fn stalled(&mut self, yes: bool) {
        let Some(digest) = self.trains() else {
            return;
        };
        self.facts.retain(|f| !matches!(f, ToAgent::Stalled { .. }));
        self.fact(ToAgent::Stalled { digest, yes });
    }
}
