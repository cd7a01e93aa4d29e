//! Words between agents on how long a start waits for nodes that may still train (R16): after a change to those that may
//! not know, after an end to all, for any node may begin the next life.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use super::{Ctx, Head, Job, REPEAT};
use crate::ids::{Digest, NodeId};
use crate::record::{Arbiter, Kind, Record};
use crate::time::{Span, Time};
use crate::wire::{JobMessage, MAX_LIST};

/// Most agents that are asked for how long a start waits after an end.
const MOST_ASKED: usize = 8;

/// The words of other agents on the wait for nodes that may still train, and how far they went on from here.
#[derive(Clone, Debug, Default)]
pub(super) struct Words {
    /// The newest of each agent: it replaces the ones before. This agent's own is what the run before it stored.
    newest: BTreeMap<NodeId, Word>,
    /// The agent whose word goes on from here. Those of others do not: words would go round.
    first: Option<NodeId>,
    /// Nodes that have stopped, by their own word or by that of one that waited for them.
    stopped: BTreeSet<NodeId>,
    /// Those that heard of the end from this agent, and hear of the wait from it.
    to: BTreeSet<NodeId>,
    /// The end of the wait as they were told last.
    said: Option<Time>,
    /// Since when this agent knows of the head.
    since: Time,
    /// Those that this agent asked for how long to wait, and when.
    asked: BTreeMap<NodeId, Time>,
}

/// The word of one agent: until when a start waits, for each node, or as a whole where it did not say for whom.
#[derive(Clone, Debug)]
struct Word {
    until: Time,
    nodes: BTreeMap<NodeId, Time>,
}

impl Word {
    fn until(&self, waited: impl Fn(NodeId) -> bool) -> Option<Time> {
        let named = self.nodes.iter().filter(|(n, _)| waited(**n));
        match self.nodes.is_empty() {
            true => Some(self.until),
            false => named.map(|(_, until)| *until).max(),
        }
    }
}

impl Words {
    /// Another head: what was said of nodes that are no members, and have not `stopped`, holds on.
    pub(super) fn of_head(&mut self, record: &Record, stopped: &BTreeSet<NodeId>, now: Time) {
        let mut newest = std::mem::take(&mut self.newest);
        let over = |n: &NodeId| self.stopped.contains(n) || stopped.contains(n) || record.has(*n);
        for word in newest.values_mut().filter(|w| !w.nodes.is_empty()) {
            word.nodes.retain(|n, _| !over(n));
            word.until = word.nodes.values().copied().max().unwrap_or(Time::ZERO);
        }
        newest.retain(|_, w| now < w.until);
        let (first, since) = (self.first, now);
        *self = Words {
            newest,
            first,
            since,
            ..Words::default()
        };
    }

    /// This agent knows of the head since then.
    pub(super) fn since(&mut self, now: Time) {
        self.since = now;
    }

    /// No start waits any more.
    pub(super) fn clear(&mut self) {
        self.newest.clear();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.newest.is_empty()
    }

    /// Drops what is over, and says when more will be.
    pub(super) fn expire(&mut self, now: Time) -> Option<Time> {
        self.newest.retain(|_, w| now < w.until);
        self.newest.values().map(|w| w.until).min()
    }

    /// No wait is over before this time. Whether some word changes by more than `much`.
    pub(super) fn lengthen(&mut self, to: Time, much: Span) -> bool {
        let mut longer = false;
        for word in self.newest.values_mut() {
            longer |= to > word.until + much;
            word.until = word.until.max(to);
            for until in word.nodes.values_mut() {
                longer |= to > *until + much;
                *until = to.max(*until);
            }
        }
        longer
    }

    /// The nodes that others wait for, as far as they named them, and the end of all waits.
    pub(super) fn left(&self, now: Time) -> (BTreeSet<NodeId>, Option<Time>) {
        let waited = |n: NodeId| !self.stopped.contains(&n);
        let until = self.newest.values().filter_map(|w| w.until(waited)).max();
        let named = self.newest.values().flat_map(|w| &w.nodes);
        let named = named.filter(|(n, until)| waited(**n) && now < **until);
        (named.map(|(n, _)| *n).collect(), until)
    }

