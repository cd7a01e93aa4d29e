//! A slot's memory: where what is, and the only unsafe code that touches it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

use crate::hex::Id;
use crate::slot::{MAX_NOTE, SlotError};
use crate::sum::{chunks_of, crc};
use crate::{PAGE, pool};

/// Version of the layout.
pub(super) const LAYOUT: u64 = 1;

const MAGIC: u64 = u64::from_le_bytes(*b"MUSTERSL");

const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Offsets of the words, in bytes.
pub(super) mod word {
    pub(in crate::slot) const MAGIC: usize = 0;
    pub(in crate::slot) const LAYOUT: usize = 8;
    pub(in crate::slot) const CAPACITY: usize = 16;
    pub(in crate::slot) const NOTE_CAPACITY: usize = 24;
    /// A count of changes, and in the lowest two bits the state.
    pub(in crate::slot) const STATE: usize = 128;
    pub(in crate::slot) const STEP: usize = 192;
    pub(in crate::slot) const IMAGE: usize = 200;
    pub(in crate::slot) const NOTE: usize = 208;
    pub(in crate::slot) const HEAD_SUM: usize = 216;
    pub(in crate::slot) const GENERATION: [usize; 4] = [224, 232, 240, 248];
    /// Not 0: what is in it is of use, and the other slot is to be filled first.
    pub(in crate::slot) const KEPT: usize = 320;
    /// Length of the image that is being filled. Before FOLLOWED.
    pub(in crate::slot) const COMING: usize = 384;
    /// The STATE of a fill whose chunks' sums appear one by one: 0 is none yet.
    pub(in crate::slot) const FOLLOWED: usize = 392;
}

/// Room of a slot, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) image: u64,
    pub(super) note: u64,
}

impl Shape {
    /// Rounded up to whole pages.
    pub(super) fn new(image: u64, note: u64) -> Result<Shape, SlotError> {
        let page = PAGE as u64;
        // Far below 2^63 together with its sums, so no sum of offsets overflows.
        if image > 1 << 56 || note > MAX_NOTE {
            return Err(SlotError::TooSmall {
                what: if note > MAX_NOTE { "note" } else { "image" },
                need: image.max(note),
                have: if note > MAX_NOTE { MAX_NOTE } else { 1 << 56 },
            });
        }
        Ok(Shape {
            image: image.next_multiple_of(page),
            note: note.next_multiple_of(page),
        })
    }

    fn sums_at(self) -> usize {
        PAGE + self.image as usize
    }

    fn note_at(self) -> usize {
        let sums = chunks_of(self.image) as usize * 8;
        self.sums_at() + sums.next_multiple_of(PAGE)
    }

    pub(super) fn len(self) -> usize {
        self.note_at() + self.note as usize
    }
}

/// Advice for an error of the kernel, or nothing.
pub(super) fn help(error: &io::Error) -> &'static str {
    match Errno::from_io_error(error) {
        Some(Errno::NOMEM | Errno::NOSPC) => {
            "; there is not enough memory for it: lower the slots' size, or raise the limit of the cgroup"
        }
        Some(Errno::MFILE | Errno::NFILE) => "; raise the limit of open files (ulimit -n)",
        _ => "",
    }
}

/// The mapping of a slot.
#[derive(Debug)]
pub(super) struct Region {
    map: MmapRaw,
    shape: Shape,
}

impl Region {
    pub(super) fn create(shape: Shape) -> Result<(OwnedFd, Region), SlotError> {
        let error = |source| SlotError::Io {
            what: "cannot make",
            bytes: shape.len() as u64,
            source,
        };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("muster-slot", flags).map_err(|e| error(e.into()))?;
        let file = File::from(file);
        file.set_len(shape.len() as u64).map_err(error)?;
        fcntl_add_seals(&file, SEALS).map_err(|e| error(e.into()))?;
        let region = Self::map(file.as_fd(), shape)?;
        region.store(word::LAYOUT, LAYOUT);
        region.store(word::CAPACITY, shape.image);
        region.store(word::NOTE_CAPACITY, shape.note);
        region.store(word::MAGIC, MAGIC);
        Ok((file.into(), region))
    }

