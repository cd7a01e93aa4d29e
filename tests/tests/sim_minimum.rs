//! A node leaves a job that has no more nodes than it wants: it goes once its workers have stopped, and the
//! others say for whom they wait.

#![expect(clippy::panic, reason = "helpers of tests")]

use muster_protocol::local::ToLauncher;
use muster_protocol::record::{Cause, Kind};
use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup};
use muster_tests::sim::step::Step;

const LEAVES: u64 = 10 * SEC;
const GRACE_MS: u32 = 20_000;

/// `nodes` nodes, all of which the job wants; and one more that comes later, perhaps.
fn setup(nodes: usize, spare_at: Option<u64>, fault: Fault) -> Setup {
    let mut all: Vec<NodeSetup> = (0..nodes).map(|n| NodeSetup::quiet(n, 0)).collect();
    all.extend(spare_at.map(|at| NodeSetup::quiet(nodes, at)));
    let wanted = nodes as u16;
    let spec = JobSpec {
        min_nodes: wanted,
        max_nodes: wanted,
        ..JobSpec::default()
    };
    Setup {
        faults: vec![(LEAVES, fault)],
        // From then on nobody comes back by himself.
        heal_at: LEAVES + 10 * MS,
        ..Setup::quiet(1, all, spec)
    }
}

/// Runs it; what the launchers were told, with times and nodes.
fn run(setup: Setup) -> (Conductor, Vec<(u64, usize, ToLauncher)>) {
    let mut conductor = Conductor::new(setup);
    conductor.relaunches = false;
    conductor.log = Some(Vec::new());
    assert_eq!(conductor.run(), Ok(()));
    let heard = conductor.log.take().into_iter().flatten();
    let heard = heard.filter_map(|(at, step)| match step {
        Step::LauncherHears { node, frame, .. } => Some((at, node, frame)),
        _ => None,
    });
    let heard = heard.collect();
    (conductor, heard)
}

#[test]
fn a_node_that_leaves_a_job_at_its_minimum_goes_at_once_and_the_others_say_so() {
    for nodes in [2, 3, 5] {
        for leaver in 0..nodes {
            for drain in [true, false] {
                let fault = match drain {
                    true => Fault::Drain {
                        node: leaver,
                        grace_ms: GRACE_MS,
                        back_after: 100 * SEC,
                    },
                    false => Fault::Leave {
                        node: leaver,
                        grace_ms: GRACE_MS,
                        relaunch_after: None,
                    },
                };
                check(nodes, leaver, setup(nodes, None, fault));
            }
        }
    }
}

#[track_caller]
fn check(nodes: usize, leaver: usize, setup: Setup) {
    let (conductor, heard) = run(setup);
    let what = format!("{leaver} of {nodes}");
    let ended = heard.iter().find(|(_, node, frame)| {
        *node == leaver && matches!(frame, ToLauncher::End { code: 143, .. })
    });
    let ended = ended.map(|(at, _, _)| at - LEAVES);
    assert!(
        ended.is_some_and(|after| after < 2 * SEC),
        "{what}: {ended:?}"
    );
    // It is recorded, so whoever leads later knows.
    let truth = &conductor.world.truth;
    let short = truth.announced.values().find(|r| r.is_short());
    let Some(short) = short else {
        panic!("{what}: nothing was decided")
    };
    assert!(matches!(&short.cause, Cause::NodesLeft { nodes } if nodes.len() == 1));
    assert_eq!((short.members.len(), short.kind), (nodes - 1, Kind::Next));
    for other in (0..nodes).filter(|n| *n != leaver) {
        let texts: Vec<&String> = heard
            .iter()
            .filter(|(at, node, _)| *at > LEAVES && *node == other)
            .filter_map(|(_, _, frame)| match frame {
                ToLauncher::Waiting { text } => Some(text),
                _ => None,
            })
            .collect();
        let said = texts.iter().any(|t| {
            t.contains(&format!("waiting for 1 more of {nodes} nodes: n{leaver} "))
                && t.contains(" left")
        });
        assert!(said, "{what}: node {other} says {texts:?}");
        assert!(!texts.iter().any(|t| t.contains("spare")), "{texts:?}");
        let launcher = conductor.world.nodes[other].launcher.as_ref();
        assert!(
            launcher.is_some_and(|l| l.run.is_none()),
            "{what}: it waits"
        );
    }
}

