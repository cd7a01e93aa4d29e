//! Processes by the mark in their environment. Zombies have none and do not count.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::ground::{PATIENCE, eventually, pids};

/// Live processes that carry all of these `NAME=VALUE`.
pub(super) fn carrying(marks: &[String]) -> Vec<i32> {
    pids().filter(|pid| carries(*pid, marks)).collect()
}

pub(super) fn carries(pid: i32, marks: &[String]) -> bool {
    let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let variables: Vec<&[u8]> = environ.split(|&b| b == 0).collect();
    marks.iter().all(|m| variables.contains(&m.as_bytes()))
}

/// Signals a process that carries the marks; one that is gone is no fault.
pub(super) fn signal(pid: i32, marks: &[String], signal: Signal) {
    if !carries(pid, marks) {
        return;
    }
    let _ = kill(Pid::from_raw(pid), signal);
    if signal == Signal::SIGSTOP {
        // Each thread stops on its own, and finishes the call in which it is.
        eventually(PATIENCE, "it stands still", || {
            stands_still(pid).then_some(())
        });
    }
}

/// Whether no thread of the process runs; true of one that is gone.
fn stands_still(pid: i32) -> bool {
    let stopped = |stat: String| {
        // proc(5): the state follows the name, which may hold spaces.
        let state = stat
            .rsplit_once(") ")
            .and_then(|(_, rest)| rest.chars().next());
        matches!(state, Some('T' | 't' | 'Z' | 'X'))
    };
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
    let mut stats = tasks
        .into_iter()
        .flatten()
        .flatten()
        .map(|task| std::fs::read_to_string(task.path().join("stat")));
    stats.all(|stat| stat.map_or(true, stopped))
}

/// When the process was started, in nanoseconds since 1970, to a hundredth of a second; `None` when
/// it is gone.
pub(crate) fn started(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // proc(5): field 22, counted in clock ticks since the machine started; the name may hold spaces.
    let ticks: u64 = stat
        .rsplit_once(')')?
        .1
        .split_whitespace()
        .nth(19)?
        .parse()
        .ok()?;
    let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok()??;
    let at = u128::from(ticks) * 1_000_000_000 / u128::try_from(per_second).ok()?;
    let up = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME).ok()?;
    let up = std::time::Duration::from(up).as_nanos();
    super::now_ns().checked_sub(u64::try_from(up.checked_sub(at)?).ok()?)
}
