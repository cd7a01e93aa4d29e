//! The acting leader: watches the members' statuses, ends a generation that is broken or is to
//! change, has the next one decided, and starts it.

use std::collections::{BTreeMap, BTreeSet};

use super::checkpoint::Saving;
use super::hang::Hanging;
use super::orders::Orders;
use super::plan::Assessment;
use super::start::Starting;
use super::stop::Planned;
use super::{Ctx, Job, REPEAT};
use crate::agent::Notice;
use crate::barrier;
use crate::budget;
use crate::ids::{Boot, Digest, NodeId};
use crate::membership::State;
use crate::record::{Arbiter, Kind, Member, Record};
use crate::storelog::RETRY_MAX;
use crate::time::{Span, Time};
use crate::wire::{Action, JobMessage, Status};

/// Knowledge of the acting leader beside the head.
#[derive(Clone, Debug)]
pub(super) struct Lead {
    pub(super) began: Time,
    pub(super) statuses: BTreeMap<NodeId, Status>,
    /// Members whose workers failed, in the order of their telling.
    pub(super) failures: Vec<NodeId>,
    /// When members that said nothing are asked.
    ask_at: Time,
    /// Members whose word a decision waits for, and since when.
    silent: BTreeMap<NodeId, Time>,
    pub(super) orders: Orders,
    pub(super) start: Starting,
    /// Their workers do not end.
    given_up: BTreeSet<NodeId>,
    /// Since when too few nodes are there to go on.
    pub(super) waited: Option<Time>,
    /// Since when the generation should have other witnesses.
    pub(super) voters_due: Option<Time>,
    /// Witnesses that were done without.
    pub(super) gone: BTreeMap<NodeId, super::voters::Gone>,
    /// No launcher of the generation is left.
    pub(super) deserted: Option<super::deserted::Deserted>,
    /// A person ended the job, on a node without a launcher of it.
    pub(super) cancelled: bool,
    /// Since when some ranks have finished and others have not.
    pub(super) finishing: Option<Time>,
    /// These have a bad view of a checkpoint that is whole.
    pub(super) misread: BTreeSet<NodeId>,
    /// Since when a link between two members is reported missing.
    pub(super) links: BTreeMap<(NodeId, NodeId), Time>,
    pub(super) ending: Option<Time>,
    /// When the store had answered here for the first time after `ending`.
    store_back: Option<Time>,
    pub(super) planned: Option<Planned>,
    pub(super) barrier: Option<barrier::Leader>,
    /// Nobody else has led this generation before, nor has an earlier run of this agent.
    pub(super) whole: bool,
    pub(super) hanging: Hanging,
    pub(super) saving: Option<Saving>,
    /// The step of a checkpoint that was waited for in vain: no other is held up by it again.
    pub(super) unsaved: Option<u64>,
}

impl Lead {
    pub(super) fn new(whole: bool, now: Time) -> Lead {
        Lead {
            began: now,
            whole,
            statuses: BTreeMap::new(),
            failures: Vec::new(),
            // The members of a new generation tell its leader by themselves.
            ask_at: if whole { now + REPEAT } else { now },
            silent: BTreeMap::new(),
            orders: Orders::default(),
            start: Starting::default(),
            given_up: BTreeSet::new(),
            waited: None,
            voters_due: None,
            gone: BTreeMap::new(),
            deserted: None,
            cancelled: false,
            finishing: None,
            misread: BTreeSet::new(),
            links: BTreeMap::new(),
            ending: None,
            store_back: None,
            planned: None,
            barrier: None,
            hanging: Hanging::default(),
            saving: None,
            unsaved: None,
        }
    }

