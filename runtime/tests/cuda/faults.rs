//! Faults of the driver, and what stays as it was.

use std::error::Error as _;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

use muster_checkpoint::slot::{IMAGE_AT, State};
use muster_runtime::cuda::CudaError;
use muster_runtime::saving::{
    LoadError, Memory, MemoryMut, OnDevice, OnDeviceMut, SaveError, Slice, Way,
};

use super::support::*;

/// The driver's error.
fn cause(error: &SaveError) -> &CudaError {
    assert!(
        matches!(error, SaveError::Device(_) | SaveError::Lost(_)),
        "{error:?}"
    );
    error.source().unwrap().downcast_ref().unwrap()
}

/// Straight and through pinned memory, at once and only when somebody waits for it.
const WAYS: [&str; 4] = ["", "register:801;", "lazy;", "lazy;register:801;"];

fn states(worker: &Worker) -> Vec<State> {
    let states = worker.slots.iter().map(|slot| slot.state().0);
    states.collect()
}

#[test]
fn an_error_in_the_middle_seals_nothing_and_the_last_save_stays() {
    for way in WAYS {
        script(way);
        let place = tempfile::tempdir().unwrap();
        let mut worker = Worker::new();
        worker.train(1);
        worker.save(1).unwrap();
        worker.train(2);
        // Of each way's copies one of the first and one of the last.
        for copy in [1, 7] {
            script(&format!("{way}passing:{copy}:719"));
            let error = worker.save(2).unwrap_err();
            assert!(
                matches!(*error, SaveError::Device(_))
                    && error.to_string().contains("nothing was saved"),
                "{error:?}"
            );
            let said = cause(&error).to_string();
            assert!(said.contains("CUDA error 719"), "{said}");
            assert_eq!(
                states(&worker),
                [State::Sealed, State::Free],
                "{way}: {copy}"
            );
        }
        let restore = worker.commit(place.path(), 1);
        let loaded = load(&restore);
        for (name, _, bytes) in TENSORS {
            assert!(loaded[name] == content(name, bytes, 1), "{way}: {name}");
        }
        // Of an error that passes the next save knows nothing.
        script(way);
        worker.save(4).unwrap();
        let loaded = load(&worker.commit(place.path(), 4));
        for (name, _, bytes) in TENSORS {
            assert!(loaded[name] == content(name, bytes, 2), "{way}: {name}");
        }
    }
}

#[test]
fn what_copies_may_still_write_to_is_never_used_again() {
    for way in WAYS {
        let straight = !way.contains("register");
        for copy in [1, 7] {
            script(way);
            let before = live();
            let place = tempfile::tempdir().unwrap();
            let mut worker = Worker::new();
            worker.train(1);
            worker.save(1).unwrap();
            worker.train(2);
            script(&format!("{way}copy:{copy}:700"));
            let error = worker.save(2).unwrap_err();
            assert!(matches!(*error, SaveError::Lost(_)), "{error:?}");
            assert!(error.to_string().contains("end it"), "{error}");
            let said = cause(&error).to_string();
            assert!(said.contains("illegal memory access"), "{said}");
            // No device writes to the slot itself where it has buffers between.
            let second = match straight {
                true => State::Filling,
                false => State::Free,
            };
            assert_eq!(states(&worker), [State::Sealed, second], "{way}: {copy}");
            let restore = worker.commit(place.path(), 1);
            let loaded = load(&restore);
            for (name, _, bytes) in TENSORS {
                assert!(loaded[name] == content(name, bytes, 1), "{way}: {name}");
            }
            // Nor is anything begun anew, whatever the driver says by now.
            script(way);
            let again = worker.save(3).unwrap_err();
            assert!(matches!(*again, SaveError::Lost(_)), "{again:?}");
            let why = again.source().unwrap().to_string();
            assert!(why.contains("illegal memory access"), "{why}");
            assert_eq!(states(&worker), [State::Free, second], "{way}: {copy}");
            // It stays as it is when all else goes, with a context to be in.
            drop((restore, worker));
            let [contexts, .., registered, pinned] = live();
            let kept = (registered - before[4], pinned - before[5]);
            match straight {
                true => assert_eq!(kept, (1, 0), "{way}: {copy}"),
                false => assert!(kept.0 == 0 && (1..=6).contains(&kept.1), "{way}: {kept:?}"),
            }
            assert!(contexts > before[0], "{way}: {copy}");
        }
    }
}

