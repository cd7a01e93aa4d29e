//! The state directory: what an agent must still know after a restart.
//!
//! ```text
//! lock       held exclusively (flock) while an agent runs; contains its pid
//! identity   Ed25519 secret key
//! state-id   8 bytes, drawn when the directory is created
//! boot       u64 little-endian, counts the agent's starts
//! clock      the host's boot id: which clock stored moments are of
//! peers      addresses of peers, only a hint
//! events     and events.1: what happened to jobs, for people
//! past       lineages that were voted in, of jobs whose blobs are gone
//! jobs/<hex> one blob per job: records and votes
//! ```
//! Never does it forget a vote silently. Where the directory cannot prove that it still has every
//! vote (a job's blob, `boot` or `state-id` is damaged or gone), a new state id is drawn before
//! anything else happens: the agent is then another voter, and the lost votes are lost instead of
//! being cast twice (RENDEZVOUS rule R5).
//!
//! A restored backup or a cloned disk cannot be told from the original; neither must be started.

mod blob;
mod dir;
mod place;

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use libp2p::identity::Keypair;
use muster_protocol::{Boot, NodeId, StateId};
use rand::TryRngCore;
use rand::rngs::OsRng;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

pub use blob::BlobError;
pub use dir::MAX_BLOB;
use dir::{BlobDir, Loaded, SaveError};
pub use place::check as refused_file_system;

const LOCK: &str = "lock";
const IDENTITY: &str = "identity";
const STATE_ID: &str = "state-id";
const BOOT: &str = "boot";
const CLOCK: &str = "clock";
const PEERS: &str = "peers";
const PAST: &str = "past";
const JOBS: &str = "jobs";

/// Why the state directory cannot be used, or a blob not be saved.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error(
        "another agent{} uses the state directory {}: stop it, or give this agent its own --state-dir",
        .pid.map(|p| format!(" (pid {p})")).unwrap_or_default(), .path.display()
    )]
    InUse {
        path: PathBuf,
        pid: Option<u32>,
        /// When the other agent started, in Unix milliseconds.
        since_ms: Option<u64>,
    },
    #[error(
        "the state directory {} is on {kind}: a network file system can be locked from two hosts at once; put --state-dir on a local disk",
        .path.display()
    )]
    NetworkFileSystem { path: PathBuf, kind: String },
    #[error(
        "{} is damaged: {why}; restore this file from a backup, or move the whole directory away to start as a new node",
        .path.display()
    )]
    Damaged { path: PathBuf, why: BlobError },
    #[error("{doing} {} failed: {source}; {}", .path.display(), fix(.source))]
    Io {
        doing: &'static str,
        path: PathBuf,
        source: io::Error,
        /// Whether the old content is certainly still there.
        unchanged: bool,
    },
    #[error("{name:?} cannot name a job's blob: give 1 to 64 lower-case hexadecimal digits")]
    Name { name: String },
    #[error("the system's random numbers cannot be read: {0}")]
    Random(String),
}

impl StateError {
    /// The system's error number; 0 where it named none.
    pub fn errno(&self) -> i32 {
        match self {
            StateError::Io { source, .. } => source.raw_os_error().unwrap_or(0),
            _ => 0,
        }
    }
}

/// Advice to the person who reads an error.
fn fix(error: &io::Error) -> String {
    let text = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free some space there (the agent needs a few MiB)"
        }
        io::ErrorKind::ReadOnlyFilesystem => {
            "mount it writable, or choose a writable --state-dir (under systemd: StateDirectory=muster)"
        }
        io::ErrorKind::PermissionDenied => {
            return format!(
                "make it writable for user {}, or choose another --state-dir",
                rustix::process::geteuid().as_raw()
            );
        }
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            "a file is in the way: move it, or choose another --state-dir"
        }
        io::ErrorKind::FileTooLarge => "raise the limit on file sizes (ulimit -f)",
        _ => "check the disk (dmesg), or choose another --state-dir",
    };
    text.to_owned()
}

/// A file that was found damaged and put aside. To be logged as an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quarantined {
    /// Where the file was.
    pub path: PathBuf,
    /// Where it is now, for a person to look at.
    pub kept_as: PathBuf,
    pub why: BlobError,
    /// The state id was drawn anew, because the file may have held votes.
    pub votes_lost: bool,
}

