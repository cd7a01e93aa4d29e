//! Workers that stand still. A job's ranks go from step to step together: where one stands, the others of
//! its generation wait at the same step.

use muster_protocol::Digest;
use muster_protocol::hang::{Evidence, Hang};

use super::World;
use crate::sim::invariants::{HangError, Violation};
use crate::sim::launcher::{Idle, Run};
use crate::sim::step::Request;

/// As many steps apart ranks still count as being at the same.
const TOGETHER: u64 = 40;

impl World {
    fn run_of(&self, node: usize, digest: Digest) -> Option<&Run> {
        let run = self.nodes[node].launcher.as_ref()?.training()?;
        (run.start.digest == digest).then_some(run)
    }

    fn each_run(&mut self, digest: Digest, mut change: impl FnMut(usize, &mut Run)) {
        for (at, node) in self.nodes.iter_mut().enumerate() {
            let run = node.launcher.as_mut().and_then(|l| l.run.as_mut());
            if let Some(run) = run.filter(|r| r.start.digest == digest && r.alive_steps()) {
                change(at, run);
            }
        }
    }

    pub(super) fn hang(&mut self, node: usize, busy: bool) {
        let now = self.now;
        let training = self.nodes[node]
            .launcher
            .as_ref()
            .and_then(|l| l.training());
        let Some(digest) = training
            .filter(|r| r.steps.stuck.is_none())
            .map(|r| r.start.digest)
        else {
            return;
        };
        let all = (0..self.nodes.len()).filter_map(|n| self.run_of(n, digest));
        let all: Vec<u64> = all.map(|r| r.steps.at(now)).collect();
        // The others may be a step ahead already: it gets as far before it stands still.
        let (Some(first), Some(furthest)) = (all.iter().min(), all.iter().max()) else {
            return;
        };
        // Here ranks that began later do not hold the others up, and are behind them.
        if furthest - first > TOGETHER {
            return;
        }
        let idle = if busy { Idle::Busy } else { Idle::Hangs };
        self.each_run(digest, |at, run| {
            let idle = if at == node { idle } else { Idle::Waits };
            run.steps.stick(furthest + 1, idle);
        });
        self.coverage.hangs += 1;
        self.requests.push(Request::Hangs { node, digest });
    }

    pub(super) fn thaw(&mut self, node: usize, digest: Digest) {
        let now = self.now;
        // Also those that were told to end meanwhile, and have not.
        let runs = self.nodes.iter_mut().enumerate().filter_map(|(at, n)| {
            let run = n.launcher.as_mut()?.run.as_mut()?;
            (run.start.digest == digest).then_some((at, run))
        });
        let mut runs: Vec<_> = runs.collect();
        let stands = |run: &Run| run.steps.stuck.is_some_and(|(_, i)| i != Idle::Waits);
        if runs.iter().any(|(at, run)| *at == node && stands(run)) {
            runs.iter_mut().for_each(|(_, run)| run.steps.thaw(now));
        }
    }

    /// Workers that begin while another's hangs will wait for it, too.
    pub(super) fn joins_hang(&mut self, node: usize) {
        let run = self.nodes[node]
            .launcher
            .as_ref()
            .and_then(|l| l.run.as_ref());
        let Some(digest) = run.map(|r| r.start.digest) else {
            return;
        };
        let all = (0..self.nodes.len()).filter_map(|n| self.run_of(n, digest));
        let step = all
            .filter_map(|r| r.steps.stuck)
            .map(|(step, _)| step)
            .min();
        if let Some(step) = step {
            self.each_run(digest, |at, run| {
                if at == node {
                    run.steps.stick(step, Idle::Waits);
                }
            });
        }
    }

    /// An agent judged, or heard, for whom everybody waits. A rank that is named stood still when it was asked where it
    /// stands.
    pub(super) fn judged(&mut self, by: usize, hang: &Hang) -> Result<(), Violation> {
        self.coverage.verdicts += 1;
        let job = self.nodes[by].agent.as_ref().and_then(|a| a.job(&self.key));
        let Some((_, digest)) = job.and_then(|j| j.head()) else {
            return Ok(());
        };
        for named in &hang.ranks {
            let Some(node) = self.index(named.node) else {
                continue;
            };
            let launcher = self.nodes[node].launcher.as_ref();
            let run = launcher.and_then(|l| l.run.as_ref());
            let Some(run) = run.filter(|r| r.start.digest == digest) else {
                continue;
            };
            let first = named.rank == run.start.first_rank;
            if !first || !run.steps.answers.contains(&true) {
                let (rank, evidence): (u32, Evidence) = (named.rank, hang.evidence);
                return Err(HangError::Blamed {
                    node,
                    digest,
                    rank,
                    evidence: evidence.word(),
                }
                .into());
            }
        }
        Ok(())
    }
}
