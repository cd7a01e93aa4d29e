//! The exact set of the largest values by their absolute.
//!
//! The order is that of the bits without the sign: NaN is above infinity, and that above all numbers. Of
//! equal ones the first are chosen. So the set is one, however it is found.
//!
//! A sample tells a bound that somewhat more than the wanted number exceed; one pass over all values, whose
//! inner loop the compiler turns into vector instructions, collects those, and the choice is among them.
//! When the sample was wrong, or too many are equal, two histograms of 16 bits each give the bound exactly.

use crate::wide::widest;

/// Values that the sample has.
const SAMPLE: usize = 1 << 14;
/// Values that are compared with the bound at once.
const CHUNK: usize = 16;
/// Without the sign, bits are of numbers that compare as signed ones too.
const ABSOLUTE: u32 = 0x7fff_ffff;

fn absolute(value: f32) -> i32 {
    (value.to_bits() & ABSOLUTE) as i32
}

/// Chooses the largest values by their absolute, and keeps its buffers. NaN is larger than infinity, and that
/// than all numbers; of equal ones the first are chosen.
#[derive(Debug, Default)]
pub struct Largest {
    candidates: Vec<u32>,
    bits: Vec<i32>,
}

impl Largest {
    /// The indices of the `count` largest, ascending; of all, if there are not more. There are at most 2^32
    /// values.
    pub fn choose(&mut self, values: &[f32], count: usize) -> &[u32] {
        self.candidates.clear();
        if count >= values.len() {
            self.candidates.extend(0..values.len() as u32);
        } else if count > 0 && !self.by_sample(values, count) {
            self.by_histograms(values, count);
        }
        &self.candidates
    }

    /// False, if the sample's bound was none.
    fn by_sample(&mut self, values: &[f32], count: usize) -> bool {
        // So many of the sample are expected to be wanted; four standard deviations more are taken.
        let size = SAMPLE.min(values.len());
        let expected = size as f64 * count as f64 / values.len() as f64;
        let nth = (expected + 4.0 * expected.sqrt() + 8.0) as usize;
        if nth >= size {
            return false;
        }
        self.bits.clear();
        let places = (0..size as u64).map(|i| (i * values.len() as u64 / size as u64) as usize);
        self.bits
            .extend(places.map(|place| absolute(values[place])));
        let (_, bound, _) = self.bits.select_nth_unstable_by(nth, |a, b| b.cmp(a));
        let bound = *bound;
        if !self.collect(values, bound, 4 * count + SAMPLE) || self.candidates.len() < count {
            return false;
        }
        self.bits.clear();
        let among = self.candidates.iter();
        self.bits
            .extend(among.map(|i| absolute(values[*i as usize])));
        let (above, exact, _) = self.bits.select_nth_unstable_by(count - 1, |a, b| b.cmp(a));
        let exact = *exact;
        let equal = count - above.iter().filter(|bits| **bits > exact).count();
        self.keep(values, exact, equal);
        true
    }

    /// All that reach the bound; false, if there are more than `most`.
    fn collect(&mut self, values: &[f32], bound: i32, most: usize) -> bool {
        self.candidates.clear();
        reaching(values, bound, most, &mut self.candidates)
    }

    /// Of the candidates, those above `exact`, and the first `equal` ones that are the same.
    fn keep(&mut self, values: &[f32], exact: i32, mut equal: usize) {
        self.candidates.retain(|index| {
            let bits = absolute(values[*index as usize]);
            if bits == exact && equal > 0 {
                equal -= 1;
                return true;
            }
            bits > exact
        });
    }

    fn by_histograms(&mut self, values: &[f32], count: usize) {
        let upper = values.iter().map(|value| absolute(*value) >> 16);
        let (high, left) = nth_bucket(upper, count);
        let lower = values.iter().map(|value| absolute(*value));
        let lower = lower
            .filter(|bits| bits >> 16 == high)
            .map(|bits| bits & 0xffff);
        let (low, mut equal) = nth_bucket(lower, left);
        let exact = high << 16 | low;
        self.candidates.clear();
        for (index, value) in (0..).zip(values) {
            let bits = absolute(*value);
            if bits > exact || bits == exact && equal > 0 {
                equal -= usize::from(bits == exact);
                self.candidates.push(index);
            }
        }
    }
}

