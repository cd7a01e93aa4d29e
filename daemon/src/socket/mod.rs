//! The agent's unix socket: frames and file descriptors between an agent and the launchers, workers
//! and commands of its own machine.
//!
//! A frame is what [`muster_protocol::codec`] makes, with its length in front. Up to
//! [`MAX_FDS`] descriptors travel with its first byte (`SCM_RIGHTS`) and arrive close-on-exec.
//! Anyone may connect; who the peer is comes from the kernel (`SO_PEERCRED`) and decides what it
//! may do. Nothing here decodes a frame or decides a right.
//!
//! Never does a client that does not read hold the agent up: sending only queues, the queue is bounded, and a
//! connection whose queue is full or whose frame is not taken in time is closed. Nor does closing a descriptor that a
//! client has sent, which takes as long as its file wants ([`Received`]), nor a client who is turned away (`refused`).

mod conn;
#[cfg(test)]
mod lingering;
mod listener;
mod received;
mod refused;
mod room;
mod wire;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

pub use conn::{Conn, Receiver, Sender, connect, pair};
pub use listener::Listener;
pub use received::Received;

/// Descriptors that travel with one frame at most.
pub const MAX_FDS: usize = 4;
/// Connections to one agent at most.
pub const MAX_CONNECTIONS: usize = 256;
/// How many of them are kept for root and the agent's own user, so that another user's jobs
/// cannot lock the operator out.
pub const RESERVED_CONNECTIONS: usize = 32;
/// How many of the others one user has at most, so that he cannot lock another one out.
pub const CONNECTIONS_PER_USER: usize = (MAX_CONNECTIONS - RESERVED_CONNECTIONS) / 2;
/// Frames that wait to be taken by a peer at most, and their bytes.
pub const MAX_QUEUED_FRAMES: usize = 256;
pub const MAX_QUEUED_BYTES: usize = 1 << 20;
/// Frames with descriptors that are neither kept nor closed yet: of one connection, of one user, and of all. Of
/// whoever has as many a connection on which more of them lie is not read until one is closed. The others are.
pub const UNSETTLED: usize = 3;
pub const UNSETTLED_PER_USER: usize = 24;
pub const UNSETTLED_OF_ALL: usize = 64;
/// How long a peer may take to read one frame.
pub const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// One frame and the descriptors that came with it.
pub type Message = (Vec<u8>, Result<Received, NoRoom>);

/// Descriptors came with a frame and could not be taken in; the connection goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "descriptors came with a frame, and this process can open no more: raise its limit (systemd: LimitNOFILE, a shell: ulimit -n)"
)]
pub struct NoRoom;

/// The process at the other end, as the kernel recorded it when the connection was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// 0 when the peer is outside this process' pid namespace.
    pub pid: i32,
    pub uid: u32,
    pub gid: u32,
}

/// Errors of the socket. After any error of a connection it is closed.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    #[error(
        "another agent{} listens on {}: stop it, or give this agent its own --socket",
        .pid.map(|p| format!(" (pid {p})")).unwrap_or_default(), .path.display()
    )]
    InUse { path: PathBuf, pid: Option<i32> },
    #[error("{} exists and is no socket: move it, or choose another --socket", .path.display())]
    NotASocket { path: PathBuf },
    #[error(
        "the socket's path {} has more than {limit} bytes: choose a shorter --socket", .path.display()
    )]
    PathTooLong { path: PathBuf, limit: usize },
    #[error("{doing} the socket {} failed: {source}; {}", .path.display(), fix(.source))]
    Path {
        doing: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error(
        "a frame has {len} bytes, the limit is {}",
        muster_protocol::codec::MAX_FRAME
    )]
    TooLong { len: usize },
    #[error("the peer closed the connection in the middle of a frame")]
    Truncated,
    #[error("more than {MAX_FDS} descriptors came with one frame")]
    TooManyFds,
    #[error("the peer did not send the rest of a frame with descriptors within {} s", WRITE_TIMEOUT.as_secs())]
    Unfinished,
    #[error("descriptors came in the middle of a frame")]
    LateFds,
    #[error("the peer does not read: its queue is full")]
    QueueFull,
    #[error("the peer did not take a frame within {} s", WRITE_TIMEOUT.as_secs())]
    WriteTimeout,
    #[error("the connection is closed")]
    Closed,
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
}

fn fix(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            "start musterd, or name its socket with --socket or MUSTER_SOCKET"
        }
        io::ErrorKind::PermissionDenied => {
            "choose a --socket in a directory that this user may write to"
        }
        io::ErrorKind::ReadOnlyFilesystem => {
            "choose a --socket on a writable file system (under systemd: RuntimeDirectory=muster)"
        }
        io::ErrorKind::WouldBlock => "the agent is too busy to answer: try again",
        io::ErrorKind::StorageFull => "free some space there",
        _ => "check the path, or choose another --socket",
    }
}

#[cfg(test)]
mod tests;
