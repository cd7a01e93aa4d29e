//! How a job is born (R2): the agent at which launchers gather proposes the first generation to all its members at
//! once, and decides it when every one of them has bound itself to it.
//!
//! Only the proposer counts the answers, and only it decides; a birth that it abandons can never be
//! decided. So two births that share a member are never both decided, short of the proposer being
//! lost at the wrong moment; for that case a member leaves an undecided birth after
//! `birth_timeout`, and `merge` brings together what may come of it.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::gathering::Held;
use super::member::Local;
use super::{Ctx, Job, REPEAT};
use crate::agent::Notice;
use crate::ids::{Digest, LauncherId, NodeId};
use crate::ranks;
use crate::record::{Arbiter, Cause, Kind, Member, Record, Voter, WITNESSED_VOTERS};
use crate::time::{Span, Time};
use crate::wire::JobMessage;

/// Births that this agent remembers to have proposed.
const MOST_MADE: usize = 8;

/// Births that this agent proposes, or is bound to.
#[derive(Clone, Debug, Default)]
pub(super) struct Births {
    pub(super) under_way: Option<Birth>,
    /// When one was last handed to its first member to be claimed.
    pub(super) claim_asked: Option<Time>,
    /// Members of the births that were proposed last, and when first: any of them may be decided. With their launchers
    /// they are no other birth's.
    made: Vec<(Vec<Member>, Time)>,
    /// None is proposed before.
    not_before: Time,
    /// None was proposed so far for workers of the life before.
    held: bool,
    /// When this agent bound itself to an undecided one.
    bound_at: Option<Time>,
    bound_asked: bool,
}

impl Births {
    /// A generation was decided.
    pub(super) fn is_over(&mut self) {
        (self.under_way, self.held) = (None, false);
    }

    fn remember(&mut self, record: &Record, at: Time) {
        self.made.retain(|(members, _)| *members != record.members);
        let most = self.made.len().saturating_sub(MOST_MADE - 1);
        self.made.drain(..most);
        self.made.push((record.members.clone(), at));
    }

    /// Since when this agent has proposed a birth of these members, if this generation is one.
    pub(super) fn made(&self, record: &Record) -> Option<Time> {
        let mut made = self.made.iter();
        let made = made.find(|(members, _)| record.number == 1 && record.members == *members);
        made.map(|(_, at)| *at)
    }

    /// The life that is proposed here.
    pub(super) fn proposes(&self) -> Option<Digest> {
        self.under_way.as_ref().map(|b| b.lineage)
    }
}

/// A birth under way.
#[derive(Clone, Debug)]
pub(super) struct Birth {
    record: Arc<Record>,
    lineage: Digest,
    accepted: BTreeSet<NodeId>,
    since: Time,
    said: Time,
}

impl Job {
    pub(super) fn drive_birth(&mut self, ctx: &mut Ctx<'_>) {
        let now = ctx.now;
        self.drop_void_tickets(ctx);
        self.drive_continues(ctx);
        self.drive_bound(ctx);
        if self.live().is_some() && !self.is_leaderless(ctx) {
            return;
        }
        if self.births.under_way.is_some() {
            return self.drive_proposed(ctx);
        }
        if self.gathering.tickets.is_empty() || self.abstains() {
            return;
        }
        self.wake_at(now + REPEAT, "look at the tickets");
        let unsure = self.awaits_word_of_end(ctx);
        if self.joins_successor(ctx) {
            return;
        }
        let Some(first) = self.gathering.tickets.values().min_by_key(|h| h.first) else {
            return;
        };
        let (spec, came) = (first.ticket.spec.clone(), first.first);
        let have = self.eligible(ctx).count();
        // An operator's word replaces the quorum.
        let least = match self.durable.continues {
            Some(_) => spec.min_nodes,
            None => spec.birth_nodes(),
        };
        let few = have < usize::from(least);
        let gathers = came + spec.form_quiet();
        self.gathering.waits = few && now >= gathers || now >= came + REPEAT.times(2);
        if few {
            if now < gathers {
                self.wake_at(gathers, "others should know of these launchers");
            }
            return;
        }
        let held = self.others_train_until(ctx);
        if held.is_none() && std::mem::take(&mut self.births.held) {
            // The nodes that were waited for may come back at once.
            self.gathering.last_new = now;
        }
        self.births.held = held.is_some();
        let nodes = self.eligible(ctx).map(|h| h.ticket.member.node).collect();
        let awaited = self.awaits_newcomers(ctx, nodes, usize::from(spec.max_nodes));
        let quiet = self.gathering.last_new + spec.form_quiet();
        if have < usize::from(spec.max_nodes) && now < quiet {
            self.wake_at(quiet, "quiet before forming");
            return;
        }
        if let Some(at) = held {
            return self.wake_at(at, "workers of the life before");
        }
        if unsure {
            return;
        }
        if now < self.births.not_before {
            return self.wake_at(self.births.not_before, "another birth");
        }
        // One that was asked for before the newest node came holds nothing up: that life may have ended since.
        // Beyond as many as fit it would be the same one.
        let more = have <= usize::from(spec.max_nodes);
        let asked = self.births.claim_asked;
        let asked = asked.filter(|at| *at >= self.gathering.last_new || !more);
        if let Some(at) = asked.map(|at| at + REPEAT)
            && now < at
        {
            return self.wake_at(at, "a birth without a claim");
        }
        // Some of those that waited in the life before may have asked for another specification.
        if self.refuse_unlike(ctx) || awaited {
            return;
        }
        self.phases = crate::agent::Phases {
            fault: came,
            detected: now,
            ..Default::default()
        };
        self.propose_birth(ctx, spec, least);
    }

