//! Checkpoints of a launcher's workers: the real [`SlotTable`], around memory, writers and files that are modelled.
//! Workers save each time that a number of steps is done, at a stop step, and at the step of a checkpoint that somebody
//! orders; the files are in the world's store.

use std::collections::{BTreeMap, BTreeSet};

use muster_launcher::slots::{Ask, Capacity, Effect, Failure, Look, SlotTable};
use muster_protocol::Digest;
use muster_protocol::checkpoint::{Copy, Found, Save, SlotId};
use muster_protocol::control::slots::{Given, SLOTS};
use muster_protocol::local::{Review, SaveAsk, SaveNews, Start, ToAgent};
use serde::{Deserialize, Serialize};

use super::{Due, Launcher, Out, Phase};
use crate::sim::clock::MS;
use crate::sim::rng::Rng;

/// How often the launcher looks at the slots.
const LOOK: u64 = 100 * MS;

/// How long it takes to find memory for a rank's slots, and to make a manifest.
const MAKE: u64 = 50 * MS;

const CAPACITY: Capacity = (1 << 20, 1 << 10);

/// How the workers of a job save.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saving {
    /// After each so many steps.
    pub every: u64,
    /// How long a copy into a slot takes (nanoseconds).
    pub fill: u64,
    /// How long the write of a file takes (nanoseconds), and how many of a thousand fail.
    pub write: u64,
    pub fails: u32,
}

/// Something of the slots that falls due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SlotDue {
    Look,
    Made { k: u16, ask: u64 },
    Filled { slot: SlotId, run: u64 },
    Wrote { slot: SlotId, save: Save },
    Assembled { save: Save },
}

/// Content of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    Free,
    Filling { step: u64 },
    Sealed(Copy),
}

/// Slots of a launcher that died, of which the agent has descriptors.
pub type Left = BTreeMap<u16, [LeftSlot; SLOTS]>;

/// One of them, and whether its worker was filling it.
type LeftSlot = (Found, bool);

/// A file that is written.
#[derive(Clone, Copy, Debug)]
struct Write {
    save: Save,
    rank: u32,
    stopped: bool,
}

#[derive(Debug, Default)]
pub(super) struct Slots {
    /// None where workers save nothing.
    saving: Option<Saving>,
    table: SlotTable,
    memory: BTreeMap<u16, [Memory; SLOTS]>,
    /// How many ranks there are here, those that wait for an answer or were refused slots, and those that have them.
    ranks: u16,
    /// The step that all ranks of the job have reached: none of them is far ahead of the others.
    common: u64,
    asked: BTreeSet<u16>,
    has: BTreeSet<u16>,
    asks: u64,
    /// The step with which the run began, and the newest that each rank has begun to save, or left out.
    base: u64,
    begun: BTreeMap<u16, u64>,
    /// The step for which a rank waits for a slot, and whether the agent was told.
    waits: BTreeMap<u16, (u64, bool)>,
    loads: Option<Digest>,
    arriving: Option<Review>,
    writing: BTreeMap<SlotId, Write>,
    assembling: Option<(Save, u32)>,
    looks: bool,
}

impl Slots {
    pub(super) fn new(saving: Option<Saving>, ranks: u16) -> Slots {
        Slots {
            saving,
            ranks,
            table: SlotTable::new(saving.is_some(), u64::MAX),
            ..Slots::default()
        }
    }

    /// Whether all ranks here that have slots have saved this step of the run, or have left it out. One without goes on,
    /// as where slots were refused.
    pub(super) fn have_saved(&self, step: u64) -> bool {
        let step = self.base + step;
        let saved = |k: &u16| {
            let memory = self.memory.get(k);
            let begun = self.begun.get(k).is_some_and(|begun| *begun >= step);
            begun && !memory.is_some_and(|m| m.contains(&Memory::Filling { step }))
        };
        self.has.iter().all(saved)
    }
}

fn news(news: SaveNews) -> Out {
    Out::Say(ToAgent::Save(news))
}

/// The manifest of a save; it says of which step it is.
pub fn manifest(save: &Save) -> Digest {
    let mut digest = save.generation.0;
    digest[16..24].copy_from_slice(&u64::from(save.attempt).to_be_bytes());
    digest[24..].copy_from_slice(&save.step.to_be_bytes());
    Digest(digest)
}

/// The step of a manifest.
pub fn step_of(manifest: Digest) -> u64 {
    let mut step = [0; 8];
    step.copy_from_slice(&manifest.0[24..]);
    u64::from_be_bytes(step)
}

