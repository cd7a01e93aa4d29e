//! A rank whose state deviates becomes a newcomer in place: its process stays, and the others go on.

use muster_protocol::live::{Event, Live};

use super::compare::{Comparison, compare};
use super::outcome::LiveError;
use super::run::Worker;
use super::training::Training;

/// Bits of a number of the rule that count the turns of one generation.
const TURN_BITS: u32 = 8;

impl<T: Training> Worker<'_, T> {
    /// Compares the states of all ranks before each step that is a multiple of `steps`: their digests, in a small
    /// all-gather. A rank that holds another state than more than half of them is named
    /// ([`Outcome::Quarantined`](super::Outcome::Quarantined)) and becomes a newcomer. Where no state has a
    /// majority, every rank gets [`LiveError::StatesDiffer`].
    ///
    /// Each time costs a digest of the whole state ([`Training::digest_state`]). All ranks choose the same; `None`,
    /// or 0: never.
    pub fn compare_every(&mut self, steps: Option<u64>) {
        self.compare_every = steps;
    }

    /// What the rule calls this generation. It grows with each turn, and each generation begins above all turns of
    /// the one before.
    pub(super) fn number(&self) -> u64 {
        let first = self.place.term.0.saturating_mul(1 << TURN_BITS);
        first.saturating_add(self.turn)
    }

    /// The ranks that hold another state than most do, if it is time to compare.
    pub(super) fn deviating(&mut self, step: u64) -> Result<Option<Vec<u32>>, LiveError> {
        let due = |every: u64| every > 0 && step.is_multiple_of(every);
        let Some(formed) = self
            .formed
            .as_mut()
            .filter(|_| self.compare_every.is_some_and(due))
        else {
            return Ok(None);
        };
        let holds = self.live.is_settled() && self.live.committed() == step;
        let own = holds.then(|| self.training.digest_state());
        match compare(&mut formed.group, own)? {
            Comparison::Same => Ok(None),
            // A rank that deviates time and again cannot compute.
            Comparison::Deviating { ranks, right } if self.turn + 1 >= 1 << TURN_BITS => {
                let groups = vec![right, ranks];
                Err(LiveError::StatesDiffer { step, groups })
            }
            Comparison::Deviating { ranks, .. } => Ok(Some(ranks)),
            Comparison::Undecided { groups } => Err(LiveError::StatesDiffer { step, groups }),
        }
    }

    /// All ranks begin the generation anew, in the group that they have; these ones without a state.
    pub(super) fn quarantine(&mut self, deviating: &[u32]) -> Result<(), LiveError> {
        let rank = self.place.rank;
        self.live.handle(Event::Lost {
            number: self.number(),
        })?;
        self.turn += 1;
        if deviating.contains(&rank) {
            self.live = Live::new(self.place.lineage);
        }
        self.live.handle(Event::Assigned {
            number: self.number(),
            rank,
        })?;
        let report = self.begin_exchange();
        // Copies of a state that some still waited for, too: those ask anew.
        self.forget_copy();
        self.exchange(report)
    }
}
