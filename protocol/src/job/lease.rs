//! The lease without which no worker of this node runs (R16).

use super::member::Mine;
use super::{Ctx, Job};
use crate::agent::Config;
use crate::ids::{Digest, NodeId};
use crate::local::{Began, ToLauncher};
use crate::membership::State;
use crate::record::{Arbiter, Record};
use crate::time::{Span, Time};
use crate::wire::{JobMessage, Timeouts};

impl Job {
    /// The generation whose lease this node asks that voter to acknowledge.
    pub(crate) fn lease_wanted_of(&self, voter: NodeId) -> Option<Digest> {
        let mine = self.member.as_ref()?;
        let head = self.live()?;
        // A leader whose workers have ended asks for those that wait to be let in.
        let asks =
            !mine.status.stopped || self.lead.is_some() && !self.gathering.tickets.is_empty();
        let wanted = head.record.arbiter == Arbiter::Members && asks;
        let votes = || head.voting().voters().any(|v| v.node == voter);
        (wanted && votes()).then_some(head.configuration().1)
    }

    /// The name that a member has to give that asks this voter for its lease: of the vote, so that nobody counts those
    /// who voted before.
    pub(crate) fn lease_asked_of(&self) -> Option<Digest> {
        self.head.as_ref().map(|h| h.configuration().1)
    }

    /// A voter acknowledged, or refused, the heartbeat that was sent at `sent` and asked for this lease.
    pub(crate) fn lease_answered(&mut self, from: NodeId, granted: bool, sent: Time) {
        if let Some(mine) = &mut self.member {
            let answers = match granted {
                true => &mut mine.acks,
                false => &mut mine.refusals,
            };
            let at = answers.entry(from).or_default();
            *at = sent.max(*at);
        }
    }

    /// A voter that refuses may know what followed. Nobody else may tell: a machine that was suspended, and its clock
    /// with it, does not know that its lease is over, and may count on a voter whose agent has gone since.
    pub(crate) fn lease_refused(&mut self, ctx: &Ctx<'_>, from: NodeId) {
        let have = self.head_digest();
        self.send(ctx, from, JobMessage::Ask { have });
        // Or it has not heard that it votes.
        self.tell_voters(ctx, from);
    }

    pub(super) fn tail_seen(&mut self, asked: Time) {
        if let Some(mine) = &mut self.member {
            mine.tail_seen = mine.tail_seen.max(asked);
        }
    }

    /// When the newest heartbeat was sent that the arbiter has confirmed.
    fn confirmed(record: &Record, mine: &Mine) -> Time {
        match record.arbiter {
            Arbiter::Store(_) => mine.tail_seen,
            Arbiter::Members => {
                let times = mine.acks.values().chain(mine.stand_behind.values());
                let mut times: Vec<Time> = times.copied().collect();
                times.sort_unstable_by(|a, b| b.cmp(a));
                let newest = |n: &NodeId| mine.acks.get(n).max(mine.stand_behind.get(n));
                let held = |at: Time| record.is_majority(|n| newest(&n).is_some_and(|t| *t >= at));
                // The older the time, the more voters have acknowledged one at least as new.
                let newest = times.partition_point(|at| !held(*at));
                times.get(newest).copied().unwrap_or(Time::ZERO)
            }
        }
    }

    /// The voters are about to change: the lease that those of before have confirmed holds until it is over.
    pub(super) fn keep_lease(&mut self) {
        if let (Some(head), Some(mine)) = (&self.head, &mut self.member) {
            mine.confirmed_before = mine
                .confirmed_before
                .max(Self::confirmed(head.voting(), mine));
        }
    }

    /// Until when this member may train.
    fn lease_end(cfg: &Config, record: &Record, mine: &Mine) -> Time {
        let confirmed = Self::confirmed(record, mine).max(mine.confirmed_before);
        match confirmed.max(mine.adopted) {
            // Never: also on a machine that has just booted.
            Time::ZERO => Time::ZERO,
            at => at + cfg.lease(),
        }
    }

