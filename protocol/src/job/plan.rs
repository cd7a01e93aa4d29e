//! View of the acting leader, and the record that it would have decided next: pure reading of
//! the job's state, without a single effect.

use std::collections::BTreeSet;

use super::gathering::Held;
use super::second_look::Verdict;
use super::spares::Joining;
use super::{Ctx, Job};
use crate::budget;
use crate::clique;
use crate::ids::{Digest, NodeId, StateId};
use crate::local::WorkerExit;
use crate::peers::Peer;
use crate::ranks;
use crate::record::{Arbiter, Cause, Kind, Member, Record, Voter};
use crate::time::{Span, Time};
use crate::wire::{Leave, Status};

/// By how much hosts' clocks may differ, in milliseconds.
const CLOCKS_DIFFER_MS: u64 = 1_000;

/// From the end of the grace until a member is given up whose workers have not ended. A process with much
/// memory on a GPU takes seconds to be torn down; one that waits for a dead device or file system never is.
pub(super) const STOP_LIMIT: Span = Span::from_secs(10);

/// The members of the present generation, by how they are.
#[derive(Debug, Default)]
pub(super) struct Assessment {
    /// Lost by the failure detector, with a dead launcher, or back with another state directory.
    pub(super) lost: Vec<NodeId>,
    /// Agents away while their launchers answer: no fault, but they cannot join a new generation.
    pub(super) away: Vec<NodeId>,
    pub(super) not_started: Vec<NodeId>,
    /// Told to end their workers, and have not for [`STOP_LIMIT`]: the others go on without them.
    pub(super) stuck: Vec<NodeId>,
    /// The launcher there does not answer its agent. That disturbs nobody while all train.
    pub(super) unresponsive: Vec<NodeId>,
    /// Of these, those that the others go on without: the generation ends or starts, which takes every launcher.
    pub(super) left_out: Vec<NodeId>,
    /// Ended their workers for lack of a lease.
    pub(super) dark: Vec<NodeId>,
    /// Stopped by a deputy, or by a cause that is gone by now: they do not come back by themselves.
    pub(super) idle: Vec<NodeId>,
    pub(super) leaving: Vec<(NodeId, Leave)>,
    pub(super) failed: Option<(NodeId, WorkerExit)>,
    pub(super) unlinked: Vec<NodeId>,
    /// When a link that is missing now will count.
    pub(super) links_due: Option<Time>,
    pub(super) cancel: bool,
    /// Every member that is not lost has finished, and at least one has.
    pub(super) finished: bool,
    pub(super) survivors: Vec<Member>,
    /// Members that could go on, had they not lost the store.
    pub(super) cut: Vec<Member>,
}

impl Assessment {
    /// Something ended the generation by itself: nothing is gained by waiting.
    pub(super) fn is_broken(&self) -> bool {
        !(self.lost.is_empty()
            && self.stuck.is_empty()
            && self.not_started.is_empty()
            && self.dark.is_empty()
            && self.idle.is_empty()
            && self.unlinked.is_empty())
    }

    /// How many nodes may join. A member whose agent is away keeps its place: it is no fault, and ends with
    /// the agent's return.
    pub(super) fn room(&self, record: &Record) -> usize {
        let taken = self.survivors.len() + self.away.len();
        usize::from(record.spec.max_nodes).saturating_sub(taken)
    }

    /// The user stops the job, and members that went first are all that is wrong: nothing goes on, so the ranks of the
    /// others have the time to save that the user gave them.
    pub(super) fn is_cancelled_orderly(&self) -> bool {
        let others = self.stuck.is_empty()
            && self.left_out.is_empty()
            && self.not_started.is_empty()
            && self.dark.is_empty()
            && self.unlinked.is_empty();
        others && self.cancel && !self.lost.is_empty()
    }

    /// Members that did not start are all that is wrong.
    pub(super) fn only_unstarted(&self) -> bool {
        let others = self.lost.is_empty()
            && self.stuck.is_empty()
            && self.left_out.is_empty()
            && self.dark.is_empty()
            && self.idle.is_empty()
            && self.unlinked.is_empty();
        others && !self.not_started.is_empty() && !self.cancel && self.leaving.is_empty()
    }
}

