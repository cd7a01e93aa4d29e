//! Launchers that wait for a place, and whose agents are stopped or cut off just then: the job goes on, or begins, with
//! those that are there.

use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup};

/// Two of these train, the others wait.
const NODES: usize = 5;
const MEMBERS: usize = 2;
/// From when on members are lost.
const LOST: u64 = 20 * SEC;
/// Longer than anything here may last.
const FOR: u64 = 15 * SEC;

/// The last ones have their launchers `later`, each a little after the one before.
fn setup(seed: u64, store: bool, later: u64, faults: Vec<(u64, Fault)>) -> Setup {
    let spec = JobSpec {
        min_nodes: 2,
        max_nodes: 2,
        ..JobSpec::default()
    };
    let node = |at: usize| NodeSetup {
        launcher_at: Some(match at < MEMBERS {
            true => SEC,
            false => later + at as u64 * 20 * MS,
        }),
        ..NodeSetup::quiet(at, 0)
    };
    Setup {
        store,
        faults,
        heal_at: 60 * SEC,
        ..Setup::quiet(seed, (0..NODES).map(node).collect(), spec)
    }
}

/// How long after this time two of these nodes train.
fn trains_after(at: u64, nodes: &[usize], setup: Setup) -> Option<u64> {
    let seed = setup.seed;
    let mut conductor = Conductor::new(setup);
    assert_eq!(conductor.run(), Ok(()), "seed {seed}");
    let spawns = &conductor.world.truth.spawns;
    let mut since: Vec<u64> = nodes
        .iter()
        .filter_map(|node| spawns.iter().find(|s| s.node == *node && s.at > at))
        .map(|spawn| spawn.at - at)
        .collect();
    since.sort_unstable();
    since.get(1).copied()
}

/// A member that reaches nobody, but perhaps its store, takes in none that it cannot reach either.
#[test]
fn others_go_on_where_a_member_is_cut_off_with_its_store() {
    for seed in 0..10 {
        for cut in 0..MEMBERS {
            for store in [false, true] {
                let (side, for_ns) = (1 << cut, FOR);
                let faults = vec![(LOST, Fault::Partition { side, for_ns })];
                let others: Vec<usize> = (0..NODES).filter(|node| *node != cut).collect();
                let after = trains_after(LOST, &others, setup(seed, store, 3 * SEC, faults));
                let which = (seed, cut, store);
                // With the store: `suspect_after`, the wait of a minority, and a lease of whoever is cut off.
                assert!(after.is_some_and(|t| t < 11 * SEC), "{which:?}: {after:?}");
            }
        }
    }
}

#[test]
fn a_spare_whose_agent_is_stopped_gets_no_place_while_others_are_there() {
    for seed in 0..4 {
        for store in [false, true] {
            for stopped in [400 * MS, 700 * MS, 1_500 * MS, 2_500 * MS, 3_400 * MS] {
                // The one that has waited longest, and the next one too. The member is killed, or told to go.
                for (spares, killed) in [(1, true), (2, true), (1, false), (2, false)] {
                    let pause = |spare| {
                        let (node, for_ns) = (MEMBERS + spare, FOR);
                        (LOST - stopped, Fault::AgentPause { node, for_ns })
                    };
                    let mut faults: Vec<(u64, Fault)> = (0..spares).map(pause).collect();
                    let (node, relaunch_after) = (1, None);
                    let lost = match killed {
                        true => Fault::LauncherCrash {
                            node,
                            relaunch_after,
                        },
                        false => Fault::Leave {
                            node,
                            grace_ms: 5_000,
                            relaunch_after,
                        },
                    };
                    faults.push((LOST, lost));
                    let nodes = [0, 2, 3, 4];
                    let after = trains_after(LOST, &nodes, setup(seed, store, 3 * SEC, faults));
                    let which = (seed, store, stopped / MS, spares, killed);
                    assert!(after.is_some_and(|t| t < 2 * SEC), "{which:?}: {after:?}");
                }
            }
        }
    }
}

/// One that waits alone, and whose agent is stopped as the others come.
#[test]
fn a_job_begins_without_a_launcher_whose_agent_is_stopped() {
    const COME: u64 = 6 * SEC;
    for seed in 0..4 {
        for store in [false, true] {
            for stopped in [400 * MS, SEC, 1_500 * MS, 2_500 * MS] {
                for node in 0..NODES {
                    let for_ns = 20 * SEC;
                    let faults = vec![(COME - stopped, Fault::AgentPause { node, for_ns })];
                    let mut setup = setup(seed, store, COME, faults);
                    let others: Vec<usize> = (0..NODES).filter(|n| *n != node).collect();
                    for (n, at) in others.iter().zip(0u64..) {
                        setup.nodes[*n].launcher_at = (at < 2).then_some(COME + at * 200 * MS);
                    }
                    setup.nodes[node].launcher_at = Some(SEC);
                    let after = trains_after(COME, &others, setup);
                    let which = (seed, store, stopped / MS, node);
                    // An agent that does not answer is asked for 8 s.
                    assert!(after.is_some_and(|t| t < 9 * SEC), "{which:?}: {after:?}");
                }
            }
        }
    }
}
