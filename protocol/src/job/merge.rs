//! Two lineages of one key (R10): groups that were born apart find each other. The one with the
//! lower birth digest takes the other in; the other writes its own end first.

use std::collections::{BTreeMap, BTreeSet};

use super::{Ctx, Head, Job, REPEAT};
use crate::ids::{Digest, NodeId};
use crate::peers::Peer;
use crate::record::{Arbiter, Cause, Member, Record, Voter};
use crate::time::Time;
use crate::wire::{Advert, JobMessage, MAX_LIST};

/// Lineages beside ours that are remembered; with more, some wait for the next round.
const MAX_OTHERS: usize = 16;

/// How often a lineage is asked to take this one in, before another one is.
const ASKS: usize = 10;

/// Why the workers of a group that is left are ended.
const TO_ANOTHER_GROUP: &str = "this group lost its nodes to another group of the job";

#[derive(Clone, Debug, Default)]
pub(super) struct Merge {
    /// Live lineages other than ours, and who leads them.
    others: BTreeMap<Digest, NodeId>,
    /// Where nodes belong, when it is not here.
    elsewhere: BTreeMap<NodeId, Digest>,
    /// A lineage that asked to be taken in, while we lead the winner.
    asked: Option<(Digest, NodeId)>,
    /// Lineages that this agent has seen taken in.
    taken: Vec<Digest>,
    /// Our lineage was granted its end.
    pub(super) tombstone: Option<Digest>,
    granted_at: Time,
    said: Time,
    /// How often other lineages were asked to take this one in.
    asks: usize,
    /// Since when all of the head are known to be dead, and enough wait here to form the job anew.
    dead_since: Option<Time>,
    /// Voters that said that they gave up their vote on what follows the head named.
    forfeited: (Digest, BTreeSet<NodeId>),
    /// Members that left the head named, and said that their workers of it have ended.
    ended: (Digest, BTreeSet<NodeId>),
}

impl Merge {
    /// A node showed that it takes part in our own lineage.
    pub(super) fn is_here(&mut self, node: NodeId) {
        self.elsewhere.remove(&node);
    }

    /// A member that left this head says that its workers have ended.
    pub(super) fn note_stopped(&mut self, of: Digest, node: NodeId) {
        if self.ended.0 != of {
            self.ended = (of, BTreeSet::new());
        }
        self.ended.1.insert(node);
    }

    /// Whether nothing runs for this head on a node that left it.
    pub(super) fn has_stopped(&self, of: Digest, node: NodeId) -> bool {
        self.ended.0 == of && self.ended.1.contains(&node)
    }

    /// A lineage has ended, and takes nobody in.
    pub(super) fn forget(&mut self, lineage: Digest) {
        self.others.remove(&lineage);
    }

    /// Whether a node said that it takes part in another lineage.
    pub(super) fn lives_elsewhere(&self, node: NodeId) -> bool {
        self.elsewhere.contains_key(&node)
    }

    /// A lineage that the next generation should take in.
    pub(super) fn taking_in(&self) -> Option<Digest> {
        self.asked
            .map(|(loser, _)| loser)
            .filter(|l| !self.taken.contains(l))
    }
}

/// Whether each of these is among the others at least as often.
fn are_all_among<T: Ord>(
    mut these: impl Iterator<Item = T>,
    others: impl Iterator<Item = T>,
) -> bool {
    let mut left: BTreeMap<T, usize> = BTreeMap::new();
    for other in others {
        *left.entry(other).or_default() += 1;
    }
    these.all(|one| {
        let found = left.get_mut(&one).filter(|n| **n > 0);
        found.map(|n| *n -= 1).is_some()
    })
}

