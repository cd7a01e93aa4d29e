use std::ops::ControlFlow;
use std::sync::Barrier;
use std::time::Duration;

use super::*;
use crate::store::{Entry, Verified};
use crate::{Kind, Options, Store};

fn open(path: &Path) -> Store {
    Store::open(
        &crate::Location::Directory(path.to_owned()),
        &Options::new(crate::Variables::default()),
    )
    .unwrap()
}

fn all(store: &Store, folder: &str) -> Vec<String> {
    let mut found = Vec::new();
    store
        .list(folder, &mut |Entry { name, .. }| {
            found.push(name);
            ControlFlow::Continue(())
        })
        .unwrap();
    found
}

fn go_on(_: crate::Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn a_record_is_created_once_and_read_by_all() {
    let place = tempfile::tempdir().unwrap();
    let (a, b) = (open(place.path()), open(place.path()));
    let job = |store: &Store| store.within("job").unwrap();
    assert_eq!(
        job(&a).get("log/1.json", 9).unwrap_err().kind,
        Kind::NotFound
    );
    assert_eq!(
        job(&a).create("log/1.json", b"one").unwrap(),
        Created::Created
    );
    assert_eq!(
        job(&b).create("log/1.json", b"two").unwrap(),
        Created::Exists
    );
    assert_eq!(
        job(&b).create("log/1.json", b"longer").unwrap(),
        Created::Exists
    );
    // The same bytes again: perhaps a try whose answer was lost.
    assert_eq!(
        job(&b).create("log/1.json", b"one").unwrap(),
        Created::Created
    );
    assert_eq!(b.get("job/log/1.json", 3).unwrap(), b"one");
    assert_eq!(b.get("job/log/1.json", 2).unwrap_err().kind, Kind::TooLarge);
    assert_eq!(b.head("job/log/1.json").unwrap().size, 3);
    let mut two = [0; 2];
    b.get_range("job/log/1.json", 1, &mut two).unwrap();
    assert_eq!(&two, b"ne");
    let short = b.get_range("job/log/1.json", 2, &mut two).unwrap_err();
    assert_eq!(short.kind, Kind::Short);
    // Nothing else is left behind.
    assert_eq!(all(&a, ""), ["job/log/1.json"]);
    assert_eq!(
        std::fs::read_dir(place.path().join("job/log"))
            .unwrap()
            .count(),
        1
    );
}

#[test]
fn a_put_takes_the_old_ones_place_and_a_delete_may_come_twice() {
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path());
    store.put("job/beacon", b"1").unwrap();
    store.put("job/beacon", b"22").unwrap();
    assert_eq!(store.get("job/beacon", 9).unwrap(), b"22");
    store.delete("job/beacon").unwrap();
    store.delete("job/beacon").unwrap();
    store.delete("none/at/all").unwrap();
    assert_eq!(store.get("job/beacon", 9).unwrap_err().kind, Kind::NotFound);
}

#[test]
fn listings_are_in_the_order_of_names_and_hold_only_objects() {
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path());
    for name in ["a/b", "a-b", "a/b-c/d", "b", "a.b", "Z"] {
        store.create(name, b"x").unwrap();
    }
    std::fs::write(place.path().join(".hidden"), "x").unwrap();
    std::fs::write(place.path().join("a/not an object"), "x").unwrap();
    std::os::unix::fs::symlink("b", place.path().join("link")).unwrap();
    assert_eq!(all(&store, ""), ["Z", "a-b", "a.b", "a/b", "a/b-c/d", "b"]);
    assert_eq!(all(&store, "a"), ["a/b", "a/b-c/d"]);
    assert_eq!(all(&store, "none"), [""; 0]);
    assert_eq!(store.folders("").unwrap(), ["a"]);
    assert_eq!(store.folders("a").unwrap(), ["b-c"]);
    let mut first = Vec::new();
    let stop = |entry| {
        first.push(entry);
        ControlFlow::Break(())
    };
    store.list("", &mut { stop }).unwrap();
    let entry = Entry {
        name: "Z".into(),
        size: 1,
    };
    assert_eq!(first, [entry]);
}

