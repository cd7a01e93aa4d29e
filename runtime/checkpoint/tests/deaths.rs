//! Writers that are killed, and disks that are full: with real processes.

#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use muster_checkpoint::dir::Dir;
use muster_checkpoint::hex::Bytes;
use muster_checkpoint::persist::{Options, persist};
use muster_checkpoint::slot::{Image, Slot, Source, State};
use muster_checkpoint::sum::{CHUNK, crc};
use muster_checkpoint::{PAGE, Pages};

const PLACE: &str = "MUSTER_CHECKPOINT_TEST_PLACE";

/// Contents of a writer's file `number`.
fn image(number: u8) -> Pages {
    let mut image = Pages::new(12 << 20).unwrap();
    image.fill(number);
    image
}

/// This binary again, to run one test in `place`.
fn again(test: &str, place: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture"])
        .env(PLACE, place)
        .stdout(Stdio::null());
    command
}

mod real {
    use super::*;

    /// Not a test of its own: the process that is killed.
    #[test]
    fn writer() {
        let Some(place) = std::env::var_os(PLACE) else {
            return;
        };
        let dir = Dir::open(Path::new(&place)).unwrap();
        for number in 0..100 {
            let go_on = |_| ControlFlow::Continue(());
            persist(
                &dir,
                &format!("file-{number}"),
                &image(number),
                Options::default(),
                &go_on,
            )
            .unwrap();
        }
        // Killed by then, or its parent is dead.
        std::thread::sleep(Duration::from_secs(60));
    }

    #[test]
    fn a_killed_writer_leaves_whole_files_and_temporaries() {
        let mut temporaries = 0;
        for round in 0..6u32 {
            let place = tempfile::tempdir().unwrap();
            let dir = Dir::open(place.path()).unwrap();
            let mut writer = again("real::writer", place.path()).spawn().unwrap();
            // Killed at some moment after its first file.
            let begun = Instant::now();
            while dir.names().unwrap().is_empty() {
                assert!(
                    begun.elapsed() < Duration::from_secs(60),
                    "it writes nothing"
                );
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(u64::from(round) * 7));
            assert!(writer.try_wait().unwrap().is_none(), "it is still at work");
            writer.kill().unwrap();
            writer.wait().unwrap();
            for name in dir.names().unwrap() {
                let number: u8 = name.strip_prefix("file-").unwrap().parse().unwrap();
                assert!(
                    fs::read(place.path().join(&name)).unwrap() == image(number)[..],
                    "{name}"
                );
            }
            for entry in fs::read_dir(place.path()).unwrap() {
                let name = entry.unwrap().file_name().into_string().unwrap();
                let temporary = name.starts_with(".tmp-file-");
                assert!(temporary || name.starts_with("file-"), "{name}");
                temporaries += usize::from(temporary);
            }
        }
        eprintln!("{temporaries} temporary files were left");
    }

    /// The bytes of the save before a step.
    fn state(step: u64) -> Vec<u8> {
        (0..9u64 << 20)
            .map(|at| (at / 5 + step * 37) as u8)
            .collect()
    }

    /// Not a test of its own: the worker that is killed. It saves whenever its slot is free.
    #[test]
    fn worker() {
        let Some(place) = std::env::var_os(PLACE) else {
            return;
        };
        let file = fs::File::options()
            .read(true)
            .write(true)
            .open(place)
            .unwrap();
        let slot = Slot::open(file.into(), 2).unwrap();
        for step in 0.. {
            let bytes = state(step);
            let sources = [Source {
                at: 0,
                bytes: &bytes,
            }];
            let image = Image {
                step,
                generation: Bytes([1; 32]),
                bytes: bytes.len() as u64,
                sources: &sources,
                note: b"",
            };
            while slot.fill(&image, 2).is_err() {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }

    #[test]
    fn what_a_worker_sealed_outlives_it() {
        let mut sealed_at_its_death = 0;
        for round in 0..8u64 {
            let (slot, _) = Slot::create(9 << 20, 0, 2).unwrap();
            let fd = std::os::fd::AsRawFd::as_raw_fd(&slot.fd());
            let place = format!("/proc/{}/fd/{fd}", std::process::id());
            let mut worker = again("real::worker", Path::new(&place)).spawn().unwrap();
            let mut newest = None;
            let mut take = || {
                let sealed = slot.take().unwrap()?;
                assert!(newest < Some(sealed.step));
                newest = Some(sealed.step);
                assert!(sealed.image() == state(sealed.step), "step {}", sealed.step);
                let sums: Vec<u64> = sealed.image().chunks(CHUNK as usize).map(crc).collect();
                assert_eq!(sums, sealed.sums);
                sealed.release();
                Some(())
            };
            let begun = Instant::now();
            let mut taken = 0;
            while taken <= round {
                assert!(
                    begun.elapsed() < Duration::from_secs(60),
                    "it seals nothing"
                );
                taken += u64::from(take().is_some());
            }
            std::thread::sleep(Duration::from_millis(round * 3));
            worker.kill().unwrap();
            worker.wait().unwrap();
            slot.reclaim();
            sealed_at_its_death += usize::from(take().is_some());
            assert_eq!(slot.state().0, State::Free);
        }
        eprintln!("{sealed_at_its_death} of 8 slots were sealed when their worker died");
    }
}

mod needs_netns {
    use super::*;

    /// Not a test of its own: what runs on a disk of 8 MiB.
    #[test]
    fn on_a_small_disk() {
        let Some(place) = std::env::var_os(PLACE) else {
            return;
        };
        let dir = Dir::open(Path::new(&place)).unwrap();
        let write = |name: &str, bytes: &[u8]| {
            persist(&dir, name, bytes, Options::default(), &|_| {
                ControlFlow::Continue(())
            })
        };
        let error = write("large", &image(1)).unwrap_err();
        assert!(error.to_string().contains("free space"), "{error}");
        assert_eq!(
            fs::read_dir(&place).unwrap().count(),
            0,
            "its bytes are free again"
        );
        write("small", &image(1)[..PAGE]).unwrap();
        let half = &image(2)[..6 << 20];
        write("half", half).unwrap();
        write("more", half).unwrap_err();
        assert_eq!(
            dir.names().unwrap(),
            ["half", "small"],
            "what was there is untouched"
        );
        assert!(fs::read(Path::new(&place).join("half")).unwrap() == half);
    }

    #[test]
    fn a_full_disk_is_named_and_nothing_else_is_touched() {
        let place = tempfile::tempdir().unwrap();
        let test = again("needs_netns::on_a_small_disk", place.path());
        // In a mount namespace of its own, which ends with it.
        let output = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c"])
            .arg("mount -t tmpfs -o size=8m tmpfs \"$0\" && exec \"$@\"")
            .arg(place.path())
            .arg(test.get_program())
            .args(test.get_args())
            .env(PLACE, place.path())
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}");
        let lines = String::from_utf8_lossy(&output.stdout);
        assert!(lines.contains("1 passed"), "{lines}");
    }
}
