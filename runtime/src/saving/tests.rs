use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::thread;

use muster_checkpoint::dir::Dir;
use muster_checkpoint::hex::{Bytes, Id};
use muster_checkpoint::manifest::Origin;
use muster_checkpoint::part::{Note, keep};
use muster_checkpoint::persist::Options;
use muster_checkpoint::shelf;
use muster_checkpoint::slot::{Slot, State};
use muster_protocol::Digest;
use muster_protocol::control::fresh_page;
use muster_protocol::control::slots::{Given, RESTORE_ENV, STORE_ENV, STORE_ID_ENV, word};
use muster_protocol::control::{decode_step, encode_step, saving};
use muster_store::Store;

use super::*;
use crate::page::Page;
use crate::{Session, WorkerEnv};

pub(super) const ROWS: u64 = 300_000;

/// A launcher's side: answers one ask for slots.
fn give(page: &Page, given: Given) -> Vec<std::sync::Arc<Slot>> {
    while page.load(word::ASK) == 0
        || !Given::decode(page.load(word::GIVEN), page.load(word::ASK)).is_open()
    {
        thread::yield_now();
    }
    let slots: Vec<_> = (0..2)
        .map(|_| {
            let (image, note) = (page.load(word::IMAGE), page.load(word::NOTE));
            Slot::create(image, note, 1).unwrap().0
        })
        .collect();
    page.store(word::PID, std::process::id().into());
    for (at, slot) in word::FDS.into_iter().zip(&slots) {
        page.store(at, u64::try_from(slot.fd().as_raw_fd()).unwrap());
    }
    page.store(word::ROOM, 77);
    page.store(word::GIVEN, given.encode(page.load(word::ASK)));
    page.wake(word::GIVEN);
    slots
}

fn page() -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&fresh_page()).unwrap();
    file
}

/// A rank that holds everything: its page and session, and its launcher's view of the page.
fn one_rank() -> (File, Session, Page, [Peer; 1]) {
    let file = page();
    let session = Session::from_fd(file.as_raw_fd()).unwrap();
    let launcher = Page::from_file(&file).unwrap();
    let held = held(0, 1);
    (file, session, launcher, [Peer { node: 0, held }])
}

fn env(rank: u32, world: u32) -> WorkerEnv {
    WorkerEnv {
        rank,
        world,
        local_rank: rank,
        master: None,
        restart: 0,
        generation: 3,
        digest: Digest([5; 32]),
    }
}

pub(super) fn row(rank: u64, world: u64) -> Slice {
    let rows = ROWS / world;
    Slice {
        offset: vec![rank * rows, 0],
        extent: vec![rows, 4],
    }
}

/// A tensor that all hold, and one of which each rank has some rows.
fn held(rank: u64, world: u64) -> Vec<Held> {
    let mut sharded = Held::whole("sharded", Dtype::F32, &[ROWS, 4]);
    sharded.slices = vec![row(rank, world)];
    vec![Held::whole("weights", Dtype::F16, &[100_000]), sharded]
}

/// The bytes of the state before a step.
pub(super) fn bytes(name: &str, step: u64) -> Vec<u8> {
    let count = match name {
        "weights" => 200_000,
        _ => ROWS * 16,
    };
    (0..count).map(|at| (at / 7 + step * 3) as u8).collect()
}

pub(super) fn part(step: u64, slice: &Slice) -> Vec<u8> {
    let begin = slice.offset[0] * 16;
    bytes("sharded", step)[begin as usize..][..(slice.extent[0] * 16) as usize].to_vec()
}