    /// One more word of an agent, beside those before.
    fn add(&mut self, teller: NodeId, word: Word) {
        let Some(before) = self.newest.get_mut(&teller) else {
            self.newest.insert(teller, word);
            return;
        };
        let named = !(before.nodes.is_empty() || word.nodes.is_empty());
        before.until = before.until.max(word.until);
        for (node, until) in word.nodes {
            let known = before.nodes.entry(node).or_insert(until);
            *known = until.max(*known);
        }
        if !named {
            before.nodes.clear();
        }
    }

    /// A node says that its workers have ended. Whether somebody waits for it.
    fn has_stopped(&mut self, node: NodeId) -> bool {
        self.name(node) && self.stopped.insert(node)
    }

    /// Whether some word names this node.
    fn name(&self, node: NodeId) -> bool {
        self.newest.values().any(|w| w.nodes.contains_key(&node))
    }
}

impl Job {
    /// Until when a start waits by the words of others: of all that spoke, or of this one.
    pub(super) fn told_until(&self, ctx: &Ctx<'_>, of: Option<NodeId>) -> Option<Time> {
        let words = self.words.newest.iter();
        let words = words.filter(|(teller, _)| of.is_none_or(|of| of == **teller));
        let waited = |n| self.is_waited_as_told(ctx, n);
        words.filter_map(|(_, w)| w.until(waited)).max()
    }

    fn is_waited_as_told(&self, ctx: &Ctx<'_>, node: NodeId) -> bool {
        let stopped = self.words.stopped.contains(&node) || self.stopped.contains(&node);
        let here = node == ctx.me() && self.has_ended_here();
        !(stopped || here || ctx.peers.lost(node) == Some(true))
    }

    /// For how long a start of the head waits, as things stand.
    pub(super) fn held_ms(&self, ctx: &Ctx<'_>) -> u32 {
        let until = self.held_until(ctx);
        rounded_up(until.map_or(Span::ZERO, |at| at.since(ctx.now)))
    }

    /// One that restarts waits as long as things stand now.
    pub(super) fn store_wait(&mut self, ctx: &mut Ctx<'_>) {
        self.hold(ctx);
        self.persist(ctx);
    }

    pub(super) fn hold(&mut self, ctx: &Ctx<'_>) {
        let (ms, nodes) = (self.held_ms(ctx), self.names_of_held(ctx));
        self.durable.hold(ms, nodes, ctx.now);
    }

    /// Takes up the wait that the run of this agent before this one stored.
    pub(super) fn recall_wait(&mut self, ctx: &Ctx<'_>) {
        let left = self.durable.held(ctx.now);
        if left == Span::ZERO {
            return;
        }
        let until = ctx.now + left;
        let nodes = self.durable.held_each(ctx.now);
        let nodes: BTreeMap<_, _> = nodes.map(|(node, left)| (node, ctx.now + left)).collect();
        if nodes.is_empty() {
            self.forgotten = Some(until);
        } else {
            self.words.newest.insert(ctx.me(), Word { until, nodes });
        }
    }

    /// For whom a start of the head waits, in milliseconds from now; none where somebody may be among them who is not
    /// known.
    fn names_of_held(&self, ctx: &Ctx<'_>) -> Vec<(NodeId, u32)> {
        let words = self.words.newest.values();
        let mut words = words.filter(|w| ctx.now < w.until);
        let forgot = self.forgotten.is_some_and(|at| ctx.now < at);
        let unknown = self.unknown || forgot || words.any(|w| w.nodes.is_empty());
        let tellers = self.words.newest.keys();
        let told = tellers.flat_map(|teller| self.named(ctx, *teller));
        match unknown {
            true => Vec::new(),
            false => self.with_dropped(ctx, told),
        }
    }

    /// For whom this teller said that a start waits.
    fn named(&self, ctx: &Ctx<'_>, teller: NodeId) -> impl Iterator<Item = (NodeId, Time)> {
        let word = self.words.newest.get(&teller);
        let nodes = word.into_iter().flat_map(|w| &w.nodes);
        let nodes = nodes.map(|(node, until)| (*node, *until));
        nodes.filter(|(n, until)| ctx.now < *until && self.is_waited_as_told(ctx, *n))
    }

