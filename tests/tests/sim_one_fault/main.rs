//! One fault in a job that is well otherwise: the others train again within a bound, no node is left out that
//! nothing befell, and no more than two generations follow.

mod four;
mod spare;
mod two;

use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup};

/// When the fault comes.
const AT: u64 = 15 * SEC;
/// From SIGTERM to SIGKILL when a generation ends by itself.
const GRACE: u64 = 5 * SEC;
/// After the grace, until a node whose workers do not end is left behind.
const STOP_LIMIT: u64 = 10 * SEC;
/// Upper bound of the drawn times: delays, and how often agents look.
const MOMENT: u64 = 1_500 * MS;
/// From the loss of a node that says nothing until the others know, and until its lease is over.
const LOSS: u64 = 4 * SEC + MOMENT;

/// How many nodes there are, and how many train: all, or all but the last, which came later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cluster {
    Four,
    /// Four nodes, and room for three.
    Spare,
    /// Two nodes, and no other agent.
    Two,
}

impl Cluster {
    fn nodes(self) -> usize {
        match self {
            Cluster::Four | Cluster::Spare => 4,
            Cluster::Two => 2,
        }
    }
    fn max(self) -> usize {
        match self {
            Cluster::Spare => 3,
            other => other.nodes(),
        }
    }
}

/// The part of a spare, and the time from the fault until it takes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Spare {
    /// It waits: nobody is lost.
    #[default]
    Waits,
    /// It trains with those that are left.
    StepsIn(u64),
    /// As many train as the job wants, with it or without it.
    Fills(u64),
}

/// The trait that sets one node apart in a case.
#[derive(Clone, Copy, Debug)]
enum With {
    /// Its disk takes up to so long for a write (nanoseconds).
    SlowDisk(usize, u64),
    /// Its clock is 1 % fast.
    FastClock(usize),
    /// Its launcher is not there from the beginning.
    Late(usize),
}

#[derive(Clone, Debug, Default)]
struct Case {
    name: &'static str,
    faults: Vec<(u64, Fault)>,
    with: Option<With>,
    /// The nodes that may be left out.
    touched: Vec<usize>,
    /// How many generations may follow.
    changes: usize,
    /// From the fault until all others train, in one generation, if ever.
    others: Option<u64>,
    /// From the fault until all do, if ever.
    all: Option<u64>,
    spare: Spare,
}

fn one(
    name: &'static str,
    fault: Fault,
    touched: &[usize],
    changes: usize,
    others: u64,
    all: Option<u64>,
) -> Case {
    Case {
        name,
        faults: vec![(AT, fault)],
        touched: touched.to_vec(),
        changes,
        others: Some(others),
        all,
        ..Case::default()
    }
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    seed: u64,
    cluster: Cluster,
    store: bool,
    live: bool,
}

fn leave(node: usize) -> Fault {
    Fault::Leave {
        node,
        grace_ms: 5_000,
        relaunch_after: None,
    }
}

fn drain(node: usize) -> Fault {
    Fault::Drain {
        node,
        grace_ms: 5_000,
        back_after: 3 * SEC,
    }
}

/// A node that goes by order, for good and for a while.
fn departures(node: usize) -> [Case; 2] {
    [
        one(
            "a node that leaves",
            leave(node),
            &[node],
            1,
            GRACE + LOSS,
            None,
        ),
        one(
            "a node that is drained",
            drain(node),
            &[node],
            2,
            GRACE + LOSS,
            Some(30 * SEC),
        ),
    ]
}

fn setup(shape: Shape, case: &Case) -> Setup {
    let cluster = shape.cluster;
    let spec = JobSpec {
        min_nodes: cluster.nodes() as u16 / 2,
        max_nodes: cluster.max() as u16,
        loss_grace_ms: (GRACE / MS) as u32,
        stop_grace_ms: (GRACE / MS) as u32,
        max_restarts: 3,
        ..JobSpec::default()
    };
    let nodes = (0..cluster.nodes()).map(|at| NodeSetup::quiet(at, 0));
    let mut setup = Setup {
        store: shape.store,
        stop_steps: shape.live,
        live: shape.live,
        faults: case.faults.clone(),
        heal_at: 600 * SEC,
        settle: 30 * SEC,
        ..Setup::quiet(shape.seed, nodes.collect(), spec)
    };
    for spare in cluster.max()..cluster.nodes() {
        setup.nodes[spare].launcher_at = Some(5 * SEC);
    }
    match case.with {
        Some(With::SlowDisk(node, most)) => setup.slow_disk = Some((node, most)),
        Some(With::FastClock(node)) => setup.nodes[node].clock.ppm = 10_000,
        Some(With::Late(node)) => setup.nodes[node].launcher_at = None,
        None => {}
    }
    setup
}

/// Whether these nodes train in one generation, which is whole, and has so many members at least.
fn trains(conductor: &Conductor, nodes: &[usize], least: usize) -> bool {
    let world = &conductor.world;
    let training = conductor.training();
    let record = training.and_then(|(_, d)| world.truth.records.get(&d));
    record.is_some_and(|r| {
        r.members.len() >= least && nodes.iter().all(|n| r.has(world.nodes[*n].id))
    })
}

