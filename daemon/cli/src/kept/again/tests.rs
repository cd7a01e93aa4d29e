use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use muster_checkpoint::source::Readers;
use muster_protocol::Digest;
use muster_protocol::record::CommitRef;

use super::*;
use crate::kept::testing::{Bench, FILE};

const NEWEST: Digest = Digest([9; 32]);

/// Somebody who waits for nothing, but notes for how long he would have.
struct Fake<F> {
    pauses: Mutex<Vec<Duration>>,
    /// In each pause.
    meanwhile: F,
    done: AtomicU64,
    /// Goes on until so much is done.
    until: u64,
}

impl<F: Fn(usize) + Sync> Fake<F> {
    fn new(meanwhile: F) -> Fake<F> {
        Fake {
            pauses: Mutex::default(),
            meanwhile,
            done: AtomicU64::new(0),
            until: u64::MAX,
        }
    }

    fn waited(&self) -> Duration {
        self.pauses.lock().unwrap().iter().sum()
    }
}

impl<F: Fn(usize) + Sync> Asker for Fake<F> {
    fn goes_on(&self, done: u64) -> ControlFlow<()> {
        match self.done.fetch_add(done, Ordering::Relaxed) + done < self.until {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        }
    }

    fn pause(&self, time: Duration) -> ControlFlow<()> {
        let mut pauses = self.pauses.lock().unwrap();
        pauses.push(time);
        (self.meanwhile)(pauses.len());
        self.goes_on(0)
    }
}

fn about(commit: &CommitRef, why: &str, all: bool) -> Question {
    Question {
        number: 1,
        manifest: commit.manifest,
        why: why.to_owned(),
        all,
    }
}

#[test]
fn a_store_that_is_away_for_a_moment_is_waited_for() {
    let bench = Bench::new();
    let commit = bench.save(NEWEST, 4, None);
    let question = about(&commit, "", true);
    let (mark, away) = (bench.root().join("muster-store"), bench.root().join("away"));
    std::fs::rename(&mark, &away).unwrap();
    // For a minute.
    let fake = Fake::new(|_| ());
    let state = look_again(&bench.place(), &question, 1, &fake);
    assert!(matches!(state, Some(State::Unreadable { .. })), "{state:?}");
    assert_eq!(fake.waited(), PATIENCE);
    let pauses = fake.pauses.into_inner().unwrap();
    assert_eq!(pauses[..3], [PAUSE, 2 * PAUSE, 4 * PAUSE]);
    // It comes back.
    let fake = Fake::new(|pauses| {
        if pauses == 3 {
            std::fs::rename(&away, &mark).unwrap();
        }
    });
    let state = look_again(&bench.place(), &question, 1, &fake);
    assert_eq!(state, Some(State::Verified));
    assert_eq!(fake.waited(), 7 * PAUSE);
    // What is not there needs no patience.
    std::fs::remove_file(bench.file(&commit)).unwrap();
    let fake = Fake::new(|_| ());
    let state = look_again(&bench.place(), &question, 1, &fake);
    assert!(matches!(state, Some(State::Damaged { .. })), "{state:?}");
    assert_eq!(fake.waited(), Duration::ZERO);
}

/// A file whose first reads fail.
struct Failing(AtomicU64);

impl Source for Failing {
    fn size(&self, _path: &str) -> io::Result<u64> {
        Ok(1)
    }

    fn read(&self, _path: &str, _at: u64, into: &mut [u8], _readers: Readers) -> io::Result<()> {
        let left = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
        into.fill(7);
        match left {
            Ok(_) => Err(io::ErrorKind::TimedOut.into()),
            Err(_) => Ok(()),
        }
    }
}

impl Shelf for Failing {
    fn list(&self) -> io::Result<Vec<Id>> {
        Ok(Vec::new())
    }

    fn manifest(&self, _digest: Id) -> io::Result<Vec<u8>> {
        Err(io::ErrorKind::NotFound.into())
    }
}

#[test]
fn a_read_that_fails_is_tried_again_where_it_was() {
    let fake = Fake::new(|_| ());
    let (shelf, asker) = (&Failing(AtomicU64::new(2)), &fake);
    let patient = Patient { shelf, asker };
    let mut byte = [0];
    patient.read("x", 0, &mut byte, Readers::One).unwrap();
    assert_eq!((byte, fake.waited()), ([7], 3 * PAUSE));
    // As long as somebody wants to know.
    let mut fake = Fake::new(|_| ());
    fake.until = 0;
    let (shelf, asker) = (&Failing(AtomicU64::new(2)), &fake);
    let patient = Patient { shelf, asker };
    let error = patient.read("x", 0, &mut byte, Readers::One).unwrap_err();
    assert_eq!(
        (error.kind(), fake.waited()),
        (io::ErrorKind::TimedOut, PAUSE)
    );
}

#[test]
fn only_what_a_node_could_not_read_is_read_for_it() {
    let bench = Bench::new();
    let commit = bench.save(NEWEST, 4, None);
    bench.flip(&commit);
    let look = |why: &str, all: bool| {
        let fake = Fake::new(|_| ());
        let state = look_again(&bench.place(), &about(&commit, why, all), 2, &fake);
        (state.unwrap(), fake.done.into_inner())
    };
    // A file that was looked at counts as one.
    let (state, done) = look("it finds another store", false);
    assert_eq!((state, done), (State::Unchecked, 1));
    let path = bench.file(&commit);
    let path = path.strip_prefix(bench.job()).unwrap().display();
    let (state, _) = look(
        &format!("an input/output error when it reads {path}"),
        false,
    );
    assert!(matches!(state, State::Damaged { .. }), "{state:?}");
    assert!(matches!(look("", true).0, State::Damaged { .. }));
    bench.flip(&commit);
    let (state, done) = look("", true);
    assert_eq!((state, done), (State::Verified, 1 + FILE as u64));
}

#[test]
fn nobody_is_told_who_does_not_want_to_know() {
    let bench = Bench::new();
    let commit = bench.save(NEWEST, 4, None);
    for until in [0, 1, 2] {
        let mut fake = Fake::new(|_| ());
        fake.until = until;
        let state = look_again(&bench.place(), &about(&commit, "", true), 2, &fake);
        assert_eq!(state, None, "{until}");
    }
}
