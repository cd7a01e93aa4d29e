//! I8 to I11: what runs where, and for which generation.

use muster_launcher::patience;
use muster_protocol::record::{CommitRef, Record};
use muster_protocol::{Digest, Span};

use super::SLACK;
use crate::sim::clock::{MS, SEC};
use crate::sim::launcher::{Launcher, STEP};
use crate::sim::truth::{Spawn, Truth};
use crate::sim::world::World;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("node {node} restores {theirs:?} for {digest}, whose record says {restores:?}")]
pub struct RestoreError {
    node: usize,
    digest: Digest,
    theirs: Option<CommitRef>,
    restores: Option<CommitRef>,
}

/// I8: all ranks of a generation restore the same.
pub fn i08_all_restore_the_same(truth: &Truth) -> Result<(), RestoreError> {
    for spawn in truth.fresh_spawns() {
        let digest = spawn.start.digest;
        let restores = truth.records.get(&digest).and_then(|r| r.restore);
        if let Some(theirs) = spawn.restore
            && theirs != restores
        {
            return Err(RestoreError {
                node: spawn.node,
                digest,
                theirs,
                restores,
            });
        }
    }
    Ok(())
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WorkersError {
    #[error("node {node} runs workers for {digest}, which nobody decided")]
    NotDecided { node: usize, digest: Digest },
    #[error("node {node} runs workers for {digest} under a launcher that is not the member there")]
    NotMember { node: usize, digest: Digest },
    #[error("launcher {token} went back from number {before} to {after} of lineage {lineage}")]
    Backwards {
        token: u32,
        lineage: Digest,
        before: u64,
        after: u64,
    },
}

/// I9: workers run only for a decided digest, monotonic per launcher.
pub fn i09_workers_only_for_decided(truth: &Truth) -> Result<(), WorkersError> {
    for spawn in truth.fresh_spawns() {
        let (node, digest) = (spawn.node, spawn.start.digest);
        let record = truth.records.get(&digest);
        let Some(record) = record.filter(|_| truth.is_decided(&digest)) else {
            return Err(WorkersError::NotDecided { node, digest });
        };
        if !record.members.iter().any(|m| m.launcher == spawn.launcher) {
            return Err(WorkersError::NotMember { node, digest });
        }
        let (token, lineage, after) = (spawn.token, record.lineage(), record.number);
        let earlier = truth
            .spawns
            .iter()
            .filter(|s| s.token == token && s.at < spawn.at);
        for record in earlier.filter_map(|s| truth.records.get(&s.start.digest)) {
            let before = record.number;
            if before > after && record.lineage() == lineage {
                return Err(WorkersError::Backwards {
                    token,
                    lineage,
                    before,
                    after,
                });
            }
        }
    }
    Ok(())
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RanksError {
    #[error("node {node} was started with ranks that are not its own in {digest}")]
    NotOwn { node: usize, digest: Digest },
    #[error("two nodes of {digest}, attempt {attempt}, were given different masters")]
    Masters { digest: Digest, attempt: u32 },
    #[error("the record {digest} does not hold together: {why}")]
    Record {
        digest: Digest,
        why: muster_protocol::record::RecordError,
    },
}

/// I10: ranks are 0..world, one owner each.
pub fn i10_ranks_are_dense(truth: &Truth) -> Result<(), RanksError> {
    for (digest, record) in truth.fresh_announced() {
        record.check().map_err(|why| RanksError::Record {
            digest: *digest,
            why,
        })?;
    }
    for spawn in truth.fresh_spawns() {
        let s = &spawn.start;
        let (node, digest, attempt) = (spawn.node, s.digest, s.attempt);
        let Some(record) = truth.records.get(&digest) else {
            continue;
        };
        let position = record
            .members
            .iter()
            .position(|m| m.launcher == spawn.launcher);
        let ranks = position.and_then(|p| record.ranks_of(record.members.get(p)?.node));
        let fits = position == Some(s.node_rank as usize)
            && ranks == Some((s.first_rank, s.slots))
            && s.world == record.world()
            && s.nodes as usize == record.members.len()
            && s.number == record.number
            && record.members.first().map(|m| m.launcher) == Some(s.master_launcher);
        if !fits {
            return Err(RanksError::NotOwn { node, digest });
        }
        let same = |o: &&Spawn| o.start.digest == digest && o.start.attempt == attempt;
        let other =
            |o: &Spawn| (o.start.master, o.start.master_guard) != (s.master, s.master_guard);
        if truth.spawns.iter().filter(same).any(other) {
            return Err(RanksError::Masters { digest, attempt });
        }
    }
    Ok(())
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OverlapError {
    #[error(
        "node {node}, {} member of {next}, still runs workers of {old} {late_ms} ms after {next} started",
        if *stays { "a" } else { "no" }
    )]
    Beside {
        node: usize,
        old: Digest,
        next: Digest,
        stays: bool,
        late_ms: u64,
    },
    #[error("node {node} runs workers of {digest} {late_ms} ms after its agent was last heard")]
    Alone {
        node: usize,
        digest: Digest,
        late_ms: u64,
    },
}

/// Workers that exist while those of a later generation do, or did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overlap {
    node: usize,
    old: Digest,
    next: Digest,
    /// The node is a member of the later one.
    stays: bool,
    since: u64,
}

