//! A job's store on a local or shared directory.
//!
//! ```text
//! muster-store            {"format":1,"uuid":"<32 hex>"}, created once
//! <job>/log/<slot>.json   create-only, never changed, never deleted
//! ```
//! The launcher opens the directory and does all that is done in it, with its user's rights; the
//! agent asks for operations over the socket. Everything is done relative to the one descriptor:
//! every name is one component, and no symbolic link is followed.
//!
//! A create writes a temporary file, makes it durable and `link(2)`s it to its name: the link is
//! atomic on local file systems and on NFS, and fails when the name exists. Its answer can be lost
//! or, on NFS, be wrong (a repeated request sees its own first success, open(2) on `O_EXCL`), so
//! after an error the name is compared with the temporary file by inode. What cannot be settled is
//! [`Create::Unknown`]: only the same bytes may be tried again (RENDEZVOUS rule R12).
//!
//! On NFS a client may go on believing for up to a minute that a name does not exist (nfs(5),
//! `lookupcache`). That delays a reader, and never gives it a wrong answer; `lookupcache=positive`
//! avoids it.
//!
//! What [`StoreDir::read`] returns is durable: a record that a crash could still undo is no
//! decision. Calls block; a hung network file system blocks them for as long as it hangs.

mod beacon;

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read as _, Write};
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use muster_protocol::StoreUuid;
use rand::TryRngCore;
use rand::rngs::OsRng;
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// The most bytes of one object: what the log takes for an entry.
pub const MAX_OBJECT: usize = muster_protocol::storelog::MAX_ENTRY;
/// The most bytes of a job's name in the store.
pub const MAX_JOB: usize = 128;

const UUID_NAME: &str = "muster-store";
const LOG: &str = "log";
/// Temporary files carry this prefix; no job's name begins with a dot.
const TEMPORARY: &str = ".muster-tmp-";
const PROBE: &str = ".muster-probe-";
/// Slots that one fsync of a log may settle at once while the log is scanned.
const AHEAD: u64 = 256;
/// Temporary files older than this were left by a crash and are removed.
const ABANDONED_AFTER: Duration = Duration::from_secs(24 * 3600);
/// Jobs whose log is remembered as durable; beyond it all are forgotten, which costs only time.
const MAX_REMEMBERED: usize = 1024;

/// Why a directory cannot be a store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("{doing} the store failed: {source}; {}", fix(.source))]
    Io {
        doing: &'static str,
        source: io::Error,
    },
    #[error(
        "the store let one object be created twice: it cannot decide between two groups of nodes; use another file system for --store"
    )]
    NotCreateOnly,
    #[error(
        "whether the store refuses a second create could not be found out: {source}; try again, or use another file system for --store"
    )]
    Unsettled { source: io::Error },
    #[error(
        "the store's {UUID_NAME} is not readable as one ({0}): restore it from a backup, or use an empty directory"
    )]
    BadUuid(String),
    #[error("the system's random numbers cannot be read: {0}")]
    Random(String),
}

/// What to do about an error of a store, for people.
pub fn fix(error: &io::Error) -> String {
    if error.kind() == io::ErrorKind::PermissionDenied {
        return format!(
            "let user {} write there on every node",
            rustix::process::geteuid().as_raw()
        );
    }
    fix_by_kind(error).to_owned()
}

fn fix_by_kind(error: &io::Error) -> &'static str {
    if error.raw_os_error() == Some(Errno::PERM.raw_os_error())
        || error.raw_os_error() == Some(Errno::OPNOTSUPP.raw_os_error())
        || error.raw_os_error() == Some(Errno::NOSYS.raw_os_error())
    {
        return "its file system has no hard links: use another one for --store";
    }
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "free some space there",
        io::ErrorKind::ReadOnlyFilesystem => "mount it writable on every node",
        io::ErrorKind::NotADirectory => "give a directory as --store",
        io::ErrorKind::StaleNetworkFileHandle => {
            "the directory was removed or mounted anew: restart the job"
        }
        _ => "check the file system on this node",
    }
}