    /// Until when somebody of the life before may still be training, as those say who are here.
    pub(super) fn others_train_until(&self, ctx: &Ctx<'_>) -> Option<Time> {
        let most = ctx.peers.timeouts().max(self.timeouts(ctx));
        let most = Span(most.agent_grace.0.saturating_add(most.suspect_after.0));
        let tickets = self.gathering.tickets.values();
        let until = tickets.map(|h| {
            let held = Span::from_millis(h.ticket.held_ms.into());
            h.renewed + held.min(most)
        });
        // This agent may know of one, and have no launcher itself.
        let here = self.held_until(ctx).filter(|_| self.live().is_none());
        until
            .chain(here)
            .max()
            .filter(|at| ctx.now < *at && !ctx.cfg.flaws.skip_r16)
    }

    fn propose_birth(&mut self, ctx: &mut Ctx<'_>, spec: crate::spec::JobSpec, least: u16) {
        let there = |h: &&Held| self.was_there(ctx, h);
        let mut held: Vec<&Held> = self.eligible(ctx).filter(there).collect();
        if held.len() < usize::from(least) {
            // Those that say nothing are soon forgotten.
            return;
        }
        held.sort_by_key(|h| (h.first, h.ticket.member.node));
        held.truncate(usize::from(spec.max_nodes));
        let stores: BTreeSet<_> = held.iter().map(|h| h.ticket.store).collect();
        let arbiter = match stores.first() {
            Some(Some(uuid)) if stores.len() == 1 => Arbiter::Store(*uuid),
            _ => Arbiter::Members,
        };
        let joiners: Vec<Member> = held.iter().map(|h| h.ticket.member.clone()).collect();
        let members = ranks::order(&[], &joiners);
        let witnesses = match arbiter {
            Arbiter::Members => self.witnesses(ctx, &members, &[], &[]),
            Arbiter::Store(_) => Vec::new(),
        };
        let (parent, cause) = match &self.durable.continues {
            Some(from) => {
                let nodes = from.without.clone();
                (from.parent, Cause::Continued { nodes })
            }
            None => (self.head_digest(), Cause::Formed),
        };
        let record = Arc::new(Record {
            key: self.key.clone(),
            birth: Digest::ZERO,
            number: 1,
            parent,
            kind: Kind::Next,
            members,
            witnesses,
            arbiter,
            spec,
            restarts_used: 0,
            cause,
            restore: None,
            nonce: ctx.rng.next_u64(),
        });
        self.asks_no_more();
        if self.births.made(&record).is_none() {
            self.births.remember(&record, ctx.now);
        }
        if let Arbiter::Store(_) = arbiter {
            let Some(first) = record.leader() else { return };
            self.births.claim_asked = Some(ctx.now);
            self.send(ctx, first, JobMessage::ClaimBirth { record });
            return;
        }
        let lineage = record.digest();
        self.births.under_way = Some(Birth {
            record,
            lineage,
            accepted: BTreeSet::new(),
            since: ctx.now,
            said: Time::ZERO,
        });
        self.drive_proposed(ctx);
    }

