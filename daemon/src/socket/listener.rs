//! The listening side: one agent per path, a stale socket file is replaced, and the number of
//! connections is bounded.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use tokio::net::UnixListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{
    CONNECTIONS_PER_USER, Conn, MAX_CONNECTIONS, RESERVED_CONNECTIONS, SocketError, conn, received,
};
use crate::seldom::Seldom;

/// `sun_path` holds 108 bytes with its end (unix(7)).
const MAX_PATH: usize = 107;
const BACKLOG: i32 = 128;
/// How long to wait when the process has no descriptor left for a connection.
const OUT_OF_FDS_PAUSE: Duration = Duration::from_millis(100);

/// A bound socket. Dropping it removes the file.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
    /// Device and inode of the socket file that is ours.
    file: (u64, u64),
    /// Whoever holds it owns the path; it makes the replacing of a stale file free of races.
    _lock: File,
    all: Arc<Semaphore>,
    unprivileged: Arc<Semaphore>,
    /// The places of each user who has any, or had.
    users: Mutex<BTreeMap<u32, Arc<Semaphore>>>,
    /// Room for the descriptors of each user that are neither kept nor closed yet.
    unsettled: Mutex<BTreeMap<u32, Arc<Semaphore>>>,
    refusals: Mutex<Seldom>,
}

