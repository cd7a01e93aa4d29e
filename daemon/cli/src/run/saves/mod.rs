//! The workers' checkpoint slots, and the writing of what they sealed.
//!
//! The launcher makes the slots, so that their memory is charged to the job and outlives a worker, and
//! writes from them, with its user's rights. When a save is written, and which slots may be filled
//! again, the agent says ([`SaveAsk`]); what happens to the slots it is told ([`SaveNews`]). What is known of them and
//! what follows is the [`SlotTable`]'s; here are their memory and files. Everything that blocks is done by threads, and
//! the driver never waits for them.

mod ahead;
mod cache;
mod heir;
mod keeping;
mod looking;
mod making;
pub mod replicas;
mod way;
mod writing;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use muster_checkpoint::part::Kept;
use muster_checkpoint::persist::Options;
use muster_checkpoint::slot::{Sealed, Slot};
use muster_launcher::slots::{Ask, Effect, Failure, SlotTable};
use muster_protocol::Digest;
use muster_protocol::checkpoint::{Save, SlotId};
use muster_protocol::control::slots::{Given, SLOTS};
use muster_protocol::local::{SaveAsk, SaveNews, Start};
use muster_store::Store;
use tokio::sync::mpsc;

use crate::kept::{Folder, Rules};
use ahead::Ahead;
pub use cache::Cache;
use keeping::Keeping;
use making::Made;
use replicas::Replicas;
use way::Way;
use writing::{Task, Writer};

/// The workers, as far as their slots go.
pub trait Ranks {
    /// Asks of the running ones, by local rank.
    fn asks(&self) -> Vec<(u16, Ask)>;

    /// Answers an ask: where the slots are, or why there are none and for how many bytes there is room.
    fn give(&self, k: u16, ask: u64, given: Given, slots: Option<&[Arc<Slot>; SLOTS]>, room: u64);

    /// Whether the worker of this local rank runs.
    fn runs(&self, k: u16) -> bool;
}

/// How checkpoints reach a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum CheckpointIo {
    /// By a few threads
    #[default]
    Threads,
    /// Through io_uring, which many containers forbid: then as by threads
    IoUring,
}

impl CheckpointIo {
    fn options(self) -> Options {
        Options {
            ring: self == CheckpointIo::IoUring,
            ..Options::default()
        }
    }
}

/// Where checkpoints go.
#[derive(Clone, Debug)]
pub struct Place {
    /// The job's folder in its store.
    pub store: Store,
    /// Where that is, for commands.
    pub location: String,
    /// Where copies of this node's files are kept, too.
    pub cache: Option<Cache>,
    /// How files are written.
    pub io: CheckpointIo,
    /// The job's id, for people who read a manifest.
    pub job: String,
}

/// Memory of a local rank's slots.
#[derive(Debug)]
struct Rank {
    slots: [Arc<Slot>; SLOTS],
    sealed: [Option<Arc<Sealed>>; SLOTS],
    /// Writes of each slot that began before they were asked for.
    ahead: [Option<Ahead>; SLOTS],
}

impl Rank {
    fn new(slots: [Arc<Slot>; SLOTS]) -> Rank {
        Rank {
            slots,
            sealed: [None, None],
            ahead: [None, None],
        }
    }
}

/// A flag that stops the write of a file, and the count of its bytes.
type Watched = (Arc<AtomicBool>, Arc<AtomicU64>);

/// Something that a thread has finished.
#[derive(Debug)]
pub enum Done {
    Made(Made),
    Wrote(SlotId, Save, Result<Kept, Failure>),
    Assembled(Save, Result<(Digest, u32), String>),
    /// Something for people.
    Said(String),
    /// How what is sealed here gets to other nodes.
    Stands(replicas::Standing),
    Kept(keeping::Word),
}

/// Messages that are to be told.
#[derive(Debug, Default)]
pub struct Told {
    pub agent: Vec<SaveNews>,
    pub people: Vec<String>,
    /// Answers to workers: their asks, and the bytes that one slot may have.
    answers: Vec<(u16, u64, Given, u64)>,
}

/// The slots of this node's workers.
#[derive(Debug)]
pub struct Saves {
    place: Option<Place>,
    table: SlotTable,
    ranks: BTreeMap<u16, Rank>,
    writing: BTreeMap<SlotId, Watched>,
    writer: Option<Writer>,
    way: Way,
    /// While ranks fill slots: training waits for that.
    filling: Option<looking::Filling>,
    /// Images that are held in memory; none without a store.
    replicas: Option<Replicas>,
    standing: replicas::Standing,
    keeping: Keeping,
    done: (mpsc::UnboundedSender<Done>, mpsc::UnboundedReceiver<Done>),
}

