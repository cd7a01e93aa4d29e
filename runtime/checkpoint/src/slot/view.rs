//! A look at what is in a slot that holds nobody up: the slot may be freed and filled again meanwhile, and then the
//! view is of nothing any more.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::region::word;
use super::{Sealed, Slot, State, after};
use crate::PAGE;
use crate::hex::Id;

/// Where an image begins in its descriptor.
pub const IMAGE_AT: u64 = PAGE as u64;

/// An image that was sealed, for as long as it is in its slot: also when the slot is free, until it is filled anew.
#[derive(Clone, Debug)]
pub struct View {
    slot: Arc<Slot>,
    taken: u64,
    /// The step that the save is of.
    pub step: u64,
    /// The digest of the generation that saved.
    pub generation: Id,
    bytes: u64,
    /// CRC-64/NVME of each chunk, as its worker sealed it.
    pub sums: Arc<[u64]>,
}

impl Sealed {
    /// A look at it that does not hold it.
    pub fn view(&self) -> View {
        View {
            slot: Arc::clone(&self.slot),
            taken: self.taken,
            step: self.step,
            generation: self.generation,
            bytes: self.bytes,
            sums: self.sums.as_slice().into(),
        }
    }
}

impl View {
    /// Whether the image is still there. A read of it before this said so gave the bytes as they were sealed, if its
    /// worker keeps to the states; its sums tell.
    pub fn is_whole(&self) -> bool {
        let now = self.slot.region.load(word::STATE);
        now == self.taken || now == after(self.taken, State::Free)
    }

    /// Length of the image.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The image's bytes, which change when the slot is filled again.
    pub fn image(&self) -> &[u8] {
        self.slot.region.image(self.bytes)
    }

    /// The slot's descriptor; the image begins at [`IMAGE_AT`].
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.slot.fd()
    }

    /// Asks the worker to fill the other slot first, or not.
    pub fn keep(&self, keep: bool) {
        self.slot.keep(keep);
    }

    /// Bytes of memory that the slot takes.
    pub fn memory(&self) -> u64 {
        self.slot.region.shape().len() as u64
    }
}

impl Slot {
    /// The image that a free slot was sealed with last, if its head still says so, and the note: as after a commit. Of
    /// a copy that was begun since and given up, the sums tell.
    pub fn left(self: &Arc<Self>) -> Option<(View, Vec<u8>)> {
        let free = self.region.load(word::STATE);
        if State::of(free) != State::Free {
            return None;
        }
        let head = self.read().ok()?;
        let view = View {
            slot: Arc::clone(self),
            taken: free,
            step: head.step,
            generation: head.generation,
            bytes: head.bytes,
            sums: head.sums.into(),
        };
        Some((view, head.note))
    }

    /// Asks the worker to fill the other slot first, where both are free: what is in this one is of use.
    pub fn keep(&self, keep: bool) {
        self.region.store(word::KEPT, u64::from(keep));
    }

    /// Whether the other slot is to be filled first.
    pub fn is_kept(&self) -> bool {
        self.region.load(word::KEPT) != 0
    }
}
