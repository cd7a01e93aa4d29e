//! Training of a live worker: the part that is the user's.

use std::any::Any;
use std::ops::Range;

use super::hand::{Frozen, Landing};
use crate::collective::{Group, GroupError};

/// Why a training could not do its part.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// A collective failed: an ordinary outcome, which the next generation mends.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// The training itself cannot go on.
    #[error(transparent)]
    Training(Box<dyn std::error::Error + Send + Sync>),
}

/// Training of a live worker. Inside a step nothing that [`encode_state`](Self::encode_state) shows
/// may change; [`commit`](Self::commit) changes it, by the results alone.
pub trait Training {
    /// Results of a step's collectives: all that its commit needs.
    type Results;

    /// Computes this rank's share of step `step` and does all its collectives. Every rank calls the
    /// same ones, those without samples too: they contribute nothing and keep the results.
    ///
    /// # Errors
    /// A collective failed, or the training cannot go on. The state is unchanged.
    fn results(
        &mut self,
        step: u64,
        share: &Share,
        group: &mut Group,
    ) -> Result<Self::Results, Fault>;

    /// Applies a step's results: the same bits on every rank, without any collective.
    fn commit(&mut self, step: u64, results: &Self::Results);

    /// Bytes of memory that a step's results take: the same on every rank, always, or `None`. Where they are few
    /// ([`LIGHT`](Self::LIGHT)) two steps' results are held for a while, and no rank waits for the others before a
    /// step.
    fn results_len(&self) -> Option<usize> {
        None
    }

    /// Results of no more bytes are few: beside larger ones the wait does not count, but the memory does.
    const LIGHT: usize = 16 << 20;

    fn encode_results(&self, results: &Self::Results) -> Vec<u8>;

    /// The inverse of [`encode_results`](Self::encode_results); `None` for anything else.
    fn decode_results(&self, bytes: &[u8]) -> Option<Self::Results>;

    /// The whole state, of which newcomers get a copy.
    fn encode_state(&self) -> Vec<u8>;

    /// Becomes that state; false, and nothing changed, if it is none.
    fn decode_state(&mut self, bytes: &[u8]) -> bool;

    /// The whole state as it is now, for newcomers to copy while the training goes on: what their
    /// [`adopt_state`](Self::adopt_state) takes; here the bytes of [`encode_state`](Self::encode_state). The others
    /// wait for it once. So a large state had better be shared piece by piece, and each piece copied when a commit
    /// changes it; or be copied into memory that is there already.
    fn freeze(&mut self) -> Box<dyn Frozen> {
        Box::new(self.encode_state())
    }

    /// Where the copy of the state is written as it comes. Best the model's own memory, which it gives away until
    /// [`adopt_state`](Self::adopt_state): to fill memory that was never touched takes far longer than to fill what
    /// the model's first values lie in. Here, for want of knowing better, new memory for
    /// [`decode_state`](Self::decode_state).
    ///
    /// This training holds no state from now on: if the copy does not get whole, the landing is dropped with what
    /// has come, and this is asked again, or [`restore`](Self::restore), which then makes a whole state of nothing.
    ///
    /// `None`: not yet (the model is just being made, on a thread of its own). It is asked again before each step,
    /// while this rank listens and the others go on.
    fn landing(&mut self) -> Option<Box<dyn Landing>> {
        Some(Box::new(Vec::new()))
    }

    /// Becomes the state that this landing now holds, all of it and checked; false, if it is none. The others wait
    /// for this.
    fn adopt_state(&mut self, landing: Box<dyn Landing>) -> bool {
        let landing: Box<dyn Any> = landing;
        let bytes = landing.downcast::<Vec<u8>>();
        bytes.is_ok_and(|bytes| self.decode_state(&bytes))
    }

    /// No rank holds a state: all load the same checkpoint, or begin anew. Returns the number of
    /// steps that are committed to it.
    ///
    /// # Errors
    /// A collective failed, or there is a checkpoint that cannot be used.
    fn restore(&mut self, group: &mut Group) -> Result<u64, Fault>;

    /// A name of the state by which ranks are compared ([`Worker::compare_every`](super::Worker::compare_every)).
    fn digest_state(&self) -> [u8; 32] {
        *blake3::hash(&self.encode_state()).as_bytes()
    }

    /// Whether some steps take far longer than most, on this rank or another (they evaluate, say). Then each
    /// operation is given [`Patience::operation`](super::Patience::operation), and not what the last steps took.
    fn has_long_steps(&self) -> bool {
        false
    }

    /// An error of a commit, of encoding or decoding the state, or of making a landing, none of which can fail: asked
    /// for after each. This process ends then, before anybody gets its state.
    fn fault(&mut self) -> Option<Box<dyn std::error::Error + Send + Sync>> {
        None
    }

    /// This rank's state deviates, and it becomes a newcomer: what is its own, and handed to nobody in a copy, is to
    /// be forgotten now.
    fn quarantined(&mut self) {}

    /// Results that are not needed any more: their memory may be used again.
    fn recycle(&mut self, results: Self::Results) {
        drop(results);
    }

    /// All ranks stop before a step, and some may leave for good: the last chance to talk with them. No more
    /// than a chance, for a rank may be lost meanwhile. Every rank calls it, those without a state too.
    ///
    /// # Errors
    /// A collective failed, which is taken for granted; or the training cannot go on.
    fn boundary(&mut self, _group: &mut Group) -> Result<(), Fault> {
        Ok(())
    }

    /// A generation begins, before its first step. Every rank calls it; `survived`: with a state. Registered state must
    /// not change.
    ///
    /// # Errors
    /// A collective failed, or the training cannot go on.
    fn regrouped(&mut self, _group: &mut Group, _survived: bool) -> Result<(), Fault> {
        Ok(())
    }
}

/// The ranks that work on a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// The ranks whose samples count, in order; the others listen.
    pub entered: Vec<u32>,
    pub rank: u32,
    pub world: u32,
}

impl Share {
    /// This rank's part of `count` things that are dealt to the ranks that count: contiguous, all in
    /// order of ranks, the parts as long as each other up to one.
    pub fn part(&self, count: usize) -> Range<usize> {
        self.part_of(self.rank, count)
    }

    /// Whether this rank's samples count: it holds the state.
    pub fn is_entered(&self) -> bool {
        self.entered.binary_search(&self.rank).is_ok()
    }

    /// The part of another rank; empty for one that listens.
    pub fn part_of(&self, rank: u32, count: usize) -> Range<usize> {
        let n = self.entered.len();
        match self.entered.binary_search(&rank) {
            Ok(i) => i * count / n..(i + 1) * count / n,
            Err(_) => 0..0,
        }
    }
}
