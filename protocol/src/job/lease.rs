//! The lease without which no worker of this node runs (R16).

use std::sync::Arc;

use super::member::Mine;
use super::{Ctx, Head, Job};
use crate::agent::Config;
use crate::ids::{Digest, NodeId};
use crate::local::{Began, ToLauncher};
use crate::membership::State;
use crate::record::{Arbiter, Record};
use crate::time::{Span, Time};
use crate::wire::{JobMessage, MAX_LIST, Status, Timeouts};

/// A member that was dropped without confirmation of its end.
#[derive(Clone, Debug)]
pub(super) struct Dropped {
    /// The generation of which it was a member last.
    pub(super) of: Arc<Head>,
    /// Until when it may still train (R16).
    until: Time,
}

impl Job {
    /// The generation whose lease this node asks that voter to acknowledge.
    pub(crate) fn lease_wanted_of(&self, voter: NodeId) -> Option<Digest> {
        let mine = self.member.as_ref()?;
        let head = self.live()?;
        // A leader whose workers have ended asks for those that wait to be let in.
        let asks = !mine.status.stopped || self.lead.is_some() && !self.desk.tickets.is_empty();
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
    pub(crate) fn on_hello(&mut self, ctx: &mut Ctx<'_>, from: NodeId) {
        self.say_ended_here(ctx, std::iter::once(from));
        self.repeat_stopped(ctx, from);
        let concerned = self
            .voting()
            .is_some_and(|r| r.voters_and_members().any(|n| n == from));
        if concerned {
            self.tell_voters(ctx, from);
        }
        if self.live().is_none() {
            self.repeat_held(ctx, from);
        }
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

    /// A new head, `before` being set already: whoever was dropped and is not known to have stopped
    /// may go on until its lease ends. Who leads the new generation need not be who decided it, and
    /// the next one may follow at once: so every agent keeps this for itself.
    pub(super) fn note_dropped(&mut self, ctx: &Ctx<'_>, record: &Record) {
        let leases = self.leases_ended.take();
        self.forgotten_by = None;
        self.ended_told.clear();
        // What was missed stays unknown until somebody tells who knows it.
        self.unknown &= self.forgotten.is_some_and(|at| ctx.now < at);
        self.dropped.retain(|node, _| !record.has(*node));
        self.stopped.retain(|node| !record.has(*node));
        let other_life = record.number == 1 || record.kind.is_terminal();
        self.stopped_here
            .take_if(|_| other_life || record.has(ctx.me()));
        if record.number == 1 {
            return;
        }
        let before = self.before.clone();
        let before = before.filter(|b| b.lineage() == record.lineage());
        let knows = before.as_ref().is_some_and(|b| b.digest == record.parent);
        if record.kind.is_terminal() && !(knows && self.lead.is_some()) {
            // The one that had the end decided knows who has not stopped yet, and tells.
            self.dropped.clear();
            self.unknown = true;
            return;
        }
        if !knows {
            // A node may have trained again in a generation that was missed here.
            self.stopped.clear();
            let waits = std::mem::take(&mut self.dropped);
            self.forgotten = self.forgotten.max(waits.values().map(|d| d.until).max());
        }
        let taken = self.took_over.filter(|t| t.from == record.parent);
        let missed = !knows
            && !self.was_left_behind(ctx.peers.all, record.parent)
            && !taken.is_some_and(|t| t.died);
        if missed && !record.kind.is_terminal() {
            // Who was dropped is not known here, nor whether their agents are there to end their workers.
            let most = ctx.peers.timeouts().max(self.timeouts(ctx));
            let most = match taken {
                Some(_) => most.suspect_after,
                None => most.agent_grace,
            };
            self.unknown = true;
            self.forgotten = self.forgotten.max(Some(ctx.now + most));
        }
        let Some(before) = before else { return };
        let (times, of) = (self.timeouts(ctx), Arc::new(before));
        let before = &of.record;
        let gone = before.members.iter().map(|m| m.node);
        // A leader whose own launcher does not answer goes on deciding, and has dropped itself.
        let others = |n: &NodeId| *n != ctx.me() || self.lead.is_some();
        let gone = gone.filter(|n| others(n) && !record.has(*n));
        let gone = gone.filter(|n| ctx.peers.lost(*n) != Some(true) && !self.stopped_for_good(*n));
        for node in gone.collect::<Vec<_>>() {
            let until = match &leases {
                // The voters told whom they had acknowledged: nobody else holds a lease. But whoever
                // began nothing in `before` may still train for the one before that: its launcher may be stopped.
                Some(leases) => {
                    let began = |s: &Status| s.started.is_some() || s.stopped;
                    let heard = before.number == 1 || self.status_of(node).is_some_and(began);
                    let older = (!heard).then_some(self.installed_at + times.suspect_after);
                    leases.get(&node).copied().max(older)
                }
                None => Some(ctx.now + times.suspect_after),
            };
            // The launcher that went on without its agent may not have found the one that came in its place.
            let alone = ctx.peers.alone_at(node).map(|at| at + times.agent_grace);
            let alone = alone.filter(|_| Self::is_back_anew(ctx, before, node));
            let (of, until) = (of.clone(), until.max(alone).unwrap_or(ctx.now));
            self.stopped.remove(&node);
            self.dropped.insert(node, Dropped { of, until });
        }
        self.lengthen_waits(ctx);
    }

    /// This node gives the head up. Those that may still train for it are waited for, until they say that they have
    /// stopped.
    pub(super) fn wait_for_left(&mut self, ctx: &Ctx<'_>, record: &Record) {
        let grace = self.timeouts(ctx).agent_grace;
        let of = Arc::new(Head::new(Arc::new(record.clone())));
        for m in record.members.iter().filter(|m| m.node != ctx.me()) {
            let stopped = self.status_of(m.node).is_some_and(|s| s.stopped);
            let asks = self.desk.is_asked_for(m);
            if stopped || asks || ctx.peers.lost(m.node) == Some(true) {
                continue;
            }
            // Of an agent without its state the launcher before counts, if it was seen to go on.
            let since = match Self::is_back_anew(ctx, record, m.node) {
                true => ctx.peers.alone_at(m.node),
                false => Some(ctx.now),
            };
            if let Some(until) = since.map(|at| at + grace) {
                let of = of.clone();
                self.dropped.insert(m.node, Dropped { of, until });
            }
        }
    }

    /// Whether the agent of this member is there with another state directory.
    fn is_back_anew(ctx: &Ctx<'_>, of: &Record, node: NodeId) -> bool {
        let was = of.member(node).map(|m| m.state);
        let peer = ctx.peers.get(node);
        was.is_some_and(|state| peer.is_some_and(|p| p.has_lost(state)))
    }

    /// Those whose leases are over by now are waited for no more.
    pub(super) fn drive_dropped(&mut self, ctx: &mut Ctx<'_>) {
        if self.lengthen_waits(ctx) {
            // One that restarts waits for them, too, and so does whoever was told of an end.
            self.durable.hold(self.held_ms(ctx), ctx.now);
            self.persist(ctx);
            if self.live().is_none() {
                self.say_held_to_all(ctx);
            }
        }
        self.dropped.retain(|_, d| ctx.now < d.until);
        self.forgotten.take_if(|until| ctx.now >= *until);
        let next = self.dropped.values().map(|d| d.until);
        if let Some(at) = next.chain(self.forgotten).min() {
            self.wake_at(at, "a lease that may be over");
        }
    }

    /// Whether nodes that were dropped may train for longer than was known, by more than a lease. Where no agent is
    /// there to end them, workers go on without any lease; an agent that has just started may see that only after
    /// the node was dropped. And a voter that accepted what followed may have gone before it refused anybody a
    /// lease: a member that was dropped, and hears no more than that, takes it for one that stands behind its
    /// generation while its agent is away ([`Self::count_away`]). Nobody knows how long that was so once the agent
    /// is back.
    fn lengthen_waits(&mut self, ctx: &Ctx<'_>) -> bool {
        let grace = self.timeouts(ctx).agent_grace;
        let stopped = |n| ctx.peers.unwell(n) == Some(State::Suspect { guarded: true });
        let away = |n| ctx.peers.away_since(n);
        // Its launcher was there alone, then stopped itself, and may go on.
        let silent = |n| {
            let seen = ctx.peers.alone_at(n);
            seen.filter(|_| ctx.peers.lost(n) == Some(false))
        };
        let counted = |of: &Head| match of.record.arbiter {
            Arbiter::Store(_) => None,
            Arbiter::Members => {
                // One that was dropped before it heard of other voters counts on those of before.
                let voters = of.voting().voters().chain(of.record.voters());
                let voters = voters.map(|v| v.node);
                let gone = voters.map(|n| away(n).max(stopped(n).then_some(ctx.now)));
                gone.max().flatten()
            }
        };
        let mut longer = false;
        let mut last: Option<(Digest, Option<Time>)> = None;
        for (node, dropped) in &mut self.dropped {
            let known = last.filter(|(of, _)| *of == dropped.of.digest);
            let (_, since) =
                *last.insert(known.unwrap_or_else(|| (dropped.of.digest, counted(&dropped.of))));
            if let Some(since) = since.max(away(*node).or_else(|| silent(*node))) {
                let until = since + grace;
                longer |= until > dropped.until + ctx.cfg.suspect_after;
                dropped.until = until.max(dropped.until);
            }
        }
        // An agent that was started anew since knows neither whom it dropped nor who voted then: of its voters, most
        // are those of the generation before.
        let head = self.head.as_ref().filter(|_| self.before.is_none());
        if let Some(known) = &mut self.forgotten
            && let Some(since) = head.and_then(counted)
        {
            let until = since + grace;
            longer |= until > *known + ctx.cfg.suspect_after;
            *known = until.max(*known);
        }
        longer
    }

    /// For how long a start of the head waits, as things stand.
    pub(super) fn held_ms(&self, ctx: &Ctx<'_>) -> u32 {
        let left = self
            .held_until(ctx)
            .map_or(Span::ZERO, |at| at.since(ctx.now));
        rounded_up(left)
    }

    /// The one that had a generation decided tells its leader for how long to wait, which may not know
    /// it, and those that are new: one of them may lead what follows. Of an end it tells everybody, for any node may
    /// begin the next life.
    pub(super) fn tell_held(&mut self, ctx: &Ctx<'_>, record: &Record) {
        if self.unknown || self.head_digest() != record.digest() {
            return;
        }
        match record.kind.is_terminal() {
            true if self.held_ms(ctx) == 0 => {}
            true => self.say_held_to_all(ctx),
            false => {
                let before = self.before.as_ref().filter(|b| b.digest == record.parent);
                let new = |n: &NodeId| before.is_some_and(|b| !b.has(*n));
                let nodes = record.members.iter().map(|m| m.node);
                let to = nodes.filter(|n| record.leader() == Some(*n) || new(n));
                self.say_held(ctx, to.collect());
            }
        }
    }

    /// One that was not there when the head was decided hears how long a start has to wait, where this agent knows.
    pub(super) fn repeat_held(&mut self, ctx: &Ctx<'_>, to: NodeId) {
        let ended = self.head.is_some() && self.live().is_none();
        if ended {
            // The one that tells this agent of the wait may not reach it, and it may begin the next life at once.
            self.ended_told.insert(to);
        }
        if !self.unknown && (self.live().is_some() || ended && self.held_ms(ctx) > 0) {
            self.say_held(ctx, vec![to]);
        }
    }

    /// Of an end: any node may begin the next life.
    fn say_held_to_all(&mut self, ctx: &Ctx<'_>) {
        self.say_held(ctx, ctx.peers.connected_nodes().collect());
    }

    pub(super) fn say_held(&mut self, ctx: &Ctx<'_>, to: Vec<NodeId>) {
        let (digest, ms) = (self.head_digest(), self.held_ms(ctx));
        let known = self.forgotten.is_none_or(|at| ctx.now >= at);
        let waited = self
            .dropped
            .iter()
            .filter(|(node, d)| known && ctx.now < d.until && ctx.peers.lost(**node) != Some(true));
        let nodes = waited.map(|(node, d)| (*node, rounded_up(d.until.since(ctx.now))));
        let nodes: Vec<(NodeId, u32)> = nodes.collect();
        let nodes = match nodes.len() <= MAX_LIST {
            true => nodes,
            false => Vec::new(),
        };
        for node in to.into_iter().filter(|n| *n != ctx.me()) {
            let nodes = nodes.clone();
            self.send(ctx, node, JobMessage::Held { digest, ms, nodes });
        }
    }

    /// Should this say that a node which was dropped has ended its workers, no start waits for it any more.
    pub(super) fn dropped_has_stopped(&mut self, ctx: &mut Ctx<'_>, from: NodeId, status: &Status) {
        let of = self.dropped.get(&from).map(|d| d.of.digest);
        if !status.stopped || of != Some(status.digest) {
            return;
        }
        self.dropped.remove(&from);
        self.stopped.insert(from);
        if self.live().is_none() {
            // Those that were told of the wait.
            self.say_held_to_all(ctx);
        }
        self.durable.hold(self.held_ms(ctx), ctx.now);
        self.persist(ctx);
    }

    pub(super) fn on_held(
        &mut self,
        ctx: &mut Ctx<'_>,
        from: NodeId,
        digest: Digest,
        ms: u32,
        nodes: &[(NodeId, u32)],
    ) {
        if digest != self.head_digest() {
            return;
        }
        let after = |ms: u32| ctx.now + Span::from_millis(ms.into());
        let until = Some(after(ms));
        let ended = self.live().is_none();
        let named = |(n, _): &(NodeId, u32)| {
            let waited = self.dropped.contains_key(n);
            waited || self.stopped.contains(n) || ctx.peers.lost(*n) == Some(true)
        };
        if !ended && !self.unknown && !nodes.is_empty() && nodes.iter().all(named) {
            // It knows no more than this agent, but perhaps for how long: each of these says when it has stopped.
            for (node, ms) in nodes {
                if let Some(dropped) = self.dropped.get_mut(node) {
                    dropped.until = dropped.until.max(after(*ms));
                }
            }
            if self.durable.held(ctx.now) < Span::from_millis(self.held_ms(ctx).into()) {
                self.durable.hold(self.held_ms(ctx), ctx.now);
                self.persist(ctx);
            }
            return;
        }
        let again = ended && self.forgotten_by == Some(from);
        match std::mem::take(&mut self.unknown) {
            true => {
                self.forgotten = until;
                self.forgotten_by = Some(from);
            }
            false if again => self.forgotten = until,
            // Of an agent that is away it may have seen what nobody saw here.
            false if self.live().is_some() => self.forgotten = self.forgotten.max(until),
            false => return,
        }
        if ended {
            self.say_held(ctx, self.ended_told.iter().copied().collect());
        }
        // A leader that restarts waits for them, too.
        if again || self.durable.held(ctx.now) < Span::from_millis(ms.into()) {
            self.durable.hold(ms, ctx.now);
            self.persist(ctx);
        }
    }

    /// The leader of the head has workers started: it has waited for everybody who was dropped, and
    /// nobody waits again after a restart of the agent.
    pub(super) fn all_waited_for(&mut self, ctx: &mut Ctx<'_>) {
        self.dropped.clear();
        self.forgotten = None;
        if self.durable.held_ms > 0 {
            self.durable.hold(0, ctx.now);
            self.persist(ctx);
        }
    }

    /// Until when a start is held back, for those who may still be training (R16).
    pub(super) fn held_until(&self, ctx: &Ctx<'_>) -> Option<Time> {
        let dropped = self.dropped.iter();
        let dropped = dropped.filter(|(node, _)| ctx.peers.lost(**node) != Some(true));
        let until = dropped.map(|(_, d)| d.until);
        let until = until.chain(self.forgotten).max();
        until.filter(|at| ctx.now < *at && !ctx.cfg.flaws.skip_r16)
    }

    /// Where workers of a life that is over may still run, as their agents were away or cut off, and for how long; no
    /// nodes where this agent was only told of the wait.
    pub fn left_running(&self, now: Time) -> Option<(Vec<NodeId>, Span)> {
        let ended = self.head.is_some() && self.live().is_none();
        let until = self.dropped.values().map(|d| d.until);
        let until = until.chain(self.forgotten).max();
        let until = until.filter(|at| ended && now < *at)?;
        let nodes = self.dropped.iter().filter(|(_, d)| now < d.until);
        Some((nodes.map(|(node, _)| *node).collect(), until.since(now)))
    }

    /// Whether a start of the head waits for somebody, or may have to.
    pub(super) fn waits_for_leases(&self) -> bool {
        self.forgotten.is_some() || !self.dropped.is_empty()
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
            local.running = Some(start.digest);
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

fn rounded_up(left: Span) -> u32 {
    u32::try_from(left.as_millis() + u64::from(left > Span::ZERO)).unwrap_or(u32::MAX)
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
