//! Consequences for the slots of all that is known: which are written, which are free, and what the
//! leader is to hear. Looked at anew after every event.

use super::super::slots::Rank;
use super::super::{
    Busy, Copy, Ended, Error, Outcome, Part, Save, Slot, SlotId, Stage, ToLeader, ToNode, Written,
};
use super::{Effect, Node, Notice, REPEAT, not_in};
use crate::time::Time;

impl Node {
    pub(super) fn rank(&mut self, k: u16) -> Result<&mut Rank, Error> {
        let none = Error::NoSlot(SlotId { k, side: 0 });
        self.ranks.get_mut(&k).ok_or(none)
    }

    pub(super) fn slot_mut(&mut self, id: SlotId) -> Result<&mut Slot, Error> {
        let rank = self.ranks.get_mut(&id.k);
        let slot = rank.and_then(|r| r.slots.get_mut(usize::from(id.side)));
        slot.ok_or(Error::NoSlot(id))
    }

    /// A slot that is written for this attempt, and its rank.
    pub(super) fn writing(&mut self, id: SlotId, of: u32) -> Result<(u32, &mut Slot), Error> {
        let rank = self.rank(id.k)?.rank;
        let slot = self.slot_mut(id)?;
        match matches!(&*slot, Slot::Writing { attempt, .. } if *attempt == of) {
            true => Ok((rank, slot)),
            false => Err(not_in(id, "being written for this attempt")),
        }
    }

    /// No writer reads the slot any more, and its file is not there.
    pub(super) fn write_ends(&mut self, id: SlotId, attempt: u32) -> Result<u32, Error> {
        let (rank, slot) = self.writing(id, attempt)?;
        if let Slot::Writing { copy, .. } = *slot {
            *slot = Slot::Sealed(copy);
        }
        Ok(rank)
    }

    /// Whether sealed copies of this step may still be used, by the leader's last word.
    pub(super) fn still_needed(&self, step: u64) -> bool {
        let Some(ToNode {
            save, keep, stage, ..
        }) = self.heard
        else {
            return true;
        };
        match step.cmp(&save.step) {
            std::cmp::Ordering::Less => keep == Some(step),
            std::cmp::Ordering::Equal => !matches!(
                stage,
                Stage::Over(Outcome::Committed) | Stage::Over(Outcome::Dropped)
            ),
            std::cmp::Ordering::Greater => true,
        }
    }

    fn is_prepared(&self, save: Save) -> Option<&[Written]> {
        let prepared = self.durable.prepared.as_ref();
        let (_, files) = prepared.filter(|(known, _)| *known == save)?;
        Some(files)
    }

    /// The save that copies are to be written for now.
    fn writes(&self) -> Option<Save> {
        let open = |h: &ToNode| !matches!(h.stage, Stage::Over(_));
        let heard = self.heard.filter(open)?;
        let stands = self.ended || self.released || self.failed.is_some();
        let done = self.is_prepared(heard.save).is_some();
        Some(heard.save).filter(|_| !stands && !done)
    }

    /// Copies that nobody leads any more make room, the oldest first.
    pub(super) fn evict(&mut self) {
        if self.lease.is_none() {
            return;
        }
        let mut old: Vec<(u64, SlotId)> = Vec::new();
        for (k, rank) in &self.ranks {
            for (side, slot) in rank.sides() {
                if let Slot::Sealed(copy) | Slot::Durable { copy, .. } = slot {
                    old.push((copy.step, SlotId { k: *k, side }));
                }
            }
        }
        old.sort_unstable();
        for (step, slot) in old {
            if self.memory() <= self.settings.budget {
                return;
            }
            let rank = self.settings.first + u32::from(slot.k);
            self.free(slot);
            self.effects.push_back(Effect::Notice(Notice::LetGo {
                rank,
                step,
                why: "the node's budget for slots is needed otherwise",
            }));
        }
    }

    /// The lease is over: what is sealed may go.
    pub(super) fn release(&mut self) {
        self.released = true;
        let mut lost = Vec::new();
        for rank in self.ranks.values() {
            let copies = rank.slots.iter().filter_map(Slot::copy);
            let needed = copies.filter(|c| self.still_needed(c.step));
            lost.extend(needed.map(|c| Notice::LetGo {
                rank: rank.rank,
                step: c.step,
                why: "nobody asked for it while its lease lasted",
            }));
        }
        self.effects.extend(lost.into_iter().map(Effect::Notice));
    }

    fn free(&mut self, id: SlotId) {
        if let Ok(slot) = self.slot_mut(id) {
            *slot = Slot::Free;
            self.effects.push_back(Effect::Free { slot: id });
        }
    }

