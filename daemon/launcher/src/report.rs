//! The launcher's report on a generation: its start, and in the end the root cause first, then what followed from it.

use std::fmt::Write as _;

use muster_protocol::local::{Start, WorkerExit, plain_tail};

use crate::signal;

const SIGKILL: i32 = 9;

/// The most exits that are listed.
const MAX_LISTED: usize = 16;

/// The workers of this node are started.
pub(crate) fn starts(start: &Start) -> String {
    let nodes = match start.nodes {
        1 => "1 node".to_owned(),
        nodes => format!("{nodes} nodes"),
    };
    let last = start.first_rank + u32::from(start.slots).saturating_sub(1);
    let ranks = match last == start.first_rank {
        true => format!("rank {last} of {} is here", start.world),
        false => format!(
            "ranks {} to {last} of {} are here",
            start.first_rank, start.world
        ),
    };
    format!("generation {} starts on {nodes}: {ranks}", start.number)
}

/// How a worker ended, in a few words.
pub(crate) fn how(exit: &WorkerExit) -> String {
    match exit.signal {
        Some(SIGKILL) if exit.hung => "killed by its launcher, as it hung".into(),
        // Nobody else says it.
        Some(SIGKILL) => match exit.out_of_memory {
            Some(true) => "killed by the kernel for want of memory (SIGKILL; `dmesg` tells whose limit it was)",
            Some(false) => "killed by SIGKILL, and not by the kernel for want of memory",
            None => "killed by SIGKILL (by the kernel where memory was short: `dmesg` tells)",
        }
        .into(),
        Some(signal) => format!("killed by {}", signal::name(signal)),
        None => format!("exit code {}", exit.code),
    }
}

/// The exit from which the others follow: the earliest; torchrun's rule of the smallest timestamp.
/// At the same moment a failure that says why beats one that does not.
pub(crate) fn root_cause(exits: &[WorkerExit]) -> Option<&WorkerExit> {
    exits
        .iter()
        .min_by_key(|e| (e.at_ms, e.tail.is_empty(), e.rank))
}

/// A worker of this node ended, and the workers are started again.
pub(crate) fn ended_here(exit: &WorkerExit) -> String {
    format!(
        "rank {} (local rank {}, pid {}) had ended: {}",
        exit.rank,
        exit.local_rank,
        exit.pid,
        how(exit)
    )
}

/// The failure on another node from which those here follow, with its last lines.
pub(crate) fn root_elsewhere(node: &str, exit: &WorkerExit) -> String {
    let mut text = format!(
        "the cause: rank {} (local rank {}, pid {}) on {node}: {}",
        exit.rank,
        exit.local_rank,
        exit.pid,
        how(exit)
    );
    for line in plain_tail(&exit.tail).lines() {
        let _ = write!(text, "\n    {line}");
    }
    text
}

/// The agent's report about the whole job, followed by the root cause where it was on another node,
/// and by what failed on this one.
pub(crate) fn whole(
    report: &str,
    code: i32,
    elsewhere: Option<&(String, WorkerExit)>,
    failures: &[WorkerExit],
) -> String {
    let mut text = report.trim_end().to_owned();
    if code == 0 {
        return text;
    }
    if let Some((node, exit)) = elsewhere {
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&root_elsewhere(node, exit));
    }
    let Some(root) = root_cause(failures) else {
        return text;
    };
    if !text.is_empty() {
        text.push('\n');
    }
    let _ = writeln!(
        text,
        "first failure on this node: rank {} (local rank {}, pid {}): {}",
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
            hung: false,
            out_of_memory: None,
            damaged: None,
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
        let text = whole("the job failed", 139, None, &exits);
        assert_eq!(
            text,
            "the job failed\n\
             first failure on this node: rank 1 (local rank 1, pid 101): killed by SIGSEGV\n\
             \x20 then, 200 ms later: rank 0: exit code 1\n\
             \x20 then, 300 ms later: rank 2: killed by SIGTERM"
        );
        assert_eq!(whole("done", 0, None, &exits), "done");
        assert_eq!(
            whole("", 1, None, &[exit(3, 1, 1, "a\nb")]).lines().last(),
            Some("    b")
        );
    }
    #[test]
    fn a_root_cause_on_another_node_is_told_with_its_last_lines() {
        let root = (
            "b (22)".to_owned(),
            exit(2, 900, 3, "Traceback\n\u{1b}[31mboom"),
        );
        let here = [exit(0, 1_200, 1, "")];
        assert_eq!(
            whole("the job failed", 3, Some(&root), &here),
            "the job failed\n\
             the cause: rank 2 (local rank 2, pid 102) on b (22): exit code 3\n\
             \x20   Traceback\n\
             \x20   boom\n\
             first failure on this node: rank 0 (local rank 0, pid 100): exit code 1"
        );
        assert_eq!(whole("done", 0, Some(&root), &here), "done");
        assert!(!whole("", 3, Some(&root), &[]).starts_with('\n'));
    }
}
