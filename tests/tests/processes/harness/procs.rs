//! Processes by the mark in their environment. Zombies have none and do not count.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Live processes that carry all of these `NAME=VALUE`.
pub(super) fn carrying(marks: &[String]) -> Vec<i32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else {
            continue;
        };
        if carries(pid, marks) {
            found.push(pid);
        }
    }
    found
}

pub(super) fn carries(pid: i32, marks: &[String]) -> bool {
    let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let variables: Vec<&[u8]> = environ.split(|&b| b == 0).collect();
    marks.iter().all(|m| variables.contains(&m.as_bytes()))
}

/// Signals a process that carries the marks; one that is gone is no fault.
pub(super) fn signal(pid: i32, marks: &[String], signal: Signal) {
    if carries(pid, marks) {
        let _ = kill(Pid::from_raw(pid), signal);
    }
}
