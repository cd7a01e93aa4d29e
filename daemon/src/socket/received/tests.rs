use std::io::Write;
use std::os::unix::net::UnixStream as Client;
use std::time::{Duration, Instant};

use rustix::net::SendFlags;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::time::timeout;

use super::super::lingering::{
    FRAME, LONG, SHORT, client_of, connect_as, lingering, open_dir, send, send_with, soon,
};
use super::super::{
    Conn, Listener, NoRoom, SocketError, UNSETTLED, UNSETTLED_PER_USER, connect, pair,
};
use super::*;

fn file() -> OwnedFd {
    tempfile::tempfile().unwrap().into()
}

/// The next frame, which is [`FRAME`] with so many descriptors.
async fn frame_with(server: &mut Conn, count: usize) -> Received {
    let (frame, fds) = soon(server.recv()).await.unwrap().unwrap();
    let fds = fds.unwrap();
    assert_eq!((frame, fds.len()), (vec![9], count));
    fds
}

async fn waits(server: &mut Conn) {
    let waits = timeout(SHORT, server.recv()).await;
    assert!(waits.is_err(), "{waits:?}");
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
    drop(frame_with(&mut server, 1).await);
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
    // In the middle of one.
    let (mut client, mut server) = client_of(&listener, &path).await;
    let (full, _other) = lingering();
    client.write_all(&FRAME[..2]).unwrap();
    waits(&mut server).await;
    send(&client, &FRAME[2..], &[full]);
    let error = soon(server.recv()).await.unwrap_err();
    assert!(matches!(error, SocketError::LateFds), "{error}");
    drop((client, server));
    // Behind what is read of a connection.
    let (client, server) = client_of(&listener, &path).await;
    let (full, _other) = lingering();
    send(&client, &FRAME, &[full]);
    drop((client, server));

    // The writers' tasks end, and with them the sockets.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(from.elapsed() < LONG, "{:?}", from.elapsed());
}

/// The kernel leaves it out of what is read, unless it is told otherwise, and closes what came with it.
#[tokio::test]
async fn nobody_who_reads_waits_for_what_came_with_an_urgent_byte() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = Listener::bind(&path).unwrap();
    let from = Instant::now();
    let (mut client, mut server) = client_of(&listener, &path).await;
    let (full, _other) = lingering();
    if let Err(error) = send_with(&client, &FRAME[..1], &[full], SendFlags::OOB) {
        eprintln!("SKIPPED: this kernel has no urgent data on unix sockets ({error})");
        return;
    }
    client.write_all(&FRAME[1..]).unwrap();
    drop(frame_with(&mut server, 1).await);
    assert!(from.elapsed() < LONG, "{:?}", from.elapsed());
}

#[tokio::test]
async fn nobody_who_sends_waits_until_a_descriptor_is_closed() {
    let from = Instant::now();
    let (a, _b) = pair().unwrap();
    let (sender, _receiver) = a.split();
    let (full, _other) = lingering();
    // More than the kernel takes.
    for _ in 0..8 {
        sender.send(vec![0; 100_000], Vec::new()).unwrap();
    }
    sender.send(vec![1], vec![full]).unwrap();
    sender.close();
    soon(sender.finish()).await;
    assert!(from.elapsed() < LONG, "{:?}", from.elapsed());
}

#[tokio::test]
async fn a_connection_whose_descriptors_do_not_close_holds_up_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = Listener::bind(&path).unwrap();
    let mut others = Vec::new();
    let (mut client, mut server) = client_of(&listener, &path).await;
    for _ in 0..UNSETTLED {
        let (full, other) = lingering();
        send(&client, &FRAME, &[full]);
        // Nobody keeps it.
        drop(frame_with(&mut server, 1).await);
        others.push(other);
    }
    // It brings no more of them, and says what it likes.
    client.write_all(&FRAME).unwrap();
    frame_with(&mut server, 0).await;
    send(&client, &FRAME, &[file()]);
    waits(&mut server).await;
    // Another one of the same user.
    let (client_2, mut server_2) = client_of(&listener, &path).await;
    send(&client_2, &FRAME, &[file()]);
    frame_with(&mut server_2, 1).await;
    // One is closed now.
    others.pop();
    frame_with(&mut server, 1).await;

    // What is kept counts no more, and what is settled does not either.
    for _ in 0..2 * UNSETTLED {
        send(&client, &FRAME, &[file()]);
        let fds = frame_with(&mut server, 1).await;
        others.clear();
        assert_eq!(fds.keep().len(), 1);
    }
    let mut kept = Vec::new();
    for _ in 0..2 * UNSETTLED {
        send(&client, &FRAME, &[file()]);
        let mut fds = frame_with(&mut server, 1).await;
        fds.settle();
        kept.push(fds);
    }
}

