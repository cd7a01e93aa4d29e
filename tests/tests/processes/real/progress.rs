//! How far workers are that have attached to their control pages. One that makes no progress is named
//! on every node, its stacks are kept, and it is ended where that was asked for. Reports of the workers about their
//! training are shown. They save at one step by order, and go on.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::harness::{Bed, Group, now_ns};

/// A worker is hung after three seconds without progress; usual steps take 30 ms.
const FLAGS: [&str; 3] = ["--nnodes=3", "--hang-factor=20", "--hang-min=3s"];

/// Ten times what it takes from the hang until it is named: 3 s, and what the nodes ask each other.
const NAMED_WITHIN: Duration = Duration::from_secs(35);

fn three(more: &[&str]) -> (Bed, Group) {
    let flags: Vec<&str> = FLAGS.iter().chain(more).copied().collect();
    let mut bed = Bed::new(&flags);
    bed.steps();
    for node in 0..3 {
        bed.run(node, 0);
    }
    let group = bed.group(&[0, 1, 2], 0);
    (bed, group)
}

/// All workers have done their first steps.
fn trains(bed: &Bed, group: &Group) {
    bed.until("the first steps", |bed| bed.has_met(group.generation, 20));
}

/// Checks every node's words about a hang, once all have some.
fn named(bed: &Bed, rank: u32, node: usize, since: Instant) {
    let text = format!("for rank {rank} on n{node} ");
    bed.until("every launcher names the rank and its node", |bed| {
        (0..3).all(|n| bed.said(n).contains(&text))
    });
    let took = since.elapsed();
    println!("named after {took:?}");
    assert!(took < NAMED_WITHIN, "{took:?}");
    for n in 0..3 {
        let events = bed.history(n, "hung");
        assert_eq!(events.len(), 1, "n{n}: {events:?}");
        assert_eq!(events[0]["ranks"][0]["rank"], rank);
        let jobs = bed.job(n)["hung"].to_string();
        assert!(jobs.contains(&text), "n{n}: {jobs}");
        assert!(bed.status(n)["hung"].to_string().contains(&text));
    }
}

/// The file that the launcher of the node names.
fn stacks(bed: &Bed, node: usize) -> String {
    let mut found = None;
    bed.until("the stacks are kept", |bed| {
        let said = bed.said(node);
        let lines = said.lines().filter_map(|l| l.split_once("stacks of rank "));
        found = lines
            .filter_map(|(_, l)| l.split_once(": "))
            .next_back()
            .map(|(_, path)| path.to_owned());
        found.is_some()
    });
    std::fs::read_to_string(PathBuf::from(found.unwrap())).unwrap()
}

#[test]
fn a_stopped_worker_is_named_on_every_node_and_goes_on_when_it_is_woken() {
    let (mut bed, group) = three(&[]);
    trains(&bed, &group);
    let node = group.nodes()[1];
    let began = Instant::now();
    bed.signal(group.pid(node), Signal::SIGSTOP);
    named(&bed, 1, node, began);
    let text = stacks(&bed, node);
    assert!(
        text.contains("rank 1, pid") && text.contains("state T"),
        "{text}"
    );
    // Nothing is ended unless that was asked for.
    bed.signal(group.pid(node), Signal::SIGCONT);
    bed.until("every launcher says that it goes on", |bed| {
        (0..3).all(|n| bed.said(n).contains("all ranks make progress again"))
    });
    bed.until("nothing hangs any more", |bed| {
        (0..3).all(|n| bed.job(n)["hung"] == "")
    });
    bed.order(None, 0);
    for node in 0..3 {
        assert_eq!(bed.ended(node), Some(0), "n{node}");
    }
}