    /// Keeps since when `from` misses which members.
    fn note_links(&mut self, from: NodeId, status: &Status, now: Time) {
        let misses = |node: NodeId| status.unreachable.contains(&node);
        let known = &self.statuses;
        self.links.retain(|(a, b), _| {
            let (other, ours) = if *a == from {
                (*b, true)
            } else {
                (*a, *b == from)
            };
            let back = known
                .get(&other)
                .is_some_and(|s| s.unreachable.contains(&from));
            !ours || misses(other) || back
        });
        for other in &status.unreachable {
            let pair = (from.min(*other), from.max(*other));
            self.links.entry(pair).or_insert(now);
        }
    }

    pub(super) fn status(&self, node: NodeId) -> Option<&Status> {
        self.statuses.get(&node)
    }

    /// Every worker of this member has attached the runtime. The workers of an earlier start do not
    /// count: the order to start that is on its way replaces them, with all that they agreed to.
    pub(super) fn takes_stop_steps(&self, node: NodeId) -> bool {
        let takes = |s: &Status| s.takes_stop_steps && s.started >= Some(self.start.attempt);
        self.status(node).is_some_and(takes)
    }
}

impl Job {
    pub(super) fn on_status(&mut self, ctx: &mut Ctx<'_>, from: NodeId, status: Status) {
        if status.stopped {
            self.dropped_has_stopped(ctx, from, status.digest, status.gone && status.seq == 0);
        }
        let Some(head) = self.live() else {
            // Without a number it is said by one that knows what came after.
            if status.digest != self.head_digest() && status.seq > 0 {
                match self.head {
                    Some(_) => self.on_ask(ctx, from, status.digest),
                    // A group that this node left still takes it for its leader, and may need its end from it.
                    None => self.send(ctx, from, JobMessage::Ask { have: Digest::ZERO }),
                }
            }
            return;
        };
        if status.digest != head.digest {
            let stopped = status.digest == head.record.parent && status.stopped;
            if stopped {
                self.note_rest(from);
            }
            if stopped && self.phases.detected > Time::ZERO {
                self.phases.stopped = ctx.now;
            }
            if status.seq == 0 {
                // Without a number it is said by one that knows what came after.
                return;
            }
            return self.on_ask(ctx, from, status.digest);
        }
        if !head.has(from) {
            return;
        }
        let (of, by_store) = (
            head.digest,
            matches!(head.record.arbiter, Arbiter::Store(_)),
        );
        self.merge.is_here(from);
        if status.stopped && status.seq == 0 {
            // Without a number: it has left this group, which may be left here a moment later.
            self.merge.note_stopped(of, from);
        }
        if status.started.is_some() {
            self.all_waited_for(ctx);
        }
        if by_store {
            match status.storeless {
                true => self.storeless.insert(from, status.clone()),
                false => self.storeless.remove(&from),
            };
        }
        let Some(lead) = &mut self.lead else {
            if !status.stopped {
                self.pass_end_on(ctx, from);
            }
            return;
        };
        if let Some(known) = lead.statuses.get(&from)
            && (known.boot, known.seq) > (status.boot, status.seq)
        {
            return;
        }
        if status.stopped && self.phases.detected > Time::ZERO {
            self.phases.stopped = ctx.now;
        }
        let known = lead.status(from).and_then(|s| s.start_failed.as_ref());
        let failed = status.start_failed.as_ref().filter(|f| known != Some(f));
        if let Some((_, reason)) = failed {
            self.failed_starts.entry(from).or_default().failed(reason);
        } else if status.started.is_some() {
            // The program runs somewhere: wherever it does not, the node is at fault.
            self.failed_starts.clear();
        }
        if lead.status(from).map(|s| &s.unreachable) != Some(&status.unreachable) {
            lead.note_links(from, &status, ctx.now);
        }
        if status.exit.is_some() && !lead.failures.contains(&from) {
            lead.failures.push(from);
        }
        lead.statuses.insert(from, status.clone());
        self.repeat_times(ctx, from, &status);
        self.repeat_hang(ctx, from, &status);
        self.tell_wait_to(ctx, from, &status);
        if let Some(number) = status.gate {
            self.member_gated(ctx, from, number);
        }
        self.settle_status(ctx, from, &status);
    }

