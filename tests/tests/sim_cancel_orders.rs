//! A person ends the job by `muster cancel` while nodes fail: the order is carried out, or is said to have failed.

use muster_protocol::job::CancelStage;
use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup};

/// The first two of these train, the third waits, the fourth has no launcher.
const NODES: usize = 4;
const FAILS: u64 = 15 * SEC;
const ORDERED: u64 = FAILS + 8 * SEC;

fn setup(seed: u64, store: bool, mut faults: Vec<(u64, Fault)>, ordered_at: usize) -> Setup {
    let spec = JobSpec {
        min_nodes: 2,
        max_nodes: 2,
        ..JobSpec::default()
    };
    let node = |at: usize| NodeSetup {
        launcher_at: [Some(SEC), Some(SEC), Some(3 * SEC), None][at],
        ..NodeSetup::quiet(at, 0)
    };
    faults.push((ORDERED, Fault::OrderCancel { node: ordered_at }));
    Setup {
        store,
        faults,
        heal_at: 120 * SEC,
        ..Setup::quiet(seed, (0..NODES).map(node).collect(), spec)
    }
}

/// How the order stands after this time.
fn stage_after(for_ns: u64, setup: Setup, ordered_at: usize) -> Option<CancelStage> {
    let seed = setup.seed;
    let mut conductor = Conductor::new(setup);
    assert_eq!(conductor.run_until(ORDERED + for_ns), Ok(()), "seed {seed}");
    let world = &conductor.world;
    let agent = world.nodes[ordered_at].agent.as_ref();
    agent
        .and_then(|a| a.job(&world.key))
        .and_then(|j| j.cancelling())
}

/// A member's agent is stopped, cut off or killed, and a launcher is killed.
#[test]
fn a_person_hears_soon_how_an_order_ended() {
    let stops: [fn(usize) -> Option<Fault>; 3] = [
        |_| None,
        |node| {
            Some(Fault::AgentPause {
                node,
                for_ns: 60 * SEC,
            })
        },
        |node| {
            Some(Fault::Partition {
                side: 1 << node,
                for_ns: 60 * SEC,
            })
        },
    ];
    let mut unanswered = Vec::new();
    for store in [false, true] {
        for (how, stop) in stops.iter().enumerate() {
            for stopped in 0..NODES - 1 {
                for killed in 0..NODES {
                    for ordered_at in (0..NODES).filter(|n| *n != stopped) {
                        let mut faults: Vec<(u64, Fault)> =
                            stop(stopped).map(|f| (FAILS, f)).into_iter().collect();
                        if killed < NODES - 1 {
                            let crash = Fault::LauncherCrash {
                                node: killed,
                                relaunch_after: None,
                            };
                            faults.push((FAILS + 2 * SEC, crash));
                        }
                        let setup = setup(killed as u64, store, faults, ordered_at);
                        let stage = stage_after(13 * SEC + 500 * MS, setup, ordered_at);
                        let which = (store, how, stopped, killed, ordered_at);
                        if matches!(stage, Some(CancelStage::Asked { .. })) {
                            unanswered.push(which);
                        }
                    }
                }
            }
        }
    }
    assert_eq!(unanswered, []);
}
