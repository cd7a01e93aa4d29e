//! The functions as a caller in C sees them; the launcher's side is played by the test.

mod cuda;
mod header;
mod job;
mod sampler;
mod saving;

use std::ffi::{CStr, CString, c_void};
use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::thread;

use muster_checkpoint::dir::Dir;
use muster_checkpoint::hex::{Bytes, Id};
use muster_checkpoint::manifest::Origin;
use muster_checkpoint::part::{Note, keep};
use muster_checkpoint::persist::Options;
use muster_checkpoint::shelf;
use muster_checkpoint::slot::{self, Slot};
use muster_protocol::Digest;
use muster_protocol::control::fresh_page;
use muster_protocol::control::slots::{Given, word as slots};
use muster_runtime::{Session, WorkerEnv};

use super::saves;
use crate::job::Job;
use crate::outcome::{Code, muster_error};
use crate::raw::{HOST, Memory, Tensor};
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

/// Text of the last failure.
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

/// Memory of this process.
fn host(at: *mut u8) -> Memory {
    Memory {
        at: at.cast::<c_void>(),
        kind: HOST,
        reserved: 0,
        stream: null_mut(),
    }
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
fn save(page: &Page, rank: u32, step: u64) -> (Vec<Arc<Slot>>, [bool; 4]) {
    let job = page.job(rank, 2);
    let state = State::new();
    let mut wants = [9; 4];
    let slots = thread::scope(|scope| {
        let launcher = scope.spawn(|| page.give(Given::Slots));
        let tensors = state.tensors.as_ptr();
        // SAFETY: all as the header says, here and below.
        let code = unsafe { saves::muster_declare(&job, tensors, 4, wants.as_mut_ptr()) };
        assert_eq!(code, 0, "{}", said());
        launcher.join().unwrap()
    });
    let writes = wants.map(|wants| wants & 1 != 0);
    let memory = State::memory(rank as u8);
    let data = [&memory[0], &memory[1], &memory[2], &memory[2]];
    // What it does not write is not looked at.
    let data: Vec<Memory> = (data.iter().zip(writes))
        .map(|(bytes, writes)| match writes {
            true => host(bytes.as_ptr().cast_mut()),
            false => host(null_mut()),
        })
        .collect();
    let first = (memory.iter().chain(memory.last())).zip(wants);
    let first: Vec<*const u8> = first
        .map(|(bytes, wants)| match wants & 2 != 0 {
            true => bytes[..4096].as_ptr(),
            false => null(),
        })
        .collect();
    // SAFETY: as above.
    let code = unsafe { saves::muster_look(&job, first.as_ptr(), 4) };
    assert_eq!(code, 0, "{}", said());
    assert_eq!(
        wants.map(|wants| wants & 2),
        [2, 0, 0, 0],
        "what two ranks hold"
    );
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
    let saved = [0, 1].map(|rank| {
        let (slots, writes) = save(&Page::new(), rank, step);
        // A tensor that both hold is written by one of them.
        assert_eq!(writes[1..], [rank == 0, rank == 0, rank == 1]);
        slots[0].take().unwrap().unwrap()
    });
    durable(place, step, &saved)
}

/// Makes what ranks have sealed durable.
fn durable(place: &Path, step: u64, sealed: &[slot::Sealed]) -> Id {
    let dir = Dir::open(place).unwrap();
    let (mut draft, mut parts) = (None, Vec::new());
    for (rank, sealed) in (0..).zip(sealed) {
        let go_on = |_| std::ops::ControlFlow::Continue(());
        let kept = keep(sealed, &dir, "s", rank, None, Options::default(), &go_on).unwrap();
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
        world: parts.len() as u32,
        saved_at: 0,
    };
    let manifest = draft.unwrap().assemble(origin, &dir, "s", &parts).unwrap();
    shelf::put(&dir, &manifest).unwrap()
}
