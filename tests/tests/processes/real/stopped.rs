//! Launchers and agents that are stopped, and go on or not: old workers never run beside new ones, and nobody is
//! disturbed where nothing has to be done.

use std::time::Duration;

use muster_protocol::local::Query;
use nix::sys::signal::Signal;

use crate::harness::{Bed, Group, now_ns};

/// Three nodes with an agent each, and launchers that attach to it.
fn three(flags: &[&str]) -> (Bed, Group) {
    let mut bed = Bed::new(flags);
    for node in 0..3 {
        bed.agent(node);
    }
    for node in 0..3 {
        bed.attach(node);
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

/// What the agent of `node` says of the others.
fn states(bed: &Bed, node: usize) -> Vec<String> {
    let nodes = bed.query(node, Query::Nodes).unwrap_or_default();
    let nodes = nodes.as_array().into_iter().flatten();
    let states = nodes.filter_map(|n| n["state"].as_str().map(str::to_owned));
    states.collect()
}

fn starts(bed: &Bed) -> usize {
    let all = bed.events().into_iter();
    all.filter(|e| e.event == "start").count()
}

#[test]
fn an_agent_that_was_stopped_and_goes_on_disturbs_nobody() {
    let (bed, group) = three(&["--nnodes=3"]);
    let nodes = group.nodes();
    // Rank 0's: it leads.
    for node in [nodes[2], nodes[0]] {
        let witness = nodes[1];
        let agent = bed.agent_pid(node);
        bed.signal(agent, Signal::SIGSTOP);
        bed.until("the others see that the agent is away", |bed| {
            states(bed, witness).contains(&"away".to_owned())
        });
        // Longer than any lease, shorter than the launcher would wait.
        std::thread::sleep(Duration::from_secs(4));
        bed.signal(agent, Signal::SIGCONT);
        bed.until("all see each other again", |bed| {
            nodes.iter().all(|n| {
                let states = states(bed, *n);
                let well = |s: &String| ["alive", "connected"].contains(&s.as_str());
                states.iter().filter(|s| well(s)).count() == 3
            })
        });
    }
    for rank in &group.ranks {
        assert!(bed.is_alive(rank.pid), "{rank:?} was restarted");
    }
    assert_eq!(starts(&bed), 3);
    finish(bed, &[0, 1, 2]);
}

#[test]
fn a_launcher_that_is_stopped_disturbs_nobody_while_its_agent_is_there() {
    let (bed, group) = three(&["--nnodes=3"]);
    let node = group.nodes()[1];
    let launcher = bed.launcher_pid(node);
    bed.signal(launcher, Signal::SIGSTOP);
    // More than twice the lease: as after Ctrl-Z.
    std::thread::sleep(Duration::from_secs(4));
    bed.signal(launcher, Signal::SIGCONT);
    for rank in &group.ranks {
        assert!(bed.is_alive(rank.pid), "{rank:?} was ended");
    }
    assert_eq!(starts(&bed), 3);
    finish(bed, &[0, 1, 2]);
}

#[test]
fn the_workers_of_a_stopped_launcher_never_run_beside_those_of_the_next() {
    let mut bed = Bed::new(&["--nnodes=1"]);
    bed.agent(0);
    bed.attach(0);
    let old = bed.group(&[0], 0);
    let first = bed.launcher_pid(0);
    bed.signal(first, Signal::SIGSTOP);
    bed.kill_agent(0);
    bed.agent(0);
    // The same again.
    let at = now_ns();
    bed.attach(0);
    // `group` finds no worker of an older generation.
    let new = bed.group(&[0], at);
    assert!(!bed.is_alive(old.pid(0)));
    bed.signal(first, Signal::SIGCONT);
    bed.until("the one that was stopped ends", |bed| !bed.is_alive(first));
    assert!(bed.is_alive(new.pid(0)));
    finish(bed, &[0]);
}

#[test]
fn what_its_agent_orders_holds_for_a_launcher_that_is_stopped() {
    let (bed, group) = three(&["--nnodes=2:3", "--max-restarts=3"]);
    let nodes = group.nodes();
    let launcher = bed.launcher_pid(nodes[1]);
    bed.signal(launcher, Signal::SIGSTOP);
    // A worker elsewhere fails: the generation is over, for all.
    bed.signal(group.pid(nodes[2]), Signal::SIGKILL);
    bed.until("its worker is gone too", |bed| {
        !bed.is_alive(group.pid(nodes[1]))
    });
    bed.signal(launcher, Signal::SIGCONT);
    let next = bed.group(&[0, 1, 2], group.began());
    assert!(next.generation > group.generation);
    finish(bed, &[0, 1, 2]);
}
