//! From a caller's pointers to references.

use std::ffi::{CStr, c_char, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use muster_runtime::saving::{self, Dtype, MemoryMut, OnDevice, OnDeviceMut, Slice};

use crate::outcome::Failure;

/// The most dimensions that are read; the format allows no more.
const MAX_DIMS: u32 = 32;

/// `muster_tensor` of the header.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Tensor {
    pub name: *const c_char,
    pub dtype: *const c_char,
    pub dims: u32,
    pub rank: u32,
    pub shape: *const u64,
    pub offset: *const u64,
    pub extent: *const u64,
}

/// `muster_memory` of the header.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Memory {
    pub at: *mut c_void,
    pub kind: u32,
    pub reserved: u32,
    pub stream: *mut c_void,
}

/// `MUSTER_HOST` and `MUSTER_CUDA`.
pub(crate) const HOST: u32 = 0;
pub(crate) const CUDA: u32 = 1;

/// The same, read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Described<'a> {
    pub(crate) name: &'a str,
    pub(crate) dtype: Dtype,
    /// `None`: all ranks.
    pub(crate) rank: Option<u32>,
    pub(crate) shape: &'a [u64],
    pub(crate) slice: Slice,
    /// Of the slice.
    pub(crate) bytes: usize,
}

/// # Safety
/// `at` is null or valid for a write of as long as `'a`.
pub(crate) unsafe fn out<'a, T>(at: *mut T, what: &str) -> Result<&'a mut T, Failure> {
    // SAFETY: the caller's promise.
    unsafe { at.as_mut() }.ok_or_else(|| null(what))
}

/// # Safety
/// `at` is null or points to something that stays as it is for `'a`.
pub(crate) unsafe fn one<'a, T>(at: *const T, what: &str) -> Result<&'a T, Failure> {
    // SAFETY: the caller's promise.
    unsafe { at.as_ref() }.ok_or_else(|| null(what))
}

/// # Safety
/// `at` is null or points to `count` values that stay as they are for `'a`.
pub(crate) unsafe fn list<'a, T>(
    at: *const T,
    count: usize,
    what: &str,
) -> Result<&'a [T], Failure> {
    check(at, count, what)?;
    match count {
        0 => Ok(&[]),
        // SAFETY: the caller's promise; not null, aligned and not too long by the check.
        _ => Ok(unsafe { std::slice::from_raw_parts(at, count) }),
    }
}

/// # Safety
/// `at` is null or points to `count` values that nobody else looks at for `'a`.
pub(crate) unsafe fn list_mut<'a, T>(
    at: *mut T,
    count: usize,
    what: &str,
) -> Result<&'a mut [T], Failure> {
    check(at, count, what)?;
    match count {
        0 => Ok(&mut []),
        // SAFETY: the caller's promise; not null, aligned and not too long by the check.
        _ => Ok(unsafe { std::slice::from_raw_parts_mut(at, count) }),
    }
}

fn check<T>(at: *const T, count: usize, what: &str) -> Result<(), Failure> {
    if count == 0 {
        return Ok(());
    }
    if at.is_null() {
        return Err(null(what));
    }
    let fits = count
        .checked_mul(size_of::<T>())
        .is_some_and(|bytes| isize::try_from(bytes).is_ok());
    match fits && at.is_aligned() {
        true => Ok(()),
        false => Err(Failure::argument(format!(
            "{what}: {count} values at an address that cannot hold them"
        ))),
    }
}

/// A tensor's memory, to be read.
///
/// # Safety
/// It is null or as the header says, and stays as it is for `'a`.
pub(crate) unsafe fn memory<'a>(
    memory: &Memory,
    bytes: usize,
) -> Result<saving::Memory<'a>, Failure> {
    match kind_of(memory)? {
        // SAFETY: the caller's promise, here and below.
        HOST => unsafe { list(memory.at.cast_const().cast::<u8>(), bytes, MEMORY) }.map(Into::into),
        _ => {
            let at = on_device(memory, bytes)?;
            Ok(unsafe { OnDevice::new(at, bytes as u64, memory.stream) }.into())
        }
    }
}

