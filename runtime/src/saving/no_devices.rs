//! Without the feature `cuda`: tensors of GPUs are refused by name.

use std::sync::Arc;
use std::time::Duration;

use muster_checkpoint::load::{LoadError, Loaded, Room, Team, Wanted, load_to};
use muster_checkpoint::manifest::Manifest;
use muster_checkpoint::slot::{Image, Slot};
use muster_checkpoint::source::Source;

use super::SaveError;
use super::memory::{MemoryMut, Part, Way};

/// Nothing is to be done.
pub(super) type Preparation = fn(&[Arc<Slot>]);

/// None.
#[derive(Debug, Default)]
pub(super) struct Devices {}

#[derive(Debug, thiserror::Error)]
#[error(
    "this worker was built without the feature `cuda` of muster-runtime, which tensors on GPUs need: build it with that, or hand over copies in the host's memory"
)]
struct NoCuda;

impl Devices {
    pub(super) fn renew(&mut self) {}

    pub(super) fn check(&self, parts: &[Part<'_>]) -> Result<(), SaveError> {
        match parts {
            [] => Ok(()),
            _ => Err(SaveError::Device(NoCuda.into())),
        }
    }

    pub(super) fn preparation(&mut self, _parts: &[Part<'_>]) -> Option<Preparation> {
        None
    }

    pub(super) fn fill(
        &mut self,
        _slots: &[Arc<Slot>],
        slot: &Slot,
        image: &Image<'_>,
        parts: &[Part<'_>],
        threads: usize,
    ) -> Result<Duration, SaveError> {
        self.check(parts)?;
        Ok(slot.fill(image, threads)?)
    }

    pub(super) fn load(
        &self,
        manifest: &Manifest,
        source: &impl Source,
        wants: Vec<Wanted<'_, MemoryMut<'_>>>,
        team: Team,
    ) -> Result<Loaded, LoadError> {
        let here = wants.into_iter().map(|want| {
            Ok(Wanted {
                name: want.name,
                dtype: want.dtype,
                shape: want.shape,
                slice: want.slice,
                into: match want.into {
                    MemoryMut::Host(bytes) => Room::Here(bytes),
                    MemoryMut::Device(_) => return Err(LoadError::Far(NoCuda.into())),
                },
            })
        });
        let here = here.collect::<Result<Vec<_>, LoadError>>()?;
        load_to(manifest, source, here, &(), team)
    }

    pub(super) fn way(&self) -> Option<&Way> {
        None
    }
}
