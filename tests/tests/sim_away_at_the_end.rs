//! A node whose agent is away while its job ends: its launcher hears the end of its life once the agent is back, and
//! the next life begins in time.

use muster_protocol::local::ToLauncher;
use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::SEC;
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup, Times, Torn};
use muster_tests::sim::step::Step;

const NODES: usize = 3;
/// The node whose agent is away.
const AWAY: usize = 1;
/// So few nodes go on without the others.
const ELASTIC: u16 = 2;
/// From when its agent is away, at the latest, to the end of the job.
const CRASH: u64 = 10 * SEC;
const END: u64 = 14 * SEC;
const AGENT_GRACE: u64 = 10 * SEC;
const LONG_GRACE: u64 = 30 * SEC;
/// When all launchers are started again, in most cases.
const AGAIN: u64 = 60 * SEC;
/// Ten times what a start takes.
const BOUND: u64 = 6 * SEC;

fn ends() -> [(Fault, i32); 3] {
    let failed = Fault::WorkerFail {
        node: 0,
        code: 3,
        cascade: true,
    };
    [
        (Fault::Finish, 0),
        (failed, 3),
        (Fault::Cancel { node: 0 }, 130),
    ]
}

fn setup(
    seed: u64,
    end: Fault,
    (down, again, agent_grace): (u64, u64, u64),
    (min_nodes, store): (u16, bool),
) -> Setup {
    let crash = Fault::AgentCrash {
        node: AWAY,
        effects: 0,
        torn: Torn::Between,
        down,
        new_disk: false,
    };
    let mut faults = vec![(CRASH, crash), (END, end.clone())];
    if end == Fault::Finish && min_nodes == ELASTIC {
        // The others go on without the node once its agent counts as lost, and find nothing to do.
        faults.extend((1..10).map(|n| (END + n * 4 * SEC, Fault::Finish)));
    }
    faults.extend((0..NODES).map(|node| (again, Fault::LateJoin { node })));
    let spec = JobSpec {
        min_nodes,
        max_nodes: NODES as u16,
        max_restarts: 0,
        ..JobSpec::default()
    };
    let nodes = (0..NODES).map(|at| NodeSetup::quiet(at, 0)).collect();
    Setup {
        store,
        times: Times {
            agent_grace,
            ..Times::USUAL
        },
        faults,
        heal_at: again + BOUND,
        ..Setup::quiet(seed, nodes, spec)
    }
}

/// Why it is not as it must be.
fn judge(
    seed: u64,
    (end, code): (Fault, i32),
    (down, again, agent_grace): (u64, u64, u64),
    (min_nodes, store): (u16, bool),
) -> Result<(), String> {
    let times = (down, again, agent_grace);
    let mut conductor = Conductor::new(setup(seed, end, times, (min_nodes, store)));
    conductor.log = Some(Vec::new());
    conductor.relaunches = false;
    conductor.run().map_err(|v| v.to_string())?;
    let mut told = [None; NODES];
    for (at, step) in conductor.log.take().into_iter().flatten() {
        if let Step::LauncherHears {
            node,
            frame: ToLauncher::End { code, .. },
            ..
        } = step
            && at < again
        {
            told[node].get_or_insert((code, at));
        }
    }
    let by = (END + agent_grace).max(CRASH + 3 * SEC + down) + BOUND;
    for (node, told) in told.iter().enumerate() {
        if !told.is_some_and(|(with, at)| with == code && at < by) {
            return Err(format!("node {node} was told {told:?}, not {code} by {by}"));
        }
    }
    let spawns = &conductor.world.truth.spawns;
    if min_nodes != ELASTIC && spawns.iter().any(|s| (END..again).contains(&s.at)) {
        return Err("what had finished was done again".to_owned());
    }
    for node in 0..NODES {
        let trains = |at: u64| (again..again + BOUND).contains(&at);
        if !spawns.iter().any(|s| s.node == node && trains(s.at)) {
            return Err(format!("node {node} does not train in the next life"));
        }
    }
    Ok(())
}

#[track_caller]
fn assert_none(wrong: &[String]) {
    let (n, all) = (wrong.len(), wrong.join("\n"));
    assert!(wrong.is_empty(), "{n} wrong:\n{all}");
}

/// Back before the others have given it up, and long after they have ended.
#[test]
fn a_launcher_whose_agent_was_away_hears_how_its_job_ended() {
    let mut wrong = Vec::new();
    for store in [false, true] {
        for down in [2 * SEC, 6 * SEC, 9 * SEC, 20 * SEC, 30 * SEC] {
            for (end, code) in ends() {
                for seed in 1..4 {
                    if let Err(why) = judge(
                        seed,
                        (end.clone(), code),
                        (down, AGAIN, AGENT_GRACE),
                        (ELASTIC, store),
                    ) {
                        let down = down / SEC;
                        wrong.push(format!("{end:?}, {down} s, store {store}, {seed}: {why}"));
                    }
                }
            }
        }
    }
    assert_none(&wrong);
}

/// The agent is back a moment after the others ended the job without it, and its launcher has gone by then: nobody
/// waits for workers that have ended.
#[test]
fn a_node_that_comes_back_after_the_end_holds_up_no_start() {
    let mut wrong = Vec::new();
    for store in [false, true] {
        for (end, code) in ends().into_iter().skip(1) {
            for seed in 1..8 {
                // Its launcher ends its workers, and exits.
                let down = END - CRASH + SEC;
                let again = END + 3 * SEC;
                if let Err(why) = judge(
                    seed,
                    (end.clone(), code),
                    (down, again, LONG_GRACE),
                    (ELASTIC, store),
                ) {
                    wrong.push(format!("{end:?}, store {store}, {seed}: {why}"));
                }
            }
        }
    }
    assert_none(&wrong);
}

/// The others wait for its word, however long that takes, and do nothing again.
#[test]
fn ranks_that_finished_while_an_agent_was_away_are_not_run_again() {
    let mut wrong = Vec::new();
    for store in [false, true] {
        for down in [2 * SEC, 6 * SEC, 9 * SEC, 20 * SEC, 30 * SEC] {
            for seed in 1..4 {
                let all = (NODES as u16, store);
                if let Err(why) = judge(seed, (Fault::Finish, 0), (down, AGAIN, AGENT_GRACE), all) {
                    let down = down / SEC;
                    wrong.push(format!("{down} s, store {store}, {seed}: {why}"));
                }
            }
        }
    }
    assert_none(&wrong);
}