    /// A member with nothing to tell, and nothing left to be told, is let be for a while.
    fn settle_status(&mut self, ctx: &Ctx<'_>, from: NodeId, status: &Status) {
        let hang = self.lead.as_ref().map(|l| l.hanging.told());
        let heard = hang == Some(status.heard_hang) && !self.owes_times(status);
        if status.is_settled() && heard {
            let (digest, boot, seq) = (status.digest, status.boot, status.seq);
            let body = JobMessage::StatusHeard { digest, boot, seq };
            self.send(ctx, from, body);
        }
    }

    /// Whether a member's status says what it said before.
    pub(super) fn is_known(&self, from: NodeId, status: &Status) -> bool {
        let known = self.status_of(from).filter(|s| s.boot == status.boot);
        known.is_some_and(|known| {
            let again = Status {
                seq: known.seq,
                ..status.clone()
            };
            again == *known && status.gate.is_none()
        })
    }

    /// Members whose status this leader lacks are asked for it: they may have told it to an earlier run
    /// of this agent, or before it came to lead. The words of an earlier run of theirs hold no more.
    fn ask_statuses(&mut self, ctx: &mut Ctx<'_>, record: &Record) {
        let digest = self.head_digest();
        let Some(lead) = &mut self.lead else { return };
        let boot = |n| {
            ctx.peers
                .get(n)
                .filter(|p| p.greeted.is_some())?
                .hello
                .as_ref()
                .map(|h| h.boot)
        };
        let heard = |n| {
            let status = lead.statuses.get(&n);
            status.is_some_and(|s| n == ctx.me() || boot(n).is_none_or(|b| b <= s.boot))
        };
        let unheard = |n: &NodeId| !heard(*n) && ctx.peers.connected(*n);
        let nodes = record.members.iter().map(|m| m.node);
        let nodes: Vec<NodeId> = nodes.filter(unheard).collect();
        if nodes.is_empty() {
            return;
        }
        if ctx.now < lead.ask_at {
            let at = lead.ask_at;
            return self.wake_at(at, "members that said nothing");
        }
        lead.ask_at = ctx.now + REPEAT;
        for node in nodes {
            let (boot, seq) = (Boot(0), 0);
            self.send(ctx, node, JobMessage::StatusHeard { digest, boot, seq });
        }
        self.wake_at(ctx.now + REPEAT, "members that said nothing");
    }

    pub(super) fn drive_lead(&mut self, ctx: &mut Ctx<'_>) {
        let Some(head) = self.live() else {
            self.lead = None;
            return;
        };
        let record = head.record.clone();
        if self.acting_leader(ctx, &record) != Some(ctx.me()) {
            if let Some(lead) = self.lead.take() {
                self.ended = lead.ending.map(|at| (self.head_digest(), at));
            }
            self.proposal = None;
            return;
        }
        if self.lead.is_none() {
            let digest = self.head_digest();
            let again = self.led.replace(digest) == Some(digest);
            let first = record.leader() == Some(ctx.me()) && self.durable.learned == ctx.cfg.boot;
            let mut lead = Lead::new(first && !again, ctx.now);
            lead.statuses.extend(self.storeless.clone());
            let ended = self.ended.filter(|(of, _)| *of == digest);
            lead.ending = ended.map(|(_, at)| at);
            self.lead = Some(lead);
            self.take_passed_on(ctx);
        }
        self.tell_lives(ctx);
        self.drive_commit(ctx);
        self.drive_proposal(ctx);
        if self.proposal.as_ref().is_some_and(|p| !p.of_voters) {
            return;
        }
        self.ask_statuses(ctx, &record);
        self.drive_start(ctx, &record);
        let a = self.assess(ctx, &record);
        if let Some(at) = a.links_due {
            self.wake_at(at, "a link that stays missing");
        }
        self.drive_saving(ctx, &record);
        self.drive_triggers(ctx, &record);
        self.tell_verified(ctx, &record);
        if self
            .lead
            .as_ref()
            .is_some_and(|l| l.planned.is_none() && l.ending.is_none())
        {
            // The barrier's own times; a planned stop drives it otherwise.
            self.at_lead_barrier(ctx, None);
        }
        self.drive_hang(ctx, &record);
        self.drive_deserted(ctx, &record, &a);
        self.tell_finishing(ctx, &record);
        self.drive_change(ctx, &record, &a);
        self.drive_voters(ctx);
        self.repeat_orders(ctx);
    }

