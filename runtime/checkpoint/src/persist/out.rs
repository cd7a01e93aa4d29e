//! A file of a known length while it has no name yet: its chunks are written in any order, by several threads.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs as unix;
use rustix::io::Errno;

use super::disk::Disk;
use super::ring::{self, Ring};
use super::{Fault, Options, Path};
use crate::PAGE;
use crate::dir::Dir;
use crate::sum::ChunkSum;

#[derive(Debug)]
pub(super) struct Out<'d, D> {
    disk: &'d D,
    file: OwnedFd,
    bytes: u64,
    /// How chunks are written, unless such a write is refused.
    path: Path,
    /// Through io_uring, where there is one.
    ring: bool,
    refused: AtomicU64,
    by_ring: AtomicU64,
}

impl<'d, D: Disk> Out<'d, D> {
    /// Of a new file. `aligned`: its image begins at a page.
    pub(super) fn new(
        disk: &'d D,
        file: OwnedFd,
        bytes: u64,
        aligned: bool,
        options: Options,
    ) -> Result<Self, Fault> {
        // The size is set first: a full disk is found at once, and threads that write beyond the end
        // of a file would wait for each other.
        if bytes > 0 {
            match disk.allocate(file.as_fd(), bytes) {
                Ok(()) => {}
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
                    unix::ftruncate(&file, bytes).map_err(|errno| Fault::io("size", errno))?;
                }
                Err(errno) => return Err(Fault::io("allocate", errno)),
            }
        }
        let aligned = aligned && bytes.is_multiple_of(PAGE as u64);
        let path = match (options.direct, aligned) {
            (false, _) => Path::Buffered,
            (true, false) => Path::Unaligned,
            (true, true) if disk.set_direct(file.as_fd(), true).is_ok() => Path::Direct,
            (true, true) => Path::Refused,
        };
        Ok(Self {
            disk,
            file,
            bytes,
            path,
            ring: options.ring,
            refused: AtomicU64::new(0),
            by_ring: AtomicU64::new(0),
        })
    }

    pub(super) fn file(&self) -> &OwnedFd {
        &self.file
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How its chunks were written so far.
    pub(super) fn path(&self) -> Path {
        let some = |count: &AtomicU64| count.load(Ordering::Relaxed) > 0;
        match (some(&self.refused), some(&self.by_ring)) {
            (false, false) => self.path,
            (false, true) => Path::Ring,
            (true, _) => Path::Refused,
        }
    }

    /// A ring for a thread that writes chunks. Where one is refused, the thread does without.
    pub(super) fn queue(&self) -> Option<Ring> {
        let ring = self.ring && self.path == Path::Direct;
        ring.then(Ring::new).and_then(Result::ok)
    }

    /// Hashes and writes a chunk. `wanted` is the CRC-64/NVME that it has to have, where that is known: `Some(None)`
    /// fits none.
    pub(super) fn chunk(
        &self,
        queue: &mut Option<Ring>,
        bytes: &[u8],
        at: u64,
        wanted: Option<Option<u64>>,
    ) -> Result<ChunkSum, Fault> {
        let file = self.file.as_fd();
        let queued = queue.as_mut().and_then(|ring| {
            let written = ring.write(file, bytes, at, || ChunkSum::of(bytes));
            written.ok()
        });
        if queued.is_none() {
            *queue = None;
        }
        // The file gets its name only when all of it is right, so a chunk may be written before that is known.
        let (answers, sum) = queued.unwrap_or_else(|| (Vec::new(), ChunkSum::of(bytes)));
        if wanted.is_some_and(|wanted| wanted != Some(sum.crc)) {
            return Err(Fault::Damaged { at });
        }
        if answers.is_empty() {
            self.write_all(bytes, at)?;
        } else {
            self.by_ring.fetch_add(1, Ordering::Relaxed);
        }
        for (block, answer) in answers {
            // What the kernel did not take at once is written as without io_uring, which also says why not.
            let (from, rest) = ring::rest(bytes, block, usize::try_from(answer).unwrap_or(0));
            self.write_all(rest, at + from as u64)?;
        }
        Ok(sum)
    }

    /// Writes all of it. Where the kernel refuses a write with O_DIRECT as such, it is tried once more without.
    pub(super) fn write_all(&self, mut bytes: &[u8], mut at: u64) -> Result<(), Fault> {
        let mut fallen = false;
        while !bytes.is_empty() {
            match self.disk.write(self.file.as_fd(), bytes, at) {
                Ok(0) => return Err(Fault::Short { at }),
                Ok(count) => {
                    let count = count.min(bytes.len());
                    bytes = &bytes[count..];
                    at += count as u64;
                }
                Err(Errno::INTR) => {}
                Err(Errno::INVAL) if !fallen && self.fall_back() => fallen = true,
                Err(errno) => return Err(Fault::io("write", errno)),
            }
        }
        Ok(())
    }

    /// Whether writes go through the page cache from now on, and did not have to.
    fn fall_back(&self) -> bool {
        let off = || self.disk.set_direct(self.file.as_fd(), false).is_ok();
        let first = self.path == Path::Direct && off();
        self.refused.fetch_add(u64::from(first), Ordering::Relaxed);
        first
    }

    pub(super) fn sync(&self) -> Result<(), Fault> {
        let synced = self.disk.sync(self.file.as_fd());
        synced.map_err(|errno| Fault::io("sync", errno))
    }

    /// Gives it its name, which must be free, in place of its temporary one.
    pub(super) fn publish(&self, dir: &Dir, temporary: &str, name: &str) -> Result<(), Fault> {
        let published = self.disk.publish(dir.fd(), temporary, name);
        published.map_err(|errno| match errno {
            Errno::EXIST => Fault::Exists,
            errno => Fault::io("rename", errno),
        })
    }
}
