//! Registration of the slots' memory with the driver: each slot once, and what is refused again some saves later. The
//! driver may have been short of what it needs for a while only, and a refusal may take it long.

use std::sync::{Arc, Weak};

use muster_checkpoint::slot::Slot;

use super::super::memory::Way;
use crate::cuda::{CudaError, Device, Registered};

/// Saves between two tries, at most. It begins with one, and doubles.
const SELDOM: u32 = 64;

/// How far that is.
#[derive(Debug, Default)]
pub(super) struct Registering {
    /// Slots whose memory was refused, and why.
    refused: Vec<Weak<Slot>>,
    why: Option<String>,
    /// Saves that go by before the next try, and how many it was at the last.
    left: u32,
    gap: u32,
}

impl Registering {
    /// Something is not as it was: the next save tries.
    pub(super) fn renew(&mut self) {
        (self.left, self.gap) = (0, 0);
    }

    /// Registers what is not, if it is time to. All slots at once: a save before a deadline is not the time for it.
    pub(super) fn all(&mut self, device: &Arc<Device>, slots: &[Arc<Slot>]) {
        let missing = || {
            let is_missing = |slot: &&Arc<Slot>| slot.tied::<Registered>().is_none();
            slots.iter().filter(is_missing)
        };
        let was_refused = |slot: &Arc<Slot>| {
            let same = |refused: &Weak<Slot>| refused.as_ptr() == Arc::as_ptr(slot);
            self.refused.iter().any(same)
        };
        if self.left > 0 && missing().all(was_refused) {
            self.left -= 1;
            return;
        }
        self.refused.clear();
        self.why = None;
        for slot in missing() {
            if let Err(error) = register(device, slot) {
                self.refused.push(Arc::downgrade(slot));
                self.why.get_or_insert(error.to_string());
            }
        }
        self.gap = match self.refused.is_empty() {
            true => 0,
            false => (self.gap * 2).clamp(1, SELDOM),
        };
        self.left = self.gap;
    }

    /// The driver's last message, if it refused any.
    pub(super) fn why(&self) -> Option<&str> {
        self.why.as_deref()
    }

    /// Into this slot.
    pub(super) fn way(&self, slot: &Slot) -> Way {
        let other = || "the slot's memory is in other hands".to_owned();
        match slot.tied::<Registered>() {
            Some(_) => Way::Straight,
            None => Way::Pinned {
                why: self.why.clone().unwrap_or_else(other),
            },
        }
    }
}

/// Once for each slot.
pub(super) fn register(device: &Arc<Device>, slot: &Slot) -> Result<(), CudaError> {
    // SAFETY: the slot drops it before it unmaps the memory.
    let made = slot.tie(|memory| unsafe { Registered::new(device, memory) });
    made.map(drop)
}
