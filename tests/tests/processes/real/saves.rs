//! Checkpoints that outlive every process: saved by slots, committed in the job's log, restored by whatever nodes
//! come next.

use std::path::PathBuf;

use nix::sys::signal::Signal;

use crate::ground::program;
use crate::harness::{Bed, Group, Noted};

/// A store, and a job of nodes whose workers save every so many steps.
struct Saves {
    bed: Bed,
    store: tempfile::TempDir,
}

impl Saves {
    fn new(nodes: &str, mib: usize, every: u64) -> Saves {
        let store = tempfile::tempdir().unwrap();
        let dir = format!("--store={}", store.path().display());
        let mut bed = Bed::new(&[&format!("--nnodes={nodes}"), &dir, "--max-restarts=1"]);
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        let (events, control) = (text(bed.path("events")), text(bed.path("control")));
        let (mib, every) = (mib.to_string(), every.to_string());
        bed.script(&["--", &program("saver"), &events, &control, &mib, &every]);
        Saves { bed, store }
    }

    /// Starts these, and waits until they train together.
    fn train(&mut self, nodes: &[usize], after: u64) -> Group {
        for node in nodes {
            self.bed.run(*node, nodes[0]);
        }
        self.bed.group(nodes, after)
    }

    fn noted(&self, event: &str, generation: u64) -> Vec<Noted> {
        let all = self.bed.events().into_iter();
        all.filter(|e| e.event == event && e.generation == generation)
            .collect()
    }

    /// Waits for the first steps: by then their launchers know that all ranks have attached.
    fn trains(&self, group: &Group) {
        self.bed
            .until("it trains", |bed| bed.has_met(group.generation, 20));
    }

    /// The steps whose commits are in the log.
    fn committed(&self) -> Vec<u64> {
        let log = self.store.path().join("job/log");
        let mut entries: Vec<(u64, serde_json::Value)> = std::fs::read_dir(log)
            .into_iter()
            .flatten()
            .filter_map(|entry| {
                let path = entry.ok()?.path();
                let seq = path.file_stem()?.to_str()?.parse().ok()?;
                let text = std::fs::read_to_string(&path).ok()?;
                Some((seq, serde_json::from_str(&text).ok()?))
            })
            .collect();
        entries.sort_by_key(|(seq, _)| *seq);
        let step = |(_, entry): &(u64, serde_json::Value)| entry["body"]["commit"]["step"].as_u64();
        entries.iter().filter_map(step).collect()
    }

    /// The step that every rank of a generation restored, the same on all.
    fn restored(&self, group: &Group) -> u64 {
        let of = |saves: &Saves| saves.noted("restored", group.generation);
        let world = group.ranks.len();
        self.bed
            .until("every rank has restored", |_| of(self).len() == world);
        let all = of(self);
        assert!(all.iter().all(|e| e.step == all[0].step), "{all:?}");
        all[0].step
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

#[test]
fn what_is_sealed_is_committed_though_every_worker_dies_at_once() {
    let mut saves = Saves::new("2", 3, 1_000_000);
    let first = saves.train(&[0, 1], 0);
    saves.trains(&first);
    let (ok, said) = saves.bed.checkpoint(0, &[]);
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
