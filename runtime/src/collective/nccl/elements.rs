//! Operands of an operation: elements in a device's memory, and NCCL's names for them.

use std::ffi::c_void;

use cudarc::nccl::sys as nc;

use super::super::element::{DType, Op};
use super::error::NcclError;
use crate::cuda::Memory;

/// Elements in a device's memory, which an operation reads or writes: an address that somebody else
/// keeps, for example a tensor's `data_ptr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elements {
    pub(super) address: u64,
    pub(super) len: usize,
    pub(super) dtype: DType,
}

impl Elements {
    /// `len` elements of a type at an address.
    ///
    /// # Safety
    /// They lie in the memory of the communicator's device, and stay there, used by nobody else, until
    /// each operation that was given them is waited for or its communicator is dropped.
    pub unsafe fn new(address: u64, len: usize, dtype: DType) -> Elements {
        Elements {
            address,
            len,
            dtype,
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.len as u64 * self.dtype.size() as u64
    }
}

impl Memory {
    /// All of it as elements of a type; a rest that is no whole element is left out.
    ///
    /// # Safety
    /// See [`Elements::new`]: the memory is kept until the operations that use it have ended.
    pub unsafe fn elements(&self, dtype: DType) -> Elements {
        // SAFETY: the caller vouches for it.
        unsafe { Elements::new(self.address(), self.bytes() / dtype.size(), dtype) }
    }
}

/// Elements that only move are moved as bytes, so that NCCL need not know the type.
pub(super) const BYTES: nc::ncclDataType_t = nc::ncclDataType_t::ncclUint8;

pub(super) fn number_of(dtype: DType) -> Result<nc::ncclDataType_t, NcclError> {
    Ok(match dtype {
        DType::F32 => nc::ncclDataType_t::ncclFloat32,
        DType::F64 => nc::ncclDataType_t::ncclFloat64,
        DType::F16 => nc::ncclDataType_t::ncclFloat16,
        DType::Bf16 => nc::ncclDataType_t::ncclBfloat16,
        DType::I8 => nc::ncclDataType_t::ncclInt8,
        DType::I32 => nc::ncclDataType_t::ncclInt32,
        DType::I64 => nc::ncclDataType_t::ncclInt64,
        DType::U8 => nc::ncclDataType_t::ncclUint8,
        DType::U32 => nc::ncclDataType_t::ncclUint32,
        DType::U64 => nc::ncclDataType_t::ncclUint64,
        DType::I16 | DType::U16 => return Err(NcclError::Unsupported(dtype)),
    })
}

pub(super) fn reduction(op: Op) -> nc::ncclRedOp_t {
    match op {
        Op::Sum => nc::ncclRedOp_t::ncclSum,
        Op::Mean => nc::ncclRedOp_t::ncclAvg,
        Op::Min => nc::ncclRedOp_t::ncclMin,
        Op::Max => nc::ncclRedOp_t::ncclMax,
    }
}

pub(super) fn from(elements: Elements) -> *const c_void {
    std::ptr::with_exposed_provenance(usize::try_from(elements.address).unwrap_or(0))
}

pub(super) fn to(elements: Elements) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(usize::try_from(elements.address).unwrap_or(0))
}

/// The output is `len` elements of the input's type, and lies elsewhere.
pub(super) fn fits(
    what: &'static str,
    input: Elements,
    output: Elements,
    len: usize,
) -> Result<(), NcclError> {
    if output.dtype != input.dtype {
        return Err(NcclError::Types {
            what,
            got: output.dtype,
            expected: input.dtype,
        });
    }
    if output.len != len {
        return Err(NcclError::Length {
            what,
            got: output.len,
            expected: len,
        });
    }
    let ends = |elements: Elements| elements.address.saturating_add(elements.bytes());
    if input.address < ends(output) && output.address < ends(input) {
        return Err(NcclError::Overlap);
    }
    Ok(())
}
