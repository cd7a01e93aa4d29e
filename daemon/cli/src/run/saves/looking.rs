//! Looks for what workers have done to their slots.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use muster_checkpoint::slot::{Sealed, State};
use muster_launcher::slots::{Look, SlotTable};
use muster_protocol::checkpoint::{Copy, Found, SlotId};
use muster_protocol::{Digest, Span, Time};

use super::replicas::Replicas;
use super::way::Taken;
use super::{Ahead, Place, Rank, Ranks, Saves, Told};

/// So long a fill is waited for by others: it takes seconds, unless its worker stands still, or keeps the slot for
/// good.
const FILLS: Span = Span::from_secs(60);

/// Slots are filled.
#[derive(Debug)]
pub(super) struct Filling {
    since: Time,
    way: Option<Taken>,
}

impl Saves {
    /// Looks at what the workers ask for, and at what they have done to their slots.
    pub fn look(&mut self, workers: &impl Ranks, now: Time) -> Told {
        let mut told = Told::default();
        let asks = workers.asks();
        let ranks = self.ranks.len();
        let mut looks = Vec::new();
        for (k, rank) in &mut self.ranks {
            let by = By {
                alive: workers.runs(*k),
                // An older file goes first.
                ahead: self.place.as_ref().filter(|_| !self.table.is_writing()),
                ranks,
                replicas: self.replicas.as_ref(),
                table: &self.table,
            };
            looks.push((*k, [0, 1].map(|side| look_at(*k, side, rank, &by))));
        }
        for (k, looks) in looks {
            let effects = self.table.looked(k, looks);
            self.carry_out(effects, &mut told);
        }
        self.filling = match self.table.is_filling() {
            true => {
                let mut filling = self.filling.take().unwrap_or_else(|| Filling {
                    since: now,
                    way: Some(self.way.take()),
                });
                filling.way.take_if(|_| now.since(filling.since) > FILLS);
                Some(filling)
            }
            false => None,
        };
        // Behind the look: what was sealed before its worker asked for other slots is known by now, and kept.
        for (k, ask) in asks {
            let effects = self.table.asked(k, ask);
            self.carry_out(effects, &mut told);
        }
        for (slot, (_, done)) in &self.writing {
            let done = done.load(Ordering::Relaxed);
            told.agent.extend(self.table.progress(*slot, done, now));
        }
        self.answer(&mut told, workers);
        told
    }
}

/// Description of a sealed slot for the agent.
pub(super) fn copy_of(sealed: &Sealed) -> Copy {
    Copy {
        generation: Digest(sealed.generation.0),
        step: sealed.step,
        bytes: sealed.image().len() as u64,
        digest: Digest(sealed.digest().0),
    }
}

/// Conditions for a look at a rank's slots.
struct By<'a> {
    /// The rank's worker runs.
    alive: bool,
    /// Where what it fills may be written ahead.
    ahead: Option<&'a Place>,
    /// How many ranks the node has.
    ranks: usize,
    replicas: Option<&'a Replicas>,
    table: &'a SlotTable,
}

/// The state of a slot. A sealed copy is taken out of it.
fn look_at(k: u16, side: u8, rank: &mut Rank, by: &By<'_>) -> Look {
    let id = SlotId { k, side };
    let at = usize::from(side);
    let (slot, known) = (&rank.slots[at], by.table.found(id));
    let (state, step) = slot.state();
    match state {
        State::Free => Look::Free,
        State::Filling if !by.alive => {
            slot.reclaim();
            Look::Torn
        }
        State::Filling => {
            if known == Found::Free {
                rank.ahead[at] = (by.ahead).and_then(|place| Ahead::start(place, slot, by.ranks));
            }
            Look::Filling { step }
        }
        State::Taken => Look::Same,
        State::Sealed if matches!(known, Found::Sealed(_)) => Look::Same,
        State::Sealed => match slot.take() {
            Ok(Some(sealed)) => {
                muster_fault::point("launcher.taken");
                let copy = copy_of(&sealed);
                if let Some(replicas) = by.replicas {
                    replicas.sealed(id, &sealed);
                }
                rank.sealed[at] = Some(Arc::new(sealed));
                Look::Sealed(copy)
            }
            Ok(None) => Look::Same,
            Err(error) => Look::Broken(error.to_string()),
        },
    }
}
