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
/// When the agent of the node that left goes, too.
const GOES: u64 = 13 * SEC;
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
    with_idle(seed, faults, embedded, 0)
}

/// Beside the nodes that train others whose agents have no launcher.
fn with_idle(seed: u64, faults: Vec<(u64, Fault)>, embedded: bool, idle: usize) -> Conductor {
    until(Setup {
        embedded,
        ..setup(seed, faults, idle)
    })
}

fn setup(seed: u64, faults: Vec<(u64, Fault)>, idle: usize) -> Setup {
    let spec = JobSpec {
        min_nodes: 1,
        max_nodes: NODES as u16,
        ..JobSpec::default()
    };
    let agent_alone = |at| NodeSetup {
        launcher_at: None,
        ..NodeSetup::quiet(at, 0)
    };
    let trains = (0..NODES).map(|at| NodeSetup::quiet(at, 0));
    let nodes = trains.chain((NODES..NODES + idle).map(agent_alone));
    Setup {
        faults,
        heal_at: 60 * SEC,
        ..Setup::quiet(seed, nodes.collect(), spec)
    }
}

/// Nobody comes back by itself.
fn until(setup: Setup) -> Conductor {
    let mut conductor = Conductor::new(setup);
    conductor.relaunches = false;
    assert_eq!(conductor.run_until(BOUND), Ok(()));
    conductor
}

/// Whether the workers of this node run.
fn trains(conductor: &Conductor, node: usize) -> bool {
    let launcher = conductor.world.nodes[node].launcher.as_ref();
    launcher.is_some_and(|l| l.training().is_some())
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
                let trains = trains(&conductor, left);
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
            assert!(
                trains(&conductor, node),
                "{node} does not train: {leaver} left"
            );
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
        assert!(trains(&conductor, last), "{last}");
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

/// The ways in which the agent of a node that left can go.
fn goes(node: usize) -> [Fault; 3] {
    [
        Fault::NodeStop { node },
        Fault::NodeCrash {
            node,
            down: 100 * SEC,
            new_disk: false,
            relaunch: false,
        },
        Fault::Drain {
            node,
            grace_ms: 1_000,
            back_after: 100 * SEC,
        },
    ]
}

/// One leaves, later its agent goes, and then another node is lost. Rank 0 goes on by itself: with the vote of one
/// that has gone it could not. Nobody's workers are disturbed meanwhile.
#[test]
fn a_witness_that_goes_is_done_without() {
    for seed in 0..3 {
        for leaver in 0..NODES {
            for gone in goes(leaver) {
                let faults = vec![(LEAVES, leave(leaver)), (GOES, gone.clone())];
                let quiet = with(seed, faults.clone(), false);
                let record = last(&quiet);
                assert_eq!(
                    record.number, 2,
                    "{gone:?}: a witness that goes is no change"
                );
                let at = |node| (0..NODES).find(|i| quiet.world.nodes[*i].id == node);
                let members: Vec<usize> =
                    record.members.iter().filter_map(|m| at(m.node)).collect();
                let [zero, other] = members[..] else {
                    panic!("{members:?} of two");
                };
                assert!(trains(&quiet, zero) && trains(&quiet, other), "{gone:?}");
                let stop = Fault::NodeStop { node: other };
                let faults = faults.into_iter().chain([(LOST, stop)]).collect();
                let alone = with(seed, faults, false);
                let members = last(&alone).members.len();
                assert!(
                    trains(&alone, zero) && members == 1,
                    "seed {seed}: {leaver} left, {gone:?}, {other} was lost: {members} members"
                );
            }
        }
    }
}

/// The same, beside an agent that has no part in the job: it votes in place of the one that has gone, so that either
/// of the two may be lost.
#[test]
fn a_witness_that_goes_is_replaced() {
    for leaver in 0..NODES {
        for gone in goes(leaver) {
            for lost in (0..NODES).filter(|n| *n != leaver) {
                let faults = vec![
                    (LEAVES, leave(leaver)),
                    (GOES, gone.clone()),
                    (LOST, Fault::NodeStop { node: lost }),
                ];
                let conductor = with_idle(1, faults, false, 1);
                let left = NODES - leaver - lost;
                let members = last(&conductor).members.len();
                assert!(
                    trains(&conductor, left) && members == 1,
                    "{leaver} left, {gone:?}, {lost} was lost: {members} members"
                );
            }
        }
    }
}

/// A job without a store goes on committing its checkpoints: those who vote now acknowledge them.
#[test]
fn checkpoints_are_committed_by_those_who_vote_now() {
    for idle in [0, 1] {
        for gone in goes(0) {
            let faults = vec![(LEAVES, leave(0)), (GOES, gone.clone())];
            let mut conductor = Conductor::new(Setup {
                commit_every: SEC,
                ..setup(1, faults, idle)
            });
            conductor.relaunches = false;
            assert_eq!(conductor.run_until(LOST), Ok(()));
            let before = conductor.world.truth.committed.len();
            assert_eq!(conductor.run_until(BOUND), Ok(()));
            let after = conductor.world.truth.committed.len();
            assert!(
                before > 0 && after > before,
                "{gone:?}: {before}, then {after}"
            );
        }
    }
}

/// An agent that comes later votes as well.
#[test]
fn two_members_take_a_witness_that_comes_later() {
    for lost in 0..2 {
        let mut nodes: Vec<NodeSetup> = (0..3).map(|at| NodeSetup::quiet(at, 0)).collect();
        nodes[2].launcher_at = None;
        nodes[2].agent_at = LEAVES;
        let spec = JobSpec {
            min_nodes: 1,
            max_nodes: 2,
            ..JobSpec::default()
        };
        let conductor = until(Setup {
            faults: vec![(LOST, Fault::NodeStop { node: lost })],
            heal_at: 60 * SEC,
            ..Setup::quiet(lost as u64, nodes, spec)
        });
        assert!(trains(&conductor, 1 - lost), "{lost} was lost");
    }
}
