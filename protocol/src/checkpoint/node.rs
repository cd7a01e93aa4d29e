//! A node's part in saving: the slots of its ranks, and the writing of what they sealed. Never touches a
//! byte of a slot or of a file: it says which slot may be filled, written or freed, and is told what
//! came of it.

mod state;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

use serde::{Deserialize, Serialize};

use super::slots::Rank;
use super::{
    Busy, Copy, Error, Flaws, Found, MAX_SUMMARY, Occupied, Save, Slot, SlotId, Stage, ToLeader,
    ToNode, Written,
};
use crate::ids::Digest;
use crate::time::{Span, Time};
use crate::wire::MAX_TEXT;

/// How often what the leader may not know is said again.
const REPEAT: Span = Span::from_secs(1);

/// Settings with which a node is made.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The node's place in the record.
    pub index: u32,
    /// Its first rank, and how many it has.
    pub first: u32,
    pub ranks: u16,
    pub busy: Busy,
    /// The most bytes of all slots.
    pub budget: u64,
    /// How long sealed copies live on when nobody leads them any more.
    pub lease: Span,
    pub flaws: Flaws,
}

/// State that a restarted agent has to find again: that it may still say that its files are durable, though
/// nobody holds the slots any more.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NodeState {
    /// The newest save whose files were all durable, and the files.
    pub prepared: Option<(Save, Vec<Written>)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The launcher made, or brings again, the two slots of a rank.
    Slots {
        k: u16,
        /// Bytes of each.
        capacity: u64,
        found: [Found; 2],
    },
    /// A rank wants a slot for the state that it has before this step.
    Wants {
        k: u16,
        step: u64,
    },
    /// A rank took a slot by its state word alone, as while the agent was away.
    Filling {
        slot: SlotId,
        step: u64,
    },
    Sealed {
        slot: SlotId,
        copy: Copy,
    },
    /// So many bytes of the slot are written.
    Progress {
        slot: SlotId,
        attempt: u32,
        done: u64,
    },
    /// The file and its name are durable.
    Written {
        slot: SlotId,
        attempt: u32,
        bytes: u64,
        summary: Vec<u8>,
    },
    /// It could not be written, and no writer reads the slot any more.
    WriteFailed {
        slot: SlotId,
        attempt: u32,
        why: String,
    },
    /// After [`Effect::StopWrite`]: no writer reads the slot any more.
    WriteStopped {
        slot: SlotId,
        attempt: u32,
    },
    /// A copy of this manifest is durable on this node's disk.
    Held {
        manifest: Digest,
    },
    /// It could not be had, or not be written.
    HoldFailed {
        manifest: Digest,
        why: String,
    },
    Leader(ToNode),
    /// A rank's slots are no more: it gets other ones.
    SlotsGone {
        k: u16,
    },
    /// The process of a rank is gone: what it was copying is torn. Its sealed copies stay.
    WorkerGone {
        k: u16,
    },
    /// The process of a rank has ended with 0, and seals nothing any more.
    WorkerEnded {
        k: u16,
    },
    /// The generation's workers were started once more.
    WorkersAnew,
    /// The launcher is gone, and all workers with it.
    LauncherGone,
    /// Another generation was decided, or the job is over.
    Ended,
    /// The rest of the node's memory budget for slots that nobody leads any more.
    Budget {
        bytes: u64,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Make this durable. Comes before the send that depends on it.
    Persist(NodeState),
    /// To whoever leads the generation.
    Send(ToLeader),
    /// The rank may copy into this slot.
    Fill {
        slot: SlotId,
        step: u64,
    },
    /// The rank leaves this save out: both of its slots are occupied.
    Skip {
        k: u16,
        step: u64,
    },
    /// Write the slot's sealed bytes to this file below the job's folder, under a temporary name until
    /// all is durable. A file that is there already with the same bytes is [`Event::Written`]; with
    /// others it is [`Event::WriteFailed`], and stays.
    Write {
        slot: SlotId,
        save: Save,
        path: String,
        bytes: u64,
    },
    StopWrite {
        slot: SlotId,
        attempt: u32,
    },
    /// The slot may be filled again; of a job that is gone, its memory may go.
    Free {
        slot: SlotId,
    },
    /// The rank's slots are not taken in: unmap them.
    Refuse {
        k: u16,
    },
    /// Get this manifest from the leader's node and make it durable.
    Hold {
        manifest: Digest,
        bytes: u32,
    },
    Notice(Notice),
}

