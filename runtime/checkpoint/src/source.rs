//! Where data files are read from.

use std::collections::BTreeMap;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{self as unix, Advice, OFlags};
use rustix::io::{self as unix_io, Errno};

use crate::PAGE;
use crate::dir::Dir;

/// Readers of the same bytes on this host, as far as the reader knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readers {
    /// Nobody else: what remembers them for others is in the way.
    One,
    /// Other ranks as well.
    Several,
}

/// Data files by their paths in the manifest: a directory, later a store or a peer. The caller verifies the bytes that
/// it returns.
pub trait Source: Sync {
    /// Length of a file in bytes.
    ///
    /// # Errors
    /// `NotFound` if it is not there; anything else if that cannot be told.
    fn size(&self, path: &str) -> io::Result<u64>;

    /// Fills `into` from byte `at` of a file. Called by several threads at once.
    ///
    /// # Errors
    /// `UnexpectedEof` if the file is shorter, else as [`Source::size`].
    fn read(&self, path: &str, at: u64, into: &mut [u8], readers: Readers) -> io::Result<()>;

    /// Is told that the bytes read last from byte `at` of a file do not verify. Returns whether they would come from
    /// elsewhere now: then they are read again.
    fn refuse(&self, _path: &str, _at: u64) -> bool {
        false
    }
}

/// Files that a directory keeps open at most; each may have two descriptors.
const OPEN: usize = 64;

/// A directory on this machine or a shared file system.
#[derive(Debug)]
pub struct Directory {
    dir: Dir,
    direct: bool,
    open: Mutex<BTreeMap<String, Arc<Opened>>>,
}

#[derive(Debug)]
struct Opened {
    cached: OwnedFd,
    /// The same file with O_DIRECT, where the file system has it.
    direct: Option<OwnedFd>,
}

impl Directory {
    /// Reads below this directory; with `direct` what nobody else reads goes around the page cache, where that is
    /// possible.
    pub fn new(dir: Dir, direct: bool) -> Self {
        Self {
            dir,
            direct,
            open: Mutex::default(),
        }
    }

    /// The directory.
    pub fn dir(&self) -> &Dir {
        &self.dir
    }

    /// Closes what is open of this path, or below it: what was deleted keeps its space on the disk, and
    /// keeps a file system from being made read-only, for as long as somebody holds it open.
    pub fn forget(&self, path: &str) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|name, _| {
            let rest = name.strip_prefix(path);
            rest.is_none_or(|rest| !rest.is_empty() && !rest.starts_with('/'))
        });
    }

    fn opened(&self, path: &str) -> io::Result<Arc<Opened>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(opened) = open.get(path) {
            return Ok(Arc::clone(opened));
        }
        let cached = self.dir.open_file(path)?;
        let direct = match self.direct {
            // A descriptor of its own: flags belong to the open file, and both kinds are used.
            true => self.dir.open_file(path).ok().filter(|file| {
                let flags = unix::fcntl_getfl(file).unwrap_or(OFlags::empty());
                unix::fcntl_setfl(file, flags | OFlags::DIRECT).is_ok()
            }),
            false => None,
        };
        let opened = Arc::new(Opened { cached, direct });
        if open.len() >= OPEN {
            // Files are read one after the other, by their names: the first is done with.
            open.pop_first();
        }
        open.insert(path.to_owned(), Arc::clone(&opened));
        Ok(opened)
    }
}

impl Source for Directory {
    fn size(&self, path: &str) -> io::Result<u64> {
        let stat = unix::fstat(&self.opened(path)?.cached)?;
        Ok(u64::try_from(stat.st_size).unwrap_or(0))
    }

    fn read(&self, path: &str, at: u64, into: &mut [u8], readers: Readers) -> io::Result<()> {
        let opened = self.opened(path)?;
        let aligned = at.is_multiple_of(PAGE as u64)
            && into.len().is_multiple_of(PAGE)
            && into.as_ptr().addr().is_multiple_of(PAGE);
        let (mut rest, mut at) = (into, at);
        let mut file = match &opened.direct {
            Some(direct) if aligned && readers == Readers::One => direct,
            _ => {
                // All of it at once: read-ahead alone asks the disk for little at a time.
                if let Some(bytes) = NonZeroU64::new(rest.len() as u64) {
                    let _advice = unix::fadvise(&opened.cached, at, Some(bytes), Advice::WillNeed);
                }
                &opened.cached
            }
        };
        while !rest.is_empty() {
            match unix_io::pread(file, &mut *rest, at) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    rest = rest.split_at_mut(count.min(rest.len())).1;
                    at += count as u64;
                    // A part of a page is the file's end, or continues unaligned.
                    file = &opened.cached;
                }
                Err(Errno::INTR) => {}
                Err(Errno::INVAL) if !std::ptr::eq(file, &raw const opened.cached) => {
                    file = &opened.cached;
                }
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}
