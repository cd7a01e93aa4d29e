//! The next life of a job begins on nodes that had no part in the last one, which a person has just ended, while workers
//! of that still run: the agent of one of its members is stopped.

use std::fmt::Debug;

use itertools::iproduct;
use muster_protocol::agent::Flaws;
use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::invariants::Violation;
use muster_tests::sim::rng::Rng;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup, Torn};

const NODES: usize = 5;
const STOPPED: u64 = 15 * SEC;
const ORDERED: u64 = STOPPED + 4 * SEC;
const FOR: u64 = 12 * SEC;
/// When the next life has begun at the latest.
const BEGUN: u64 = STOPPED + FOR + 4 * SEC;

/// The nodes that train, and those on which the next life is started. The lowest agent proposes a life.
const PLACES: [([usize; 2], [usize; 2]); 3] =
    [([0, 1], [3, 4]), ([3, 4], [0, 1]), ([1, 4], [0, 3])];

/// The agent of a node is killed, for so long.
fn killed(node: usize, down: u64) -> Fault {
    Fault::AgentCrash {
        node,
        effects: 0,
        torn: Torn::Between,
        down,
        new_disk: false,
    }
}

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

/// In none of the cases does the next life begin beside workers of the last one. A start that waits for nobody would be
/// seen in those that are `early`, with a store and without.
#[track_caller]
fn none_begins_beside<C: Debug>(
    cases: impl Iterator<Item = C>,
    has_store: fn(&C) -> bool,
    early: fn(&C) -> bool,
    begins_beside: fn(&C, Flaws) -> bool,
) {
    let waits_not = Flaws {
        skip_r16: true,
        ..Flaws::default()
    };
    let mut shown = [false; 2];
    let mut wrong = Vec::new();
    for case in cases {
        if early(&case) {
            shown[usize::from(has_store(&case))] |= begins_beside(&case, waits_not);
        }
        if begins_beside(&case, Flaws::default()) {
            wrong.push(case);
        }
    }
    assert_eq!(wrong.len(), 0, "{:?}", wrong.first());
    assert_eq!(
        shown, [true; 2],
        "a start that waits for nobody is not seen"
    );
}

#[test]
fn a_life_does_not_begin_beside_workers_of_the_one_that_was_ended() {
    let cases = iproduct!([false, true], PLACES, [false, true], 0..60);
    let cases = cases.map(|(store, ([first, second], new), turned, i)| Case {
        seed: i % 3,
        store,
        members: match turned {
            false => [first, second],
            true => [second, first],
        },
        new,
        again: i * 12 * MS,
    });
    none_begins_beside(
        cases,
        |c| c.store,
        |c| c.again < 100 * MS,
        Case::begins_beside,
    );
}

/// One start of the next life by nodes that had no part in the last one, once those that ended it have gone, too.
#[derive(Clone, Copy, Debug)]
struct Gone {
    seed: u64,
    store: bool,
    members: [usize; 3],
    /// How many of the members lose their agents after the order, the first ones.
    gone: usize,
    new: [usize; 2],
    /// The agent of the first of those starts only once they have gone.
    comes: bool,
    /// The order is so long after the kill.
    ordered: u64,
    /// So long after that.
    again: u64,
}

impl Gone {
    const NODES: usize = 6;
    /// When the agent of the last member is killed; its launcher lives, and its workers go on.
    const KILLED: u64 = 15 * SEC;
    /// When the next life has begun at the latest: the workers end with their agent's grace.
    const BEGUN: u64 = Self::KILLED + 45 * SEC;

    /// When the others lose their agents.
    fn left(&self) -> u64 {
        Self::KILLED + self.ordered + 4 * SEC
    }

