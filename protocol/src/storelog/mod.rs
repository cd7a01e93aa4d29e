//! A job's create-only log on a store (R11 to R15): the arbiter of generations where a store is
//! configured, and the commit point of checkpoints. Never reads a clock, touches a store, or draws
//! a random number: it says which object to read or create, and is told what came of it.
//!
//! The log is dense: slot `s` is read only after slots 1 to `s - 1` were read and verified, so each
//! writer knows everything below the slot it writes. An object is created once and never changed.
//! The outcome of a create is not known until a record has been read at its slot (R12): the put may have
//! failed, or it may land minutes later, after others read nothing there. Until then the very same
//! bytes are tried again at that slot, and nothing else is written.
//!
//! Every 256th slot holds a snapshot of all that the slots below say ([`Snapshot`]): who knows nothing of the log
//! begins at the newest one, and reads from there on.
//!
//! One operation at a time decides what comes next; up to [`MAX_READS`] reads are in flight while a log is searched or
//! walked, and are applied in order. The driver answers each operation with exactly one event, and turns its own
//! timeouts into `Failed` (a read) or `Unknown` (a create).

mod api;
mod entry;
mod reading;
mod rules;
mod search;
mod snapshot;
#[cfg(test)]
mod tests;
mod view;

use std::collections::{BTreeMap, VecDeque};

pub use api::{
    CreateOutcome, Damage, Effect, Error, Event, Flaws, Outcome, Output, ReadOutcome, Tail,
};
pub use entry::{Body, ENTRY_VERSION, Entry, EntryError, MAX_ENTRY, MAX_REASON, OPERATOR};
pub use reading::MAX_READS;
pub use rules::{MAX_METRIC, Rules};
pub use snapshot::{Compaction, Snapshot, Standing};
pub use view::{KEPT_COMMITS, Why};

use crate::ids::{Digest, JobKey, NodeId, StoreUuid};
use crate::record::{CommitRef, Record};
use crate::time::{Span, Time};
use reading::Ahead;
use search::Search;
use view::View;

/// The most appends of one agent that wait.
pub const MAX_QUEUE: usize = 64;

/// First and longest wait before a failed operation is tried again.
const RETRY_FIRST: Span = Span::from_millis(50);
pub(crate) const RETRY_MAX: Span = Span::from_secs(2);

/// How often a slot may read as empty though it holds something, or one behind it does (a cached
/// answer), before the log counts as damaged: about eleven seconds.
const MAX_VANISHED: u32 = 10;

/// How long a damaged log is left alone before it is looked at again: the damage may have been a cached answer, or
/// somebody has restored the object.
const LOOK_AGAIN: Span = Span::from_secs(30);

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
    /// How often a create has failed.
    failures: u32,
    /// Until when the next create waits. The log is read meanwhile: a store that cannot be written is no reason to lose
    /// the lease.
    not_before: Option<Time>,
    /// These are a snapshot's, and not those of the first append that waits.
    snapshot: bool,
}

/// Whether the log can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Health {
    Sound,
    /// Nothing is read or written until then.
    Damaged {
        why: Damage,
        until: Time,
    },
    /// Read again, and not written.
    Doubted {
        why: Damage,
    },
}

