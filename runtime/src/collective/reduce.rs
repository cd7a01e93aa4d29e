//! Reductions in the order of parts: loops that the compiler turns into vector instructions.
//!
//! The parts are gone through in blocks that stay in the first-level cache, so each byte of a part is
//! read from memory once and each byte of the result written once, whatever the number of parts.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::element::{DType, Op};

/// Elements of a block. Two blocks of eight-byte elements fill half of a 32 KiB cache.
const BLOCK: usize = 1024;

/// A reduction over parts, as `fold` is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fold {
    pub(super) dtype: DType,
    pub(super) op: Op,
    /// Divide the sum by this: the world size in the last stage of a mean, else 1.
    pub(super) divisor: u32,
}

impl Fold {
    /// The whole reduction over `world` ranks.
    pub(super) fn whole(dtype: DType, op: Op, world: u32) -> Fold {
        Fold {
            dtype,
            op,
            divisor: if op == Op::Mean { world } else { 1 },
        }
    }

    /// Without the division of a mean: for all stages but the last.
    pub(super) fn partial(self) -> Fold {
        Fold { divisor: 1, ..self }
    }

    /// `to` becomes the parts' reduction, in their order. All are equally long, whole numbers of
    /// elements, and aligned for them; `parts` is not empty. Otherwise false, and `to` is unspecified.
    pub(super) fn run(self, to: &mut [u8], parts: &[&[u8]]) -> bool {
        match self.dtype {
            DType::F32 => self.typed::<f32>(to, parts),
            DType::F64 => self.typed::<f64>(to, parts),
            DType::F16 => self.typed::<f16>(to, parts),
            DType::Bf16 => self.typed::<bf16>(to, parts),
            DType::I8 => self.typed::<i8>(to, parts),
            DType::I16 => self.typed::<i16>(to, parts),
            DType::I32 => self.typed::<i32>(to, parts),
            DType::I64 => self.typed::<i64>(to, parts),
            DType::U8 => self.typed::<u8>(to, parts),
            DType::U16 => self.typed::<u16>(to, parts),
            DType::U32 => self.typed::<u32>(to, parts),
            DType::U64 => self.typed::<u64>(to, parts),
        }
    }

    fn typed<T: Number>(self, to: &mut [u8], parts: &[&[u8]]) -> bool {
        let Ok(to) = bytemuck::try_cast_slice_mut::<u8, T>(to) else {
            return false;
        };
        let typed = parts
            .iter()
            .map(|part| bytemuck::try_cast_slice::<u8, T>(part).ok());
        let Some(parts) = typed.collect::<Option<Vec<&[T]>>>() else {
            return false;
        };
        if parts.is_empty() || parts.iter().any(|part| part.len() != to.len()) {
            return false;
        }
        let (op, by) = (self.op, self.divisor);
        match op {
            Op::Sum | Op::Mean => blocks(to, &parts, T::plus, |acc| T::finish(acc, by)),
            Op::Min => blocks(to, &parts, T::least, |acc| T::finish(acc, 1)),
            Op::Max => blocks(to, &parts, T::most, |acc| T::finish(acc, 1)),
        }
        true
    }
}

#[inline(always)]
fn blocks<T: Number>(
    to: &mut [T],
    parts: &[&[T]],
    combine: impl Fn(T::Acc, T::Acc) -> T::Acc,
    finish: impl Fn(&mut [T::Acc]),
) {
    let mut acc = [T::Acc::default(); BLOCK];
    let mut next = [T::Acc::default(); BLOCK];
    let mut at = 0;
    for out in to.chunks_mut(BLOCK) {
        let acc = &mut acc[..out.len()];
        let mut parts = parts.iter().map(|part| &part[at..at + out.len()]);
        if let Some(first) = parts.next() {
            T::widen(first, acc);
        }
        for part in parts {
            match T::same(part) {
                Some(part) => {
                    for (acc, next) in acc.iter_mut().zip(part) {
                        *acc = combine(*acc, *next);
                    }
                }
                None => {
                    let next = &mut next[..out.len()];
                    T::widen(part, next);
                    for (acc, next) in acc.iter_mut().zip(&*next) {
                        *acc = combine(*acc, *next);
                    }
                }
            }
        }
        finish(acc);
        T::narrow(acc, out);
        at += out.len();
    }
}

