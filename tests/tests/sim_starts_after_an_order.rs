//! The next life of a job begins on nodes that had no part in the last one, which a person has just ended, while workers
//! of that still run: the agent of one of its members is stopped.

use muster_protocol::agent::Flaws;
use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::invariants::Violation;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup};

const NODES: usize = 5;
const STOPPED: u64 = 15 * SEC;
const ORDERED: u64 = STOPPED + 4 * SEC;
const FOR: u64 = 12 * SEC;

/// Two nodes train, workers of the first take 300 ms to end. The launchers of the next life are started so long after the
/// order.
fn setup(seed: u64, store: bool, stopped: usize, again: u64, flaws: Flaws) -> Setup {
    let (node, for_ns) = (stopped, FOR);
    let mut faults = vec![
        (10 * SEC, Fault::Stubborn { node: 1 - stopped }),
        (STOPPED, Fault::AgentPause { node, for_ns }),
        (ORDERED, Fault::OrderCancel { node: 1 - stopped }),
    ];
    for node in [3, 4] {
        faults.push((ORDERED + again, Fault::LateJoin { node }));
    }
    let spec = JobSpec {
        min_nodes: 2,
        max_nodes: 2,
        stop_grace_ms: 300,
        ..JobSpec::default()
    };
    let node = |at: usize| NodeSetup {
        launcher_at: (at < 2).then_some(SEC),
        ..NodeSetup::quiet(at, 0)
    };
    Setup {
        store,
        faults,
        flaws,
        heal_at: 60 * SEC,
        ..Setup::quiet(seed, (0..NODES).map(node).collect(), spec)
    }
}

/// Whether the next life begins while a worker of the last one runs.
fn begins_beside(setup: Setup, stopped: usize) -> bool {
    let seed = setup.seed;
    let mut conductor = Conductor::new(setup);
    match conductor.run_until(STOPPED + FOR) {
        Err(Violation::Overlap(_)) => return true,
        result => assert_eq!(result, Ok(()), "seed {seed}"),
    }
    let world = &conductor.world;
    let begun = world.truth.spawns.iter().any(|spawn| spawn.node > 2);
    let launcher = world.nodes[stopped].launcher.as_ref();
    let run = launcher.and_then(|l| l.alive());
    begun && run.is_some_and(|run| run.killed.is_none())
}

#[test]
fn a_life_does_not_begin_beside_workers_of_the_one_that_was_ended() {
    let waits_not = Flaws {
        skip_r16: true,
        ..Flaws::default()
    };
    let mut shown = false;
    for store in [false, true] {
        for stopped in 0..2 {
            for (seed, again) in (0..60u64).map(|i| (i % 3, i * 12 * MS)) {
                let case = setup(seed, store, stopped, again, Flaws::default());
                let which = (seed, store, stopped, again / MS);
                assert!(!begins_beside(case, stopped), "{which:?}");
                if again < 100 * MS {
                    let flawed = setup(seed, store, stopped, again, waits_not);
                    shown |= begins_beside(flawed, stopped);
                }
            }
        }
    }
    assert!(shown, "a start that waits for nobody is not seen");
}
