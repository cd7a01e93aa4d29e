//! A node more than the job wants: its launcher ends with the job, however young it or the job is.

use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup, Times};
use muster_tests::sim::step::Step;

const NODES: usize = 4;
/// So many find a place.
const MAX: u16 = 3;
/// Ten times what it takes to hear of an end.
const BOUND: u64 = 4 * SEC;
/// A launcher has asked for a place that long after it was started.
const ASKED: u64 = 300 * MS;

#[derive(Clone, Copy, Debug)]
struct Case {
    seed: u64,
    /// When the job is to end, and when the last launcher comes, if it comes late.
    end: u64,
    late: Option<u64>,
    min_nodes: u16,
    store: bool,
}

/// Whether the job ended then, unless a launcher is left over.
fn all_end(case: Case, (end, code): (Fault, i32)) -> Result<bool, String> {
    let mut nodes: Vec<NodeSetup> = (0..NODES).map(|at| NodeSetup::quiet(at, 0)).collect();
    if case.late.is_some() {
        nodes[NODES - 1].launcher_at = case.late;
    }
    let spec = JobSpec {
        min_nodes: case.min_nodes,
        max_nodes: MAX,
        max_restarts: 0,
        ..JobSpec::default()
    };
    let mut conductor = Conductor::new(Setup {
        store: case.store,
        times: Times::USUAL,
        faults: vec![(case.end, end)],
        heal_at: case.end + BOUND,
        ..Setup::quiet(case.seed, nodes, spec)
    });
    conductor.relaunches = false;
    conductor.run().map_err(|v| v.to_string())?;
    let told = &conductor.world.truth.told;
    let in_time = |node: usize| {
        let mut told = told.iter().filter(|t| t.node == node);
        told.any(|t| t.code == code && t.at < case.end + BOUND)
    };
    let left: Vec<usize> = (0..NODES).filter(|node| !in_time(*node)).collect();
    match left.len() {
        0 => Ok(true),
        NODES => Ok(false),
        _ => Err(format!("{left:?} are left over, told: {told:?}")),
    }
}

/// `times`: when the job is to end; `ages`: how old the spare is then at least, where it comes late.
fn judge(times: impl Iterator<Item = u64> + Clone, ages: &[Option<u64>]) {
    let (mut wrong, mut ended) = (Vec::new(), 0);
    for (min_nodes, store) in [(1, false), (1, true), (3, false), (3, true)] {
        for end in times.clone() {
            for age in ages {
                for (how, code) in Fault::ends() {
                    for seed in 1..3 {
                        let case = Case {
                            seed,
                            end,
                            late: age.map(|age| end - age),
                            min_nodes,
                            store,
                        };
                        match all_end(case, (how.clone(), code)) {
                            Ok(all) => ended += u32::from(all),
                            Err(why) => wrong.push(format!("{how:?}, {case:?}: {why}")),
                        }
                    }
                }
            }
        }
    }
    let (n, all) = (wrong.len(), wrong.join("\n"));
    assert!(wrong.is_empty(), "{n} wrong, {ended} right:\n{all}");
    assert!(ended > 0);
}

/// All come together, and the script has a mistake, or a person sees one, right after the start.
#[test]
fn one_that_came_with_the_others_ends_with_them_at_once() {
    judge((5..30).map(|tenth| tenth * 100 * MS), &[None]);
}

#[test]
fn one_that_came_late_ends_with_the_others() {
    let ages = [ASKED, 400 * MS, 600 * MS, SEC, 3 * SEC];
    judge([8 * SEC].into_iter(), &ages.map(Some));
}

/// Lives of a job of two nodes that three ask for a place in, each soon over and started again at once: the one without
/// a place votes, and had one in a life before.
#[derive(Clone, Copy, Debug)]
struct Lives {
    seed: u64,
    /// A life ends that long after all workers were started, and the last launcher has asked for a place.
    lasts: u64,
    /// From the end of a launcher to its next start, and more from node to node.
    pause: u64,
    apart: u64,
    /// That starts first.
    first: usize,
    store: bool,
}

impl Lives {
    fn end_everywhere(self) -> Result<(), String> {
        const NODES: usize = 3;
        let nodes = (0..NODES).map(|at| NodeSetup::quiet(at, 0)).collect();
        let spec = JobSpec {
            min_nodes: 2,
            max_nodes: 2,
            max_restarts: 0,
            ..JobSpec::default()
        };
        let mut conductor = Conductor::new(Setup {
            store: self.store,
            times: Times::USUAL,
            heal_at: 60 * SEC,
            ..Setup::quiet(self.seed, nodes, spec)
        });
        conductor.relaunches = false;
        let run = |conductor: &mut Conductor, until| {
            let went = conductor.run_until(until);
            assert_eq!(went, Ok(()), "{self:?}");
        };
        let (mut now, mut lived) = (4 * SEC, 0);
        run(&mut conductor, now);
        for life in 1..5 {
            let began = now;
            let members = loop {
                let spawns = &conductor.world.truth.spawns;
                let all = spawns.iter().filter(|s| s.at > lived);
                let all: Vec<_> = all.map(|s| (s.node, s.start.digest)).collect();
                if all.len() >= 2 {
                    break all;
                }
                now += 5 * MS;
                run(&mut conductor, now);
                if now > began + BOUND {
                    return Err(format!("life {life} does not begin: {all:?}"));
                }
            };
            now = now.max(began + ASKED) + self.lasts;
            run(&mut conductor, now);
            for (node, digest) in members {
                conductor.put(Step::Finish { node, digest });
            }
            lived = conductor.world.now;
            let from = now;
            while (0..NODES).any(|node| conductor.world.nodes[node].launcher.is_some()) {
                now += 5 * MS;
                run(&mut conductor, now);
                if now > from + BOUND {
                    let left =
                        (0..NODES).filter(|node| conductor.world.nodes[*node].launcher.is_some());
                    return Err(format!("life {life}: {:?} left", left.collect::<Vec<_>>()));
                }
            }
            now += self.pause;
            for at in 0..NODES {
                run(&mut conductor, now);
                conductor.put(Step::LauncherStart {
                    node: (self.first + (1 + life % 2) * at) % NODES,
                });
                now += self.apart;
            }
        }
        Ok(())
    }
}

#[test]
fn one_that_took_part_in_a_life_before_ends_with_the_others() {
    let mut wrong = Vec::new();
    for seed in 1..9 {
        for lasts in [0, 50, 100, 300, 600, 1000] {
            for (pause, apart) in [(0, 0), (5, 5), (50, 12), (300, 1), (300, 20), (300, 40)] {
                for (first, store) in [(0, false), (1, false), (2, false), (1, true)] {
                    let case = Lives {
                        seed,
                        lasts: lasts * MS,
                        pause: pause * MS,
                        apart: apart * MS,
                        first,
                        store,
                    };
                    if let Err(why) = case.end_everywhere() {
                        wrong.push(format!("{case:?}: {why}"));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}:\n{}", wrong.len(), wrong.join("\n"));
}
