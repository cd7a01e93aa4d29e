//! A job that no launcher takes part in any more: all were killed. It is kept for those that come back,
//! and ends after a while, or by a person's word, or when a start asks for another specification.

use std::collections::BTreeMap;

use super::plan::Assessment;
use super::store::differs;
use super::{Ctx, Head, Job};
use crate::ids::{Digest, NodeId};
use crate::peers::{Peers, View};
use crate::record::{Arbiter, Member, Record};
use crate::time::{Span, Time};
use crate::wire::{Advert, MAX_LIST, Status};

/// How long a job without launchers is kept while some member may only be cut off.
const UNSURE: Span = Span::from_secs(24 * 3_600);

/// Since when the acting leader sees no launcher of the job, and whether all are known to be dead.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deserted {
    pub(super) since: Time,
    sure: bool,
    /// One that is not may only be cut off, and train.
    cut_off: bool,
    /// It is to end, and launchers that come from then on are of the next life.
    given_up: bool,
}

impl Deserted {
    /// From when on another specification may follow: members that are cut off have ended their workers.
    fn replaced_at(&self, ctx: &Ctx<'_>) -> Time {
        match self.sure {
            true => self.since,
            false => self.since + ctx.cfg.agent_grace,
        }
    }
}

impl Job {
    /// Whether the head is a generation whose launchers all are gone, as far as this agent knows: its
    /// leader sees that, and tells the others.
    pub fn is_deserted(&self, peers: &Peers) -> bool {
        let Some(head) = self.live() else {
            return false;
        };
        let me = peers.me.as_ref().map(|(me, ..)| *me);
        let mut told = self.adverts(peers);
        me.is_some_and(|me| self.says_deserted(me, peers))
            || self.lead.is_none() && told.any(|(_, a)| a.digest == head.digest && a.deserted)
    }

    /// Whether others say that the job goes on, or begins, after the end that is known here.
    pub fn has_next(&self, peers: &Peers) -> bool {
        let gathering = |(_, a): (NodeId, &Advert)| a.is_gathering();
        let begins = self.live().is_none() && self.adverts(peers).any(gathering);
        begins || self.runs_elsewhere(peers).is_some()
    }

    /// The word of others on a generation that runs after all that is known here.
    pub fn runs_elsewhere<'a>(&'a self, peers: &'a Peers) -> Option<&'a Advert> {
        let mut told = self.adverts(peers);
        told.find_map(|(_, a)| self.is_next(a).then_some(a))
    }

    /// Whether an agent speaks of a generation that runs after all that is known here.
    fn is_next(&self, a: &Advert) -> bool {
        let here = self.head.as_ref().map(Head::lineage);
        let over = self.durable.has_ended(a.lineage) || here == Some(a.lineage);
        let over = over || self.durable.superseded(a.lineage, a.number).is_some();
        self.live().is_none() && a.belongs && !over
    }

    /// The nodes on which a generation ran after all that is known here, as their agents said before they were gone
    /// without a word: their launchers may go on.
    pub fn ran_elsewhere(&self, peers: &Peers, now: Time) -> Vec<NodeId> {
        let most = peers.timeouts().max(self.durable.timeouts);
        let since = now - Span(most.agent_grace.0.saturating_add(most.suspect_after.0));
        let told = peers.last_adverts(since);
        let told = told.filter(|(_, a)| a.key == self.key && self.is_next(a));
        told.map(|(node, _)| node).take(MAX_LIST).collect()
    }