impl Listener {
    /// Binds the path, whose directory is made with mode 0755 where it is missing. Must be called
    /// within a tokio runtime.
    pub fn bind(path: &Path) -> Result<Listener, SocketError> {
        if path.as_os_str().as_bytes().len() > MAX_PATH {
            return Err(SocketError::PathTooLong {
                path: path.to_owned(),
                limit: MAX_PATH,
            });
        }
        let failed = |doing| {
            move |source: io::Error| SocketError::Path {
                doing,
                path: path.to_owned(),
                source,
            }
        };
        make_directory(path).map_err(failed("making the directory of"))?;
        let lock = take_lock(path)?;
        remove_stale(path)?;

        let socket = unix_socket().map_err(|e| failed("making")(e.into()))?;
        let address = SocketAddrUnix::new(path).map_err(|e| failed("binding")(e.into()))?;
        bind(&socket, &address).map_err(|e| failed("binding")(e.into()))?;
        // Everyone may connect; SO_PEERCRED decides what they may do. Nobody can connect before
        // the mode is right, because the socket does not listen yet.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))
            .map_err(failed("setting the mode of"))?;
        listen(&socket, BACKLOG).map_err(|e| failed("listening on")(e.into()))?;
        let file = std::fs::symlink_metadata(path).map_err(failed("looking at"))?;
        let socket =
            UnixListener::from_std(StdListener::from(socket)).map_err(failed("listening on"))?;
        Ok(Listener {
            socket,
            path: path.to_owned(),
            file: (file.dev(), file.ino()),
            _lock: lock,
            all: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
            unprivileged: Arc::new(Semaphore::new(MAX_CONNECTIONS - RESERVED_CONNECTIONS)),
            users: Mutex::default(),
            unsettled: Mutex::default(),
            refusals: Mutex::default(),
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next connection. One beyond the limit is closed at once, so that its client does not
    /// wait. May be cancelled without losing a connection.
    pub async fn accept(&self) -> Result<Conn, SocketError> {
        loop {
            let stream = match self.socket.accept().await {
                Ok((stream, _)) => stream,
                Err(e) if is_exhausted(&e) => {
                    if let Some(left_out) = seldom(&self.refusals) {
                        tracing::warn!(error = %e, left_out, "no descriptor left for a local connection");
                    }
                    tokio::time::sleep(OUT_OF_FDS_PAUSE).await;
                    continue;
                }
                Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(e) => return Err(e.into()),
            };
            let Ok(uid) = stream.peer_cred().map(|c| c.uid()) else {
                received::close(stream);
                continue;
            };
            match self.admit(uid) {
                Ok(permits) => return Conn::new(stream, permits, self.unsettled_of(uid)),
                Err(why) => {
                    received::close(stream);
                    if let Some(left_out) = seldom(&self.refusals) {
                        tracing::warn!(uid, left_out, "refused a local connection: {why}");
                    }
                }
            }
        }
    }

    fn unsettled_of(&self, uid: u32) -> Arc<Semaphore> {
        let mut all = (self.unsettled.lock()).unwrap_or_else(PoisonError::into_inner);
        // A connection has it, or what one brought.
        all.retain(|_, room| Arc::strong_count(room) > 1);
        Arc::clone(all.entry(uid).or_insert_with(conn::unsettled))
    }

    /// The places that a connection of this user takes, or why it gets none.
    fn admit(&self, uid: u32) -> Result<Vec<OwnedSemaphorePermit>, &'static str> {
        let take = |of: &Arc<Semaphore>| Arc::clone(of).try_acquire_owned().ok();
        let mut permits = vec![take(&self.all).ok_or("all places are taken")?];
        if uid != 0 && uid != rustix::process::geteuid().as_raw() {
            permits.push(take(&self.unprivileged).ok_or("the other places are reserved")?);
            let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
            users.retain(|_, places| places.available_permits() < CONNECTIONS_PER_USER);
            let places = users
                .entry(uid)
                .or_insert_with(|| Arc::new(Semaphore::new(CONNECTIONS_PER_USER)));
            permits.push(take(places).ok_or("this user has half of all places")?);
        }
        Ok(permits)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Only what is still ours: someone may have moved it and bound another one.
        if let Ok(file) = std::fs::symlink_metadata(&self.path)
            && (file.dev(), file.ino()) == self.file
        {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn seldom(of: &Mutex<Seldom>) -> Option<u64> {
    of.lock().unwrap_or_else(PoisonError::into_inner).due()
}

fn is_exhausted(error: &io::Error) -> bool {
    [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM]
        .iter()
        .any(|e| error.raw_os_error() == Some(e.raw_os_error()))
}

fn unix_socket() -> rustix::io::Result<OwnedFd> {
    socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
}

fn make_directory(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() && !parent.is_dir() => {
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o755)
                .create(parent)
        }
        _ => Ok(()),
    }
}

fn take_lock(path: &Path) -> Result<File, SocketError> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let name = PathBuf::from(name);
    let failed = |source: io::Error| SocketError::Path {
        doing: "locking",
        path: name.clone(),
        source,
    };
    let flags = rustix::fs::OFlags::RDWR
        | rustix::fs::OFlags::CREATE
        | rustix::fs::OFlags::CLOEXEC
        | rustix::fs::OFlags::NOFOLLOW;
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    let lock = rustix::fs::open(&name, flags, mode).map_err(|e| failed(e.into()))?;
    match rustix::fs::flock(lock.as_fd(), FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(File::from(lock)),
        Err(Errno::WOULDBLOCK) => Err(SocketError::InUse {
            path: path.to_owned(),
            pid: match listening(path) {
                Ok(Answer::Somebody(pid)) => pid,
                _ => None,
            },
        }),
        Err(e) => Err(failed(e.into())),
    }
}

enum Answer {
    Nobody,
    /// With the pid, unless it is too busy to be asked or in another pid namespace.
    Somebody(Option<i32>),
}

/// Whether anyone listens there. Never blocks.
fn listening(path: &Path) -> rustix::io::Result<Answer> {
    let socket = unix_socket()?;
    match connect(&socket, &SocketAddrUnix::new(path)?) {
        Ok(()) => {
            // Not rustix: its pid cannot be 0, the kernel's can.
            let peer =
                nix::sys::socket::getsockopt(&socket, nix::sys::socket::sockopt::PeerCredentials);
            Ok(Answer::Somebody(
                peer.ok().map(|p| p.pid()).filter(|p| *p != 0),
            ))
        }
        Err(Errno::AGAIN) => Ok(Answer::Somebody(None)),
        Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(Answer::Nobody),
        Err(e) => Err(e),
    }
}

/// Removes a socket file that nobody answers on. The lock must be held.
fn remove_stale(path: &Path) -> Result<(), SocketError> {
    let failed = |doing| {
        move |source: io::Error| SocketError::Path {
            doing,
            path: path.to_owned(),
            source,
        }
    };
    match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(failed("looking at")(e)),
        Ok(file) if !file.file_type().is_socket() => {
            return Err(SocketError::NotASocket {
                path: path.to_owned(),
            });
        }
        Ok(_) => {}
    }
    match listening(path).map_err(|e| failed("looking at")(e.into()))? {
        Answer::Somebody(pid) => Err(SocketError::InUse {
            path: path.to_owned(),
            pid,
        }),
        Answer::Nobody => std::fs::remove_file(path).map_err(failed("removing the stale")),
    }
}
