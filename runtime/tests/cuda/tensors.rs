//! Tensors there and back.

use muster_checkpoint::slot::State;
use muster_runtime::saving::{MemoryMut, OnDeviceMut, Way};

use super::support::*;

/// Both ways, where nothing is copied before somebody waits for it: a seal that does not wait seals what was in the
/// slot before.
const WAYS: [&str; 2] = ["lazy", "lazy;register:801"];

fn expect_way(worker: &Worker, script: &str) {
    let way = worker.saver.way().unwrap();
    match script.contains("register") {
        false => assert_eq!(*way, Way::Straight),
        true => {
            let Way::Pinned { why } = way else {
                unreachable!("{way:?}");
            };
            for word in ["cuMemHostRegister", "operation not supported", "801"] {
                assert!(why.contains(word), "{why}");
            }
        }
    }
}

#[test]
fn tensors_of_devices_come_back_bit_for_bit_either_way() {
    for way in WAYS {
        script(way);
        let place = tempfile::tempdir().unwrap();
        let mut worker = Worker::new();
        // Both slots, and one of them again.
        for step in 1..=3 {
            worker.train(step);
            let saved = worker.save(step).unwrap();
            assert!(saved.bytes > 20 << 20);
            expect_way(&worker, way);
            let restore = worker.commit(place.path(), step);
            let loaded = load(&restore);
            for (name, _, bytes) in TENSORS {
                assert!(loaded[name] == content(name, bytes, step), "{way}: {name}");
            }

            // And to where it came from, which holds something else by now.
            worker.train(step + 50);
            let mut head = vec![0; TENSORS[2].2 as usize];
            let shapes = TENSORS.map(|(_, _, bytes)| [bytes]);
            let mut wants = vec![want("head", &shapes[2], MemoryMut::Host(&mut head))];
            for ((name, at, bytes), shape) in TENSORS.into_iter().zip(&shapes) {
                if at == Place::Host {
                    continue;
                }
                let there = worker.on_device(name).address();
                // SAFETY: it is so long, and nobody else uses it.
                let there = unsafe { OnDeviceMut::new(there, bytes, std::ptr::null_mut()) };
                wants.push(want(name, shape, MemoryMut::Device(there)));
            }
            restore.load_into(wants).unwrap();
            assert!(head == content("head", TENSORS[2].2, step));
            for (name, at, bytes) in TENSORS {
                if at != Place::Host {
                    let mut read = vec![0u8; bytes as usize];
                    worker.on_device(name).read(&mut read).unwrap();
                    assert!(read == content(name, bytes, step), "{way}: {name}");
                }
            }
        }
    }
}

#[test]
fn a_part_of_a_tensor_goes_to_its_place_on_a_device() {
    let place = tempfile::tempdir().unwrap();
    let (worker, restore) = Worker::saved(place.path());
    // Across the border of two chunks.
    let (name, _, bytes) = TENSORS[4];
    let (shape, begin, len) = ([bytes], (4 << 20) - 100, (5 << 20) + 3);
    let into = worker.devices[1]
        .upload(&vec![0xeeu8; len as usize + 2])
        .unwrap();
    // SAFETY: inside, and nobody else uses it.
    let there = unsafe { OnDeviceMut::new(into.address() + 1, len, std::ptr::null_mut()) };
    let mut part = want(name, &shape, MemoryMut::Device(there));
    (part.slice.offset, part.slice.extent) = (vec![begin], vec![len]);
    restore.load_into(vec![part]).unwrap();
    let mut read = vec![0u8; len as usize + 2];
    into.read(&mut read).unwrap();
    let whole = content(name, bytes, 1);
    assert!(read[1..=len as usize] == whole[begin as usize..][..len as usize]);
    assert_eq!([read[0], read[len as usize + 1]], [0xee; 2]);
}

#[test]
fn what_is_in_the_callers_stream_is_waited_for() {
    for way in WAYS {
        script(way);
        let place = tempfile::tempdir().unwrap();
        let mut worker = Worker::new();
        worker.train(1);
        // Behind the save's back nobody has these kernels done.
        let stream = worker.devices[0].stream().unwrap();
        set(stream.raw(), worker.on_device("weight"), 0x55);
        set(stream.raw(), worker.on_device("weight"), 0x66);
        set(stream.raw(), worker.on_device("bias"), 0x77);
        worker.save_after(1, stream.raw()).unwrap();
        expect_way(&worker, way);
        let restore = worker.commit(place.path(), 1);
        let loaded = load(&restore);
        assert!(loaded["weight"].iter().all(|byte| *byte == 0x66), "{way}");
        assert_eq!(loaded["bias"], [0x77; 10], "{way}");
        assert!(loaded["embedding"] == content("embedding", TENSORS[1].2, 1));

        // On the way back, too: else the kernel would write over what was loaded.
        set(stream.raw(), worker.on_device("weight"), 0x11);
        let shape = [TENSORS[4].2];
        let memory = worker.on_device("weight");
        // SAFETY: it is so long, and only the stream uses it.
        let there = unsafe { OnDeviceMut::new(memory.address(), shape[0], stream.raw().as_ptr()) };
        let weight = want("weight", &shape, MemoryMut::Device(there));
        restore.load_into(vec![weight]).unwrap();
        // What is left in a stream that is destroyed is done.
        let streams = live()[1];
        drop(stream);
        while live()[1] == streams {
            std::thread::yield_now();
        }
        let mut read = vec![0u8; shape[0] as usize];
        memory.read(&mut read).unwrap();
        assert!(read.iter().all(|byte| *byte == 0x66), "{way}");
    }
}

#[test]
fn tensors_of_the_host_alone_ask_for_no_driver() {
    script("");
    let mut worker = Worker::new();
    let before = live();
    let bytes = TENSORS.map(|(name, _, bytes)| (name, content(name, bytes, 1)));
    let state = |name: &str, _: &_| {
        let found = bytes.iter().find(|(known, _)| *known == name);
        found.map(|(_, bytes)| &bytes[..])
    };
    worker.saver.save(1, state, Vec::new()).unwrap();
    assert_eq!((worker.saver.way(), live()), (None, before));
    assert_eq!(worker.slots[0].state(), (State::Sealed, 1));
}