    pub(super) fn open(fd: BorrowedFd<'_>) -> Result<Region, SlotError> {
        let stat = fstat(fd).map_err(|_| SlotError::Foreign("it cannot be looked at"))?;
        let sealed = fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SEALS));
        if !sealed {
            return Err(SlotError::Foreign("its length is not sealed"));
        }
        let bytes = u64::try_from(stat.st_size).unwrap_or(0);
        if bytes < PAGE as u64 {
            return Err(SlotError::Foreign("it is too short"));
        }
        // The head alone at first: it says how long the whole is.
        let head = Self::map(fd, Shape { image: 0, note: 0 })?;
        if head.load(word::MAGIC) != MAGIC {
            return Err(SlotError::Foreign("it does not begin as one"));
        }
        match head.load(word::LAYOUT) {
            LAYOUT => {}
            found => {
                return Err(SlotError::Layout {
                    found,
                    known: LAYOUT,
                });
            }
        }
        let (image, note) = (head.load(word::CAPACITY), head.load(word::NOTE_CAPACITY));
        let shape = Shape::new(image, note)
            .ok()
            .filter(|shape| (shape.image, shape.note) == (image, note))
            .filter(|shape| shape.len() as u64 == bytes)
            .ok_or(SlotError::Foreign("its length is not what it says"))?;
        Self::map(fd, shape)
    }

    fn map(fd: BorrowedFd<'_>, shape: Shape) -> Result<Region, SlotError> {
        let map = MmapOptions::new().len(shape.len()).map_raw(&fd);
        let map = map.map_err(|source| SlotError::Io {
            what: "cannot map",
            bytes: shape.len() as u64,
            source,
        })?;
        Ok(Region { map, shape })
    }

    pub(super) fn shape(&self) -> Shape {
        self.shape
    }

    /// Has the kernel find every page now, and enter it into this process' table.
    pub(super) fn populate(&self, threads: usize) -> Result<(), SlotError> {
        const STRIDE: usize = 64 << 20;
        let len = self.shape.len();
        let populated = pool::each(
            threads,
            len.div_ceil(STRIDE),
            || Ok(()),
            |(), at| {
                let begin = at * STRIDE;
                let bytes = STRIDE.min(len - begin);
                // SAFETY: inside the mapping, by the line above.
                let start = unsafe { self.map.as_mut_ptr().add(begin) };
                // SAFETY: populating changes no byte.
                match unsafe { madvise(start.cast(), bytes, Advice::LinuxPopulateWrite) } {
                    // A kernel before 5.14: one write that changes nothing to each page.
                    Err(Errno::INVAL) => {
                        for page in (0..bytes).step_by(PAGE) {
                            // SAFETY: aligned, and inside the range above.
                            let word = unsafe { AtomicU64::from_ptr(start.add(page).cast()) };
                            word.fetch_or(0, Ordering::Relaxed);
                        }
                        Ok(())
                    }
                    other => other,
                }
            },
        );
        populated.map(drop).map_err(|errno| SlotError::Io {
            what: "cannot get the memory of",
            bytes: len as u64,
            source: errno.into(),
        })
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        debug_assert!(at.is_multiple_of(8) && at < PAGE);
        // SAFETY: aligned, and inside the first page of the mapping, which lives as long as `self`.
        // All processes use atomics on that page alone.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().add(at).cast()) }
    }

    pub(super) fn load(&self, at: usize) -> u64 {
        u64::from_le(self.word(at).load(Ordering::Acquire))
    }

    pub(super) fn store(&self, at: usize, value: u64) {
        self.word(at).store(value.to_le(), Ordering::Release);
    }

    /// Replaces the word if it is still `from`; else what it is.
    pub(super) fn exchange(&self, at: usize, from: u64, to: u64) -> Result<u64, u64> {
        (self.word(at))
            .compare_exchange(
                from.to_le(),
                to.to_le(),
                Ordering::AcqRel,
                Ordering::Acquire,
            )
            .map_err(u64::from_le)
    }

    /// The bytes `begin..end` of the image, to be written.
    #[expect(clippy::mut_from_ref, reason = "each chunk is written by one thread")]
    pub(super) fn image_part(&self, begin: u64, end: u64) -> &mut [u8] {
        assert!(begin <= end && end <= self.shape.image);
        // SAFETY: inside the mapping by the line above. Who fills has moved the state from free to
        // filling, and gives each chunk to one thread; a process that does not keep to that spoils the
        // bytes of its own save, which are compared with their sums before they count.
        unsafe {
            let start = self.map.as_mut_ptr().add(PAGE + begin as usize);
            slice::from_raw_parts_mut(start, (end - begin) as usize)
        }
    }

    /// All memory for an image. Its users keep to the states, as `image_part` says.
    pub(super) fn image_memory(&self) -> *mut [u8] {
        // SAFETY: inside the mapping, which is longer by its first page at least.
        let start = unsafe { self.map.as_mut_ptr().add(PAGE) };
        std::ptr::slice_from_raw_parts_mut(start, self.shape.image as usize)
    }

    /// The image's first bytes, to be read.
    pub(super) fn image(&self, bytes: u64) -> &[u8] {
        self.image_range(0, bytes)
    }

    /// The bytes `begin..end` of the image, to be read.
    pub(super) fn image_range(&self, begin: u64, end: u64) -> &[u8] {
        assert!(begin <= end && end <= self.shape.image);
        // SAFETY: inside the mapping by the line above. As for `image_part`: nobody who keeps to the states writes
        // to these bytes while what is read of them counts, and the value of no byte decides about memory.
        unsafe {
            let start = self.map.as_ptr().add(PAGE + begin as usize);
            slice::from_raw_parts(start, (end - begin) as usize)
        }
    }

    /// The sum of a chunk, which others may look at while it is written.
    fn sum_word(&self, chunk: u64) -> &AtomicU64 {
        assert!(chunk < chunks_of(self.shape.image));
        let at = self.shape.sums_at() + chunk as usize * 8;
        // SAFETY: aligned, for the sums begin at a page, and inside the mapping by the line above.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().add(at).cast()) }
    }

    /// After the chunk's bytes.
    pub(super) fn put_sum(&self, chunk: u64, crc: u64) {
        self.sum_word(chunk).store(crc.to_le(), Ordering::Release);
    }

    /// Before the chunk's bytes.
    pub(super) fn sum(&self, chunk: u64) -> u64 {
        u64::from_le(self.sum_word(chunk).load(Ordering::Acquire))
    }

    pub(super) fn put_note(&self, note: &[u8]) {
        self.put(self.shape.note_at(), note);
    }

    fn put(&self, at: usize, bytes: &[u8]) {
        assert!(at >= PAGE && at + bytes.len() <= self.shape.len());
        // SAFETY: inside the mapping by the line above; as for `image_part`.
        unsafe {
            let to = self.map.as_mut_ptr().add(at);
            to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
    }

    fn get(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at >= PAGE && at + len <= self.shape.len());
        let mut bytes = vec![0; len];
        // SAFETY: inside the mapping by the lines above; as for `image`.
        unsafe { (self.map.as_ptr().add(at)).copy_to_nonoverlapping(bytes.as_mut_ptr(), len) };
        bytes
    }

    /// The sums of an image of this length.
    pub(super) fn sums(&self, image: u64) -> Vec<u64> {
        let bytes = self.get(self.shape.sums_at(), chunks_of(image) as usize * 8);
        let words = bytes.as_chunks().0.iter();
        words.map(|word| u64::from_le_bytes(*word)).collect()
    }

    pub(super) fn note(&self, bytes: u64) -> Vec<u8> {
        self.get(self.shape.note_at(), bytes as usize)
    }

    /// The checksum of all that is in the slot besides the image, as it stands there.
    pub(super) fn head_sum(&self, image: u64, note: u64) -> u64 {
        let mut generation = [0; 32];
        for (to, at) in generation.chunks_exact_mut(8).zip(word::GENERATION) {
            to.copy_from_slice(&self.load(at).to_le_bytes());
        }
        head_sum(
            self.load(word::STEP),
            &crate::hex::Bytes(generation),
            image,
            &self.sums(image),
            &self.note(note),
        )
    }
}

/// CRC-64/NVME of all that is in a slot besides the image. The sums in it stand for that.
pub(super) fn head_sum(step: u64, generation: &Id, image: u64, sums: &[u64], note: &[u8]) -> u64 {
    let mut bytes = Vec::with_capacity(64 + sums.len() * 8 + note.len());
    bytes.extend_from_slice(&step.to_le_bytes());
    bytes.extend_from_slice(&generation.0);
    bytes.extend_from_slice(&image.to_le_bytes());
    bytes.extend_from_slice(&(note.len() as u64).to_le_bytes());
    for sum in sums {
        bytes.extend_from_slice(&sum.to_le_bytes());
    }
    bytes.extend_from_slice(note);
    crc(&bytes)
}
