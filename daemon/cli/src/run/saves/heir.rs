//! Slots after their launcher: the agent of the node has descriptors of them, and gives those of a launcher that died
//! to the job's next one. Saves sealed in them are of use then as if this launcher had made them.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use muster_checkpoint::slot::Slot;
use muster_launcher::slots::shown;
use muster_protocol::checkpoint::{Found, SlotId};
use muster_protocol::control::slots::SLOTS;

use super::looking::copy_of;
use super::{Rank, Saves, Told};

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
        if !self.table.takes_left(k, ranks) {
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
        let (image, note) = slots[0].capacity();
        let each = image + note;
        if let Some(text) = self.table.no_room_for(k, each * SLOTS as u64) {
            told.people.push(text);
            return told;
        }
        let mut steps = Vec::new();
        let (mut rank, mut found) = (Rank::new(slots), [Found::Free; SLOTS]);
        for (side, found) in (0u8..).zip(&mut found) {
            let id = SlotId { k, side };
            let slot = &rank.slots[usize::from(side)];
            match slot.take() {
                Ok(Some(sealed)) => {
                    steps.push(sealed.step);
                    if let Some(replicas) = &self.replicas {
                        replicas.inherited(id, sealed.view(), &sealed.note);
                    }
                    *found = Found::Sealed(copy_of(&sealed));
                    rank.sealed[usize::from(side)] = Some(Arc::new(sealed));
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
            shown(each),
            match &steps[..] {
                [] => "nothing is in them".to_owned(),
                [one] => format!("step {one} is in them"),
                [first, .., last] => format!("steps {first} and {last} are in them"),
            }
        ));
        self.ranks.insert(k, rank);
        let news = self.table.inherit(k, (image, note), found, torn);
        told.agent.push(news);
        self.count_slots();
        told
    }
}