/// What is at a slot.
#[derive(Debug)]
pub enum Read {
    /// The whole object. It is durable.
    Found(Vec<u8>),
    /// Nothing is there now; a create that is under way may still land.
    NotFound,
    /// Not known: try again later.
    Failed(io::Error),
}

/// How a create ended.
#[derive(Debug)]
pub enum Create {
    /// This call created the object, and it is durable.
    Won,
    /// The name is taken by another call's object, perhaps with the same bytes: read it.
    AlreadyExists,
    /// Nothing was created and nothing will be.
    Failed(io::Error),
    /// It may or may not exist, now or later: read the slot; until something is read there, only
    /// the same bytes may be tried again.
    Unknown(io::Error),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct UuidFile {
    format: u32,
    uuid: String,
}

/// Which part of a log is known to survive a power loss.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Durable {
    /// Device and inode of the log's directory: a directory that was made anew starts from zero.
    directory: (u64, u64),
    /// Every slot from `from` up to, not including, `until`.
    from: u64,
    until: u64,
    /// What crashes left there has been looked at.
    tidied: bool,
}

/// An open store. Calls may come from several threads.
#[derive(Debug)]
pub struct StoreDir {
    root: OwnedFd,
    uuid: StoreUuid,
    latency: Duration,
    /// The store's own clock when it was opened (Unix seconds), and ours: the two are never
    /// compared, only ours says how much time has passed.
    opened: (i64, Instant),
    durable: Mutex<HashMap<String, Durable>>,
}

impl std::fmt::Debug for Durable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}..{}", self.from, self.until)
    }
}

impl StoreDir {
    /// Takes a directory's descriptor as a store: reads or creates its uuid, and refuses it where a
    /// second create of one name succeeds. Blocking.
    pub fn open(root: OwnedFd) -> Result<StoreDir, StoreError> {
        let io_error = |doing| move |source| StoreError::Io { doing, source };
        let status =
            rustix::fs::fstat(&root).map_err(|e| io_error("looking at")(io::Error::from(e)))?;
        if !rustix::fs::FileType::from_raw_mode(status.st_mode).is_dir() {
            return Err(io_error("opening")(io::ErrorKind::NotADirectory.into()));
        }
        // The launcher may have opened it with O_PATH, which cannot be fsynced or listed.
        let root = rustix::fs::openat(&root, ".", DIRECTORY, Mode::empty())
            .map_err(|e| io_error("opening")(e.into()))?;

        let probe = format!("{PROBE}{}", random_hex()?);
        let latency = judge(|| create(&root, &probe, b"probe"));
        let now = rustix::fs::statat(&root, &probe, AtFlags::SYMLINK_NOFOLLOW).map(|s| s.st_mtime);
        // A leftover is harmless, and its name is never used again.
        let _ = rustix::fs::unlinkat(&root, &probe, AtFlags::empty());
        Ok(StoreDir {
            latency: latency?,
            opened: (
                now.map_err(|e| io_error("looking at")(e.into()))?,
                Instant::now(),
            ),
            uuid: uuid(&root)?,
            root,
            durable: Mutex::new(HashMap::new()),
        })
    }

    /// Names the directory itself, whatever path leads to it.
    pub fn uuid(&self) -> StoreUuid {
        self.uuid
    }

    /// The time that one create took at the start.
    pub fn latency(&self) -> Duration {
        self.latency
    }

    /// Reads a slot of a job's log. Blocking.
    pub fn read(&self, job: &str, slot: u64) -> Read {
        match self.try_read(job, slot) {
            Ok(Some(bytes)) => Read::Found(bytes),
            Ok(None) => Read::NotFound,
            Err(e) => Read::Failed(e),
        }
    }

    /// Creates a slot of a job's log, if nothing is there. Blocking: two fsyncs.
    pub fn create(&self, job: &str, slot: u64, bytes: &[u8]) -> Create {
        match self.open_log_for_create(job) {
            Ok(log) => create(&log, &slot_name(slot), bytes),
            Err(e) => Create::Failed(e),
        }
    }

