//! A voter accepts a generation that drops a member, or the job's end, and its agent dies before that member asks it
//! again for its lease: no worker of the member runs beside the next generation, or in the next life (I11), though it
//! takes the voter for one that stands behind the generation before.

#![expect(clippy::expect_used, reason = "a helper of tests")]

use muster_protocol::spec::JobSpec;
use muster_protocol::wire::{JobMessage, Message};
use muster_tests::sim::clock::{MS, SEC, US};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup, Torn};
use muster_tests::sim::step::Step;

/// The leader, the voter, and the member that is cut off from the leader.
const LEADER: usize = 0;
const VOTER: usize = 1;
const MEMBER: usize = 2;
const CUT: u64 = 10 * SEC;
/// When the leader's node starts a job again that was cancelled: the voter has accepted its end before.
const AGAIN: u64 = CUT + 8 * SEC;

/// Successor of the generation of which the member is.
#[derive(Clone, Copy, Debug)]
enum Next {
    Generation,
    /// The job is cancelled, and started again.
    Life,
}

fn setup(seed: u64, next: Next, crashes: &[(usize, u64, u64)]) -> Setup {
    let cut = Fault::CutBoth {
        a: LEADER,
        b: MEMBER,
        for_ns: 60 * SEC,
    };
    let crash = |&(node, at, down): &(usize, u64, u64)| {
        let crash = Fault::AgentCrash {
            node,
            effects: 0,
            torn: Torn::Between,
            down,
            new_disk: false,
        };
        (at, crash)
    };
    let stubborn = Fault::Stubborn { node: MEMBER };
    let mut faults = vec![(CUT - SEC, stubborn), (CUT, cut)];
    if let Next::Life = next {
        faults.push((CUT + 100 * MS, Fault::Cancel { node: LEADER }));
        faults.push((AGAIN, Fault::LateJoin { node: LEADER }));
    }
    faults.extend(crashes.iter().map(crash));
    faults.sort_by_key(|(at, _)| *at);
    let spec = JobSpec {
        min_nodes: 1,
        max_nodes: 3,
        loss_grace_ms: 15_000,
        ..JobSpec::default()
    };
    let nodes = (0..3).map(|at| NodeSetup::quiet(at, 0));
    Setup {
        faults,
        heal_at: 80 * SEC,
        ..Setup::quiet(seed, nodes.collect(), spec)
    }
}

/// When the leader hears that the voter has accepted what follows.
fn accepted(seed: u64, next: Next) -> Option<u64> {
    let mut conductor = Conductor::new(setup(seed, next, &[]));
    conductor.log = Some(Vec::new());
    assert_eq!(conductor.run_until(CUT + 10 * SEC), Ok(()));
    let log = conductor.log.take().into_iter().flatten();
    let mut heard = log.filter(|(at, step)| {
        let Step::Deliver { to, from, frame } = step else {
            return false;
        };
        let job = match Message::decode(frame) {
            Ok(Message::Job { body, .. }) => matches!(*body, JobMessage::Accepted { .. }),
            _ => false,
        };
        job && *at > CUT && (*to, *from) == (LEADER, VOTER)
    });
    heard.next().map(|(at, _)| at)
}

/// After how long the leader's agent is started anew, if it is, and for how long it is away.
fn run_all(next: Next, leader: Option<(u64, u64)>) {
    let mut wrong = Vec::new();
    for seed in 1..8 {
        let at = accepted(seed, next).expect("the voter accepts something");
        assert!(at < AGAIN, "seed {seed}: {at}");
        for down in [2 * SEC, 8 * SEC, 20 * SEC, 40 * SEC] {
            let leader = leader.map(|(after, down)| (LEADER, at + after, down));
            let crashes: Vec<_> = [(VOTER, at + US, down)].into_iter().chain(leader).collect();
            let mut conductor = Conductor::new(setup(seed, next, &crashes));
            conductor.relaunches = false;
            if let Err(violation) = conductor.run() {
                wrong.push(format!("{seed}, away for {} ms: {violation}", down / MS));
            }
            assert!(conductor.world.truth.announced.len() > 1);
        }
    }
    assert!(wrong.is_empty(), "{}:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn a_voter_that_dies_after_its_vote_lets_no_worker_run_on() {
    run_all(Next::Generation, None);
}

#[test]
fn a_voter_that_dies_after_it_voted_for_the_end_lets_no_worker_run_into_the_next_life() {
    run_all(Next::Life, None);
}

/// The leader knows of nobody that it dropped, and of the voter only that it is away now.
#[test]
fn nor_if_the_leader_is_started_anew_at_once() {
    for after in [2 * US, 100 * US, MS, 10 * MS, 100 * MS, SEC] {
        run_all(Next::Generation, Some((after, 20 * MS)));
    }
}