/// A tensor's memory, to be filled.
///
/// # Safety
/// It is null or as the header says, and nobody else looks at it for `'a`.
pub(crate) unsafe fn memory_mut<'a>(
    memory: &Memory,
    bytes: usize,
) -> Result<MemoryMut<'a>, Failure> {
    match kind_of(memory)? {
        // SAFETY: the caller's promise, here and below.
        HOST => unsafe { list_mut(memory.at.cast::<u8>(), bytes, MEMORY) }.map(MemoryMut::Host),
        _ => {
            let at = on_device(memory, bytes)?;
            Ok(unsafe { OnDeviceMut::new(at, bytes as u64, memory.stream) }.into())
        }
    }
}

const MEMORY: &str = "a tensor's memory";

/// The kind, if it is one that there is.
fn kind_of(memory: &Memory) -> Result<u32, Failure> {
    match (memory.kind, memory.reserved) {
        (kind @ (HOST | CUDA), 0) => Ok(kind),
        (kind, reserved) => Err(Failure::argument(format!(
            "memory of kind {kind} (reserved: {reserved}) is not known: fill muster_memory with zeros first, and take header and library from one release"
        ))),
    }
}

/// The address of a device's memory.
fn on_device(memory: &Memory, bytes: usize) -> Result<u64, Failure> {
    match memory.at.is_null() && bytes > 0 {
        true => Err(null(MEMORY)),
        false => Ok(memory.at.addr() as u64),
    }
}

/// # Safety
/// `at` is null or text that ends with a zero byte, as it is for `'a`.
pub(crate) unsafe fn text<'a>(at: *const c_char, what: &str) -> Result<&'a str, Failure> {
    if at.is_null() {
        return Err(null(what));
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(at) };
    text.to_str()
        .map_err(|_| Failure::argument(format!("{what} is not UTF-8: {text:?}")))
}

/// # Safety
/// The pointers of `tensor` are null or as the header says.
pub(crate) unsafe fn described<'a>(tensor: &Tensor) -> Result<Described<'a>, Failure> {
    // SAFETY: the caller's promise, here and below.
    let (name, dtype) = unsafe {
        (
            text(tensor.name, "a tensor's name")?,
            text(tensor.dtype, "a tensor's dtype")?,
        )
    };
    let Some(dtype) = Dtype::ALL.into_iter().find(|known| known.name() == dtype) else {
        return Err(Failure::argument(format!(
            "`{name}` has the type {dtype:?}, which safetensors does not know"
        )));
    };
    if tensor.dims > MAX_DIMS {
        return Err(Failure::argument(format!(
            "`{name}` has {} dimensions, the limit is {MAX_DIMS}",
            tensor.dims
        )));
    }
    let dims = tensor.dims as usize;
    // SAFETY: as above.
    let shape = unsafe { list(tensor.shape, dims, "a tensor's shape")? };
    let slice = match tensor.offset.is_null() && tensor.extent.is_null() {
        true => Slice::whole(shape),
        false => Slice {
            // SAFETY: as above.
            offset: unsafe { list(tensor.offset, dims, "a tensor's offset")? }.to_vec(),
            // SAFETY: as above.
            extent: unsafe { list(tensor.extent, dims, "a tensor's extent")? }.to_vec(),
        },
    };
    let count =
        (slice.check(shape)).map_err(|error| Failure::argument(format!("of `{name}`: {error}")))?;
    let bytes = usize::try_from(count.saturating_mul(dtype.size()))
        .map_err(|_| Failure::argument(format!("`{name}` is larger than memory")))?;
    Ok(Described {
        name,
        dtype,
        rank: (tensor.rank != u32::MAX).then_some(tensor.rank),
        shape,
        slice,
        bytes,
    })
}

fn null(what: &str) -> Failure {
    Failure::argument(format!("{what} is NULL"))
}

/// Locks the value behind a handle. A panic in another call has left it as it was between two of its own calls, or
/// in the middle of one: nothing here breaks by that.
pub(crate) fn lock<T>(handle: &Mutex<T>) -> MutexGuard<'_, T> {
    handle.lock().unwrap_or_else(PoisonError::into_inner)
}
