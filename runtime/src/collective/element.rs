//! Types of elements that collectives work on, and operations on them.

use half::{bf16, f16};

/// The type of a buffer's elements, as it is said between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DType {
    F32 = 1,
    F64,
    F16,
    Bf16,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::I8 | DType::U8 => 1,
            DType::F16 | DType::Bf16 | DType::I16 | DType::U16 => 2,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F64 | DType::I64 | DType::U64 => 8,
        }
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A number that collectives carry. Implemented for the types of [`DType`] and no others.
pub trait Element: bytemuck::Pod + Send + Sync + sealed::Sealed {
    const DTYPE: DType;
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),*) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

elements!(
    f32 => F32, f64 => F64, f16 => F16, bf16 => Bf16,
    i8 => I8, i16 => I16, i32 => I32, i64 => I64,
    u8 => U8, u16 => U16, u32 => U32, u64 => U64
);

/// How contributions become one.
///
/// | | floats | integers |
/// |---|---|---|
/// | `Sum` | rounded after each addition; 16-bit floats are added in `f32` and rounded once a host | wraps |
/// | `Mean` | the sum, divided by the world size | the wrapped sum, divided towards zero |
/// | `Min`, `Max` | NaN if any is; of equal ones (-0, +0) the first | |
///
/// Every NaN in a result is the one canonical NaN of its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    Sum = 1,
    Mean,
    Min,
    Max,
}
