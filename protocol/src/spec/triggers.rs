//! When a job saves without anybody's order.

use serde::{Deserialize, Serialize};

use super::SpecError;
use crate::checkpoint::Busy;
use crate::time::Span;

/// The greatest share of the time that stalls may take, in millionths.
const MOST_OVERHEAD: u32 = 500_000;

/// The least: finer is not told apart.
const LEAST_OVERHEAD: u32 = 10;

/// When the leader has all ranks save at one step. Nothing set: only by order, and where the job stops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Triggers {
    /// After so many steps; 0: not by steps.
    pub steps: u64,
    /// After so many milliseconds; 0: not by time.
    pub every_ms: u32,
    /// So that stalls take this share of the time, in millionths; 0: not by that.
    pub overhead_ppm: u32,
    /// Action on a save for which a rank has no free slot.
    pub busy: Busy,
}

impl Triggers {
    /// Whether the leader opens saves by itself.
    pub fn any(&self) -> bool {
        self.steps > 0 || self.every_ms > 0 || self.overhead_ppm > 0
    }

    pub fn every(&self) -> Span {
        Span::from_millis(self.every_ms.into())
    }

    /// The share of the time that stalls may take.
    pub fn overhead(&self) -> f64 {
        f64::from(self.overhead_ppm) / 1e6
    }

    pub(super) fn check(&self) -> Result<(), SpecError> {
        if self.every_ms > 0 && self.overhead_ppm > 0 {
            return Err(SpecError::TwoIntervals);
        }
        let allowed = LEAST_OVERHEAD..=MOST_OVERHEAD;
        match self.overhead_ppm {
            0 => Ok(()),
            ppm if allowed.contains(&ppm) => Ok(()),
            _ => Err(SpecError::Overhead),
        }
    }

    /// Flags and what they are set to.
    pub(super) fn rows(&self) -> [(&'static str, String); 4] {
        let or_off = |set: bool, text: String| match set {
            true => text,
            false => "off".to_owned(),
        };
        let busy = match self.busy {
            Busy::Wait => "wait",
            Busy::Skip => "skip",
        };
        [
            (
                "--checkpoint-every-steps",
                or_off(self.steps > 0, self.steps.to_string()),
            ),
            (
                "--checkpoint-every",
                or_off(self.every_ms > 0, self.every().to_string()),
            ),
            (
                "--checkpoint-overhead",
                or_off(
                    self.overhead_ppm > 0,
                    format!("{} %", 100.0 * self.overhead()),
                ),
            ),
            ("--checkpoint-busy", busy.to_owned()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::super::JobSpec;
    use super::*;

    #[test]
    fn other_triggers_are_another_job() {
        let with = |triggers| JobSpec {
            triggers,
            ..JobSpec::default()
        };
        let every = with(Triggers {
            every_ms: 90_000,
            ..Triggers::default()
        });
        let share = with(Triggers {
            overhead_ppm: 10_000,
            busy: Busy::Skip,
            ..Triggers::default()
        });
        assert_eq!(
            every.differences(&share),
            [
                "--checkpoint-every 90.0 s here, off there",
                "--checkpoint-overhead off here, 1 % there",
                "--checkpoint-busy wait here, skip there",
            ]
        );
        assert!(every.check().is_ok() && share.check().is_ok());
        assert!(every.triggers.any() && !Triggers::default().any());
        let both = Triggers {
            every_ms: 1,
            ..share.triggers
        };
        assert_eq!(with(both).check(), Err(SpecError::TwoIntervals));
        for ppm in [1, MOST_OVERHEAD + 1] {
            let wrong = Triggers {
                overhead_ppm: ppm,
                ..Triggers::default()
            };
            assert_eq!(with(wrong).check(), Err(SpecError::Overhead));
        }
    }
}
