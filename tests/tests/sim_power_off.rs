//! A job without a store whose members all lose power, and say nothing more: others start it again. Of these some may
//! know of the life that is lost, and have no part in it.

use itertools::iproduct;
use muster_protocol::record::Record;
use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup, Times};
use muster_tests::sim::truth::Spawn;

const NODES: usize = 6;
/// The launchers of the first life are killed.
const KILLED: u64 = 8 * SEC;
/// The power of the second one's nodes is off.
const OFF: u64 = 16 * SEC;
const AGAIN: u64 = 18 * SEC;
const HEALED: u64 = AGAIN + 60 * SEC;
/// Until a node that only knows of the life that is lost begins anew: the most of 60 runs was 17 s.
const BOUND: u64 = 20 * SEC;

/// Two nodes train; then these two, or one of them, and more; all of these lose power; two others start.
fn starts(seed: u64, first: [usize; 2], again: [usize; 2], min_nodes: u16) -> Vec<Option<u64>> {
    let second = [1, 2, 3];
    let spec = JobSpec {
        min_nodes,
        max_nodes: 3,
        ..JobSpec::default()
    };
    let node = |at: usize| NodeSetup {
        launcher_at: first.contains(&at).then_some(200 * MS),
        ..NodeSetup::quiet(at, 0)
    };
    let mut faults: Vec<(u64, Fault)> = Vec::new();
    faults.extend(first.map(|node| {
        let fault = Fault::LauncherCrash {
            node,
            relaunch_after: None,
        };
        (KILLED, fault)
    }));
    faults.extend(second.map(|node| (KILLED + SEC, Fault::LateJoin { node })));
    faults.extend(second.map(|node| {
        let fault = Fault::NodeCrash {
            node,
            down: 1_000 * SEC,
            new_disk: false,
            relaunch: false,
        };
        (OFF, fault)
    }));
    faults.extend(again.map(|node| (AGAIN, Fault::LateJoin { node })));
    faults.sort_by_key(|(at, _)| *at);
    let setup = Setup {
        times: Times::USUAL,
        faults,
        heal_at: HEALED,
        ..Setup::quiet(seed, (0..NODES).map(node).collect(), spec)
    };
    let mut conductor = Conductor::new(setup);
    conductor.relaunches = false;
    let ran = conductor.run();
    let spawns = &conductor.world.truth.spawns;
    let trained = |node| spawns.iter().any(|s| s.node == node && s.at < OFF);
    assert!(
        second.iter().all(|n| trained(*n)),
        "seed {seed}: no second life"
    );
    let begun = |node| spawns.iter().find(|s| s.node == node && s.at >= AGAIN);
    assert!(ran.is_ok(), "seed {seed}: {ran:?}");
    again.map(|node| begun(node).map(|s| s.at)).to_vec()
}

#[test]
fn nodes_without_a_part_in_what_is_lost_begin_anew() {
    for seed in 0..6 {
        for (first, again) in [
            ([1, 2], [4, 5]),
            ([0, 2], [4, 5]),
            ([0, 2], [0, 4]),
            ([3, 0], [5, 0]),
            ([1, 2], [0, 4]),
        ] {
            for min_nodes in 1..=2 {
                let starts = starts(seed, first, again, min_nodes);
                let right = |at: &Option<u64>| at.is_some_and(|at| at < AGAIN + BOUND);
                let case = (seed, first, again, min_nodes);
                assert!(starts.iter().all(right), "{case:?}: {starts:?}");
            }
        }
    }
}

/// One node trains, another asks to be let in, and the first loses power about when it takes it in.
const JOINS: u64 = 5 * SEC;
const BACK: u64 = 30 * SEC;
/// Until it trains with the others after that.
const TAKEN_IN: u64 = 20 * SEC;

fn loses_power_as_it_lets_another_in(seed: u64, off: u64) -> Conductor {
    let spec = JobSpec {
        min_nodes: 1,
        max_nodes: 3,
        ..JobSpec::default()
    };
    let node = |at: usize| NodeSetup {
        agent_at: if at == 0 { 0 } else { 4 * SEC },
        launcher_at: (at == 0).then_some(200 * MS),
        ..NodeSetup::quiet(at, 0)
    };
    let crash = Fault::NodeCrash {
        node: 0,
        down: BACK - off,
        new_disk: false,
        relaunch: true,
    };
    // Its network goes a moment before.
    let cut = Fault::Partition {
        side: 0b001,
        for_ns: 10 * SEC,
    };
    let faults = vec![
        (JOINS, Fault::LateJoin { node: 1 }),
        (off - 200 * MS, cut),
        (off, crash),
        (JOINS + 4 * SEC, Fault::LateJoin { node: 2 }),
    ];
    Conductor::new(Setup {
        times: Times::USUAL,
        disk: 50 * MS,
        faults,
        heal_at: BACK + TAKEN_IN,
        ..Setup::quiet(seed, (0..3).map(node).collect(), spec)
    })
}

/// It wrote its vote for the generation with the other node, which heard nothing of that and began the job anew. It
/// decides that generation alone when it is back.
#[test]
fn a_node_that_alone_knows_of_its_generation_is_taken_in_when_it_is_back() {
    let (mut knew, mut late) = (0, Vec::new());
    for (seed, tick) in iproduct!(0..4, 0..60) {
        let off = JOINS + SEC + tick * 20 * MS;
        let mut conductor = loses_power_as_it_lets_another_in(seed, off);
        conductor.relaunches = false;
        let ran = conductor.run();
        assert!(ran.is_ok(), "seed {seed}, {off}: {ran:?}");
        let truth = &conductor.world.truth;
        let [zero, one] = [0, 1].map(|node: usize| conductor.world.nodes[node].id);
        // Nobody has started what it decided then.
        let alone = |digest| !truth.spawns.iter().any(|s| s.start.digest == digest);
        let both = |r: &Record| r.number == 2 && r.has(zero) && r.has(one);
        let mut decided = truth.announced.iter();
        knew += u32::from(decided.any(|(digest, r)| both(r) && alone(*digest)));
        let mut lives = truth.spawns.iter().rev().filter(|s| s.node != 0);
        let life = lives.next().map(|s| s.start.lineage);
        let trains = |s: &Spawn| {
            let then = (BACK..BACK + TAKEN_IN).contains(&s.at);
            s.node == 0 && then && Some(s.start.lineage) == life
        };
        if !truth.spawns.iter().any(trains) {
            late.push((seed, off));
        }
    }
    assert!(knew > 0, "it never knew alone");
    assert!(late.is_empty(), "{} never taken in: {late:?}", late.len());
}
