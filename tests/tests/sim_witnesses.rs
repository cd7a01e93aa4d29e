//! Three nodes train, and one leaves. Its agent stays where it is a daemon: as a voter without workers it lets the two
//! others lose one more. An agent that lives in a launcher goes with it, and is no voter of what follows.

#![expect(clippy::expect_used, reason = "a helper of tests")]

use muster_protocol::record::{Kind, Record};
use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::SEC;
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup};

const NODES: usize = 3;
const LEAVES: u64 = 10 * SEC;
const LOST: u64 = 20 * SEC;
/// More than ten times what a loss takes beyond `suspect_after`.
const BOUND: u64 = LOST + 10 * SEC;

fn leave(node: usize) -> Fault {
    Fault::Leave {
        node,
        grace_ms: 5_000,
        relaunch_after: None,
    }
}

fn run(seed: u64, leave: Fault, embedded: bool, lost: Option<usize>) -> Conductor {
    let mut faults = vec![(LEAVES, leave)];
    faults.extend(lost.map(|node| (LOST, Fault::NodeStop { node })));
    with(seed, faults, embedded)
}

fn with(seed: u64, faults: Vec<(u64, Fault)>, embedded: bool) -> Conductor {
    let spec = JobSpec {
        min_nodes: 1,
        max_nodes: NODES as u16,
        ..JobSpec::default()
    };
    let nodes = (0..NODES).map(|at| NodeSetup::quiet(at, 0)).collect();
    let mut conductor = Conductor::new(Setup {
        faults,
        embedded,
        heal_at: 60 * SEC,
        ..Setup::quiet(seed, nodes, spec)
    });
    conductor.relaunches = false;
    assert_eq!(conductor.run_until(BOUND), Ok(()));
    conductor
}

/// The newest generation.
fn last(conductor: &Conductor) -> &Record {
    let records = conductor.world.truth.announced.values();
    let next = records.filter(|r| r.kind == Kind::Next);
    next.max_by_key(|r| r.number).expect("none was decided")
}

#[test]
fn a_node_that_left_and_stays_votes_so_that_the_others_may_lose_one_more() {
    for seed in 0..3 {
        for leaver in 0..NODES {
            for lost in (0..NODES).filter(|n| *n != leaver) {
                let conductor = run(seed, leave(leaver), false, Some(lost));
                let left = NODES - leaver - lost;
                let launcher = conductor.world.nodes[left].launcher.as_ref();
                let trains = launcher.is_some_and(|l| l.training().is_some());
                let members = last(&conductor).members.len();
                assert!(
                    trains && members == 1,
                    "seed {seed}: {leaver} left, {lost} was lost, {left} trains: {trains}, in a generation of {members}"
                );
            }
        }
    }
}

#[test]
fn a_node_that_left_and_is_switched_off_costs_the_others_nothing() {
    for leaver in 0..NODES {
        let conductor = run(1, leave(leaver), false, Some(leaver));
        let others = (0..NODES).filter(|n| *n != leaver);
        for node in others {
            let launcher = conductor.world.nodes[node].launcher.as_ref();
            let trains = launcher.is_some_and(|l| l.training().is_some());
            assert!(trains, "{node} does not train: {leaver} left");
        }
        assert_eq!(last(&conductor).number, 2);
    }
}

/// They leave one after the other, and are switched off: the last one trains.
#[test]
fn one_that_remains_needs_no_vote_of_those_that_left() {
    for last in 0..NODES {
        let others: Vec<usize> = (0..NODES).filter(|n| *n != last).collect();
        let mut faults = vec![
            (LEAVES, leave(others[0])),
            (LEAVES + 5 * SEC, leave(others[1])),
        ];
        faults.extend(others.iter().map(|n| (LOST, Fault::NodeStop { node: *n })));
        let conductor = with(1, faults, false);
        let launcher = conductor.world.nodes[last].launcher.as_ref();
        assert!(launcher.is_some_and(|l| l.training().is_some()), "{last}");
    }
}

#[test]
fn an_agent_that_goes_with_the_launcher_is_no_voter() {
    for leaver in 0..NODES {
        let drain = Fault::Drain {
            node: leaver,
            grace_ms: 30_000,
            back_after: 100 * SEC,
        };
        let cases = [
            (leave(leaver), false),
            (leave(leaver), true),
            (drain, false),
        ];
        for (fault, embedded) in cases {
            let stays = !embedded && matches!(fault, Fault::Leave { .. });
            let conductor = run(1, fault.clone(), embedded, None);
            let (record, node) = (last(&conductor), conductor.world.nodes[leaver].id);
            let voters: Vec<_> = record.voters().map(|v| v.node).collect();
            assert_eq!(record.members.len(), 2);
            assert_eq!(voters.contains(&node), stays, "{fault:?}: {voters:?}");
        }
    }
}
