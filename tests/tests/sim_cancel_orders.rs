//! A person ends the job by `muster cancel` while nodes fail: the order is carried out, or is said to have failed.

use std::collections::BTreeSet;

use muster_protocol::job::CancelStage;
use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup, Torn};

const NODES: usize = 4;
const FAILS: u64 = 15 * SEC;
const FOR: u64 = 60 * SEC;

/// Launchers on the first three nodes.
fn setup(seed: u64, store: bool, nodes: u16, faults: Vec<(u64, Fault)>) -> Setup {
    let spec = JobSpec {
        min_nodes: nodes,
        max_nodes: nodes,
        ..JobSpec::default()
    };
    let node = |at: usize| NodeSetup {
        launcher_at: [Some(SEC), Some(SEC), Some(3 * SEC), None][at],
        ..NodeSetup::quiet(at, 0)
    };
    Setup {
        store,
        faults,
        heal_at: 120 * SEC,
        ..Setup::quiet(seed, (0..NODES).map(node).collect(), spec)
    }
}

/// The world at that time.
fn at(time: u64, setup: Setup) -> Conductor {
    let seed = setup.seed;
    let mut conductor = Conductor::new(setup);
    assert_eq!(conductor.run_until(time), Ok(()), "seed {seed}");
    conductor
}

fn stage(conductor: &Conductor, node: usize) -> Option<CancelStage> {
    let world = &conductor.world;
    let agent = world.nodes[node].agent.as_ref()?;
    agent.job(&world.key)?.cancelling()
}

/// The node on which workers of the job may run though it is over, as that agent says.
fn left_running(conductor: &Conductor, node: usize) -> Option<usize> {
    let world = &conductor.world;
    let node = &world.nodes[node];
    let now = node.clock.local(world.now);
    let (nodes, _) = node.agent.as_ref()?.job(&world.key)?.left_running(now)?;
    let [named] = nodes[..] else {
        return None;
    };
    world.nodes.iter().position(|n| n.id == named)
}

fn trains(conductor: &Conductor, node: usize) -> bool {
    let launcher = conductor.world.nodes[node].launcher.as_ref();
    launcher.is_some_and(|l| l.alive().is_some())
}

/// The nodes whose launchers were told after that time that the user stopped the job.
fn told(conductor: &Conductor, after: u64) -> Vec<usize> {
    let told = conductor.world.truth.told.iter();
    let mut nodes: Vec<usize> = told
        .filter(|t| t.code == 130 && t.at >= after)
        .map(|t| t.node)
        .collect();
    nodes.sort_unstable();
    nodes.dedup();
    nodes
}

/// Two nodes train, a third waits, a fourth has no launcher. A member's or the third one's agent is stopped or cut off,
/// and a launcher is killed, before the order or just after it.
#[test]
fn a_person_hears_soon_how_an_order_ended() {
    let stops: [fn(usize) -> Option<Fault>; 3] = [
        |_| None,
        |node| Some(Fault::AgentPause { node, for_ns: FOR }),
        |node| {
            let (side, for_ns) = (1 << node, FOR);
            Some(Fault::Partition { side, for_ns })
        },
    ];
    let mut wrong = Vec::new();
    for (how, stop) in stops.iter().enumerate() {
        let stopped = if how == 0 { NODES..NODES + 1 } else { 0..3 };
        for stopped in stopped {
            for killed in 0..NODES {
                for ordered_at in (0..NODES).filter(|n| *n != stopped) {
                    for (store, ordered) in [
                        (false, FAILS + 8 * SEC),
                        (true, FAILS + 8 * SEC),
                        (true, FAILS + 2_500 * MS),
                        (false, FAILS + 2_500 * MS),
                    ] {
                        let mut faults = vec![(ordered, Fault::OrderCancel { node: ordered_at })];
                        faults.extend(stop(stopped).map(|fault| (FAILS, fault)));
                        if killed < 3 {
                            let crash = Fault::LauncherCrash {
                                node: killed,
                                relaunch_after: None,
                            };
                            faults.push((FAILS + 2 * SEC, crash));
                        }
                        let case = setup(killed as u64, store, 2, faults);
                        let end = at(ordered + 13_500 * MS, case);
                        let mut go: Vec<usize> = (0..3).collect();
                        go.retain(|n| ![stopped, killed].contains(n));
                        let right = match stage(&end, ordered_at) {
                            // One that is cut off from the others may read of it in the store.
                            Some(CancelStage::Over) => go.iter().all(|n| told(&end, 0).contains(n)),
                            // A member that trains is there: nothing stands in the way.
                            _ if stopped >= 2 => false,
                            Some(CancelStage::Failed { .. } | CancelStage::InStore { .. }) => true,
                            Some(CancelStage::Asked { sure }) => sure,
                            None => false,
                        };
                        if !right {
                            let stage = stage(&end, ordered_at);
                            wrong.push((store, how, stopped, killed, ordered_at, ordered, stage));
                        }
                    }
                }
            }
        }
    }
    assert_eq!(wrong, []);
}

