//! Checkpoints that outlive every process: saved by slots, committed in the job's log, restored by whatever nodes
//! come next.

use std::ops::ControlFlow;
use std::path::PathBuf;

use muster_store::{Location, Options, Store, Variables};
use nix::sys::signal::Signal;

use crate::ground::program;
use crate::harness::{Bed, Group, Noted, now_ns};

/// A store, and a job of nodes whose workers save every so many steps.
pub(crate) struct Saves {
    pub(crate) bed: Bed,
    /// The job's folder.
    pub(crate) store: Store,
    /// Of a store that is one.
    directory: Option<tempfile::TempDir>,
}

impl Saves {
    fn new(nodes: &str, mib: usize, every: u64) -> Saves {
        Saves::with(&["--max-restarts=1"], nodes, mib, every)
    }

    /// With flags of its own.
    pub(crate) fn with(flags: &[&str], nodes: &str, mib: usize, every: u64) -> Saves {
        let directory = tempfile::tempdir().unwrap();
        let location = Location::Directory(directory.path().to_owned());
        let store = Store::open(&location, &Options::new(Variables::default())).unwrap();
        let mut saves = Saves::at(&location.to_string(), &store, flags, nodes, mib, every);
        saves.directory = Some(directory);
        saves
    }

    /// In this store, which is where the launchers are told that it is.
    pub(crate) fn at(
        location: &str,
        store: &Store,
        flags: &[&str],
        nodes: &str,
        mib: usize,
        every: u64,
    ) -> Saves {
        let (nodes, store_flag) = (format!("--nnodes={nodes}"), format!("--store={location}"));
        let mut bed = Bed::new(&[&[&nodes[..], &store_flag], flags].concat());
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        let (events, control) = (text(bed.path("events")), text(bed.path("control")));
        let (mib, every) = (mib.to_string(), every.to_string());
        bed.script(&["--", &program("saver"), &events, &control, &mib, &every]);
        Saves {
            bed,
            store: store.within("job").unwrap(),
            directory: None,
        }
    }

    /// The job's folder, in a store that is a directory.
    pub(crate) fn folder(&self) -> PathBuf {
        self.directory.as_ref().unwrap().path().join("job")
    }

    /// Starts these, and waits until they train together.
    pub(crate) fn train(&mut self, nodes: &[usize], after: u64) -> Group {
        for node in nodes {
            self.bed.run(*node, nodes[0]);
        }
        self.bed.group(nodes, after)
    }

    pub(crate) fn noted(&self, event: &str, generation: u64) -> Vec<Noted> {
        let all = self.bed.events().into_iter();
        all.filter(|e| e.event == event && e.generation == generation)
            .collect()
    }

    /// Waits for the first steps: by then their launchers know that all ranks have attached.
    pub(crate) fn trains(&self, group: &Group) {
        self.bed.until("it trains", |bed| {
            // Who restores says so before its first step.
            let restored = self.noted("restored", group.generation).into_iter();
            let began = restored.map(|e| e.step).max().unwrap_or(0);
            bed.has_met(group.generation, began + 20)
        });
    }

    /// Three nodes whose launchers hold each other's checkpoints in memory, once they train.
    pub(crate) fn three(replicas: &str, nodes: &str, mib: usize) -> (Saves, Group) {
        let replicas = format!("--replicas={replicas}");
        let flags = [&replicas, "--checkpoint-memory=1G", "--max-restarts=3"];
        // It saves only where it is told to.
        let mut saves = Saves::with(&flags, nodes, mib, 1_000_000);
        let first = saves.train(&[0, 1, 2], 0);
        saves.trains(&first);
        (saves, first)
    }

    /// The three save once; waits until that is committed, and each launcher has said so.
    pub(crate) fn save_held(&self, told: &str) -> u64 {
        let (ok, said) = self.bed.checkpoint(0, &[]);
        assert!(ok, "{said}");
        let what = format!("a commit, and that it {told}");
        self.bed.until(&what, |bed| {
            let held = |node| bed.said(node).contains(told);
            self.committed().len() == 1 && [0, 1, 2].into_iter().all(held)
        });
        self.committed()[0]
    }

    /// All workers end well, and so do these nodes' launchers.
    pub(crate) fn finish(&mut self, nodes: &[usize]) {
        self.bed.order(None, 0);
        for node in nodes {
            assert_eq!(self.bed.ended(*node), Some(0), "n{node}");
        }
    }

    /// The steps whose commits are in the log.
    pub(crate) fn committed(&self) -> Vec<u64> {
        let mut names = Vec::new();
        let listed = self.store.list("log", &mut |entry| {
            names.push(entry.name);
            ControlFlow::Continue(())
        });
        listed.unwrap();
        let entry = |name: &String| -> Option<serde_json::Value> {
            serde_json::from_slice(&self.store.get(name, 1 << 20).ok()?).ok()
        };
        let step = |entry: serde_json::Value| entry["body"]["commit"]["step"].as_u64();
        names.iter().filter_map(entry).filter_map(step).collect()
    }

    /// The step that every rank of a generation restored, the same on all.
    pub(crate) fn restored(&self, group: &Group) -> u64 {
        let of = |saves: &Saves| saves.noted("restored", group.generation);
        let world = group.ranks.len();
        self.bed
            .until("every rank has restored", |_| of(self).len() == world);
        let all = of(self);
        assert!(all.iter().all(|e| e.step == all[0].step), "{all:?}");
        all[0].step
    }

