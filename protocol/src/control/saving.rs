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
//! | [`DAMAGE`](word::DAMAGE) | worker | bytes of TEXT, plus one, and [`HERE`] where it is only this node that cannot read it; 0: nothing is damaged |
//! | [`FAILED_STEP`](word::FAILED_STEP), [`WHY`](word::WHY) | worker | a step before which it was to save and did not ([`encode_step`](super::encode_step)), and why. Before FAILED, which is before SAVED |
//! | [`FAILED`](word::FAILED) | worker | bytes of WHY, plus one; 0: no save has failed |
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

    pub const FAILED: usize = 3328;
    pub const FAILED_STEP: usize = 3336;
    pub const WHY: usize = 3344;

    /// Every word of this module.
    pub fn all() -> impl Iterator<Item = usize> {
        let single = [
            SAVES, STEP, BYTES, COPIED, WAITED, WAITS, DAMAGE, HOLD, SKIP, FAILED,
        ];
        single.into_iter().chain(damage()).chain(failure())
    }

    /// The words of [`super::Failure`], in the order in which it is encoded.
    pub fn failure() -> impl Iterator<Item = usize> {
        std::iter::once(FAILED_STEP).chain((0..TEXT_WORDS).map(|i| WHY + 8 * i))
    }

    /// The words of [`super::Damage`], in the order in which it is encoded.
    pub fn damage() -> impl Iterator<Item = usize> {
        let manifest = (0..DIGEST_WORDS).map(|i| MANIFEST + 8 * i);
        manifest.chain((0..TEXT_WORDS).map(|i| TEXT + 8 * i))
    }
}

/// Words of [`Failure`].
pub const FAILURE_WORDS: usize = 1 + TEXT_WORDS;

/// The times for which one save held its rank up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Counts the saves of one worker.
    pub saves: u64,
    pub step: u64,
    pub bytes: u64,
    pub copied_us: u64,
    pub waited_us: u64,
}

/// In [`DAMAGE`](word::DAMAGE): the trouble is this node's.
pub const HERE: u64 = 1 << 32;

/// A checkpoint that was to be restored and cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    pub manifest: Digest,
    pub why: String,
    /// The worker does not doubt it: its node's disk fails, or it finds another store than the job's.
    pub here: bool,
}

/// A save that a rank was to make, and did not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub step: u64,
    pub why: String,
}

/// The head of a text, and the text, which is cut where it is too long; and its length, plus one.
fn encode<const N: usize>(head: &[u8], text: &str) -> ([u64; N], u64) {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let mut bytes = head.iter().chain(text.as_bytes().iter().take(end));
    let words = std::array::from_fn(|_| {
        let word: [u8; 8] = std::array::from_fn(|_| bytes.next().copied().unwrap_or(0));
        u64::from_le_bytes(word)
    });
    (words, end as u64 + 1)
}

/// The inverse, total; none where there is nothing.
fn decode<const HEAD: usize>(words: &[u64], length: u64) -> Option<([u8; HEAD], String)> {
    let len = usize::try_from(length.checked_sub(1)?).ok()?.min(MAX_TEXT);
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let (head, text) = bytes.split_first_chunk()?;
    let text = String::from_utf8_lossy(text.get(..len)?).into_owned();
    Some((*head, text))
}

impl Damage {
    /// Words for [`word::damage`], and that of [`word::DAMAGE`]; what is too long is cut.
    pub fn encode(&self) -> ([u64; DAMAGE_WORDS], u64) {
        let (words, length) = encode(&self.manifest.0, &self.why);
        let here = if self.here { HERE } else { 0 };
        (words, length | here)
    }

    /// The inverse, total; none while nothing is damaged.
    pub fn decode(words: &[u64; DAMAGE_WORDS], damage: u64) -> Option<Damage> {
        let (manifest, why) = decode(words, damage & !HERE)?;
        Some(Damage {
            manifest: Digest(manifest),
            why,
            here: damage & HERE != 0,
        })
    }
}

impl Failure {
    /// Words for [`word::failure`], and that of [`word::FAILED`]; what is too long is cut.
    pub fn encode(&self) -> ([u64; FAILURE_WORDS], u64) {
        let step = super::encode_step(Some(self.step)).to_le_bytes();
        encode(&step, &self.why)
    }

    /// The inverse, total; none while no save has failed.
    pub fn decode(words: &[u64; FAILURE_WORDS], failed: u64) -> Option<Failure> {
        let (step, why) = decode(words, failed)?;
        let step = super::decode_step(u64::from_le_bytes(step))?;
        Some(Failure { step, why })
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
            here: why.is_empty(),
        };
        for why in ["", "n0-0.safetensors is damaged in chunk 3", "ü"] {
            let (words, damage) = of(why).encode();
            assert_eq!(Damage::decode(&words, damage), Some(of(why)));
        }
        assert_eq!(Damage::decode(&[0; DAMAGE_WORDS], HERE), None);
        let (words, damage) = of(&"ü".repeat(MAX_TEXT)).encode();
        let cut = Damage::decode(&words, damage).map(|d| d.why);
        assert_eq!(cut, Some("ü".repeat(MAX_TEXT / 2)));
        assert_eq!(Damage::decode(&words, 0), None);
        // Whatever a worker writes there.
        let foreign =
            Damage::decode(&[u64::MAX; DAMAGE_WORDS], u64::MAX).map(|d| d.why.chars().count());
        assert_eq!(foreign, Some(MAX_TEXT));
    }

    #[test]
    fn what_failed_comes_back_as_it_was_told() {
        let of = |step, why: &str| Failure {
            step,
            why: why.to_owned(),
        };
        for (step, why) in [(0, ""), (7, "ü"), (crate::control::MAX_STEP, "no room")] {
            let (words, failed) = of(step, why).encode();
            assert_eq!(Failure::decode(&words, failed), Some(of(step, why)));
        }
        let (words, _) = of(7, "no room").encode();
        assert_eq!(Failure::decode(&words, 0), None);
        let _any = Failure::decode(&[u64::MAX; FAILURE_WORDS], u64::MAX);
    }
}
