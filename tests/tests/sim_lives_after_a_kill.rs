//! Agents that live and die with their launchers: after a life in which a node was killed, and that ended without it,
//! the next one is there in time, with every node that comes, and nobody is told the end of the life before.

use muster_protocol::local::ToLauncher;
use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::rng::Rng;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup};
use muster_tests::sim::step::Step;
use muster_tests::sim::trace;

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
    /// Nodes that start anew without their state.
    anew: Vec<usize>,
    /// Groups that may have to merge.
    merges: usize,
    /// Nobody is left of the first: a majority of its newest generation has to come.
    all_lost: bool,
}

impl Case {
    fn setup(&self) -> Setup {
        let mut faults: Vec<(u64, Fault)> = self.ends.clone();
        let first = self.first.iter().map(|node| (*node, MS));
        for (node, at) in first.chain(self.next.iter().copied()) {
            let new_disk = at >= AGAIN && self.anew.contains(&node);
            faults.push((at, Fault::NodeStart { node, new_disk }));
            faults.push((at + MS, Fault::LateJoin { node }));
        }
        let stops = self
            .first
            .iter()
            .map(|node| Fault::NodeStop { node: *node });
        faults.extend(stops.map(|stop| (AGAIN - 300 * MS, stop)));
        faults.sort_by_key(|(at, _)| *at);
        let nodes = (0..8).map(|at| NodeSetup {
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

    /// From when on there are surely enough nodes for the one that comes at this place.
    fn waits_until(&self, at: usize) -> u64 {
        match self.all_lost {
            true => self.next.iter().map(|(_, at)| *at).max().unwrap_or(0),
            false => self.next[at].1,
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
        let traced = std::env::var_os("MUSTER_SIM_CASE").is_some();
        for (at, step) in conductor.log.take().into_iter().flatten() {
            if let Some(line) = trace::line(at, &step).filter(|_| traced) {
                println!("{line}");
            }
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
            let mut of = of.map(move |s| (s.at - from) / MS).collect::<Vec<_>>();
            // An agent may have voted for the others' start before its own launcher came, which takes so long.
            of.dedup_by(|next, before| self.all_lost && *next - *before < 250);
            of
        };
        for (at, (node, from)) in self.next.iter().enumerate() {
            let starts = starts(*node, *from);
            // Each node that comes later may have the others start once more.
            let most = self.next.len() - at + self.merges;
            let late = self.waits_until(at).saturating_sub(*from) + self.bound;
            if starts.first().is_none_or(|ms| *ms > late / MS) || starts.len() > most {
                return Err(format!(
                    "node {node} trains after {starts:?} ms: {:?}",
                    self.next
                ));
            }
        }
        Ok(())
    }
}

/// All cases but so many in a hundred are as they must be: messages cross, and a node may start once more.
#[track_caller]
fn check_but(percent: usize, cases: impl Iterator<Item = (String, Case)>) {
    let only = std::env::var("MUSTER_SIM_CASE").ok();
    let (mut wrong, mut all) = (Vec::new(), 0);
    for (name, case) in cases.filter(|(name, _)| only.as_ref().is_none_or(|o| name == o)) {
        all += 1;
        if let Err(why) = case.judge() {
            wrong.push(format!("{name}: {why}"));
        }
    }
    let n = wrong.len();
    assert!(
        100 * n <= percent * all,
        "{n} of {all}:\n{}",
        wrong.join("\n")
    );
}

#[track_caller]
fn check(cases: impl Iterator<Item = (String, Case)>) {
    check_but(0, cases);
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
        anew: Vec::new(),
        merges: 0,
        all_lost: false,
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

/// All nodes are killed, at once or one after the other, and start in whatever order.
fn all_killed(seed: u64) -> Case {
    let mut rng = Rng::new(seed);
    let (n, min_nodes) = [(2, 1), (2, 2), (3, 2), (3, 1), (4, 2)][rng.below(5) as usize];
    let mut order = || {
        let mut nodes: Vec<usize> = (0..n).collect();
        for at in (1..n).rev() {
            nodes.swap(at, rng.below(at as u64 + 1) as usize);
        }
        nodes
    };
    let (killed, starts) = (order(), order());
    let mut at = KILL;
    let mut ends = Vec::new();
    for node in killed {
        ends.push((at, Fault::NodeStop { node }));
        at += [0, 300, 2_000][rng.below(3) as usize] * MS;
    }
    let mut at = AGAIN;
    let mut next = Vec::new();
    for node in starts {
        next.push((node, at));
        at += [20, 500, 1_500, 5_000][rng.below(4) as usize] * MS;
    }
    Case {
        seed,
        spec: JobSpec {
            min_nodes,
            max_nodes: n as u16,
            ..JobSpec::default()
        },
        first: (0..n).collect(),
        ends,
        next,
        bound: BOUND,
        anew: Vec::new(),
        merges: 0,
        all_lost: true,
    }
}

#[test]
fn nodes_that_all_were_killed_train_once_all_are_back() {
    check_but(
        1,
        (0..400).map(|seed| (format!("{seed}"), all_killed(seed))),
    );
}

#[test]
fn nodes_some_of_which_lost_their_state_train_once_all_are_back() {
    let cases = (0..400).map(|seed| {
        let case = all_killed(seed);
        let mut rng = Rng::new(seed + 2_000);
        let anew = case.first.iter().copied().filter(|_| rng.below(2) == 0);
        let anew = anew.collect();
        // A node that kept its state may lead a group of its own, which then has to merge: that takes one start.
        let (bound, merges) = (3 * BOUND, 1);
        let case = Case {
            anew,
            bound,
            merges,
            ..case
        };
        (format!("{seed}"), case)
    });
    check_but(1, cases);
}

/// Those that lost their state come as other nodes, and train when one that kept it comes: its group can decide nothing
/// any more, for the other voters are gone for good.
#[test]
fn a_node_whose_group_is_gone_joins_the_one_that_trains() {
    let cases = (0..200).map(|seed| {
        let case = all_killed(seed);
        let mut rng = Rng::new(seed + 3_000);
        let n = case.first.len();
        let kept = rng.below(n as u64) as usize;
        let fresh = n.max(3) - 1;
        let mut next: Vec<_> = (0..fresh).map(|node| (4 + node, AGAIN)).collect();
        let after = [1_500, 3_000, 6_000][rng.below(3) as usize] * MS;
        next.push((kept, AGAIN + after));
        let spec = JobSpec {
            max_nodes: 4,
            ..case.spec.clone()
        };
        let all_lost = false;
        let case = Case {
            next,
            spec,
            all_lost,
            ..case
        };
        (format!("{seed}"), case)
    });
    check_but(2, cases);
}

/// The same, of one that comes first: those without its state find it, and the job forms anew.
#[test]
fn a_node_whose_group_is_gone_forms_the_job_anew_with_others() {
    let cases = (0..200).map(|seed| {
        let case = all_killed(seed);
        let mut rng = Rng::new(seed + 4_000);
        let kept = rng.below(case.first.len() as u64) as usize;
        let fresh = usize::from(case.spec.min_nodes).max(2);
        let mut next = vec![(kept, AGAIN)];
        let after = |rng: &mut Rng| AGAIN + [30, 1_500, 6_000][rng.below(3) as usize] * MS;
        next.extend((0..fresh).map(|node| (4 + node, after(&mut rng))));
        next.sort_by_key(|(_, at)| *at);
        let spec = JobSpec {
            max_nodes: 4,
            ..case.spec.clone()
        };
        // Their agents may come a moment later.
        let bound = 3 * BOUND;
        let case = Case {
            next,
            spec,
            bound,
            ..case
        };
        (format!("{seed}"), case)
    });
    check_but(1, cases);
}
