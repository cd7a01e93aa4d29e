//! An image in memory becomes a durable file, and its checksums.
//!
//! Written under a temporary name by a few threads, with O_DIRECT from the image's own pages where
//! the file system allows it, else through the page cache; hashed on the way; then synced, given
//! its name, which must be free, and its directory synced. Before that moment a crash leaves at
//! most a temporary file ([`Dir::collect_temporaries`]); after it, the whole file.
//!
//! Through io_uring where that is asked for and allowed (containers forbid it by default): a few threads keep a disk
//! as busy (the figures are in docs/checkpoints.md).

mod disk;
mod error;
mod ring;

use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{self as unix, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::dir::{Dir, TEMPORARY};
use crate::hex::Bytes;
use crate::manifest::DataFile;
use crate::sum::{CHUNK, ChunkSum, chunks_of, file_digest};
use crate::{PAGE, pool};

use disk::{Disk, Real};
pub use error::{Fault, PersistError};
use ring::Ring;

/// How to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Threads that hash and write, the caller's among them.
    pub threads: usize,
    /// Go around the page cache where the file system and the image's alignment allow it.
    pub direct: bool,
    /// Hand writes with O_DIRECT to io_uring, several at once, where this process may use it.
    pub ring: bool,
}

impl Options {
    /// For a file of a few pages, whose image need not begin at one.
    pub const SMALL: Options = Options {
        threads: 1,
        direct: false,
        ring: false,
    };
}

impl Default for Options {
    /// Four threads: what a local disk needs to be busy. Around the page cache, without io_uring.
    fn default() -> Self {
        Self {
            threads: 4,
            direct: true,
            ring: false,
        }
    }
}

/// How far a file is, in bytes handed to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    pub done: u64,
    pub total: u64,
}

/// How a file was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// By O_DIRECT.
    Direct,
    /// By O_DIRECT through io_uring.
    Ring,
    /// Through the page cache, because that was asked for.
    Buffered,
    /// Through the page cache, because the image does not begin at a page or is not whole pages.
    Unaligned,
    /// Through the page cache, because the file system refuses O_DIRECT, or refused such a write.
    Refused,
    /// To a store that is no directory.
    Uploaded,
    /// Not now: it was there already, and was read and compared.
    Found,
}

/// A durable file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    pub bytes: u64,
    pub chunks: Vec<ChunkSum>,
    pub path: Path,
}

impl Written {
    /// Its entry in a manifest.
    pub fn data_file(&self, path: String) -> DataFile {
        DataFile {
            path,
            bytes: self.bytes,
            digest: file_digest(&self.chunks),
            chunks: (self.chunks.iter())
                .map(|chunk| Bytes(chunk.crc.to_be_bytes()))
                .collect(),
        }
    }
}

/// Makes the image the file `name` in `dir`, durably. Nothing of that name may be there.
///
/// `progress` is called by any of the threads after each chunk; when it breaks, the write is given
/// up.
///
/// # Errors
/// The disk, the directory, the name; nothing is left of the file then but perhaps a temporary one.
pub fn persist(
    dir: &Dir,
    name: &str,
    image: &[u8],
    options: Options,
    progress: &(dyn Fn(Progress) -> ControlFlow<()> + Sync),
) -> Result<Written, PersistError> {
    persist_on(&Real, dir, name, image, None, options, progress)
}

/// As [`persist`], of an image whose chunks must have these CRC-64/NVME: what was damaged since they
/// were taken never becomes a file.
///
/// # Errors
/// As [`persist`]; [`Fault::Damaged`].
pub fn persist_sealed(
    dir: &Dir,
    name: &str,
    image: &[u8],
    sums: &[u64],
    options: Options,
    progress: &(dyn Fn(Progress) -> ControlFlow<()> + Sync),
) -> Result<Written, PersistError> {
    persist_on(&Real, dir, name, image, Some(sums), options, progress)
}

fn persist_on(
    disk: &impl Disk,
    dir: &Dir,
    name: &str,
    image: &[u8],
    sums: Option<&[u64]>,
    options: Options,
    progress: &(dyn Fn(Progress) -> ControlFlow<()> + Sync),
) -> Result<Written, PersistError> {
    let path = dir.shown(name);
    let error = |fault| PersistError::new(path.clone(), image.len() as u64, fault);
    let plain = name
        .bytes()
        .all(|c| c.is_ascii_alphanumeric() || b"-_.".contains(&c));
    if name.is_empty() || name.starts_with('.') || name.len() > 200 || !plain {
        return Err(error(Fault::Name));
    }
    let (temporary, file) = create(disk, dir, name).map_err(error)?;
    let finished = write(disk, file.as_fd(), image, sums, options, progress)
        .and_then(|written| {
            muster_fault::point_on("persist.publish", || path.display().to_string());
            disk.publish(dir.fd(), &temporary, name)
                .map_err(|errno| match errno {
                    Errno::EXIST => Fault::Exists,
                    errno => Fault::io("rename", errno),
                })?;
            Ok(written)
        })
        .inspect_err(|_| {
            // Best effort: a full disk gets its bytes back. If not, it may be collected later.
            let _ = unix::unlinkat(dir.fd(), &*temporary, unix::AtFlags::empty());
        })
        .map_err(error)?;
    muster_fault::point_on("persist.published", || path.display().to_string());
    disk.sync_dir(dir.fd()).map_err(|errno| PersistError {
        published: true,
        ..error(Fault::io("sync the directory of", errno))
    })?;
    Ok(finished)
}

