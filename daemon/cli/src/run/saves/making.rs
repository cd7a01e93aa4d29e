//! Making slots: memory is found and touched by a thread, for that takes seconds.

use std::sync::Arc;
use std::time::Duration;

use muster_checkpoint::slot::{Slot, SlotError};
use muster_launcher::slots::{Ask, shown};
use muster_protocol::control::slots::SLOTS;
use tokio::sync::mpsc;

use super::Done;
use super::replicas::Freeing;

/// How long slots wait for memory that is given back before theirs is found.
const SETTLES: Duration = Duration::from_secs(10);

/// Threads that touch the memory: the kernel zeroes it, page by page.
const THREADS: usize = 4;

/// Slots that were made, or not.
#[derive(Debug)]
pub struct Made {
    pub k: u16,
    /// The ask that this answers.
    pub ask: u64,
    pub result: Result<([Arc<Slot>; SLOTS], Duration), SlotError>,
}

/// A line for people on slots that were made.
pub(super) fn text(k: u16, slots: &[Arc<Slot>; SLOTS], took: Duration) -> String {
    let (image, note) = slots[0].capacity();
    let each = shown(image + note);
    let took = took.as_secs_f64();
    format!("checkpoint slots of local rank {k}: 2 x {each} of memory in {took:.1} s")
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
