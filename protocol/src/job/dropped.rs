//! Nodes that were dropped and may still train: for how long a start waits for them, and how others hear of it (R16).

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{Ctx, Head, Job, REPEAT};
use crate::ids::{Digest, NodeId};
use crate::membership::State;
use crate::record::{Arbiter, Kind, Record};
use crate::time::{Span, Time};
use crate::wire::{JobMessage, MAX_LIST, Status};

/// Most agents that are asked for how long a start waits after an end.
const MOST_ASKED: usize = 8;

/// A member that was dropped without confirmation of its end.
#[derive(Clone, Debug)]
pub(super) struct Dropped {
    /// The generation of which it was a member last; of one that this agent was told of, the one that the head follows.
    of: Digest,
    /// That generation; not where this agent was only told of the node.
    pub(super) head: Option<Arc<Head>>,
    /// The agent that told of it, if this one does not know by itself.
    by: Option<NodeId>,
    /// Until when it may still train (R16).
    until: Time,
}

impl Dropped {
    fn from(head: &Arc<Head>, until: Time) -> Dropped {
        Dropped {
            of: head.digest,
            head: Some(head.clone()),
            by: None,
            until,
        }
    }
}

/// The wait after the job's end, as it goes from node to node.
#[derive(Clone, Debug, Default)]
pub(super) struct EndTold {
    /// The node that told for how long it is, and says when it is over sooner.
    by: Option<NodeId>,
    /// Those that heard of the end from this agent, and hear of the wait from it.
    to: BTreeSet<NodeId>,
    /// The end of the wait as they were told last.
    said: Option<Time>,
    /// Since when this agent knows of the end.
    since: Time,
    /// Those that this agent asked for how long to wait, and when.
    asked: BTreeMap<NodeId, Time>,
}

impl EndTold {
    pub(super) fn since(now: Time) -> EndTold {
        EndTold {
            since: now,
            ..EndTold::default()
        }
    }
}

impl Job {
    /// A new head, `before` being set already: whoever was dropped and is not known to have stopped
    /// may go on until its lease ends. The one that leads the new generation need not be the one that decided it, and
    /// the next one may follow at once: so every agent keeps this for itself.
    pub(super) fn note_dropped(&mut self, ctx: &Ctx<'_>, record: &Record) {
        let leases = self.leases_ended.take();
        let ended = |h: &Head| h.record.kind.is_terminal();
        if record.kind.is_terminal() && self.before.as_ref().is_some_and(ended) {
            // Another end counts as the last one. Those that were waited for may train all the same, and so may others.
            self.stopped.clear();
            if self.held_until(ctx).is_none() {
                self.unknown = true;
                self.end_told = EndTold::since(ctx.now);
            }
            return;
        }
        self.end_told = EndTold::since(ctx.now);
        // What was missed stays unknown until somebody tells who knows it.
        self.unknown &= self.forgotten.is_some_and(|at| ctx.now < at);
        self.dropped.retain(|node, _| !record.has(*node));
        self.stopped.retain(|node| !record.has(*node));
        let other_life = record.number == 1 || record.kind.is_terminal();
        self.stopped_here
            .take_if(|_| other_life || record.has(ctx.me()));
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
            if let Some(of) = before.filter(|b| knows && self.runs_here(b.digest)) {
                let until = ctx.now + self.timeouts(ctx).suspect_after;
                let dropped = Dropped::from(&Arc::new(of), until);
                self.dropped.insert(ctx.me(), dropped);
            }
            self.stopped.clear();
            self.unknown = true;
            return;
        }
        // What this agent did not know of the generation before is in `forgotten`.
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
            let until = until.max(alone).unwrap_or(ctx.now);
            self.stopped.remove(&node);
            self.dropped.insert(node, Dropped::from(&of, until));
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

    /// Whether no workers of this generation run here any more, as this agent knows.
    fn has_ended_here(&self, generation: Option<Digest>) -> bool {
        let here = self.local.as_ref();
        let ended = here.map(|l| l.ended || l.running != generation);
        ended.unwrap_or(self.died.is_some())
    }