    fn setup(&self, flaws: Flaws) -> Setup {
        let crash = |node| killed(node, 300 * SEC);
        let [first, second, killed] = self.members;
        let comes = self.left() + 200 * MS;
        let mut faults = vec![
            (Self::KILLED, crash(killed)),
            (
                Self::KILLED + self.ordered,
                Fault::OrderCancel { node: second },
            ),
        ];
        for node in [first, second].into_iter().take(self.gone) {
            faults.push((self.left(), crash(node)));
        }
        for node in self.new {
            let at = comes + 300 * MS + self.again;
            faults.push((at, Fault::LateJoin { node }));
        }
        let spec = JobSpec {
            min_nodes: 2,
            max_nodes: 3,
            stop_grace_ms: 300,
            ..JobSpec::default()
        };
        let node = |at: usize| {
            let late = self.comes && at == self.new[0];
            NodeSetup {
                launcher_at: self.members.contains(&at).then_some(SEC),
                ..NodeSetup::quiet(at, if late { comes } else { 0 })
            }
        };
        Setup {
            store: self.store,
            faults,
            flaws,
            heal_at: 90 * SEC,
            ..Setup::quiet(self.seed, (0..Self::NODES).map(node).collect(), spec)
        }
    }

    /// Whether the next life begins while a worker of the last one runs; it begins soon after that has ended.
    fn begins_beside(&self, flaws: Flaws) -> bool {
        let mut conductor = Conductor::new(self.setup(flaws));
        conductor.relaunches = false;
        assert_eq!(conductor.run_until(self.left()), Ok(()), "{self:?}");
        let trains = |conductor: &Conductor, node: usize| {
            let launcher = conductor.world.nodes[node].launcher.as_ref();
            launcher.is_some_and(|l| l.alive().is_some())
        };
        let [first, second, killed] = self.members;
        let left = [first, second, killed].map(|node| trains(&conductor, node));
        assert_eq!(
            left,
            [false, false, true],
            "{self:?}: who trains after the order"
        );
        match conductor.run_until(Self::BEGUN) {
            Err(Violation::Overlap(_)) => return true,
            result => assert_eq!(result, Ok(()), "{self:?}"),
        }
        let spawns = &conductor.world.truth.spawns;
        let begun = |node: &usize| spawns.iter().any(|spawn| spawn.node == *node);
        assert!(self.new.iter().all(begun), "{self:?}: it does not begin");
        false
    }
}

#[test]
fn a_life_does_not_begin_beside_workers_though_those_that_ended_it_are_gone() {
    let places = [
        ([0, 1, 2], [3, 4]),
        ([3, 4, 5], [0, 1]),
        ([4, 0, 2], [5, 1]),
    ];
    let cases = iproduct!([false, true], places, [1, 2], [false, true], 0..12);
    let cases = cases.map(|(store, (members, new), gone, comes, i)| Gone {
        seed: i % 2,
        store,
        members,
        gone,
        new,
        comes,
        ordered: [200 * MS, SEC, 4 * SEC][i as usize % 3],
        again: i * 30 * MS,
    });
    none_begins_beside(
        cases,
        |c| c.store,
        |c| c.again < 90 * MS,
        Gone::begins_beside,
    );
}