/// A new temporary file, locked so that nobody takes it for a dead one's.
fn create(disk: &impl Disk, dir: &Dir, name: &str) -> Result<(String, OwnedFd), Fault> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let pid = std::process::id();
    // A name that is taken is another host's or a dead process's of the same number.
    for _ in 0..1000 {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let temporary = format!("{TEMPORARY}{name}-{pid}-{count}");
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        match disk.create(dir.fd(), &temporary, flags, Mode::from_raw_mode(0o666)) {
            Ok(file) => {
                // Where locks are not supported, nothing is collected either. Who collects may have
                // been faster than this lock: then the file is gone, or about to be.
                let lock = unix::flock(&file, FlockOperation::NonBlockingLockExclusive);
                let taken = lock == Err(Errno::WOULDBLOCK);
                if !taken && unix::fstat(&file).is_ok_and(|stat| stat.st_nlink > 0) {
                    return Ok((temporary, file));
                }
            }
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(Fault::io("create", errno)),
        }
    }
    Err(Fault::io("create", Errno::EXIST))
}

fn write(
    disk: &impl Disk,
    file: BorrowedFd<'_>,
    image: &[u8],
    sums: Option<&[u64]>,
    options: Options,
    progress: &(dyn Fn(Progress) -> ControlFlow<()> + Sync),
) -> Result<Written, Fault> {
    let total = image.len() as u64;
    // The size is set first: a full disk is found at once, and threads that write beyond the end
    // of a file would wait for each other.
    if total > 0 {
        match disk.allocate(file, total) {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
                unix::ftruncate(file, total).map_err(|errno| Fault::io("size", errno))?;
            }
            Err(errno) => return Err(Fault::io("allocate", errno)),
        }
    }
    let aligned = image.as_ptr().addr().is_multiple_of(PAGE) && image.len().is_multiple_of(PAGE);
    let path = match (options.direct, aligned) {
        (false, _) => Path::Buffered,
        (true, false) => Path::Unaligned,
        (true, true) if disk.set_direct(file, true).is_ok() => Path::Direct,
        (true, true) => Path::Refused,
    };
    let done = AtomicU64::new(0);
    let refused = AtomicU64::new(0);
    let by_ring = AtomicU64::new(0);
    let queue = || {
        let ring = options.ring && path == Path::Direct;
        // One that is refused is done without.
        Ok(ring.then(Ring::new).and_then(Result::ok))
    };
    let chunks = pool::each(
        options.threads,
        usize::try_from(chunks_of(total)).unwrap_or(usize::MAX),
        queue,
        |queue, chunk| {
            let begin = chunk * CHUNK as usize;
            let bytes = &image[begin..image.len().min(begin + CHUNK as usize)];
            let fall_back = || {
                let first = path == Path::Direct && disk.set_direct(file, false).is_ok();
                refused.fetch_add(u64::from(first), Ordering::Relaxed);
                first
            };
            muster_fault::point("persist.chunk");
            let queued = queue.as_mut().and_then(|ring| {
                let written = ring.write(file, bytes, begin as u64, || ChunkSum::of(bytes));
                written.ok()
            });
            if queued.is_none() {
                *queue = None;
            }
            // The file gets its name only when all of it is right, so a chunk may be written before that is known.
            let (answers, sum) = queued.unwrap_or_else(|| (Vec::new(), ChunkSum::of(bytes)));
            if sums.is_some_and(|sums| sums.get(chunk) != Some(&sum.crc)) {
                return Err(Fault::Damaged { at: begin as u64 });
            }
            by_ring.fetch_add(u64::from(!answers.is_empty()), Ordering::Relaxed);
            if answers.is_empty() {
                write_all(disk, file, bytes, begin as u64, fall_back)?;
            }
            for (block, answer) in answers {
                // What the kernel did not take at once is written as without io_uring, which also says why not.
                let (from, rest) = ring::rest(bytes, block, usize::try_from(answer).unwrap_or(0));
                write_all(disk, file, rest, (begin + from) as u64, fall_back)?;
            }
            let done = done.fetch_add(bytes.len() as u64, Ordering::Relaxed) + bytes.len() as u64;
            match progress(Progress { done, total }) {
                ControlFlow::Continue(()) => Ok(sum),
                ControlFlow::Break(()) => Err(Fault::Cancelled),
            }
        },
    )?;
    disk.sync(file).map_err(|errno| Fault::io("sync", errno))?;
    Ok(Written {
        bytes: total,
        chunks,
        path: match (refused.into_inner(), by_ring.into_inner()) {
            (0, 0) => path,
            (0, _) => Path::Ring,
            _ => Path::Refused,
        },
    })
}

/// Writes all of it. `fall_back` is asked once when the kernel refuses the write as such: whether
/// it is worth another try.
fn write_all(
    disk: &impl Disk,
    file: BorrowedFd<'_>,
    mut bytes: &[u8],
    mut at: u64,
    fall_back: impl Fn() -> bool,
) -> Result<(), Fault> {
    let mut fallen = false;
    while !bytes.is_empty() {
        match disk.write(file, bytes, at) {
            Ok(0) => return Err(Fault::Short { at }),
            Ok(count) => {
                let count = count.min(bytes.len());
                bytes = &bytes[count..];
                at += count as u64;
            }
            Err(Errno::INTR) => {}
            Err(Errno::INVAL) if !fallen && fall_back() => fallen = true,
            Err(errno) => return Err(Fault::io("write", errno)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
