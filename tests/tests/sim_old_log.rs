//! A job with a store after days: agents are restarted and nodes come while its log is long and the store slow; a node
//! that does not see all of the log; and an end that a minority writes down.

#![expect(clippy::panic, clippy::expect_used, reason = "helpers of tests")]

use muster_protocol::local::ToLauncher;
use muster_protocol::record::{CommitRef, Kind};
use muster_protocol::spec::JobSpec;
use muster_protocol::storelog::{self, Body, Compaction, CreateOutcome, Log, Outcome, Output};
use muster_protocol::{Digest, Time};
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup, Torn};
use muster_tests::sim::step::Step;
use muster_tests::sim::store::UUID;

/// How long the store takes for an operation.
const LATENCY: u64 = 30 * MS;
/// Entries of the log when it is old.
const OLD: u64 = 2_000;
const AGED: u64 = 120 * SEC;

/// Three nodes of a job for three to four, and a fourth that is not started.
fn setup(faults: Vec<(u64, Fault)>) -> Setup {
    let node = |at: usize| NodeSetup {
        launcher_at: Some(MS).filter(|_| at < 3),
        ..NodeSetup::quiet(at, 0)
    };
    let slow = Fault::StoreSlow {
        by: LATENCY,
        for_ns: 1_000 * SEC,
    };
    let spec = JobSpec {
        min_nodes: 3,
        max_nodes: 4,
        ..JobSpec::default()
    };
    Setup {
        store: true,
        faults: [(0, slow)].into_iter().chain(faults).collect(),
        heal_at: 400 * SEC,
        ..Setup::quiet(1, (0..4).map(node).collect(), spec)
    }
}

/// Compacts where production does.
fn begin(faults: Vec<(u64, Fault)>) -> Conductor {
    let mut conductor = Conductor::new(setup(faults));
    conductor.world.compaction = Compaction::default();
    conductor.log = Some(Vec::new());
    conductor
}

fn until(conductor: &mut Conductor, at: u64) {
    assert_eq!(conductor.run_until(at), Ok(()));
}

/// Writes into the store as the first member would, at once.
fn settle(conductor: &mut Conductor, log: &mut Log) -> Vec<Output> {
    let world = &mut conductor.world;
    let mut said = Vec::new();
    for _ in 0..10_000 {
        said.extend(std::iter::from_fn(|| log.poll_output()));
        let event = match log.poll_effect() {
            Some(storelog::Effect::Read { op, slot }) => {
                let found = world.store.get(slot).map(<[u8]>::to_vec);
                let outcome = match found {
                    Some(bytes) => storelog::ReadOutcome::Found(bytes),
                    None => storelog::ReadOutcome::Absent,
                };
                storelog::Event::Read { op, slot, outcome }
            }
            Some(storelog::Effect::Create { op, slot, bytes }) => {
                let outcome = match world.store.create(slot, &bytes, 0) {
                    true => CreateOutcome::Won,
                    false => CreateOutcome::Exists,
                };
                world.truth.logged(&world.store);
                storelog::Event::Created { op, slot, outcome }
            }
            None => return said,
        };
        log.handle(event, Time(1)).expect("it was asked for");
    }
    panic!("the log never rests");
}

/// The job trains, and its log grows to [`OLD`] entries: saves, and the end of those before. The generation.
fn ages(conductor: &mut Conductor) -> Digest {
    until(conductor, 8 * SEC);
    let (record, generation) = match conductor.world.truth.latest_claim() {
        Some((_, record, digest)) => (record.clone(), *digest),
        None => panic!("there is no generation"),
    };
    let leader = record.leader().expect("it trains");
    let mut log = Log::new(conductor.world.key.clone(), UUID, leader, 4_711);
    let mut saves: Vec<u64> = Vec::new();
    let (mut at, mut number) = (8 * SEC, 0);
    while conductor.world.store.next() <= OLD {
        number += 1;
        let mut manifest = [0; 32];
        manifest[..8].copy_from_slice(&u64::to_be_bytes(number));
        let commit = CommitRef {
            generation,
            number,
            step: 10 * number,
            manifest: Digest(manifest),
        };
        log.commit(2 * number, commit, Time(1));
        let said = settle(conductor, &mut log);
        let won = said.iter().find_map(|o| match o {
            Output::Appended {
                outcome: Outcome::Won { seq },
                ..
            } => Some(*seq),
            _ => None,
        });
        let Some(won) = won else {
            panic!("commit {number}: {said:?}")
        };
        saves.push(won);
        if saves.len() > 4 {
            let seq = saves.remove(0);
            log.append(2 * number + 1, Body::Retire { seq, good: None }, Time(1));
            settle(conductor, &mut log);
        }
        // Slowly enough for those who read along.
        if number.is_multiple_of(5) {
            at += 500 * MS;
            until(conductor, at);
        }
    }
    assert!(at < AGED);
    until(conductor, AGED);
    assert_eq!(
        conductor.world.truth.latest_claim().map(|c| c.2),
        Some(generation)
    );
    assert!(trains(conductor, &[0, 1, 2]));
    generation
}

fn trains(conductor: &Conductor, nodes: &[usize]) -> bool {
    nodes.iter().all(|node| {
        let launcher = conductor.world.nodes[*node].launcher.as_ref();
        launcher.is_some_and(|l| l.training().is_some())
    })
}

fn claims(conductor: &Conductor) -> usize {
    conductor.world.truth.log.claims.len()
}