impl Job {
    /// The first member, in rank order, that is not lost or away, and that does not live in another group of
    /// the job: who leads, as this node sees it.
    pub(super) fn acting_leader(&self, ctx: &Ctx<'_>, record: &Record) -> Option<NodeId> {
        self.first_there(ctx, record, |n| !self.merge.lives_elsewhere(n))
    }

    /// The first that could lead among the members, else among the witnesses, and that `fits`.
    pub(super) fn first_there(
        &self,
        ctx: &Ctx<'_>,
        record: &Record,
        fits: impl Fn(NodeId) -> bool,
    ) -> Option<NodeId> {
        let there = |m: &&Member| {
            if self.storeless.contains_key(&m.node) {
                false
            } else if m.node == ctx.me() {
                m.state == ctx.cfg.state
            } else {
                !self.is_lost(ctx, m) && !ctx.peers.away(m.node) && fits(m.node)
            }
        };
        let member = record.members.iter().find(there).map(|m| m.node);
        member.or_else(|| self.acting_witness(ctx, fits))
    }

    /// With no member left, a witness that is there has the next generation decided: from the
    /// nodes that ask to be let in.
    fn acting_witness(&self, ctx: &Ctx<'_>, fits: impl Fn(NodeId) -> bool) -> Option<NodeId> {
        let voting = self.voting()?;
        let there = |w: &&Voter| {
            let peer = ctx.peers.get(w.node).filter(|p| p.connected);
            let here = w.node == ctx.me() || peer.and_then(Peer::state_dir) == Some(w.state);
            here && fits(w.node) && self.has_vote(ctx, voting, w.node)
        };
        voting.witnesses.iter().find(there).map(|w| w.node)
    }

    /// Whether a member is lost as an agent: judged so, or back without its state.
    pub(super) fn is_lost(&self, ctx: &Ctx<'_>, m: &Member) -> bool {
        if m.node == ctx.me() {
            return m.state != ctx.cfg.state;
        }
        let peer = ctx.peers.get(m.node);
        ctx.peers.lost(m.node).is_some() || peer.is_some_and(|p| p.has_lost(m.state))
    }

    /// The state directory with which a node is a member of this generation.
    pub(crate) fn member_state(&self, digest: &Digest, node: NodeId) -> Option<StateId> {
        let head = self.live().filter(|h| h.digest == *digest)?;
        head.record.member(node).map(|m| m.state)
    }

    pub(super) fn status_of(&self, node: NodeId) -> Option<&Status> {
        self.lead.as_ref().and_then(|l| l.statuses.get(&node))
    }

    /// Whether this node's workers of the present generation are known never to run again.
    pub(super) fn stopped_for_good(&self, node: NodeId) -> bool {
        // One without its launcher tells all members.
        let said = self.status_of(node).or_else(|| self.storeless.get(&node));
        said.is_some_and(|s| s.stopped || s.gone || s.finished)
    }

