//! Nodes that are told to go, one, several or all of them, with time and without, while a core is busy: what was
//! trained is saved, committed, and restored on what is left or by others in another world.
//!
//! Two workers: `saver`, which saves by itself and is restarted with each generation, and `trainee`, a
//! `train::Trainer` that stays in its process. Both check all that they restore.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::ground::{eventually, program};
use crate::harness::{Bed, Group, Noted, committed, metrics, now_ns};

/// Longer than any wait here: a machine that is busy.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(90);

/// Keeps a core busy until it is dropped.
struct Busy(Arc<AtomicBool>, Option<JoinHandle<()>>);

impl Busy {
    fn begin() -> Busy {
        let over = Arc::new(AtomicBool::new(false));
        let stop = over.clone();
        let thread = std::thread::spawn(move || {
            let mut x = 1u64;
            while !stop.load(Ordering::Relaxed) {
                for _ in 0..10_000 {
                    x = std::hint::black_box(x.wrapping_mul(6364136223846793005).wrapping_add(1));
                }
            }
        });
        Busy(over, Some(thread))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        if let Some(thread) = self.1.take() {
            let _ended = thread.join();
        }
    }
}

struct Job {
    bed: Bed,
    store: tempfile::TempDir,
    _busy: Busy,
}

impl Job {
    /// `worker` saves every so many steps.
    fn new(worker: &str, every: u64, flags: &[&str]) -> Job {
        let store = tempfile::tempdir().unwrap();
        let dir = format!("--store={}", store.path().display());
        let mut bed = Bed::new(&[&["--nnodes=1:3", "--join-quiet=100ms", &dir], flags].concat());
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        let (events, control) = (text(bed.path("events")), text(bed.path("control")));
        bed.script(&[
            "--",
            &program(worker),
            &events,
            &control,
            "2",
            &every.to_string(),
        ]);
        Job {
            bed,
            store,
            _busy: Busy::begin(),
        }
    }

    /// Starts these, and waits until all of them train together.
    fn train(&mut self, nodes: &[usize]) -> Group {
        let at = now_ns();
        for node in nodes {
            self.bed.run(*node, nodes[0]);
        }
        self.group(nodes, at)
    }

    /// The newest generation, once these nodes have begun it after that time.
    fn group(&self, nodes: &[usize], after: u64) -> Group {
        eventually(PATIENCE, &format!("a generation of {nodes:?}"), || {
            self.bed.newest(nodes, after)
        })
    }

    /// Notes of a generation's ranks in it. Another job may have a generation of the same number.
    fn noted(&self, event: &str, group: &Group) -> Vec<Noted> {
        let theirs = |e: &Noted| group.ranks.iter().any(|r| r.pid == e.pid);
        let all = self.bed.events().into_iter();
        all.filter(|e| e.event == event && e.generation == group.generation && theirs(e))
            .collect()
    }

    /// Waits until all ranks are some steps into it, so that their launchers know that all have attached.
    fn trains(&self, group: &Group) {
        let number = group.generation;
        let told = group.ranks.iter().map(|r| r.step).max().unwrap();
        eventually(PATIENCE, "it trains", || {
            let steps = self.noted("step", group).into_iter();
            // Who restores says so before its first step.
            let restored = self.noted("restored", group).into_iter().map(|e| e.step);
            let began = restored.chain([told]).max().unwrap();
            let noted = steps.filter(|e| e.step > began + 15).count() > 0;
            (noted || self.bed.has_met(number, began + 15)).then_some(())
        });
    }

    fn tell(&self, nodes: &[usize], signal: Signal) {
        for node in nodes {
            self.bed.signal(self.bed.launcher_pid(*node), signal);
        }
    }

    fn committed(&self) -> Vec<u64> {
        committed(self.store.path())
    }

    /// The step before which all ranks of a generation have saved last, and were to.
    fn stopped(&self, group: &Group) -> u64 {
        let saved = self.noted("saved", group);
        let last = saved.iter().map(|e| e.step).max().unwrap();
        let all = saved.iter().filter(|e| e.step == last).count();
        assert_eq!(all, group.ranks.len(), "all save step {last}: {saved:?}");
        last
    }

