mod parity;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use muster_checkpoint::hex::Id;
use muster_protocol::memory::{Answer, Ask, Entry, Key, Name, Peer, Whom};
use muster_protocol::{Digest, LauncherId};

use super::tests::{load_all, save_on_two};
use super::*;
use crate::memory::{Link, SOON};

fn key() -> Key {
    Key::of_cluster(Some(b"secret")).of_job(Digest([1; 32]))
}

const LAUNCHER: LauncherId = LauncherId(*b"launcher");

/// Ways in which a launcher answers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Does {
    Well,
    /// One bit is not as it was.
    Flips,
    /// It takes the question, and says nothing.
    Hangs,
    /// It has said that it holds it, and does not.
    Lies,
    /// It begins, and ends.
    Breaks,
}

type Files = BTreeMap<Name, Vec<u8>>;

/// A launcher that holds these, in another process for all that its reader knows. Its port.
fn launcher(who: &'static str, files: Files, does: Does) -> u16 {
    serve(move |link, ask| answer(link, who, &files, does, ask))
}

/// A launcher that answers like this. Its port.
fn serve(answer: impl Fn(&mut Link, Ask) + Clone + Send + 'static) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        loop {
            let (stream, _) = listener.accept().unwrap();
            let answer = answer.clone();
            thread::spawn(move || {
                let Ok(mut link) = Link::accept(stream, &key(), LAUNCHER) else {
                    return;
                };
                while let Ok(ask) = link.hear::<Ask>(SOON * 30) {
                    answer(&mut link, ask);
                }
            });
        }
    });
    port
}

fn answer(link: &mut Link, who: &str, files: &Files, does: Does, ask: Ask) {
    let until = std::time::Instant::now() + SOON * 30;
    match ask {
        Ask::List => {
            let entry = |(name, bytes): (&Name, &Vec<u8>)| Entry {
                name: name.clone(),
                bytes: bytes.len() as u64,
                fd: -1,
                base: 0,
            };
            let list = files.iter().map(entry).collect();
            let (who, pid) = (who.to_owned(), 1);
            link.say(&Answer::Held { who, pid, list }).unwrap();
        }
        Ask::Parities { .. } => {
            let list = Vec::new();
            link.say(&Answer::Parities { list }).unwrap();
        }
        Ask::Read { name, at, len } => {
            let mut part = files[&name][at as usize..][..len as usize].to_vec();
            match does {
                Does::Well => {}
                Does::Flips => part[len as usize / 2] ^= 8,
                Does::Hangs => return thread::sleep(SOON * 2),
                Does::Lies => return link.say(&Answer::Gone).unwrap(),
                Does::Breaks => part.truncate(len as usize / 2),
            }
            link.say(&Answer::Bytes).unwrap();
            let _gone = link.write(&part, until);
            if does == Does::Breaks {
                // Nothing more comes, ever.
                thread::sleep(SOON * 30);
            }
        }
        other => panic!("{other:?}"),
    }
}

/// The guard of a launcher at this port.
fn guard(port: u16) -> Peer {
    use std::io::Write;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let at = listener.local_addr().unwrap();
    thread::spawn(move || {
        loop {
            let (mut stream, _) = listener.accept().unwrap();
            let answer = [&b"MGRD\x01launcher"[..], &port.to_be_bytes()].concat();
            stream.write_all(&answer).unwrap();
        }
    });
    Peer {
        launcher: LAUNCHER,
        guard: at,
    }
}

/// A checkpoint, and its files by name.
fn checkpoint(place: &Path) -> (Id, Files) {
    let digest = save_on_two(place, 40);
    let opened = Restore::open(place, digest).unwrap();
    let files = opened.manifest().files.iter().map(|file| {
        let bytes = std::fs::read(place.join(&file.path)).unwrap();
        (Name::of_path(&file.path).unwrap(), bytes)
    });
    (digest, files.collect())
}

/// Nobody listens there. A port that was free a moment ago may be that of the next launcher.
const NOBODY: u16 = 1;

/// Opens it, with what these hold.
fn open(place: &Path, digest: Id, own: u16, peers: &[u16]) -> Restore {
    let whom = Whom {
        key: key(),
        own,
        launcher: LAUNCHER,
        others: peers.iter().map(|port| guard(*port)).collect(),
    };
    Restore::open_with(place, digest, &whom, 0).unwrap()
}

