use std::fs;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;

use super::ring::Ring;
use super::*;
use crate::Pages;
use crate::testing::Random;

fn go_on(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// 9 MiB and a page: three chunks, the last one short.
fn image() -> Pages {
    let mut image = Pages::new((9 << 20) + PAGE).unwrap();
    let mut random = Random(1);
    for word in image.chunks_exact_mut(8) {
        word.copy_from_slice(&random.below(u64::MAX).to_le_bytes());
    }
    image
}

fn options(direct: bool) -> Options {
    Options {
        threads: 3,
        direct,
        ring: false,
    }
}

/// Names in a directory, temporary ones too.
fn all_names(dir: &std::path::Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Answer to the nth write in place of the kernel, if any: how much of it is written.
pub(super) type AtWrite = fn(usize, &[u8]) -> Option<Result<usize, Errno>>;

/// Answers in place of the kernel where a test says so.
#[derive(Default)]
pub(super) struct Faulty {
    writes: AtomicUsize,
    write: Option<AtWrite>,
    allocate: Option<Errno>,
    create: Option<Errno>,
    sync: Option<Errno>,
    publish: Option<Errno>,
    sync_dir: Option<Errno>,
    direct: Option<Errno>,
    /// Whether O_DIRECT was on at each change of it.
    flags: Mutex<Vec<bool>>,
}

impl Faulty {
    /// One whose writes are answered so.
    pub(super) fn at_write(write: AtWrite) -> Faulty {
        Faulty {
            write: Some(write),
            ..Faulty::default()
        }
    }
}

fn or<T>(fault: Option<Errno>, real: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    fault.map_or_else(real, Err)
}

impl Disk for Faulty {
    fn create(
        &self,
        dir: BorrowedFd<'_>,
        name: &str,
        flags: OFlags,
        mode: Mode,
    ) -> Result<OwnedFd, Errno> {
        or(self.create, || Real.create(dir, name, flags, mode))
    }
    fn allocate(&self, file: BorrowedFd<'_>, bytes: u64) -> Result<(), Errno> {
        or(self.allocate, || Real.allocate(file, bytes))
    }
    /// Only remembered, whatever the file system can.
    fn set_direct(&self, _: BorrowedFd<'_>, on: bool) -> Result<(), Errno> {
        self.flags.lock().unwrap().push(on);
        or(self.direct.filter(|_| on), || Ok(()))
    }
    fn write(&self, file: BorrowedFd<'_>, bytes: &[u8], at: u64) -> Result<usize, Errno> {
        let number = self.writes.fetch_add(1, Ordering::Relaxed);
        match self.write.and_then(|answer| answer(number, bytes)) {
            Some(Ok(count)) => Real.write(file, &bytes[..count], at),
            Some(Err(errno)) => Err(errno),
            None => Real.write(file, bytes, at),
        }
    }
    fn sync(&self, file: BorrowedFd<'_>) -> Result<(), Errno> {
        or(self.sync, || Real.sync(file))
    }
    fn publish(&self, dir: BorrowedFd<'_>, temporary: &str, name: &str) -> Result<(), Errno> {
        or(self.publish, || Real.publish(dir, temporary, name))
    }
    fn sync_dir(&self, dir: BorrowedFd<'_>) -> Result<(), Errno> {
        or(self.sync_dir, || Real.sync_dir(dir))
    }
}

#[test]
fn what_is_written_is_there_and_hashes_to_what_is_said() {
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open(place.path()).unwrap();
    let image = image();
    let most = AtomicU64::new(0);
    let watch = |progress: Progress| {
        assert_eq!(progress.total, image.len() as u64);
        most.fetch_max(progress.done, Ordering::Relaxed);
        ControlFlow::Continue(())
    };
    for (name, direct, bytes) in [
        ("direct", true, &image[..]),
        ("buffered", false, &image[..]),
        ("unaligned", true, &image[8..]),
        ("empty", true, &[][..]),
        ("small", true, &image[..100]),
    ] {
        let watch: &(dyn Fn(Progress) -> ControlFlow<()> + Sync) = match bytes.len() == image.len()
        {
            true => &watch,
            false => &go_on,
        };
        let written = persist(&dir, name, bytes, options(direct), watch).unwrap();
        assert!(
            fs::read(place.path().join(name)).unwrap() == bytes,
            "{name}"
        );
        let sums: Vec<ChunkSum> = bytes.chunks(CHUNK as usize).map(ChunkSum::of).collect();
        assert_eq!(
            (written.bytes, &written.chunks),
            (bytes.len() as u64, &sums),
            "{name}"
        );
        match name {
            // Whether the test's own file system has O_DIRECT is not this test's to say.
            "direct" => assert!(matches!(written.path, Path::Direct | Path::Refused)),
            "buffered" => assert_eq!(written.path, Path::Buffered),
            "unaligned" | "small" => assert_eq!(written.path, Path::Unaligned),
            _ => {}
        }
    }
    assert_eq!(most.into_inner(), image.len() as u64);
    assert_eq!(
        all_names(place.path()),
        ["buffered", "direct", "empty", "small", "unaligned"]
    );
}

/// tmpfs refuses O_DIRECT in older kernels and takes it in newer ones: it works either way.
#[test]
fn memory_file_systems_are_written_to() {
    let Ok(place) = tempfile::tempdir_in("/dev/shm") else {
        return;
    };
    let dir = Dir::open(place.path()).unwrap();
    let image = image();
    persist(&dir, "file", &image, options(true), &go_on).unwrap();
    assert!(fs::read(place.path().join("file")).unwrap() == image[..]);
}

#[test]
fn a_name_that_is_taken_is_left_alone() {
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open(place.path()).unwrap();
    fs::write(place.path().join("file"), "mine").unwrap();
    let error = persist(&dir, "file", b"other", options(true), &go_on).unwrap_err();
    assert!(matches!(error.fault, Fault::Exists), "{error}");
    assert_eq!(fs::read(place.path().join("file")).unwrap(), b"mine");
    for name in [
        "",
        ".",
        "..",
        "a/b",
        "/a",
        ".hidden",
        "a b",
        "ü",
        &"x".repeat(201),
    ] {
        let error = persist(&dir, name, b"x", options(true), &go_on).unwrap_err();
        assert!(matches!(error.fault, Fault::Name), "{name}");
    }
    assert_eq!(all_names(place.path()), ["file"]);
}

/// One write to a disk with this fault; nothing is left, and the error says what helps.
fn check(disk: &Faulty, helps: &str) -> PersistError {
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open(place.path()).unwrap();
    let error = persist_on(disk, &dir, "file", &image(), None, options(true), &go_on).unwrap_err();
    assert_eq!(error.path, place.path().join("file"));
    let text = error.to_string();
    assert!(
        text.contains(helps) && text.contains(&*place.path().to_string_lossy()),
        "{text}"
    );
    assert_eq!(all_names(place.path()), [""; 0], "{text}");
    assert!(!error.published);
    error
}

#[test]
fn every_fault_is_named_and_leaves_nothing() {
    let fault = Faulty::default;
    let full = check(
        &Faulty {
            allocate: Some(Errno::NOSPC),
            ..fault()
        },
        "free space",
    );
    assert!(matches!(full.fault, Fault::Full(_)));
    let second = |number: usize, _: &[u8]| (number == 1).then_some(Err(Errno::NOSPC));
    let full = check(
        &Faulty {
            write: Some(second),
            ..fault()
        },
        "free space",
    );
    assert!(matches!(full.fault, Fault::Full(_)));
    let quota = check(
        &Faulty {
            sync: Some(Errno::DQUOT),
            ..fault()
        },
        "quota",
    );
    assert!(matches!(quota.fault, Fault::Full(_)));
    let broken = |number: usize, _: &[u8]| (number == 2).then_some(Err(Errno::IO));
    let disk = check(
        &Faulty {
            write: Some(broken),
            ..fault()
        },
        "kernel's log",
    );
    assert!(matches!(disk.fault, Fault::Io { what: "write", .. }));
    assert!(std::error::Error::source(&disk).is_some());
    let disk = check(
        &Faulty {
            sync: Some(Errno::IO),
            ..fault()
        },
        "cannot sync",
    );
    assert!(matches!(disk.fault, Fault::Io { what: "sync", .. }));
    let denied = check(
        &Faulty {
            create: Some(Errno::ACCESS),
            ..fault()
        },
        "right to write",
    );
    assert!(matches!(denied.fault, Fault::Denied(_)));
    let read_only = check(
        &Faulty {
            create: Some(Errno::ROFS),
            ..fault()
        },
        "read-only",
    );
    assert!(matches!(read_only.fault, Fault::ReadOnly(_)));
    let gone = check(
        &Faulty {
            publish: Some(Errno::NOENT),
            ..fault()
        },
        "deleted",
    );
    assert!(matches!(gone.fault, Fault::Gone(_)));
    let nothing = |number: usize, _: &[u8]| (number == 1).then_some(Ok(0));
    let short = check(
        &Faulty {
            write: Some(nothing),
            ..fault()
        },
        "wrote nothing",
    );
    assert!(matches!(short.fault, Fault::Short { .. }));
}

#[test]
fn a_directory_that_does_not_sync_is_said_to_have_the_file() {
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open(place.path()).unwrap();
    let disk = Faulty {
        sync_dir: Some(Errno::IO),
        ..Faulty::default()
    };
    let error = persist_on(&disk, &dir, "file", b"x", None, options(true), &go_on).unwrap_err();
    assert!(error.published, "{error}");
    assert_eq!(all_names(place.path()), ["file"]);
}

#[test]
fn short_writes_interruptions_and_refusals_are_gone_on_from() {
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open(place.path()).unwrap();
    let image = image();
    let odd = |number: usize, bytes: &[u8]| match number % 3 {
        0 => Some(Err(Errno::INTR)),
        1 => Some(Ok(bytes.len().div_ceil(3))),
        _ => None,
    };
    let disk = Faulty {
        write: Some(odd),
        ..Faulty::default()
    };
    let written = persist_on(&disk, &dir, "odd", &image, None, options(true), &go_on).unwrap();
    assert_eq!(written.path, Path::Direct);

    let refuse = |number: usize, _: &[u8]| (number == 0).then_some(Err(Errno::INVAL));
    let disk = Faulty {
        write: Some(refuse),
        ..Faulty::default()
    };
    let written = persist_on(&disk, &dir, "refused", &image, None, options(true), &go_on).unwrap();
    assert_eq!(written.path, Path::Refused);
    assert_eq!(*disk.flags.lock().unwrap(), [true, false]);

    let disk = Faulty {
        direct: Some(Errno::INVAL),
        allocate: Some(Errno::OPNOTSUPP),
        ..Faulty::default()
    };
    let written = persist_on(&disk, &dir, "plain", &image, None, options(true), &go_on).unwrap();
    assert_eq!(written.path, Path::Refused);
    for name in ["odd", "refused", "plain"] {
        assert!(
            fs::read(place.path().join(name)).unwrap() == image[..],
            "{name}"
        );
    }
    // A refusal that goes on is an error, not a loop.
    let disk = Faulty {
        write: Some(|_, _| Some(Err(Errno::INVAL))),
        ..Faulty::default()
    };
    assert!(persist_on(&disk, &dir, "never", &image, None, options(true), &go_on).is_err());
    assert!(persist_on(&disk, &dir, "never", &image, None, options(false), &go_on).is_err());
}

#[test]
fn it_can_be_broken_off() {
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open(place.path()).unwrap();
    let stop = |progress: Progress| match progress.done > CHUNK {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    };
    let error = persist(
        &dir,
        "file",
        &image(),
        Options {
            threads: 1,
            ..Options::default()
        },
        &stop,
    )
    .unwrap_err();
    assert!(matches!(error.fault, Fault::Cancelled), "{error}");
    assert_eq!(all_names(place.path()), [""; 0]);
}

#[test]
fn through_io_uring_the_same_file_is_written_and_damage_is_found() {
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open(place.path()).unwrap();
    let image = image();
    let ringed = Options {
        ring: true,
        ..options(true)
    };
    let by_threads = persist(&dir, "threads", &image, options(true), &go_on).unwrap();
    let written = persist(&dir, "ring", &image, ringed, &go_on).unwrap();
    let expected = match (by_threads.path, Ring::new()) {
        (Path::Direct, Ok(_)) => Path::Ring,
        (path, _) => {
            eprintln!("no io_uring or no O_DIRECT here: only that it is done without was seen");
            path
        }
    };
    assert_eq!(written.path, expected);
    assert_eq!(written.chunks, by_threads.chunks);
    assert_eq!(fs::read(place.path().join("ring")).unwrap(), &image[..]);
    let mut sums: Vec<u64> = written.chunks.iter().map(|chunk| chunk.crc).collect();
    sums[1] ^= 1;
    let error = persist_sealed(&dir, "damaged", &image, &sums, ringed, &go_on).unwrap_err();
    assert!(
        matches!(error.fault, Fault::Damaged { at: CHUNK }),
        "{error}"
    );
    assert_eq!(all_names(place.path()), ["ring", "threads"]);
}

#[test]
fn what_io_uring_leaves_is_written_without_it() {
    let bytes = vec![0u8; (2 << 20) + 5];
    assert_eq!(ring::rest(&bytes, 0, 1 << 20), (1 << 20, &[][..]));
    assert_eq!(ring::rest(&bytes, 1 << 20, 10).0, (1 << 20) + 10);
    assert_eq!(ring::rest(&bytes, 1 << 20, 10).1.len(), (1 << 20) - 10);
    assert_eq!(ring::rest(&bytes, 2 << 20, 0).1.len(), 5);
    assert_eq!(ring::rest(&bytes, 2 << 20, usize::MAX >> 1).1.len(), 0);
}

#[test]
fn a_directory_that_was_removed_is_named() {
    let place = tempfile::tempdir().unwrap();
    let inner = place.path().join("inner");
    fs::create_dir(&inner).unwrap();
    let dir = Dir::open(&inner).unwrap();
    fs::remove_dir(&inner).unwrap();
    let error = persist(&dir, "file", b"x", options(true), &go_on).unwrap_err();
    assert!(matches!(error.fault, Fault::Gone(_)), "{error}");
}

#[test]
fn two_writers_of_one_name_make_one_file() {
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open(place.path()).unwrap();
    let outcomes: Vec<bool> = std::thread::scope(|scope| {
        let started: Vec<_> = (0..8u8)
            .map(|k| {
                let dir = &dir;
                scope
                    .spawn(move || persist(dir, "file", &[k; 5000], options(false), &go_on).is_ok())
            })
            .collect();
        started
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert_eq!(outcomes.iter().filter(|ok| **ok).count(), 1);
    let bytes = fs::read(place.path().join("file")).unwrap();
    assert!(outcomes[bytes[0] as usize] && bytes.iter().all(|b| *b == bytes[0]));
    assert_eq!(all_names(place.path()), ["file"]);
    assert_eq!(fs::metadata(place.path().join("file")).unwrap().nlink(), 1);
}
