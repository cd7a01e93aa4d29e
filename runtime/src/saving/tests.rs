use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::thread;

use muster_checkpoint::dir::Dir;
use muster_checkpoint::hex::{Bytes, Id};
use muster_checkpoint::manifest::Origin;
use muster_checkpoint::part::{Note, keep};
use muster_checkpoint::persist::Options;
use muster_checkpoint::shelf;
use muster_checkpoint::slot::{Slot, State};
use muster_protocol::Digest;
use muster_protocol::control::fresh_page;
use muster_protocol::control::slots::{Given, word};

use super::*;
use crate::page::Page;
use crate::{Session, WorkerEnv};

const ROWS: u64 = 300_000;

/// A launcher's side: answers one ask for slots.
fn give(page: &Page, given: Given) -> Vec<std::sync::Arc<Slot>> {
    while page.load(word::ASK) == 0
        || Given::decode(page.load(word::GIVEN), page.load(word::ASK)) != Given::Nothing
    {
        thread::yield_now();
    }
    let slots: Vec<_> = (0..2)
        .map(|_| {
            let (image, note) = (page.load(word::IMAGE), page.load(word::NOTE));
            Slot::create(image, note, 1).unwrap().0
        })
        .collect();
    page.store(word::PID, std::process::id().into());
    for (at, slot) in word::FDS.into_iter().zip(&slots) {
        page.store(at, u64::try_from(slot.fd().as_raw_fd()).unwrap());
    }
    page.store(word::ROOM, 77);
    page.store(word::GIVEN, given.encode(page.load(word::ASK)));
    page.wake(word::GIVEN);
    slots
}

fn page() -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&fresh_page()).unwrap();
    file
}

fn env(rank: u32, world: u32) -> WorkerEnv {
    WorkerEnv {
        rank,
        world,
        local_rank: rank,
        master: None,
        restart: 0,
        generation: 3,
        digest: Digest([5; 32]),
    }
}

fn row(rank: u64, world: u64) -> Slice {
    let rows = ROWS / world;
    Slice {
        offset: vec![rank * rows, 0],
        extent: vec![rows, 4],
    }
}

/// A tensor that all hold, and one of which each rank has some rows.
fn held(rank: u64, world: u64) -> Vec<Held> {
    let mut sharded = Held::whole("sharded", Dtype::F32, &[ROWS, 4]);
    sharded.slices = vec![row(rank, world)];
    vec![Held::whole("weights", Dtype::F16, &[100_000]), sharded]
}

/// The bytes of the state before a step.
fn bytes(name: &str, step: u64) -> Vec<u8> {
    let count = match name {
        "weights" => 200_000,
        _ => ROWS * 16,
    };
    (0..count).map(|at| (at / 7 + step * 3) as u8).collect()
}

fn part(step: u64, slice: &Slice) -> Vec<u8> {
    let begin = slice.offset[0] * 16;
    bytes("sharded", step)[begin as usize..][..(slice.extent[0] * 16) as usize].to_vec()
}

/// Saves `step` on two ranks, makes it durable as launchers do, and returns the manifest's digest.
fn save_on_two(place: &Path, step: u64) -> Id {
    let peers: Vec<Peer> = (0..2)
        .map(|rank| Peer {
            node: 0,
            held: held(rank, 2),
        })
        .collect();
    let dir = Dir::open(place).unwrap();
    let (mut draft, mut parts) = (None, Vec::new());
    for rank in 0..2u32 {
        let file = page();
        let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
        let launcher = Page::from_file(&file).unwrap();
        let slots = thread::scope(|scope| {
            let launcher = scope.spawn(|| give(&launcher, Given::Slots));
            let mut saver = Saver::new(&mut session, &env(rank, 2), &peers).unwrap();
            let (weights, mine) = (bytes("weights", step), part(step, &row(rank.into(), 2)));
            let state = |name: &str, slice: &Slice| match name {
                "weights" => Some(&weights[..]),
                _ => (*slice == row(rank.into(), 2)).then_some(&mine[..]),
            };
            let blob = Blob {
                name: format!("rng/{rank}"),
                data: vec![7; 3],
            };
            let saved = saver.save(step, state, vec![blob]).unwrap();
            assert!(saved.bytes > ROWS * 8);
            launcher.join().unwrap()
        });
        let sealed = slots[0].take().unwrap().unwrap();
        assert_eq!((sealed.step, sealed.generation), (step, Bytes([5; 32])));
        let go_on = |_| std::ops::ControlFlow::Continue(());
        let kept = keep(&sealed, &dir, "s", rank, Options::default(), &go_on).unwrap();
        parts.push(kept.digest);
        draft = draft.or(Note::decode(&sealed.note).unwrap().draft);
    }
    let origin = Origin {
        job: "test".to_owned(),
        lineage: Bytes([0; 32]),
        generation: Bytes([5; 32]),
        number: 3,
        attempt: 1,
        step,
        world: 2,
        saved_at: 0,
    };
    let manifest = draft.unwrap().assemble(origin, &dir, "s", &parts).unwrap();
    shelf::put(&dir, &manifest).unwrap()
}

