//! The store as arbiter (R11 to R15): the job's log decides generations and commits, and reading
//! its tail is the lease.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::orphaned::{Beacon, TookOver};
use super::{Ctx, Job, REPEAT};
use crate::agent::{Effect, Notice};
use crate::ids::{Digest, NodeId, StoreUuid};
use crate::local::ToLauncher;
use crate::record::{Arbiter, Cause, CommitRef, Kind, Record};
use crate::storelog::{self, Body, Log, Outcome, Output};
use crate::time::{Span, Time};
use crate::wire::{JobMessage, Ticket};

/// The job's log as this agent sees it.
#[derive(Clone, Debug)]
pub(super) struct Store {
    uuid: StoreUuid,
    pub(super) log: Log,
    asked: Time,
    ids: u64,
    claiming: Option<u64>,
    /// The writer of the log's newest claim, where that was read as an entry.
    claimed_by: Option<NodeId>,
    /// A birth to claim once the log is read as far as its coordinator knows it.
    birth: Option<AskedBirth>,
    committing: Option<(u64, CommitRef)>,
    pub(super) beacon: Beacon,
    /// Why the log cannot be used, as long as it cannot.
    broken: Option<String>,
    /// When the newest read of the log to its end was asked for. The log's entries after the first of them
    /// are news; before, only its newest claim counts.
    read: Option<Time>,
    /// Since when this agent wants to go on from a generation of which too few members can be reached.
    alone: Option<(Digest, Time)>,
}

/// A birth that a coordinator asks this node to claim.
#[derive(Clone, Debug)]
struct AskedBirth {
    record: Arc<Record>,
    /// When one after the same end was asked for first, and when this one was.
    since: Time,
    said: Time,
}

impl Store {
    fn is_read(&self, ctx: &Ctx<'_>) -> bool {
        // Nobody who waits reads it more often than each `REPEAT`.
        let fresh = |at: Time| ctx.now < at + ctx.cfg.lease() + REPEAT;
        self.broken.is_none() && self.read.is_some_and(fresh)
    }
}

impl Job {
    /// The launcher brought a store's directory.
    pub(super) fn open_store(&mut self, ctx: &mut Ctx<'_>, uuid: StoreUuid) {
        if let Some(store) = self.store.as_mut().filter(|s| s.uuid == uuid) {
            store.asked = Time::ZERO;
            return store.log.reopened(ctx.now);
        }
        let flaws = storelog::Flaws {
            skip_r12: ctx.cfg.flaws.skip_r12,
            skip_r13: ctx.cfg.flaws.skip_r13,
        };
        let seed = ctx.rng.next_u64();
        let log = Log::with_flaws(self.key.clone(), uuid, ctx.me(), seed, flaws)
            .compacted(ctx.cfg.compaction);
        self.store = Some(Store {
            uuid,
            log,
            asked: Time::ZERO,
            ids: 0,
            claiming: None,
            claimed_by: None,
            birth: None,
            committing: None,
            beacon: Beacon::default(),
            broken: None,
            read: None,
            alone: None,
        });
    }

    pub(super) fn store_event(&mut self, ctx: &mut Ctx<'_>, event: storelog::Event) {
        if let Some(store) = &mut self.store {
            // An answer that comes twice or too late changes nothing.
            let _late = store.log.handle(event, ctx.now);
        }
    }

    fn uses_store(&self) -> bool {
        match (self.live(), &self.store) {
            (_, None) => false,
            (Some(head), Some(store)) => head.record.arbiter == Arbiter::Store(store.uuid),
            (None, Some(_)) => true,
        }
    }

    pub(super) fn drive_store(&mut self, ctx: &mut Ctx<'_>) {
        if !self.uses_store() {
            return;
        }
        let member = self.is_member(ctx);
        let every = if member {
            Span(ctx.cfg.lease().0 / 4)
        } else {
            REPEAT
        };
        let urgent = self.lease_urgent();
        let spare = self.untold_since();
        let Some(store) = &mut self.store else { return };
        store.log.handle_timeout(ctx.now);
        let due = store.asked + every;
        let urgent = urgent && ctx.now > store.asked || spare > Some(store.asked);
        if store.asked == Time::ZERO || ctx.now >= due || urgent {
            store.asked = ctx.now;
            store.log.refresh(ctx.now);
        }
        let next = store.asked + every;
        let retry = store.log.poll_timeout();
        self.wake_at(next, "look at the log's tail");
        if let Some((at, why)) = retry {
            self.wake_at(at, why);
        }
        self.drive_beacon(ctx);
        self.pump_store(ctx);
        self.claim_awaited(ctx);
    }

