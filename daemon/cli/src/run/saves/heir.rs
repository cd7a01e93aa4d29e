//! Slots after their launcher: the agent of the node has descriptors of them, and gives those of a launcher that died
//! to the job's next one. Saves sealed in them are of use then as if this launcher had made them.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use muster_checkpoint::slot::Slot;
use muster_protocol::checkpoint::SlotId;
use muster_protocol::control::slots::SLOTS;
use muster_protocol::local::SaveNews;

use super::looking::copy_of;
use super::{Rank, Saves, Seen, Told, making};

impl Saves {
    /// A local rank's slots, for the agent to keep. None where no descriptor is left.
    pub fn descriptors(&self, k: u16) -> Vec<OwnedFd> {
        let slots = self.ranks.get(&k).into_iter().flat_map(|r| &r.slots);
        let copies = slots.map(|slot| slot.fd().try_clone_to_owned().ok());
        copies.collect::<Option<_>>().unwrap_or_default()
    }

    /// The slots of a local rank that the launcher before left; `ranks` is how many there are here.
    pub fn inherit(&mut self, k: u16, slots: Vec<OwnedFd>, ranks: u16) -> Told {
        let mut told = Told::default();
        // Its own are newer: the agent took this very launcher for dead.
        let has_own = self.ranks.contains_key(&k) || self.making.contains_key(&k);
        if self.place.is_none() || has_own || k >= ranks {
            return told;
        }
        let slots: Result<Vec<(Arc<Slot>, bool)>, _> =
            slots.into_iter().map(Slot::inherit).collect();
        let (slots, torn) = match slots.map(<[_; SLOTS]>::try_from) {
            Ok(Ok(slots)) => {
                let torn = slots.each_ref().map(|(_, torn)| *torn);
                (slots.map(|(slot, _)| slot), torn)
            }
            Ok(Err(others)) => {
                let count = others.len();
                let text = format!("{count} checkpoint slots of local rank {k} were left, not two");
                told.people.push(text);
                return told;
            }
            Err(error) => {
                let text =
                    format!("the checkpoint slots that were left of local rank {k}: {error}");
                told.people.push(text);
                return told;
            }
        };
        let bytes = making::bytes_of(&slots);
        let used = self
            .ranks
            .values()
            .map(|rank| making::bytes_of(&rank.slots));
        let room = self.budget.saturating_sub(used.sum());
        if bytes > room {
            told.people.push(format!(
                "the checkpoint slots that were left of local rank {k} have {}, and there is room for {}: raise --checkpoint-memory, now {}",
                making::shown(bytes),
                making::shown(room),
                making::shown(self.budget),
            ));
            return told;
        }
        let mut steps = Vec::new();
        let mut seen = [Seen::Free, Seen::Free];
        for (side, (slot, seen)) in (0u8..).zip(slots.iter().zip(&mut seen)) {
            let id = SlotId { k, side };
            match slot.take() {
                Ok(Some(sealed)) => {
                    steps.push(sealed.step);
                    if let Some(replicas) = &self.replicas {
                        replicas.inherited(id, sealed.view(), &sealed.note);
                    }
                    let copy = copy_of(&sealed);
                    *seen = Seen::Sealed(Arc::new(sealed), copy);
                }
                // What was committed is free, and there until it is overwritten.
                Ok(None) => {
                    if let Some((view, note)) = slot.left() {
                        steps.push(view.step);
                        if let Some(replicas) = &self.replicas {
                            replicas.inherited(id, view, &note);
                        }
                    }
                }
                Err(error) => told.people.push(format!("local rank {k}: {error}")),
            }
        }
        steps.sort_unstable();
        told.people.push(format!(
            "checkpoint slots of local rank {k}, 2 x {}, of the launcher that was here before: {}",
            making::shown(bytes / SLOTS as u64),
            match &steps[..] {
                [] => "nothing is in them".to_owned(),
                [one] => format!("step {one} is in them"),
                [first, .., last] => format!("steps {first} and {last} are in them"),
            }
        ));
        let ahead = [None, None];
        let rank = Rank {
            slots,
            seen,
            torn,
            ahead,
        };
        told.agent.push(SaveNews::Slots {
            k,
            capacity: rank.slots[0].capacity().0,
            found: [rank.seen[0].found(), rank.seen[1].found()],
        });
        self.ranks.insert(k, rank);
        self.gone.remove(&k);
        self.count_slots();
        told
    }
}