/// For people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A rank has no free slot for a step.
    Busy {
        rank: u32,
        step: u64,
        skipped: bool,
        by: [Option<Occupied>; 2],
    },
    /// The slots do not fit into the budget.
    OverBudget { rank: u32, needs: u64, left: u64 },
    /// Copies that nobody leads any more were given up.
    LetGo {
        rank: u32,
        step: u64,
        why: &'static str,
    },
    /// A file could not be written, or not the manifest.
    Failed { rank: Option<u32>, why: String },
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Notice::Busy {
                rank,
                step,
                skipped,
                by,
            } => {
                let does = match skipped {
                    true => "leaves this save out",
                    false => "waits",
                };
                write!(
                    f,
                    "rank {rank} has no free slot for step {step} and {does}:"
                )?;
                for (i, by) in by.iter().flatten().enumerate() {
                    write!(f, "{} {by}", if i == 0 { "" } else { "," })?;
                }
                Ok(())
            }
            Notice::OverBudget { rank, needs, left } => write!(
                f,
                "the slots of rank {rank} need {needs} bytes, {left} are left of the budget: raise it, or \
                 save less in each rank"
            ),
            Notice::LetGo { rank, step, why } => {
                write!(f, "rank {rank}'s sealed copy of step {step} is gone: {why}")
            }
            Notice::Failed {
                rank: Some(rank),
                why,
            } => write!(f, "rank {rank}'s copy could not be written: {why}"),
            Notice::Failed { rank: None, why } => {
                write!(f, "the manifest could not be kept: {why}")
            }
        }
    }
}

/// The slots of one generation on one node. It outlives its generation until it
/// [is empty](Self::is_empty).
#[derive(Clone, Debug)]
pub struct Node {
    generation: Digest,
    settings: Settings,
    ranks: BTreeMap<u16, Rank>,
    /// Ranks whose processes have ended with 0, with slots or not.
    without_worker: BTreeSet<u16>,
    /// The newest word of the leader.
    heard: Option<ToNode>,
    durable: NodeState,
    /// Why this attempt comes to nothing here.
    failed: Option<String>,
    held: Option<Digest>,
    /// Nothing new is written.
    ended: bool,
    /// Nobody needs what is sealed any more.
    released: bool,
    /// Until when sealed copies live on without anybody who leads them.
    lease: Option<Time>,
    said: Option<ToLeader>,
    say_at: Option<Time>,
    effects: VecDeque<Effect>,
}

impl Node {
    /// For a generation that begins, or that a restarted agent finds itself in: with what it persisted.
    pub fn new(generation: Digest, settings: Settings, durable: NodeState) -> Node {
        let ours = |(save, _): &(Save, Vec<Written>)| save.generation == generation;
        Node {
            generation,
            settings,
            ranks: BTreeMap::new(),
            without_worker: BTreeSet::new(),
            heard: None,
            durable: NodeState {
                prepared: durable.prepared.filter(ours),
            },
            failed: None,
            held: None,
            ended: false,
            released: false,
            lease: None,
            said: None,
            say_at: None,
            effects: VecDeque::new(),
        }
    }

    /// Whether nothing is left of a generation that is over: the driver may drop it.
    pub fn is_empty(&self) -> bool {
        let mut slots = self.ranks.values().flat_map(|r| &r.slots);
        (self.ended || self.lease.is_some()) && slots.all(|s| *s == Slot::Free)
    }

    pub fn generation(&self) -> Digest {
        self.generation
    }

    /// The step of the newest save that was begun, as far as was heard here.
    pub fn opened(&self) -> Option<u64> {
        self.heard.map(|heard| heard.save.step)
    }

    pub fn slot(&self, id: SlotId) -> Option<&Slot> {
        self.ranks.get(&id.k)?.slots.get(usize::from(id.side))
    }

    /// Bytes that the slots occupy: of a job that is gone, only those with something in them.
    pub fn memory(&self) -> u64 {
        let gone = self.lease.is_some();
        let of = |r: &Rank| {
            let held = r.slots.iter().filter(|s| !gone || **s != Slot::Free);
            r.capacity.saturating_mul(held.count() as u64)
        };
        self.ranks.values().map(of).fold(0, u64::saturating_add)
    }

