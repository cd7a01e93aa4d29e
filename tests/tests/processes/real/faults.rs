//! Three nodes, each with an agent inside its launcher: workers and nodes die, leave, fall silent,
//! join, and wait as spares.

use std::time::Duration;

use nix::sys::signal::Signal;

use crate::harness::{Bed, Group, now_ns};

/// Ten times what a loss usually takes, on a busy machine.
const SOON: Duration = Duration::from_secs(5);

/// Three nodes that train together.
fn three(flags: &[&str]) -> (Bed, Group) {
    let mut bed = Bed::new(flags);
    for node in 0..3 {
        bed.run(node, 0);
    }
    let group = bed.group(&[0, 1, 2], 0);
    (bed, group)
}

fn finish(mut bed: Bed, nodes: &[usize]) {
    bed.order(None, 0);
    for node in nodes {
        assert_eq!(bed.ended(*node), Some(0), "n{node}");
    }
}

/// The order of `nodes` among those of a group.
fn order_of(group: &Group, nodes: &[usize]) -> Vec<usize> {
    let all = group.nodes();
    all.into_iter().filter(|n| nodes.contains(n)).collect()
}

/// Sorted, without one of them.
fn others(of: usize) -> Vec<usize> {
    (0..3).filter(|n| *n != of).collect()
}

#[test]
fn a_killed_worker_is_restarted_until_the_budget_is_spent() {
    let (mut bed, group) = three(&["--nnodes=3", "--max-restarts=1"]);
    let at = now_ns();
    bed.signal(group.pid(group.nodes()[1]), Signal::SIGKILL);
    let again = bed.group(&[0, 1, 2], at);
    assert_eq!(again.ranks[0].restart, 1);
    assert_eq!(again.nodes(), group.nodes(), "nobody changes its rank");
    // The second failure is one too many: its own code, on every node, with the cause.
    bed.order(Some(2), 7);
    let failed = again.nodes()[2];
    for node in 0..3 {
        assert_eq!(bed.ended(node), Some(7), "n{node}");
        let report = format!("rank 2 on n{failed}");
        let said = bed.said(node);
        assert!(
            said.contains(&report) && said.contains("its restarts are used up"),
            "n{node}: {said}"
        );
        // Whoever reads one log only finds the reason in it: the worker's last words.
        assert!(
            said.contains("worker of rank 2 ends with 7"),
            "n{node}: {said}"
        );
    }
    assert!(bed.said(failed).contains("worker of rank 2 ends with 7"));
}

#[test]
fn a_killed_node_is_replaced_by_who_comes_next() {
    let (mut bed, group) = three(&["--nnodes=2:3"]);
    let nodes = group.nodes();
    let at = bed.kill(nodes[1]);
    let two = bed.group(&others(nodes[1]), at);
    assert_eq!(two.nodes(), [nodes[0], nodes[2]]);
    let took = Duration::from_nanos(two.began() - at);
    assert!(took < SOON, "{took:?} until the survivors' workers began");
    // It comes back and is a newcomer.
    let at = now_ns();
    bed.run(nodes[1], 0);
    let three = bed.group(&[0, 1, 2], at);
    assert_eq!(three.nodes(), [nodes[0], nodes[2], nodes[1]]);
    finish(bed, &[0, 1, 2]);
}

#[test]
fn one_node_goes_on_with_two_that_come_back_without_their_state() {
    // Node 0 has the endpoint's port, the agents of the others any.
    for stays in [0, 1] {
        let (mut bed, _) = three(&["--nnodes=2:3"]);
        let at = now_ns();
        bed.kill_together(&others(stays));
        for node in others(stays) {
            bed.lose_state(node);
            bed.run(node, 0);
        }
        let three = bed.group(&[0, 1, 2], at);
        let took = Duration::from_nanos(three.began() - at);
        assert!(took < 2 * SOON, "{took:?} until all train again");
        finish(bed, &[0, 1, 2]);
    }
}

#[test]
fn rank_0_and_the_first_peer_may_die() {
    let (mut bed, group) = three(&["--nnodes=2:3"]);
    let zero = group.rank0();
    let at = bed.kill(zero);
    let two = bed.group(&others(zero), at);
    assert_eq!(two.nodes(), group.nodes()[1..]);
    let took = Duration::from_nanos(two.began() - at);
    assert!(took < SOON, "{took:?} until the survivors' workers began");
    bed.run(zero, 0);
    let three = bed.group(&[0, 1, 2], two.began());
    assert_eq!(three.nodes()[2], zero);
    // Node 0 is the peer that all called first. It is gone, and the job does not need it.
    let at = bed.kill(0);
    let last = bed.group(&[1, 2], at);
    assert_eq!(last.nodes(), order_of(&three, &[1, 2]));
    finish(bed, &[1, 2]);
}