#[test]
fn a_worker_whose_slot_is_kept_from_it_saves_what_is_the_hosts() {
    script("");
    let mut worker = Worker::new();
    script("copy:1:700");
    worker.save(1).unwrap_err();
    assert_eq!(states(&worker), [State::Filling, State::Free]);
    let host = vec![7u8; 32 << 20];
    for step in [2, 3] {
        let state = |_: &str, slice: &Slice| Some(&host[..slice.extent[0] as usize]);
        worker.saver.save(step, state, Vec::new()).unwrap();
        worker.taken(step).release();
    }
    // Its end ends whatever was under way: only then is it the launcher's to give away.
    worker.slots[0].reclaim();
    assert_eq!(states(&worker), [State::Free, State::Free]);
}

#[test]
fn a_save_that_failed_has_nothing_on_its_way() {
    let place = tempfile::tempdir().unwrap();
    let (mut worker, restore) = Worker::saved(place.path());
    let at = restore.manifest().tensor("weight").unwrap().slices[0].at;
    // Shorter than it says. The stand-in refuses what goes beyond it, and has begun what comes before that.
    let short = content("weight", 9 << 20, 2);
    let memory = worker.devices[0].upload(&short).unwrap();
    let host = vec![0u8; 32 << 20];
    let state = |name: &str, slice: &Slice| match name {
        // SAFETY: as said.
        "weight" => Memory::Device(unsafe {
            OnDevice::new(memory.address(), slice.extent[0], std::ptr::null_mut())
        }),
        _ => Memory::Host(&host[..slice.extent[0] as usize]),
    };
    let error = worker
        .saver
        .save(2, |name, slice| Some(state(name, slice)), Vec::new());
    let error = error.unwrap_err();
    assert!(
        matches!(cause(&error), CudaError::Call { code: 1, .. }),
        "{error:?}"
    );
    // What was begun is over: a copy that comes later would be one into the next save.
    let first = (4 << 20) - at % (4 << 20);
    let mut there = vec![0; first as usize];
    let slot = File::from(worker.slots[1].fd().try_clone_to_owned().unwrap());
    slot.read_exact_at(&mut there, IMAGE_AT + at).unwrap();
    assert!(there == short[..first as usize]);
}

#[test]
fn without_pinned_memory_either_it_is_said_what_is_missing() {
    script("register:1;pinned:2");
    let mut worker = Worker::new();
    worker.train(1);
    let error = worker.save(1).unwrap_err();
    let said = cause(&error).to_string();
    assert_eq!(said, "cuMemHostAlloc: out of memory (CUDA error 2)");
    assert_eq!(worker.slots[0].state().0, State::Free);
    // After an error all is begun anew.
    script("");
    worker.save(1).unwrap();
    assert_eq!(worker.saver.way(), Some(&Way::Straight));
}

#[test]
fn what_was_refused_is_asked_for_again_some_saves_later() {
    let mut worker = Worker::new();
    let mut save = |step: u64, driver: &str| {
        script(driver);
        worker.save(step).unwrap();
        worker.taken(step).release();
        worker.saver.way().unwrap().clone()
    };
    let pinned = |way: &Way, said: &str| matches!(way, Way::Pinned { why } if why.contains(said));
    assert!(pinned(&save(1, "register:801"), "not supported"));
    // Not by each save: what the driver does to refuse may take it long.
    assert!(pinned(&save(2, "register:2"), "not supported"));
    assert!(pinned(&save(3, "register:2"), "out of memory"));
    assert!(pinned(&save(4, ""), "out of memory"));
    assert!(pinned(&save(5, ""), "out of memory"));
    assert_eq!(save(6, ""), Way::Straight);
    // Once it is registered it stays so.
    assert_eq!(save(7, "register:801"), Way::Straight);
    assert_eq!(save(8, "register:801"), Way::Straight);
}

#[test]
fn slots_are_registered_before_the_first_save_if_that_is_asked_for() {
    script("");
    let mut worker = Worker::new();
    worker.prepare();
    // By a thread, which needs nobody.
    while live()[4] < 2 {
        std::thread::yield_now();
    }
    script("register:801");
    worker.save(1).unwrap();
    assert_eq!(worker.saver.way(), Some(&Way::Straight));
    worker.taken(1).release();
    // What is refused then is the save's to tell.
    let mut refused = Worker::new();
    refused.prepare();
    refused.save(1).unwrap();
    assert!(matches!(refused.saver.way(), Some(Way::Pinned { .. })));
}

