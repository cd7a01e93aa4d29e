use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use proptest::prelude::*;

use super::super::tests::{AtWrite, Faulty};
use super::*;
use crate::hex::Bytes;
use crate::place::Place as _;
use crate::slot::{Ended, Far, FarError, Image, Slot, SlotError, Source, Span};
use crate::testing::ramp;

const CHUNKS: u64 = 5;

/// So long anything here is waited for.
const SOON: Duration = Duration::from_secs(30);

/// Brings nothing, and holds a fill up at one chunk until it is told to go on, or to give up.
struct Gate {
    at: u64,
    goes: Mutex<Receiver<bool>>,
}

impl Far for Gate {
    fn spans(&self) -> &[Span] {
        &[]
    }

    fn begin(&self) -> Result<(), FarError> {
        Ok(())
    }

    fn bring(&self, _image: *mut [u8], begin: u64, _end: u64) -> Result<(), FarError> {
        if begin != self.at * CHUNK {
            return Ok(());
        }
        match self.goes.lock().unwrap().recv_timeout(SOON) {
            Ok(true) => Ok(()),
            _ => Err("given up".into()),
        }
    }

    fn end(&self) -> Ended {
        Ended::Well
    }
}

/// A slot that is being filled with these bytes as far as this chunk; what lets it go on, and the worker.
fn filling(
    slot: &Arc<Slot>,
    bytes: &[u8],
    at: u64,
) -> (
    Sender<bool>,
    thread::JoinHandle<Result<Duration, SlotError>>,
) {
    let (go, goes) = channel();
    let gate = Gate {
        at,
        goes: Mutex::new(goes),
    };
    let (worker, bytes) = (Arc::clone(slot), bytes.to_vec());
    let worker = thread::spawn(move || {
        let sources = [Source {
            at: 0,
            bytes: &bytes,
        }];
        let image = Image {
            step: 3,
            generation: Bytes([1; 32]),
            bytes: bytes.len() as u64,
            sources: &sources,
            note: b"",
        };
        worker.fill_with(&image, &gate, 1)
    });
    let began = Instant::now();
    while slot.follow().and_then(|f| f.chunk(at - 1)).is_none() {
        assert!(began.elapsed() < SOON, "the worker fills nothing");
        thread::sleep(LOOK);
    }
    (go, worker)
}

fn slot() -> Arc<Slot> {
    Slot::create(CHUNKS * CHUNK, 0, 2).unwrap().0
}

/// The image of a fill: whole pages, the last chunk short.
fn state(number: u8) -> Vec<u8> {
    let mut bytes = ramp(&[(CHUNKS - 1) * CHUNK + 4096], 1);
    bytes.iter_mut().for_each(|byte| *byte ^= number);
    bytes
}

/// None, and a word about it, where the file system has no files without names, or no O_DIRECT.
fn begin(dir: &Dir, slot: &Arc<Slot>) -> Option<Begun> {
    begin_by(dir, slot, Options::default())
}

fn begin_by(dir: &Dir, slot: &Arc<Slot>, options: Options) -> Option<Begun> {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::DIRECT;
    if unix::openat(dir.fd(), ".", flags, Mode::from_raw_mode(0o600)).is_err() {
        eprintln!("skipped: nothing can be written ahead on this file system");
        return None;
    }
    Some(dir.begin_ahead(slot.follow().unwrap(), options).unwrap())
}

/// Writes by a thread of its own; what stops it, counts, and comes of it.
struct Follows {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    thread: thread::JoinHandle<Result<Ahead, Fault>>,
}

fn follow(begun: Begun) -> Follows {
    let (stop, done) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
    let (stops, counts) = (Arc::clone(&stop), Arc::clone(&done));
    let thread = thread::spawn(move || begun.follow(3, &stops, &counts));
    Follows { stop, done, thread }
}

impl Follows {
    fn until(&self, chunks: u64) {
        let began = Instant::now();
        while self.done.load(Ordering::Relaxed) < chunks * CHUNK {
            assert!(began.elapsed() < SOON, "nothing is written");
            thread::sleep(LOOK);
        }
    }

    fn end(self) -> Result<Ahead, Fault> {
        self.thread.join().unwrap()
    }
}