    /// Claims the birth that is asked for once the log was read as far as its coordinator knows it. It is asked for
    /// anew soon.
    fn claim_awaited(&mut self, ctx: &mut Ctx<'_>) {
        if self.store.as_ref().is_none_or(|s| s.birth.is_none()) {
            return;
        }
        // Its coordinator may not know of those that may still train.
        let waits = self.held_until(ctx).is_some() || self.awaits_word_of_end(ctx);
        let Some(store) = &mut self.store else { return };
        let tail = store.log.tail();
        let Some(AskedBirth {
            record,
            since,
            said,
        }) = &store.birth
        else {
            return;
        };
        let newest = tail.claim.map_or(Digest::ZERO, |(_, digest, _)| digest);
        let is_read = newest == record.parent || store.read >= Some(*since);
        if ctx.now >= *said + REPEAT.times(2) {
            store.birth = None;
        } else if !is_read && store.asked < *since {
            store.asked = Time::ZERO;
            self.wake_at(ctx.now, "the log's end");
        } else if is_read && tail.complete && store.claiming.is_none() && !waits {
            let record = record.clone();
            store.birth = None;
            self.claim_birth(ctx, &record);
        }
    }

    fn pump_store(&mut self, ctx: &mut Ctx<'_>) {
        loop {
            let Some(store) = &mut self.store else { return };
            if let Some(output) = store.log.poll_output() {
                self.on_log(ctx, output);
            } else if let Some(effect) = store.log.poll_effect() {
                self.effects.push_back(Effect::Store {
                    key: self.key.clone(),
                    effect,
                });
            } else {
                return;
            }
        }
    }

    fn on_log(&mut self, ctx: &mut Ctx<'_>, output: Output) {
        match output {
            Output::Entry { entry, valid, .. } => {
                let (seq, own) = (entry.seq, entry.writer == ctx.me());
                if valid {
                    self.keep(&entry);
                }
                let news = self.store.as_ref().is_some_and(|s| s.read.is_some());
                if let (Body::Claim(_), true, Some(store)) = (&entry.body, valid, &mut self.store) {
                    store.claimed_by = Some(entry.writer);
                }
                if let (Body::Claim(record), true) = (&entry.body, valid) {
                    self.hear_of_end(ctx, record);
                }
                match (entry.body, valid) {
                    (Body::Claim(record), true) if news => {
                        let record = Arc::new(*record);
                        if own {
                            if record.kind.is_terminal() && record.parent == self.head_digest() {
                                self.tell_life_at_end(ctx);
                            }
                            self.tell_claimed(ctx, &record);
                        }
                        self.on_claimed(ctx, record);
                    }
                    (Body::Claim(record), false) if seq == 1 && record.key != self.key => {
                        self.refuse_store(&record);
                    }
                    _ => {}
                }
            }
            Output::Began { snapshot, .. } => {
                if let Some(store) = &mut self.store {
                    store.claimed_by = None;
                }
                self.keep_from(&snapshot);
            }
            Output::TailConfirmed { asked_at } => {
                self.keeping_caught_up();
                self.at_tail(ctx, asked_at);
            }
            Output::Appended { id, outcome } => self.on_appended(ctx, id, &outcome),
            Output::Mended => {
                if let Some(store) = &mut self.store {
                    store.broken = None;
                }
                self.applicant.told.clear();
                let key = self.key.clone();
                let text = "the job's log is whole again".to_owned();
                self.notice(Notice::Trouble { key, text });
            }
            Output::Broken { why } => {
                let text = format!("the job's log is damaged: {why}");
                if let Some(store) = &mut self.store {
                    store.broken = Some(text.clone());
                }
                self.tell_waiting(ctx.now, text.clone());
                self.notice(Notice::Trouble {
                    key: self.key.clone(),
                    text,
                });
            }
        }
    }

    /// The log was begun by a job of another owner that has the same name: a folder is named by the
    /// job's id alone, for a user may have another number on another node.
    fn refuse_store(&mut self, first: &Record) {
        let reason = format!(
            "in the directory of --store, the log of a job called {} belongs to user {} (cluster {}): \
             choose another --rdzv-id, or another directory",
            self.key.id, first.key.owner, first.key.cluster
        );
        if let Some(store) = &mut self.store {
            store.broken = Some(reason.clone());
        }
        self.part(ToLauncher::Refused { reason });
    }

