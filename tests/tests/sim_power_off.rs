//! A job without a store whose members all lose power, and say nothing more: others start it again. Of these some may
//! know of the life that is lost, and have no part in it.

use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup, Times};

const NODES: usize = 6;
/// The launchers of the first life are killed.
const KILLED: u64 = 8 * SEC;
/// The power of the second one's nodes is off.
const OFF: u64 = 16 * SEC;
const AGAIN: u64 = 18 * SEC;
const HEALED: u64 = AGAIN + 60 * SEC;
/// Until a node that only knows of the life that is lost begins anew: the most of 60 runs was 17 s.
const BOUND: u64 = 20 * SEC;

/// Two nodes train; then these two, or one of them, and more; all of these lose power; two others start.
fn starts(seed: u64, first: [usize; 2], again: [usize; 2], min_nodes: u16) -> Vec<Option<u64>> {
    let second = [1, 2, 3];
    let spec = JobSpec {
        min_nodes,
        max_nodes: 3,
        ..JobSpec::default()
    };
    let node = |at: usize| NodeSetup {
        launcher_at: first.contains(&at).then_some(200 * MS),
        ..NodeSetup::quiet(at, 0)
    };
    let mut faults: Vec<(u64, Fault)> = Vec::new();
    faults.extend(first.map(|node| {
        let fault = Fault::LauncherCrash {
            node,
            relaunch_after: None,
        };
        (KILLED, fault)
    }));
    faults.extend(second.map(|node| (KILLED + SEC, Fault::LateJoin { node })));
    faults.extend(second.map(|node| {
        let fault = Fault::NodeCrash {
            node,
            down: 1_000 * SEC,
            new_disk: false,
            relaunch: false,
        };
        (OFF, fault)
    }));
    faults.extend(again.map(|node| (AGAIN, Fault::LateJoin { node })));
    faults.sort_by_key(|(at, _)| *at);
    let setup = Setup {
        times: Times::USUAL,
        faults,
        heal_at: HEALED,
        ..Setup::quiet(seed, (0..NODES).map(node).collect(), spec)
    };
    let mut conductor = Conductor::new(setup);
    conductor.relaunches = false;
    let ran = conductor.run();
    let spawns = &conductor.world.truth.spawns;
    let trained = |node| spawns.iter().any(|s| s.node == node && s.at < OFF);
    assert!(
        second.iter().all(|n| trained(*n)),
        "seed {seed}: no second life"
    );
    let begun = |node| spawns.iter().find(|s| s.node == node && s.at >= AGAIN);
    assert!(ran.is_ok(), "seed {seed}: {ran:?}");
    again.map(|node| begun(node).map(|s| s.at)).to_vec()
}

#[test]
fn nodes_without_a_part_in_what_is_lost_begin_anew() {
    for seed in 0..6 {
        for (first, again) in [
            ([1, 2], [4, 5]),
            ([0, 2], [4, 5]),
            ([0, 2], [0, 4]),
            ([3, 0], [5, 0]),
            ([1, 2], [0, 4]),
        ] {
            for min_nodes in 1..=2 {
                let starts = starts(seed, first, again, min_nodes);
                let right = |at: &Option<u64>| at.is_some_and(|at| at < AGAIN + BOUND);
                let case = (seed, first, again, min_nodes);
                assert!(starts.iter().all(right), "{case:?}: {starts:?}");
            }
        }
    }
}
