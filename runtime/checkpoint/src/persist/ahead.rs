//! A file is written while its image is still being copied into a slot.
//!
//! It has no name at all until the image is sealed (O_TMPFILE), so whatever becomes of the copy, or of this process,
//! nothing is left. Then it gets a temporary name, and from there goes the way of every other file. Each of its chunks
//! has the sum that the seal says of it; if not, or if anything goes wrong before, all of it is forgotten, and the file
//! is written from the sealed slot as if nobody had begun.
//!
//! Training waits for the copy, so while that goes on only one thread writes, when a processor has nothing else to do,
//! and hashes nothing: that keeps most disks busy. With the seal as many as usual go on, and hash what is written
//! already.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{self as unix, AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;

use super::disk::{Disk, Real};
use super::out::Out;
use super::ring::Ring;
use super::{Fault, Options, Path, PersistError, Written, check, finish, published, temporaries};
use crate::PAGE;
use crate::dir::Dir;
use crate::pool;
use crate::slot::{Fill, Following, Sealed};
use crate::sum::{CHUNK, ChunkSum, chunks_of};

/// Between two looks at a chunk that is not there yet: a chunk is copied in less than a millisecond.
const LOOK: Duration = Duration::from_micros(200);

/// Between two looks whether a slot is sealed. Each takes a processor from the copy for a moment.
const LOOK_AT_SEAL: Duration = Duration::from_millis(2);

/// So long a seal is waited for: after that its worker stands still, or keeps the slot for good.
const PATIENCE: Duration = Duration::from_secs(60);

/// The priority of what goes on beside the copy: the lowest.
const NICE: i32 = 19;

/// A file without a name, and what is to be in it.
#[derive(Debug)]
pub struct Begun {
    out: Out<'static, Real>,
    following: Following,
}

/// A file without a name in which all chunks are.
#[derive(Debug)]
pub struct Ahead {
    out: Out<'static, Real>,
    following: Following,
    chunks: Vec<ChunkSum>,
}

impl Dir {
    /// A file for what is being copied into a slot. None where a file system has no files without names, or writes
    /// through the page cache, which would cost the copy more time than this saves; nor where there is no room.
    pub fn begin_ahead(&self, following: Following, options: Options) -> Option<Begun> {
        if !following.bytes().is_multiple_of(PAGE as u64) || !options.direct {
            return None;
        }
        // O_DIRECT at once: nothing is reserved where it is refused.
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::DIRECT | OFlags::CLOEXEC;
        let file = unix::openat(self.fd(), ".", flags, Mode::from_raw_mode(0o666)).ok()?;
        let out = Out::new(&Real, file, following.bytes(), true, options).ok()?;
        (out.path() == Path::Direct).then_some(Begun { out, following })
    }
}

impl Begun {
    /// Writes each chunk as soon as it is there, by up to so many threads; returns when the slot is sealed and all of
    /// it is written and hashed. `done` counts bytes.
    ///
    /// # Errors
    /// [`Fault::Cancelled`] when the copy was given up, or takes too long, or `stop` is set; or whatever kept a chunk
    /// from being written. Nothing is lost: the file is written from the sealed slot, where a fault shows again.
    pub fn follow(
        self,
        threads: usize,
        stop: &AtomicBool,
        done: &AtomicU64,
    ) -> Result<Ahead, Fault> {
        let work = Work::new(&self.out, &self.following, stop, done);
        let chunks = work.run(threads)?;
        Ok(Ahead {
            out: self.out,
            following: self.following,
            chunks,
        })
    }
}

/// Writing, seen by all threads.
struct Work<'a, D> {
    out: &'a Out<'a, D>,
    following: &'a Following,
    /// Chunks of the file.
    count: usize,
    /// So long a seal is waited for.
    patience: Duration,
    /// The first chunk that nobody has begun to write.
    next: AtomicUsize,
    /// Sums of the chunks that were written before the seal.
    seen: Mutex<Vec<u64>>,
    /// It comes to nothing.
    over: AtomicBool,
    /// Every chunk was there: none is waited for any more.
    hashed: AtomicBool,
    stop: &'a AtomicBool,
    done: &'a AtomicU64,
}

impl<'a, D: Disk> Work<'a, D> {
    /// Of which nothing is done yet.
    fn new(
        out: &'a Out<'a, D>,
        following: &'a Following,
        stop: &'a AtomicBool,
        done: &'a AtomicU64,
    ) -> Self {
        let count = chunks_of(following.bytes());
        Work {
            out,
            following,
            count: usize::try_from(count).unwrap_or(usize::MAX),
            patience: PATIENCE,
            next: AtomicUsize::new(0),
            seen: Mutex::default(),
            over: AtomicBool::new(false),
            hashed: AtomicBool::new(false),
            stop,
            done,
        }
    }

    /// All of it, as [`Begun::follow`]; the sums of all chunks.
    fn run(self, threads: usize) -> Result<Vec<ChunkSum>, Fault> {
        let (early, rest) = thread::scope(|scope| {
            let early = thread::Builder::new().name("ahead".into());
            // Without a thread nothing is written before the seal.
            let early = early.spawn_scoped(scope, || self.ends_with(self.while_it_is_filled()));
            let rest = self.sealed().and_then(|()| self.after_the_seal(threads));
            let rest = self.ends_with(rest);
            self.hashed.store(true, Ordering::Release);
            let early = early
                .ok()
                .map_or(Ok(Ok(())), thread::ScopedJoinHandle::join);
            (early.unwrap_or(Err(Fault::Cancelled)), rest)
        });
        let chunks = match (early, rest) {
            // Each ends when the other has failed: that one says why.
            (Err(Fault::Cancelled), Err(why)) | (Err(why), _) => return Err(why),
            (Ok(()), rest) => rest?,
        };
        let seen = self
            .seen
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        // What was copied once more has been written too early.
        match (seen.iter().zip(&chunks)).position(|(seen, now)| *seen != now.crc) {
            Some(at) => Err(Fault::Damaged {
                at: at as u64 * CHUNK,
            }),
            None => Ok(chunks),
        }
    }