    pub fn handle(&mut self, event: Event, now: Time) -> Result<(), Error> {
        match event {
            Event::Slots { k, capacity, found } => self.register(k, capacity, found)?,
            Event::Wants { k, step } => self.wants(k, step)?,
            Event::Filling { slot, step } => match self.slot_mut(slot)? {
                state @ (Slot::Free | Slot::Filling { .. }) => *state = Slot::Filling { step },
                _ => return Err(not_in(slot, "free")),
            },
            Event::Sealed { slot, copy } => self.sealed(slot, copy)?,
            Event::Progress {
                slot,
                attempt,
                done,
            } => {
                let (_, state) = self.writing(slot, attempt)?;
                if let Slot::Writing {
                    done: known, copy, ..
                } = state
                {
                    // Also less than before: what was begun in vain is written again.
                    *known = done.min(copy.bytes);
                }
            }
            Event::Written {
                slot,
                attempt,
                bytes,
                summary,
            } => {
                if summary.len() > MAX_SUMMARY {
                    return Err(Error::Summary(summary.len()));
                }
                let (rank, state) = self.writing(slot, attempt)?;
                if let Slot::Writing { copy, .. } = *state {
                    let written = Written {
                        rank,
                        bytes,
                        summary,
                    };
                    *state = Slot::Durable {
                        copy,
                        attempt,
                        written,
                    };
                }
            }
            Event::WriteFailed { slot, attempt, why } => {
                let rank = self.write_ends(slot, attempt)?;
                if self.attempt() == attempt {
                    self.fail(Some(rank), why);
                }
            }
            Event::WriteStopped { slot, attempt } => {
                self.write_ends(slot, attempt)?;
            }
            Event::Held { manifest } => self.held = Some(manifest),
            Event::HoldFailed { manifest, why } => {
                let wanted = self.heard.map(|h| h.stage);
                if matches!(wanted, Some(Stage::Hold { manifest: m, .. }) if m == manifest) {
                    self.fail(None, why);
                }
            }
            Event::Leader(message) => self.leader(message)?,
            Event::SlotsGone { k } => drop(self.ranks.remove(&k)),
            Event::WorkerGone { k } => self.torn(|at| at == k),
            Event::WorkerEnded { k } if k < self.settings.ranks => {
                self.without_worker.insert(k);
            }
            Event::WorkerEnded { .. } => {}
            Event::WorkersAnew => self.without_worker.clear(),
            Event::LauncherGone => {
                self.torn(|_| true);
                self.let_live(now);
            }
            Event::Ended => {
                self.ended = true;
                self.let_live(now);
            }
            Event::Budget { bytes } => {
                self.settings.budget = bytes;
                self.evict();
            }
        }
        self.settle(now);
        Ok(())
    }

    pub fn handle_timeout(&mut self, now: Time) {
        if self.lease.is_some_and(|at| now >= at) && !self.released {
            self.release();
        }
        if self.say_at.is_some_and(|at| now >= at) {
            self.said = None;
        }
        self.settle(now);
    }

    pub fn poll_timeout(&self) -> Option<(Time, &'static str)> {
        let say = self
            .say_at
            .map(|at| (at, "tell the leader of the slots again"));
        let lease = self.lease.filter(|_| !self.released);
        let lease = lease.map(|at| (at, "the lease of sealed copies"));
        say.into_iter().chain(lease).min_by_key(|(at, _)| *at)
    }

    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    fn attempt(&self) -> u32 {
        self.heard.map_or(0, |h| h.save.attempt)
    }

    fn register(&mut self, k: u16, capacity: u64, found: [Found; 2]) -> Result<(), Error> {
        let rank = self.settings.first + u32::from(k);
        if k >= self.settings.ranks {
            return Err(Error::NotMine { rank });
        }
        // Slots of another size take the place of those that it had.
        let known = self.ranks.remove(&k).filter(|r| r.capacity == capacity);
        let needs = capacity.saturating_mul(2);
        let left = self.settings.budget.saturating_sub(self.memory());
        if known.is_none() && needs > left {
            let notice = Notice::OverBudget { rank, needs, left };
            self.effects.push_back(Effect::Refuse { k });
            self.effects.push_back(Effect::Notice(notice));
            return Ok(());
        }
        if !self.ended {
            self.lease = None;
        }
        let mut slots = found.map(Slot::found);
        for (side, slot) in (0..).zip(&mut slots) {
            let Some(copy) = slot.copy().filter(|c| c.generation != self.generation) else {
                continue;
            };
            *slot = Slot::Free;
            let slot = SlotId { k, side };
            self.effects.push_back(Effect::Free { slot });
            self.effects.push_back(Effect::Notice(Notice::LetGo {
                rank,
                step: copy.step,
                why: "it is of an earlier generation",
            }));
        }
        // The launcher's connection was made anew, and what either said last may have been lost with the old one: what
        // is in the slots counts, and what is still to be done with it is asked for again.
        let mut of_rank = known.unwrap_or(Rank {
            rank,
            capacity,
            slots: [Slot::Free, Slot::Free],
            wants: None,
            skipped: None,
        });
        let writes = |s: &Slot| matches!(s, Slot::Writing { .. } | Slot::Durable { .. });
        for (known, found) in of_rank.slots.iter_mut().zip(slots) {
            if !(writes(known) && known.copy() == found.copy()) {
                *known = found;
            }
        }
        self.ranks.insert(k, of_rank);
        for side in 0..2 {
            self.ask_again(SlotId { k, side });
        }
        Ok(())
    }