    /// Lines of these nodes' launchers about each rank's restore, once there are so many.
    pub(crate) fn origins(&self, nodes: &[usize], many: usize) -> Vec<String> {
        let of = |node: &usize| {
            let text = self.bed.said(*node);
            let lines = text.lines().filter(|line| line.contains(" restored step "));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        let said = || nodes.iter().flat_map(of).collect::<Vec<_>>();
        self.bed
            .until("the launchers say from where", |_| said().len() >= many);
        said()
    }
}

#[test]
fn a_job_whose_nodes_all_die_goes_on_from_its_last_commit_on_others() {
    let mut saves = Saves::new("2", 3, 5);
    let first = saves.train(&[0, 1], 0);
    saves
        .bed
        .until("two commits", |_| saves.committed().len() >= 2);
    assert!(saves.noted("restored", first.generation).is_empty());
    saves.bed.kill(0);
    let at = saves.bed.kill(1);
    let committed = *saves.committed().last().unwrap();
    // Other nodes, which share nothing with them but the store.
    let next = saves.train(&[2, 3], at);
    let restored = saves.restored(&next);
    assert!(restored >= committed, "{restored} of {committed}");
    let known = saves.committed();
    assert!(known.contains(&restored), "{restored} of {known:?}");
    saves.bed.order(None, 0);
    assert_eq!((saves.bed.ended(2), saves.bed.ended(3)), (Some(0), Some(0)));
}

#[test]
fn no_step_is_lost_when_a_node_is_told_to_go_and_the_world_changes() {
    // It saves only where it is told to.
    let mut saves = Saves::new("2:3", 3, 1_000_000);
    let first = saves.train(&[0, 1, 2], 0);
    saves.trains(&first);
    let gone = first.nodes()[2];
    let at = first.began();
    (saves.bed).signal(saves.bed.launcher_pid(gone), Signal::SIGTERM);
    let mut stay: Vec<usize> = first.nodes()[..2].to_vec();
    stay.sort_unstable();
    let next = saves.bed.group(&stay, at);
    let stopped: Vec<u64> = saves
        .noted("saved", first.generation)
        .iter()
        .map(|e| e.step)
        .collect();
    assert_eq!(
        stopped.len(),
        3,
        "all saved where they stopped: {stopped:?}"
    );
    assert!(
        stopped.iter().all(|step| *step == stopped[0]),
        "{stopped:?}"
    );
    assert_eq!(
        saves.restored(&next),
        stopped[0],
        "the very step at which they stopped"
    );
    assert_eq!(saves.committed(), [stopped[0]]);
    saves.bed.order(None, 0);
    for node in stay {
        assert_eq!(saves.bed.ended(node), Some(0));
    }
}

/// The launchers look at their workers for who takes stop steps: that is to be known by the first step, on all nodes.
#[track_caller]
fn stops_in_the_first_step_after_a_restart(leader_goes: bool) {
    let mut saves = Saves::with(&["--max-restarts=1"], "1:2", 3, 1_000_000);
    for node in [0, 1] {
        saves.bed.agent(node);
        saves.bed.attach(node);
    }
    let first = saves.bed.group(&[0, 1], 0);
    saves.trains(&first);
    let (ok, said) = saves.bed.checkpoint(0, &[]);
    assert!(ok, "{said}");
    saves
        .bed
        .until("a commit", |_| saves.committed().len() == 1);
    let (goes, stays) = match leader_goes {
        true => (first.nodes()[0], first.nodes()[1]),
        false => (first.nodes()[1], first.nodes()[0]),
    };
    let at = now_ns();
    saves.bed.signal(first.pid(stays), Signal::SIGKILL);
    let next = saves.bed.group(&[0, 1], at);
    let began = saves.restored(&next);
    saves
        .bed
        .until("its first step", |bed| bed.has_met(next.generation, began));
    let at = now_ns();
    saves.bed.signal(saves.bed.agent_pid(goes), Signal::SIGTERM);
    let alone = saves.bed.group(&[stays], at);
    let stopped: Vec<u64> = (saves.noted("saved", next.generation).iter())
        .map(|e| e.step)
        .collect();
    assert_eq!(stopped.len(), 2, "both stop at a step: {stopped:?}");
    assert_eq!(stopped[0], stopped[1]);
    assert!(stopped[0] > began, "{stopped:?} after {began}");
    assert_eq!(saves.restored(&alone), stopped[0], "no step is lost");
    assert_eq!(saves.bed.ended(goes), Some(143));
    saves.finish(&[stays]);
}

#[test]
fn no_step_is_lost_when_the_leader_goes_in_the_first_step_after_a_restart() {
    stops_in_the_first_step_after_a_restart(true);
}

#[test]
fn no_step_is_lost_when_another_node_goes_in_the_first_step_after_a_restart() {
    stops_in_the_first_step_after_a_restart(false);
}

#[test]
fn what_is_sealed_is_committed_though_every_worker_dies_at_once() {
    let mut saves = Saves::new("2", 3, 1_000_000);
    let first = saves.train(&[0, 1], 0);
    saves.trains(&first);
    let (ok, said) = saves.bed.checkpoint(0, &["--sealed"]);
    assert!(ok, "{said}");
    // All ranks have sealed; how far the writing is nobody knows.
    for node in [0, 1] {
        saves.bed.signal(first.pid(node), Signal::SIGKILL);
    }
    let next = saves.bed.group(&[0, 1], first.began());
    let sealed = saves.noted("saved", first.generation)[0].step;
    assert_eq!(saves.restored(&next), sealed);
    saves.bed.order(None, 0);
    assert_eq!((saves.bed.ended(0), saves.bed.ended(1)), (Some(0), Some(0)));
}