    /// Nothing but the members decides: two groups that do not see each other may both form the job.
    pub(super) fn warn_of_twins(&mut self, record: &Record) {
        let spec = &record.spec;
        if record.arbiter == Arbiter::Members && spec.may_form_twice(spec.max_nodes) {
            let text = format!(
                "{} of at most {} nodes may form this job, so two groups that cannot reach each other \
                 could each start it: name a directory that all share with --store, list all nodes and \
                 add --birth-quorum, or raise the minimum of --nnodes",
                spec.birth_nodes(),
                spec.max_nodes
            );
            let key = self.key.clone();
            self.notice(Notice::Warning { key, text });
        }
    }

    /// Voters that fill a small job up (R4): those that were, then other connected agents, the nearest to the job
    /// first. Those that can store no vote come last. A node that leaves is one only where its agent stays and two
    /// members remain: one alone decides with its own vote out of two (`is_majority`), and is better off without
    /// voters that may be switched off.
    pub(super) fn witnesses(
        &self,
        ctx: &Ctx<'_>,
        members: &[Member],
        before: &[Voter],
        leaving: &[NodeId],
    ) -> Vec<Voter> {
        let wanted = WITNESSED_VOTERS.saturating_sub(members.len());
        if wanted == 0 {
            return Vec::new();
        }
        let member = |n: NodeId| members.iter().any(|m| m.node == n);
        let up = |v: &Voter| {
            (ctx.voter() == *v && !ctx.draining)
                || ctx.peers.get(v.node).is_some_and(|p| {
                    p.connected
                        && p.leaves(ctx.now, ctx.cfg.suspect_after).is_none()
                        && p.state_dir() == Some(v.state)
                })
        };
        let others = ctx.peers.map.iter().filter_map(|(node, p)| {
            let state = p.state_dir()?;
            Some(Voter { node: *node, state })
        });
        let (distance, mut others) = (self.key.distance(), others.collect::<Vec<_>>());
        others.sort_by_key(|v| distance(v.node));
        let (mut out, mut unstored): (Vec<Voter>, Vec<Voter>) = Default::default();
        for v in before.iter().copied().chain([ctx.voter()]).chain(others) {
            let goes = leaving.contains(&v.node) && (members.len() == 1 || ctx.goes(v.node));
            let list = match self.is_unstored(ctx, v.node) {
                true => &mut unstored,
                false => &mut out,
            };
            if list.len() < wanted && up(&v) && !member(v.node) && !goes && !list.contains(&v) {
                list.push(v);
            }
        }
        out.extend(unstored);
        out.truncate(wanted);
        out
    }

    /// Says an undecided birth again, gives it up when somebody does not answer, and decides it
    /// when all have.
    fn drive_proposed(&mut self, ctx: &mut Ctx<'_>) {
        let Some(birth) = &self.births.under_way else {
            return;
        };
        let record = birth.record.clone();
        let missing: Vec<NodeId> = record
            .members
            .iter()
            .map(|m| m.node)
            .filter(|n| !birth.accepted.contains(n))
            .collect();
        if missing.is_empty() {
            self.births.under_way = None;
            return self.decided(ctx, &record, true);
        }
        let half = crate::time::Span(ctx.cfg.birth_timeout.0 / 2);
        let give_up = birth.since + half;
        let gone = |n: &&NodeId| !ctx.reachable(**n) || self.is_unstored(ctx, **n);
        let gone: Vec<NodeId> = missing.iter().filter(gone).copied().collect();
        if ctx.now >= give_up || !gone.is_empty() {
            let silent = if gone.is_empty() { missing } else { gone };
            for node in &silent {
                self.gathering.tickets.remove(node);
            }
            self.abandon_birth(ctx);
            return self.pause_births(ctx);
        }
        let Some(birth) = &mut self.births.under_way else {
            return;
        };
        let again = birth.said + REPEAT;
        if birth.said == Time::ZERO || ctx.now >= again {
            let first_time = birth.said == Time::ZERO;
            birth.said = ctx.now;
            let witnesses = record.witnesses.iter().map(|w| w.node);
            for node in missing
                .iter()
                .copied()
                .chain(witnesses.filter(|_| first_time))
            {
                let record = record.clone();
                self.send(ctx, node, JobMessage::Birth { record });
            }
        }
        self.wake_at((ctx.now + REPEAT).min(give_up), "a birth without answers");
    }

