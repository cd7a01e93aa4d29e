//! A job that ends and is started again, by nodes drawn at random, six times in a row: with all agents alive, or back,
//! every start trains soon, and every launcher ends with its life.

use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::rng::Rng;
use muster_tests::sim::setup::{NodeSetup, Setup, Times};
use muster_tests::sim::step::Step;
use muster_tests::sim::trace;

const NODES: usize = 5;
const LIVES: usize = 6;
const MIN: u16 = 2;
const MAX: u16 = 3;
/// Ten times what a start takes, once all its launchers are there, and what an end takes.
const BOUND: u64 = 4 * SEC;

/// A launcher has asked for a place that long after it was started.
const ASKED: u64 = 500 * MS;
/// For so long an agent that is killed is away.
const AWAY: u64 = SEC + 100 * MS;

/// How a life ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Finish,
    Fail,
    Cancel,
    /// All are told to leave, one after the other.
    Leave,
    /// All launchers are killed.
    Kill,
    /// All launchers and their agents are killed; these come back.
    KillAgents,
}

struct Lives {
    conductor: Conductor,
    rng: Rng,
    now: u64,
    /// The lives so far, for people.
    story: String,
}

impl Lives {
    fn new(seed: u64, store: bool) -> Lives {
        let nodes = (0..NODES).map(|at| NodeSetup {
            launcher_at: None,
            ..NodeSetup::quiet(at, 0)
        });
        let spec = JobSpec {
            min_nodes: MIN,
            max_nodes: MAX,
            max_restarts: 0,
            ..JobSpec::default()
        };
        let mut conductor = Conductor::new(Setup {
            store,
            times: Times::USUAL,
            heal_at: 1_000 * SEC,
            ..Setup::quiet(seed, nodes.collect(), spec)
        });
        conductor.relaunches = false;
        Lives {
            conductor,
            rng: Rng::new(seed ^ 0x6c69_7665),
            now: 0,
            story: String::new(),
        }
    }

    fn pass(&mut self, ns: u64) -> Result<(), String> {
        self.now += ns;
        self.conductor
            .run_until(self.now)
            .map_err(|v| v.to_string())
    }

    fn put(&mut self, step: Step) {
        self.conductor.put(step);
    }

    fn runs(&self, node: usize) -> bool {
        self.conductor.world.nodes[node].launcher.is_some()
    }

    /// Some of these, in any order.
    fn some(&mut self, of: impl Iterator<Item = usize>, most: usize) -> Vec<usize> {
        let mut of: Vec<usize> = of.collect();
        self.rng.shuffle(&mut of);
        of.truncate(most);
        of
    }

    /// The nodes of the next life.
    fn chosen(&mut self, before: &[usize]) -> Vec<usize> {
        match (before.is_empty(), self.rng.below(4)) {
            (false, 0) => before.to_vec(),
            (false, 1) => self.some(before.iter().copied(), MIN.into()),
            (false, 2) => {
                let other = (0..NODES).filter(|k| !before.contains(k));
                let mut nodes = self.some(other, MIN.into());
                let missing = usize::from(MIN) - nodes.len();
                nodes.extend(self.some(before.iter().copied(), missing));
                nodes
            }
            (false, _) => self.some(0..NODES, 4),
            (true, _) => self.some(0..NODES, 3),
        }
    }

    /// Those that run the newest generation, once these nodes have one with as many of them as can have a place.
    fn begins(&mut self, nodes: &[usize], ended: u64) -> Result<Vec<usize>, String> {
        let wanted = nodes.len().min(MAX.into());
        let bound = self.now + BOUND;
        loop {
            let spawns = &self.conductor.world.truth.spawns;
            let new = spawns.iter().filter(|s| s.at > ended);
            let newest = new.clone().map(|s| (s.at, s.start.digest)).max();
            if let Some((_, digest)) = newest {
                let here = new.filter(|s| s.start.digest == digest).map(|s| s.node);
                let here: Vec<usize> = here.collect();
                if here.len() == wanted {
                    return Ok(here);
                }
            }
            if self.now > bound {
                return Err(format!("does not begin on {nodes:?}"));
            }
            self.pass(5 * MS)?;
        }
    }

