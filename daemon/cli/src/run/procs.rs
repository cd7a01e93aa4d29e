//! Finding every process of a launcher: the descendants that escaped their group and session.
//!
//! Two marks, either suffices. *Descent*: the launcher is a child subreaper, so an orphan of its
//! workers becomes its child. *Environment*: every worker is started with `MUSTER_LAUNCHER=<id>` and
//! its children inherit it, so what a killed launcher left behind can still be told; a process that
//! overwrote its environment (setproctitle) is only found by descent.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;

/// The variable that marks a launcher's processes.
pub const MARK: &str = "MUSTER_LAUNCHER";

/// The most of an environment that is read: the kernel's own limit for one string is 128 KiB.
const MAX_ENVIRON: u64 = 2 * 1024 * 1024;

fn pids() -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok())
        .collect()
}

/// Parent and state of a process, from `/proc/PID/stat` (proc(5)); `None` when it is gone.
fn parent_and_state(pid: i32) -> Option<(i32, u8)> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may itself hold parentheses and spaces.
    let end = stat.iter().rposition(|&b| b == b')')?;
    let rest = std::str::from_utf8(stat.get(end + 1..)?).ok()?;
    let mut fields = rest.split_ascii_whitespace();
    let state = *fields.next()?.as_bytes().first()?;
    let parent = fields.next()?.parse().ok()?;
    Some((parent, state))
}

/// A process's parent; `None` when it is gone.
pub fn parent(pid: i32) -> Option<i32> {
    parent_and_state(pid).map(|(parent, _)| parent)
}

/// Whether a process still runs: neither gone nor a zombie.
pub fn is_running(pid: i32) -> bool {
    parent_and_state(pid).is_some_and(|(_, state)| state != b'Z' && state != b'X')
}

fn carries(pid: i32, mark: &[u8]) -> bool {
    let Ok(file) = fs::File::open(format!("/proc/{pid}/environ")) else {
        return false;
    };
    let mut environ = Vec::new();
    if file.take(MAX_ENVIRON).read_to_end(&mut environ).is_err() {
        return false;
    }
    environ.split(|&b| b == 0).any(|entry| entry == mark)
}

/// Running processes of this user that carry the launcher's id in their environment, without the
/// calling process.
pub fn carriers(id: &str) -> Vec<i32> {
    let mark = format!("{MARK}={id}");
    let me = std::process::id() as i32;
    pids()
        .into_iter()
        .filter(|&pid| pid != me && carries(pid, mark.as_bytes()) && is_running(pid))
        .collect()
}

/// Running descendants of the calling process, without `except` and what descends from it.
pub fn descendants(except: &[i32]) -> Vec<i32> {
    descendants_of(std::process::id() as i32, except)
}

/// Running descendants of a process, likewise.
pub fn descendants_of(me: i32, except: &[i32]) -> Vec<i32> {
    let mut children: BTreeMap<i32, Vec<(i32, u8)>> = BTreeMap::new();
    for pid in pids() {
        if let Some((parent, state)) = parent_and_state(pid) {
            children.entry(parent).or_default().push((pid, state));
        }
    }
    let mut found = Vec::new();
    let mut open = vec![me];
    while let Some(parent) = open.pop() {
        // Taken out, so that a torn picture of /proc cannot lead in circles.
        for (pid, state) in children.remove(&parent).unwrap_or_default() {
            if except.contains(&pid) || pid == me {
                continue;
            }
            open.push(pid);
            if state != b'Z' && state != b'X' {
                found.push(pid);
            }
        }
    }
    found
}

/// Every running process of this launcher, by either mark.
pub fn all_of(id: &str, except: &[i32]) -> Vec<i32> {
    let mut all = descendants(except);
    all.extend(carriers(id).into_iter().filter(|pid| !except.contains(pid)));
    all.sort_unstable();
    all.dedup();
    all
}

/// Sends SIGKILL to a process. That it is gone already is no error.
pub fn kill(pid: i32) {
    if pid > 1 {
        // SAFETY: kill() has no memory effects.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
}