    pub(super) fn settle(&mut self, now: Time) {
        self.note_prepared();
        let ids: Vec<SlotId> = self
            .ranks
            .keys()
            .flat_map(|k| [0, 1].map(|side| SlotId { k: *k, side }))
            .collect();
        for id in ids {
            self.settle_slot(id);
        }
        self.note_prepared();
        let wants =
            |(k, r): (&u16, &Rank)| Some((*k, r.wants.filter(|_| r.free_side().is_some())?));
        let waiting: Vec<(u16, u64)> = self.ranks.iter().filter_map(wants).collect();
        for (k, step) in waiting {
            // It waits for a slot, so nothing can be wrong with its wish but that all is over.
            let _over = self.wants(k, step);
        }
        self.report(now);
    }

    fn settle_slot(&mut self, id: SlotId) {
        let writes = self.writes();
        let path = writes.map(|save| save.file(self.settings.index, id.k));
        let over = self
            .heard
            .is_some_and(|h| matches!(h.stage, Stage::Over(_)));
        let attempt_now = self.attempt();
        let Some(slot) = self.slot(id) else { return };
        let needed = |copy: &Copy| !self.released && self.still_needed(copy.step);
        match slot {
            Slot::Free | Slot::Filling { .. } => {}
            Slot::Sealed(copy) | Slot::Durable { copy, .. } if !needed(copy) => self.free(id),
            Slot::Durable { copy, attempt, .. } => {
                // The file is of no use any more, but the copy is.
                let copy = *copy;
                if *attempt != attempt_now || over {
                    if let Ok(slot) = self.slot_mut(id) {
                        *slot = Slot::Sealed(copy);
                    }
                    self.settle_slot(id);
                }
            }
            Slot::Sealed(copy) => {
                let copy = *copy;
                if let Some((save, path)) = writes.zip(path).filter(|(s, _)| s.step == copy.step) {
                    if let Ok(slot) = self.slot_mut(id) {
                        *slot = Slot::Writing {
                            copy,
                            attempt: save.attempt,
                            done: 0,
                            stopping: false,
                        };
                    }
                    self.effects.push_back(Effect::Write {
                        slot: id,
                        save,
                        path,
                        bytes: copy.bytes,
                    });
                }
            }
            Slot::Writing {
                attempt, stopping, ..
            } => {
                let attempt = *attempt;
                if !stopping && writes.is_none_or(|save| save.attempt != attempt) {
                    if let Ok(Slot::Writing { stopping, .. }) = self.slot_mut(id) {
                        *stopping = true;
                    }
                    let stop = Effect::StopWrite { slot: id, attempt };
                    self.effects.push_back(stop);
                }
            }
        }
    }

    /// The last order to the writers of a slot, or their answer, may have been lost.
    pub(super) fn ask_again(&mut self, slot: SlotId) {
        let Some(Slot::Writing {
            copy,
            attempt,
            stopping,
            ..
        }) = self.slot(slot)
        else {
            return;
        };
        let (bytes, attempt) = (copy.bytes, *attempt);
        let save = self.heard.map(|h| h.save);
        let again = match save.filter(|s| s.attempt == attempt && !stopping) {
            Some(save) => Effect::Write {
                slot,
                save,
                path: save.file(self.settings.index, slot.k),
                bytes,
            },
            None => Effect::StopWrite { slot, attempt },
        };
        self.effects.push_back(again);
    }

    /// All files of the attempt are durable: from now on that may be said, whatever happens to the slots.
    fn note_prepared(&mut self) {
        let Some(save) = self.writes() else { return };
        let durable = |slot: &Slot| match slot {
            Slot::Durable {
                attempt, written, ..
            } if *attempt == save.attempt => Some(written.clone()),
            _ => None,
        };
        let of = |k: u16| self.ranks.get(&k)?.slots.iter().find_map(durable);
        let files: Option<Vec<Written>> = (0..self.settings.ranks).map(of).collect();
        if let Some(files) = files {
            self.durable.prepared = Some((save, files));
            let state = self.durable.clone();
            self.effects.push_back(Effect::Persist(state));
        }
    }