/// Saves `step` on two ranks, makes it durable as launchers do, and returns the manifest's digest.
pub(super) fn save_on_two(place: &Path, step: u64) -> Id {
    let peers: Vec<Peer> = (0..2)
        .map(|rank| Peer {
            node: 0,
            held: held(rank, 2),
        })
        .collect();
    let dir = Dir::open(place).unwrap();
    let name = format!("{step}-{}-1", "05".repeat(8));
    let (mut draft, mut parts) = (None, Vec::new());
    for rank in 0..2u32 {
        let file = page();
        let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
        let launcher = Page::from_file(&file).unwrap();
        let slots = thread::scope(|scope| {
            let launcher = scope.spawn(|| give(&launcher, Given::Slots));
            let mut saver = Saver::new(&mut session, &env(rank, 2), &peers).unwrap();
            let (weights, mine) = (bytes("weights", step), part(step, &row(rank.into(), 2)));
            let state = |name: &str, slice: &Slice| match name {
                "weights" => Some(&weights[..]),
                _ => (*slice == row(rank.into(), 2)).then_some(&mine[..]),
            };
            let blob = Blob {
                name: format!("rng/{rank}"),
                data: vec![7; 3],
            };
            let saved = saver.save(step, state, vec![blob]).unwrap();
            assert!(saved.bytes > ROWS * 8);
            launcher.join().unwrap()
        });
        let sealed = slots[0].take().unwrap().unwrap();
        assert_eq!((sealed.step, sealed.generation), (step, Bytes([5; 32])));
        let go_on = |_| std::ops::ControlFlow::Continue(());
        let kept = keep(&sealed, &dir, &name, rank, None, Options::default(), &go_on).unwrap();
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
        world: 2,
        saved_at: 0,
    };
    let manifest = draft
        .unwrap()
        .assemble(origin, &dir, &name, &parts)
        .unwrap();
    shelf::put(&dir, &manifest).unwrap()
}

#[test]
fn what_two_ranks_save_three_load() {
    let place = tempfile::tempdir().unwrap();
    let digest = save_on_two(place.path(), 40);
    let checkpoint = Restore::open(place.path(), digest).unwrap();
    assert_eq!((checkpoint.step(), checkpoint.world()), (40, 2));
    assert_eq!(checkpoint.blob("rng/1"), Some(&[7; 3][..]));
    for rank in 0..3 {
        let slice = row(rank, 3);
        let (mut weights, mut mine) = (vec![0; 200_000], vec![0; (ROWS / 3 * 16) as usize]);
        let want = |name, dtype, shape, slice, into| Want {
            name,
            dtype,
            shape,
            slice,
            into,
        };
        let loaded = checkpoint.load(&mut [
            want(
                "weights",
                Dtype::F16,
                &[100_000],
                Slice::whole(&[100_000]),
                &mut weights,
            ),
            want("sharded", Dtype::F32, &[ROWS, 4], slice.clone(), &mut mine),
        ]);
        loaded.unwrap();
        assert!(weights == bytes("weights", 40) && mine == part(40, &slice));
    }
    let other = Restore::open(place.path(), Bytes([1; 32])).unwrap_err();
    assert!(matches!(other, RestoreError::Manifest { .. }), "{other}");
    let name = format!("manifest/{digest}.json");
    std::fs::write(place.path().join(name), "{}").unwrap();
    let damaged = Restore::open(place.path(), digest).unwrap_err();
    assert!(matches!(damaged, RestoreError::Damaged { .. }), "{damaged}");
}