/// Whether one generation follows the other: in its lineage, or in one that began where that ended.
fn follows(truth: &Truth, next: &Record, old: &Record) -> bool {
    let mut at = next;
    // More lives than any run has.
    for _ in 0..100 {
        if at.lineage() == old.lineage() {
            return at.number > old.number;
        }
        let birth = match at.number {
            1 => Some(at),
            _ => truth.records.get(&at.lineage()).map(|r| &**r),
        };
        match birth.and_then(|b| truth.records.get(&b.parent)) {
            Some(end) => at = end,
            None => return false,
        }
    }
    false
}

pub(super) fn overlaps(world: &World) -> Vec<Overlap> {
    let mut out = Vec::new();
    for (index, node) in world.nodes.iter().enumerate() {
        let run = node.launcher.as_ref().and_then(|l| l.alive());
        let old = run.and_then(|r| world.truth.records.get_key_value(&r.start.digest));
        let Some((digest, old)) = old else {
            continue;
        };
        for spawn in world.truth.spawns.iter().rev() {
            let Some(next) = world.truth.records.get(&spawn.start.digest) else {
                continue;
            };
            if follows(&world.truth, next, old) {
                out.push(Overlap {
                    node: index,
                    old: *digest,
                    next: spawn.start.digest,
                    stays: next.has(node.id),
                    since: spawn.at,
                });
            }
        }
    }
    out
}

/// I11: no worker of a removed member runs after START of the next, in its lineage or in one that follows it; one of a
/// member that stays was told to end before, and has its grace. The known limit, where links
/// fail: an agent that crashed or was stopped cannot have its workers ended. They have until three quarters of
/// `agent_grace` and their grace are over, counted from that; or, when the agent has taken its launcher up again
/// before, until its lease must have run out anew. Workers that were killed and that no signal ends do not count.
/// Nothing else excuses an overlap: a broken connection between launcher and agent does not, nor a launcher that is
/// stopped, for its sidecar ends them when their lease is over.
pub fn i11_no_removed_worker_runs(world: &World) -> Result<(), OverlapError> {
    let times = &world.setup.times;
    let spec = &world.setup.spec;
    for overlap in &world.overlaps {
        let Overlap {
            node,
            old,
            next,
            stays,
            since,
        } = *overlap;
        let Some(n) = world.nodes.get(node) else {
            continue;
        };
        // Nothing runs on a machine that is suspended; its clock tells it afterwards that its lease holds on.
        if n.suspended.is_some() {
            continue;
        }
        let away =
            n.agent.is_none() || n.paused || n.launcher.as_ref().is_some_and(|l| l.is_alone());
        let lease = world.suspect_after(node).0;
        let woke = if n.woke > 0 { n.woke + lease } else { 0 };
        let left = n.left.filter(|_| world.setup.links_fail());
        let excused = left.map_or(0, |left| {
            let grace = left + times.agent_grace / 4 * 3;
            match away || n.steady_since > grace {
                // Their launcher asks them to end first.
                true => grace + u64::from(spec.loss_grace_ms) * MS,
                false => n.steady_since.saturating_add(lease),
            }
        });
        let grace = u64::from(spec.loss_grace_ms.max(spec.stop_grace_ms)) * MS;
        let grace = match (stays, world.setup.live) {
            (false, _) => 0,
            (true, false) => grace + lease,
            (true, true) => grace.max(patience(Some(Span(STEP))).0) + lease,
        };
        let run = n.launcher.as_ref().and_then(|l| l.alive());
        // A launcher that was stopped reads an old START, begins, and reads then that it is over.
        let went_on = n.launcher.as_ref().map_or(0, |l| l.went_on);
        let began = run.map(|r| r.began).filter(|at| *at <= went_on + SLACK);
        let began = began.unwrap_or(0);
        let limit = since.max(excused).max(woke).max(began) + grace + SLACK;
        // What was killed in time is no fault, though the kernel cannot end it.
        let until = run.and_then(|r| r.killed).unwrap_or(world.now);
        if until > limit {
            let late_ms = (until - since) / MS;
            return Err(OverlapError::Beside {
                node,
                old,
                next,
                stays,
                late_ms,
            });
        }
    }
    alone_workers_end(world)
}

/// Workers whose agent is away are killed once three quarters of `agent_grace` and their grace are over.
fn alone_workers_end(world: &World) -> Result<(), OverlapError> {
    let limit = world.setup.times.agent_grace / 4 * 3;
    let limit = limit + u64::from(world.setup.spec.loss_grace_ms) * MS + SLACK;
    for (node, n) in world.nodes.iter().enumerate() {
        let launcher = n.launcher.as_ref().filter(|l| l.paused.is_none());
        let Some((launcher, run)) = launcher.and_then(|l| Some((l, l.alive()?))) else {
            continue;
        };
        let until = run.killed.unwrap_or(world.now);
        if until > launcher.heard() + limit {
            let late_ms = (until - launcher.heard()) / MS;
            let digest = run.start.digest;
            return Err(OverlapError::Alone {
                node,
                digest,
                late_ms,
            });
        }
    }
    Ok(())
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("node {node}'s launcher has not answered an order about {digest}")]
pub struct UnansweredError {
    node: usize,
    digest: Digest,
}

/// A launcher answers every START and every STOP, unless nothing can end its workers.
pub fn orders_are_answered(world: &World) -> Result<(), UnansweredError> {
    for (node, n) in world.nodes.iter().enumerate() {
        let held =
            |l: &&Launcher| world.now > l.habits.unkillable_until + l.habits.reaped_after + SEC;
        let launcher = n.launcher.as_ref().filter(|l| l.paused.is_none());
        if let Some(digest) = launcher.filter(held).and_then(|l| l.unanswered(world.now)) {
            return Err(UnansweredError { node, digest });
        }
    }
    Ok(())
}
