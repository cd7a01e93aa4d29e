//! The next life of a job begins on nodes that had no part in the last one, which a person has just ended, while workers
//! of that still run: the agent of one of its members is stopped.

use muster_protocol::agent::Flaws;
use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::invariants::Violation;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup};

const NODES: usize = 5;
const STOPPED: u64 = 15 * SEC;
const ORDERED: u64 = STOPPED + 4 * SEC;
const FOR: u64 = 12 * SEC;
/// When the next life has begun at the latest.
const BEGUN: u64 = STOPPED + FOR + 4 * SEC;

/// The nodes that train, and those on which the next life is started. The lowest agent proposes a life.
const PLACES: [([usize; 2], [usize; 2]); 3] =
    [([0, 1], [3, 4]), ([3, 4], [0, 1]), ([1, 4], [0, 3])];

/// One start of the next life.
#[derive(Clone, Copy, Debug)]
struct Case {
    seed: u64,
    store: bool,
    members: [usize; 2],
    new: [usize; 2],
    /// So long after the order.
    again: u64,
}

impl Case {
    /// Two nodes train, and the agent of the first is stopped. Workers of the second take 300 ms to end.
    fn setup(&self, flaws: Flaws) -> Setup {
        let [node, other] = self.members;
        let mut faults = vec![
            (10 * SEC, Fault::Stubborn { node: other }),
            (STOPPED, Fault::AgentPause { node, for_ns: FOR }),
            (ORDERED, Fault::OrderCancel { node: other }),
        ];
        for node in self.new {
            faults.push((ORDERED + self.again, Fault::LateJoin { node }));
        }
        let spec = JobSpec {
            min_nodes: 2,
            max_nodes: 2,
            stop_grace_ms: 300,
            ..JobSpec::default()
        };
        let node = |at: usize| NodeSetup {
            launcher_at: self.members.contains(&at).then_some(SEC),
            ..NodeSetup::quiet(at, 0)
        };
        Setup {
            store: self.store,
            faults,
            flaws,
            heal_at: 60 * SEC,
            ..Setup::quiet(self.seed, (0..NODES).map(node).collect(), spec)
        }
    }

    fn begun(&self, conductor: &Conductor) -> bool {
        let spawns = &conductor.world.truth.spawns;
        let begun = |node: &usize| spawns.iter().any(|spawn| spawn.node == *node);
        self.new.iter().any(begun)
    }

    /// Whether the next life begins while a worker of the last one runs; it begins soon after those have ended.
    fn begins_beside(&self, flaws: Flaws) -> bool {
        let mut conductor = Conductor::new(self.setup(flaws));
        match conductor.run_until(STOPPED + FOR) {
            Err(Violation::Overlap(_)) => return true,
            result => assert_eq!(result, Ok(()), "{self:?}"),
        }
        let launcher = conductor.world.nodes[self.members[0]].launcher.as_ref();
        let run = launcher.and_then(|l| l.alive());
        let beside = self.begun(&conductor) && run.is_some_and(|run| run.killed.is_none());
        assert_eq!(conductor.run_until(BEGUN), Ok(()), "{self:?}");
        assert!(self.begun(&conductor), "{self:?}: it does not begin");
        beside
    }
}

#[test]
fn a_life_does_not_begin_beside_workers_of_the_one_that_was_ended() {
    let waits_not = Flaws {
        skip_r16: true,
        ..Flaws::default()
    };
    let mut shown = [false; 2];
    let mut wrong = Vec::new();
    for store in [false, true] {
        for (members, new) in PLACES {
            for members in [members, [members[1], members[0]]] {
                for i in 0..60 {
                    let case = Case {
                        seed: i % 3,
                        store,
                        members,
                        new,
                        again: i * 12 * MS,
                    };
                    if case.begins_beside(Flaws::default()) {
                        wrong.push(case);
                    }
                    if case.again < 100 * MS {
                        shown[usize::from(store)] |= case.begins_beside(waits_not);
                    }
                }
            }
        }
    }
    let (count, first) = (wrong.len(), wrong.first());
    assert_eq!(count, 0, "{first:?}");
    assert_eq!(
        shown, [true; 2],
        "a start that waits for nobody is not seen"
    );
}