    /// Those, and those that this agent knows by itself; none if they are too many for a list.
    fn with_dropped(
        &self,
        ctx: &Ctx<'_>,
        told: impl Iterator<Item = (NodeId, Time)>,
    ) -> Vec<(NodeId, u32)> {
        let mut nodes: BTreeMap<NodeId, Time> = BTreeMap::new();
        for (node, until) in told.chain(self.waited_for(ctx)) {
            let known = nodes.entry(node).or_insert(until);
            *known = until.max(*known);
        }
        if nodes.len() > MAX_LIST {
            return Vec::new();
        }
        let nodes = nodes.into_iter();
        nodes
            .map(|(node, until)| (node, rounded_up(until.since(ctx.now))))
            .collect()
    }

    /// The word on the wait that goes to an agent: the waits that this one knows by itself, and the word that goes on from
    /// here, but not to where it came from. None where that alone is to be said.
    fn word_to(&self, ctx: &Ctx<'_>, to: NodeId) -> Option<(u32, Vec<(NodeId, u32)>)> {
        let own = self.own_wait(ctx);
        let first = self
            .words
            .first
            .filter(|f| self.words.newest.contains_key(f));
        if first == Some(to) && own.is_none() {
            return None;
        }
        let first = first.filter(|f| *f != to);
        let told = first.and_then(|f| self.told_until(ctx, Some(f)));
        let until = own.max(told).filter(|_| !ctx.cfg.flaws.skip_r16);
        let word = first.and_then(|f| self.words.newest.get(&f));
        let named = word.is_none_or(|w| !w.nodes.is_empty());
        let known = self.forgotten.is_none_or(|at| ctx.now >= at) && named;
        let tellers = first.into_iter().chain([ctx.me()]);
        let told = tellers.flat_map(|teller| self.named(ctx, teller));
        let nodes = match known {
            true => self.with_dropped(ctx, told),
            false => Vec::new(),
        };
        Some((until.map_or(0, |at| rounded_up(at.since(ctx.now))), nodes))
    }

    pub(super) fn say_held(&mut self, ctx: &Ctx<'_>, to: Vec<NodeId>) {
        let digest = self.head_digest();
        for node in to.into_iter().filter(|n| *n != ctx.me()) {
            if let Some((ms, nodes)) = self.word_to(ctx, node) {
                self.send(ctx, node, JobMessage::Held { digest, ms, nodes });
            }
        }
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
        for node in ctx.peers.connected_nodes().collect::<Vec<_>>() {
            self.tell_waited_end(ctx, node);
        }
    }

    /// The end after which a start has to wait, and for how long, to one that perhaps knows nothing of that life: it may
    /// begin the next when all that know have gone.
    pub(super) fn tell_waited_end(&mut self, ctx: &Ctx<'_>, to: NodeId) {
        let merged = |kind: Kind| matches!(kind, Kind::Tombstone { .. });
        let head = self.head.as_ref().map(|h| h.record.clone());
        let head = head.filter(|r| r.kind.is_terminal() && !self.unknown);
        let word = head.and_then(|record| Some((record, self.word_to(ctx, to)?)));
        let Some((record, _)) = word.filter(|(_, (ms, _))| *ms > 0) else {
            return;
        };
        if !merged(record.kind) {
            let body = match self.durable.ended.last().map(|e| e.digest()) {
                Some(have) => JobMessage::Follows { have, record },
                None => JobMessage::Decided { record },
            };
            self.send(ctx, to, body);
        }
        self.say_held(ctx, vec![to]);
    }

    /// A peer said hello, the first time on its connection or again.
    pub(super) fn greet_with_wait(&mut self, ctx: &Ctx<'_>, to: NodeId, came: bool) {
        if self.live().is_some() {
            return;
        }
        if came {
            self.tell_waited_end(ctx, to);
        }
        // After an end for which nobody waits those hear that took part, and others as they ask.
        if self.knew_life() {
            self.repeat_held(ctx, to);
        } else if came && self.head.is_some() {
            self.words.to.insert(to);
        }
    }

    /// One that was not there when the head was decided hears how long a start has to wait, where this agent knows.
    pub(super) fn repeat_held(&mut self, ctx: &Ctx<'_>, to: NodeId) {
        let ended = self.head.is_some() && self.live().is_none();
        if ended {
            // The one that tells this agent of the wait may not reach it, and it may begin the next life at once.
            self.words.to.retain(|n| ctx.peers.connected(*n));
            self.words.to.insert(to);
        }
        if !self.unknown && self.head.is_some() {
            self.tell_part(ctx, to);
            self.say_held(ctx, vec![to]);
        }
    }

