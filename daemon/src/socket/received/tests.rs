use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream as Client;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sockopt};
use tokio::time::timeout;

use super::super::{Conn, Listener, SocketError, UNSETTLED};
use super::*;

/// How long whoever closes one of these connections waits.
const LINGER: Duration = Duration::from_secs(600);

/// Far beyond what anything here takes; only a wait for such a connection reaches it.
const LONG: Duration = Duration::from_secs(60);

/// A connection with something in it that its other end does not read: its close takes [`LINGER`], or until the other end
/// is dropped.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut full = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (other, _) = listener.accept().unwrap();
    full.set_nonblocking(true).unwrap();
    while full.write(&[0; 1 << 16]).is_ok() {}
    sockopt::set_socket_linger(&full, Some(LINGER)).unwrap();
    (full.into(), other)
}

fn send(client: &Client, bytes: &[u8], fds: &[OwnedFd]) {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let bytes = [std::io::IoSlice::new(bytes)];
    rustix::net::sendmsg(client, &bytes, &mut control, SendFlags::empty()).unwrap();
}

/// A frame of one byte.
const FRAME: [u8; 5] = [1, 0, 0, 0, 9];

async fn client_of(listener: &Listener, path: &Path) -> (Client, Conn) {
    let client = Client::connect(path).unwrap();
    (client, soon(listener.accept()).await.unwrap())
}

async fn soon<T>(future: impl Future<Output = T>) -> T {
    timeout(LONG, future).await.unwrap()
}

#[tokio::test]
async fn nobody_who_reads_waits_until_a_descriptor_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = Listener::bind(&path).unwrap();
    let from = Instant::now();

    // With a frame.
    let (client, mut server) = client_of(&listener, &path).await;
    let (full, _other) = lingering();
    send(&client, &FRAME, &[full]);
    let (frame, fds) = soon(server.recv()).await.unwrap().unwrap();
    assert_eq!((frame, fds.len()), (vec![9], 1));
    drop(fds);
    drop((client, server));
    // More than a frame may have, as many as a message may.
    let (client, mut server) = client_of(&listener, &path).await;
    let (full, _other) = lingering();
    let mut many: Vec<OwnedFd> = (0..60).map(|_| full.try_clone().unwrap()).collect();
    many.push(full);
    send(&client, &FRAME, &many);
    drop(many);
    let error = soon(server.recv()).await.unwrap_err();
    assert!(matches!(error, SocketError::TooManyFds), "{error}");
    drop((client, server));
    // In a frame that never comes to its end.
    let (client, mut server) = client_of(&listener, &path).await;
    let (full, _other) = lingering();
    send(&client, &FRAME[..3], &[full]);
    drop(client);
    let error = soon(server.recv()).await.unwrap_err();
    assert!(matches!(error, SocketError::Truncated), "{error}");
    drop(server);
    // Behind what is read of a connection, and in one that is not taken.
    let (client, server) = client_of(&listener, &path).await;
    let (full, _other) = lingering();
    send(&client, &FRAME, &[full]);
    drop((client, server));
    let stream = tokio::net::UnixStream::pair().unwrap();
    let (full, _other) = lingering();
    send(&stream.0.into_std().unwrap(), &FRAME, &[full]);
    close(stream.1);

    // The writers' tasks end, and with them the sockets.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(from.elapsed() < LONG, "{:?}", from.elapsed());
}

#[tokio::test]
async fn of_a_user_whose_descriptors_do_not_close_nothing_more_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = Listener::bind(&path).unwrap();
    let mut others = Vec::new();
    for _ in 0..UNSETTLED {
        let (client, mut server) = client_of(&listener, &path).await;
        let (full, other) = lingering();
        send(&client, &FRAME, &[full]);
        // Nobody keeps it, and its connection ends.
        soon(server.recv()).await.unwrap().unwrap();
        others.push(other);
    }
    let (mut client, mut server) = client_of(&listener, &path).await;
    client.write_all(&FRAME).unwrap();
    let waits = timeout(Duration::from_millis(300), server.recv()).await;
    assert!(waits.is_err(), "{waits:?}");
    // One is closed now.
    others.pop();
    let (frame, fds) = soon(server.recv()).await.unwrap().unwrap();
    assert_eq!((frame, fds.len()), (vec![9], 0));

    // What is kept counts no more, and what is settled does not either.
    for _ in 0..2 * UNSETTLED {
        send(&client, &FRAME, &[tempfile::tempfile().unwrap().into()]);
        let (_, fds) = soon(server.recv()).await.unwrap().unwrap();
        others.clear();
        assert_eq!(fds.keep().len(), 1);
    }
    let mut kept = Vec::new();
    for _ in 0..2 * UNSETTLED {
        send(&client, &FRAME, &[tempfile::tempfile().unwrap().into()]);
        let (_, mut fds) = soon(server.recv()).await.unwrap().unwrap();
        fds.settle();
        kept.push(fds);
    }
}
