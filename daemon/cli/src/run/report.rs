//! The final report: the root cause first, then what followed from it.

use std::fmt::Write as _;

use muster_protocol::local::WorkerExit;

/// The most exits that are listed.
const MAX_LISTED: usize = 16;

/// The name of a signal, for people.
pub fn signal_name(signal: i32) -> String {
    nix::sys::signal::Signal::try_from(signal)
        .map_or_else(|_| format!("signal {signal}"), |s| s.as_str().to_owned())
}

/// How a worker ended, in a few words.
pub fn how(exit: &WorkerExit) -> String {
    match exit.signal {
        Some(signal) => format!("killed by {}", signal_name(signal)),
        None => format!("exit code {}", exit.code),
    }
}

/// The exit from which the others follow: the earliest; torchrun's rule of the smallest timestamp.
/// At the same moment a failure that says why beats one that does not.
pub fn root_cause(exits: &[WorkerExit]) -> Option<&WorkerExit> {
    exits
        .iter()
        .min_by_key(|e| (e.at_ms, e.tail.is_empty(), e.rank))
}

/// The agent's report about the whole job, followed by what failed on this node where the report
/// does not name it yet.
pub fn with_local(report: &str, code: i32, failures: &[WorkerExit]) -> String {
    let mut text = report.trim_end().to_owned();
    if code == 0 {
        return text;
    }
    let Some(root) = root_cause(failures) else {
        return text;
    };
    if !text.is_empty() {
        text.push('\n');
    }
    let _ = writeln!(
        text,
        "on this node, first: rank {} (local rank {}, pid {}): {}",
        root.rank,
        root.local_rank,
        root.pid,
        how(root)
    );
    for line in root.tail.lines() {
        let _ = writeln!(text, "    {line}");
    }
    let mut others: Vec<&WorkerExit> = failures.iter().filter(|e| e.rank != root.rank).collect();
    others.sort_by_key(|e| (e.at_ms, e.rank));
    for exit in others.iter().take(MAX_LISTED) {
        let later = exit.at_ms.saturating_sub(root.at_ms);
        let _ = writeln!(
            text,
            "  then, {later} ms later: rank {}: {}",
            exit.rank,
            how(exit)
        );
    }
    if others.len() > MAX_LISTED {
        let _ = writeln!(text, "  and {} more", others.len() - MAX_LISTED);
    }
    text.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exit(rank: u32, at_ms: u64, code: i32, tail: &str) -> WorkerExit {
        WorkerExit {
            rank,
            local_rank: rank as u16,
            pid: 100 + rank,
            code,
            signal: (code > 128).then_some(code - 128),
            at_ms,
            tail: tail.into(),
        }
    }

    #[test]
    fn the_root_cause_comes_first() {
        let exits = [
            exit(0, 1_200, 1, "RuntimeError: connection closed"),
            exit(1, 1_000, 139, ""),
            exit(2, 1_300, 143, ""),
        ];
        let text = with_local("the job failed", 139, &exits);
        assert_eq!(
            text,
            "the job failed\n\
             on this node, first: rank 1 (local rank 1, pid 101): killed by SIGSEGV\n\
             \x20 then, 200 ms later: rank 0: exit code 1\n\
             \x20 then, 300 ms later: rank 2: killed by SIGTERM"
        );
        assert_eq!(with_local("done", 0, &exits), "done");
        assert_eq!(
            with_local("", 1, &[exit(3, 1, 1, "a\nb")]).lines().last(),
            Some("    b")
        );
    }
}
