//! Bytes of an image that this process cannot copy itself, for they are in a GPU's memory: somebody brings them.

use std::error::Error;

use super::Slot;

/// Why they were not brought.
pub type FarError = Box<dyn Error + Send + Sync>;

/// Where such bytes go in an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub at: u64,
    pub bytes: u64,
}

/// Brings the spans' bytes while a slot is filled ([`Slot::fill_with`](super::Slot::fill_with)).
///
/// The image's memory is given as a pointer, since a device may be writing to it: until [`bring`](Self::bring)
/// has returned for bytes, nobody else reads or writes those of them that are in a span, and nothing but spans is
/// written. The pointer is good until [`end`](Self::end) has returned, and after [`Ended::Unknown`] for the life of the
/// process.
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

    /// Returns when nothing writes to the image any more, whether it is whole or given up, or when that cannot be
    /// known.
    fn end(&self) -> Ended;
}

/// Outcome of copying the bytes that were brought.
#[derive(Debug)]
pub enum Ended {
    /// The answers of [`bring`](Far::bring) hold.
    Well,
    /// Nothing is on its way any more, and something has failed: the image is given up.
    Badly(FarError),
    /// Something may still be writing, and nobody will know when it has ended: the memory is kept from everybody for
    /// as long as this process lives.
    Unknown(FarError),
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

    fn end(&self) -> Ended {
        Ended::Well
    }
}

/// Ends it, whatever happens in between.
pub(super) struct Ending<'a, F: Far> {
    pub(super) far: &'a F,
    pub(super) slot: &'a Slot,
}

impl<F: Far> Ending<'_, F> {
    /// Nothing happened in between.
    pub(super) fn over(self) -> Result<(), FarError> {
        let this = std::mem::ManuallyDrop::new(self);
        this.end()
    }

    fn end(&self) -> Result<(), FarError> {
        match self.far.end() {
            Ended::Well => Ok(()),
            Ended::Badly(error) => Err(error),
            Ended::Unknown(error) => {
                self.slot.abandon();
                Err(error)
            }
        }
    }
}

impl<F: Far> Drop for Ending<'_, F> {
    fn drop(&mut self) {
        // The slot knows what it has to, and what went wrong before is the cause.
        let _ended = self.end();
    }
}
