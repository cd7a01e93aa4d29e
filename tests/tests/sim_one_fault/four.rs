//! Four nodes, and room for all of them: what befalls one of them.

use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::setup::{Fault, Torn};

use super::{AT, Case, GRACE, LOSS, MOMENT, STOP_LIMIT, With, departures, drain, leave, one};

fn crash(node: usize, down: u64, torn: Torn) -> Fault {
    Fault::AgentCrash {
        node,
        effects: 0,
        torn,
        down,
        new_disk: false,
    }
}

/// Those of one node, in a job of so many, and of another one.
pub(crate) fn cases(node: usize, other: usize, nodes: usize, store: bool) -> Vec<Case> {
    let node_crash = |down, relaunch| Fault::NodeCrash {
        node,
        down,
        new_disk: false,
        relaunch,
    };
    let pause = |for_ns| Fault::LauncherPause { node, for_ns };
    let unkillable = |for_ns| (AT, Fault::Unkillable { node, for_ns });
    let fail = |node, cascade| Fault::WorkerFail {
        node,
        code: 1,
        cascade,
    };
    let stuck = |name, fault| Case {
        name,
        faults: vec![unkillable(90 * SEC), (AT + SEC, fault)],
        touched: vec![node],
        changes: 2,
        others: Some(SEC + GRACE + STOP_LIMIT + LOSS),
        all: Some(90 * SEC + 60 * SEC),
        ..Case::default()
    };
    // The state directory of one node refuses writes for as long as all of it takes.
    let full = |name, fault, touched: &[usize], changes, others, all| {
        let for_ns = 90 * SEC;
        let mut case = one(name, fault, touched, changes, 2 * SEC + others, all);
        case.faults[0].0 += 2 * SEC;
        case.faults
            .insert(0, (AT, Fault::DiskFull { node, for_ns }));
        case
    };
    let mut cases = vec![
        one(
            "an agent that crashes for a moment",
            crash(node, 2 * SEC, Torn::Between),
            &[],
            0,
            4 * SEC,
            Some(4 * SEC),
        ),
        one(
            "an agent that is away for long",
            crash(node, 15 * SEC, Torn::Between),
            &[],
            0,
            17 * SEC,
            Some(17 * SEC),
        ),
        one(
            "an agent that crashes in a write",
            crash(node, 5 * SEC, Torn::New),
            &[],
            0,
            12 * SEC,
            Some(12 * SEC),
        ),
        one(
            "an agent that is stopped",
            Fault::AgentPause {
                node,
                for_ns: 8 * SEC,
            },
            &[],
            0,
            10 * SEC,
            Some(10 * SEC),
        ),
        one(
            "a machine that is suspended for a moment",
            Fault::Suspend {
                node,
                for_ns: 700 * MS,
            },
            &[],
            0,
            2 * SEC,
            Some(2 * SEC),
        ),
        one(
            "a machine that is suspended",
            Fault::Suspend {
                node,
                for_ns: 12 * SEC,
            },
            &[node],
            2,
            GRACE + LOSS,
            Some(60 * SEC),
        ),
        one(
            "an agent that is away for too long",
            crash(node, 50 * SEC, Torn::Between),
            &[node],
            2,
            30 * SEC + GRACE + 30 * SEC + LOSS,
            Some(70 * SEC),
        ),
        one(
            "a connection that breaks",
            Fault::LauncherHiccup { node },
            &[],
            0,
            SEC,
            Some(SEC),
        ),
        one(
            "a disk that is full",
            Fault::DiskFull {
                node,
                for_ns: 8 * SEC,
            },
            &[],
            0,
            SEC,
            Some(SEC),
        ),
        one(
            "a launcher that crashes",
            Fault::LauncherCrash {
                node,
                relaunch_after: Some(3 * SEC),
            },
            &[node],
            2,
            GRACE + LOSS,
            Some(20 * SEC),
        ),
        one(
            "a launcher that crashes for good",
            Fault::LauncherCrash {
                node,
                relaunch_after: None,
            },
            &[node],
            1,
            GRACE + LOSS,
            None,
        ),
        one(
            "a node that crashes",
            node_crash(5 * SEC, true),
            &[node],
            2,
            GRACE + LOSS,
            Some(25 * SEC),
        ),
        one(
            "a node that is lost",
            node_crash(500 * SEC, false),
            &[node],
            1,
            GRACE + LOSS,
            None,
        ),
        one(
            "a worker that fails",
            fail(node, false),
            &[],
            1,
            GRACE + LOSS,
            Some(GRACE + LOSS),
        ),
        one(
            "workers that fail together",
            fail(node, true),
            &[],
            1,
            GRACE + LOSS,
            Some(GRACE + LOSS),
        ),
        one(
            "a short cut",
            Fault::CutBoth {
                a: node,
                b: other,
                for_ns: 700 * MS,
            },
            &[],
            0,
            SEC,
            Some(SEC),
        ),
        one(
            "a cut",
            Fault::CutBoth {
                a: node,
                b: other,
                for_ns: 20 * SEC,
            },
            &[node, other],
            2,
            GRACE + 2 * LOSS,
            Some(60 * SEC),
        ),
        one(
            "a cut one way",
            Fault::CutOneWay {
                from: node,
                to: other,
                for_ns: 20 * SEC,
            },
            &[node, other],
            2,
            GRACE + 2 * LOSS,
            Some(60 * SEC),
        ),
        one(
            "a node that is cut off",
            Fault::Partition {
                side: 1 << node,
                for_ns: 20 * SEC,
            },
            &[node],
            2,
            GRACE + LOSS,
            Some(60 * SEC),
        ),
        one(
            "a launcher that is stopped for a moment",
            pause(400 * MS),
            &[],
            0,
            SEC,
            Some(SEC),
        ),
        full(
            "a disk that is full when a worker fails",
            fail(other, false),
            &[],
            1,
            GRACE + LOSS,
            Some(2 * SEC + GRACE + LOSS),
        ),
        full(
            "a disk that is full when a node leaves",
            leave(other),
            &[other],
            1,
            GRACE + LOSS,
            None,
        ),
        full(
            "a disk that is full when a node leaves and comes again",
            Fault::Leave {
                node: other,
                grace_ms: 5_000,
                relaunch_after: Some(3 * SEC),
            },
            &[other],
            2,
            GRACE + LOSS,
            Some(2 * SEC + GRACE + 20 * SEC),
        ),
        full(
            "a disk that is full when a launcher crashes",
            Fault::LauncherCrash {
                node: other,
                relaunch_after: Some(3 * SEC),
            },
            &[other],
            2,
            GRACE + LOSS,
            Some(2 * SEC + GRACE + 20 * SEC),
        ),
        stuck("workers that do not end when one fails", fail(node, false)),
        stuck(
            "workers that do not end when another fails",
            fail(other, true),
        ),
    ];
    cases.extend(stuck_and_another(stuck, node, other));
    match store {
        true => {
            cases.push(one(
                "a launcher that is stopped and with it its store",
                pause(12 * SEC),
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
            let cut = |node| {
                (
                    AT,
                    Fault::StoreCut {
                        node,
                        for_ns: 4 * SEC,
                    },
                )
            };
            cases.push(Case {
                name: "a store that nobody reaches",
                faults: (0..nodes).map(cut).collect(),
                touched: Vec::new(),
                changes: 1,
                others: Some(4 * SEC + 10 * SEC + GRACE + LOSS),
                ..Case::default()
            });
            cases.push(one(
                "a store that is slow",
                Fault::StoreSlow {
                    by: 300 * MS,
                    for_ns: 10 * SEC,
                },
                &[],
                0,
                SEC,
                Some(SEC),
            ));
        }
        false => {
            cases.push(one(
                "a launcher that is stopped",
                pause(12 * SEC),
                &[],
                0,
                SEC,
                Some(SEC),
            ));
            cases.push(one(
                "a launcher that is stopped for long",
                pause(60 * SEC),
                &[],
                0,
                SEC,
                Some(SEC),
            ));
        }
    }
    cases.extend(departures(node));
    cases
}

/// Workers that do not end where their node, or another one, goes. `stuck`: they do not end, and that happens.
fn stuck_and_another(
    stuck: impl Fn(&'static str, Fault) -> Case,
    node: usize,
    other: usize,
) -> Vec<Case> {
    let crash = Fault::LauncherCrash {
        node: other,
        relaunch_after: None,
    };
    // The node that goes has its own time first, and one that is back while they are waited for begins that anew.
    let without_other = |name, fault, first: u64| {
        let case = stuck(name, fault);
        Case {
            touched: vec![node, other],
            others: case.others.map(|ns| ns + first),
            all: None,
            ..case
        }
    };
    vec![
        without_other(
            "workers that do not end when another node is lost",
            crash,
            0,
        ),
        without_other(
            "workers that do not end when another node leaves",
            leave(other),
            GRACE,
        ),
        without_other(
            "workers that do not end when another node is drained",
            drain(other),
            2 * GRACE + LOSS,
        ),
        stuck(
            "workers that do not end when their node is drained",
            drain(node),
        ),
        Case {
            all: None,
            ..stuck(
                "workers that do not end when their node leaves",
                leave(node),
            )
        },
    ]
}

/// The cases that only a job with room has, and what sets its machines apart.
pub(crate) fn more(node: usize, other: usize) -> Vec<Case> {
    let fail = || Fault::WorkerFail {
        node: other,
        code: 1,
        cascade: false,
    };
    let lost = || Fault::LauncherCrash {
        node: other,
        relaunch_after: None,
    };
    let away = || Fault::AgentCrash {
        node: other,
        effects: 0,
        torn: Torn::Between,
        down: 15 * SEC,
        new_disk: false,
    };
    // A change is a few writes of each node, one after the other.
    let (slow, fast) = (With::SlowDisk(node, 300 * MS), With::FastClock(node));
    let writes = 4 * 300 * MS;
    let very_slow = |ns| With::SlowDisk(node, ns);
    let busy = 1_500 * MS;
    let long_writes = 4 * busy;
    // Longer than `suspect_after`. The others need no vote of this node; if it leads, it asks for theirs in another round.
    let stall = 10 * SEC;
    let stalled = 3 * SEC;
    let on = |with, case: Case| Case {
        with: Some(with),
        ..case
    };
    vec![
        on(
            With::Late(node),
            one(
                "a node that joins late",
                Fault::LateJoin { node },
                &[node],
                1,
                // Nobody is waited for: it is the last that there is room for.
                GRACE + MOMENT,
                Some(GRACE + MOMENT),
            ),
        ),
        on(
            slow,
            Case {
                name: "a slow disk",
                others: Some(60 * SEC),
                ..Case::default()
            },
        ),
        on(
            slow,
            one(
                "a slow disk when a worker fails",
                fail(),
                &[],
                1,
                GRACE + LOSS + writes,
                Some(GRACE + LOSS + writes),
            ),
        ),
        on(
            slow,
            one(
                "a slow disk when a node is lost",
                lost(),
                &[other],
                1,
                GRACE + LOSS + writes,
                None,
            ),
        ),
        on(
            very_slow(3 * SEC),
            Case {
                name: "a disk that takes seconds",
                others: Some(60 * SEC),
                ..Case::default()
            },
        ),
        on(
            very_slow(busy),
            one(
                "a disk that takes seconds when a worker fails",
                fail(),
                &[],
                1,
                GRACE + LOSS + long_writes,
                Some(GRACE + LOSS + long_writes),
            ),
        ),
        on(
            very_slow(busy),
            one(
                "a disk that takes seconds when a node is lost",
                lost(),
                &[other],
                1,
                GRACE + LOSS + long_writes,
                None,
            ),
        ),
        on(
            very_slow(stall),
            one(
                "a disk that stalls when a worker fails",
                fail(),
                &[],
                1,
                GRACE + LOSS + stalled,
                Some(GRACE + LOSS + stalled),
            ),
        ),
        on(
            very_slow(stall),
            one(
                "a disk that stalls when a node is lost",
                lost(),
                &[other],
                1,
                GRACE + LOSS + stalled,
                None,
            ),
        ),
        on(
            fast,
            Case {
                name: "a fast clock",
                others: Some(60 * SEC),
                ..Case::default()
            },
        ),
        on(
            fast,
            one(
                "a fast clock when an agent is away",
                away(),
                &[],
                0,
                17 * SEC,
                Some(17 * SEC),
            ),
        ),
        on(
            fast,
            one(
                "a fast clock when a node is lost",
                lost(),
                &[other],
                1,
                GRACE + LOSS,
                None,
            ),
        ),
    ]
}

/// The agent of one node is away for a moment, and the launcher of another dies just before it is back, or just after.
pub(crate) fn away_and_lost(node: usize, other: usize) -> Vec<Case> {
    let down = 3 * SEC;
    let case = |at: u64| Case {
        name: "a launcher that dies while another node's agent is away",
        faults: vec![
            (AT, crash(node, down, Torn::Between)),
            (
                AT + at,
                Fault::LauncherCrash {
                    node: other,
                    relaunch_after: None,
                },
            ),
        ],
        touched: vec![node, other],
        changes: 2,
        others: Some(down + MOMENT + GRACE + LOSS),
        ..Case::default()
    };
    let around = [500, 2_700, 3_000, 3_100, 3_600];
    around.map(|ms| case(ms * MS)).to_vec()
}
