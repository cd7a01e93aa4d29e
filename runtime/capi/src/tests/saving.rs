//! Saving and restoring.

use std::ffi::CStr;
use std::ptr::{null, null_mut};
use std::thread;

use muster_protocol::control::slots::Given;
use muster_runtime::saving::Restore;

use super::{Page, ROWS, State, commit, fails, host, said, save};
use crate::outcome::Code;
use crate::raw::{Memory, Tensor};
use crate::restore::Checkpoint;
use crate::{restore, saves};

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
    let into = memory.each_mut().map(|m| host(m.as_mut_ptr()));
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
    let at = [host(rows.as_mut_ptr())];
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
    let load = |tensor: &Tensor, into: &[Memory]| {
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
    fails(
        load(&tensors[0], &[host(null_mut())]),
        Code::Argument,
        "is NULL",
    );
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
    let data = [host(bytes.as_ptr().cast_mut())];
    // SAFETY: as above.
    let save = |step, wait| unsafe {
        saves::muster_save(&job, step, data.as_ptr(), 1, null(), 0, wait, null_mut())
    };
    assert_eq!((save(1, 9.0), save(2, 9.0)), (0, 0));
    fails(save(3, 0.0), Code::Busy, "being written");
    fails(save(3, f64::NAN), Code::Argument, "NaN");
    // Memory that this library does not know of.
    for (kind, reserved) in [(2, 0), (0, 1), (1, 9)] {
        let other = Memory {
            kind,
            reserved,
            ..data[0]
        };
        // SAFETY: as above.
        let code = unsafe { saves::muster_save(&job, 3, &other, 1, null(), 0, 0.0, null_mut()) };
        fails(code, Code::Argument, &format!("of kind {kind}"));
    }
}