#[test]
fn nothing_outside_is_reached() {
    let place = tempfile::tempdir().unwrap();
    std::fs::create_dir(place.path().join("in")).unwrap();
    std::fs::write(place.path().join("secret"), "x").unwrap();
    std::os::unix::fs::symlink("..", place.path().join("in/up")).unwrap();
    std::os::unix::fs::symlink("../secret", place.path().join("in/link")).unwrap();
    let store = open(&place.path().join("in"));
    for name in ["../secret", "up/secret", "link", "/etc/passwd", "up"] {
        assert!(store.get(name, 99).is_err(), "{name}");
        assert!(store.head(name).is_err(), "{name}");
        assert!(store.create(&format!("{name}/x"), b"").is_err(), "{name}");
    }
    assert!(store.within("..").is_err());
    let fifo = place.path().join("in/fifo");
    let made = std::process::Command::new("mkfifo")
        .arg(&fifo)
        .status()
        .unwrap();
    assert!(made.success());
    assert_eq!(store.get("fifo", 9).unwrap_err().kind, Kind::Other);
}

#[test]
fn of_a_hundred_creators_one_wins() {
    let place = tempfile::tempdir().unwrap();
    for round in 0..5 {
        let name = format!("job/log/{round}.json");
        let barrier = Barrier::new(100);
        let won: Vec<usize> = std::thread::scope(|scope| {
            let racer = |number: usize| {
                let (name, barrier) = (&name, &barrier);
                let store = open(place.path());
                scope.spawn(move || {
                    barrier.wait();
                    let bytes = number.to_string();
                    let created = store.create(name, bytes.as_bytes()).unwrap();
                    (created == Created::Created).then_some(number)
                })
            };
            let racers: Vec<_> = (0..100).map(racer).collect();
            racers
                .into_iter()
                .filter_map(|r| r.join().unwrap())
                .collect()
        });
        assert_eq!(won.len(), 1);
        let there = open(place.path()).get(&name, 9).unwrap();
        assert_eq!(there, won[0].to_string().as_bytes());
    }
    assert_eq!(
        std::fs::read_dir(place.path().join("job/log"))
            .unwrap()
            .count(),
        5
    );
}

#[test]
fn an_upload_is_whole_or_not_there() {
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path());
    let bytes: Vec<u8> = (0..3 << 20).map(|at: u32| (at / 7) as u8).collect();
    let total = bytes.len() as u64;
    let mut steps = Vec::new();
    let uploaded = store
        .upload("data/1/n0", &mut &bytes[..], total, &mut |progress| {
            steps.push(progress.done);
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(uploaded.crc64, muster_checkpoint::sum::crc(&bytes));
    assert_eq!(uploaded.verified, Verified::Durable);
    assert_eq!(steps.last(), Some(&total));
    assert!(steps.is_sorted() && steps.len() > 1);
    assert_eq!(store.get("data/1/n0", total).unwrap(), bytes);
    // A try whose answer was lost, and another object.
    let again = store.upload("data/1/n0", &mut &bytes[..], total, &mut go_on);
    assert_eq!(again.unwrap(), uploaded);
    let mut other = bytes.clone();
    other[5] ^= 1;
    let refused = store.upload("data/1/n0", &mut &other[..], total, &mut go_on);
    assert_eq!(refused.unwrap_err().kind, Kind::Exists);
    assert_eq!(store.get("data/1/n0", total).unwrap(), bytes);

    for announced in [total - 1, total + 1] {
        let wrong = store.upload("data/1/n1", &mut &bytes[..], announced, &mut go_on);
        assert_eq!(wrong.unwrap_err().kind, Kind::Source);
    }
    let cancelled = store.upload("data/1/n1", &mut &bytes[..], total, &mut |_| {
        ControlFlow::Break(())
    });
    assert_eq!(cancelled.unwrap_err().kind, Kind::Cancelled);
    assert_eq!(store.head("data/1/n1").unwrap_err().kind, Kind::NotFound);
    assert_eq!(
        std::fs::read_dir(place.path().join("data/1"))
            .unwrap()
            .count(),
        1
    );
}

#[test]
fn a_probe_leaves_the_uuid_and_no_more() {
    let place = tempfile::tempdir().unwrap();
    let (a, b) = (open(place.path()), open(place.path()));
    let probed = a.probe().unwrap();
    assert_eq!(b.probe().unwrap().uuid, probed.uuid);
    assert_eq!(a.uuid(), Some(probed.uuid));
    assert!(probed.latency < Duration::from_secs(60));
    assert_eq!(all(&a, ""), ["muster-store"]);
    let other = tempfile::tempdir().unwrap();
    assert_ne!(open(other.path()).probe().unwrap().uuid, probed.uuid);
}

#[test]
fn a_store_that_was_removed_or_exchanged_says_nothing() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("store");
    std::fs::create_dir(&path).unwrap();
    let store = open(&path);
    store.probe().unwrap();
    let job = store.within("job").unwrap();
    assert_eq!(job.create("log/1", b"x").unwrap(), Created::Created);
    assert_eq!(job.get("log/2", 9).unwrap_err().kind, Kind::NotFound);
    std::fs::remove_dir_all(&path).unwrap();
    for gone in [
        job.get("log/1", 9).map(|_| ()),
        job.get("log/2", 9).map(|_| ()),
        job.head("log/1").map(|_| ()),
        job.create("log/2", b"x").map(|_| ()),
        job.list("", &mut |_| ControlFlow::Continue(())),
    ] {
        let error = gone.unwrap_err();
        assert_eq!(error.kind, Kind::Gone, "{error}");
        assert!(!error.unknown);
        let io = std::io::Error::from(error);
        assert_ne!(io.kind(), std::io::ErrorKind::NotFound);
    }
    // Emptied and made anew, it is another store.
    let emptied = tempfile::tempdir().unwrap();
    let store = open(emptied.path());
    store.probe().unwrap();
    std::fs::remove_file(emptied.path().join("muster-store")).unwrap();
    open(emptied.path()).probe().unwrap();
    assert_eq!(store.get("none", 9).unwrap_err().kind, Kind::Gone);
}