    pub(super) fn assess(&self, ctx: &Ctx<'_>, record: &Record) -> Assessment {
        // Its own status says so a moment later.
        let here = self.is_member(ctx) && self.local.as_ref().is_some_and(|l| l.cancel);
        let mut a = Assessment {
            cancel: here || self.lead.as_ref().is_some_and(|l| l.cancelled),
            ..Assessment::default()
        };
        let mut failures = Vec::new();
        let (mut any_finished, mut all_finished) = (false, true);
        for m in &record.members {
            let status = self.status_of(m.node);
            let finished = status.is_some_and(|s| s.finished);
            any_finished |= finished;
            let gone = status.is_some_and(|s| s.gone);
            // Back with another launcher before anybody missed it: the member's workers are dead.
            if self.is_lost(ctx, m) || gone || self.replaced(m) {
                if !finished {
                    a.lost.push(m.node);
                    all_finished = false;
                }
                continue;
            }
            all_finished &= finished;
            if ctx.peers.away(m.node) {
                a.away.push(m.node);
                continue;
            }
            if let Some(status) = status {
                a.cancel |= status.cancel;
                if self.is_stuck(ctx, record, status) {
                    a.stuck.push(m.node);
                    continue;
                }
                if status.unresponsive && !status.finished {
                    a.unresponsive.push(m.node);
                }
                if let Some(leave) = &status.leave {
                    a.leaving.push((m.node, leave.clone()));
                    continue;
                }
                if status.lease_lost && !finished {
                    a.dark.push(m.node);
                    if status.storeless {
                        // It would get no lease in the next generation either.
                        a.cut.push(m.clone());
                        continue;
                    }
                }
                if let Some(exit) = &status.exit {
                    let lead = self.lead.as_ref();
                    let told = lead.and_then(|l| l.failures.iter().position(|n| *n == m.node));
                    failures.push((told, m.node, exit));
                }
            }
            let peer = ctx.peers.get(m.node);
            let leaves = peer.and_then(|p| p.leaves(ctx.now, ctx.cfg.suspect_after));
            if let Some(leave) = leaves {
                a.leaving.push((m.node, leave.clone()));
                continue;
            }
            if self.failed_to_start(m.node) {
                a.not_started.push(m.node);
                // Kept out for a while; if the job cannot go on without it, tried again then.
                if self.parked_ms(ctx, m.node).is_some() {
                    continue;
                }
            }
            let misread = self
                .lead
                .as_ref()
                .is_some_and(|l| l.misread.contains(&m.node));
            if misread && self.parked_ms(ctx, m.node).is_some() {
                continue;
            }
            a.survivors.push(m.clone());
        }
        a.failed = root_cause(failures);
        a.finished = any_finished && all_finished;
        self.leave_out(record, &mut a);
        let links = self.missing_links(ctx, &mut a);
        if !links.is_empty() {
            let nodes: Vec<NodeId> = a.survivors.iter().map(|m| m.node).collect();
            let (_, dropped) = clique::drop_unlinked(&nodes, &links);
            a.survivors.retain(|m| !dropped.contains(&m.node));
            a.unlinked = dropped;
        }
        let planned = self.lead.as_ref().is_some_and(|l| l.planned.is_some());
        let ends = planned || !a.left_out.is_empty();
        if !(ends || a.is_broken() || a.cancel || a.failed.is_some() || a.finished)
            && a.leaving.is_empty()
        {
            let idle = |m: &&Member| {
                let status = self.status_of(m.node);
                status.is_some_and(|s| s.stopped && !s.finished)
            };
            a.idle = a.survivors.iter().filter(idle).map(|m| m.node).collect();
        }
        a
    }

    /// Until when the members may take to end their workers, once all were told to.
    pub(super) fn stop_limit(&self, record: &Record) -> Option<Time> {
        let ending = self.lead.as_ref()?.ending?;
        Some(ending + record.spec.loss_grace() + STOP_LIMIT)
    }

    /// Whether a member was told to end its workers long ago, and has not: they cannot be ended, or its
    /// launcher stands still.
    fn is_stuck(&self, ctx: &Ctx<'_>, record: &Record, status: &Status) -> bool {
        let over = status.stopped || status.gone || status.finished;
        !over && self.stop_limit(record).is_some_and(|at| ctx.now >= at)
    }

    /// Links that stay missing between two members that this node reaches well. One of the two may
    /// just be dying, which shows here as well a moment later, and is then the better reason.
    fn missing_links(&self, ctx: &Ctx<'_>, a: &mut Assessment) -> BTreeSet<(NodeId, NodeId)> {
        let patience = Span(ctx.cfg.suspect_after.0 / 4);
        let links = self.lead.as_ref().map(|l| &l.links);
        let Some(links) = links.filter(|l| !l.is_empty()) else {
            return BTreeSet::new();
        };
        let there: BTreeSet<NodeId> = a.survivors.iter().map(|m| m.node).collect();
        let well = |n: &NodeId| there.contains(n) && ctx.peers.unwell(*n).is_none();
        let (mut due, mut out) = (None::<Time>, BTreeSet::new());
        for (pair, since) in links {
            if !well(&pair.0) || !well(&pair.1) {
                continue;
            }
            let at = *since + patience;
            if ctx.now >= at {
                out.insert(*pair);
            } else {
                due = Some(due.map_or(at, |t| t.min(at)));
            }
        }
        a.links_due = due;
        out
    }

