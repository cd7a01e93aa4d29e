//! Where a tensor's bytes are.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Range;

/// A tensor's bytes, to be saved: in C order, little-endian.
#[derive(Clone, Copy, Debug)]
pub enum Memory<'a> {
    /// Memory of this process.
    Host(&'a [u8]),
    /// Memory of a GPU.
    Device(OnDevice<'a>),
}

/// Memory that a tensor of a checkpoint is to fill.
#[derive(Debug)]
pub enum MemoryMut<'a> {
    /// Memory of this process.
    Host(&'a mut [u8]),
    /// Memory of a GPU.
    Device(OnDevice<'a>),
}

/// Bytes in the memory of a GPU that NVIDIA's driver knows, and the stream in which they are worked with.
#[derive(Clone, Copy, Debug)]
pub struct OnDevice<'a> {
    pub(super) address: u64,
    pub(super) bytes: u64,
    /// A `CUstream`. As a number, because it is only handed on.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "without a driver it is only refused")
    )]
    pub(super) stream: usize,
    tensor: PhantomData<&'a [u8]>,
}

impl<'a> OnDevice<'a> {
    /// `bytes` bytes at an address: a tensor's `data_ptr`. What was put into `stream` before is waited for; null is the
    /// default stream. Device and stream are of the primary context, as with PyTorch, tch and the CUDA runtime.
    ///
    /// # Safety
    /// So many bytes of one GPU's memory lie there, in memory that stays for `'a`, and the stream does, too. Until
    /// the call to which this is handed has returned, nobody but what is in the stream by then writes to
    /// them; and where they are to be filled, nobody else reads them.
    pub unsafe fn new(address: u64, bytes: u64, stream: *mut c_void) -> OnDevice<'a> {
        OnDevice {
            address,
            bytes,
            stream: stream.expose_provenance(),
            tensor: PhantomData,
        }
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A part of it, if it is inside.
    pub(crate) fn part(self, range: Range<u64>) -> Option<OnDevice<'a>> {
        let inside = range.start <= range.end && range.end <= self.bytes;
        inside.then(|| OnDevice {
            address: self.address + range.start,
            bytes: range.end - range.start,
            ..self
        })
    }
}

impl<'a> Memory<'a> {
    /// A part of it, if it is inside.
    pub(super) fn part(self, range: Range<u64>) -> Option<Memory<'a>> {
        match self {
            Memory::Host(bytes) => {
                let (start, end) = (range.start.try_into().ok()?, range.end.try_into().ok()?);
                bytes.get::<Range<usize>>(start..end).map(Memory::Host)
            }
            Memory::Device(whole) => whole.part(range).map(Memory::Device),
        }
    }
}

impl<'a, B: AsRef<[u8]> + ?Sized> From<&'a B> for Memory<'a> {
    fn from(bytes: &'a B) -> Memory<'a> {
        Memory::Host(bytes.as_ref())
    }
}

impl<'a> From<OnDevice<'a>> for Memory<'a> {
    fn from(bytes: OnDevice<'a>) -> Memory<'a> {
        Memory::Device(bytes)
    }
}

impl MemoryMut<'_> {
    /// The same, for a while.
    pub(crate) fn reborrow(&mut self) -> MemoryMut<'_> {
        match self {
            MemoryMut::Host(bytes) => MemoryMut::Host(bytes),
            MemoryMut::Device(there) => MemoryMut::Device(*there),
        }
    }
}

impl<'a, B: AsMut<[u8]> + ?Sized> From<&'a mut B> for MemoryMut<'a> {
    fn from(bytes: &'a mut B) -> MemoryMut<'a> {
        MemoryMut::Host(bytes.as_mut())
    }
}

impl<'a> From<OnDevice<'a>> for MemoryMut<'a> {
    fn from(there: OnDevice<'a>) -> MemoryMut<'a> {
        MemoryMut::Device(there)
    }
}

/// How tensors of GPUs get into a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Way {
    /// Straight: the slot's memory is registered with the driver.
    Straight,
    /// Through a buffer of pinned memory, because the driver does not register the slot's.
    Pinned {
        /// What the driver said.
        why: String,
    },
}

/// Bytes of a GPU's, and where they go in an image.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part<'a> {
    pub(super) at: u64,
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "without a driver it is only refused")
    )]
    pub(super) from: OnDevice<'a>,
}
