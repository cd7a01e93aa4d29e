//! A job whose launchers are all gone, and that is started again: nobody waits for workers that are known to have
//! ended, whoever starts it, and though all agents were started anew meanwhile.

use itertools::iproduct;
use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup, Torn};
use muster_tests::sim::step::Step;

const NODES: usize = 6;
/// When all nodes of the job are lost, and are started again.
const LOST: u64 = 15 * SEC;
const AGAIN: u64 = 25 * SEC;
/// Ten times what a start takes.
const BOUND: u64 = 6 * SEC;
/// A start that has nothing to wait for: twice what it takes with the quiet time before a job forms with fewer nodes
/// than it could have.
const PROMPT: u64 = 1_200 * MS;

/// How the nodes of the job are lost.
#[derive(Clone, Copy, Debug)]
enum Loss {
    /// All at once, without a word; the machines and their agents are up again.
    Power,
    /// The launchers alone; their agents are started again a moment later.
    LaunchersThenAgents,
    /// The launchers alone, while the agents are away.
    AgentsThenLaunchers,
}

fn losses(loss: Loss, node: usize) -> Vec<(u64, Fault)> {
    let agent = Fault::AgentCrash {
        node,
        effects: 0,
        torn: Torn::Between,
        down: SEC,
        new_disk: false,
    };
    let launcher = Fault::LauncherCrash {
        node,
        relaunch_after: None,
    };
    match loss {
        Loss::Power => {
            let power = Fault::NodeCrash {
                node,
                down: 2 * SEC,
                new_disk: false,
                relaunch: false,
            };
            vec![(LOST, power)]
        }
        Loss::LaunchersThenAgents => vec![(LOST, launcher), (LOST + SEC, agent)],
        Loss::AgentsThenLaunchers => vec![(LOST - 100 * MS, agent), (LOST, launcher)],
    }
}

fn train_in_time(
    seed: u64,
    loss: Loss,
    first: &[usize],
    joins: Option<usize>,
    next: &[usize],
    store: bool,
) -> Result<(), String> {
    let mut faults: Vec<(u64, Fault)> = Vec::new();
    faults.extend(joins.map(|node| (6 * SEC, Fault::LateJoin { node })));
    let all = first.iter().copied().chain(joins);
    faults.extend(all.flat_map(|node| losses(loss, node)));
    faults.extend(
        next.iter()
            .map(|node| (AGAIN, Fault::LateJoin { node: *node })),
    );
    faults.sort_by_key(|(at, _)| *at);
    let nodes = (0..NODES).map(|at| NodeSetup {
        launcher_at: first.contains(&at).then_some(MS),
        ..NodeSetup::quiet(at, 0)
    });
    started_in_time(seed, nodes.collect(), faults, store, next)
}

/// Runs these faults, and judges when the nodes that start the job then train.
fn started_in_time(
    seed: u64,
    nodes: Vec<NodeSetup>,
    faults: Vec<(u64, Fault)>,
    store: bool,
    next: &[usize],
) -> Result<(), String> {
    started_within(seed, nodes, faults, store, next, BOUND)
}

fn started_within(
    seed: u64,
    nodes: Vec<NodeSetup>,
    faults: Vec<(u64, Fault)>,
    store: bool,
    next: &[usize],
    bound: u64,
) -> Result<(), String> {
    let spec = JobSpec {
        min_nodes: 2,
        max_nodes: nodes.len() as u16,
        ..JobSpec::default()
    };
    let mut conductor = Conductor::new(Setup {
        store,
        faults,
        heal_at: AGAIN + 60 * SEC,
        ..Setup::quiet(seed, nodes, spec)
    });
    conductor.relaunches = false;
    conductor.run().map_err(|v| v.to_string())?;
    within(&conductor, next, AGAIN, bound)
}

#[test]
fn a_job_whose_agents_are_all_back_without_launchers_is_started_at_once() {
    let losses = [
        Loss::Power,
        Loss::LaunchersThenAgents,
        Loss::AgentsThenLaunchers,
    ];
    let first = [(&[0, 1][..], None), (&[0, 1], Some(2)), (&[2, 3], Some(1))];
    let next = [&[4, 5][..], &[2, 3], &[0, 1], &[0, 1, 2], &[0, 3]];
    let cases = iproduct!([true, false], losses, first, next, 1..4);
    let wrong = cases.filter_map(|(store, loss, (first, joins), next, seed)| {
        let went = train_in_time(seed, loss, first, joins, next, store);
        let what = format!("{loss:?} of {first:?} and {joins:?}, then {next:?}, store {store}");
        went.err().map(|why| format!("{what}, {seed}: {why}"))
    });
    let wrong: Vec<String> = wrong.collect();
    assert!(wrong.is_empty(), "{}:\n{}", wrong.len(), wrong.join("\n"));
}