    fn try_read(&self, job: &str, slot: u64) -> io::Result<Option<Vec<u8>>> {
        check_job(job)?;
        let found = open_dir(&self.root, job)
            .and_then(|dir| open_dir(&dir, LOG))
            .and_then(|log| Ok((read_object(&log, &slot_name(slot))?, log)));
        match found {
            Ok((bytes, log)) => {
                self.settle(job, &log, slot)?;
                Ok(Some(bytes))
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => self.still_there().map(|()| None),
            Err(e) => Err(e),
        }
    }

    /// That nothing is found in a directory that was removed or emptied says nothing.
    fn still_there(&self) -> io::Result<()> {
        match rustix::fs::statat(&self.root, UUID_NAME, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(()),
            Err(Errno::NOENT) => Err(io::ErrorKind::StaleNetworkFileHandle.into()),
            Err(e) => Err(e.into()),
        }
    }

    /// Makes a slot that was just seen durable: whoever linked it may have died before its fsync.
    fn settle(&self, job: &str, log: &OwnedFd, slot: u64) -> io::Result<()> {
        let directory = identity(log)?;
        let known = self.remembered(job).filter(|d| d.directory == directory);
        if known.is_some_and(|d| (d.from..d.until).contains(&slot)) {
            return Ok(());
        }
        // Everything that is visible before the fsync is durable after it.
        let mut until = slot.saturating_add(1);
        while until - slot < AHEAD && exists(log, &slot_name(until)) {
            until += 1;
        }
        // The log itself may be as new as the slot.
        sync(&self.root)?;
        sync(&open_dir(&self.root, job)?)?;
        sync(log)?;
        let from = match known {
            Some(d) if d.until == slot => d.from,
            _ => slot,
        };
        self.remember(
            job,
            Durable {
                directory,
                from,
                until,
                tidied: known.is_some_and(|d| d.tidied),
            },
        );
        Ok(())
    }

    fn open_log_for_create(&self, job: &str) -> io::Result<OwnedFd> {
        check_job(job)?;
        self.still_there()?;
        let dir = make_dir(&self.root, job)?;
        let log = make_dir(&dir, LOG)?;
        let directory = identity(&log)?;
        let known = self.remembered(job).filter(|d| d.directory == directory);
        if known.is_some_and(|d| d.tidied) {
            return Ok(log);
        }
        if known.is_none() {
            // Also where another call made them: it may not have come to its fsync yet.
            sync(&self.root)?;
            sync(&dir)?;
        }
        self.tidy(&log);
        let (from, until) = known.map_or((0, 0), |d| (d.from, d.until));
        self.remember(
            job,
            Durable {
                directory,
                from,
                until,
                tidied: true,
            },
        );
        Ok(log)
    }

    /// Removes temporary files that a crash left long ago. One that belongs to a writer which only
    /// hangs makes that writer's create fail before anything is created. Errors are no matter.
    fn tidy(&self, log: &OwnedFd) {
        let (store_time, ours) = self.opened;
        let passed = i64::try_from(ours.elapsed().as_secs()).unwrap_or(i64::MAX);
        let limit = i64::try_from(ABANDONED_AFTER.as_secs()).unwrap_or(i64::MAX);
        let Ok(entries) = rustix::fs::Dir::read_from(log) else {
            return;
        };
        for entry in entries.map_while(Result::ok) {
            let name = entry.file_name();
            if !name.to_bytes().starts_with(TEMPORARY.as_bytes()) {
                continue;
            }
            let age = rustix::fs::statat(log, name, AtFlags::SYMLINK_NOFOLLOW)
                .map(|s| store_time.saturating_add(passed).saturating_sub(s.st_mtime));
            if age.is_ok_and(|age| age > limit) {
                let _ = rustix::fs::unlinkat(log, name, AtFlags::empty());
            }
        }
    }

    fn remembered(&self, job: &str) -> Option<Durable> {
        let map = self.durable.lock().unwrap_or_else(PoisonError::into_inner);
        map.get(job).copied()
    }

    fn remember(&self, job: &str, durable: Durable) {
        let mut map = self.durable.lock().unwrap_or_else(PoisonError::into_inner);
        if map.len() >= MAX_REMEMBERED {
            map.clear();
        }
        map.insert(job.to_owned(), durable);
    }
}

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// Eight digits keep a listing in order; beyond them names only grow.
fn slot_name(slot: u64) -> String {
    format!("{slot:08}.json")
}

/// The folder of a job in its store: its id where that is a plain file name, else a digest of it.
pub fn job_folder(id: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if id.chars().all(plain) && !id.starts_with('.') {
        id.to_owned()
    } else {
        let hash = blake3::hash(id.as_bytes()).to_hex();
        format!("job-{}", hash.get(..32).unwrap_or_default())
    }
}

fn check_job(job: &str) -> io::Result<()> {
    let fine = (1..=MAX_JOB).contains(&job.len())
        && !job.starts_with('.')
        && job != UUID_NAME
        && !job.chars().any(|c| c == '/' || c.is_control());
    if fine {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidInput,
        format!(
            "{:?} cannot name a job in a store: no slash, no dot in front, at most {MAX_JOB} bytes",
            job.chars().take(MAX_JOB).collect::<String>()
        ),
    ))
}

