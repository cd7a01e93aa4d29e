//! The workers' checkpoint slots, and the writing of what they sealed.
//!
//! The launcher makes the slots, so that their memory is charged to the job and outlives a worker, and
//! writes from them, with its user's rights. When a save is written, and which slots may be filled
//! again, the agent says ([`SaveAsk`]); what happens to the slots it is told ([`SaveNews`]). Everything
//! that blocks is done by threads, and the driver never waits for them.

mod ahead;
mod cache;
mod heir;
mod keeping;
mod looking;
mod making;
pub mod replicas;
mod way;
mod writing;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use muster_checkpoint::part::Kept;
use muster_checkpoint::persist::Options;
use muster_checkpoint::slot::{Sealed, Slot};
use muster_protocol::checkpoint::{Copy, Found, Save, SlotId, Written};
use muster_protocol::control::slots::{Given, SLOTS};
use muster_protocol::local::{MAX_PARTS, SaveAsk, SaveNews, Start, short};
use muster_protocol::{Digest, Span, Time};
use muster_store::Store;
use tokio::sync::mpsc;

use crate::kept::{Folder, Rules};
use ahead::Ahead;
pub use cache::Cache;
use keeping::Keeping;
pub use making::Ask;
use making::Made;
use replicas::Replicas;
use way::Way;
use writing::{Task, Writer};

/// Between two words about how far a file is.
const PROGRESS: Span = Span::from_millis(500);

/// Generations whose saves may still be written: the present one, and those whose workers sealed
/// something before it.
const GENERATIONS: usize = 8;

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

/// Of a generation, what a manifest says.
#[derive(Clone, Copy, Debug)]
struct Generation {
    digest: Digest,
    lineage: Digest,
    number: u64,
    world: u32,
    first_rank: u32,
}

/// A slot as it was last seen.
#[derive(Debug)]
enum Seen {
    Free,
    Filling { step: u64 },
    Sealed(Arc<Sealed>, Copy),
}

impl Seen {
    fn found(&self) -> Found {
        match self {
            Seen::Free => Found::Free,
            Seen::Filling { step } => Found::Filling { step: *step },
            Seen::Sealed(_, copy) => Found::Sealed(*copy),
        }
    }
}

/// A local rank's slots.
#[derive(Debug)]
struct Rank {
    slots: [Arc<Slot>; SLOTS],
    seen: [Seen; SLOTS],
    /// The worker of the launcher before was filling it, and may not be dead for certain: another one takes its place
    /// before anything is filled.
    torn: [bool; SLOTS],
    /// Writes of each slot that began before they were asked for.
    ahead: [Option<Ahead>; SLOTS],
}

/// A file that is being written.
#[derive(Debug)]
struct Writing {
    save: Save,
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    /// The progress that was said last, and when the next is due.
    said: u64,
    say_at: Time,
}

/// Something that a thread has finished.
#[derive(Debug)]
pub enum Done {
    Made(Made),
    Wrote(SlotId, Save, Result<Kept, writing::Failure>),
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
}