#[test]
fn a_uuid_that_is_none_is_told() {
    let place = tempfile::tempdir().unwrap();
    for bad in [
        "",
        "{}",
        "{\"format\":2,\"uuid\":\"00112233445566778899aabbccddeeff\"}",
    ] {
        std::fs::write(place.path().join("muster-store"), bad).unwrap();
        let error = open(place.path()).probe().unwrap_err();
        assert!(error.to_string().contains("restore it"), "{error}");
    }
}

#[test]
fn what_a_crash_left_is_removed_and_what_is_new_is_not() {
    let place = tempfile::tempdir().unwrap();
    std::fs::create_dir(place.path().join("log")).unwrap();
    let old = place.path().join("log/.muster-tmp-old");
    std::fs::write(&old, "x").unwrap();
    let day = std::time::SystemTime::now() - Duration::from_secs(25 * 3600);
    File::open(&old).unwrap().set_modified(day).unwrap();
    std::fs::write(place.path().join("log/.muster-tmp-new"), "x").unwrap();
    open(place.path()).create("log/1", b"x").unwrap();
    assert!(!old.exists());
    assert!(place.path().join("log/.muster-tmp-new").exists());
}

#[test]
fn places_that_cannot_be_used_are_told_with_what_helps() {
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("file"), "x").unwrap();
    for (name, fix) in [("none", "create it"), ("file", "no directory")] {
        let location = crate::Location::Directory(place.path().join(name));
        let options = Options::new(crate::Variables::default());
        let error = Store::open(&location, &options).unwrap_err();
        assert_eq!(error.kind, Kind::Setup);
        assert!(error.to_string().contains(fix), "{error}");
    }
    let store = open(place.path());
    for bad in ["", "a//b", ".a", "a b", "../a"] {
        assert_eq!(store.create(bad, b"").unwrap_err().kind, Kind::Name);
    }
    let error = store.create("file/x", b"").unwrap_err();
    assert!(!error.unknown, "{error}");
}

#[test]
fn a_directory_that_was_made_anew_is_another_one() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("data");
    let make = || {
        std::fs::create_dir(&path).unwrap();
        let dir = File::open(&path).unwrap();
        let (device, inode, made) = identity(dir.as_fd()).unwrap();
        let stat = unix::fstat(&dir).unwrap();
        assert_eq!((device, inode), (stat.st_dev, stat.st_ino));
        std::fs::remove_dir(&path).unwrap();
        made
    };
    let Some(first) = make() else {
        return eprintln!("skipped: this file system does not say when a directory was made");
    };
    // The clock of a file system has ticks of some milliseconds.
    std::thread::sleep(Duration::from_millis(50));
    assert_ne!(Some(first), make());
}

