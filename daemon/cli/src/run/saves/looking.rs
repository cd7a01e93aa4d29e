//! Looks for what workers have done to their slots.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use muster_checkpoint::slot::{Sealed, State};
use muster_protocol::checkpoint::{Copy, SlotId};
use muster_protocol::local::SaveNews;
use muster_protocol::{Digest, Span, Time};

use super::replicas::Replicas;
use super::way::Taken;
use super::{Ahead, PROGRESS, Place, Rank, Ranks, Saves, Seen, Told};

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
        for (k, rank) in &mut self.ranks {
            let by = By {
                alive: workers.runs(*k),
                // What is older goes first.
                ahead: self.place.as_ref().filter(|_| self.writing.is_empty()),
                ranks,
                replicas: self.replicas.as_ref(),
            };
            look_at(*k, rank, &by, &mut told);
        }
        let fills = |rank: &Rank| rank.seen.iter().any(|s| matches!(s, Seen::Filling { .. }));
        self.filling = match self.ranks.values().any(fills) {
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
            self.asked(k, ask, workers, &mut told);
        }
        for (slot, writing) in &mut self.writing {
            let done = writing.done.load(Ordering::Relaxed);
            if done != writing.said && now >= writing.say_at {
                writing.said = done;
                writing.say_at = now + PROGRESS;
                told.agent.push(SaveNews::Progress {
                    slot: *slot,
                    attempt: writing.save.attempt,
                    done,
                });
            }
        }
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
}

/// Handles the changes of a rank's slots since the last look.
fn look_at(k: u16, rank: &mut Rank, by: &By<'_>, told: &mut Told) {
    let mut torn = false;
    let slots = rank.slots.iter().zip(&mut rank.seen).zip(&mut rank.ahead);
    for (side, ((slot, seen), ahead)) in (0u8..).zip(slots) {
        let id = SlotId { k, side };
        let (state, step) = slot.state();
        match (state, &*seen) {
            (State::Free, Seen::Filling { .. }) => (*seen, *ahead) = (Seen::Free, None),
            (State::Filling, _) if !by.alive => {
                slot.reclaim();
                (*seen, *ahead) = (Seen::Free, None);
                torn = true;
            }
            (State::Filling, Seen::Free) => {
                *seen = Seen::Filling { step };
                *ahead = (by.ahead).and_then(|place| Ahead::start(place, slot, by.ranks));
                told.agent.push(SaveNews::Filling { slot: id, step });
            }
            (State::Sealed, Seen::Free | Seen::Filling { .. }) => match slot.take() {
                Ok(Some(sealed)) => {
                    muster_fault::point("launcher.taken");
                    if matches!(*seen, Seen::Free) {
                        let step = sealed.step;
                        told.agent.push(SaveNews::Filling { slot: id, step });
                    }
                    let copy = copy_of(&sealed);
                    told.agent.push(SaveNews::Sealed { slot: id, copy });
                    if let Some(replicas) = by.replicas {
                        replicas.sealed(id, &sealed);
                    }
                    *seen = Seen::Sealed(Arc::new(sealed), copy);
                }
                Ok(None) => {}
                Err(error) => {
                    (*seen, *ahead) = (Seen::Free, None);
                    torn = true;
                    told.people.push(format!("local rank {k}: {error}"));
                }
            },
            _ => {}
        }
    }
    if torn {
        told.agent.push(SaveNews::WorkerGone { k });
    }
}