    fn wants(&mut self, k: u16, step: u64) -> Result<(), Error> {
        if self.ended {
            return Err(Error::Over);
        }
        let skip = self.settings.busy == Busy::Skip;
        let early = self.settings.flaws.skip_decision;
        let rank = self.rank(k)?;
        if rank.holds(step) {
            let rank = rank.rank;
            return Err(Error::Sealed { rank, step });
        }
        let (number, mut free) = (rank.rank, rank.free_side());
        // A copy that it had begun, by another's hand or for another step, is torn.
        let torn = |(_, s): &(u8, &Slot)| matches!(s, Slot::Filling { .. });
        free = rank.sides().find(torn).map(|(side, _)| side).or(free);
        if early && free.is_none() {
            let sealed = |(_, s): &(u8, &Slot)| matches!(s, Slot::Sealed(_));
            free = rank.sides().find(sealed).map(|(side, _)| side);
        }
        rank.wants = None;
        if let Some(side) = free {
            let slot = SlotId { k, side };
            *self.slot_mut(slot)? = Slot::Filling { step };
            self.effects.push_back(Effect::Fill { slot, step });
            return Ok(());
        }
        let by = [0, 1].map(|side: usize| rank.slots.get(side).and_then(Slot::occupied));
        match skip {
            true => rank.skipped = rank.skipped.max(Some(step)),
            false => rank.wants = Some(step),
        }
        if skip {
            self.effects.push_back(Effect::Skip { k, step });
        }
        self.effects.push_back(Effect::Notice(Notice::Busy {
            rank: number,
            step,
            skipped: skip,
            by,
        }));
        Ok(())
    }

    fn sealed(&mut self, slot: SlotId, copy: Copy) -> Result<(), Error> {
        let capacity = self.rank(slot.k)?.capacity;
        if copy.generation != self.generation {
            return Err(Error::OtherGeneration {
                ours: self.generation,
                theirs: copy.generation,
            });
        }
        if copy.bytes > capacity {
            let len = copy.bytes;
            return Err(Error::TooLong { len, capacity });
        }
        match self.slot_mut(slot)? {
            state @ Slot::Filling { .. } => *state = Slot::Sealed(copy),
            _ => return Err(not_in(slot, "being filled")),
        }
        Ok(())
    }

    fn leader(&mut self, message: ToNode) -> Result<(), Error> {
        let (ours, theirs) = (self.generation, message.save.generation);
        if ours != theirs {
            return Err(Error::OtherGeneration { ours, theirs });
        }
        match &mut self.heard {
            // Old, or known: what is known here is said again.
            Some(heard)
                if (message.save.attempt, message.number) <= (heard.save.attempt, heard.number) =>
            {
                self.said = None;
                return Ok(());
            }
            // What is over stays over: a leader that does not remember is told.
            Some(heard)
                if heard.save.attempt == message.save.attempt
                    && (matches!(heard.stage, Stage::Over(_)) || heard.save != message.save) =>
            {
                heard.number = message.number;
            }
            heard => {
                if heard.is_none_or(|h| h.save.attempt != message.save.attempt) {
                    self.failed = None;
                }
                *heard = Some(message);
                if let Stage::Hold { manifest, bytes } = message.stage
                    && self.held != Some(manifest)
                    && !self.ended
                {
                    self.effects.push_back(Effect::Hold { manifest, bytes });
                }
            }
        }
        Ok(())
    }

    fn fail(&mut self, rank: Option<u32>, mut why: String) {
        let end = (0..=MAX_TEXT.min(why.len())).rev();
        let end = end.into_iter().find(|at| why.is_char_boundary(*at));
        why.truncate(end.unwrap_or(0));
        if self.failed.is_none() {
            self.failed = Some(why.clone());
        }
        let notice = Notice::Failed { rank, why };
        self.effects.push_back(Effect::Notice(notice));
    }

    /// The copies that these ranks were making will never be sealed.
    fn torn(&mut self, of: impl Fn(u16) -> bool) {
        for (k, rank) in self.ranks.iter_mut().filter(|(k, _)| of(**k)) {
            rank.wants = None;
            for (side, slot) in (0..).zip(&mut rank.slots) {
                if matches!(slot, Slot::Filling { .. }) {
                    *slot = Slot::Free;
                    let slot = SlotId { k: *k, side };
                    self.effects.push_back(Effect::Free { slot });
                }
            }
        }
    }

    /// From now on nobody may lead what is sealed here.
    fn let_live(&mut self, now: Time) {
        self.lease.get_or_insert(now + self.settings.lease);
        self.evict();
    }
}

fn not_in(slot: SlotId, wanted: &'static str) -> Error {
    Error::NotInState { slot, wanted }
}
