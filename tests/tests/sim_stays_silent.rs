//! An agent falls silent, and before that is noticed another node is lost and a spare steps in: nobody starts beside
//! workers that were never told to end.

use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup, Times, Torn};

const NODES: usize = 4;
const AT: u64 = 6 * SEC;

#[derive(Clone, Copy, Debug)]
struct Case {
    seed: u64,
    store: bool,
    live: bool,
    /// The ranks of the two, and how long after the first the second is lost.
    silent: u32,
    lost: u32,
    later: u64,
    /// Whether the agent crashes, or is stopped, and for how long.
    crashes: bool,
    silence: u64,
}

impl Case {
    fn setup(self, faults: Vec<(u64, Fault)>) -> Setup {
        let spec = JobSpec {
            min_nodes: 2,
            max_nodes: 3,
            stop_grace_ms: 500,
            ..JobSpec::default()
        };
        let nodes = (0..NODES).map(|at| NodeSetup::quiet(at, 0)).collect();
        Setup {
            store: self.store,
            live: self.live,
            times: Times::USUAL,
            heal_at: AT + 60 * SEC,
            faults,
            ..Setup::quiet(self.seed, nodes, spec)
        }
    }

    fn judge(self) -> Result<(), String> {
        let mut first = Conductor::new(self.setup(Vec::new()));
        first.run_until(AT).map_err(|v| v.to_string())?;
        let of = |rank| {
            let mut spawns = first.world.truth.spawns.iter();
            let spawn = spawns.find(|s| s.start.node_rank == rank);
            spawn.map_or(0, |s| s.node)
        };
        let (node, for_ns) = (of(self.silent), self.silence);
        let falls = match self.crashes {
            false => Fault::AgentPause { node, for_ns },
            true => Fault::AgentCrash {
                node,
                effects: 0,
                torn: Torn::Between,
                down: for_ns,
                new_disk: false,
            },
        };
        let crash = Fault::LauncherCrash {
            node: of(self.lost),
            relaunch_after: None,
        };
        let faults = vec![(AT, falls), (AT + self.later * MS, crash)];
        let mut conductor = Conductor::new(self.setup(faults));
        conductor.relaunches = false;
        conductor.run().map_err(|v| v.to_string())
    }
}

#[test]
fn nobody_starts_beside_a_member_that_stays_and_says_nothing() {
    let (mut wrong, mut all) = (Vec::new(), 0);
    for (store, live) in [(false, false), (true, false), (false, true), (true, true)] {
        for (silent, lost) in [(2, 1), (1, 2), (2, 0), (1, 0), (0, 1)] {
            for later in [100, 500, 1_000, 1_500, 2_500] {
                for (crashes, silence) in
                    [(false, 40), (true, 40), (false, 5), (false, 15), (true, 12)]
                {
                    let case = Case {
                        seed: u64::from(silent) + 1,
                        store,
                        live,
                        silent,
                        lost,
                        later,
                        crashes,
                        silence: silence * SEC,
                    };
                    all += 1;
                    if let Err(why) = case.judge() {
                        wrong.push(format!("{case:?}: {why}"));
                    }
                }
            }
        }
    }
    let n = wrong.len();
    assert!(wrong.is_empty(), "{n} of {all}:\n{}", wrong.join("\n"));
}