impl Job {
    /// Another agent says what it knows of this job. A hint: it leads to questions only.
    pub(crate) fn on_advert(&mut self, ctx: &mut Ctx<'_>, from: NodeId, advert: &Advert) {
        let leads = advert.belongs && advert.leader == Some(ctx.me());
        // One that holds the end itself belongs to nothing any more, and has nothing to hear.
        let mut ends = self.durable.ended.iter();
        let ended = ends.any(|e| e.lineage() == advert.lineage && e.number > advert.number);
        let over = match advert.belongs || ended {
            true => self.is_over(ctx, from, advert.lineage, advert.number),
            false => self.is_superseded(ctx, from, advert.lineage, advert.number),
        };
        if over {
            return;
        }
        if self.may_know_end(ctx, advert) {
            // With no end known here they tell all that they know.
            let have = Digest::ZERO;
            return self.send(ctx, from, JobMessage::Ask { have });
        }
        let Some(head) = &self.head else {
            if leads {
                // A generation that this node is to lead, decided without its knowledge.
                let have = Digest::ZERO;
                self.send(ctx, from, JobMessage::Ask { have });
            }
            return;
        };
        let (mine, number) = (head.lineage(), head.record.number);
        if advert.lineage == mine {
            self.merge.elsewhere.remove(&from);
            if advert.number > number {
                let have = head.digest;
                self.send(ctx, from, JobMessage::Ask { have });
            } else if advert.number < number {
                let record = head.record.clone();
                self.send(ctx, from, JobMessage::Decided { record });
            }
            return;
        }
        if head.record.kind.is_terminal() {
            if advert.belongs {
                let have = head.digest;
                if leads {
                    self.send(ctx, from, JobMessage::Ask { have });
                }
            }
            return;
        }
        if !advert.belongs {
            return;
        }
        if !self.merge.taken.contains(&advert.lineage) {
            self.merge.elsewhere.insert(from, advert.lineage);
        }
        if let Some(leader) = advert.leader {
            let known = self.merge.others.contains_key(&advert.lineage);
            if known || self.merge.others.len() < MAX_OTHERS {
                self.merge.others.insert(advert.lineage, leader);
            }
        }
        self.leave_dead_birth(ctx);
    }

    /// Groups that spoke of themselves before there was one here were no concern then, and may never
    /// speak again: the leader of a new lineage asks them. Their statements may be long out of date.
    pub(super) fn ask_other_groups(&mut self, ctx: &mut Ctx<'_>) {
        let Some(head) = self.live().filter(|h| h.record.leader() == Some(ctx.me())) else {
            return;
        };
        let (mine, have) = (head.lineage(), head.digest);
        let ended: BTreeSet<Digest> = self.durable.ended.iter().map(|r| r.lineage()).collect();
        let other = |a: &Advert| {
            a.key == self.key && a.belongs && a.lineage != mine && !ended.contains(&a.lineage)
        };
        let peers = ctx.peers.map.iter().filter(|(_, p)| p.connected);
        let told = peers.filter(|(_, p)| p.hello.iter().flat_map(|h| &h.jobs).any(other));
        let told: Vec<NodeId> = told.map(|(n, _)| *n).collect();
        for node in told {
            self.send(ctx, node, JobMessage::Ask { have });
        }
    }

    /// A first generation whose voters were bound elsewhere can never decide a second: it is left.
    fn leave_dead_birth(&mut self, ctx: &mut Ctx<'_>) {
        let Some(head) = self
            .live()
            .filter(|h| h.record.number == 1 && h.record.arbiter == Arbiter::Members)
        else {
            return;
        };
        let mine = head.digest;
        let elsewhere = &self.merge.elsewhere;
        if head.voting().is_majority(|n| !elsewhere.contains_key(&n)) {
            return;
        }
        self.leave_group(ctx, mine, TO_ANOTHER_GROUP);
    }

    pub(super) fn on_forfeited(&mut self, from: NodeId, parent: Digest) {
        let Some(head) = self.live().filter(|h| h.configuration().1 == parent) else {
            return;
        };
        if head.voting().voters().any(|v| v.node == from) {
            let (of, voters) = &mut self.merge.forfeited;
            if *of != parent {
                (*of, *voters) = (parent, BTreeSet::new());
            }
            voters.insert(from);
        }
    }

    /// Voters of this group forfeited their votes when it was to end for another, others lost their
    /// disks, and those that are left are no majority: nothing can follow here, whoever comes back.
    /// Nobody's word is needed to give such a group up, and all who still hold it are told.
    fn leave_without_voters(&mut self, ctx: &mut Ctx<'_>, record: &Record) -> bool {
        let Some(voting) = self.voting().cloned() else {
            return false;
        };
        if record.arbiter != Arbiter::Members
            || voting.is_majority(|n| self.has_vote(ctx, &voting, n))
        {
            return false;
        }
        if voting
            .voters()
            .any(|v| self.is_replaced(ctx, &voting, v.node))
        {
            // To another member these may seem to be away, and it trains until it is told.
            self.wait_for_left(ctx, record);
        }
        self.give_up_group(ctx, record, "nothing can be decided in this group any more");
        self.hold(ctx);
        self.persist(ctx);
        true
    }

