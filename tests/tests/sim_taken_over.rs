//! A job with a store all of whose nodes are lost without a word, and that others start again: how long they wait
//! depends on what can be known of the dead.

use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup, Times};

/// The first two nodes train, the other two come after them.
const NODES: usize = 4;
const LOST: u64 = 20 * SEC;
const AGAIN: u64 = 22 * SEC;
/// Time that hosts that live allow, with the usual `suspect_after` of 2 s.
const AT_ONCE: u64 = 2 * SEC;
/// All paths are whole again.
const HEALED: u64 = AGAIN + 20 * SEC;

/// How the first two are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lost {
    /// Launchers and agents are killed, their hosts live and refuse.
    Killed,
    /// The hosts lose power, and say nothing.
    Dark,
    /// They train on. The others cannot reach them: hosts of another network have their addresses, and refuse.
    Elsewhere,
    /// All are killed. The agents of the first ones have lost their state, and come back as other nodes if at all; the
    /// others are back at once.
    Replaced(usize),
    /// The first is killed, and its agent back at once; to it the second has the address of a host that refuses, and
    /// trains on.
    OneElsewhere,
}

fn setup(seed: u64, lost: Lost, min_nodes: u16) -> Setup {
    let spec = JobSpec {
        min_nodes,
        max_nodes: 3,
        ..JobSpec::default()
    };
    let node = |at: usize| match at {
        0 | 1 => NodeSetup::quiet(at, 0),
        _ => NodeSetup {
            agent_at: AGAIN,
            launcher_at: None,
            ..NodeSetup::quiet(at, 0)
        },
    };
    let mut faults = Vec::new();
    match lost {
        Lost::Killed => faults.extend((0..2).map(|node| (LOST, Fault::NodeStop { node }))),
        Lost::Dark => faults.extend((0..2).map(|node| {
            let fault = Fault::NodeCrash {
                node,
                down: 1_000 * SEC,
                new_disk: false,
                relaunch: false,
            };
            (LOST, fault)
        })),
        Lost::Replaced(first) => faults.extend((0..2).map(|node| {
            let back = Fault::NodeCrash {
                node,
                down: 500 * MS,
                new_disk: false,
                relaunch: false,
            };
            let replaced = node < first;
            let fault = if replaced {
                Fault::NodeStop { node }
            } else {
                back
            };
            (LOST, fault)
        })),
        Lost::OneElsewhere => {
            let back = Fault::NodeCrash {
                node: 0,
                down: 500 * MS,
                new_disk: false,
                relaunch: false,
            };
            let cut = Fault::CutBoth {
                a: 0,
                b: 1,
                for_ns: 1_000 * SEC,
            };
            faults.extend([(LOST, back), (LOST, cut)]);
        }
        Lost::Elsewhere => {
            let fault = Fault::Partition {
                side: 0b11,
                for_ns: 1_000 * SEC,
            };
            faults.push((0, fault));
        }
    }
    faults.extend((2..NODES).map(|node| (AGAIN + MS, Fault::LateJoin { node })));
    Setup {
        store: true,
        commit_every: SEC,
        namesakes: matches!(lost, Lost::Elsewhere | Lost::OneElsewhere),
        times: Times {
            agent_grace: 10 * SEC,
            orphan_after: 12 * SEC,
            ..Times::USUAL
        },
        faults,
        heal_at: HEALED,
        ..Setup::quiet(seed, (0..NODES).map(node).collect(), spec)
    }
}

/// When each of the nodes that come later begins to train.
fn starts(seed: u64, lost: Lost, min_nodes: u16) -> Vec<Option<u64>> {
    starts_in(setup(seed, lost, min_nodes), lost)
}

fn starts_in(setup: Setup, lost: Lost) -> Vec<Option<u64>> {
    let seed = setup.seed;
    let mut conductor = Conductor::new(setup);
    conductor.relaunches = false;
    let ran = conductor.run();
    let elsewhere = lost == Lost::Elsewhere;
    // Of those that are not to train nobody may wait for ever.
    assert!(ran.is_ok() || elsewhere, "{lost:?}, seed {seed}: {ran:?}");
    let spawns = &conductor.world.truth.spawns;
    let of = |node| {
        spawns
            .iter()
            .find(|s| s.node == node && (AGAIN..HEALED).contains(&s.at))
    };
    (2..NODES).map(|node| of(node).map(|s| s.at)).collect()
}

