use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use muster_protocol::Span;
use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::*;

const CAPACITY: u64 = 1 << 20;

const OLD: LauncherId = LauncherId([1; 8]);
const NEW: LauncherId = LauncherId([2; 8]);

fn memory(bytes: u64, seals: SealFlags) -> OwnedFd {
    let fd = memfd_create("slot", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fcntl_add_seals(&fd, seals).unwrap();
    fd
}

fn slot() -> OwnedFd {
    memory(CAPACITY + 8192, SealFlags::SHRINK | SealFlags::GROW)
}

fn two() -> Received {
    vec![slot(), slot()].into()
}

/// As they come back from an heir.
fn brought(slots: &Received) -> Received {
    let copies = slots.iter().map(|slot| slot.try_clone().unwrap());
    copies.collect::<Vec<_>>().into()
}

/// Which memory this is.
fn id(fd: &OwnedFd) -> (u64, u64) {
    let stat = fstat(fd).unwrap();
    (stat.st_dev, stat.st_ino)
}

fn job(owner: &str, id: &str) -> JobKey {
    JobKey {
        cluster: "test".into(),
        owner: owner.into(),
        id: id.into(),
    }
}

fn at(seconds: u64) -> Time {
    Time::ZERO + Span::from_secs(seconds)
}

#[test]
fn an_heir_gets_the_very_slots_and_nobody_else_any() {
    let (mut held, key) = (Held::default(), job("1000", "job"));
    for k in [0, 3] {
        held.keep(&key, OLD, k, CAPACITY, two()).unwrap();
    }
    let kept: Vec<(u64, u64)> = (held.of(&key))
        .flat_map(|r| r.slots.iter())
        .map(id)
        .collect();
    // While its launcher lives there is no heir.
    assert!(held.inherit(&key).is_empty());
    let left = held.orphan(&key, |_| true, at(600)).unwrap();
    assert_eq!((left.ranks, left.bytes), (2, 4 * (CAPACITY + 8192)));
    assert_eq!(
        held.orphan(&key, |_| true, at(999)),
        None,
        "its lease runs already"
    );
    // Another user's job of the same name, and another job.
    for other in [job("1001", "job"), job("1000", "jo")] {
        assert!(held.inherit(&other).is_empty(), "{other:?}");
    }
    let heirs = held.inherit(&key);
    assert_eq!(heirs.iter().map(|(k, _)| *k).collect::<Vec<_>>(), [0, 3]);
    let given: Vec<(u64, u64)> = (heirs.iter())
        .flat_map(|(_, fds)| fds.iter())
        .map(id)
        .collect();
    assert_eq!(given, kept);
    // It brings one rank's back as its own; the lease of the other's runs on.
    let (k, slots) = heirs.into_iter().next().unwrap();
    held.keep(&key, OLD, k, CAPACITY, brought(&slots)).unwrap();
    assert_eq!(held.waiting(), 2 * (CAPACITY + 8192));
    assert_eq!(held.expire(at(600))[0].ranks, 1);
    assert_eq!(held.jobs(), std::slice::from_ref(&key));
    held.end(&key);
    assert!(held.jobs().is_empty());
}

/// The one before is looked for still.
#[test]
fn an_heir_in_the_place_of_a_launcher_gets_what_that_one_had() {
    let (mut held, key) = (Held::default(), job("1000", "job"));
    held.keep(&key, OLD, 0, CAPACITY, two()).unwrap();
    held.keep(&key, NEW, 1, CAPACITY, two()).unwrap();
    // It lives after all.
    assert_eq!(held.orphan(&key, |_| false, at(600)), None);
    let left = held.orphan(&key, |launcher| launcher != NEW, at(600));
    assert_eq!(left.map(|left| left.ranks), Some(1));
    let heirs = held.inherit(&key);
    assert_eq!(heirs.iter().map(|(k, _)| *k).collect::<Vec<_>>(), [0]);
    let (k, slots) = heirs.into_iter().next().unwrap();
    held.keep(&key, NEW, k, CAPACITY, brought(&slots)).unwrap();
    assert_eq!((held.waiting(), held.due()), (0, None));
}

#[test]
fn who_gives_up_slots_gives_up_its_own() {
    let (mut held, key) = (Held::default(), job("1000", "job"));
    held.keep(&key, OLD, 0, CAPACITY, two()).unwrap();
    held.orphan(&key, |_| true, at(600)).unwrap();
    // An heir that had slots while no agent heard it, and has none: what was left for it is there still.
    held.give_up(&key, NEW, 0);
    let heirs = held.inherit(&key);
    assert_eq!(heirs.len(), 1);
    let (k, slots) = heirs.into_iter().next().unwrap();
    held.keep(&key, NEW, k, CAPACITY, brought(&slots)).unwrap();
    // Said once more than it was heard.
    for _again in 0..2 {
        held.give_up(&key, NEW, k);
        assert!(held.jobs().is_empty());
    }
}

#[test]
fn a_lease_ends_when_it_is_over_and_not_before() {
    let (mut held, key) = (Held::default(), job("1000", "job"));
    held.keep(&key, OLD, 0, CAPACITY, two()).unwrap();
    assert_eq!(held.due(), None);
    held.orphan(&key, |_| true, at(600)).unwrap();
    assert_eq!(held.due(), Some(at(600)));
    assert!(held.expire(at(599)).is_empty());
    assert_eq!(held.inherit(&key).len(), 1);
    let gone = held.expire(at(600));
    assert_eq!((gone.len(), gone[0].ranks), (1, 1));
    assert!(held.inherit(&key).is_empty() && held.due().is_none());
}

#[test]
fn the_memory_is_given_back_when_slots_are_closed_and_heirs_cost_no_descriptor() {
    let (mut held, key) = (Held::default(), job("1000", "job"));
    held.keep(&key, OLD, 0, CAPACITY, two()).unwrap();
    let ours: Vec<(u64, u64)> = (held.of(&key))
        .flat_map(|r| r.slots.iter())
        .map(id)
        .collect();
    let open = || -> Vec<(u64, u64)> {
        let all = std::fs::read_dir("/proc/self/fd").unwrap();
        let of = |entry: std::fs::DirEntry| std::fs::metadata(entry.path()).ok();
        let files = all.filter_map(|entry| of(entry.ok()?));
        let ids = files.map(|file| (file.dev(), file.ino()));
        ids.filter(|id| ours.contains(id)).collect()
    };
    held.orphan(&key, |_| true, at(1)).unwrap();
    // As many as ask and do not read.
    let heirs: Vec<_> = (0..10).map(|_| held.inherit(&key)).collect();
    assert!(heirs.iter().all(|slots| slots.len() == 1));
    assert_eq!(open().len(), 2);
    held.expire(at(1));
    assert_eq!(open().len(), 2, "they are to be sent still");
    drop(heirs);
    // By a thread of its own.
    let until = Instant::now() + Duration::from_secs(60);
    while !open().is_empty() {
        assert!(Instant::now() < until, "{:?} are open", open());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_waits_makes_room_for_jobs_that_run_the_shortest_lease_first() {
    let mut held = Held::default();
    let each = 2 * (CAPACITY + 8192);
    for (name, lease) in [("a", 30), ("b", 10), ("c", 20)] {
        let key = job("1000", name);
        held.keep(&key, OLD, 0, CAPACITY, two()).unwrap();
        held.orphan(&key, |_| true, at(lease)).unwrap();
    }
    // Of a launcher that lives: it counts elsewhere.
    held.keep(&job("1000", "d"), OLD, 0, CAPACITY, two())
        .unwrap();
    assert!(held.fit(3 * each).is_empty());
    let gone = held.fit(2 * each - 1);
    let names: Vec<&str> = gone.iter().map(|left| left.key.id.as_str()).collect();
    assert_eq!(names, ["b", "c"]);
    held.fit(0);
    assert_eq!(held.jobs(), [job("1000", "d")]);
}

#[test]
fn what_is_no_slot_is_refused() {
    let (mut held, key) = (Held::default(), job("1000", "job"));
    let both = SealFlags::SHRINK | SealFlags::GROW;
    let file = || OwnedFd::from(tempfile::tempfile().unwrap());
    let cases: Vec<(Vec<OwnedFd>, Refused)> = vec![
        (vec![], Refused::Count(0)),
        (vec![slot()], Refused::Count(1)),
        (vec![slot(), slot(), slot()], Refused::Count(3)),
        (vec![slot(), file()], Refused::Foreign),
        (
            vec![slot(), memory(CAPACITY, SealFlags::SHRINK)],
            Refused::Foreign,
        ),
        (
            vec![slot(), memory(CAPACITY - 1, both)],
            Refused::Size {
                said: CAPACITY,
                found: CAPACITY - 1,
            },
        ),
        (
            vec![slot(), memory(1 << 40, both)],
            Refused::Size {
                said: CAPACITY,
                found: 1 << 40,
            },
        ),
    ];
    for (slots, refused) in cases {
        held.keep(&key, OLD, 0, CAPACITY, two()).unwrap();
        assert_eq!(
            held.keep(&key, OLD, 0, CAPACITY, slots.into()),
            Err(refused)
        );
        assert!(held.jobs().is_empty(), "what was there is given up");
    }
}

#[test]
fn one_user_leaves_room_for_others() {
    let mut held = Held::default();
    let keep = |held: &mut Held, owner: &str, k: usize| {
        held.keep(&job(owner, "job"), OLD, k as u16, CAPACITY, two())
    };
    for k in 0..MAX_PER_USER {
        keep(&mut held, "1", k).unwrap();
    }
    assert_eq!(keep(&mut held, "1", MAX_PER_USER), Err(Refused::TooMany));
    keep(&mut held, "1", 0).unwrap();
    for k in 0..MAX_PER_NODE - MAX_PER_USER {
        keep(&mut held, "2", k).unwrap();
    }
    assert_eq!(keep(&mut held, "3", 0), Err(Refused::TooMany));
}

#[test]
fn slots_are_known_by_their_launcher_until_it_gives_them_up() {
    let (mut held, key) = (Held::default(), job("1000", "job"));
    held.keep(&key, OLD, 0, CAPACITY, two()).unwrap();
    assert!(held.is_of(&key, OLD, 0));
    assert!(!held.is_of(&key, NEW, 0) && !held.is_of(&key, OLD, 1));
    assert!(!held.is_of(&job("1001", "job"), OLD, 0));
    held.give_up(&key, OLD, 0);
    assert!(!held.is_of(&key, OLD, 0));
}
