//! Making slots: memory is found and touched by a thread, for that takes seconds.

use std::sync::Arc;
use std::time::Duration;

use muster_checkpoint::slot::{Slot, SlotError};
use muster_protocol::control::slots::SLOTS;
use tokio::sync::mpsc;

use super::Done;
use super::replicas::Freeing;

/// How long slots wait for memory that is given back before theirs is found.
const SETTLES: Duration = Duration::from_secs(10);

/// Threads that touch the memory: the kernel zeroes it, page by page.
const THREADS: usize = 4;

/// A worker's ask for slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Counts its asks.
    pub number: u64,
    pub image: u64,
    pub note: u64,
}

impl Ask {
    /// Of one slot, about.
    pub fn bytes(self) -> u64 {
        self.image.saturating_add(self.note)
    }

    /// Whether a slot is large enough.
    pub fn fits(self, slot: &Slot) -> bool {
        let (image, note) = slot.capacity();
        self.image <= image && self.note <= note
    }
}

/// Slots that were made, or not.
#[derive(Debug)]
pub struct Made {
    pub k: u16,
    /// The ask that this answers.
    pub ask: u64,
    pub result: Result<([Arc<Slot>; SLOTS], Duration), SlotError>,
}

/// Bytes of a rank's slots.
pub(super) fn bytes_of(slots: &[Arc<Slot>; SLOTS]) -> u64 {
    let of = |slot: &Arc<Slot>| {
        let (image, note) = slot.capacity();
        image + note
    };
    slots.iter().map(of).sum()
}

/// Bytes, for people.
pub(super) fn shown(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut unit = "B";
    for next in ["KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    match unit {
        "B" => format!("{bytes} B"),
        _ => format!("{value:.1} {unit}"),
    }
}

/// Makes those that are not there, once what makes room for them is given back.
pub(super) fn start(
    k: u16,
    ask: Ask,
    there: [Option<Arc<Slot>>; SLOTS],
    freeing: Option<Freeing>,
    done: mpsc::UnboundedSender<Done>,
) -> std::io::Result<()> {
    let make = move || -> Result<([Arc<Slot>; SLOTS], Duration), SlotError> {
        let mut took = Duration::ZERO;
        let mut one = |slot: Option<Arc<Slot>>| match slot {
            Some(slot) => Ok(slot),
            None => {
                let (slot, made) = Slot::create(ask.image, ask.note, THREADS)?;
                took += made.took;
                Ok(slot)
            }
        };
        let [first, second] = there;
        let slots = [one(first)?, one(second)?];
        Ok((slots, took))
    };
    let thread = std::thread::Builder::new().name("slots".into());
    thread.spawn(move || {
        if let Some(freeing) = freeing {
            freeing.settle(SETTLES);
        }
        let made = Made {
            k,
            ask: ask.number,
            result: make(),
        };
        // Nobody listens once the launcher ends.
        let _over = done.send(Done::Made(made));
    })?;
    Ok(())
}