/// Three launchers wait for a fourth. Those that are started after the order begin the job, also where an agent at which
/// the first ones wait is stopped just then.
#[test]
fn an_order_ends_those_that_wait_and_none_that_come_later() {
    const ORDERED: u64 = FAILS + SEC;
    for seed in 0..4 {
        for store in [false, true] {
            for stopped in 0..NODES {
                for ordered_at in (0..NODES).filter(|n| *n != stopped) {
                    let mut faults = vec![(ORDERED, Fault::OrderCancel { node: ordered_at })];
                    if stopped < 3 {
                        let (node, for_ns) = (stopped, 4 * SEC);
                        faults.push((FAILS, Fault::AgentPause { node, for_ns }));
                    }
                    for node in (0..NODES).filter(|n| *n != stopped) {
                        faults.push((ORDERED + SEC, Fault::LateJoin { node }));
                    }
                    let again = ORDERED + 8 * SEC;
                    for node in 0..NODES {
                        faults.push((again, Fault::LateJoin { node }));
                    }
                    let end = at(again + 10 * SEC, setup(seed, store, 4, faults));
                    let which = (seed, store, stopped, ordered_at);
                    assert_eq!(told(&end, 0), [0, 1, 2], "{which:?}");
                    let spawns = &end.world.truth.spawns;
                    let train = |node: usize| spawns.iter().any(|s| s.node == node);
                    assert!((0..NODES).all(train), "{which:?}");
                }
            }
        }
    }
}

/// Three launchers wait for a fourth, which is started after the order. The agent to which that was given is stopped, and
/// hears of it later.
#[test]
fn an_order_to_a_stopped_agent_ends_none_that_were_started_before_it_was_heard() {
    const ORDERED: u64 = FAILS + SEC;
    for seed in 0..4 {
        for store in [false, true] {
            for ordered_at in 0..3 {
                let (node, for_ns) = (ordered_at, 4 * SEC);
                let faults = vec![
                    (FAILS, Fault::AgentPause { node, for_ns }),
                    (ORDERED, Fault::OrderCancel { node }),
                    (ORDERED + SEC, Fault::LateJoin { node: 3 }),
                ];
                let end = at(ORDERED + 10 * SEC, setup(seed, store, 4, faults));
                let which = (seed, store, ordered_at);
                assert_eq!(told(&end, 0), [0, 1, 2], "{which:?}");
            }
        }
    }
}