    /// Whether a voter still has its vote on what follows the head, as far as this node knows.
    pub(super) fn has_vote(&self, ctx: &Ctx<'_>, record: &Record, node: NodeId) -> bool {
        let voter = record.voters().find(|v| v.node == node);
        if node == ctx.me() {
            return self.durable.may_vote() && voter == Some(ctx.voter());
        }
        let there = ctx.peers.get(node).and_then(Peer::state_dir);
        let forfeited = self.has_forfeited(node) || self.is_replaced(ctx, record, node);
        !forfeited && voter.is_some_and(|v| there.is_none_or(|s| s == v.state))
    }

    /// Whether a voter has said that it votes no more on what follows the head.
    pub(super) fn has_forfeited(&self, node: NodeId) -> bool {
        let (of, told) = &self.merge.forfeited;
        *of == self.configuration() && told.contains(&node)
    }

    /// Whether the agent of a voter has come back without its state directory, and so under another identity: its
    /// launcher asks here to be let in as that of another node, or is dead, and another agent of its host has its
    /// address.
    fn is_replaced(&self, ctx: &Ctx<'_>, record: &Record, node: NodeId) -> bool {
        let member = record.member(node);
        let asks = member.and_then(|m| self.gathering.node_of(m.launcher));
        let dead = || ctx.peers.lost(node) == Some(true) && ctx.peers.has_successor(node);
        asks.is_some_and(|at| at != node) || dead()
    }

    /// This group is to end for a winner, and cannot write that down: too many of its voters live
    /// in the winner already, and never will vote here again while it lasts. It is left as a dead
    /// birth is, with the vote forfeited; whoever is not its leader follows the leader. So is a group
    /// whose end was granted long ago and is not decided: its voters may have forfeited their votes,
    /// which nobody tells.
    fn leave_for_winner(&mut self, ctx: &mut Ctx<'_>, record: &Record) -> bool {
        let first = self.first_there(ctx, record, |_| true);
        let followed = first.and_then(|n| self.merge.elsewhere.get(&n).copied());
        let leads = self.acting_leader(ctx, record) == Some(ctx.me());
        let followed = followed.filter(|w| *w < record.lineage());
        let winner = followed.or(self.merge.tombstone.filter(|_| leads));
        let due = self.merge.granted_at + ctx.cfg.birth_timeout.times(2);
        let granted = self.merge.tombstone.is_some() && record.arbiter == Arbiter::Members;
        let stuck = granted && ctx.now >= due;
        if granted && !stuck {
            self.wake_at(due, "an end that is not decided");
        }
        let goes =
            winner.is_some_and(|w| w < record.lineage() && (stuck || self.needs_voters_of(ctx, w)));
        if goes {
            let mine = self.head_digest();
            self.leave_group(ctx, mine, TO_ANOTHER_GROUP);
        }
        goes
    }

    /// This node has no part in the group, as it was dropped or lost its disk, and all who could lead it live in
    /// another: there it asks to be let in.
    fn leave_without_part(&mut self, ctx: &mut Ctx<'_>, record: &Record) -> bool {
        let goes = record.arbiter == Arbiter::Members
            && !self.has_part(ctx)
            && self.acting_leader(ctx, record).is_none()
            && self.first_there(ctx, record, |_| true).is_some();
        if goes {
            let mine = self.head_digest();
            self.leave_group(ctx, mine, TO_ANOTHER_GROUP);
        }
        goes
    }

    /// Whether this node trains in the head, or votes on what follows it.
    pub(super) fn has_part(&self, ctx: &Ctx<'_>) -> bool {
        self.is_member(ctx) || self.voting().is_none_or(|v| v.is_voter(ctx.voter()))
    }

    /// This node only knows of the group, in which its launcher does not wait, and nobody of it has been heard for as
    /// long as a birth may take: the job begins here as it would on nodes that never heard of it.
    fn leave_unheard(&mut self, ctx: &mut Ctx<'_>, record: &Record) -> bool {
        let Some(due) = self.unheard_until(ctx, record) else {
            return false;
        };
        if ctx.now < due {
            self.wake_at(due, "a group of which nobody is heard");
            return false;
        }
        let mine = self.head_digest();
        let why = "nobody of this group is heard, and the job begins anew";
        self.leave_group(ctx, mine, why);
        true
    }

