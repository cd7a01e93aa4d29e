//! A store in a directory: local, or shared by network file system.
//!
//! Everything is done below one descriptor; names are single components, and no symbolic link is
//! followed. A create writes a temporary file, makes it durable and links it to its name: `link(2)`
//! is atomic on local file systems and on NFS, and fails where the name exists. Its answer can be
//! lost, or on NFS be wrong (a repeated request sees its own first success), so after an error the
//! name's inode is compared with the temporary file's.
//!
//! Bytes that `get` returns are durable: a record that a crash could still undo is no decision. Calls
//! block; a hung network file system blocks them for as long as it hangs.

mod listing;
mod upload;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use muster_checkpoint::dir::Dir;
use muster_checkpoint::source::{self, Readers};
use rustix::fs::{self as unix, AtFlags, FileType, Mode, OFlags, StatxFlags};
use rustix::io::Errno;

use crate::error::{Flavour, Kind, StoreError};
use crate::store::{Created, Head};

/// Temporary files begin so. No object's name begins with a dot.
const TEMPORARY: &str = ".muster-tmp-";
/// Temporary files older than this were left by a crash.
const ABANDONED_AFTER: i64 = 24 * 3600;
/// Names of one directory that are remembered as durable, the greatest: those are a log's newest. Of the others each
/// read syncs again.
const MAX_NAMES: usize = 1 << 16;
/// Directories that are remembered; beyond it all are forgotten, which costs only time.
const MAX_DIRECTORIES: usize = 256;

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// A directory's device and inode, and when it was made, where the file system says that: then one that was made anew
/// is another, though it often has the inode of one that was deleted.
type Identity = (u64, u64, Option<(i64, u32)>);

/// Names in a directory that are known to survive a power loss.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Names(BTreeSet<String>);

impl Names {
    fn of(names: impl IntoIterator<Item = String>) -> Self {
        let mut this = Self(names.into_iter().collect());
        this.forget();
        this
    }

    fn insert(&mut self, name: &str) {
        self.0.insert(name.to_owned());
        self.forget();
    }

    fn forget(&mut self) {
        while self.0.len() > MAX_NAMES {
            self.0.pop_first();
        }
    }

    /// It makes no sense to list such a directory: not all of it can be remembered.
    fn is_full(&self) -> bool {
        self.0.len() >= MAX_NAMES
    }
}

/// Directories and names known to survive a power loss.
#[derive(Debug, Default)]
struct Durable {
    /// Directories whose own names are durable, and those of all above them, with the names in them that are.
    names: HashMap<Identity, Names>,
    /// Directories that were searched for what a crash left.
    tidied: HashSet<Identity>,
}

/// A folder of a store, which need not exist yet.
#[derive(Clone, Debug)]
pub(crate) struct Folder {
    root: Arc<OwnedFd>,
    shown: PathBuf,
    /// Components below the root.
    below: Vec<String>,
    durable: Arc<Mutex<Durable>>,
    /// For reading data files, once the folder exists.
    reader: Arc<OnceLock<source::Directory>>,
}

