//! The functions as a caller in C sees them; the launcher's side is played by the test.

use std::ffi::{CStr, CString, c_void};
use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::process::Command;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::thread;

use muster_checkpoint::dir::Dir;
use muster_checkpoint::hex::{Bytes, Id};
use muster_checkpoint::manifest::Origin;
use muster_checkpoint::part::{Note, keep};
use muster_checkpoint::persist::Options;
use muster_checkpoint::shelf;
use muster_checkpoint::slot::Slot;
use muster_protocol::Digest;
use muster_protocol::control::slots::{Given, word as slots};
use muster_protocol::control::{
    Reason, Stop, decode_step, encode_step, fresh_page, report, saving, word,
};
use muster_runtime::data::{Batch, Sampler, SamplerConfig, Tail};
use muster_runtime::saving::Restore;
use muster_runtime::{Session, WorkerEnv};

use super::*;
use crate::job::{Asked, Job, Place, Trains};
use crate::outcome::{Code, entry, muster_error};
use crate::raw::Tensor;
use crate::restore::Checkpoint;
use crate::sampler::{Config, Cursor, Dealt};
use crate::saves::{RawBlob, Sealed};

/// A launcher's side of a control page: a file, which the worker maps.
struct Page(File);

impl Page {
    fn new() -> Page {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&fresh_page()).unwrap();
        Page(file)
    }

    fn load(&self, at: usize) -> u64 {
        use std::os::unix::fs::FileExt as _;
        let mut bytes = [0; 8];
        self.0.read_exact_at(&mut bytes, at as u64).unwrap();
        u64::from_le_bytes(bytes)
    }

    fn store(&self, at: usize, value: u64) {
        use std::os::unix::fs::FileExt as _;
        self.0
            .write_all_at(&value.to_le_bytes(), at as u64)
            .unwrap();
    }

    fn job(&self, rank: u32, world: u32) -> Job {
        let env = WorkerEnv {
            rank,
            world,
            local_rank: rank,
            master: None,
            restart: 0,
            generation: 3,
            digest: Digest([5; 32]),
        };
        Job::new(Session::from_fd(self.0.as_raw_fd()).unwrap(), env, 1)
    }

    /// Answers one ask for slots.
    fn give(&self, given: Given) -> Vec<Arc<Slot>> {
        while self.load(slots::ASK) == 0
            || Given::decode(self.load(slots::GIVEN), self.load(slots::ASK)) != Given::Nothing
        {
            thread::yield_now();
        }
        let (image, note) = (self.load(slots::IMAGE), self.load(slots::NOTE));
        let both: Vec<_> = (0..2)
            .map(|_| Slot::create(image, note, 1).unwrap().0)
            .collect();
        self.store(slots::PID, std::process::id().into());
        for (at, slot) in slots::FDS.into_iter().zip(&both) {
            self.store(at, u64::try_from(slot.fd().as_raw_fd()).unwrap());
        }
        self.store(slots::GIVEN, given.encode(self.load(slots::ASK)));
        both
    }
}

/// What the last failure said.
fn said() -> String {
    // SAFETY: never null, and of this thread.
    unsafe { CStr::from_ptr(muster_error()) }
        .to_str()
        .unwrap()
        .to_owned()
}

fn fails(code: i32, expected: Code, says: &str) {
    assert_eq!(
        (code, said().contains(says)),
        (expected as i32, true),
        "{}",
        said()
    );
}

const ROWS: u64 = 300_000;

/// 7 bytes a value, so that no two places look alike.
fn content(len: usize, salt: u8) -> Vec<u8> {
    (0..len).map(|at| (at / 7) as u8 ^ salt).collect()
}

/// A tensor that all hold, one of rank 0's alone, and one of which each of two ranks has half.
struct State {
    names: Vec<CString>,
    shapes: Vec<Vec<u64>>,
    tensors: Vec<Tensor>,
}