#[cfg(not(feature = "buckets"))]
#[test]
fn a_bucket_is_refused_by_a_worker_that_was_built_without_them() {
    let refused = Restore::open("s3://bucket/team/job", Bytes([1; 32])).unwrap_err();
    assert!(matches!(refused, RestoreError::Buckets(_)), "{refused}");
    assert!(
        refused.to_string().contains("feature `buckets`"),
        "{refused}"
    );
    // Also where there is nothing to restore yet.
    let get = |name: &str| (name == STORE_ENV).then(|| "s3://bucket/team/job".into());
    let refused = Restore::told(None, get).unwrap_err();
    assert!(matches!(refused, RestoreError::Buckets(_)), "{refused}");
    let location = Restore::open("ftp://host/job", Bytes([1; 32])).unwrap_err();
    assert!(matches!(location, RestoreError::Location(_)), "{location}");
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_gpu_is_refused_by_a_worker_that_was_built_without_them() {
    use std::error::Error as _;

    let (_file, mut session, launcher, peers) = one_rank();
    let (mut saver, slots) = thread::scope(|scope| {
        let launcher = scope.spawn(|| give(&launcher, Given::Slots));
        let saver = Saver::new(&mut session, &env(0, 1), &peers).unwrap();
        (saver, launcher.join().unwrap())
    });
    // SAFETY: nobody looks there; that is what is tested.
    let there = |bytes| unsafe { OnDevice::new(4096, bytes, std::ptr::null_mut()) };
    let state = |name: &str, _: &Slice| Some(there(bytes(name, 1).len() as u64));
    let refused = saver.save(1, state, Vec::new()).unwrap_err();
    let said = refused.source().unwrap().to_string();
    assert!(said.contains("feature `cuda`"), "{said}");
    assert_eq!(slots[0].state().0, State::Free);

    let place = tempfile::tempdir().unwrap();
    let digest = save_on_two(place.path(), 40);
    let checkpoint = Restore::open(place.path(), digest).unwrap();
    let want = Wanted {
        name: "weights",
        dtype: Dtype::F16,
        shape: &[100_000],
        slice: Slice::whole(&[100_000]),
        // SAFETY: as above.
        into: unsafe { OnDeviceMut::new(4096, 200_000, std::ptr::null_mut()) }.into(),
    };
    let refused = checkpoint.load_into(vec![want]).unwrap_err();
    let said = refused.source().unwrap().to_string();
    assert!(said.contains("feature `cuda`"), "{said}");
}

#[test]
fn the_training_goes_on_while_slots_are_made() {
    let (_file, mut session, launcher, peers) = one_rank();
    let mut saver = thread::scope(|scope| {
        scope.spawn(|| {
            while launcher.load(word::ASK) == 0 {
                thread::yield_now();
            }
            launcher.store(word::GIVEN, Given::Coming.encode(launcher.load(word::ASK)));
            launcher.wake(word::GIVEN);
        });
        // They are made behind this: nobody gives them yet.
        Saver::new(&mut session, &env(0, 1), &peers).unwrap()
    });
    let (saved, slots) = thread::scope(|scope| {
        let slots = scope.spawn(|| give(&launcher, Given::Slots));
        let (weights, rows) = (bytes("weights", 1), bytes("rows", 1));
        let state = |name: &str, _: &Slice| match name {
            "weights" => Some(&weights[..]),
            _ => Some(&rows[..]),
        };
        let saved = saver.save(1, state, Vec::new()).unwrap();
        (saved, slots.join().unwrap())
    });
    assert!(!saved.left_out);
    assert!(slots.iter().any(|slot| slot.state().0 == State::Sealed));
}

/// Whether a thread of this process waits for slots.
fn is_waited_for() -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let mut names = tasks.filter_map(|t| std::fs::read_to_string(t.path().join("comm")).ok());
    names.any(|name| name.trim() == "muster-slots")
}

#[test]
fn memory_that_was_short_once_is_asked_for_again() {
    let (_file, mut session, launcher, peers) = one_rank();
    let say = |given: Given| {
        launcher.store(word::GIVEN, given.encode(launcher.load(word::ASK)));
        launcher.wake(word::GIVEN);
    };
    let mut saver = thread::scope(|scope| {
        scope.spawn(|| {
            while launcher.load(word::ASK) == 0 {
                thread::yield_now();
            }
            say(Given::Coming);
        });
        Saver::new(&mut session, &env(0, 1), &peers).unwrap()
    });
    say(Given::Memory);
    while is_waited_for() {
        thread::yield_now();
    }
    // Hours later there is some: a stop has one save, and no second try.
    thread::scope(|scope| {
        let slots = scope.spawn(|| {
            while launcher.load(word::ASK) == 1 {
                thread::yield_now();
            }
            give(&launcher, Given::Slots)
        });
        let (weights, rows) = (bytes("weights", 1), bytes("rows", 1));
        let state = |name: &str, _: &Slice| match name {
            "weights" => Some(&weights[..]),
            _ => Some(&rows[..]),
        };
        let saved = saver.save(1, state, Vec::new());
        // Else the launcher's side would wait without end.
        launcher.store(word::ASK, launcher.load(word::ASK).max(2));
        let _slots = slots.join();
        assert!(!saved.unwrap().left_out);
    });
}