#[test]
fn what_two_ranks_save_three_load() {
    let place = tempfile::tempdir().unwrap();
    let digest = save_on_two(place.path(), 40);
    let checkpoint = Restore::open(place.path(), digest).unwrap();
    assert_eq!((checkpoint.step(), checkpoint.world()), (40, 2));
    assert_eq!(checkpoint.blob("rng/1"), Some(&[7; 3][..]));
    for rank in 0..3 {
        let slice = row(rank, 3);
        let (mut weights, mut mine) = (vec![0; 200_000], vec![0; (ROWS / 3 * 16) as usize]);
        let want = |name, dtype, shape, slice, into| Want {
            name,
            dtype,
            shape,
            slice,
            into,
        };
        let loaded = checkpoint.load(&mut [
            want(
                "weights",
                Dtype::F16,
                &[100_000],
                Slice::whole(&[100_000]),
                &mut weights,
            ),
            want("sharded", Dtype::F32, &[ROWS, 4], slice.clone(), &mut mine),
        ]);
        loaded.unwrap();
        assert!(weights == bytes("weights", 40) && mine == part(40, &slice));
    }
    let other = Restore::open(place.path(), Bytes([1; 32])).unwrap_err();
    assert!(matches!(other, RestoreError::Manifest { .. }), "{other}");
    let name = format!("manifest/{digest}.json");
    std::fs::write(place.path().join(name), "{}").unwrap();
    let damaged = Restore::open(place.path(), digest).unwrap_err();
    assert!(matches!(damaged, RestoreError::Damaged { .. }), "{damaged}");
}

#[test]
fn why_there_are_no_slots_is_said() {
    let peers = [Peer {
        node: 0,
        held: held(0, 1),
    }];
    let refused = |given| {
        let file = page();
        let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
        let launcher = Page::from_file(&file).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| give(&launcher, given));
            let refused = Saver::new(&mut session, &env(0, 1), &peers).unwrap_err();
            refused.to_string()
        })
    };
    assert!(refused(Given::NoStore).contains("--store"));
    let budget = refused(Given::Budget);
    assert!(
        budget.contains("room for 77") && budget.contains("--checkpoint-memory"),
        "{budget}"
    );
    assert!(refused(Given::Memory).contains("no memory"));
    let file = page();
    let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
    let few = Saver::new(&mut session, &env(0, 2), &peers).unwrap_err();
    assert!(matches!(few, SaveError::Peers { peers: 1, .. }), "{few}");
}

#[test]
fn a_rank_waits_for_a_slot_and_then_says_which_are_busy() {
    let file = page();
    let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
    let launcher = Page::from_file(&file).unwrap();
    let peers = [Peer {
        node: 0,
        held: held(0, 1),
    }];
    let (weights, sharded) = (bytes("weights", 0), bytes("sharded", 0));
    let state = |name: &str, _: &Slice| match name {
        "weights" => Some(&weights[..]),
        _ => Some(&sharded[..]),
    };
    let (mut saver, slots) = thread::scope(|scope| {
        let launcher = scope.spawn(|| give(&launcher, Given::Slots));
        let saver = Saver::new(&mut session, &env(0, 1), &peers).unwrap();
        (saver, launcher.join().unwrap())
    });
    let short = |_: &str, _: &Slice| Some(&weights[1..]);
    let error = saver.save(0, short, Vec::new()).unwrap_err();
    assert!(matches!(&error, SaveError::State { .. }), "{error}");
    saver.save(1, state, Vec::new()).unwrap();
    saver.save(2, state, Vec::new()).unwrap();
    saver.wait(std::time::Duration::ZERO);
    let busy = saver.save(3, state, Vec::new()).unwrap_err();
    let SaveError::Busy { slots: both } = busy else {
        panic!("{busy}");
    };
    assert_eq!(both, [(State::Sealed, 1), (State::Sealed, 2)]);
    saver.wait(std::time::Duration::from_secs(60));
    thread::scope(|scope| {
        scope.spawn(|| slots[0].take().unwrap().unwrap().release());
        saver.save(3, state, Vec::new()).unwrap();
    });
    assert_eq!(slots[0].state(), (State::Sealed, 3));

    // Blobs that have grown take larger slots.
    slots[0].take().unwrap().unwrap().release();
    let blob = Blob {
        name: "big".to_owned(),
        data: vec![1; 400_000],
    };
    let larger = thread::scope(|scope| {
        let larger = scope.spawn(|| give(&launcher, Given::Slots));
        saver.save(4, state, vec![blob]).unwrap();
        larger.join().unwrap()
    });
    assert_eq!(larger[0].state(), (State::Sealed, 4));
}