impl Folder {
    /// Opens a directory by its path.
    pub(crate) fn open(path: &Path) -> Result<Self, StoreError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = unix::open(path, flags, Mode::empty()).map_err(|errno| {
            let kind = match errno {
                Errno::NOENT | Errno::NOTDIR => Kind::Setup,
                _ => kind_of(&errno.into()),
            };
            let place = path.display().to_string();
            StoreError {
                source: Some(errno.into()),
                ..StoreError::new(Flavour::Directory, kind, "open", place).said(match errno {
                    Errno::NOENT => "no such directory: create it".to_owned(),
                    Errno::NOTDIR => "it is no directory".to_owned(),
                    errno => words(&errno.into()),
                })
            }
        })?;
        Ok(Self::from_fd(fd, path))
    }

    /// From a descriptor that someone passed; `shown` is only repeated in errors.
    pub(crate) fn from_fd(fd: OwnedFd, shown: &Path) -> Self {
        Self {
            root: Arc::new(fd),
            shown: shown.to_owned(),
            below: Vec::new(),
            durable: Arc::default(),
            reader: Arc::default(),
        }
    }

    /// The folder of this name in it.
    pub(crate) fn within(&self, folder: &str) -> Self {
        let mut below = self.below.clone();
        below.extend(folder.split('/').map(str::to_owned));
        Self {
            shown: self.shown.join(folder),
            below,
            reader: Arc::default(),
            ..self.clone()
        }
    }

    /// The same folder, with a reader of its own.
    pub(crate) fn afresh(&self) -> Self {
        Self {
            reader: Arc::default(),
            ..self.clone()
        }
    }

    pub(crate) fn shown(&self, name: &str) -> String {
        let path = match name {
            "" => self.shown.clone(),
            name => self.shown.join(name),
        };
        path.display().to_string()
    }

    fn error(&self, doing: &'static str, name: &str, error: io::Error) -> StoreError {
        let kind = kind_of(&error);
        StoreError {
            source: Some(error),
            ..StoreError::new(Flavour::Directory, kind, doing, self.shown(name))
        }
        .with_source_said()
    }

    /// Creates the object, if nothing has its name. Two syncs.
    pub(crate) fn create(&self, name: &str, bytes: &[u8]) -> Result<Created, StoreError> {
        let failed = |error| self.error("create", name, error);
        let (dir, last) = self.make_parents(name).map_err(failed)?;
        let mut file = Temporary::new(dir.as_fd()).map_err(failed)?;
        file.write_all(bytes).map_err(failed)?;
        file.sync_all().map_err(failed)?;
        self.tidy(dir.as_fd(), &file);
        match self.publish(&dir, file, last) {
            Ok(true) => Ok(Created::Created),
            Ok(false) => match self.get(name, bytes.len() as u64) {
                // Perhaps a try of ours whose answer was lost, which makes it durable just now.
                Ok(there) if there == bytes => Ok(Created::Created),
                Ok(_) => Ok(Created::Exists),
                Err(error) if error.kind == Kind::TooLarge => Ok(Created::Exists),
                Err(error) => Err(StoreError {
                    unknown: true,
                    ..error
                }),
            },
            Err((unknown, error)) => Err(StoreError {
                unknown,
                ..failed(error)
            }),
        }
    }

    /// Writes the object in place of what has its name. Not synced: it is read while its writer lives,
    /// and means nothing afterwards.
    pub(crate) fn put(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let put = || -> io::Result<()> {
            let (dir, last) = self.make_parents(name)?;
            let mut file = Temporary::new(dir.as_fd())?;
            file.write_all(bytes)?;
            unix::renameat(&dir, file.name(), &dir, last)?;
            file.done();
            Ok(())
        };
        put().map_err(|error| self.error("write", name, error))
    }

    /// The whole object, which is durable. At most `limit` bytes.
    pub(crate) fn get(&self, name: &str, limit: u64) -> Result<Vec<u8>, StoreError> {
        let get = || {
            let (dir, last) = self.parents(name)?;
            let file = open_file(dir.as_fd(), last)?;
            let length = file.metadata()?.len();
            let mut bytes = Vec::with_capacity(usize::try_from(length.min(limit)).unwrap_or(0));
            file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
            match bytes.len() as u64 > limit {
                true => Ok(None),
                false => self.settle(&dir, name).map(|()| Some(bytes)),
            }
        };
        match get() {
            Ok(Some(bytes)) => Ok(bytes),
            Ok(None) => {
                let place = self.shown(name);
                let error = StoreError::new(Flavour::Directory, Kind::TooLarge, "read", place);
                Err(error.said(format!("at most {limit} bytes were expected")))
            }
            Err(error) => Err(self.error("read", name, error)),
        }
    }

    /// Fills `into` from byte `at` of the object.
    pub(crate) fn get_range(
        &self,
        name: &str,
        at: u64,
        into: &mut [u8],
        readers: Readers,
    ) -> Result<(), StoreError> {
        let read =
            |reader: &source::Directory| source::Source::read(reader, name, at, into, readers);
        (self.reader().and_then(read)).map_err(|error| self.error("read", name, error))
    }

    pub(crate) fn head(&self, name: &str) -> Result<Head, StoreError> {
        // Not by the reader, which keeps files open: this one may have been removed.
        let stat = || {
            let (dir, last) = self.parents(name)?;
            let stat = unix::statat(&dir, last, AtFlags::SYMLINK_NOFOLLOW)?;
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile => Ok(u64::try_from(stat.st_size).unwrap_or(0)),
                _ => Err(io::Error::other("not a plain file")),
            }
        };
        match stat() {
            Ok(size) => Ok(Head {
                size,
                checksum: None,
            }),
            Err(error) => Err(self.error("look at", name, error)),
        }
    }

    /// Removes the object, if it is there.
    pub(crate) fn delete(&self, name: &str) -> Result<(), StoreError> {
        if let Some(reader) = self.reader.get() {
            reader.forget(name);
        }
        let delete = || -> io::Result<()> {
            let (dir, last) = self.parents(name)?;
            unix::unlinkat(&dir, last, AtFlags::empty())?;
            let mut durable = self.durable();
            if let Some(names) = durable.names.get_mut(&identity(dir.as_fd())?) {
                names.0.remove(last);
            }
            Ok(())
        };
        match delete() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(self.error("delete", name, error)),
            Ok(()) => Ok(()),
        }
    }

    /// One of another user is as its owner made it.
    pub(crate) fn set_mode(&self, name: &str, mode: u32) {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        if let Ok(there) = unix::openat(&self.root, name, flags, Mode::empty()) {
            let _another_users = unix::fchmod(there, Mode::from_raw_mode(mode));
        }
    }

    /// Removes the folder with all that is in it, also what a crash left there.
    pub(crate) fn delete_folder(&self, folder: &str) -> Result<(), StoreError> {
        if let Some(reader) = self.reader.get() {
            reader.forget(folder);
        }
        let delete = || -> io::Result<()> {
            let (dir, last) = self.parents(folder)?;
            let removed = listing::remove(&dir, last);
            // What was known of them, also by a thread that looked meanwhile, may be told of other directories soon:
            // inodes are used again.
            *self.durable() = Durable::default();
            removed
        };
        match delete() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.map_err(|error| self.error("delete", folder, error)),
        }
    }

    /// The directory that holds the object of this name; what is missing of it is made.
    pub(crate) fn directory_of(&self, name: &str) -> Result<Dir, StoreError> {
        let made = self.make_parents(name);
        let (dir, _) = made.map_err(|error| self.error("store", name, error))?;
        let folders = split(name).0;
        Ok(Dir::from_fd(dir, &self.shown.join(folders)))
    }

    fn reader(&self) -> io::Result<&source::Directory> {
        if let Some(reader) = self.reader.get() {
            return Ok(reader);
        }
        let (dir, _) = self.parents(".")?;
        let reader = source::Directory::new(Dir::from_fd(dir, &self.shown), true);
        Ok(self.reader.get_or_init(|| reader))
    }

    /// All components from the root to these folders.
    fn components<'a>(&'a self, folders: &'a str) -> impl Iterator<Item = &'a str> {
        let folders = folders.split('/').filter(|part| !part.is_empty());
        self.below.iter().map(String::as_str).chain(folders)
    }

    /// The directory that holds the object of this name, and the name's last component.
    fn parents<'n>(&self, name: &'n str) -> io::Result<(OwnedFd, &'n str)> {
        let (parents, last) = split(name);
        let mut dir = self.root.try_clone()?;
        for part in self.components(parents) {
            dir = unix::openat(&dir, part, DIRECTORY, Mode::empty())?;
        }
        Ok((dir, last))
    }

    /// As [`Folder::parents`]; what is missing is made, and all are durable.
    fn make_parents<'n>(&self, name: &'n str) -> io::Result<(OwnedFd, &'n str)> {
        let (parents, last) = split(name);
        let mut dir = self.root.try_clone()?;
        for part in self.components(parents) {
            let made = match unix::mkdirat(&dir, part, Mode::from_raw_mode(0o755)) {
                Ok(()) => true,
                Err(Errno::EXIST) => false,
                Err(errno) => return Err(errno.into()),
            };
            let below = unix::openat(&dir, part, DIRECTORY, Mode::empty())?;
            let id = identity(below.as_fd())?;
            if made {
                // Known is one that was deleted, and had this inode.
                self.durable().names.remove(&id);
            }
            // Also where another process made it: it may not have come to its sync yet.
            if !self.knows(&id) {
                sync(dir.as_fd())?;
                self.remember(id, Names::default());
            }
            dir = below;
        }
        Ok((dir, last))
    }

    /// Makes a name that was just seen durable: whoever linked it may have died before its sync.
    fn settle(&self, dir: &OwnedFd, name: &str) -> io::Result<()> {
        let id = identity(dir.as_fd())?;
        let (parents, last) = split(name);
        let known = |durable: &Durable| durable.names.get(&id).is_some_and(|n| n.0.contains(last));
        if known(&self.durable()) {
            return Ok(());
        }
        let full = self.durable().names.get(&id).is_some_and(Names::is_full);
        // What is visible before the sync is durable after it.
        let visible = match full {
            true => vec![last.to_owned()],
            false => listing::names(dir)?,
        };
        // The directories above may be as new as the name.
        let mut above = self.root.try_clone()?;
        for part in self.components(parents) {
            let below = unix::openat(&above, part, DIRECTORY, Mode::empty())?;
            let id = identity(below.as_fd())?;
            let known = self.knows(&id);
            if !known || id.2.is_none() {
                sync(above.as_fd())?;
            }
            if !known {
                self.remember(id, Names::default());
            }
            above = below;
        }
        sync(dir.as_fd())?;
        // The lock ends with this statement.
        let names = self
            .durable()
            .names
            .get_mut(&id)
            .filter(|_| full)
            .map(|n| n.insert(last));
        if names.is_none() {
            self.remember(id, Names::of(visible));
        }
        Ok(())
    }

    /// Gives a temporary file its name. `Ok(false)`: another object has it. An error says whether
    /// the outcome is unknown.
    fn publish(
        &self,
        dir: &OwnedFd,
        file: Temporary<'_>,
        name: &str,
    ) -> Result<bool, (bool, io::Error)> {
        let linked = link(dir, &file, name)?;
        // Its other name ends before the sync, so that both are one commit.
        drop(file);
        if linked {
            let path = || format!("/proc/self/fd/{}/{name}", dir.as_raw_fd());
            muster_fault::point_on("log.linked", || {
                std::fs::read_to_string(path()).unwrap_or_default()
            });
            sync(dir.as_fd()).map_err(|error| (true, error))?;
            if let Ok(id) = identity(dir.as_fd())
                && let Some(names) = self.durable().names.get_mut(&id)
            {
                names.insert(name);
            }
        }
        Ok(linked)
    }

    /// Removes temporary files that a crash left long ago, judged by the store's own clock: the
    /// time of a file just written. Errors are no matter.
    fn tidy(&self, dir: BorrowedFd<'_>, fresh: &File) {
        let (Ok(id), Ok(now)) = (identity(dir), unix::fstat(fresh)) else {
            return;
        };
        {
            let mut durable = self.durable();
            if durable.tidied.len() >= MAX_DIRECTORIES {
                durable.tidied.clear();
            }
            if !durable.tidied.insert(id) {
                return;
            }
        }
        let Ok(entries) = unix::Dir::read_from(dir) else {
            return;
        };
        for entry in entries.map_while(Result::ok) {
            let name = entry.file_name();
            if name.to_bytes().starts_with(TEMPORARY.as_bytes())
                && let Ok(stat) = unix::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)
                && now.st_mtime.saturating_sub(stat.st_mtime) > ABANDONED_AFTER
            {
                let _ = unix::unlinkat(dir, name, AtFlags::empty());
            }
        }
    }

    fn durable(&self) -> std::sync::MutexGuard<'_, Durable> {
        self.durable.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a directory's own name is durable.
    fn knows(&self, id: &Identity) -> bool {
        self.durable().names.contains_key(id)
    }

    fn remember(&self, id: Identity, names: Names) {
        let mut durable = self.durable();
        if durable.names.len() >= MAX_DIRECTORIES && !durable.names.contains_key(&id) {
            durable.names.clear();
        }
        // What was known of one that was deleted is not so of this one.
        durable.names.insert(id, names);
    }
}

