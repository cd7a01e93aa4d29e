//! Nodes that were dropped and may still train: for how long a start waits for them, as far as this agent knows by itself
//! (R16).

use std::sync::Arc;

use super::{Ctx, Head, Job};
use crate::ids::{Digest, NodeId};
use crate::membership::State;
use crate::record::{Arbiter, Record};
use crate::time::{Span, Time};
use crate::wire::Status;

/// A member that was dropped without confirmation of its end.
#[derive(Clone, Debug)]
pub(super) struct Dropped {
    /// The generation of which it was a member last.
    pub(super) of: Arc<Head>,
    /// Until when it may still train (R16).
    until: Time,
    /// This agent may have heard late of the generation without both. The word of a member there replaces that time.
    estimated: bool,
}

impl Job {
    /// A new head, `before` being set already: whoever was dropped and is not known to have stopped
    /// may go on until its lease ends. The one that leads the new generation need not be the one that decided it, and
    /// the next one may follow at once: so every agent keeps this for itself.
    pub(super) fn note_dropped(&mut self, ctx: &Ctx<'_>, record: &Record) {
        let leases = self.leases_ended.take();
        self.unsure_of = None;
        let ended = |h: &Head| h.record.kind.is_terminal();
        if record.kind.is_terminal() && self.before.as_ref().is_some_and(ended) {
            // Another end counts as the last one. Those that were waited for may train all the same, and so may others.
            self.words.of_head(record, &self.stopped, ctx.now);
            self.stopped.clear();
            self.unknown |= self.held_until(ctx).is_none();
            return;
        }
        self.words.of_head(record, &self.stopped, ctx.now);
        // What was missed stays unknown until somebody tells who knows it.
        self.unknown &= self.forgotten.is_some_and(|at| ctx.now < at);
        self.dropped.retain(|node, _| !record.has(*node));
        self.stopped.retain(|node| !record.has(*node));
        self.stopped_here
            .take_if(|_| record.number == 1 || record.has(ctx.me()));
        if record.number == 1 {
            self.stopped.clear();
            return;
        }
        let before = self.before.clone();
        let before = before.filter(|b| b.lineage() == record.lineage());
        let knows = before.as_ref().is_some_and(|b| b.digest == record.parent);
        let decides = self.decides == Some(record.nonce);
        if record.kind.is_terminal() && !(knows && decides) {
            // The one that had the end decided knows who has not stopped yet, and tells. Others know of their own workers
            // and of those that were dropped before, and ask only where a store decides ([`Self::awaits_word_of_end`]).
            if record.arbiter == Arbiter::Members {
                self.dropped.clear();
            }
            let local = self.local.as_ref();
            let runs = local.is_some_and(|l| !l.ended && l.running.is_some());
            if let Some(of) = before.filter(|_| runs) {
                let own = Dropped {
                    of: Arc::new(of),
                    until: ctx.now + self.timeouts(ctx).suspect_after,
                    estimated: false,
                };
                self.dropped.insert(ctx.me(), own);
            }
            self.stopped.clear();
            self.unknown = true;
            return;
        }
        // What this agent did not know of the generation before is in `forgotten`.
        self.unsure_of = (self.unknown && record.kind.is_terminal()).then_some(record.parent);
        self.unknown &= !record.kind.is_terminal();
        if !knows {
            // A node may have trained again in a generation that was missed here.
            self.stopped.clear();
            let waits = std::mem::take(&mut self.dropped);
            self.forgotten = self.forgotten.max(waits.values().map(|d| d.until).max());
        }
        let taken = self.took_over.filter(|t| t.from == record.parent);
        let peers = ctx.peers.all;
        let left = self.was_left_behind(peers, record.parent, &[])
            && self.was_started(peers, record.parent);
        let missed = !(knows || left || taken.is_some_and(|t| t.died));
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
        let gone = gone.filter(|n| ctx.peers.lost(*n) != Some(true));
        for node in gone.collect::<Vec<_>>() {
            let rests = knows && before.is_short() && self.rests(ctx, node);
            if self.stopped_for_good(node) || rests {
                // It may have trained again in a generation that was missed here.
                self.stopped.extend(knows.then_some(node));
                continue;
            }
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
            let dropped = Dropped {
                of: of.clone(),
                until: until.max(alone).unwrap_or(ctx.now),
                estimated: !(decides || record.has(ctx.me())) && alone.is_none(),
            };
            self.stopped.remove(&node);
            self.dropped.insert(node, dropped);
        }
        self.lengthen_waits(ctx);
    }