/// Messages to a node's launcher from then on.
fn heard(conductor: &Conductor, of: usize, from: u64) -> Vec<&ToLauncher> {
    let log = conductor.log.iter().flatten();
    log.filter_map(|(at, step)| match step {
        Step::LauncherHears { node, frame, .. } if *node == of && *at >= from => Some(frame),
        _ => None,
    })
    .collect()
}

fn crash(node: usize, down: u64) -> Fault {
    Fault::AgentCrash {
        node,
        effects: 0,
        torn: Torn::Between,
        down,
        new_disk: false,
    }
}

/// The workers train on while their agent reads: a lease of a second and a half.
#[test]
fn agents_of_an_old_job_are_restarted_and_no_worker_is_stopped() {
    let faults = (0..3).map(|node| (AGED + (1 + 5 * node as u64) * SEC, crash(node, 300 * MS)));
    let mut conductor = begin(faults.collect());
    let generation = ages(&mut conductor);
    let tokens: Vec<u32> = (0..3)
        .map(|n| conductor.world.nodes[n].agent_token)
        .collect();
    until(&mut conductor, AGED + 20 * SEC);
    for (node, token) in tokens.into_iter().enumerate() {
        assert_ne!(conductor.world.nodes[node].agent_token, token);
        let told = heard(&conductor, node, AGED);
        let stopped = |f: &&ToLauncher| matches!(f, ToLauncher::Stop { .. });
        assert!(!told.iter().any(stopped), "node {node}: {told:?}");
    }
    let latest = conductor.world.truth.latest_claim().map(|c| c.2);
    assert_eq!(latest, Some(generation));
    assert!(trains(&conductor, &[0, 1, 2]));
}

#[test]
fn a_node_joins_an_old_job_at_once() {
    let mut conductor = begin(vec![(AGED + SEC, Fault::LateJoin { node: 3 })]);
    ages(&mut conductor);
    let before = claims(&conductor);
    // Its workers stop in good order, and start anew.
    until(&mut conductor, AGED + 10 * SEC);
    assert!(trains(&conductor, &[0, 1, 2, 3]));
    assert_eq!(claims(&conductor), before + 1);
}

/// Let in, it would get no lease, and hold up everybody again and again.
#[test]
fn a_node_that_does_not_see_all_of_the_log_stays_outside_until_it_does() {
    let mut conductor = begin(vec![(AGED + SEC, Fault::LateJoin { node: 3 })]);
    let generation = ages(&mut conductor);
    let hidden = conductor.world.store.next() - 5;
    conductor.unseen.insert((3, hidden));
    let before = claims(&conductor);
    until(&mut conductor, AGED + 120 * SEC);
    assert_eq!(claims(&conductor), before);
    let latest = conductor.world.truth.latest_claim().map(|c| c.2);
    assert_eq!(latest, Some(generation));
    let told = heard(&conductor, 3, AGED);
    let said = told.iter().any(|f| match f {
        ToLauncher::Waiting { text } => text.contains(&format!("log slot {hidden} is missing")),
        _ => false,
    });
    assert!(said, "{told:?}");
    assert!(trains(&conductor, &[0, 1, 2]));

    // The listing that hid it is gone: nobody has to do anything.
    conductor.unseen.clear();
    until(&mut conductor, AGED + 180 * SEC);
    assert!(trains(&conductor, &[0, 1, 2, 3]));
    assert_eq!(claims(&conductor), before + 1);
}

/// Seen too late once: that is no damage.
#[test]
fn an_object_that_is_seen_late_costs_a_moment() {
    let mut conductor = begin(vec![(AGED + SEC, Fault::LateJoin { node: 3 })]);
    ages(&mut conductor);
    let hidden = conductor.world.store.next() - 5;
    conductor.unseen.insert((3, hidden));
    until(&mut conductor, AGED + 2 * SEC);
    conductor.unseen.clear();
    until(&mut conductor, AGED + 15 * SEC);
    assert!(trains(&conductor, &[0, 1, 2, 3]));
}

/// The others finished, and their agents were gone before this node had: no fault was ever seen. It writes the end down
/// alone, once nobody else can have gone on.
#[test]
fn who_leads_a_job_that_finished_writes_its_end_down_alone() {
    let at = 10 * SEC;
    let faults = [1, 2].map(|node| (at + 300 * MS, crash(node, 1_000 * SEC)));
    let mut conductor = begin(faults.into());
    until(&mut conductor, at);
    let (record, digest) = match conductor.world.truth.latest_claim() {
        Some((_, record, digest)) => (record.clone(), *digest),
        None => panic!("there is no generation"),
    };
    assert_eq!(record.leader(), Some(conductor.world.nodes[0].id));
    assert!(trains(&conductor, &[0, 1, 2]));
    for node in [1, 2] {
        conductor.put(Step::Finish { node, digest });
    }
    until(&mut conductor, at + 500 * MS);
    conductor.put(Step::Finish { node: 0, digest });
    let ended = |conductor: &Conductor| {
        let latest = conductor.world.truth.latest_claim();
        latest.is_some_and(|(_, r, _)| matches!(r.kind, Kind::End { .. }))
    };
    until(&mut conductor, at + 5 * SEC);
    assert!(!ended(&conductor), "a minority waits");
    until(&mut conductor, at + 15 * SEC);
    assert!(ended(&conductor));
    let told = heard(&conductor, 0, at);
    let end = |f: &&ToLauncher| matches!(f, ToLauncher::End { code: 0, .. });
    assert!(told.iter().any(end), "{told:?}");
}
