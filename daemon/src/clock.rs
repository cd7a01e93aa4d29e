//! The clock that the cores are driven by: monotonic, and it also counts suspended time.

use muster_protocol::Time;
use rustix::time::{ClockId, clock_gettime};

/// `CLOCK_BOOTTIME` now.
pub fn now() -> Time {
    let t = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(t.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(t.tv_nsec).unwrap_or(0);
    Time(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
}

/// Milliseconds since the Unix epoch, for people and logs.
pub fn unix_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}
