//! A node's own clock: its zero and its speed differ from every other node's.

use muster_protocol::Time;
use serde::{Deserialize, Serialize};

pub const US: u64 = 1_000;
pub const MS: u64 = 1_000_000;
pub const SEC: u64 = 1_000_000_000;

/// Local time = offset + global time * (1 + ppm / 10^6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clock {
    /// Nanoseconds.
    pub offset: u64,
    pub ppm: i32,
}

impl Clock {
    /// Time that this clock shows at a global time (nanoseconds since the simulation began).
    pub fn local(&self, global: u64) -> Time {
        let rate = (1_000_000 + i64::from(self.ppm)) as u128;
        let run = u128::from(global) * rate / 1_000_000;
        Time(self.offset.saturating_add(run as u64))
    }

    /// It stood still between two global times, as that of a virtual machine that is suspended.
    pub fn stood_still(&mut self, since: u64, until: u64) {
        let slept = self.local(until).0 - self.local(since).0;
        self.offset = self.offset.saturating_sub(slept);
    }

    /// The first global time at which this clock shows at least `local`.
    pub fn global(&self, local: Time) -> u64 {
        let rate = (1_000_000 + i64::from(self.ppm)) as u128;
        let run = u128::from(local.0.saturating_sub(self.offset));
        u64::try_from((run * 1_000_000).div_ceil(rate)).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_stood_still_goes_on_where_it_stopped() {
        for ppm in [-500, 0, 10_000] {
            let offset = 77 * SEC;
            let mut clock = Clock { offset, ppm };
            let stopped = clock.local(3 * SEC);
            clock.stood_still(3 * SEC, 9 * SEC);
            assert_eq!(clock.local(9 * SEC), stopped);
        }
    }

    #[test]
    fn a_timer_is_never_early() {
        for ppm in [-500, -1, 0, 3, 500] {
            let clock = Clock {
                offset: 77 * SEC,
                ppm,
            };
            for local in [0, 77 * SEC, 78 * SEC + 1, 1234 * SEC + 567] {
                let at = clock.global(Time(local));
                assert!(clock.local(at) >= Time(local));
            }
        }
    }
}
