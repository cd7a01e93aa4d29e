use std::path::Path;
use std::process::{Command, Stdio};

use super::*;
use crate::testing::{as_nobody, on_tiny_disk};

fn fd(path: &Path) -> OwnedFd {
    File::open(path).unwrap().into()
}

fn open(path: &Path) -> StoreDir {
    StoreDir::open(fd(path)).unwrap()
}

fn found(read: Read) -> Vec<u8> {
    match read {
        Read::Found(bytes) => bytes,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_slot_is_created_once_and_read_by_all() {
    let tmp = tempfile::tempdir().unwrap();
    let (a, b) = (open(tmp.path()), open(tmp.path()));
    assert_eq!(a.uuid(), b.uuid());
    assert!(!a.uuid().is_zero());
    assert!(matches!(a.read("job", 1), Read::NotFound));
    assert!(matches!(a.create("job", 1, b"one"), Create::Won));
    assert!(matches!(b.create("job", 1, b"two"), Create::AlreadyExists));
    assert!(matches!(a.create("job", 1, b"one"), Create::AlreadyExists));
    for slot in 2..600 {
        assert!(matches!(a.create("job", slot, b"x"), Create::Won));
    }
    for slot in 2..600 {
        assert_eq!(found(b.read("job", slot)), b"x");
    }
    assert_eq!(found(b.read("job", 1)), b"one");
    assert!(matches!(b.read("job", 600), Read::NotFound));
    assert!(tmp.path().join("job/log/00000001.json").exists());
    // Nothing else is left behind: the uuid, the job, 599 slots.
    assert_eq!(std::fs::read_dir(tmp.path()).unwrap().count(), 2);
    assert_eq!(
        std::fs::read_dir(tmp.path().join("job/log"))
            .unwrap()
            .count(),
        599
    );
    println!("one create: {:?}", a.latency());
}

#[test]
fn two_directories_have_two_uuids() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    assert_ne!(open(a.path()).uuid(), open(b.path()).uuid());
}

#[test]
fn a_log_that_is_removed_and_made_anew_is_seen() {
    let tmp = tempfile::tempdir().unwrap();
    let store = open(tmp.path());
    assert!(matches!(store.create("job", 1, b"a"), Create::Won));
    assert_eq!(found(store.read("job", 1)), b"a");
    std::fs::remove_dir_all(tmp.path().join("job")).unwrap();
    assert!(matches!(store.read("job", 1), Read::NotFound));
    assert!(matches!(store.create("job", 1, b"b"), Create::Won));
    assert_eq!(found(store.read("job", 1)), b"b");
}

#[test]
fn no_name_leads_out_of_the_directory() {
    let tmp = tempfile::tempdir().unwrap();
    let outside = tempfile::tempdir().unwrap();
    std::fs::create_dir(outside.path().join("log")).unwrap();
    std::fs::write(outside.path().join("log/00000001.json"), b"secret").unwrap();
    std::os::unix::fs::symlink(outside.path(), tmp.path().join("link")).unwrap();
    std::fs::create_dir_all(tmp.path().join("job/log")).unwrap();
    std::os::unix::fs::symlink(
        outside.path().join("log/00000001.json"),
        tmp.path().join("job/log/00000001.json"),
    )
    .unwrap();
    let store = open(tmp.path());
    let absolute = outside.path().to_str().unwrap().to_owned();
    for job in [
        "",
        ".",
        "..",
        "a/b",
        "../x",
        "/etc",
        ".hidden",
        "a\0b",
        "muster-store",
        "link",
        &absolute,
    ] {
        assert!(matches!(store.read(job, 1), Read::Failed(_)), "{job}");
        assert!(
            matches!(store.create(job, 2, b""), Create::Failed(_)),
            "{job}"
        );
    }
    assert!(matches!(store.read("job", 1), Read::Failed(_)));
    assert!(matches!(store.create("job", 1, b""), Create::AlreadyExists));
    assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 1);
    assert_eq!(
        std::fs::read_dir(outside.path().join("log"))
            .unwrap()
            .count(),
        1
    );
}

