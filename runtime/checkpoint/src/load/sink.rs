//! Memory that this process cannot write to itself, such as a GPU's: somebody takes bytes there.

use std::ops::DerefMut;

use super::{LoadError, buffer};
use crate::Pages;

/// Where a want's bytes go.
#[derive(Debug)]
pub enum Room<'a> {
    /// Memory of this process.
    Here(&'a mut [u8]),
    /// So many bytes somewhere else, which the [`Sink`] knows by the want's place in the list.
    Far(u64),
}

impl Room<'_> {
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Room::Here(bytes) => bytes.len() as u64,
            Room::Far(bytes) => *bytes,
        }
    }
}

/// Receiver of bytes that go elsewhere. It is given verified bytes only.
pub trait Sink: Sync {
    /// A thread's memory for a chunk: what is put comes from there. When it is dropped, nothing may be on its
    /// way any more.
    type Buffer: DerefMut<Target = [u8]>;

    /// At least the bytes of a chunk, beginning at a page where O_DIRECT is to be of use.
    ///
    /// # Errors
    /// There is no memory.
    fn buffer(&self) -> Result<Self::Buffer, LoadError>;

    /// Takes `bytes` of `from` to byte `at` of this want's memory. It need not be done when this returns.
    ///
    /// # Errors
    /// The load is given up.
    fn put(&self, want: usize, at: u64, from: &Self::Buffer, bytes: Part) -> Result<(), LoadError>;

    /// Waits until all that was put from this buffer is there: other bytes come into it next.
    ///
    /// # Errors
    /// The load is given up.
    fn flush(&self, buffer: &mut Self::Buffer) -> Result<(), LoadError>;
}

/// A part of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub at: usize,
    pub bytes: usize,
}

/// All wants are of this process.
impl Sink for () {
    type Buffer = Pages;

    fn buffer(&self) -> Result<Pages, LoadError> {
        buffer()
    }

    fn put(&self, _want: usize, _at: u64, _from: &Pages, _bytes: Part) -> Result<(), LoadError> {
        Err(LoadError::Far("nobody takes bytes there".into()))
    }

    fn flush(&self, _buffer: &mut Pages) -> Result<(), LoadError> {
        Ok(())
    }
}