/// The log of one job, as one agent sees it.
#[derive(Clone, Debug)]
pub struct Log {
    me: NodeId,
    seed: u64,
    nonces: u64,
    flaws: Flaws,
    compaction: Compaction,
    view: View,
    /// Where to begin, until that is known.
    search: Option<Search>,
    ahead: Ahead,
    next: u64,
    /// Digest of the last entry read.
    last: Digest,
    /// Every COMMIT read, valid or not.
    commits: BTreeMap<u64, CommitRef>,
    /// When the read was asked for that found `next` empty.
    complete: Option<Time>,
    last_changed: Time,
    /// The read to do next to find out whether a slot in the middle is missing.
    gap: Option<Purpose>,
    gap_checked: bool,
    /// The log seems to end, to a read that was asked for then; whether nothing is behind is being read.
    unchecked: Option<Time>,
    queue: VecDeque<Pending>,
    trying: Option<Trying>,
    /// The last slot that holds an append of this agent's.
    wrote: u64,
    /// The slot that a snapshot was last meant for: one that does not fit is not tried again.
    offered: u64,
    refresh: Option<Time>,
    in_flight: Option<InFlight>,
    ops: u64,
    retry_at: Option<Time>,
    failures: u32,
    vanished: u32,
    health: Health,
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
        let compaction = Compaction::default();
        Log {
            me,
            seed,
            nonces: 0,
            flaws,
            compaction,
            view: View::new(key, store, flaws, compaction),
            search: Some(Search::new(compaction.every)),
            ahead: Ahead::default(),
            next: 1,
            last: Digest::ZERO,
            commits: BTreeMap::new(),
            complete: None,
            last_changed: Time::ZERO,
            gap: None,
            gap_checked: false,
            unchecked: None,
            queue: VecDeque::new(),
            trying: None,
            wrote: 0,
            offered: 0,
            refresh: None,
            in_flight: None,
            ops: 0,
            retry_at: None,
            failures: 0,
            vanished: 0,
            health: Health::Sound,
            effects: VecDeque::new(),
            outputs: VecDeque::new(),
        }
    }

    /// Snapshots elsewhere than in production, for tests; before anything else is done.
    pub fn compacted(mut self, compaction: Compaction) -> Log {
        self.compaction = compaction;
        self.view.compact(compaction);
        self.search = Some(Search::new(compaction.every));
        self
    }

    /// Looks for newer entries, up to the tail: ends in [`Output::TailConfirmed`] with a time that
    /// is not before `now`, however long the store takes.
    pub fn refresh(&mut self, now: Time) {
        self.refresh = Some(now);
        self.step(now);
    }

    /// A launcher has brought the store anew: what failed without one is tried again at once.
    pub fn reopened(&mut self, now: Time) {
        self.failures = 0;
        let waits = self.retry_at.take().is_some();
        let mut create_waits = false;
        if let Some(trying) = &mut self.trying {
            trying.failures = 0;
            create_waits = trying.not_before.take().is_some();
        }
        if waits || create_waits {
            self.step(now);
        }
    }

    /// Claims a generation. The checkpoint that it restores is set here, anew for every slot that is tried; the
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
        let why = match (self.is_broken(), self.queue.len()) {
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
        let under_way = self.under_way();
        let mut waiting = self.queue.iter().enumerate().skip(under_way);
        match waiting.find(|(_, p)| p.id == id).map(|(at, _)| at) {
            Some(at) => self.queue.remove(at).is_some(),
            None => false,
        }
    }

    /// How many of the appends that wait may be in the store by now.
    fn under_way(&self) -> usize {
        let own = self.trying.as_ref().is_some_and(|t| !t.snapshot);
        usize::from(own).min(self.queue.len())
    }

    fn is_broken(&self) -> bool {
        self.health != Health::Sound
    }

    pub fn tail(&self) -> Tail<'_> {
        Tail {
            next: self.next,
            complete: self.complete.is_some(),
            claim: self.view.latest(),
            commit: self.view.restorable(),
            last_changed: self.last_changed,
        }
    }

    /// The valid commit in this slot.
    pub fn committed(&self, seq: u64) -> Option<CommitRef> {
        self.view.committed(seq)
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
        if self.is_broken() || self.view.keeps(&manifest) || self.queue.iter().any(asked) {
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
            (Event::Read { op, slot, outcome }, _) if self.ahead.answers(op, slot) => {
                self.read_ahead(slot, outcome, now);
            }
            (Event::Read { op, .. } | Event::Created { op, .. }, _) => {
                return Err(Error::NotInFlight { op });
            }
        }
        self.step(now);
        Ok(())
    }

    pub fn handle_timeout(&mut self, now: Time) {
        let mut due = self.retry_at.take_if(|at| now >= *at).is_some();
        if let Some(trying) = &mut self.trying {
            due |= trying.not_before.take_if(|at| now >= *at).is_some();
        }
        if let Health::Damaged { why, until } = &self.health
            && now >= *until
        {
            self.health = Health::Doubted { why: why.clone() };
            self.doubt(now);
            due = true;
        }
        if due {
            self.step(now);
        }
    }

    pub fn poll_timeout(&self) -> Option<(Time, &'static str)> {
        match &self.health {
            Health::Damaged { until, .. } => Some((*until, "look at a damaged log again")),
            Health::Sound | Health::Doubted { .. } => {
                let create = self.trying.as_ref().and_then(|t| t.not_before);
                let first = self.retry_at.into_iter().chain(create).min();
                first.map(|at| (at, "store retry"))
            }
        }
    }

    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
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
            CreateOutcome::Unknown => {
                trying.not_before = Some(now + wait_after(trying.failures));
                trying.failures = trying.failures.saturating_add(1);
            }
        }
    }

    fn back_off(&mut self, now: Time) {
        self.retry_at = Some(now + wait_after(self.failures));
        self.failures = self.failures.saturating_add(1);
    }

    /// Starts the next operation, if there is one to do and none under way.
    fn step(&mut self, now: Time) {
        while self.turn(now) {}
    }

    /// Whether it has changed what is to be done next. An entry that was read ahead is taken in by it, so that each
    /// turn uses one up, or starts an operation.
    fn turn(&mut self, now: Time) -> bool {
        if matches!(self.health, Health::Damaged { .. }) || self.retry_at.is_some() {
            return false;
        }
        if self.search.is_some() {
            return self.find_beginning(now);
        }
        if self.in_flight.is_some() {
            return false;
        }
        if let Some(purpose) = self.gap {
            let slot = match purpose {
                Purpose::Beyond => self.next + 1,
                Purpose::Next | Purpose::Recheck => self.next,
            };
            return self.ask(slot, purpose, now);
        }
        if let Some(trying) = &self.trying {
            let waits = trying.not_before.is_some_and(|at| now < at);
            return match (trying.read, waits) {
                (true, _) => self.ask(trying.slot, Purpose::Next, now),
                (false, false) => self.send(),
                (false, true) => {
                    self.refresh.is_some() && self.ask(trying.slot, Purpose::Next, now)
                }
            };
        }
        if self.owes_snapshot() && self.try_snapshot() {
            return self.send();
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
                        self.try_at_next(bytes, false);
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
        match self.refresh {
            Some(_) => self.ask(self.next, Purpose::Next, now),
            None => false,
        }
    }

    /// Whether the next slot is for a snapshot, and for this agent to write: it has written the slot below, or
    /// something of its own waits.
    fn owes_snapshot(&self) -> bool {
        let due = self.next.is_multiple_of(self.compaction.every) && self.offered != self.next;
        let appends = !self.queue.is_empty() && self.complete.is_some();
        due && (appends || self.wrote + 1 == self.next)
    }

    fn try_snapshot(&mut self) -> bool {
        self.offered = self.next;
        let Some(snapshot) = self.view.snapshot() else {
            return false;
        };
        self.nonces += 1;
        let nonce = splitmix(self.seed, self.nonces);
        // One that does not fit is left out: the walk from the one before is longer then.
        match self
            .entry(nonce, Body::Snapshot(Box::new(snapshot)))
            .encode()
        {
            Ok(bytes) => {
                self.try_at_next(bytes, true);
                true
            }
            Err(_) => false,
        }
    }

    fn try_at_next(&mut self, bytes: Vec<u8>, snapshot: bool) {
        self.trying = Some(Trying {
            slot: self.next,
            bytes,
            taken: false,
            read: false,
            failures: 0,
            not_before: None,
            snapshot,
        });
    }

    /// The body as it would be written at the next slot: a claim restores the newest commit below
    /// that very slot (R13), and a commit has the number after all below it, whatever was known when it was asked for.
    fn body_for_next(&self, body: &Body) -> Body {
        let mut body = body.clone();
        match &mut body {
            Body::Claim(record) if !self.flaws.skip_r13 => {
                record.restore = self.view.restorable().map(|(c, _)| c);
            }
            Body::Commit(commit) => commit.number = self.view.last_number().saturating_add(1),
            _ => {}
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

    fn send(&mut self) -> bool {
        if let Some(trying) = &self.trying {
            self.ops += 1;
            let (op, slot, bytes) = (self.ops, trying.slot, trying.bytes.clone());
            self.in_flight = Some(InFlight::Create { op, slot });
            self.effects.push_back(Effect::Create { op, slot, bytes });
        }
        false
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
}

/// The wait after a failure that so many others came before.
fn wait_after(failures: u32) -> Span {
    RETRY_FIRST.times(1 << failures.min(16)).min(RETRY_MAX)
}

/// The generator of Steele, Lea and Flood, "Fast splittable pseudorandom number generators"
/// (OOPSLA 2014), as a function of seed and position.
fn splitmix(seed: u64, position: u64) -> u64 {
    let mut z = seed.wrapping_add(position.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