    fn abandon_birth(&mut self, ctx: &mut Ctx<'_>) {
        let Some(birth) = self.births.under_way.take() else {
            return;
        };
        for voter in birth.record.voters().collect::<Vec<_>>() {
            let lineage = birth.lineage;
            self.send(ctx, voter.node, JobMessage::BirthAbandoned { lineage });
        }
        for m in birth.record.members.iter().skip(crate::record::MAX_VOTERS) {
            let lineage = birth.lineage;
            self.send(ctx, m.node, JobMessage::BirthAbandoned { lineage });
        }
    }

    /// Two proposers that got into each other's way try again at different times.
    pub(super) fn pause_births(&mut self, ctx: &mut Ctx<'_>) {
        let pause = ctx.rng.below(ctx.cfg.birth_timeout.0 / 2);
        self.births.not_before = ctx.now + crate::time::Span(pause);
        self.wake_at(self.births.not_before, "another birth");
    }

    /// Abandons the birth that is being proposed here, and frees this agent from it at once.
    pub(super) fn withdraw_birth(&mut self, ctx: &mut Ctx<'_>) {
        let Some(lineage) = self.births.under_way.as_ref().map(|b| b.lineage) else {
            return;
        };
        self.abandon_birth(ctx);
        self.on_birth_abandoned(ctx, lineage);
    }

    /// The launcher here, if it can take part in a life that begins.
    pub(super) fn launcher_to_join(&self) -> Option<LauncherId> {
        let stays = |l: &&Local| l.conn.is_some() && l.leave.is_none() && l.over.is_none();
        self.local.as_ref().filter(stays).map(|l| l.reg.launcher)
    }

    /// A proposer asks this agent to bind itself.
    pub(super) fn on_birth(&mut self, ctx: &mut Ctx<'_>, from: NodeId, record: Arc<Record>) {
        let lineage = record.digest();
        if record.number != 1 || record.arbiter != Arbiter::Members || self.abstains() {
            return;
        }
        if let Some(head) = self.live() {
            let bound = head.record.lineage();
            let body = if bound == lineage {
                JobMessage::BirthAccepted { lineage }
            } else {
                JobMessage::BirthRefused { lineage, bound }
            };
            return self.send(ctx, from, body);
        }
        let mine = match record.member(ctx.me()) {
            Some(m) => m.state == ctx.cfg.state && self.launcher_to_join() == Some(m.launcher),
            None => record.is_voter(ctx.voter()),
        };
        let bound = self.durable.bound.as_ref();
        let replaced = bound.filter(|bound| mine && self.is_outlived(ctx, bound, &record));
        if let Some(old) = replaced.map(|bound| bound.digest()) {
            match self
                .births
                .under_way
                .as_ref()
                .is_some_and(|b| b.lineage == old)
            {
                true => self.withdraw_birth(ctx),
                false => self.unbind(ctx),
            }
        }
        if let Some(bound) = self.durable.bound.as_ref().map(|b| b.digest()) {
            let body = if bound == lineage {
                JobMessage::BirthAccepted { lineage }
            } else {
                JobMessage::BirthRefused { lineage, bound }
            };
            return self.send(ctx, from, body);
        }
        let continued = matches!(record.cause, Cause::Continued { .. });
        if self.head_digest() != record.parent && !(continued && self.head.is_none()) {
            self.compare_ends(ctx, from, record.parent);
            return self.came_early(ctx, from, record.parent, JobMessage::Birth { record });
        }
        if !mine {
            let bound = Digest::ZERO;
            return self.send(ctx, from, JobMessage::BirthRefused { lineage, bound });
        }
        if self.held_until(ctx).is_some() {
            // The one that proposes it may not know of those that are waited for.
            self.say_held(ctx, vec![from]);
            return self.came_early(ctx, from, record.parent, JobMessage::Birth { record });
        }
        self.durable.bound = Some(record);
        self.births.bound_at = Some(ctx.now);
        self.births.bound_asked = false;
        if self.is_stored(ctx) {
            self.send(ctx, from, JobMessage::BirthAccepted { lineage });
        }
    }

    pub(super) fn on_birth_accepted(&mut self, ctx: &mut Ctx<'_>, from: NodeId, lineage: Digest) {
        if let Some(birth) = &mut self.births.under_way
            && birth.lineage == lineage
        {
            birth.accepted.insert(from);
            self.wake_at(ctx.now, "a birth was accepted");
        }
    }