#[test]
fn oversized_and_strange_objects_are_refused() {
    let tmp = tempfile::tempdir().unwrap();
    let store = open(tmp.path());
    assert!(matches!(
        store.create("job", 1, &vec![0; MAX_OBJECT + 1]),
        Create::Failed(_)
    ));
    assert!(matches!(
        store.create("job", 1, &vec![0; MAX_OBJECT]),
        Create::Won
    ));
    assert_eq!(found(store.read("job", 1)).len(), MAX_OBJECT);
    let log = tmp.path().join("job/log");
    std::fs::write(log.join("00000002.json"), vec![0; MAX_OBJECT + 1]).unwrap();
    std::fs::create_dir(log.join("00000003.json")).unwrap();
    let mode = Mode::RUSR | Mode::WUSR;
    rustix::fs::mknodat(
        fd(&log),
        "00000004.json",
        rustix::fs::FileType::Fifo,
        mode,
        0,
    )
    .unwrap();
    for slot in 2..=4 {
        assert!(matches!(store.read("job", slot), Read::Failed(_)), "{slot}");
    }
}

#[test]
fn a_store_that_lets_a_name_be_created_twice_is_refused() {
    let error = || io::Error::other("lost");
    assert!(matches!(
        judge(|| Create::Won),
        Err(StoreError::NotCreateOnly)
    ));
    assert!(matches!(
        judge(|| Create::Unknown(error())),
        Err(StoreError::Unsettled { .. })
    ));
    assert!(matches!(
        judge(|| Create::Failed(error())),
        Err(StoreError::Io { .. })
    ));
    let mut answers = [Create::AlreadyExists, Create::Won].into_iter();
    let mut next = || answers.next_back().unwrap();
    assert!(judge(&mut next).is_ok());
}

#[test]
fn what_is_no_store_is_refused_with_the_fix() {
    let tmp = tempfile::tempdir().unwrap();
    let file = tmp.path().join("file");
    std::fs::write(&file, b"").unwrap();
    let text = StoreDir::open(fd(&file)).unwrap_err().to_string();
    assert!(text.contains("give a directory"), "{text}");
    std::fs::write(tmp.path().join(UUID_NAME), b"{}").unwrap();
    assert!(matches!(
        StoreDir::open(fd(tmp.path())),
        Err(StoreError::BadUuid(_))
    ));
}

#[test]
fn a_full_or_read_only_disk_creates_nothing_and_says_what_to_do() {
    on_tiny_disk(256, |disk| {
        let path = disk.path.join("store");
        std::fs::create_dir(&path).unwrap();
        let store = open(&path);
        assert!(matches!(store.create("job", 1, b"x"), Create::Won));
        let filler = disk.fill();
        assert!(matches!(
            store.create("job", 2, &[1; 9000]),
            Create::Failed(_)
        ));
        let text = StoreDir::open(fd(&path)).unwrap_err().to_string();
        assert!(text.contains("free some space"), "{text}");
        assert!(matches!(store.read("job", 2), Read::NotFound));
        assert_eq!(found(store.read("job", 1)), b"x");
        std::fs::remove_file(filler).unwrap();
        assert!(matches!(store.create("job", 2, &[1; 9000]), Create::Won));

        disk.remount_read_only();
        assert!(matches!(store.create("job", 3, b"x"), Create::Failed(_)));
        assert_eq!(found(store.read("job", 2)), [1; 9000]);
        let text = StoreDir::open(fd(&path)).unwrap_err().to_string();
        assert!(text.contains("mount it writable"), "{text}");
    });
}

