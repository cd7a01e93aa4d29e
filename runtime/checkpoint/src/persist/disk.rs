//! Requests of writing to the kernel, so that tests can answer in its place.

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
                publish_by_link(dir, temporary, name)
            }
            other => other,
        }
    }

    fn sync_dir(&self, dir: BorrowedFd<'_>) -> Result<(), Errno> {
        unix::fsync(dir)
    }
}

/// As a rename that replaces nothing, where there is none.
fn publish_by_link(dir: BorrowedFd<'_>, temporary: &str, name: &str) -> Result<(), Errno> {
    unix::linkat(dir, temporary, dir, name, AtFlags::empty())?;
    // The file has its name. The other one, if it stays, is a temporary file, which goes with its folder.
    let _ = unix::unlinkat(dir, temporary, AtFlags::empty());
    Ok(())
}

/// The kernel.
#[derive(Debug)]
pub(super) struct Real;

impl Disk for Real {}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_link_replaces_nothing_either() {
        let place = tempfile::tempdir().unwrap();
        let dir = fs::File::open(place.path()).unwrap();
        let temporary = |content: &str| fs::write(place.path().join(".tmp-x"), content).unwrap();
        temporary("one");
        publish_by_link(dir.as_fd(), ".tmp-x", "file").unwrap();
        assert!(!place.path().join(".tmp-x").exists());
        temporary("two");
        let again = publish_by_link(dir.as_fd(), ".tmp-x", "file");
        assert_eq!(again, Err(Errno::EXIST));
        assert_eq!(fs::read(place.path().join("file")).unwrap(), b"one");
    }
}