/// Loads all of it; what came from where.
fn restore(place: &Path, digest: Id, own: u16, peers: &[u16]) -> Result<Origins, LoadError> {
    let opened = open(place, digest, own, peers);
    load_all(&opened)?;
    Ok(opened.origins())
}

fn from(origins: &Origins, who: &str) -> u64 {
    let found = origins.from.iter().find(|(name, _)| name == who);
    found.map_or(0, |(_, bytes)| *bytes)
}

#[test]
fn what_peers_hold_is_not_read_from_the_store() {
    let place = tempfile::tempdir().unwrap();
    let (digest, files) = checkpoint(place.path());
    std::fs::remove_dir_all(place.path().join("data")).unwrap();
    let without = restore(place.path(), digest, NOBODY, &[]);
    assert!(without.is_err(), "{without:?}");
    let total: u64 = files.values().map(|file| file.len() as u64).sum();
    // Each holds one of the two files; a third is not there at all.
    let mut others = files.clone();
    let (name, first) = others.pop_first().unwrap();
    let peers = [
        launcher("n1", others, Does::Well),
        NOBODY,
        launcher("n2", [(name, first.clone())].into(), Does::Well),
    ];
    let origins = restore(place.path(), digest, NOBODY, &peers).unwrap();
    assert_eq!(from(&origins, "n2's memory"), first.len() as u64);
    assert_eq!(from(&origins, "n1's memory"), total - first.len() as u64);
    assert_eq!(from(&origins, "the store"), 0);
    assert_eq!(origins.why, None);
}

#[test]
fn what_a_peer_does_wrong_costs_nothing_but_time() {
    let place = tempfile::tempdir().unwrap();
    let (digest, files) = checkpoint(place.path());
    let total: u64 = files.values().map(|file| file.len() as u64).sum();
    for (does, words) in [
        (Does::Flips, "is damaged at byte 0"),
        (Does::Hangs, "n1's memory failed"),
        (Does::Lies, "no more"),
        (Does::Breaks, "n1's memory failed"),
    ] {
        let bad = launcher("n1", files.clone(), does);
        let origins = restore(place.path(), digest, NOBODY, &[bad]).unwrap();
        assert_eq!(from(&origins, "the store"), total, "{does:?}: {origins:?}");
        assert_eq!(from(&origins, "n1's memory"), 0, "{does:?}: {origins:?}");
        let why = origins.why.unwrap();
        assert!(why.contains(words), "{does:?}: {why}");
        // Another peer comes before the store.
        let good = launcher("n2", files.clone(), Does::Well);
        let origins = restore(place.path(), digest, NOBODY, &[bad, good]).unwrap();
        assert_eq!(
            from(&origins, "n2's memory"),
            total,
            "{does:?}: {origins:?}"
        );
    }
}

#[test]
fn damage_in_memory_and_on_disk_is_damage() {
    let place = tempfile::tempdir().unwrap();
    let (digest, files) = checkpoint(place.path());
    for (name, bytes) in &files {
        let file = format!("data/40-0505050505050505-1/{}", name.file);
        let mut bytes = bytes.clone();
        bytes[5_000] ^= 1;
        std::fs::write(place.path().join(file), bytes).unwrap();
    }
    let bad = launcher("n1", files.clone(), Does::Flips);
    let error = restore(place.path(), digest, NOBODY, &[bad]).unwrap_err();
    assert!(error.damage().is_some(), "{error}");
    let good = launcher("n2", files, Does::Well);
    restore(place.path(), digest, NOBODY, &[bad, good]).unwrap();
}