impl Launcher {
    /// Workers of this start exist. What those before them sealed is known by then.
    pub(super) fn slots_begin(&mut self, start: &Start, out: &mut Vec<Out>) {
        self.tell_slots(out);
        let slots = &mut self.slots;
        if slots.saving.is_none() {
            return;
        }
        slots.table.begins(start);
        slots.base = start.restore.map_or(0, step_of);
        slots.common = 0;
        slots.begun.clear();
        slots.waits.clear();
        slots.loads = start.restore.map(|_| start.digest);
        // Each worker asks for itself.
        slots.asked.clear();
        slots.has.clear();
        if !std::mem::replace(&mut slots.looks, true) {
            out.push(wait(SlotDue::Look, LOOK, true));
        }
    }

    /// All ranks of the job have reached this step of the run.
    pub fn reached(&mut self, step: u64) {
        self.slots.common = step;
    }

    /// The words on a new link, behind the registration.
    pub(super) fn slots_link_up(&mut self) -> Vec<Out> {
        let all = self.slots.table.link_up().into_iter();
        all.map(news).collect()
    }

    /// A worker has ended with 0 by itself.
    pub(super) fn slots_ended(&mut self, k: u16, out: &mut Vec<Out>) {
        if self.slots.saving.is_some() {
            out.extend(self.slots.table.worker_ended(k).map(news));
        }
    }

    /// The slots that the launcher leaves behind when it dies.
    pub fn slots_left(&self) -> Left {
        let of = |memory: Memory| match memory {
            Memory::Free => (Found::Free, false),
            Memory::Filling { .. } => (Found::Free, true),
            Memory::Sealed(copy) => (Found::Sealed(copy), false),
        };
        let all = self.slots.memory.iter();
        all.map(|(k, slots)| (*k, slots.map(of))).collect()
    }

    /// The slots of the launcher before are this one's.
    pub fn inherit(&mut self, left: Left) -> Vec<Out> {
        let mut out = Vec::new();
        let ranks = self.slots.ranks;
        for (k, slots) in left {
            if !self.slots.table.takes_left(k, ranks) {
                continue;
            }
            let memory = |(found, _): LeftSlot| match found {
                Found::Sealed(copy) => Memory::Sealed(copy),
                Found::Free | Found::Filling { .. } => Memory::Free,
            };
            self.slots.memory.insert(k, slots.map(memory));
            let (found, torn) = (slots.map(|s| s.0), slots.map(|s| s.1));
            let told = self.slots.table.inherit(k, CAPACITY, found, torn);
            out.push(news(told));
        }
        out
    }

    /// Does what the agent asks.
    pub(super) fn save_asked(&mut self, ask: SaveAsk, out: &mut Vec<Out>) {
        match ask {
            SaveAsk::Skip { k, step } => {
                let begun = self.slots.begun.entry(k).or_default();
                *begun = step.max(*begun);
            }
            SaveAsk::Review(review) => {
                let whole = match self.slots.arriving.take() {
                    Some(mut so_far) if so_far.round == review.round => {
                        so_far.commits.extend(review.commits);
                        so_far.last = review.last;
                        so_far
                    }
                    _ => review,
                };
                match whole.last {
                    true => out.push(Out::Review(whole)),
                    false => self.slots.arriving = Some(whole),
                }
            }
            SaveAsk::Delete { name } => out.push(Out::Delete(name)),
            SaveAsk::LookAgain(question) => out.push(Out::LookAgain(question)),
            ask => {
                let effects = self.slots.table.ask(ask);
                self.slot_effects(effects, out);
            }
        }
    }

    pub(super) fn slot_due(&mut self, due: SlotDue, now: u64, out: &mut Vec<Out>) {
        match due {
            SlotDue::Look => {
                out.push(wait(SlotDue::Look, LOOK, true));
                self.save_what_is_due(now, out);
                if self.paused.is_none() {
                    self.tell_slots(out);
                }
            }
            SlotDue::Made { k, ask } => {
                self.slots.memory.entry(k).or_insert([Memory::Free; SLOTS]);
                let effects = self.slots.table.made(k, ask, Ok(CAPACITY));
                self.slot_effects(effects, out);
            }
            SlotDue::Filled { slot, run } => self.filled(slot, run),
            SlotDue::Wrote { slot, save } => self.wrote(slot, save, out),
            SlotDue::Assembled { save } => {
                let made = self.slots.assembling.filter(|(of, _)| *of == save);
                if let Some((save, world)) = made {
                    self.slots.assembling = None;
                    out.push(Out::Manifest { save, world });
                    let made = Ok((manifest(&save), 100));
                    out.push(news(SlotTable::assembled(save, made)));
                }
            }
        }
    }

