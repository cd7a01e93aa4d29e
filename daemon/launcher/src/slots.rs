//! The checkpoint slots of this node's workers, as the launcher decides about them: which there are, what is in them,
//! what is written of them, and what the agent is told. Memory, files and threads are the driver's.
//!
//! When a copy is written, and which slots may be filled again, the agent says ([`SaveAsk`]). All that it has to know
//! is told again on each link.

mod words;

use std::collections::{BTreeMap, BTreeSet};

use muster_protocol::checkpoint::{Found, Save, SlotId, Written};
use muster_protocol::control::slots::{Given, SLOTS};
use muster_protocol::local::{MAX_PARTS, SaveAsk, SaveNews, Start, short};
use muster_protocol::{Digest, Span, Time};

pub use words::{Ask, Capacity, Effect, Failure, Generation, Look, shown};

/// Between two words about how far a file is.
const PROGRESS: Span = Span::from_millis(500);

/// Generations whose saves may still be written: the present one, and those whose workers sealed something before it.
const GENERATIONS: usize = 8;

/// A local rank's slots.
#[derive(Clone, Debug)]
struct Rank {
    capacity: Capacity,
    found: [Found; SLOTS],
    /// The worker of the launcher before was filling it, and may not be dead for certain: another one takes its place
    /// before anything is filled.
    torn: [bool; SLOTS],
    /// Files that are durable: an agent that was restarted meanwhile asks for them again.
    written: [Option<WrittenFile>; SLOTS],
}

/// A file of this save, its bytes, and the digest of its part.
type WrittenFile = (Save, u64, Vec<u8>);

impl Rank {
    fn new(capacity: Capacity, found: [Found; SLOTS], torn: [bool; SLOTS]) -> Rank {
        Rank {
            capacity,
            found,
            torn,
            written: [None, None],
        }
    }

    fn bytes(&self) -> u64 {
        (self.capacity.0 + self.capacity.1) * SLOTS as u64
    }

    fn news(&self, k: u16) -> SaveNews {
        SaveNews::Slots {
            k,
            capacity: self.capacity.0,
            found: self.found,
        }
    }

    fn is_torn(&self) -> bool {
        self.torn.contains(&true)
    }
}

/// A file that is written.
#[derive(Clone, Copy, Debug)]
struct Writing {
    save: Save,
    /// The progress that was told last, and when the next is due.
    told: u64,
    tell_at: Time,
}

/// The slots of this node's workers.
#[derive(Clone, Debug, Default)]
pub struct SlotTable {
    /// Without a store nobody saves.
    has_store: bool,
    /// The most bytes of all slots.
    budget: u64,
    ranks: BTreeMap<u16, Rank>,
    /// Had slots, and has none. That is told on each link, as what the others have is: the word may have been lost with
    /// the link before, and the agent would hold memory that nobody uses.
    gone: BTreeSet<u16>,
    /// Workers of the newest generation that have ended with 0 by themselves. That is told on each link, too.
    ended: BTreeSet<u16>,
    /// Slots that are being made, and for which ask.
    making: BTreeMap<u16, Ask>,
    generations: Vec<Generation>,
    writing: BTreeMap<SlotId, Writing>,
    /// Parts of a manifest that is to be made, as they arrive.
    parts: Option<(Save, Vec<Written>)>,
}

impl SlotTable {
    pub fn new(has_store: bool, budget: u64) -> SlotTable {
        SlotTable {
            has_store,
            budget,
            ..SlotTable::default()
        }
    }

    // ---- queries ----

    /// The most bytes of all slots.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Bytes of all slots, with those that are being made.
    pub fn bytes(&self) -> u64 {
        self.used_beside(None)
    }

    fn used_beside(&self, k: Option<u16>) -> u64 {
        let others = self.ranks.iter().filter(|(other, _)| Some(**other) != k);
        let used: u64 = others.map(|(_, rank)| rank.bytes()).sum();
        let made = self.making.values().map(|ask| ask.bytes() * SLOTS as u64);
        used + made.sum::<u64>()
    }

