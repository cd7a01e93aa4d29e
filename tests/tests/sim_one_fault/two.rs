//! Two nodes, and no other agent: the one with rank 0 counts as the majority, unless a store decides.

use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::setup::{Fault, Torn};

use super::{AT, Case, GRACE, LOSS, STOP_LIMIT, departures, four, one};

/// A store's nodes take over from one that is not known to be dead after three times `suspect_after`.
const TAKEN_OVER: u64 = 6 * SEC;

/// Those of both nodes, of which this one has rank 0.
pub(crate) fn cases(first: usize, store: bool) -> Vec<Case> {
    (0..2).flat_map(|node| of(node, first, store)).collect()
}

fn of(node: usize, first: usize, store: bool) -> Vec<Case> {
    let other = 1 - node;
    // Without rank 0's vote nothing is decided.
    let waits = node == first && !store;
    let loss = match store {
        true => GRACE + LOSS + TAKEN_OVER,
        false => GRACE + LOSS,
    };
    let mut cases = four::cases(node, other, 2, store);
    cases.retain(|case| case.touched.is_empty());
    for case in &mut cases {
        let disk_lasts = |(_, f): &(u64, Fault)| match f {
            Fault::DiskFull { for_ns, .. } => (case.faults.len() > 1).then_some(*for_ns),
            _ => None,
        };
        if let Some(full) = case.faults.iter().find_map(disk_lasts).filter(|_| waits) {
            // It cannot store its vote, and says so every 2.5 s.
            let all = full + 2_500 * MS + GRACE + LOSS;
            (case.others, case.all) = (None, Some(all));
        }
    }
    // What takes the vote of a node with it.
    let takes = |name, fault, all| Case {
        changes: match all {
            Some(_) => 2,
            None => usize::from(!waits),
        },
        others: (!waits).then_some(loss),
        ..one(name, fault, &[node], 2, loss, all)
    };
    cases.extend([
        takes(
            "a machine that is suspended",
            Fault::Suspend {
                node,
                for_ns: 12 * SEC,
            },
            Some(60 * SEC),
        ),
        takes(
            "a node that crashes",
            Fault::NodeCrash {
                node,
                down: 5 * SEC,
                new_disk: false,
                relaunch: true,
            },
            Some(25 * SEC),
        ),
        takes(
            "a node that is lost",
            Fault::NodeCrash {
                node,
                down: 500 * SEC,
                new_disk: false,
                relaunch: false,
            },
            None,
        ),
    ]);
    let away = Fault::AgentCrash {
        node,
        effects: 0,
        torn: Torn::Between,
        down: 50 * SEC,
        new_disk: false,
    };
    let away = one(
        "an agent that is away for too long",
        away,
        &[node],
        2,
        30 * SEC + GRACE + 30 * SEC + LOSS,
        Some(70 * SEC),
    );
    cases.push(Case {
        others: away.others.filter(|_| !waits),
        ..away
    });
    cases.extend(cuts(node, other, first, store));
    cases.extend(agents_stay(node, other));
    if store {
        cases.push(one(
            "a launcher that is stopped and with it its store",
            Fault::LauncherPause {
                node,
                for_ns: 12 * SEC,
            },
            &[node],
            2,
            GRACE + STOP_LIMIT + LOSS,
            Some(60 * SEC),
        ));
        cases.push(one(
            "a store that one node does not reach",
            Fault::StoreCut {
                node,
                for_ns: 10 * SEC,
            },
            &[node],
            2,
            GRACE + LOSS,
            Some(60 * SEC),
        ));
    }
    cases
}

/// Rank 0 goes on alone; with a store it may be either.
fn cuts(node: usize, other: usize, first: usize, store: bool) -> Vec<Case> {
    let touched: Vec<usize> = (0..2).filter(|n| store || *n != first).collect();
    let for_ns = 20 * SEC;
    let faults = [
        (
            "a cut",
            Fault::CutBoth {
                a: node,
                b: other,
                for_ns,
            },
        ),
        (
            "a cut one way",
            Fault::CutOneWay {
                from: node,
                to: other,
                for_ns,
            },
        ),
        (
            "a node that is cut off",
            Fault::Partition {
                side: 1 << node,
                for_ns,
            },
        ),
    ];
    let bound = match store {
        true => GRACE + 2 * LOSS + TAKEN_OVER,
        false => GRACE + 2 * LOSS,
    };
    faults
        .into_iter()
        .map(|(name, fault)| {
            // The node that hears nothing of rank 0 gives its lease up before it calls the link missing, and says so.
            let deaf = matches!(fault, Fault::CutOneWay { .. }) && node == first && !store;
            let changes = 2 + usize::from(deaf);
            one(name, fault, &touched, changes, bound, Some(60 * SEC))
        })
        .collect()
}

/// The agents are there and vote, so either node goes on without the other's launcher.
fn agents_stay(node: usize, other: usize) -> Vec<Case> {
    let ends = |relaunch_after| Fault::LauncherCrash {
        node,
        relaunch_after,
    };
    let stuck = |name, fails, cascade| Case {
        name,
        faults: vec![
            (
                AT,
                Fault::Unkillable {
                    node,
                    for_ns: 90 * SEC,
                },
            ),
            (
                AT + SEC,
                Fault::WorkerFail {
                    node: fails,
                    code: 1,
                    cascade,
                },
            ),
        ],
        touched: vec![node],
        changes: 2,
        others: Some(SEC + GRACE + STOP_LIMIT + LOSS),
        all: Some(90 * SEC + 60 * SEC),
        ..Case::default()
    };
    let mut cases = vec![
        one(
            "a launcher that crashes",
            ends(Some(3 * SEC)),
            &[node],
            2,
            GRACE + LOSS,
            Some(20 * SEC),
        ),
        one(
            "a launcher that crashes for good",
            ends(None),
            &[node],
            1,
            GRACE + LOSS,
            None,
        ),
        stuck("workers that do not end when one fails", node, false),
        stuck("workers that do not end when another fails", other, true),
    ];
    cases.extend(departures(node));
    cases
}