#[test]
fn what_is_known_of_a_directory_is_not_so_of_the_next_one_of_its_name() {
    let place = tempfile::tempdir().unwrap();
    let folder = || Folder::open(place.path()).unwrap();
    let (store, other) = (folder(), folder());
    store.create("data/a/x", b"1").unwrap();
    assert_eq!(store.get("data/a/x", 9).unwrap(), b"1");
    let id_now = || {
        let dir = File::open(place.path().join("data/a")).unwrap();
        identity(dir.as_fd()).unwrap()
    };
    let names_now = || store.durable().names.get(&id_now()).cloned();
    assert!(names_now().unwrap().0.contains("x"));
    // Another node deletes it, and this one makes it once more.
    other.delete_folder("data/a").unwrap();
    store.create("data/a/y", b"2").unwrap();
    assert_eq!(store.get("data/a/x", 9).unwrap_err().kind, Kind::NotFound);
    assert!(!names_now().unwrap().0.contains("x"));
    // As where it has the inode of the one before, and nothing else is known of both.
    store.remember(id_now(), Names::of(["x".to_owned()]));
    store.remember(id_now(), Names::default());
    assert_eq!(names_now(), Some(Names::default()));
    // This one deletes it.
    store.delete_folder("data/a").unwrap();
    assert!(store.durable().names.is_empty());
}

/// A log of months: its newest names are remembered, and it is not listed at each look.
#[test]
fn a_directory_of_very_many_names_is_not_listed_again() {
    let place = tempfile::tempdir().unwrap();
    let store = Folder::open(place.path()).unwrap();
    store.create("log/99999998", b"1").unwrap();
    let log = place.path().join("log");
    for slot in 0..MAX_NAMES {
        std::fs::write(log.join(format!("{slot:08}")), b"1").unwrap();
    }
    let names_now = || {
        let dir = File::open(&log).unwrap();
        let id = identity(dir.as_fd()).unwrap();
        store.durable().names.get(&id).cloned().unwrap()
    };
    // Nothing of it was known; this one is listed.
    assert_eq!(
        store.get("log/00070000", 9).unwrap_err().kind,
        Kind::NotFound
    );
    store.get("log/00065535", 9).unwrap();
    let names = names_now();
    assert!(names.is_full() && names.0.contains("00065535"));
    assert!(!names.0.contains("00000000") && names.0.len() == MAX_NAMES);
    // From now on each name is looked at by itself.
    for name in ["00065536", "00065537"] {
        std::fs::write(log.join(name), b"2").unwrap();
    }
    store.get("log/00065536", 9).unwrap();
    let names = names_now().0;
    assert!(names.contains("00065536") && !names.contains("00065537"));
    assert_eq!(
        store.create("log/00065538", b"3").unwrap(),
        Created::Created
    );
    assert!(names_now().0.contains("00065538"));
    // One that is too old to be remembered is found as well.
    assert_eq!(store.get("log/00000000", 9).unwrap(), b"1");
    assert!(names_now().0.len() == MAX_NAMES);
}

proptest::proptest! {
    // Each step may sync a disk.
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(24))]
    /// Against a map: whatever is done in whatever order.
    #[test]
    fn behaves_like_a_map(steps in proptest::collection::vec((0..4u8, 0..6usize, 0..4u8), 0..40)) {
        const NAMES: [&str; 6] = ["a", "b/c", "b/d", "b/e/f", "g-h", "g/h"];
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path());
        let mut model = std::collections::BTreeMap::new();
        for (what, name, byte) in steps {
            let (name, bytes) = (NAMES[name], vec![byte; 3]);
            match what {
                0 => {
                    let created = store.create(name, &bytes).unwrap();
                    let there = model.entry(name).or_insert_with(|| bytes.clone());
                    proptest::prop_assert_eq!(created == Created::Created, *there == bytes);
                }
                1 => {
                    store.put(name, &bytes).unwrap();
                    model.insert(name, bytes);
                }
                2 => {
                    store.delete(name).unwrap();
                    model.remove(name);
                }
                _ => {
                    let got = store.get(name, 3).map_err(|error| error.kind);
                    let expected = model.get(name).cloned().ok_or(Kind::NotFound);
                    proptest::prop_assert_eq!(got, expected);
                }
            }
        }
        let names: Vec<&str> = model.into_keys().collect();
        proptest::prop_assert_eq!(all(&store, ""), names);
    }
}

