//! Reading the log: where to begin, several slots at once, and what a read means.

use std::collections::BTreeMap;

use super::{
    Body, Damage, Digest, Effect, Entry, Health, InFlight, LOOK_AGAIN, Log, MAX_VANISHED, Outcome,
    Output, Pending, Purpose, ReadOutcome, Snapshot, Why,
};
use crate::time::Time;

/// The most reads of one log in flight.
pub const MAX_READS: usize = 16;

/// As many as there are after one has failed.
const LEAST_READS: usize = 2;

/// Reads besides the one that decides what comes next: of the slots behind it, and of those where a snapshot may be.
#[derive(Clone, Debug)]
pub(super) struct Ahead {
    /// By operation: the slot, and when it was asked for.
    reads: BTreeMap<u64, (u64, Time)>,
    /// Content of slots that are not taken in yet.
    found: BTreeMap<u64, Vec<u8>>,
    /// The newest snapshot that the search has come upon.
    best: Option<(u64, Box<Snapshot>, Digest)>,
    /// The first slot seemed empty, to a read that was asked for then, while the search went on.
    empty: Option<Time>,
    /// How many reads may be in flight: few after one has failed.
    width: usize,
    /// How many slots are asked for at once: one at the log's end, where nothing follows.
    window: usize,
}

impl Default for Ahead {
    fn default() -> Ahead {
        Ahead {
            reads: BTreeMap::new(),
            found: BTreeMap::new(),
            best: None,
            empty: None,
            width: MAX_READS,
            window: 1,
        }
    }
}

impl Ahead {
    /// Whether this operation was asked for; it is no more.
    pub(super) fn answers(&mut self, op: u64, slot: u64) -> bool {
        let asked = self.reads.get(&op).is_some_and(|(at, _)| *at == slot);
        asked && self.reads.remove(&op).is_some()
    }

    fn is_free(&self) -> bool {
        self.reads.len() + 1 < self.width
    }

    fn is_asked(&self, slot: u64) -> bool {
        self.reads.values().any(|(at, _)| *at == slot)
    }
}

impl Log {
    /// Searches for the newest snapshot, and reads the first slot meanwhile. Nothing, where nobody wants to know.
    pub(super) fn find_beginning(&mut self, now: Time) -> bool {
        let first = self.next;
        let known = self.ahead.found.contains_key(&first) || self.ahead.empty.is_some();
        let Some(search) = self.search.as_mut() else {
            return false;
        };
        if self.refresh.is_none() && self.queue.is_empty() {
            return false;
        }
        if search.is_over() && self.in_flight.is_none() {
            self.search = None;
            self.begin(now);
            return true;
        }
        while self.ahead.is_free()
            && let Some(slot) = search.take()
        {
            self.ops += 1;
            self.ahead.reads.insert(self.ops, (slot, now));
            let op = self.ops;
            self.effects.push_back(Effect::Read { op, slot });
        }
        self.in_flight.is_none() && !known && self.ask(first, Purpose::Next, now)
    }

    /// Goes on from the newest snapshot that was found; from the first slot, if there was none.
    fn begin(&mut self, now: Time) {
        let empty = self.ahead.empty.take();
        let Some((slot, snapshot, digest)) = self.ahead.best.take() else {
            if let Some(asked_at) = empty {
                self.absent(self.next, asked_at, now);
            }
            return;
        };
        self.view.begin(&snapshot);
        self.next = slot + 1;
        self.last = digest;
        self.last_changed = now;
        self.commits = snapshot.commits.iter().map(|c| (c.seq, c.commit)).collect();
        self.ahead.found.clear();
        let seq = slot;
        self.outputs.push_back(Output::Began { seq, snapshot });
    }

    /// Asks for a slot. Whether it has been read already, and is taken in.
    pub(super) fn ask(&mut self, slot: u64, purpose: Purpose, now: Time) -> bool {
        // After a create, only a read that began later tells what has become of it.
        let walks = purpose == Purpose::Next && self.trying.is_none();
        if walks && let Some(bytes) = self.ahead.found.remove(&slot) {
            self.found(slot, &bytes, now);
            return true;
        }
        let reads = self.ahead.reads.iter();
        let known = reads
            .filter(|(_, (at, _))| walks && *at == slot)
            .map(|(op, (_, asked_at))| (*op, *asked_at))
            .next();
        let (op, asked_at) = match known {
            Some((op, asked_at)) => {
                self.ahead.reads.remove(&op);
                (op, asked_at)
            }
            None => {
                self.ops += 1;
                let op = self.ops;
                self.effects.push_back(Effect::Read { op, slot });
                (op, now)
            }
        };
        self.in_flight = Some(InFlight::Read {
            op,
            slot,
            asked_at,
            purpose,
        });
        if walks && self.search.is_none() {
            self.look_ahead(slot, now);
        }
        false
    }

