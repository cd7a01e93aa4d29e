//! Nodes of a job with a store that come and go as spot capacity does, each with its own agent: all are lost at once
//! again and again, and whenever enough are back, they train soon.

use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::rng::Rng;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup, Times};
use muster_tests::sim::step::Step;

const NODES: usize = 8;
const LEAST: usize = 2;
const EVERY: u64 = 4 * SEC;
const CHANGES: usize = 24;
/// A node that was told to go has so long.
const GRACE: u64 = 15 * SEC;
/// With the second for which nodes that had no part in the last life look at its writer's beacon, where none of its
/// members is there.
const PROMPT: u64 = 1_800 * MS;
/// Ten times what a start takes.
const BOUND: u64 = 3 * SEC;

struct Trace {
    conductor: Conductor,
    rng: Rng,
    now: u64,
    present: Vec<usize>,
    /// They were told to go.
    leaving: Vec<usize>,
    story: String,
}

impl Trace {
    fn new(seed: u64) -> Trace {
        let nodes = (0..NODES).map(|at| NodeSetup {
            agent_at: 100_000 * SEC,
            launcher_at: None,
            ..NodeSetup::quiet(at, 0)
        });
        let spec = JobSpec {
            min_nodes: LEAST as u16,
            max_nodes: NODES as u16,
            max_restarts: 0,
            ..JobSpec::default()
        };
        let mut conductor = Conductor::new(Setup {
            store: true,
            embedded: true,
            times: Times::USUAL,
            heal_at: 10_000 * SEC,
            ..Setup::quiet(seed, nodes.collect(), spec)
        });
        conductor.relaunches = false;
        Trace {
            conductor,
            rng: Rng::new(seed ^ 0x7370_6f74),
            now: 0,
            present: Vec::new(),
            leaving: Vec::new(),
            story: String::new(),
        }
    }

    fn pass(&mut self, ns: u64) -> Result<(), String> {
        for _ in 0..ns / (5 * MS) {
            self.now += 5 * MS;
            let went = self.conductor.run_until(self.now);
            went.map_err(|v| v.to_string())?;
            let nodes = &self.conductor.world.nodes;
            let gone = |node: &usize| nodes[*node].launcher.is_none();
            let (gone, leaving) = self.leaving.iter().partition(|node| gone(node));
            self.leaving = leaving;
            let gone: Vec<usize> = gone;
            for node in gone {
                self.conductor.befall_now(Fault::NodeStop { node });
            }
        }
        Ok(())
    }

    fn lose(&mut self, node: usize, killed: bool) {
        if killed {
            return self.conductor.befall_now(Fault::NodeStop { node });
        }
        let grace_ms = (GRACE / MS) as u32;
        self.conductor.put(Step::Drain { node, grace_ms });
        self.leaving.push(node);
    }

    fn come(&mut self, node: usize) {
        let new_disk = false;
        self.conductor
            .befall_now(Fault::NodeStart { node, new_disk });
        self.conductor.befall_now(Fault::LateJoin { node });
    }

    /// To so many nodes; whether the i-th that is lost is killed.
    fn set(&mut self, level: usize, killed: impl Fn(usize) -> bool) {
        let mut there = self.present.clone();
        self.rng.shuffle(&mut there);
        let lost = there.split_off(level.min(there.len()));
        for (at, node) in lost.iter().enumerate() {
            self.lose(*node, killed(at));
        }
        let leaving = self.leaving.clone();
        let free = |n: &usize| !there.contains(n) && !lost.contains(n) && !leaving.contains(n);
        let mut free: Vec<usize> = (0..NODES).filter(free).collect();
        self.rng.shuffle(&mut free);
        free.truncate(level.saturating_sub(there.len()));
        for node in &free {
            self.come(*node);
        }
        self.story += &format!("\n  {} ms: lost {lost:?}, come {free:?}", self.now / MS);
        there.extend(free);
        self.present = there;
    }

    /// How long after enough nodes are back, each time, until some train (nanoseconds).
    fn replay(&mut self) -> Result<Vec<u64>, String> {
        let mut after = Vec::new();
        for change in 0..CHANGES {
            let gone = change % 2 == 1;
            let way = change / 2 % 4;
            let level = match gone {
                true => 0,
                false => self.rng.between(LEAST as u64, NODES as u64 + 1) as usize,
            };
            // In turn: all are told, twice, all are killed, half of each.
            self.set(level, |at| match way {
                0 | 1 => false,
                2 => true,
                _ => at % 2 == 0,
            });
            let back = self.now;
            self.pass(EVERY)?;
            if gone {
                continue;
            }
            let spawns = &self.conductor.world.truth.spawns;
            let first = spawns.iter().map(|s| s.at).find(|at| *at > back);
            let took = first.map_or(u64::MAX, |at| at - back);
            if took > BOUND {
                return Err(format!("none trains by {} ms{}", self.now / MS, self.story));
            }
            after.push(took);
        }
        Ok(after)
    }
}

/// A member that was dropped, and is back when all that knew for whom a start waits are gone, waits for those that were
/// dropped with it, until they say that they have ended: few starts do.
#[test]
fn nodes_that_are_all_lost_and_come_back_train_soon() {
    let after = (0..100).flat_map(|seed| {
        let after = Trace::new(seed).replay();
        after.unwrap_or_else(|why| panic!("seed {seed}: {why}"))
    });
    let after: Vec<u64> = after.collect();
    let late: Vec<u64> = after.iter().copied().filter(|ns| *ns > PROMPT).collect();
    assert!(
        late.len() * 200 <= after.len(),
        "{} of {}: {late:?}",
        late.len(),
        after.len()
    );
}
