//! Getting the next generation decided: by the voters (R6 to R8), or by the store's log.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{Ctx, Job};
use crate::agent::Notice;
use crate::ids::{Digest, NodeId};
use crate::paxos::{Prepared, Proposer, newest};
use crate::record::{Arbiter, CommitRef, Member, Record};
use crate::time::{Span, Time};
use crate::wire::{Ballot, Grant, JobMessage, MAX_LIST};

/// An attempt to decide what follows the head.
#[derive(Clone, Debug)]
pub(super) struct Proposal {
    proposer: Proposer,
    parent: Digest,
    /// It is about who votes, and about nothing else.
    pub(super) of_voters: bool,
    /// Its value was made here, and was none that voters had accepted before.
    own: bool,
    /// Said again, or given up for a higher round, at this time.
    retry: Time,
    /// Until when a member that the voters acknowledged may still be training; none where a voter could
    /// not name them all.
    pub(super) grants: Option<BTreeMap<NodeId, Time>>,
}

/// A commit that waits for a majority (R8).
#[derive(Clone, Debug)]
pub(super) struct Committing {
    pub(super) commit: CommitRef,
    pub(super) acks: BTreeSet<NodeId>,
    pub(super) said: Time,
}

impl Job {
    /// Proposes `record` to the arbiter of the head.
    pub(super) fn propose(&mut self, ctx: &mut Ctx<'_>, record: Record) {
        // What is to become of the workers does not wait for a change of voters.
        let of_voters = record.change_of_voters() > 0;
        if self
            .proposal
            .as_ref()
            .is_some_and(|p| of_voters || !p.of_voters)
        {
            return;
        }
        match record.arbiter {
            Arbiter::Store(_) => self.claim(ctx, record),
            Arbiter::Members => self.propose_to_members(ctx, record),
        }
    }

    fn propose_to_members(&mut self, ctx: &mut Ctx<'_>, mut record: Record) {
        let Some(head) = self.live() else { return };
        let (before, parent) = head.configuration();
        let (leader, restore) = (head.record.leader(), before.restore);
        let of_voters = record.change_of_voters() > 0;
        let acceptor = &self.durable.acceptor;
        // R7: the leader's own first word, in the boot in which it learnt the head, and never
        // after it promised anything itself. A later round of its own may have failed before: others who
        // promised that one refuse this.
        let first = leader == Some(ctx.me())
            && !self.abstains()
            && self.durable.may_vote()
            && ((self.durable.learned == ctx.cfg.boot
                && self.durable.voters.is_none()
                && acceptor.accepted.is_none()
                && acceptor.promised == Ballot::default())
                || (ctx.cfg.flaws.skip_r7 && acceptor.promised.round == 0));
        if first {
            let sent = if ctx.cfg.flaws.skip_r8 {
                None
            } else {
                self.durable.sent
            };
            record.restore = newest(restore, sent);
            let value = Arc::new(record);
            let proposer = Proposer::at_zero(ctx.me(), ctx.cfg.boot, value);
            self.start_proposal(ctx, parent, of_voters, proposer);
            self.say_accept(ctx);
        } else {
            self.start_round(ctx, parent, of_voters);
        }
    }

    fn start_round(&mut self, ctx: &mut Ctx<'_>, parent: Digest, of_voters: bool) {
        let acceptor = &self.durable.acceptor;
        let seen = acceptor
            .promised
            .round
            .max(acceptor.accepted.as_ref().map_or(0, |a| a.0.round))
            .max(self.seen_round)
            .max(self.own_round);
        // A ballot is used once, for one value; without a higher one nothing is proposed.
        let Some(round) = seen.checked_add(1) else {
            return;
        };
        self.own_round = round;
        let ballot = Ballot {
            round,
            node: ctx.me(),
            boot: ctx.cfg.boot,
        };
        self.start_proposal(ctx, parent, of_voters, Proposer::prepare(ballot));
        for node in self.voter_nodes() {
            self.send(ctx, node, JobMessage::Prepare { parent, ballot });
        }
    }