    /// When this node leaves a group of which nobody is heard; none where it has a part in it, or somebody is there.
    fn unheard_until(&self, ctx: &Ctx<'_>, record: &Record) -> Option<Time> {
        let local = self.local.as_ref().filter(|l| l.conn.is_some())?;
        let head = self.live()?;
        let waits_there = local.reg.lineage == Some(head.lineage());
        if record.arbiter != Arbiter::Members || self.has_part(ctx) || waits_there {
            return None;
        }
        let members = record.members.iter().map(|m| m.node);
        let mut all = members.chain(head.voting().voters().map(|v| v.node));
        let heard = all.try_fold(local.since, |heard, node| {
            let seen = ctx.peers.get(node).map_or(Time::ZERO, |p| p.seen);
            (!ctx.reachable(node)).then(|| heard.max(seen))
        });
        Some(heard? + ctx.cfg.birth_timeout)
    }

    /// Nothing runs here, and another group of the job is led, and has as many nodes as train at least. In either
    /// order of the two, this node is of more use there. All who hold what is left here are told.
    fn leave_idle(&mut self, ctx: &mut Ctx<'_>, record: &Record) -> bool {
        if record.arbiter != Arbiter::Members || !self.is_another_complete(ctx, record) {
            return false;
        }
        let leads = self.acting_leader(ctx, record) == Some(ctx.me());
        let a = self.assess(ctx, record);
        let ends = a.finished || a.cancel || !a.leaving.is_empty() || !a.stuck.is_empty();
        // Nothing of a short one has begun, so it says nothing of a launcher that it waits for.
        let ends = ends || !(a.left_out.is_empty() || record.is_short());
        let idle = record.is_short() || a.survivors.is_empty() && a.away.is_empty();
        let decides = self.proposal.is_some() || self.is_stranded(ctx);
        let free = leads && idle && !ends && !decides;
        if !free && !self.is_hopeless(ctx) {
            return false;
        }
        let why = "nothing of this group runs, and another group of the job trains";
        self.give_up_group(ctx, record, why)
    }

    /// Whether another group is led, by what is said of it now, and has enough nodes.
    fn is_another_complete(&self, ctx: &Ctx<'_>, record: &Record) -> bool {
        // Of a first record it is a digest, which takes its time where there are hundreds of members.
        let mine = record.lineage();
        let other = |a: &Advert| {
            a.belongs
                && !a.deserted
                && a.lineage != mine
                && !self.merge.taken.contains(&a.lineage)
                && !self.durable.has_ended(a.lineage)
        };
        let mut groups: BTreeMap<Digest, (u16, bool)> = BTreeMap::new();
        for (node, advert) in self.adverts(ctx.peers.all).filter(|(_, a)| other(a)) {
            let (nodes, led) = groups.entry(advert.lineage).or_default();
            *nodes += 1;
            *led |= advert.leader == Some(node);
        }
        let mut groups = groups.values();
        groups.any(|(nodes, led)| *led && *nodes >= record.spec.min_nodes)
    }

    /// Nobody is left who could decide what follows, all members are known to be dead, and enough launchers wait here
    /// for the job to form anew: nodes that come without their state, as most of these do, need not ask for more.
    fn leave_dead(&mut self, ctx: &mut Ctx<'_>, record: &Record) -> bool {
        let dead = |m: &Member| self.is_dead(ctx, record, m.node) || self.is_anew(ctx.peers.all, m);
        let enough = self.eligible(ctx).count() >= usize::from(record.spec.birth_nodes());
        if !enough || !self.is_hopeless(ctx) || !record.members.iter().all(dead) {
            self.merge.dead_since = None;
            return false;
        }
        // Agents of a cluster that boots come one after the other.
        let since = *self.merge.dead_since.get_or_insert(ctx.now);
        let at = since + ctx.cfg.suspect_after.times(2);
        if ctx.now < at && !self.all_hosts_wait(record) {
            self.wake_at(at, "a group whose members are dead");
            return false;
        }
        self.give_up_group(ctx, record, "all of this group are dead, and it forms anew")
    }

