//! Resources that are taken are given back.

use std::fs;

use muster_runtime::saving::Blob;

use super::support::*;

/// Descriptors and threads of this process.
fn of_process() -> (usize, usize) {
    let count = |folder: &str| fs::read_dir(folder).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

#[test]
fn a_hundred_saves_leave_what_three_left() {
    for way in ["", "register:801"] {
        script(way);
        let mut worker = Worker::new();
        // Otherwise it is chance how many threads are on their way at once, each with a buffer of its own.
        if way.contains("register") {
            worker.saver.threads(1);
        }
        let mut after_three = None;
        for step in 1..=103 {
            worker.save(step).unwrap();
            worker.taken(step).release();
            if step == 3 {
                after_three = Some((live(), of_process()));
            }
        }
        assert_eq!(Some((live(), of_process())), after_three, "{way}");
        let [.., registered, pinned] = live();
        match way {
            // Both slots, at once.
            "" => assert_eq!((registered, pinned), (2, 0)),
            // One for each device.
            _ => assert_eq!((registered, pinned), (0, 2)),
        }
    }
}

#[test]
fn slots_are_unregistered_before_they_are_unmapped() {
    script("");
    let before = live();
    let mut worker = Worker::new();
    worker.save(1).unwrap();
    assert_eq!(live()[4], 2);
    worker.taken(1).release();
    // Larger ones come in their place. The stand-in touches what it unregisters.
    let blob = Blob {
        name: "big".to_owned(),
        data: vec![1; 400_000],
    };
    let state = |_: &str, slice: &muster_runtime::saving::Slice| {
        let zeros: &'static [u8] = vec![0; slice.extent[0] as usize].leak();
        Some(zeros)
    };
    worker.with_launcher(|worker| worker.saver.save(2, state, vec![blob]).unwrap());
    assert_eq!(live()[4], 0);
    worker.taken(2).release();
    worker.save(3).unwrap();
    assert_eq!(live()[4], 2);
    // Also after an error, and by whoever drops them.
    script("passing:2:719");
    worker.save(4).unwrap_err();
    script("");
    drop(worker);
    // Streams end a moment after they were destroyed.
    while live() != before {
        std::thread::yield_now();
    }
}