    /// The step that every rank of a generation restored, the same on all.
    fn restored(&self, group: &Group) -> u64 {
        let world = group.ranks.len();
        let all = eventually(PATIENCE, "every rank has restored", || {
            let all = self.noted("restored", group);
            (all.len() == world).then_some(all)
        });
        assert!(all.iter().all(|e| e.step == all[0].step), "{all:?}");
        all[0].step
    }

    /// Starts these, and waits until all of them train together; the step that they went on from. Nodes that miss each
    /// other at first meet in a second generation, and who joins a trainer is given its state: the first one counts.
    fn resume(&mut self, nodes: &[usize]) -> u64 {
        let at = now_ns();
        self.train(nodes);
        let restored = || {
            let mut all = self.bed.events();
            all.retain(|e| e.event == "restored" && e.t > at);
            let (generation, world) = all.first().map(|e| (e.generation, e.world))?;
            all.retain(|e| e.generation == generation);
            (all.len() >= world as usize).then_some(all)
        };
        let all = eventually(PATIENCE, "all ranks have restored", restored);
        assert!(all.iter().all(|e| e.step == all[0].step), "{all:?}");
        all[0].step
    }

    fn finish(mut self, nodes: &[usize]) {
        // A trainee, which notes its steps, ends after one of its own: one that still takes in the others' state would
        // be left behind.
        if self.bed.events().iter().any(|e| e.event == "step") {
            eventually(PATIENCE, "all train", || {
                let group = self.bed.newest(nodes, 0)?;
                let steps = self.noted("step", &group);
                let steps = |pid| steps.iter().any(|e| e.pid == pid);
                group.ranks.iter().all(|r| steps(r.pid)).then_some(())
            });
        }
        self.bed.order(None, 0);
        for node in nodes {
            assert_eq!(self.bed.ended(*node), Some(0), "n{node}");
        }
    }
}

/// Two of three at once, then the last one; others in another world go on at the very step.
#[track_caller]
fn two_then_all(worker: &str) {
    let mut job = Job::new(worker, 1_000_000, &[]);
    let first = job.train(&[0, 1, 2]);
    job.trains(&first);
    let gone = [first.nodes()[0], first.nodes()[1]];
    let stays = first.nodes()[2];
    let at = now_ns();
    job.tell(&gone, Signal::SIGTERM);
    let alone = job.group(&[stays], at);
    for node in gone {
        assert_eq!(job.bed.ended(node), Some(143), "n{node}");
    }
    let stopped = job.stopped(&first);
    assert!(
        job.committed().contains(&stopped),
        "{stopped} of {:?}",
        job.committed()
    );
    // Whether restored or kept: it begins where all stopped.
    job.trains(&alone);
    match worker {
        "saver" => assert_eq!(job.restored(&alone), stopped),
        _ => assert_eq!(alone.ranks[0].step, stopped),
    }
    job.tell(&[stays], Signal::SIGTERM);
    assert_eq!(job.bed.ended(stays), Some(143));
    let last = job.stopped(&alone);
    assert!(last > stopped);
    assert_eq!(job.committed().last(), Some(&last));
    assert_eq!(job.resume(&[3, 4]), last, "no step is lost");
    job.finish(&[3, 4]);
}

#[test]
fn two_nodes_go_at_once_and_then_the_last() {
    two_then_all("saver");
}

#[test]
fn two_nodes_of_a_trainer_go_at_once_and_then_the_last() {
    two_then_all("trainee");
}

/// All at once, with so much time.
#[track_caller]
fn all_at_once(worker: &str, grace: &str) {
    let mut job = Job::new(worker, 1_000_000, &[grace]);
    let first = job.train(&[0, 1, 2]);
    job.trains(&first);
    job.tell(&[0, 1, 2], Signal::SIGTERM);
    for node in [0, 1, 2] {
        assert_eq!(job.bed.ended(node), Some(143), "n{node}");
    }
    let stopped = job.stopped(&first);
    assert_eq!(job.committed().last(), Some(&stopped));
    // One node in the place of three.
    assert_eq!(job.resume(&[4]), stopped, "no step is lost");
    job.finish(&[4]);
}