    /// A node that is waited for may have missed the last generation before the end: it learns of its part there, and
    /// says what became of that.
    fn tell_part(&mut self, ctx: &Ctx<'_>, to: NodeId) {
        let end = self.head.as_ref().filter(|h| h.record.kind.is_terminal());
        let parent = end.map(|h| h.record.parent);
        let before = self.before.as_ref();
        let before = before.filter(|b| Some(b.digest) == parent && b.has(to));
        let waits = self.words.name(to) || self.waited_for(ctx).any(|(node, _)| node == to);
        if let Some(before) = before.filter(|_| waits) {
            let record = before.record.clone();
            self.send(ctx, to, JobMessage::Decided { record });
        }
    }

    /// Of an end, to all: any node may begin the next life.
    pub(super) fn say_end_held(&mut self, ctx: &Ctx<'_>) {
        if self.live().is_none() && !self.unknown {
            self.say_held(ctx, ctx.peers.connected_nodes().collect());
        }
    }

    /// A node that others wait for says that its workers have ended: of the generation that the head follows, or all, for
    /// its launcher is `gone`.
    pub(super) fn told_has_stopped(
        &mut self,
        ctx: &mut Ctx<'_>,
        node: NodeId,
        of: Digest,
        gone: bool,
    ) {
        let last = self.head.as_ref().map(|h| h.record.parent);
        // Nothing of a node that has no part in the generation between is newer.
        let between = self.before.as_ref().filter(|b| Some(b.digest) == last);
        let between = between.filter(|b| !b.has(node));
        let earlier = between.map(|b| b.record.parent);
        let last = [last, earlier].contains(&Some(of));
        if (gone || last) && self.words.has_stopped(node) {
            self.pass_held_on(ctx, None);
            self.store_wait(ctx);
        }
    }

    /// Those that heard of the end from here hear of a change in the wait. The same word takes longer on one way than on
    /// another. Nodes that pass such differences on to each other would do so without end, and wait longer each time.
    fn pass_held_on(&mut self, ctx: &Ctx<'_>, from: Option<NodeId>) {
        let first = self.words.first;
        let told = first.and_then(|f| self.told_until(ctx, Some(f)));
        let until = self.own_wait(ctx).max(told).unwrap_or(ctx.now);
        let differ = |at: Time| at.since(until).max(until.since(at)) >= REPEAT;
        let over = |at: Time| at <= ctx.now && until <= ctx.now;
        let news = self.words.said.is_none_or(|at| differ(at) && !over(at));
        if news && self.live().is_none() {
            self.words.said = Some(until);
            let to = self.words.to.iter().copied();
            self.say_held(ctx, to.filter(|n| Some(*n) != from).collect());
        }
    }

    pub(super) fn on_held(
        &mut self,
        ctx: &mut Ctx<'_>,
        from: NodeId,
        digest: Digest,
        ms: u32,
        nodes: &[(NodeId, u32)],
    ) {
        if self.unsure_of == Some(digest) {
            return self.learn_late(ctx, from, ms, nodes);
        }
        if digest != self.head_digest() {
            return;
        }
        let ended = self.live().is_none();
        let unknown = std::mem::take(&mut self.unknown);
        if unknown {
            self.words.newest.clear();
            if ended {
                // It knows which of those have stopped since, but for the workers here.
                self.dropped.retain(|node, _| *node == ctx.me());
            }
        }
        let replaces = self.forget_estimates(ctx, from);
        if unknown || ended && self.words.first == Some(from) {
            // For whom this agent once did not know that one knows.
            self.forgotten = None;
            self.words.newest.remove(&ctx.me());
        }
        let first = self.words.first.is_none() && ms > 0;
        if unknown || first || replaces || self.end_writer() == Some(from) {
            self.words.first = Some(from);
        }
        self.take_word(ctx, from, ms, nodes);
        self.pass_held_on(ctx, Some(from));
        // A leader that restarts waits for them, too, and no longer for what was unknown.
        let held = Span::from_millis(self.held_ms(ctx).into());
        let kept = self.durable.held(ctx.now);
        let other = kept < held || held + REPEAT < kept || unknown && kept > held;
        if other || self.has_other_names(ctx) {
            self.store_wait(ctx);
        }
    }

