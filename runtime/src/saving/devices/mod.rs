//! Tensors on GPUs: straight into slots, and out of checkpoints.
//!
//! A slot's memory is registered with the driver once, if need be after some tries, and unregistered right before it is
//! unmapped. From then on a
//! device copies into it by itself, in a stream of ours that waits for the caller's. A chunk is hashed when
//! the event behind its copies has passed, while later ones are on their way, and the slot is sealed when all
//! have. Where the driver does not register that memory, the same goes through pinned buffers of
//! [`BOUNCE`](into_slot::BOUNCE) bytes for each thread.
//!
//! After an error the streams are waited for. Where the driver does not say that they have come to their end, copies
//! may be under way for as long as this process lives ([`Lost`]): the slot stays Filling, it and the buffers stay
//! mapped, registered and pinned, and nothing more is copied from or to devices.

mod from_checkpoint;
mod into_slot;
mod registering;

use std::io::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use muster_checkpoint::load::{LoadError, Loaded, Team, Wanted};
use muster_checkpoint::manifest::Manifest;
use muster_checkpoint::slot::{Ended, FarError, Image, Slot, SlotError};
use muster_checkpoint::source::Source;

use self::into_slot::{Bounce, Copies};
use self::registering::{Registering, register};
use super::SaveError;
use super::memory::{MemoryMut, Part, There, Way};
use crate::cuda::{CudaError, Device, Driver, Event, RawStream, Stream};

/// The last message in this process: why the driver refused, or that it did not.
static SAID: Mutex<Option<Option<String>>> = Mutex::new(None);

/// The devices whose tensors were saved, with what is kept from save to save.
#[derive(Debug, Default)]
pub(super) struct Devices {
    driver: Option<Arc<Driver>>,
    lanes: Vec<Lane>,
    bounces: Mutex<Vec<Bounce>>,
    registering: Registering,
    way: Option<Way>,
    lost: Arc<Lost>,
}

/// Done with the slots when they are there.
pub(super) type Preparation = Box<dyn FnOnce(&[Arc<Slot>]) + Send>;

/// Whether copies may be under way that nobody will ever know the end of, and what the driver said then. An error that
/// stays is such that the process has to end before CUDA is of use again (CUDA's manual, of the errors that leave the
/// process in an inconsistent state), and nothing is promised of what was on its way.
#[derive(Debug, Default)]
struct Lost(OnceLock<String>);

impl Lost {
    /// Waits for what is in a stream. After an error it is waited for once more: only one that stays says nothing of
    /// what is on its way.
    fn settle(&self, stream: &Stream) -> Ended {
        let Err(error) = stream.synchronize() else {
            return Ended::Well;
        };
        match stream.synchronize() {
            Ok(()) => Ended::Badly(error.into()),
            Err(_) => {
                // The first is told.
                let _set = self.0.set(error.to_string());
                Ended::Unknown(error.into())
            }
        }
    }

    fn why(&self) -> Option<FarError> {
        let why = self.0.get()?;
        Some(format!("earlier copies may still be under way ({why})").into())
    }
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

impl Devices {
    /// This driver from now on, instead of the one that [`Driver::load`] finds.
    pub(super) fn use_driver(&mut self, driver: Arc<Driver>) {
        *self = Devices {
            driver: Some(driver),
            lost: Arc::clone(&self.lost),
            ..Devices::default()
        };
    }

    /// How the last tensors got into a slot.
    pub(super) fn way(&self) -> Option<&Way> {
        self.way.as_ref()
    }

    /// Another generation begins.
    pub(super) fn renew(&mut self) {
        self.registering.renew();
    }

    /// Whether these parts can be copied at all.
    pub(super) fn check(&self, parts: &[Part<'_>]) -> Result<(), SaveError> {
        match self.lost.why() {
            Some(why) if !parts.is_empty() => Err(SaveError::Lost(why)),
            _ => Ok(()),
        }
    }

    /// Preparation of the slots before the first of these parts is copied: none, if they are on no device.
    pub(super) fn preparation(&mut self, parts: &[Part<'_>]) -> Option<Preparation> {
        if parts.is_empty() {
            // Nor is the driver looked for.
            return None;
        }
        let first = *self.lanes_of(parts).ok()?.first()?;
        let device = self.lanes.get(first)?.device.clone();
        Some(Box::new(move |slots| {
            for slot in slots {
                // The save tries again, and has the error.
                let _refused = register(&device, slot);
            }
        }))
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
        self.check(parts)?;
        let filled = self.bring(slots, slot, image, parts, threads);
        filled.map_err(|error| {
            // The next save begins anew: what a lost context had is good for nothing.
            self.lanes.clear();
            lock(&self.bounces).clear();
            self.registering.renew();
            match error {
                SaveError::Device(source) if self.lost.0.get().is_some() => SaveError::Lost(source),
                other => other,
            }
        })
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
        self.registering.all(&first.device, slots);
        say(self.registering.why(), threads);
        let way = self.registering.way(slot);
        let straight = way == Way::Straight;
        self.way = Some(way);
        let copies = Copies::new(
            &self.lanes,
            &self.bounces,
            &self.lost,
            parts,
            &which,
            straight,
            image.bytes,
        );
        let filled = slot.fill_with(image, &copies, threads);
        copies.give_back();
        filled.map_err(|error| match error {
            SlotError::Far(source) => SaveError::Device(source),
            SlotError::Abandoned(source) => SaveError::Lost(source),
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
            let ordinal = Device::ordinal_of(&driver, part.from.there.address)?;
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
        from_checkpoint::load(
            self.driver.as_ref(),
            &self.lost,
            manifest,
            source,
            wants,
            team,
        )
    }
}

/// The stream in which a tensor is worked with.
fn stream_of(tensor: There) -> RawStream {
    // SAFETY: it lives, by the word of who handed over the tensor.
    unsafe { RawStream::new(std::ptr::with_exposed_provenance_mut(tensor.stream)) }
}

/// Says which way is taken, if that is not what was said last.
fn say(refused: Option<&str>, threads: usize) {
    let now = Some(refused.map(str::to_owned));
    let mut said = lock(&SAID);
    if *said == now {
        return;
    }
    *said = now;
    let mut stderr = std::io::stderr();
    // Nobody may be there to read it.
    let _written = match refused {
        None => writeln!(
            stderr,
            "muster: tensors on GPUs are copied straight into the checkpoint slots"
        ),
        Some(why) => writeln!(
            stderr,
            "muster: tensors on GPUs are copied through pinned buffers of {} MiB, because the driver does not register the checkpoint slots: {why}; it is asked again in some saves",
            (threads * into_slot::BOUNCE) >> 20
        ),
    };
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