fn go_on(_: super::super::Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn chunks_are_written_before_the_seal_and_the_file_is_what_was_sealed() {
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open(place.path()).unwrap();
    let below = dir.make("data").unwrap();
    for (number, ring) in [(1, false), (2, true)] {
        let (slot, bytes) = (slot(), state(number));
        let (go, worker) = filling(&slot, &bytes, 3);
        let options = Options {
            ring,
            ..Options::default()
        };
        let Some(begun) = begin_by(&dir, &slot, options) else {
            return;
        };
        let follows = follow(begun);
        follows.until(3);
        assert_eq!(dir.names().unwrap(), ["data"]);
        go.send(true).unwrap();
        worker.join().unwrap().unwrap();
        let ahead = follows.end().unwrap();
        let sealed = slot.take().unwrap().unwrap();
        let name = format!("file-{number}");
        let written = ahead.publish(&below, &name, &sealed).unwrap().unwrap();
        assert!(matches!(written.path, Path::Direct | Path::Ring));
        assert!(std::fs::read(place.path().join("data").join(&name)).unwrap() == bytes);
        // As it would be said of it without that.
        let plain = below.keep("plain", &sealed, None, Options::default(), &go_on);
        assert_eq!(written.chunks, plain.unwrap().chunks);
        std::fs::remove_file(place.path().join("data/plain")).unwrap();
    }
    assert_eq!(below.names().unwrap(), ["file-1", "file-2"]);
    // No temporary name is left, either.
    assert_eq!(
        std::fs::read_dir(place.path().join("data"))
            .unwrap()
            .count(),
        2
    );
}

#[test]
fn of_a_fill_that_is_given_up_nothing_is_left() {
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open(place.path()).unwrap();
    let slot = slot();
    let (go, worker) = filling(&slot, &state(1), 2);
    let Some(begun) = begin(&dir, &slot) else {
        return;
    };
    let follows = follow(begun);
    follows.until(2);
    go.send(false).unwrap();
    worker.join().unwrap().unwrap_err();
    assert!(matches!(follows.end(), Err(Fault::Cancelled)));
    // Nor of one whose worker goes on while nobody wants it.
    let (go, worker) = filling(&slot, &state(1), 2);
    let follows = follow(begin(&dir, &slot).unwrap());
    follows.until(2);
    follows.stop.store(true, Ordering::Relaxed);
    assert!(matches!(follows.end(), Err(Fault::Cancelled)));
    go.send(true).unwrap();
    worker.join().unwrap().unwrap();
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
}

#[test]
fn nothing_more_is_written_once_it_comes_to_nothing() {
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open(place.path()).unwrap();
    let slot = slot();
    let (go, worker) = filling(&slot, &state(1), 3);
    let Some(begun) = begin(&dir, &slot) else {
        return;
    };
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let work = Work::new(&begun.out, &begun.following, &stop, &done);
    assert!(work.wait(2).is_some());
    // Chunks that are there are no reason to go on.
    let failed: Result<(), Fault> = work.ends_with(Err(Fault::Short { at: 0 }));
    assert!(failed.is_err());
    assert_eq!(work.wait(2), None);
    assert!(matches!(work.while_it_is_filled(), Err(Fault::Cancelled)));
    assert!(matches!(work.sealed(), Err(Fault::Cancelled)));
    assert!(matches!(work.after_the_seal(2), Err(Fault::Cancelled)));
    let work = Work::new(&begun.out, &begun.following, &stop, &done);
    stop.store(true, Ordering::Relaxed);
    assert_eq!(work.wait(2), None);
    stop.store(false, Ordering::Relaxed);
    // A worker that unseals its slot: what was there for others is not waited for.
    work.hashed.store(true, Ordering::Relaxed);
    assert_eq!(work.wait(3), None);
    assert!(work.wait(2).is_some());
    assert_eq!(done.into_inner(), 0);
    go.send(true).unwrap();
    worker.join().unwrap().unwrap();
}

#[test]
fn a_disk_that_fails_ends_it_at_once_with_its_error() {
    // At the second write, while the slot is filled and nobody lets it go on; at one after the seal; and a file system
    // that refuses O_DIRECT at the write: nothing is written ahead there.
    let cases: [(AtWrite, bool, Option<Errno>); 3] = [
        (
            |n, _| (n == 1).then_some(Err(Errno::IO)),
            false,
            Some(Errno::IO),
        ),
        (
            |n, _| (n >= 3).then_some(Err(Errno::IO)),
            true,
            Some(Errno::IO),
        ),
        (|n, _| (n == 1).then_some(Err(Errno::INVAL)), false, None),
    ];
    for (write, seals, why) in cases {
        let faulty = Faulty::at_write(write);
        let slot = slot();
        let (go, worker) = filling(&slot, &state(1), 3);
        let following = slot.follow().unwrap();
        let out = out(&faulty, &following);
        let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
        let fill = || {
            go.send(true).unwrap();
            worker.join().unwrap().unwrap();
        };
        let fill = match seals {
            true => {
                fill();
                None
            }
            false => Some(fill),
        };
        let fault = Work::new(&out, &following, &stop, &done)
            .run(2)
            .unwrap_err();
        match (&fault, why) {
            (Fault::Io { source, .. }, Some(why)) => {
                assert_eq!(source.raw_os_error(), Some(why.raw_os_error()));
            }
            (Fault::Cancelled, None) => {}
            _ => panic!("{fault:?}"),
        }
        if let Some(fill) = fill {
            assert_eq!(following.state(), Fill::Going);
            fill();
        }
    }
}

/// A file for what is copied into a slot, on a disk that a test answers for.
fn out<'d>(disk: &'d Faulty, following: &Following) -> Out<'d, Faulty> {
    let file = tempfile::tempfile().unwrap().into();
    Out::new(disk, file, following.bytes(), true, Options::default()).unwrap()
}

