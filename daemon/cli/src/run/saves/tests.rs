use std::cell::RefCell;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use muster_checkpoint::dir::Dir;
use muster_checkpoint::hex::Bytes;
use muster_checkpoint::load::{Team, Want, load};
use muster_checkpoint::manifest::{Blob, Manifest};
use muster_checkpoint::newest::Shelf;
use muster_checkpoint::part::Note;
use muster_checkpoint::plan::{Held, Plan, Rank as Holder};
use muster_checkpoint::slot::{Ended, Far, FarError, Image, Source, Span, State};
use muster_checkpoint::source::Directory;
use muster_checkpoint::{Dtype, Slice};
use muster_protocol::checkpoint::{Found, Written};
use muster_protocol::local::KeepNews;
use muster_protocol::{LauncherId, Time};
use muster_store::{Location, Options, Variables};

use super::*;

pub(super) const GENERATION: Digest = Digest([9; 32]);
pub(super) const BYTES: u64 = 10_000_000;

/// An answer to a rank: slots of its own mapping, or how much room there is.
pub(super) type Answer = (Given, Option<[Arc<Slot>; SLOTS]>, u64);

/// Two local ranks that ask, and remember what they are given.
#[derive(Default)]
pub(super) struct Two {
    asks: RefCell<BTreeMap<u16, Ask>>,
    given: RefCell<BTreeMap<u16, Answer>>,
    /// The asks whose answer was said to follow.
    coming: RefCell<BTreeSet<(u16, u64)>>,
    dead: RefCell<Vec<u16>>,
}

impl Two {
    pub(super) fn ask(&self, k: u16, number: u64, image: u64) {
        let note = 100_000;
        let ask = Ask {
            number,
            image,
            note,
        };
        self.asks.borrow_mut().insert(k, ask);
    }

    pub(super) fn answer(&self, k: u16) -> Option<Answer> {
        self.given.borrow_mut().remove(&k)
    }
}

impl Ranks for Two {
    fn asks(&self) -> Vec<(u16, Ask)> {
        self.asks
            .borrow()
            .iter()
            .map(|(k, ask)| (*k, *ask))
            .collect()
    }

    fn give(&self, k: u16, ask: u64, given: Given, slots: Option<&[Arc<Slot>; SLOTS]>, room: u64) {
        if given == Given::Coming {
            assert!(slots.is_none());
            self.coming.borrow_mut().insert((k, ask));
            return;
        }
        let asked = self.asks.borrow_mut().remove(&k);
        assert_eq!(asked.map(|a| a.number), Some(ask));
        // As a worker opens them: mappings of their own.
        let open =
            |slot: &Arc<Slot>| Slot::open(slot.fd().try_clone_to_owned().unwrap(), 1).unwrap();
        let slots = slots.map(|slots| slots.each_ref().map(open));
        self.given.borrow_mut().insert(k, (given, slots, room));
    }

    fn runs(&self, k: u16) -> bool {
        !self.dead.borrow().contains(&k)
    }
}

pub(super) fn start() -> Start {
    let nowhere = SocketAddr::from(([127, 0, 0, 1], 1));
    Start {
        digest: GENERATION,
        lineage: Digest([8; 32]),
        attempt: 1,
        number: 4,
        node_rank: 0,
        nodes: 1,
        first_rank: 0,
        slots: 2,
        world: 2,
        master: nowhere,
        master_guard: nowhere,
        master_launcher: LauncherId([0; 8]),
        restart_count: 0,
        restore: None,
        peers: Box::default(),
        why: String::new(),
    }
}

/// In this directory.
pub(super) fn place(path: &std::path::Path) -> Place {
    let location = Location::Directory(path.to_owned());
    let store = Store::open(&location, &Options::new(Variables::default())).unwrap();
    Place {
        store: store.within("job").unwrap(),
        location: location.to_string(),
        cache: None,
        io: super::CheckpointIo::default(),
        job: "job".into(),
    }
}

fn saves(path: &std::path::Path, budget: u64) -> Saves {
    let mut saves = Saves::new(Some(place(path)), budget, Rules::default());
    saves.begins(&start());
    saves
}

/// Waits for a thread.
pub(super) async fn done(saves: &mut Saves, two: &Two) -> Told {
    let next = tokio::time::timeout(Duration::from_secs(60), saves.next());
    let done = next.await.unwrap().unwrap();
    saves.finished(done, two)
}

