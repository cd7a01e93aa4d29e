//! Launchers that were started wrongly: too few, with other flags, or twice.

use crate::support::{Bed, JOB};

#[test]
fn other_parameters_are_refused_by_name_and_the_first_goes_on() {
    let mut bed = Bed::new();
    let _agents = [
        bed.agent("a", &[]),
        bed.agent("b", &["a"]),
        bed.agent("c", &["a"]),
    ];
    let mut first = bed.launch("a", &["--nnodes", "2"]);
    first.until_says("waiting for 1 more of 2 nodes");
    let mut other = bed.launch("b", &["--nnodes", "3", "--max-restarts", "5"]);
    assert_eq!(other.code(), 1, "{}", other.log());
    let said = other.log();
    assert!(said.contains("--nnodes 3:3 here, 2:2 there"), "{said}");
    assert!(said.contains("--max-restarts 5 here, 0 there"), "{said}");
    assert!(!said.contains("--loss-grace"), "{said}");
    assert!(said.contains("--rdzv-id"), "names the fix: {said}");
    assert!(first.is_alive());

    // With the right flags the same node is welcome; while the job runs, others are refused too.
    let mut second = bed.launch("b", &["--nnodes", "2"]);
    let before = bed.until_runs_on(&["a", "b"]);
    let mut late = bed.launch("c", &["--nnodes", "2:3"]);
    assert_eq!(late.code(), 1, "{}", late.log());
    assert!(late.log().contains("--nnodes 2:3 here, 2:2 there"));
    assert_eq!(bed.until_runs_on(&["a", "b"]), before);
    let _open = bed.finish();
    assert_eq!((first.code(), second.code()), (0, 0));
}

#[test]
fn fewer_than_the_minimum_says_who_is_here_waits_and_can_be_cancelled() {
    let mut bed = Bed::new();
    let _agents = [
        bed.agent("a", &[]),
        bed.agent("b", &["a"]),
        bed.agent("c", &["a"]),
    ];
    let mut first = bed.launch("a", &["--nnodes", "3"]);
    first.until_says("waiting for 2 more of 3 nodes");
    let mut second = bed.launch("b", &["--nnodes", "3"]);
    second.until_says("waiting for 1 more of 3 nodes");
    first.until_says("waiting for 1 more of 3 nodes");
    let said = second.log();
    assert!(said.contains("this node") && said.contains('a'), "{said}");
    assert!(said.contains("--rdzv-id"), "{said}");
    assert!(
        said.contains("sees 2 others"),
        "names what the agent sees: {said}"
    );
    second.signal(libc::SIGINT);
    assert_eq!(second.code(), 130, "{}", second.log());
    // The one that still waits is told, and is not ended by the other's Ctrl-C.
    first.until_says("waiting for 2 more of 3 nodes");
    assert!(first.is_alive() && bed.worker_pids().is_empty());
    first.signal(libc::SIGINT);
    assert_eq!(first.code(), 130, "{}", first.log());
}

#[test]
fn the_same_command_twice_on_one_node_is_refused_naming_the_first() {
    let mut bed = Bed::new();
    let _agent = bed.agent("a", &[]);
    let mut first = bed.launch("a", &["--nnodes", "1"]);
    let before = bed.until_runs_on(&["a"]);
    let mut second = bed.launch("a", &["--nnodes", "1"]);
    assert_eq!(second.code(), 1, "{}", second.log());
    let said = second.log();
    assert!(said.contains(&format!("(pid {})", first.pid())), "{said}");
    assert!(said.contains(JOB) && said.contains("--instance"), "{said}");
    assert_eq!(bed.until_runs_on(&["a"]), before);
    let _open = bed.finish();
    assert_eq!(first.code(), 0);
}
