//! This agent as a voter: promises, acceptances, acknowledged leases and commits. Every answer is
//! made durable before it is sent (R6), and none is given without record n on the disk (R5).

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Ctx, Job};
use crate::agent::Config;
use crate::ids::{Digest, NodeId};
use crate::membership::State;
use crate::record::{CommitRef, Record, Voter};
use crate::time::{Span, Time};
use crate::wire::{Ballot, Grant, JobMessage, MAX_LIST};

/// When this voter last acknowledged each member's lease.
#[derive(Clone, Debug, Default)]
pub(super) struct Leases {
    granted: BTreeMap<NodeId, Time>,
    /// The run of this agent before this one may have acknowledged anybody's until then, also in a generation that its
    /// disk did not take any more.
    recalled: Option<Time>,
}

impl Leases {
    pub(super) fn on_install(&mut self, record: &Record) {
        // Kept for those that the new generation dropped until it starts; the others begin anew.
        self.granted.retain(|node, _| !record.has(*node));
    }
}

impl Job {
    /// Whether this agent may vote on what follows `parent`; if it lacks the record, it asks.
    fn may_vote(&mut self, ctx: &mut Ctx<'_>, from: NodeId, parent: Digest) -> bool {
        if self.abstains() {
            return false;
        }
        if parent == self.configuration() && !self.durable.may_vote() {
            if from != ctx.me() {
                self.send(ctx, from, JobMessage::Forfeited { parent });
            }
            return false;
        }
        if parent != self.configuration() {
            if ctx.cfg.flaws.skip_r5 && self.head.is_none() {
                return true;
            }
            if from != ctx.me() {
                let have = self.head_digest();
                self.send(ctx, from, JobMessage::Ask { have });
                self.on_ask(ctx, from, parent);
            }
            return false;
        }
        let voter = ctx.voter();
        let by_name = ctx.cfg.flaws.skip_r5;
        self.live().map(super::Head::voting).is_some_and(|r| {
            r.is_voter(voter) || (by_name && r.voters().any(|v| v.node == voter.node))
        })
    }

    pub(super) fn on_prepare(
        &mut self,
        ctx: &mut Ctx<'_>,
        from: NodeId,
        parent: Digest,
        ballot: Ballot,
    ) {
        if ballot.node != from || !self.may_vote(ctx, from, parent) {
            return;
        }
        let before = self.durable.acceptor.promised;
        match self.durable.acceptor.prepare(ballot) {
            Ok(()) => {
                if before != ballot && !self.is_stored(ctx) {
                    return;
                }
                let acceptor = &self.durable.acceptor;
                let (accepted, acked) = (acceptor.accepted.clone(), acceptor.acked);
                let body = JobMessage::Promise {
                    parent,
                    ballot,
                    accepted,
                    acked,
                };
                self.send(ctx, from, body);
            }
            Err(promised) => self.send(ctx, from, JobMessage::Rejected { parent, promised }),
        }
    }

    pub(super) fn on_accept(
        &mut self,
        ctx: &mut Ctx<'_>,
        from: NodeId,
        parent: Digest,
        ballot: Ballot,
        record: Arc<Record>,
    ) {
        if ballot.node != from || !self.may_vote(ctx, from, parent) {
            return;
        }
        if let Some(head) = self.live()
            && !record.follows(&head.record)
            && !record.changes_voters_of(head.voting())
        {
            return;
        }
        let before = self.durable.acceptor.accepted.as_ref().map(|a| a.0);
        match self.durable.acceptor.accept(ballot, &record) {
            Ok(()) => {
                if before != Some(ballot) && !self.is_stored(ctx) {
                    return;
                }
                let grants = self.grants(ctx, &record);
                let body = JobMessage::Accepted {
                    parent,
                    ballot,
                    grants,
                };
                self.send(ctx, from, body);
            }
            Err(promised) => self.send(ctx, from, JobMessage::Rejected { parent, promised }),
        }
    }

    // ---- leases ----

