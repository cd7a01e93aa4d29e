//! Launchers and agents of saves, in one: slots on demand, and a manifest once all ranks of a world have sealed a step.
//! Nothing is committed; the restoring process is told the manifest.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muster_checkpoint::dir::Dir;
use muster_checkpoint::hex::{Bytes, Id};
use muster_checkpoint::manifest::Origin;
use muster_checkpoint::part::{Note, keep};
use muster_checkpoint::persist::Options;
use muster_checkpoint::shelf;
use muster_checkpoint::slot::{Sealed, Slot, State};
use muster_protocol::control::slots::{Given, word};

use crate::live::seated;
use crate::page::Page;
use crate::saving::Restore;

/// Sealed slots of one step of one generation, by rank.
type Parts = BTreeMap<u32, Sealed>;

#[derive(Default)]
struct Seen {
    /// The newest generation of which something was sealed.
    generation: u64,
    parts: BTreeMap<(Id, u64), Parts>,
    /// Manifests by the order in which they got whole, with their step and the ranks that saved.
    whole: Vec<(u64, u32, Id)>,
}

pub(crate) struct Keeper {
    store: tempfile::TempDir,
    seen: Mutex<Seen>,
    over: Arc<AtomicBool>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Keeper {
    pub(crate) fn new() -> Arc<Keeper> {
        Arc::new(Keeper {
            store: tempfile::tempdir().unwrap(),
            seen: Mutex::default(),
            over: Arc::default(),
            threads: Mutex::default(),
        })
    }

    pub(crate) fn place(&self) -> &Path {
        self.store.path()
    }

    /// The steps that were saved whole, and by how many ranks.
    pub(crate) fn saved(&self) -> Vec<(u64, u32)> {
        let seen = self.seen.lock().unwrap();
        seen.whole
            .iter()
            .map(|(step, world, _)| (*step, *world))
            .collect()
    }

    /// Waits until this step is.
    pub(crate) fn until_saved(&self, step: u64) {
        let until = Instant::now() + super::LONG;
        while self.saved().last().is_none_or(|(last, _)| *last < step) {
            assert!(Instant::now() < until, "not saved: {:?}", self.saved());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub(crate) fn open(&self, step: u64) -> Restore {
        let seen = self.seen.lock().unwrap();
        let found = seen.whole.iter().rfind(|(saved, ..)| *saved == step);
        Restore::open(self.place(), found.expect("it was saved").2).unwrap()
    }

    /// The last checkpoint that was saved.
    pub(crate) fn newest(&self) -> Option<Id> {
        self.seen.lock().unwrap().whole.last().map(|(.., id)| *id)
    }

    /// Watches a rank's page until this is dropped.
    pub(crate) fn watch(self: &Arc<Keeper>, page: Arc<Page>) {
        let (keeper, over) = (Arc::downgrade(self), self.over.clone());
        let watch = move || {
            let mut slots: Vec<Arc<Slot>> = Vec::new();
            while !over.load(Ordering::Acquire) {
                // What was sealed before it asked for others is taken first.
                let ask = page.load(word::ASK);
                let Some(keeper) = keeper.upgrade() else {
                    return;
                };
                for slot in slots.iter().filter(|slot| slot.state().0 == State::Sealed) {
                    keeper.sealed(&page, slot.take().unwrap().unwrap());
                }
                drop(keeper);
                give(&page, ask, &mut slots);
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let thread = std::thread::spawn(watch);
        self.threads.lock().unwrap().push(thread);
    }

    fn sealed(&self, page: &Page, sealed: Sealed) {
        let place = seated(page).unwrap();
        let mut seen = self.seen.lock().unwrap();
        let now = Bytes(place.digest.0);
        // A rank that was lost is looked at once more, and its page stays where it was.
        if place.term.number() < seen.generation {
            return sealed.release();
        }
        seen.generation = place.term.number();
        // What an earlier generation left is of no use.
        let old: Vec<(Id, u64)> = (seen.parts.keys().copied())
            .filter(|(generation, _)| *generation != now)
            .collect();
        for parts in old.iter().filter_map(|key| seen.parts.remove(key)) {
            parts.into_values().for_each(Sealed::release);
        }
        if sealed.generation != now {
            return sealed.release();
        }
        let (key, step) = ((now, sealed.step), sealed.step);
        let parts = seen.parts.entry(key).or_default();
        let before = parts.insert(place.rank, sealed);
        assert!(before.is_none(), "each step once");
        if parts.len() < place.world as usize {
            return;
        }
        let parts = seen.parts.remove(&key).unwrap();
        let dir = Dir::open(self.place()).unwrap();
        let name = format!("{step}-{}", seen.whole.len());
        let (mut draft, mut digests) = (None, Vec::new());
        for (rank, sealed) in parts {
            let go_on = |_| ControlFlow::Continue(());
            let kept = keep(&sealed, &dir, &name, rank, None, Options::default(), &go_on).unwrap();
            digests.push(kept.digest);
            draft = draft.or(Note::decode(&sealed.note).unwrap().draft);
            sealed.release();
        }
        let origin = Origin {
            job: "test".to_owned(),
            lineage: Bytes(place.lineage.0),
            generation: now,
            number: place.term.number(),
            attempt: 0,
            step,
            world: place.world,
            saved_at: 0,
        };
        let manifest = draft
            .unwrap()
            .assemble(origin, &dir, &name, &digests)
            .unwrap();
        let id = shelf::put(&dir, &manifest).unwrap();
        seen.whole.push((step, place.world, id));
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
    }
}

/// Answers an ask for slots.
fn give(page: &Page, ask: u64, slots: &mut Vec<Arc<Slot>>) {
    if ask == 0 || Given::decode(page.load(word::GIVEN), ask) != Given::Nothing {
        return;
    }
    let need = (page.load(word::IMAGE), page.load(word::NOTE));
    let fits = |slot: &Arc<Slot>| slot.capacity().0 >= need.0 && slot.capacity().1 >= need.1;
    if slots.is_empty() || !slots.iter().all(fits) {
        *slots = (0..2)
            .map(|_| Slot::create(need.0, need.1, 1).unwrap().0)
            .collect();
    }
    page.store(word::PID, std::process::id().into());
    for (at, slot) in word::FDS.into_iter().zip(slots) {
        page.store(at, u64::try_from(slot.fd().as_raw_fd()).unwrap());
    }
    page.store(word::GIVEN, Given::Slots.encode(ask));
    page.wake(word::GIVEN);
}
