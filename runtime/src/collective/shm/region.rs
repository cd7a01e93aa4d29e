//! The memory that the ranks of a host share, and the discipline that makes its use sound.
//!
//! Time goes in rounds. In each, every rank fills its own slot and posts it, waits until all have posted,
//! and reads the others' slots. A rank has two slots, used in turn: when all have posted round r, all
//! have read round r - 1, so the slots of r - 1 are free for r + 1. [`Port`] allows nothing else.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};
use rustix::io::Errno;
use rustix::thread::futex;

use super::super::wire::HEAD_LEN;

/// Bytes of one slot. Two of each rank of a small host fit into a second-level cache.
pub(crate) const SLOT: usize = 512 << 10;

const PAGE: usize = 4096;
const MAGIC: [u8; 8] = *b"MUSTERSH";
/// Bytes of a rank's words: its count of posted rounds, who sleeps on it, and two heads.
const DESK: usize = 256;
const SLEEPERS: usize = 64;
const HEADS: usize = 128;

const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// The mapping. All ranks of the host hold the same one.
#[derive(Debug)]
pub(crate) struct Region {
    map: MmapRaw,
    places: usize,
}

fn slots_at(places: usize) -> usize {
    PAGE + (places * DESK).next_multiple_of(PAGE)
}

fn len(places: usize) -> usize {
    slots_at(places) + places * 2 * SLOT
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl Region {
    /// Makes a region for so many places. It has no name, and is gone with the last process that maps
    /// or holds it. The file is for the others to open; `nonce` proves to them that it is the right one.
    pub(crate) fn create(places: usize, nonce: &[u8; 32]) -> io::Result<(File, Region)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("muster-collective", flags)?);
        file.set_len(len(places) as u64)?;
        // Whoever maps it can rely on its length.
        fcntl_add_seals(&file, SEALS)?;
        let region = Region::map(&file, places)?;
        let start = [&MAGIC[..], nonce].concat();
        // SAFETY: the first page is mapped and longer than this; nobody else has the region yet.
        unsafe {
            region
                .map
                .as_mut_ptr()
                .copy_from(start.as_ptr(), start.len())
        };
        Ok((file, region))
    }

    /// Opens the region that another process of this user has made.
    pub(crate) fn open(pid: u32, fd: u32, places: usize, nonce: &[u8; 32]) -> io::Result<Region> {
        let path = format!("/proc/{pid}/fd/{fd}");
        let file = File::options().read(true).write(true).open(path)?;
        if file.metadata()?.len() != len(places) as u64 || !fcntl_get_seals(&file)?.contains(SEALS)
        {
            return Err(invalid("another file than the region"));
        }
        let region = Region::map(&file, places)?;
        let mut start = [0; 40];
        // SAFETY: the first page is mapped and longer than this; its maker wrote it before it said
        // where the region is, and nobody writes it afterwards.
        unsafe { region.map.as_ptr().copy_to(start.as_mut_ptr(), start.len()) };
        if start[..8] != MAGIC || start[8..] != *nonce {
            return Err(invalid("another region"));
        }
        Ok(region)
    }

    fn map(file: &File, places: usize) -> io::Result<Region> {
        let map = MmapOptions::new()
            .len(len(places))
            .map_raw(file.as_raw_fd())?;
        Ok(Region { map, places })
    }

    fn word(&self, place: usize, at: usize) -> &AtomicU32 {
        assert!(place < self.places && at + 4 <= HEADS && at.is_multiple_of(4));
        // SAFETY: inside the mapping by the line above, aligned to four, and used by all processes
        // as an atomic only.
        unsafe { AtomicU32::from_ptr(self.map.as_mut_ptr().add(PAGE + place * DESK + at).cast()) }
    }

    fn posted(&self, place: usize) -> &AtomicU32 {
        self.word(place, 0)
    }

    fn sleepers(&self, place: usize) -> &AtomicU32 {
        self.word(place, SLEEPERS)
    }

    fn head_ptr(&self, place: usize, parity: usize) -> *mut u8 {
        assert!(place < self.places && parity < 2);
        let at = PAGE + place * DESK + HEADS + parity * HEAD_LEN;
        // SAFETY: inside the mapping, as two heads fit behind HEADS in a desk.
        unsafe { self.map.as_mut_ptr().add(at) }
    }

    fn slot_ptr(&self, place: usize, parity: usize) -> *mut u8 {
        assert!(place < self.places && parity < 2);
        let at = slots_at(self.places) + (place * 2 + parity) * SLOT;
        // SAFETY: inside the mapping, by the definition of its length.
        unsafe { self.map.as_mut_ptr().add(at) }
    }

    /// Wakes everybody who sleeps in this region, in all processes.
    pub(crate) fn wake_all(&self) {
        for place in 0..self.places {
            wake(self.posted(place));
        }
    }
}

