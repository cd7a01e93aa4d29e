//! Checkpoints in memory: after a node's loss its bytes come from the peer that holds a copy.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;

use super::progress::metrics;
use super::saves::Saves;

/// MiB of the state: so much that each rank writes a part.
const STATE: usize = 12;

/// A launcher's words when all of them are held.
const HELD: &str = "are in the memory of";

/// Memory of other ranks' images that this launcher holds: it has no room for notes.
fn copies(launcher: i32) -> Vec<PathBuf> {
    let descriptors = std::fs::read_dir(format!("/proc/{launcher}/fd")).unwrap();
    let paths = descriptors.filter_map(|fd| Some(fd.ok()?.path()));
    let is_copy = |path: &PathBuf| {
        let slot = |target: &Path| target.to_string_lossy().starts_with("/memfd:muster-slot");
        let mut notes = [1; 8];
        std::fs::read_link(path).is_ok_and(|target| slot(&target))
            && File::open(path).is_ok_and(|file| file.read_exact_at(&mut notes, 24).is_ok())
            && notes == [0; 8]
    };
    paths.filter(is_copy).collect()
}

#[test]
fn a_lost_nodes_bytes_come_from_a_peers_memory() {
    let (mut saves, first) = Saves::three("1", "2:3", STATE);
    let step = saves.save_held(HELD);
    let lost = first.nodes()[1];
    let stay: Vec<usize> = (0..3).filter(|node| *node != lost).collect();
    let at = saves.bed.kill(lost);
    let next = saves.bed.group(&stay, at);
    assert_eq!(saves.restored(&next), step);
    for line in saves.origins(&stay, 2) {
        assert!(line.contains(&format!("restored step {step}:")), "{line}");
        assert!(line.contains("from this node's memory"), "{line}");
        assert!(line.contains(" 0 B from the store"), "{line}");
    }
    // Once more, from what is held by who is left.
    saves.bed.signal(next.pid(stay[1]), Signal::SIGKILL);
    let third = saves.bed.group(&stay, next.began());
    assert_eq!(saves.restored(&third), step);
    for line in &saves.origins(&stay, 4) {
        assert!(line.contains(&format!("restored step {step}:")), "{line}");
        assert!(line.contains(" 0 B from the store"), "{line}");
    }
    saves.finish(&stay);
}

#[test]
fn a_flipped_bit_in_a_peers_memory_is_read_from_the_store() {
    let (mut saves, first) = Saves::three("1", "2:3", STATE);
    let step = saves.save_held(HELD);
    let lost = first.nodes()[1];
    let stay: Vec<usize> = (0..3).filter(|node| *node != lost).collect();
    for node in &stay {
        let held = copies(saves.bed.launcher_pid(*node));
        assert!(!held.is_empty(), "n{node} holds nothing of another node");
        for path in held {
            let memory = File::options().read(true).write(true).open(path).unwrap();
            let mut byte = [0];
            // Behind the head and the file's header.
            memory.read_exact_at(&mut byte, 20_000).unwrap();
            memory.write_all_at(&[byte[0] ^ 4], 20_000).unwrap();
        }
    }
    let at = saves.bed.kill(lost);
    let next = saves.bed.group(&stay, at);
    // It checks what it has restored.
    assert_eq!(saves.restored(&next), step);
    for line in saves.origins(&stay, 2) {
        assert!(line.contains("is damaged at byte 0"), "{line}");
        assert!(!line.contains(" 0 B from the store"), "{line}");
    }
    saves.finish(&stay);
}

/// Of a node's agent with HTTP: the newest saves in a row that other nodes do not hold.
fn behind(address: &str) -> Option<u64> {
    let all = metrics(address, "muster_checkpoint_replicas_behind_saves");
    all.first()?.split(' ').next_back()?.parse().ok()
}

#[test]
fn saves_that_no_peer_holds_are_counted_as_long_as_the_job_runs() {
    let flags = ["--checkpoint-memory=1G", "--max-restarts=3"];
    let mut saves = Saves::with(&flags, "2", STATE, 1_000_000);
    let address = saves.bed.agent_with_http(0);
    saves.bed.agent(1);
    // It takes no copies.
    saves.bed.attach(1);
    saves.bed.flag("--replicas=1");
    saves.bed.attach(0);
    let first = saves.bed.group(&[0, 1], 0);
    saves.trains(&first);
    for count in 0..3 {
        let (ok, said) = saves.bed.checkpoint(0, &[]);
        assert!(ok, "{said}");
        // The newest is still tried.
        let what = format!("{count} saves that are not held");
        let refused = "start it with --replicas 1";
        saves.bed.until(&what, |bed| {
            bed.said(0).contains(refused) && behind(&address) == Some(count)
        });
    }
    let (ok, said) = saves.bed.muster(0, &["status"]);
    let words = "of this node's newest 2 saves other nodes do not hold in memory";
    assert!(ok && said.contains(words), "{said}");
    saves.finish(&[0, 1]);
    saves
        .bed
        .until("none is of any use", |_| behind(&address) == Some(0));
}
