//! A job's create-only log on a store (R11 to R15): the arbiter of generations where a store is
//! configured, and the commit point of checkpoints. Never reads a clock, touches a store, or draws
//! a random number: it says which object to read or create, and is told what came of it.
//!
//! The log is dense: slot `s` is read only after slots 1 to `s - 1` were read and verified, so each
//! writer knows everything below the slot it writes. An object is created once and never changed.
//! What a create did is not known until a record has been read at its slot (R12): the put may have
//! failed, or it may land minutes later, after others read nothing there. Until then the very same
//! bytes are tried again at that slot, and nothing else is written.
//!
//! One operation is in flight at a time. The driver answers each with exactly one event, and turns
//! its own timeouts into `Failed` (a read) or `Unknown` (a create).

mod api;
mod entry;
mod rules;
#[cfg(test)]
mod tests;
mod view;

use std::collections::{BTreeMap, VecDeque};

pub use api::{
    CreateOutcome, Damage, Effect, Error, Event, Flaws, Outcome, Output, ReadOutcome, Tail,
};
pub use entry::{Body, ENTRY_VERSION, Entry, EntryError, MAX_ENTRY, MAX_REASON, OPERATOR};
pub use rules::{MAX_METRIC, Rules};
pub use view::{KEPT_COMMITS, Why};

use crate::ids::{Digest, JobKey, NodeId, StoreUuid};
use crate::record::{CommitRef, Record};
use crate::time::{Span, Time};
use view::View;

/// The most appends of one agent that wait.
pub const MAX_QUEUE: usize = 64;

/// First and longest wait before a failed operation is tried again.
const RETRY_FIRST: Span = Span::from_millis(50);
const RETRY_MAX: Span = Span::from_secs(2);

/// How often a slot may read as empty after the store said that it holds something (a cached
/// answer), before the log counts as damaged: about eleven seconds.
const MAX_VANISHED: u32 = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// The slot after the last one read.
    Next,
    /// The slot behind an empty one: must be empty too.
    Beyond,
    /// The slot behind was not empty: was this one written meanwhile, or is it missing?
    Recheck,
}

#[derive(Clone, Copy, Debug)]
enum InFlight {
    Read {
        op: u64,
        slot: u64,
        asked_at: Time,
        purpose: Purpose,
    },
    Create {
        op: u64,
        slot: u64,
    },
}

/// An append that waits; the first one may be under way.
#[derive(Clone, Debug)]
struct Pending {
    id: u64,
    nonce: u64,
    asked_at: Time,
    body: Body,
}

/// Bytes that were sent to a slot at which no record has been read yet (R12).
#[derive(Clone, Debug)]
struct Trying {
    slot: u64,
    bytes: Vec<u8>,
    /// Whether the store said that the slot is taken.
    taken: bool,
    /// Whether to read the slot next, or to create it (again).
    read: bool,
}

/// The log of one job, as one agent sees it.
#[derive(Debug)]
pub struct Log {
    me: NodeId,
    seed: u64,
    nonces: u64,
    flaws: Flaws,
    view: View,
    next: u64,
    /// Digest of the last entry read.
    last: Digest,
    /// Every COMMIT read, valid or not.
    commits: BTreeMap<u64, CommitRef>,
    /// When the read was asked for that found `next` empty.
    complete: Option<Time>,
    last_changed: Time,
    /// What to read next to find out whether a slot in the middle is missing.
    gap: Option<Purpose>,
    gap_checked: bool,
    queue: VecDeque<Pending>,
    trying: Option<Trying>,
    refresh: Option<Time>,
    in_flight: Option<InFlight>,
    ops: u64,
    retry_at: Option<Time>,
    failures: u32,
    vanished: u32,
    broken: bool,
    effects: VecDeque<Effect>,
    outputs: VecDeque<Output>,
}

impl Log {
    /// A log of which nothing is known yet. The seed must differ between the agents and between the
    /// boots of one agent: own entries are known by it.
    pub fn new(key: JobKey, store: StoreUuid, me: NodeId, seed: u64) -> Log {
        Log::with_flaws(key, store, me, seed, Flaws::default())
    }