impl StoreError {
    fn with_source_said(self) -> Self {
        let said = self.source.as_ref().map(words);
        self.said(said.unwrap_or_default())
    }
}

/// A file that is being written, under a name of its own that ends with it.
struct Temporary<'d> {
    dir: BorrowedFd<'d>,
    name: Option<String>,
    file: File,
}

impl<'d> Temporary<'d> {
    fn new(dir: BorrowedFd<'d>) -> io::Result<Self> {
        let name = format!("{TEMPORARY}{:032x}", rand::random::<u128>());
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = unix::openat(dir, &*name, flags, Mode::from_raw_mode(0o644))?;
        Ok(Self {
            dir,
            name: Some(name),
            file: file.into(),
        })
    }

    fn name(&self) -> &str {
        self.name.as_deref().unwrap_or_default()
    }

    /// It has its last name.
    fn done(&mut self) {
        self.name = None;
    }
}

impl std::ops::Deref for Temporary<'_> {
    type Target = File;
    fn deref(&self) -> &File {
        &self.file
    }
}

impl std::ops::DerefMut for Temporary<'_> {
    fn deref_mut(&mut self) -> &mut File {
        &mut self.file
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            // One that stays behind is harmless: no reader looks at it.
            let _ = unix::unlinkat(self.dir, name.as_str(), AtFlags::empty());
        }
    }
}

