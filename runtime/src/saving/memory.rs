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
    Device(OnDeviceMut<'a>),
}

/// Where bytes are in the memory of a GPU that NVIDIA's driver knows, and the stream in which they are worked with.
#[derive(Clone, Copy, Debug)]
pub(super) struct There {
    pub(super) address: u64,
    pub(super) bytes: u64,
    /// A `CUstream`. As a number, because it is only handed on.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "without a driver it is only refused")
    )]
    pub(super) stream: usize,
}

impl There {
    fn new(address: u64, bytes: u64, stream: *mut c_void) -> There {
        There {
            address,
            bytes,
            stream: stream.expose_provenance(),
        }
    }

    /// A part of it, if it is inside.
    fn part(self, range: Range<u64>) -> Option<There> {
        let inside = range.start <= range.end && range.end <= self.bytes;
        inside.then(|| There {
            address: self.address + range.start,
            bytes: range.end - range.start,
            ..self
        })
    }
}

/// Bytes in the memory of a GPU, to be read: as `&[u8]` for what is not this process's own.
#[derive(Clone, Copy, Debug)]
pub struct OnDevice<'a> {
    pub(super) there: There,
    tensor: PhantomData<&'a [u8]>,
}

impl<'a> OnDevice<'a> {
    /// `bytes` bytes at an address: a tensor's `data_ptr`. Copies wait for all that was put into `stream` before; null
    /// is the default stream. Device and stream are of the primary context, as with PyTorch, tch and the CUDA runtime.
    ///
    /// # Safety
    /// So many bytes of one GPU's memory lie there, in memory that stays for `'a`, and the stream does, too. Until
    /// a call to which this is handed has returned, nobody but what is in the stream by then writes to them.
    pub unsafe fn new(address: u64, bytes: u64, stream: *mut c_void) -> OnDevice<'a> {
        OnDevice {
            there: There::new(address, bytes, stream),
            tensor: PhantomData,
        }
    }

    pub fn bytes(&self) -> u64 {
        self.there.bytes
    }

    /// A part of it, if it is inside.
    pub(crate) fn part(self, range: Range<u64>) -> Option<OnDevice<'a>> {
        Some(OnDevice {
            there: self.there.part(range)?,
            tensor: PhantomData,
        })
    }
}

/// Bytes in the memory of a GPU, to be filled: as `&mut [u8]` for what is not this process's own. So there is one at a
/// time, and none is made of what is only to be read.
///
/// ```
/// use muster_runtime::saving::{MemoryMut, OnDeviceMut};
///
/// fn filled(mut there: OnDeviceMut<'_>) {
///     let _for_a_while: MemoryMut<'_> = there.reborrow().into();
///     let _for_good: MemoryMut<'_> = there.into();
/// }
/// ```
///
/// ```compile_fail,E0382
/// # use muster_runtime::saving::{MemoryMut, OnDeviceMut};
/// fn two(there: OnDeviceMut<'_>) -> [MemoryMut<'_>; 2] {
///     [there.into(), there.into()]
/// }
/// ```
///
/// ```compile_fail,E0499
/// # use muster_runtime::saving::OnDeviceMut;
/// fn two<'a>(there: &'a mut OnDeviceMut<'_>) -> [OnDeviceMut<'a>; 2] {
///     [there.reborrow(), there.reborrow()]
/// }
/// ```
///
/// ```compile_fail,E0277
/// # use muster_runtime::saving::{MemoryMut, OnDevice};
/// fn filled(there: OnDevice<'_>) -> MemoryMut<'_> {
///     there.into()
/// }
/// ```
#[derive(Debug)]
pub struct OnDeviceMut<'a> {
    pub(super) there: There,
    tensor: PhantomData<&'a mut [u8]>,
}

impl<'a> OnDeviceMut<'a> {
    /// As [`OnDevice::new`].
    ///
    /// # Safety
    /// As there; and nobody else reads or writes those bytes during `'a`, but what is in the stream by the call to
    /// which this is handed.
    pub unsafe fn new(address: u64, bytes: u64, stream: *mut c_void) -> OnDeviceMut<'a> {
        OnDeviceMut {
            there: There::new(address, bytes, stream),
            tensor: PhantomData,
        }
    }

    pub fn bytes(&self) -> u64 {
        self.there.bytes
    }

    /// The same, for a while.
    pub fn reborrow(&mut self) -> OnDeviceMut<'_> {
        OnDeviceMut {
            there: self.there,
            tensor: PhantomData,
        }
    }

    /// The part before a byte, and the part that begins with it, if it is inside.
    pub fn split_at_checked(self, at: u64) -> Option<(OnDeviceMut<'a>, OnDeviceMut<'a>)> {
        let of = |range| {
            let there = self.there.part(range)?;
            let tensor = PhantomData;
            Some(OnDeviceMut { there, tensor })
        };
        Some((of(0..at)?, of(at..self.there.bytes)?))
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
            MemoryMut::Device(there) => MemoryMut::Device(there.reborrow()),
        }
    }
}

impl<'a, B: AsMut<[u8]> + ?Sized> From<&'a mut B> for MemoryMut<'a> {
    fn from(bytes: &'a mut B) -> MemoryMut<'a> {
        MemoryMut::Host(bytes.as_mut())
    }
}

impl<'a> From<OnDeviceMut<'a>> for MemoryMut<'a> {
    fn from(there: OnDeviceMut<'a>) -> MemoryMut<'a> {
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
        /// The driver's message.
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