    /// A log that breaks rules, for tests of the checker.
    pub fn with_flaws(key: JobKey, store: StoreUuid, me: NodeId, seed: u64, flaws: Flaws) -> Log {
        Log {
            me,
            seed,
            nonces: 0,
            flaws,
            view: View::new(key, store, flaws),
            next: 1,
            last: Digest::ZERO,
            commits: BTreeMap::new(),
            complete: None,
            last_changed: Time::ZERO,
            gap: None,
            gap_checked: false,
            queue: VecDeque::new(),
            trying: None,
            refresh: None,
            in_flight: None,
            ops: 0,
            retry_at: None,
            failures: 0,
            vanished: 0,
            broken: false,
            effects: VecDeque::new(),
            outputs: VecDeque::new(),
        }
    }

    /// Looks for newer entries, up to the tail: ends in [`Output::TailConfirmed`] with a time that
    /// is not before `now`, however long the store takes.
    pub fn refresh(&mut self, now: Time) {
        self.refresh = Some(now);
        self.step(now);
    }

    /// Claims a generation. What it restores is set here, anew for every slot that is tried; the
    /// record that was decided is the one in [`Output::Entry`].
    pub fn claim(&mut self, id: u64, mut record: Record, now: Time) {
        record.restore = self.view.restorable().map(|(c, _)| c);
        self.append(id, Body::Claim(Box::new(record)), now);
    }

    /// Commits a checkpoint whose data is durable. A commit that stands in the log already, by
    /// whomever, is won.
    pub fn commit(&mut self, id: u64, commit: CommitRef, now: Time) {
        self.append(id, Body::Commit(commit), now);
    }

    /// Appends any entry.
    pub fn append(&mut self, id: u64, body: Body, now: Time) {
        let why = match (self.broken, self.queue.len()) {
            (true, _) => Why::Broken,
            (_, MAX_QUEUE..) => Why::Busy,
            _ => {
                self.nonces += 1;
                let nonce = splitmix(self.seed, self.nonces);
                self.queue.push_back(Pending {
                    id,
                    nonce,
                    asked_at: now,
                    body,
                });
                return self.step(now);
            }
        };
        self.say(id, Outcome::Invalid(why));
    }

    /// Takes back an append that was never sent to the store. `false`: it is unknown, or may be
    /// written; its outcome will follow.
    pub fn withdraw(&mut self, id: u64) -> bool {
        let under_way = usize::from(self.trying.is_some());
        let mut waiting = self.queue.iter().enumerate().skip(under_way);
        match waiting.find(|(_, p)| p.id == id).map(|(at, _)| at) {
            Some(at) => self.queue.remove(at).is_some(),
            None => false,
        }
    }

