//! An agent that is stopped for less than three quarters of `agent_grace` and goes on costs no generation: not the
//! leader's, not another's, though its lease ran out meanwhile.

use muster_protocol::local::ToLauncher;
use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup, Times, Torn};
use muster_tests::sim::step::Step;

/// Of the agents in the simulation.
const AGENT_GRACE: u64 = 10 * SEC;

fn setup(seed: u64, pauses: &[(u64, usize, u64)]) -> Setup {
    let pause = |&(at, node, for_ns): &(u64, usize, u64)| (at, Fault::AgentPause { node, for_ns });
    with_faults(seed, pauses.iter().map(pause).collect())
}

fn with_faults(seed: u64, faults: Vec<(u64, Fault)>) -> Setup {
    of(3, seed, faults)
}

fn of(nodes: usize, seed: u64, faults: Vec<(u64, Fault)>) -> Setup {
    let spec = JobSpec {
        min_nodes: 2,
        max_nodes: 3,
        ..JobSpec::default()
    };
    let nodes = (0..nodes).map(|at| NodeSetup::quiet(at, 0));
    Setup {
        times: Times {
            agent_grace: 10 * SEC,
            orphan_after: 14 * SEC,
            ..Times::USUAL
        },
        faults,
        heal_at: 60 * SEC,
        settle: 30 * SEC,
        ..Setup::quiet(seed, nodes.collect(), spec)
    }
}

/// Runs it: how many generations there were, and how often workers were to start.
fn run(setup: Setup) -> (usize, usize) {
    let mut conductor = Conductor::new(setup);
    conductor.log = Some(Vec::new());
    assert_eq!(conductor.run(), Ok(()));
    let starts = conductor.log.take().into_iter().flatten();
    let starts = starts.filter(|(_, step)| {
        let start = |frame: &ToLauncher| matches!(frame, ToLauncher::Start(_));
        matches!(step, Step::LauncherHears { frame, .. } if start(frame))
    });
    (conductor.world.truth.announced.len(), starts.count())
}

#[test]
fn an_agent_that_is_stopped_for_a_while_costs_no_generation() {
    for node in 0..3 {
        for pause in [1_600 * MS, 2 * SEC, 3 * SEC, 5 * SEC, 6 * SEC] {
            for seed in 1..4 {
                let paused = run(setup(seed, &[(10 * SEC, node, pause)]));
                assert_eq!(paused, (1, 3), "n{node} for {} ms", pause / MS);
            }
        }
    }
}

/// Of two agents, the one that is not stopped has no majority with it: rank 0's launcher answers, and that counts.
#[test]
fn an_agent_of_two_that_is_stopped_for_a_while_costs_no_generation() {
    for node in 0..2 {
        for pause in [1_200 * MS, 1_600 * MS, 1_990 * MS, 3 * SEC, 6 * SEC] {
            for seed in 1..4 {
                let for_ns = pause;
                let faults = vec![(10 * SEC, Fault::AgentPause { node, for_ns })];
                let ms = pause / MS;
                assert_eq!(run(of(2, seed, faults)), (1, 2), "n{node} for {ms} ms");
            }
        }
    }
}

#[test]
fn one_agent_after_the_other_may_be_stopped_again_and_again() {
    let pauses: Vec<(u64, usize, u64)> = (0..9)
        .map(|n| (10 * SEC + n * 5 * SEC, n as usize % 3, 3 * SEC))
        .collect();
    assert_eq!(run(setup(1, &pauses)), (1, 3));
}

/// The launcher ends its workers after three quarters of `agent_grace`, and after all of it the others go on.
#[test]
fn an_agent_that_is_stopped_for_longer_is_lost() {
    let (generations, _) = run(setup(1, &[(10 * SEC, 1, AGENT_GRACE + 5 * SEC)]));
    assert!(generations > 1, "{generations}");
}

/// An agent that was stopped says that it was, and of others only that it joins them: they are there.
#[test]
fn an_agent_that_was_stopped_for_long_names_nobody_else() {
    for store in [false, true] {
        let mut setup = setup(1, &[(10 * SEC, 1, AGENT_GRACE + 5 * SEC)]);
        setup.store = store;
        let mut conductor = Conductor::new(setup);
        conductor.log = Some(Vec::new());
        assert_eq!(conductor.run(), Ok(()));
        let told = conductor.log.take().into_iter().flatten();
        let told = told.filter_map(|(at, step)| match step {
            Step::LauncherHears { node: 1, frame, .. } if at > 10 * SEC => Some(frame),
            _ => None,
        });
        let told = told.take_while(|frame| !matches!(frame, ToLauncher::Start(_)));
        let waits = told.filter(|frame| matches!(frame, ToLauncher::Waiting { .. }));
        assert_eq!(waits.count(), 1, "with a store: {store}");
    }
}

/// A machine that was suspended, and its clock with it, takes a generation that is long over for the present one. Its
/// workers end within a lease of its waking (I11), also where the agent that led the others has just crashed.
#[test]
fn a_machine_that_was_suspended_hears_that_its_generation_is_over() {
    for (node, for_ns) in [(0, 14 * SEC), (1, 14 * SEC), (2, 9 * SEC)] {
        for other in (0..3).filter(|n| *n != node) {
            let crash = Fault::AgentCrash {
                node: other,
                effects: 0,
                torn: Torn::Between,
                down: 25 * SEC,
                new_disk: false,
            };
            let faults = vec![
                (10 * SEC, Fault::Suspend { node, for_ns }),
                (10 * SEC + for_ns - SEC, crash),
            ];
            let mut conductor = Conductor::new(with_faults(1, faults));
            assert_eq!(conductor.run(), Ok(()), "n{node}, then n{other}");
            assert!(conductor.world.truth.announced.len() > 1);
        }
    }
}
