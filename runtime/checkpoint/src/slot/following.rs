//! A slot is looked at while it is filled: which chunks are there already.
//!
//! The worker that fills a slot first clears the sums of all its chunks, and writes each one down when the chunk is
//! there. So whoever makes images durable may begin with a chunk before the last one is copied. The outcome of the fill
//! is known at the seal alone: until then nothing that was made of chunks counts.

use std::sync::Arc;

use super::region::word;
use super::{Sealed, Slot, State, after};
use crate::sum::{CHUNK, chunks_of};

/// A fill, seen by another process.
#[derive(Clone, Debug)]
pub struct Following {
    slot: Arc<Slot>,
    /// The state by which the slot is being filled.
    filling: u64,
    bytes: u64,
}

/// State of a fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// It goes on.
    Going,
    /// Every chunk is there.
    Sealed,
    /// It was given up, or what was sealed has been let go.
    Gone,
}

impl Slot {
    /// Clears the sums of the chunks that are to come.
    pub(super) fn begin_sums(&self, filling: u64, bytes: u64) {
        for chunk in 0..chunks_of(bytes) {
            self.region.put_sum(chunk, 0);
        }
        self.region.store(word::COMING, bytes);
        self.region.store(word::FOLLOWED, filling);
    }

    /// The fill that goes on; none if there is none, or one of an image that does not fit.
    pub fn follow(self: &Arc<Self>) -> Option<Following> {
        let filling = self.region.load(word::STATE);
        // In this order: what is written before it is of this fill, too.
        let clear = self.region.load(word::FOLLOWED) == filling;
        let bytes = self.region.load(word::COMING);
        let fits = bytes <= self.region.shape().image;
        (State::of(filling) == State::Filling && clear && fits).then(|| Following {
            slot: Arc::clone(self),
            filling,
            bytes,
        })
    }
}

#[cfg(test)]
impl Slot {
    /// As a worker does that keeps to nothing: other bytes in a chunk that was there, and their sum.
    pub(crate) fn fill_chunk_again(&self, chunk: u64, byte: u8) {
        let begin = chunk * CHUNK;
        let bytes = self.region.image_part(begin, begin + CHUNK);
        bytes.fill(byte);
        self.region.put_sum(chunk, crate::sum::crc(bytes));
    }
}

impl Following {
    /// Length of the image.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// State of the fill.
    pub fn state(&self) -> Fill {
        match self.slot.region.load(word::STATE) {
            now if now == self.filling => Fill::Going,
            now if now == self.sealed() || now == self.taken() => Fill::Sealed,
            _ => Fill::Gone,
        }
    }

    /// The CRC-64/NVME of a chunk that is there; none while it is not. A chunk whose sum is 0, which is one in 2^64,
    /// is there with the seal.
    pub fn chunk(&self, chunk: u64) -> Option<u64> {
        let sum = self.slot.region.sum(chunk);
        match self.state() {
            Fill::Going => Some(sum).filter(|sum| *sum != 0),
            // Read anew: it may have been written since the line above.
            Fill::Sealed => Some(self.slot.region.sum(chunk)),
            Fill::Gone => None,
        }
    }

    /// The bytes of a chunk that is [there](Self::chunk). A read of them counts only if the fill
    /// [became](Self::became) a seal, and they hash to what that says.
    pub fn chunk_bytes(&self, chunk: u64) -> &[u8] {
        let begin = self.bytes.min(chunk.saturating_mul(CHUNK));
        let end = self.bytes.min(begin.saturating_add(CHUNK));
        self.slot.region.image_range(begin, end)
    }

    /// Whether this fill ended with this seal.
    pub fn became(&self, sealed: &Sealed) -> bool {
        Arc::ptr_eq(&self.slot, &sealed.slot) && sealed.taken == self.taken()
    }

    fn sealed(&self) -> u64 {
        after(self.filling, State::Sealed)
    }

    fn taken(&self) -> u64 {
        after(self.sealed(), State::Taken)
    }
}
