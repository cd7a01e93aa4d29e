//! Other witnesses for a generation that goes on: one that has gone is replaced, or done without, before its vote is
//! missed. The voters of before decide it as they decide what follows a generation; the members train on.

use std::sync::Arc;

use super::{Ctx, Job};
use crate::agent::Notice;
use crate::ids::NodeId;
use crate::peers::Peer;
use crate::record::{Arbiter, Record, Voter, WITNESSED_VOTERS};
use crate::time::{Span, Time};
use crate::wire::{Ballot, JobMessage};

/// So many times `suspect_after` a witness may refuse leases before it counts as one that takes no part: it may have
/// to hear of the generation first.
const REFUSES: u64 = 5;

/// A witness that was lost is taken again after this many times `suspect_after`, if it is heard: a link that flaps
/// would change the voters each time.
const BACK: u64 = 4;

/// One that takes no part is tried again after twice as long each time, this often at most: half an hour with the
/// usual `suspect_after`.
const MOST_DOUBLINGS: u32 = 8;

/// So long a save that is being written goes before a change: voters write to the same disks, and a change has three
/// writes in a row within one lease.
const WRITES: Span = Span::from_secs(30);

/// A witness that was done without.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Gone {
    since: Time,
    /// Its connection may stand for long.
    lost: bool,
    /// How often it took no part.
    refused: u32,
}

impl Gone {
    fn keeps_out(&self, ctx: &Ctx<'_>, node: NodeId) -> bool {
        let times = BACK << self.refused.min(MOST_DOUBLINGS);
        let heard = ctx.peers.get(node).is_some_and(|p| p.seen > self.since);
        self.lost && !heard || ctx.now < self.since + ctx.cfg.suspect_after.times(times)
    }
}

impl Job {
    /// The leader of a generation that runs undisturbed has its witnesses replaced where they are gone.
    pub(super) fn drive_voters(&mut self, ctx: &mut Ctx<'_>) {
        if self.proposal.is_some() || self.committing.is_some() && !self.has_begun() {
            return;
        }
        let record = self.next_voters(ctx);
        let writes = self.saves().is_some_and(|l| l.under_way().is_some());
        let Some(lead) = &mut self.lead else { return };
        let Some(record) = record else {
            lead.voters_due = None;
            return;
        };
        let until = *lead.voters_due.get_or_insert(ctx.now) + WRITES;
        if writes && ctx.now < until && !self.has_begun() {
            return self.wake_at(until, "a save that is written before a change of voters");
        }
        self.propose(ctx, record);
    }

    /// The generation with the witnesses that it should have, if it has others; none unless all its members are
    /// there and can decide it.
    pub(super) fn next_voters(&self, ctx: &Ctx<'_>) -> Option<Record> {
        let head = self.live()?;
        let (record, before) = (&head.record, head.voting());
        let small = record.members.len() < WITNESSED_VOTERS || !before.witnesses.is_empty();
        let leads = record.arbiter == Arbiter::Members && record.leader() == Some(ctx.me());
        if !(small && leads) {
            return None;
        }
        let lead = self.lead.as_ref()?;
        let quiet = lead.ending.is_none() && lead.planned.is_none() && lead.deserted.is_none();
        let well = |n| ctx.reachable(n) && ctx.peers.unwell(n).is_none();
        let votes = |n| !self.is_unstored(ctx, n) && self.has_vote(ctx, before, n);
        let decides = before.is_majority(|n| well(n) && votes(n));
        if !(quiet && decides && record.members.iter().all(|m| well(m.node))) {
            return None;
        }
        let a = self.assess(ctx, record);
        let change = a.cancel || a.finished || a.failed.is_some() || a.is_broken();
        if change || a.survivors.len() < record.members.len() {
            // What follows is about to be decided, by those who vote now.
            return None;
        }
        let witnesses = self.witnesses_now(ctx, record.members.len(), &before.witnesses);
        (witnesses != before.witnesses || self.has_begun())
            .then(|| before.with_witnesses(witnesses))
    }

    /// Whether this voter has promised or accepted something about what follows. Of a generation that goes on that has
    /// to come to an end, if only with the same witnesses: until then it acknowledges no commits, nor leases once it
    /// has accepted.
    fn has_begun(&self) -> bool {
        let acceptor = &self.durable.acceptor;
        acceptor.accepted.is_some() || acceptor.promised != Ballot::default()
    }

    /// The witnesses of a generation that runs: those that it has and that are not gone. Two members have one in
    /// place of one that is gone, or that never was: an agent that stays when its launcher ends. One member decides
    /// alone, sooner than with others that may go, too.
    fn witnesses_now(&self, ctx: &Ctx<'_>, members: usize, before: &[Voter]) -> Vec<Voter> {
        let stay = before.iter().filter(|v| !self.is_gone(ctx, v));
        let mut out: Vec<Voter> = stay.copied().collect();
        if members == 2 && out.len() + members < WITNESSED_VOTERS {
            let fits = |v: &Voter| {
                let member = self.live().is_none_or(|h| h.has(v.node));
                let well = ctx.reachable(v.node) && ctx.peers.unwell(v.node).is_none();
                let stays = !ctx.goes(v.node) && !self.is_gone(ctx, v);
                let gone = self.lead.as_ref().and_then(|l| l.gone.get(&v.node));
                let kept_out = gone.is_some_and(|g| g.keeps_out(ctx, v.node));
                // One that asks to be let in is to be a member.
                let joins = self.gathering.tickets.contains_key(&v.node);
                well && stays && !kept_out && !member && !joins
            };
            let others = ctx.peers.map.iter().filter_map(|(node, p)| {
                let state = p.state_dir()?;
                Some(Voter { node: *node, state })
            });
            let distance = self.key.distance();
            out.extend(others.filter(fits).min_by_key(|v| distance(v.node)));
        }
        out
    }