    fn end(&mut self, how: End, nodes: &[usize], members: &[usize]) -> Result<(), String> {
        let spawns = &self.conductor.world.truth.spawns;
        let digest = spawns.iter().rev().find(|s| s.node == members[0]);
        let digest = digest.map(|s| s.start.digest);
        let one = members[self.rng.index(members.len())];
        match (how, digest) {
            (End::Finish, Some(digest)) => {
                for node in members {
                    let node = *node;
                    self.put(Step::Finish { node, digest });
                }
            }
            (End::Fail, digest) => {
                let (node, code) = (one, 3);
                self.put(Step::WorkerFail { node, code, digest });
            }
            (End::Cancel, _) => self.put(Step::Cancel { node: one }),
            (End::Leave, _) => {
                for node in nodes {
                    self.put(Step::Leave { node: *node });
                    let apart = self.rng.below(2) * self.rng.below(300) * MS;
                    self.pass(apart)?;
                }
            }
            (End::Kill | End::KillAgents, _) => {
                for node in nodes {
                    self.put(Step::LauncherKill { node: *node });
                }
            }
            (End::Finish, None) => return Err("nobody trains".to_owned()),
        }
        if how == End::KillAgents {
            for node in nodes {
                self.put(Step::AgentKill { node: *node });
            }
            self.pass(AWAY)?;
        }
        let bound = self.now + BOUND;
        while nodes.iter().any(|node| self.runs(*node)) {
            if self.now > bound {
                let left: Vec<_> = nodes.iter().filter(|node| self.runs(**node)).collect();
                return Err(format!("{left:?} are left"));
            }
            self.pass(5 * MS)?;
        }
        Ok(())
    }

    fn live(&mut self) -> Result<(), String> {
        const ENDS: [End; 6] = [
            End::Finish,
            End::Fail,
            End::Cancel,
            End::Leave,
            End::Kill,
            End::KillAgents,
        ];
        self.pass(3 * SEC)?;
        let mut before = Vec::new();
        for life in 0..LIVES {
            let nodes = self.chosen(&before);
            let apart = [0, 500 * MS, 2 * SEC][self.rng.index(3)];
            let at = self.now / MS;
            self.story += &format!("\n  {at} ms: life {life} on {nodes:?}, {apart}");
            let ended = self.conductor.world.now;
            for (at, node) in nodes.iter().enumerate() {
                if at > 0 {
                    self.pass(apart)?;
                }
                self.put(Step::LauncherStart { node: *node });
            }
            let asked = self.now + ASKED;
            let members = self.begins(&nodes, ended)?;
            let lasts = [50 * MS, SEC, 3 * SEC][self.rng.index(3)];
            let lasts = asked.saturating_sub(self.now) + lasts;
            self.pass(lasts)?;
            if !nodes.iter().all(|node| self.runs(*node)) {
                return Err("one ended before its life".to_owned());
            }
            let how = ENDS[self.rng.index(ENDS.len())];
            let at = self.now / MS;
            self.story += &format!(", members {members:?}, {at} ms: {how:?}");
            self.end(how, &nodes, &members)?;
            let pause = [0, 50 * MS, SEC][self.rng.index(3)];
            self.pass(pause)?;
            before = nodes;
        }
        Ok(())
    }
}

fn judge(seeds: std::ops::Range<u64>) {
    let mut wrong = Vec::new();
    // One alone, with a trace.
    let only = std::env::var("MUSTER_SIM_LIFE").ok();
    let only: Option<u64> = only.and_then(|s| s.parse().ok());
    for seed in only.map_or(seeds.clone(), |seed| seed..seed + 1) {
        for store in [false, true] {
            let mut lives = Lives::new(seed, store);
            lives.conductor.log = only.is_some().then(Vec::new);
            let Err(why) = lives.live() else { continue };
            let story = &lives.story;
            wrong.push(format!("seed {seed}, store {store}: {why}{story}"));
            let log = lives.conductor.log.take().into_iter().flatten();
            log.filter_map(|(at, step)| trace::line(at, &step))
                .for_each(|line| println!("{line}"));
        }
    }
    let n = wrong.len();
    assert!(wrong.is_empty(), "{n} of {seeds:?}:\n{}", wrong.join("\n"));
}

#[test]
fn every_life_begins_and_ends_soon() {
    judge(0..100);
}

mod long {
    #[test]
    fn every_life_of_thousands_of_jobs_begins_and_ends_soon() {
        super::judge(100..4_000);
    }
}