impl fmt::Display for Quarantined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} was damaged ({}) and is kept as {}",
            self.path.display(),
            self.why,
            self.kept_as.display()
        )?;
        if self.votes_lost {
            f.write_str(
                "; it may have held votes, so this agent counts as a new voter from now on",
            )?;
        }
        Ok(())
    }
}

/// An open state directory. The lock is held until this is dropped.
pub struct StateDir {
    path: PathBuf,
    root: BlobDir,
    jobs: BlobDir,
    identity: Keypair,
    node: NodeId,
    state_id: StateId,
    boot: Boot,
    loaded: Vec<(String, Vec<u8>)>,
    past: Vec<u8>,
    quarantined: Vec<Quarantined>,
    _lock: File,
}

impl fmt::Debug for StateDir {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StateDir")
            .field("path", &self.path)
            .field("node", &self.node)
            .field("state_id", &self.state_id)
            .field("boot", &self.boot)
            .finish_non_exhaustive()
    }
}

impl StateDir {
    /// Opens the directory, creates it where it is missing, and counts this start. Blocking.
    pub fn open(path: &Path) -> Result<StateDir, StateError> {
        let at = |doing, name: &str| {
            let path = path.join(name);
            move |source: io::Error| StateError::Io {
                doing,
                path,
                source,
                unchanged: true,
            }
        };
        let mut root = open_root(path)?;
        if let Some(kind) =
            place::refused_file_system(root.fd()).map_err(|e| at("looking at", "")(e.into()))?
        {
            return Err(StateError::NetworkFileSystem {
                path: path.to_owned(),
                kind,
            });
        }
        let lock = take_lock(path, &root)?;
        match rustix::fs::mkdirat(root.fd(), JOBS, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(at("creating", JOBS)(e.into())),
        }
        let jobs = rustix::fs::openat(root.fd(), JOBS, DIRECTORY, Mode::empty())
            .map(BlobDir::new)
            .map_err(|e| at("opening", JOBS)(e.into()))?;
        root.settle().map_err(at("cleaning", ""))?;
        jobs.settle().map_err(at("cleaning", JOBS))?;

        let (identity, node) = open_identity(path, &mut root)?;
        let mut state = StateDir {
            path: path.to_owned(),
            root,
            jobs,
            identity,
            node,
            // Known once the votes are read, below.
            state_id: StateId::ZERO,
            boot: Boot(0),
            loaded: Vec::new(),
            past: Vec::new(),
            quarantined: Vec::new(),
            _lock: lock,
        };
        state.open_votes()?;
        Ok(state)
    }

    /// The key that this node proves itself with.
    pub fn identity(&self) -> &Keypair {
        &self.identity
    }

    /// The public half of [`identity`](Self::identity).
    pub fn node_id(&self) -> NodeId {
        self.node
    }

    pub fn state_id(&self) -> StateId {
        self.state_id
    }

