//! A short story of three nodes as agents and workers would tell it, and what the checks, the table
//! and the timeline make of it and of versions with something wrong.

use muster_runtime::demo::{Event, Line, Outcome};
use serde_json::{Value, json};

use super::recording::{Act, Change, Down, NodeLife, Recording};
use super::{check, table, timeline};

const STEPS: u64 = 40;
const SAVE_EVERY: u64 = 10;

fn outcome() -> Outcome {
    Outcome {
        correct: 340,
        held_out: 359,
        hash: "ab".repeat(32),
    }
}

fn generation(number: u64, cause: &str, nodes: &[u32], at: u64) -> Value {
    let member = |(rank, node): (usize, &u32)| json!({"node": format!("{node:064}"), "slots": 1, "first_rank": rank});
    json!({
        "event": "generation", "time_ms": at, "digest": format!("d{number}"),
        "generation": number, "kind": if nodes.is_empty() { "finished" } else { "runs" },
        "cause": cause, "world": nodes.len(), "restarts_used": 0,
        "members": nodes.iter().enumerate().map(member).collect::<Vec<_>>(),
    })
}

fn phases(number: u64, at: u64) -> Value {
    json!({
        "event": "changed", "time_ms": at, "digest": format!("d{number}"), "detect_ms": 1.0,
        "decide_ms": 4.0, "stop_ms": 9.0, "start_ms": 20.0,
    })
}

/// A report of an agent or a worker.
#[derive(Clone, Debug)]
enum Told {
    Agent(Value),
    Worker(String, Line),
}

fn worker(generation: u64, rank: u32, node: u32, time_ms: u64, event: Event) -> Told {
    let line = Line {
        time_ms,
        generation,
        rank,
        pid: 100 * generation as u32 + node,
        event,
    };
    Told::Worker(format!("n{node}"), line)
}

/// A generation's training on these nodes, in rank order, a step a millisecond.
fn trains(number: u64, nodes: &[u32], steps: std::ops::Range<u64>, at: u64) -> Vec<Told> {
    let mut told = Vec::new();
    let ranks = || (0..).zip(nodes.iter().copied());
    for (rank, node) in ranks() {
        let event = Event::Start {
            step: steps.start,
            world: nodes.len() as u32,
            restart: number - 1,
            restored_from: (number > 1).then_some(steps.start),
            linked: true,
        };
        told.push(worker(number, rank, node, at, event));
    }
    for step in steps.clone() {
        let (ms, loss, done) = (
            at + 1 + step - steps.start,
            1.0 / (step + 1) as f32,
            step + 1,
        );
        for (rank, node) in ranks() {
            if step == steps.start {
                let event = Event::FirstStep { step: done, loss };
                told.push(worker(number, rank, node, ms, event));
            }
            let event = Event::Step { step: done, loss };
            told.push(worker(number, rank, node, ms, event));
        }
    }
    told
}

fn stops(number: u64, nodes: &[u32], step: u64, at: u64) -> Vec<Told> {
    let stop = |(rank, node): (u32, u32)| {
        let reason = "drain".into();
        worker(number, rank, node, at, Event::Stop { step, reason })
    };
    (0..).zip(nodes.iter().copied()).map(stop).collect()
}

/// Three nodes form, the second is killed at step 15, the third leaves at step 25.
fn story() -> Vec<Told> {
    let mut told = vec![
        Told::Agent(generation(1, "formed", &[1, 2, 3], 1_010)),
        Told::Agent(phases(1, 1_035)),
    ];
    told.extend(trains(1, &[1, 2, 3], 0..15, 1_050));
    told.push(Told::Agent(generation(2, "nodes_lost", &[1, 3], 1_080)));
    told.push(Told::Agent(phases(2, 1_110)));
    told.extend(trains(2, &[1, 3], 10..25, 1_120));
    told.extend(stops(2, &[1, 3], 25, 1_136));
    told.push(Told::Agent(generation(3, "nodes_left", &[1], 1_150)));
    told.push(Told::Agent(phases(3, 1_180)));
    told.extend(trains(3, &[1], 25..STEPS, 1_190));
    let outcome = outcome();
    let done = Event::Done {
        step: STEPS,
        outcome,
    };
    told.push(worker(3, 0, 1, 1_206, done));
    told.push(Told::Agent(generation(4, "finished", &[], 1_210)));
    told
}