impl State {
    fn new() -> State {
        let rows = ROWS / 2;
        let names = ["model.weight", "model.buffer", "sharded", "sharded"]
            .map(|n| CString::new(n).unwrap());
        let shapes = vec![
            vec![100_000],
            vec![3],
            vec![ROWS, 4],
            vec![0, 0],
            vec![rows, 4],
            vec![rows, 0],
        ];
        let (dtypes, ranks) = ([c"BF16", c"I64", c"F32", c"F32"], [u32::MAX, 0, 0, 1]);
        let mut state = State {
            names: names.into(),
            shapes,
            tensors: Vec::new(),
        };
        for i in 0..4 {
            let shape: &[u64] = &state.shapes[i.min(2)];
            let (offset, extent) = match i {
                2 => (state.shapes[3].as_ptr(), state.shapes[4].as_ptr()),
                3 => (state.shapes[5].as_ptr(), state.shapes[4].as_ptr()),
                _ => (null(), null()),
            };
            state.tensors.push(Tensor {
                name: state.names[i].as_ptr(),
                dtype: dtypes[i].as_ptr(),
                dims: shape.len() as u32,
                rank: ranks[i],
                shape: shape.as_ptr(),
                offset,
                extent,
            });
        }
        state
    }

    fn memory(rank: u8) -> [Vec<u8>; 3] {
        let half = (ROWS * 8) as usize;
        // Only rank 0's buffer counts.
        [
            content(200_000, 1),
            content(24, 2 + rank * 100),
            content(half, 10 + rank),
        ]
    }
}

/// Saves `step` as this rank, and leaves the slots.
fn save(page: &Page, rank: u32, step: u64) -> (Vec<Arc<Slot>>, [u8; 4]) {
    let job = page.job(rank, 2);
    let state = State::new();
    let mut writes = [9; 4];
    let slots = thread::scope(|scope| {
        let launcher = scope.spawn(|| page.give(Given::Slots));
        let tensors = state.tensors.as_ptr();
        // SAFETY: all as the header says, here and below.
        let code = unsafe { saves::muster_declare(&job, tensors, 4, writes.as_mut_ptr()) };
        assert_eq!(code, 0, "{}", said());
        launcher.join().unwrap()
    });
    let memory = State::memory(rank as u8);
    let mine = memory[2].as_ptr().cast::<c_void>();
    let data = [
        memory[0].as_ptr().cast(),
        memory[1].as_ptr().cast(),
        mine,
        mine,
    ];
    // What it does not write is not looked at.
    let data: Vec<*const c_void> = data
        .iter()
        .zip(writes)
        .map(|(at, writes)| if writes == 1 { *at } else { null() })
        .collect();
    let name = CString::new(format!("rng/{rank}")).unwrap();
    let blob = RawBlob {
        name: name.as_ptr(),
        data: [7, 8, 9].as_ptr(),
        bytes: 3,
    };
    let mut saved = Sealed::default();
    // SAFETY: as above.
    let code =
        unsafe { saves::muster_save(&job, step, data.as_ptr(), 4, &blob, 1, 60.0, &mut saved) };
    assert_eq!(code, 0, "{}", said());
    assert!(saved.bytes >= ROWS * 8 && saved.copied > 0.0, "{saved:?}");
    (slots, writes)
}