    /// The number of this start: 1 for the first since the state id was drawn.
    pub fn boot(&self) -> Boot {
        self.boot
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the directory and all that is in it. A process that opens it meanwhile finds it in use, or
    /// makes a new one: another node and another voter.
    pub fn remove_all(self) -> io::Result<()> {
        let mut aside = self.path.clone().into_os_string();
        aside.push(format!(".gone-{}", std::process::id()));
        std::fs::rename(&self.path, &aside)?;
        // The lock is held until all is gone.
        std::fs::remove_dir_all(&aside)
    }

    /// Files that were put aside when the directory was opened.
    pub fn quarantined(&self) -> &[Quarantined] {
        &self.quarantined
    }

    /// The jobs' blobs as they were when the directory was opened, by name. To be called once: the
    /// memory goes to the caller.
    pub fn load_all(&mut self) -> Vec<(String, Vec<u8>)> {
        std::mem::take(&mut self.loaded)
    }

    /// Replaces a job's blob. When this returns `Ok`, the blob survives a power loss. Blocking: one
    /// flush of data and one journal commit.
    pub fn save(&mut self, name: &str, bytes: &[u8]) -> Result<(), StateError> {
        check_name(name)?;
        let path = self.path.join(JOBS).join(name);
        save(&mut self.jobs, path, name, bytes)
    }

    /// Removes a job's blob, durably. A missing one is no error.
    pub fn remove(&mut self, name: &str) -> Result<(), StateError> {
        check_name(name)?;
        self.jobs.remove(name).map_err(|source| StateError::Io {
            doing: "removing",
            path: self.path.join(JOBS).join(name),
            source,
            unchanged: false,
        })
    }

    /// Whether stored moments are of the clock that runs here. A boot, and another host, have another one. Blocking.
    pub fn is_of_this_clock(&mut self) -> Result<bool, StateError> {
        let noted = self.load_root(CLOCK, false)?;
        Ok(noted.is_some() && noted == clock_id())
    }

    /// Everything that is stored is of this clock from now on.
    pub fn note_clock(&mut self) -> Result<(), StateError> {
        self.save_clock(&clock_id().unwrap_or_default())
    }

    pub(crate) fn save_clock(&mut self, id: &[u8]) -> Result<(), StateError> {
        save(&mut self.root, self.path.join(CLOCK), CLOCK, id)
    }

    /// Replaces what is remembered of jobs whose blobs go next.
    pub fn save_past(&mut self, bytes: &[u8]) -> Result<(), StateError> {
        save(&mut self.root, self.path.join(PAST), PAST, bytes)
    }

    /// The bytes that were last saved of them under the present state id; none where nothing was. To be called
    /// once: the memory goes to the caller.
    pub fn load_past(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.past)
    }

    /// Draws a new state id, for votes may be lost with these blobs: they are put aside. Nothing that was
    /// voted under the old one is asked for any more.
    pub fn renew(&mut self, unreadable: &[&str]) -> Result<(), StateError> {
        self.draw()?;
        // Only now, with the new state id on the disk, may they go out of sight.
        for name in unreadable {
            check_name(name)?;
            let path = self.path.join(JOBS).join(name);
            self.quarantined.push(Quarantined {
                path,
                kept_as: PathBuf::new(),
                why: BlobError::Content,
                votes_lost: true,
            });
        }
        self.quarantine_jobs()?;
        self.count_start()
    }

    fn draw(&mut self) -> Result<(), StateError> {
        let id = random::<8>()?;
        save(&mut self.root, self.path.join(STATE_ID), STATE_ID, &id)?;
        self.root.remove(PAST).map_err(|source| StateError::Io {
            doing: "removing",
            path: self.path.join(PAST),
            source,
            unchanged: false,
        })?;
        (self.state_id, self.boot) = (StateId(id), Boot(1));
        Ok(())
    }

    fn count_start(&mut self) -> Result<(), StateError> {
        let boot = self.boot.0.to_le_bytes();
        save(&mut self.root, self.path.join(BOOT), BOOT, &boot)
    }

    /// Replaces the remembered peers.
    pub fn save_peers(&mut self, bytes: &[u8]) -> Result<(), StateError> {
        save(&mut self.root, self.path.join(PEERS), PEERS, bytes)
    }

    /// The remembered peers, if any. A damaged file is put aside and counts as none: peers are
    /// only a hint.
    pub fn load_peers(&mut self) -> Result<Option<Vec<u8>>, StateError> {
        self.load_root(PEERS, false)
    }

    /// Reads state id, boot counter and jobs, draws a new state id where a vote may be missing, and
    /// counts this start.
    fn open_votes(&mut self) -> Result<(), StateError> {
        let whole = |bytes: Option<Vec<u8>>| bytes.and_then(|b| <[u8; 8]>::try_from(b).ok());
        let state_id = whole(self.load_root(STATE_ID, true)?);
        let boot = whole(self.load_root(BOOT, true)?);
        let damaged = self.quarantined.len();
        let past = self.load_root(PAST, true)?;
        let votes_lost = self.quarantined.len() > damaged;
        let votes_lost = self.load_jobs()? || votes_lost;

        match (state_id, boot) {
            (Some(id), Some(boot)) if !votes_lost => {
                self.past = past.unwrap_or_default();
                self.state_id = StateId(id);
                self.boot = Boot(u64::from_le_bytes(boot).saturating_add(1));
            }
            _ => self.draw()?,
        }
        // Only now, with the new state id on the disk, may the damaged blobs go out of sight.
        self.quarantine_jobs()?;
        self.count_start()
    }