    /// A voter whose agent is away, while its launcher answers, votes for no other generation meanwhile: it
    /// stands behind this one, as long as its own workers may go on without their agent. One that did not
    /// acknowledge this generation until it went may have voted for another one before. An agent that is
    /// stopped refuses nothing, and a lease is shorter than the silence after which it counts as away: it
    /// stands behind this generation from the moment at which it is suspected and its launcher answers.
    pub(super) fn count_away(&mut self, ctx: &Ctx<'_>, record: &Record) {
        let patience = Span(ctx.cfg.agent_grace.0 / 4 * 3);
        let recent = ctx.cfg.lease() + ctx.cfg.suspect_after;
        let Some(mine) = &mut self.member else { return };
        for node in record.voters().map(|v| v.node) {
            let since = match ctx.peers.unwell(node) {
                Some(State::Away { since }) => since,
                Some(State::Suspect { guarded: true }) => ctx.now,
                _ => continue,
            };
            let refused = mine.refusals.get(&node);
            let until = mine.acks.get(&node);
            let until = until.is_some_and(|at| *at + recent >= since && refused < Some(at));
            // An agent that has started anew may vote, though the path to it is cut.
            let Some(seen) = ctx.peers.alone_at(node).filter(|_| until) else {
                continue;
            };
            if ctx.now < since + patience {
                mine.stand_behind.insert(node, seen);
            }
        }
    }

    /// For how long the workers of the launcher here may go on if it does nothing: it may be stopped,
    /// and its sidecar asks.
    pub(crate) fn lease_left(&self, cfg: &Config, now: Time) -> Span {
        let (Some(head), Some(mine), Some(local)) = (self.live(), &self.member, &self.local) else {
            return Span::ZERO;
        };
        let runs = local.running == Some(head.digest) && local.silent_since.is_none();
        if !runs || !mine.trains() || mine.status.lease_lost {
            return Span::ZERO;
        }
        let end = Self::lease_end(cfg, head.voting(), mine);
        local.ends.map_or(end, |at| end.min(at)).since(now)
    }

    /// From when the launcher was told to end its workers its time counts.
    pub(super) fn drive_ends(&mut self, ctx: &Ctx<'_>) {
        if let Some(local) = &mut self.local
            && let Some(grace) = local.ends_within.take()
        {
            let by = ctx.now + grace;
            local.ends = Some(local.ends.map_or(by, |at| at.min(by)));
        }
    }

    /// Whether the lease ran out while this process was stopped: then nobody was asked for another. To
    /// the others it was away, like an agent that is started anew, and like that one it has the time of
    /// one lease to ask; no later than its launcher would have ended the workers of an agent that is
    /// away, for the others wait no longer than that.
    fn slept_through(ctx: &Ctx<'_>, record: &Record, mine: &Mine) -> bool {
        let end = Self::lease_end(ctx.cfg, record, mine);
        let unseen = stood_still(ctx, end).is_some();
        let from = Self::confirmed(record, mine).max(mine.confirmed_before);
        let others_wait = from > Time::ZERO && ctx.now < from + Span(ctx.cfg.agent_grace.0 / 4 * 3);
        unseen && others_wait
    }

    // ---- the leases of those who are no members any more ----

    /// The longest times that a member of the head keeps, as far as this agent knows.
    pub(super) fn timeouts(&self, ctx: &Ctx<'_>) -> Timeouts {
        self.durable.timeouts.max(ctx.cfg.timeouts())
    }

    /// A peer said hello: should its node take part here, its times count, and should it wait for this node, it
    /// need not.
    pub(crate) fn on_hello(&mut self, ctx: &mut Ctx<'_>, from: NodeId, came: bool) {
        self.say_ended_here(ctx, std::iter::once(from));
        self.repeat_stopped(ctx, from);
        let concerned = self
            .voting()
            .is_some_and(|r| r.voters_and_members().any(|n| n == from));
        if concerned {
            self.tell_voters(ctx, from);
        }
        self.greet_with_wait(ctx, from, came);
        let said = ctx.peers.get(from).and_then(|p| p.hello.as_ref());
        let (Some(head), Some(said)) = (self.live(), said) else {
            return;
        };
        let longest = self.durable.timeouts.max(said.timeouts);
        if longest != self.durable.timeouts && head.has(from) {
            self.durable.timeouts = longest;
            self.persist(ctx);
        }
    }

    /// Whether a start waits for this lease, so that it is worth asking for it more often.
    pub(crate) fn lease_urgent(&self) -> bool {
        self.member.as_ref().is_some_and(|m| m.pending.is_some())
    }

    /// Whether something is to be done once the lease is held.
    pub(crate) fn awaits_lease(&self) -> bool {
        self.lease_urgent() || self.durable.adopted.is_some()
    }