fn state(step: u64) -> Vec<u8> {
    (0..BYTES).map(|at| (at / 3 + step) as u8).collect()
}

fn plan() -> Plan {
    let held = [Held::whole("w", Dtype::U8, &[BYTES])];
    let rank = Holder {
        node: 0,
        held: &held,
    };
    Plan::new(&[rank, rank]).unwrap()
}

/// A worker's save.
pub(super) fn fill(slot: &Slot, rank: usize, step: u64) {
    fill_of(&plan(), &state(step), slot, rank, step);
}

/// A worker's save of this state.
pub(super) fn fill_of(plan: &Plan, state: &[u8], slot: &Slot, rank: usize, step: u64) {
    fill_with(plan, state, slot, rank, step, &());
}

fn fill_with(plan: &Plan, state: &[u8], slot: &Slot, rank: usize, step: u64, far: &impl Far) {
    let shard = &plan.shards[rank];
    let mut sources = vec![Source {
        at: 0,
        bytes: &shard.layout.header,
    }];
    sources.extend(shard.pieces.iter().map(|piece| Source {
        at: piece.at,
        bytes: &state[piece.skip as usize..][..piece.bytes as usize],
    }));
    sources.sort_unstable_by_key(|source| source.at);
    let note = Note {
        file: Some(shard.file.clone()),
        blobs: vec![Blob {
            name: format!("rng/{rank}"),
            data: vec![rank as u8],
        }],
        draft: (rank == 0).then(|| plan.draft()),
        inventory: Some(plan.inventory().clone()),
    };
    let note = note.encode().unwrap();
    let image = Image {
        step,
        generation: Bytes(GENERATION.0),
        bytes: shard.layout.bytes,
        sources: &sources,
        note: &note,
    };
    slot.fill_with(&image, far, 2).unwrap();
}

pub(super) fn save(step: u64) -> Save {
    Save {
        generation: GENERATION,
        attempt: 1,
        step,
    }
}

pub(super) async fn given(saves: &mut Saves, two: &Two, k: u16) -> [Arc<Slot>; SLOTS] {
    let (slots, said) = given_for(saves, two, k, BYTES).await;
    assert!(said.contains("9.6 MiB"), "{said}");
    slots
}

/// Slots for images of so many bytes, and what is said of them.
pub(super) async fn given_for(
    saves: &mut Saves,
    two: &Two,
    k: u16,
    bytes: u64,
) -> ([Arc<Slot>; SLOTS], String) {
    two.ask(k, 1, bytes);
    assert!(saves.look(two, Time::ZERO).agent.is_empty());
    // The worker goes on meanwhile.
    assert!(two.coming.borrow_mut().remove(&(k, 1)));
    let mut told = done(saves, two).await;
    assert!(
        matches!(&told.agent[..], [SaveNews::Slots { k: of, capacity, found: [Found::Free, Found::Free] }] if *of == k && *capacity >= bytes),
        "{told:?}"
    );
    let (given, slots, _) = two.answer(k).unwrap();
    assert_eq!(given, Given::Slots);
    (slots.unwrap(), told.people.remove(0))
}

