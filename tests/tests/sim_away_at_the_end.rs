//! A node whose agent is away while its job ends: its launcher hears the end of its life once the agent is back, and
//! the next life begins in time.

use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::SEC;
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup, Times, Torn};

const NODES: usize = 3;
/// The node whose agent is away.
const AWAY: usize = 1;
/// So few nodes go on without the others.
const ELASTIC: u16 = 2;
/// When the launcher of that node comes, where it is a spare.
const SPARE_COMES: u64 = 4 * SEC;
/// When the life before ends, where there is one.
const FIRST_ENDS: u64 = 3 * SEC;
/// From when its agent is away, at the latest, to the end of the job.
const CRASH: u64 = 10 * SEC;
const END: u64 = 14 * SEC;
const AGENT_GRACE: u64 = 10 * SEC;
const LONG_GRACE: u64 = 30 * SEC;
/// When all launchers are started again, in most cases.
const AGAIN: u64 = 60 * SEC;
/// Ten times what a start takes.
const BOUND: u64 = 6 * SEC;

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
    conductor.relaunches = false;
    conductor.run().map_err(|v| v.to_string())?;
    let before = conductor.world.truth.told.iter().filter(|t| t.at < again);
    let mut told = [None; NODES];
    for told_end in before {
        told[told_end.node].get_or_insert((told_end.code, told_end.at));
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

/// So many nodes train while the third waits for a place.
const FULL: u16 = 2;

/// Why a spare does not end with the life of the job in which it waits.
fn judge_spare(
    seed: u64,
    (end, code): (Fault, i32),
    (crash, down, again): (u64, u64, u64),
    (min_nodes, store, trained): (u16, bool, bool),
) -> Result<(), String> {
    let mut setup = setup(seed, end, (down, again, LONG_GRACE), (min_nodes, store));
    setup.spec.max_nodes = FULL;
    match trained {
        false => setup.nodes[AWAY].launcher_at = Some(SPARE_COMES),
        // Before this life there was one of which it was a member.
        true => {
            let comes = |(node, after)| (FIRST_ENDS + after * SEC, Fault::LateJoin { node });
            let comes = [(0, 1), (2, 1), (AWAY, 4)].map(comes);
            setup.nodes[2].launcher_at = None;
            setup
                .faults
                .insert(0, (FIRST_ENDS, Fault::Cancel { node: 0 }));
            setup.faults.splice(1..1, comes);
        }
    }
    // The others alone begin the next life, where it comes before the agent is back.
    let back = crash + down;
    let is_again = |f: &Fault| *f == Fault::LateJoin { node: AWAY };
    setup
        .faults
        .retain(|(at, f)| *at < again || again > back || !is_again(f));
    for (at, fault) in &mut setup.faults {
        if let Fault::AgentCrash { .. } = fault {
            *at = crash;
        }
    }
    setup.heal_at = setup.heal_at.max(back + BOUND);
    let mut conductor = Conductor::new(setup);
    conductor.relaunches = false;
    conductor.run().map_err(|v| v.to_string())?;
    let by = END.max(back) + BOUND;
    let mut told = conductor.world.truth.told.iter();
    let told = told.find(|t| t.node == AWAY && t.at >= crash);
    if !told.is_some_and(|t| t.code == code && t.at < by) {
        return Err(format!("the spare was told {told:?}, not {code} by {by}"));
    }
    let spawns = &conductor.world.truth.spawns;
    if spawns
        .iter()
        .any(|s| s.node == AWAY && (crash..again.max(by)).contains(&s.at))
    {
        return Err("the spare trained".to_owned());
    }
    let trains = |at: u64| (again..again + BOUND).contains(&at);
    let train = (0..NODES).filter(|n| spawns.iter().any(|s| s.node == *n && trains(s.at)));
    match train.count() == usize::from(FULL) {
        true => Ok(()),
        false => Err("the next life does not begin in time".to_owned()),
    }
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
            for (end, code) in Fault::ends() {
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
        for (end, code) in Fault::ends().into_iter().skip(1) {
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

/// Whether its agent is back before the end, after it, or when the others are in the next life.
#[test]
fn a_spare_whose_agent_was_away_ends_with_its_job() {
    let away = [(300, 200), (100, 5_000), (2_000, 1_950), (3_000, 9_000)];
    let away = away.map(|(before, down)| (before, down, AGAIN));
    let mut wrong = Vec::new();
    let cases = [1, 2].map(|min| [(min, false), (min, true)]).concat();
    let cases = [false, true].map(|trained| {
        cases
            .iter()
            .map(move |(min, store)| (*min, *store, trained))
    });
    for case in cases.into_iter().flatten() {
        for (before, down, again) in away.into_iter().chain([(1_000, 14_000, END + 6 * SEC)]) {
            let times = (END - before * SEC / 1_000, down * SEC / 1_000, again);
            for (end, code) in Fault::ends() {
                for seed in 1..4 {
                    if let Err(why) = judge_spare(seed, (end.clone(), code), times, case) {
                        wrong.push(format!(
                            "{end:?}, {before} ms before, (nodes, store, trained) {case:?}, {seed}: {why}"
                        ));
                    }
                }
            }
        }
    }
    assert_none(&wrong);
}