    fn failed_to_start(&self, node: NodeId) -> bool {
        self.lead
            .as_ref()
            .is_some_and(|l| l.start.struck.contains(&node))
    }

    pub(super) fn survivors(&self, ctx: &Ctx<'_>, record: &Record) -> Vec<Member> {
        self.assess(ctx, record).survivors
    }

    /// Leaves out the members whose launchers do not answer, where the generation ends by itself, has not started on
    /// them, or has stopped everywhere else.
    fn leave_out(&self, record: &Record, a: &mut Assessment) {
        let Some(lead) = &self.lead else { return };
        let broken = lead.ending.is_some() || a.is_broken();
        a.left_out.clone_from(&a.unresponsive);
        let any = || record.members.iter().any(|m| self.stopped_for_good(m.node));
        let stopped = lead.planned.is_some() && any() && self.all_stopped(record, a);
        let started = |n| {
            self.status_of(n)
                .is_some_and(|s: &Status| s.started.is_some())
        };
        a.left_out.retain(|n| broken || stopped || !started(*n));
        a.survivors.retain(|m| !a.left_out.contains(&m.node));
    }

    /// How long a node is still kept out, in milliseconds.
    pub(super) fn parked_ms(&self, ctx: &Ctx<'_>, node: NodeId) -> Option<u64> {
        let until = self.strikes.get(&node)?.readmit_at();
        let left = until.since(ctx.now).as_millis();
        (left > 0).then_some(left)
    }

    /// Until when more nodes may come before those that are here go on, where nothing runs: as before a birth, each
    /// further start would end what the one before has begun.
    pub(super) fn gathers_until(
        &self,
        ctx: &Ctx<'_>,
        record: &Record,
        a: &Assessment,
    ) -> Option<Time> {
        let few = a.survivors.len() < usize::from(record.spec.min_nodes);
        let idle = record.is_short() || few && a.cut.is_empty();
        if !idle || a.finished || a.cancel || !a.leaving.is_empty() {
            return None;
        }
        let come = self.candidates(ctx, record);
        // The one with which there were enough: those before it waited in any case.
        let needed = usize::from(record.spec.min_nodes).saturating_sub(a.survivors.len());
        let enough = come.get(needed.saturating_sub(1)).or(come.last())?;
        let quiet = self.gathering.last_new + record.spec.form_quiet();
        let quiet = quiet.min(enough.first + record.spec.join_max());
        (ctx.now < quiet && come.len() < a.room(record)).then_some(quiet)
    }

