//! Bits that flip, files that are cut short, directories that somebody deletes.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use muster_checkpoint::manifest::Manifest;
use muster_protocol::Digest;
use muster_protocol::record::CommitRef;
use muster_protocol::storelog::{Body, Entry};

use super::super::drill::{Job, Setup, judge::Commit};

fn flip(path: &Path, at: u64) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
}

fn manifest_of(folder: &Path, commit: &CommitRef) -> PathBuf {
    folder.join(format!("manifest/{}.json", commit.manifest.hex()))
}

/// The first data file of a checkpoint.
fn data_of(folder: &Path, commit: &CommitRef) -> PathBuf {
    let bytes = std::fs::read(manifest_of(folder, commit)).unwrap();
    let manifest = Manifest::decode(&bytes).unwrap();
    folder.join(&manifest.files[0].path)
}

/// Harms a checkpoint.
type Harm = fn(&Path, &CommitRef);

fn bit_of_data(folder: &Path, commit: &CommitRef) {
    let path = data_of(folder, commit);
    let middle = path.metadata().unwrap().len() / 2;
    flip(&path, middle);
}

fn cut_short(folder: &Path, commit: &CommitRef) {
    let path = data_of(folder, commit);
    let len = path.metadata().unwrap().len();
    let file = File::options().write(true).open(path).unwrap();
    file.set_len(len - 4096).unwrap();
}

fn folder_deleted(folder: &Path, commit: &CommitRef) {
    let path = data_of(folder, commit);
    std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
}

fn bit_of_the_manifest(folder: &Path, commit: &CommitRef) {
    let path = manifest_of(folder, commit);
    let middle = path.metadata().unwrap().len() / 2;
    flip(&path, middle);
}

/// Harms to the newest checkpoint while nobody looked.
const HARMS: [(&str, Harm); 4] = [
    ("a bit of the data", bit_of_data),
    ("a file is cut short", cut_short),
    ("its folder is gone", folder_deleted),
    ("a bit of the manifest", bit_of_the_manifest),
];

#[test]
fn the_newest_commit_that_is_whole_is_restored_and_why_no_newer_one_is_said() {
    let mut job = Job::start(Setup {
        times: HARMS.len() + 1,
        ..Setup::default()
    });
    for (name, harm) in HARMS {
        let (_, log) = job.steady(0, name);
        job.steady(log.step(), name);
        job.kill();
        let known = job.judge.check(&job.bed.events());
        let mut counting = known.commits.iter().rev().filter(|c| c.counts());
        let (newest, before) = (counting.next().unwrap(), counting.next().unwrap());
        harm(&job.folder(), &newest.commit);
        job.begin_anew();
        job.steady(newest.commit.step, name);
        let log = job.judge.check(&job.bed.events());
        let again = log.commits.iter().find(|c| c.seq == newest.seq).unwrap();
        assert!(again.rejected, "{name}: {again:?} is still there");
        let since = &log.claims[known.claims.len()..];
        let steps: Vec<_> = since.iter().map(|c| c.restore.unwrap().step).collect();
        assert_eq!(
            steps[..2],
            [newest.commit.step, before.commit.step],
            "{name}"
        );
        // On every node, whoever found it first: a rank, or the launcher that verifies what is committed.
        job.all_hear(&format!(
            "the checkpoint of step {} is rejected: ",
            newest.commit.step
        ));
    }
    job.end();
}

/// Of a slot: behind its words, and the header of its image. The smallest image here has 20 KiB.
const IN_EVERY_IMAGE: u64 = 4096 + 4096 + 1000;

#[test]
fn a_bit_that_flips_in_a_sealed_slot_becomes_no_checkpoint() {
    let job = Job::start(Setup::default());
    let (group, log) = job.steady(0, "the start");
    let victim = group.rank0();
    job.bed
        .arm(victim, "launcher.write", "sleep=5000 in=muster");
    job.bed.until("it is about to write", |bed| {
        bed.taken(victim, "launcher.write")
    });
    let launcher = job.bed.launcher_pid(victim);
    let mut slots = 0;
    for entry in std::fs::read_dir(format!("/proc/{launcher}/fd"))
        .unwrap()
        .flatten()
    {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        if target.to_string_lossy().contains("memfd:muster-slot") {
            flip(&entry.path(), IN_EVERY_IMAGE);
            slots += 1;
        }
    }
    assert_eq!(slots, 2, "the launcher holds its worker's two slots");
    job.hears("after it was sealed");
    let (last, _) = job.steady(log.step(), "a bit flipped in a slot");
    assert_eq!(last.generation, group.generation, "training went on");
    job.end();
}