#[test]
fn why_there_are_no_slots_is_said() {
    let peers = [Peer {
        node: 0,
        held: held(0, 1),
    }];
    let refused = |given| {
        let file = page();
        let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
        let launcher = Page::from_file(&file).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| give(&launcher, given));
            let refused = Saver::new(&mut session, &env(0, 1), &peers).unwrap_err();
            refused.to_string()
        })
    };
    assert!(refused(Given::NoStore).contains("--store"));
    let budget = refused(Given::Budget);
    assert!(
        budget.contains("room for 77") && budget.contains("--checkpoint-memory"),
        "{budget}"
    );
    assert!(refused(Given::Memory).contains("no memory"));
    let file = page();
    let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
    let few = Saver::new(&mut session, &env(0, 2), &peers).unwrap_err();
    assert!(matches!(few, SaveError::Peers { peers: 1, .. }), "{few}");
}

#[test]
fn a_rank_waits_for_a_slot_and_then_says_which_are_busy() {
    let (_file, mut session, launcher, peers) = one_rank();
    let (weights, sharded) = (bytes("weights", 0), bytes("sharded", 0));
    let state = |name: &str, _: &Slice| match name {
        "weights" => Some(&weights[..]),
        _ => Some(&sharded[..]),
    };
    let (mut saver, slots) = thread::scope(|scope| {
        let launcher = scope.spawn(|| give(&launcher, Given::Slots));
        let saver = Saver::new(&mut session, &env(0, 1), &peers).unwrap();
        (saver, launcher.join().unwrap())
    });
    let short = |_: &str, _: &Slice| Some(&weights[1..]);
    let error = saver.save(0, short, Vec::new()).unwrap_err();
    assert!(matches!(&error, SaveError::State { .. }), "{error}");
    saver.save(1, state, Vec::new()).unwrap();
    saver.save(2, state, Vec::new()).unwrap();
    saver.wait(std::time::Duration::ZERO);
    let busy = saver.save(3, state, Vec::new()).unwrap_err();
    let SaveError::Busy { slots: both } = busy else {
        panic!("{busy}");
    };
    assert_eq!(both, [(State::Sealed, 1), (State::Sealed, 2)]);
    saver.wait(std::time::Duration::from_secs(60));
    // The launcher sees that it waits, and may have it leave the save out.
    let left_out = thread::scope(|scope| {
        scope.spawn(|| {
            while decode_step(launcher.load(saving::word::WAITS)) != Some(3) {
                thread::yield_now();
            }
            launcher.store(saving::word::SKIP, encode_step(Some(3)));
        });
        saver.save(3, state, Vec::new()).unwrap()
    });
    assert!(left_out.left_out && left_out.bytes == 0);
    assert_eq!(launcher.load(saving::word::WAITS), encode_step(None));
    launcher.store(saving::word::SKIP, encode_step(None));
    // What the saves took is told, and the one that was left out took nothing.
    assert_eq!(launcher.load(saving::word::SAVES), 2);
    assert_eq!(launcher.load(saving::word::STEP), 2);
    assert!(launcher.load(saving::word::BYTES) > ROWS * 16);
    thread::scope(|scope| {
        scope.spawn(|| slots[0].take().unwrap().unwrap().release());
        saver.save(3, state, Vec::new()).unwrap();
    });
    assert_eq!(slots[0].state(), (State::Sealed, 3));

    // Blobs that have grown take larger slots.
    slots[0].take().unwrap().unwrap().release();
    let blob = Blob {
        name: "big".to_owned(),
        data: vec![1; 400_000],
    };
    let larger = thread::scope(|scope| {
        let larger = scope.spawn(|| give(&launcher, Given::Slots));
        saver.save(4, state, vec![blob]).unwrap();
        larger.join().unwrap()
    });
    assert_eq!(larger[0].state(), (State::Sealed, 4));

    // The node's agent has refused the slots since.
    launcher.store(word::GIVEN, Given::Budget.encode(launcher.load(word::ASK)));
    let refused = saver.save(5, state, Vec::new()).unwrap_err();
    assert!(matches!(refused, SaveError::Budget { .. }), "{refused}");
}

/// A store, and a job's checkpoint in it.
struct Kept {
    root: tempfile::TempDir,
    uuid: String,
    digest: Id,
    page: File,
}