#[test]
fn all_nodes_go_at_once() {
    all_at_once("saver", "--stop-grace=30s");
}

#[test]
fn all_nodes_go_at_once_within_three_seconds() {
    all_at_once("saver", "--stop-grace=3s");
}

#[test]
fn all_nodes_of_a_trainer_go_at_once() {
    all_at_once("trainee", "--stop-grace=30s");
}

#[test]
fn all_nodes_of_a_trainer_go_at_once_within_three_seconds() {
    all_at_once("trainee", "--stop-grace=3s");
}

/// All at once, and killed right after: what was committed before is there.
#[track_caller]
fn no_time_at_all(worker: &str) {
    let mut job = Job::new(worker, 5, &[]);
    let first = job.train(&[0, 1, 2]);
    eventually(PATIENCE, "two commits", || {
        (job.committed().len() >= 2).then_some(())
    });
    let before = *job.committed().last().unwrap();
    job.tell(&[0, 1, 2], Signal::SIGTERM);
    for node in [0, 1, 2] {
        job.bed.kill(node);
    }
    let restored = job.resume(&[3, 4]);
    assert!(restored >= before, "{restored} after {before}");
    assert!(job.committed().contains(&restored));
    let saved = job.noted("saved", &first);
    assert!(
        saved.iter().any(|e| e.step == restored),
        "{restored} of {saved:?}"
    );
    job.finish(&[3, 4]);
}

#[test]
fn nodes_that_are_killed_right_after_the_notice_lose_what_was_not_committed() {
    no_time_at_all("saver");
}

#[test]
fn a_trainer_whose_nodes_are_killed_right_after_the_notice_begins_at_its_last_commit() {
    no_time_at_all("trainee");
}

#[test]
fn an_agent_that_is_told_to_go_loses_no_step_of_a_trainer() {
    let mut job = Job::new("trainee", 1_000_000, &[]);
    let at = now_ns();
    for node in 0..3 {
        job.bed.agent(node);
    }
    for node in 0..3 {
        job.bed.attach(node);
    }
    let first = job.group(&[0, 1, 2], at);
    job.trains(&first);
    // It leads.
    let gone = first.nodes()[0];
    let others: Vec<usize> = (0..3).filter(|n| *n != gone).collect();
    let at = now_ns();
    job.bed.signal(job.bed.agent_pid(gone), Signal::SIGTERM);
    let two = job.group(&others, at);
    assert_eq!(job.bed.ended(gone), Some(143));
    let stopped = job.stopped(&first);
    assert!(two.ranks.iter().all(|rank| rank.step == stopped), "{two:?}");
    eventually(PATIENCE, "the commit", || {
        job.committed().contains(&stopped).then_some(())
    });
    // The processes stayed, and go on.
    job.trains(&two);
    for node in &others {
        assert_eq!(two.pid(*node), first.pid(*node));
    }
    job.finish(&others);
}

#[test]
fn the_best_model_of_a_trainer_is_saved_and_says_how_good_it_is() {
    let mut job = Job::new("trainee", 1_000_000, &[]);
    job.train(&[0, 1]);
    // It is best after step 10, better after 20, and never again.
    eventually(PATIENCE, "both are committed", || {
        (job.committed().ends_with(&[10, 20])).then_some(())
    });
    let all = metrics(job.store.path());
    assert!(all.iter().all(|(_, metrics)| metrics["better"] == "lower"));
    let metric = |(step, metrics): &(u64, Value)| (*step, metrics["metric"].as_f64().unwrap());
    let metrics: Vec<(u64, f64)> = all.iter().map(metric).collect();
    assert_eq!(metrics, [(10, 10.0), (20, 0.0)]);
    job.finish(&[0, 1]);
}
