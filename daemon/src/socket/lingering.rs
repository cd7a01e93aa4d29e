//! For tests: descriptors whose close takes as long as their sender wants, and a client that is driven by hand.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream as Client;
use std::path::Path;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sockopt};
use tokio::time::timeout;

use super::{Conn, Listener};

/// How long whoever closes one of these connections waits.
const LINGER: Duration = Duration::from_secs(600);

/// Far beyond what anything here takes; only a wait for such a connection reaches it.
pub(super) const LONG: Duration = Duration::from_secs(60);

/// Long enough to see that something waits.
pub(super) const SHORT: Duration = Duration::from_millis(300);

/// A frame of one byte.
pub(super) const FRAME: [u8; 5] = [1, 0, 0, 0, 9];

/// A connection with something in it that its other end does not read: its close takes [`LINGER`], or until the other
/// end is dropped.
pub(super) fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // Little fills it.
    sockopt::set_socket_recv_buffer_size(&listener, 4096).unwrap();
    let mut full = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    sockopt::set_socket_send_buffer_size(&full, 4096).unwrap();
    let (other, _) = listener.accept().unwrap();
    full.set_nonblocking(true).unwrap();
    while full.write(&[0; 1 << 16]).is_ok() {}
    sockopt::set_socket_linger(&full, Some(LINGER)).unwrap();
    (full.into(), other)
}

pub(super) fn send_with(
    client: &Client,
    bytes: &[u8],
    fds: &[OwnedFd],
    flags: SendFlags,
) -> rustix::io::Result<usize> {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let bytes = [std::io::IoSlice::new(bytes)];
    rustix::net::sendmsg(client, &bytes, &mut control, flags)
}

pub(super) fn send(client: &Client, bytes: &[u8], fds: &[OwnedFd]) {
    send_with(client, bytes, fds, SendFlags::empty()).unwrap();
}

pub(super) async fn client_of(listener: &Listener, path: &Path) -> (Client, Conn) {
    let client = Client::connect(path).unwrap();
    (client, soon(listener.accept()).await.unwrap())
}

/// Connects as this user; `None` without the right to become him.
pub(super) fn connect_as(uid: u32, path: &Path) -> Option<Client> {
    let mut stream = None;
    crate::testing::as_user(uid, || stream = Some(Client::connect(path).unwrap()));
    stream
}

pub(super) async fn soon<T>(future: impl Future<Output = T>) -> T {
    timeout(LONG, future).await.unwrap()
}

/// A directory that every user may enter.
pub(super) fn open_dir() -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    dir
}