widest! {
    /// Adds the places of those that reach the bound; false, if there are more than `most`.
    fn reaching(values: &[f32], bound: i32, most: usize, places: &mut Vec<u32>) -> bool {
        for (i, chunk) in values.chunks(CHUNK).enumerate() {
            let any = chunk
                .iter()
                .fold(false, |any, value| any | (absolute(*value) >= bound));
            if !any {
                continue;
            }
            let first = (i * CHUNK) as u32;
            let reach = (first..)
                .zip(chunk)
                .filter(|(_, value)| absolute(**value) >= bound);
            places.extend(reach.map(|(index, _)| index));
            if places.len() > most {
                return false;
            }
        }
        true
    }
}

/// Counted from the top, in which bucket the `nth` is (from 1), and its number there.
fn nth_bucket(buckets: impl Iterator<Item = i32>, nth: usize) -> (i32, usize) {
    let mut counts = vec![0usize; 1 << 16];
    buckets.for_each(|bucket| counts[(bucket & 0xffff) as usize] += 1);
    let mut left = nth;
    for (bucket, count) in (0..1 << 16).zip(&counts).rev() {
        if left <= *count {
            return (bucket, left);
        }
        left -= count;
    }
    (0, left)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::random::SplitMix;

    /// By sorting everything.
    fn reference(values: &[f32], count: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..values.len() as u32).collect();
        order.sort_by_key(|i| (std::cmp::Reverse(absolute(values[*i as usize])), *i));
        order.truncate(count);
        order.sort_unstable();
        order
    }

    fn check(values: &[f32], count: usize) {
        let expected = reference(values, count);
        let mut largest = Largest::default();
        assert_eq!(largest.choose(values, count), expected);
        if (1..values.len()).contains(&count) {
            largest.by_histograms(values, count);
            assert_eq!(largest.candidates, expected);
        }
    }

    proptest! {
        #[test]
        fn few_values_of_any_kind(
            bits in prop::collection::vec(prop_oneof![
                any::<u32>(),
                prop::sample::select(vec![0, 0x8000_0000, 0x7f80_0000, 0xff80_0000, 0x7fc0_0000, 0xffc0_0001]),
                0x3f80_0000u32..0x3f80_0004,
            ], 0..200),
            count in 0usize..220,
        ) {
            let values: Vec<f32> = bits.iter().map(|bits| f32::from_bits(*bits)).collect();
            check(&values, count);
        }
    }

    #[test]
    fn many_values() {
        let mut random = SplitMix::new(4);
        for len in [40_000, 300_001] {
            // Bell-shaped, in steps (many ties), all equal, and sorted both ways.
            let bell: Vec<f32> = (0..len)
                .map(|_| (0..4).map(|_| random.signed_unit()).sum())
                .collect();
            let steps = bell.iter().map(|v| (v * 4.0).round()).collect();
            let mut sorted = bell.clone();
            sorted.sort_unstable_by(f32::total_cmp);
            let reversed = sorted.iter().rev().copied().collect();
            let mut sparse = vec![0.0; len];
            sparse[17] = f32::NAN;
            sparse[len - 1] = f32::NEG_INFINITY;
            for values in [bell, steps, sorted, reversed, vec![-1.0; len], sparse] {
                for count in [1, len / 1000, len / 100, len / 3, len - 1] {
                    check(&values, count);
                }
            }
        }
    }

    #[test]
    fn the_sample_is_enough_for_usual_gradients() {
        let mut random = SplitMix::new(9);
        let values: Vec<f32> = (0..1_000_000)
            .map(|_| random.signed_unit() * random.signed_unit())
            .collect();
        for count in [1000, 10_000, 100_000] {
            let mut largest = Largest::default();
            assert!(largest.by_sample(&values, count));
            assert_eq!(largest.candidates.len(), count);
        }
    }
}
