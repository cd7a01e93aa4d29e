//! Several threads fill the same buffers, each other bytes of them.

use std::marker::PhantomData;
use std::ptr;

/// Buffers that threads write to at once.
pub(super) struct Targets<'a> {
    buffers: Vec<(*mut u8, usize)>,
    _borrowed: PhantomData<&'a mut [u8]>,
}

// SAFETY: a shared `Targets` only allows `copy`, whose callers write to disjoint bytes; nothing
// reads the buffers while it exists.
unsafe impl Sync for Targets<'_> {}

impl<'a> Targets<'a> {
    pub(super) fn new(buffers: impl Iterator<Item = &'a mut [u8]>) -> Self {
        Self {
            buffers: buffers
                .map(|buffer| (buffer.as_mut_ptr(), buffer.len()))
                .collect(),
            _borrowed: PhantomData,
        }
    }

    /// Copies into buffer `index` from byte `at` on; what would go beyond its end is left out.
    ///
    /// For [`super::load`] alone, which never has two threads copy to the same byte: a byte of a
    /// want comes from one byte of one file, as slices in a checked manifest do not overlap, and
    /// each chunk of a file is one thread's.
    pub(super) fn copy(&self, index: usize, at: usize, from: &[u8]) {
        let Some((buffer, len)) = self.buffers.get(index) else {
            return;
        };
        let count = from.len().min(len.saturating_sub(at));
        if count == 0 {
            return;
        }
        // SAFETY: `at + count` is at most the buffer's length, and `self` borrows the buffer
        // exclusively, so `from` is not in it; see above for other threads.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), buffer.add(at), count) };
    }
}
