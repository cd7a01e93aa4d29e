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
    let store = bed.path("store");
    std::fs::create_dir(&store).unwrap();
    let store = format!("--store={}", store.display());
    let mut stored = bed.launch("c", &["--nnodes", "2", &store]);
    assert_eq!(stored.code(), 1, "{}", stored.log());
    assert!(stored.log().contains("--store is given here, none there"));
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
        said.contains("launchers on 3 nodes and has 2") && said.contains("connected to 2 others"),
        "how many are needed, and what the agent sees: {said}"
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

/// The same without a daemon: the first launcher's own agent holds the state of the job here.
#[test]
fn the_same_command_twice_with_agents_of_their_own_is_refused_naming_the_first() {
    let mut bed = Bed::new();
    let endpoint = format!("127.0.0.1:{}", bed.port("a"));
    let worker = bed.path("worker.sh");
    let words = ["sh", worker.to_str().unwrap()];
    let flags = ["--nnodes", "1:2", "--rdzv-endpoint", endpoint.as_str()];
    let mut first = bed.run("a", &flags, &words);
    let before = bed.until_runs_on(&["a"]);
    let mut second = bed.run("a", &flags, &words);
    assert_eq!(second.code(), 1, "{}", second.log());
    let said = second.log();
    let named = format!(
        "job {JOB} already has a launcher on this node (pid {}, started 20",
        first.pid()
    );
    assert!(
        said.contains(&named) && said.contains("--instance 1"),
        "{said}"
    );
    assert_eq!(
        bed.until_runs_on(&["a"]),
        before,
        "the first is not disturbed"
    );
    // Where a second node on this host is meant, it says so, and is let in.
    let mut more = flags.to_vec();
    more.extend(["--instance", "1"]);
    let mut other = bed.run("a", &more, &words);
    crate::support::until("both run", || {
        bed.workers()
            .is_some_and(|w| w.len() == 2 && w.iter().all(|w| w.world == 2))
    });
    let mut again = bed.run("a", &more, &words);
    assert_eq!(again.code(), 1, "{}", again.log());
    assert!(again.log().contains("--instance 2"), "{}", again.log());
    let _open = bed.finish();
    assert_eq!((first.code(), other.code()), (0, 0));
}

/// All nodes are on this host, and one of them is too few: each further launcher is meant.
#[test]
fn the_same_command_twice_on_a_host_that_has_all_nodes_makes_two_of_them() {
    let mut bed = Bed::new();
    let endpoint = format!("localhost:{}", bed.port("a"));
    let worker = bed.path("worker.sh");
    let words = ["sh", worker.to_str().unwrap()];
    let flags = ["--nnodes", "2", "--rdzv-endpoint", endpoint.as_str()];
    let mut first = bed.run("a", &flags, &words);
    first.until_says("waiting for 1 more of 2 nodes");
    let mut second = bed.run("a", &flags, &words);
    crate::support::until("both run", || {
        bed.workers()
            .is_some_and(|w| w.len() == 2 && w.iter().all(|w| w.world == 2))
    });
    assert!(second.log().contains("--instance 1"), "{}", second.log());
    let mut third = bed.run("a", &flags, &words);
    assert_eq!(third.code(), 1, "{}", third.log());
    let said = third.log();
    let named = format!("(pid {},", first.pid());
    assert!(
        said.contains(&named) && said.contains("--instance 2"),
        "{said}"
    );
    let _open = bed.finish();
    assert_eq!((first.code(), second.code()), (0, 0));
}

/// Nothing but the nodes decides here: with a quorum one of three does not start the job, though it
/// may go on alone later, and all have to ask for the same.
#[test]
fn a_quorum_for_the_birth_is_waited_for_and_is_the_same_on_all_nodes() {
    let mut bed = Bed::new();
    let _agents = [
        bed.agent("a", &[]),
        bed.agent("b", &["a"]),
        bed.agent("c", &["a"]),
    ];
    let warned = |bed: &Bed| {
        let events = crate::support::events(&bed.socket("a"));
        events.iter().any(|e| {
            e["event"] == "warning" && e["text"].as_str().is_some_and(|t| t.contains("two groups"))
        })
    };
    let quorum = [
        "--nnodes",
        "1:3",
        "--birth-quorum",
        "--rdzv-endpoint",
        "a,b,c",
    ];
    let mut first = bed.launch("a", &quorum);
    first.until_says("waiting for 1 more of 2 to 3 nodes");
    let mut other = bed.launch("c", &["--nnodes", "1:3"]);
    assert_eq!(other.code(), 1, "{}", other.log());
    let said = other.log();
    assert!(
        said.contains("--birth-quorum off here, 2 nodes there"),
        "{said}"
    );
    let mut second = bed.launch("b", &quorum);
    bed.until_runs_on(&["a", "b"]);
    assert!(!warned(&bed));
    second.kill();
    bed.until_runs_on(&["a"]);
    let open = bed.finish();
    assert_eq!(first.code(), 0);
    drop(open);

    // Without it one node is enough, and that two groups could form is said.
    let mut alone = bed.launch("a", &["--nnodes", "1:3"]);
    bed.until_runs_on(&["a"]);
    assert!(warned(&bed));
    let _open = bed.finish();
    assert_eq!(alone.code(), 0);
}