    /// The log was read to its end by a read that was asked for at this time: its newest claim is the
    /// newest generation that it has decided.
    fn at_tail(&mut self, ctx: &mut Ctx<'_>, asked_at: Time) {
        let head = self.head_digest();
        self.gathering.spares.look_now(ctx.now);
        let Some(store) = &mut self.store else { return };
        let first = store.read.is_none();
        store.read = store.read.max(Some(asked_at));
        let record = match store.log.tail().claim {
            Some((_, digest, _)) if digest == head => return self.tail_seen(asked_at),
            Some((record, ..)) => Arc::new(record.clone()),
            None => return,
        };
        // What this log decided stands in it before anybody hears of it: a head of another life, which
        // was known before the read, is older. A store may answer from a cache all the same.
        let older = self.live().is_some_and(|h| {
            let stale = match h.record.lineage() == record.lineage() {
                true => record.number <= h.record.number,
                false => {
                    h.record.parent == record.digest() || self.durable.has_ended(record.lineage())
                }
            };
            h.record.arbiter == record.arbiter && asked_at > self.installed_at && !stale
        });
        if older {
            self.install(ctx, record);
        } else if first {
            self.on_claimed(ctx, record);
        }
    }

    /// A claim was read: it decides its generation for everybody.
    fn on_claimed(&mut self, ctx: &mut Ctx<'_>, record: Arc<Record>) {
        let concerns_me = record.has(ctx.me());
        let follows = self
            .head
            .as_ref()
            .is_some_and(|h| h.record.lineage() == record.lineage());
        let newer = self
            .head
            .as_ref()
            .is_none_or(|h| !follows || record.number > h.record.number);
        // The log is read from where it was left, and others may have told of ends in it, and of what came after them.
        let over = || self.durable.has_ended(record.lineage());
        let free = self.live().is_none() && !over();
        if newer && (follows || (free && (concerns_me || record.kind.is_terminal()))) {
            self.install(ctx, record);
        }
    }

    fn on_appended(&mut self, ctx: &mut Ctx<'_>, id: u64, outcome: &Outcome) {
        let Some(store) = &mut self.store else { return };
        if store.claiming == Some(id) {
            store.claiming = None;
            let claimed = store.log.tail().claim.map(|(r, _, _)| Arc::new(r.clone()));
            if let (Outcome::Won { .. }, Some(record)) = (outcome, claimed) {
                self.decided_by_store(ctx, &record);
            }
        } else if let Some((_, commit)) = store.committing.filter(|(i, _)| *i == id) {
            store.committing = None;
            if let Outcome::Won { seq } = outcome {
                // By the number that it has there: it may have been asked for before the log was read.
                let commit = store.log.committed(*seq).unwrap_or(commit);
                self.notice(Notice::Committed {
                    key: self.key.clone(),
                    commit,
                });
                self.save_committed(ctx, commit.manifest);
            } else {
                self.save_refused(ctx, commit.manifest, outcome);
            }
        } else {
            self.keeper_appended(id, outcome);
        }
    }

    /// Appends what is said of checkpoints, under the id that is returned; none where no log can be written.
    pub(super) fn append(&mut self, ctx: &Ctx<'_>, body: Body) -> Option<u64> {
        let store = self.store.as_mut().filter(|s| s.broken.is_none())?;
        store.ids += 1;
        let id = store.ids;
        store.log.append(id, body, ctx.now);
        Some(id)
    }

    /// The agent that had the end decided with which the log ends.
    pub(super) fn end_writer(&self) -> Option<NodeId> {
        let store = self.store.as_ref()?;
        let (_, digest, _) = store.log.tail().claim?;
        store.claimed_by.filter(|_| digest == self.head_digest())
    }

    /// Whether the log was read to its end, and can be written.
    pub(super) fn log_is_read(&self) -> bool {
        let usable = self.store.as_ref().filter(|s| s.broken.is_none());
        self.uses_store() && usable.is_some_and(|s| s.log.tail().complete)
    }

    /// Whether the log was read to its end by a read that began then or later.
    pub(super) fn log_read_since(&self, since: Time) -> bool {
        let store = self.store.as_ref().filter(|_| self.uses_store());
        store.is_some_and(|s| s.read >= Some(since))
    }

    /// Whether this node can take part in what is decided: where the log decides, it has to have read it. It would be
    /// let in otherwise, get no lease, and hold up all others.
    pub(super) fn follows_log(&self, ctx: &Ctx<'_>) -> bool {
        let brought = self.local.as_ref().is_some_and(|l| l.store.is_some());
        let store = self.store.as_ref().filter(|_| brought && self.uses_store());
        store.is_none_or(|s| s.is_read(ctx))
    }