#[test]
fn what_somebody_deletes_while_a_job_trains_is_not_missed_by_what_comes_next() {
    let mut job = Job::start(Setup {
        times: 2,
        ..Setup::default()
    });
    let (group, _) = job.steady(0, "the start");
    for name in ["data", "manifest"] {
        // Again and again, as files are being written there.
        job.bed.until("it is gone", |_| {
            std::fs::remove_dir_all(job.folder().join(name)).is_ok()
        });
        job.judge.forgive();
        let gone = job.judge.log();
        // What was being written when it went may have been committed with a part in the old folder.
        let (_, log) = job.steady(gone.step(), name);
        job.judge.forgive();
        let (last, _) = job.steady(log.step(), name);
        assert_eq!(last.generation, group.generation, "training went on");
    }
    job.kill();
    let known = job.judge.check(&job.bed.events());
    job.begin_anew();
    job.steady(known.step(), "all died");
    let log = job.judge.check(&job.bed.events());
    let restored = log.claims[known.claims.len()].restore;
    assert_eq!(restored, known.newest().map(|c| c.commit));
    job.end();
}

#[test]
fn a_damaged_log_starts_nothing_and_is_named() {
    let mut job = Job::start(Setup {
        times: 4,
        ..Setup::default()
    });
    let (_, log) = job.steady(0, "the start");
    job.steady(log.step(), "a commit");
    job.kill();
    let known = job.judge.check(&job.bed.events());
    let events = job.bed.events().len();
    let newest = known.newest().unwrap();
    // Of a record that others follow, and of the last one.
    for (seq, field) in [(1, "\"claim\""), (newest.seq, "\"generation\":\"")] {
        let path = job.folder().join(format!("log/{seq:08}.json"));
        let text = std::fs::read_to_string(&path).unwrap();
        let at = text.find(field).unwrap() + field.len() + 4;
        flip(&path, at as u64);
        job.begin_anew();
        job.hears("log");
        let slot = format!("slot {seq}");
        job.hears(&slot);
        job.kill();
        assert_eq!(job.bed.events().len(), events, "no worker started");
        flip(&path, at as u64);
    }
    job.begin_anew();
    job.steady(known.step(), "the log was mended");
    job.end();
}

/// As if a build had committed it whose format is older than all that this one knows. It is not damaged,
/// so nothing goes on without it: no step is lost to an upgrade that went wrong.
#[test]
fn a_checkpoint_of_an_older_format_is_refused_by_name_and_nothing_else_is_restored() {
    let mut job = Job::start(Setup {
        times: 2,
        ..Setup::default()
    });
    let (_, log) = job.steady(0, "the start");
    job.steady(log.step(), "a commit");
    job.kill();
    let known = job.judge.check(&job.bed.events());
    let newest = known.newest().unwrap();
    as_version_0(&job.folder(), newest);
    let events = job.bed.events().len();
    job.begin_anew();
    job.hears("version 0");
    job.kill();
    let since = &job.bed.events()[events..];
    assert!(since.iter().all(|e| e.event == "start"), "{since:?}");
    let log = job.judge.log();
    let again = log.commits.iter().find(|c| c.seq == newest.seq).unwrap();
    assert!(again.counts(), "it was taken back: {again:?}");
    let wanted: Vec<u64> = log.claims[known.claims.len()..]
        .iter()
        .map(|c| c.restore.unwrap().step)
        .collect();
    assert!(!wanted.is_empty());
    assert!(
        wanted.iter().all(|step| *step == newest.commit.step),
        "{wanted:?}"
    );
}

/// Rewrites a manifest, the COMMIT that names it, and the chain of entries from there on.
fn as_version_0(folder: &Path, newest: &Commit) {
    let text = std::fs::read_to_string(manifest_of(folder, &newest.commit)).unwrap();
    let text = text.replacen("\"version\":1", "\"version\":0", 1);
    let digest = Digest(Manifest::digest(text.as_bytes()).0);
    std::fs::write(folder.join(format!("manifest/{}.json", digest.hex())), text).unwrap();
    let mut before = None;
    for seq in newest.seq.. {
        let path = folder.join(format!("log/{seq:08}.json"));
        let Ok(bytes) = std::fs::read(&path) else {
            break;
        };
        let mut entry = Entry::decode(&bytes).unwrap();
        match &mut entry.body {
            Body::Commit(commit) if seq == newest.seq => commit.manifest = digest,
            _ => entry.prev = before.unwrap(),
        }
        let bytes = entry.encode().unwrap();
        before = Some(Entry::digest(&bytes));
        std::fs::write(&path, bytes).unwrap();
    }
}
