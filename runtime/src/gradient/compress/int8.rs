//! 8 bits a value and a scale per block, in two stages: each rank adds up one part of the bucket, rounds the
//! sum again, and sends it to all. A rank sends 2 (w-1)/w bytes a value, whatever the world.

use std::ops::Range;

use super::{Step, compensate};
use crate::collective::{Group, GroupError};
use crate::wide::widest;

const SCALE: usize = size_of::<f32>();

#[derive(Debug)]
pub(super) struct Int8 {
    block: usize,
    send: Vec<u8>,
    receive: Vec<u8>,
    /// The sum of the part that is this rank's to add up.
    part: Vec<f32>,
}

/// How a bucket is cut: equal parts of whole blocks, the last ones filled up with zeros.
struct Cut {
    len: usize,
    block: usize,
    blocks: usize,
}

impl Cut {
    fn new(len: usize, world: usize, block: usize) -> Cut {
        Cut {
            len,
            block,
            blocks: len.div_ceil(world).div_ceil(block),
        }
    }

    /// Bytes of a part: for each block its scale, then its values.
    fn bytes(&self) -> usize {
        self.blocks * (SCALE + self.block)
    }

    /// The values of a part.
    fn part(&self, rank: usize) -> Range<usize> {
        let at = |rank: usize| self.len.min(rank * self.blocks * self.block);
        at(rank)..at(rank + 1)
    }
}

impl Int8 {
    pub(super) fn new(block: usize) -> Int8 {
        Int8 {
            block,
            send: Vec::new(),
            receive: Vec::new(),
            part: Vec::new(),
        }
    }

    pub(super) fn reduce(&mut self, group: &mut Group, step: Step<'_>) -> Result<(), GroupError> {
        let Step {
            input, next, sum, ..
        } = step;
        let world = group.world() as usize;
        let cut = Cut::new(input.len(), world, self.block);
        let feedback = !next.residual.is_empty();
        if feedback {
            compensate(&mut next.residual, input, &step.own.residual);
        }
        self.send.clear();
        self.send.resize(world * cut.bytes(), 0);
        self.receive.resize(world * cut.bytes(), 0);
        for (rank, to) in self.send.chunks_exact_mut(cut.bytes().max(1)).enumerate() {
            if feedback {
                encode_exact(&mut next.residual[cut.part(rank)], self.block, to);
            } else {
                encode(&input[cut.part(rank)], self.block, to);
            }
        }
        group.all_to_all(&self.send, &mut self.receive)?;

        let mine = cut.part(group.rank() as usize);
        self.part.clear();
        self.part.resize(mine.len(), 0.0);
        for from in self.receive.chunks_exact(cut.bytes().max(1)) {
            decode(from, self.block, &mut self.part, How::Add);
        }
        let own_bytes = &mut self.send[..cut.bytes()];
        own_bytes.fill(0);
        if feedback {
            encode_exact(&mut self.part, self.block, own_bytes);
            for (kept, rest) in next.residual[mine].iter_mut().zip(&self.part) {
                *kept += rest;
            }
        } else {
            encode(&self.part, self.block, own_bytes);
        }
        *step.prepared = true;
        group.all_gather(own_bytes, &mut self.receive)?;
        for (rank, from) in self.receive.chunks_exact(cut.bytes().max(1)).enumerate() {
            decode(from, self.block, &mut sum[cut.part(rank)], How::Put);
        }
        Ok(())
    }
}

/// Adding it rounds a value of less than 2^22 to a whole number, ties to even, and leaves that in the low bits.
const ROUND: f32 = 12_582_912.0;

/// The scale of a block: its largest absolute becomes 127. NaN, if a value is not finite, and so the whole
/// block is. 0, if all are too small for a normal scale.
#[inline(always)]
fn scale_of(values: &[f32]) -> f32 {
    // Without the sign, bits are of numbers that compare as the values do, infinity and NaN above all others.
    let largest = values
        .iter()
        .fold(0u32, |most, value| most.max(value.to_bits() & 0x7fff_ffff));
    let largest = f32::from_bits(largest);
    match largest / 127.0 {
        _ if !largest.is_finite() => f32::NAN,
        scale if scale < f32::MIN_POSITIVE => 0.0,
        scale => scale,
    }
}

