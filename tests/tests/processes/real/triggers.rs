//! Saves that nobody orders, a notice that leaves no time, a checkpoint that turns out damaged, and an agent
//! that dies while a save is open.

use std::io::{Read, Seek, SeekFrom, Write};
use std::path::PathBuf;

use nix::sys::signal::Signal;

use super::saves::Saves;
use crate::harness::now_ns;

/// Its workers save where they are told to, and nowhere else.
const NEVER: u64 = 1_000_000;

impl Saves {
    /// Entries of this kind in the log.
    pub(super) fn entries(&self, kind: &str) -> Vec<serde_json::Value> {
        let mut files: Vec<PathBuf> = std::fs::read_dir(self.folder().join("log"))
            .into_iter()
            .flatten()
            .filter_map(|entry| Some(entry.ok()?.path()))
            .collect();
        files.sort();
        let read = |path: &PathBuf| {
            let text = std::fs::read_to_string(path).ok()?;
            serde_json::from_str::<serde_json::Value>(&text).ok()
        };
        let all = files.iter().filter_map(read);
        all.filter_map(|e| e["body"].get(kind).cloned()).collect()
    }

    /// Turns a bit of a data file of this step.
    fn damage(&self, step: u64) {
        let data = self.folder().join("data");
        let of_step = |path: &PathBuf| {
            let name = path
                .file_name()
                .and_then(|n| n.to_str())
                .unwrap_or_default();
            name.starts_with(&format!("{step}-"))
        };
        let folders = std::fs::read_dir(data).unwrap().map(|e| e.unwrap().path());
        let folder = folders.filter(of_step).max().unwrap();
        let files = std::fs::read_dir(folder)
            .unwrap()
            .map(|e| e.unwrap().path());
        let path = files
            .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
            .max_by_key(|path| path.metadata().unwrap().len())
            .unwrap();
        let mut file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(path)
            .unwrap();
        let mut byte = [0];
        let middle = SeekFrom::Start(file.metadata().unwrap().len() / 2);
        file.seek(middle).unwrap();
        file.read_exact(&mut byte).unwrap();
        file.seek(middle).unwrap();
        file.write_all(&[byte[0] ^ 1]).unwrap();
    }
}

#[test]
fn all_ranks_save_every_so_many_steps_without_counting_them() {
    let flags = ["--checkpoint-every-steps=50"];
    let mut saves = Saves::with(&flags, "2", 3, NEVER);
    let group = saves.train(&[0, 1], 0);
    saves
        .bed
        .until("three commits", |_| saves.committed().len() >= 3);
    let committed = saves.committed();
    assert!(committed[0] >= 50, "{committed:?}");
    let apart = committed.windows(2).all(|w| w[1] >= w[0] + 50);
    assert!(apart, "{committed:?}");
    for step in &committed {
        let noted = saves.noted("saved", group.generation);
        assert_eq!(noted.iter().filter(|e| e.step == *step).count(), 2);
    }
    saves.finish(&[0, 1]);
}

#[test]
fn the_interval_is_chosen_from_what_a_save_takes_and_told_on_every_node() {
    let flags = ["--checkpoint-overhead=0.5%"];
    let mut saves = Saves::with(&flags, "2", 3, NEVER);
    saves.train(&[0, 1], 0);
    for node in [0, 1] {
        saves.bed.until("the interval is told", |bed| {
            bed.said(node).contains("muster: a checkpoint every ")
        });
    }
    assert!(!saves.committed().is_empty());
    saves.finish(&[0, 1]);
}

#[test]
fn a_damaged_checkpoint_is_rejected_and_the_one_before_is_restored() {
    // No restart is left to a script that fails.
    let flags = ["--checkpoint-every=500ms", "--max-restarts=0"];
    let mut saves = Saves::with(&flags, "2", 3, NEVER);
    saves.train(&[0, 1], 0);
    saves
        .bed
        .until("two commits", |_| saves.committed().len() >= 2);
    let at = now_ns();
    saves.bed.kill(0);
    saves.bed.kill(1);
    let committed = saves.committed();
    let [.., before, damaged] = committed[..] else {
        panic!("{committed:?}");
    };
    saves.damage(damaged);
    for node in [2, 3] {
        saves.bed.run(node, 2);
    }
    // Both ranks read the damaged bytes, so that no rank has trained with them.
    saves
        .bed
        .until("it is rejected", |_| !saves.entries("reject").is_empty());
    saves.bed.until("the one before is restored", |bed| {
        let restored = |e: &crate::harness::Noted| e.event == "restored" && e.step == before;
        bed.events()
            .iter()
            .filter(|e| restored(e) && e.t > at)
            .count()
            == 2
    });
    let rejected = saves.entries("reject");
    assert_eq!(rejected.len(), 1, "{rejected:?}");
    let reason = rejected[0]["reason"].as_str().unwrap();
    assert!(reason.contains("damaged in chunk"), "{reason}");
    // On every node, whoever found it first: a rank, or the launcher that verifies what is committed.
    let text = format!("the checkpoint of step {damaged} is rejected: {reason}");
    for node in [2, 3] {
        let what = format!("n{node} reads it");
        (saves.bed).until(&what, |bed| bed.said(node).contains(&text));
    }
    let known = saves.committed().len();
    saves.bed.until("it trains and saves again", |_| {
        saves.committed().len() > known
    });
    saves.finish(&[2, 3]);
}