    pub fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }

    /// The content of a slot when it was last looked at.
    pub fn found(&self, slot: SlotId) -> Found {
        let rank = self.ranks.get(&slot.k);
        let found = rank.and_then(|r| r.found.get(usize::from(slot.side)));
        found.copied().unwrap_or(Found::Free)
    }

    /// Whether some slot is being filled.
    pub fn is_filling(&self) -> bool {
        let mut found = self.ranks.values().flat_map(|r| r.found);
        found.any(|f| matches!(f, Found::Filling { .. }))
    }

    pub fn is_writing(&self) -> bool {
        !self.writing.is_empty()
    }

    /// The slots that there are.
    pub fn slots(&self) -> Vec<SaveNews> {
        let slots = self.ranks.iter();
        slots.map(|(k, rank)| rank.news(*k)).collect()
    }

    /// None without a store: nobody saves.
    fn ended_news(&self, k: u16) -> Option<SaveNews> {
        let saves = self.generations.last().filter(|_| self.has_store);
        let generation = saves?.digest;
        Some(SaveNews::WorkerEnded { generation, k })
    }

    fn generation(&self, digest: Digest) -> Option<Generation> {
        let known = self.generations.iter().find(|g| g.digest == digest);
        known.copied().filter(|_| self.has_store)
    }

    // ---- generations, links ----

    /// A generation's workers start.
    pub fn begins(&mut self, start: &Start) {
        self.ended.clear();
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

    /// A worker has ended with 0 by itself.
    pub fn worker_ended(&mut self, k: u16) -> Option<SaveNews> {
        self.ended.insert(k);
        self.ended_news(k)
    }

    /// All that the agent is to know, on a new link.
    pub fn link_up(&mut self) -> Vec<SaveNews> {
        self.parts = None;
        // First: what they have left is memory for others.
        let gone = self.gone.iter().map(|k| SaveNews::SlotsGone { k: *k });
        let ended = self.ended.iter().filter_map(|k| self.ended_news(*k));
        gone.chain(self.slots()).chain(ended).collect()
    }

    // ---- making ----

    /// A worker wants slots.
    pub fn asked(&mut self, k: u16, mut ask: Ask) -> Vec<Effect> {
        let number = ask.number;
        let give = |given, room| Effect::Give {
            k,
            ask: number,
            given,
            room,
        };
        if self.making.contains_key(&k) {
            return vec![give(Given::Coming, 0)];
        }
        if !self.has_store {
            return vec![give(Given::NoStore, 0)];
        }
        let fits = self.ranks.get(&k).filter(|rank| ask.fits(rank.capacity));
        let mut keep = [false; SLOTS];
        if let Some(rank) = fits {
            if !rank.is_torn() {
                return vec![give(Given::Slots, 0)];
            }
            keep = rank.torn.map(|torn| !torn);
            // As the other one is.
            (ask.image, ask.note) = rank.capacity;
        }
        let used = self.used_beside(Some(k));
        let room = self.budget.saturating_sub(used) / SLOTS as u64;
        if ask.bytes() > room {
            let (wanted, room_shown, budget) =
                (shown(ask.bytes()), shown(room), shown(self.budget));
            let text = format!(
                "local rank {k} wants two checkpoint slots of {wanted}, and there is room for {room_shown} each: \
                 raise --checkpoint-memory, now {budget}"
            );
            return vec![Effect::Say(text), give(Given::Budget, room)];
        }
        let mut out = vec![give(Given::Coming, 0)];
        let sealed = |rank: &Rank| rank.found.iter().any(|f| matches!(f, Found::Sealed(_)));
        if self.ranks.get(&k).is_some_and(sealed) {
            // A copy in the small ones is still to be written: they are held until then.
            return out;
        }
        if self.ranks.remove(&k).is_some() {
            // The agent has descriptors of them: it lets go before there is memory for others.
            self.gone.insert(k);
            out.push(Effect::Tell(SaveNews::SlotsGone { k }));
        }
        self.making.insert(k, ask);
        out.push(Effect::Make { k, ask, keep });
        out
    }

    /// Slots were made, of this capacity, or why not.
    pub fn made(&mut self, k: u16, ask: u64, result: Result<Capacity, String>) -> Vec<Effect> {
        self.making.remove(&k);
        let give = |given| Effect::Give {
            k,
            ask,
            given,
            room: 0,
        };
        match result {
            Ok(capacity) => {
                let rank = Rank::new(capacity, [Found::Free; SLOTS], [false; SLOTS]);
                let news = rank.news(k);
                self.ranks.insert(k, rank);
                self.gone.remove(&k);
                vec![Effect::Tell(news), give(Given::Slots)]
            }
            Err(why) => vec![Effect::Say(why), give(Given::Memory)],
        }
    }

    /// Whether slots of the launcher before may be those of this rank; `ranks` is how many there are here. Its own are
    /// newer: the agent took this very launcher for dead.
    pub fn takes_left(&self, k: u16, ranks: u16) -> bool {
        let has_own = self.ranks.contains_key(&k) || self.making.contains_key(&k);
        self.has_store && !has_own && k < ranks
    }

    /// Why there is no room for slots of so many bytes that the launcher before left.
    pub fn no_room_for(&self, k: u16, bytes: u64) -> Option<String> {
        let room = self.budget.saturating_sub(self.bytes());
        let (has, room_shown, budget) = (shown(bytes), shown(room), shown(self.budget));
        (bytes > room).then(|| {
            format!(
                "the checkpoint slots that were left of local rank {k} have {has}, and there is room for {room_shown}: \
                 raise --checkpoint-memory, now {budget}"
            )
        })
    }

    /// The slots that the launcher before left are those of this rank.
    pub fn inherit(
        &mut self,
        k: u16,
        capacity: Capacity,
        found: [Found; SLOTS],
        torn: [bool; SLOTS],
    ) -> SaveNews {
        let rank = Rank::new(capacity, found, torn);
        let news = rank.news(k);
        self.ranks.insert(k, rank);
        self.gone.remove(&k);
        news
    }

    // ---- looking ----

    /// The slots of a rank were looked at.
    pub fn looked(&mut self, k: u16, looks: [Look; SLOTS]) -> Vec<Effect> {
        let mut out = Vec::new();
        let Some(rank) = self.ranks.get_mut(&k) else {
            return out;
        };
        let mut torn = false;
        for (side, (found, look)) in (0u8..).zip(rank.found.iter_mut().zip(looks)) {
            let slot = SlotId { k, side };
            match (look, *found) {
                (Look::Free, Found::Filling { .. }) => {
                    *found = Found::Free;
                    out.push(Effect::Forget { slot });
                }
                (Look::Filling { step }, Found::Free) => {
                    *found = Found::Filling { step };
                    out.push(Effect::Tell(SaveNews::Filling { slot, step }));
                }
                (Look::Sealed(copy), Found::Free | Found::Filling { .. }) => {
                    if *found == Found::Free {
                        let step = copy.step;
                        out.push(Effect::Tell(SaveNews::Filling { slot, step }));
                    }
                    *found = Found::Sealed(copy);
                    out.push(Effect::Tell(SaveNews::Sealed { slot, copy }));
                }
                (Look::Torn, _) => {
                    (*found, torn) = (Found::Free, true);
                    out.push(Effect::Forget { slot });
                }
                (Look::Broken(why), _) => {
                    (*found, torn) = (Found::Free, true);
                    out.push(Effect::Forget { slot });
                    out.push(Effect::Say(format!("local rank {k}: {why}")));
                }
                _ => {}
            }
        }
        if torn {
            out.push(Effect::Tell(SaveNews::WorkerGone { k }));
        }
        out
    }

    /// How many bytes of a file are written; told now and then.
    pub fn progress(&mut self, slot: SlotId, done: u64, now: Time) -> Option<SaveNews> {
        let writing = self.writing.get_mut(&slot)?;
        if done == writing.told || now < writing.tell_at {
            return None;
        }
        (writing.told, writing.tell_at) = (done, now + PROGRESS);
        Some(SaveNews::Progress {
            slot,
            attempt: writing.save.attempt,
            done,
        })
    }

    // ---- what the agent asks ----

    /// Does what the agent asks, as far as slots are concerned: the rest of its asks is the driver's.
    pub fn ask(&mut self, ask: SaveAsk) -> Vec<Effect> {
        match ask {
            SaveAsk::Write { slot, save } => self.write(slot, save),
            SaveAsk::StopWrite { slot, attempt } => {
                let writing = self.writing.get(&slot);
                let known = writing.is_some_and(|w| w.save.attempt == attempt);
                vec![match known {
                    true => Effect::StopWrite { slot },
                    // That it ended was lost with a link.
                    false => Effect::Tell(SaveNews::WriteStopped { slot, attempt }),
                }]
            }
            SaveAsk::Free { slot } => self.free(slot),
            SaveAsk::Refuse { k } => {
                self.ranks.remove(&k);
                vec![Effect::Drop { k }]
            }
            SaveAsk::Hold { manifest, .. } => vec![Effect::Tell(SaveNews::HoldFailed {
                manifest,
                why: "checkpoints need a store that all nodes share (--store)".into(),
            })],
            SaveAsk::Assemble { save, parts, last } => self.assemble(save, parts, last),
            SaveAsk::Delete { .. }
            | SaveAsk::Skip { .. }
            | SaveAsk::Go { .. }
            | SaveAsk::Tell { .. }
            | SaveAsk::Committed { .. }
            | SaveAsk::Review(_)
            | SaveAsk::LookAgain(_)
            | SaveAsk::Inherit { .. } => Vec::new(),
        }
    }

    fn write(&mut self, slot: SlotId, save: Save) -> Vec<Effect> {
        let failed = |why: &str| {
            vec![Effect::Tell(SaveNews::WriteFailed {
                slot,
                attempt: save.attempt,
                why: why.to_owned(),
            })]
        };
        if self.writing.get(&slot).is_some_and(|w| w.save == save) {
            // An agent that was restarted asks again; the answer comes when it is done.
            return Vec::new();
        }
        let Some(generation) = self.generation(save.generation) else {
            return failed("this launcher knows no such generation");
        };
        match self.found(slot) {
            // The same step of another generation is other state.
            Found::Sealed(copy) if (copy.generation, copy.step) == (save.generation, save.step) => {
            }
            _ => return failed("the slot holds no such copy"),
        }
        let rank = self.ranks.get(&slot.k);
        let written = rank.and_then(|r| r.written.get(usize::from(slot.side)));
        if let Some((of, bytes, summary)) = written.and_then(Option::as_ref)
            && *of == save
        {
            return vec![Effect::Tell(SaveNews::Written {
                slot,
                attempt: save.attempt,
                bytes: *bytes,
                summary: summary.clone(),
            })];
        }
        let writing = Writing {
            save,
            told: 0,
            tell_at: Time::ZERO,
        };
        self.writing.insert(slot, writing);
        let rank = generation.first_rank + u32::from(slot.k);
        vec![Effect::Write { slot, save, rank }]
    }

    /// A file was written: of so many bytes, with the digest of its part, or why not.
    pub fn wrote(
        &mut self,
        slot: SlotId,
        save: Save,
        result: Result<(u64, Vec<u8>), Failure>,
    ) -> Option<SaveNews> {
        let attempt = save.attempt;
        self.writing.get(&slot).filter(|w| w.save == save)?;
        self.writing.remove(&slot);
        Some(match result {
            Ok((bytes, summary)) => {
                let rank = self.ranks.get_mut(&slot.k);
                let written = rank.and_then(|r| r.written.get_mut(usize::from(slot.side)));
                if let Some(written) = written {
                    *written = Some((save, bytes, summary.clone()));
                }
                SaveNews::Written {
                    slot,
                    attempt,
                    bytes,
                    summary,
                }
            }
            Err(Failure::Stopped) => SaveNews::WriteStopped { slot, attempt },
            Err(Failure::Failed(why)) => SaveNews::WriteFailed {
                slot,
                attempt,
                why: short(why),
            },
        })
    }

    fn free(&mut self, slot: SlotId) -> Vec<Effect> {
        let (rank, side) = (self.ranks.get_mut(&slot.k), usize::from(slot.side));
        let slot_of = rank.and_then(|r| Some((r.found.get_mut(side)?, r.written.get_mut(side)?)));
        let found = slot_of.map(|(found, written)| {
            *written = None;
            found
        });
        match found {
            Some(found @ Found::Sealed(_)) => {
                *found = Found::Free;
                vec![Effect::Release { slot }]
            }
            Some(_) => vec![Effect::Forget { slot }],
            None => Vec::new(),
        }
    }

    fn assemble(&mut self, save: Save, parts: Vec<Written>, last: bool) -> Vec<Effect> {
        let failed = |why: String| {
            let why = short(why);
            vec![Effect::Tell(SaveNews::AssembleFailed { save, why })]
        };
        let (of, mut all) = self.parts.take().unwrap_or((save, Vec::new()));
        if of != save {
            all.clear();
        }
        all.extend(parts);
        if all.len() > MAX_PARTS {
            return failed(format!("more than {MAX_PARTS} ranks"));
        }
        if !last {
            self.parts = Some((save, all));
            return Vec::new();
        }
        let Some(of) = self.generation(save.generation) else {
            return failed("this launcher knows no such generation".to_owned());
        };
        let in_order = all.iter().zip(0..).all(|(part, rank)| part.rank == rank);
        if !in_order || all.len() != of.world as usize {
            return failed("these are not the parts of all ranks, each once".to_owned());
        }
        let is_of_save = |found: &Found| {
            matches!(found, Found::Sealed(copy)
                if (copy.step, copy.generation) == (save.step, save.generation))
        };
        let of_rank = |(k, rank): (&u16, &Rank)| {
            let sides = (0u8..).zip(rank.found);
            let sides = sides.filter(|(_, found)| is_of_save(found));
            let slots = sides.map(|(side, _)| SlotId { k: *k, side });
            slots.collect::<Vec<_>>()
        };
        let sealed = self.ranks.iter().flat_map(of_rank).collect();
        vec![Effect::Assemble {
            of,
            save,
            parts: all,
            sealed,
        }]
    }

    /// A manifest was made: its digest and bytes, or why not.
    pub fn assembled(save: Save, result: Result<(Digest, u32), String>) -> SaveNews {
        match result {
            Ok((manifest, bytes)) => SaveNews::Assembled {
                save,
                manifest,
                bytes,
            },
            Err(why) => SaveNews::AssembleFailed {
                save,
                why: short(why),
            },
        }
    }
}

#[cfg(test)]
mod tests;