#[test]
fn the_job_goes_on_once_another_node_comes() {
    let fault = Fault::Leave {
        node: 0,
        grace_ms: GRACE_MS,
        relaunch_after: None,
    };
    let (conductor, _) = run(setup(3, Some(13 * SEC), fault));
    let world = &conductor.world;
    for node in 1..4 {
        let launcher = world.nodes[node].launcher.as_ref();
        assert!(
            launcher.is_some_and(|l| l.training().is_some()),
            "node {node}"
        );
    }
    assert!(world.nodes[0].launcher.is_none());
}

/// How long before the others leave a node dies: long enough for a minority to write the store.
const EARLIER: u64 = 9 * SEC;

/// All nodes but one, which has died, are told to go; the launchers that are still there long after.
fn left_behind(nodes: usize, dead: usize, crash: Fault, store: bool) -> Vec<usize> {
    let leaves = (0..nodes).filter(|n| *n != dead).map(|node| {
        let fault = Fault::Leave {
            node,
            grace_ms: GRACE_MS,
            relaunch_after: None,
        };
        (LEAVES, fault)
    });
    let mut setup = setup(nodes, None, crash);
    setup.faults[0].0 = LEAVES - EARLIER;
    setup.faults.extend(leaves);
    setup.store = store;
    launchers_after(setup)
}

/// Runs it for less than the grace; which nodes have a launcher then.
fn launchers_after(setup: Setup) -> Vec<usize> {
    let (conductor, _) = run(Setup {
        settle: 15 * SEC,
        ..setup
    });
    let nodes = conductor.world.nodes.iter().enumerate();
    let there = nodes.filter(|(_, n)| n.launcher.is_some());
    there.map(|(at, _)| at).collect()
}

#[test]
fn those_that_wait_for_a_dead_node_go_at_once() {
    for (nodes, dead, store) in [2, 3].into_iter().flat_map(|nodes| {
        let each = (0..nodes).flat_map(|dead| [(dead, false), (dead, true)]);
        each.map(move |(dead, store)| (nodes, dead, store))
    }) {
        let crash = Fault::LauncherCrash {
            node: dead,
            relaunch_after: None,
        };
        let what = format!("n{dead} of {nodes}, store: {store}");
        assert!(left_behind(nodes, dead, crash, store).is_empty(), "{what}");
    }
}

#[test]
fn who_waits_for_a_node_that_may_live_goes_at_once() {
    for (dead, store) in [(0, false), (1, false), (0, true), (1, true)] {
        let crash = Fault::NodeCrash {
            node: dead,
            down: 100 * SEC,
            new_disk: false,
            relaunch: false,
        };
        let what = format!("n{dead}, store: {store}");
        assert!(left_behind(2, dead, crash, store).is_empty(), "{what}");
    }
}

#[test]
fn nodes_that_are_told_to_go_while_they_start_go_at_once() {
    for (nodes, store) in [(1, false), (1, true), (2, false), (2, true), (3, true)] {
        for at in (2..600).step_by(3) {
            let leaves = (0..nodes).map(|node| {
                let fault = Fault::Leave {
                    node,
                    grace_ms: GRACE_MS,
                    relaunch_after: None,
                };
                (at * MS, fault)
            });
            let mut setup = setup(nodes, None, Fault::Finish);
            setup.faults = leaves.collect();
            setup.heal_at = SEC;
            setup.store = store;
            let there = launchers_after(setup);
            let what = format!("{nodes} nodes after {at} ms, store: {store}");
            assert!(there.is_empty(), "{what}: {there:?}");
        }
    }
}
