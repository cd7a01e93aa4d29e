//! Plain DDP with `muster.py`: no step is lost on SIGTERM, and what is restored is what was there, bit for bit.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use nix::sys::signal::Signal;

use crate::clouds::fake::Faults;
use crate::clouds::lend;
use crate::clouds::proxy::Fault;
use crate::ground::{eventually, program};
use crate::harness::{Bed, Group, Noted, metrics, now_ns, project, python};
use crate::real::buckets::bucket;

/// The bound of waits for processes that import PyTorch.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(90);

/// A job of `trainer.py`, and its store.
struct Job {
    bed: Bed,
    store: tempfile::TempDir,
}

/// A bed whose workers find `muster.py` and its library.
pub(super) fn bed(nodes: &str, store: &str) -> Bed {
    let (nodes, store) = (format!("--nnodes={nodes}"), format!("--store={store}"));
    let mut bed = Bed::new(&[&nodes, &store, "--max-restarts=1"]);
    bed.env("PYTHONPATH", &project("python"));
    bed.env("MUSTER_LIBRARY", &program("libmuster.so"));
    bed.env("OMP_NUM_THREADS", "1");
    bed.env("PYTHON_EXEC", &python());
    bed
}

impl Job {
    fn new(nodes: &str, steps: u64, every: u64, more: &[&str]) -> Job {
        let store = tempfile::tempdir().unwrap();
        let mut bed = bed(nodes, store.path().to_str().unwrap());
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        let (events, control) = (text(bed.path("events")), text(bed.path("control")));
        let (steps, every) = (steps.to_string(), every.to_string());
        let script = project("tests/tests/processes/harness/trainer.py");
        let words = ["--", &python(), &script, &events, &control, &steps, &every];
        bed.script(&[&words[..], more].concat());
        Job { bed, store }
    }

    /// The newest generation, once each of these nodes has trained in it up to this step.
    fn trains(&self, nodes: &[usize], after: u64, step: u64) -> Group {
        eventually(PATIENCE, "it trains; logs below", || {
            let group = self.bed.newest(nodes, after)?;
            let done = self.noted("done", &group);
            let ranks: BTreeSet<u32> = done
                .iter()
                .filter(|e| e.step >= step)
                .map(|e| e.rank)
                .collect();
            (ranks.len() == group.ranks.len()).then_some(group)
        })
    }

    /// Notes of a generation's ranks in it. Another job may have a generation of the same number.
    fn noted(&self, event: &str, group: &Group) -> Vec<Noted> {
        let theirs = |e: &Noted| group.ranks.iter().any(|r| r.pid == e.pid);
        let all = self.bed.events().into_iter();
        all.filter(|e| e.event == event && e.generation == group.generation && theirs(e))
            .collect()
    }

    /// The digest of the state after each step of a generation: the same on every rank that has done it.
    fn digests(&self, group: &Group) -> BTreeMap<u64, String> {
        let mut found = BTreeMap::new();
        for event in self.noted("done", group) {
            let digest = found
                .entry(event.step)
                .or_insert_with(|| event.digest.clone());
            assert_eq!(*digest, event.digest, "after step {}", event.step);
        }
        found
    }

    /// Where a generation began: the same step and state on every rank.
    fn began(&self, group: &Group) -> Noted {
        let all = self.noted("begin", group);
        assert_eq!(all.len(), group.ranks.len());
        let same = all
            .iter()
            .all(|e| (e.step, &e.digest) == (all[0].step, &all[0].digest));
        assert!(same, "{all:?}");
        all[0].clone()
    }

    /// The steps whose commits are in the log, in its order.
    fn committed(&self) -> Vec<u64> {
        let log = self.store.path().join("job/log");
        let mut entries: BTreeMap<u64, u64> = BTreeMap::new();
        for entry in std::fs::read_dir(log).into_iter().flatten() {
            let path = entry.unwrap().path();
            let Some(seq) = path.file_stem().and_then(|s| s.to_str()?.parse().ok()) else {
                continue;
            };
            let text = std::fs::read_to_string(&path).unwrap();
            let entry: serde_json::Value = serde_json::from_str(&text).unwrap();
            if let Some(step) = entry["body"]["commit"]["step"].as_u64() {
                entries.insert(seq, step);
            }
        }
        entries.into_values().collect()
    }
}

