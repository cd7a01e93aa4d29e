//! Gradients in 16 bits.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::collective::{Element, Group, GroupError, Op};

/// Values that are scaled before the cast at once: they stay in the first-level cache.
const BLOCK: usize = 1024;

/// A 16-bit float with its conversions, in loops that the compiler turns into vector instructions.
pub(super) trait Half: Element {
    /// Sums of a world of this size are divided by so much on the way. A power of two.
    fn divisor(world: u32) -> f32;
    fn narrow(from: &[f32], to: &mut [Self]);
    fn widen(from: &[Self], to: &mut [f32]);
}

impl Half for f16 {
    /// So a sum overflows only if its mean does.
    fn divisor(world: u32) -> f32 {
        world.next_power_of_two() as f32
    }

    fn narrow(from: &[f32], to: &mut [f16]) {
        to.convert_from_f32_slice(from);
    }

    fn widen(from: &[f16], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }
}

impl Half for bf16 {
    /// It has the range of `f32`.
    fn divisor(_: u32) -> f32 {
        1.0
    }

    /// To the nearest, ties to even.
    fn narrow(from: &[f32], to: &mut [bf16]) {
        for (to, from) in to.iter_mut().zip(from) {
            let bits = from.to_bits();
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
            // The quiet bit, so that a NaN whose payload is cut off stays one.
            let kept = if from.is_nan() {
                bits >> 16 | 0x40
            } else {
                rounded
            };
            *to = bf16::from_bits(kept as u16);
        }
    }

    fn widen(from: &[bf16], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = f32::from_bits(u32::from(from.to_bits()) << 16);
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
        T::widen(&self.sum, sum);
        if divisor != 1.0 {
            sum.iter_mut().for_each(|value| *value *= divisor);
        }
        Ok(())
    }
}

fn narrow_scaled<T: Half>(from: &[f32], factor: f32, to: &mut [T]) {
    if factor == 1.0 {
        return T::narrow(from, to);
    }
    let mut scaled = [0.0; BLOCK];
    for (from, to) in from.chunks(BLOCK).zip(to.chunks_mut(BLOCK)) {
        let scaled = &mut scaled[..from.len()];
        for (scaled, value) in scaled.iter_mut().zip(from) {
            *scaled = value * factor;
        }
        T::narrow(scaled, to);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn casts_are_those_of_the_half_crate(bits in prop::collection::vec(any::<u32>(), 1..2000)) {
            let values: Vec<f32> = bits.iter().map(|bits| f32::from_bits(*bits)).collect();
            let mut brain = vec![bf16::ZERO; values.len()];
            let mut half = vec![f16::ZERO; values.len()];
            bf16::narrow(&values, &mut brain);
            narrow_scaled(&values, 0.25, &mut half);
            let mut back = vec![0.0; values.len()];
            bf16::widen(&brain, &mut back);
            for (i, value) in values.iter().enumerate() {
                prop_assert_eq!(brain[i].to_bits(), bf16::from_f32(*value).to_bits());
                prop_assert_eq!(half[i].to_bits(), f16::from_f32(*value * 0.25).to_bits());
                prop_assert_eq!(back[i].to_bits(), brain[i].to_f32().to_bits());
            }
        }
    }
}
