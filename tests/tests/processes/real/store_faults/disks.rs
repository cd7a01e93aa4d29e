//! Disks that are full, or read-only for a while.

use std::path::Path;

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};

use super::super::drill::{Job, Setup};
use crate::ground::disk::{self, fill, free};

/// KiB of the small disk, and MiB of a checkpoint on it.
const DISK: usize = 48 * 1024;
const MIB: usize = 4;

fn job_on(store: &Path, step_ms: u64) -> Job {
    Job::start(Setup {
        times: 2,
        mib: MIB,
        store: Some(store.to_owned()),
        env: vec![("SAVER_STEP_MS", step_ms.to_string())],
        ..Setup::default()
    })
}

#[test]
fn a_disk_that_is_full_before_or_during_costs_saves_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    if !disk::small(&store, DISK) {
        return;
    }
    // Room for the log, and for no checkpoint.
    fill(&store, 256 << 10);
    let mut job = job_on(&store, 20);
    let group = job.bed.group(&[0, 1], 0);
    job.hears("No space left on device");
    job.trains_on(&group, "on a full disk");
    assert_eq!(job.judge.log().step(), 0, "there is no room");
    free(&store);
    let (_, log) = job.steady(0, "there is room again");
    fill(&store, 0);
    job.trains_on(&group, "when the disk fills up");
    job.judge.check(&job.bed.events());
    free(&store);
    let (last, log) = job.steady(log.step(), "there is room once more");
    assert_eq!(last.generation, group.generation, "no worker ended by it");
    // Whatever fits is whole, and is what others go on from.
    fill(&store, 3 << 20);
    job.trains_on(&group, "while some saves do not fit");
    job.kill();
    free(&store);
    job.begin_anew();
    job.steady(log.step(), "all died on a full disk");
    job.end();
}

/// Retries while files are open for writing.
fn remount(store: &Path, read_only: bool, job: &Job) {
    let none = None::<&str>;
    let mut flags = MsFlags::MS_REMOUNT;
    flags.set(MsFlags::MS_RDONLY, read_only);
    let what = "no file is open for writing at the moment";
    job.bed
        .until(what, |_| match mount(none, store, none, flags, none) {
            Ok(()) => true,
            Err(Errno::EBUSY) => false,
            Err(error) => panic!("{}: {error}", store.display()),
        });
}

#[test]
fn a_file_system_that_becomes_read_only_costs_saves_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    if !disk::small(&store, DISK) {
        return;
    }
    // Thirty steps are longer than a lease.
    let mut job = job_on(&store, 200);
    let (group, _) = job.steady(0, "the start");
    remount(&store, true, &job);
    let log = job.judge.log();
    job.hears("Read-only file system");
    job.trains_on(&group, "on a read-only disk");
    job.judge.check_all(&job.bed.events());
    remount(&store, false, &job);
    let (last, _) = job.steady(log.step(), "it can be written again");
    assert_eq!(last.generation, group.generation, "no worker ended by it");
    job.end();
}