    /// The record that should follow the head, as things stand; `None` while too few nodes are
    /// there, more may come, or nothing is to change.
    pub(super) fn next_record(&self, ctx: &mut Ctx<'_>) -> Option<Record> {
        let head = self.live()?;
        let record = head.record.clone();
        let parent = head.digest;
        let a = self.assess(ctx, &record);
        let next = |kind: Kind, cause: Cause, nonce: u64| Record {
            key: record.key.clone(),
            birth: record.lineage(),
            number: record.number + 1,
            parent,
            kind,
            members: Vec::new(),
            witnesses: Vec::new(),
            arbiter: record.arbiter,
            spec: record.spec.clone(),
            restarts_used: record.restarts_used,
            cause,
            restore: record.restore,
            nonce,
        };
        let nonce = ctx.rng.next_u64();
        if let Some(winner) = self.merge.tombstone {
            return Some(next(
                Kind::Tombstone { winner },
                Cause::Merged { other: winner },
                nonce,
            ));
        }
        if a.finished {
            return Some(next(Kind::End { cancelled: false }, Cause::Finished, nonce));
        }
        if a.cancel {
            return Some(next(Kind::End { cancelled: true }, Cause::Cancelled, nonce));
        }
        let cause = self.cause(&record, &a);
        let charge = cause
            .as_ref()
            .map(|c| budget::charge(&record.spec, record.restarts_used, c));
        if let Some(budget::Charge::Failed { code, .. }) = charge {
            return cause.map(|cause| next(Kind::Failed { code }, cause, nonce));
        }
        if let Some(Cause::StartFailed { .. }) = cause
            && let Some(code) = self.hopeless(&record)
        {
            return cause.map(|cause| next(Kind::Failed { code }, cause, nonce));
        }
        // Where all others leave, the job waits for those that lost the store, or do not answer.
        let mut waited = a.cut.clone();
        let leaves = |n: NodeId| a.leaving.iter().any(|(node, _)| *node == n);
        let silent = |m: &&Member| a.left_out.contains(&m.node) && !leaves(m.node);
        if !a.leaving.is_empty() {
            waited.extend(record.members.iter().filter(silent).cloned());
        }
        let survivors = match a.survivors.is_empty() {
            true => &waited,
            false => &a.survivors,
        };
        if self.gathers_until(ctx, &record, &a).is_some() {
            return None;
        }
        let mut joiners = self.joiners(ctx, &record, a.room(&record));
        joiners.retain(|j| !survivors.iter().any(|s| s.node == j.node));
        let cause = cause.or_else(|| {
            let nodes = joiners.iter().map(|m| m.node).collect::<Vec<_>>();
            (!nodes.is_empty()).then_some(Cause::NodesJoined { nodes })
        });
        // A planned stop whose reason is gone by now: everybody has stopped, so all start again.
        let cause = cause.or_else(|| {
            let nodes = survivors.iter().map(|m| m.node);
            let nodes = nodes.take(crate::wire::MAX_LIST).collect();
            let stopped = self.all_stopped(&record, &a);
            stopped.then_some(Cause::Resumed { nodes })
        })?;
        if survivors.is_empty() && joiners.is_empty() {
            // The dead do not come back: nobody is left for whom the job could wait.
            let dead = a.lost.iter().all(|n| self.is_dead(ctx, &record, *n));
            // Tickets of agents that say nothing are soon void.
            let none_asks = self.candidates(ctx, &record).is_empty();
            let all_leave = !a.leaving.is_empty() && dead && a.away.is_empty() && none_asks;
            return (all_leave || self.is_given_up(ctx, &record))
                .then(|| next(Kind::Dormant, cause, nonce));
        }
        let members = ranks::order(survivors, &joiners);
        // Who leaves is let go, and a group that joins is let in, all the same: what comes of that runs
        // nothing until others come.
        let short = members.len() < usize::from(record.spec.min_nodes);
        if short && a.leaving.is_empty() && !matches!(cause, Cause::Merged { .. }) {
            return None;
        }
        let mut out = next(Kind::Next, cause, nonce);
        out.witnesses = match out.arbiter {
            crate::record::Arbiter::Members => {
                let leaving: Vec<NodeId> = a.leaving.iter().map(|(n, _)| *n).collect();
                let before = self.voting().map_or(&[][..], |r| &r.witnesses[..]);
                self.witnesses(ctx, &members, before, &leaving)
            }
            crate::record::Arbiter::Store(_) => Vec::new(),
        };
        out.members = members;
        if let Some(charge) = charge {
            out.restarts_used = charge.restarts_used();
        }
        Some(out)
    }