/// The machines of the agents that launchers meet at have lost power, and their connections stand yet.
#[test]
fn a_start_passes_over_agents_whose_machines_have_lost_power() {
    let cases = iproduct!([true, false], 1..4, 1..6);
    let wrong = cases.filter_map(|(store, dead, seed)| {
        let power = |node| Fault::NodeCrash {
            node,
            down: 200 * SEC,
            new_disk: false,
            relaunch: false,
        };
        let next = [dead, NODES - 1];
        let mut faults: Vec<_> = (0..dead)
            .map(|node| (AGAIN - SEC / 2, power(node)))
            .collect();
        faults.extend(next.map(|node| (AGAIN, Fault::LateJoin { node })));
        let nodes = (0..NODES).map(|at| NodeSetup {
            launcher_at: None,
            ..NodeSetup::quiet(at, 0)
        });
        let went = started_in_time(seed, nodes.collect(), faults, store, &next);
        let what = format!("{dead} dead, store {store}, {seed}");
        went.err().map(|why| format!("{what}: {why}"))
    });
    let wrong: Vec<String> = wrong.collect();
    assert!(wrong.is_empty(), "{}:\n{}", wrong.len(), wrong.join("\n"));
}

/// Nodes without agents of their own: all of the job's are killed, then these start it.
fn embedded(seed: u64, first: &[usize], next: &[usize]) -> Result<(), String> {
    let mut faults: Vec<(u64, Fault)> = Vec::new();
    for (at, nodes) in [(MS, first), (AGAIN, next)] {
        faults.extend(nodes.iter().flat_map(|node| {
            let (node, new_disk) = (*node, false);
            [
                (at, Fault::NodeStart { node, new_disk }),
                (at + MS, Fault::LateJoin { node }),
            ]
        }));
    }
    faults.extend(
        first
            .iter()
            .map(|node| (LOST, Fault::NodeStop { node: *node })),
    );
    faults.sort_by_key(|(at, _)| *at);
    let nodes = (0..4).map(|at| NodeSetup {
        agent_at: 10_000 * SEC,
        launcher_at: None,
        ..NodeSetup::quiet(at, 0)
    });
    started_in_time(seed, nodes.collect(), faults, true, next)
}

