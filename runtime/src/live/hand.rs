//! Bytes that one rank hands to others of its generation while the training goes on: a frozen state
//! for newcomers, and results for survivors that lack them. Plain TCP on threads of its own, so
//! that a copy disturbs no collective. Every request proves the generation's token first.
//!
//! Nothing is hashed before it is asked for: what is offered is there at once. A part's bytes are sent as they lie
//! and hashed as they come, where they are to stay ([`Landing`]). Then another source is asked for the digest of its
//! own part: so each byte is hashed twice in all, damage on the way is found, and no copy is made of two states that
//! differ. The hash finds damage, not forgery: whoever may send at all has proven the token, and could send any state.

mod fetch;
mod gather;
mod landing;
mod serve;
mod source;
mod todo;

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use twox_hash::XxHash3_128;

pub use fetch::FetchError;
pub(super) use fetch::fetch;
pub use landing::Landing;
pub(super) use serve::Hand;

/// Bytes that are received, and then hashed, at once: they stay in the second-level cache.
const CHUNK: usize = 256 << 10;
/// The longest silence on a connection.
const SILENCE: Duration = Duration::from_secs(10);

const MAGIC: [u8; 8] = *b"MUSTERH3";
const TOKEN_LEN: usize = 32;
const REQUEST_LEN: usize = 8 + TOKEN_LEN + 5 * 8;

/// XXH3-128.
type Digest = [u8; 16];

fn digest_of(hashed: &XxHash3_128) -> Digest {
    hashed.finish_128().to_be_bytes()
}

/// Things that are handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Thing {
    /// The state at a boundary: so many steps are committed.
    State(u64),
    /// All results of a step.
    Results(u64),
}

impl Thing {
    fn words(self) -> (u64, u64) {
        match self {
            Thing::State(boundary) => (1, boundary),
            Thing::Results(step) => (2, step),
        }
    }

    fn from_words(kind: u64, number: u64) -> Option<Thing> {
        match kind {
            1 => Some(Thing::State(number)),
            2 => Some(Thing::Results(number)),
            _ => None,
        }
    }
}

/// Content of a request for a part. The answer begins with the length of the whole, plus one; 0, if it is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Want {
    /// No more than that.
    Length = 0,
    /// The part's bytes.
    Bytes = 1,
    /// Their digest.
    Digest = 2,
}

impl Want {
    fn from_word(word: u64) -> Option<Want> {
        [Want::Length, Want::Bytes, Want::Digest]
            .into_iter()
            .find(|want| *want as u64 == word)
    }
}

/// Bytes that do not change while they are offered; they need not lie in one piece.
pub trait Frozen: Send + Sync {
    /// Bytes of all pieces.
    fn total(&self) -> usize;

    /// The bytes that lie in one piece from this byte on: not empty, if there are any more.
    fn piece(&self, byte: usize) -> &[u8];
}

impl Frozen for Vec<u8> {
    fn total(&self) -> usize {
        self.len()
    }

    fn piece(&self, byte: usize) -> &[u8] {
        self.get(byte..).unwrap_or_default()
    }
}

impl Frozen for Box<dyn Frozen> {
    fn total(&self) -> usize {
        (**self).total()
    }

    fn piece(&self, byte: usize) -> &[u8] {
        (**self).piece(byte)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
