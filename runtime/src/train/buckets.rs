//! Cutting the arena of parameters into buckets.

use std::ops::Range;

/// Parameters of the first bucket, and of the later ones: 1 MiB, so that communication begins early, then
/// 25 MiB, as PyTorch's `DistributedDataParallel` has it (Li et al.: PyTorch Distributed, VLDB 2020,
/// section 3.2.3).
pub const BUCKET_SIZES: [usize; 2] = [(1 << 20) / 4, (25 << 20) / 4];

/// Buckets of whole tensors, from the last tensor to the first, as backward completes their gradients.
///
/// `tensors` are the lengths of the tensors in the order of the arena; `sizes` the parameters of the first
/// bucket and of the later ones. A bucket is closed when it has as many or more; a tensor is never cut.
///
/// ```
/// use muster_runtime::train::buckets_of;
///
/// // Three layers of a weight and a bias each.
/// let tensors = [40, 4, 400, 4, 4000, 10];
/// assert_eq!(buckets_of(&tensors, [1000, 300]), [448..4458, 44..448, 0..44]);
/// ```
pub fn buckets_of(tensors: &[usize], sizes: [usize; 2]) -> Vec<Range<usize>> {
    let mut end = tensors.iter().sum::<usize>();
    let mut start = end;
    let mut buckets = Vec::new();
    for len in tensors.iter().rev() {
        start -= len;
        let size = if buckets.is_empty() {
            sizes[0]
        } else {
            sizes[1]
        };
        if end - start >= size.max(1) {
            buckets.push(start..end);
            end = start;
        }
    }
    if start < end {
        buckets.push(start..end);
    }
    buckets
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn buckets_cover_the_arena_backwards(
            tensors in prop::collection::vec(0usize..50, 0..20), first in 0usize..60, later in 0usize..200,
        ) {
            let buckets = buckets_of(&tensors, [first, later]);
            let mut end = tensors.iter().sum::<usize>();
            let starts: Vec<usize> = (0..=tensors.len()).map(|i| tensors[..i].iter().sum()).collect();
            for (i, bucket) in buckets.iter().enumerate() {
                prop_assert!(bucket.end == end && !bucket.is_empty());
                prop_assert!(starts.contains(&bucket.start), "a tensor is cut");
                let size = if i == 0 { first } else { later };
                prop_assert!(bucket.len() >= size || i + 1 == buckets.len());
                end = bucket.start;
            }
            prop_assert_eq!(end, 0);
        }
    }
}