fn recorded(told: &[Told]) -> Recording {
    let mut recording = Recording::new(1_000);
    for node in 1..=3u32 {
        recording.nodes.push(NodeLife {
            name: format!("n{node}"),
            id: format!("{node:064}"),
            up_ms: 1_000,
            down: [(2, 1_070, Down::Killed), (3, 1_145, Down::Drained)]
                .into_iter()
                .find(|(n, ..)| *n == node)
                .map(|(_, ms, down)| (ms, down)),
        });
    }
    let change = |act, node: &str, at_ms| Change {
        act,
        node: node.into(),
        at_ms,
    };
    recording.changes = vec![
        change(Act::Form, "n1 n2 n3", 1_001),
        change(Act::Kill, "n2", 1_070),
        change(Act::Drain, "n3", 1_134),
    ];
    for told in told {
        match told {
            Told::Agent(event) => recording.take_event(event),
            Told::Worker(node, line) => recording.take_line(node, line),
        };
    }
    recording
}

fn faults(told: &[Told]) -> Vec<String> {
    let recording = recorded(told);
    let rows = table::rows(&recording);
    check::check(&recording, &rows, &outcome(), STEPS, SAVE_EVERY)
}

/// Exactly these faults are found once the lines of workers were changed like this.
fn check_changed(change: impl Fn(&mut String, &mut Line), expected: &[&str]) {
    let mut told = story();
    for told in &mut told {
        if let Told::Worker(node, line) = told {
            change(node, line);
        }
    }
    check_found(&faults(&told), expected);
}

fn check_found(found: &[String], expected: &[&str]) {
    for text in expected {
        assert!(
            found.iter().any(|f| f.contains(text)),
            "{text} not in {found:#?}"
        );
    }
    assert!(!expected.is_empty() || found.is_empty(), "{found:#?}");
}

#[test]
fn a_good_run_has_no_fault_and_shows_its_cost() {
    let told = story();
    check_found(&faults(&told), &[]);
    let recording = recorded(&told);
    let rows = table::rows(&recording);
    let brief: Vec<_> = rows
        .iter()
        .map(|r| (r.act.word(), r.generation, r.world, r.redone, r.stopped_at))
        .collect();
    assert_eq!(
        brief,
        [
            ("form", 1, 3, None, None),
            ("kill", 2, 2, Some(5), None),
            ("drain", 3, 1, Some(0), Some(25)),
        ]
    );
    let kill = &rows[1];
    // Known after 1110 - 1070 - (20 + 9), first step 11 later, 51 in all.
    assert_eq!(kill.detect, Some(11.0));
    assert_eq!((kill.first_step, kill.total), (Some(11), 51));
    assert_eq!(kill.pause, Some(1_121 - 1_065));
    let text = table::text(&rows);
    assert!(
        text.lines().count() == 4 && text.contains("SIGTERM to a node"),
        "{text}"
    );
    assert_eq!(table::to_json(&rows)[1]["steps_redone"], 5);
}

#[test]
fn the_timeline_has_a_row_per_node() {
    let text = timeline::text(&recorded(&story()), 1_216);
    let rows: Vec<&str> = text.lines().collect();
    assert_eq!(rows.len(), 6, "{text}");
    let row = |name: &str| *rows.iter().find(|r| r.starts_with(name)).unwrap();
    for mark in ["1", "2", "3"] {
        assert!(row("n1").contains(mark), "{text}");
    }
    assert!(
        row("n2").ends_with('x') && !row("n2").contains('3'),
        "{text}"
    );
    assert!(
        row("n3").ends_with('v') && row("n3")[4..].contains('2'),
        "{text}"
    );
    assert!(
        row("loss").contains('█') && row("loss").contains('▁'),
        "{text}"
    );
    // Nothing told yet is no reason to fail.
    timeline::text(&Recording::new(5), 5);
}

#[test]
fn what_several_agents_tell_counts_once() {
    let mut told = story();
    let again: Vec<Told> = story()
        .into_iter()
        .filter(|t| matches!(t, Told::Agent(_)))
        .collect();
    told.extend(again);
    check_found(&faults(&told), &[]);
    assert_eq!(recorded(&told).generations.len(), 4);
}

