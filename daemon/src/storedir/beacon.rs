//! The leader's beacon (R14): a small file that moves while a leader lives. It is overwritten and
//! not flushed: what a power loss takes from it is only a sign of life.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags};

use super::{StoreDir, check_job, make_dir, open_dir};

const NAME: &str = "beacon";
const NEXT: &str = ".beacon-next";

impl StoreDir {
    /// Blocking.
    pub fn write_beacon(&self, job: &str, value: u64) -> io::Result<()> {
        check_job(job)?;
        self.still_there()?;
        let dir = make_dir(&self.root, job)?;
        let flags = OFlags::WRONLY
            .union(OFlags::CREATE)
            .union(OFlags::TRUNC)
            .union(OFlags::NOFOLLOW)
            .union(OFlags::CLOEXEC);
        let file = rustix::fs::openat(&dir, NEXT, flags, Mode::from_raw_mode(0o644))?;
        let text = format!("{value:016x}");
        rustix::io::write(&file, text.as_bytes())?;
        rustix::fs::renameat(&dir, NEXT, &dir, NAME)?;
        Ok(())
    }

    /// The value last written; `None` when there is none, or only a torn one. Blocking.
    pub fn read_beacon(&self, job: &str) -> io::Result<Option<u64>> {
        check_job(job)?;
        match open(&self.root, job) {
            Ok(file) => {
                let mut bytes = [0u8; 16];
                let n = rustix::io::read(&file, &mut bytes)?;
                let text = bytes.get(..n).and_then(|b| std::str::from_utf8(b).ok());
                Ok(text.and_then(|t| u64::from_str_radix(t, 16).ok()))
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => self.still_there().map(|()| None),
            Err(e) => Err(e),
        }
    }
}

fn open(root: &OwnedFd, job: &str) -> io::Result<OwnedFd> {
    let dir = open_dir(root, job)?;
    let flags = OFlags::RDONLY
        .union(OFlags::NOFOLLOW)
        .union(OFlags::CLOEXEC);
    Ok(rustix::fs::openat(&dir, NAME, flags, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_beacon_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let root = OwnedFd::from(std::fs::File::open(folder.path()).unwrap());
        let store = StoreDir::open(root).unwrap();
        assert_eq!(store.read_beacon("job").unwrap(), None);
        for value in [1, u64::MAX, 0] {
            store.write_beacon("job", value).unwrap();
            assert_eq!(store.read_beacon("job").unwrap(), Some(value));
        }
        std::fs::write(folder.path().join("job/beacon"), b"not hex").unwrap();
        assert_eq!(store.read_beacon("job").unwrap(), None);
        assert!(store.write_beacon("../up", 1).is_err());
    }
}
