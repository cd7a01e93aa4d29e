//! Four nodes, and room for three: the last one waits, and takes the place of a node that is lost.

use muster_tests::sim::clock::SEC;
use muster_tests::sim::setup::{Fault, Torn};

use super::{Case, GRACE, MOMENT, Spare, four, one};

const MEMBERS: usize = 3;
const SPARE: usize = 3;

/// From when the others train until the spare does that joins them: joins are collected for 5 s at most.
const JOINS: u64 = 5 * SEC + GRACE + MOMENT;

pub(crate) fn cases(store: bool) -> Vec<Case> {
    let of = |node| {
        let other = (node + 1) % MEMBERS;
        let mut cases = members(node, other, store);
        cases.extend(between(node));
        cases
    };
    let mut cases: Vec<Case> = (0..MEMBERS).flat_map(of).collect();
    cases.extend(of_the_spare());
    cases
}

/// Nobody takes the place of a member that is away for a moment. One that was lost and comes back finds its place
/// taken, and waits.
fn members(node: usize, other: usize, store: bool) -> Vec<Case> {
    let mut cases = four::cases(node, other, MEMBERS + 1, store);
    for case in &mut cases {
        let since = case.others.unwrap_or_default();
        let stuck = |(_, f): &(u64, Fault)| matches!(f, Fault::Unkillable { .. });
        match case.touched.as_slice() {
            [] => case.spare = Spare::Waits,
            // Its workers may have ended by themselves: then nobody is lost.
            [_] if case.faults.iter().any(stuck) => {
                (case.spare, case.all) = (Spare::Fills(since + JOINS), None);
            }
            [_] => {
                (case.spare, case.changes, case.all) = (Spare::StepsIn(since), 1, None);
            }
            // One is lost, and the other is until its workers end: the third needs the spare.
            _ if case.faults.iter().any(stuck) => {
                (case.spare, case.all) = (Spare::StepsIn(since + JOINS), None);
                case.others = None;
            }
            // Of two that do not reach each other one stays.
            _ => (case.spare, case.all) = (Spare::Fills(since + JOINS), None),
        }
    }
    cases
}

/// A cut between a member and the spare is nothing to those that train.
fn between(node: usize) -> Vec<Case> {
    let for_ns = 20 * SEC;
    let cut = Fault::CutBoth {
        a: node,
        b: SPARE,
        for_ns,
    };
    let one_way = |from, to| Fault::CutOneWay { from, to, for_ns };
    [
        ("a cut between a member and the spare", cut),
        ("a cut from a member to the spare", one_way(node, SPARE)),
        ("a cut from the spare to a member", one_way(SPARE, node)),
    ]
    .into_iter()
    .map(|(name, fault)| one(name, fault, &[], 0, 30 * SEC, Some(30 * SEC)))
    .collect()
}

/// Faults of the spare are nothing to those that train.
fn of_the_spare() -> Vec<Case> {
    let node = SPARE;
    let crash = |down| Fault::AgentCrash {
        node,
        effects: 0,
        torn: Torn::Between,
        down,
        new_disk: false,
    };
    let ends = |relaunch_after| Fault::LauncherCrash {
        node,
        relaunch_after,
    };
    let faults = [
        ("the agent of a spare that crashes", crash(2 * SEC)),
        ("the agent of a spare that is away", crash(50 * SEC)),
        ("the launcher of a spare that crashes", ends(Some(3 * SEC))),
        ("the launcher of a spare that ends", ends(None)),
        (
            "a spare that is lost",
            Fault::NodeCrash {
                node,
                down: 500 * SEC,
                new_disk: false,
                relaunch: false,
            },
        ),
        (
            "a spare that is suspended",
            Fault::Suspend {
                node,
                for_ns: 12 * SEC,
            },
        ),
        (
            "a spare that is cut off",
            Fault::Partition {
                side: 1 << node,
                for_ns: 20 * SEC,
            },
        ),
        (
            "a spare that leaves",
            Fault::Leave {
                node,
                grace_ms: 5_000,
                relaunch_after: Some(3 * SEC),
            },
        ),
        (
            "a spare that is drained",
            Fault::Drain {
                node,
                grace_ms: 5_000,
                back_after: 3 * SEC,
            },
        ),
        (
            "a spare whose launcher is stopped",
            Fault::LauncherPause {
                node,
                for_ns: 12 * SEC,
            },
        ),
        (
            "a spare whose disk is full",
            Fault::DiskFull {
                node,
                for_ns: 8 * SEC,
            },
        ),
    ];
    faults
        .into_iter()
        .map(|(name, fault)| one(name, fault, &[], 0, 60 * SEC, Some(60 * SEC)))
        .collect()
}