    /// Starts the workers that the leader ordered, once the lease to run them is held.
    pub(super) fn drive_pending(&mut self, ctx: &mut Ctx<'_>, record: &Record) {
        let Some(mine) = &self.member else { return };
        let Some(start) = mine.pending.clone() else {
            return;
        };
        if ctx.now >= Self::lease_end(ctx.cfg, record, mine) && !ctx.cfg.flaws.skip_r16 {
            return;
        }
        if let Some(mine) = &mut self.member {
            mine.pending = None;
            mine.attempt = start.attempt;
        }
        if let Some(local) = &mut self.local {
            (local.running, local.ended) = (Some(start.digest), false);
            local.reg.began = Some(Box::new(Began {
                lineage: start.lineage,
                digest: start.digest,
            }));
        }
        self.applicant.told.clear();
        self.tell_launcher(ToLauncher::Start(start));
    }

    /// Live workers that compute are waited for when their generation ends; no longer than this node holds the lease
    /// of the one that followed, for without it others may begin the next.
    fn end_leftovers(&mut self, ctx: &mut Ctx<'_>, record: &Record) {
        let (Some(mine), Some(local)) = (&self.member, &self.local) else {
            return;
        };
        let Some(stopping) = local.stopping.filter(|s| !s.at_once) else {
            return;
        };
        let end = Self::lease_end(ctx.cfg, record, mine).max(self.installed_at + ctx.cfg.lease());
        if ctx.now < end {
            return self.wake_at(end, "the lease ends");
        }
        let why = why_lost(ctx, record, end);
        self.stop_launcher(ctx.now, stopping.digest, 0, &why);
    }

    pub(super) fn drive_lease(&mut self, ctx: &mut Ctx<'_>, record: &Record) {
        if ctx.cfg.flaws.skip_r16 {
            return;
        }
        let Some(mine) = self.member.as_ref().filter(|m| m.trains()) else {
            return self.end_leftovers(ctx, record);
        };
        if mine.status.finished {
            return;
        }
        let (end, digest) = (Self::lease_end(ctx.cfg, record, mine), mine.status.digest);
        let (confirmed, lost) = (Self::confirmed(record, mine), mine.status.lease_lost);
        let slept_through = Self::slept_through(ctx, record, mine);
        if confirmed > Time::ZERO && self.durable.adopted.take().is_some() {
            self.persist(ctx);
        }
        if ctx.now < end {
            return self.wake_at(end, "the lease ends");
        }
        if lost {
            return;
        }
        if slept_through {
            if let Some(mine) = &mut self.member {
                mine.adopted = ctx.now;
            }
            return self.wake_at(ctx.now + ctx.cfg.lease(), "the lease ends");
        }
        self.update(true, |s| s.lease_lost = true);
        let why = why_lost(ctx, record, end);
        if let Some(mine) = &mut self.member {
            mine.pending = None;
            mine.why_lost.clone_from(&why);
        }
        self.stop_launcher(ctx.now, digest, 0, &why);
        if stood_still(ctx, end).is_some() {
            // It has not asked anybody since.
            return;
        }
        match record.arbiter {
            Arbiter::Members => {
                let missing = self.missing_voters(ctx);
                self.tell_wait(ctx, &crate::wire::Wait::NoQuorum { missing });
            }
            Arbiter::Store(_) => {
                let text = match self.unanswered(ctx.now) {
                    Some(pid) => format!(
                        "the job cannot go on here: the launcher of this node (process {pid}), which reads the job's store, \
                         does not answer"
                    ),
                    None => "the job cannot go on here: its store has not answered this node for too long. \
                             What would help: look whether the directory or bucket of --store can be read here"
                        .into(),
                };
                self.tell_waiting(ctx.now, text);
            }
        }
    }
}

/// For how long this process stood still while a lease ended.
fn stood_still(ctx: &Ctx<'_>, end: Time) -> Option<Span> {
    let (stopped, woke) = ctx.quiet;
    // While it runs it has something to do more often than that.
    (stopped < end && woke > end).then(|| woke.since(stopped))
}

/// Why a lease that ended then was lost, for people.
fn why_lost(ctx: &Ctx<'_>, record: &Record, end: Time) -> String {
    if let Some(span) = stood_still(ctx, end) {
        return format!("the agent of this node was stopped or its machine slept, for {span}");
    }
    match record.arbiter {
        Arbiter::Members => "no majority of the job's nodes can be reached".into(),
        Arbiter::Store(_) => "the job's log in its store cannot be read".into(),
    }
}