#[tokio::test]
async fn from_two_workers_memory_to_a_manifest() {
    let dir = tempfile::tempdir().unwrap();
    let (mut saves, two) = (saves(dir.path(), u64::MAX), Two::default());
    let slots = [
        given(&mut saves, &two, 0).await,
        given(&mut saves, &two, 1).await,
    ];
    for (rank, slots) in slots.iter().enumerate() {
        fill(&slots[0], rank, 7);
    }
    let told = saves.look(&two, Time::ZERO).agent;
    let sealed = |k: u16, news: &[SaveNews]| match news {
        [
            SaveNews::Filling { slot: a, step: 7 },
            SaveNews::Sealed { slot: b, copy },
        ] => {
            assert_eq!((a, b), (&SlotId { k, side: 0 }, &SlotId { k, side: 0 }));
            assert_eq!((copy.step, copy.generation), (7, GENERATION));
        }
        other => panic!("{other:?}"),
    };
    sealed(0, &told[..2]);
    sealed(1, &told[2..]);
    assert!(saves.look(&two, Time::ZERO).agent.is_empty());
    // Another run of the agent hears what is there.
    assert!(matches!(
        &saves.link_up()[..],
        [
            SaveNews::Slots { found: [Found::Sealed(copy), Found::Free], .. },
            SaveNews::Slots { .. },
            SaveNews::Keep(KeepNews::Place { .. }),
            SaveNews::Keep(KeepNews::Rules(_)),
        ] if copy.step == 7
    ));

    let mut parts = Vec::new();
    for k in [0, 1] {
        let slot = SlotId { k, side: 0 };
        assert!(
            saves
                .ask(SaveAsk::Write {
                    slot,
                    save: save(7)
                })
                .is_empty()
        );
        // Asked twice, written once.
        assert!(
            saves
                .ask(SaveAsk::Write {
                    slot,
                    save: save(7)
                })
                .is_empty()
        );
        let told = done(&mut saves, &two).await.agent;
        let [
            SaveNews::Written {
                slot: of,
                attempt: 1,
                bytes,
                summary,
            },
        ] = &told[..]
        else {
            panic!("{told:?}");
        };
        assert_eq!(*of, slot);
        parts.push(Written {
            rank: k.into(),
            bytes: *bytes,
            summary: summary.clone(),
        });
    }
    for (some, last) in [(&parts[..1], false), (&parts[1..], true)] {
        let parts = some.to_vec();
        let ask = SaveAsk::Assemble {
            save: save(7),
            parts,
            last,
        };
        assert!(saves.ask(ask).is_empty());
    }
    let told = done(&mut saves, &two).await.agent;
    let [
        SaveNews::Assembled {
            save: of,
            manifest,
            bytes,
        },
    ] = &told[..]
    else {
        panic!("{told:?}");
    };
    assert_eq!(*of, save(7));

    // It is what was in the workers' memory.
    let source = Directory::new(Dir::open(&dir.path().join("job")).unwrap(), false);
    let encoded = source.manifest(Bytes(manifest.0)).unwrap();
    assert_eq!(encoded.len(), *bytes as usize);
    let manifest = Manifest::decode(&encoded).unwrap();
    assert_eq!((manifest.origin.step, manifest.origin.world), (7, 2));
    assert_eq!(manifest.blob("rng/1"), Some(&[1][..]));
    let mut into = vec![0; BYTES as usize];
    let want = Want {
        name: "w",
        dtype: Dtype::U8,
        shape: &[BYTES],
        slice: Slice::whole(&[BYTES]),
        into: &mut into,
    };
    load(&manifest, &source, &mut [want], Team::alone(2)).unwrap();
    assert!(into == state(7));

    // A slot is busy until it is freed.
    assert_eq!(slots[0][0].state().0, State::Taken);
    saves.ask(SaveAsk::Free {
        slot: SlotId { k: 0, side: 0 },
    });
    assert_eq!(slots[0][0].state().0, State::Free);
    fill(&slots[0][0], 0, 8);
    let told = saves.look(&two, Time::ZERO).agent;
    assert!(matches!(told[1], SaveNews::Sealed { copy, .. } if copy.step == 8));
    // Parts that are not those of all ranks make nothing.
    let ask = SaveAsk::Assemble {
        save: save(7),
        parts: vec![parts[1].clone()],
        last: true,
    };
    assert!(matches!(
        &saves.ask(ask)[..],
        [SaveNews::AssembleFailed { .. }]
    ));
}

#[tokio::test]
async fn memory_is_given_within_the_budget() {
    let dir = tempfile::tempdir().unwrap();
    let two = Two::default();
    let mut saves = saves(dir.path(), 3 * BYTES);
    given(&mut saves, &two, 0).await;
    // Large enough slots are given again, as to a worker that was started anew.
    two.ask(0, 5, BYTES / 2);
    saves.look(&two, Time::ZERO);
    assert!(matches!(two.answer(0), Some((Given::Slots, Some(_), _))));
    two.ask(1, 1, BYTES);
    let told = saves.look(&two, Time::ZERO);
    assert!(told.people[0].contains("--checkpoint-memory"), "{told:?}");
    let (given, slots, room) = two.answer(1).unwrap();
    assert!(given == Given::Budget && slots.is_none() && room < BYTES / 2 && room > BYTES / 3);
    // What its worker asks for anew takes the place of what it had.
    two.ask(0, 6, BYTES + 1_000_000);
    let told = saves.look(&two, Time::ZERO);
    // The agent has descriptors of it, and lets go before there is other memory.
    assert_eq!(told.agent, [SaveNews::SlotsGone { k: 0 }]);
    // Where that was lost with the link, it is said on the next one, until there are others.
    let of_slots = |saves: &mut Saves| {
        let mut all = saves.link_up();
        all.retain(|news| !matches!(news, SaveNews::Keep(_)));
        all
    };
    for _link in 0..2 {
        assert_eq!(of_slots(&mut saves), [SaveNews::SlotsGone { k: 0 }]);
    }
    assert!(matches!(
        &done(&mut saves, &two).await.agent[..],
        [SaveNews::Slots { k: 0, .. }]
    ));
    assert!(matches!(two.answer(0), Some((Given::Slots, Some(_), _))));
    assert!(matches!(
        &of_slots(&mut saves)[..],
        [SaveNews::Slots { k: 0, .. }]
    ));

    let mut nowhere = Saves::new(None, u64::MAX, Rules::default());
    two.ask(0, 1, 1);
    nowhere.look(&two, Time::ZERO);
    assert!(matches!(two.answer(0), Some((Given::NoStore, None, _))));
}