/// Lives of a job on nodes that change from each to the next, so that few agents know of all ends. The last one ends while
/// the agent of a member is killed, all others that took part in it go, and nodes that had no part in it start the next.
fn after_other_lives(seed: u64) -> Setup {
    const NODES: usize = 7;
    let mut rng = Rng::new(seed);
    let mut faults = Vec::new();
    let mut at = SEC;
    let lives = rng.between(2, 4);
    for life in 1..=lives {
        let mut nodes: Vec<usize> = (0..NODES).collect();
        rng.shuffle(&mut nodes);
        let (members, others) = nodes.split_at(rng.between(2, 4) as usize);
        for (i, node) in members.iter().enumerate() {
            let joins = if i >= 2 { 5 * SEC } else { 0 };
            faults.push((at + joins, Fault::LateJoin { node: *node }));
        }
        let (first, away) = (members[0], members[members.len() - 1]);
        let ends = at + 14 * SEC;
        faults.push((ends, Fault::OrderCancel { node: first }));
        if life < lives {
            // Those that end it have to wait for one, or for nobody.
            let (node, for_ns) = (away, 6 * SEC);
            let stops = rng
                .chance(500)
                .then_some(Fault::AgentPause { node, for_ns });
            faults.extend(stops.map(|stops| (ends - rng.between(MS, 4 * SEC), stops)));
            at += 40 * SEC;
            continue;
        }
        let crash = |node| killed(node, 300 * SEC);
        let fault = ends - rng.between(MS, 4 * SEC);
        faults.push((fault, crash(away)));
        let left = ends + 4 * SEC;
        for node in &members[..members.len() - 1] {
            faults.push((left, crash(*node)));
        }
        for node in &others[..2] {
            let again = left + rng.between(MS, SEC);
            faults.push((again, Fault::LateJoin { node: *node }));
        }
        at = fault;
    }
    faults.sort_by_key(|(at, _)| *at);
    let spec = JobSpec {
        min_nodes: 2,
        max_nodes: 4,
        stop_grace_ms: 300,
        ..JobSpec::default()
    };
    let node = |at: usize| NodeSetup {
        launcher_at: None,
        ..NodeSetup::quiet(at, 0)
    };
    Setup {
        store: rng.chance(500),
        faults,
        heal_at: at + 60 * SEC,
        ..Setup::quiet(seed, (0..NODES).map(node).collect(), spec)
    }
}

#[test]
fn a_life_does_not_begin_beside_workers_whatever_lives_there_were_before() {
    let mut wrong = Vec::new();
    for seed in 0..400 {
        let setup = after_other_lives(seed);
        // The workers end with their agent's grace.
        let until = setup.heal_at - 15 * SEC;
        let last = setup.faults.last().map_or(0, |(at, _)| *at);
        let mut conductor = Conductor::new(setup);
        conductor.relaunches = false;
        let went = conductor.run_until(until);
        let spawns = &conductor.world.truth.spawns;
        let begun = spawns.iter().any(|spawn| spawn.at > last);
        if went != Ok(()) || !begun {
            wrong.push((seed, went, begun));
        }
    }
    let (count, first) = (wrong.len(), wrong.first());
    assert_eq!(count, 0, "{first:?}");
}

/// The agent of one of the nodes that start the next life was started again meanwhile, or stood still.
#[test]
fn a_life_begins_soon_though_agents_of_its_nodes_were_away() {
    let mut wrong = Vec::new();
    let cases = iproduct!(
        0..24,
        PLACES,
        [false, true],
        [(true, false), (false, true), (true, true)]
    );
    for (seed, ([first, second], new), turned, (crashes, pauses)) in cases {
        let case = Case {
            seed,
            store: seed % 2 == 0,
            members: match turned {
                false => [first, second],
                true => [second, first],
            },
            new,
            again: 5 * SEC + seed % 10 * 300 * MS,
        };
        let for_ns = 8 * SEC;
        let pause = Fault::AgentPause {
            node: new[1],
            for_ns,
        };
        let crash = crashes.then(|| killed(new[0], for_ns));
        let away = crash.into_iter().chain(pauses.then_some(pause));
        let mut setup = case.setup(Flaws::default());
        let at = STOPPED - SEC + seed % 7 * 200 * MS;
        setup.faults.extend(away.map(|f| (at, f)));
        setup.faults.sort_by_key(|(at, _)| *at);
        let mut conductor = Conductor::new(setup);
        conductor.relaunches = false;
        let went = conductor.run_until(BEGUN + 2 * SEC);
        if went != Ok(()) || !case.begun(&conductor) {
            wrong.push((case, went));
        }
    }
    let (count, first) = (wrong.len(), wrong.first());
    assert_eq!(count, 0, "{first:?}");
}
