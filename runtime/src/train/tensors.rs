//! A model's state as tensors with names: what checkpoints keep, and how it comes back.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::Range;

use super::config::TrainError;
use super::handed::Come;
use super::model::Model;
#[cfg(feature = "torch")]
use crate::saving::OnDeviceMut;
use crate::saving::{Dtype, Held, LoadError, Memory, MemoryMut, OnDevice, Restore, Slice, Wanted};

/// The name of what a model without names is saved as: its encoding, in one tensor of bytes.
pub(super) const STATE: &str = "model.state";

#[cfg(target_endian = "big")]
compile_error!("tensors are saved as they are in memory, in little endian");

/// Where bytes may be, for what is to be done with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// In this process's memory: it is read here.
    Host,
    /// Or in a GPU's.
    Devices,
}

/// A tensor's elements in C order, little-endian. They are copied once, into the checkpoint's slot, unless they are
/// bytes of their own.
#[derive(Clone, Debug)]
pub enum Bytes<'a> {
    /// In the memory of this process.
    Host(Cow<'a, [u8]>),
    /// In a GPU's.
    Device(OnDevice<'a>),
}

impl Bytes<'_> {
    /// In the memory of this process.
    pub(super) fn host(&self) -> Option<&[u8]> {
        match self {
            Bytes::Host(bytes) => Some(bytes),
            Bytes::Device(_) => None,
        }
    }

    /// Memory that is saved.
    pub fn memory(&self) -> Memory<'_> {
        match self {
            Bytes::Host(bytes) => Memory::Host(bytes),
            Bytes::Device(there) => Memory::Device(*there),
        }
    }
}

impl<'a> From<&'a [u8]> for Bytes<'a> {
    fn from(bytes: &'a [u8]) -> Bytes<'a> {
        Bytes::Host(Cow::Borrowed(bytes))
    }
}

impl From<Vec<u8>> for Bytes<'_> {
    fn from(bytes: Vec<u8>) -> Self {
        Bytes::Host(Cow::Owned(bytes))
    }
}

/// A tensor of a model's state, by the name that it has in checkpoints.
#[derive(Clone, Debug)]
pub struct Named<'a> {
    /// `model.…` for what the model computes with, `optim.…` for what only its training needs.
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    pub bytes: Bytes<'a>,
}

impl<'a> Named<'a> {
    pub fn floats(name: impl Into<String>, shape: &[u64], values: &'a [f32]) -> Named<'a> {
        Named {
            name: name.into(),
            dtype: Dtype::F32,
            shape: shape.to_vec(),
            bytes: bytemuck::cast_slice::<f32, u8>(values).into(),
        }
    }

    /// A number, such as that of the optimizer's steps.
    pub fn count(name: impl Into<String>, value: u64) -> Named<'a> {
        Named {
            name: name.into(),
            dtype: Dtype::U64,
            shape: Vec::new(),
            bytes: value.to_le_bytes().to_vec().into(),
        }
    }

    pub(super) fn bytes(name: &str, bytes: &'a [u8]) -> Named<'a> {
        Named {
            name: name.to_owned(),
            dtype: Dtype::U8,
            shape: vec![bytes.len() as u64],
            bytes: bytes.into(),
        }
    }

    pub(super) fn held(&self) -> Held {
        Held::whole(&self.name, self.dtype, &self.shape)
    }
}

/// Memory that a tensor of a checkpoint is to fill.
#[derive(Debug)]
pub struct Room<'a> {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    pub into: MemoryMut<'a>,
}

impl<'a> Room<'a> {
    pub fn floats(name: impl Into<String>, shape: &[u64], into: &'a mut [f32]) -> Room<'a> {
        Room {
            name: name.into(),
            dtype: Dtype::F32,
            shape: shape.to_vec(),
            into: bytemuck::cast_slice_mut::<f32, u8>(into).into(),
        }
    }

    /// A number, as its bytes.
    pub fn count(name: impl Into<String>, into: &'a mut [u8; 8]) -> Room<'a> {
        Room {
            name: name.into(),
            dtype: Dtype::U64,
            shape: Vec::new(),
            into: into.into(),
        }
    }
}

/// Source of a model's load: a checkpoint or a part of it, or the state that others hand to a newcomer.
pub struct Load<'a> {
    source: Source<'a>,
    picks: &'a dyn Fn(&str) -> bool,
    filled: BTreeSet<String>,
}

#[derive(Clone, Copy)]
enum Source<'a> {
    Checkpoint(&'a Restore),
    Come(&'a Come<'a>),
    /// Nothing: memory that is to be filled some day is touched, and stays as it is.
    Nowhere,
}

impl std::fmt::Debug for Load<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let step = match self.source {
            Source::Checkpoint(checkpoint) => Some(checkpoint.step()),
            Source::Come(_) | Source::Nowhere => None,
        };
        f.debug_struct("Load")
            .field("step", &step)
            .field("filled", &self.filled.len())
            .finish_non_exhaustive()
    }
}

