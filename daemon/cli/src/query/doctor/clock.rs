//! The clocks: the agent's timers run on CLOCK_BOOTTIME, people and error files on CLOCK_REALTIME.

use nix::time::{ClockId, clock_gettime};

use super::Check;

/// A clock before this (2024-01-01) was never set.
const SANE: i64 = 1_704_067_200;
/// Worst error of a synchronised clock that still orders events between nodes, in microseconds.
const COARSE: i64 = 500_000;

pub(super) fn checks() -> Vec<Check> {
    vec![
        monotonic(
            seconds(ClockId::CLOCK_BOOTTIME),
            seconds(ClockId::CLOCK_MONOTONIC),
        ),
        date(seconds(ClockId::CLOCK_REALTIME)),
        synchronised(adjtimex()),
    ]
}

fn seconds(clock: ClockId) -> Option<f64> {
    let t = clock_gettime(clock).ok()?;
    Some(t.tv_sec() as f64 + t.tv_nsec() as f64 / 1e9)
}

fn monotonic(boot: Option<f64>, running: Option<f64>) -> Check {
    const NAME: &str = "timers";
    let (Some(boot), Some(running)) = (boot, running) else {
        return Check::fail(
            NAME,
            "the kernel has no CLOCK_BOOTTIME",
            "use Linux 2.6.39 or newer; in a sandbox, allow clock_gettime",
        );
    };
    let slept = boot - running;
    if slept > 1.0 {
        return Check::warn(
            NAME,
            format!("this machine was suspended for {slept:.0} s since it was booted"),
            "a suspended node counts as lost: turn sleep off (systemctl mask sleep.target suspend.target)",
        );
    }
    Check::ok(
        NAME,
        format!("up for {:.1} h, never suspended", boot / 3600.0),
    )
}

fn date(real: Option<f64>) -> Check {
    const NAME: &str = "date";
    match real {
        Some(t) if t >= SANE as f64 => {
            let (date, time) = super::super::output::utc((t * 1000.0) as u64);
            Check::ok(NAME, format!("{date} {time} UTC"))
        }
        _ => Check::fail(
            NAME,
            "the clock was never set",
            "set it: systemctl enable --now systemd-timesyncd, or chronyd",
        ),
    }
}

/// State of the kernel's clock discipline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Discipline {
    synchronised: bool,
    /// Microseconds that the clock may be off at most.
    max_error: i64,
}

/// Reads the kernel's clock state; sets nothing (adjtimex(2) with modes 0 needs no rights).
fn adjtimex() -> Option<Discipline> {
    // SAFETY: the structure is plain numbers, for which all zeroes is a value, and modes 0 only reads.
    let (state, timex) = unsafe {
        let mut timex: libc::timex = std::mem::zeroed();
        let state = libc::adjtimex(&raw mut timex);
        (state, timex)
    };
    (state >= 0).then_some(Discipline {
        synchronised: state != libc::TIME_ERROR && timex.status & libc::STA_UNSYNC == 0,
        max_error: timex.maxerror,
    })
}

fn synchronised(discipline: Option<Discipline>) -> Check {
    const NAME: &str = "clock sync";
    const FIX: &str = "start chronyd or systemd-timesyncd; Muster itself works without, but the times of events of several nodes do not fit together";
    match discipline {
        None => Check::warn(
            NAME,
            "the kernel does not say (adjtimex is not allowed here)",
            "check on the host: timedatectl, or chronyc tracking",
        ),
        Some(d) if !d.synchronised => Check::warn(NAME, "the clock is not synchronised", FIX),
        Some(d) if d.max_error > COARSE => Check::warn(
            NAME,
            format!("synchronised, but up to {} ms off", d.max_error / 1000),
            FIX,
        ),
        Some(d) => Check::ok(
            NAME,
            format!(
                "synchronised, at most {:.1} ms off",
                d.max_error as f64 / 1000.0
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn clocks_are_judged() {
        assert_eq!(monotonic(Some(7200.0), Some(7200.0)).verdict, Verdict::Ok);
        let slept = monotonic(Some(7200.0), Some(7100.0));
        assert!(slept.detail.contains("100 s"));
        assert_eq!(monotonic(None, Some(1.0)).verdict, Verdict::Fail);
        assert_eq!(date(Some(3600.0)).verdict, Verdict::Fail);
        let judge = |synchronised, max_error| {
            synchronised_of(Discipline {
                synchronised,
                max_error,
            })
        };
        assert_eq!(judge(true, 1_000), Verdict::Ok);
        assert_eq!(judge(true, 900_000), Verdict::Warn);
        assert_eq!(judge(false, 0), Verdict::Warn);
        assert_eq!(synchronised(None).verdict, Verdict::Warn);
    }

    fn synchronised_of(d: Discipline) -> Verdict {
        synchronised(Some(d)).verdict
    }

    #[test]
    fn this_machines_clocks_can_be_read() {
        let all = checks();
        assert_eq!(all.len(), 3);
        assert_eq!(all[1].verdict, Verdict::Ok, "{all:?}");
    }
}