fn random_hex() -> Result<String, StoreError> {
    let mut bytes = [0; 16];
    OsRng
        .try_fill_bytes(&mut bytes)
        .map_err(|e| StoreError::Random(e.to_string()))?;
    Ok(StoreUuid(bytes).hex())
}

fn uuid(root: &OwnedFd) -> Result<StoreUuid, StoreError> {
    let io_error = |doing| move |source| StoreError::Io { doing, source };
    let mut fresh = serde_json::to_vec(&UuidFile {
        format: 1,
        uuid: random_hex()?,
    })
    .map_err(|e| StoreError::BadUuid(e.to_string()))?;
    fresh.push(b'\n');
    if !exists(root, UUID_NAME) {
        match create(root, UUID_NAME, &fresh) {
            Create::Won | Create::AlreadyExists => {}
            Create::Failed(e) | Create::Unknown(e) => return Err(io_error("naming")(e)),
        }
    }
    // Read back in every case: what others will read is what counts.
    let bytes = read_object(root, UUID_NAME).map_err(io_error("reading the name of"))?;
    sync(root).map_err(io_error("naming"))?;
    let file: UuidFile =
        serde_json::from_slice(&bytes).map_err(|e| StoreError::BadUuid(e.to_string()))?;
    if file.format != 1 {
        return Err(StoreError::BadUuid(format!("format {}", file.format)));
    }
    StoreUuid::from_hex(&file.uuid)
        .filter(|u| !u.is_zero())
        .ok_or_else(|| StoreError::BadUuid("its uuid is not 32 hexadecimal digits".to_owned()))
}

/// Creates one name twice and says whether the store can be trusted, and how long one create takes.
fn judge(mut create: impl FnMut() -> Create) -> Result<Duration, StoreError> {
    let from = Instant::now();
    match create() {
        Create::Won => {}
        Create::AlreadyExists => {
            // The name was drawn at random a moment ago.
            return Err(StoreError::Unsettled {
                source: io::ErrorKind::AlreadyExists.into(),
            });
        }
        Create::Failed(source) => {
            return Err(StoreError::Io {
                doing: "writing to",
                source,
            });
        }
        Create::Unknown(source) => return Err(StoreError::Unsettled { source }),
    }
    let latency = from.elapsed();
    match create() {
        Create::AlreadyExists => Ok(latency),
        Create::Won => Err(StoreError::NotCreateOnly),
        Create::Failed(source) | Create::Unknown(source) => Err(StoreError::Unsettled { source }),
    }
}

