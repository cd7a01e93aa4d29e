//! Tensors on GPUs: straight into slots, and out of checkpoints.
//!
//! A slot's memory is registered with the driver once, and unregistered right before it is unmapped. From then on a
//! device copies into it by itself, in a stream of ours that waits for the caller's. A chunk is hashed when
//! the event behind its copies has passed, while later ones are on their way, and the slot is sealed when all
//! have. Where the driver does not register that memory, the same goes through pinned buffers of
//! [`BOUNCE`](into_slot::BOUNCE) bytes for each thread.

mod from_checkpoint;
mod into_slot;

use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use muster_checkpoint::load::{LoadError, Loaded, Team, Wanted};
use muster_checkpoint::manifest::Manifest;
use muster_checkpoint::slot::{Image, Slot, SlotError};
use muster_checkpoint::source::Source;

use self::into_slot::{Bounce, Copies};
use super::SaveError;
use super::memory::{MemoryMut, OnDevice, Part, Way};
use crate::cuda::{CudaError, Device, Driver, Event, RawStream, Registered, Stream};

/// Which way was taken was said in this process.
static SAID: AtomicBool = AtomicBool::new(false);

/// The devices whose tensors were saved, with what is kept from save to save.
#[derive(Debug, Default)]
pub(super) struct Devices {
    driver: Option<Arc<Driver>>,
    lanes: Vec<Lane>,
    bounces: Mutex<Vec<Bounce>>,
    way: Option<Way>,
}

/// A device, and what copies from it go by.
#[derive(Debug)]
struct Lane {
    ordinal: u32,
    device: Arc<Device>,
    stream: Stream,
    /// Events to be used again.
    spare: Mutex<Vec<Event>>,
}

impl Lane {
    fn open(driver: &Arc<Driver>, ordinal: u32) -> Result<Lane, CudaError> {
        let device = Device::open(driver, ordinal)?;
        Ok(Lane {
            ordinal,
            stream: device.stream()?,
            device,
            spare: Mutex::default(),
        })
    }

    fn event(&self) -> Result<Event, CudaError> {
        match lock(&self.spare).pop() {
            Some(event) => Ok(event),
            None => self.device.event(),
        }
    }
}

/// What became of a slot's registration.
type Registration = Result<Registered, CudaError>;

impl Devices {
    /// This driver from now on, instead of the one that [`Driver::load`] finds.
    pub(super) fn use_driver(&mut self, driver: Arc<Driver>) {
        *self = Devices {
            driver: Some(driver),
            ..Devices::default()
        };
    }

    /// How the last tensors got into a slot.
    pub(super) fn way(&self) -> Option<&Way> {
        self.way.as_ref()
    }

    /// Fills one of these slots with an image, of which these parts are on devices.
    pub(super) fn fill(
        &mut self,
        slots: &[Arc<Slot>],
        slot: &Slot,
        image: &Image<'_>,
        parts: &[Part<'_>],
        threads: usize,
    ) -> Result<Duration, SaveError> {
        if parts.is_empty() {
            return Ok(slot.fill(image, threads)?);
        }
        let filled = self.bring(slots, slot, image, parts, threads);
        if filled.is_err() {
            // The next save begins anew: what a lost context had is good for nothing.
            self.lanes.clear();
            lock(&self.bounces).clear();
        }
        filled
    }

    fn bring(
        &mut self,
        slots: &[Arc<Slot>],
        slot: &Slot,
        image: &Image<'_>,
        parts: &[Part<'_>],
        threads: usize,
    ) -> Result<Duration, SaveError> {
        let failed = |error: CudaError| SaveError::Device(error.into());
        let which = self.lanes_of(parts).map_err(failed)?;
        let Some(first) = which.first().and_then(|lane| self.lanes.get(*lane)) else {
            return Ok(slot.fill(image, threads)?);
        };
        // Both at once: a save before a deadline is not the time for it.
        for slot in slots {
            slot.tie(|memory| register(&first.device, memory));
        }
        let registered = slot.tie(|memory| register(&first.device, memory));
        let way = match registered {
            Some(Ok(_)) => Way::Straight,
            Some(Err(error)) => Way::Pinned {
                why: error.to_string(),
            },
            None => Way::Pinned {
                why: "the slot's memory is in other hands".to_owned(),
            },
        };
        say(&way, threads);
        let straight = way == Way::Straight;
        self.way = Some(way);
        let copies = Copies::new(
            &self.lanes,
            &self.bounces,
            parts,
            &which,
            straight,
            image.bytes,
        );
        let filled = slot.fill_with(image, &copies, threads);
        copies.give_back();
        filled.map_err(|error| match error {
            SlotError::Far(source) => SaveError::Device(source),
            other => other.into(),
        })
    }

    /// The lane of each part.
    fn lanes_of(&mut self, parts: &[Part<'_>]) -> Result<Vec<usize>, CudaError> {
        let driver = match &self.driver {
            Some(driver) => driver.clone(),
            None => self.driver.insert(Driver::load()?).clone(),
        };
        let lane = |part: &Part<'_>| {
            let ordinal = Device::ordinal_of(&driver, part.from.address)?;
            let known = self.lanes.iter().position(|lane| lane.ordinal == ordinal);
            if let Some(known) = known {
                return Ok(known);
            }
            self.lanes.push(Lane::open(&driver, ordinal)?);
            Ok(self.lanes.len() - 1)
        };
        parts.iter().map(lane).collect()
    }

    /// Fills these wants from a checkpoint, those on devices too.
    pub(super) fn load(
        &self,
        manifest: &Manifest,
        source: &impl Source,
        wants: Vec<Wanted<'_, MemoryMut<'_>>>,
        team: Team,
    ) -> Result<Loaded, LoadError> {
        from_checkpoint::load(self.driver.as_ref(), manifest, source, wants, team)
    }
}

fn register(device: &Arc<Device>, memory: *mut [u8]) -> Registration {
    // SAFETY: the slot drops it before it unmaps the memory.
    unsafe { Registered::new(device, memory) }
}

/// The stream in which a tensor is worked with.
fn stream_of(tensor: &OnDevice<'_>) -> RawStream {
    // SAFETY: it lives, by the word of who handed over the tensor.
    unsafe { RawStream::new(std::ptr::with_exposed_provenance_mut(tensor.stream)) }
}

/// Says once which way was taken.
fn say(way: &Way, threads: usize) {
    if SAID.swap(true, Ordering::Relaxed) {
        return;
    }
    let mut stderr = std::io::stderr();
    // Nobody may be there to read it.
    let _written = match way {
        Way::Straight => writeln!(
            stderr,
            "muster: tensors on GPUs are copied straight into the checkpoint slots"
        ),
        Way::Pinned { why } => writeln!(
            stderr,
            "muster: tensors on GPUs are copied through pinned buffers of {} MiB, because the driver does not register the checkpoint slots: {why}",
            (threads * into_slot::BOUNCE) >> 20
        ),
    };
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
