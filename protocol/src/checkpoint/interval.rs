//! How often to save. Pure functions.
//!
//! Saving too often costs stalls, too seldom costs steps that are done again after a failure. The
//! interval that loses least is Daly's: J. T. Daly, "A higher order estimate of the optimum checkpoint
//! interval for restart dumps", Future Generation Computer Systems 22 (2006), equation 37, which
//! refines J. W. Young, "A first order approximation to the optimum checkpoint interval",
//! Communications of the ACM 17 (1974): the square root of 2 C M.

use super::Cause;
use crate::time::{Span, Time};

/// Measurements that the interval goes by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    /// C: for how long one save holds training up.
    pub stall: Span,
    /// From the request to the commit: saves no more often than that.
    pub durable: Span,
    /// M: the mean time between failures of the whole job; none where it is not known.
    pub mtbf: Option<Span>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// The greatest share of the time that stalls may take, as 0.01 for a hundredth.
    pub overhead: f64,
    pub least: Span,
    pub most: Span,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Interval {
    /// From the end of one save's stall to the beginning of the next one's.
    pub every: Span,
    /// The share of the time that stalls take then.
    pub overhead: f64,
    /// A sentence for people.
    pub why: String,
}

/// The interval that loses least, but never one whose stalls take more than the overhead wanted, nor one
/// shorter than a save takes to become durable; within the bounds.
pub fn interval(measured: Measured, bounds: Bounds) -> Interval {
    let stall = measured.stall.as_secs_f64();
    // The overhead is C / (T + C), so T = C / overhead - C.
    let share = bounds.overhead.clamp(1e-6, 0.999);
    let for_overhead = stall / share - stall;
    let best = measured.mtbf.map(|m| daly(stall, m.as_secs_f64()));
    let durable = measured.durable.as_secs_f64();
    let (mut every, mut why) = match (best, measured.mtbf) {
        (Some(best), Some(mtbf)) if best >= for_overhead => {
            let why = format!("that loses least with a failure every {mtbf} (Daly 2006)");
            (best, why)
        }
        _ => {
            let why = format!(
                "stalls take {:.2} % of the time then, as wanted",
                100.0 * share
            );
            (for_overhead, why)
        }
    };
    if every < durable {
        every = durable;
        why = format!("a save takes {} to become durable", measured.durable);
    }
    let (least, most) = (bounds.least.as_secs_f64(), bounds.most.as_secs_f64());
    if every < least {
        every = least;
        why = "the shortest that is allowed".to_owned();
    } else if every > most {
        every = most;
        why = "the longest that is allowed".to_owned();
    }
    let overhead = match every + stall > 0.0 {
        true => stall / (every + stall),
        false => 0.0,
    };
    let every = seconds(every);
    Interval {
        every,
        overhead,
        why: format!(
            "a checkpoint every {every}, each of which holds training up for {}: {why}",
            measured.stall
        ),
    }
}

/// Daly's equation 37, in seconds: the time of work between saves that takes the least time in all.
fn daly(stall: f64, mtbf: f64) -> f64 {
    if stall >= 2.0 * mtbf {
        return mtbf;
    }
    let ratio = stall / (2.0 * mtbf);
    (2.0 * stall * mtbf).sqrt() * (1.0 + ratio.sqrt() / 3.0 + ratio / 9.0) - stall
}

fn seconds(s: f64) -> Span {
    // The cast saturates.
    Span((s * 1e9) as u64)
}

/// The mean time between failures of a job on so many nodes: what was observed, and what is reckoned
/// with for a node (one failure in `per_node`) as if one failure more had been seen. Never zero.
pub fn mean_time_between_failures(
    failures: u64,
    observed: Span,
    nodes: u64,
    per_node: Span,
) -> Span {
    let reckoned = per_node.0 / nodes.max(1);
    let all = observed.0.saturating_add(reckoned);
    Span((all / failures.saturating_add(1)).max(1))
}

/// Saves in a regular rhythm: after so many steps, or after so much time, whichever comes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rhythm {
    /// 0: not by steps.
    pub steps: u64,
    /// Zero: not by time.
    pub every: Span,
}

impl Rhythm {
    /// Whether a save is due at this step; `last` is the step of the newest save that was opened, or
    /// of the one that was restored, and when.
    pub fn due(&self, step: u64, last: (u64, Time), now: Time) -> Option<Cause> {
        let (last_step, last_at) = last;
        if step <= last_step {
            return None;
        }
        if self.steps > 0 && step - last_step >= self.steps {
            return Some(Cause::Steps);
        }
        let by_time = self.every > Span::ZERO && now.since(last_at) >= self.every;
        by_time.then_some(Cause::Seconds)
    }
}