/// Agents that live and die with their launchers: one node of the job comes back together with another one.
#[test]
fn a_node_that_comes_back_with_another_one_starts_the_job_at_once() {
    let mut wrong = Vec::new();
    for (first, next) in [
        ([0, 1], [0, 2]),
        ([0, 1], [1, 2]),
        ([2, 3], [2, 0]),
        ([2, 3], [3, 0]),
        ([0, 1], [0, 1]),
    ] {
        for seed in 1..6 {
            if let Err(why) = embedded(seed, &first, &next) {
                wrong.push(format!("{first:?}, then {next:?}, {seed}: {why}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}:\n{}", wrong.len(), wrong.join("\n"));
}

/// All nodes of the job are drained, one `apart` after the other, and their agents end as soon as their launchers
/// have.
fn drained(seed: u64, agents: usize, job: usize, apart: u64, store: bool) -> Result<(), String> {
    let nodes = (0..agents).map(|at| NodeSetup {
        launcher_at: (at < job).then_some(MS),
        ..NodeSetup::quiet(at, 0)
    });
    let spec = JobSpec {
        min_nodes: 2,
        max_nodes: 4,
        ..JobSpec::default()
    };
    let mut conductor = Conductor::new(Setup {
        store,
        heal_at: AGAIN + 60 * SEC,
        ..Setup::quiet(seed, nodes.collect(), spec)
    });
    conductor.relaunches = false;
    let until = |conductor: &mut Conductor, at| conductor.run_until(at).map_err(|v| v.to_string());
    let mut left: Vec<usize> = (0..job).collect();
    let mut now = LOST;
    while now < AGAIN {
        until(&mut conductor, now)?;
        let since = now - LOST;
        if since.is_multiple_of(apart) && since / apart < job as u64 {
            let (node, grace_ms) = ((since / apart) as usize, 5_000);
            conductor.put(Step::Drain { node, grace_ms });
        }
        let world = &conductor.world;
        let gone = left.iter().position(|n| world.nodes[*n].launcher.is_none());
        if let Some(at) = gone {
            let node = left.remove(at);
            conductor.put(Step::AgentKill { node });
        }
        now += MS;
    }
    if !left.is_empty() {
        return Err(format!("{left:?} are still there"));
    }
    for node in 0..job {
        conductor.put(Step::LauncherStart { node });
    }
    let again = conductor.world.now;
    until(&mut conductor, u64::MAX)?;
    let nodes: Vec<usize> = (0..job).collect();
    within(&conductor, &nodes, again, PROMPT)
}

#[test]
fn a_job_whose_nodes_were_drained_is_started_at_once() {
    let sizes = [(2, 2), (3, 2), (3, 3), (4, 3)];
    let apart = [1, 5, 20, 100, 300, 1_000];
    let cases = iproduct!([false, true], sizes, apart, 1..6);
    let wrong = cases.filter_map(|(store, (agents, job), apart, seed)| {
        let went = drained(seed, agents, job, apart * MS, store);
        let what = format!("{job} of {agents}, {apart} ms apart, store {store}, {seed}");
        went.err().map(|why| format!("{what}: {why}"))
    });
    let wrong: Vec<String> = wrong.collect();
    assert!(wrong.is_empty(), "{}:\n{}", wrong.len(), wrong.join("\n"));
}

/// The launcher of one node dies, and the agent of another just then; somebody ends the job, and all start it again. The
/// agent knows nothing of the last generation, in which its node has a part.
#[test]
fn a_job_is_started_at_once_though_an_agent_missed_its_last_generation() {
    let orders = [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ];
    let gaps = [2, 5, 12, 18, 30, 60];
    let cases = iproduct!([false, true], orders, gaps, 1..4);
    let wrong = cases.filter_map(|(store, [lost, away, orders], gap, seed)| {
        let launcher = Fault::LauncherCrash {
            node: lost,
            relaunch_after: None,
        };
        let agent = Fault::AgentCrash {
            node: away,
            effects: 0,
            torn: Torn::Between,
            down: 2 * SEC,
            new_disk: false,
        };
        let mut faults = vec![
            (LOST, launcher),
            (LOST + gap * MS, agent),
            (LOST + 300 * MS, Fault::OrderCancel { node: orders }),
        ];
        faults.extend((0..3).map(|node| (AGAIN, Fault::LateJoin { node })));
        let nodes = (0..3).map(|at| NodeSetup {
            launcher_at: Some(MS),
            ..NodeSetup::quiet(at, 0)
        });
        let went = started_within(seed, nodes.collect(), faults, store, &[0, 1, 2], PROMPT);
        let what = format!("{lost} lost, {away} away, {orders} ordered, {gap} ms, {store}, {seed}");
        went.err().map(|why| format!("{what}: {why}"))
    });
    let wrong: Vec<String> = wrong.collect();
    assert!(wrong.is_empty(), "{}:\n{}", wrong.len(), wrong.join("\n"));
}

fn in_time(conductor: &Conductor, nodes: &[usize], from: u64) -> Result<(), String> {
    within(conductor, nodes, from, BOUND)
}

fn within(conductor: &Conductor, nodes: &[usize], from: u64, bound: u64) -> Result<(), String> {
    let spawns = &conductor.world.truth.spawns;
    for node in nodes {
        let mut starts = spawns.iter().filter(|s| s.node == *node && s.at > from);
        let after = starts.next().map(|s| (s.at - from) / MS);
        if after.is_none_or(|ms| ms > bound / MS) {
            return Err(format!("node {node} trains after {after:?} ms"));
        }
    }
    Ok(())
}

/// Whether it is the node that would begin the job or another: the others begin it, and let it in.
#[test]
fn a_job_begins_without_a_node_whose_disk_is_full() {
    let mut wrong = Vec::new();
    for (full, store, seed) in [false, true].into_iter().flat_map(|store| {
        let each = (0..3).flat_map(|full| (1..6).map(move |seed| (full, seed)));
        each.map(move |(full, seed)| (full, store, seed))
    }) {
        let others: Vec<usize> = (0..3).filter(|n| *n != full).collect();
        let fault = Fault::DiskFull {
            node: full,
            for_ns: 30 * SEC,
        };
        let nodes = (0..3).map(|at| NodeSetup {
            launcher_at: Some(SEC),
            ..NodeSetup::quiet(at, 0)
        });
        let spec = JobSpec {
            min_nodes: 2,
            max_nodes: 3,
            ..JobSpec::default()
        };
        let mut conductor = Conductor::new(Setup {
            store,
            faults: vec![(MS, fault)],
            heal_at: 60 * SEC,
            ..Setup::quiet(seed, nodes.collect(), spec)
        });
        conductor.relaunches = false;
        let went = conductor.run().map_err(|v| v.to_string());
        let went = went.and_then(|()| in_time(&conductor, &others, SEC));
        // It joins them, for those who vote on that can store their votes.
        let went = went.and_then(|()| in_time(&conductor, &[full], SEC));
        if let Err(why) = went {
            wrong.push(format!("n{full}, store {store}, {seed}: {why}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// All launchers of a job leave while the agent of one of its nodes is away, which is back before the job is started again.
#[derive(Clone, Copy, Debug)]
struct Away {
    seed: u64,
    store: bool,
    job: usize,
    /// The agent of this one is stopped, or killed and started again.
    node: usize,
    stopped: bool,
    /// So long after the fault the launchers are told to leave.
    leave: u64,
    down: u64,
    /// Those that start the job then, and when, after all have been told to leave.
    next: [usize; 2],
    again: u64,
    /// They start it for fewer nodes than it had been started for.
    fewer: bool,
}

impl Away {
    fn started(&self) -> Result<(), String> {
        const GRACE: u64 = 5 * SEC;
        let node = self.node;
        let away = match self.stopped {
            true => Fault::AgentPause {
                node,
                for_ns: self.down,
            },
            false => Fault::AgentCrash {
                node,
                effects: 0,
                torn: Torn::Between,
                down: self.down,
                new_disk: false,
            },
        };
        let mut faults = vec![(LOST, away)];
        for node in 0..self.job {
            let leave = Fault::Leave {
                node,
                grace_ms: (GRACE / MS) as u32,
                relaunch_after: None,
            };
            faults.push((LOST + self.leave, leave));
        }
        // A launcher whose agent is away goes when its time to leave is over.
        let gone = LOST + self.leave + GRACE + SEC;
        // The others are gone soon.
        let soon = LOST + self.leave + 2 * SEC;
        let free = |next: &usize| match *next {
            next if next == node => gone,
            next if next < self.job => soon,
            _ => 0,
        };
        let free = self.next.iter().map(free).max().unwrap_or(0);
        let again = free.max(LOST + self.leave + self.again);
        for node in self.next {
            faults.push((again, Fault::LateJoin { node }));
        }
        let node = |at| NodeSetup {
            launcher_at: (at < self.job).then_some(MS),
            ..NodeSetup::quiet(at, 0)
        };
        let spec = JobSpec {
            min_nodes: 2,
            max_nodes: 4,
            ..JobSpec::default()
        };
        let fewer = JobSpec {
            max_nodes: 3,
            ..spec.clone()
        };
        let later_specs = self.fewer.then_some((again, fewer));
        let mut conductor = Conductor::new(Setup {
            store: self.store,
            faults,
            later_specs: later_specs.into_iter().collect(),
            heal_at: AGAIN + 60 * SEC,
            ..Setup::quiet(self.seed, (0..5).map(node).collect(), spec)
        });
        conductor.relaunches = false;
        conductor.run().map_err(|v| v.to_string())?;
        let refused = conductor.world.coverage.refused_launchers;
        if refused > 0 {
            return Err(format!("{refused} launchers are refused"));
        }
        // It may have to wait until the agent is back, which alone knows that the workers there have ended.
        let until = again.max(LOST + self.down) + BOUND;
        within(&conductor, &self.next, again, until - again)
    }
}

#[track_caller]
fn all_started(cases: impl Iterator<Item = Away>) {
    let wrong = cases.filter_map(|case| case.started().err().map(|why| format!("{case:?}: {why}")));
    let wrong: Vec<String> = wrong.collect();
    assert!(wrong.is_empty(), "{}:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn a_job_that_all_left_while_an_agent_was_away_is_started_at_once_when_that_is_back() {
    let cases = iproduct!(
        [false, true],
        [false, true],
        [(2, 0), (2, 1), (3, 0), (3, 2)],
        [100 * MS, SEC, 3 * SEC],
        [6 * SEC, 11 * SEC],
        0..3,
        [2 * SEC, 3 * SEC, 6 * SEC, 9 * SEC, 15 * SEC]
    );
    let cases = cases.map(
        |(store, stopped, (job, node), leave, down, next, again)| Away {
            seed: leave / MS % 3,
            store,
            job,
            node,
            stopped,
            leave,
            down,
            next: [[0, 1], [3, 4], [node, 4]][next],
            again,
            fewer: false,
        },
    );
    all_started(cases);
}

/// It may be that the launcher whose agent is stopped lives, but nobody knows that.
#[test]
fn a_job_that_all_left_while_an_agent_was_away_is_started_with_another_specification() {
    let cases = iproduct!(
        [false, true],
        [false, true],
        [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)],
        [100 * MS, SEC, 3 * SEC],
        0..3,
        [100 * MS, SEC, 3 * SEC, 6 * SEC]
    );
    let cases = cases.map(|(store, stopped, (job, node), leave, next, again)| Away {
        seed: leave / MS % 3,
        store,
        job,
        node,
        stopped,
        leave,
        down: 11 * SEC,
        next: [[0, 1], [3, 4], [node, 4]][next],
        again,
        fewer: true,
    });
    all_started(cases);
}