/// Eight processes in lock step: the parent opens a slot to all of them at once, and waits for all
/// answers before the next one.
#[test]
fn of_eight_processes_one_wins_a_hundred_times() {
    use std::io::BufRead as _;
    use std::process::{Command, Stdio};
    const CHILD: &str = "MUSTER_TEST_STORE";
    const NAME: &str = "directory::tests::of_eight_processes_one_wins_a_hundred_times";
    if let Some(path) = std::env::var_os(CHILD) {
        let store = open(Path::new(&path));
        let me = std::process::id().to_le_bytes();
        for line in io::stdin().lines() {
            let created = store.create(&format!("log/{}", line.unwrap()), &me);
            println!("\noutcome {:?}", created.unwrap());
        }
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let mut children: Vec<_> = (0..8)
        .map(|_| {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", NAME, "--nocapture"])
                .env(CHILD, place.path())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let lines = io::BufReader::new(child.stdout.take().unwrap()).lines();
            (child.stdin.take().unwrap(), lines, child)
        })
        .collect();
    let store = open(place.path());
    for slot in 1..=100 {
        for (stdin, _, _) in &mut children {
            writeln!(stdin, "{slot}").unwrap();
        }
        let mut winners = Vec::new();
        for (_, lines, child) in &mut children {
            let mut lines = lines.map(Result::unwrap);
            let said = lines.find_map(|line| line.strip_prefix("outcome ").map(str::to_owned));
            match said.as_deref() {
                Some("Created") => winners.push(child.id()),
                Some("Exists") => {}
                other => panic!("slot {slot}: {other:?}"),
            }
        }
        let [winner] = winners[..] else {
            panic!("slot {slot}: {winners:?}")
        };
        let there = store.get(&format!("log/{slot}"), 9).unwrap();
        assert_eq!(there, winner.to_le_bytes());
    }
    for (stdin, lines, mut child) in children {
        drop(stdin);
        lines.for_each(drop);
        child.wait().unwrap();
    }
}

/// Runs `test` in a thread with a mount namespace of its own, on a tmpfs of 256 KiB that goes when the
/// thread ends. Without the right to mount it is skipped, and says so.
fn on_tiny_disk(test: impl FnOnce(&Path) + Send) {
    use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
    let place = tempfile::tempdir().unwrap();
    let path: &Path = place.path();
    std::thread::scope(|scope| {
        let done = scope.spawn(move || {
            let namespace = rustix::thread::UnshareFlags::NEWNS;
            // SAFETY: only this thread leaves the shared mount namespace, and it ends here.
            if let Err(error) = unsafe { rustix::thread::unshare_unsafe(namespace) } {
                eprintln!("SKIPPED: no right to make a mount namespace ({error}); run as root");
                return;
            }
            let all = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
            mount_change("/", all).unwrap();
            let flags = MountFlags::empty();
            mount("tmpfs", path, "tmpfs", flags, c"size=256k,mode=0700").unwrap();
            test(path);
        });
        if let Err(panic) = done.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

#[test]
fn a_full_or_read_only_disk_creates_nothing_and_says_what_to_do() {
    on_tiny_disk(|disk| {
        let path = disk.join("store");
        std::fs::create_dir(&path).unwrap();
        let store = open(&path);
        store.probe().unwrap();
        assert_eq!(store.create("log/1", b"x").unwrap(), Created::Created);
        let filler = disk.join("filler");
        let mut file = File::create(&filler).unwrap();
        while file.write_all(&[1; 512]).is_ok() {}
        drop(file);
        let refused = |kind, fix: &str| {
            let created = store.create("log/2", &[1; 9000]).map(|_| ());
            for error in [created.unwrap_err(), open(&path).probe().unwrap_err()] {
                assert_eq!(error.kind, kind, "{error}");
                assert!(!error.unknown && error.to_string().contains(fix), "{error}");
            }
        };
        refused(Kind::Full, "free space");
        assert_eq!(store.get("log/2", 9999).unwrap_err().kind, Kind::NotFound);
        assert_eq!(store.get("log/1", 9).unwrap(), b"x");
        std::fs::remove_file(&filler).unwrap();
        let again = store.create("log/2", &[1; 9000]);
        assert_eq!(again.unwrap(), Created::Created);
        store.delete("log/2").unwrap();

        let flags = rustix::mount::MountFlags::RDONLY;
        rustix::mount::mount_remount(disk, flags, c"").unwrap();
        refused(Kind::ReadOnly, "mount it writable");
        assert_eq!(open(&path).get("log/1", 9).unwrap(), b"x");
    });
}