#[test]
fn no_step_is_lost_on_sigterm_and_all_may_die() {
    let mut job = Job::new("2:3", 1_000_000, 10, &["--shards"]);
    for node in 0..3 {
        job.bed.agent(node);
    }
    for node in 0..3 {
        job.bed.attach(node);
    }
    let three = job.trains(&[0, 1, 2], 0, 15);
    assert_eq!(job.began(&three).step, 0);
    let gone = three.nodes()[1];
    job.bed.signal(job.bed.agent_pid(gone), Signal::SIGTERM);
    assert_eq!(job.bed.ended(gone), Some(143));
    let stay: Vec<usize> = (0..3).filter(|node| *node != gone).collect();
    let two = job.trains(&stay, three.began(), 0);

    // All ranks stopped behind the same step, the next generation began with the one after, and with that very state.
    let before = job.digests(&three);
    let last = *before.keys().last().unwrap();
    assert_eq!(
        before.keys().copied().collect::<Vec<u64>>(),
        (0..=last).collect::<Vec<u64>>()
    );
    let each = job.noted("done", &three).len() as u64;
    assert_eq!(each, 3 * (last + 1), "every rank did every step");
    let began = job.began(&two);
    assert_eq!((began.step, &began.digest), (last + 1, &before[&last]));
    assert!(
        job.committed().contains(&(last + 1)),
        "{:?} of {last}",
        job.committed()
    );

    // Every process of the job dies. Other nodes have nothing but the store.
    let enough = |job: &Job| {
        job.committed()
            .iter()
            .filter(|step| **step > last + 1)
            .count()
            >= 2
    };
    eventually(PATIENCE, "two commits more", || enough(&job).then_some(()));
    let known = job.committed();
    let at = stay.iter().map(|node| job.bed.kill(*node)).max().unwrap();
    for node in [3, 4] {
        job.bed.agent(node);
    }
    for node in [3, 4] {
        job.bed.attach(node);
    }
    let others = job.trains(&[3, 4], at, 0);
    let began = job.began(&others);
    assert!(
        began.step >= *known.last().unwrap(),
        "{} of {known:?}",
        began.step
    );
    assert!(job.committed().contains(&began.step));
    assert_eq!(began.digest, job.digests(&two)[&(began.step - 1)]);
    job.bed.order(None, 0);
    assert_eq!((job.bed.ended(3), job.bed.ended(4)), (Some(0), Some(0)));
}

#[test]
fn two_nodes_go_at_once_within_three_seconds_and_then_the_last() {
    let mut job = Job::new("1:3", 1_000_000, 1_000_000, &[]);
    job.bed.env("PET_STOP_GRACE", "3s");
    (0..3).for_each(|node| job.bed.run(node, 0));
    let three = job.trains(&[0, 1, 2], 0, 15);
    let gone = [three.nodes()[0], three.nodes()[2]];
    let stays = three.nodes()[1];
    let at = now_ns();
    let tell = |job: &Job, node| (job.bed).signal(job.bed.launcher_pid(node), Signal::SIGTERM);
    gone.iter().for_each(|node| tell(&job, *node));
    // Some steps on, so that its launcher knows that it has attached.
    let goes_on_at = |job: &Job| job.digests(&three).keys().last().map_or(0, |step| step + 1);
    job.trains(&[stays], at, 0);
    let alone = job.trains(&[stays], at, goes_on_at(&job) + 15);
    for node in gone {
        assert_eq!(job.bed.ended(node), Some(143), "{}", job.bed.said(node));
    }
    // Whoever goes on begins where all stopped, with that very state.
    let goes_on = |job: &Job, before: &Group, after: &Group| {
        let digests = job.digests(before);
        let (last, digest) = digests.last_key_value().unwrap();
        let began = job.began(after);
        assert_eq!((began.step, &began.digest), (last + 1, digest));
        assert_eq!(job.committed().last(), Some(&(last + 1)));
    };
    goes_on(&job, &three, &alone);
    tell(&job, stays);
    assert_eq!(job.bed.ended(stays), Some(143), "{}", job.bed.said(stays));
    let at = now_ns();
    job.bed.run(3, 3);
    let other = job.trains(&[3], at, 0);
    goes_on(&job, &alone, &other);
    job.bed.order(None, 0);
    assert_eq!(job.bed.ended(3), Some(0), "{}", job.bed.said(3));
}

#[test]
fn a_training_that_was_killed_and_stopped_ends_as_an_undisturbed_one() {
    const STEPS: u64 = 90;
    let finish = |job: &mut Job, nodes: [usize; 2]| {
        job.trains(&nodes, 0, STEPS - 1);
        for node in nodes {
            assert_eq!(job.bed.ended(node), Some(0), "{}", job.bed.said(node));
        }
        let all = job.bed.events();
        let ends: Vec<&Noted> = all.iter().filter(|e| e.event == "finished").collect();
        assert_eq!((ends.len(), &ends[0].digest), (2, &ends[1].digest));
        ends[0].digest.clone()
    };
    let mut calm = Job::new("2", STEPS, 20, &[]);
    (0..2).for_each(|node| calm.bed.run(node, 0));
    let expected = finish(&mut calm, [0, 1]);
    drop(calm);

    let mut job = Job::new("2", STEPS, 20, &[]);
    (0..2).for_each(|node| job.bed.run(node, 0));
    let first = job.trains(&[0, 1], 0, 30);
    eventually(PATIENCE, "a commit", || {
        job.committed().contains(&20).then_some(())
    });
    let at = [0, 1].map(|node| job.bed.kill(node))[1];
    (2..4).for_each(|node| job.bed.run(node, 2));
    let next = job.trains(&[2, 3], at, 50);
    let again = job.began(&next);
    assert_eq!(again.digest, job.digests(&first)[&(again.step - 1)]);
    // A checkpoint by order, in the middle.
    let (ok, said) = job.bed.checkpoint(2, &[]);
    assert!(ok, "{said}");
    assert_eq!(finish(&mut job, [2, 3]), expected);
}

