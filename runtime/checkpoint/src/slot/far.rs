//! Bytes of an image that this process cannot copy itself, for they are in a GPU's memory: somebody brings them.

use std::error::Error;

/// Why they were not brought.
pub type FarError = Box<dyn Error + Send + Sync>;

/// Where such bytes go in an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub at: u64,
    pub bytes: u64,
}

/// Who brings them, while a slot is filled ([`Slot::fill_with`](super::Slot::fill_with)).
///
/// The image's memory is given as a pointer, since a device may be writing to it: until [`bring`](Self::bring)
/// has returned for bytes, nobody else reads or writes those of them that are in a span, and nothing but spans is
/// written. The pointer is good until [`end`](Self::end) has returned.
pub trait Far: Sync {
    /// Ascending, apart from each other and from the image's other sources.
    fn spans(&self) -> &[Span];

    /// The slot is this image's from now on.
    ///
    /// # Errors
    /// The image is given up.
    fn begin(&self) -> Result<(), FarError>;

    /// Returns when what belongs between `begin` and `end` is there. Called once for each chunk, by several
    /// threads, in about ascending order.
    ///
    /// # Errors
    /// The image is given up.
    fn bring(&self, image: *mut [u8], begin: u64, end: u64) -> Result<(), FarError>;

    /// Returns when nothing writes to the image any more, whether it is whole or given up.
    fn end(&self);
}

/// Nothing is far.
impl Far for () {
    fn spans(&self) -> &[Span] {
        &[]
    }

    fn begin(&self) -> Result<(), FarError> {
        Ok(())
    }

    fn bring(&self, _image: *mut [u8], _begin: u64, _end: u64) -> Result<(), FarError> {
        Ok(())
    }

    fn end(&self) {}
}

/// Ends it, whatever happens in between.
pub(super) struct Ending<'a, F: Far>(pub(super) &'a F);

impl<F: Far> Drop for Ending<'_, F> {
    fn drop(&mut self) {
        self.0.end();
    }
}