impl<'a> Load<'a> {
    pub(super) fn new(checkpoint: &'a Restore, picks: &'a dyn Fn(&str) -> bool) -> Load<'a> {
        Load {
            source: Source::Checkpoint(checkpoint),
            picks,
            filled: BTreeSet::new(),
        }
    }

    /// All of a state that has come.
    pub(super) fn come(come: &'a Come<'a>) -> Load<'a> {
        Load {
            source: Source::Come(come),
            picks: &|_| true,
            filled: BTreeSet::new(),
        }
    }

    /// None of it: the memory that is to be filled is touched, so that its pages are there when it is.
    pub(super) fn touch() -> Load<'static> {
        Load {
            source: Source::Nowhere,
            picks: &|_| false,
            filled: BTreeSet::new(),
        }
    }

    /// Whether a tensor is to be loaded. One that is not stays as it is.
    pub fn picks(&self, name: &str) -> bool {
        (self.picks)(name)
    }

    /// Fills all of these that are to be loaded, each from the tensor of its name. Only what they need is read, and
    /// all of that is verified.
    ///
    /// # Errors
    /// A tensor is not there or another one, which the error names, or it is damaged. The memory's contents are of no
    /// use then.
    pub fn fill(&mut self, mut rooms: Vec<Room<'_>>) -> Result<(), LoadError> {
        if let Source::Nowhere = self.source {
            rooms.iter_mut().for_each(|room| touch(&mut room.into));
        }
        rooms.retain(|room| self.picks(&room.name));
        match self.source {
            Source::Nowhere => {}
            Source::Come(come) => come.fill(&mut rooms)?,
            Source::Checkpoint(checkpoint) => {
                let wants = (rooms.iter_mut())
                    .map(|room| Wanted {
                        name: &room.name,
                        dtype: room.dtype,
                        shape: &room.shape,
                        slice: Slice::whole(&room.shape),
                        into: room.into.reborrow(),
                    })
                    .collect();
                checkpoint.load_into(wants)?;
            }
        }
        self.filled.extend(rooms.into_iter().map(|room| room.name));
        Ok(())
    }

    /// A tensor of bytes, as long as it was saved; `None`, if it is not to be loaded.
    pub(super) fn bytes(&mut self, name: &str) -> Result<Option<Vec<u8>>, LoadError> {
        if !self.picks(name) {
            return Ok(None);
        }
        let Some(&[len]) = self.shape(name) else {
            let name = name.to_owned();
            return Err(LoadError::Missing { name });
        };
        let mut out = Vec::new();
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        out.try_reserve_exact(len)
            .map_err(|_| LoadError::Memory(std::io::ErrorKind::OutOfMemory.into()))?;
        out.resize(len, 0);
        self.fill(vec![Room {
            name: name.to_owned(),
            dtype: Dtype::U8,
            shape: vec![len as u64],
            into: (&mut out).into(),
        }])?;
        Ok(Some(out))
    }

    /// A model's encoding, if that is what is there.
    pub(super) fn encoded(&mut self) -> Result<Option<Vec<u8>>, LoadError> {
        match self.shape(STATE) {
            Some(_) => self.bytes(STATE),
            None => Ok(None),
        }
    }

    /// The shape of a tensor that is there.
    pub(super) fn shape(&self, name: &str) -> Option<&[u64]> {
        match self.source {
            Source::Nowhere => None,
            Source::Come(come) => come.shape(name),
            Source::Checkpoint(checkpoint) => {
                let tensor = checkpoint.manifest().tensor(name)?;
                Some(&tensor.shape)
            }
        }
    }

    /// The first tensor of the model or its optimizer that is there and was not loaded.
    pub(super) fn left(&self) -> Option<String> {
        let left = |name: &&String| !self.filled.contains(*name);
        match self.source {
            Source::Nowhere => None,
            Source::Come(come) => {
                let of_model =
                    |name: &&String| name.starts_with("model.") || name.starts_with("optim.");
                come.names().filter(of_model).find(left).cloned()
            }
            Source::Checkpoint(checkpoint) => {
                let all = checkpoint.manifest().matching(&["model.*", "optim.*"]);
                all.map(|tensor| &tensor.name).find(left).cloned()
            }
        }
    }
}