    /// Whether no workers of an earlier generation are left on this member of one that has too few to run.
    fn rests(&self, ctx: &Ctx<'_>, node: NodeId) -> bool {
        let here = || self.local.as_ref().is_some_and(|l| l.ended);
        self.rest.contains(&node) || node == ctx.me() && here()
    }

    /// Whether this agent knew the life that is over before it ended.
    pub(super) fn knew_life(&self) -> bool {
        let before = self.before.as_ref().map(Head::lineage);
        before.is_some() && before == self.head.as_ref().map(Head::lineage)
    }

    /// Whether no workers of a life that is over run here any more, as this agent knows. One that was started again may
    /// not know of another launcher than the one that is here.
    pub(super) fn has_ended_here(&self) -> bool {
        let known = self.before.is_some();
        let here = self.local.as_ref();
        let ended = here.map(|l| l.ended || l.running.is_none() && known);
        ended.unwrap_or(self.died.is_some())
    }

    /// A member says that the workers of the generation before have ended there.
    pub(super) fn note_rest(&mut self, node: NodeId) {
        if self.live().is_some_and(|h| h.record.is_short()) {
            self.rest.insert(node);
        }
    }

    /// The members that rest in a generation that is too short to run, or are known to have stopped before it.
    pub(super) fn carry_rest(&mut self, ctx: &Ctx<'_>, record: &Record) {
        let before = self.before.as_ref().filter(|b| b.digest == record.parent);
        let before = before.filter(|_| record.is_short()).cloned();
        let members = before.iter().flat_map(|b| &b.record.members);
        let short = before.as_ref().is_some_and(|b| b.record.is_short());
        let rests = |n: &NodeId| self.stopped_for_good(*n) || short && self.rests(ctx, *n);
        self.rest = members.map(|m| m.node).filter(rests).collect();
    }

    /// This node gives the head up. Those that may still train for it are waited for, until they say that they have
    /// stopped.
    pub(super) fn wait_for_left(&mut self, ctx: &Ctx<'_>, record: &Record) {
        let grace = self.timeouts(ctx).agent_grace;
        let of = Arc::new(Head::new(Arc::new(record.clone())));
        for m in record.members.iter().filter(|m| m.node != ctx.me()) {
            let stopped = self.status_of(m.node).is_some_and(|s| s.stopped);
            let stopped = stopped || self.merge.has_stopped(of.digest, m.node);
            let asks = self.gathering.is_asked_for(m);
            if stopped || asks || ctx.peers.lost(m.node) == Some(true) {
                continue;
            }
            // Of an agent without its state the launcher before counts, if it was seen to go on.
            let since = match Self::is_back_anew(ctx, record, m.node) {
                true => ctx.peers.alone_at(m.node),
                false => Some(ctx.now),
            };
            if let Some(until) = since.map(|at| at + grace) {
                let dropped = Dropped {
                    of: of.clone(),
                    until,
                    estimated: false,
                };
                self.dropped.insert(m.node, dropped);
            }
        }
    }

    /// Another agent says for whom a start of the head waits. Whether it is a member, whose word replaces what was
    /// estimated here.
    pub(super) fn forget_estimates(&mut self, ctx: &Ctx<'_>, teller: NodeId) -> bool {
        let member = self.live().is_some_and(|head| head.record.has(teller));
        let before = self.dropped.len();
        self.dropped
            .retain(|node, d| !(member && d.estimated) || *node == ctx.me());
        self.dropped.len() < before
    }

    /// Whether the agent of this member is there with another state directory.
    fn is_back_anew(ctx: &Ctx<'_>, of: &Record, node: NodeId) -> bool {
        let was = of.member(node).map(|m| m.state);
        was.is_some_and(|state| ctx.peers.all.has_lost(node, state))
    }