    // ---- changing ----

    fn drive_change(&mut self, ctx: &mut Ctx<'_>, record: &Record, a: &Assessment) {
        if a.finished || self.merge.tombstone.is_some() {
            return self.decide(ctx, record);
        }
        let run_at = self.lead.as_ref().and_then(|l| l.start.run_at);
        if a.only_unstarted()
            && let Some(due) = run_at.and_then(|at| self.tries_due(ctx, record, at))
        {
            return self.wake_at(due, "others that may fail to start");
        }
        let ending = self.lead.as_ref().is_some_and(|l| l.ending.is_some());
        if a.is_cancelled_orderly() && !ending {
            return self.drive_planned(ctx, record, a);
        }
        let planned = self.lead.as_ref().is_some_and(|l| l.planned.is_some());
        // Whose workers failed says more than who does not answer meanwhile.
        let silent = !a.left_out.is_empty() && (planned || a.failed.is_none());
        if a.is_broken() || silent {
            self.fault_seen(ctx, a);
            self.end(ctx, record, a);
            self.give_up(ctx, record, a);
            if self.awaits_store(ctx, a) || self.awaits_links(ctx, a) || self.awaits_word(ctx, a) {
                return;
            }
            return self.decide(ctx, record);
        }
        if let Some((node, exit)) = a.failed.as_ref().filter(|_| !planned) {
            self.tell_failure(ctx, *node, exit);
            self.fault_seen(ctx, a);
            self.end(ctx, record, a);
            self.give_up(ctx, record, a);
            // Who ends the job waits for no verdict, nor does who leaves it: a generation that restores the same
            // again asks anew. One that is known is soon in the log.
            let waits = !a.cancel && (a.leaving.is_empty() || self.is_judged(record, exit));
            if waits && self.awaits_reject(ctx, record, exit) {
                return;
            }
            // Whether a lost node is behind the failure shows once everybody has answered.
            if self.all_stopped(record, a) && !self.doubts(ctx, record) {
                self.decide(ctx, record);
            }
            return;
        }
        self.drive_planned(ctx, record, a);
    }

    /// Whether members that lost their lease may only have to read the store again. After an outage that this
    /// node had, too, all do, and none tries again more often than each `RETRY_MAX`. Nothing can be decided before the
    /// store answers here.
    fn awaits_store(&mut self, ctx: &Ctx<'_>, a: &Assessment) -> bool {
        let lost = self.member.as_ref().is_some_and(|m| m.status.lease_lost);
        let since = self.lead.as_ref().and_then(|l| l.ending);
        let since = since.unwrap_or(ctx.now);
        let is_back = self.log_read_since(since);
        let Some(lead) = self.lead.as_mut().filter(|_| !a.cut.is_empty()) else {
            return false;
        };
        if is_back {
            lead.store_back.get_or_insert(ctx.now);
        }
        let back = lead.store_back.unwrap_or(ctx.now);
        let common = lost || back > since + Span(ctx.cfg.lease().0 / 2);
        let until = match common {
            true => back + RETRY_MAX.times(2),
            false => since + Span(ctx.cfg.suspect_after.0 / 2),
        };
        if ctx.now >= until {
            return false;
        }
        self.wake_at(until, "members that lost the store");
        true
    }

