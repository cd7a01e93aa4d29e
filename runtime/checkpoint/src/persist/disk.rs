//! What writing asks of the kernel, so that tests can answer in its place.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{self as unix, AtFlags, FallocateFlags, Mode, OFlags, RenameFlags};
use rustix::io::{self as unix_io, Errno};

pub(super) trait Disk: Sync {
    fn create(
        &self,
        dir: BorrowedFd<'_>,
        name: &str,
        flags: OFlags,
        mode: Mode,
    ) -> Result<OwnedFd, Errno> {
        unix::openat(dir, name, flags, mode)
    }

    fn allocate(&self, file: BorrowedFd<'_>, bytes: u64) -> Result<(), Errno> {
        unix::fallocate(file, FallocateFlags::empty(), 0, bytes)
    }

    /// On the open file: an O_DIRECT that is refused when a file is created leaves it behind.
    fn set_direct(&self, file: BorrowedFd<'_>, on: bool) -> Result<(), Errno> {
        let mut flags = unix::fcntl_getfl(file)?;
        flags.set(OFlags::DIRECT, on);
        unix::fcntl_setfl(file, flags)
    }

    fn write(&self, file: BorrowedFd<'_>, bytes: &[u8], at: u64) -> Result<usize, Errno> {
        unix_io::pwrite(file, bytes, at)
    }

    fn sync(&self, file: BorrowedFd<'_>) -> Result<(), Errno> {
        unix::fdatasync(file)
    }

    /// Gives the file its name, unless that is taken.
    fn publish(&self, dir: BorrowedFd<'_>, temporary: &str, name: &str) -> Result<(), Errno> {
        match unix::renameat_with(dir, temporary, dir, name, RenameFlags::NOREPLACE) {
            // Some network file systems cannot.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                unix::linkat(dir, temporary, dir, name, AtFlags::empty())?;
                unix::unlinkat(dir, temporary, AtFlags::empty())
            }
            other => other,
        }
    }

    fn sync_dir(&self, dir: BorrowedFd<'_>) -> Result<(), Errno> {
        unix::fsync(dir)
    }
}

/// The kernel.
pub(super) struct Real;

impl Disk for Real {}