widest! {
    fn encode(values: &[f32], block: usize, to: &mut [u8]) {
        for (values, to) in values.chunks(block).zip(to.chunks_exact_mut(SCALE + block)) {
            let scale = scale_of(values);
            let (head, to) = to.split_at_mut(SCALE);
            head.copy_from_slice(&scale.to_le_bytes());
            if scale > 0.0 {
                let inverse = 1.0 / scale;
                for (to, value) in to.iter_mut().zip(values) {
                    // Within -127..=127, but for the rounding of the inverse, which is rounded away here.
                    *to = (value * inverse + ROUND).to_bits() as u8;
                }
            } else {
                to[..values.len()].fill(0);
            }
        }
    }
}

/// The same; `values` become what was lost.
fn encode_exact(values: &mut [f32], block: usize, to: &mut [u8]) {
    encode(values, block, to);
    decode(to, block, values, How::Subtract);
}

/// Ways to apply a value to a place.
#[derive(Clone, Copy, Debug)]
enum How {
    Put,
    Add,
    Subtract,
}

widest! {
    fn decode(from: &[u8], block: usize, to: &mut [f32], how: How) {
        match how {
            How::Put => each(from, block, to, |to, value| *to = value),
            How::Add => each(from, block, to, |to, value| *to += value),
            How::Subtract => each(from, block, to, |to, value| *to -= value),
        }
    }
}

#[inline(always)]
fn each(from: &[u8], block: usize, to: &mut [f32], put: impl Fn(&mut f32, f32)) {
    for (to, from) in to.chunks_mut(block).zip(from.chunks_exact(SCALE + block)) {
        let Some((scale, from)) = from.split_first_chunk() else {
            continue;
        };
        let scale = f32::from_le_bytes(*scale);
        // The one NaN, whichever a peer sent.
        let scale = if scale.is_nan() { f32::NAN } else { scale };
        for (to, value) in to.iter_mut().zip(from) {
            put(to, f32::from(*value as i8) * scale);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_error_is_half_a_scale_at_most_and_is_what_is_left(
            values in prop::collection::vec(-1e6f32..1e6, 0..100), block in 1usize..20, small in 0i32..45,
        ) {
            let values: Vec<f32> = values.iter().map(|v| v * 10f32.powi(-small)).collect();
            let mut bytes = vec![0; values.len().div_ceil(block) * (SCALE + block)];
            let mut left = values.clone();
            encode_exact(&mut left, block, &mut bytes);
            let mut got = vec![0.0; values.len()];
            decode(&bytes, block, &mut got, How::Put);
            for (i, block) in values.chunks(block).enumerate().flat_map(|(b, c)| {
                (0..c.len()).map(move |i| (b * block + i, c))
            }) {
                let most = block.iter().fold(0f32, |m, v| m.max(v.abs()));
                let bound = (most / 127.0 * 0.50001).max(127.0 * f32::MIN_POSITIVE);
                prop_assert!((got[i] - values[i]).abs() <= bound);
                prop_assert_eq!(left[i], values[i] - got[i]);
            }
        }

        #[test]
        fn one_odd_value_spoils_its_block_and_no_other(
            at in 0usize..40, odd in prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY]),
        ) {
            let mut values = vec![1.0; 40];
            values[at] = odd;
            let mut bytes = vec![0; 4 * (SCALE + 10)];
            encode(&values, 10, &mut bytes);
            let mut got = vec![0.0; 40];
            decode(&bytes, 10, &mut got, How::Put);
            for (i, got) in got.iter().enumerate() {
                prop_assert_eq!(got.is_nan(), i / 10 == at / 10);
            }
        }

        #[test]
        fn parts_are_disjoint_and_whole(len in 0usize..2000, world in 1usize..10, block in 1usize..300) {
            let cut = Cut::new(len, world, block);
            let mut at = 0;
            for rank in 0..world {
                let part = cut.part(rank);
                prop_assert_eq!(part.start, at);
                prop_assert!(part.len() <= cut.blocks * block);
                at = part.end;
            }
            prop_assert_eq!(at, len);
        }
    }
}
