//! The state that newcomers copy: a head of small things, then all tensors as they lie in memory, one after the other.
//!
//! The tensors that checkpoints have by name are handed over here in one piece, so a state that can be saved and loaded
//! can be handed over. On both sides it lies in memory of the [`Reserve`](super::reserve::Reserve): the survivors'
//! models go on, and the newcomer's is as it was until the copy is whole, should it never be.

use std::any::Any;
use std::collections::BTreeMap;

use super::bytes::{Fields, put, put_word};
use super::config::TrainError;
use super::model::Model;
use super::parallel::Parallel;
use super::reserve::{Buffer, copy};
use super::state::PIECES;
use super::tensors::{Load, Named, Reach, Room};
use crate::live::{Frozen, Landing};
use crate::saving::{Dtype, LoadError, MemoryMut};

const MAGIC: &[u8] = b"MHANDED1";

const DEVICES: &str = "ranks without a GPU handed their state to one that has one: train all on the same kind of device";

/// Room for what of a head differs from state to state, such as the best evaluation.
const SLACK: usize = 64 << 10;

/// A state that is handed over.
#[derive(Debug)]
pub(super) struct Handed {
    head: Vec<u8>,
    tensors: Buffer,
}

impl Frozen for Handed {
    fn total(&self) -> usize {
        self.head.len() + self.tensors.len()
    }

    fn piece(&self, byte: usize) -> &[u8] {
        let piece = match byte.checked_sub(self.head.len()) {
            None => self.head.get(byte..),
            Some(byte) => self.tensors.get(byte..),
        };
        piece.unwrap_or_default()
    }
}

/// Where a newcomer's copy comes to.
#[derive(Debug)]
pub(super) struct Landed(pub(super) Buffer);

impl Landing for Landed {
    fn places(&mut self, total: usize) -> Option<Vec<&mut [u8]>> {
        self.0.resize(total).then(|| vec![&mut self.0[..]])
    }
}

/// A state that has come.
#[derive(Debug)]
pub(super) struct Come<'a> {
    /// Lasting state beside model and codecs, in the order of [`PIECES`].
    pub(super) pieces: Vec<&'a [u8]>,
    tensors: BTreeMap<String, Tensor<'a>>,
}

#[derive(Debug)]
struct Tensor<'a> {
    dtype: Dtype,
    shape: Vec<u64>,
    bytes: &'a [u8],
}

