//! Numbers that look random and are a pure function of a seed: the same on every rank, in every release.

/// SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
#[derive(Clone, Debug)]
pub(crate) struct SplitMix(u64);

impl SplitMix {
    pub(crate) fn new(seed: u64) -> SplitMix {
        SplitMix(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Uniform in 0..below, for `below` far below 2^32 (the bias is below 2^-32).
    pub(crate) fn below(&mut self, below: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(below)) >> 64) as u64
    }

    /// Uniform in -1..1, with the 24 bits that an `f32` holds.
    pub(crate) fn signed_unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// The finalizer of SplitMix64: a bijection in which each bit of the input changes half of the output's.
pub(crate) fn mix(value: u64) -> u64 {
    let mut z = value;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A seed that depends on all of `words` and on their order.
pub(crate) fn seed_of(words: &[u64]) -> u64 {
    words.iter().fold(0x6d75_7374_6572, |seed, word| {
        SplitMix::new(seed ^ mix(word.wrapping_add(1))).next()
    })
}