    /// Asks for slots behind this one, too.
    fn look_ahead(&mut self, slot: u64, now: Time) {
        let window = self.ahead.window as u64;
        for slot in slot + 1..slot.saturating_add(window) {
            if !self.ahead.is_free() {
                return;
            }
            if self.ahead.found.contains_key(&slot) || self.ahead.is_asked(slot) {
                continue;
            }
            self.ops += 1;
            self.ahead.reads.insert(self.ops, (slot, now));
            let op = self.ops;
            self.effects.push_back(Effect::Read { op, slot });
        }
    }

    /// Takes in the outcome of a read besides.
    pub(super) fn read_ahead(&mut self, slot: u64, outcome: ReadOutcome, now: Time) {
        let search = self.search.as_mut();
        match (outcome, search) {
            (ReadOutcome::Failed, search) => {
                self.ahead.width = LEAST_READS;
                if let Some(search) = search {
                    search.failed(slot);
                    self.back_off(now);
                }
            }
            (ReadOutcome::Found(bytes), Some(search)) => {
                search.found(slot);
                self.failures = 0;
                let newest = self.ahead.best.as_ref();
                if newest.is_none_or(|(at, ..)| *at < slot)
                    && let Some(snapshot) = self.snapshot_in(slot, &bytes)
                {
                    self.ahead.best = Some((slot, snapshot, Entry::digest(&bytes)));
                }
            }
            (ReadOutcome::Absent, Some(search)) => {
                search.absent(slot);
                self.failures = 0;
            }
            // It seems to be behind the log's end; what is empty now may be written by the time that it is its turn.
            (ReadOutcome::Absent, None) => self.ahead.window = 1,
            (ReadOutcome::Found(bytes), None) => {
                if (self.next..self.next + MAX_READS as u64).contains(&slot) {
                    self.ahead.found.insert(slot, bytes);
                }
            }
        }
    }

    fn snapshot_in(&self, slot: u64, bytes: &[u8]) -> Option<Box<Snapshot>> {
        let entry = Entry::decode(bytes).ok().filter(|e| e.seq == slot)?;
        match entry.body {
            Body::Snapshot(snapshot) if self.view.is_of(&snapshot) => Some(snapshot),
            _ => None,
        }
    }

    pub(super) fn read(
        &mut self,
        slot: u64,
        outcome: ReadOutcome,
        purpose: Purpose,
        asked_at: Time,
        now: Time,
    ) {
        match (outcome, purpose) {
            (ReadOutcome::Failed, _) => {
                self.ahead.width = LEAST_READS;
                self.back_off(now);
            }
            (ReadOutcome::Found(_), Purpose::Beyond) => {
                self.failures = 0;
                self.gap = Some(Purpose::Recheck);
                // That was not the log's end.
                self.unchecked = None;
            }
            (ReadOutcome::Absent, Purpose::Beyond) => {
                self.failures = 0;
                self.gap = None;
                self.gap_checked = true;
                // Nothing contradicts what was read so far.
                self.mended();
                if let Some(asked_at) = self.unchecked.take() {
                    self.at_the_end(asked_at);
                }
            }
            (ReadOutcome::Absent, Purpose::Recheck) => {
                self.vanished(Damage::Gap { slot }, now);
            }
            (ReadOutcome::Found(bytes), Purpose::Next | Purpose::Recheck) => {
                self.failures = 0;
                self.gap = None;
                match self.search {
                    // It is not known yet whether to begin here.
                    Some(_) => drop(self.ahead.found.insert(slot, bytes)),
                    None => self.found(slot, &bytes, now),
                }
            }
            (ReadOutcome::Absent, Purpose::Next) if self.search.is_some() => {
                self.ahead.empty = Some(asked_at);
            }
            (ReadOutcome::Absent, Purpose::Next) => self.absent(slot, asked_at, now),
        }
    }