#[test]
fn a_node_whose_launcher_is_told_to_stop_leaves() {
    let (mut bed, group) = three(&["--nnodes=2:3", "--preempt-signal=USR1"]);
    let leaves = group.nodes()[0];
    let at = now_ns();
    bed.signal(bed.launcher_pid(leaves), Signal::SIGTERM);
    let two = bed.group(&others(leaves), at);
    assert_eq!(two.nodes(), group.nodes()[1..]);
    assert_eq!(bed.ended(leaves), Some(143));
    // Every rank of every node was told, by the agreed signal, and close to at once.
    let told: Vec<_> = bed
        .events()
        .into_iter()
        .filter(|e| e.event == "signal" && e.generation == group.generation)
        .collect();
    let mut ranks: Vec<u32> = told.iter().map(|e| e.rank).collect();
    ranks.sort_unstable();
    assert_eq!(ranks, [0, 1, 2]);
    assert!(told.iter().all(|e| e.signal == Signal::SIGUSR1 as i32));
    let times = || told.iter().map(|e| e.t);
    let apart = Duration::from_nanos(times().max().unwrap() - times().min().unwrap());
    assert!(apart < Duration::from_millis(500), "{apart:?} apart");
    finish(bed, &others(leaves));
}

#[test]
fn a_silent_node_is_lost_and_comes_back() {
    let (bed, group) = three(&["--nnodes=2:3"]);
    let silent = group.nodes()[2];
    let launcher = bed.launcher_pid(silent);
    let at = now_ns();
    // Agent and launcher are one process here: nothing of the node answers, and nothing is closed.
    bed.signal(launcher, Signal::SIGSTOP);
    let two = bed.group(&others(silent), at);
    let took = Duration::from_nanos(two.began() - at);
    assert!(
        took < Duration::from_secs(25),
        "{took:?} until the survivors' workers began, suspect_after is 2 s"
    );
    let at = now_ns();
    bed.signal(launcher, Signal::SIGCONT);
    let three = bed.group(&[0, 1, 2], at);
    assert_eq!(three.nodes()[2], silent);
    assert!(!bed.is_alive(group.pid(silent)), "the old worker runs on");
    finish(bed, &[0, 1, 2]);
}

#[test]
fn a_node_joins_and_a_spare_steps_in() {
    let mut bed = Bed::new(&["--nnodes=1:3"]);
    bed.run(0, 0);
    bed.group(&[0], 0);
    bed.run(1, 0);
    let two = bed.group(&[0, 1], 0);
    assert_eq!(two.nodes(), [0, 1]);
    bed.run(2, 0);
    let three = bed.group(&[0, 1, 2], two.began());
    assert_eq!(three.nodes(), [0, 1, 2]);
    // The fourth is one too many: it parks, and nobody is disturbed.
    bed.run(3, 0);
    bed.until("the fourth is a spare", |bed| bed.said(3).contains("spare"));
    // It votes on nothing, and knows of the job by the others' word alone.
    bed.until("its agent lists what runs", |bed| {
        let row = bed.job(3);
        row["kind"] == "runs" && row["generation"] == three.generation
    });
    let at = bed.kill(1);
    let next = bed.group(&[0, 2, 3], at);
    assert_eq!(next.nodes(), [0, 2, 3]);
    assert_eq!(
        next.generation,
        three.generation + 1,
        "the spare costs no generation"
    );
    finish(bed, &[0, 2, 3]);
}

#[test]
fn a_node_that_comes_back_needs_no_first_peer() {
    let (mut bed, group) = three(&["--nnodes=2:3"]);
    let back = *group.nodes().iter().rfind(|n| **n != 0).unwrap();
    let stays = 3 - back;
    let remembered = bed.path(&format!("n{back}/state/muster/n{back}/job-0/peers"));
    bed.until("the peers are remembered", |_| remembered.exists());
    bed.kill(0);
    bed.group(&[1, 2], 0);
    bed.kill(back);
    bed.until("the last node waits for another", |bed| {
        bed.said(stays).contains("waiting for 1 more")
    });
    let at = now_ns();
    bed.run(back, 0);
    bed.group(&[1, 2], at);
    finish(bed, &[1, 2]);
}