impl Saves {
    pub fn new(place: Option<Place>, budget: u64, rules: Rules) -> Saves {
        let (done, way) = (mpsc::unbounded_channel(), Way::default());
        let folder = (place.as_ref()).map(|place| Folder::probed(place.store.clone()));
        let location = place.as_ref().map(|place| place.location.clone());
        let location = location.unwrap_or_default();
        Saves {
            keeping: Keeping::new(folder, location, rules, done.0.clone(), way.clone()),
            way,
            filling: None,
            table: SlotTable::new(place.is_some(), budget),
            place,
            ranks: BTreeMap::new(),
            writing: BTreeMap::new(),
            writer: None,
            replicas: None,
            standing: replicas::Standing::default(),
            done,
        }
    }

    /// Gives what is in slots to the job's workers, and has it copied to another node.
    ///
    /// # Errors
    /// No thread is left.
    pub fn share(&mut self, settings: replicas::Settings) -> std::io::Result<()> {
        let done = self.done.0.clone();
        self.replicas = Some(Replicas::start(settings, self.table.budget(), done)?);
        Ok(())
    }

    /// A generation's workers start.
    pub fn begins(&mut self, start: &Start) {
        self.table.begins(start);
        if let Some(replicas) = &mut self.replicas {
            replicas.begins(start);
        }
    }

    /// The slots that there are.
    pub fn slots(&self) -> Vec<SaveNews> {
        self.table.slots()
    }

    /// A worker has ended with 0 by itself.
    pub fn ended(&mut self, k: u16) -> Option<SaveNews> {
        self.table.worker_ended(k)
    }

    /// All that the agent is to know, on a new link.
    pub fn link_up(&mut self) -> Vec<SaveNews> {
        let kept = self.keeping.link_up().into_iter().map(SaveNews::Keep);
        let some = self.standing != replicas::Standing::default();
        let standing = some.then(|| self.standing.news());
        let slots = self.table.link_up().into_iter();
        slots.chain(kept).chain(standing).collect()
    }

    /// Whether there is anything to look at often.
    pub fn is_used(&self) -> bool {
        !self.table.is_empty()
    }

    /// Waits for something that a thread has finished.
    pub async fn next(&mut self) -> Option<Done> {
        self.done.1.recv().await
    }

    /// Takes it in.
    pub fn finished(&mut self, done: Done, workers: &impl Ranks) -> Told {
        let mut told = Told::default();
        match done {
            Done::Made(made) => self.made(made, &mut told),
            Done::Wrote(slot, save, result) => {
                let result = result.map(|kept| (kept.bytes, kept.digest.0.to_vec()));
                if let Some(news) = self.table.wrote(slot, save, result) {
                    self.writing.remove(&slot);
                    told.agent.push(news);
                }
            }
            Done::Said(text) => told.people.push(text),
            Done::Stands(standing) => {
                self.standing = standing;
                told.agent.push(standing.news());
            }
            Done::Assembled(save, result) => {
                told.agent.push(SlotTable::assembled(save, result));
            }
            Done::Kept(word) => {
                let (news, text) = self.keeping.finished(word);
                told.agent.extend(news.into_iter().map(SaveNews::Keep));
                told.people.extend(text);
            }
        }
        self.answer(&mut told, workers);
        told
    }

    /// Answers workers that have asked.
    fn answer(&self, told: &mut Told, workers: &impl Ranks) {
        for (k, ask, given, room) in told.answers.drain(..) {
            let rank = self.ranks.get(&k).filter(|_| given == Given::Slots);
            workers.give(k, ask, given, rank.map(|rank| &rank.slots), room);
        }
    }

    fn made(&mut self, made: Made, told: &mut Told) {
        let Made { k, ask, result } = made;
        let result = match result {
            Ok((slots, took)) => {
                told.people.push(making::text(k, &slots, took));
                let capacity = slots[0].capacity();
                self.ranks.insert(k, Rank::new(slots));
                Ok(capacity)
            }
            Err(error) => Err(error.to_string()),
        };
        let effects = self.table.made(k, ask, result);
        self.carry_out(effects, told);
        self.count_slots();
    }

    /// Counts the slots: the memory that they leave is for copies.
    fn count_slots(&self) {
        if let Some(replicas) = &self.replicas {
            replicas.set_slots(self.table.bytes());
        }
    }

    /// Does what the agent asks.
    pub fn ask(&mut self, ask: SaveAsk) -> Vec<SaveNews> {
        let mut told = Told::default();
        match ask {
            SaveAsk::Committed { generation, step } => {
                if let Some(replicas) = &self.replicas {
                    replicas.committed(generation, step);
                }
            }
            SaveAsk::Delete { name } => self.keeping.delete(name),
            SaveAsk::Review(review) => {
                let news = self.keeping.ask(review);
                told.agent.extend(news.map(SaveNews::Keep));
            }
            SaveAsk::LookAgain(question) => {
                let news = self.keeping.look_again(question);
                told.agent.push(SaveNews::Keep(news));
            }
            ask => {
                let effects = self.table.ask(ask);
                self.carry_out(effects, &mut told);
            }
        }
        debug_assert!(told.people.is_empty() && told.answers.is_empty());
        told.agent
    }

