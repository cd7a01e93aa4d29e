use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Instant;

use muster_protocol::codec::{MAX_FRAME, with_length};
use tokio::io::AsyncReadExt;
use tokio::time::timeout;

use super::lingering::connect_as;
use super::*;

/// Far beyond what anything here takes; only a hang reaches it.
const LONG: Duration = Duration::from_secs(30);

async fn soon<T>(future: impl Future<Output = T>) -> T {
    timeout(LONG, future).await.unwrap()
}

fn file_with(text: &str) -> OwnedFd {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file.rewind().unwrap();
    file.into()
}

fn text_in(fd: OwnedFd) -> String {
    let mut text = String::new();
    File::from(fd).read_to_string(&mut text).unwrap();
    text
}

/// A listener, a client of it that the test drives by hand, and the agent's end.
async fn raw_client(path: &Path) -> (Listener, std::os::unix::net::UnixStream, Conn) {
    let listener = Listener::bind(path).unwrap();
    let client = std::os::unix::net::UnixStream::connect(path).unwrap();
    let server = soon(listener.accept()).await.unwrap();
    (listener, client, server)
}

#[tokio::test]
async fn whoever_sends_sees_whether_all_was_read() {
    let (here, mut there) = pair().unwrap();
    let (sender, _receiver) = here.split();
    assert!(sender.is_read());
    for _ in 0..2 {
        sender.send(b"a frame".to_vec(), Vec::new()).unwrap();
        assert!(!sender.is_read());
    }
    soon(there.recv()).await.unwrap();
    assert!(!sender.is_read());
    soon(there.recv()).await.unwrap();
    // The writer lets go of a frame after the peer has it.
    soon(async {
        while !sender.is_read() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn frames_and_descriptors_arrive_together_and_in_order() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("run/m.sock");
    let listener = Listener::bind(&path).unwrap();
    let mode = |p: &Path| std::fs::metadata(p).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path), 0o666);
    assert_eq!(mode(&tmp.path().join("run")), 0o755);

    let client = connect(&path).await.unwrap();
    let mut server = soon(listener.accept()).await.unwrap();
    let me = Peer {
        pid: i32::try_from(std::process::id()).unwrap(),
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
    };
    assert_eq!((server.peer(), client.peer()), (me, me));

    // Frames without, with, with the most, and without descriptors, sent before anything is read.
    for (n, fds) in [0, 1, 4, 0, 2, 0].into_iter().enumerate() {
        let fds = (0..fds).map(|k| file_with(&format!("{n}.{k}"))).collect();
        client
            .send(vec![u8::try_from(n).unwrap(); n * 20_000], fds)
            .unwrap();
    }
    for (n, count) in [0, 1, 4, 0, 2, 0].into_iter().enumerate() {
        let (frame, fds) = soon(server.recv()).await.unwrap().unwrap();
        assert_eq!(frame, vec![u8::try_from(n).unwrap(); n * 20_000]);
        let fds = fds.unwrap();
        assert_eq!(fds.len(), count);
        for (k, fd) in fds.keep().into_iter().enumerate() {
            let flags = rustix::io::fcntl_getfd(&fd).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
            assert_eq!(text_in(fd), format!("{n}.{k}"));
        }
    }
    // And back; then the end.
    server.send(b"bye".to_vec(), Vec::new()).unwrap();
    drop(server);
    let (_, mut receiver) = client.split();
    assert_eq!(soon(receiver.recv()).await.unwrap().unwrap().0, b"bye");
    assert!(soon(receiver.recv()).await.unwrap().is_none());
    drop(listener);
    assert!(!path.exists());
}

#[tokio::test]
async fn a_pair_works_like_a_connection() {
    let (a, mut b) = pair().unwrap();
    assert_eq!(a.peer().pid, i32::try_from(std::process::id()).unwrap());
    a.send(vec![1; MAX_FRAME], vec![file_with("x")]).unwrap();
    let (frame, fds) = soon(b.recv()).await.unwrap().unwrap();
    assert_eq!(frame.len(), MAX_FRAME);
    assert_eq!(text_in(fds.unwrap().keep().pop().unwrap()), "x");
    assert!(matches!(
        a.send(vec![0; MAX_FRAME + 1], Vec::new()),
        Err(SocketError::TooLong { .. })
    ));
    let five = (0..5).map(|_| file_with("")).collect();
    assert!(matches!(a.send(vec![], five), Err(SocketError::TooManyFds)));
}