    /// The adverts of this job by connected agents.
    pub(super) fn adverts<'a>(
        &'a self,
        peers: &'a Peers,
    ) -> impl Iterator<Item = (NodeId, &'a Advert)> {
        peers.adverts().filter(|(_, a)| a.key == self.key)
    }

    /// Whether this agent sees that no launcher of the job is left: as its leader, or where nobody leads.
    pub(crate) fn says_deserted(&self, me: NodeId, peers: &Peers) -> bool {
        let here = self.lead.as_ref().map(|l| l.deserted.is_some());
        here.unwrap_or_else(|| self.has_no_store_left(me, peers))
    }

    /// Whether the job's log decides, and no member is left that could write it: nobody leads. An agent that is back
    /// with another state directory is no member any more, and one that gave the job up writes no more.
    pub(super) fn has_no_store_left(&self, me: NodeId, peers: &Peers) -> bool {
        self.is_storeless_but(me, |m| self.is_anew(peers, m) || self.has_forfeited(m.node))
    }

    /// Whether the agent of this member is there with another state directory: its launchers end what they run.
    pub(super) fn is_anew(&self, peers: &Peers, m: &Member) -> bool {
        // Its launcher may have come to this agent, and be about to do so.
        self.launcher() != Some(m.launcher) && peers.has_lost(m.node, m.state)
    }

    /// The member that others are told to ask. Where that has no way to the store it is the next that has one, and that
    /// is not missed if there is such a one. Else the word stays: a thousand members would say to a thousand agents what
    /// they see.
    pub(super) fn leader_told(&self, me: NodeId, peers: View<'_>) -> Option<NodeId> {
        let head = self.head.as_ref()?;
        let members = head.record.members.iter();
        let first = members
            .clone()
            .next()
            .filter(|_| !self.has_no_store_left(me, peers.all))?;
        if self.lead.is_some() {
            return Some(me);
        }
        let storeless = |m: &Member| {
            self.storeless_status(me, m.node)
                .is_some_and(|s| s.storeless)
        };
        let missed = |m: &Member| peers.lost(m.node).is_some() || peers.away(m.node);
        let mut others = members.filter(|_| storeless(first));
        let next = others.clone().find(|m| !storeless(m) && !missed(m));
        let next = next.or_else(|| others.find(|m| !storeless(m)));
        Some(next.unwrap_or(first).node)
    }

    /// Whether the job's log decides, and each member's launcher is gone, by its word or by another's.
    fn is_storeless_but(&self, me: NodeId, other: impl Fn(&Member) -> bool) -> bool {
        let gone = |m: &Member| self.storeless_status(me, m.node).is_some_and(|s| s.gone);
        self.live().is_some_and(|head| {
            let by_store = matches!(head.record.arbiter, Arbiter::Store(_));
            by_store && head.record.members.iter().all(|m| gone(m) || other(m))
        })
    }

    fn storeless_status(&self, me: NodeId, node: NodeId) -> Option<&Status> {
        match node == me {
            true => self.member.as_ref().map(|mine| &mine.status),
            false => self.storeless.get(&node),
        }
    }

    /// Whether no launcher of the head is left, nor its workers: by the word of their agents, or of this member's
    /// failure detector.
    pub(crate) fn is_left_behind(&self, me: NodeId, peers: View<'_>) -> bool {
        self.live().is_some_and(|head| head.record.has(me))
            && self.is_storeless_but(me, |m| peers.lost(m.node) == Some(true))
    }

    /// Whether workers of the head had been started, or would have been at once: their start had waited for everybody
    /// who was dropped (R16).
    pub(crate) fn had_started(&self, me: NodeId) -> bool {
        let Some(head) = self.live() else {
            return false;
        };
        let mut members = head.record.members.iter();
        let started = members.any(|m| {
            let status = self.storeless_status(me, m.node);
            status.is_some_and(|s| s.started.is_some())
        });
        started || head.record.leader() == Some(me) && !self.waits_for_leases()
    }

    /// Whether its agents that are there say of this generation that nobody of it is left ([`Job::is_left_behind`]):
    /// each of these `members` whose agent is there, for it knows of its own launcher.
    pub(super) fn was_left_behind(
        &self,
        peers: &Peers,
        generation: Digest,
        members: &[Member],
    ) -> bool {
        let of = |(_, a): &(NodeId, &Advert)| a.digest == generation && a.belongs;
        let told: BTreeMap<NodeId, bool> = self
            .adverts(peers)
            .filter(of)
            .map(|(node, a)| (node, a.left_behind))
            .collect();
        let is_there = |m: &&Member| {
            let peer = peers.get(m.node).filter(|p| p.connected);
            peer.is_some_and(|p| !p.has_lost(m.state))
        };
        let mut there = members.iter().filter(is_there);
        !told.is_empty()
            && told.values().all(|left| *left)
            && there.all(|m| told.contains_key(&m.node))
    }

    /// Whether one of its agents says that workers of this generation had been started ([`Job::had_started`]).
    pub(super) fn was_started(&self, peers: &Peers, generation: Digest) -> bool {
        let mut told = self.adverts(peers);
        told.any(|(_, a)| a.digest == generation && a.started)
    }

    /// Watches for a job without launchers.
    pub(super) fn drive_deserted(&mut self, ctx: &mut Ctx<'_>, record: &Record, a: &Assessment) {
        let here = record.members.iter().any(|m| !a.lost.contains(&m.node));
        let sure = a.lost.iter().all(|n| self.is_dead(ctx, record, *n));
        let anew = |m: &Member| self.is_anew(ctx.peers.all, m);
        let ended =
            |n: &NodeId| self.is_dead(ctx, record, *n) || record.member(*n).is_some_and(anew);
        let cut_off = !a.lost.iter().all(ended);
        let Some(lead) = &mut self.lead else { return };
        if here || !a.stuck.is_empty() {
            lead.deserted = None;
            return;
        }
        let deserted = lead.deserted.get_or_insert(Deserted {
            since: ctx.now,
            sure,
            cut_off,
            given_up: false,
        });
        (deserted.sure, deserted.cut_off) = (sure, cut_off);
        let kept = deserted.since + Self::kept_for(ctx, *deserted);
        let replaced = deserted.replaced_at(ctx);
        let given_up = self.is_given_up(ctx, record);
        if let Some(deserted) = self.lead.as_mut().and_then(|l| l.deserted.as_mut()) {
            deserted.given_up = given_up;
        }
        for at in [replaced, kept].into_iter().filter(|at| ctx.now < *at) {
            self.wake_at(at, "a job without launchers");
        }
    }

    /// Whether a member that is lost is known to be dead, and not only cut off.
    pub(super) fn is_dead(&self, ctx: &Ctx<'_>, record: &Record, node: NodeId) -> bool {
        let gone = self.status_of(node).is_some_and(|s| s.gone);
        let member = record.member(node);
        gone || ctx.peers.lost(node) == Some(true) || member.is_some_and(|m| self.replaced(m))
    }

    /// Its slots are kept for so long, too.
    fn kept_for(ctx: &Ctx<'_>, deserted: Deserted) -> Span {
        match deserted.cut_off {
            false => ctx.cfg.slot_lease.max(ctx.cfg.agent_grace),
            true => UNSURE,
        }
    }

    /// Whether the job is to end because nobody is left: its time is over, or it is held up by the
    /// specification of launchers that are all dead.
    pub(super) fn is_given_up(&self, ctx: &Ctx<'_>, record: &Record) -> bool {
        let Some(deserted) = self.lead.as_ref().and_then(|l| l.deserted) else {
            return false;
        };
        let over = ctx.now >= deserted.since + Self::kept_for(ctx, deserted);
        let asked = !self.gathering.tickets.is_empty();
        deserted.given_up || over || asked && self.may_differ(ctx, record)
    }

    /// Whether its end is to be decided here.
    pub(crate) fn is_given_up_here(&self) -> bool {
        let deserted = self.lead.as_ref().and_then(|l| l.deserted);
        deserted.is_some_and(|d| d.given_up)
    }

    /// Whether it has no launcher, as far as its leader sees, while some member may only be cut off.
    pub(crate) fn may_be_cut_off(&self) -> bool {
        let deserted = self.lead.as_ref().and_then(|l| l.deserted);
        deserted.is_some_and(|d| d.cut_off)
    }

    /// There are so many jobs without launchers that this one is kept no longer: it ends, or, where that is not
    /// decided here, this node takes no part in it any more.
    pub(crate) fn give_up_deserted(&mut self, ctx: &mut Ctx<'_>) {
        let deserted = self.lead.as_mut().and_then(|l| l.deserted.as_mut());
        let led = deserted.is_some();
        if let Some(deserted) = deserted.filter(|d| !d.given_up) {
            deserted.given_up = true;
            return;
        }
        let Some(head) = self.live() else { return };
        let (mine, lineage, number) = (head.digest, head.lineage(), head.record.number);
        // The others go on to tell of it, and it would be taken up again and again, in place of another.
        if matches!(head.record.arbiter, Arbiter::Store(_)) {
            // Of what follows it the log tells. A member with a new launcher may go on, so nobody is told to leave.
            self.durable.forfeit(lineage, number + 1);
        } else if led {
            self.durable.supersede(lineage, number);
        }
        self.leave_group(ctx, mine, "nobody has come back to it");
    }

    /// Whether no launcher of the generation is left that could train, and nobody goes on with its
    /// specification, so that another one may follow.
    pub(super) fn may_differ(&self, ctx: &Ctx<'_>, record: &Record) -> bool {
        let deserted = self.lead.as_ref().and_then(|l| l.deserted);
        let mut tickets = self.gathering.tickets.values();
        deserted.is_some_and(|d| ctx.now >= d.replaced_at(ctx))
            && tickets.all(|h| differs(&h.ticket, record))
    }

    /// Whether a launcher of the generation is known to stay, or one waits that would go on with it.
    pub(super) fn is_taken_part_in(&self, ctx: &Ctx<'_>, record: &Record) -> bool {
        let mut tickets = self.gathering.tickets.values();
        self.any_member_stays(ctx, record) || tickets.any(|h| !differs(&h.ticket, record))
    }

    /// Whether a launcher of the generation is known to live, and not to leave it.
    pub(super) fn any_member_stays(&self, ctx: &Ctx<'_>, record: &Record) -> bool {
        let stays = |m: &Member| {
            let status = self.status_of(m.node);
            let there = status.is_some_and(|s| !s.gone && s.leave.is_none());
            // One whose agent is silent may have gone since.
            let there = there && ctx.peers.unwell(m.node).is_none();
            there && !self.is_lost(ctx, m) && !self.replaced(m)
        };
        record.members.iter().any(stays)
    }

    /// Until when workers of a job without launchers may still train, where the launcher of this node waits to
    /// start it with another specification.
    pub(super) fn replaced_in(&self, ctx: &Ctx<'_>, record: &Record, node: NodeId) -> Option<Span> {
        let asks = self.gathering.tickets.get(&node)?;
        let deserted = self.lead.as_ref()?.deserted?;
        let at = deserted.replaced_at(ctx);
        (differs(&asks.ticket, record) && ctx.now < at).then(|| at.since(ctx.now))
    }
}