    /// Whether a member that would stay has no link to this node, and may be lost as well: that shows within
    /// `suspect_after`. An agent that has just started has met nobody yet, and a generation of dead members could
    /// be led and decided by nobody.
    fn awaits_links(&mut self, ctx: &Ctx<'_>, a: &Assessment) -> bool {
        let since = self.lead.as_ref().and_then(|l| l.ending);
        let until = since.unwrap_or(ctx.now) + ctx.cfg.suspect_after;
        if ctx.now >= until || a.survivors.iter().all(|m| ctx.reachable(m.node)) {
            return false;
        }
        self.wake_at(until, "members that may be lost, too");
        true
    }

    /// Whether a member that would stay has not said yet how it stands, since this node leads and is linked to it: its
    /// launcher may be dead though its agent is there, or this agent may have lost its state.
    fn awaits_word(&mut self, ctx: &Ctx<'_>, a: &Assessment) -> bool {
        let Some(lead) = &mut self.lead else {
            return false;
        };
        let silent = |m: &&Member| !lead.statuses.contains_key(&m.node) && ctx.reachable(m.node);
        let silent = a.survivors.iter().filter(silent).map(|m| m.node);
        let before = std::mem::take(&mut lead.silent);
        let since = |n: NodeId| before.get(&n).copied().unwrap_or(ctx.now);
        lead.silent = silent.map(|n| (n, since(n))).collect();
        let until = |since: &Time| *since + Span(ctx.cfg.suspect_after.0 / 4);
        let due = lead
            .silent
            .values()
            .map(until)
            .filter(|at| ctx.now < *at)
            .max();
        if let Some(at) = due {
            self.wake_at(at, "members that have not said how they stand");
        }
        due.is_some()
    }

    /// Whether a member looks unwell, so that it may be the cause of another's failure: that shows
    /// within a moment, which is worth waiting for before the job's budget is charged.
    fn doubts(&mut self, ctx: &Ctx<'_>, record: &Record) -> bool {
        let since = self.lead.as_ref().and_then(|l| l.ending);
        let until = since.unwrap_or(ctx.now) + Span(ctx.cfg.suspect_after.0 / 4);
        let unwell = |m: &Member| {
            matches!(
                ctx.peers.unwell(m.node),
                Some(State::Suspect { .. } | State::Away { .. })
            )
        };
        if ctx.now >= until || !record.members.iter().any(unwell) {
            return false;
        }
        self.wake_at(until, "a member that looks unwell");
        true
    }

    /// Members whose workers do not end are left behind, and kept out for a while. A start waits until
    /// their leases are over, like that of a lost member.
    fn give_up(&mut self, ctx: &mut Ctx<'_>, record: &Record, a: &Assessment) {
        for node in &a.stuck {
            let Some(lead) = &mut self.lead else { return };
            if !lead.given_up.insert(*node) {
                continue;
            }
            self.strike(ctx, *node);
            let text = format!(
                "the workers on {} do not end, {} s after they were told to: the others go on without \
                 that node. Look for processes in state D there; it joins again once they have ended",
                ctx.name(*node),
                super::plan::STOP_LIMIT.as_millis() / 1_000,
            );
            let key = self.key.clone();
            self.notice(Notice::Trouble { key, text });
        }
        for node in &a.left_out {
            let Some(lead) = &mut self.lead else { return };
            if !lead.given_up.insert(*node) {
                continue;
            }
            let text = format!(
                "the launcher on {} does not answer: {}. The change goes on without it",
                ctx.name(*node),
                super::explain::STOPPED
            );
            self.tell_all(ctx, record, text);
        }
    }

    fn fault_seen(&mut self, ctx: &Ctx<'_>, a: &Assessment) {
        let ending = self.lead.as_ref().is_some_and(|l| l.ending.is_some());
        if ending {
            return;
        }
        let seen = last_heard(ctx, &a.lost).unwrap_or(ctx.now);
        self.change_begins(ctx.now, seen);
    }

