//! Memory for the image of a rank of another node.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::SlotError;
use super::region::{Region, Shape};

/// Memory for one image, of which nothing is there yet. The kernel finds its pages when they are written.
#[derive(Debug)]
pub struct Room {
    fd: OwnedFd,
    region: Region,
}

impl Room {
    /// For images of up to so many bytes.
    ///
    /// # Errors
    /// No descriptor, or no address space, is left.
    pub fn create(bytes: u64) -> Result<Room, SlotError> {
        let (fd, region) = Region::create(Shape::new(bytes, 0)?)?;
        Ok(Room { fd, region })
    }

    /// Bytes of memory that a room for such an image takes; none for one that is longer than any may be.
    pub fn memory_for(bytes: u64) -> Option<u64> {
        let shape = Shape::new(bytes, 0).ok()?;
        Some(shape.len() as u64)
    }

    /// The longest image.
    pub fn capacity(&self) -> u64 {
        self.region.shape().image
    }

    /// Bytes of memory that it takes, once all is written.
    pub fn memory(&self) -> u64 {
        self.region.shape().len() as u64
    }

    /// The bytes `begin..end`; none if they are not inside.
    pub fn part(&mut self, begin: u64, end: u64) -> Option<&mut [u8]> {
        let inside = begin <= end && end <= self.capacity();
        inside.then(|| self.region.image_part(begin, end))
    }

    /// An image of this length is in it, whole. It is as long as there is room at most.
    pub fn seal(self, bytes: u64) -> Replica {
        let bytes = bytes.min(self.capacity());
        Replica { room: self, bytes }
    }
}

/// A whole image of a rank of another node.
#[derive(Debug)]
pub struct Replica {
    room: Room,
    bytes: u64,
}

impl Replica {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn image(&self) -> &[u8] {
        self.room.region.image(self.bytes)
    }

    /// Its descriptor; the image begins at [`IMAGE_AT`](super::IMAGE_AT).
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.room.fd.as_fd()
    }

    pub fn memory(&self) -> u64 {
        self.room.memory()
    }

    /// Its memory, for another image.
    pub fn into_room(self) -> Room {
        self.room
    }
}
