//! A keyed permutation of 0..n.
//!
//! Up to [`TABLE`] elements it is a table, shuffled after Fisher and Yates. Beyond, it needs no memory per
//! element: a Feistel network (Luby and Rackoff: How to Construct Pseudorandom Permutations from
//! Pseudorandom Functions, 1988) permutes the next power of two, and whatever falls outside of 0..n is
//! permuted again until it falls inside: cycle walking (Black and Rogaway: Ciphers with Arbitrary Finite
//! Domains, CT-RSA 2002, section 3), on average fewer than two times.

use std::sync::Arc;

use crate::random::{SplitMix, mix};

/// The most elements that are kept as a table, of 16 KiB.
const TABLE: u64 = 4096;

/// Rounds of the network. Four make a pseudorandom permutation of large halves; small ones need more
/// (Patarin: Security of Random Feistel Schemes with 5 or More Rounds, CRYPTO 2004).
const ROUNDS: usize = 8;

#[derive(Clone, Debug)]
pub(super) enum Permutation {
    Table(Arc<[u32]>),
    Feistel(Feistel),
}

impl Permutation {
    pub(super) fn new(n: u64, key: u64) -> Permutation {
        if n > TABLE {
            return Permutation::Feistel(Feistel::new(n, key));
        }
        let mut random = SplitMix::new(key);
        let mut order: Vec<u32> = (0..n as u32).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, random.below(i as u64 + 1) as usize);
        }
        Permutation::Table(order.into())
    }

    /// Where `place`, below n, goes.
    pub(super) fn at(&self, place: u64) -> u64 {
        match self {
            Permutation::Table(order) => {
                order.get(place as usize).copied().map_or(place, u64::from)
            }
            Permutation::Feistel(network) => network.at(place),
        }
    }
}

/// Of two halves whose widths differ by one bit at most.
#[derive(Clone, Debug)]
pub(super) struct Feistel {
    n: u64,
    low_bits: u32,
    low_mask: u64,
    high_mask: u64,
    keys: [u64; ROUNDS],
}

impl Feistel {
    fn new(n: u64, key: u64) -> Feistel {
        let bits = (u64::BITS - n.saturating_sub(1).leading_zeros()).max(2);
        let low_bits = bits / 2;
        let mut random = SplitMix::new(key);
        let mut keys = [0; ROUNDS];
        keys.fill_with(|| random.next());
        Feistel {
            n,
            low_bits,
            low_mask: (1 << low_bits) - 1,
            high_mask: (1 << (bits - low_bits)) - 1,
            keys,
        }
    }

    fn at(&self, place: u64) -> u64 {
        if place >= self.n {
            return place;
        }
        // Ends: the cycle that `place` lies on leads back to it, and it is inside.
        let mut value = self.once(place);
        while value >= self.n {
            value = self.once(value);
        }
        value
    }

    fn once(&self, value: u64) -> u64 {
        let (mut low, mut high) = (value & self.low_mask, value >> self.low_bits);
        for [a, b] in self.keys.as_chunks().0 {
            high ^= mix(low ^ a) & self.high_mask;
            low ^= mix(high ^ b) & self.low_mask;
        }
        high << self.low_bits | low
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn is_permutation(n: u64, at: impl Fn(u64) -> u64) -> bool {
        let mut seen = vec![false; n as usize];
        (0..n).all(|i| {
            let to = at(i);
            to < n && !std::mem::replace(&mut seen[to as usize], true)
        })
    }

    proptest! {
        #[test]
        fn each_element_comes_once(n in 1u64..20_000, key: u64) {
            let network = Feistel::new(n, key);
            prop_assert!(is_permutation(n, |i| network.at(i)));
            let permutation = Permutation::new(n, key);
            prop_assert!(is_permutation(n, |i| permutation.at(i)));
        }

        #[test]
        fn the_largest_sets_are_walked_in_bounds(n in 1u64 << 40..u64::MAX, key: u64, place: u64) {
            let network = Feistel::new(n, key);
            prop_assert!(network.at(place % n) < n);
        }
    }

    #[test]
    fn the_order_never_changes_between_releases() {
        // A checkpoint holds a position in an order that is not stored.
        let table = Permutation::new(10, 1);
        let got: Vec<u64> = (0..10).map(|i| table.at(i)).collect();
        assert_eq!(got, GOLDEN_TABLE);
        let network = Permutation::new(1_000_000, 1);
        let got: Vec<u64> = (0..6).map(|i| network.at(i)).collect();
        assert_eq!(got, GOLDEN_NETWORK);
    }

    // Computed by another program, from the description above.
    const GOLDEN_TABLE: [u64; 10] = [9, 0, 1, 4, 8, 2, 3, 7, 6, 5];
    const GOLDEN_NETWORK: [u64; 6] = [351241, 894522, 402852, 864592, 878703, 437315];

    /// Where one place goes over many keys is even, and so is the way from one place to the next.
    #[test]
    fn places_are_evenly_spread() {
        for n in [37u64, 5000] {
            let (cells, keys) = (37u64, 37_000u64);
            let mut places = vec![0u64; cells as usize];
            let mut gaps = vec![0u64; cells as usize];
            for key in 0..keys {
                let network = Feistel::new(n, crate::random::mix(key));
                let (a, b) = (network.at(5), network.at(6));
                places[(a * cells / n) as usize] += 1;
                gaps[((b + n - a) % n * cells / n) as usize] += 1;
            }
            let expected = keys as f64 / cells as f64;
            let chi = |counts: &[u64]| -> f64 {
                let square = |count: &u64| (*count as f64 - expected).powi(2) / expected;
                counts.iter().map(square).sum()
            };
            // 36 degrees of freedom: 5 sigma are 36 + 5 * sqrt(72). A gap of zero never comes, which
            // moves one cell of a small set.
            assert!(chi(&places) < 79.0, "{n}: {}", chi(&places));
            let gaps = if n == cells { &gaps[1..] } else { &gaps[..] };
            assert!(chi(gaps) < 79.0 + 28.0, "{n}: {}", chi(gaps));
        }
    }
}