/// The slots of this node's workers.
#[derive(Debug)]
pub struct Saves {
    place: Option<Place>,
    /// The most bytes of all slots.
    budget: u64,
    ranks: BTreeMap<u16, Rank>,
    /// Had slots, and has none. That is said on each link, as what the others have is: the word may have been lost with
    /// the link before, and the agent would hold memory that nobody uses.
    gone: BTreeSet<u16>,
    /// Workers of the newest generation that have ended with 0 by themselves. That is said on each link, too.
    ended: BTreeSet<u16>,
    /// Slots that are being made, and for which ask.
    making: BTreeMap<u16, Ask>,
    generations: Vec<Generation>,
    writing: BTreeMap<SlotId, Writing>,
    /// Parts of a manifest that is to be made, as they arrive.
    parts: Option<(Save, Vec<Written>)>,
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
            place,
            budget,
            ranks: BTreeMap::new(),
            gone: BTreeSet::new(),
            ended: BTreeSet::new(),
            making: BTreeMap::new(),
            generations: Vec::new(),
            writing: BTreeMap::new(),
            parts: None,
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
        self.replicas = Some(Replicas::start(settings, self.budget, done)?);
        Ok(())
    }

    /// A generation's workers start.
    pub fn begins(&mut self, start: &Start) {
        self.ended.clear();
        if let Some(replicas) = &mut self.replicas {
            replicas.begins(start);
        }
        self.generations.retain(|g| g.digest != start.digest);
        if self.generations.len() == GENERATIONS {
            self.generations.remove(0);
        }
        self.generations.push(Generation {
            digest: start.digest,
            lineage: start.lineage,
            number: start.number,
            world: start.world,
            first_rank: start.first_rank,
        });
    }

    /// The slots that there are.
    pub fn slots(&self) -> Vec<SaveNews> {
        let slots = |(k, rank): (&u16, &Rank)| SaveNews::Slots {
            k: *k,
            capacity: rank.slots[0].capacity().0,
            found: [rank.seen[0].found(), rank.seen[1].found()],
        };
        self.ranks.iter().map(slots).collect()
    }

    /// A worker has ended with 0 by itself.
    pub fn ended(&mut self, k: u16) -> Option<SaveNews> {
        self.ended.insert(k);
        self.ended_news(k)
    }

    /// None without a store: nobody saves.
    fn ended_news(&self, k: u16) -> Option<SaveNews> {
        let saves = self.place.as_ref().and(self.generations.last());
        let generation = saves?.digest;
        Some(SaveNews::WorkerEnded { generation, k })
    }

    /// All that the agent is to know, on a new link.
    pub fn link_up(&mut self) -> Vec<SaveNews> {
        self.parts = None;
        let kept = self.keeping.link_up().into_iter().map(SaveNews::Keep);
        // First: what they have left is memory for others.
        let gone = self.gone.iter().map(|k| SaveNews::SlotsGone { k: *k });
        let some = self.standing != replicas::Standing::default();
        let standing = some.then(|| self.standing.news());
        let ended = self.ended.iter().filter_map(|k| self.ended_news(*k));
        let all = gone.chain(self.slots()).chain(ended).chain(kept);
        all.chain(standing).collect()
    }

    /// Whether there is anything to look at often.
    pub fn is_used(&self) -> bool {
        !self.ranks.is_empty()
    }

    /// A worker wants slots.
    fn asked(&mut self, k: u16, ask: making::Ask, workers: &impl Ranks, told: &mut Told) {
        if self.making.contains_key(&k) {
            return workers.give(k, ask.number, Given::Coming, None, 0);
        }
        if self.place.is_none() {
            return workers.give(k, ask.number, Given::NoStore, None, 0);
        }
        let mut ask = ask;
        if let Some(rank) = self.ranks.get(&k).filter(|rank| ask.fits(&rank.slots[0])) {
            if rank.torn == [false; SLOTS] {
                return workers.give(k, ask.number, Given::Slots, Some(&rank.slots), 0);
            }
            // As the other one is.
            (ask.image, ask.note) = rank.slots[0].capacity();
        }
        let others = self.ranks.iter().filter(|(other, _)| **other != k);
        let used: u64 = others.map(|(_, rank)| making::bytes_of(&rank.slots)).sum();
        let made = self.making.values().map(|ask| ask.bytes() * SLOTS as u64);
        let used = used + made.sum::<u64>();
        let room = self.budget.saturating_sub(used) / SLOTS as u64;
        if ask.bytes() > room {
            told.people.push(format!(
                "local rank {k} wants two checkpoint slots of {}, and there is room for {} each: raise --checkpoint-memory, now {}",
                making::shown(ask.bytes()),
                making::shown(room),
                making::shown(self.budget),
            ));
            return workers.give(k, ask.number, Given::Budget, None, room);
        }
        workers.give(k, ask.number, Given::Coming, None, 0);
        // What is sealed in the small ones is still to be written: it is held until then.
        if let Some(rank) = self.ranks.get(&k)
            && rank
                .seen
                .iter()
                .any(|seen| matches!(seen, Seen::Sealed(..)))
        {
            return;
        }
        let mut there = [None, None];
        if let Some(rank) = self.ranks.remove(&k) {
            if rank.torn != [false; SLOTS] && ask.fits(&rank.slots[0]) {
                for ((slot, torn), there) in rank.slots.into_iter().zip(rank.torn).zip(&mut there) {
                    *there = (!torn).then_some(slot);
                }
            }
            // The agent has descriptors of them: it lets go before there is memory for others.
            self.gone.insert(k);
            told.agent.push(SaveNews::SlotsGone { k });
        }
        if let Some(replicas) = &self.replicas {
            if there.iter().all(Option::is_none) {
                replicas.part(k);
            }
            replicas.set_slots(used + ask.bytes() * SLOTS as u64);
        }
        let freeing = self.replicas.as_ref().map(Replicas::freeing);
        self.making.insert(k, ask);
        if let Err(error) = making::start(k, ask, there, freeing, self.done.0.clone()) {
            self.making.remove(&k);
            told.people
                .push(format!("no thread to make checkpoint slots: {error}"));
            workers.give(k, ask.number, Given::Memory, None, 0);
        }
    }

    /// Waits for something that a thread has finished.
    pub async fn next(&mut self) -> Option<Done> {
        self.done.1.recv().await
    }

    /// Takes it in.
    pub fn finished(&mut self, done: Done, workers: &impl Ranks) -> Told {
        let mut told = Told::default();
        match done {
            Done::Made(made) => self.made(made, workers, &mut told),
            Done::Wrote(slot, save, result) => {
                let known = self.writing.get(&slot).is_some_and(|w| w.save == save);
                if known {
                    self.writing.remove(&slot);
                    told.agent.push(writing::news(slot, save, result));
                }
            }
            Done::Said(text) => told.people.push(text),
            Done::Stands(standing) => {
                self.standing = standing;
                told.agent.push(standing.news());
            }
            Done::Assembled(save, result) => told.agent.push(match result {
                Ok((manifest, bytes)) => SaveNews::Assembled {
                    save,
                    manifest,
                    bytes,
                },
                Err(why) => {
                    let why = short(why);
                    SaveNews::AssembleFailed { save, why }
                }
            }),
            Done::Kept(word) => {
                let (news, text) = self.keeping.finished(word);
                told.agent.extend(news.into_iter().map(SaveNews::Keep));
                told.people.extend(text);
            }
        }
        told
    }

    fn made(&mut self, made: Made, workers: &impl Ranks, told: &mut Told) {
        let Made { k, ask, result } = made;
        self.making.remove(&k);
        match result {
            Ok((slots, took)) => {
                told.people.push(format!(
                    "checkpoint slots of local rank {k}: 2 x {} of memory in {:.1} s",
                    making::shown(making::bytes_of(&slots) / SLOTS as u64),
                    took.as_secs_f64()
                ));
                let rank = Rank {
                    seen: [Seen::Free, Seen::Free],
                    slots,
                    torn: [false; SLOTS],
                    ahead: [None, None],
                };
                told.agent.push(SaveNews::Slots {
                    k,
                    capacity: rank.slots[0].capacity().0,
                    found: [Found::Free, Found::Free],
                });
                workers.give(k, ask, Given::Slots, Some(&rank.slots), 0);
                self.ranks.insert(k, rank);
                self.gone.remove(&k);
                self.count_slots();
            }
            Err(error) => {
                self.count_slots();
                told.people.push(error.to_string());
                workers.give(k, ask, Given::Memory, None, 0);
            }
        }
    }

    /// Counts the slots: the memory that they leave is for copies.
    fn count_slots(&self) {
        if let Some(replicas) = &self.replicas {
            let slots = self
                .ranks
                .values()
                .map(|rank| making::bytes_of(&rank.slots));
            replicas.set_slots(slots.sum());
        }
    }

    /// Does what the agent asks.
    pub fn ask(&mut self, ask: SaveAsk) -> Vec<SaveNews> {
        match ask {
            SaveAsk::Write { slot, save } => self.write(slot, save),
            SaveAsk::StopWrite { slot, attempt } => {
                let writing = self.writing.get(&slot);
                match writing.filter(|w| w.save.attempt == attempt) {
                    Some(writing) => {
                        writing.stop.store(true, Ordering::Relaxed);
                        None
                    }
                    // That it ended was lost with a link.
                    None => Some(SaveNews::WriteStopped { slot, attempt }),
                }
            }
            SaveAsk::Free { slot } => {
                self.free(slot);
                None
            }
            SaveAsk::Committed { generation, step } => {
                if let Some(replicas) = &self.replicas {
                    replicas.committed(generation, step);
                }
                None
            }
            SaveAsk::Refuse { k } => {
                self.ranks.remove(&k);
                self.count_slots();
                None
            }
            SaveAsk::Hold { manifest, .. } => Some(SaveNews::HoldFailed {
                manifest,
                why: "checkpoints need a store that all nodes share (--store)".into(),
            }),
            SaveAsk::Delete { name } => {
                self.keeping.delete(name);
                None
            }
            SaveAsk::Review(review) => self.keeping.ask(review).map(SaveNews::Keep),
            SaveAsk::LookAgain(question) => Some(SaveNews::Keep(self.keeping.look_again(question))),
            SaveAsk::Assemble { save, parts, last } => self.assemble(save, parts, last),
            // The driver's, who knows the workers, and has the descriptors.
            SaveAsk::Skip { .. }
            | SaveAsk::Go { .. }
            | SaveAsk::Tell { .. }
            | SaveAsk::Inherit { .. } => None,
        }
        .into_iter()
        .collect()
    }

    fn write(&mut self, slot: SlotId, save: Save) -> Option<SaveNews> {
        let failed = |why: &str| {
            Some(SaveNews::WriteFailed {
                slot,
                attempt: save.attempt,
                why: why.to_owned(),
            })
        };
        if self.writing.get(&slot).is_some_and(|w| w.save == save) {
            // An agent that was restarted asks again; the answer comes when it is done.
            return None;
        }
        let generation = self
            .generations
            .iter()
            .find(|g| g.digest == save.generation);
        let (Some(generation), Some(place)) = (generation, &self.place) else {
            return failed("this launcher knows no such generation");
        };
        let rank = generation.first_rank + u32::from(slot.k);
        let held = self.ranks.get_mut(&slot.k);
        let side = usize::from(slot.side);
        let held = held.and_then(|r| Some((r.seen.get(side)?, r.ahead.get_mut(side)?)));
        let (sealed, ahead) = match held {
            Some((Seen::Sealed(sealed, copy), ahead)) if copy.step == save.step => {
                (Arc::clone(sealed), ahead.take())
            }
            _ => return failed("the slot holds no such copy"),
        };
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
            return failed("this launcher cannot start a thread to write");
        }
        let writing = Writing {
            save,
            stop,
            done,
            said: 0,
            say_at: Time::ZERO,
        };
        self.writing.insert(slot, writing);
        None
    }

    fn free(&mut self, slot: SlotId) {
        let (rank, side) = (self.ranks.get_mut(&slot.k), usize::from(slot.side));
        let Some((seen, ahead)) =
            rank.and_then(|r| Some((r.seen.get_mut(side)?, r.ahead.get_mut(side)?)))
        else {
            return;
        };
        *ahead = None;
        if let Seen::Sealed(..) = seen
            && let Seen::Sealed(sealed, _) = std::mem::replace(seen, Seen::Free)
            && let Some(sealed) = Arc::into_inner(sealed)
        {
            muster_fault::point("launcher.free");
            sealed.release();
        }
    }

    fn assemble(&mut self, save: Save, parts: Vec<Written>, last: bool) -> Option<SaveNews> {
        let (of, mut all) = self.parts.take().unwrap_or((save, Vec::new()));
        if of != save {
            all.clear();
        }
        all.extend(parts);
        if all.len() > MAX_PARTS {
            return Some(SaveNews::AssembleFailed {
                save,
                why: format!("more than {MAX_PARTS} ranks"),
            });
        }
        if !last {
            self.parts = Some((save, all));
            return None;
        }
        let why = match self.start_assembly(save, &all) {
            Ok(()) => return None,
            Err(why) => short(why),
        };
        Some(SaveNews::AssembleFailed { save, why })
    }

    fn start_assembly(&mut self, save: Save, parts: &[Written]) -> Result<(), String> {
        let generation = self
            .generations
            .iter()
            .find(|g| g.digest == save.generation);
        let (Some(generation), Some(place)) = (generation, &self.place) else {
            return Err("this launcher knows no such generation".into());
        };
        let copies = (self.ranks.values().flat_map(|r| &r.seen)).filter_map(|seen| match seen {
            Seen::Sealed(sealed, copy) => Some((sealed, copy)),
            Seen::Free | Seen::Filling { .. } => None,
        });
        let mut of_save =
            copies.filter(|(_, copy)| (copy.step, copy.generation) == (save.step, save.generation));
        let sealed: Vec<Arc<Sealed>> = of_save.by_ref().map(|(s, _)| Arc::clone(s)).collect();
        writing::assemble(
            *generation,
            place.clone(),
            save,
            parts,
            sealed,
            self.done.0.clone(),
        )
    }
}

#[cfg(test)]
mod tests;