/// Nodes that are told and killed right after: what was committed before is there, with that very state.
#[track_caller]
fn no_time_at_all(gone: &[usize], goes_on: &[usize]) {
    // With a minimum of two: one alone would begin, and stop for the other, at steps of its own.
    let mut job = Job::new("2:3", 1_000_000, 5, &[]);
    (0..3).for_each(|node| job.bed.run(node, 0));
    let first = job.trains(&[0, 1, 2], 0, 0);
    let start = job.began(&first).step;
    let its_own = |job: &Job| job.committed().iter().filter(|step| **step > start).count();
    eventually(PATIENCE, "two commits of this generation", || {
        (its_own(&job) >= 2).then_some(())
    });
    let before = *job.committed().last().unwrap();
    let at = now_ns();
    for node in gone {
        (job.bed).signal(job.bed.launcher_pid(*node), Signal::SIGTERM);
    }
    for node in gone {
        job.bed.kill(*node);
    }
    for node in goes_on.iter().filter(|node| !first.nodes().contains(node)) {
        job.bed.run(*node, goes_on[0]);
    }
    let next = job.trains(goes_on, at, 0);
    let began = job.began(&next);
    assert!(began.step >= before, "{} after {before}", began.step);
    assert!(job.committed().contains(&began.step));
    assert_eq!(began.digest, job.digests(&first)[&(began.step - 1)]);
    job.bed.order(None, 0);
    for node in goes_on {
        assert_eq!(job.bed.ended(*node), Some(0), "{}", job.bed.said(*node));
    }
}

#[test]
fn a_node_that_is_killed_right_after_the_notice_loses_what_was_not_committed() {
    no_time_at_all(&[2], &[0, 1]);
}

#[test]
fn nodes_that_are_killed_right_after_the_notice_lose_what_was_not_committed() {
    no_time_at_all(&[0, 1, 2], &[3, 4]);
}

#[test]
fn the_best_state_of_a_script_is_kept() {
    let mut job = Job::new("1", 1_000_000, 10, &["--evaluate"]);
    job.bed.env("PET_KEEP_BEST", "1");
    job.bed.run(0, 0);
    let there = |step: u64| {
        let data = std::fs::read_dir(job.store.path().join("job/data")).unwrap();
        let mut names = data.map(|entry| entry.unwrap().file_name());
        names.any(|name| name.to_str().unwrap().starts_with(&format!("{step}-")))
    };
    eventually(PATIENCE, "of the older ones the best alone is left", || {
        let many = job.committed().len() >= 8;
        (many && !there(10) && there(20) && !there(30)).then_some(())
    });
    job.bed.order(None, 0);
    assert_eq!(job.bed.ended(0), Some(0), "{}", job.bed.said(0));
    let all = metrics(job.store.path());
    let (_, best) = all.iter().find(|(step, _)| *step == 20).unwrap();
    assert_eq!(*best, serde_json::json!({ "loss": 0.0 }));
}

/// The example is told to stop, and goes on elsewhere: each step once, over both runs.
#[track_caller]
fn stops_and_goes_on(mut bed: Bed) {
    let script = project("examples/three_lines.py");
    bed.script(&[
        "--nproc-per-node=2",
        &script,
        "--steps=2000",
        "--print-every=50",
    ]);
    bed.run(0, 0);
    let says = |bed: &Bed, node, what: &str| {
        eventually(PATIENCE, what, || {
            bed.said(node).contains(what).then_some(())
        });
    };
    says(&bed, 0, "step 150:");
    bed.signal(bed.launcher_pid(0), Signal::SIGTERM);
    assert_eq!(bed.ended(0), Some(143), "{}", bed.said(0));
    says(&bed, 0, "muster: all ranks stop before step");
    bed.run(1, 1);
    says(&bed, 1, "step 2000:");
    assert_eq!(bed.ended(1), Some(0), "{}", bed.said(1));
    let both = bed.said(0) + &bed.said(1);
    for step in (50..=2000).step_by(50) {
        let times = both.matches(&format!("step {step}:")).count();
        assert_eq!(times, 1, "step {step}");
    }
}

#[test]
fn the_example_stops_and_goes_on_and_is_done_once() {
    let store = tempfile::tempdir().unwrap();
    stops_and_goes_on(bed("1", store.path().to_str().unwrap()));
}

#[test]
fn the_example_stops_and_goes_on_from_a_bucket() {
    let (_fake, proxy, location) = bucket(Faults::default());
    let mut bed = bed("1", &location);
    lend(&mut bed, proxy.port);
    proxy.inject("GET", "/data/", 1, Fault::Reset);
    stops_and_goes_on(bed);
    assert!(proxy.count("GET", "/data/") >= 2, "it was restored");
}