    /// Whether as many launchers wait here, on each host, as the group had members there: no agent of it is still to
    /// come.
    fn all_hosts_wait(&self, record: &Record) -> bool {
        let host = |member: &Member| member.guard.ip();
        let waiting = self
            .gathering
            .tickets
            .values()
            .map(|h| host(&h.ticket.member));
        are_all_among(record.members.iter().map(host), waiting)
    }

    /// Leaves the head, and has all who still hold it told to leave it as well. Always `true`.
    fn give_up_group(&mut self, ctx: &mut Ctx<'_>, record: &Record, why: &str) -> bool {
        let mine = self.head_digest();
        self.durable.supersede(record.lineage(), record.number);
        self.leave_group(ctx, mine, why);
        true
    }

    /// Gives the head up for good, and with it the vote on what follows it.
    pub(super) fn leave_group(&mut self, ctx: &mut Ctx<'_>, mine: Digest, why: &str) {
        self.before = self.head.take();
        self.durable.leave();
        self.persist(ctx);
        self.member = None;
        self.lead = None;
        self.proposal = None;
        self.merge = Merge::default();
        self.applicant.told.clear();
        self.stop_launcher(ctx.now, mine, 0, why);
        self.wake_at(ctx.now, "join another group, or form one");
    }

    pub(super) fn drive_merge(&mut self, ctx: &mut Ctx<'_>) {
        let Some(head) = self.live() else {
            self.merge = Merge {
                taken: std::mem::take(&mut self.merge.taken),
                ..Merge::default()
            };
            return;
        };
        let (record, mine) = (head.record.clone(), head.lineage());
        if let Cause::Merged { other } = record.cause
            && !self.merge.taken.contains(&other)
        {
            self.merge.taken.push(other);
            // They are to live here, and some have said something else on the way.
            self.merge.elsewhere.retain(|_, lives| *lives != other);
        }
        // Not the leader alone: it may be gone, and this group unable to decide another.
        if self.leave_without_voters(ctx, &record)
            || self.leave_without_part(ctx, &record)
            || self.leave_unheard(ctx, &record)
            || self.leave_for_winner(ctx, &record)
            || self.leave_idle(ctx, &record)
            || self.leave_dead(ctx, &record)
            || self.acting_leader(ctx, &record) != Some(ctx.me())
        {
            return;
        }
        if let Some((loser, from)) = self.merge.asked
            && self.merge.taken.contains(&loser)
        {
            self.merge.asked = None;
            let body = JobMessage::MergeGranted {
                loser,
                winner: mine,
            };
            self.send(ctx, from, body);
        }
        if self.merge.tombstone.is_some() {
            return;
        }
        // The lowest first. One that does not answer may have ended, unheard: the next one is asked then.
        let lower = || self.merge.others.iter().filter(|(l, _)| **l < mine);
        let turn = self.merge.asks / ASKS;
        let winner = turn.checked_rem(lower().count());
        let Some((winner, leader)) = winner.and_then(|n| lower().nth(n)) else {
            return;
        };
        let (winner, leader) = (*winner, *leader);
        // Where all are dead the other group need not stop for this one, which leaves.
        let a = self.assess(ctx, &record);
        let spoke = |m: &Member| self.status_of(m.node).is_some();
        // A member that lives in another group never says how it stands in this one.
        let silent = |m: &Member| !spoke(m) && !self.merge.lives_elsewhere(m.node);
        if !a.survivors.iter().any(spoke) && a.survivors.iter().any(silent) {
            return self.wake_at(
                ctx.now + REPEAT,
                "members that have not said how they stand",
            );
        }
        if ctx.now >= self.merge.said + REPEAT || self.merge.said == Time::ZERO {
            self.merge.said = ctx.now;
            self.merge.asks += 1;
            // Its leader may be gone: whoever acts in its place is among those who live there.
            let there = self.merge.elsewhere.iter();
            let there = there.filter(|(n, l)| **l == winner && **n != leader);
            let stuck = self.needs_voters_of(ctx, winner);
            let asked: Vec<NodeId> = there.map(|(n, _)| *n).take(MAX_LIST).collect();
            for node in asked.into_iter().chain([leader]) {
                let loser = mine;
                self.send(ctx, node, JobMessage::MergeAsk { loser, stuck });
            }
        }
        self.wake_at(self.merge.said + REPEAT, "ask the other group again");
    }