#[tokio::test]
async fn a_user_whose_descriptors_do_not_close_holds_up_no_other() {
    let dir = open_dir();
    let path = dir.path().join("s");
    let listener = Listener::bind(&path).unwrap();
    let (one, two) = (65534, 65533);
    let connect = async |uid: u32| -> Option<(Client, Conn)> {
        let client = connect_as(uid, &path)?;
        Some((client, soon(listener.accept()).await.unwrap()))
    };
    let mut others = Vec::new();
    for n in 0..UNSETTLED_PER_USER {
        let Some((client, mut server)) = connect(one).await else {
            return;
        };
        let (full, other) = lingering();
        send(&client, &FRAME, &[full]);
        // Nobody keeps it, and its connection ends or does not.
        drop(frame_with(&mut server, 1).await);
        others.push((other, (n % 2 == 0).then_some((client, server))));
    }
    let (mut client, mut server) = connect(one).await.unwrap();
    client.write_all(&FRAME).unwrap();
    frame_with(&mut server, 0).await;
    send(&client, &FRAME, &[file()]);
    waits(&mut server).await;
    for uid in [two, 0] {
        let (client, mut server) = connect(uid).await.unwrap();
        send(&client, &FRAME, &[file()]);
        frame_with(&mut server, 1).await;
    }
    others.pop();
    frame_with(&mut server, 1).await;
}

/// Lowers what this process may open while `future` is awaited.
async fn with_limit<T>(limit: u64, future: impl Future<Output = T>) -> T {
    let before = getrlimit(Resource::Nofile);
    let lower = Rlimit {
        current: Some(limit),
        ..before
    };
    setrlimit(Resource::Nofile, lower).unwrap();
    let result = future.await;
    setrlimit(Resource::Nofile, before).unwrap();
    result
}

#[tokio::test]
async fn descriptors_that_cannot_be_opened_are_told_from_none() {
    use std::os::fd::AsRawFd;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = Listener::bind(&path).unwrap();
    let (client, mut server) = client_of(&listener, &path).await;
    let next = file().as_raw_fd();
    // None of them, or the first one only.
    for limit in [0, u64::try_from(next).unwrap() + 1] {
        for _ in 0..2 * UNSETTLED {
            send(&client, &FRAME, &[file(), file()]);
            let received = with_limit(limit, soon(server.recv())).await;
            let (frame, fds) = received.unwrap().unwrap();
            assert_eq!((frame, fds.map(|fds| fds.len())), (vec![9], Err(NoRoom)));
        }
    }
    // The connection goes on.
    send(&client, &FRAME, &[file(), file()]);
    frame_with(&mut server, 2).await;
}

#[tokio::test]
async fn descriptors_sent_to_who_has_not_taken_the_connection_yet_arrive() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = Listener::bind(&path).unwrap();
    let client = connect(&path).await.unwrap();
    client.send(vec![8], Vec::new()).unwrap();
    client.send(vec![9], vec![file()]).unwrap();
    client.send(vec![9], Vec::new()).unwrap();
    // The writer has tried.
    tokio::time::sleep(Duration::from_millis(50)).await;
    let mut server = soon(listener.accept()).await.unwrap();
    let (first, _) = soon(server.recv()).await.unwrap().unwrap();
    assert_eq!(first, [8]);
    frame_with(&mut server, 1).await;
    frame_with(&mut server, 0).await;
}