    fn load_root(&mut self, name: &str, votes: bool) -> Result<Option<Vec<u8>>, StateError> {
        match self.root.load(name).map_err(|e| self.reading(name, e))? {
            Loaded::Whole(bytes) => Ok(Some(bytes)),
            Loaded::Missing => Ok(None),
            Loaded::Damaged(why) => {
                let to = self
                    .root
                    .quarantine(name)
                    .map_err(|e| self.reading(name, e))?;
                self.quarantined.push(Quarantined {
                    path: self.path.join(name),
                    kept_as: self.path.join(to),
                    why,
                    votes_lost: votes,
                });
                Ok(None)
            }
        }
    }

    /// Reads every job; true when a blob that may hold votes is damaged. Damaged ones are noted
    /// with `kept_as` still empty.
    fn load_jobs(&mut self) -> Result<bool, StateError> {
        let names = self.jobs.names().map_err(|e| self.reading(JOBS, e))?;
        let mut votes_lost = false;
        for name in names.into_iter().filter(|n| !dir::is_quarantined(n)) {
            let path = self.path.join(JOBS).join(&name);
            let ours = check_name(&name).is_ok();
            let why = match self.jobs.load(&name) {
                Ok(Loaded::Whole(bytes)) if ours => {
                    self.loaded.push((name, bytes));
                    continue;
                }
                Ok(Loaded::Missing) => continue,
                Ok(Loaded::Whole(_)) => BlobError::Checksum,
                Ok(Loaded::Damaged(why)) => why,
                Err(e) => return Err(self.reading(&format!("{JOBS}/{name}"), e)),
            };
            votes_lost |= ours;
            self.quarantined.push(Quarantined {
                path,
                kept_as: PathBuf::new(),
                why,
                votes_lost: ours,
            });
        }
        Ok(votes_lost)
    }

    fn quarantine_jobs(&mut self) -> Result<(), StateError> {
        let jobs = self.path.join(JOBS);
        for entry in &mut self.quarantined {
            if !entry.kept_as.as_os_str().is_empty() {
                continue;
            }
            let name = entry.path.file_name().unwrap_or_default().to_string_lossy();
            let to = self
                .jobs
                .quarantine(&name)
                .map_err(|source| StateError::Io {
                    doing: "putting aside",
                    path: entry.path.clone(),
                    source,
                    unchanged: true,
                })?;
            entry.kept_as = jobs.join(to);
        }
        Ok(())
    }

    fn reading(&self, name: &str, source: io::Error) -> StateError {
        StateError::Io {
            doing: "reading",
            path: self.path.join(name),
            source,
            unchanged: true,
        }
    }
}

/// Reads the key, or draws it where there is none.
fn open_identity(path: &Path, root: &mut BlobDir) -> Result<(Keypair, NodeId), StateError> {
    let path = path.join(IDENTITY);
    let damaged = |why| StateError::Damaged {
        path: path.clone(),
        why,
    };
    let loaded = root.load(IDENTITY).map_err(|source| StateError::Io {
        doing: "reading",
        path: path.clone(),
        source,
        unchanged: true,
    })?;
    let mut secret = match loaded {
        Loaded::Whole(secret) => secret,
        Loaded::Missing => {
            let secret = random::<32>()?.to_vec();
            save(root, path.clone(), IDENTITY, &secret)?;
            secret
        }
        // Not replaced on our own: a node that changes its name without being told to is worse
        // than one that does not start.
        Loaded::Damaged(why) => return Err(damaged(why)),
    };
    let key = libp2p::identity::ed25519::SecretKey::try_from_bytes(&mut secret)
        .map_err(|_wrong_length| damaged(BlobError::Checksum))?;
    let key = libp2p::identity::ed25519::Keypair::from(key);
    let node = NodeId(key.public().to_bytes());
    Ok((Keypair::from(key), node))
}

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC);

/// The clock of this boot of this host; none where the kernel does not tell.
fn clock_id() -> Option<Vec<u8>> {
    std::fs::read("/proc/sys/kernel/random/boot_id").ok()
}