#[test]
fn this_nodes_memory_comes_first_and_by_descriptor() {
    let place = tempfile::tempdir().unwrap();
    let (digest, files) = checkpoint(place.path());
    let total: u64 = files.values().map(|file| file.len() as u64).sum();
    // Descriptors of this process, as its own launcher's; behind its port nothing is to be had.
    let open: Vec<(Name, std::fs::File, u64)> = (files.iter())
        .map(|(name, bytes)| {
            let file = format!("data/40-0505050505050505-1/{}", name.file);
            let file = std::fs::File::open(place.path().join(file)).unwrap();
            (name.clone(), file, bytes.len() as u64)
        })
        .collect();
    let list: Vec<Entry> = (open.iter())
        .map(|(name, file, bytes)| Entry {
            name: name.clone(),
            bytes: *bytes,
            fd: file.as_raw_fd(),
            base: 0,
        })
        .collect();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let own = listener.local_addr().unwrap().port();
    let told = thread::spawn(move || {
        let accept = || Link::accept(listener.accept().unwrap().0, &key(), LAUNCHER).unwrap();
        let mut link = accept();
        assert_eq!(link.hear::<Ask>(SOON).unwrap(), Ask::List);
        let (who, pid) = ("me".to_owned(), std::process::id());
        link.say(&Answer::Held { who, pid, list }).unwrap();
        assert_eq!(link.hear::<Ask>(SOON).unwrap(), Ask::Parities { above: 0 });
        let list = Vec::new();
        link.say(&Answer::Parities { list }).unwrap();
        let mut link = accept();
        let ask = link.hear::<Ask>(SOON * 30).unwrap();
        link.say(&Answer::Heard).unwrap();
        ask
    });
    let peer = launcher("n1", files, Does::Well);
    let origins = restore(place.path(), digest, own, &[peer]).unwrap();
    assert_eq!(from(&origins, "this node's memory"), total);
    let Ask::Restored { step: 40, from, .. } = told.join().unwrap() else {
        panic!("the launcher is told what came from where");
    };
    assert!(
        from.contains(&("this node's memory".into(), total)),
        "{from:?}"
    );
    assert!(from.contains(&("the store".into(), 0)), "{from:?}");
}

#[test]
fn several_loads_at_once_find_no_damage_that_is_none() {
    let place = tempfile::tempdir().unwrap();
    let (digest, files) = checkpoint(place.path());
    let bad = launcher("n1", files, Does::Flips);
    for _ in 0..5 {
        let opened = open(place.path(), digest, NOBODY, &[bad]);
        thread::scope(|scope| {
            let loads = [(); 6].map(|()| scope.spawn(|| load_all(&opened)));
            for load in loads {
                load.join().unwrap().unwrap();
            }
        });
        assert_eq!(from(&opened.origins(), "n1's memory"), 0);
    }
}

/// A launcher that holds nothing, and counts who asks it.
fn counts(asked: &Arc<AtomicU64>) -> u16 {
    let asked = asked.clone();
    serve(move |link, ask| {
        if ask == Ask::List {
            asked.fetch_add(1, Ordering::Relaxed);
        }
        answer(link, "n0", &Files::new(), Does::Well, ask);
    })
}

#[test]
fn of_many_launchers_no_more_are_asked_than_it_takes() {
    let place = tempfile::tempdir().unwrap();
    let (digest, files) = checkpoint(place.path());
    let total: u64 = files.values().map(|file| file.len() as u64).sum();
    let mut second = files.clone();
    let (name, first) = second.pop_first().unwrap();
    let asked = Arc::default();
    let empty = counts(&asked);
    let taken = |asked: &Arc<AtomicU64>| asked.swap(0, Ordering::Relaxed);
    // The first ones are asked in any case.
    let has_all = launcher("n1", files, Does::Well);
    let mut peers = vec![empty; 200];
    peers[20] = has_all;
    let origins = restore(place.path(), digest, NOBODY, &peers).unwrap();
    assert_eq!(from(&origins, "n1's memory"), total);
    assert_eq!(taken(&asked), 63);
    // What those do not have is looked for, no further than it is found.
    let mut peers = vec![empty; 200];
    peers[70] = launcher("n2", [(name, first.clone())].into(), Does::Well);
    peers[130] = launcher("n3", second, Does::Well);
    let origins = restore(place.path(), digest, NOBODY, &peers).unwrap();
    assert_eq!(from(&origins, "n2's memory"), first.len() as u64);
    assert_eq!(from(&origins, "n3's memory"), total - first.len() as u64);
    assert_eq!((from(&origins, "the store"), origins.why), (0, None));
    assert_eq!(taken(&asked), 142);
}
