//! Conditions that must come about once the faults have stopped, computed from the truth.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use muster_protocol::Digest;
use muster_protocol::record::{Arbiter, Record};
use muster_protocol::wire::CheckpointStage;

use super::clock::SEC;
use super::launcher::{Launcher, Phase};
use super::truth::{Holder, majority};
use super::world::{Node, World};

/// For how long the cluster has to be at rest.
const QUIET: u64 = 6 * SEC;

/// Why the cluster is not where it must come to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LivenessError {
    #[error("{launchers} launchers are up, {min} are enough, but no generation runs")]
    NothingRuns { launchers: usize, min: u16 },
    #[error(
        "generation {digest} (number {number}) should run, but node {node} does not train for it"
    )]
    NotTraining {
        digest: Digest,
        number: u64,
        node: usize,
    },
    #[error("generation {digest} has fewer members than the minimum")]
    BelowMinimum { digest: Digest },
    #[error("node {node}'s launcher was never taken in, though the job has room")]
    LeftOut { node: usize },
    #[error("node {node} runs workers of {digest}, which is not the newest generation")]
    Leftover { node: usize, digest: Digest },
    #[error("generations go on and on: {a} and then {b}")]
    Restless { a: Digest, b: Digest },
    #[error("ranks of node {node} wait at a step that nobody decides")]
    WaitsAtBarrier { node: usize },
    #[error("node {node}'s agent was asked to {what}, and does not say how that went")]
    OrderOpen { node: usize, what: Order },
    #[error("a worker of node {node} hangs for ever, and node {unaware} has not heard of it")]
    NoVerdict { node: usize, unaware: usize },
}

impl LivenessError {
    /// Longest time that this may be so, once all is well.
    fn bound(&self) -> Option<u64> {
        match self {
            LivenessError::WaitsAtBarrier { .. } => Some(10 * SEC),
            LivenessError::NoVerdict { .. } => Some(20 * SEC),
            LivenessError::OrderOpen { what, .. } => Some(what.bound()),
            _ => None,
        }
    }
}

/// An order of a person at an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    Cancel,
    Checkpoint,
}

impl Order {
    /// Longest time until it is answered, once all is well.
    fn bound(self) -> u64 {
        match self {
            // A launcher may take a life over first that nobody else could end: after `orphan_after`.
            Order::Cancel => 60 * SEC,
            // The ranks have 30 s to agree on a step, and save then.
            Order::Checkpoint => 60 * SEC,
        }
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Order::Cancel => "end the job",
            Order::Checkpoint => "have the job save",
        })
    }
}

/// How the cluster is at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// This generation runs, whole.
    Runs(Digest),
    /// Nothing has to run: no launchers, too few, or voters that may come back are waited for.
    Waits,
    Not(LivenessError),
}

/// Since when the cluster has been as it is.
#[derive(Debug, Default)]
pub struct Settling {
    last: Option<(State, u64)>,
    running: Option<Digest>,
    changes: u32,
}

impl Settling {
    /// True once it has been at rest for long enough; an error when time is over before.
    pub fn judge(&mut self, now: u64, state: State, over: bool) -> Result<bool, LivenessError> {
        let since = match &self.last {
            Some((last, since)) if *last == state => *since,
            _ => now,
        };
        self.last = Some((state.clone(), since));
        match state {
            State::Not(error) => {
                let late = error.bound().is_some_and(|bound| now - since > bound);
                return match over || late {
                    true => Err(error),
                    false => Ok(false),
                };
            }
            State::Runs(digest) => {
                if let Some(before) = self.running.replace(digest)
                    && before != digest
                {
                    self.changes += 1;
                    if over {
                        return Err(LivenessError::Restless {
                            a: before,
                            b: digest,
                        });
                    }
                }
            }
            State::Waits => {}
        }
        Ok(now - since >= QUIET)
    }
}

pub fn settled(world: &World) -> State {
    let launchers: Vec<usize> = (0..world.nodes.len())
        .filter(|i| world.nodes[*i].launcher.is_some())
        .collect();
    let tips = world.truth.tips();
    let min = world.setup.spec_at(world.now).min_nodes;
    let whole = tips.iter().find(|(d, r)| runs_whole(world, d, r).is_none());
    if let Some(error) = leftover(world, &tips).or_else(|| order_open(world)) {
        return State::Not(error);
    }
    if launchers.len() < usize::from(min) {
        return State::Waits;
    }
    if tips.iter().any(|(_, r)| may_be_decided(world, r)) {
        // A voter that is only silent may live, and nothing is given up. One whose disk is gone has no vote: of a
        // group that has too few left all are told, and form anew (decisions 0032 and 0033).
        return State::Waits;
    }
    let Some((digest, record)) = whole else {
        return State::Not(match tips.first() {
            Some((d, r)) => match runs_whole(world, d, r) {
                Some(error) => error,
                None => LivenessError::BelowMinimum { digest: *d },
            },
            None => LivenessError::NothingRuns {
                launchers: launchers.len(),
                min,
            },
        });
    };
    let full = record.members.len() >= usize::from(record.spec.max_nodes);
    // It takes in nobody once the first have finished.
    let mut all = world.nodes.iter().filter_map(|n| n.launcher.as_ref());
    let finishes = all.any(|l| l.finished == Some(*digest));
    let left_out = launchers.iter().find(|i| {
        let launcher = world.nodes[**i].launcher.as_ref().map(|l| l.id);
        !record.members.iter().any(|m| Some(m.launcher) == launcher)
    });
    match left_out {
        Some(node) if !full && !finishes => State::Not(LivenessError::LeftOut { node: *node }),
        _ => match waits_or_hangs(world, *digest, record) {
            Some(error) => State::Not(error),
            None => State::Runs(*digest),
        },
    }
}