    fn start_proposal(
        &mut self,
        ctx: &mut Ctx<'_>,
        parent: Digest,
        of_voters: bool,
        proposer: Proposer,
    ) {
        let back_off = Span::from_millis(700 + ctx.rng.below(600));
        self.proposal = Some(Proposal {
            proposer,
            parent,
            of_voters,
            own: true,
            retry: ctx.now + back_off,
            grants: Some(BTreeMap::new()),
        });
        self.wake_at(ctx.now + back_off, "a proposal without a majority");
    }

    fn voter_nodes(&self) -> Vec<NodeId> {
        let head = self.live();
        head.map(|h| h.voting().voters().map(|v| v.node).collect())
            .unwrap_or_default()
    }

    fn say_accept(&mut self, ctx: &mut Ctx<'_>) {
        let Some(proposal) = &self.proposal else {
            return;
        };
        let (parent, ballot) = (proposal.parent, proposal.proposer.ballot);
        let Some(record) = proposal.proposer.value().cloned() else {
            return;
        };
        // Our own acceptance comes first: in round 0 it is durable before anybody hears of the value (R7). A later
        // round rests on the promises of others, so one that cannot store its vote has theirs counted.
        let me = ctx.me();
        let mut nodes = self.voter_nodes();
        if let Some(at) = nodes.iter().position(|n| *n == me) {
            nodes.remove(at);
            self.on_accept(ctx, me, parent, ballot, record.clone());
            if self.abstains() && ballot.round == 0 {
                self.proposal = None;
                return;
            }
        }
        for node in nodes {
            let record = record.clone();
            let body = JobMessage::Accept {
                parent,
                ballot,
                record,
            };
            self.send(ctx, node, body);
        }
    }

    /// The disk refused a write: what ballot 0 says rests on it (R7).
    pub(super) fn drop_unstored(&mut self) {
        self.proposal.take_if(|p| p.proposer.ballot.round == 0);
        self.committing = None;
    }

    /// A proposal without an answer in time is tried again in a higher round.
    pub(super) fn drive_proposal(&mut self, ctx: &mut Ctx<'_>) {
        let Some(proposal) = &self.proposal else {
            return;
        };
        if ctx.now < proposal.retry {
            let at = proposal.retry;
            return self.wake_at(at, "a proposal without a majority");
        }
        self.proposal = None;
    }

    fn heard_grants(&mut self, ctx: &Ctx<'_>, grants: &[Grant]) {
        let Some(proposal) = &mut self.proposal else {
            return;
        };
        if grants.len() >= MAX_LIST {
            proposal.grants = None;
        }
        if let Some(known) = &mut proposal.grants {
            for g in grants {
                let end = ctx.now + Span::from_millis(g.left_ms.into());
                let known = known.entry(g.node).or_default();
                *known = end.max(*known);
            }
        }
    }

    pub(super) fn on_promise(
        &mut self,
        ctx: &mut Ctx<'_>,
        from: NodeId,
        (parent, ballot): (Digest, Ballot),
        accepted: Option<(Ballot, Arc<Record>)>,
        acked: Option<CommitRef>,
    ) {
        let Some(head) = self.live().filter(|h| h.configuration().1 == parent) else {
            return;
        };
        let record = head.configuration().0.clone();
        let Some(proposal) = self.proposal.as_mut().filter(|p| p.parent == parent) else {
            return;
        };
        let of_voters = proposal.of_voters;
        let prepared = proposal
            .proposer
            .on_promise(&record, from, ballot, accepted, acked);
        let value = match prepared {
            None => return,
            Some(Prepared::Adopt(value)) => {
                proposal.own = false;
                value
            }
            Some(Prepared::Free { acked }) => {
                let next = match of_voters {
                    true => self.next_voters(ctx),
                    false => self.next_record(ctx),
                };
                let Some(mut value) = next else {
                    self.proposal = None;
                    return;
                };
                let acked = if ctx.cfg.flaws.skip_r8 { None } else { acked };
                value.restore = newest(record.restore, acked);
                Arc::new(value)
            }
        };
        if let Some(proposal) = &mut self.proposal {
            proposal.proposer.propose(value);
        }
        self.say_accept(ctx);
    }