#[test]
fn where_hosts_refuse_for_the_dead_others_go_on_at_once() {
    for seed in 0..40 {
        for min_nodes in 1..=2 {
            let starts = starts(seed, Lost::Killed, min_nodes);
            let late = |at: &Option<u64>| at.is_none_or(|at| at >= AGAIN + AT_ONCE);
            assert!(!starts.iter().any(late), "seed {seed}: {starts:?}");
        }
    }
}

/// Nothing was saved in the life that is lost, and another had ended before: that it had begun to train, for which it
/// had waited for everybody else, its leader has written to the beacon.
#[test]
fn others_go_on_at_once_with_a_later_life_that_has_saved_nothing() {
    for seed in 0..20 {
        let mut setup = setup(seed, Lost::Killed, 2);
        setup.commit_every = 0;
        setup.faults.push((6 * SEC, Fault::Finish));
        let again = (0..2).map(|node| (8 * SEC, Fault::LateJoin { node }));
        setup.faults.extend(again);
        setup.faults.sort_by_key(|(at, _)| *at);
        let starts = starts_in(setup, Lost::Killed);
        let late = |at: &Option<u64>| at.is_none_or(|at| at >= AGAIN + AT_ONCE);
        assert!(!starts.iter().any(late), "seed {seed}: {starts:?}");
    }
}

/// Agents that are back say that their launchers are gone; where the others' launchers were nothing answers.
#[test]
fn where_some_agents_are_back_and_some_replaced_others_go_on_at_once() {
    for seed in 0..20 {
        for replaced in 0..=2 {
            for min_nodes in 1..=2 {
                let starts = starts(seed, Lost::Replaced(replaced), min_nodes);
                // The word of those that are back takes its time, too (the most of 120 runs: 2.1 s).
                let by = AGAIN + AT_ONCE + SEC / 2;
                let late = |at: &Option<u64>| at.is_none_or(|at| at >= by);
                let which = (seed, replaced, min_nodes);
                assert!(!starts.iter().any(late), "{which:?}: {starts:?}");
            }
        }
    }
}

/// The agent of the first takes the second for dead; that of the second knows better. No two groups train (I11).
#[test]
fn a_member_that_trains_is_not_taken_over_on_anothers_word() {
    for seed in 0..40 {
        for came_after in [100 * MS, 400 * MS, 900 * MS, 2 * SEC] {
            let mut setup = setup(seed, Lost::OneElsewhere, 1);
            let back = LOST + 500 * MS;
            for (node, n) in setup.nodes.iter_mut().enumerate().skip(2) {
                n.agent_at = SEC * node as u64;
            }
            for (at, fault) in &mut setup.faults {
                if matches!(fault, Fault::LateJoin { .. }) {
                    *at = back + came_after;
                }
            }
            setup.faults.sort_by_key(|(at, _)| *at);
            let mut conductor = Conductor::new(setup);
            conductor.relaunches = false;
            let ran = conductor.run();
            assert!(ran.is_ok(), "seed {seed}, {came_after}: {ran:?}");
        }
    }
}

#[test]
fn where_hosts_say_nothing_others_wait_until_nobody_can_train() {
    for seed in 0..10 {
        let starts = starts(seed, Lost::Dark, 2);
        let times = AGAIN + 10 * SEC..AGAIN + 18 * SEC;
        let right = |at: &Option<u64>| at.is_some_and(|at| times.contains(&at));
        assert!(starts.iter().all(right), "seed {seed}: {starts:?}");
    }
}

#[test]
fn a_group_that_trains_in_another_network_is_not_taken_over() {
    for seed in 0..10 {
        assert_eq!(starts(seed, Lost::Elsewhere, 2), [None, None], "{seed}");
    }
}

/// The beacon's word comes late, or not at all, to those that look whether the group is dead.
#[test]
fn a_group_is_not_taken_over_because_the_store_is_slow_or_fails() {
    let for_ns = HEALED;
    let faults = [
        Fault::StoreSlow {
            by: 700 * MS,
            for_ns,
        },
        Fault::StoreReadsFail {
            permille: 400,
            for_ns,
        },
    ];
    for fault in faults {
        for seed in 0..10 {
            let mut setup = setup(seed, Lost::Elsewhere, 2);
            setup.faults.push((10 * SEC, fault.clone()));
            let starts = starts_in(setup, Lost::Elsewhere);
            assert_eq!(starts, [None, None], "{fault:?}, seed {seed}");
        }
    }
}
