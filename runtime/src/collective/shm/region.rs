//! The memory that the ranks of a host share, and the discipline that makes its use sound.
//!
//! Time goes in rounds. In each, every rank fills its own slot and posts it, waits until all have posted,
//! and reads the others' slots. A rank has two slots, used in turn: when all have posted round r, all
//! have read round r - 1, so the slots of r - 1 are free for r + 1. [`Port`] allows nothing else.
//!
//! The last rank to post rings a bell on which the others sleep, so each is woken once a round. The bell only
//! wakes: whether all have posted is read from what each has.

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
const MAGIC: [u8; 8] = *b"MUSTERS2";
/// Words on the first page, behind what says which region it is, each on its own line of the cache: posts of all
/// rounds so far; the bell, which counts; who sleeps on it.
const ARRIVED: usize = 64;
const BELL: usize = 128;
const SLEEPERS: usize = 192;
/// Bytes of a rank's words: its count of posted rounds, and two heads.
const DESK: usize = 256;
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

    fn word(&self, at: usize) -> &AtomicU32 {
        assert!(at + 4 <= slots_at(self.places) && at.is_multiple_of(4));
        // SAFETY: inside the mapping by the line above, aligned to four, and used by all processes
        // as an atomic only: `at` is one of the constants for the first page, or the start of a desk.
        unsafe { AtomicU32::from_ptr(self.map.as_mut_ptr().add(at).cast()) }
    }

    fn posted(&self, place: usize) -> &AtomicU32 {
        assert!(place < self.places);
        self.word(PAGE + place * DESK)
    }

    fn bell(&self) -> &AtomicU32 {
        self.word(BELL)
    }

    fn sleepers(&self) -> &AtomicU32 {
        self.word(SLEEPERS)
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

    /// Counts a post of this round, and rings if all have now posted it.
    fn arrive(&self, round: u32) {
        let places = u32::try_from(self.places).unwrap_or(u32::MAX);
        let arrived = self.word(ARRIVED).fetch_add(1, Ordering::SeqCst);
        // Posts of all rounds before this one: a rank is one round ahead at most, so that its count may also
        // be the last one of the round before, which another has posted and not counted yet.
        let before = round.wrapping_mul(places);
        let arrived = arrived.wrapping_add(1);
        if arrived == before || arrived == before.wrapping_add(places) {
            self.ring();
        }
    }

    /// Wakes everybody who sleeps in this region, in all processes.
    pub(crate) fn ring(&self) {
        self.bell().fetch_add(1, Ordering::SeqCst);
        if self.sleepers().load(Ordering::SeqCst) != 0 {
            // Fails only for an address that is not mapped.
            let woken = futex::wake(self.bell(), futex::Flags::empty(), i32::MAX as u32);
            debug_assert!(woken.is_ok());
        }
    }
}

const _: () = assert!(4 <= HEADS && HEADS + 2 * HEAD_LEN <= DESK);
const _: () = assert!(40 <= ARRIVED && SLEEPERS + 4 <= PAGE);

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
        self.region.arrive(self.round);
        true
    }

    /// Whether the place has posted this round (it may be one round ahead).
    pub(crate) fn is_posted(&self, place: usize) -> bool {
        let posted = self.region.posted(place).load(Ordering::SeqCst);
        posted.wrapping_sub(self.round.wrapping_add(1)) < 2
    }

    /// Whether all have posted this round.
    pub(crate) fn is_complete(&self) -> bool {
        (0..self.region.places).all(|place| self.is_posted(place))
    }

    /// Sleeps until the bell rings; false where this time has passed, or a signal came.
    pub(crate) fn sleep(&self, at_most: Duration) -> bool {
        // Read before what it announces: a bell that rings from here on is not slept through.
        let seen = self.region.bell().load(Ordering::SeqCst);
        let sleepers = self.region.sleepers();
        sleepers.fetch_add(1, Ordering::SeqCst);
        let mut rang = true;
        if !self.is_complete() {
            let timeout = rustix::time::Timespec {
                tv_sec: i64::try_from(at_most.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(at_most.subsec_nanos()),
            };
            let bell = self.region.bell();
            let slept = futex::wait(bell, futex::Flags::empty(), seen, Some(&timeout));
            debug_assert!(
                matches!(
                    slept,
                    Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT)
                ),
                "{slept:?}"
            );
            // A signal rings no bell: who is woken by one looks at what the bell does not announce.
            rang = matches!(slept, Ok(()) | Err(Errno::AGAIN));
        }
        sleepers.fetch_sub(1, Ordering::SeqCst);
        rang
    }

    /// All slots, if all have posted this round.
    pub(crate) fn slots(&self) -> Option<Slots<'_>> {
        (self.written && self.is_complete()).then_some(Slots {
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

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    /// Three places, from this round on, each of which sleeps whenever another has not posted yet.
    fn rounds(first: u32, count: u32) {
        let (_file, region) = Region::create(3, &[7; 32]).unwrap();
        let region = Arc::new(region);
        for place in 0..3 {
            region.posted(place).store(first, Ordering::SeqCst);
        }
        let arrived = first.wrapping_mul(3);
        region.word(ARRIVED).store(arrived, Ordering::SeqCst);
        std::thread::scope(|scope| {
            for me in 0..3u8 {
                let mut port = Port::new(region.clone(), me.into());
                port.round = first;
                scope.spawn(move || {
                    for round in 0..count {
                        let said = [me, round as u8];
                        assert!(
                            port.write(&[0; HEAD_LEN], |slot| slot[..2].copy_from_slice(&said))
                        );
                        assert!(!port.write(&[0; HEAD_LEN], |_| unreachable!()));
                        while !port.is_complete() {
                            assert!(port.sleep(LONG), "the bell did not ring");
                        }
                        let slots = port.slots().unwrap();
                        for place in 0..3u8 {
                            assert_eq!(slots.slot(place.into())[..2], [place, round as u8]);
                        }
                        assert!(port.finish());
                    }
                });
            }
        });
        assert_eq!(region.sleepers().load(Ordering::SeqCst), 0);
    }

    #[test]
    fn the_last_to_post_wakes_the_others() {
        rounds(0, 3000);
    }

    #[test]
    fn rounds_are_counted_past_the_end_of_a_word() {
        rounds(u32::MAX - 50, 100);
    }

    #[test]
    fn nobody_is_waited_for_longer_than_asked() {
        let (_file, region) = Region::create(2, &[7; 32]).unwrap();
        let region = Arc::new(region);
        let mut port = Port::new(region.clone(), 0);
        assert!(port.write(&[0; HEAD_LEN], |_| {}));
        assert!(!port.sleep(Duration::from_millis(1)));
        assert!(port.slots().is_none() && !port.finish());
        std::thread::scope(|scope| {
            let asleep = scope.spawn(|| port.sleep(LONG));
            while !asleep.is_finished() {
                region.ring();
                std::thread::yield_now();
            }
            assert!(asleep.join().unwrap());
        });
    }
}