/// The error of a generation that runs whole and does not go on.
fn waits_or_hangs(world: &World, digest: Digest, record: &Record) -> Option<LivenessError> {
    let run = |node: usize| {
        let run = world.nodes[node].launcher.as_ref()?.run.as_ref()?;
        (run.start.digest == digest).then_some(run)
    };
    let members = || record.members.iter().filter_map(|m| world.index(m.node));
    let waits = |node: &usize| run(*node).is_some_and(|r| r.waits_since().is_some());
    if let Some(node) = members().find(waits) {
        return Some(LivenessError::WaitsAtBarrier { node });
    }
    let saves = |node: usize| run(node).is_some_and(|r| r.steps.saves());
    let node = members().find(|n| run(*n).is_some_and(|r| r.is_judged(world.now)))?;
    let heard = |node: usize| {
        let job = world.nodes[node].agent.as_ref()?.job(&world.key)?;
        Some(!job.hung().is_empty())
    };
    let unaware = members().find(|n| heard(*n) != Some(true));
    let unaware = unaware.filter(|_| !members().any(saves))?;
    Some(LivenessError::NoVerdict { node, unaware })
}

/// Whether what follows is decided by voters of whom too few are there, and enough may come back.
fn may_be_decided(world: &World, record: &Record) -> bool {
    let votes = |there: fn(&Node) -> bool| {
        let nodes = world.nodes.iter().filter(|n| there(n));
        let holders: BTreeSet<Holder> = nodes.map(|n| (n.id, n.disk.state)).collect();
        majority(record, &holders)
    };
    let by_members = record.arbiter == Arbiter::Members;
    by_members && !votes(|n| n.agent.is_some()) && votes(|_| true)
}

/// Why a generation does not run whole; `None` when it does.
fn runs_whole(world: &World, digest: &Digest, record: &Record) -> Option<LivenessError> {
    if record.members.len() < usize::from(record.spec.min_nodes) {
        return Some(LivenessError::BelowMinimum { digest: *digest });
    }
    let launchers = || {
        record.members.iter().map(|m| {
            let node = world.index(m.node)?;
            let launcher = world.nodes[node].launcher.as_ref();
            launcher.filter(|l| l.id == m.launcher)
        })
    };
    // Those that have finished wait for one that never will.
    let hangs = |l: &Launcher| {
        let mut run = l.run.iter();
        run.any(|r| r.start.digest == *digest && r.steps.hangs(world.now))
    };
    let held_up = launchers().flatten().any(hangs);
    for (m, launcher) in record.members.iter().zip(launchers()) {
        let node = world.index(m.node)?;
        let trains = launcher
            .and_then(|l| l.training())
            .is_some_and(|r| r.start.digest == *digest);
        let finished = launcher.is_some_and(|l| l.finished == Some(*digest));
        if !(trains || finished && held_up) {
            let (digest, number) = (*digest, record.number);
            return Some(LivenessError::NotTraining {
                digest,
                number,
                node,
            });
        }
    }
    None
}

fn order_open(world: &World) -> Option<LivenessError> {
    world.nodes.iter().enumerate().find_map(|(node, n)| {
        let job = n.agent.as_ref()?.job(&world.key)?;
        let cancel = n.cancel_ordered.is_some();
        // A rank that hangs holds up a save for as long as that may take.
        let open = |stage: &CheckpointStage| {
            !stage.is_over() && !matches!(stage, CheckpointStage::Saving { .. })
        };
        let saves = || job.checkpoint().is_some_and(|c| open(&c.state.stage));
        let what = match cancel {
            true => Order::Cancel,
            false if saves() => Order::Checkpoint,
            false => return None,
        };
        Some(LivenessError::OrderOpen { node, what })
    })
}

fn leftover(world: &World, tips: &[(Digest, Arc<Record>)]) -> Option<LivenessError> {
    world.nodes.iter().enumerate().find_map(|(node, n)| {
        let run = n.launcher.as_ref()?.run.as_ref()?;
        // Workers that have parked wait for the next.
        if matches!(run.phase, Phase::Parked | Phase::Dead) {
            return None;
        }
        let digest = run.start.digest;
        let newest = tips.iter().any(|(d, _)| *d == digest);
        (!newest).then_some(LivenessError::Leftover { node, digest })
    })
}
