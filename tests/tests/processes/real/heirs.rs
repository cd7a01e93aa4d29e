//! A launcher dies, its agent lives: what its ranks had sealed waits with the agent for the launcher that comes next.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;

use super::saves::Saves;
use crate::harness::{Bed, Group, now_ns};

/// Two nodes with an agent each; they save where they are told to.
fn two(env: &[(&str, &str)]) -> (Saves, Group) {
    let mut saves = Saves::with(&["--max-restarts=5"], "2", 12, 1_000_000);
    for (name, value) in env {
        saves.bed.env(name, value);
    }
    for node in [0, 1] {
        saves.bed.agent(node);
        saves.bed.attach(node);
    }
    let first = saves.bed.group(&[0, 1], 0);
    saves.trains(&first);
    (saves, first)
}

/// Saves once, and waits for the commit.
pub(super) fn save(saves: &Saves) -> u64 {
    let (ok, said) = saves.bed.checkpoint(0, &[]);
    assert!(ok, "{said}");
    saves
        .bed
        .until("a commit", |_| saves.committed().len() == 1);
    saves.committed()[0]
}

/// The slots of which the node's agent has descriptors.
pub(super) fn slots(bed: &Bed, node: usize) -> Vec<PathBuf> {
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", bed.agent_pid(node))).unwrap();
    let paths = descriptors.filter_map(|fd| Some(fd.ok()?.path()));
    let slot = |target: &Path| target.to_string_lossy().starts_with("/memfd:muster-slot");
    let is_slot = |path: &PathBuf| std::fs::read_link(path).is_ok_and(|target| slot(&target));
    paths.filter(is_slot).collect()
}

/// SIGKILL to the node's launcher; its worker dies with it. Returns the time just before.
fn kill(saves: &mut Saves, node: usize) -> u64 {
    let at = now_ns();
    let launcher = saves.bed.launcher_pid(node);
    saves.bed.signal(launcher, Signal::SIGKILL);
    saves.bed.exit(node);
    at
}

pub(super) fn end(saves: &mut Saves) {
    saves.bed.order(None, 0);
    for node in [0, 1] {
        assert_eq!(saves.bed.ended(node), Some(0));
        saves.bed.until("the agent closes what it kept", |bed| {
            slots(bed, node).is_empty()
        });
    }
}

#[test]
fn the_next_launcher_restores_from_what_the_dead_one_left_in_memory() {
    let (mut saves, first) = two(&[]);
    let step = save(&saves);
    // Whichever leads, once a node that does not, once the one that does.
    let (zero, one) = (first.nodes()[0], first.nodes()[1]);
    let mut after = first;
    for node in [one, zero] {
        assert_eq!(slots(&saves.bed, node).len(), 2);
        let at = kill(&mut saves, node);
        saves.bed.until("the agent says that it keeps them", |bed| {
            let texts = bed.history(node, "saving");
            texts
                .iter()
                .any(|e| e["text"].to_string().contains("wait 600.0 s"))
        });
        saves.bed.attach(node);
        after = saves.bed.group(&[0, 1], at);
        assert_eq!(saves.restored(&after), step);
        let said = saves.bed.said(node);
        assert!(
            said.contains(&format!(
                "of the launcher that was here before: step {step} is in them"
            )),
            "{said}"
        );
        // Its own part from there, the other's from the other's memory.
        let line = saves.origins(&[node], 1).remove(0);
        assert!(line.contains(&format!("restored step {step}:")), "{line}");
        assert!(line.contains("from this node's memory"), "{line}");
        assert!(line.contains(" 0 B from the store"), "{line}");
        saves.bed.until("they are this launcher's own", |bed| {
            slots(bed, node).len() == 2
        });
    }
    saves.trains(&after);
    let (ok, said) = saves.bed.checkpoint(0, &[]);
    assert!(ok, "{said}");
    saves
        .bed
        .until("another commit", |_| saves.committed().len() == 2);
    // Its rank is the one that writes less now: it does so into the very same slots.
    assert_eq!(after.rank0(), one);
    assert!(
        !saves.bed.said(zero).contains("of memory in"),
        "none was made"
    );
    for node in [zero, one] {
        assert_eq!(slots(&saves.bed, node).len(), 2);
    }
    end(&mut saves);
}

#[test]
fn what_is_damaged_in_memory_meanwhile_comes_from_the_store() {
    let (mut saves, first) = two(&[]);
    let step = save(&saves);
    let node = first.nodes()[1];
    let at = kill(&mut saves, node);
    for path in slots(&saves.bed, node) {
        let memory = File::options().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        // Behind the head and the file's header.
        memory.read_exact_at(&mut byte, 20_000).unwrap();
        memory.write_all_at(&[byte[0] ^ 4], 20_000).unwrap();
    }
    saves.bed.attach(node);
    let next = saves.bed.group(&[0, 1], at);
    // It checks what it has restored.
    assert_eq!(saves.restored(&next), step);
    let line = saves.origins(&[node], 1).remove(0);
    assert!(line.contains("is damaged at byte 0"), "{line}");
    assert!(!line.contains(" 0 B from the store"), "{line}");
    end(&mut saves);
}

#[test]
fn when_the_lease_is_over_the_memory_is_given_back() {
    let (mut saves, first) = two(&[("MUSTER_CHECKPOINT_LEASE", "300ms")]);
    let step = save(&saves);
    let node = first.nodes()[1];
    let at = kill(&mut saves, node);
    saves
        .bed
        .until("they are closed", |bed| slots(bed, node).is_empty());
    saves.bed.until("that is told", |bed| {
        let texts = bed.history(node, "saving");
        let told = "no launcher came for them in time";
        texts.iter().any(|e| e["text"].to_string().contains(told))
    });
    saves.bed.attach(node);
    let next = saves.bed.group(&[0, 1], at);
    assert_eq!(saves.restored(&next), step);
    let line = saves.origins(&[node], 1).remove(0);
    assert!(!line.contains("from this node's memory"), "{line}");
    assert!(!line.contains(" 0 B from the store"), "{line}");
    end(&mut saves);
}
