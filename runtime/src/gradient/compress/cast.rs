//! Gradients in 16 bits.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::streamed;
use crate::collective::{Element, Group, GroupError, Op};
use crate::wide::widest;

/// Values that are scaled before the cast at once: they stay in the first-level cache.
const BLOCK: usize = 1024;

/// A 16-bit float with its conversions, in vector instructions where the processor has them.
pub trait Half: Element {
    /// Sums of a world of this size are divided by so much on the way. A power of two.
    fn divisor(world: u32) -> f32;

    /// `to` becomes `from` times `factor`, to the nearest, ties to even; both are equally long.
    fn narrow_by(from: &[f32], factor: f32, to: &mut [Self]);

    /// `to` becomes `from` times `factor`; both are equally long.
    fn widen_by(from: &[Self], factor: f32, to: &mut [f32]);
}

/// Rounds to 16 bits, to the nearest, ties to even: as many values as both have.
pub fn narrow<T: Half>(from: &[f32], to: &mut [T]) {
    narrow_scaled(from, 1.0, to);
}

/// The inverse, which is exact: as many values as both have.
pub fn widen<T: Half>(from: &[T], to: &mut [f32]) {
    widen_scaled(from, 1.0, to);
}

fn narrow_scaled<T: Half>(from: &[f32], factor: f32, to: &mut [T]) {
    let len = from.len().min(to.len());
    let at = unaligned(&to[..len]);
    T::narrow_by(&from[..at], factor, &mut to[..at]);
    T::narrow_by(&from[at..len], factor, &mut to[at..len]);
}

fn widen_scaled<T: Half>(from: &[T], factor: f32, to: &mut [f32]) {
    let len = from.len().min(to.len());
    let at = unaligned(&to[..len]);
    T::widen_by(&from[..at], factor, &mut to[..at]);
    T::widen_by(&from[at..len], factor, &mut to[at..len]);
}

/// Elements before the first one that begins a line of the cache. From there on no vector is written across two
/// lines, which costs a fifth where the memory is the limit.
fn unaligned<T>(to: &[T]) -> usize {
    to.as_ptr().align_offset(64).min(to.len())
}

impl Half for f16 {
    /// So a sum overflows only if its mean does.
    fn divisor(world: u32) -> f32 {
        world.next_power_of_two() as f32
    }

    fn narrow_by(from: &[f32], factor: f32, to: &mut [f16]) {
        let done = streamed::narrow::<false>(from, factor, bytemuck::cast_slice_mut(to));
        let (from, to) = (&from[done..], &mut to[done..]);
        #[cfg(target_arch = "x86_64")]
        match f16c::there() {
            // SAFETY: the processor has what the function was compiled for.
            Some(f16c::Lanes::Sixteen) => return unsafe { f16c::narrow_16(from, factor, to) },
            // SAFETY: as above.
            Some(f16c::Lanes::Eight) => return unsafe { f16c::narrow_8(from, factor, to) },
            None => {}
        }
        let mut scaled = [0.0; BLOCK];
        for (from, to) in from.chunks(BLOCK).zip(to.chunks_mut(BLOCK)) {
            let scaled = &mut scaled[..from.len()];
            for (scaled, value) in scaled.iter_mut().zip(from) {
                *scaled = value * factor;
            }
            to.convert_from_f32_slice(scaled);
        }
    }

    fn widen_by(from: &[f16], factor: f32, to: &mut [f32]) {
        let done = streamed::widen::<false>(bytemuck::cast_slice(from), factor, to);
        let (from, to) = (&from[done..], &mut to[done..]);
        #[cfg(target_arch = "x86_64")]
        match f16c::there() {
            // SAFETY: the processor has what the function was compiled for.
            Some(f16c::Lanes::Sixteen) => return unsafe { f16c::widen_16(from, factor, to) },
            // SAFETY: as above.
            Some(f16c::Lanes::Eight) => return unsafe { f16c::widen_8(from, factor, to) },
            None => {}
        }
        from.convert_to_f32_slice(to);
        to.iter_mut().for_each(|value| *value *= factor);
    }
}