#[test]
fn a_seal_that_does_not_come_is_not_waited_for_without_end() {
    let slot = slot();
    let (go, worker) = filling(&slot, &state(1), 3);
    let following = slot.follow().unwrap();
    let disk = Faulty::default();
    let out = out(&disk, &following);
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let work = Work {
        patience: LOOK_AT_SEAL * 10,
        ..Work::new(&out, &following, &stop, &done)
    };
    // The worker stands at its fourth chunk.
    let began = Instant::now();
    assert!(matches!(work.run(2), Err(Fault::Cancelled)));
    assert!(began.elapsed() >= LOOK_AT_SEAL * 10);
    assert_eq!(following.state(), Fill::Going);
    go.send(true).unwrap();
    worker.join().unwrap().unwrap();
}

#[test]
fn what_another_fill_left_is_no_file_of_this_one() {
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open(place.path()).unwrap();
    let slot = slot();
    let ahead = |number| {
        let (go, worker) = filling(&slot, &state(number), 2);
        let follows = begin(&dir, &slot).map(follow);
        go.send(true).unwrap();
        worker.join().unwrap().unwrap();
        Some(follows?.end().unwrap())
    };
    let Some(older) = ahead(1) else {
        return;
    };
    // Its process takes it up, and is taken for dead: the seal is another one, and the bytes are the same.
    drop(slot.take().unwrap());
    let sealed = slot.take().unwrap().unwrap();
    assert!(!older.is(&sealed));
    sealed.release();
    let newer = ahead(2).unwrap();
    let sealed = slot.take().unwrap().unwrap();
    for (name, ahead) in [("older", older), ("newer", newer)] {
        (dir.keep(name, &sealed, Some(ahead), Options::default(), &go_on)).unwrap();
        assert!(std::fs::read(place.path().join(name)).unwrap() == state(2));
    }
}

#[test]
fn a_chunk_that_changes_once_it_is_written_is_found() {
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open(place.path()).unwrap();
    let (slot, bytes) = (slot(), state(1));
    let (go, worker) = filling(&slot, &bytes, 3);
    let Some(begun) = begin(&dir, &slot) else {
        return;
    };
    let follows = follow(begun);
    follows.until(3);
    // A worker that keeps to nothing: it copies a chunk again.
    slot.fill_chunk_again(1, 77);
    go.send(true).unwrap();
    worker.join().unwrap().unwrap();
    assert!(matches!(follows.end(), Err(Fault::Damaged { at: CHUNK })));
}

#[test]
fn a_name_that_is_taken_stays_and_a_wrong_one_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open(place.path()).unwrap();
    std::fs::write(place.path().join("taken"), "another's").unwrap();
    for (name, fault) in [("taken", "already"), ("../x", "name")] {
        let slot = slot();
        let (go, worker) = filling(&slot, &state(1), 2);
        let Some(begun) = begin(&dir, &slot) else {
            return;
        };
        go.send(true).unwrap();
        worker.join().unwrap().unwrap();
        let ahead = follow(begun).end().unwrap();
        let sealed = slot.take().unwrap().unwrap();
        let error = dir.keep(name, &sealed, Some(ahead), Options::default(), &go_on);
        let error = error.unwrap_err().to_string();
        assert!(error.contains(fault), "{error}");
    }
    assert_eq!(
        std::fs::read(place.path().join("taken")).unwrap(),
        b"another's"
    );
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 1);
}

proptest! {
    #[test]
    fn every_chunk_has_its_turn_once(count in 0usize..300, share in 0usize..=100) {
        let begun = count * share / 100;
        let mut order = spread(begun, count);
        // The disk waits for the first at once, if for any.
        prop_assert!(begun == count || order[0] == begun);
        order.sort_unstable();
        prop_assert!(order.into_iter().eq(0..count));
    }
}