    /// Whether tickets may wait in the life of the job that runs. A launcher that was started with other flags is of the
    /// next one ([`differs`]).
    pub(super) fn joining(&self, ctx: &Ctx<'_>) -> Joining {
        let (Some(head), Some(lead)) = (self.live(), &self.lead) else {
            return Joining::Unclear;
        };
        let record = &head.record;
        let a = self.assess(ctx, record);
        let fails = self.cause(record, &a).is_some_and(|cause| {
            let charge = budget::charge(&record.spec, record.restarts_used, &cause);
            matches!(charge, budget::Charge::Failed { .. })
        });
        let finishes = lead.statuses.values().any(|s| s.finished);
        let nobody = a.survivors.is_empty() && a.cut.is_empty() && a.left_out.is_empty();
        let all_leave = nobody && !a.leaving.is_empty();
        let given_up = self.is_given_up(ctx, record);
        // A launcher that came when those who took part were gone, or left, does not share their end: it may have been
        // voted on before.
        let gone = !self.any_member_stays(ctx, record);
        match a.cancel || fails || finishes || all_leave || given_up {
            true => Joining::Ends(head.lineage()),
            false if gone => Joining::Unclear,
            false => Joining::Life(head.lineage()),
        }
    }

    /// Whether it is known that a ticket which may wait in the life that runs does so.
    pub(super) fn waits_in_life(&self, held: &Held) -> bool {
        let Some(head) = self.live() else {
            return false;
        };
        // On the other side of a cut it may be over: those that decide have to say, since the launcher came, that it
        // goes on.
        let says = |n| {
            let mine = self.member.as_ref();
            mine.is_some_and(|m| m.acknowledged(n, held.first))
        };
        match head.record.arbiter {
            Arbiter::Store(_) => self.log_read_since(held.first),
            Arbiter::Members => head.voting().is_majority(says),
        }
    }

    /// A member whose node holds a ticket for another launcher by now.
    pub(super) fn replaced(&self, m: &Member) -> bool {
        self.gathering
            .tickets
            .get(&m.node)
            .is_some_and(|h| h.ticket.member.launcher != m.launcher)
    }

    pub(super) fn cause(&self, record: &Record, a: &Assessment) -> Option<Cause> {
        let cap = |nodes: &[NodeId]| {
            let nodes = nodes.iter();
            nodes.take(crate::wire::MAX_LIST).copied().collect()
        };
        if !(a.lost.is_empty() && a.stuck.is_empty()) {
            let nodes = a.lost.iter().chain(&a.stuck).chain(&a.left_out);
            let nodes: Vec<NodeId> = nodes.copied().collect();
            return Some(Cause::NodesLost { nodes: cap(&nodes) });
        }
        if !a.dark.is_empty() {
            let nodes = cap(&a.dark);
            return Some(Cause::LeasesLost { nodes });
        }
        if !a.unlinked.is_empty() {
            let nodes = cap(&a.unlinked);
            return Some(Cause::LinksLost { nodes });
        }
        if !a.idle.is_empty() {
            let nodes = cap(&a.idle);
            return Some(Cause::Resumed { nodes });
        }
        let planned = self.lead.as_ref().is_some_and(|l| l.planned.is_some());
        if let Some((node, exit)) = &a.failed
            && !planned
        {
            let Some(commit) = self.damaged(record, exit) else {
                return Some(cause_of(*node, exit));
            };
            let (rank, step) = (exit.rank, commit.step);
            let verdict = self.verdict(&commit);
            if verdict.is_none() && !a.leaving.is_empty() {
                // These wait for none, and the next generation asks anew.
                return Some(left(a));
            }
            return Some(match verdict {
                Some(Verdict::Whole { .. }) => Cause::Misread {
                    nodes: cap(&self.misread_by()),
                    step,
                },
                Some(Verdict::Unknown { urgent: true, .. }) => cause_of(*node, exit),
                Some(Verdict::Unknown { .. } | Verdict::Damaged { .. }) | None => Cause::Damaged {
                    node: *node,
                    rank,
                    step,
                },
            });
        }
        if !a.not_started.is_empty() {
            let nodes = cap(&a.not_started);
            return Some(Cause::StartFailed { nodes });
        }
        if !a.leaving.is_empty() {
            return Some(left(a));
        }
        if !a.left_out.is_empty() {
            let nodes = cap(&a.left_out);
            return Some(Cause::NodesLost { nodes });
        }
        if let Some(other) = self.merge.taking_in() {
            return Some(Cause::Merged { other });
        }
        None
    }
}