    /// Whether a witness votes no more: it is lost, says that it leaves, came back without its votes, cannot store
    /// them, or answers and takes no part.
    fn is_gone(&self, ctx: &Ctx<'_>, v: &Voter) -> bool {
        if v.node == ctx.me() {
            return *v != ctx.voter();
        }
        let peer = ctx.peers.get(v.node);
        let leaves = |p: &Peer| p.leaves(ctx.now, ctx.cfg.suspect_after).is_some();
        let lost = ctx.peers.lost(v.node).is_some() || self.is_unstored(ctx, v.node);
        let elsewhere = self.merge.lives_elsewhere(v.node);
        let forfeited = self
            .voting()
            .is_some_and(|r| r.is_voter(*v) && !self.has_vote(ctx, r, v.node));
        let says = peer.is_some_and(|p| leaves(p) || p.has_lost(v.state));
        lost || elsewhere || forfeited || says || self.takes_no_part(ctx, v.node)
    }

    /// Whether a voter is asked for this node's lease and goes on refusing it: it lives in another group of the job, or
    /// has no room for another job.
    fn takes_no_part(&self, ctx: &Ctx<'_>, voter: NodeId) -> bool {
        let asked = self.lease_wanted_of(voter).is_some();
        let (Some(mine), Some(lead)) = (self.member.as_ref().filter(|_| asked), &self.lead) else {
            return false;
        };
        let granted = mine.acks.get(&voter).copied().unwrap_or_default();
        let since = granted.max(self.voting_since()).max(lead.began);
        let refused = mine.refusals.get(&voter);
        refused.is_some_and(|at| *at >= since + ctx.cfg.suspect_after.times(REFUSES))
    }

    /// The voters of before have decided who votes from now on.
    pub(super) fn voters_decided(&mut self, ctx: &mut Ctx<'_>, record: Arc<Record>) {
        let Some(head) = self.live() else { return };
        let generation = head.record.clone();
        let before = head.voting().voters_and_members();
        let mut told: Vec<NodeId> = before.chain(record.voters_and_members()).collect();
        told.sort_unstable();
        told.dedup();
        for node in told.into_iter().filter(|n| *n != ctx.me()) {
            let (generation, record) = (generation.clone(), record.clone());
            self.send(ctx, node, JobMessage::Voters { generation, record });
        }
        self.change_voters(ctx, record);
    }

    /// Tells who votes, where those are others than the generation began with.
    pub(super) fn tell_voters(&mut self, ctx: &Ctx<'_>, to: NodeId) {
        if let Some(head) = self.live()
            && let Some((record, _)) = head.voters.clone()
        {
            let generation = head.record.clone();
            self.send(ctx, to, JobMessage::Voters { generation, record });
        }
    }

    pub(super) fn on_voters(
        &mut self,
        ctx: &mut Ctx<'_>,
        from: NodeId,
        generation: Arc<Record>,
        record: Arc<Record>,
    ) {
        let of = generation.digest();
        if !record.is_of(&generation) {
            return;
        }
        if self.head_digest() != of {
            let votes = record.is_voter(ctx.voter());
            self.learn(ctx, from, generation, votes);
        }
        let known = self.live().filter(|h| h.digest == of);
        if known.is_some_and(|h| h.voting().change_of_voters() < record.change_of_voters()) {
            let members = self.live().map(|h| h.nodes.clone()).unwrap_or_default();
            let votes = record.is_voter(ctx.voter());
            self.change_voters(ctx, record);
            if votes && !self.durable.may_vote() {
                let parent = self.configuration();
                self.send(ctx, from, JobMessage::Forfeited { parent });
            }
            // The one that had it decided may be gone before the other has heard.
            let known = [ctx.me(), from];
            for node in members.into_iter().filter(|n| !known.contains(n)) {
                self.tell_voters(ctx, node);
            }
        }
    }

    fn change_voters(&mut self, ctx: &mut Ctx<'_>, record: Arc<Record>) {
        let before = self.voting().map_or(&[][..], |r| &r.witnesses[..]);
        let gone = before.iter().filter(|v| !record.witnesses.contains(v));
        let gone: Vec<NodeId> = gone.map(|v| v.node).collect();
        for node in &gone {
            let (lost, refused) = (ctx.peers.lost(*node), self.takes_no_part(ctx, *node));
            if let Some(lead) = &mut self.lead {
                let known = lead.gone.entry(*node).or_default();
                (known.since, known.lost) = (ctx.now, lost.is_some());
                known.refused += u32::from(refused);
            }
        }
        self.keep_lease();
        let Some(head) = self.head.take() else { return };
        self.head = Some(head.with_voters(Some(record.clone())));
        self.durable.change_voters(record.clone());
        self.persist(ctx);
        self.take_over_leases(ctx);
        self.voters_at = ctx.now;
        self.proposal = None;
        self.seen_round = 0;
        self.committing = None;
        self.notice(Notice::Voters {
            key: self.key.clone(),
            record,
            gone,
        });
        self.wake_at(ctx.now, "other voters");
    }
}