#[test]
fn a_notice_that_leaves_no_time_begins_no_save_and_says_so_on_every_node() {
    let flags = ["--stop-grace=300ms"];
    let mut saves = Saves::with(&flags, "2:3", 3, NEVER);
    let first = saves.train(&[0, 1, 2], 0);
    saves.trains(&first);
    let (ok, said) = saves.bed.checkpoint(0, &[]);
    assert!(ok, "{said}");
    saves
        .bed
        .until("it is committed", |_| saves.committed().len() == 1);
    let committed = saves.committed()[0];
    let noted = saves.noted("saved", first.generation).len();
    // Steps of their own make the difference.
    saves.bed.until("it goes on", |bed| {
        bed.has_met(first.generation, committed + 10)
    });
    let gone = first.nodes()[2];
    let at = first.began();
    (saves.bed).signal(saves.bed.launcher_pid(gone), Signal::SIGTERM);
    let mut stay: Vec<usize> = first.nodes()[..2].to_vec();
    stay.sort_unstable();
    let next = saves.bed.group(&stay, at);
    assert_eq!(saves.restored(&next), committed);
    assert_eq!(saves.noted("saved", first.generation).len(), noted);
    let text = format!("the checkpoint of step {committed} has to do");
    for node in stay.iter().chain([&gone]) {
        let said = saves.bed.said(*node);
        assert!(said.contains(&text), "n{node}: {said}");
    }
    saves.finish(&stay);
}

#[test]
fn a_notice_that_leaves_time_for_the_sealed_copy_alone_commits_that_one() {
    let flags = ["--stop-grace=5s"];
    let mut saves = Saves::with(&flags, "2:3", 3, NEVER);
    let first = saves.train(&[0, 1, 2], 0);
    saves.trains(&first);
    let (ok, said) = saves.bed.checkpoint(0, &[]);
    assert!(ok, "{said}");
    let known = saves.committed();
    // The next copy takes longer than the notice will give, and the writing of it has not begun when that comes.
    let gone = first.nodes()[2];
    saves.bed.arm(gone, "slot.filled", "sleep=6500");
    saves.bed.arm(gone, "launcher.write", "sleep=2500");
    let (ok, said) = saves.bed.checkpoint(0, &["--sealed"]);
    assert!(ok, "{said}");
    let sealed = saves.noted("saved", first.generation);
    let sealed = sealed.iter().map(|e| e.step).max().unwrap();
    assert!(sealed > known[0], "{sealed} after {known:?}");
    saves.bed.until("it goes on", |bed| {
        bed.has_met(first.generation, sealed + 3)
    });
    let at = now_ns();
    (saves.bed).signal(saves.bed.launcher_pid(gone), Signal::SIGTERM);
    let mut stay: Vec<usize> = first.nodes()[..2].to_vec();
    stay.sort_unstable();
    let next = saves.bed.group(&stay, at);
    assert_eq!(saves.restored(&next), sealed);
    assert_eq!(saves.committed(), [known[0], sealed]);
    let noted = saves.noted("saved", first.generation);
    assert!(noted.iter().all(|e| e.step <= sealed), "{noted:?}");
    let text = format!("the copy of step {sealed}, which all ranks have sealed, needs ");
    for node in stay.iter().chain([&gone]) {
        let said = saves.bed.said(*node);
        assert!(said.contains(&text), "n{node}: {said}");
    }
    saves.finish(&stay);
}

#[test]
fn a_save_that_is_open_when_its_leader_s_agent_dies_is_committed_when_it_is_back() {
    // Large enough to be still written.
    let mut saves = Saves::with(&[], "2", 48, NEVER);
    for node in [0, 1] {
        saves.bed.agent(node);
    }
    for node in [0, 1] {
        saves.bed.attach(node);
    }
    let group = saves.bed.group(&[0, 1], 0);
    saves.trains(&group);
    let leader = group.rank0();
    let asked = saves.bed.begin_checkpoint(1 - leader, &[]);
    saves.bed.until("all have sealed", |_| {
        saves.noted("saved", group.generation).len() == 2
    });
    saves.bed.kill_agent(leader);
    let step = saves.noted("saved", group.generation)[0].step;
    saves.bed.agent(leader);
    saves.bed.until("it is committed", |_| {
        saves.committed().first() >= Some(&step)
    });
    // It, or one that was opened for who asked again meanwhile: they hear of it by the agent that is back.
    let (ok, said) = crate::harness::Bed::checkpointed(asked);
    assert!(ok, "{said}");
    // By the same generation: nobody was started anew.
    let starts = saves
        .bed
        .events()
        .into_iter()
        .filter(|e| e.event == "start");
    assert_eq!(starts.count(), 2);
    // And what follows goes its usual way.
    let known = saves.committed().len();
    let (ok, said) = saves.bed.checkpoint(leader, &[]);
    assert!(ok, "{said}");
    saves
        .bed
        .until("the next is committed", |_| saves.committed().len() > known);
    saves.finish(&[0, 1]);
}