#[tokio::test]
async fn what_cannot_be_written_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let (mut saves, two) = (saves(dir.path(), u64::MAX), Two::default());
    let slots = given(&mut saves, &two, 0).await;
    let slot = SlotId { k: 0, side: 0 };
    let failed = |news: &[SaveNews], words: &str| {
        assert!(
            matches!(news, [SaveNews::WriteFailed { why, .. }] if why.contains(words)),
            "{news:?}"
        );
    };
    failed(
        &saves.ask(SaveAsk::Write {
            slot,
            save: save(7),
        }),
        "no such copy",
    );
    fill(&slots[0], 0, 7);
    saves.look(&two, Time::ZERO);
    failed(
        &saves.ask(SaveAsk::Write {
            slot,
            save: save(8),
        }),
        "no such copy",
    );
    let other = Save {
        generation: Digest([1; 32]),
        ..save(7)
    };
    failed(
        &saves.ask(SaveAsk::Write { slot, save: other }),
        "no such generation",
    );
    // Something else has the file's name.
    let data = dir.path().join("job").join(save(7).folder());
    std::fs::create_dir_all(&data).unwrap();
    std::fs::write(data.join("n0-0.safetensors"), "x").unwrap();
    saves.ask(SaveAsk::Write {
        slot,
        save: save(7),
    });
    failed(&done(&mut saves, &two).await.agent, "is there already");
    // Given up, and written by the next attempt.
    let next = Save {
        attempt: 2,
        ..save(7)
    };
    saves.ask(SaveAsk::Write { slot, save: next });
    saves.ask(SaveAsk::StopWrite { slot, attempt: 2 });
    let told = done(&mut saves, &two).await.agent;
    let ended = matches!(
        &told[..],
        [SaveNews::WriteStopped { attempt: 2, .. } | SaveNews::Written { attempt: 2, .. }]
    );
    assert!(ended, "{told:?}");
}

/// Waits in the middle of a fill until it is told to go on.
struct Paused<'a>(&'a mpsc::Sender<()>, &'a Mutex<mpsc::Receiver<()>>);

impl Far for Paused<'_> {
    fn spans(&self) -> &[Span] {
        &[]
    }

    fn begin(&self) -> Result<(), FarError> {
        self.0.send(())?;
        let go = self.1.lock().unwrap();
        Ok(go.recv_timeout(Duration::from_secs(60))?)
    }

    fn bring(&self, _image: *mut [u8], _begin: u64, _end: u64) -> Result<(), FarError> {
        Ok(())
    }

    fn end(&self) -> Ended {
        Ended::Well
    }
}

#[tokio::test]
async fn nothing_is_verified_while_a_slot_is_filled() {
    let dir = tempfile::tempdir().unwrap();
    let (mut saves, two) = (saves(dir.path(), u64::MAX), Two::default());
    let slots = given(&mut saves, &two, 0).await;
    assert!(!saves.way.is_taken());
    let ((begun, begins), (go_on, goes_on)) = (mpsc::channel(), mpsc::channel());
    let image = Image {
        step: 7,
        generation: Bytes(GENERATION.0),
        bytes: 0,
        sources: &[],
        note: &[],
    };
    std::thread::scope(|scope| {
        let goes_on = Mutex::new(goes_on);
        let filling = scope.spawn({
            let (slot, begun, image) = (&slots[0], &begun, &image);
            move || slot.fill_with(image, &Paused(begun, &goes_on), 1).is_ok()
        });
        begins.recv_timeout(Duration::from_secs(60)).unwrap();
        saves.look(&two, Time::ZERO);
        assert!(saves.way.is_taken());
        // A worker that stands still: not for ever.
        let minute = Time::ZERO + muster_protocol::Span::from_secs(60);
        saves.look(&two, minute);
        assert!(saves.way.is_taken());
        saves.look(&two, minute + muster_protocol::Span::from_secs(1));
        assert!(!saves.way.is_taken());
        go_on.send(()).unwrap();
        assert!(filling.join().unwrap());
    });
    saves.look(&two, Time::ZERO);
    assert!(!saves.way.is_taken());
}

