//! Cost of a fault: the job's restart budget, a node's strikes, the pause in a crash loop.
//!
//! The budget is a function of the chain of records alone (I13), so every agent that knows the
//! latest record comes to the same answer. Only faults of the script are charged to the job; nodes
//! that are lost, drained, or taken in are free. Faults of a node are strikes against that node, and
//! keep it out for a while.

use std::collections::VecDeque;

use crate::ids::NodeId;
use crate::record::{Cause, Kind};
use crate::spec::JobSpec;
use crate::time::{Span, Time};

/// A generation that lived shorter than this is a turn of a crash loop.
pub const SHORT_LIFE: Span = Span::from_secs(10);

/// The first pause in a crash loop behind the restart without a pause, and the longest.
const PAUSE_FIRST: Span = Span::from_millis(250);
pub const PAUSE_MAX: Span = Span::from_secs(10);

/// The first delay before a node with a strike is taken in again, and the longest.
const READMIT_FIRST: Span = Span::from_secs(1);
const READMIT_MAX: Span = Span::from_secs(300);

/// A node's strikes are halved for each such time without a new one.
const STRIKE_HALVES: Span = Span::from_secs(600);

/// Strikes beyond these make no difference: the delay has reached its longest.
const MAX_STRIKES: u32 = 10;

/// Consequence of a generation's end for the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Charge {
    /// The job goes on, and this is what its next record says was used so far.
    GoesOn { restarts_used: u32 },
    /// The budget is spent: the job ends as [`Kind::Failed`] with the root cause's own exit code.
    Failed { restarts_used: u32, code: i32 },
}

impl Charge {
    /// The `restarts_used` of the next record.
    pub fn restarts_used(self) -> u32 {
        match self {
            Charge::GoesOn { restarts_used } | Charge::Failed { restarts_used, .. } => {
                restarts_used
            }
        }
    }

    /// The kind of the next record.
    pub fn kind(self) -> Kind {
        match self {
            Charge::GoesOn { .. } => Kind::Next,
            Charge::Failed { code, .. } => Kind::Failed { code },
        }
    }
}

/// Charges a cause to the job. `restarts_used` is the latest record's. The cause that spends the
/// budget is not charged any more, so what was used never exceeds `max_restarts`.
pub fn charge(spec: &JobSpec, restarts_used: u32, cause: &Cause) -> Charge {
    match cause {
        Cause::WorkerFailed { code, .. } | Cause::WorkerHung { code, .. }
            if restarts_used >= spec.max_restarts =>
        {
            Charge::Failed {
                restarts_used,
                code: *code,
            }
        }
        Cause::WorkerFailed { .. } | Cause::WorkerHung { .. } => Charge::GoesOn {
            restarts_used: restarts_used + 1,
        },
        Cause::Formed
        | Cause::Continued { .. }
        | Cause::NodesLost { .. }
        | Cause::NodesLeft { .. }
        | Cause::NodesJoined { .. }
        | Cause::LinksLost { .. }
        | Cause::Resumed { .. }
        | Cause::LeasesLost { .. }
        | Cause::StartFailed { .. }
        | Cause::Merged { .. }
        // Each takes a checkpoint out of the log, so there is no end to fear.
        | Cause::Damaged { .. }
        // A fault of nodes, which get their strikes for it.
        | Cause::Misread { .. }
        | Cause::Finished
        | Cause::Cancelled => Charge::GoesOn { restarts_used },
    }
}

/// The pause before the next start after a fault of the script: none at first, then doubling while
/// generations end soon after their start. The leader's own count: a new leader begins again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CrashLoop {
    short_lives: u32,
}

impl CrashLoop {
    /// How many generations in a row failed soon after their start.
    pub fn short_lives(&self) -> u32 {
        self.short_lives
    }

    /// A worker failed in a generation that had run for `lived`. Returns the pause before the next
    /// one starts.
    pub fn pause_after(&mut self, lived: Span) -> Span {
        if lived >= SHORT_LIFE {
            *self = CrashLoop::default();
            return Span::ZERO;
        }
        let before = self.short_lives;
        self.short_lives = before.saturating_add(1);
        match before.checked_sub(1) {
            None => Span::ZERO,
            Some(doublings) => doubled(PAUSE_FIRST, doublings, PAUSE_MAX),
        }
    }
}

