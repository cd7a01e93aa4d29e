//! A rank's slots, as its launcher gives them.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_checkpoint::slot::{Slot, State};
use muster_protocol::control::slots::{Given, SLOTS, word};

use super::SaveError;
use crate::page::Page;

/// How long the launcher may take to find and touch the memory: some gigabytes a second.
const GIVEN: Duration = Duration::from_secs(300);

/// Between two looks at a slot that is busy.
const LOOK: Duration = Duration::from_micros(500);

/// Two slots that are large enough.
#[derive(Debug)]
pub(super) struct Slots {
    slots: [Arc<Slot>; SLOTS],
}

impl Slots {
    /// Asks the launcher for slots with room for an image and a note of so many bytes.
    pub(super) fn ask(
        page: &Page,
        image: u64,
        note: u64,
        threads: usize,
    ) -> Result<Slots, SaveError> {
        let ask = page.load(word::ASK).wrapping_add(1).max(1);
        page.store(word::IMAGE, image);
        page.store(word::NOTE, note);
        page.store(word::ASK, ask);
        let began = Instant::now();
        loop {
            let answer = page.load(word::GIVEN);
            match Given::decode(answer, ask) {
                Given::Slots => break,
                Given::NoStore => return Err(SaveError::NoStore),
                Given::Budget => {
                    return Err(SaveError::Budget {
                        need: image.saturating_add(note),
                        room: page.load(word::ROOM),
                    });
                }
                Given::Memory => return Err(SaveError::Memory),
                Given::Nothing if began.elapsed() > GIVEN => return Err(SaveError::NoAnswer),
                Given::Nothing => {
                    page.wait_while(word::GIVEN, answer, Duration::from_millis(100));
                }
            }
        }
        let pid = page.load(word::PID);
        let open = |at: usize| -> Result<Arc<Slot>, SaveError> {
            let path = format!("/proc/{pid}/fd/{}", page.load(at));
            let file = File::options().read(true).write(true).open(&path);
            let file = file.map_err(|source| SaveError::Descriptor { path, source })?;
            Ok(Slot::open(file.into(), threads)?)
        };
        let [first, second] = word::FDS;
        Ok(Slots {
            slots: [open(first)?, open(second)?],
        })
    }

    /// Whether they have room for this.
    pub(super) fn fit(&self, image: u64, note: u64) -> bool {
        self.slots.iter().all(|slot| {
            let capacity = slot.capacity();
            image <= capacity.0 && note <= capacity.1
        })
    }

    /// A free slot, waiting for one; how long that took.
    pub(super) fn free(&self, longest: Duration) -> Result<(&Slot, Duration), SaveError> {
        let began = Instant::now();
        loop {
            let free = self.slots.iter().find(|slot| slot.state().0 == State::Free);
            if let Some(slot) = free {
                return Ok((slot, began.elapsed()));
            }
            if began.elapsed() >= longest {
                let [a, b] = self.slots.each_ref().map(|slot| slot.state());
                return Err(SaveError::Busy { slots: [a, b] });
            }
            std::thread::sleep(LOOK);
        }
    }
}