    pub fn tail(&self) -> Tail<'_> {
        Tail {
            next: self.next,
            complete: self.complete.is_some(),
            claim: self.view.latest(),
            commit: self.view.restorable(),
            last_number: self.view.last_number(),
            last_changed: self.last_changed,
        }
    }

    /// The slot of a generation's claim, if it was decided here.
    pub fn claim_slot(&self, generation: &Digest) -> Option<u64> {
        self.view.claim_slot(generation)
    }

    /// Whether the data of the COMMIT in this slot may be deleted (R12, I7).
    pub fn may_delete(&self, seq: u64) -> bool {
        self.commits
            .get(&seq)
            .is_some_and(|c| self.may_delete_data(c))
    }

    /// Whether the data that a commit names, or would name, may be deleted: no valid unretired
    /// COMMIT names it, and none can appear any more. A COMMIT that is not in the log can still land
    /// (from an earlier boot of this agent, too) until a later claim stands above its generation.
    pub fn may_delete_data(&self, commit: &CommitRef) -> bool {
        let manifest = commit.manifest;
        let asked = |p: &Pending| matches!(&p.body, Body::Commit(c) if c.manifest == manifest);
        if self.broken || self.view.keeps(&manifest) || self.queue.iter().any(asked) {
            return false;
        }
        if self.view.commit_slot(commit).is_some() {
            // In the log and not kept: retired.
            return true;
        }
        let decided = self.view.claim_slot(&commit.generation).is_some();
        let latest = self.view.latest().map(|(_, digest, _)| digest);
        self.flaws.skip_r12 || (decided && latest != Some(commit.generation))
    }

    pub fn handle(&mut self, event: Event, now: Time) -> Result<(), Error> {
        match (event, self.in_flight) {
            (
                Event::Read { op, slot, outcome },
                Some(InFlight::Read {
                    op: asked,
                    slot: at,
                    asked_at,
                    purpose,
                }),
            ) if op == asked && slot == at => {
                self.in_flight = None;
                self.read(slot, outcome, purpose, asked_at, now);
            }
            (
                Event::Created { op, slot, outcome },
                Some(InFlight::Create {
                    op: asked,
                    slot: at,
                }),
            ) if op == asked && slot == at => {
                self.in_flight = None;
                self.created(outcome, now);
            }
            (Event::Read { op, .. } | Event::Created { op, .. }, _) => {
                return Err(Error::NotInFlight { op });
            }
        }
        self.step(now);
        Ok(())
    }

    pub fn handle_timeout(&mut self, now: Time) {
        if self.retry_at.is_some_and(|at| now >= at) {
            self.retry_at = None;
            self.step(now);
        }
    }

    pub fn poll_timeout(&self) -> Option<(Time, &'static str)> {
        self.retry_at.map(|at| (at, "store retry"))
    }

    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    fn read(
        &mut self,
        slot: u64,
        outcome: ReadOutcome,
        purpose: Purpose,
        asked_at: Time,
        now: Time,
    ) {
        match (outcome, purpose) {
            (ReadOutcome::Failed, _) => self.back_off(now),
            (ReadOutcome::Found(_), Purpose::Beyond) => {
                self.failures = 0;
                self.gap = Some(Purpose::Recheck);
            }
            (ReadOutcome::Absent, Purpose::Beyond) => {
                self.failures = 0;
                self.gap = None;
                self.gap_checked = true;
            }
            (ReadOutcome::Absent, Purpose::Recheck) => self.broke(Damage::Gap { slot }),
            (ReadOutcome::Found(bytes), Purpose::Next | Purpose::Recheck) => {
                self.failures = 0;
                self.gap = None;
                self.found(slot, &bytes, now);
            }
            (ReadOutcome::Absent, Purpose::Next) => self.absent(slot, asked_at, now),
        }
    }

    fn found(&mut self, slot: u64, bytes: &[u8], now: Time) {
        let entry = match Entry::decode(bytes) {
            Ok(entry) => entry,
            Err(error) => return self.broke(Damage::Entry { slot, error }),
        };
        if entry.seq != slot {
            let holds = entry.seq;
            return self.broke(Damage::Slot { slot, holds });
        }
        if entry.prev != self.last {
            return self.broke(Damage::Chain { slot });
        }
        self.vanished = 0;
        self.last = Entry::digest(bytes);
        self.next = slot + 1;
        self.complete = None;
        self.last_changed = now;
        if let Body::Commit(commit) = &entry.body {
            self.commits.insert(slot, *commit);
        }
        let applied = self.view.apply(&entry);
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
            let outcome = match applied {
                Ok(()) => Outcome::Won { seq: slot },
                Err(why) => Outcome::Invalid(why),
            };
            self.finish(outcome);
        }
    }

    fn absent(&mut self, slot: u64, asked_at: Time, now: Time) {
        match &mut self.trying {
            Some(trying) if trying.taken => {
                self.vanished += 1;
                if self.vanished > MAX_VANISHED {
                    return self.broke(Damage::Vanished { slot });
                }
                return self.back_off(now);
            }
            Some(_) if self.flaws.skip_r12 => {
                self.trying = None;
                self.finish(Outcome::Invalid(Why::GivenUp));
            }
            Some(trying) => trying.read = false,
            None => {
                if !self.gap_checked {
                    self.gap = Some(Purpose::Beyond);
                }
            }
        }
        self.complete = Some(asked_at);
        if self.refresh.is_some_and(|wanted| wanted <= asked_at) {
            self.refresh = None;
        }
        self.outputs.push_back(Output::TailConfirmed { asked_at });
    }

    fn created(&mut self, outcome: CreateOutcome, now: Time) {
        let Some(trying) = &mut self.trying else {
            return;
        };
        // Whatever the answer: only a read tells what stands in the slot (R12).
        trying.read = true;
        match outcome {
            CreateOutcome::Won | CreateOutcome::Exists => {
                trying.taken = true;
                self.failures = 0;
            }
            CreateOutcome::Unknown => self.back_off(now),
        }
    }

    fn back_off(&mut self, now: Time) {
        let wait = RETRY_FIRST.times(1 << self.failures.min(16)).min(RETRY_MAX);
        self.failures = self.failures.saturating_add(1);
        self.retry_at = Some(now + wait);
    }

    /// Starts the next operation, if there is one to do and none under way.
    fn step(&mut self, now: Time) {
        if self.broken || self.in_flight.is_some() || self.retry_at.is_some() {
            return;
        }
        if let Some(purpose) = self.gap {
            let slot = match purpose {
                Purpose::Beyond => self.next + 1,
                Purpose::Next | Purpose::Recheck => self.next,
            };
            return self.ask(slot, purpose, now);
        }
        if let Some(trying) = &self.trying {
            return match trying.read {
                true => self.ask(trying.slot, Purpose::Next, now),
                false => self.send(),
            };
        }
        // Each turn takes one append off the queue, or starts an operation.
        while let Some(first) = self.queue.front() {
            let Some(read_at) = self.complete else {
                return self.ask(self.next, Purpose::Next, now);
            };
            let body = self.body_for_next(&first.body);
            let outcome = match self.view.judge(self.me, &body) {
                Ok(()) => match self.entry(first.nonce, body).encode() {
                    Ok(bytes) => {
                        self.trying = Some(Trying {
                            slot: self.next,
                            bytes,
                            taken: false,
                            read: false,
                        });
                        return self.send();
                    }
                    Err(_) => Outcome::Invalid(Why::TooLong),
                },
                // The caller may have heard of entries that were not read here yet.
                Err(_) if read_at < first.asked_at => {
                    return self.ask(self.next, Purpose::Next, now);
                }
                Err(why) => self.refusal(why, &body),
            };
            self.finish(outcome);
        }
        if self.refresh.is_some() {
            self.ask(self.next, Purpose::Next, now);
        }
    }

    /// The body as it would be written at the next slot: a claim restores the newest commit below
    /// that very slot (R13).
    fn body_for_next(&self, body: &Body) -> Body {
        let mut body = body.clone();
        if let Body::Claim(record) = &mut body
            && !self.flaws.skip_r13
        {
            record.restore = self.view.restorable().map(|(c, _)| c);
        }
        body
    }

    fn entry(&self, nonce: u64, body: Body) -> Entry {
        Entry {
            seq: self.next,
            prev: self.last,
            writer: self.me,
            nonce,
            body,
        }
    }

    /// Tells a lost race from a mistake of the caller's.
    fn refusal(&self, why: Why, body: &Body) -> Outcome {
        let latest = self.view.latest();
        match (why, body, latest) {
            (Why::Again(seq), Body::Commit(_), _) => Outcome::Won { seq },
            (Why::NotFollowing, Body::Claim(record), Some((_, digest, by)))
                if record.parent != digest =>
            {
                Outcome::Overtaken { by }
            }
            (Why::NotFollowing, Body::Claim(record), Some((latest, _, by)))
                if record.number == 1 && !latest.kind.is_terminal() =>
            {
                Outcome::Overtaken { by }
            }
            (Why::NotLatest, Body::Commit(commit), Some((_, digest, by)))
                if digest != commit.generation =>
            {
                Outcome::Overtaken { by }
            }
            (why, ..) => Outcome::Invalid(why),
        }
    }

    fn ask(&mut self, slot: u64, purpose: Purpose, now: Time) {
        self.ops += 1;
        let op = self.ops;
        self.in_flight = Some(InFlight::Read {
            op,
            slot,
            asked_at: now,
            purpose,
        });
        self.effects.push_back(Effect::Read { op, slot });
    }

    fn send(&mut self) {
        if let Some(trying) = &self.trying {
            self.ops += 1;
            let (op, slot, bytes) = (self.ops, trying.slot, trying.bytes.clone());
            self.in_flight = Some(InFlight::Create { op, slot });
            self.effects.push_back(Effect::Create { op, slot, bytes });
        }
    }

    /// The first append of the queue is through.
    fn finish(&mut self, outcome: Outcome) {
        if let Some(first) = self.queue.pop_front() {
            self.say(first.id, outcome);
        }
    }

    fn say(&mut self, id: u64, outcome: Outcome) {
        self.outputs.push_back(Output::Appended { id, outcome });
    }

    fn broke(&mut self, why: Damage) {
        self.broken = true;
        self.complete = None;
        self.retry_at = None;
        self.outputs.push_back(Output::Broken { why });
        let unknown = usize::from(self.trying.is_some());
        for waiting in self.queue.split_off(unknown.min(self.queue.len())) {
            self.say(waiting.id, Outcome::Invalid(Why::Broken));
        }
    }
}

/// The generator of Steele, Lea and Flood, "Fast splittable pseudorandom number generators"
/// (OOPSLA 2014), as a function of seed and position.
fn splitmix(seed: u64, position: u64) -> u64 {
    let mut z = seed.wrapping_add(position.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