#[test]
fn the_leftovers_of_a_crash_are_harmless() {
    let tmp = tempfile::tempdir().unwrap();
    let store = open(tmp.path());
    assert!(matches!(store.create("job", 1, b"x"), Create::Won));
    // A crash before the link, and one between the link and the removal of the temporary name.
    let log = tmp.path().join("job/log");
    std::fs::write(log.join(format!("{TEMPORARY}0")), b"torn").unwrap();
    std::fs::hard_link(log.join("00000001.json"), log.join(format!("{TEMPORARY}1"))).unwrap();
    std::fs::write(tmp.path().join(format!("{PROBE}0")), b"").unwrap();
    let old = File::create(log.join(format!("{TEMPORARY}2"))).unwrap();
    let age = ABANDONED_AFTER + Duration::from_secs(3600);
    old.set_modified(std::time::SystemTime::now() - age)
        .unwrap();
    let store = open(tmp.path());
    assert_eq!(found(store.read("job", 1)), b"x");
    assert!(matches!(
        store.create("job", 1, b"y"),
        Create::AlreadyExists
    ));
    assert!(matches!(store.create("job", 2, b"y"), Create::Won));
    // Only what nobody can still be writing is removed.
    assert!(log.join(format!("{TEMPORARY}0")).exists());
    assert!(!log.join(format!("{TEMPORARY}2")).exists());
}

/// Each contender writes its own bytes; exactly one wins, and it is the one that all read.
#[test]
fn of_fifty_threads_one_wins_a_hundred_times() {
    let tmp = tempfile::tempdir().unwrap();
    let store = open(tmp.path());
    for slot in 1..=100u64 {
        let barrier = std::sync::Barrier::new(50);
        let winners: Vec<u8> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..50u8)
                .map(|me| {
                    let (store, barrier) = (&store, &barrier);
                    scope.spawn(move || {
                        barrier.wait();
                        match store.create("job", slot, &[me; 100]) {
                            Create::Won => Some(me),
                            Create::AlreadyExists => {
                                assert_eq!(found(store.read("job", slot)).len(), 100);
                                None
                            }
                            other => panic!("{other:?}"),
                        }
                    })
                })
                .collect();
            threads
                .into_iter()
                .filter_map(|t| t.join().unwrap())
                .collect()
        });
        let [winner] = winners[..] else {
            panic!("slot {slot}: {winners:?}")
        };
        assert_eq!(found(store.read("job", slot)), [winner; 100]);
    }
}

/// Eight processes in lock step: the parent opens a slot to all of them at once, and waits for all
/// answers before the next one.
#[test]
fn of_eight_processes_one_wins_a_hundred_times() {
    use std::io::BufRead;
    const CHILD: &str = "MUSTER_TEST_STORE";
    if let Ok(path) = std::env::var(CHILD) {
        let store = open(Path::new(&path));
        let me = std::process::id().to_le_bytes();
        for line in io::stdin().lines() {
            let outcome = store.create("job", line.unwrap().parse().unwrap(), &me);
            println!("\noutcome {outcome:?}");
        }
        return;
    }
    let tmp = tempfile::tempdir().unwrap();
    let mut children: Vec<_> = (0..8)
        .map(|_| {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args([
                    "--exact",
                    "storedir::tests::of_eight_processes_one_wins_a_hundred_times",
                    "--nocapture",
                ])
                .env(CHILD, tmp.path())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let lines = io::BufReader::new(child.stdout.take().unwrap()).lines();
            (child.stdin.take().unwrap(), lines, child)
        })
        .collect();
    let store = open(tmp.path());
    for slot in 1..=100 {
        for (stdin, _, _) in &mut children {
            writeln!(stdin, "{slot}").unwrap();
        }
        let mut winners = Vec::new();
        for (_, lines, child) in &mut children {
            let outcome = lines
                .find_map(|line| line.unwrap().strip_prefix("outcome ").map(str::to_owned))
                .unwrap();
            match outcome.as_str() {
                "Won" => winners.push(child.id()),
                "AlreadyExists" => {}
                other => panic!("slot {slot}: {other}"),
            }
        }
        let [winner] = winners[..] else {
            panic!("slot {slot}: {winners:?}")
        };
        assert_eq!(found(store.read("job", slot)), winner.to_le_bytes());
    }
    for (stdin, lines, mut child) in children {
        drop(stdin);
        lines.for_each(drop);
        child.wait().unwrap();
    }
}

#[test]
fn a_directory_without_the_rights_is_refused_naming_the_user() {
    let tmp = tempfile::tempdir().unwrap();
    let fd = fd(tmp.path());
    as_nobody(|| {
        let text = StoreDir::open(fd).unwrap_err().to_string();
        assert!(text.contains("user 65534"), "{text}");
    });
}
