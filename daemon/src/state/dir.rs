//! Blobs in one directory, reached through its descriptor.
//!
//! A save writes the new bytes into a spare file, makes them durable, swaps the spare with the blob
//! (`renameat2(RENAME_EXCHANGE)`) and makes the swap durable. The file under the blob's own name is
//! therefore whole at every moment. The spare keeps its blocks for the next save, so that only the
//! swap costs a journal commit: about a third less time than with a new temporary file each time.

use std::ffi::CStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::blob::{self, BlobError};

/// Spare files carry this prefix; no blob's name does.
const SPARE: &str = ".spare-";
/// The most bytes of one blob's payload. A job's state is a few records of at most 128 KiB each.
pub const MAX_BLOB: usize = 8 << 20;

/// Content of a blob's file.
pub(super) enum Loaded {
    Whole(Vec<u8>),
    Damaged(BlobError),
    Missing,
}

/// At which step a save failed: what is on disk afterwards depends on it.
#[derive(Debug)]
pub(super) enum SaveError {
    /// The blob is as it was.
    Unchanged(std::io::Error),
    /// The blob is either as it was or as it should be, and it cannot be known which of the two
    /// survives a power loss.
    Uncertain(std::io::Error),
}

#[derive(Debug)]
pub(super) struct BlobDir {
    fd: OwnedFd,
    /// A failed fsync of the directory: the swap may not be durable, so the spare may be what the
    /// disk holds under the blob's name, and must not be overwritten.
    poisoned: bool,
}

impl BlobDir {
    pub(super) fn new(fd: OwnedFd) -> BlobDir {
        BlobDir {
            fd,
            poisoned: false,
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(super) fn names(&self) -> std::io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.fd)? {
            let entry = entry?;
            let name: &CStr = entry.file_name();
            if name != c"." && name != c".." {
                names.push(name.to_string_lossy().into_owned());
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    /// Removes what a crash left, and makes the directory as it is now durable. To be called
    /// before the first save.
    pub(super) fn settle(&self) -> std::io::Result<()> {
        for name in self.names()? {
            if name.starts_with(SPARE) {
                rustix::fs::unlinkat(&self.fd, &name, AtFlags::empty())?;
            }
        }
        self.sync()
    }

    pub(super) fn sync(&self) -> std::io::Result<()> {
        Ok(rustix::fs::fsync(&self.fd)?)
    }

    pub(super) fn load(&self, name: &str) -> std::io::Result<Loaded> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let fd = match rustix::fs::openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(Loaded::Missing),
            // A symbolic link or a socket: not written by us.
            Err(Errno::LOOP | Errno::NXIO) => return Ok(Loaded::Damaged(BlobError::Magic)),
            Err(e) => return Err(e.into()),
        };
        let file = File::from(fd);
        if !file.metadata()?.is_file() {
            return Ok(Loaded::Damaged(BlobError::Magic));
        }
        let mut bytes = Vec::new();
        file.take((MAX_BLOB + blob::HEADER) as u64)
            .read_to_end(&mut bytes)?;
        Ok(match blob::unwrap(name, &bytes) {
            Ok(payload) => Loaded::Whole(payload),
            Err(e) => Loaded::Damaged(e),
        })
    }

    pub(super) fn save(&mut self, name: &str, payload: &[u8]) -> Result<(), SaveError> {
        if self.poisoned {
            return Err(SaveError::Uncertain(std::io::Error::other(
                "an earlier fsync of this directory failed, what is on the disk is not known; restart the agent",
            )));
        }
        if payload.len() > MAX_BLOB {
            return Err(SaveError::Unchanged(std::io::Error::new(
                std::io::ErrorKind::FileTooLarge,
                format!(
                    "the blob has {} bytes, the limit is {MAX_BLOB}",
                    payload.len()
                ),
            )));
        }
        let spare = format!("{SPARE}{name}");
        self.write(&spare, &blob::wrap(name, payload))
            .map_err(SaveError::Unchanged)?;
        match rustix::fs::renameat_with(&self.fd, &spare, &self.fd, name, RenameFlags::EXCHANGE) {
            Ok(()) => {}
            // The blob is new, or the file system cannot swap.
            Err(Errno::NOENT | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                rustix::fs::renameat(&self.fd, &spare, &self.fd, name)
                    .map_err(|e| SaveError::Unchanged(e.into()))?;
            }
            Err(e) => return Err(SaveError::Unchanged(e.into())),
        }
        self.sync().map_err(|e| {
            self.poisoned = true;
            SaveError::Uncertain(e)
        })
    }

    fn write(&self, name: &str, bytes: &[u8]) -> std::io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fd = rustix::fs::openat(&self.fd, name, flags, Mode::RUSR | Mode::WUSR)?;
        let mut file = File::from(fd);
        file.write_all(bytes)?;
        // The length is flushed too when it changed: it is needed to read the data back.
        file.sync_data()
    }

    pub(super) fn remove(&mut self, name: &str) -> std::io::Result<()> {
        for name in [format!("{SPARE}{name}"), name.to_owned()] {
            match rustix::fs::unlinkat(&self.fd, &name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(e) => return Err(e.into()),
            }
        }
        self.sync()
    }

    /// Moves a damaged file out of the way, to the first free `<name>.corrupt-<n>`.
    pub(super) fn quarantine(&self, name: &str) -> std::io::Result<String> {
        for n in 1..=1000 {
            let to = format!("{name}.corrupt-{n}");
            match rustix::fs::renameat_with(&self.fd, name, &self.fd, &to, RenameFlags::NOREPLACE) {
                Ok(()) => {
                    self.sync()?;
                    return Ok(to);
                }
                Err(Errno::EXIST) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Err(std::io::Error::other(
            "there are 1000 damaged copies already: look at the disk, then remove them",
        ))
    }
}

/// Whether a file was put aside by [`BlobDir::quarantine`].
pub(super) fn is_quarantined(name: &str) -> bool {
    name.rsplit_once(".corrupt-")
        .is_some_and(|(_, n)| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}
