//! Agents that live and die with their launchers: after a life in which a node was killed, and that ended without it, the
//! next one is there in time, with every node that comes, and nobody is told the end of the life before.

use muster_protocol::local::ToLauncher;
use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::rng::Rng;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup};
use muster_tests::sim::step::Step;

/// When a node is killed.
const KILL: u64 = 10 * SEC;
/// When the first node of the next life starts.
const AGAIN: u64 = 20 * SEC;
/// Within this time of its start a node trains.
const BOUND: u64 = 2_500 * MS;

struct Case {
    seed: u64,
    spec: JobSpec,
    /// The nodes of the first life.
    first: Vec<usize>,
    /// The faults that end it.
    ends: Vec<(u64, Fault)>,
    /// The nodes of the next, with when they start.
    next: Vec<(usize, u64)>,
    bound: u64,
}

impl Case {
    fn setup(&self) -> Setup {
        let mut faults: Vec<(u64, Fault)> = self.ends.clone();
        let first = self.first.iter().map(|node| (*node, MS));
        for (node, at) in first.chain(self.next.iter().copied()) {
            let new_disk = false;
            faults.push((at, Fault::NodeStart { node, new_disk }));
            faults.push((at + MS, Fault::LateJoin { node }));
        }
        let stops = self
            .first
            .iter()
            .map(|node| Fault::NodeStop { node: *node });
        faults.extend(stops.map(|stop| (AGAIN - 300 * MS, stop)));
        faults.sort_by_key(|(at, _)| *at);
        let nodes = (0..4).map(|at| NodeSetup {
            agent_at: 10_000 * SEC,
            launcher_at: None,
            ..NodeSetup::quiet(at, 0)
        });
        Setup {
            faults,
            heal_at: AGAIN + 30 * SEC,
            ..Setup::quiet(self.seed, nodes.collect(), self.spec.clone())
        }
    }

    /// Why it is not as it must be.
    fn judge(&self) -> Result<(), String> {
        let mut conductor = Conductor::new(self.setup());
        conductor.log = Some(Vec::new());
        conductor.relaunches = false;
        conductor
            .run_until(AGAIN + 30 * SEC)
            .map_err(|v| v.to_string())?;
        for (at, step) in conductor.log.take().into_iter().flatten() {
            if let Step::LauncherHears { node, frame, .. } = step
                && at > AGAIN
                && let ToLauncher::End { .. } | ToLauncher::Refused { .. } = frame
            {
                return Err(format!("node {node} hears {frame:?}"));
            }
        }
        let spawns = &conductor.world.truth.spawns;
        let starts = |node: usize, from: u64| {
            let of = spawns.iter().filter(move |s| s.node == node && s.at > from);
            of.map(move |s| (s.at - from) / MS).collect::<Vec<_>>()
        };
        for (at, (node, from)) in self.next.iter().enumerate() {
            let starts = starts(*node, *from);
            // Each node that comes later may have the others start once more.
            let most = self.next.len() - at;
            if starts.first().is_none_or(|ms| *ms > self.bound / MS) || starts.len() > most {
                return Err(format!("node {node} trains after {starts:?} ms"));
            }
        }
        Ok(())
    }
}

#[track_caller]
fn check(cases: impl Iterator<Item = (String, Case)>) {
    let only = std::env::var("MUSTER_SIM_CASE").ok();
    let (mut wrong, mut all) = (Vec::new(), 0);
    for (name, case) in cases.filter(|(name, _)| only.as_ref().is_none_or(|o| name == o)) {
        all += 1;
        if let Err(why) = case.judge() {
            wrong.push(format!("{name}: {why}"));
        }
    }
    let n = wrong.len();
    assert!(wrong.is_empty(), "{n} of {all}:\n{}", wrong.join("\n"));
}

/// One of three nodes is killed, and another's user ends the job.
fn killed_then_cancelled(seed: u64) -> (usize, Case) {
    let mut rng = Rng::new(seed);
    let killed = rng.below(3) as usize;
    let by = (killed + 1 + rng.below(2) as usize) % 3;
    let ends_at = KILL + [100, 500, 1_500, 2_500][rng.below(4) as usize] * MS;
    let case = Case {
        seed,
        spec: JobSpec {
            min_nodes: 2,
            max_nodes: 3,
            ..JobSpec::default()
        },
        first: vec![0, 1, 2],
        ends: vec![
            (KILL, Fault::NodeStop { node: killed }),
            (ends_at, Fault::Cancel { node: by }),
        ],
        next: Vec::new(),
        bound: BOUND,
    };
    (killed, case)
}

#[test]
fn a_node_that_was_killed_starts_with_the_others_after_the_end() {
    check((0..200).map(|seed| {
        let (_, case) = killed_then_cancelled(seed);
        let mut rng = Rng::new(seed + 1_000);
        let next = (0..3).map(|node| (node, AGAIN + rng.below(30) * MS));
        let next = next.collect();
        (format!("{seed}"), Case { next, ..case })
    }));
}

#[test]
fn a_node_that_was_killed_joins_those_that_came_before_it() {
    check((0..200).map(|seed| {
        let (killed, case) = killed_then_cancelled(seed);
        let mut rng = Rng::new(seed + 1_000);
        let late = AGAIN + [300, 600, 1_000, 2_000, 4_000][rng.below(5) as usize] * MS;
        let others = (0..3).filter(|n| *n != killed).map(|n| (n, AGAIN));
        let next = others.chain([(killed, late)]).collect();
        (format!("{seed}"), Case { next, ..case })
    }));
}
