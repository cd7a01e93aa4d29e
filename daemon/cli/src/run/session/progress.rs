//! Workers that stand still, and those that save for a checkpoint.

use muster_protocol::Digest;
use muster_protocol::local::ToAgent;
use muster_protocol::wire::Saved;

use super::{Effect, Session};

impl Session {
    /// The generation whose workers do steps, if they may.
    pub fn trains(&self) -> Option<Digest> {
        let current = self.current.as_ref().filter(|c| c.trains());
        current.map(|c| c.start.digest)
    }

    /// Whether workers that make no progress do so by themselves.
    pub fn expects_progress(&self) -> bool {
        let current = self.current.as_ref().filter(|c| c.trains());
        current.is_some_and(|c| c.installed.is_none() && !c.is_saving() && !c.confirmed)
    }

    /// The step of the checkpoint that workers are saving for.
    pub fn saves(&self) -> Option<u64> {
        let current = self.current.as_ref().filter(|c| c.trains())?;
        current.saves.map(|(step, _)| step)
    }

    pub(super) fn saved(&mut self, ranks: Vec<u32>, all: bool, passed: bool) {
        let (Some(digest), Some(step)) = (self.trains(), self.saves()) else {
            return;
        };
        let saved = Saved { step, ranks, all };
        let frame = ToAgent::Saved { digest, saved };
        if !self.facts.contains(&frame) {
            self.facts.retain(|f| !matches!(f, ToAgent::Saved { .. }));
            self.fact(frame);
        }
        let Some(current) = &mut self.current else {
            return;
        };
        current.saves = Some((step, passed));
        if all {
            current.saves = None;
            self.effects.push_back(Effect::CancelStop);
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