    /// Whether workers of this generation may still run here.
    fn runs_here(&self, generation: Digest) -> bool {
        let local = self.local.as_ref().filter(|l| !l.ended);
        local.is_some_and(|l| l.running == Some(generation))
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
                self.dropped.insert(m.node, Dropped::from(&of, until));
            }
        }
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
            self.durable.hold(self.held_ms(ctx), ctx.now);
            self.persist(ctx);
            self.say_end_held(ctx);
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
        // An agent that was started anew since knows neither whom it dropped nor who voted then: of its voters, most
        // are those of the generation before.
        let head = self.head.as_ref().filter(|_| self.before.is_none());
        let mut last: Option<(Digest, Option<Time>)> = None;
        for (node, dropped) in &mut self.dropped {
            let of = dropped.head.as_deref().or(head);
            let known = last.filter(|(of, _)| *of == dropped.of);
            let known = known.unwrap_or_else(|| (dropped.of, of.and_then(counted)));
            let (_, since) = *last.insert(known);
            if let Some(since) = since.max(away(*node).or_else(|| silent(*node))) {
                let until = since + grace;
                longer |= until > dropped.until + ctx.cfg.suspect_after;
                dropped.until = until.max(dropped.until);
            }
        }
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
    /// it, and those that are new: one of them may lead what follows.
    pub(super) fn tell_held(&mut self, ctx: &Ctx<'_>, record: &Record) {
        if self.unknown || self.head_digest() != record.digest() || record.kind.is_terminal() {
            return;
        }
        let before = self.before.as_ref().filter(|b| b.digest == record.parent);
        let new = |n: &NodeId| before.is_some_and(|b| !b.has(*n));
        let nodes = record.members.iter().map(|m| m.node);
        let to = nodes.filter(|n| record.leader() == Some(*n) || new(n));
        self.say_held(ctx, to.collect());
    }

    /// The one that had an end decided tells everybody for how long to wait, for any node may begin the next life.
    pub(super) fn tell_end_held(&mut self, ctx: &Ctx<'_>) {
        if self.held_ms(ctx) > 0 {
            let all: Vec<NodeId> = ctx.peers.connected_nodes().collect();
            self.tell_waited_end(ctx, &all);
            self.say_end_held(ctx);
        }
    }

    /// One that was not there when the head was decided hears how long a start has to wait, where this agent knows.
    pub(super) fn repeat_held(&mut self, ctx: &Ctx<'_>, to: NodeId) {
        let ended = self.head.is_some() && self.live().is_none();
        if ended {
            // The one that tells this agent of the wait may not reach it, and it may begin the next life at once.
            self.end_told.to.retain(|n| ctx.peers.connected(*n));
            self.end_told.to.insert(to);
        }
        if !self.unknown && self.head.is_some() {
            self.say_held(ctx, vec![to]);
        }
    }

    /// Of an end, to all: any node may begin the next life.
    fn say_end_held(&mut self, ctx: &Ctx<'_>) {
        if self.live().is_none() && !self.unknown {
            self.say_held(ctx, ctx.peers.connected_nodes().collect());
        }
    }

    /// The end after which a start has to wait, to those that perhaps know nothing of that life: one of them may begin
    /// the next when all that know have gone.
    pub(super) fn tell_waited_end(&mut self, ctx: &Ctx<'_>, to: &[NodeId]) {
        let merged = |h: &&Head| matches!(h.record.kind, Kind::Tombstone { .. });
        let ended = |h: &&Head| h.record.kind.is_terminal() && !merged(h);
        let head = self.head.as_ref().filter(ended);
        let record = head.map(|h| h.record.clone());
        let Some(record) = record.filter(|_| !self.unknown && self.held_ms(ctx) > 0) else {
            return;
        };
        let before = self.durable.ended.last().map(|e| e.digest());
        for node in to {
            let record = record.clone();
            let body = match before {
                Some(have) => JobMessage::Follows { have, record },
                None => JobMessage::Decided { record },
            };
            self.send(ctx, *node, body);
        }
    }

    /// An agent has just said its first word on a connection: what it was asked before it may not have heard.
    pub(super) fn ask_again(&mut self, node: NodeId) {
        self.end_told.asked.remove(&node);
    }

    /// Whether a start waits for the word of others on those that may still train for the life that is over: where
    /// this agent reads of its end in the job's log, nobody need have told it. They are asked as soon as somebody wants
    /// to start here, first the one that had the end decided. Those that do not know either say nothing, and an agent
    /// that has just heard of the end may be about to meet others.
    pub(super) fn awaits_word_of_end(&mut self, ctx: &Ctx<'_>) -> bool {
        let head = self.head.as_ref().filter(|h| h.record.kind.is_terminal());
        let by_store = |h: &&Head| matches!(h.record.arbiter, Arbiter::Store(_));
        let end = head.filter(by_store).map(|h| (h.lineage(), h.digest));
        let Some((lineage, have)) = end.filter(|_| self.unknown && !ctx.cfg.flaws.skip_r16) else {
            return false;
        };
        let most = ctx.peers.timeouts().max(self.timeouts(ctx));
        let over = self.end_told.since + most.agent_grace + most.suspect_after;
        // Where the next life has begun, nothing starts here but by its word.
        let begun = self.log_runs().is_some() || self.runs_elsewhere(ctx.peers.all).is_some();
        if ctx.now >= over || begun {
            return false;
        }
        let writer = self.end_writer();
        let told = self.told_of(ctx, lineage).map(|(node, _)| node);
        let know = writer
            .into_iter()
            .chain(told.filter(|n| Some(*n) != writer));
        let know = know.filter(|n| *n != ctx.me() && ctx.peers.connected(*n));
        let know: Vec<NodeId> = know.take(MOST_ASKED).collect();
        let asked = &mut self.end_told.asked;
        asked.retain(|n, _| ctx.peers.connected(*n));
        for node in know {
            if let Entry::Vacant(asked) = self.end_told.asked.entry(node) {
                asked.insert(ctx.now);
                self.send(ctx, node, JobMessage::Ask { have });
            }
        }
        let asked = self.end_told.asked.values().copied();
        let newest = asked.fold(self.end_told.since, Time::max);
        let until = newest + Span(ctx.cfg.suspect_after.0 / 8);
        let waits = ctx.now < until;
        if waits {
            self.wake_at(until, "word of those that may still train");
        }
        waits
    }

    pub(super) fn say_held(&mut self, ctx: &Ctx<'_>, to: Vec<NodeId>) {
        let (digest, ms) = (self.head_digest(), self.held_ms(ctx));
        let known = self.forgotten.is_none_or(|at| ctx.now >= at);
        let waited = self.waited_for(ctx).filter(|_| known);
        let nodes = waited.map(|(node, until)| (node, rounded_up(until.since(ctx.now))));
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

    /// Should this be a node that was dropped, its workers have ended, and no start waits for it any more.
    pub(super) fn dropped_has_stopped(&mut self, ctx: &mut Ctx<'_>, node: NodeId, of: Digest) {
        let waits = self.dropped.get(&node).filter(|d| d.of == of);
        let Some(told) = waits.map(|d| d.by.is_some()) else {
            return;
        };
        self.dropped.remove(&node);
        self.stopped.insert(node);
        match told {
            // The one that told this agent has told all others.
            true => self.pass_held_on(ctx, None),
            false => self.say_end_held(ctx),
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
        let ended = self.live().is_none();
        // A word that replaces what this agent knew, not one more beside others.
        let unknown = std::mem::take(&mut self.unknown);
        let anew = unknown || ended && self.end_told.by == Some(from);
        if unknown && ended {
            // It knows which of those have stopped since, but for the workers here.
            self.dropped.retain(|node, _| *node == ctx.me());
        }
        self.wait_as_told(ctx, from, anew, ms, nodes);
        let held = Span::from_millis(self.held_ms(ctx).into());
        // The same word takes longer on one way than on another. Nodes that pass such differences on to each other
        // would do so without end, and wait longer each time.
        let until = ctx.now + held;
        let differ = |at: Time| at.since(until).max(until.since(at)) >= REPEAT;
        let over = |at: Time| at <= ctx.now && until <= ctx.now;
        let said = self.end_told.said;
        if ended && said.is_none_or(|at| differ(at) && !over(at)) {
            self.end_told.said = Some(until);
            self.pass_held_on(ctx, Some(from));
        }
        // A leader that restarts waits for them, too, and no longer for what was unknown.
        let kept = self.durable.held(ctx.now);
        if kept < held || anew && kept > Span::ZERO {
            self.durable.hold(self.held_ms(ctx), ctx.now);
            self.persist(ctx);
        }
    }

    /// Takes in the word of another agent: for whom a start waits, each of which says by itself when it has stopped; or
    /// only for how long. `anew`: it replaces what was known of nodes that are not named.
    fn wait_as_told(
        &mut self,
        ctx: &Ctx<'_>,
        from: NodeId,
        anew: bool,
        ms: u32,
        nodes: &[(NodeId, u32)],
    ) {
        let after = |ms: u32| ctx.now + Span::from_millis(ms.into());
        let of = self.head.as_ref().map(|h| h.record.parent);
        let of = of.filter(|_| !nodes.is_empty());
        let until = of.is_none().then(|| after(ms)).filter(|_| ms > 0);
        // Another one that was asked knows more than the one that answered first; an agent that was started again knows
        // for how long it was to wait then; of an agent that is away another may have seen what nobody saw here.
        let restored = self.before.is_none() && self.end_told.by.is_none();
        let asked = self.end_told.asked.contains_key(&from);
        let more = restored || asked || self.live().is_some();
        // The same word is a moment longer by another way.
        let longer = |until: Time, known: Time| until.since(known.max(ctx.now)) >= REPEAT;
        let known = self.forgotten.unwrap_or(Time::ZERO);
        if anew || more && until.is_some_and(|until| longer(until, known)) {
            self.end_told.by = Some(from);
        }
        self.forgotten = match anew {
            true => until,
            false => self.forgotten.max(until.filter(|_| more)),
        };
        self.dropped.retain(|_, d| d.by != Some(from));
        let stopped = |n: NodeId| match n == ctx.me() {
            true => self.has_ended_here(of),
            false => self.stopped.contains(&n) || ctx.peers.lost(n) == Some(true),
        };
        let waited: Vec<_> = nodes.iter().filter(|(n, _)| !stopped(*n)).collect();
        for (node, ms) in waited {
            let (of, until, by, head) = (of.unwrap_or(Digest::ZERO), after(*ms), Some(from), None);
            let known = self.dropped.entry(*node);
            let known = known.or_insert(Dropped {
                of,
                head,
                by,
                until,
            });
            if longer(until, known.until) {
                known.by = known.by.and(by);
            }
            known.until = known.until.max(until);
        }
    }

    /// Those that heard of the end from here hear of the wait.
    fn pass_held_on(&mut self, ctx: &Ctx<'_>, from: Option<NodeId>) {
        let to = self.end_told.to.iter().copied();
        self.say_held(ctx, to.filter(|n| Some(*n) != from).collect());
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

    /// The nodes that were dropped and may still train, and until when.
    pub(super) fn waited_for(&self, ctx: &Ctx<'_>) -> impl Iterator<Item = (NodeId, Time)> {
        let dropped = self.dropped.iter();
        let waits = |n: NodeId, d: &Dropped| ctx.now < d.until && ctx.peers.lost(n) != Some(true);
        dropped
            .filter(move |(n, d)| waits(**n, d))
            .map(|(n, d)| (*n, d.until))
    }

    /// Until when a start is held back, for those who may still be training (R16).
    pub(super) fn held_until(&self, ctx: &Ctx<'_>) -> Option<Time> {
        let until = self.waited_for(ctx).map(|(_, until)| until);
        let until = until.chain(self.forgotten).max();
        until.filter(|at| ctx.now < *at && !ctx.cfg.flaws.skip_r16)
    }

    /// Where workers of a life that is over may still run, as their agents were away or cut off, and for how long; no
    /// nodes where that is not known.
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
}

fn rounded_up(left: Span) -> u32 {
    u32::try_from(left.as_millis() + u64::from(left > Span::ZERO)).unwrap_or(u32::MAX)
}