/// Writes to each page what is there.
fn touch(memory: &mut MemoryMut<'_>) {
    const PAGE: usize = 4096;
    let MemoryMut::Host(memory) = memory else {
        return;
    };
    for byte in memory.iter_mut().step_by(PAGE) {
        *byte = std::hint::black_box(*byte);
    }
}

/// Loads a model, or a part of one, from a checkpoint: to evaluate it, to use it, or to begin another training with
/// it. Nothing of the training around it is loaded, and nothing is written. `picks` says which of the model's tensors
/// are wanted; each of them has to be there. How many were loaded.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use muster_runtime::train::Model;
/// # fn body(model: &mut impl Model) -> Result<(), Box<dyn std::error::Error>> {
/// use muster_runtime::saving::Restore;
/// use muster_runtime::train::load_model;
///
/// // In a job: what its generation begins with. Elsewhere: `Restore::open`.
/// let checkpoint = Restore::from_env()?.ok_or("nothing was saved yet")?;
/// // All but what only a training needs.
/// load_model(model, &checkpoint, |name| name.starts_with("model."))?;
/// # Ok(()) }
/// # Ok(()) }
/// ```
///
/// # Errors
/// A tensor that is wanted is missing, has another type or shape, or is damaged: the error names it. Or none is wanted.
/// After an error the model is of no use.
pub fn load_model<M: Model>(
    model: &mut M,
    checkpoint: &Restore,
    picks: impl Fn(&str) -> bool,
) -> Result<usize, TrainError> {
    let step = checkpoint.step();
    let mut load = Load::new(checkpoint, &picks);
    let loaded = model.load(&mut load);
    loaded.map_err(|source| TrainError::Checkpoint { step, source })?;
    match load.filled.len() {
        0 => Err(TrainError::NothingPicked { step }),
        filled => Ok(filled),
    }
}

/// Where tensors lie in one list of numbers, as those of [`Model::parameters`] do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Ascending by their ranges.
    parts: Vec<(String, Vec<u64>, Range<usize>)>,
}