fn link(dir: &OwnedFd, file: &Temporary<'_>, name: &str) -> Result<bool, (bool, io::Error)> {
    let error = match unix::linkat(dir, file.name(), dir, name, AtFlags::empty()) {
        Ok(()) => return Ok(true),
        Err(error) => error,
    };
    // Is the object under that name this one, whatever the answer said?
    let ours = unix::fstat(&file.file).map(|stat| (stat.st_dev, stat.st_ino));
    let there =
        unix::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).map(|stat| (stat.st_dev, stat.st_ino));
    match (error, ours, there) {
        (_, Ok(ours), Ok(there)) if ours == there => Ok(true),
        (Errno::EXIST, Ok(_), Ok(_)) => Ok(false),
        // Answers that mean that the request was never carried out.
        (
            Errno::PERM
            | Errno::ACCESS
            | Errno::ROFS
            | Errno::NOSPC
            | Errno::DQUOT
            | Errno::MLINK
            | Errno::NOENT
            | Errno::OPNOTSUPP
            | Errno::NOSYS
            | Errno::XDEV,
            Ok(_),
            Err(Errno::NOENT),
        ) => Err((false, error.into())),
        _ => Err((true, error.into())),
    }
}

/// The folders, and the last component.
fn split(name: &str) -> (&str, &str) {
    name.rsplit_once('/').unwrap_or(("", name))
}