    /// Whether this agent has read the log that decides such generations, and reads on: without a launcher it cannot.
    pub(super) fn reads_log_of(&self, ctx: &Ctx<'_>, record: &Record) -> bool {
        let brought = self.local.as_ref().and_then(|l| l.store);
        let store = self.store.as_ref().filter(|s| brought == Some(s.uuid));
        store.is_some_and(|s| record.arbiter == Arbiter::Store(s.uuid) && s.is_read(ctx))
    }

    /// Why the log cannot be used here.
    pub(super) fn log_damage(&self) -> Option<String> {
        self.store.as_ref()?.broken.clone()
    }

    /// The generation that the log says is running, where the log decides.
    pub(super) fn log_runs(&self) -> Option<(&Record, Digest)> {
        let store = self.store.as_ref().filter(|_| self.uses_store())?;
        let (last, digest, _) = store.log.tail().claim?;
        (!last.kind.is_terminal()).then_some((last, digest))
    }

    /// The newest commit of the log that may be restored, and its slot.
    pub(super) fn log_commit(&self) -> Option<(CommitRef, u64)> {
        self.store.as_ref()?.log.tail().commit
    }

    /// Tells the members of both generations at once; the others find it in the log. What this node says once it has
    /// installed the new one means nothing to those that do not know it.
    fn tell_claimed(&mut self, ctx: &Ctx<'_>, record: &Arc<Record>) {
        let before = self.head.iter().flat_map(|h| &h.record.members);
        let told = record.members.iter().chain(before).map(|m| m.node);
        let told: BTreeSet<NodeId> = told.filter(|n| *n != ctx.me()).collect();
        for node in told {
            let record = record.clone();
            self.send(ctx, node, JobMessage::Decided { record });
        }
    }

    fn decided_by_store(&mut self, ctx: &mut Ctx<'_>, record: &Arc<Record>) {
        let follows = self
            .live()
            .is_some_and(|h| h.record.lineage() == record.lineage());
        if self.head_digest() != record.digest() && (record.has(ctx.me()) || follows) {
            self.install(ctx, record.clone());
        }
        self.tell_held(ctx, record);
    }

    /// Claims the generation that follows the head, or a birth.
    pub(super) fn claim(&mut self, ctx: &mut Ctx<'_>, record: Record) {
        let Some(store) = &mut self.store else { return };
        if store.claiming.is_some() || store.broken.is_some() {
            return;
        }
        store.ids += 1;
        store.claiming = Some(store.ids);
        self.decides = Some(record.nonce);
        store.log.claim(store.ids, record, ctx.now);
        self.pump_store(ctx);
    }

    pub(super) fn commit_to_store(&mut self, ctx: &mut Ctx<'_>, commit: CommitRef) -> bool {
        let Some(store) = &mut self.store else {
            return false;
        };
        if store.committing.is_some() || store.claiming.is_some() || store.broken.is_some() {
            return false;
        }
        store.ids += 1;
        store.committing = Some((store.ids, commit));
        store.log.commit(store.ids, commit, ctx.now);
        self.pump_store(ctx);
        true
    }

    pub(super) fn commits_to_store(&self, manifest: &Digest) -> bool {
        let under_way = self.store.as_ref().and_then(|s| s.committing);
        under_way.is_some_and(|(_, commit)| commit.manifest == *manifest)
    }

    /// R14: a connected majority of the tail's members claims at once, a minority when the tail has
    /// not changed for `minority_wait`.
    pub(super) fn may_claim(&mut self, ctx: &mut Ctx<'_>, record: &Record) -> bool {
        let Some(store) = &self.store else {
            if self.local.is_some() {
                self.tell_waiting(
                    ctx.now,
                    "the job is decided by its store, and this launcher brought none: start it with the \
                     same --store"
                        .into(),
                );
            }
            return false;
        };
        if store.claiming.is_some() {
            return false;
        }
        // A connection stands for long after its link was cut: whoever is suspected does not count.
        let there = |n| ctx.reachable(n) && ctx.peers.unwell(n).is_none();
        if record.is_majority(there) {
            return true;
        }
        // The wait is for others that may be alive and claim too: none is left if all that cannot
        // be reached are known to be dead.
        let known = |n| there(n) || ctx.peers.lost(n) == Some(true);
        if record.voters().all(|v| known(v.node)) {
            return true;
        }
        let changed = store.log.tail().last_changed;
        let since = changed.max(self.fault_at(ctx, record.parent));
        let at = since + ctx.cfg.minority_wait;
        if ctx.now >= at {
            return true;
        }
        self.wake_at(at, "a minority waits before it claims");
        false
    }