#[tokio::test]
async fn a_worker_that_dies_leaves_what_it_sealed() {
    let dir = tempfile::tempdir().unwrap();
    let (mut saves, two) = (saves(dir.path(), u64::MAX), Two::default());
    let slots = given(&mut saves, &two, 0).await;
    fill(&slots[0], 0, 7);
    two.dead.borrow_mut().push(0);
    let told = saves.look(&two, Time::ZERO).agent;
    assert!(matches!(told[1], SaveNews::Sealed { copy, .. } if copy.step == 7));
    let slot = SlotId { k: 0, side: 0 };
    saves.ask(SaveAsk::Write {
        slot,
        save: save(7),
    });
    assert!(matches!(
        &done(&mut saves, &two).await.agent[..],
        [SaveNews::Written { .. }]
    ));
}

/// A worker's save that is looked at before its first byte is there.
fn fill_seen(saves: &mut Saves, two: &Two, slot: &Slot, step: u64) {
    let ((begun, begins), (go_on, goes_on)) = (mpsc::channel(), mpsc::channel());
    std::thread::scope(|scope| {
        let goes_on = Mutex::new(goes_on);
        let filling = scope.spawn(move || {
            let far = Paused(&begun, &goes_on);
            fill_with(&plan(), &state(step), slot, 0, step, &far);
        });
        begins.recv_timeout(Duration::from_secs(60)).unwrap();
        saves.look(two, Time::ZERO);
        go_on.send(()).unwrap();
        filling.join().unwrap();
    });
    saves.look(two, Time::ZERO);
}

#[tokio::test]
async fn what_is_being_filled_is_written_ahead_unless_something_older_is() {
    let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (mut alone, other) = (saves(elsewhere.path(), u64::MAX), Two::default());
    let (mut saves, two) = (saves(dir.path(), u64::MAX), Two::default());
    let slots = given(&mut saves, &two, 0).await;
    let slot = SlotId { k: 0, side: 0 };
    let ahead = |saves: &Saves| saves.ranks[&0].ahead.each_ref().map(Option::is_some);
    fill_seen(&mut saves, &two, &slots[0], 7);
    assert_eq!(ahead(&saves), [true, false]);
    let write = |saves: &mut Saves| {
        let save = save(7);
        saves.ask(SaveAsk::Write { slot, save })
    };
    assert_eq!(write(&mut saves), []);
    // It is the writer's now; and until that is through, nothing newer is begun.
    fill_seen(&mut saves, &two, &slots[1], 8);
    assert_eq!(ahead(&saves), [false, false]);
    let told = done(&mut saves, &two).await.agent;
    let [SaveNews::Written { summary: first, .. }] = &told[..] else {
        panic!("{told:?}");
    };
    // An agent that asks again is told so at once.
    assert_eq!(write(&mut saves), told);
    // Written from a slot alone it is the same.
    let slots_there = given(&mut alone, &other, 0).await;
    fill(&slots_there[0], 0, 7);
    alone.look(&other, Time::ZERO);
    assert_eq!(ahead(&alone), [false, false]);
    assert_eq!(write(&mut alone), []);
    let told = done(&mut alone, &other).await.agent;
    assert!(
        matches!(&told[..], [SaveNews::Written { summary, .. }] if summary == first),
        "{told:?}"
    );
    // What nobody asks for is forgotten with its slot.
    saves.ask(SaveAsk::Free { slot });
    fill_seen(&mut saves, &two, &slots[0], 9);
    assert_eq!(ahead(&saves), [true, false]);
    saves.ask(SaveAsk::Free { slot });
    assert_eq!(ahead(&saves), [false, false]);
}