    pub(super) fn on_merge_ask(
        &mut self,
        ctx: &mut Ctx<'_>,
        from: NodeId,
        loser: Digest,
        stuck: bool,
    ) {
        // It says itself where it is, if perhaps a moment later: then it asks again.
        let hello = ctx.peers.get(from).and_then(|p| p.hello.as_ref());
        let mut said = hello.iter().flat_map(|h| &h.jobs);
        let said = said.find(|a| a.key == self.key && a.lineage == loser);
        if self.is_over(ctx, from, loser, said.map_or(0, |a| a.number)) {
            return;
        }
        let Some(head) = self.live() else { return };
        let mine = head.lineage();
        if loser == mine {
            // Asked as the leader of the winner, which was decided without this node's knowledge:
            // the winner needs it, so its own group ends.
            let me = ctx.me();
            let led = |(l, n): &(&Digest, &NodeId)| **n == me && **l < loser;
            if let Some(winner) = self.merge.others.iter().find(led).map(|(l, _)| *l) {
                self.send(ctx, from, JobMessage::MergeGranted { loser, winner });
            }
            return;
        }
        if self.acting_leader(ctx, &head.record) != Some(ctx.me()) || loser < mine {
            return;
        }
        if self.merge.taken.contains(&loser) {
            let body = JobMessage::MergeGranted {
                loser,
                winner: mine,
            };
            return self.send(ctx, from, body);
        }
        // Nothing of this one has to stop first, and the other can decide nothing while it waits.
        let deserted = self.lead.as_ref().is_some_and(|l| l.deserted.is_some());
        if stuck && deserted {
            let winner = mine;
            return self.send(ctx, from, JobMessage::MergeGranted { loser, winner });
        }
        self.merge.asked = Some((loser, from));
        // Whatever it was once named here: it lives there.
        self.merge.elsewhere.insert(from, loser);
        if self.shares_members_with(loser) || self.needs_voters_of(ctx, loser) {
            let winner = mine;
            self.send(ctx, from, JobMessage::MergeGranted { loser, winner });
        }
    }

    /// Whether members of this generation live in `other`: the generation can neither start nor stop
    /// in good order without them, so the other group ends first.
    fn shares_members_with(&self, other: Digest) -> bool {
        let lives_there = |n: NodeId| self.merge.elsewhere.get(&n) == Some(&other);
        let mut members = self.live().into_iter().flat_map(|h| &h.record.members);
        members.any(|m| lives_there(m.node))
    }

    /// Whether nothing can be decided here without voters that live in `other`: they were named
    /// without being asked, and were bound there before they heard of it. Then the other group has
    /// to end first, and its nodes are free to vote here.
    fn needs_voters_of(&self, ctx: &Ctx<'_>, other: Digest) -> bool {
        let Some(head) = self.live() else {
            return false;
        };
        let here = |v: &Voter| {
            let hello = ctx.peers.get(v.node).filter(|p| p.connected);
            let state = hello.and_then(|p| p.hello.as_ref()).map(|h| h.state);
            *v == ctx.voter() || state == Some(v.state)
        };
        let voting = head.voting();
        let here = voting.voters().filter(here).map(|v| v.node);
        let here = here.filter(|n| self.has_vote(ctx, voting, *n));
        let here: BTreeSet<NodeId> = here.collect();
        let lives_there = |n: NodeId| self.merge.elsewhere.get(&n) == Some(&other);
        head.record.arbiter == Arbiter::Members
            && voting.is_majority(|n| here.contains(&n))
            && !voting.is_majority(|n| here.contains(&n) && !lives_there(n))
    }

    pub(super) fn on_merge_granted(&mut self, ctx: &mut Ctx<'_>, loser: Digest, winner: Digest) {
        let mine = self.live().map(Head::lineage);
        if mine == Some(loser) && winner < loser {
            if self.merge.tombstone.replace(winner).is_none() {
                self.merge.granted_at = ctx.now;
            }
            self.wake_at(ctx.now, "end this group");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::are_all_among;

    #[test]
    fn a_host_with_two_members_is_back_with_two_launchers() {
        let all = |these: &[u8], others: &[u8]| {
            are_all_among(these.iter().copied(), others.iter().copied())
        };
        assert!(all(&[1, 2, 1], &[3, 1, 2, 1]));
        assert!(!all(&[1, 2, 1], &[1, 2, 2]));
        assert!(!all(&[1, 2], &[1, 3, 4]));
    }
}
