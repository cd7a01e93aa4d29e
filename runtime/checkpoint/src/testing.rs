//! Common parts of tests: tensors whose bytes say where they belong, and ways to cut them.

use crate::Dtype;
use crate::hex::Bytes;
use crate::manifest::{Origin, Placed, Tensor};
use crate::slice::Slice;

/// A sequence from a seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        // SplitMix64 (Steele, Lea, Flood 2014).
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

/// Of a save that nobody asks about.
pub(crate) fn origin() -> Origin {
    Origin {
        job: "job".into(),
        lineage: Bytes([1; 32]),
        generation: Bytes([2; 32]),
        number: 1,
        attempt: 1,
        step: 1,
        world: 1,
        saved_at: 1,
    }
}

/// A tensor's bytes, no two elements of a small one alike.
pub(crate) fn ramp(shape: &[u64], size: u64) -> Vec<u8> {
    let count = shape.iter().product::<u64>() * size;
    (0..count)
        .map(|at| ((at % 251) ^ (at / 251 % 256)) as u8)
        .collect()
}

/// Cuts a shape at random, not necessarily into a grid.
pub(crate) fn tiling(shape: &[u64], seed: u64) -> Vec<Slice> {
    fn cut(slice: Slice, depth: u64, random: &mut Random, into: &mut Vec<Slice>) {
        let dims: Vec<usize> = (0..slice.extent.len())
            .filter(|dim| slice.extent[*dim] > 1)
            .collect();
        // An empty tensor is one slice.
        if slice.extent.contains(&0) || dims.is_empty() || random.below(4) < depth {
            return into.push(slice);
        }
        let dim = dims[random.below(dims.len() as u64) as usize];
        let at = 1 + random.below(slice.extent[dim] - 1);
        let (mut low, mut high) = (slice.clone(), slice);
        low.extent[dim] = at;
        high.offset[dim] += at;
        high.extent[dim] -= at;
        cut(low, depth + 1, random, into);
        cut(high, depth + 1, random, into);
    }
    let mut slices = Vec::new();
    cut(Slice::whole(shape), 0, &mut Random(seed), &mut slices);
    slices
}

/// A slice of a tensor's bytes, element by element.
pub(crate) fn read_slice(whole: &[u8], shape: &[u64], slice: &Slice, size: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    for element in 0..slice.elements().unwrap() {
        let (mut rest, mut at, mut stride) = (element, 0, 1);
        for dim in (0..shape.len()).rev() {
            at += (slice.offset[dim] + rest % slice.extent[dim]) * stride;
            rest /= slice.extent[dim];
            stride *= shape[dim];
        }
        bytes.extend_from_slice(&whole[(at * size) as usize..][..size as usize]);
    }
    bytes
}

/// The tensor saved in these slices, in three files with gaps between them.
pub(crate) fn tensor_of(
    shape: &[u64],
    dtype: Dtype,
    slices: &[Slice],
    whole: &[u8],
) -> (Tensor, Vec<Vec<u8>>) {
    let mut files = vec![vec![0xee; 3], vec![0xee; 5], vec![]];
    let mut placed: Vec<Placed> = (slices.iter().enumerate())
        .map(|(number, slice)| {
            let file = number % files.len();
            let bytes = read_slice(whole, shape, slice, dtype.size());
            let at = files[file].len() as u64;
            files[file].extend_from_slice(&bytes);
            files[file].push(0xee);
            Placed {
                slice: slice.clone(),
                file: file as u32,
                at,
                bytes: bytes.len() as u64,
            }
        })
        .collect();
    placed.sort_by(|a, b| a.slice.cmp(&b.slice));
    let tensor = Tensor {
        name: "t".to_owned(),
        dtype,
        shape: shape.to_vec(),
        slices: placed,
    };
    (tensor, files)
}