impl Layout {
    /// Tensors by name and shape, one after the other.
    pub fn new<'n>(tensors: impl IntoIterator<Item = (&'n str, &'n [u64])>) -> Layout {
        let mut layout = Layout::default();
        for (name, shape) in tensors {
            let start = layout.len();
            let len = shape.iter().product::<u64>() as usize;
            layout.add(name.to_owned(), shape.to_vec(), start..start + len);
        }
        layout
    }

    /// Another one, behind those before.
    pub(crate) fn add(&mut self, name: String, shape: Vec<u64>, range: Range<usize>) {
        debug_assert!(self.len() <= range.start);
        self.parts.push((name, shape, range));
    }

    /// Where the last one ends.
    pub fn len(&self) -> usize {
        self.parts.last().map_or(0, |(_, _, range)| range.end)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The model's tensors, `model.<name>`.
    pub fn model<'a>(&'a self, values: &'a [f32]) -> impl Iterator<Item = Named<'a>> {
        self.tensors(values, |name| format!("model.{name}"))
    }

    /// The memory of the model's tensors.
    pub fn model_rooms<'a>(&self, values: &'a mut [f32]) -> Vec<Room<'a>> {
        self.rooms(values, |name| format!("model.{name}"))
    }

    /// An optimizer's: `optim.<name>.<slot>` for each slot, whose numbers lie as the parameters do, and
    /// `optim.step`. An empty slot is none.
    pub(crate) fn optim<'a>(
        &'a self,
        steps: u64,
        slots: impl IntoIterator<Item = (&'static str, &'a [f32])>,
    ) -> Vec<Named<'a>> {
        let mut all = vec![Named::count("optim.step", steps)];
        for (slot, values) in slots.into_iter().filter(|(_, values)| !values.is_empty()) {
            all.extend(self.tensors(values, move |name| format!("optim.{name}.{slot}")));
        }
        all
    }

    /// Loads those.
    pub(crate) fn load_optim<'a>(
        &self,
        steps: &mut u64,
        slots: impl IntoIterator<Item = (&'static str, &'a mut [f32])>,
        from: &mut Load<'_>,
    ) -> Result<(), LoadError> {
        let mut count = steps.to_le_bytes();
        let mut all = vec![Room::count("optim.step", &mut count)];
        for (slot, values) in slots.into_iter().filter(|(_, values)| !values.is_empty()) {
            all.extend(self.rooms(values, |name| format!("optim.{name}.{slot}")));
        }
        from.fill(all)?;
        *steps = u64::from_le_bytes(count);
        Ok(())
    }

    pub(crate) fn tensors<'a>(
        &'a self,
        values: &'a [f32],
        full: impl Fn(&str) -> String,
    ) -> impl Iterator<Item = Named<'a>> {
        self.parts.iter().filter_map(move |(name, shape, range)| {
            Some(Named::floats(full(name), shape, values.get(range.clone())?))
        })
    }

    /// Copies of them.
    #[cfg(feature = "torch")]
    pub(crate) fn copies(
        &self,
        values: &[f32],
        full: impl Fn(&str) -> String,
    ) -> Vec<Named<'static>> {
        let copied = self.parts.iter().filter_map(|(name, shape, range)| {
            let values = values.get(range.clone())?;
            Some(Named {
                name: full(name),
                dtype: Dtype::F32,
                shape: shape.clone(),
                bytes: bytemuck::cast_slice::<f32, u8>(values).to_vec().into(),
            })
        });
        copied.collect()
    }

    /// The same of numbers that are on a GPU.
    #[cfg(feature = "torch")]
    pub(crate) fn there<'a>(
        &self,
        values: OnDevice<'a>,
        full: impl Fn(&str) -> String,
    ) -> Vec<Named<'a>> {
        let parts = self.parts.iter().filter_map(|(name, shape, range)| {
            let bytes = bytes_of(range.start)..bytes_of(range.end);
            Some(Named {
                name: full(name),
                dtype: Dtype::F32,
                shape: shape.clone(),
                bytes: Bytes::Device(values.part(bytes)?),
            })
        });
        parts.collect()
    }

    /// Their memory.
    #[cfg(feature = "torch")]
    pub(crate) fn rooms_there<'a>(
        &self,
        values: OnDeviceMut<'a>,
        full: impl Fn(&str) -> String,
    ) -> Vec<Room<'a>> {
        let (mut rest, mut at, mut rooms) = (values, 0, Vec::new());
        for (name, shape, range) in &self.parts {
            let after = rest.split_at_checked(bytes_of(range.start - at));
            let here = after.and_then(|(_, after)| after.split_at_checked(bytes_of(range.len())));
            let Some((here, after)) = here else { break };
            rooms.push(Room {
                name: full(name),
                dtype: Dtype::F32,
                shape: shape.clone(),
                into: here.into(),
            });
            (rest, at) = (after, range.end);
        }
        rooms
    }

    pub(crate) fn rooms<'a>(
        &self,
        values: &'a mut [f32],
        full: impl Fn(&str) -> String,
    ) -> Vec<Room<'a>> {
        let (mut rest, mut at, mut rooms) = (values, 0, Vec::new());
        for (name, shape, range) in &self.parts {
            let after = std::mem::take(&mut rest).split_at_mut_checked(range.start - at);
            let here = after.and_then(|(_, after)| after.split_at_mut_checked(range.len()));
            let Some((here, after)) = here else { break };
            rooms.push(Room::floats(full(name), shape, here));
            (rest, at) = (after, range.end);
        }
        rooms
    }
}

/// Of so many numbers.
#[cfg(feature = "torch")]
fn bytes_of(numbers: usize) -> u64 {
    numbers as u64 * size_of::<f32>() as u64
}