impl Kept {
    fn new() -> Kept {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("job")).unwrap();
        let location = muster_store::Location::Directory(root.path().to_owned());
        let store = Store::open(&location, &muster_store::Options::of_process()).unwrap();
        Kept {
            uuid: store.probe().unwrap().uuid.to_string(),
            digest: save_on_two(&root.path().join("job"), 40),
            root,
            page: page(),
        }
    }

    fn folder(&self) -> std::path::PathBuf {
        self.root.path().join("job")
    }

    fn env(&self, name: &str) -> Option<std::ffi::OsString> {
        match name {
            RESTORE_ENV => Some(self.digest.to_string().into()),
            STORE_ENV => Some(self.folder().into()),
            STORE_ID_ENV => Some(self.uuid.clone().into()),
            _ => None,
        }
    }

    /// As a worker restores it; `but` is another value of a variable, or none.
    fn open(&self, but: &[(&str, Option<&Path>)]) -> Result<Restore, RestoreError> {
        let page = Page::from_file(&self.page).ok().map(std::sync::Arc::new);
        let opened = Restore::told(page, |name| {
            let other = but.iter().find(|(other, _)| *other == name);
            other.map_or_else(|| self.env(name), |(_, value)| value.map(Into::into))
        });
        opened.map(|restore| restore.expect("there is something to restore"))
    }

    /// Damage that the launcher was told since the last call.
    fn told(&self) -> Option<saving::Damage> {
        let launcher = Page::from_file(&self.page).unwrap();
        let words: Vec<u64> = saving::word::damage().map(|at| launcher.load(at)).collect();
        let length = launcher.load(saving::word::DAMAGE);
        launcher.store(saving::word::DAMAGE, 0);
        saving::Damage::decode(&words.try_into().unwrap(), length)
    }

    /// The launcher was told that this node cannot read the checkpoint, and doubts nothing else.
    fn told_of_this_node(&self, why: &str) {
        let told = self.told().unwrap();
        assert!(told.here && told.why.contains(why), "{told:?}");
        assert_eq!(told.manifest, Digest(self.digest.0));
    }

    /// A file that has nothing of this tensor.
    fn file_without(&self, tensor: &str) -> std::path::PathBuf {
        let opened = Restore::open(self.folder(), self.digest).unwrap();
        let manifest = opened.manifest();
        let of = |t: &&muster_checkpoint::manifest::Tensor| t.name == tensor;
        let with = manifest.tensors.iter().find(of).unwrap();
        let files = manifest.files.iter().enumerate();
        let mut files = files.filter(|(at, _)| with.slices.iter().all(|s| s.file as usize != *at));
        self.folder().join(&files.next().unwrap().1.path)
    }

    fn remove_a_file(&self) {
        let data = self.folder().join(format!("data/40-{}-1", "05".repeat(8)));
        let files = std::fs::read_dir(data).unwrap().map(|e| e.unwrap().path());
        let mut files = files.filter(|p| p.extension().is_some_and(|e| e == "safetensors"));
        std::fs::remove_file(files.next().unwrap()).unwrap();
    }

    fn remove_the_manifest(&self) {
        let name = format!("manifest/{}.json", self.digest);
        std::fs::remove_file(self.folder().join(name)).unwrap();
    }
}

/// Loads all of what was saved of step 40, and compares it.
pub(super) fn load_all(restore: &Restore) -> Result<Loaded, LoadError> {
    let (mut weights, mut sharded) = (vec![0; 200_000], vec![0; ROWS as usize * 16]);
    let (one, two) = ([100_000], [ROWS, 4]);
    let of = |name, dtype, shape, into| Want {
        name,
        dtype,
        shape,
        slice: Slice::whole(shape),
        into,
    };
    let loaded = restore.load(&mut [
        of("weights", Dtype::F16, &one, &mut weights),
        of("sharded", Dtype::F32, &two, &mut sharded),
    ])?;
    assert!(weights == bytes("weights", 40) && sharded == part(40, &row(0, 1)));
    Ok(loaded)
}

#[test]
fn what_is_found_damaged_the_launcher_is_told() {
    let kept = Kept::new();
    kept.remove_a_file();
    let restore = kept.open(&[]).unwrap();
    assert_eq!(kept.told(), None);
    let error = load_all(&restore).unwrap_err();
    let damage = kept.told().unwrap();
    assert_eq!(damage.manifest, Digest(kept.digest.0));
    assert_eq!(damage.why, error.damage().unwrap().to_string());
    assert!(damage.why.ends_with("is not there"), "{}", damage.why);
    assert!(!damage.here);
    // So is a manifest that is gone.
    kept.remove_the_manifest();
    kept.open(&[]).unwrap_err();
    let why = kept.told().unwrap().why;
    assert!(why.contains("cannot read the manifest"), "{why}");
    // A store that is not there is no damage: this node's view is bad.
    let elsewhere = kept.root.path().join("elsewhere/job");
    kept.open(&[(STORE_ENV, Some(&elsewhere))]).unwrap_err();
    kept.told_of_this_node("mount the store there");
}

