mod given_up;
mod heir;
mod parity;

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use muster_protocol::local::{SaveAsk, SaveNews};
use muster_protocol::memory::{Answer, Ask, Key, Peer, Peers};
use muster_runtime::memory::Link;

use super::*;
use crate::kept::Rules;
use crate::run::guard::{self, Guard};
use crate::run::saves::tests::{BYTES, GENERATION, Two, done, fill, given, place, save, start};
use crate::run::saves::{Saves, Told};

/// How long a test waits for what comes soon.
const LONG: Duration = Duration::from_secs(60);

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const LATER: Digest = Digest([3; 32]);

fn key() -> Key {
    Key::of_cluster(Some(b"secret")).of_job(Digest([8; 32]))
}

/// A launcher that shares memory.
struct Launcher {
    id: LauncherId,
    saves: Saves,
    two: Two,
    guard: Guard,
    port: u16,
    dir: Arc<tempfile::TempDir>,
}

impl Launcher {
    fn new(who: &str, replicas: Choice, budget: u64) -> Launcher {
        Launcher::of_store(
            who,
            replicas,
            budget,
            Arc::new(tempfile::tempdir().unwrap()),
        )
    }

    fn of_store(who: &str, replicas: Choice, budget: u64, dir: Arc<tempfile::TempDir>) -> Launcher {
        // Each name begins with another letter.
        let id = LauncherId([who.as_bytes()[1]; 8]);
        let server = Server::open(LOOPBACK).unwrap();
        let port = server.port();
        let guard = Guard::open(LOOPBACK, id, Some(port)).unwrap();
        let mut saves = Saves::new(Some(place(dir.path())), budget, Rules::default());
        let settings = Settings {
            server,
            launcher: id,
            who: who.into(),
            replicas,
        };
        saves.share(settings).unwrap();
        Launcher {
            id,
            saves,
            two: Two::default(),
            guard,
            port,
            dir,
        }
    }

    fn peer(&self) -> Peer {
        Peer {
            launcher: self.id,
            guard: SocketAddr::new(LOOPBACK, self.guard.port()),
        }
    }

    fn begins(&mut self, digest: Digest, others: Vec<Peer>, committed: Option<(Digest, u64)>) {
        let mut start = start();
        start.digest = digest;
        *start.peers = Peers {
            key: key(),
            others,
            group: Vec::new(),
            committed,
        };
        self.saves.begins(&start);
    }

    fn committed(&mut self, generation: Digest, step: u64) {
        let told = self.saves.ask(SaveAsk::Committed { generation, step });
        assert!(told.is_empty());
    }

    /// Waits until something with these words is said.
    async fn says(&mut self, words: &str) -> String {
        loop {
            let Told { people, .. } = done(&mut self.saves, &self.two).await;
            if let Some(text) = people.into_iter().find(|text| text.contains(words)) {
                return text;
            }
        }
    }

