//! Contents of a directory.

use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{self as unix, AtFlags, FileType, Mode};
use rustix::io::Errno;

use super::{DIRECTORY, Folder};
use crate::error::StoreError;
use crate::name::{is_name, join};
use crate::store::Entry;

/// Directories below each other that are looked into.
const DEPTH: usize = 16;
/// Objects of one listing.
const MAX_OBJECTS: usize = 4 << 20;

/// Names in a directory that objects may have.
pub(super) fn names(dir: &OwnedFd) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in unix::Dir::read_from(dir)? {
        let entry = entry?;
        if let Ok(name) = entry.file_name().to_str()
            && is_name(name)
        {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

impl Folder {
    /// All objects in the folder and below, by ascending name.
    pub(crate) fn list(
        &self,
        folder: &str,
        each: &mut dyn FnMut(Entry) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        let mut found = Vec::new();
        let walked = self.enter(folder).and_then(|dir| match dir {
            Some(dir) => walk(&dir, folder, DEPTH, &mut found),
            None => Ok(()),
        });
        walked.map_err(|error| self.error("list", folder, error))?;
        // Not the order of the walk: `a-b` comes before `a/b`.
        found.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        for entry in found {
            if each(entry).is_break() {
                break;
            }
        }
        Ok(())
    }

    /// Names of the folders directly in this one, ascending.
    pub(crate) fn folders(&self, folder: &str) -> Result<Vec<String>, StoreError> {
        let folders = || {
            let Some(dir) = self.enter(folder)? else {
                return Ok(Vec::new());
            };
            let mut found = Vec::new();
            for name in names(&dir)? {
                match unix::statat(&dir, name.as_str(), AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(stat) if is_directory(&stat) => found.push(name),
                    Ok(_) | Err(Errno::NOENT) => {}
                    Err(errno) => return Err(errno.into()),
                }
            }
            found.sort_unstable();
            Ok(found)
        };
        folders().map_err(|error| self.error("list", folder, error))
    }

    /// The directory of this folder; none, where nothing was ever stored in it.
    fn enter(&self, folder: &str) -> io::Result<Option<OwnedFd>> {
        match self.parents(&join(folder, ".")) {
            Ok((dir, _)) => Ok(Some(dir)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Removes a directory of this name with all that is in it. Links are removed, not followed.
pub(super) fn remove(dir: &OwnedFd, name: &str) -> io::Result<()> {
    remove_below(dir, name, DEPTH)
}

fn remove_below(dir: &OwnedFd, name: &str, depth: usize) -> io::Result<()> {
    let inside = unix::openat(dir, name, DIRECTORY, Mode::empty())?;
    for entry in unix::Dir::read_from(&inside)? {
        let entry = entry?;
        let Ok(below) = entry.file_name().to_str() else {
            return Err(io::Error::other("a name in it is none of Muster's"));
        };
        if below == "." || below == ".." {
            continue;
        }
        let removed = match unix::unlinkat(&inside, below, AtFlags::empty()) {
            Err(Errno::ISDIR | Errno::PERM) if depth > 0 => remove_below(&inside, below, depth - 1),
            other => other.map_err(io::Error::from),
        };
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => muster_fault::point_on("store.unlinked", || below.to_owned()),
        }
    }
    Ok(unix::unlinkat(dir, name, AtFlags::REMOVEDIR)?)
}

fn is_directory(stat: &unix::Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

fn walk(dir: &OwnedFd, at: &str, depth: usize, found: &mut Vec<Entry>) -> io::Result<()> {
    for last in names(dir)? {
        let stat = match unix::statat(dir.as_fd(), last.as_str(), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            // It was deleted meanwhile.
            Err(Errno::NOENT) => continue,
            Err(errno) => return Err(errno.into()),
        };
        let name = join(at, &last);
        if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
            let size = u64::try_from(stat.st_size).unwrap_or(0);
            found.push(Entry { name, size });
        } else if is_directory(&stat) && depth > 0 {
            match unix::openat(dir, last.as_str(), DIRECTORY, Mode::empty()) {
                Ok(below) => walk(&below, &name, depth - 1, found)?,
                Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        if found.len() > MAX_OBJECTS {
            return Err(io::Error::other("more than 4 million files"));
        }
    }
    Ok(())
}