#[test]
fn a_step_lost_on_sigterm_is_found() {
    let mut told: Vec<Told> = story();
    let at = told
        .iter()
        .position(|t| matches!(t, Told::Worker(_, l) if l.generation == 3));
    // The last generation goes on from the checkpoint and not from where all stopped.
    told.truncate(at.unwrap());
    told.extend(trains(3, &[1], 20..STEPS, 1_190));
    check_found(&faults(&told), &["5 steps were lost on the drain of n3"]);
}

#[test]
fn ranks_that_are_wrong_are_found() {
    check_changed(
        |node, line| {
            if line.generation == 2 && line.rank == 1 {
                *node = "n1".into();
            }
        },
        &["rank 1 of generation 2 ran on n1 and not on n3"],
    );
    check_changed(
        |_, line| {
            if line.generation == 2 && line.rank == 1 {
                line.rank = 0;
            }
        },
        &["rank 0 of generation 2 ran on n3 and not on n1"],
    );
    check_changed(
        |_, line| match &mut line.event {
            Event::Start { world, .. } if line.generation == 2 => *world = 3,
            _ => {}
        },
        &["was told a world of 3, which is 2"],
    );
    check_changed(
        |_, line| {
            if let Event::Start { linked, .. } = &mut line.event {
                *linked = false;
            }
        },
        &["did not link the runtime"],
    );
}

#[test]
fn a_wrong_world_is_found() {
    let mut told = story();
    // A healthy node is left out for one generation.
    let odd = generation(5, "links_lost", &[1, 2], 1_060);
    told.insert(2, Told::Agent(odd));
    check_found(&faults(&told), &["generation 5 (links_lost) is on"]);
    let mut told = story();
    let Told::Agent(first) = &mut told[0] else {
        panic!("the first line is the generation")
    };
    first["members"][2]["first_rank"] = json!(1);
    check_found(
        &faults(&told),
        &["gives n3 the rank Some(1), which should be 2"],
    );
}

#[test]
fn a_node_that_costs_a_restart_is_found() {
    let charged = |number: u64| {
        let mut told = story();
        for t in &mut told {
            if let Told::Agent(event) = t
                && event["event"] == "generation"
                && event["generation"].as_u64() >= Some(number)
            {
                event["restarts_used"] = json!(1);
            }
        }
        faults(&told)
    };
    assert!(charged(9).is_empty());
    let found = charged(2);
    assert!(
        found
            .iter()
            .any(|f| f.contains("generation 2 (nodes_lost) counts 1 restarts")),
        "{found:?}"
    );
}

#[test]
fn another_result_is_found() {
    check_changed(
        |_, line| {
            if let Event::Done { outcome, .. } = &mut line.event {
                outcome.hash = "cd".repeat(32);
                outcome.correct -= 1;
            }
        },
        &["ended with the parameters cdcd", "classifies 339 held-out"],
    );
    let cut: Vec<Told> = story().into_iter().take(60).collect();
    check_found(
        &faults(&cut),
        &["ranks completed the training", "was never done"],
    );
}

#[test]
fn steps_that_are_left_out_or_differ_are_found() {
    check_changed(
        |_, line| match &mut line.event {
            Event::Step { step, .. } if *step == 30 => *step = 31,
            _ => {}
        },
        &["went from step 29 to step 31", "step 30 was never done"],
    );
    check_changed(
        |_, line| match &mut line.event {
            Event::Step { step: 12, loss } if line.generation == 2 => *loss += 0.5,
            _ => {}
        },
        &["step 12 had the loss"],
    );
}

#[test]
fn people_read_the_names_of_the_demo() {
    let mut recording = recorded(&[]);
    let text = "host-7 (00000000) joins";
    // The begin of all ids is the same here, so that the first node is meant.
    let line = recording.take_event(&json!({"event": "stopping", "why": text}));
    assert_eq!(line.unwrap(), "generation 0 stops cleanly: n1 joins");
    let wait = json!({"event": "waiting", "time_ms": 2_000, "text": "for more"});
    assert_eq!(recording.take_event(&wait), None);
    assert_eq!(recording.waits(2_100), None);
    assert_eq!(recording.waits(5_000).unwrap(), "waiting: for more");
    assert_eq!(recording.waits(9_000), None);
}
