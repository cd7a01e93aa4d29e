use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as Client;
use std::path::Path;
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::SendFlags;
use tokio::time::timeout;

use super::super::Listener;
use super::super::lingering::{
    FRAME, LONG, SHORT, connect_as, lingering, open_dir, send, send_with, soon,
};

const HOSTILE: u32 = 65534;
const OTHER: u32 = 65533;

/// A listener that takes no connection of [`HOSTILE`], and one of him; `None` without the right to become him.
fn turned_away(listener: &Listener, path: &Path) -> Option<(Vec<impl Sized>, Client)> {
    Some((listener.fill(HOSTILE), connect_as(HOSTILE, path)?))
}

fn ends(mut client: &Client) {
    client.set_read_timeout(Some(LONG)).unwrap();
    // What it sent and nobody read shows as a reset.
    match client.read(&mut [0]) {
        Ok(0) => {}
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        other => panic!("{other:?}"),
    }
}

/// On this kernel, if it can.
#[tokio::test]
async fn who_is_not_taken_can_leave_no_descriptor() {
    let dir = open_dir();
    let path = dir.path().join("s");
    let listener = Listener::bind(&path).unwrap();
    if !listener.bars_descriptors() {
        eprintln!("SKIPPED: this kernel cannot bar descriptors; Linux 6.16 can");
        return;
    }
    let Some((_places, mut client)) = turned_away(&listener, &path) else {
        return;
    };
    let file = || OwnedFd::from(tempfile::tempfile().unwrap());
    let refused = send_with(&client, &FRAME, &[file()], SendFlags::empty());
    assert_eq!(refused, Err(Errno::PERM));
    client.write_all(&FRAME).unwrap();
    // Who is taken may send some.
    let other = connect_as(OTHER, &path).unwrap();
    let mut server = soon(listener.accept()).await.unwrap();
    assert_eq!(server.peer().uid, OTHER);
    ends(&client);
    send(&other, &FRAME, &[file()]);
    let (_, fds) = soon(server.recv()).await.unwrap().unwrap();
    assert_eq!(fds.unwrap().len(), 1);
}

/// As on a kernel that cannot bar descriptors.
#[tokio::test]
async fn a_user_who_is_turned_away_has_one_thread_and_holds_up_no_other() {
    const PLACES: usize = 6;
    let dir = open_dir();
    let path = dir.path().join("s");
    let listener = Listener::bind(&path).unwrap().without_bar(PLACES);
    let refused = listener.refused().unwrap();
    let Some((_places, silent)) = turned_away(&listener, &path) else {
        return;
    };
    let from = Instant::now();
    let mut held = Vec::new();
    let hostile = |held: &mut Vec<_>| {
        let client = connect_as(HOSTILE, &path).unwrap();
        let (full, other) = lingering();
        send(&client, &FRAME, &[full]);
        held.push((client, other));
    };
    for _ in 0..PLACES - 2 {
        hostile(&mut held);
    }
    // Without descriptors there is nothing to wait for.
    let mut plain = connect_as(HOSTILE, &path).unwrap();
    plain.write_all(&FRAME).unwrap();
    for uid in [OTHER, 0] {
        let _client = connect_as(uid, &path).unwrap();
        let server = soon(listener.accept()).await.unwrap();
        assert_eq!(server.peer().uid, uid);
    }
    for client in [&silent, &plain] {
        ends(client);
    }
    assert_eq!(refused.places(), 2);
    // A thread waits for one of them, and the others for that.
    while refused.waiting(HOSTILE) != Some(PLACES - 3) {
        assert!(from.elapsed() < LONG, "{:?}", refused.waiting(HOSTILE));
        tokio::task::yield_now().await;
    }

    // No more than there are places for; it ends when one of them is closed.
    for _ in 0..2 {
        hostile(&mut held);
    }
    let _client = connect_as(OTHER, &path).unwrap();
    let waits = timeout(SHORT, listener.accept()).await;
    assert!(waits.is_err(), "{waits:?}");
    drop(held.remove(0));
    let server = soon(listener.accept()).await.unwrap();
    assert_eq!(server.peer().uid, OTHER);
    // The thread ends with the last one.
    held.clear();
    while refused.waiting(HOSTILE).is_some() || refused.places() < PLACES {
        assert!(from.elapsed() < LONG, "{:?}", refused.waiting(HOSTILE));
        tokio::task::yield_now().await;
    }
}