/// So many failed starts in a row, all for one reason, and the next one would fail as well.
const HOPELESS_STARTS: u32 = 3;

/// One node's starts that failed in a row. The leader's own count: a new leader begins again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FailedStarts {
    reason: String,
    count: u32,
}

impl FailedStarts {
    /// Another start failed for this reason.
    pub fn failed(&mut self, reason: &str) {
        if self.reason != reason {
            self.reason = reason.to_owned();
            self.count = 0;
        }
        self.count = self.count.saturating_add(1);
    }

    /// Whether there is no hope that the reason passes.
    pub fn hopeless(&self) -> bool {
        self.count >= HOPELESS_STARTS
    }

    /// Why the newest one failed.
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

/// One node's faults: a start that was not acknowledged, links that were missing, losses beyond those
/// of others. Each agent counts on its own clock; the counts are not agreed upon and do not outlive the agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Strikes {
    count: u32,
    /// When `count` was right.
    at: Time,
}

impl Strikes {
    /// Counts a fault. Returns when the node may be taken in again.
    pub fn strike(&mut self, now: Time) -> Time {
        self.count = (self.left(now) + 1).min(MAX_STRIKES);
        self.at = now;
        self.readmit_at()
    }

    /// Strikes that are left: half of them for each ten minutes without a new one.
    pub fn left(&self, now: Time) -> u32 {
        let halvings = now.since(self.at).0 / STRIKE_HALVES.0;
        let halvings = u32::try_from(halvings).unwrap_or(u32::MAX);
        self.count.checked_shr(halvings).unwrap_or(0)
    }

    /// When the node may be taken in again; [`Time::ZERO`] for one without a strike.
    pub fn readmit_at(&self) -> Time {
        match self.count.checked_sub(1) {
            None => Time::ZERO,
            Some(doublings) => self.at + doubled(READMIT_FIRST, doublings, READMIT_MAX),
        }
    }

    pub fn is_parked(&self, now: Time) -> bool {
        now < self.readmit_at()
    }
}

/// So many losses of a node in the time that is looked at are its bad luck.
const FREE_LOSSES: usize = 4;

/// How far back losses are looked at, and how many.
const LOSSES_WITHIN: Span = Span::from_secs(1_800);
const MAX_LOSSES: usize = 256;

/// The nodes that a job lost, for finding those that come back only to be lost again: something on
/// them ends Muster or its workers. Where all nodes are lost again and again, none is at fault.
#[derive(Clone, Debug, Default)]
pub struct Losses {
    recent: VecDeque<(Time, NodeId)>,
}

/// A node that was lost more often than the others, and how often within which time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flapping {
    pub node: NodeId,
    pub times: usize,
    pub within: Span,
}

impl Losses {
    /// A job of so many members lost these. Returns those of them that are at fault themselves: lost
    /// more than a few times, and three times as often as the mean of all members.
    pub fn lost(&mut self, nodes: &[NodeId], members: usize, now: Time) -> Vec<Flapping> {
        self.recent.extend(nodes.iter().map(|n| (now, *n)));
        let old = |(at, _): &(Time, NodeId)| now.since(*at) > LOSSES_WITHIN;
        while self.recent.front().is_some_and(old) || self.recent.len() > MAX_LOSSES {
            self.recent.pop_front();
        }
        let all = self.recent.len();
        let of = |node: NodeId| self.recent.iter().filter(move |(_, n)| *n == node);
        let flapping = |node: &NodeId| {
            let times = of(*node).count();
            // In a job of three nodes or fewer it has to be the only one.
            let often = times == all || times * members >= 3 * all && members > 3;
            let first = of(*node).next().map_or(now, |(at, _)| *at);
            (times > FREE_LOSSES && often).then_some(Flapping {
                node: *node,
                times,
                within: now.since(first),
            })
        };
        nodes.iter().filter_map(flapping).collect()
    }
}

