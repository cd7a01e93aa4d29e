//! Measured times of saving: a choice before a deadline and the interval between saves are reckoned with them.

use serde::{Deserialize, Serialize};

use super::Speeds;
use crate::time::{Span, Time};

/// Cost of the newest save on one node. Zero: not measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Pace {
    /// Bytes that its ranks copied.
    pub bytes: u64,
    /// Microseconds of the slowest rank's copy.
    pub copied_us: u64,
    /// Microseconds for which the save held the slowest rank up: the copy, and before it the wait for a
    /// slot.
    pub stall_us: u64,
    /// Bytes that were made durable, and the microseconds from the first that was asked for to the last
    /// that was.
    pub written: u64,
    pub write_us: u64,
}

impl Pace {
    /// The bytes per second of the copies, and of the files. None: not measured.
    pub fn speeds(&self) -> (Option<u64>, Option<u64>) {
        let per_second = |bytes: u64, us: u64| {
            let all = u128::from(bytes) * 1_000_000;
            let speed = all.checked_div(u128::from(us))?;
            // Who has nothing to do holds nobody up.
            Some(match bytes {
                0 => u64::MAX,
                _ => u64::try_from(speed).unwrap_or(u64::MAX),
            })
        };
        (
            per_second(self.bytes, self.copied_us),
            per_second(self.written, self.write_us),
        )
    }

    pub fn stall(&self) -> Option<Span> {
        (self.stall_us > 0).then(|| Span(self.stall_us.saturating_mul(1_000)))
    }

    /// The slowest of these; none where a node has measured nothing. `writers` are the nodes whose files
    /// have to be there in time.
    pub fn slowest(
        all: impl IntoIterator<Item = Pace>,
        writers: impl IntoIterator<Item = Pace>,
        commit: Span,
    ) -> Option<Speeds> {
        let mut speeds = Speeds {
            copy: u64::MAX,
            write: u64::MAX,
            commit,
        };
        for pace in all {
            speeds.copy = speeds.copy.min(pace.speeds().0?);
        }
        for pace in writers {
            speeds.write = speeds.write.min(pace.speeds().1?);
        }
        Some(speeds)
    }
}

/// Measures one node's saves, and how its ranks get on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Meter {
    pub(crate) pace: Pace,
    /// The save that the copies are of.
    step: u64,
    /// The write under way: the attempt, since when, and how much of it is there.
    writing: Option<(u32, Time, u64)>,
    /// The furthest rank's step, and how long steps usually take.
    pub(crate) at: Option<(u64, Span)>,
}

impl Meter {
    /// A rank has copied.
    pub(crate) fn copied(&mut self, step: u64, bytes: u64, copied_us: u64, waited_us: u64) {
        let pace = &mut self.pace;
        if self.step != step {
            self.step = step;
            (pace.bytes, pace.copied_us, pace.stall_us) = (0, 0, 0);
        }
        pace.bytes = pace.bytes.saturating_add(bytes);
        pace.copied_us = pace.copied_us.max(copied_us.max(1));
        let stall = copied_us.saturating_add(waited_us).max(1);
        pace.stall_us = pace.stall_us.max(stall);
    }

    /// A file is asked for. Until one of this attempt is there, the speed is that of the one before: a notice that
    /// comes meanwhile asks for it.
    pub(crate) fn writes(&mut self, attempt: u32, now: Time) {
        if self.writing.is_none_or(|(known, ..)| known != attempt) {
            self.writing = Some((attempt, now, 0));
        }
    }

    /// Since when something is being written.
    pub(crate) fn writes_since(&self) -> Option<Time> {
        self.writing.map(|(_, since, _)| since)
    }

    /// And is there.
    pub(crate) fn written(&mut self, attempt: u32, bytes: u64, now: Time) {
        if let Some((known, since, written)) = &mut self.writing
            && *known == attempt
        {
            *written = written.saturating_add(bytes);
            self.pace.written = *written;
            self.pace.write_us = (now.since(*since).0 / 1_000).max(1);
        }
    }

    /// Another generation: nobody knows where its ranks are.
    pub(crate) fn begins(&mut self) {
        self.at = None;
        self.writing = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Time {
        Time::ZERO + Span::from_millis(ms)
    }

    #[test]
    fn a_node_s_pace_is_that_of_its_newest_save() {
        let mut meter = Meter::default();
        meter.copied(10, 4 << 20, 2_000, 0);
        meter.copied(10, 4 << 20, 4_000, 6_000);
        meter.writes(1, at(0));
        meter.writes(1, at(5));
        meter.written(1, 4 << 20, at(50));
        meter.written(1, 4 << 20, at(100));
        meter.written(2, 1, at(100));
        let pace = meter.pace;
        assert_eq!((pace.bytes, pace.stall_us), (8 << 20, 10_000));
        assert_eq!(pace.stall(), Some(Span::from_millis(10)));
        assert_eq!(pace.speeds(), (Some((8 << 20) * 250), Some((8 << 20) * 10)));
        meter.copied(20, 1 << 20, 1_000, 0);
        assert_eq!((meter.pace.bytes, meter.pace.stall_us), (1 << 20, 1_000));
        // While the next one is written, and nothing of it is there, the last one still tells.
        meter.writes(3, at(200));
        assert_eq!(meter.pace.speeds().1, Some((8 << 20) * 10));
        meter.written(3, 1 << 20, at(300));
        assert_eq!(meter.pace.speeds().1, Some((1 << 20) * 10));
        assert_eq!(Pace::default().speeds(), (None, None));
    }

    #[test]
    fn the_slowest_node_sets_the_speeds_and_one_that_is_unknown_leaves_none() {
        let pace = |bytes| Pace {
            bytes,
            copied_us: 1_000_000,
            stall_us: 1,
            written: bytes,
            write_us: 2_000_000,
        };
        let of = |writers: &[u64]| {
            let writers = writers.iter().map(|b| pace(*b));
            Pace::slowest([pace(100), pace(40), pace(0)], writers, Span::ZERO)
        };
        let speeds = |copy, write| Speeds {
            copy,
            write,
            commit: Span::ZERO,
        };
        assert_eq!(of(&[100]), Some(speeds(40, 50)));
        assert_eq!(of(&[100, 40]), Some(speeds(40, 20)));
        assert_eq!(of(&[0]), Some(speeds(40, u64::MAX)));
        let unknown = Pace::slowest([pace(100)], [Pace::default()], Span::ZERO);
        assert_eq!(unknown, None);
    }
}