/// Says all that is wrong with how a case went.
fn judge(case: &Case, shape: Shape) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut conductor = Conductor::new(setup(shape, case));
    conductor.relaunches = false;
    let max = shape.cluster.max();
    let ids: Vec<_> = conductor.world.nodes.iter().map(|n| n.id).collect();
    let others: Vec<usize> = (0..max).filter(|n| !case.touched.contains(n)).collect();
    let everybody: Vec<usize> = (0..max).collect();
    let first: &[usize] = match case.with {
        Some(With::Late(_)) => &others,
        _ => &everybody,
    };
    if let Err(error) = conductor.run_until(AT - MS) {
        return vec![error.to_string()];
    }
    if !trains(&conductor, first, first.len()) {
        return vec!["the job did not begin".into()];
    }
    let before = conductor.world.truth.announced.len();
    let with_spare: Vec<usize> = others.iter().copied().chain(max..ids.len()).collect();
    let mut due = Vec::new();
    due.extend(case.others.map(|ns| (ns, &others, 0, "the others")));
    due.extend(case.all.map(|ns| (ns, &everybody, 0, "all")));
    due.extend(match case.spare {
        Spare::Waits => None,
        Spare::StepsIn(ns) => Some((ns, &with_spare, 0, "the others and the spare")),
        Spare::Fills(ns) => Some((ns, &others, max, "as many as before")),
    });
    due.sort_by_key(|(ns, ..)| *ns);
    for (ns, nodes, least, who) in due {
        if let Err(error) = conductor.run_until(AT + ns) {
            return vec![error.to_string()];
        }
        let mut late = 0;
        while !trains(&conductor, nodes, least) && late < 60 * SEC {
            late += 250 * MS;
            if let Err(error) = conductor.run_until(AT + ns + late) {
                return vec![error.to_string()];
            }
        }
        if late > 0 {
            wrong.push(format!("{who} train {} ms too late", late / MS));
        }
    }
    let end = conductor.world.now.max(AT) + 20 * SEC;
    if let Err(error) = conductor.run_until(end) {
        return vec![error.to_string()];
    }
    let truth = &conductor.world.truth;
    let changes = truth.announced.len() - before;
    let mut records: Vec<_> = truth.announced.values().collect();
    records.sort_by_key(|r| r.number);
    let chain = || {
        let each = records.iter().map(|r| {
            let nodes = (0..ids.len()).filter(|n| r.has(ids[*n]));
            let nodes = nodes.map(|n| n.to_string()).collect::<String>();
            format!("{} [{nodes}] {:?}", r.number, r.cause)
        });
        each.collect::<Vec<_>>().join("; ")
    };
    if changes > case.changes {
        wrong.push(format!("{changes} generations followed: {}", chain()));
    }
    // A job that takes nodes in later may have begun with fewer, and nobody waits for seconds for a vote.
    let from = match (shape.cluster, case.with) {
        (Cluster::Spare, _) | (_, Some(With::Late(_))) => before,
        (_, Some(With::SlowDisk(_, ns))) if ns > MOMENT => before,
        _ => 0,
    };
    for n in &others {
        if records[from..].iter().any(|r| !r.has(ids[*n])) {
            wrong.push(format!("n{n} was left out: {}", chain()));
        }
    }
    wrong
}

/// The node of rank 0 before anything happens.
fn rank_0(shape: Shape) -> usize {
    let mut conductor = Conductor::new(setup(shape, &Case::default()));
    assert_eq!(conductor.run_until(AT), Ok(()));
    let training = conductor.training();
    training.map_or_else(|| unreachable!("{shape:?}"), |(leader, _)| leader)
}

