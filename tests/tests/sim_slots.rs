//! Workers that save into slots, and launchers that write what they sealed to the job's store, among whole agents: what
//! a coordinated stop saves is what the next generation begins with, whatever dies meanwhile.

use itertools::iproduct;
use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::launcher::{Saving, step_of};
use muster_tests::sim::setup::{Fault, NodeSetup, Setup, Times, Torn};
use muster_tests::sim::truth::Spawn;

const NODES: usize = 3;
/// Behind the first saves.
const GONE: u64 = 10 * SEC;
const AGAIN: u64 = 20 * SEC;
const HEALED: u64 = AGAIN + 20 * SEC;

fn setup(seed: u64, min_nodes: u16, faults: Vec<(u64, Fault)>) -> Setup {
    let spec = JobSpec {
        min_nodes,
        max_nodes: NODES as u16,
        max_restarts: 3,
        ..JobSpec::default()
    };
    Setup {
        store: true,
        stop_steps: true,
        saving: Some(Saving {
            every: 20,
            fill: 30 * MS,
            write: 300 * MS,
            fails: 0,
        }),
        times: Times::USUAL,
        faults,
        heal_at: HEALED,
        ..Setup::quiet(
            seed,
            (0..NODES).map(|at| NodeSetup::quiet(at, 0)).collect(),
            spec,
        )
    }
}

fn run(setup: Setup) -> Conductor {
    let seed = setup.seed;
    let mut conductor = Conductor::new(setup);
    conductor.relaunches = false;
    let ran = conductor.run();
    assert!(ran.is_ok(), "seed {seed}: {ran:?}");
    conductor
}

/// The step of the checkpoint with which the first workers at or after this time begin.
fn restored(conductor: &Conductor, from: u64) -> Option<u64> {
    let spawns = &conductor.world.truth.spawns;
    let first: Option<&Spawn> = spawns.iter().find(|s| s.at >= from);
    first?.start.restore.map(step_of)
}

fn leave(node: usize) -> Fault {
    Fault::Leave {
        node,
        grace_ms: 8_000,
        relaunch_after: None,
    }
}

#[test]
fn what_is_saved_when_a_node_leaves_is_what_the_others_go_on_with() {
    for (seed, node, live) in iproduct!(0..10, 0..NODES, [false, true]) {
        let case = (seed, node, live);
        let setup = Setup {
            live,
            ..setup(seed, 2, vec![(GONE, leave(node))])
        };
        let conductor = run(setup);
        let stops = &conductor.world.truth.stops;
        let stop = stops.first().map(|s| s.step);
        assert!(stop.is_some(), "{case:?}: no stop step");
        assert_eq!(restored(&conductor, GONE), stop, "{case:?}");
    }
}

#[test]
fn what_is_saved_when_all_leave_is_what_the_next_life_begins_with() {
    for seed in 0..20 {
        let all = (0..NODES).map(|node| (GONE + node as u64 * 20 * MS, leave(node)));
        let again = (0..NODES).map(|node| (AGAIN, Fault::LateJoin { node }));
        let conductor = run(setup(seed, 2, all.chain(again).collect()));
        let stops = &conductor.world.truth.stops;
        let last = stops.iter().map(|s| s.step).max();
        assert!(last.is_some(), "seed {seed}: no stop step");
        assert!(restored(&conductor, AGAIN) >= last, "seed {seed}: {last:?}");
    }
}

/// At any moment of a save; the leader's agent is that of rank 0, which commits.
#[test]
fn a_save_that_is_under_way_when_an_agent_is_killed_is_committed() {
    for (node, tick) in iproduct!(0..NODES, 0..40) {
        let at = 6 * SEC + tick * 75 * MS;
        let crash = Fault::AgentCrash {
            node,
            effects: 0,
            torn: Torn::Between,
            down: 500 * MS,
            new_disk: false,
        };
        let mut setup = setup(tick, NODES as u16, vec![(at, crash)]);
        // A member says again after a second what was lost with a connection.
        setup.saving = setup.saving.map(|saving| Saving {
            every: 60,
            write: 50 * MS,
            ..saving
        });
        let conductor = run(setup);
        let truth = &conductor.world.truth;
        let steps: Vec<u64> = truth.log.commits.values().map(|(c, _)| c.step).collect();
        // None is left out: writing takes less than the steps between two.
        let every: Vec<u64> = (1..=steps.len() as u64).map(|n| n * 60).collect();
        assert_eq!(steps, every, "node {node}, {at}");
        assert!(steps.len() > 10, "node {node}, {at}: {steps:?}");
        assert_eq!(conductor.world.coverage.rewritten, 0, "node {node}, {at}");
        // Nor were the workers touched.
        assert_eq!(truth.spawns.len(), NODES, "node {node}, {at}");
    }
}

/// The launcher that comes after it gets its slots from the agent, and what was sealed in them is written all the same
/// or given up; either way the next saves are committed.
#[test]
fn a_launcher_that_is_killed_while_it_writes_leaves_nothing_half_done() {
    for (node, tick) in iproduct!(0..NODES, 0..20) {
        let at = 6 * SEC + tick * 50 * MS;
        let crash = Fault::LauncherCrash {
            node,
            relaunch_after: Some(300 * MS),
        };
        let mut setup = setup(tick, 2, vec![(at, crash)]);
        setup.spec.join_quiet_ms = 300;
        let conductor = run(setup);
        let truth = &conductor.world.truth;
        assert!(
            conductor.world.coverage.inherited > 0,
            "node {node}, {at}: no slots"
        );
        let begun = truth
            .spawns
            .iter()
            .filter_map(|s| s.start.restore)
            .map(step_of);
        let begun = begun.max().unwrap_or(0);
        let newest = truth.log.commits.values().map(|(c, _)| c.step).max();
        assert!(
            newest > Some(begun + 100),
            "node {node}, {at}: {begun}, {newest:?}"
        );
    }
}
