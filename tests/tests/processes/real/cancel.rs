//! `muster cancel`, after any history and from any node: it ends that life of the job, or says at once what is
//! missing.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::ground::program;
use crate::harness::Bed;

/// Within so long a command says what is missing.
const AT_ONCE: Duration = Duration::from_secs(15);

/// Agents on the first `n` nodes.
fn agents(n: usize, flags: &[&str]) -> Bed {
    let mut bed = Bed::of(n, flags);
    (0..n).for_each(|node| bed.agent(node));
    bed
}

/// A store, and the flag that names it.
fn store() -> (tempfile::TempDir, String) {
    let store = tempfile::tempdir().unwrap();
    let flag = format!("--store={}", store.path().display());
    (store, flag)
}

/// SIGKILL to the launchers, then to the agents, which are started again.
fn all_restart(bed: &mut Bed, nodes: &[usize]) {
    for node in nodes {
        bed.signal(bed.launcher_pid(*node), Signal::SIGKILL);
        bed.exit(*node);
    }
    nodes.iter().for_each(|node| bed.kill_agent(*node));
    nodes.iter().for_each(|node| bed.agent(*node));
}

fn begins(bed: &Bed, node: usize, args: &[&str]) -> Child {
    Command::new(program("muster"))
        .args(args)
        .arg("--socket")
        .arg(bed.socket(node))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn is_over(bed: &Bed, nodes: &[usize]) {
    for node in nodes {
        bed.until("it is over", |bed| bed.job(*node)["kind"] == "cancelled");
    }
}

#[test]
fn a_job_whose_launchers_and_agents_were_killed_is_ended_in_its_store_from_a_node_of_it() {
    let (_store, flag) = store();
    let mut bed = agents(3, &["--nnodes=2", &flag]);
    [0, 1].into_iter().for_each(|node| bed.attach(node));
    bed.group(&[0, 1], 0);
    all_restart(&mut bed, &[0, 1]);
    let asked = Instant::now();
    let (done, said) = bed.muster(1, &["cancel", "job"]);
    assert!(!done && said.contains("--store"), "{said}");
    assert!(asked.elapsed() < AT_ONCE, "{:?}", asked.elapsed());
    let (done, said) = bed.muster(1, &["cancel", "job", "--wait", &flag]);
    assert!(done, "{said}");
    is_over(&bed, &[0, 1]);
}

#[test]
fn a_job_whose_launchers_and_agents_were_killed_is_ended_in_its_store_from_any_node() {
    let (_store, flag) = store();
    let mut bed = agents(3, &["--nnodes=2", &flag]);
    [0, 1].into_iter().for_each(|node| bed.attach(node));
    bed.group(&[0, 1], 0);
    all_restart(&mut bed, &[0, 1]);
    bed.until("an agent that has no part in it is there", |bed| {
        [0, 1].iter().all(|n| bed.peer(2, *n)["connected"] == true)
    });
    let asked = Instant::now();
    let (done, said) = bed.muster(2, &["cancel", "job"]);
    assert!(!done && said.contains("--store"), "{said}");
    assert!(asked.elapsed() < AT_ONCE, "{:?}", asked.elapsed());
    let (done, said) = bed.muster(2, &["cancel", "job", &flag]);
    assert!(done, "{said}");
    is_over(&bed, &[0, 1]);
}

#[test]
fn a_job_whose_nodes_are_dead_is_ended_in_its_store_once_nothing_is_written_there() {
    let (_store, flag) = store();
    let mut bed = Bed::of(3, &["--nnodes=2", &flag]);
    bed.env("MUSTER_AGENT_GRACE", "3s");
    (0..3).for_each(|node| bed.agent(node));
    [0, 1].into_iter().for_each(|node| bed.attach(node));
    let first = bed.group(&[0, 1], 0);
    bed.kill_together(&[0, 1]);
    bed.until("they are missed", |bed| {
        [0, 1].iter().all(|n| bed.peer(2, *n)["connected"] != true)
    });
    let (done, said) = bed.muster(2, &["cancel", "job"]);
    assert!(!done && said.contains("--store"), "{said}");
    let (done, said) = bed.muster(2, &["cancel", "job", &flag]);
    assert!(!done && said.contains("--wait"), "{said}");
    let (done, said) = bed.muster(2, &["cancel", "job", "--wait", &flag]);
    assert!(done, "{said}");
    // What is started then is another life of it.
    bed.agent(0);
    [0, 2].into_iter().for_each(|node| bed.attach(node));
    let next = bed.group(&[0, 2], first.began());
    assert_eq!(next.ranks[0].restart, 0);
    bed.order(None, 0);
    for node in [0, 2] {
        assert_eq!(bed.ended(node), Some(0));
    }
}

/// Its launcher lives on, as one that knows no life of the job.
#[test]
fn a_node_whose_agent_lost_its_state_ends_the_job_and_not_its_own_launcher_alone() {
    let mut bed = agents(3, &["--nnodes=2:3"]);
    (0..3).for_each(|node| bed.attach(node));
    bed.group(&[0, 1, 2], 0);
    bed.kill_agent(0);
    bed.lose_state(0);
    bed.agent(0);
    let (done, said) = bed.muster(0, &["cancel", "job", "--wait"]);
    assert!(done, "{said}");
    // That the job is over is known a moment before its last launcher has gone.
    for node in 0..3 {
        assert_eq!(bed.ended(node), Some(130), "n{node}: {said}");
    }
}

#[test]
fn a_spares_node_ends_the_job() {
    let mut bed = agents(2, &["--nnodes=1"]);
    bed.attach(0);
    bed.group(&[0], 0);
    bed.attach(1);
    bed.until("it is a spare", |bed| bed.said(1).contains("spare"));
    let (done, said) = bed.muster(1, &["cancel", "job", "--wait"]);
    assert!(done, "{said}");
    for node in [0, 1] {
        assert_eq!(bed.ended(node), Some(130), "n{node}: {said}");
    }
}

#[test]
fn an_order_ends_the_life_that_it_found_and_not_the_next_one() {
    let mut bed = agents(3, &["--nnodes=2"]);
    [0, 1].into_iter().for_each(|node| bed.attach(node));
    let first = bed.group(&[0, 1], 0);
    let mut order = begins(&bed, 2, &["cancel", "job", "--wait"]);
    for node in [0, 1] {
        assert_eq!(bed.exit(node).code(), Some(130));
        // As a supervisor does.
        bed.attach(node);
    }
    let next = bed.group(&[0, 1], first.began());
    let asked = Instant::now();
    while order.try_wait().unwrap().is_none() {
        assert!(asked.elapsed() < AT_ONCE, "the order goes on");
        std::thread::sleep(Duration::from_millis(20));
    }
    let (done, said) = Bed::checkpointed(order);
    assert!(done, "{said}");
    assert_eq!(
        bed.newest(&[0, 1], first.began()).map(|g| g.began()),
        Some(next.began())
    );
    bed.order(None, 0);
    for node in [0, 1] {
        assert_eq!(bed.ended(node), Some(0), "{said}");
    }
}