fn open_file(dir: BorrowedFd<'_>, name: &str) -> io::Result<File> {
    // NONBLOCK: a FIFO of that name must not hang the caller.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = File::from(unix::openat(dir, name, flags, Mode::empty())?);
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("not a plain file")),
    }
}

fn identity(dir: BorrowedFd<'_>) -> io::Result<Identity> {
    match unix::statx(
        dir,
        "",
        AtFlags::EMPTY_PATH,
        StatxFlags::INO | StatxFlags::BTIME,
    ) {
        Ok(stat) => {
            let device = unix::makedev(stat.stx_dev_major, stat.stx_dev_minor);
            let said = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
            let made = (stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec);
            Ok((
                device,
                stat.stx_ino,
                Some(made).filter(|made| said && *made != (0, 0)),
            ))
        }
        // Also where a container's rules do not know the call.
        Err(Errno::NOSYS | Errno::PERM) => {
            let stat = unix::fstat(dir)?;
            Ok((stat.st_dev, stat.st_ino, None))
        }
        Err(errno) => Err(errno.into()),
    }
}

/// Makes a directory's entries durable. Where the file system knows no such request (EINVAL), its
/// answers to the calls before are all that can be had.
fn sync(dir: BorrowedFd<'_>) -> io::Result<()> {
    match unix::fsync(dir) {
        Ok(()) | Err(Errno::INVAL | Errno::ROFS) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// The system's message, with the user where rights are lacking.
fn words(error: &io::Error) -> String {
    match kind_of(error) {
        Kind::Denied => {
            let user = rustix::process::geteuid().as_raw();
            format!("{error}, as user {user}")
        }
        _ => error.to_string(),
    }
}

fn kind_of(error: &io::Error) -> Kind {
    match Errno::from_io_error(error) {
        Some(Errno::NOENT) => Kind::NotFound,
        Some(Errno::STALE) => Kind::Gone,
        Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => Kind::Full,
        Some(Errno::ROFS) => Kind::ReadOnly,
        Some(Errno::ACCESS) => Kind::Denied,
        Some(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS) => Kind::NoLinks,
        Some(Errno::TIMEDOUT) => Kind::Timeout,
        _ if error.kind() == io::ErrorKind::UnexpectedEof => Kind::Short,
        _ => Kind::Other,
    }
}

#[cfg(test)]
mod tests;