fn left(a: &Assessment) -> Cause {
    let nodes = a.leaving.iter().take(crate::wire::MAX_LIST);
    Cause::NodesLeft {
        nodes: nodes.map(|(node, _)| *node).collect(),
    }
}

/// The cause that a worker's end gives for the next generation.
fn cause_of(node: NodeId, exit: &WorkerExit) -> Cause {
    let (rank, code) = (exit.rank, exit.code);
    // By its launcher's word: a rank that was named may have moved, and failed by itself then.
    match exit.hung {
        true => Cause::WorkerHung { node, rank, code },
        false => Cause::WorkerFailed { node, rank, code },
    }
}

/// Of all failures the one that the others follow from: a damaged checkpoint before all, then a worker
/// that was killed by a signal before one that exited, then the one that was told first. The hosts'
/// clocks are believed only where they differ by more than they are usually wrong.
fn root_cause(failures: Vec<(Option<usize>, NodeId, &WorkerExit)>) -> Option<(NodeId, WorkerExit)> {
    let class = |e: &WorkerExit| (e.damaged.is_none(), e.signal.is_none());
    let first = failures.iter().map(|(_, _, e)| class(e)).min()?;
    let gravest = || failures.iter().filter(|(_, _, e)| class(e) == first);
    // One whose telling was not seen was told to a leader before this one.
    let (_, _, heard) = gravest().min_by_key(|(told, _, e)| (*told, e.rank))?;
    let (_, node, exit) = gravest().min_by_key(|(told, _, e)| {
        let earlier = e.at_ms.saturating_add(CLOCKS_DIFFER_MS) < heard.at_ms;
        let at = if earlier { e.at_ms } else { u64::MAX };
        (at, *told, e.rank)
    })?;
    Some((*node, (*exit).clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_worker_that_its_launcher_ended_for_it_counts_as_hung() {
        let mut exit = WorkerExit {
            rank: 3,
            local_rank: 0,
            pid: 7,
            code: 137,
            signal: Some(9),
            hung: false,
            out_of_memory: None,
            damaged: None,
            at_ms: 0,
            tail: String::new(),
        };
        let (node, rank, code) = (NodeId([1; 32]), 3, 137);
        let failed = Cause::WorkerFailed { node, rank, code };
        assert_eq!(cause_of(node, &exit), failed);
        exit.hung = true;
        let hung = Cause::WorkerHung { node, rank, code };
        assert_eq!(cause_of(node, &exit), hung);
    }

    #[test]
    fn the_failure_that_was_told_first_is_the_root_unless_the_clocks_say_clearly_otherwise() {
        let exit = |rank, at_ms, signal| WorkerExit {
            rank,
            local_rank: 0,
            pid: 7,
            code: 1,
            signal,
            hung: false,
            out_of_memory: None,
            damaged: None,
            at_ms,
            tail: String::new(),
        };
        let root = |list: &[(Option<usize>, WorkerExit)]| {
            let failures = list.iter().map(|(told, e)| (*told, NodeId([1; 32]), e));
            root_cause(failures.collect()).map(|(_, e)| e.rank)
        };
        assert_eq!(root(&[]), None);
        // A clock that is 200 ms behind blames nobody.
        let (cause, follows) = (exit(3, 10_000, None), exit(0, 9_850, None));
        assert_eq!(
            root(&[(Some(1), follows), (Some(0), cause.clone())]),
            Some(3)
        );
        // What was told late, but happened long before, is the cause.
        let (late, slow) = (exit(0, 8_500, None), exit(1, 8_000, None));
        let all = [(Some(1), late), (Some(2), slow), (Some(0), cause.clone())];
        assert_eq!(root(&all), Some(1));
        let killed = exit(5, 20_000, Some(9));
        assert_eq!(root(&[(Some(0), cause), (Some(1), killed)]), Some(5));
    }
}
