//! Memory that begins at a page: what O_DIRECT reads into and writes from.

use std::io;
use std::ops::{Deref, DerefMut};

use memmap2::MmapMut;

use crate::PAGE;

/// Zeroed memory of whole pages, beginning at a page.
#[derive(Debug)]
pub struct Pages(MmapMut);

impl Pages {
    /// At least this many bytes, rounded up to whole pages.
    ///
    /// # Errors
    /// The kernel has no memory left.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let len = bytes
            .max(1)
            .checked_next_multiple_of(PAGE)
            .ok_or(io::ErrorKind::OutOfMemory)?;
        MmapMut::map_anon(len).map(Self)
    }
}

impl Deref for Pages {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}