#[tokio::test]
async fn a_cancelled_receive_loses_nothing() {
    let tmp = tempfile::tempdir().unwrap();
    let (_listener, mut client, mut server) = raw_client(&tmp.path().join("s")).await;
    let bytes = with_length(&[7; 300]);
    for piece in bytes.chunks(50) {
        client.write_all(piece).unwrap();
        if piece.len() == 50 {
            let cut = timeout(Duration::from_millis(5), server.recv()).await;
            assert!(cut.is_err());
        }
    }
    assert_eq!(soon(server.recv()).await.unwrap().unwrap().0, [7; 300]);
}

#[tokio::test]
async fn finish_waits_for_what_is_queued() {
    let (a, b) = pair().unwrap();
    let reader = tokio::spawn(async move {
        let (_, mut b) = b.split();
        let mut count = 0;
        while let Some((frame, _)) = b.recv().await.unwrap() {
            assert_eq!(frame.len(), 100_000);
            count += 1;
        }
        count
    });
    let (sender, _receiver) = a.split();
    for _ in 0..10 {
        sender.send(vec![1; 100_000], Vec::new()).unwrap();
    }
    soon(sender.finish()).await;
    assert_eq!(soon(reader).await.unwrap(), 10);
}

#[tokio::test]
async fn a_client_that_does_not_read_is_cut_off_and_holds_nothing_up() {
    let tmp = tempfile::tempdir().unwrap();
    let (_listener, mut client, server) = raw_client(&tmp.path().join("s")).await;
    let from = Instant::now();
    let error = (0..10_000)
        .find_map(|_| server.send(vec![0; 10_000], vec![file_with("")]).err())
        .unwrap();
    assert!(matches!(error, SocketError::QueueFull), "{error}");
    // Not one of these calls waited for the client.
    assert!(from.elapsed() < WRITE_TIMEOUT);
    // The client sees the end after what the kernel had taken.
    client.set_read_timeout(Some(LONG)).unwrap();
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).unwrap();
    assert!(rest.len() < 10_000 * 10_000);
}

#[tokio::test]
async fn a_frame_that_is_not_taken_in_time_ends_the_connection() {
    let tmp = tempfile::tempdir().unwrap();
    let (_listener, _client, server) = raw_client(&tmp.path().join("s")).await;
    // More than the kernel takes (net.core.wmem_default is about 200 KiB), less than the queue.
    for _ in 0..8 {
        server.send(vec![0; 100_000], Vec::new()).unwrap();
    }
    let (sender, mut receiver) = server.split();
    // The queue ends when the writer gives up.
    soon(sender.finish()).await;
    assert!(soon(receiver.recv()).await.unwrap().is_none());
}

#[tokio::test]
async fn broken_frames_end_the_connection_with_a_reason() {
    type Check = fn(&SocketError) -> bool;
    let cases: [(&[u8], Check); 4] = [
        (&[0xff; 4], |e| matches!(e, SocketError::TooLong { .. })),
        (&(MAX_FRAME as u32 + 1).to_le_bytes(), |e| {
            matches!(e, SocketError::TooLong { .. })
        }),
        (&[9, 0, 0, 0, 1, 2], |e| matches!(e, SocketError::Truncated)),
        (&[9, 0], |e| matches!(e, SocketError::Truncated)),
    ];
    for (bytes, check) in cases {
        let tmp = tempfile::tempdir().unwrap();
        let (_listener, mut client, mut server) = raw_client(&tmp.path().join("s")).await;
        client.write_all(bytes).unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let error = soon(server.recv()).await.unwrap_err();
        assert!(check(&error), "{bytes:?}: {error}");
        assert!(matches!(
            soon(server.recv()).await,
            Err(SocketError::Closed)
        ));
        // The client is not left waiting.
        client.set_read_timeout(Some(LONG)).unwrap();
        assert_eq!(client.read(&mut [0; 10]).unwrap(), 0);
    }
}

