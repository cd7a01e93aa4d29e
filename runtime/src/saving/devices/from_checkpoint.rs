//! From a checkpoint to devices: a chunk is read into pinned memory, verified there, and copied from there.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use muster_checkpoint::Pages;
use muster_checkpoint::load::{LoadError, Loaded, Part, Room, Sink, Team, Wanted, load_to};
use muster_checkpoint::manifest::Manifest;
use muster_checkpoint::slot::Ended;
use muster_checkpoint::source::Source;
use muster_checkpoint::sum::CHUNK;

use super::super::memory::{MemoryMut, OnDeviceMut};
use super::{Lost, stream_of};
use crate::cuda::{CudaError, Device, Driver, Event, Pinned, RawStream, Stream};

/// Fills these wants.
pub(super) fn load(
    driver: Option<&Arc<Driver>>,
    lost: &Arc<Lost>,
    manifest: &Manifest,
    source: &impl Source,
    wants: Vec<Wanted<'_, MemoryMut<'_>>>,
    team: Team,
) -> Result<Loaded, LoadError> {
    let mut deliveries = Deliveries::new(lost);
    let mut rooms = Vec::with_capacity(wants.len());
    let mut found = driver.cloned();
    for want in wants {
        let into = match want.into {
            MemoryMut::Host(bytes) => {
                deliveries.to.push(None);
                Room::Here(bytes)
            }
            MemoryMut::Device(there) => {
                if let Some(why) = lost.why() {
                    return Err(LoadError::Far(why));
                }
                let driver = match &found {
                    Some(driver) => driver.clone(),
                    None => found.insert(Driver::load().map_err(far)?).clone(),
                };
                // Of nothing there need be no address.
                let bytes = there.bytes();
                let to = match bytes {
                    0 => None,
                    _ => Some(deliveries.to(&driver, &there).map_err(far)?),
                };
                deliveries.to.push(to);
                Room::Far(bytes)
            }
        };
        rooms.push(Wanted {
            name: want.name,
            dtype: want.dtype,
            shape: want.shape,
            slice: want.slice,
            into,
        });
    }
    match deliveries.devices.is_empty() {
        true => load_to(manifest, source, rooms, &(), team),
        false => load_to(manifest, source, rooms, &deliveries, team),
    }
}

fn far(error: CudaError) -> LoadError {
    LoadError::Far(error.into())
}

/// Where a want's bytes go.
#[derive(Clone, Copy, Debug)]
struct To {
    /// Its place in the list of devices.
    device: usize,
    address: u64,
    bytes: u64,
}

/// The wants that are on devices.
#[derive(Debug)]
struct Deliveries {
    lost: Arc<Lost>,
    devices: Vec<(u32, Arc<Device>)>,
    /// The callers' streams, and what is in them by now: the memory may still be in use there.
    ready: Vec<(usize, RawStream, Event)>,
    to: Vec<Option<To>>,
}

impl Deliveries {
    fn new(lost: &Arc<Lost>) -> Deliveries {
        Deliveries {
            lost: Arc::clone(lost),
            devices: Vec::new(),
            ready: Vec::new(),
            to: Vec::new(),
        }
    }

    fn to(&mut self, driver: &Arc<Driver>, into: &OnDeviceMut<'_>) -> Result<To, CudaError> {
        let there = into.there;
        let ordinal = Device::ordinal_of(driver, there.address)?;
        let known = (self.devices.iter()).position(|(number, _)| *number == ordinal);
        let device = match known {
            Some(known) => known,
            None => {
                self.devices.push((ordinal, Device::open(driver, ordinal)?));
                self.devices.len() - 1
            }
        };
        let (of, stream) = (&self.devices[device].1, stream_of(there));
        let known = |(number, caller, _): &(usize, RawStream, Event)| {
            (*number, *caller) == (device, stream)
        };
        if !self.ready.iter().any(known) {
            let event = of.event()?;
            let _current = of.enter()?;
            event.record(stream)?;
            self.ready.push((device, stream, event));
        }
        Ok(To {
            device,
            address: there.address,
            bytes: there.bytes,
        })
    }
}

/// A thread's memory for a chunk, and its way to each device.
struct Staging {
    streams: Vec<Stream>,
    memory: ManuallyDrop<Staged>,
    lost: Arc<Lost>,
}

/// The driver may have no pinned memory left; it copies from any other, too, only slower.
enum Staged {
    Pinned(Pinned),
    Pages(Pages),
}

impl Deref for Staging {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &*self.memory {
            Staged::Pinned(memory) => memory,
            Staged::Pages(memory) => memory,
        }
    }
}

impl DerefMut for Staging {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut *self.memory {
            Staged::Pinned(memory) => memory,
            Staged::Pages(memory) => memory,
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let mut settled = true;
        for stream in &self.streams {
            // A copy that was begun may still be reading the memory, which stays if nobody knows.
            settled &= !matches!(self.lost.settle(stream), Ended::Unknown(_));
        }
        if settled {
            // SAFETY: once, and nobody uses it afterwards.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}

impl Sink for Deliveries {
    type Buffer = Staging;

    fn buffer(&self) -> Result<Staging, LoadError> {
        let mut streams = Vec::with_capacity(self.devices.len());
        for (number, (_, device)) in self.devices.iter().enumerate() {
            let stream = device.stream().map_err(far)?;
            let _current = device.enter().map_err(far)?;
            for (_, _, event) in self.ready.iter().filter(|(of, ..)| *of == number) {
                event.hold(stream.raw()).map_err(far)?;
            }
            streams.push(stream);
        }
        let pinned = self.devices.first();
        let pinned = pinned.and_then(|(_, device)| Pinned::new(device, CHUNK as usize).ok());
        let memory = match pinned {
            Some(pinned) => Staged::Pinned(pinned),
            None => Staged::Pages(Pages::new(CHUNK as usize).map_err(LoadError::Memory)?),
        };
        Ok(Staging {
            streams,
            memory: ManuallyDrop::new(memory),
            lost: Arc::clone(&self.lost),
        })
    }

    fn put(&self, want: usize, at: u64, from: &Staging, part: Part) -> Result<(), LoadError> {
        let to = self.to.get(want).copied().flatten();
        let inside = |to: &To| at.saturating_add(part.bytes as u64) <= to.bytes;
        let (Some(to), Some(bytes)) = (
            to.filter(inside),
            from.get(part.at..part.at.saturating_add(part.bytes)),
        ) else {
            return Err(LoadError::Far("more than fits was read".into()));
        };
        let (_, device) = &self.devices[to.device];
        let _current = device.enter().map_err(far)?;
        // SAFETY: the memory stays until `flush` or `drop`, which wait for the stream; the tensor is so long, and its
        // owner's word is that nobody else uses it.
        let begun = unsafe {
            from.streams[to.device].to_device(to.address + at, bytes.as_ptr(), bytes.len())
        };
        begun.map_err(far)
    }

    fn flush(&self, buffer: &mut Staging) -> Result<(), LoadError> {
        (buffer.streams.iter()).try_for_each(|stream| stream.synchronize().map_err(far))
    }
}