/// An element with its arithmetic. `Acc` is what sums are kept in.
trait Number: bytemuck::Pod {
    type Acc: Copy + Default;
    fn widen(from: &[Self], to: &mut [Self::Acc]);
    fn narrow(from: &[Self::Acc], to: &mut [Self]);
    /// The same slice, if `Acc` is the type itself.
    fn same(from: &[Self]) -> Option<&[Self::Acc]>;
    fn plus(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn least(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn most(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    /// Divides by `by`, and makes every NaN the canonical one.
    fn finish(acc: &mut [Self::Acc], by: u32);
}

macro_rules! float_arithmetic {
    ($acc:ty) => {
        #[inline(always)]
        fn plus(a: $acc, b: $acc) -> $acc {
            a + b
        }
        #[inline(always)]
        fn least(a: $acc, b: $acc) -> $acc {
            if (b < a) | b.is_nan() { b } else { a }
        }
        #[inline(always)]
        fn most(a: $acc, b: $acc) -> $acc {
            if (b > a) | b.is_nan() { b } else { a }
        }
        #[inline(always)]
        fn finish(acc: &mut [$acc], by: u32) {
            if by != 1 {
                for value in acc.iter_mut() {
                    *value /= by as $acc;
                }
            }
            for value in acc {
                *value = if value.is_nan() { <$acc>::NAN } else { *value };
            }
        }
    };
}

macro_rules! float {
    ($type:ty) => {
        impl Number for $type {
            type Acc = $type;
            #[inline(always)]
            fn widen(from: &[$type], to: &mut [$type]) {
                to.copy_from_slice(from);
            }
            #[inline(always)]
            fn narrow(from: &[$type], to: &mut [$type]) {
                to.copy_from_slice(from);
            }
            #[inline(always)]
            fn same(from: &[$type]) -> Option<&[$type]> {
                Some(from)
            }
            float_arithmetic!($type);
        }
    };
}

float!(f32);
float!(f64);

impl Number for f16 {
    type Acc = f32;
    #[inline(always)]
    fn widen(from: &[f16], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }
    #[inline(always)]
    fn narrow(from: &[f32], to: &mut [f16]) {
        to.convert_from_f32_slice(from);
    }
    #[inline(always)]
    fn same(_: &[f16]) -> Option<&[f32]> {
        None
    }
    float_arithmetic!(f32);
}

impl Number for bf16 {
    type Acc = f32;
    #[inline(always)]
    fn widen(from: &[bf16], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = f32::from_bits(u32::from(from.to_bits()) << 16);
        }
    }
    /// To the nearest, ties to even.
    #[inline(always)]
    fn narrow(from: &[f32], to: &mut [bf16]) {
        for (to, from) in to.iter_mut().zip(from) {
            let bits = from.to_bits();
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
            let kept = if from.is_nan() { bits >> 16 } else { rounded };
            *to = bf16::from_bits(kept as u16);
        }
    }
    #[inline(always)]
    fn same(_: &[bf16]) -> Option<&[f32]> {
        None
    }
    float_arithmetic!(f32);
}

macro_rules! integer {
    ($($type:ty => $wide:ty),*) => {$(
        impl Number for $type {
            type Acc = $type;
            #[inline(always)]
            fn widen(from: &[$type], to: &mut [$type]) {
                to.copy_from_slice(from);
            }
            #[inline(always)]
            fn narrow(from: &[$type], to: &mut [$type]) {
                to.copy_from_slice(from);
            }
            #[inline(always)]
            fn same(from: &[$type]) -> Option<&[$type]> {
                Some(from)
            }
            #[inline(always)]
            fn plus(a: $type, b: $type) -> $type {
                a.wrapping_add(b)
            }
            #[inline(always)]
            fn least(a: $type, b: $type) -> $type {
                a.min(b)
            }
            #[inline(always)]
            fn most(a: $type, b: $type) -> $type {
                a.max(b)
            }
            #[inline(always)]
            fn finish(acc: &mut [$type], by: u32) {
                if by != 1 {
                    for value in acc {
                        *value = (<$wide>::from(*value) / <$wide>::from(by)) as $type;
                    }
                }
            }
        }
    )*};
}

integer!(
    i8 => i64, i16 => i64, i32 => i64, i64 => i64,
    u8 => u64, u16 => u64, u32 => u64, u64 => u64
);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fold(dtype: DType, op: Op, world: u32, parts: &[&[u8]]) -> Vec<u8> {
        // Aligned for every type.
        let mut words = vec![0u64; parts[0].len().div_ceil(8)];
        let to = &mut bytemuck::cast_slice_mut(&mut words)[..parts[0].len()];
        assert!(Fold::whole(dtype, op, world).run(to, parts));
        to.to_vec()
    }

    fn check<T: bytemuck::Pod + PartialEq + std::fmt::Debug>(
        dtype: DType,
        op: Op,
        parts: &[&[T]],
        expected: &[T],
    ) {
        let bytes: Vec<&[u8]> = parts
            .iter()
            .map(|part| bytemuck::cast_slice(part))
            .collect();
        let got = fold(dtype, op, parts.len() as u32, &bytes);
        assert_eq!(got, bytemuck::cast_slice::<T, u8>(expected), "{op:?}");
    }

    #[test]
    fn special_floats() {
        let odd = f32::from_bits(0xffc1_2345);
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        let a = [1.0, odd, -0.0, inf, inf, 3.0];
        let b = [2.0, 1.0, 0.0, -inf, 1.0, odd];
        check(
            DType::F32,
            Op::Sum,
            &[&a, &b],
            &[3.0, nan, 0.0, nan, inf, nan],
        );
        check(
            DType::F32,
            Op::Mean,
            &[&a, &b],
            &[1.5, nan, 0.0, nan, inf, nan],
        );
        check(
            DType::F32,
            Op::Min,
            &[&a, &b],
            &[1.0, nan, -0.0, -inf, 1.0, nan],
        );
        check(
            DType::F32,
            Op::Max,
            &[&a, &b],
            &[2.0, nan, -0.0, inf, inf, nan],
        );
        check(DType::F32, Op::Sum, &[&[odd, 1.0]], &[nan, 1.0]);
    }

    #[test]
    fn integers_wrap_and_divide_towards_zero() {
        check(DType::I8, Op::Sum, &[&[127i8, -7], &[1, 0]], &[-128, -7]);
        check(DType::I8, Op::Mean, &[&[3i8, -7], &[4, 0]], &[3, -3]);
        check(DType::U64, Op::Sum, &[&[u64::MAX], &[2]], &[1]);
        check(
            DType::U64,
            Op::Mean,
            &[&[u64::MAX - 1], &[0]],
            &[u64::MAX / 2],
        );
        check(
            DType::I64,
            Op::Min,
            &[&[i64::MIN, 5], &[0, 4], &[9, 9]],
            &[i64::MIN, 4],
        );
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let sum = Fold::whole(DType::F32, Op::Sum, 2);
        let words = [0u64; 2];
        let bytes: &[u8] = bytemuck::cast_slice(&words);
        let mut out = [0u64; 2];
        let out: &mut [u8] = bytemuck::cast_slice_mut(&mut out);
        assert!(sum.run(out, &[bytes, bytes]));
        assert!(!sum.run(out, &[]));
        assert!(!sum.run(out, &[bytes, &bytes[..8]]));
        assert!(!sum.run(&mut out[..4], &[&bytes[1..5]]));
        assert!(!sum.run(&mut out[..6], &[&bytes[..6]]));
    }

    proptest! {
        #[test]
        fn sixteen_bit_floats_are_added_in_f32_and_rounded_once(
            parts in prop::collection::vec(prop::collection::vec(any::<u16>(), 1500), 1..5)
        ) {
            let world = parts.len() as u32;
            let bytes: Vec<&[u8]> = parts.iter().map(|p| bytemuck::cast_slice(p)).collect();
            let half = fold(DType::F16, Op::Mean, world, &bytes);
            let brain = fold(DType::Bf16, Op::Sum, world, &bytes);
            for i in 0..1500 {
                let sum = |value: &dyn Fn(u16) -> f32| parts.iter().skip(1)
                    .fold(value(parts[0][i]), |sum, part| sum + value(part[i]));
                let mean = sum(&|bits| f16::from_bits(bits).to_f32()) / world as f32;
                let canonical = |x: f32| if x.is_nan() { f32::NAN } else { x };
                let expected = f16::from_f32(canonical(mean));
                prop_assert_eq!(&half[2 * i..2 * i + 2], &expected.to_le_bytes());
                let sum = sum(&|bits| bf16::from_bits(bits).to_f32());
                let expected = bf16::from_f32(canonical(sum));
                prop_assert_eq!(&brain[2 * i..2 * i + 2], &expected.to_le_bytes());
            }
        }

        #[test]
        fn floats_are_added_in_the_order_of_parts(
            parts in prop::collection::vec(prop::collection::vec(any::<f64>(), 1111), 1..6)
        ) {
            let bytes: Vec<&[u8]> = parts.iter().map(|p| bytemuck::cast_slice(p)).collect();
            let got = fold(DType::F64, Op::Sum, parts.len() as u32, &bytes);
            let expected: Vec<f64> = (0..1111).map(|i| {
                let sum = parts.iter().skip(1).fold(parts[0][i], |sum, part| sum + part[i]);
                if sum.is_nan() { f64::NAN } else { sum }
            }).collect();
            prop_assert_eq!(got, bytemuck::cast_slice::<f64, u8>(&expected));
        }
    }
}