/// The processor's own conversion, eight or sixteen values at once. (The crate `half` has it too, but looks at
/// each call for eight whether it is there.)
#[cfg(target_arch = "x86_64")]
mod f16c {
    use std::arch::x86_64::{
        _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_cvtph_ps,
        _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_mul_ps, _mm256_set1_ps,
        _mm256_storeu_ps, _mm256_storeu_si256, _mm512_cvtph_ps, _mm512_cvtps_ph, _mm512_loadu_ps,
        _mm512_mul_ps, _mm512_set1_ps, _mm512_storeu_ps,
    };

    use half::f16;

    use crate::wide::{Width, widest_there};

    #[derive(Clone, Copy, Debug)]
    pub(super) enum Lanes {
        Eight,
        Sixteen,
    }

    pub(super) fn there() -> Option<Lanes> {
        if widest_there() == Width::Avx512 {
            return Some(Lanes::Sixteen);
        }
        (is_x86_feature_detected!("avx") && is_x86_feature_detected!("f16c"))
            .then_some(Lanes::Eight)
    }

    #[target_feature(enable = "avx,f16c")]
    pub(super) fn narrow_8(from: &[f32], factor: f32, to: &mut [f16]) {
        let by = _mm256_set1_ps(factor);
        let (whole, rest) = from.as_chunks::<8>();
        let (to_whole, to_rest) = to.as_chunks_mut::<8>();
        for (from, to) in whole.iter().zip(to_whole) {
            // SAFETY: both are eight values, of 32 and of 16 bits; no alignment is asked for.
            unsafe {
                let scaled = _mm256_mul_ps(_mm256_loadu_ps(from.as_ptr()), by);
                let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(scaled);
                _mm_storeu_si128(to.as_mut_ptr().cast(), halves);
            }
        }
        for (from, to) in rest.iter().zip(to_rest) {
            *to = f16::from_f32(from * factor);
        }
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn narrow_16(from: &[f32], factor: f32, to: &mut [f16]) {
        let by = _mm512_set1_ps(factor);
        let (whole, rest) = from.as_chunks::<16>();
        let (to_whole, to_rest) = to.as_chunks_mut::<16>();
        for (from, to) in whole.iter().zip(to_whole) {
            // SAFETY: both are sixteen values, of 32 and of 16 bits; no alignment is asked for.
            unsafe {
                let scaled = _mm512_mul_ps(_mm512_loadu_ps(from.as_ptr()), by);
                let halves = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(scaled);
                _mm256_storeu_si256(to.as_mut_ptr().cast(), halves);
            }
        }
        for (from, to) in rest.iter().zip(to_rest) {
            *to = f16::from_f32(from * factor);
        }
    }

    #[target_feature(enable = "avx,f16c")]
    pub(super) fn widen_8(from: &[f16], factor: f32, to: &mut [f32]) {
        let by = _mm256_set1_ps(factor);
        let (whole, rest) = from.as_chunks::<8>();
        let (to_whole, to_rest) = to.as_chunks_mut::<8>();
        for (from, to) in whole.iter().zip(to_whole) {
            // SAFETY: both are eight values, of 16 and of 32 bits; no alignment is asked for.
            unsafe {
                let wide = _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast()));
                _mm256_storeu_ps(to.as_mut_ptr(), _mm256_mul_ps(wide, by));
            }
        }
        for (from, to) in rest.iter().zip(to_rest) {
            *to = from.to_f32() * factor;
        }
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn widen_16(from: &[f16], factor: f32, to: &mut [f32]) {
        let by = _mm512_set1_ps(factor);
        let (whole, rest) = from.as_chunks::<16>();
        let (to_whole, to_rest) = to.as_chunks_mut::<16>();
        for (from, to) in whole.iter().zip(to_whole) {
            // SAFETY: both are sixteen values, of 16 and of 32 bits; no alignment is asked for.
            unsafe {
                let wide = _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast()));
                _mm512_storeu_ps(to.as_mut_ptr(), _mm512_mul_ps(wide, by));
            }
        }
        for (from, to) in rest.iter().zip(to_rest) {
            *to = from.to_f32() * factor;
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        /// A processor takes the widest only, so the others are compared with it here.
        #[test]
        fn both_widths_give_the_same_bits() {
            let values: Vec<f32> = (0..1003u32)
                .map(|i| f32::from_bits(i.wrapping_mul(0x9e37_79b9)))
                .collect();
            let mut narrow = [vec![f16::ZERO; 1003], vec![f16::ZERO; 1003]];
            let mut wide = [vec![0.0; 1003], vec![0.0; 1003]];
            if !matches!(there(), Some(Lanes::Sixteen)) || !is_x86_feature_detected!("f16c") {
                return;
            }
            // SAFETY: both were just looked for.
            unsafe {
                narrow_8(&values, 0.5, &mut narrow[0]);
                narrow_16(&values, 0.5, &mut narrow[1]);
                widen_8(&narrow[0], 2.0, &mut wide[0]);
                widen_16(&narrow[0], 2.0, &mut wide[1]);
            }
            let bits = |values: &[f16]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&narrow[0]), bits(&narrow[1]));
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&wide[0]), bits(&wide[1]));
        }
    }
}