    /// Strangers may take all places for a moment.
    fn link(&self) -> Link {
        let until = Instant::now() + LONG;
        loop {
            match Link::connect(SocketAddr::new(LOOPBACK, self.port), &key(), self.id) {
                Ok(link) => return link,
                Err(error) => assert!(Instant::now() < until, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Steps of what it holds, ascending.
    fn holds(&self) -> Vec<u64> {
        let Ok(Answer::Held { list, .. }) = self.link().ask(&Ask::List) else {
            panic!("it tells what it holds");
        };
        let mut steps: Vec<u64> = list.iter().map(|entry| entry.name.step).collect();
        steps.sort_unstable();
        steps
    }

    fn comes_to_hold(&self, steps: &[u64]) {
        let until = Instant::now() + LONG;
        while self.holds() != steps {
            assert!(Instant::now() < until, "{:?}, not {steps:?}", self.holds());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn name(step: u64) -> Name {
    Name::new(step, &GENERATION, "n0-0.safetensors").unwrap()
}

fn read(launcher: &Launcher, name: Name, bytes: usize) -> Option<Vec<u8>> {
    let (at, len) = (0, u32::try_from(bytes).unwrap());
    let mut link = launcher.link();
    let Answer::Bytes = link.ask(&Ask::Read { name, at, len }).unwrap() else {
        return None;
    };
    let mut into = vec![0; bytes];
    let until = Instant::now() + LONG;
    link.read(&mut into, until).unwrap();
    Some(into)
}

#[tokio::test]
async fn what_is_sealed_is_held_elsewhere_until_something_newer_is_committed() {
    let mut a = Launcher::new("na", Choice::Copy, u64::MAX);
    let mut b = Launcher::new("nb", Choice::Copy, u64::MAX);
    a.begins(GENERATION, vec![b.peer()], None);
    b.begins(GENERATION, vec![a.peer()], None);
    let slots = given(&mut a.saves, &a.two, 0).await;
    fill(&slots[0], 0, 7);
    a.saves.look(&a.two, muster_protocol::Time::ZERO);
    assert!(a.says("are in the memory of").await.contains("of nb"));
    a.comes_to_hold(&[7]);
    b.comes_to_hold(&[7]);
    let sealed = read(&a, name(7), 1_000_000).unwrap();
    assert!(read(&b, name(7), 1_000_000).unwrap() == sealed);
    assert!(!slots[0].is_kept());

    // It is of use until a newer one is committed; its slot serves both, filling and giving.
    for launcher in [&mut a, &mut b] {
        launcher.committed(GENERATION, 7);
    }
    assert!(slots[0].is_kept());
    let free = |launcher: &mut Launcher, side| {
        let slot = SlotId { k: 0, side };
        launcher.saves.ask(SaveAsk::Free { slot });
    };
    free(&mut a, 0);
    a.comes_to_hold(&[7]);
    fill(&slots[1], 0, 8);
    a.saves.look(&a.two, muster_protocol::Time::ZERO);
    b.comes_to_hold(&[7, 8]);
    for launcher in [&mut a, &mut b] {
        launcher.committed(GENERATION, 8);
    }
    b.comes_to_hold(&[8]);
    assert!(!slots[0].is_kept() && slots[1].is_kept());
    // What is filled anew is held no more, here.
    free(&mut a, 1);
    fill(&slots[0], 0, 9);
    a.comes_to_hold(&[8]);
    a.saves.look(&a.two, muster_protocol::Time::ZERO);
    b.comes_to_hold(&[8, 9]);

    // The next generation restores what is committed, and nothing else.
    for launcher in [&mut a, &mut b] {
        launcher.begins(LATER, vec![], Some((GENERATION, 8)));
    }
    b.comes_to_hold(&[8]);
    assert!(read(&b, name(8), 1_000).is_some());
    assert!(read(&b, name(9), 1_000).is_none());
    b.committed(LATER, 11);
    b.comes_to_hold(&[]);
}

#[tokio::test]
async fn a_launcher_without_room_or_without_replicas_says_so() {
    for (replicas, budget, words) in [
        (Choice::Copy, BYTES / 4, "raise --checkpoint-memory"),
        (Choice::Nothing, u64::MAX, "start it with --replicas 1"),
    ] {
        let mut a = Launcher::new("na", Choice::Copy, u64::MAX);
        let mut b = Launcher::new("nb", replicas, budget);
        a.begins(GENERATION, vec![b.peer()], None);
        b.begins(GENERATION, vec![a.peer()], None);
        let slots = given(&mut a.saves, &a.two, 0).await;
        fill(&slots[0], 0, 7);
        a.saves.look(&a.two, muster_protocol::Time::ZERO);
        let said = a.says("is not copied").await;
        assert!(said.contains(words) && said.contains("nb"), "{said}");
        assert!(b.holds().is_empty());
    }
}

#[tokio::test]
async fn a_flipped_bit_is_found_on_the_way() {
    let mut a = Launcher::new("na", Choice::Copy, u64::MAX);
    let mut b = Launcher::new("nb", Choice::Copy, u64::MAX);
    a.begins(GENERATION, vec![b.peer()], None);
    b.begins(GENERATION, vec![a.peer()], None);
    let slots = given(&mut a.saves, &a.two, 0).await;
    fill(&slots[0], 0, 7);
    let memory = std::fs::File::from(slots[0].fd().try_clone_to_owned().unwrap());
    let mut byte = [0];
    memory.read_exact_at(&mut byte, 1_000_000).unwrap();
    memory.write_all_at(&[byte[0] ^ 1], 1_000_000).unwrap();
    a.saves.look(&a.two, muster_protocol::Time::ZERO);
    let said = a.says("is not copied").await;
    assert!(said.contains("chunk 0"), "{said}");
    assert!(b.holds().is_empty());
}

/// A launcher's end that proves the key, and then does as it likes.
fn peer(then: impl FnOnce(Link) + Send + 'static) -> Peer {
    let launcher = LauncherId([2; 8]);
    let listener = TcpListener::bind((LOOPBACK, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let guard = TcpListener::bind((LOOPBACK, 0)).unwrap();
    let at = guard.local_addr().unwrap();
    std::thread::spawn(move || {
        let answer = guard::answer(launcher, Some(port));
        guard.accept().unwrap().0.write_all(&answer).unwrap();
        drop(guard);
        let (stream, _) = listener.accept().unwrap();
        then(Link::accept(stream, &key(), launcher).unwrap());
    });
    Peer {
        launcher,
        guard: at,
    }
}

/// Holds nothing, and lets its caller begin with a copy.
fn lets_begin(link: &mut Link) {
    assert_eq!(link.hear::<Ask>(LONG).unwrap(), Ask::List);
    let (who, pid, list) = ("deaf".into(), 1, Vec::new());
    link.say(&Answer::Held { who, pid, list }).unwrap();
    assert!(matches!(link.hear(LONG).unwrap(), Ask::Keep { .. }));
    link.say(&Answer::Go).unwrap();
}

#[tokio::test]
async fn a_peer_that_does_not_read_delays_no_save() {
    let (over, ends) = std::sync::mpsc::channel::<()>();
    let deaf = peer(move |mut link| {
        lets_begin(&mut link);
        let _ended = ends.recv();
    });
    let mut a = Launcher::new("na", Choice::Copy, u64::MAX);
    a.begins(GENERATION, vec![deaf], None);
    let slots = given(&mut a.saves, &a.two, 0).await;
    for (side, step) in [(0, 7), (1, 8)] {
        fill(&slots[usize::from(side)], 0, step);
        a.saves.look(&a.two, muster_protocol::Time::ZERO);
        let slot = SlotId { k: 0, side };
        let ask = SaveAsk::Write {
            slot,
            save: save(step),
        };
        assert!(a.saves.ask(ask).is_empty());
        let told = done(&mut a.saves, &a.two).await;
        assert!(
            matches!(&told.agent[..], [SaveNews::Written { .. }]),
            "{told:?}"
        );
        // The slot is free at once, whoever still reads it.
        a.saves.ask(SaveAsk::Free { slot });
        assert_eq!(
            slots[usize::from(side)].state().0,
            muster_checkpoint::slot::State::Free
        );
    }
    assert!(a.dir.path().join("job/data").is_dir());
    let said = a.says("is not copied").await;
    assert!(
        said.contains("deaf") || said.contains("launcher at"),
        "{said}"
    );
    drop(over);
}

#[test]
fn strangers_and_garbage_change_nothing() {
    let mut a = Launcher::new("na", Choice::Copy, u64::MAX);
    let at = SocketAddr::new(LOOPBACK, a.port);
    // It serves nobody before it was told the key.
    assert!(Link::connect(at, &key(), a.id).is_err());
    a.begins(GENERATION, vec![], None);
    let other = Key::of_cluster(Some(b"another")).of_job(Digest([8; 32]));
    assert!(Link::connect(at, &other, a.id).is_err());
    // Nor whoever means another launcher.
    assert!(Link::connect(at, &key(), LauncherId([2; 8])).is_err());
    let mut kept = Vec::new();
    for round in 0..100usize {
        let mut stream = TcpStream::connect(at).unwrap();
        let _cut_off = stream.write_all(&vec![round as u8; round * 331]);
        if round % 10 == 0 {
            kept.push(stream);
        }
    }
    // Who has the key may still say nonsense.
    let until = || Instant::now() + LONG;
    for bytes in [
        &[255u8; 8][..],
        &[9, 0, 0, 0, 1, 200],
        &[2, 0, 0, 0, 1, 250],
    ] {
        let mut link = a.link();
        // It may be refused before all of it is sent.
        let _cut_off = link.write(bytes, until());
        assert!(link.ask(&Ask::List).is_err());
    }
    let ask = Ask::Read {
        name: name(7),
        at: u64::MAX,
        len: 1,
    };
    assert!(a.link().ask(&ask).is_err());
    // A copy that ends early leaves nothing behind.
    let mut link = a.link();
    let ask = Ask::Keep {
        generation: GENERATION,
        name: name(7),
        bytes: 1 << 30,
    };
    assert_eq!(link.ask(&ask).unwrap(), Answer::Go);
    assert_eq!(a.link().ask(&ask).unwrap(), Answer::Have);
    drop(link);
    let until = Instant::now() + LONG;
    loop {
        let mut link = a.link();
        match link.ask(&ask).unwrap() {
            Answer::Go => break,
            Answer::Have => assert!(Instant::now() < until),
            other => panic!("{other:?}"),
        }
    }
    let restored = Ask::Restored {
        rank: 3,
        step: 7,
        from: vec![("n1's memory".into(), 5 << 20), ("the store".into(), 0)],
        why: Some("n2's memory failed\u{7}".into()),
    };
    assert_eq!(a.link().ask(&restored).unwrap(), Answer::Heard);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let said = runtime.block_on(a.says("rank 3 restored step 7"));
    assert_eq!(
        said,
        "rank 3 restored step 7: 5.0 MiB from n1's memory, 0 B from the store (n2's memory failed)"
    );
    drop(kept);
    // Nobody answers there any more.
    drop(a);
    let mut gone = TcpStream::connect(at);
    let closed = gone
        .as_mut()
        .map_or(true, |s| s.read(&mut [0]).is_ok_and(|n| n == 0));
    assert!(closed);
}

#[tokio::test]
async fn one_host_of_strangers_keeps_no_other_out() {
    let mut a = Launcher::new("na", Choice::Copy, u64::MAX);
    a.begins(GENERATION, vec![], None);
    let at = SocketAddr::new(LOOPBACK, a.port);
    let mut strangers = Vec::new();
    for _ in 0..400 {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        let from = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
        socket.bind(SocketAddr::new(from, 0)).unwrap();
        strangers.push(socket.connect(at).await.unwrap());
    }
    // They are silent, and keep what places they got for as long as a proof may take.
    let mut link = Link::connect(at, &key(), a.id).unwrap();
    assert!(matches!(link.ask(&Ask::List), Ok(Answer::Held { .. })));
    drop(strangers);
}