fn put_head(pieces: &[Vec<u8>], tensors: &[Named<'_>]) -> Vec<u8> {
    let mut head = MAGIC.to_vec();
    for piece in pieces {
        put(&mut head, piece);
    }
    put_word(&mut head, tensors.len() as u64);
    for tensor in tensors {
        put(&mut head, tensor.name.as_bytes());
        put(&mut head, tensor.dtype.name().as_bytes());
        put_word(&mut head, tensor.shape.len() as u64);
        for size in &tensor.shape {
            put_word(&mut head, *size);
        }
        put_word(&mut head, bytes_of(tensor).len() as u64);
    }
    head
}

/// Of a tensor within reach.
fn bytes_of<'a>(tensor: &'a Named<'_>) -> &'a [u8] {
    tensor.bytes.host().unwrap_or_default()
}

impl<'a> Come<'a> {
    /// `None`, if these bytes are no state.
    pub(super) fn parse(bytes: &'a [u8]) -> Option<Come<'a>> {
        let mut fields = Fields(bytes.strip_prefix(MAGIC)?);
        let mut pieces = Vec::with_capacity(PIECES.len());
        for _ in PIECES {
            pieces.push(fields.bytes()?);
        }
        let mut said = Vec::new();
        for _ in 0..fields.count()? {
            let name = str::from_utf8(fields.bytes()?).ok()?.to_owned();
            let dtype = fields.bytes()?;
            let named = |known: &Dtype| known.name().as_bytes() == dtype;
            let dtype = Dtype::ALL.into_iter().find(named)?;
            let sizes = fields.count()?;
            let shape = (0..sizes).map(|_| fields.word()).collect::<Option<_>>()?;
            let len = usize::try_from(fields.word()?).ok()?;
            said.push((name, dtype, shape, len));
        }
        let mut tensors = BTreeMap::new();
        for (name, dtype, shape, len) in said {
            let (bytes, rest) = fields.0.split_at_checked(len)?;
            fields.0 = rest;
            let tensor = Tensor {
                dtype,
                shape,
                bytes,
            };
            tensors.insert(name, tensor);
        }
        fields.end()?;
        Some(Come { pieces, tensors })
    }

    /// Fills all of these, each from the tensor of its name.
    pub(super) fn fill(&self, rooms: &mut [Room<'_>]) -> Result<(), LoadError> {
        let mut pairs = Vec::with_capacity(rooms.len());
        for room in rooms {
            let Some(tensor) = self.tensors.get(&room.name) else {
                let name = room.name.clone();
                return Err(LoadError::Missing { name });
            };
            if (tensor.dtype, &tensor.shape) != (room.dtype, &room.shape) {
                return Err(LoadError::Differs {
                    name: room.name.clone(),
                    saved: (tensor.dtype, tensor.shape.clone()),
                    wanted: (room.dtype, room.shape.clone()),
                });
            }
            let MemoryMut::Host(into) = &mut room.into else {
                // Who has a GPU hands its encoding over.
                return Err(LoadError::Far(DEVICES.into()));
            };
            if tensor.bytes.len() != into.len() {
                return Err(LoadError::Buffer {
                    name: room.name.clone(),
                    slice: tensor.bytes.len() as u64,
                    given: into.len() as u64,
                });
            }
            pairs.push((&mut **into, tensor.bytes));
        }
        copy(pairs);
        Ok(())
    }

    /// The shape of a tensor.
    pub(super) fn shape(&self, name: &str) -> Option<&[u64]> {
        let tensor = self.tensors.get(name)?;
        Some(&tensor.shape)
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        self.tensors.keys()
    }
}

impl<M: Model> Parallel<M> {
    /// The state as it is now, for newcomers. All wait for it: it is one copy, into memory that is there.
    pub(super) fn hand_over(&mut self) -> Handed {
        self.copied().unwrap_or_else(|error| {
            self.fault = Some(error);
            Handed {
                head: Vec::new(),
                tensors: Buffer::of(Vec::new()),
            }
        })
    }

    fn copied(&mut self) -> Result<Handed, TrainError> {
        let reserve = self.reserve.clone();
        let handed = self.with_tensors(Reach::Host, |training, tensors| {
            let total = tensors.iter().map(|tensor| bytes_of(tensor).len()).sum();
            let mut buffer = reserve.take(total)?;
            let mut left = &mut buffer[..];
            copy(tensors.iter().map_while(|tensor| {
                let len = bytes_of(tensor).len();
                let (to, rest) = std::mem::take(&mut left).split_at_mut_checked(len)?;
                left = rest;
                Some((to, bytes_of(tensor)))
            }));
            Ok(Handed {
                head: put_head(&training.pieces(), &tensors),
                tensors: buffer,
            })
        })?;
        self.asked()?;
        Ok(handed)
    }

    /// Bytes of the memory that a state takes which is handed over. `None`: the model names no tensors, or has them on
    /// a GPU, and so this is not known before.
    fn room(&mut self) -> Result<Option<usize>, TrainError> {
        if self.room.is_none() {
            let mut tensors = self.within(Reach::Host)?;
            if tensors.is_empty() {
                return Ok(None);
            }
            tensors.extend(self.shared_tensors());
            let bytes: usize = tensors.iter().map(|tensor| bytes_of(tensor).len()).sum();
            self.room = Some(put_head(&self.pieces(), &tensors).len() + SLACK + bytes);
        }
        Ok(self.room)
    }

    /// Has memory made for what newcomers will copy, if it is to be there before they come.
    ///
    /// # Errors
    /// The model has failed.
    pub(super) fn prepare_to_hand_over(&mut self) -> Result<(), TrainError> {
        if self.model.is_done()
            && let Some(bytes) = self.room()?
        {
            self.reserve.prepare(bytes);
        }
        Ok(())
    }

    /// Where a copy is to come to. `None`: the model is being made, or the memory; or something has failed.
    pub(super) fn land(&mut self) -> Option<Landed> {
        self.landed().unwrap_or_else(|error| {
            self.fault = Some(error);
            None
        })
    }

    fn landed(&mut self) -> Result<Option<Landed>, TrainError> {
        if !self.model.is_done() {
            return Ok(None);
        }
        let Some(bytes) = self.room()? else {
            return Ok(Some(Landed(Buffer::of(Vec::new()))));
        };
        Ok(match self.reserve.is_ready(bytes)? {
            true => Some(Landed(self.reserve.take(bytes)?)),
            false => None,
        })
    }

    /// Becomes the state that has landed. False, and nothing has changed, if it is none of this training.
    pub(super) fn adopt(&mut self, landing: Box<dyn Landing>) -> bool {
        let landing: Box<dyn Any> = landing;
        let Ok(landed) = landing.downcast::<Landed>() else {
            return false;
        };
        self.take_over(&landed.0).unwrap_or_else(|error| {
            // What it is instead is asked for.
            self.fault = Some(error);
            true
        })
    }

    /// # Errors
    /// It is the state of another model, which the error tells. This training is of no use then.
    pub(super) fn take_over(&mut self, bytes: &[u8]) -> Result<bool, TrainError> {
        let Some(come) = Come::parse(bytes) else {
            return Ok(false);
        };
        let Ok(lasting) = self.lasting(&come.pieces) else {
            return Ok(false);
        };
        let failed = |source| TrainError::Handed { source };
        let mut load = Load::come(&come);
        self.load_tensors(&mut load, failed)?;
        if let Some(name) = load.left() {
            let text = format!("it has the tensor `{name}`, and this model has none of that name");
            return Err(failed(text.into()));
        }
        self.forget_own();
        self.become_lasting(lasting);
        Ok(true)
    }
}