#[test]
fn damage_that_was_told_is_not_taken_back_by_the_load_of_something_else() {
    let kept = Kept::new();
    let restore = kept.open(&[]).unwrap();
    let mut weights = vec![0; 200_000];
    let mut load_one = || {
        restore.load(&mut [Want {
            name: "weights",
            dtype: Dtype::F16,
            shape: &[100_000],
            slice: Slice::whole(&[100_000]),
            into: &mut weights,
        }])
    };
    load_one().unwrap();
    let other = kept.file_without("weights");
    let whole = std::fs::read(&other).unwrap();
    std::fs::write(&other, b"").unwrap();
    load_all(&restore).unwrap_err();
    load_one().unwrap();
    let launcher = Page::from_file(&kept.page).unwrap();
    assert_ne!(launcher.load(saving::word::DAMAGE), 0);
    // The same, once it is whole again.
    std::fs::write(&other, whole).unwrap();
    load_all(&restore).unwrap();
    assert_eq!(kept.told(), None);
}

#[test]
fn a_missing_mount_is_no_missing_checkpoint() {
    let kept = Kept::new();
    // The directory below the mount: the job's folder is there from a day without it, and empty.
    let below = tempfile::tempdir().unwrap();
    let folder = below.path().join("job");
    std::fs::create_dir(&folder).unwrap();
    let refused = kept.open(&[(STORE_ENV, Some(&folder))]).unwrap_err();
    assert!(
        matches!(refused, RestoreError::OtherStore { .. }),
        "{refused}"
    );
    assert!(
        refused.to_string().contains("mount the store there"),
        "{refused}"
    );
    kept.told_of_this_node("mount the store there");
    // Another store is no better, whatever lies in it.
    let other = Kept::new();
    let refused = kept
        .open(&[(STORE_ENV, Some(&other.folder()))])
        .unwrap_err();
    assert!(
        matches!(refused, RestoreError::OtherStore { .. }),
        "{refused}"
    );
    kept.told_of_this_node("mount the store there");
    let wrong = kept
        .open(&[(STORE_ID_ENV, Some(Path::new("7")))])
        .unwrap_err();
    assert!(matches!(wrong, RestoreError::StoreId { .. }), "{wrong}");
    assert_eq!(kept.told(), None);

    // It may go while it is read.
    let restore = kept.open(&[]).unwrap();
    kept.remove_a_file();
    std::fs::remove_file(kept.root.path().join(muster_store::UUID_NAME)).unwrap();
    let error = load_all(&restore).unwrap_err();
    assert!(error.damage().is_none(), "{error}");
    assert_eq!(kept.told(), None);
}

#[test]
fn who_sees_the_jobs_folder_alone_restores_and_calls_nothing_gone() {
    let kept = Kept::new();
    std::fs::remove_file(kept.root.path().join(muster_store::UUID_NAME)).unwrap();
    let restore = kept.open(&[]).unwrap();
    load_all(&restore).unwrap();
    kept.remove_a_file();
    load_all(&restore).unwrap_err();
    kept.told_of_this_node("is not there");
    kept.remove_the_manifest();
    let refused = kept.open(&[]).unwrap_err();
    assert!(
        matches!(refused, RestoreError::OtherStore { .. }),
        "{refused}"
    );
    kept.told_of_this_node("mount the store there");
}

#[test]
fn what_a_store_without_a_name_does_not_show_is_not_called_gone() {
    let kept = Kept::new();
    let unnamed = [(STORE_ID_ENV, None)];
    let restore = kept.open(&unnamed).unwrap();
    kept.remove_a_file();
    load_all(&restore).unwrap_err();
    kept.told_of_this_node("is not there");
    kept.remove_the_manifest();
    kept.open(&unnamed).unwrap_err();
    assert_eq!(kept.told(), None);
}