    /// Whether the wait for some node is not stored, or a shorter one; or all were stored by name, and one is not known
    /// any more.
    fn has_other_names(&self, ctx: &Ctx<'_>) -> bool {
        let held = self.held_until(ctx).is_some();
        let named = !self.durable.held_for.is_empty();
        let names = self.names_of_held(ctx);
        let kept: BTreeMap<NodeId, Span> = self.durable.held_each(ctx.now).collect();
        // Each is rounded up to a millisecond when it is stored.
        let rounding = Span::from_millis(1);
        let short = |(node, ms): &(NodeId, u32)| {
            let kept = kept.get(node);
            kept.is_none_or(|kept| *kept + rounding < Span::from_millis((*ms).into()))
        };
        held && (names.is_empty() == named || names.iter().any(short))
    }

    /// A word on the generation that this agent had ended before that came: it says for whom the end waits. Each of those
    /// that know may say it, and the longest counts.
    fn learn_late(&mut self, ctx: &mut Ctx<'_>, from: NodeId, ms: u32, nodes: &[(NodeId, u32)]) {
        self.forgotten = None;
        self.words.newest.remove(&ctx.me());
        let word = self.word_of(ctx, ms, nodes);
        let first = self.words.first.and_then(|f| self.words.newest.get(&f));
        if first.is_none_or(|f| f.until < word.until) {
            self.words.first = Some(from);
        }
        if ms > 0 {
            self.words.add(from, word);
        }
        self.say_end_held(ctx);
        self.store_wait(ctx);
    }

    /// That word, from now on: for no longer than workers go on without an agent.
    fn word_of(&self, ctx: &Ctx<'_>, ms: u32, nodes: &[(NodeId, u32)]) -> Word {
        let most = ctx.peers.timeouts().max(self.timeouts(ctx));
        let most = Span(most.agent_grace.0.saturating_add(most.suspect_after.0));
        let after = |ms: u32| ctx.now + Span::from_millis(ms.into()).min(most);
        let nodes: BTreeMap<NodeId, Time> = nodes.iter().map(|(n, ms)| (*n, after(*ms))).collect();
        let until = nodes.values().copied().max().unwrap_or(after(ms));
        Word { until, nodes }
    }

    /// Keeps the word of another agent, which says by itself when the wait is over.
    fn take_word(&mut self, ctx: &Ctx<'_>, from: NodeId, ms: u32, nodes: &[(NodeId, u32)]) {
        let word = self.word_of(ctx, ms, nodes);
        if self.live().is_some() {
            // What was said of those that a generation dropped holds until they have stopped.
            if ms > 0 {
                self.words.add(from, word);
            }
            return;
        }
        let before = self.words.newest.remove(&from);
        let before = before.filter(|_| ms == 0 || !word.nodes.is_empty());
        for (node, until) in before.into_iter().flat_map(|w| w.nodes) {
            // It waited for it, and does so no more before that time is over.
            if ctx.now + REPEAT < until && !word.nodes.contains_key(&node) {
                self.words.stopped.insert(node);
            }
        }
        if ms > 0 {
            self.words.newest.insert(from, word);
        }
    }

    /// An agent has just said its first word on a connection: what it was asked before it may not have heard.
    pub(super) fn ask_again(&mut self, node: NodeId) {
        self.words.asked.remove(&node);
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
        let over = self.words.since + most.agent_grace + most.suspect_after;
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
        let asked = &mut self.words.asked;
        asked.retain(|n, _| ctx.peers.connected(*n));
        for node in know {
            if let Entry::Vacant(asked) = self.words.asked.entry(node) {
                asked.insert(ctx.now);
                self.send(ctx, node, JobMessage::Ask { have });
            }
        }
        let asked = self.words.asked.values().copied();
        let newest = asked.fold(self.words.since, Time::max);
        let until = newest + Span(ctx.cfg.suspect_after.0 / 8);
        let waits = ctx.now < until;
        if waits {
            self.wake_at(until, "word of those that may still train");
        }
        waits
    }
}

fn rounded_up(left: Span) -> u32 {
    u32::try_from(left.as_millis() + u64::from(left > Span::ZERO)).unwrap_or(u32::MAX)
}
