//! A directory held by a descriptor, and the names below it.
//!
//! The process that opened the directory had the right to; what is done here cannot leave it: names are single
//! components without dots at their start, and symbolic links are not followed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{self as unix, FileType, Mode, OFlags};
use rustix::io::Errno;

/// First characters of a temporary file's name.
pub(crate) const TEMPORARY: &str = ".tmp-";

/// A directory.
#[derive(Clone, Debug)]
pub struct Dir {
    fd: Arc<OwnedFd>,
    /// Where it is, for people.
    shown: PathBuf,
}

impl Dir {
    /// Opens a directory by its path. For a process that acts with its user's rights.
    ///
    /// # Errors
    /// It is not there, no directory, or may not be read.
    pub fn open(path: &Path) -> io::Result<Self> {
        let fd = unix::open(
            path,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        Ok(Self::from_fd(fd, path))
    }

    /// From a descriptor that someone passed; `shown` is only repeated in errors.
    pub fn from_fd(fd: OwnedFd, shown: &Path) -> Self {
        Self {
            fd: Arc::new(fd),
            shown: shown.to_owned(),
        }
    }

    /// A path in it, for people.
    pub fn shown(&self, name: &str) -> PathBuf {
        self.shown.join(name)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The directory of this name in it, which is created if need be, and then durable.
    ///
    /// # Errors
    /// A name of more than one component, or the file system.
    pub fn make(&self, name: &str) -> io::Result<Self> {
        check_component(name)?;
        match unix::mkdirat(&*self.fd, name, Mode::from_raw_mode(0o777)) {
            // Whoever made it may have died before it was durable.
            Ok(()) | Err(Errno::EXIST) => unix::fsync(&*self.fd)?,
            Err(error) => return Err(error.into()),
        }
        self.enter(name)
    }

    /// The directory of this name in it.
    ///
    /// # Errors
    /// It is not there, or is something else.
    pub fn enter(&self, name: &str) -> io::Result<Self> {
        check_component(name)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = unix::openat(&*self.fd, name, flags, Mode::empty())?;
        Ok(Self::from_fd(fd, &self.shown(name)))
    }

    /// Opens a file below it for reading, `/` between components. Anything but a plain file is
    /// refused, before it is waited for.
    ///
    /// # Errors
    /// It is not there, or is something else.
    pub fn open_file(&self, path: &str) -> io::Result<OwnedFd> {
        let (parents, name) = match path.rsplit_once('/') {
            Some((parents, name)) => (Some(parents), name),
            None => (None, path),
        };
        let mut dir = self.clone();
        for parent in parents.iter().flat_map(|parents| parents.split('/')) {
            dir = dir.enter(parent)?;
        }
        check_component(name)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = unix::openat(&*dir.fd, name, flags, Mode::empty())?;
        match FileType::from_raw_mode(unix::fstat(&fd)?.st_mode) {
            FileType::RegularFile => Ok(fd),
            _ => Err(io::Error::other("not a plain file")),
        }
    }

    /// Names in it that do not begin with a dot, ascending.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in unix::Dir::read_from(&*self.fd)? {
            let entry = entry?;
            // Muster writes no name that is not UTF-8.
            if let Ok(name) = entry.file_name().to_str()
                && !name.starts_with('.')
            {
                names.push(name.to_owned());
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    /// Makes the names in it durable.
    ///
    /// # Errors
    /// The disk's.
    pub(crate) fn sync(&self) -> io::Result<()> {
        Ok(unix::fsync(&*self.fd)?)
    }
}

fn check_component(name: &str) -> io::Result<()> {
    if name.is_empty() || name.starts_with('.') || name.contains(['/', '\0']) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("`{name}` is not the name of a file in one directory"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn nothing_outside_is_reached() {
        let place = tempfile::tempdir().unwrap();
        fs::write(place.path().join("secret"), "x").unwrap();
        fs::create_dir(place.path().join("inside")).unwrap();
        let dir = Dir::open(&place.path().join("inside")).unwrap();
        std::os::unix::fs::symlink("../secret", place.path().join("inside/link")).unwrap();
        std::os::unix::fs::symlink("..", place.path().join("inside/up")).unwrap();
        for path in [
            "../secret",
            "link",
            "up/secret",
            "/etc/passwd",
            "",
            ".",
            "a/../../secret",
        ] {
            assert!(dir.open_file(path).is_err(), "{path}");
        }
        let deep = dir.make("a").unwrap().make("b").unwrap();
        assert!(dir.make("a").is_ok(), "it may be there already");
        fs::write(place.path().join("inside/a/b/file"), "x").unwrap();
        assert!(dir.open_file("a/b/file").is_ok());
        assert!(dir.open_file("a/b").is_err(), "a directory");
        assert_eq!(deep.names().unwrap(), ["file"]);
        assert_eq!(deep.shown("file"), place.path().join("inside/a/b/file"));
    }
}
