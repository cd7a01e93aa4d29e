//! A rank whose state deviates becomes a newcomer in place: its process stays, and the others go on.

use muster_protocol::live::{Event, Live};

use super::compare::{Comparison, compare};
use super::outcome::{LiveError, Outcome, passes};
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

    /// All ranks compare their states now, if they ever do and have not before this step: to be called by every rank
    /// between the same two steps, such as before all of them save, or right after one has: then no checkpoint of a
    /// state that deviates stays the newest, as who is [`saver`](Self::saver) now saves over it. Other outcomes are as
    /// those of [`advance`](Self::advance): ranks that hold another state are newcomers now, or the generation is
    /// over.
    ///
    /// # Errors
    /// This process cannot go on; see [`LiveError`].
    pub fn compare_now(&mut self) -> Result<Option<Outcome>, LiveError> {
        let Some(step) = self.next else {
            return Ok(None);
        };
        match self.set_apart(step) {
            Ok(ranks) => Ok(ranks.map(|ranks| Outcome::Quarantined { ranks, step })),
            Err(LiveError::Group(error)) if passes(&error) => Ok(Some(self.ended_by(&error))),
            Err(error) => Err(error),
        }
    }

    /// The rule's number for this generation. It grows with each turn, and each generation begins above all turns of
    /// the one before.
    pub(super) fn number(&self) -> u64 {
        let first = self.place.term.0.saturating_mul(1 << TURN_BITS);
        first.saturating_add(self.turn)
    }

    /// Whether it is time to compare.
    pub(super) fn compares_at(&self, step: u64) -> bool {
        let due = |every: u64| every > 0 && step.is_multiple_of(every);
        self.compare_every.is_some_and(due)
    }

    /// Compares the states before this step, if they are compared at all and were not yet. These ranks held another
    /// one than most do, and are newcomers now.
    pub(super) fn set_apart(&mut self, step: u64) -> Result<Option<Vec<u32>>, LiveError> {
        let every = self.compare_every.filter(|every| *every > 0);
        if every.is_none() || self.compared == Some(step) {
            return Ok(None);
        }
        let deviating = self.deviating(step)?;
        self.compared = Some(step);
        if let Some(ranks) = &deviating {
            self.quarantine(ranks)?;
        }
        Ok(deviating)
    }

    /// The ranks that hold another state than most do.
    fn deviating(&mut self, step: u64) -> Result<Option<Vec<u32>>, LiveError> {
        let Some(formed) = &mut self.formed else {
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
    fn quarantine(&mut self, deviating: &[u32]) -> Result<(), LiveError> {
        let rank = self.place.rank;
        self.live.handle(Event::Lost {
            number: self.number(),
        })?;
        self.turn += 1;
        if deviating.contains(&rank) {
            self.live = Live::new(self.place.lineage);
            self.training.quarantined();
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