    fn filled(&mut self, slot: SlotId, epoch: u64) {
        let lives = |phase| matches!(phase, Phase::Running | Phase::Stopping | Phase::Parked);
        let run = self.run.as_ref().filter(|r| lives(r.phase));
        let Some(run) = run.filter(|r| r.number == epoch) else {
            return;
        };
        let generation = run.start.digest;
        let memory = self.slots.memory.get_mut(&slot.k);
        let memory = memory.and_then(|m| m.get_mut(usize::from(slot.side)));
        if let Some(memory) = memory
            && let Memory::Filling { step } = *memory
        {
            let mut digest = generation.0;
            digest[..8].copy_from_slice(&step.to_be_bytes());
            *memory = Memory::Sealed(Copy {
                generation,
                step,
                bytes: CAPACITY.0,
                digest: Digest(digest),
            });
        }
    }

    fn wrote(&mut self, slot: SlotId, save: Save, out: &mut Vec<Out>) {
        let attempt = save.attempt;
        let writing = self.slots.writing.get(&slot).copied();
        let Some(write) = writing.filter(|w| w.save == save) else {
            return;
        };
        self.slots.writing.remove(&slot);
        let Write { save, rank, .. } = write;
        let memory = self.slots.memory.get(&slot.k);
        let memory = memory.and_then(|m| m.get(usize::from(slot.side)));
        let is_of = |copy: &Copy| (copy.generation, copy.step) == (save.generation, save.step);
        // A slot that was filled again meanwhile leaves a file that is of no use.
        let whole = matches!(memory, Some(Memory::Sealed(copy)) if is_of(copy));
        let result = match write.stopped {
            true => Err(Failure::Stopped),
            false if self.fails(rank, attempt) => Err(Failure::Failed("the disk".to_owned())),
            false => {
                out.extend(whole.then_some(Out::Wrote { save, rank }));
                Ok((CAPACITY.0, vec![7; 32]))
            }
        };
        out.extend(self.slots.table.wrote(slot, save, result).map(news));
    }

    /// Whether this write is one of those that fail.
    fn fails(&self, rank: u32, attempt: u32) -> bool {
        let fails = self.slots.saving.map_or(0, |saving| saving.fails);
        let seed = u64::from(self.token) << 40 ^ u64::from(rank) << 20 ^ u64::from(attempt);
        Rng::new(seed).chance(fails)
    }

    /// The workers save what is due.
    fn save_what_is_due(&mut self, now: u64, out: &mut Vec<Out>) {
        let (Some(saving), Some(run)) = (self.slots.saving, &self.run) else {
            return;
        };
        if !run.alive_steps() {
            return;
        }
        let (ranks, number) = (run.start.slots, run.number);
        let at = self.slots.common.min(run.steps.at(now));
        let usual = Some(at - at % saving.every).filter(|step| *step > 0);
        let Some(step) = run.saves_at(now).or(usual) else {
            return;
        };
        let step = self.slots.base + step;
        for k in (0..ranks)
            .filter(|k| self.slots.has.contains(k))
            .collect::<Vec<_>>()
        {
            self.save(k, step, number, saving.fill, out);
        }
    }

    /// The launcher looks at what workers have done to their slots, and at what they ask for.
    pub(super) fn tell_slots(&mut self, out: &mut Vec<Out>) {
        if self.slots.saving.is_none() {
            return;
        }
        let alive = self.run.as_ref().is_some_and(|r| r.phase != Phase::Dead);
        for k in self.slots.memory.keys().copied().collect::<Vec<_>>() {
            let looks = [0, 1].map(|side| self.look_of(SlotId { k, side }, alive));
            let effects = self.slots.table.looked(k, looks);
            self.slot_effects(effects, out);
        }
        for (k, (step, told)) in &mut self.slots.waits {
            if !std::mem::replace(told, true) {
                let (k, step) = (*k, *step);
                out.push(news(SaveNews::Waits { k, step }));
            }
        }
        let Some(run) = self.run.as_ref().filter(|r| r.alive_steps()) else {
            return;
        };
        let ranks = run.start.slots;
        if let Some(digest) = self.slots.loads.take() {
            out.push(news(SaveNews::Loaded { digest }));
        }
        for k in 0..ranks {
            if self.slots.has.contains(&k) || !self.slots.asked.insert(k) {
                continue;
            }
            self.slots.asks += 1;
            let ask = Ask {
                number: self.slots.asks,
                image: CAPACITY.0,
                note: CAPACITY.1,
            };
            let effects = self.slots.table.asked(k, ask);
            self.slot_effects(effects, out);
        }
    }