/// Creates `name` in `dir` with these bytes, if it does not exist.
fn create(dir: &OwnedFd, name: &str, bytes: &[u8]) -> Create {
    if bytes.len() > MAX_OBJECT {
        return Create::Failed(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!(
                "the object has {} bytes, the limit is {MAX_OBJECT}",
                bytes.len()
            ),
        ));
    }
    let temporary = match random_hex() {
        Ok(hex) => format!("{TEMPORARY}{hex}"),
        Err(e) => return Create::Failed(io::Error::other(e.to_string())),
    };
    let outcome = match write_durably(dir, &temporary, bytes) {
        Ok(file) => link(dir, &temporary, &file, name),
        Err(e) => Create::Failed(e),
    };
    // A temporary file that stays behind is harmless: no reader looks at it.
    let _ = rustix::fs::unlinkat(dir, &temporary, AtFlags::empty());
    match outcome {
        // The new name, and the old one's end, in one commit.
        Create::Won => match sync(dir) {
            Ok(()) => Create::Won,
            Err(e) => Create::Unknown(e),
        },
        other => other,
    }
}

fn write_durably(dir: &OwnedFd, name: &str, bytes: &[u8]) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH;
    let mut file = File::from(rustix::fs::openat(dir, name, flags, mode)?);
    file.write_all(bytes)?;
    file.sync_all()?;
    Ok(file)
}

fn link(dir: &OwnedFd, temporary: &str, file: &File, name: &str) -> Create {
    let error = match rustix::fs::linkat(dir, temporary, dir, name, AtFlags::empty()) {
        Ok(()) => return Create::Won,
        Err(e) => e,
    };
    // Is the object under that name ours, whatever the answer said?
    let ours = rustix::fs::fstat(file).map(|s| (s.st_dev, s.st_ino));
    let there =
        rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).map(|s| (s.st_dev, s.st_ino));
    match (error, ours, there) {
        (_, Ok(ours), Ok(there)) if ours == there => Create::Won,
        (Errno::EXIST, Ok(_), Ok(_)) => Create::AlreadyExists,
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
        ) => Create::Failed(error.into()),
        _ => Create::Unknown(error.into()),
    }
}

fn read_object(dir: &OwnedFd, name: &str) -> io::Result<Vec<u8>> {
    // NONBLOCK: a FIFO of that name must not hang the launcher.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = File::from(rustix::fs::openat(dir, name, flags, Mode::empty())?);
    let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("{name} {what}"));
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(bad("is not a regular file"));
    }
    let too_large = || bad("is larger than 512 KiB: it is none of Muster's objects");
    if metadata.len() > MAX_OBJECT as u64 {
        return Err(too_large());
    }
    let mut bytes = Vec::with_capacity(usize::try_from(metadata.len()).unwrap_or(0));
    file.take(MAX_OBJECT as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > MAX_OBJECT {
        return Err(too_large());
    }
    Ok(bytes)
}

fn open_dir(parent: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(parent, name, DIRECTORY, Mode::empty())?)
}

fn make_dir(parent: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
    match open_dir(parent, name) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        other => return other,
    }
    let mode = Mode::RWXU | Mode::RGRP | Mode::XGRP | Mode::ROTH | Mode::XOTH;
    match rustix::fs::mkdirat(parent, name, mode) {
        Ok(()) | Err(Errno::EXIST) => open_dir(parent, name),
        Err(e) => Err(e.into()),
    }
}

fn exists(dir: &OwnedFd, name: &str) -> bool {
    rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).is_ok()
}

fn identity(dir: &OwnedFd) -> io::Result<(u64, u64)> {
    let status = rustix::fs::fstat(dir)?;
    Ok((status.st_dev, status.st_ino))
}

/// Makes a directory's entries durable. Where the file system knows no such request (EINVAL), its
/// answers to the calls before are all that can be had.
fn sync(dir: &OwnedFd) -> io::Result<()> {
    match rustix::fs::fsync(dir) {
        Ok(()) | Err(Errno::INVAL | Errno::ROFS) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests;