    fn found(&mut self, slot: u64, bytes: &[u8], now: Time) {
        let entry = match Entry::decode(bytes) {
            Ok(entry) => entry,
            Err(error) => return self.broke(Damage::Entry { slot, error }, now),
        };
        if entry.seq != slot {
            let holds = entry.seq;
            return self.broke(Damage::Slot { slot, holds }, now);
        }
        if entry.prev != self.last {
            return self.broke(Damage::Chain { slot }, now);
        }
        let applied = self.view.apply(&entry);
        if matches!(entry.body, Body::Snapshot(_)) && applied.is_err() {
            // Who begins at it would decide otherwise than who has read what is below.
            return self.broke(Damage::Snapshot { slot }, now);
        }
        self.mended();
        self.vanished = 0;
        self.ahead.width = (2 * self.ahead.width).min(MAX_READS);
        self.ahead.window = (2 * self.ahead.window).min(MAX_READS);
        self.ahead.found.remove(&slot);
        self.last = Entry::digest(bytes);
        self.next = slot + 1;
        self.complete = None;
        self.last_changed = now;
        match &entry.body {
            Body::Commit(commit) => drop(self.commits.insert(slot, *commit)),
            Body::Snapshot(snapshot) => {
                self.commits = snapshot.commits.iter().map(|c| (c.seq, c.commit)).collect();
            }
            _ => {}
        }
        let (writer, nonce) = (entry.writer, entry.nonce);
        self.outputs.push_back(Output::Entry {
            seq: slot,
            entry,
            digest: self.last,
            valid: applied.is_ok(),
        });
        let tried = self.trying.take().is_some();
        let own = |p: &Pending| tried && writer == self.me && p.nonce == nonce;
        if self.queue.front().is_some_and(own) {
            self.wrote = slot;
            let outcome = match applied {
                Ok(()) => Outcome::Won { seq: slot },
                Err(why) => Outcome::Invalid(why),
            };
            self.finish(outcome);
        }
    }

    fn absent(&mut self, slot: u64, asked_at: Time, now: Time) {
        self.ahead.window = 1;
        if self.trying.as_ref().is_some_and(|t| t.taken) {
            return self.vanished(Damage::Vanished { slot }, now);
        }
        if self.is_broken() {
            // It was missing, or wrong: is it, still?
            self.gap = Some(Purpose::Beyond);
            return;
        }
        match &mut self.trying {
            Some(trying) if self.flaws.skip_r12 => {
                let snapshot = trying.snapshot;
                self.trying = None;
                if !snapshot {
                    self.finish(Outcome::Invalid(Why::GivenUp));
                }
            }
            Some(trying) => trying.read = false,
            None if !self.gap_checked => {
                self.unchecked = Some(asked_at);
                self.gap = Some(Purpose::Beyond);
                return;
            }
            None => {}
        }
        self.at_the_end(asked_at);
    }

    fn at_the_end(&mut self, asked_at: Time) {
        self.failures = 0;
        self.complete = Some(asked_at);
        if self.refresh.is_some_and(|wanted| wanted <= asked_at) {
            self.refresh = None;
        }
        self.outputs.push_back(Output::TailConfirmed { asked_at });
    }

    /// A slot seems empty that cannot be: now and then a store answers from a cache.
    fn vanished(&mut self, why: Damage, now: Time) {
        self.vanished += 1;
        match self.vanished > MAX_VANISHED {
            true => self.broke(why, now),
            false => self.back_off(now),
        }
    }

    fn broke(&mut self, why: Damage, now: Time) {
        let known = match &self.health {
            Health::Sound => None,
            Health::Damaged { why, .. } | Health::Doubted { why } => Some(why),
        };
        let news = known != Some(&why);
        let until = now + LOOK_AGAIN;
        self.complete = None;
        self.retry_at = None;
        self.ahead.found.clear();
        if news {
            let why = why.clone();
            self.outputs.push_back(Output::Broken { why });
        }
        self.health = Health::Damaged { why, until };
        for waiting in self.queue.split_off(self.under_way()) {
            self.say(waiting.id, Outcome::Invalid(Why::Broken));
        }
    }

    /// Looks at a damaged log again: from the slot where it went wrong, and nothing is written meanwhile.
    pub(super) fn doubt(&mut self, now: Time) {
        self.failures = 0;
        self.vanished = 0;
        self.gap = None;
        self.ahead.found.clear();
        self.refresh = Some(now);
        if let Some(trying) = &mut self.trying {
            trying.read = true;
        }
    }

    fn mended(&mut self) {
        if self.is_broken() {
            self.health = Health::Sound;
            self.outputs.push_back(Output::Mended);
        }
    }
}
