mod codecs;
mod convergence;
mod membership;

use super::compress::{Bucket, Codec, Reduced, Shape};
use crate::collective::{Group, Sharing};
use crate::random::SplitMix;
use crate::testing::on_ranks;

/// Shared memory, TCP, and both.
const HOSTS: [fn(u32) -> Sharing; 3] = [
    |_| Sharing::Auto,
    |_| Sharing::Off,
    |rank| Sharing::Among(u64::from(rank / 2)),
];

fn shape(rows: usize, columns: usize) -> Shape {
    Shape { rows, columns }
}

/// For a bucket of `len`, as a matrix as nearly square as can be, and a vector.
fn power(len: usize, rank: usize) -> Codec {
    let side = len.isqrt();
    let (rows, columns) = (side, side.max(1));
    let rest = len - rows * columns;
    let shapes = vec![shape(rows, columns), shape(rest, 1)];
    Codec::PowerSgd { rank, shapes }
}

fn all_codecs(len: usize) -> Vec<Codec> {
    vec![
        Codec::None,
        Codec::Fp16,
        Codec::Bf16,
        Codec::Int8 {
            block: 16,
            feedback: false,
        },
        Codec::Int8 {
            block: 16,
            feedback: true,
        },
        Codec::TopK {
            density: 0.1,
            momentum: None,
        },
        Codec::TopK {
            density: 0.1,
            momentum: Some(0.9),
        },
        power(len, 2),
    ]
}

fn has_feedback(codec: &Codec) -> bool {
    matches!(
        codec,
        Codec::Int8 { feedback: true, .. }
            | Codec::TopK { momentum: None, .. }
            | Codec::PowerSgd { .. }
    )
}

fn gradient(len: usize, rank: u32, step: u64) -> Vec<f32> {
    let mut random = SplitMix::new(u64::from(rank) << 32 | step);
    let mut values = vec![0.0; len];
    values.fill_with(|| random.signed_unit() * random.signed_unit());
    values
}

fn sum_of(parts: impl IntoIterator<Item = Vec<f32>>) -> Vec<f64> {
    let mut sum = Vec::new();
    for part in parts {
        sum.resize(part.len(), 0.0);
        for (sum, value) in sum.iter_mut().zip(&part) {
            *sum += f64::from(*value);
        }
    }
    sum
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn bucket(codec: &Codec, len: usize) -> Bucket {
    Bucket::new(codec.clone(), len, 5).unwrap()
}

fn reduce(bucket: &mut Bucket, group: &mut Group, input: &[f32]) -> Reduced {
    let mut reduced = Reduced::default();
    bucket.reduce(group, input, &mut reduced).unwrap();
    reduced
}