fn doubled(first: Span, doublings: u32, most: Span) -> Span {
    first.times(1 << doublings.min(32)).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Digest;

    #[test]
    fn a_hung_worker_is_charged_as_one_that_failed() {
        let spec = JobSpec {
            max_restarts: 1,
            ..JobSpec::default()
        };
        let hung = Cause::WorkerHung {
            node: NodeId([1; 32]),
            rank: 0,
            code: 137,
        };
        for used in 0..3 {
            assert_eq!(
                charge(&spec, used, &hung),
                charge(&spec, used, &failed(137))
            );
        }
    }

    fn failed(code: i32) -> Cause {
        Cause::WorkerFailed {
            node: NodeId([1; 32]),
            rank: 0,
            code,
        }
    }

    #[test]
    fn only_script_faults_are_charged() {
        let spec = JobSpec {
            max_restarts: 2,
            ..JobSpec::default()
        };
        let nodes = vec![NodeId([1; 32])];
        let free = [
            Cause::Formed,
            Cause::NodesLost {
                nodes: nodes.clone(),
            },
            Cause::NodesLeft {
                nodes: nodes.clone(),
            },
            Cause::NodesJoined {
                nodes: nodes.clone(),
            },
            Cause::LinksLost {
                nodes: nodes.clone(),
            },
            Cause::Resumed {
                nodes: nodes.clone(),
            },
            Cause::LeasesLost {
                nodes: nodes.clone(),
            },
            Cause::StartFailed { nodes },
            Cause::Merged {
                other: Digest::ZERO,
            },
            Cause::Misread {
                nodes: vec![NodeId([1; 32])],
                step: 1,
            },
        ];
        for used in 0..4 {
            for cause in &free {
                let restarts_used = used;
                assert_eq!(charge(&spec, used, cause), Charge::GoesOn { restarts_used });
            }
        }
        let mut used = 0;
        for _ in 0..2 {
            let charged = charge(&spec, used, &failed(3));
            assert_eq!(charged.kind(), Kind::Next);
            used = charged.restarts_used();
        }
        let spent = charge(&spec, used, &failed(137));
        assert_eq!(spent.restarts_used(), 2);
        assert_eq!(spent.kind(), Kind::Failed { code: 137 });
    }

    #[test]
    fn a_crash_loop_slows_down_and_a_long_life_ends_it() {
        let mut crashes = CrashLoop::default();
        let short = Span::from_secs(9);
        let pauses: Vec<u64> = (0..9)
            .map(|_| crashes.pause_after(short).as_millis())
            .collect();
        assert_eq!(
            pauses,
            [0, 250, 500, 1_000, 2_000, 4_000, 8_000, 10_000, 10_000]
        );
        assert_eq!(crashes.pause_after(SHORT_LIFE), Span::ZERO);
        assert_eq!(crashes.pause_after(short), Span::ZERO);
        assert_eq!(crashes.pause_after(short), PAUSE_FIRST);
        for _ in 0..100 {
            assert!(crashes.pause_after(short) <= PAUSE_MAX);
        }
    }

    #[test]
    fn a_start_is_hopeless_after_three_failures_for_one_reason() {
        let mut starts = FailedStarts::default();
        for reason in ["a", "a", "b", "b"] {
            starts.failed(reason);
            assert!(!starts.hopeless());
        }
        starts.failed("b");
        assert!(starts.hopeless() && starts.reason() == "b");
        starts.failed("a");
        assert!(!starts.hopeless());
    }

    #[test]
    fn strikes_double_the_delay_and_fade() {
        let mut strikes = Strikes::default();
        let mut now = Time::ZERO + Span::from_secs(1);
        assert!(!strikes.is_parked(now));
        let mut delays = Vec::new();
        for _ in 0..12 {
            let until = strikes.strike(now);
            delays.push(until.since(now).as_millis() / 1_000);
            assert!(strikes.is_parked(now) && !strikes.is_parked(until));
            now = until;
        }
        assert_eq!(delays, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]);
        assert_eq!(strikes.left(now), MAX_STRIKES);
        assert_eq!(strikes.left(now + STRIKE_HALVES), MAX_STRIKES / 2);
        now += STRIKE_HALVES.times(4);
        assert_eq!(strikes.left(now), 0);
        assert_eq!(strikes.strike(now).since(now), READMIT_FIRST);
        assert_eq!(strikes.left(Time(u64::MAX)), 0);
    }
}