fn check_name(name: &str) -> Result<(), StateError> {
    let digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    if (1..=64).contains(&name.len()) && name.bytes().all(digit) {
        return Ok(());
    }
    Err(StateError::Name {
        name: name.chars().take(80).collect(),
    })
}

fn random<const N: usize>() -> Result<[u8; N], StateError> {
    let mut bytes = [0; N];
    OsRng
        .try_fill_bytes(&mut bytes)
        .map_err(|e| StateError::Random(e.to_string()))?;
    Ok(bytes)
}

fn save(dir: &mut BlobDir, path: PathBuf, name: &str, bytes: &[u8]) -> Result<(), StateError> {
    dir.save(name, bytes).map_err(|e| {
        let (source, unchanged) = match e {
            SaveError::Unchanged(e) => (e, true),
            SaveError::Uncertain(e) => (e, false),
        };
        StateError::Io {
            doing: "saving",
            path,
            source,
            unchanged,
        }
    })
}

fn open_root(path: &Path) -> Result<BlobDir, StateError> {
    use std::os::unix::fs::DirBuilderExt;
    let io_error = |doing| {
        move |source: io::Error| StateError::Io {
            doing,
            path: path.to_owned(),
            source,
            unchanged: true,
        }
    };
    if !path.is_dir() {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .map_err(io_error("creating"))?;
        // The new entry must be as durable as what will be in the directory.
        if let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
            File::open(parent)
                .and_then(|d| d.sync_all())
                .map_err(io_error("creating"))?;
        }
    }
    let fd = rustix::fs::open(path, DIRECTORY, Mode::empty())
        .map_err(|e| io_error("opening")(e.into()))?;
    let stat = rustix::fs::fstat(&fd).map_err(|e| io_error("looking at")(e.into()))?;
    if stat.st_uid != rustix::process::geteuid().as_raw() {
        // Another user's directory is nothing to take over, even where root could.
        let source = io::Error::from(io::ErrorKind::PermissionDenied);
        return Err(io_error("taking over another user's directory,")(source));
    }
    if stat.st_mode & 0o077 != 0 {
        // systemd creates a StateDirectory= with 0755 unless it is told otherwise.
        rustix::fs::fchmod(&fd, Mode::RWXU)
            .map_err(|e| io_error("making private (mode 0700)")(e.into()))?;
    }
    Ok(BlobDir::new(fd))
}

fn take_lock(path: &Path, root: &BlobDir) -> Result<File, StateError> {
    let io_error = |source: io::Error| StateError::Io {
        doing: "locking",
        path: path.join(LOCK),
        source,
        unchanged: true,
    };
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let in_use = |pid, since_ms| StateError::InUse {
        path: path.to_owned(),
        pid,
        since_ms,
    };
    let mut file = match rustix::fs::openat(root.fd(), LOCK, flags, Mode::RUSR | Mode::WUSR) {
        Ok(fd) => File::from(fd),
        // The directory was removed a moment ago, by its agent.
        Err(Errno::NOENT) => return Err(in_use(None, None)),
        Err(e) => return Err(io_error(e.into())),
    };
    match rustix::fs::flock(file.as_fd(), FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => {
            let mut text = String::new();
            let pid = match (&mut file).take(32).read_to_string(&mut text) {
                Ok(_) => text.trim().parse().ok(),
                Err(_) => None,
            };
            // Who holds the lock wrote its pid when it took it.
            let written = file.metadata().and_then(|m| m.modified()).ok();
            let since = written.and_then(|t| t.duration_since(std::time::UNIX_EPOCH).ok());
            let since = since.and_then(|s| u64::try_from(s.as_millis()).ok());
            return Err(in_use(pid, since));
        }
        Err(e) => return Err(io_error(e.into())),
    }
    let status = rustix::fs::fstat(&file).map_err(|e| io_error(e.into()))?;
    if status.st_nlink == 0 {
        return Err(in_use(None, None));
    }
    // For the error message of the next agent only, so it need not be durable.
    file.set_len(0)
        .and_then(|()| file.rewind())
        .and_then(|()| writeln!(file, "{}", std::process::id()))
        .map_err(io_error)?;
    Ok(file)
}

#[cfg(test)]
mod tests;
