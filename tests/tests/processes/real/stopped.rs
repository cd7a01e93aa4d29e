//! Launchers and agents that are stopped, and go on or not: old workers never run beside new ones, and nobody is
//! disturbed where nothing has to be done.

use std::time::{Duration, Instant};

use muster_protocol::local::Query;
use nix::sys::signal::Signal;

use crate::harness::{Bed, Group, now_ns};

/// So many steps take at least 3 s, as each of them sleeps: twice a lease.
const STEPS: u64 = 150;

/// Three nodes with an agent each, and launchers that attach to it. Their workers step.
fn three(flags: &[&str]) -> (Bed, Group) {
    let mut bed = Bed::new(flags);
    bed.steps();
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

/// States of the other agents, by the agent of `node`.
fn states(bed: &Bed, node: usize) -> Vec<String> {
    let nodes = bed.query(node, Query::Nodes).unwrap_or_default();
    let nodes = nodes.as_array().into_iter().flatten();
    let states = nodes.filter_map(|n| n["state"].as_str().map(str::to_owned));
    states.collect()
}

/// At which step the slowest rank is.
fn step(bed: &Bed, group: &Group) -> u64 {
    let steps = bed.steps_met(group.generation);
    let slowest = steps
        .iter()
        .min()
        .filter(|_| steps.len() == group.ranks.len());
    slowest.copied().unwrap_or(0)
}

/// Waits until all ranks have taken so many steps more, all of them the same processes as before.
fn goes_on(bed: &Bed, group: &Group, steps: u64) {
    let from = step(bed, group);
    bed.until("all ranks go on", |bed| {
        for rank in &group.ranks {
            assert!(bed.is_alive(rank.pid), "{rank:?} was ended");
        }
        step(bed, group) >= from + steps
    });
    let all = bed.events().into_iter();
    let starts = all.filter(|e| e.event == "start").count();
    assert_eq!(starts, group.ranks.len());
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
        goes_on(&bed, &group, STEPS);
        bed.signal(agent, Signal::SIGCONT);
        bed.until("all see each other again", |bed| {
            nodes.iter().all(|n| {
                let states = states(bed, *n);
                let well = |s: &String| ["alive", "connected"].contains(&s.as_str());
                states.iter().filter(|s| well(s)).count() == 3
            })
        });
    }
    goes_on(&bed, &group, STEPS / 3);
    finish(bed, &[0, 1, 2]);
}

#[test]
fn a_launcher_that_is_stopped_disturbs_nobody_while_its_agent_is_there() {
    let (bed, group) = three(&["--nnodes=3"]);
    let node = group.nodes()[1];
    let launcher = bed.launcher_pid(node);
    bed.signal(launcher, Signal::SIGSTOP);
    // As after Ctrl-Z.
    goes_on(&bed, &group, STEPS);
    bed.signal(launcher, Signal::SIGCONT);
    goes_on(&bed, &group, STEPS / 3);
    finish(bed, &[0, 1, 2]);
}

mod long {
    use super::*;

    #[test]
    fn a_launcher_that_was_stopped_for_as_long_as_it_may_be_alone_finds_its_agent() {
        let (bed, group) = three(&["--nnodes=3"]);
        let launcher = bed.launcher_pid(group.nodes()[1]);
        bed.signal(launcher, Signal::SIGSTOP);
        // Three quarters of `agent_grace` are over by then, but not for long.
        let stopped = Instant::now();
        while stopped.elapsed() < Duration::from_secs(23) {
            goes_on(&bed, &group, 10);
        }
        bed.signal(launcher, Signal::SIGCONT);
        goes_on(&bed, &group, STEPS);
        finish(bed, &[0, 1, 2]);
    }

    #[test]
    fn a_launcher_may_be_stopped_for_more_than_five_minutes() {
        let (bed, group) = three(&["--nnodes=3"]);
        let launcher = bed.launcher_pid(group.nodes()[1]);
        bed.signal(launcher, Signal::SIGSTOP);
        let stopped = Instant::now();
        while stopped.elapsed() < Duration::from_secs(310) {
            goes_on(&bed, &group, STEPS);
        }
        bed.signal(launcher, Signal::SIGCONT);
        goes_on(&bed, &group, STEPS);
        finish(bed, &[0, 1, 2]);
    }
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

/// It is rank 0's when the next generation starts, answers nobody who looks for it, and starts nothing.
#[test]
fn a_stopped_launcher_of_rank_0_is_left_out_and_not_who_looks_for_it() {
    let (mut bed, group) = three(&["--nnodes=1:3"]);
    let stopped = group.rank0();
    let mut rest = (0..3).filter(|n| *n != stopped);
    let (dies, stays) = (rest.next().unwrap(), rest.next().unwrap());
    bed.signal(bed.launcher_pid(stopped), Signal::SIGSTOP);
    let at = bed.kill(dies);
    let alone = bed.group(&[stays], at);
    let me = bed.status(stays)["node"].to_string();
    let mut failed = bed.history(stays, "generation");
    failed.retain(|e| e["cause"] == "start_failed");
    assert!(
        failed.iter().all(|e| !e["about"].to_string().contains(&me)),
        "{failed:?}"
    );
    bed.signal(bed.launcher_pid(stopped), Signal::SIGCONT);
    let mut both = [stopped, stays];
    both.sort_unstable();
    bed.group(&both, alone.began());
    finish(bed, &both);
}