    /// Writes chunks, in order, until the seal.
    fn while_it_is_filled(&self) -> Result<(), Fault> {
        // This thread's alone. One that may not have it writes as it is.
        let _slower = rustix::process::setpriority_process(None, NICE);
        loop {
            let chunk = self.next.fetch_add(1, Ordering::Relaxed);
            if chunk >= self.count {
                return Ok(());
            }
            let sum = self.wait(chunk as u64).ok_or(Fault::Cancelled)?;
            let seen = self.seen.lock();
            seen.unwrap_or_else(PoisonError::into_inner).push(sum);
            muster_fault::point("ahead.chunk");
            let bytes = self.following.chunk_bytes(chunk as u64);
            self.out.write_all(bytes, chunk as u64 * CHUNK)?;
            if self.out.path() == Path::Refused {
                // Through the page cache it costs the copy more than it saves.
                return Err(Fault::Cancelled);
            }
            self.done.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        }
    }

    /// The sum of a chunk, once that is there; none if it never will be.
    fn wait(&self, chunk: u64) -> Option<u64> {
        while !self.is_over() {
            // Before the look: a worker that unseals its slot, which none may, is not waited for.
            let hashed = self.hashed.load(Ordering::Acquire);
            match self.following.chunk(chunk) {
                Some(sum) => return Some(sum),
                None if hashed => break,
                None => thread::sleep(LOOK),
            }
        }
        None
    }

    /// Passes on a thread's result; on an error the other threads end, too.
    fn ends_with<T>(&self, result: Result<T, Fault>) -> Result<T, Fault> {
        result.inspect_err(|_| self.over.store(true, Ordering::Relaxed))
    }

    fn is_over(&self) -> bool {
        let set = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
        set(self.stop) || set(&self.over) || self.following.state() == Fill::Gone
    }

    /// Waits for the seal.
    fn sealed(&self) -> Result<(), Fault> {
        let began = Instant::now();
        while began.elapsed() < self.patience && !self.is_over() {
            match self.following.state() {
                Fill::Sealed => return Ok(()),
                Fill::Going | Fill::Gone => thread::sleep(LOOK_AT_SEAL),
            }
        }
        Err(Fault::Cancelled)
    }

    /// Writes what is not begun, and hashes all.
    fn after_the_seal(&self, threads: usize) -> Result<Vec<ChunkSum>, Fault> {
        let begun = self.next.swap(self.count, Ordering::Relaxed);
        let begun = begun.min(self.count);
        let order = spread(begun, self.count);
        let one = |queue: &mut Option<Ring>, at: usize| {
            if self.is_over() {
                return Err(Fault::Cancelled);
            }
            let chunk = order[at];
            let bytes = self.following.chunk_bytes(chunk as u64);
            if chunk < begun {
                return Ok((chunk, ChunkSum::of(bytes)));
            }
            let sum = self.out.chunk(queue, bytes, chunk as u64 * CHUNK, None)?;
            self.done.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            Ok((chunk, sum))
        };
        let mut sums = pool::each(threads, self.count, || Ok(self.out.queue()), one)?;
        sums.sort_unstable_by_key(|(chunk, _)| *chunk);
        Ok(sums.into_iter().map(|(_, sum)| sum).collect())
    }
}

/// All of `0..count`, with those below `begun`, which are only hashed, spread among those that the disk waits for.
fn spread(begun: usize, count: usize) -> Vec<usize> {
    let (mut hashed, mut written) = (0..begun, begun..count);
    let between = (count - begun).div_ceil(begun.max(1)).max(1);
    let mut order = Vec::with_capacity(count);
    while order.len() < count {
        order.extend(written.by_ref().take(between));
        order.extend(hashed.next());
    }
    order
}

impl Ahead {
    /// Whether it holds what was sealed.
    fn is(&self, sealed: &Sealed) -> bool {
        let sums = self.chunks.iter().map(|chunk| &chunk.crc);
        let bytes = sealed.image().len() as u64;
        self.following.became(sealed) && self.out.bytes() == bytes && sums.eq(&sealed.sums)
    }

    /// Gives it a temporary name in a directory.
    fn link(&self, dir: &Dir, name: &str) -> Result<String, Errno> {
        let file = format!("/proc/self/fd/{}", self.out.file().as_raw_fd());
        for temporary in temporaries(name) {
            match unix::linkat(CWD, &*file, dir.fd(), &*temporary, AtFlags::SYMLINK_FOLLOW) {
                Ok(()) => return Ok(temporary),
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
        }
        Err(Errno::EXIST)
    }

    /// Makes it the file of this name, durably, if it holds what was sealed and the directory is one of its file
    /// system. Else it is none of this name's, and forgotten.
    ///
    /// # Errors
    /// As for [`persist`](super::persist).
    pub(crate) fn publish(
        self,
        dir: &Dir,
        name: &str,
        sealed: &Sealed,
    ) -> Option<Result<Written, PersistError>> {
        let total = self.out.bytes();
        check(name).ok()?;
        if !self.is(sealed) {
            return None;
        }
        let temporary = self.link(dir, name).ok()?;
        muster_fault::point("ahead.linked");
        let finished = finish(&self.out, self.chunks, dir, &temporary, name);
        Some(published(&Real, dir, name, &temporary, total, finished))
    }
}

#[cfg(test)]
mod tests;