    fn carry_out(&mut self, effects: Vec<Effect>, told: &mut Told) {
        for effect in effects {
            match effect {
                Effect::Tell(news) => told.agent.push(news),
                Effect::Say(text) => told.people.push(text),
                Effect::Give {
                    k,
                    ask,
                    given,
                    room,
                } => told.answers.push((k, ask, given, room)),
                Effect::Make { k, ask, keep } => {
                    let more = self.make(k, ask, keep);
                    self.carry_out(more, told);
                }
                Effect::Drop { k } => {
                    self.ranks.remove(&k);
                    self.count_slots();
                }
                Effect::Write { slot, save, rank } => {
                    if let Err(why) = self.write(slot, save, rank) {
                        let failed = Err(Failure::Failed(why.to_owned()));
                        told.agent.extend(self.table.wrote(slot, save, failed));
                    }
                }
                Effect::StopWrite { slot } => {
                    if let Some((stop, _)) = self.writing.get(&slot) {
                        stop.store(true, Ordering::Relaxed);
                    }
                }
                Effect::Release { slot } => self.release(slot),
                Effect::Forget { slot } => {
                    if let Some((rank, side)) = held(&mut self.ranks, slot) {
                        (rank.ahead[side], rank.sealed[side]) = (None, None);
                    }
                }
                Effect::Assemble {
                    of,
                    save,
                    parts,
                    sealed,
                } => {
                    let sealed = sealed.into_iter();
                    let sealed = sealed.filter_map(|slot| self.sealed(slot)).collect();
                    let place = self.place.clone();
                    let done = self.done.0.clone();
                    if let Err(why) = writing::assemble(of, place, save, &parts, sealed, done) {
                        told.agent.push(SlotTable::assembled(save, Err(why)));
                    }
                }
            }
        }
    }

    fn sealed(&self, slot: SlotId) -> Option<Arc<Sealed>> {
        let sealed = self.ranks.get(&slot.k)?.sealed.get(usize::from(slot.side));
        sealed?.clone()
    }

    /// Has slots made, by a thread: the answer comes later, or at once where there is none.
    fn make(&mut self, k: u16, ask: Ask, keep: [bool; SLOTS]) -> Vec<Effect> {
        let mut there = [None, None];
        if let Some(rank) = self.ranks.remove(&k) {
            for ((slot, keep), there) in rank.slots.into_iter().zip(keep).zip(&mut there) {
                *there = keep.then_some(slot);
            }
        }
        if let Some(replicas) = &self.replicas
            && there.iter().all(Option::is_none)
        {
            replicas.part(k);
        }
        self.count_slots();
        let freeing = self.replicas.as_ref().map(Replicas::freeing);
        match making::start(k, ask, there, freeing, self.done.0.clone()) {
            Ok(()) => Vec::new(),
            Err(error) => {
                let why = format!("no thread to make checkpoint slots: {error}");
                let effects = self.table.made(k, ask.number, Err(why));
                self.count_slots();
                effects
            }
        }
    }

    fn write(&mut self, slot: SlotId, save: Save, rank: u32) -> Result<(), &'static str> {
        let sealed = self.sealed(slot);
        let held = held(&mut self.ranks, slot);
        let (Some(place), Some(sealed), Some((held, side))) = (&self.place, sealed, held) else {
            return Err("the slot holds no such copy");
        };
        let ahead = held.ahead[side].take();
        let (stop, done) = ahead.as_ref().map(Ahead::watched).unwrap_or_default();
        let task = Task {
            slot,
            save,
            rank,
            sealed,
            ahead,
            place: place.store.clone(),
            cache: place.cache.clone(),
            options: place.io.options(),
            stop: Arc::clone(&stop),
            done: Arc::clone(&done),
            way: self.way.take(),
        };
        if self.writer.is_none() {
            self.writer = Writer::start(self.done.0.clone()).ok();
        }
        if !self.writer.as_ref().is_some_and(|w| w.add(task)) {
            return Err("this launcher cannot start a thread to write");
        }
        self.writing.insert(slot, (stop, done));
        Ok(())
    }

    fn release(&mut self, slot: SlotId) {
        let Some((rank, side)) = held(&mut self.ranks, slot) else {
            return;
        };
        rank.ahead[side] = None;
        if let Some(sealed) = rank.sealed[side].take().and_then(Arc::into_inner) {
            muster_fault::point("launcher.free");
            sealed.release();
        }
    }
}

/// A rank's memory, and which side of it.
fn held(ranks: &mut BTreeMap<u16, Rank>, slot: SlotId) -> Option<(&mut Rank, usize)> {
    let side = usize::from(slot.side);
    let rank = ranks.get_mut(&slot.k).filter(|_| side < SLOTS);
    rank.map(|rank| (rank, side))
}

#[cfg(test)]
mod tests;