/// A job of two nodes ends while the agent of a third one is stopped, at which its end was ordered, and is started anew; or
/// its launchers are killed, and those that are started then go on with it.
#[test]
fn an_order_to_a_stopped_agent_does_not_end_what_is_started_after_it() {
    const ORDERED: u64 = FAILS + SEC;
    const AGAIN: u64 = ORDERED + 3 * SEC;
    let mut wrong = Vec::new();
    for seed in 0..8 {
        for store in [false, true] {
            for killed in [false, true] {
                let (node, for_ns) = (3, 10 * SEC);
                let mut faults = vec![
                    (FAILS, Fault::AgentPause { node, for_ns }),
                    (ORDERED, Fault::OrderCancel { node }),
                ];
                if !killed {
                    faults.push((ORDERED + SEC, Fault::Cancel { node: 0 }));
                }
                for node in 0..2 {
                    let relaunch_after = None;
                    let crash = Fault::LauncherCrash {
                        node,
                        relaunch_after,
                    };
                    faults.extend(killed.then_some((ORDERED + SEC, crash)));
                    faults.push((AGAIN, Fault::LateJoin { node }));
                }
                let mut case = setup(seed, store, 2, faults);
                case.nodes[2].launcher_at = None;
                let end = at(FAILS + for_ns + 20 * SEC, case);
                let told = told(&end, AGAIN);
                let spawns = end.world.truth.spawns.iter();
                let begun: BTreeSet<usize> =
                    spawns.filter(|s| s.at > AGAIN).map(|s| s.node).collect();
                let trains = end.training().is_some();
                let open = matches!(stage(&end, 3), Some(CancelStage::Asked { .. }));
                if !told.is_empty() || begun.len() != 2 || !trains || open {
                    wrong.push((seed, store, killed, told, begun, trains, open));
                }
            }
        }
    }
    assert_eq!(wrong, []);
}

/// Two nodes train, and the agent of one is killed. Its launcher goes on without it, or is killed as well; the order comes
/// from a node without a part in the job.
#[test]
fn an_order_from_outside_ends_a_job_though_a_members_agent_is_gone() {
    let mut wrong = Vec::new();
    for store in [false, true] {
        for gone in 0..2 {
            for alone in [true, false] {
                for (seed, after) in (0..).zip([50, 400, 900, 1_700, 2_400, 4_000, 8_000]) {
                    for ordered_at in [2, 3] {
                        let ordered = FAILS + after * MS;
                        let crash = Fault::AgentCrash {
                            node: gone,
                            effects: 0,
                            down: FOR,
                            torn: Torn::Between,
                            new_disk: false,
                        };
                        let mut faults = vec![(ordered, Fault::OrderCancel { node: ordered_at })];
                        faults.push((FAILS, crash));
                        if !alone {
                            let crash = Fault::LauncherCrash {
                                node: gone,
                                relaunch_after: None,
                            };
                            faults.push((FAILS, crash));
                        }
                        let mut case = setup(seed, store, 2, faults);
                        case.nodes[2].launcher_at = None;
                        let mut end = at(ordered + MS, case);
                        for step in 1..135 {
                            if stage(&end, ordered_at) == Some(CancelStage::Over) {
                                break;
                            }
                            let next = end.run_until(ordered + step * 100 * MS);
                            assert_eq!(next, Ok(()), "seed {seed}");
                        }
                        // The end and the word on those that may still run are two messages.
                        let next = end.run_until(end.world.now + 20 * MS);
                        assert_eq!(next, Ok(()), "seed {seed}");
                        let stage = stage(&end, ordered_at);
                        let ended = told(&end, ordered).contains(&(1 - gone));
                        // The agent that was asked says then, too, that workers of it may run.
                        let left = left_running(&end, ordered_at);
                        let runs = trains(&end, gone).then_some(gone);
                        if stage != Some(CancelStage::Over) || !ended || left != runs {
                            wrong.push((store, gone, alone, after, ordered_at, stage, ended, left));
                        }
                    }
                }
            }
        }
    }
    assert_eq!(wrong, []);
}

/// Three nodes train without a store. The first and a node without a part are cut off from the other two, and the order
/// is given there.
#[test]
fn an_order_to_a_leader_that_cannot_end_the_job_says_so() {
    let mut wrong = Vec::new();
    for first in 0..3 {
        for after in [500, 2_000, 8_000] {
            let side = 1 << first | 1 << 3;
            let ordered = FAILS + after * MS;
            let cut = Fault::Partition { side, for_ns: FOR };
            let faults = vec![(FAILS, cut), (ordered, Fault::OrderCancel { node: 3 })];
            let mut case = setup(after, false, 3, faults);
            case.nodes[2].launcher_at = Some(SEC);
            let end = at(ordered + 20 * SEC, case);
            match stage(&end, 3) {
                Some(CancelStage::Failed { .. }) => {}
                stage => wrong.push((first, after, stage)),
            }
        }
    }
    assert_eq!(wrong, []);
}