    /// Those whose leases are over by now are waited for no more.
    pub(super) fn drive_dropped(&mut self, ctx: &mut Ctx<'_>) {
        if self.lengthen_waits(ctx) {
            // One that restarts waits for them, too, and so does whoever was told of an end.
            self.store_wait(ctx);
            self.say_end_held(ctx);
        }
        self.dropped.retain(|_, d| ctx.now < d.until);
        self.forgotten.take_if(|until| ctx.now >= *until);
        let told = self.words.expire(ctx.now);
        let next = self.dropped.values().map(|d| d.until);
        if let Some(at) = next.chain(self.forgotten).chain(told).min() {
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
                if until > dropped.until {
                    // This is what this agent saw.
                    (dropped.until, dropped.estimated) = (until, false);
                }
            }
        }
        // An agent that was started anew since knows neither whom it dropped nor who voted then: of its voters, most
        // are those of the generation before.
        let head = self.head.as_ref().filter(|_| self.before.is_none());
        if let Some(until) = head.and_then(counted).map(|since| since + grace) {
            longer |= self.words.lengthen(until, ctx.cfg.suspect_after);
            if let Some(known) = &mut self.forgotten {
                longer |= until > *known + ctx.cfg.suspect_after;
                *known = until.max(*known);
            }
        }
        longer
    }

    /// Should this be a node that was dropped, its workers have ended, and no start waits for it any more; all of them, if
    /// its launcher is `gone`.
    pub(super) fn dropped_has_stopped(
        &mut self,
        ctx: &mut Ctx<'_>,
        node: NodeId,
        of: Digest,
        gone: bool,
    ) {
        let waits = self.dropped.get(&node).map(|d| d.of.digest);
        if waits == Some(of) {
            self.dropped.remove(&node);
            self.stopped.insert(node);
            // Those that were told of the wait.
            self.say_end_held(ctx);
            self.store_wait(ctx);
        }
        self.told_has_stopped(ctx, node, of, gone);
    }

    /// The leader of the head has workers started: it has waited for everybody who was dropped, and
    /// nobody waits again after a restart of the agent.
    pub(super) fn all_waited_for(&mut self, ctx: &mut Ctx<'_>) {
        self.dropped.clear();
        self.words.clear();
        self.forgotten = None;
        if self.durable.held_ms > 0 {
            self.durable.hold(0, Vec::new(), ctx.now);
            self.persist(ctx);
        }
    }

    /// The nodes that were dropped and may still train, and until when.
    pub(super) fn waited_for(&self, ctx: &Ctx<'_>) -> impl Iterator<Item = (NodeId, Time)> {
        let dropped = self.dropped.iter();
        let waits = |n: NodeId, d: &Dropped| ctx.now < d.until && ctx.peers.lost(n) != Some(true);
        dropped
            .filter(move |(n, d)| waits(**n, d))
            .map(|(n, d)| (*n, d.until))
    }

    /// Until when a start waits, as far as this agent knows by itself.
    pub(super) fn own_wait(&self, ctx: &Ctx<'_>) -> Option<Time> {
        let until = self.waited_for(ctx).map(|(_, until)| until);
        let kept = self.told_until(ctx, Some(ctx.me()));
        let until = until.chain(self.forgotten).chain(kept).max();
        until.filter(|at| ctx.now < *at)
    }

    /// Until when a start is held back, for those who may still be training (R16).
    pub(super) fn held_until(&self, ctx: &Ctx<'_>) -> Option<Time> {
        let until = self.own_wait(ctx).max(self.told_until(ctx, None));
        until.filter(|at| ctx.now < *at && !ctx.cfg.flaws.skip_r16)
    }

    /// Where workers of a life that is over may still run, as their agents were away or cut off, and for how long; no
    /// nodes where that is not known.
    pub fn left_running(&self, now: Time) -> Option<(Vec<NodeId>, Span)> {
        let ended = self.head.is_some() && self.live().is_none();
        let (mut nodes, told) = self.words.left(now);
        let until = self.dropped.values().map(|d| d.until);
        let until = until.chain(self.forgotten).chain(told).max();
        let until = until.filter(|at| ended && now < *at)?;
        let dropped = self.dropped.iter().filter(|(_, d)| now < d.until);
        nodes.extend(dropped.map(|(node, _)| *node));
        Some((nodes.into_iter().collect(), until.since(now)))
    }

    /// Whether a start of the head waits for somebody, or may have to.
    pub(super) fn waits_for_leases(&self) -> bool {
        self.forgotten.is_some() || !self.dropped.is_empty() || !self.words.is_empty()
    }
}