impl Half for bf16 {
    /// It has the range of `f32`.
    fn divisor(_: u32) -> f32 {
        1.0
    }

    fn narrow_by(from: &[f32], factor: f32, to: &mut [bf16]) {
        let to = bytemuck::cast_slice_mut(to);
        let done = streamed::narrow::<true>(from, factor, to);
        narrow_brain(&from[done..], factor, &mut to[done..]);
    }

    fn widen_by(from: &[bf16], factor: f32, to: &mut [f32]) {
        let from = bytemuck::cast_slice(from);
        let done = streamed::widen::<true>(from, factor, to);
        widen_brain(&from[done..], factor, &mut to[done..]);
    }
}

/// So that a NaN whose payload is cut off stays one.
pub(super) const QUIET: u32 = 0x40;

widest! {
    fn narrow_brain(from: &[f32], factor: f32, to: &mut [u16]) {
        for (to, from) in to.iter_mut().zip(from) {
            let value = from * factor;
            let bits = value.to_bits();
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
            let kept = if value.is_nan() {
                bits >> 16 | QUIET
            } else {
                rounded
            };
            *to = kept as u16;
        }
    }
}

widest! {
    fn widen_brain(from: &[u16], factor: f32, to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = f32::from_bits(u32::from(*from) << 16) * factor;
        }
    }
}

/// Buffers of one bucket.
#[derive(Debug)]
pub(super) struct Cast<T> {
    own: Vec<T>,
    sum: Vec<T>,
}

impl<T> Default for Cast<T> {
    fn default() -> Cast<T> {
        Cast {
            own: Vec::new(),
            sum: Vec::new(),
        }
    }
}

impl<T: Half> Cast<T> {
    pub(super) fn reduce(
        &mut self,
        group: &mut Group,
        input: &[f32],
        sum: &mut [f32],
    ) -> Result<(), GroupError> {
        self.own.resize(input.len(), T::zeroed());
        self.sum.resize(input.len(), T::zeroed());
        let divisor = T::divisor(group.world());
        narrow_scaled(input, 1.0 / divisor, &mut self.own);
        group.all_reduce(Op::Sum, &self.own, &mut self.sum)?;
        widen_scaled(&self.sum, divisor, sum);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A NaN that went through arithmetic is a quiet one.
    fn quiet(value: f32) -> u32 {
        value.to_bits() | if value.is_nan() { 0x0040_0000 } else { 0 }
    }

    proptest! {
        #[test]
        fn casts_are_those_of_the_half_crate(bits in prop::collection::vec(any::<u32>(), 1..2000)) {
            let values: Vec<f32> = bits.iter().map(|bits| f32::from_bits(*bits)).collect();
            let mut brain = vec![bf16::ZERO; values.len()];
            let mut half = vec![f16::ZERO; values.len()];
            narrow(&values, &mut brain);
            f16::narrow_by(&values, 0.25, &mut half);
            let (mut back, mut half_back) = (vec![0.0; values.len()], vec![0.0; values.len()]);
            widen(&brain, &mut back);
            f16::widen_by(&half, 2.0, &mut half_back);
            for (i, value) in values.iter().enumerate() {
                prop_assert_eq!(brain[i].to_bits(), bf16::from_f32(*value).to_bits());
                prop_assert_eq!(half[i].to_bits(), f16::from_f32(*value * 0.25).to_bits());
                prop_assert_eq!(back[i].to_bits(), quiet(brain[i].to_f32()));
                prop_assert_eq!(half_back[i].to_bits(), quiet(half[i].to_f32() * 2.0));
            }
        }
    }
}
