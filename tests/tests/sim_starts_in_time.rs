//! A job whose launchers are all gone, and that is started again: nobody waits for workers that are known to have
//! ended, whoever starts it, and though all agents were started anew meanwhile.

use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup, Times, Torn};

const NODES: usize = 6;
/// When all nodes of the job are lost, and are started again.
const LOST: u64 = 15 * SEC;
const AGAIN: u64 = 25 * SEC;
/// Ten times what a start takes.
const BOUND: u64 = 6 * SEC;

/// How the nodes of the job are lost.
#[derive(Clone, Copy, Debug)]
enum Loss {
    /// All at once, without a word; the machines and their agents are up again.
    Power,
    /// The launchers alone; their agents are started again a moment later.
    LaunchersThenAgents,
    /// The launchers alone, while the agents are away.
    AgentsThenLaunchers,
}

fn losses(loss: Loss, node: usize) -> Vec<(u64, Fault)> {
    let agent = Fault::AgentCrash {
        node,
        effects: 0,
        torn: Torn::Between,
        down: SEC,
        new_disk: false,
    };
    let launcher = Fault::LauncherCrash {
        node,
        relaunch_after: None,
    };
    match loss {
        Loss::Power => {
            let power = Fault::NodeCrash {
                node,
                down: 2 * SEC,
                new_disk: false,
                relaunch: false,
            };
            vec![(LOST, power)]
        }
        Loss::LaunchersThenAgents => vec![(LOST, launcher), (LOST + SEC, agent)],
        Loss::AgentsThenLaunchers => vec![(LOST - 100 * MS, agent), (LOST, launcher)],
    }
}

fn train_in_time(
    seed: u64,
    loss: Loss,
    first: &[usize],
    joins: Option<usize>,
    next: &[usize],
    store: bool,
) -> Result<(), String> {
    let mut faults: Vec<(u64, Fault)> = Vec::new();
    faults.extend(joins.map(|node| (6 * SEC, Fault::LateJoin { node })));
    let all = first.iter().copied().chain(joins);
    faults.extend(all.flat_map(|node| losses(loss, node)));
    faults.extend(next.iter().map(|node| (AGAIN, Fault::LateJoin { node: *node })));
    faults.sort_by_key(|(at, _)| *at);
    let nodes = (0..NODES).map(|at| NodeSetup {
        launcher_at: first.contains(&at).then_some(MS),
        ..NodeSetup::quiet(at, 0)
    });
    let spec = JobSpec {
        min_nodes: 2,
        max_nodes: NODES as u16,
        ..JobSpec::default()
    };
    let mut conductor = Conductor::new(Setup {
        store,
        faults,
        times: Times::USUAL,
        heal_at: AGAIN + 60 * SEC,
        ..Setup::quiet(seed, nodes.collect(), spec)
    });
    conductor.relaunches = false;
    conductor.run().map_err(|v| v.to_string())?;
    let spawns = &conductor.world.truth.spawns;
    for node in next {
        let mut starts = spawns.iter().filter(|s| s.node == *node && s.at > AGAIN);
        let at = starts.next().map(|s| (s.at - AGAIN) / MS);
        if at.is_none_or(|ms| ms > BOUND / MS) {
            return Err(format!("node {node} trains after {at:?} ms"));
        }
    }
    Ok(())
}

#[test]
fn a_job_whose_agents_are_all_back_without_launchers_is_started_at_once() {
    let mut wrong = Vec::new();
    for store in [true, false] {
        for loss in [Loss::Power, Loss::LaunchersThenAgents, Loss::AgentsThenLaunchers] {
            for (first, joins) in [(&[0, 1][..], None), (&[0, 1], Some(2)), (&[2, 3], Some(1))] {
                for next in [&[4, 5][..], &[2, 3], &[0, 1], &[0, 1, 2], &[0, 3]] {
                    for seed in 1..4 {
                        let went = train_in_time(seed, loss, first, joins, next, store);
                        if let Err(why) = went {
                            wrong.push(format!(
                                "{loss:?} of {first:?} and {joins:?}, then {next:?}, store {store}, {seed}: {why}"
                            ));
                        }
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}:\n{}", wrong.len(), wrong.join("\n"));
}