    /// A coordinator asks this node, as the first member of a birth, to claim it.
    pub(super) fn on_claim_birth(&mut self, ctx: &mut Ctx<'_>, record: Arc<Record>) {
        if !self.uses_store() || record.leader() != Some(ctx.me()) {
            return;
        }
        let Some(store) = &mut self.store else { return };
        // It is asked for again, as another one with the same parent, before a slow store has answered.
        let before = store
            .birth
            .take()
            .filter(|b| b.record.parent == record.parent);
        let since = before.map_or(ctx.now, |b| b.since);
        let said = ctx.now;
        store.birth = Some(AskedBirth {
            record,
            since,
            said,
        });
        self.claim_awaited(ctx);
    }

    fn claim_birth(&mut self, ctx: &mut Ctx<'_>, record: &Record) {
        let member = self.is_member(ctx);
        let orphaned = self.is_orphaned(ctx);
        let taking = self.taking_over(ctx);
        let launcher = self.launcher_to_join();
        let Some(store) = self.store.as_mut() else {
            return;
        };
        if record.leader() != Some(ctx.cfg.node)
            || record.members.first().map(|m| m.launcher) != launcher
            || record.arbiter != Arbiter::Store(store.uuid)
            || store.broken.is_some()
        {
            return;
        }
        let tail = store.log.tail();
        // A member of what runs goes on by way of its leader; one that came back without its state
        // is a stranger there like any other.
        if member {
            return;
        }
        let mut record = record.clone();
        match tail.claim {
            None => record.parent = Digest::ZERO,
            Some((last, digest, _)) if last.kind.is_terminal() => {
                let ended_here = self.took_over.filter(|t| t.from == last.parent);
                let wait = |t: TookOver| !t.died && ctx.now < t.at + ctx.cfg.suspect_after;
                if ended_here.is_some_and(wait) {
                    return;
                }
                record.parent = digest;
            }
            Some((last, digest, _)) => {
                // A running generation whose members are all away: a stranger takes it over (R14).
                if !orphaned {
                    return;
                }
                let lost = last.members.iter().map(|m| m.node);
                if last.spec != record.spec {
                    // With another specification it is another life.
                    record.kind = Kind::Dormant;
                    record.members.clear();
                    record.spec = last.spec.clone();
                }
                record.birth = last.lineage();
                record.number = last.number + 1;
                record.parent = digest;
                self.took_over = taking;
                record.restarts_used = last.restarts_used;
                record.cause = Cause::NodesLost {
                    nodes: lost.take(crate::wire::MAX_LIST).collect(),
                };
            }
        }
        self.before = None;
        self.claim(ctx, record);
    }

    /// Whether the data that this commit names may be deleted (R12): it is not in the log, and can
    /// never be, or it is retired there.
    pub fn may_delete_data(&self, commit: &CommitRef) -> bool {
        self.store
            .as_ref()
            .is_some_and(|s| s.log.may_delete_data(commit))
    }

    /// When the present fault was detected; where none was, when this agent first wanted to go on from this generation
    /// alone.
    fn fault_at(&mut self, ctx: &Ctx<'_>, from: Digest) -> Time {
        let detected = self.phases.detected;
        let Some(store) = self.store.as_mut().filter(|_| detected == Time::ZERO) else {
            return detected;
        };
        let known = store.alone.filter(|(of, _)| *of == from);
        let (_, since) = *store.alone.insert(known.unwrap_or((from, ctx.now)));
        since
    }
}

/// How a launcher's store differs from that of the job that it would join. A job without one takes none up
/// later: its checkpoints would lie in no store, though this launcher's user asked for that.
pub(super) fn difference(
    here: Option<StoreUuid>,
    there: Option<StoreUuid>,
) -> Option<&'static str> {
    match (here, there) {
        (Some(_), None) => Some(
            "--store is given here, none there (leave it out here, or end the job and start all its nodes with it)",
        ),
        (None, Some(_)) => Some("no --store is given here, one there"),
        (Some(here), Some(there)) if here != there => Some(
            "--store names another store here than there (the same directory has to be mounted on both)",
        ),
        _ => None,
    }
}

/// Whether a launcher asks for another job than that of this generation: by its specification, or its store.
pub(super) fn differs(ticket: &Ticket, record: &Record) -> bool {
    let store = difference(ticket.store, record.store());
    store.is_some() || !ticket.spec.differences(&record.spec).is_empty()
}