#[tokio::test]
async fn random_bytes_never_panic_and_never_hang() {
    use rand::{Rng, SeedableRng};
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("s");
    let listener = Listener::bind(&path).unwrap();
    let mut random = rand::rngs::StdRng::seed_from_u64(1);
    for _ in 0..200 {
        let mut client = std::os::unix::net::UnixStream::connect(&path).unwrap();
        let mut server = soon(listener.accept()).await.unwrap();
        let mut bytes = vec![0; random.random_range(0..2000)];
        random.fill(&mut bytes[..]);
        if let Some(head) = bytes.first_chunk_mut::<4>() {
            // Half of them with a length that passes.
            head[1] &= 7;
            head[2] &= random.random_range(0..2u8) * 2;
            head[3] = 0;
        }
        client.write_all(&bytes).unwrap();
        drop(client);
        let mut total = 0;
        while let Ok(Some((frame, _))) = soon(server.recv()).await {
            total += frame.len() + 4;
        }
        assert!(total <= bytes.len());
    }
}

/// How many descriptors of this process are open on `path`.
fn open_here(path: &Path) -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap();
    links
        .filter_map(|e| std::fs::read_link(e.ok()?.path()).ok())
        .filter(|to| to == path)
        .count()
}

#[tokio::test]
async fn too_many_descriptors_are_closed_and_end_the_connection() {
    for (first, second) in [(5, 0), (64, 0), (4, 1), (1, 4)] {
        let tmp = tempfile::tempdir().unwrap();
        let (_listener, mut client, mut server) = raw_client(&tmp.path().join("s")).await;
        let marker = tmp.path().join("marker");
        let file = File::create(&marker).unwrap();
        send_marked(&client, &[2, 0, 0, 0, 1], first, &file);
        if second > 0 {
            // In the middle of the same frame.
            send_marked(&client, &[2], second, &file);
        } else {
            client.write_all(&[2]).unwrap();
        }
        drop(file);
        let error = soon(server.recv()).await.unwrap_err();
        let told = match second {
            0 => matches!(error, SocketError::TooManyFds),
            _ => matches!(error, SocketError::LateFds),
        };
        assert!(told, "{first} {second}: {error}");
        drop((client, server));
        // What still lies in the socket's buffer goes with the socket, once its writer has ended.
        let from = Instant::now();
        while open_here(&marker) > 0 {
            assert!(from.elapsed() < LONG);
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn a_frame_that_brought_descriptors_and_is_not_finished_ends_the_connection() {
    let tmp = tempfile::tempdir().unwrap();
    let (_listener, client, mut server) = raw_client(&tmp.path().join("s")).await;
    let marker = tmp.path().join("marker");
    let file = File::create(&marker).unwrap();
    send_marked(&client, &[2, 0, 0, 0, 1], 1, &file);
    drop(file);
    let error = soon(server.recv()).await.unwrap_err();
    assert!(matches!(error, SocketError::Unfinished), "{error}");
    let from = Instant::now();
    while open_here(&marker) > 0 {
        assert!(from.elapsed() < LONG);
        tokio::task::yield_now().await;
    }
}

/// Sends one descriptor many times, past what a frame may have.
fn send_marked(socket: impl AsFd, bytes: &[u8], count: usize, file: &File) {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
    let fds = vec![file.as_fd(); count];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let bytes = [std::io::IoSlice::new(bytes)];
    rustix::net::sendmsg(socket, &bytes, &mut control, SendFlags::empty()).unwrap();
}

#[tokio::test]
async fn a_stale_socket_file_is_replaced() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("s");
    // Bound and dropped without unlinking, as a killed agent leaves it.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let listener = Listener::bind(&path).unwrap();
    let _client = connect(&path).await.unwrap();
    soon(listener.accept()).await.unwrap();
}

#[tokio::test]
async fn a_second_agent_is_refused_naming_the_first() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("s");
    let me = i32::try_from(std::process::id()).unwrap();
    let refused = |path: &Path| match Listener::bind(path) {
        Err(SocketError::InUse { pid, .. }) => pid,
        other => panic!("{other:?}"),
    };
    let first = Listener::bind(&path).unwrap();
    assert_eq!(refused(&path), Some(me));
    // The refusal has not disturbed the first one, and left a connection that ends at once.
    let client = connect(&path).await.unwrap();
    soon(first.accept()).await.unwrap();
    soon(first.accept()).await.unwrap();
    drop((client, first));
    // Someone who knows nothing of the lock.
    let other = std::os::unix::net::UnixListener::bind(&path).unwrap();
    assert_eq!(refused(&path), Some(me));
    drop(other);
    Listener::bind(&path).unwrap();
}

#[tokio::test]
async fn what_cannot_be_bound_is_refused_with_the_fix() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("file");
    std::fs::write(&path, b"precious").unwrap();
    assert!(matches!(
        Listener::bind(&path),
        Err(SocketError::NotASocket { .. })
    ));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");

    let long = tmp.path().join("x".repeat(120));
    assert!(matches!(
        Listener::bind(&long),
        Err(SocketError::PathTooLong { .. })
    ));

    let absent = connect(&tmp.path().join("absent"))
        .await
        .unwrap_err()
        .to_string();
    assert!(absent.contains("start musterd"), "{absent}");
}