#[test]
fn a_worker_that_sleeps_inside_its_step_is_ended_by_the_policy_and_the_job_recovers() {
    let (mut bed, group) = three(&["--on-hang=restart", "--max-restarts=1"]);
    trains(&bed, &group);
    let (node, at) = (group.nodes()[2], now_ns());
    bed.sleep(2);
    let again = bed.group(&[0, 1, 2], at);
    assert_eq!(again.ranks[0].restart, 1);
    let text = stacks(&bed, node);
    assert!(
        text.contains("rank 2, pid") && text.contains("state S"),
        "{text}"
    );
    for n in 0..3 {
        let generations = bed.history(n, "generation");
        let last = generations.last().unwrap();
        assert_eq!(last["cause"], "worker_hung", "{last}");
        assert_eq!(last["about"]["rank"], 2, "{last}");
        assert_eq!(last["restarts_used"], 1, "{last}");
        // By the operation that it never entered: all ranks are in the same step.
        assert_eq!(bed.history(n, "hung")[0]["evidence"], "operation");
    }
    trains(&bed, &again);
    // The budget is spent: the next hang ends the job, and every node says why.
    bed.sleep(0);
    for n in 0..3 {
        assert_eq!(bed.ended(n), Some(137), "n{n}");
        let said = bed.said(n);
        let first = format!("rank 0 on n{}", again.rank0());
        assert!(
            said.contains(&first) && said.contains("hung and was ended; its restarts are used up"),
            "n{n}: {said}"
        );
    }
}

/// Metrics on the agent's HTTP port whose names begin so, one line for each series.
pub(crate) fn metrics(address: &str, name: &str) -> Vec<String> {
    let Ok(mut stream) = TcpStream::connect(address) else {
        return Vec::new();
    };
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let lines = text.lines().filter(|l| l.starts_with(name));
    lines.map(str::to_owned).collect()
}

fn training(address: &str) -> Vec<String> {
    metrics(address, "muster_training_")
}