    fn look_of(&mut self, slot: SlotId, alive: bool) -> Look {
        let memory = self.slots.memory.get_mut(&slot.k);
        let Some(memory) = memory.and_then(|m| m.get_mut(usize::from(slot.side))) else {
            return Look::Same;
        };
        match *memory {
            Memory::Free => Look::Free,
            Memory::Filling { .. } if !alive => {
                *memory = Memory::Free;
                Look::Torn
            }
            Memory::Filling { step } => Look::Filling { step },
            Memory::Sealed(copy) => Look::Sealed(copy),
        }
    }

    /// A rank saves this step into a free slot, or waits for one.
    fn save(&mut self, k: u16, step: u64, number: u64, fill: u64, out: &mut Vec<Out>) {
        let slots = &mut self.slots;
        if slots.begun.get(&k).is_some_and(|begun| *begun >= step) {
            return;
        }
        let memory = slots.memory.get_mut(&k);
        let free = memory.and_then(|m| (0u8..).zip(m).find(|(_, m)| **m == Memory::Free));
        match free {
            Some((side, memory)) => {
                *memory = Memory::Filling { step };
                slots.begun.insert(k, step);
                let slot = SlotId { k, side };
                out.push(wait(SlotDue::Filled { slot, run: number }, fill, false));
            }
            None => {
                let known = slots.waits.get(&k).is_some_and(|(of, _)| *of == step);
                if !known {
                    slots.waits.insert(k, (step, false));
                }
            }
        }
    }

    fn slot_effects(&mut self, effects: Vec<Effect>, out: &mut Vec<Out>) {
        for effect in effects {
            match effect {
                Effect::Tell(told) => out.push(news(told)),
                Effect::Say(_) | Effect::Forget { .. } => {}
                Effect::Give { k, given, .. } => {
                    if given == Given::Slots {
                        self.slots.asked.remove(&k);
                        self.slots.has.insert(k);
                    }
                }
                Effect::Make { k, ask, keep } => {
                    match self.slots.memory.get_mut(&k) {
                        Some(memory) if keep.contains(&true) => {
                            let others = memory.iter_mut().zip(keep).filter(|(_, keep)| !keep);
                            others.for_each(|(memory, _)| *memory = Memory::Free);
                        }
                        _ => {
                            self.slots.memory.remove(&k);
                        }
                    }
                    let ask = ask.number;
                    out.push(wait(SlotDue::Made { k, ask }, MAKE, false));
                }
                Effect::Drop { k } => {
                    self.slots.memory.remove(&k);
                }
                Effect::Write { slot, save, rank } => {
                    let write = Write {
                        save,
                        rank,
                        stopped: false,
                    };
                    self.slots.writing.insert(slot, write);
                    let takes = self.slots.saving.map_or(MS, |saving| saving.write);
                    out.push(wait(SlotDue::Wrote { slot, save }, takes, false));
                }
                Effect::StopWrite { slot } => {
                    if let Some(write) = self.slots.writing.get_mut(&slot) {
                        write.stopped = true;
                    }
                }
                Effect::Release { slot } => {
                    let memory = self.slots.memory.get_mut(&slot.k);
                    let memory = memory.and_then(|m| m.get_mut(usize::from(slot.side)));
                    if let Some(memory) = memory {
                        *memory = Memory::Free;
                    }
                }
                Effect::Assemble {
                    of, save, sealed, ..
                } => match sealed.is_empty() {
                    true => {
                        let gone = Err("the draft of the manifest is gone".to_owned());
                        out.push(news(SlotTable::assembled(save, gone)));
                    }
                    false => {
                        self.slots.assembling = Some((save, of.world));
                        out.push(wait(SlotDue::Assembled { save }, MAKE, false));
                    }
                },
            }
        }
    }
}

fn wait(due: SlotDue, ns: u64, exact: bool) -> Out {
    Out::Wait {
        due: Due::Slot(due),
        ns,
        exact,
    }
}
