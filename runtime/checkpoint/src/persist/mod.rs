//! An image in memory becomes a durable file, and its checksums.
//!
//! Written under a temporary name by a few threads, with O_DIRECT from the image's own pages where
//! the file system allows it, else through the page cache; hashed on the way; then synced, given
//! its name, which must be free, and its directory synced. Before that moment a crash leaves at
//! most a temporary file, which goes with the folder of its save; after it, the whole file.
//!
//! Through io_uring where that is asked for and allowed (containers forbid it by default): a few threads keep a disk
//! as busy (the figures are in docs/checkpoints.md).

mod ahead;
mod disk;
mod error;
mod out;
mod ring;

use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{self as unix, Mode, OFlags};
use rustix::io::Errno;

use crate::dir::{Dir, TEMPORARY};
use crate::hex::Bytes;
use crate::manifest::DataFile;
use crate::sum::{CHUNK, ChunkSum, chunks_of, file_digest};
use crate::{PAGE, pool};

pub use ahead::{Ahead, Begun};
use disk::{Disk, Real};
pub use error::{Fault, PersistError};
use out::Out;

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
    let total = image.len() as u64;
    let error = |fault| PersistError::new(dir.shown(name), total, fault);
    check(name).map_err(error)?;
    let (temporary, file) = create(disk, dir, name).map_err(error)?;
    let written = || {
        let aligned = image.as_ptr().addr().is_multiple_of(PAGE);
        let out = Out::new(disk, file, total, aligned, options)?;
        let chunks = write(&out, image, sums, options.threads, progress)?;
        Ok((out, chunks))
    };
    let finished = written().and_then(|(out, chunks)| finish(&out, chunks, dir, &temporary, name));
    published(disk, dir, name, &temporary, total, finished)
}

fn check(name: &str) -> Result<(), Fault> {
    let plain = name
        .bytes()
        .all(|c| c.is_ascii_alphanumeric() || b"-_.".contains(&c));
    match name.is_empty() || name.starts_with('.') || name.len() > 200 || !plain {
        true => Err(Fault::Name),
        false => Ok(()),
    }
}

/// Syncs a temporary file of which every chunk is written, and gives it its name.
fn finish(
    out: &Out<'_, impl Disk>,
    chunks: Vec<ChunkSum>,
    dir: &Dir,
    temporary: &str,
    name: &str,
) -> Result<Written, Fault> {
    out.sync()?;
    muster_fault::point_on("persist.publish", || dir.shown(name).display().to_string());
    out.publish(dir, temporary, name)?;
    Ok(Written {
        bytes: out.bytes(),
        chunks,
        path: out.path(),
    })
}

/// Makes a file's name durable, or removes what an error left.
fn published(
    disk: &impl Disk,
    dir: &Dir,
    name: &str,
    temporary: &str,
    total: u64,
    finished: Result<Written, Fault>,
) -> Result<Written, PersistError> {
    let error = |fault| PersistError::new(dir.shown(name), total, fault);
    let finished = finished
        .inspect_err(|_| {
            // Best effort: a full disk gets its bytes back. If not, it goes with its folder.
            let _ = unix::unlinkat(dir.fd(), temporary, unix::AtFlags::empty());
        })
        .map_err(error)?;
    muster_fault::point_on("persist.published", || {
        dir.shown(name).display().to_string()
    });
    disk.sync_dir(dir.fd()).map_err(|errno| PersistError {
        published: true,
        ..error(Fault::io("sync the directory of", errno))
    })?;
    Ok(finished)
}

/// Names for a temporary file. One that is taken is another host's or a dead process's of the same number.
fn temporaries(name: &str) -> impl Iterator<Item = String> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let pid = std::process::id();
    (0..1000).map(move |_| {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        format!("{TEMPORARY}{name}-{pid}-{count}")
    })
}

/// A new temporary file.
fn create(disk: &impl Disk, dir: &Dir, name: &str) -> Result<(String, OwnedFd), Fault> {
    for temporary in temporaries(name) {
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        match disk.create(dir.fd(), &temporary, flags, Mode::from_raw_mode(0o666)) {
            Ok(file) => return Ok((temporary, file)),
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(Fault::io("create", errno)),
        }
    }
    Err(Fault::io("create", Errno::EXIST))
}

/// Writes every chunk.
fn write(
    out: &Out<'_, impl Disk>,
    image: &[u8],
    sums: Option<&[u64]>,
    threads: usize,
    progress: &(dyn Fn(Progress) -> ControlFlow<()> + Sync),
) -> Result<Vec<ChunkSum>, Fault> {
    let total = image.len() as u64;
    let done = AtomicU64::new(0);
    pool::each(
        threads,
        usize::try_from(chunks_of(total)).unwrap_or(usize::MAX),
        || Ok(out.queue()),
        |queue, chunk| {
            let begin = chunk * CHUNK as usize;
            let bytes = &image[begin..image.len().min(begin + CHUNK as usize)];
            muster_fault::point("persist.chunk");
            let wanted = sums.map(|sums| sums.get(chunk).copied());
            let sum = out.chunk(queue, bytes, begin as u64, wanted)?;
            let done = done.fetch_add(bytes.len() as u64, Ordering::Relaxed) + bytes.len() as u64;
            match progress(Progress { done, total }) {
                ControlFlow::Continue(()) => Ok(sum),
                ControlFlow::Break(()) => Err(Fault::Cancelled),
            }
        },
    )
}

#[cfg(test)]
mod tests;
