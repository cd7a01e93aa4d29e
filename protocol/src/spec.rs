//! A user's requirements of a job. Every launcher of a job must ask the same.

mod triggers;

use serde::{Deserialize, Serialize};

use crate::time::Span;

pub use triggers::Triggers;

/// The most nodes of one job: the bound that keeps a record within one frame.
pub const MAX_MEMBERS: usize = 1024;

/// As Linux numbers them.
const SIGINT: i32 = 2;
const SIGTERM: i32 = 15;

/// The parameters that all nodes of one job must agree on. Times are in milliseconds.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct JobSpec {
    /// Fewest nodes to train with.
    pub min_nodes: u16,
    /// Most nodes to train with; further ones park as spares.
    pub max_nodes: u16,
    /// Script faults that are answered with a restart before the job fails.
    pub max_restarts: u32,
    /// Quiet time before a job forms below its maximum.
    pub form_quiet_ms: u32,
    /// Quiet time before joins to a running job are taken in.
    pub join_quiet_ms: u32,
    /// The longest that a first join waits for quiet.
    pub join_max_ms: u32,
    /// From SIGTERM to SIGKILL when a node or a worker was lost.
    pub loss_grace_ms: u32,
    /// From the agreed signal to SIGKILL when a stop is planned (a join, a cancel, a drain whose
    /// notice names no deadline).
    pub stop_grace_ms: u32,
    /// The signal that tells every rank to save and leave.
    pub preempt_signal: i32,
    /// Fewest nodes to form the job with, where that is more than the minimum: a majority of the
    /// endpoints listed (R2). Zero: the minimum is enough.
    pub birth_quorum: u16,
    /// When all ranks save without anybody's order.
    pub triggers: Triggers,
}

impl Default for JobSpec {
    fn default() -> JobSpec {
        JobSpec {
            min_nodes: 1,
            max_nodes: 1,
            max_restarts: 0,
            form_quiet_ms: 300,
            join_quiet_ms: 1_000,
            join_max_ms: 5_000,
            loss_grace_ms: 200,
            stop_grace_ms: 30_000,
            preempt_signal: SIGTERM,
            birth_quorum: 0,
            triggers: Triggers::default(),
        }
    }
}

/// Why a spec cannot be used. The text names the flag and the fix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    #[error("--nnodes {min}:{max}: the minimum must be at least 1 and at most the maximum")]
    Nodes { min: u16, max: u16 },
    #[error("--nnodes asks for {max} nodes, a job has at most {}", MAX_MEMBERS)]
    TooManyNodes { max: u16 },
    #[error("--preempt-signal {0} is not a signal from 1 to 64")]
    Signal(i32),
    #[error(
        "--birth-quorum: a majority of the endpoints listed is {quorum} nodes, and --nnodes wants {max} \
         at most: list each node of the job once, or raise the maximum"
    )]
    BirthQuorum { quorum: u16, max: u16 },
    #[error(
        "--checkpoint-every and --checkpoint-overhead both set the time between checkpoints: leave one out"
    )]
    TwoIntervals,
    #[error("--checkpoint-overhead: stalls may take between 0.001 % and 50 % of the time")]
    Overhead,
}

impl JobSpec {
    pub fn check(&self) -> Result<(), SpecError> {
        let (min, max) = (self.min_nodes, self.max_nodes);
        if min == 0 || min > max {
            return Err(SpecError::Nodes { min, max });
        }
        if usize::from(max) > MAX_MEMBERS {
            return Err(SpecError::TooManyNodes { max });
        }
        if !(1..=64).contains(&self.preempt_signal) {
            return Err(SpecError::Signal(self.preempt_signal));
        }
        if self.birth_quorum > max {
            let quorum = self.birth_quorum;
            return Err(SpecError::BirthQuorum { quorum, max });
        }
        self.triggers.check()
    }

    /// Fewest nodes to form the job with. Later it goes on with the minimum.
    pub fn birth_nodes(&self) -> u16 {
        self.min_nodes.max(self.birth_quorum)
    }

    /// Whether `nodes` nodes could, where nothing but themselves decides, form the job twice: in two
    /// groups that do not see each other (R2).
    pub fn may_form_twice(&self, nodes: u16) -> bool {
        2 * u32::from(self.birth_nodes()) <= u32::from(nodes)
    }