    /// Ends the generation (END_GEN): the members stop their workers while the next generation is
    /// being decided.
    pub(super) fn end(&mut self, ctx: &mut Ctx<'_>, record: &Record, a: &Assessment) {
        let Some(lead) = &mut self.lead else { return };
        if lead.ending.is_none() {
            lead.ending = Some(ctx.now);
        }
        let why = match self.cause(record, a) {
            Some(cause) => {
                let mut next = record.clone();
                let charge = budget::charge(&record.spec, record.restarts_used, &cause);
                next.restarts_used = charge.restarts_used();
                next.kind = charge.kind();
                next.cause = cause;
                self.why(ctx, &next)
            }
            None => "the generation ended".into(),
        };
        if let Some(at) = self.stop_limit(record).filter(|at| ctx.now < *at) {
            self.wake_at(at, "members that do not end their workers");
        }
        let grace_ms = record.spec.loss_grace_ms;
        for m in &record.members {
            if !a.lost.contains(&m.node) {
                let already = self.is_ordered(m.node, |x| matches!(x, Action::End { .. }));
                if !already {
                    let why = why.clone();
                    self.order(ctx, m.node, Action::End { grace_ms, why });
                }
            }
        }
    }

    pub(super) fn all_stopped(&self, record: &Record, a: &Assessment) -> bool {
        let Some(lead) = &self.lead else { return false };
        record
            .members
            .iter()
            .filter(|m| {
                let gone = a.lost.contains(&m.node) || a.stuck.contains(&m.node);
                !(gone || a.left_out.contains(&m.node) || a.away.contains(&m.node))
            })
            .all(|m| {
                lead.status(m.node)
                    .is_some_and(|s| s.stopped || s.gone || s.finished)
            })
    }

    pub(super) fn decide(&mut self, ctx: &mut Ctx<'_>, record: &Record) {
        let a = self.assess(ctx, record);
        if self.awaits_save(ctx, a.finished) {
            return;
        }
        if let Some(quiet) = self.gathers_until(ctx, record, &a) {
            return self.wake_at(quiet, "quiet before going on");
        }
        match record.arbiter {
            Arbiter::Members => {
                let missing = self.missing_voters(ctx);
                if !(self.voting()).is_some_and(|r| r.is_majority(|n| !missing.contains(&n))) {
                    self.tell_wait(ctx, &crate::wire::Wait::NoQuorum { missing });
                    self.waits_for_nodes(true, ctx.now);
                    return self.wake_at(ctx.now + REPEAT, "no majority");
                }
            }
            Arbiter::Store(_) => {
                if !self.may_claim(ctx, record) {
                    return;
                }
            }
        }
        let waits = self.awaits_word_of_newcomers(ctx, record, &a);
        let next = self.next_record(ctx);
        let over = |next: &Record| !matches!(next.kind, Kind::Next | Kind::Dormant);
        if waits && !next.as_ref().is_some_and(over) {
            return;
        }
        let Some(next) = next else {
            let wait = self.live().map(|h| self.wait_of_running(ctx, h, ctx.me()));
            if let Some(wait) = wait {
                self.tell_wait(ctx, &wait);
            }
            self.waits_for_nodes(true, ctx.now);
            if self.local.as_ref().is_some_and(|l| l.leave.is_some()) {
                self.part_from_unreached();
            }
            for (node, _) in &a.leaving {
                self.say_wait(ctx, *node);
            }
            return self.wake_at(ctx.now + REPEAT, "too few nodes");
        };
        self.waits_for_nodes(false, ctx.now);
        self.propose(ctx, next);
    }
}

/// When any of these agents was heard last.
pub(super) fn last_heard(ctx: &Ctx<'_>, nodes: &[NodeId]) -> Option<Time> {
    let peers = nodes.iter().filter_map(|n| ctx.peers.get(*n));
    peers.map(|p| p.seen).max()
}