    pub(super) fn on_birth_refused(
        &mut self,
        ctx: &mut Ctx<'_>,
        from: NodeId,
        lineage: Digest,
        bound: Digest,
    ) {
        let Some(birth) = self
            .births
            .under_way
            .as_ref()
            .filter(|b| b.lineage == lineage)
        else {
            return;
        };
        if birth.record.has(from) {
            self.gathering.tickets.remove(&from);
            self.abandon_birth(ctx);
            self.pause_births(ctx);
            if !bound.is_zero() {
                let have = self.head_digest();
                self.send(ctx, from, JobMessage::Ask { have });
            }
        }
    }

    pub(super) fn on_birth_abandoned(&mut self, ctx: &mut Ctx<'_>, lineage: Digest) {
        self.forget_early_birth(lineage);
        let bound = self.durable.bound.as_ref().map(|b| b.digest());
        if bound == Some(lineage) {
            self.unbind(ctx);
        }
    }

    fn unbind(&mut self, ctx: &mut Ctx<'_>) {
        self.durable.bound = None;
        self.births.bound_at = None;
        self.persist(ctx);
        self.wake_at(ctx.now, "free for another birth");
    }

    /// Whether nobody is left that could train in a birth whose outcome is unknown: each of its nodes has another
    /// launcher in `by`, is dead, or is not there once the proposer must have decided or given up. So it does not
    /// matter whether it was decided. The launcher here tells which of the two is the newer one.
    fn is_outlived(&self, ctx: &Ctx<'_>, bound: &Record, by: &Record) -> bool {
        let mine = bound.member(ctx.me()).map(|m| m.launcher);
        let half = Span(ctx.cfg.birth_timeout.0 / 2);
        let waited = (self.births.bound_at).is_some_and(|since| ctx.now >= since + half);
        let dead =
            |m: &Member| ctx.peers.lost(m.node) == Some(true) || waited && !ctx.reachable(m.node);
        let another = |m: &Member| by.member(m.node).map(|other| other.launcher != m.launcher);
        let mut members = bound.members.iter();
        mine.is_some_and(|launcher| self.launcher_to_join() != Some(launcher))
            && members.all(|m| another(m).unwrap_or_else(|| dead(m)))
    }

    /// Leaves a birth whose outcome stays unknown, after asking all its members.
    fn drive_bound(&mut self, ctx: &mut Ctx<'_>) {
        let Some(record) = self.durable.bound.clone() else {
            return;
        };
        let since = *self.births.bound_at.get_or_insert(ctx.now);
        let (ask, leave) = (
            since + ctx.cfg.birth_timeout,
            since + ctx.cfg.birth_timeout.times(2),
        );
        if ctx.now >= leave {
            return self.unbind(ctx);
        }
        if ctx.now >= ask && !self.births.bound_asked {
            self.births.bound_asked = true;
            let have = self.head_digest();
            for m in &record.members {
                if m.node != ctx.me() {
                    self.send(ctx, m.node, JobMessage::Ask { have });
                }
            }
        }
        let next = if ctx.now < ask { ask } else { leave };
        self.wake_at(next, "an undecided birth");
    }

    /// Tells everybody concerned that `record` is decided, ourselves included.
    pub(super) fn decided(&mut self, ctx: &mut Ctx<'_>, record: &Arc<Record>, birth: bool) {
        if birth {
            // Nobody else decides it, so that its life has not ended: whoever has asked here by now came in time.
            self.births.remember(record, ctx.now);
        }
        let mut told: BTreeSet<NodeId> = record.voters().map(|v| v.node).collect();
        told.extend(record.members.iter().map(|m| m.node));
        if !birth && let Some(before) = &self.head {
            told.extend(before.voting().voters().map(|v| v.node));
            told.extend(before.record.voters().map(|v| v.node));
            told.extend(before.record.members.iter().map(|m| m.node));
        }
        if record.kind.is_terminal() {
            // Spares leave with the job.
            told.extend(self.gathering.tickets.keys().copied());
        }
        told.remove(&ctx.me());
        for node in told {
            let record = record.clone();
            self.send(ctx, node, JobMessage::Decided { record });
        }
        let concerns_me = record.has(ctx.me()) || record.is_voter(ctx.voter());
        if !birth || concerns_me {
            self.decides = Some(record.nonce);
            self.install(ctx, record.clone());
            self.tell_held(ctx, record);
        } else {
            self.tell_those_without_place(ctx, record);
            self.gathering.tickets.clear();
        }
    }
}