    /// The acknowledgements of the run before are forgotten: they may have been as late as now, and to anybody.
    pub(super) fn recall_leases(&mut self, ctx: &Ctx<'_>) {
        if self.voter.recalled.is_some() {
            return;
        }
        self.voter.recalled = Some(ctx.now);
        self.recall_wait(ctx);
        // For whom a start after an end waits may not have been known either: without a stored wait others are asked.
        let ended = self.head.is_some() && self.live().is_none();
        self.unknown |= ended && self.held_until(ctx).is_none();
        self.words.since(ctx.now);
    }

    /// The voters change: a member's lease may rest on any that voted before, as late as now, and this voter may be
    /// the only one that is asked for how long.
    pub(super) fn take_over_leases(&mut self, ctx: &Ctx<'_>) {
        let members = self.head.iter().flat_map(|h| &h.record.members);
        self.voter.granted = members.map(|m| (m.node, ctx.now)).collect();
    }

    /// While this agent stood still it was away to the others, and they counted it as standing behind the
    /// generation: as if it had acknowledged them until it woke.
    pub(super) fn wake_as_voter(&mut self, ctx: &Ctx<'_>) {
        let (stopped, woke) = ctx.quiet;
        if woke == stopped {
            return;
        }
        let members = self.head.iter().flat_map(|h| &h.record.members);
        for node in members.map(|m| m.node).collect::<Vec<_>>() {
            let grant = self.voter.granted.entry(node).or_insert(woke);
            *grant = woke.max(*grant);
        }
    }

    /// Whether this voter stands behind the generation (R16): one that accepted the next does not.
    fn grants_lease(&self, cfg: &Config) -> bool {
        let voter = cfg.voter();
        self.durable.may_vote()
            && self.durable.acceptor.accepted.is_none()
            && self.live().is_some_and(|h| h.voting().is_voter(voter))
    }

    /// A member of the head asks for its lease; true when this voter acknowledges it.
    pub(crate) fn ask_lease(&mut self, cfg: &Config, from: NodeId, now: Time) -> bool {
        let granted = self.grants_lease(cfg) && self.live().is_some_and(|h| h.has(from));
        if granted {
            self.voter.granted.insert(from, now);
        }
        granted
    }

    /// How long the workers of those that `next` drops may still run, as far as this voter knows: by the
    /// lease that it acknowledged, or without one where their agent is away or seems to be stopped.
    fn grants(&self, ctx: &Ctx<'_>, next: &Record) -> Vec<Grant> {
        let Some(head) = self.live() else {
            return Vec::new();
        };
        let times = self.timeouts(ctx);
        let until = |node: NodeId| {
            let granted = self.voter.granted.get(&node).copied();
            let granted = granted.max(self.voter.recalled);
            let away = ctx.peers.away_since(node);
            let lease = granted.map(|at| at + times.suspect_after);
            let mute = ctx.peers.unwell(node) == Some(State::Suspect { guarded: true });
            let away = away.max(mute.then_some(ctx.now));
            lease.max(away.map(|since| since + times.agent_grace))
        };
        let dropped = head.record.members.iter().filter(|m| !next.has(m.node));
        dropped
            .filter_map(|m| Some((m.node, until(m.node)?.since(ctx.now))))
            .filter(|(_, left)| *left > Span::ZERO)
            .take(MAX_LIST)
            .map(|(node, left)| Grant {
                node,
                left_ms: u32::try_from(left.as_millis() + 1).unwrap_or(u32::MAX),
            })
            .collect()
    }

    // ---- commits without a store (R8) ----

    /// The leader asks for a commit's acknowledgement.
    pub(super) fn on_commit(
        &mut self,
        ctx: &mut Ctx<'_>,
        from: NodeId,
        commit: CommitRef,
        vote: Digest,
    ) {
        if !self.may_vote(ctx, from, vote) || commit.generation != self.head_digest() {
            return;
        }
        if self.live().and_then(|h| h.record.leader()) != Some(from) {
            return;
        }
        let known = self.durable.acceptor.acked == Some(commit);
        if self.durable.acceptor.ack(commit, ctx.cfg.flaws.skip_r8) {
            if !known && !self.is_stored(ctx) {
                return;
            }
            self.send(ctx, from, JobMessage::Committed { commit });
        }
    }

    /// This agent as somebody whose vote counts.
    pub fn votes(&self, voter: Voter) -> bool {
        self.live().is_some_and(|h| h.voting().is_voter(voter))
    }
}