/// Makes what two ranks have saved durable, as their launchers do; the manifest's digest.
fn commit(place: &Path, step: u64) -> Id {
    let dir = Dir::open(place).unwrap();
    let (mut draft, mut parts) = (None, Vec::new());
    for rank in 0..2 {
        let (slots, writes) = save(&Page::new(), rank, step);
        // A tensor that both hold is written by one of them.
        assert_eq!(
            writes[1..],
            [
                u8::from(rank == 0),
                u8::from(rank == 0),
                u8::from(rank == 1)
            ]
        );
        let sealed = slots[0].take().unwrap().unwrap();
        let go_on = |_| std::ops::ControlFlow::Continue(());
        parts.push(
            keep(&sealed, &dir, "s", rank, Options::default(), &go_on)
                .unwrap()
                .digest,
        );
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
fn what_two_ranks_save_is_listed_and_loaded_by_one() {
    let place = tempfile::tempdir().unwrap();
    let digest = commit(place.path(), 40);
    let checkpoint = Checkpoint::new(Restore::open(place.path(), digest).unwrap()).unwrap();
    let mut found = Vec::new();
    for i in 0..3 {
        let mut tensor = State::new().tensors[0];
        // SAFETY: as the header says, here and below.
        assert_eq!(
            unsafe { restore::muster_restore_tensor(&checkpoint, i, &mut tensor) },
            0
        );
        // SAFETY: as above.
        let (name, dtype) = unsafe { (CStr::from_ptr(tensor.name), CStr::from_ptr(tensor.dtype)) };
        // SAFETY: as above.
        let shape = unsafe { std::slice::from_raw_parts(tensor.shape, tensor.dims as usize) };
        found.push((
            name.to_str().unwrap(),
            dtype.to_str().unwrap(),
            shape.to_vec(),
            tensor,
        ));
    }
    let list: Vec<_> = found
        .iter()
        .map(|(name, dtype, shape, _)| (*name, *dtype, shape.clone()))
        .collect();
    let expected = [
        ("model.buffer", "I64", vec![3]),
        ("model.weight", "BF16", vec![100_000]),
        ("sharded", "F32", vec![ROWS, 4]),
    ];
    assert_eq!(list, expected);

    let mut memory = [vec![0; 24], vec![0; 200_000], vec![0; (ROWS * 16) as usize]];
    let tensors: Vec<Tensor> = found.iter().map(|(.., tensor)| *tensor).collect();
    let into = memory.each_mut().map(|m| m.as_mut_ptr().cast::<c_void>());
    // SAFETY: as above.
    let code =
        unsafe { restore::muster_restore_load(&checkpoint, tensors.as_ptr(), into.as_ptr(), 3) };
    assert_eq!(code, 0, "{}", said());
    let [zero, one] = [0, 1].map(State::memory);
    assert!(memory[0] == zero[1] && memory[1] == zero[0]);
    assert!(memory[2] == [&zero[2][..], &one[2][..]].concat());

    // A part of it alone, across the border between the two that saved it.
    let (offset, extent) = ([ROWS / 2 - 1, 0], [2, 4]);
    let part = Tensor {
        offset: offset.as_ptr(),
        extent: extent.as_ptr(),
        ..tensors[2]
    };
    let mut rows = vec![0u8; 32];
    let at = [rows.as_mut_ptr().cast::<c_void>()];
    // SAFETY: as above.
    assert_eq!(
        unsafe { restore::muster_restore_load(&checkpoint, &part, at.as_ptr(), 1) },
        0
    );
    assert_eq!(rows, memory[2][(ROWS / 2 - 1) as usize * 16..][..32]);

    let (mut data, mut bytes) = (null(), 0);
    // SAFETY: as above.
    let mut blob = |name: &CStr| unsafe {
        let code = restore::muster_restore_blob(&checkpoint, name.as_ptr(), &mut data, &mut bytes);
        (
            code,
            std::slice::from_raw_parts(if data.is_null() { [].as_ptr() } else { data }, bytes)
                .to_vec(),
        )
    };
    assert_eq!(blob(c"rng/1"), (0, vec![7, 8, 9]));
    assert_eq!(blob(c"rng/2"), (Code::Nothing as i32, vec![]));

    // What cannot be loaded says why.
    let load = |tensor: &Tensor, into: &[*mut c_void]| {
        let twice = [*tensor, *tensor];
        // SAFETY: as above.
        unsafe {
            restore::muster_restore_load(&checkpoint, twice.as_ptr(), into.as_ptr(), into.len())
        }
    };
    let other = Tensor {
        name: c"other".as_ptr(),
        ..tensors[0]
    };
    fails(
        load(&other, &into[..1]),
        Code::Mismatch,
        "no tensor `other`",
    );
    let retyped = Tensor {
        dtype: c"F64".as_ptr(),
        ..tensors[0]
    };
    fails(load(&retyped, &into[..1]), Code::Mismatch, "model.buffer");
    fails(
        load(&tensors[0], &[into[0], into[0]]),
        Code::Argument,
        "share memory",
    );
    fails(load(&tensors[0], &[null_mut()]), Code::Argument, "is NULL");
    let file = place.path().join("data/s/n0-0.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    // The first tensor after the header: large ones come first.
    bytes[8192] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let all = |tensor: &Tensor, at| load(tensor, &[at]);
    let codes = [all(&tensors[1], into[1]), all(&tensors[2], into[2])];
    assert!(
        codes.contains(&(Code::Damaged as i32)),
        "{codes:?}: {}",
        said()
    );
}

#[test]
fn saves_that_cannot_be_say_why() {
    let (page, state) = (Page::new(), State::new());
    let job = page.job(0, 2);
    let mut writes = [0; 4];
    // SAFETY: as the header says, here and below.
    let mut declare = |tensors: *const Tensor, count| unsafe {
        saves::muster_declare(&job, tensors, count, writes.as_mut_ptr())
    };
    let half = declare(state.tensors.as_ptr(), 3);
    fails(half, Code::Plan, "sharded");
    let mut stranger = state.tensors[1];
    stranger.rank = 2;
    fails(declare(&stranger, 1), Code::Argument, "rank 2");
    stranger.dtype = c"Q4".as_ptr();
    fails(declare(&stranger, 1), Code::Argument, "Q4");
    fails(declare(null(), 1), Code::Argument, "tensors is NULL");
    // SAFETY: as above.
    let early = unsafe { saves::muster_save(&job, 0, null(), 0, null(), 0, 0.0, null_mut()) };
    fails(early, Code::Argument, "muster_declare");
    thread::scope(|scope| {
        scope.spawn(|| page.give(Given::NoStore));
        fails(declare(state.tensors.as_ptr(), 4), Code::NoStore, "--store");
    });
    let job = Page::new();
    let (slots, _) = save(&job, 0, 1);
    assert_eq!(slots[0].state().1, 1);
}

#[test]
fn both_slots_busy_is_told_apart() {
    let page = Page::new();
    let job = page.job(0, 1);
    let (shape, bytes) = ([4u64], [1u8; 4]);
    let tensor = Tensor {
        name: c"t".as_ptr(),
        dtype: c"U8".as_ptr(),
        dims: 1,
        rank: u32::MAX,
        shape: shape.as_ptr(),
        offset: null(),
        extent: null(),
    };
    let mut writes = 0;
    let _slots = thread::scope(|scope| {
        let launcher = scope.spawn(|| page.give(Given::Slots));
        // SAFETY: as the header says, here and below.
        assert_eq!(
            unsafe { saves::muster_declare(&job, &tensor, 1, &mut writes) },
            0
        );
        launcher.join().unwrap()
    });
    assert_eq!(writes, 1);
    let data = [bytes.as_ptr().cast::<c_void>()];
    // SAFETY: as above.
    let save = |step, wait| unsafe {
        saves::muster_save(&job, step, data.as_ptr(), 1, null(), 0, wait, null_mut())
    };
    assert_eq!((save(1, 9.0), save(2, 9.0)), (0, 0));
    fails(save(3, 0.0), Code::Busy, "being written");
    fails(save(3, f64::NAN), Code::Argument, "NaN");
}

#[test]
fn steps_stops_and_reports_go_through_the_page() {
    let page = Page::new();
    let job = page.job(0, 1);
    let step = |step| {
        let mut asked = Asked {
            action: 9,
            reason: 9,
            deadline: 9,
        };
        // SAFETY: as the header says, here and below.
        assert_eq!(
            unsafe { job::muster_step(&job, step, &mut asked) },
            0,
            "{}",
            said()
        );
        asked
    };
    assert_eq!(step(4), Asked::default());
    assert_eq!(decode_step(page.load(word::PROGRESS)), Some(4));
    page.store(word::CHECKPOINT, encode_step(Some(6)));
    page.store(word::STOP, Stop::Confirmed(6).encode());
    assert_eq!(step(5), Asked::default());
    assert_eq!(step(6).action, 1);
    // SAFETY: as above.
    assert_eq!(unsafe { job::muster_done(&job, 6, 1) }, 0);
    assert_eq!(decode_step(page.load(word::SAVED)), Some(6));
    page.store(word::STOP, Stop::Cancelled.encode());
    // Another one, which comes to nothing.
    page.store(word::CHECKPOINT, encode_step(Some(7)));
    page.store(word::STOP, Stop::Confirmed(7).encode());
    assert_eq!(step(7).action, 1);
    let why = c"no room".as_ptr();
    // SAFETY: as above.
    assert_eq!(unsafe { job::muster_failed(&job, 7, why) }, 0);
    assert_eq!(decode_step(page.load(word::SAVED)), Some(7));
    let words: Vec<u64> = saving::word::failure().map(|at| page.load(at)).collect();
    let length = page.load(saving::word::FAILED);
    let failure = saving::Failure::decode(&words.try_into().unwrap(), length);
    assert_eq!(
        failure.map(|f| (f.step, f.why)),
        Some((7, "no room".into()))
    );
    page.store(word::STOP, Stop::Cancelled.encode());
    page.store(word::CHECKPOINT, 0);
    page.store(word::DEADLINE, 1_234_567);
    page.store(word::REASON, Reason::Drain.encode());
    page.store(word::STOP, Stop::Confirmed(8).encode());
    assert_eq!(step(7), Asked::default());
    assert_eq!(
        step(8),
        Asked {
            action: 2,
            reason: 2,
            deadline: 1_234_567
        }
    );
    // SAFETY: as above.
    unsafe {
        assert_eq!(job::muster_done(&job, 8, 2), 0);
        fails(job::muster_done(&job, 8, 3), Code::Argument, "no action");
    }
    assert_eq!(decode_step(page.load(word::ACK)), Some(8));
    // SAFETY: as above.
    fails(
        unsafe { job::muster_step(&job, 7, &mut Asked::default()) },
        Code::Step,
        "in order",
    );

    let trains = Trains {
        steps: 9,
        training_loss: 0.5,
        samples_per_second: f64::NAN,
        learning_rate: f64::NAN,
        loss_scale: f64::NAN,
        data_seconds: f64::NAN,
        compute_seconds: f64::NAN,
        communication_seconds: f64::NAN,
        gradient_sync_seconds: 2.0,
    };
    // SAFETY: as above.
    assert_eq!(
        unsafe {
            (
                job::muster_report(&job, &trains),
                job::muster_report(&job, null()),
            )
        },
        (0, 0)
    );
    let values: Vec<u64> = report::word::values().map(|at| page.load(at)).collect();
    assert_eq!(
        (values[0], values[1], values[2], values[9]),
        (9, 1, 0.5f64.to_bits(), 2.0f64.to_bits())
    );
    assert_eq!(page.load(report::word::OPERATION), report::ALIVE);
    drop(job);
    assert_eq!(page.load(word::LINKED), 0);
}

#[test]
fn a_panic_is_a_code_and_nothing_is_an_argument() {
    let code = entry(|| panic!("on purpose"));
    fails(code, Code::Panic, "report it");
    // SAFETY: nulls are allowed everywhere.
    unsafe {
        fails(
            job::muster_open(null_mut(), null_mut()),
            Code::Argument,
            "job is NULL",
        );
        fails(
            job::muster_step(null(), 0, null_mut()),
            Code::Argument,
            "job is NULL",
        );
        fails(
            restore::muster_restore_open(null_mut(), null_mut()),
            Code::Argument,
            "NULL",
        );
        fails(
            restore::muster_restore_load(null(), null(), null(), 0),
            Code::Argument,
            "NULL",
        );
        fails(
            sampler::muster_sampler_open(null_mut(), null(), null()),
            Code::Argument,
            "NULL",
        );
        job::muster_close(null_mut());
        restore::muster_restore_close(null_mut());
        sampler::muster_sampler_close(null_mut());
        let mut release = null();
        assert_eq!(muster_abi(&mut release), ABI);
        assert_eq!(
            CStr::from_ptr(release).to_str().unwrap(),
            env!("CARGO_PKG_VERSION")
        );
        assert_eq!(muster_abi(null_mut()), ABI);
    }
    // Another thread has not failed.
    assert_eq!(thread::spawn(said).join().unwrap(), "");
}

fn sampler(config: &Config, state: *const u8) -> *mut Cursor {
    let mut cursor = null_mut();
    // SAFETY: as the header says.
    assert_eq!(
        unsafe { sampler::muster_sampler_open(&mut cursor, config, state) },
        0,
        "{}",
        said()
    );
    cursor
}

#[test]
fn the_sampler_deals_the_runtimes_batches_to_any_world() {
    let config = Config {
        samples: 100,
        seed: 7,
        batch: 12,
        epoch: 0,
        per_rank: 0,
        drop_tail: 1,
    };
    let mut ours = Sampler::new(SamplerConfig {
        samples: 100,
        seed: 7,
        batch: Batch::Global(12),
        microbatch: 1,
        tail: Tail::Drop,
    })
    .unwrap();
    let mut state: Option<[u8; 40]> = None;
    for world in [1, 3, 5, 2, 4, 12, 7, 3, 3, 1] {
        let plan = ours.plan(world as usize);
        let expected: Vec<u64> = (0..12).flat_map(|m| plan.indices(m)).collect();
        let mut dealt = Vec::new();
        let mut after = [0; 40];
        for rank in 0..world {
            let cursor = sampler(&config, state.as_ref().map_or(null(), |s| s.as_ptr()));
            let (mut into, mut batch) = ([0; 12], Dealt::default());
            // SAFETY: as the header says, here and below.
            let mut next = |room| unsafe {
                sampler::muster_sampler_next(
                    cursor,
                    rank,
                    world,
                    into.as_mut_ptr(),
                    room,
                    &mut batch,
                )
            };
            fails(next(0), Code::Argument, "do not fit");
            assert_eq!(next(12), 0, "{}", said());
            assert_eq!((batch.epoch, batch.samples), (plan.epoch(), 12));
            assert!(batch.count.abs_diff(12 / world as usize) <= 1, "{batch:?}");
            dealt.extend_from_slice(&into[..batch.count]);
            let (mut epoch, mut position) = (0, 0);
            // SAFETY: as above.
            unsafe {
                let at = after.as_mut_ptr();
                assert_eq!(
                    sampler::muster_sampler_state(cursor, at, &mut epoch, &mut position),
                    0
                );
                fails(
                    sampler::muster_sampler_next(cursor, 5, 5, null_mut(), 0, &mut batch),
                    Code::Argument,
                    "rank 5",
                );
                sampler::muster_sampler_close(cursor);
            }
        }
        assert_eq!(dealt, expected, "all ranks together, in order");
        ours.commit(&plan).unwrap();
        assert_eq!(after, ours.state().encode());
        state = Some(after);
    }
    assert_eq!(ours.state().epoch, 1, "it has gone through an epoch");
    let mut cursor = null_mut();
    let other = Config { seed: 8, ..config };
    // SAFETY: as above.
    unsafe {
        let state = state.unwrap();
        fails(
            sampler::muster_sampler_open(&mut cursor, &other, state.as_ptr()),
            Code::Argument,
            "seed",
        );
        fails(
            sampler::muster_sampler_open(&mut cursor, &config, [0; 40].as_ptr()),
            Code::Argument,
            "no state",
        );
        let none = Config { batch: 0, ..config };
        fails(
            sampler::muster_sampler_open(&mut cursor, &none, null()),
            Code::Argument,
            "zero",
        );
    }
    assert!(cursor.is_null());
    // An epoch by its number.
    let third = sampler(&Config { epoch: 3, ..config }, null());
    let (mut into, mut batch) = ([0; 12], Dealt::default());
    // SAFETY: as above.
    unsafe {
        assert_eq!(
            sampler::muster_sampler_next(third, 0, 1, into.as_mut_ptr(), 12, &mut batch),
            0
        );
        sampler::muster_sampler_close(third);
    }
    assert_eq!(batch.epoch, 3);
}

/// The numbers of `muster.h`, by a C compiler: structs are laid out as here, and codes are the same.
#[test]
fn the_header_says_the_same() {
    macro_rules! layout {
        ($($c:ident = $rust:ident { $($field:ident),* })*) => {
            vec![$((
                concat!("sizeof(", stringify!($c), ")"), size_of::<$rust>()
            ), $((
                concat!("offsetof(", stringify!($c), ", ", stringify!($field), ")"),
                std::mem::offset_of!($rust, $field)
            )),*),*]
        };
    }
    let mut numbers: Vec<(&str, i64)> = layout! {
        muster_place = Place { rank, world, local_rank, local_world, generation, restart }
        muster_directive = Asked { action, reason, deadline }
        muster_metrics = Trains { steps, training_loss, samples_per_second, learning_rate, loss_scale, data_seconds, compute_seconds, communication_seconds, gradient_sync_seconds }
        muster_tensor = Tensor { name, dtype, dims, rank, shape, offset, extent }
        muster_blob = RawBlob { name, data, bytes }
        muster_saved = Sealed { bytes, copied, waited }
        muster_origin = RestoreOrigin { step, world, reserved, tensors }
        muster_sampler_config = Config { samples, seed, batch, epoch, per_rank, drop_tail }
        muster_batch = Dealt { epoch, samples, count }
    }
    .into_iter()
    .map(|(what, number)| (what, number as i64))
    .collect();
    numbers.extend([
        ("MUSTER_ABI", i64::from(ABI)),
        ("MUSTER_ALL_RANKS", u32::MAX.into()),
        ("MUSTER_SAMPLER_STATE", sampler::STATE as i64),
        ("MUSTER_CHECKPOINT", 1),
        ("MUSTER_STOP", 2),
    ]);
    let codes = [
        ("MUSTER_OK", Code::Ok),
        ("MUSTER_NOTHING", Code::Nothing),
        ("MUSTER_ARGUMENT", Code::Argument),
        ("MUSTER_ENVIRONMENT", Code::Environment),
        ("MUSTER_STEP", Code::Step),
        ("MUSTER_UNDECIDED", Code::Undecided),
        ("MUSTER_NO_STORE", Code::NoStore),
        ("MUSTER_BUSY", Code::Busy),
        ("MUSTER_SAVE", Code::Save),
        ("MUSTER_PLAN", Code::Plan),
        ("MUSTER_RESTORE", Code::Restore),
        ("MUSTER_MISMATCH", Code::Mismatch),
        ("MUSTER_DAMAGED", Code::Damaged),
        ("MUSTER_PANIC", Code::Panic),
    ];
    numbers.extend(codes.map(|(name, code)| (name, i64::from(code as i32))));
    let place = tempfile::tempdir().unwrap();
    let (source, program) = (place.path().join("numbers.c"), place.path().join("numbers"));
    let prints: String = numbers
        .iter()
        .map(|(what, _)| format!("printf(\"%lld\\n\", (long long)({what}));\n"))
        .collect();
    let text = format!(
        "#include <stdio.h>\n#include \"muster.h\"\nint main(void) {{\n{prints}return 0;\n}}\n"
    );
    std::fs::write(&source, text).unwrap();
    let include = concat!("-I", env!("CARGO_MANIFEST_DIR"), "/include");
    let built = Command::new("cc")
        .args([
            "-std=c99",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-pedantic",
            include,
            "-o",
        ])
        .args([&program, &source])
        .output()
        .unwrap();
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
    let printed = Command::new(&program).output().unwrap().stdout;
    let printed = String::from_utf8(printed).unwrap();
    let found: Vec<(&str, i64)> = numbers
        .iter()
        .map(|(what, _)| *what)
        .zip(printed.lines().map(|line| line.parse().unwrap()))
        .collect();
    assert_eq!(found, numbers);
}

use crate::restore::Origin as RestoreOrigin;