    /// The flags in which `other` differs, as `--flag mine, theirs`, for the person who started
    /// one job with two sets of parameters.
    pub fn differences(&self, other: &JobSpec) -> Vec<String> {
        let rows = [
            (
                "--nnodes",
                format!("{}:{}", self.min_nodes, self.max_nodes),
                format!("{}:{}", other.min_nodes, other.max_nodes),
            ),
            (
                "--max-restarts",
                self.max_restarts.to_string(),
                other.max_restarts.to_string(),
            ),
            (
                "--form-quiet",
                self.form_quiet_ms.to_string(),
                other.form_quiet_ms.to_string(),
            ),
            (
                "--join-quiet",
                format!("{}/{}", self.join_quiet_ms, self.join_max_ms),
                format!("{}/{}", other.join_quiet_ms, other.join_max_ms),
            ),
            (
                "--loss-grace",
                self.loss_grace_ms.to_string(),
                other.loss_grace_ms.to_string(),
            ),
            (
                "--stop-grace",
                self.stop_grace_ms.to_string(),
                other.stop_grace_ms.to_string(),
            ),
            (
                "--preempt-signal",
                self.preempt_signal.to_string(),
                other.preempt_signal.to_string(),
            ),
            ("--birth-quorum", self.quorum_text(), other.quorum_text()),
        ];
        let triggers = self.triggers.rows().into_iter().zip(other.triggers.rows());
        let triggers = triggers.map(|((flag, mine), (_, theirs))| (flag, mine, theirs));
        rows.into_iter()
            .chain(triggers)
            .filter(|(_, mine, theirs)| mine != theirs)
            .map(|(flag, mine, theirs)| format!("{flag} {mine} here, {theirs} there"))
            .collect()
    }

    fn quorum_text(&self) -> String {
        match self.birth_quorum {
            0 => "off".into(),
            nodes => format!("{nodes} nodes"),
        }
    }

    pub fn form_quiet(&self) -> Span {
        Span::from_millis(self.form_quiet_ms.into())
    }

    pub fn join_quiet(&self) -> Span {
        Span::from_millis(self.join_quiet_ms.into())
    }

    pub fn join_max(&self) -> Span {
        Span::from_millis(self.join_max_ms.into())
    }

    /// The signal that tells workers to save and leave. Where a person stops the job it is SIGINT, as a terminal or
    /// torchrun sends it, unless another signal than the usual one was agreed.
    pub fn signal_to_stop(&self, interrupted: bool) -> i32 {
        match self.preempt_signal {
            SIGTERM if interrupted => SIGINT,
            agreed => agreed,
        }
    }

    pub fn stop_grace(&self) -> Span {
        Span::from_millis(self.stop_grace_ms.into())
    }

    pub fn loss_grace(&self) -> Span {
        Span::from_millis(self.loss_grace_ms.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(min_nodes: u16, max_nodes: u16, birth_quorum: u16) -> JobSpec {
        JobSpec {
            min_nodes,
            max_nodes,
            birth_quorum,
            ..JobSpec::default()
        }
    }

    #[test]
    fn a_quorum_of_births_leaves_room_for_one_only() {
        assert!(spec(1, 2, 0).may_form_twice(2));
        assert!(spec(2, 8, 0).may_form_twice(8));
        assert!(!spec(2, 3, 0).may_form_twice(3) && !spec(1, 1, 0).may_form_twice(1));
        for endpoints in 1..=16 {
            let wanted = spec(1, 16, endpoints / 2 + 1);
            assert!(!wanted.may_form_twice(endpoints), "{endpoints}");
            assert_eq!(wanted.birth_nodes(), endpoints / 2 + 1);
        }
        assert_eq!(spec(4, 8, 3).birth_nodes(), 4);
        assert_eq!(
            spec(1, 2, 3).check(),
            Err(SpecError::BirthQuorum { quorum: 3, max: 2 })
        );
        assert_eq!(spec(1, 3, 2).check(), Ok(()));
    }

    #[test]
    fn another_quorum_is_another_job() {
        let differences = spec(1, 3, 2).differences(&spec(1, 3, 0));
        assert_eq!(differences, ["--birth-quorum 2 nodes here, off there"]);
        assert!(spec(1, 3, 2).differences(&spec(1, 3, 2)).is_empty());
    }
}