#[tokio::test]
async fn connections_beyond_the_limit_are_closed_at_once() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("s");
    let listener = Listener::bind(&path).unwrap();
    let mut open = Vec::new();
    for _ in 0..MAX_CONNECTIONS {
        let client = tokio::net::UnixStream::connect(&path).await.unwrap();
        open.push((client, soon(listener.accept()).await.unwrap()));
    }
    let mut extra = tokio::net::UnixStream::connect(&path).await.unwrap();
    let next = tokio::spawn(async move {
        let conn = listener.accept().await.unwrap();
        (listener, conn)
    });
    assert_eq!(soon(extra.read(&mut [0; 1])).await.unwrap(), 0);
    // Room again as soon as one is gone.
    open.pop();
    let from = Instant::now();
    let mut next = next;
    loop {
        let _client = tokio::net::UnixStream::connect(&path).await.unwrap();
        if timeout(Duration::from_millis(20), &mut next).await.is_ok() {
            break;
        }
        assert!(from.elapsed() < LONG);
    }
}

#[tokio::test]
async fn other_users_may_connect_but_not_take_every_place() {
    let tmp = lingering::open_dir();
    let path = tmp.path().join("s");
    let listener = Listener::bind(&path).unwrap();
    let (one, two) = (65534, 65533);
    let turned_away = |mut stream: std::os::unix::net::UnixStream| {
        stream.set_read_timeout(Some(LONG)).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    };
    let mut open: Vec<(_, Conn)> = Vec::new();
    for uid in [one, two] {
        let has = open.iter().filter(|(_, s)| s.peer().uid == uid).count();
        for _ in has..CONNECTIONS_PER_USER {
            let Some(client) = connect_as(uid, &path) else {
                return;
            };
            let server = soon(listener.accept()).await.unwrap();
            assert_eq!(server.peer().uid, uid);
            open.push((client, server));
        }
        // The next user, or the operator, gets in past the one that is turned away.
        let extra = connect_as(uid, &path).unwrap();
        let next = if uid == one { two } else { 0 };
        let client = connect_as(next, &path).unwrap();
        let server = soon(listener.accept()).await.unwrap();
        assert_eq!(server.peer().uid, next);
        turned_away(extra);
        open.push((client, server));
    }
    // A place that is given back is taken again, as soon as its task has ended.
    open.remove(0);
    let again = async {
        loop {
            let _client = connect_as(one, &path).unwrap();
            if let Ok(server) = timeout(Duration::from_millis(200), listener.accept()).await {
                return server.unwrap().peer().uid;
            }
        }
    };
    assert_eq!(soon(again).await, one);
}

#[tokio::test]
async fn an_agent_that_hangs_is_not_taken_for_a_dead_one() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("s");
    let address = SocketAddrUnix::new(&path).unwrap();
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket =
        || rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    let hangs = socket();
    rustix::net::bind(&hangs, &address).unwrap();
    rustix::net::listen(&hangs, 1).unwrap();
    let mut waiting = Vec::new();
    loop {
        let socket = socket();
        match rustix::net::connect(&socket, &address) {
            Ok(()) => waiting.push(socket),
            Err(rustix::io::Errno::AGAIN) => break,
            Err(e) => panic!("{e}"),
        }
        assert!(waiting.len() < 100);
    }
    let refused = Listener::bind(&path).unwrap_err();
    assert!(
        matches!(refused, SocketError::InUse { pid: None, .. }),
        "{refused}"
    );
    assert!(path.exists());
}