    pub(super) fn on_accepted(
        &mut self,
        ctx: &mut Ctx<'_>,
        from: NodeId,
        parent: Digest,
        ballot: Ballot,
        grants: &[Grant],
    ) {
        self.heard_grants(ctx, grants);
        let Some(head) = self.live().filter(|h| h.configuration().1 == parent) else {
            return;
        };
        let record = head.configuration().0.clone();
        let Some(proposal) = self.proposal.as_mut().filter(|p| p.parent == parent) else {
            return;
        };
        let Some(value) = proposal.proposer.on_accepted(&record, from, ballot) else {
            return;
        };
        let (grants, own) = (proposal.grants.take(), proposal.own);
        if value.change_of_voters() > 0 {
            return self.voters_decided(ctx, value);
        }
        if own && value.kind.is_terminal() {
            self.tell_life_at_end(ctx);
        }
        self.leases_ended = grants;
        self.decided(ctx, &value, false);
    }

    pub(super) fn on_rejected(&mut self, ctx: &mut Ctx<'_>, parent: Digest, promised: Ballot) {
        self.seen_round = self.seen_round.max(promised.round);
        if let Some(proposal) = &mut self.proposal
            && proposal.parent == parent
            && proposal.proposer.ballot < promised
        {
            let back_off = ctx.now + Span::from_millis(50 + ctx.rng.below(300));
            proposal.retry = proposal.retry.min(back_off);
            let at = proposal.retry;
            self.wake_at(at, "a higher round");
        }
    }

    // ---- commits ----

    /// All shards of a checkpoint are prepared. Only the head's leader commits. `false`: it cannot be
    /// asked for now.
    pub(crate) fn commit(&mut self, ctx: &mut Ctx<'_>, step: u64, manifest: Digest) -> bool {
        // One that came back without its state does not know what it sent.
        let me = ctx.voter();
        let leads = |h: &&super::Head| h.record.members.first().map(Member::voter) == Some(me);
        let Some(head) = self.live().filter(leads) else {
            return false;
        };
        if self.committing.is_some() || self.proposal.is_some() || !self.durable.may_vote() {
            return false;
        }
        // In a job's log the commit gets another number: that of its place.
        let before = newest(head.record.restore, self.durable.sent);
        let commit = CommitRef {
            generation: head.digest,
            number: before.map_or(1, |c| c.number + 1),
            step,
            manifest,
        };
        if let Arbiter::Store(_) = head.record.arbiter {
            return self.commit_to_store(ctx, commit);
        }
        // After a restart, too: what ballot 0 may have proposed was accepted here first, durably (R7).
        if self.abstains() || self.durable.acceptor.accepted.is_some() {
            return false;
        }
        let sent = self.durable.sent.replace(commit);
        if !self.is_stored(ctx) {
            self.durable.sent = sent;
            return false;
        }
        self.committing = Some(Committing {
            commit,
            acks: BTreeSet::new(),
            said: Time::ZERO,
        });
        self.drive_commit(ctx);
        true
    }

    /// Whether a commit of this manifest is under way.
    pub(super) fn commits(&self, manifest: &Digest) -> bool {
        let by_members = self.committing.as_ref().map(|c| c.commit.manifest);
        by_members == Some(*manifest) || self.commits_to_store(manifest)
    }

    pub(super) fn drive_commit(&mut self, ctx: &mut Ctx<'_>) {
        let head = self.head_digest();
        let Some(committing) = &mut self.committing else {
            return;
        };
        if committing.commit.generation != head {
            self.committing = None;
            return;
        }
        let due = committing.said + super::REPEAT;
        if committing.said != Time::ZERO && ctx.now < due {
            return self.wake_at(due, "a commit without a majority");
        }
        committing.said = ctx.now;
        let commit = committing.commit;
        for node in self.voter_nodes() {
            let vote = self.configuration();
            self.send(ctx, node, JobMessage::Commit { commit, vote });
        }
        self.wake_at(ctx.now + super::REPEAT, "a commit without a majority");
    }

    pub(super) fn on_committed(&mut self, ctx: &mut Ctx<'_>, from: NodeId, commit: CommitRef) {
        let Some(record) = self.live().map(|h| h.configuration().0.clone()) else {
            return;
        };
        let Some(committing) = self.committing.as_mut().filter(|c| c.commit == commit) else {
            return;
        };
        committing.acks.insert(from);
        if record.is_majority(|n| committing.acks.contains(&n)) {
            self.committing = None;
            self.notice(Notice::Committed {
                key: self.key.clone(),
                commit,
            });
            self.save_committed(ctx, commit.manifest);
        }
    }
}
