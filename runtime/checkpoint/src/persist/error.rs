//! Errors while a file is written, and advice for each.

use std::fmt;
use std::io;
use std::path::PathBuf;

use rustix::io::Errno;

/// A file could not be made durable.
#[derive(Debug)]
pub struct PersistError {
    /// The file that was to be.
    pub path: PathBuf,
    /// Its length.
    pub bytes: u64,
    pub fault: Fault,
    /// Whether it has its name all the same: all was done but the last sync of its directory.
    pub published: bool,
}

/// Cause of the failure.
#[derive(Debug)]
pub enum Fault {
    /// The name is not one component of letters, digits, `-`, `_`, dots.
    Name,
    /// A file of this name is there already; it was not touched.
    Exists,
    /// The disk, or the user's quota, is full.
    Full(io::Error),
    /// The process may not.
    Denied(io::Error),
    /// The file system is mounted, or was remounted, read-only.
    ReadOnly(io::Error),
    /// The directory was deleted.
    Gone(io::Error),
    /// The kernel wrote nothing and gave no reason.
    Short { at: u64 },
    /// The image is not what was sealed: the chunk at this byte has another checksum.
    Damaged { at: u64 },
    /// The progress callback broke it off.
    Cancelled,
    /// A store that is no directory failed, in its own words.
    Store(io::Error),
    /// The disk failed, or anything else.
    Io {
        what: &'static str,
        source: io::Error,
    },
}

impl Fault {
    pub(super) fn io(what: &'static str, errno: Errno) -> Self {
        Self::Io {
            what,
            source: errno.into(),
        }
    }
}

impl PersistError {
    pub(super) fn new(path: PathBuf, bytes: u64, fault: Fault) -> Self {
        let fault = match fault {
            Fault::Io { what, source } => match Errno::from_io_error(&source) {
                Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => Fault::Full(source),
                Some(Errno::ACCESS | Errno::PERM) => Fault::Denied(source),
                Some(Errno::ROFS) => Fault::ReadOnly(source),
                Some(Errno::NOENT | Errno::STALE) => Fault::Gone(source),
                _ => Fault::Io { what, source },
            },
            other => other,
        };
        Self {
            path,
            bytes,
            fault,
            published: false,
        }
    }
}

impl fmt::Display for PersistError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        match &self.fault {
            Fault::Name => write!(
                f,
                "cannot write {path}: its name is not one that a data file may have"
            ),
            Fault::Exists => write!(
                f,
                "{path} is there already and was left as it is: save under another attempt's directory"
            ),
            Fault::Full(_) => write!(
                f,
                "no room for {path} ({} bytes): free space or quota there, keep fewer checkpoints, or choose another directory",
                self.bytes
            ),
            Fault::Denied(_) => write!(
                f,
                "may not write {path}: give the job's user the right to write in that directory"
            ),
            Fault::ReadOnly(_) => write!(
                f,
                "{path} is on a read-only file system: remount it for writing (the kernel's log says whether an error made it so), or choose another directory"
            ),
            Fault::Gone(_) => write!(
                f,
                "the directory of {path} was deleted meanwhile: save again, with the directory made anew"
            ),
            Fault::Short { at } => write!(
                f,
                "the kernel wrote nothing at byte {at} of {path}: look for the disk's errors in its log, or choose another directory"
            ),
            Fault::Damaged { at } => write!(
                f,
                "the memory that {path} was to be made of changed at byte {at} after it was sealed: if no program wrote to it, have the machine's memory tested"
            ),
            Fault::Cancelled => write!(f, "writing {path} was broken off"),
            Fault::Store(source) => source.fmt(f),
            Fault::Io { what, .. } => write!(
                f,
                "cannot {what} {path}: look for the disk's errors in the kernel's log, or choose another directory"
            ),
        }
    }
}

impl std::error::Error for PersistError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.fault {
            Fault::Full(source)
            | Fault::Denied(source)
            | Fault::ReadOnly(source)
            | Fault::Gone(source)
            | Fault::Io { source, .. } => Some(source),
            // Its words are this error's own.
            Fault::Store(source) => source.source(),
            Fault::Name
            | Fault::Exists
            | Fault::Short { .. }
            | Fault::Damaged { .. }
            | Fault::Cancelled => None,
        }
    }
}