#[test]
fn the_agent_shows_what_the_workers_report_until_they_are_gone() {
    let mut bed = Bed::of(1, &["--nnodes=1", "--nproc-per-node=2"]);
    bed.steps();
    let address = bed.agent_with_http(0);
    bed.attach(0);
    let value = |lines: &[String], name: &str, rank: u32| -> Option<f64> {
        let owner = nix::unistd::getuid();
        let series = format!(r#"{name}{{job="job",node="n0",owner="{owner}",rank="{rank}"}} "#);
        lines
            .iter()
            .find_map(|l| l.strip_prefix(&series)?.parse().ok())
    };
    bed.until("both ranks are shown, and move", |_| {
        let lines = training(&address);
        let loss = |rank| value(&lines, "muster_training_loss", rank);
        let steps = |rank| value(&lines, "muster_training_steps_total", rank);
        (0..2).all(|rank| {
            let fits = |(loss, steps): (f64, f64)| (loss - 1.0 / (steps + 1.0)).abs() < 1e-9;
            steps(rank).is_some_and(|s| s > 100.0) && loss(rank).zip(steps(rank)).is_some_and(fits)
        })
    });
    let lines = training(&address);
    assert_eq!(value(&lines, "muster_training_world_size", 0), Some(2.0));
    let seconds = value(&lines, "muster_training_data_seconds_total", 1);
    let steps = value(&lines, "muster_training_steps_total", 1);
    assert_eq!(seconds, steps.map(|s| 0.25 * s));
    // What a worker does not know is not shown.
    assert!(
        !lines
            .iter()
            .any(|l| l.contains("loss_scale") || l.contains("sync")),
        "{lines:?}"
    );
    bed.order(None, 0);
    assert_eq!(bed.ended(0), Some(0));
    bed.until("no series is left", |_| training(&address).is_empty());
}

/// The steps at which ranks were asked to save, in the order of asking.
fn checkpoints(bed: &Bed) -> Vec<(u32, u64)> {
    let events = bed.events().into_iter();
    let saves = events.filter(|e| e.event == "checkpoint");
    saves.map(|e| (e.rank, e.step)).collect()
}

#[test]
fn all_ranks_save_at_one_step_and_go_on() {
    let (mut bed, group) = three(&["--max-restarts=0"]);
    trains(&bed, &group);
    for asked in 0..3 {
        let (done, said) = bed.checkpoint(asked, &["-o", "json"]);
        assert!(done, "{said}");
        let told: serde_json::Value = serde_json::from_str(&said).unwrap();
        assert_eq!(told["saved"], serde_json::json!([0, 1, 2]), "{said}");
        let mut saved = checkpoints(&bed).split_off(3 * asked);
        saved.sort_unstable();
        let step = told["step"].as_u64().unwrap();
        assert_eq!(saved, [(0, step), (1, step), (2, step)]);
        bed.until("it goes on", |bed| bed.has_met(group.generation, step + 20));
    }
    // Who has not saved yet is named to the one that asked, and the job goes on once it has.
    bed.save_slowly(1);
    let (done, said) = bed.checkpoint(0, &["--timeout=3s"]);
    assert!(
        !done && said.contains("2 of 3 saved (0, 2), the first without: 1"),
        "{said}"
    );
    let (_, step) = *checkpoints(&bed).last().unwrap();
    bed.until("it goes on", |bed| bed.has_met(group.generation, step + 20));
    let starts = bed.events().into_iter().filter(|e| e.event == "start");
    assert_eq!(starts.count(), 3, "nobody was restarted");
    // A stop behind it: all ranks at one step, and none by the signal.
    let leaves = group.nodes()[2];
    bed.signal(bed.launcher_pid(leaves), Signal::SIGTERM);
    assert_eq!(bed.ended(leaves), Some(143));
    bed.until("all ranks stop", |bed| {
        bed.events().iter().filter(|e| e.event == "stopped").count() == 3
    });
    let stopped = bed.events().into_iter().filter(|e| e.event == "stopped");
    let steps: std::collections::BTreeSet<u64> = stopped.map(|e| e.step).collect();
    assert_eq!(steps.len(), 1, "{steps:?}");
}

/// Ten times what it takes until a restarted agent is connected, leads, and has asked what is open; far less
/// than the minute after which a rank gives up by itself.
const RESUMED_WITHIN: Duration = Duration::from_secs(30);

#[test]
fn ranks_go_on_when_an_agent_is_restarted_while_they_agree_on_a_checkpoint() {
    let mut bed = Bed::new(&["--nnodes=3", "--max-restarts=0"]);
    bed.steps();
    for node in 0..3 {
        bed.agent(node);
    }
    for node in 0..3 {
        bed.attach(node);
    }
    let group = bed.group(&[0, 1, 2], 0);
    trains(&bed, &group);
    let (leader, member, asks) = (group.rank0(), group.nodes()[1], group.nodes()[2]);
    for (round, restarted) in [leader, member].into_iter().enumerate() {
        // Whose launcher does not answer keeps the others waiting for a step.
        bed.signal(bed.launcher_pid(asks), Signal::SIGSTOP);
        let command = bed.begin_checkpoint(asks, &["-o", "json"]);
        let mut before = Vec::new();
        bed.until("the ranks wait", |bed| {
            let now = bed.steps_met(group.generation);
            now.len() == 3 && std::mem::replace(&mut before, now.clone()) == now
        });
        bed.kill_agent(restarted);
        let began = Instant::now();
        bed.agent(restarted);
        bed.signal(bed.launcher_pid(asks), Signal::SIGCONT);
        let furthest = before.into_iter().max().unwrap();
        bed.until("they go on", |bed| {
            bed.has_met(group.generation, furthest + 20)
        });
        let took = began.elapsed();
        println!("went on after {took:?}");
        assert!(took < RESUMED_WITHIN, "{took:?}");
        let (done, said) = Bed::checkpointed(command);
        assert!(done, "{said}");
        let mut saved = checkpoints(&bed).split_off(3 * round);
        saved.sort_unstable();
        let step = saved[0].1;
        assert_eq!(saved, [(0, step), (1, step), (2, step)], "{said}");
    }
    let starts = bed.events().into_iter().filter(|e| e.event == "start");
    assert_eq!(starts.count(), 3, "nobody was restarted");
    bed.order(None, 0);
    for node in 0..3 {
        assert_eq!(bed.ended(node), Some(0), "n{node}");
    }
}