#[test]
fn memory_of_no_device_is_refused() {
    script("");
    let mut worker = Worker::new();
    let host = vec![0u8; 32 << 20];
    let state = |_: &str, slice: &Slice| {
        // SAFETY: nobody copies from there; that is what is tested.
        let there = unsafe {
            let address = host.as_ptr().expose_provenance() as u64;
            OnDevice::new(address, slice.extent[0], std::ptr::null_mut())
        };
        Some(Memory::Device(there))
    };
    let error = worker.saver.save(1, state, Vec::new()).unwrap_err();
    assert!(
        matches!(cause(&error), CudaError::NotOfDevice { .. }),
        "{error:?}"
    );
    assert!(cause(&error).to_string().contains("data_ptr"));
    assert_eq!(worker.slots[0].state().0, State::Free);
}

#[test]
fn memory_that_is_too_short_is_refused_by_name() {
    script("");
    let mut worker = Worker::new();
    let short = worker.devices[0].alloc(100).unwrap();
    let state = |_: &str, _: &Slice| {
        // SAFETY: it is so long, and outlives the save.
        Some(unsafe { OnDevice::new(short.address(), 100, std::ptr::null_mut()) })
    };
    let error = worker.saver.save(1, state, Vec::new()).unwrap_err();
    assert!(
        matches!(&error, SaveError::State { bytes, .. } if *bytes > 100),
        "{error:?}"
    );
}

#[test]
fn what_is_damaged_never_gets_to_a_device() {
    let place = tempfile::tempdir().unwrap();
    let (worker, restore) = Worker::saved(place.path());
    // In the chunk of the first tensor's first byte.
    let tensor = restore.manifest().tensor("weight").unwrap();
    let (file, at) = (tensor.slices[0].file, tensor.slices[0].at);
    let path = place
        .path()
        .join(&restore.manifest().files[file as usize].path);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[at as usize] ^= 1;
    std::fs::write(&path, bytes).unwrap();

    let shape = [TENSORS[4].2];
    let into = worker.devices[0]
        .upload(&vec![0xabu8; shape[0] as usize])
        .unwrap();
    // SAFETY: it is so long, and nobody else uses it.
    let there = unsafe { OnDeviceMut::new(into.address(), shape[0], std::ptr::null_mut()) };
    let weight = want("weight", &shape, MemoryMut::Device(there));
    let error = restore.load_into(vec![weight]).unwrap_err();
    assert!(error.damage().is_some(), "{error:?}");
    let mut read = vec![0u8; shape[0] as usize];
    into.read(&mut read).unwrap();
    let chunk = (4 << 20) - (at % (4 << 20));
    assert!(read[..chunk as usize].iter().all(|byte| *byte == 0xab));
}

#[test]
fn a_device_that_fails_on_the_way_back_is_named() {
    let place = tempfile::tempdir().unwrap();
    let (worker, restore) = Worker::saved(place.path());
    script("lazy;copy:2:700");
    let (shape, memory) = ([TENSORS[4].2], worker.on_device("weight"));
    // SAFETY: it is so long, and nobody else uses it.
    let there = unsafe { OnDeviceMut::new(memory.address(), shape[0], std::ptr::null_mut()) };
    let weight = want("weight", &shape, MemoryMut::Device(there));
    let error = restore.load_into(vec![weight]).unwrap_err();
    assert!(matches!(error, LoadError::Far(_)), "{error:?}");
    let said = error.source().unwrap().to_string();
    assert!(said.contains("illegal memory access"), "{said}");
    // It is no damage of the checkpoint.
    assert!(error.damage().is_none());
    // What was read from may be read from still: it stays, and nothing is begun anew.
    let kept = live()[5];
    assert!((1..=4).contains(&kept), "{kept}");
    script("");
    // SAFETY: as above.
    let there = unsafe { OnDeviceMut::new(memory.address(), shape[0], std::ptr::null_mut()) };
    let weight = want("weight", &shape, MemoryMut::Device(there));
    let error = restore.load_into(vec![weight]).unwrap_err();
    let said = error.source().unwrap().to_string();
    assert!(said.contains("may still be under way"), "{said}");
    assert_eq!(live()[5], kept);
}

#[test]
fn a_load_goes_on_without_pinned_memory() {
    let place = tempfile::tempdir().unwrap();
    let (mut worker, restore) = Worker::saved(place.path());
    script("lazy;pinned:2");
    worker.train(9);
    let (shape, memory) = ([TENSORS[4].2], worker.on_device("weight"));
    // SAFETY: it is so long, and nobody else uses it.
    let there = unsafe { OnDeviceMut::new(memory.address(), shape[0], std::ptr::null_mut()) };
    restore
        .load_into(vec![want("weight", &shape, MemoryMut::Device(there))])
        .unwrap();
    let mut read = vec![0u8; shape[0] as usize];
    memory.read(&mut read).unwrap();
    assert!(read == content("weight", shape[0], 1));
}
