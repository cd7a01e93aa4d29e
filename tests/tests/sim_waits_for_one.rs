//! A job that a person stops while one launcher stands still, and starts again at once: the next life waits for the
//! workers of that one, and takes it in where it comes back right after they have ended.

use std::collections::BTreeSet;

use muster_protocol::Digest;
use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup, Times};
use muster_tests::sim::step::Step;

const NODES: usize = 3;
const STOPS: u64 = 5 * SEC;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Still {
    Launcher,
    Agent,
    Both,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    seed: u64,
    stopped: usize,
    what: Still,
    store: bool,
    /// How long its launcher stands still, and from its end to its next start.
    stands: u64,
    pause: u64,
}

impl Case {
    /// Whether the others waited for it.
    fn next_life(self) -> Result<bool, String> {
        let nodes = (0..NODES).map(|at| NodeSetup::quiet(at, 0)).collect();
        let spec = JobSpec {
            min_nodes: 2,
            max_nodes: NODES as u16,
            ..JobSpec::default()
        };
        let (node, for_ns) = (self.stopped, self.stands);
        let agent = (self.what != Still::Launcher).then_some(Fault::AgentPause { node, for_ns });
        let launcher = Fault::LauncherPause { node, for_ns };
        let launcher = (self.what != Still::Agent).then_some(launcher);
        let faults = agent.into_iter().chain(launcher);
        let mut conductor = Conductor::new(Setup {
            faults: faults.map(|fault| (STOPS, fault)).collect(),
            store: self.store,
            times: Times::USUAL,
            heal_at: STOPS + 60 * SEC,
            ..Setup::quiet(self.seed, nodes, spec)
        });
        conductor.relaunches = false;
        let run = |conductor: &mut Conductor, until| {
            let went = conductor.run_until(until);
            went.map_err(|v| v.to_string())
        };
        run(&mut conductor, STOPS + 200 * MS)?;
        let node = (self.stopped + 1) % NODES;
        conductor.put(Step::Cancel { node });
        let mut now = STOPS + 200 * MS;
        let goes_on = STOPS + self.stands;
        let mut starts = [None; NODES];
        while !starts.iter().all(|at| at.is_some_and(|at| at <= now)) {
            now += 5 * MS;
            run(&mut conductor, now)?;
            for (node, at) in starts.iter_mut().enumerate() {
                if conductor.world.nodes[node].launcher.is_none() && at.is_none() {
                    *at = Some(now + self.pause);
                }
                if *at == Some(now) {
                    conductor.put(Step::LauncherStart { node });
                }
            }
            if now > goes_on + 20 * SEC {
                return Err(format!("not all have ended: {starts:?}"));
            }
        }
        run(&mut conductor, u64::MAX)?;
        let spawns = conductor.world.truth.spawns.iter();
        let of = spawns.filter(|s| s.at > STOPS + 200 * MS);
        let made: BTreeSet<Digest> = of.clone().map(|s| s.start.digest).collect();
        let nodes: BTreeSet<usize> = of.clone().map(|s| s.node).collect();
        if of.clone().any(|s| s.at < goes_on) {
            // It stood still for longer than its workers might go on.
            return Ok(false);
        }
        if made.len() != 1 || nodes.len() != NODES {
            let of: Vec<_> = of.map(|s| (s.node, s.at / MS, s.start.digest)).collect();
            return Err(format!("goes on at {}, {starts:?}: {of:?}", goes_on / MS));
        }
        Ok(true)
    }
}

#[test]
fn one_that_comes_back_is_in_the_first_generation() {
    let (mut wrong, mut all) = (Vec::new(), 0);
    for store in [false, true] {
        for stopped in 0..NODES {
            for what in [Still::Launcher, Still::Agent, Still::Both] {
                for (stands, pause) in [(SEC, 20), (3 * SEC, 100), (8 * SEC, 20), (15 * SEC, 100)] {
                    for seed in 1..4 {
                        let case = Case {
                            seed,
                            stopped,
                            what,
                            store,
                            stands,
                            pause: pause * MS,
                        };
                        match case.next_life() {
                            Ok(waited) => all += u32::from(waited),
                            Err(why) => wrong.push(format!("{case:?}: {why}")),
                        }
                    }
                }
            }
        }
    }
    let n = wrong.len();
    assert!(
        wrong.is_empty(),
        "{n} wrong, {all} right:\n{}",
        wrong.join("\n")
    );
    assert!(all > 100, "{all}");
}
