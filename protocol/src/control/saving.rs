//! The part of the control page by which a worker tells how its saves and its restore went, and the
//! launcher when the first step may begin.
//!
//! | word | writer | meaning |
//! |---|---|---|
//! | [`STEP`](word::STEP), [`BYTES`](word::BYTES) | worker | the newest save, and what the rank copied for it. Before SAVES |
//! | [`COPIED`](word::COPIED), [`WAITED`](word::WAITED) | worker | microseconds of the copy, and of the wait for a slot before it. Before SAVES |
//! | [`SAVES`](word::SAVES) | worker | counts its saves |
//! | [`WAITS`](word::WAITS) | worker | the step of a save for which both slots are occupied, while it waits for one ([`encode_step`](super::encode_step)) |
//! | [`SKIP`](word::SKIP) | launcher | the newest step whose save is to be left out instead ([`encode_step`](super::encode_step)) |
//! | [`MANIFEST`](word::MANIFEST), [`TEXT`](word::TEXT) | worker | the checkpoint that it found damaged, and what is wrong. Before DAMAGE |
//! | [`DAMAGE`](word::DAMAGE) | worker | bytes of TEXT, plus one; 0: nothing is damaged |
//! | [`HOLD`](word::HOLD) | launcher | 1 while the first step has to wait until all ranks have loaded what they begin with (R15) |

use crate::ids::Digest;

/// Words of the digest of a manifest.
const DIGEST_WORDS: usize = 4;

/// Words of the reason.
const TEXT_WORDS: usize = 64;

/// Words of [`Damage`].
pub const DAMAGE_WORDS: usize = DIGEST_WORDS + TEXT_WORDS;

/// Bytes of a reason that fit.
pub const MAX_TEXT: usize = 8 * TEXT_WORDS;

/// Words of the page, in bytes.
pub mod word {
    use super::{DIGEST_WORDS, TEXT_WORDS};

    pub const SAVES: usize = 2560;
    pub const STEP: usize = 2568;
    pub const BYTES: usize = 2576;
    pub const COPIED: usize = 2584;
    pub const WAITED: usize = 2592;
    pub const WAITS: usize = 2600;
    pub const DAMAGE: usize = 2608;

    pub const HOLD: usize = 2688;
    pub const SKIP: usize = 2696;

    pub const MANIFEST: usize = 2752;
    pub const TEXT: usize = 2784;

    /// Every word of this module.
    pub fn all() -> impl Iterator<Item = usize> {
        let single = [
            SAVES, STEP, BYTES, COPIED, WAITED, WAITS, DAMAGE, HOLD, SKIP,
        ];
        single.into_iter().chain(damage())
    }

    /// The words of [`super::Damage`], in the order in which it is encoded.
    pub fn damage() -> impl Iterator<Item = usize> {
        let manifest = (0..DIGEST_WORDS).map(|i| MANIFEST + 8 * i);
        manifest.chain((0..TEXT_WORDS).map(|i| TEXT + 8 * i))
    }
}

/// What one save held its rank up for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Counts the saves of one worker.
    pub saves: u64,
    pub step: u64,
    pub bytes: u64,
    pub copied_us: u64,
    pub waited_us: u64,
}

/// A checkpoint that was to be restored and cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    pub manifest: Digest,
    pub why: String,
}

impl Damage {
    /// Words for [`word::damage`], and that of [`word::DAMAGE`]; what is too long is cut.
    pub fn encode(&self) -> ([u64; DAMAGE_WORDS], u64) {
        let mut end = self.why.len().min(MAX_TEXT);
        while !self.why.is_char_boundary(end) {
            end -= 1;
        }
        let text = self.why.as_bytes().iter().take(end);
        let mut bytes = self.manifest.0.iter().chain(text);
        let words = std::array::from_fn(|_| {
            let word: [u8; 8] = std::array::from_fn(|_| bytes.next().copied().unwrap_or(0));
            u64::from_le_bytes(word)
        });
        (words, end as u64 + 1)
    }

    /// The inverse, total; none while nothing is damaged.
    pub fn decode(words: &[u64; DAMAGE_WORDS], damage: u64) -> Option<Damage> {
        let len = usize::try_from(damage.checked_sub(1)?).ok()?.min(MAX_TEXT);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let (manifest, text) = bytes.split_first_chunk::<32>()?;
        Some(Damage {
            manifest: Digest(*manifest),
            why: String::from_utf8_lossy(text.get(..len)?).into_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_damaged_comes_back_as_it_was_told() {
        let of = |why: &str| Damage {
            manifest: Digest([0xa7; 32]),
            why: why.to_owned(),
        };
        for why in ["", "n0-0.safetensors is damaged in chunk 3", "ü"] {
            let (words, damage) = of(why).encode();
            assert_eq!(Damage::decode(&words, damage), Some(of(why)));
        }
        let (words, damage) = of(&"ü".repeat(MAX_TEXT)).encode();
        let cut = Damage::decode(&words, damage).map(|d| d.why);
        assert_eq!(cut, Some("ü".repeat(MAX_TEXT / 2)));
        assert_eq!(Damage::decode(&words, 0), None);
        // Whatever a worker writes there.
        let foreign =
            Damage::decode(&[u64::MAX; DAMAGE_WORDS], u64::MAX).map(|d| d.why.chars().count());
        assert_eq!(foreign, Some(MAX_TEXT));
    }
}