const _: () = assert!(HEADS + 2 * HEAD_LEN <= DESK);

fn wake(word: &AtomicU32) {
    // Fails only for an address that is not mapped.
    let woken = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
    debug_assert!(woken.is_ok());
}

/// A rank's place in a region.
#[derive(Debug)]
pub(crate) struct Port {
    region: Arc<Region>,
    me: usize,
    /// The round that is written or read now.
    round: u32,
    written: bool,
}

/// All slots of a round, which nobody writes while this lives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slots<'a> {
    region: &'a Region,
    parity: usize,
}

impl<'a> Slots<'a> {
    pub(crate) fn slot(&self, place: usize) -> &'a [u8] {
        // SAFETY: all have posted this round, so this slot was written before (acquired in
        // `Port::is_posted`), and is written again only after this rank has posted the next round,
        // which needs the `Port` that this borrows. Slots are SLOT bytes long.
        unsafe { std::slice::from_raw_parts(self.region.slot_ptr(place, self.parity), SLOT) }
    }

    pub(crate) fn head(&self, place: usize) -> [u8; HEAD_LEN] {
        // SAFETY: as for the slot.
        unsafe {
            self.region
                .head_ptr(place, self.parity)
                .cast::<[u8; HEAD_LEN]>()
                .read()
        }
    }
}

impl Port {
    /// The only one of its place: whoever makes two breaks the discipline.
    pub(crate) fn new(region: Arc<Region>, me: usize) -> Port {
        Port {
            region,
            me,
            round: 0,
            written: false,
        }
    }

    fn parity(&self) -> usize {
        (self.round & 1) as usize
    }

    /// Fills this rank's slot of the round, and posts it. False, and nothing done, if it was already.
    pub(crate) fn write(&mut self, head: &[u8; HEAD_LEN], fill: impl FnOnce(&mut [u8])) -> bool {
        if std::mem::replace(&mut self.written, true) {
            return false;
        }
        // SAFETY: this place's slot and head of this parity were last written two rounds ago. All have
        // posted the round before this one (`finish` saw it), and so have read that one; they look here
        // again only when this round is posted, below. Within the process `&mut self` is exclusive.
        unsafe {
            let head_ptr = self.region.head_ptr(self.me, self.parity());
            head_ptr.cast::<[u8; HEAD_LEN]>().write(*head);
            let slot = self.region.slot_ptr(self.me, self.parity());
            fill(std::slice::from_raw_parts_mut(slot, SLOT));
        }
        let posted = self.region.posted(self.me);
        posted.store(self.round.wrapping_add(1), Ordering::SeqCst);
        if self.region.sleepers(self.me).load(Ordering::SeqCst) != 0 {
            wake(posted);
        }
        true
    }

    /// Whether the place has posted this round (it may be one round ahead).
    pub(crate) fn is_posted(&self, place: usize) -> bool {
        let posted = self.region.posted(place).load(Ordering::SeqCst);
        posted.wrapping_sub(self.round.wrapping_add(1)) < 2
    }

    /// Sleeps until the place posts something, is woken otherwise, or this time has passed.
    pub(crate) fn sleep(&self, place: usize, at_most: Duration) {
        let posted = self.region.posted(place);
        let seen = posted.load(Ordering::SeqCst);
        let sleepers = self.region.sleepers(place);
        sleepers.fetch_add(1, Ordering::SeqCst);
        if !self.is_posted(place) {
            let timeout = rustix::time::Timespec {
                tv_sec: i64::try_from(at_most.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(at_most.subsec_nanos()),
            };
            let slept = futex::wait(posted, futex::Flags::empty(), seen, Some(&timeout));
            debug_assert!(
                matches!(
                    slept,
                    Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT)
                ),
                "{slept:?}"
            );
        }
        sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// All slots, if all have posted this round.
    pub(crate) fn slots(&self) -> Option<Slots<'_>> {
        let all = self.written && (0..self.region.places).all(|place| self.is_posted(place));
        all.then_some(Slots {
            region: &self.region,
            parity: self.parity(),
        })
    }

    /// Goes on to the next round. False, and nothing done, unless all have posted this one.
    pub(crate) fn finish(&mut self) -> bool {
        if self.slots().is_none() {
            return false;
        }
        self.round = self.round.wrapping_add(1);
        self.written = false;
        true
    }
}
