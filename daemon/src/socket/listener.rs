//! The listening side: one agent per path, a stale socket file is replaced, and the number of
//! connections is bounded.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::OwnedSemaphorePermit;

use super::refused::Refused;
use super::room::{Room, Shares};
use super::{
    CONNECTIONS_PER_USER, Conn, MAX_CONNECTIONS, RESERVED_CONNECTIONS, SocketError, conn, wire,
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
    /// The holder of this lock owns the path; it makes the replacing of a stale file free of races.
    _lock: File,
    connections: Shares,
    /// For descriptors that came on these.
    room: Room,
    /// Where this kernel cannot bar descriptors from connections that are not taken.
    refused: Option<Refused>,
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
        let barred = wire::bar_descriptors(&socket, true);
        listen(&socket, BACKLOG).map_err(|e| failed("listening on")(e.into()))?;
        let file = std::fs::symlink_metadata(path).map_err(failed("looking at"))?;
        let socket =
            UnixListener::from_std(StdListener::from(socket)).map_err(failed("listening on"))?;
        Ok(Listener {
            socket,
            path: path.to_owned(),
            file: (file.dev(), file.ino()),
            _lock: lock,
            connections: Shares::new(MAX_CONNECTIONS, RESERVED_CONNECTIONS, CONNECTIONS_PER_USER),
            room: Room::new(),
            refused: barred.is_err().then(Refused::new),
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
            // Before anything is there that would have to be closed.
            let place = match &self.refused {
                Some(refused) => refused.place().await,
                None => None,
            };
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
            let peer = conn::credentials(&stream);
            let uid = peer.as_ref().map_or(u32::MAX, |peer| peer.uid);
            let admitted = peer
                .map_err(|e| e.to_string())
                .and_then(|peer| Ok((peer, self.admit(&stream, uid)?)));
            match admitted {
                Ok((peer, permits)) => {
                    return Ok(Conn::new(stream, peer, permits, self.room.of(uid)));
                }
                Err(why) => {
                    match (&self.refused, place) {
                        (Some(refused), Some(place)) => refused.close(uid, stream, place),
                        // There are no descriptors in it.
                        _ => drop(stream),
                    }
                    if let Some(left_out) = seldom(&self.refusals) {
                        tracing::warn!(uid, left_out, "refused a local connection: {why}");
                    }
                }
            }
        }
    }

    /// The places that a connection of this user takes, or why it gets none.
    fn admit(&self, stream: &UnixStream, uid: u32) -> Result<Vec<OwnedSemaphorePermit>, String> {
        let permits = self.connections.try_take(uid).map_err(|e| e.to_string())?;
        if self.refused.is_none() {
            wire::bar_descriptors(stream, false).map_err(|e| e.to_string())?;
        }
        Ok(permits)
    }
}

#[cfg(test)]
impl Listener {
    pub(super) fn bars_descriptors(&self) -> bool {
        self.refused.is_none()
    }

    /// As on a kernel that cannot bar descriptors, with room for so many that are refused.
    pub(super) fn without_bar(self, places: usize) -> Listener {
        let _ = wire::bar_descriptors(&self.socket, false);
        let mut listener = self;
        listener.refused = Some(Refused::with(places));
        listener
    }

    pub(super) fn refused(&self) -> Option<&Refused> {
        self.refused.as_ref()
    }

    /// Takes the places of this user.
    pub(super) fn fill(&self, uid: u32) -> Vec<Vec<OwnedSemaphorePermit>> {
        std::iter::from_fn(|| self.connections.try_take(uid).ok()).collect()
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