    fn part(&self) -> Part {
        let Some(heard) = self.heard else {
            return Part::Idle;
        };
        if let Stage::Over(outcome) = heard.stage {
            return Part::Settled(outcome);
        }
        if let Some(why) = &self.failed {
            return Part::Failed { why: why.clone() };
        }
        if let Some(files) = self.is_prepared(heard.save) {
            return match heard.stage {
                Stage::Hold { manifest, .. } if self.held == Some(manifest) => {
                    Part::Holding { manifest }
                }
                _ => Part::Prepared {
                    files: files.to_vec(),
                },
            };
        }
        let step = heard.save.step;
        let all = (0..self.settings.ranks).map(|k| (k, self.ranks.get(&k)));
        let missing = |(k, r): (u16, Option<&Rank>)| {
            let lacks = r.is_none_or(|r| !r.holds(step));
            lacks.then(|| self.settings.first + u32::from(k))
        };
        let ranks: Vec<u32> = all.filter_map(missing).collect();
        let skipped = |r: &&Rank| r.skipped == Some(step) && !r.holds(step);
        if let Some(rank) = self.ranks.values().find(skipped) {
            let rank = rank.rank;
            let why = format!("rank {rank} had no free slot and left this save out");
            return Part::Failed { why };
        }
        if !ranks.is_empty() {
            return Part::Waiting { ranks };
        }
        let (mut done, mut bytes) = (0u64, 0u64);
        for slot in self.ranks.values().flat_map(|r| &r.slots) {
            let Some(copy) = slot.copy().filter(|c| c.step == step) else {
                continue;
            };
            bytes = bytes.saturating_add(copy.bytes);
            done = done.saturating_add(match slot {
                Slot::Writing { done, .. } => *done,
                Slot::Durable { .. } => copy.bytes,
                _ => 0,
            });
        }
        Part::Writing { done, bytes }
    }

    /// Steps of which all local ranks hold a sealed copy, ascending.
    pub fn sealed_steps(&self) -> Vec<u64> {
        let whole = self.ranks.len() == usize::from(self.settings.ranks);
        let Some(first) = self.ranks.values().next().filter(|_| whole) else {
            return Vec::new();
        };
        let copies = first.slots.iter().filter_map(Slot::copy);
        let mut steps: Vec<u64> = copies.map(|c| c.step).collect();
        steps.retain(|step| self.ranks.values().all(|r| r.holds(*step)));
        steps.sort_unstable();
        steps.dedup();
        steps
    }

    /// The newest step that a local rank has sealed in this generation, whatever the others have.
    pub fn newest_sealed(&self) -> Option<u64> {
        let slots = self.ranks.values().flat_map(|r| &r.slots);
        let copies = slots.filter_map(Slot::copy);
        let ours = copies.filter(|c| c.generation == self.generation);
        ours.map(|c| c.step).max()
    }

    /// A rank that has ended. Where ranks may leave saves out, nobody waits for it.
    fn ended(&self) -> Option<Ended> {
        let waits = self.settings.busy == Busy::Wait;
        let copies = |k: u16| {
            let slots = self.ranks.get(&k).into_iter().flat_map(|r| &r.slots);
            slots.filter_map(Slot::copy).map(|c| c.step)
        };
        let ended = self.without_worker.iter().filter(|_| waits);
        let least = *ended.min_by_key(|k| copies(**k).max())?;
        // A rank seals one step after the other.
        let seals =
            |k: u16, step: u64| !self.without_worker.contains(&k) && copies(k).max() < Some(step);
        let may_be_whole = |step: &u64| {
            let mut ranks = 0..self.settings.ranks;
            ranks.all(|k| copies(k).any(|s| s == *step) || seals(k, *step))
        };
        Some(Ended {
            rank: self.settings.first + u32::from(least),
            newest: copies(least).filter(may_be_whole).max(),
            beside: self.newest_sealed(),
        })
    }

    /// Tells the leader, when there is something new, and again while it may not know.
    fn report(&mut self, now: Time) {
        if self.ended {
            self.say_at = None;
            return;
        }
        let report = ToLeader {
            generation: self.generation,
            attempt: self.attempt(),
            number: self.heard.map_or(0, |h| h.number),
            sealed: self.sealed_steps(),
            busy: self.ranks.values().find_map(|r| r.wants),
            ended: self.ended(),
            part: self.part(),
        };
        // Mere progress waits for its turn.
        let plain = |report: &ToLeader| {
            let mut report = report.clone();
            if let Part::Writing { done, .. } = &mut report.part {
                *done = 0;
            }
            report
        };
        let known = self.said.as_ref().map(plain);
        if known.is_some_and(|known| known == plain(&report)) {
            return;
        }
        let idle = report.part == Part::Idle
            && report.sealed.is_empty()
            && report.busy.is_none()
            && report.ended.is_none();
        if idle && self.said.is_none() && self.say_at.is_none() {
            return;
        }
        let settled = matches!(report.part, Part::Settled(_) | Part::Idle);
        // A leader that was restarted opens what it hears of.
        let known = self.heard.map(|h| h.save.step);
        let newer = report.sealed.iter().any(|step| Some(*step) > known)
            || report.ended.is_some_and(|ended| ended.beside > known);
        let again = !settled || newer || report.busy.is_some();
        self.say_at = again.then_some(now + REPEAT);
        self.said = Some(report.clone());
        self.effects.push_back(Effect::Send(report));
    }
}