/// All cases of a cluster, with a store and without, with workers that stay and without, over some seeds.
fn judge_all(cluster: Cluster, cases: impl Fn(Shape) -> Vec<Case>) {
    // One for each 1,000 of those of the simulation of whole agents.
    let set = std::env::var("MUSTER_SIM_SEEDS").ok();
    let whole: Option<u64> = set.and_then(|s| s.parse().ok());
    let seeds = (whole.unwrap_or(3_000) / 1_000).clamp(1, 40);
    let mut wrong = Vec::new();
    for seed in 1..=seeds {
        for (store, live) in [(false, false), (false, true), (true, false), (true, true)] {
            let shape = Shape {
                seed,
                cluster,
                store,
                live,
            };
            for case in &cases(shape) {
                let found = judge(case, shape).into_iter();
                wrong.extend(
                    found.map(|w| format!("{} ({:?}, {shape:?}): {w}", case.name, case.faults)),
                );
            }
        }
    }
    assert!(wrong.is_empty(), "{}:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn one_fault_costs_two_generations_at_most_and_no_other_node() {
    judge_all(Cluster::Four, |shape| {
        let cases = (0..4).flat_map(|node| {
            let other = (node + 1) % 4;
            let mut cases = four::cases(node, other, 4, shape.store);
            cases.extend(four::more(node, other));
            cases
        });
        cases.collect()
    });
}

#[test]
fn an_agent_that_is_back_is_not_waited_for_where_another_node_is_lost() {
    judge_all(Cluster::Four, |_| {
        let pairs = (0..4).flat_map(|node| [1, 2].map(|by| (node, (node + by) % 4)));
        pairs
            .flat_map(|(node, other)| four::away_and_lost(node, other))
            .collect()
    });
}

#[test]
fn a_spare_takes_the_place_of_who_is_lost_and_of_nobody_else() {
    judge_all(Cluster::Spare, |shape| spare::cases(shape.store));
}

#[test]
fn two_nodes_without_another_agent_go_on_as_is_promised() {
    judge_all(Cluster::Two, |shape| two::cases(rank_0(shape), shape.store));
}

/// A person's word ends the job on all nodes, within the grace that workers have.
#[test]
fn a_cancel_ends_the_job_everywhere() {
    for (store, live) in [(false, false), (false, true), (true, false), (true, true)] {
        let clusters = [Cluster::Four, Cluster::Spare, Cluster::Two];
        // A spare's own start is not the job's: it waits, and may be taken back alone.
        let members = |c: Cluster| (0..c.max()).map(move |node| (c, node));
        for (cluster, node) in clusters.into_iter().flat_map(members) {
            let shape = Shape {
                seed: 1,
                cluster,
                store,
                live,
            };
            ends_everywhere(vec![(AT, Fault::Cancel { node })], AT, shape);
        }
    }
}

fn ends_everywhere(faults: Vec<(u64, Fault)>, from: u64, shape: Shape) {
    let case = Case {
        faults,
        ..Case::default()
    };
    let mut conductor = Conductor::new(setup(shape, &case));
    conductor.relaunches = false;
    let went = conductor.run_until(from + GRACE + MOMENT);
    assert_eq!(went, Ok(()), "{:?}, {shape:?}", case.faults);
    let nodes = conductor.world.nodes.iter().enumerate();
    let there: Vec<usize> = nodes
        .filter(|(_, n)| n.launcher.is_some())
        .map(|(at, _)| at)
        .collect();
    assert_eq!(there, Vec::<usize>::new(), "{:?}, {shape:?}", case.faults);
}

/// Ctrl-Z, and Ctrl-C after `fg`: the others have gone on without this node. Or its agent is stopped when Ctrl-C
/// comes, and hears of it once it goes on, when the others have dropped it and its launcher is gone.
#[test]
fn a_cancel_of_a_node_that_was_dropped_ends_the_job_everywhere() {
    for (store, live) in [(false, false), (false, true), (true, false), (true, true)] {
        for node in 0..4 {
            let shape = Shape {
                seed: 1,
                cluster: Cluster::Four,
                store,
                live,
            };
            let other = (node + 1) % 4;
            let faults = vec![
                (
                    AT,
                    Fault::LauncherPause {
                        node,
                        for_ns: 12 * SEC,
                    },
                ),
                (
                    AT + SEC,
                    Fault::WorkerFail {
                        node: other,
                        code: 1,
                        cascade: false,
                    },
                ),
                (AT + 12 * SEC + 10 * MS, Fault::Cancel { node }),
            ];
            ends_everywhere(faults, AT + 12 * SEC, shape);
            let pause = Fault::AgentPause {
                node,
                for_ns: 12 * SEC,
            };
            let faults = vec![(AT, pause), (AT + 200 * MS, Fault::Cancel { node })];
            ends_everywhere(faults, AT + 12 * SEC, shape);
        }
    }
}

/// A launcher that is stopped hears neither that its workers are to end nor that the next ones are to begin: its agent
/// covers neither, and the sidecar ends the old ones after their grace.
#[test]
fn workers_of_a_stopped_launcher_end_though_the_next_were_ordered() {
    for live in [false, true] {
        for node in 0..4 {
            let pause = Fault::LauncherPause {
                node,
                for_ns: 40 * SEC,
            };
            let other = Fault::LauncherCrash {
                node: (node + 1) % 4,
                relaunch_after: None,
            };
            let case = Case {
                faults: vec![(AT, pause), (AT + 5 * SEC, other)],
                ..Case::default()
            };
            let shape = Shape {
                seed: 1,
                cluster: Cluster::Four,
                store: false,
                live,
            };
            let mut conductor = Conductor::new(setup(shape, &case));
            let ended = AT + 5 * SEC + GRACE + MOMENT;
            let went = conductor.run_until(ended);
            assert_eq!(went, Ok(()), "n{node}, live: {live}");
            let launcher = conductor.world.nodes[node].launcher.as_ref();
            assert!(launcher.is_some_and(|l| l.paused.is_some() && l.alive().is_none()));
            assert!(conductor.world.truth.announced.len() > 1);
        }
    }
}
