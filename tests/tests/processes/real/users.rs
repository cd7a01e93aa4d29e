//! The agent belongs to a user of its own, as a service does, and each job to whoever started it:
//! a store that only the job's user can enter is reached by the launchers.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use crate::harness::Bed;

const AGENT: u32 = 65_534;
const USER: u32 = 12_345;

fn is_root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("SKIPPED: only root can start processes of other users");
    }
    root
}

fn mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// A directory that only the user can enter.
fn store() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    mode(dir.path(), 0o700);
    chown(dir.path(), Some(USER), Some(USER)).unwrap();
    dir
}

/// Two nodes with a daemon each, and a job on both.
fn bed(store: &Path) -> Bed {
    let dir = format!("--store={}", store.display());
    let mut bed = Bed::of_users(&["--nnodes=1:2", &dir], AGENT, USER);
    for node in [0, 1] {
        bed.agent(node);
        bed.attach(node);
    }
    bed
}

#[test]
fn a_store_of_the_jobs_user_lets_either_node_go_on() {
    if !is_root() {
        return;
    }
    let store = store();
    let mut bed = bed(store.path());
    let both = bed.group(&[0, 1], 0);
    let (zero, one) = (both.rank0(), 1 - both.rank0());
    let at = bed.kill(zero);
    let alone = bed.group(&[one], at);
    for name in ["muster-store", "job/log/00000001.json", "job/beacon"] {
        let path = store.path().join(name);
        bed.until("it is there", |_| path.exists());
        assert_eq!(std::fs::metadata(path).unwrap().uid(), USER, "{name}");
    }
    bed.agent(zero);
    bed.attach(zero);
    let again = bed.group(&[0, 1], alone.began());
    // The agent of the node that will be left crashes: its launcher brings the store again.
    bed.kill_agent(zero);
    bed.agent(zero);
    bed.until("the launcher is back", |bed| {
        bed.job(zero)["launcher_here"] == true
    });
    assert_eq!(
        bed.group(&[0, 1], alone.began()).generation,
        again.generation
    );
    let at = bed.kill(one);
    bed.group(&[zero], at);
    bed.order(None, 0);
    assert_eq!(bed.ended(zero), Some(0));
}

#[test]
fn a_decision_waits_for_a_store_that_cannot_be_written() {
    if !is_root() {
        return;
    }
    let store = store();
    let mut bed = bed(store.path());
    let both = bed.group(&[0, 1], 0);
    let (zero, one) = (both.rank0(), 1 - both.rank0());
    let log = store.path().join("job/log");
    mode(&log, 0o500);
    let at = bed.kill(zero);
    bed.until("its user reads why", |bed| {
        let said = bed.said(one);
        said.contains(&format!("Permission denied (os error 13), as user {USER}"))
            && said.contains("let the job's user write there")
    });
    // The launcher tells its user before it tells the agent.
    bed.until("the job's history has it", |bed| {
        let trouble = bed.history(one, "trouble");
        let mut texts = trouble.iter().map(|e| e["text"].to_string());
        texts.any(|text| text.contains("cannot create") && text.contains("Permission denied"))
    });
    mode(&log, 0o700);
    bed.group(&[one], at);
    bed.until("and that it is over", |bed| {
        bed.said(one).contains("answers again")
    });
    bed.order(None, 0);
    assert_eq!(bed.ended(one), Some(0));
}

#[test]
fn a_store_that_the_user_cannot_write_is_refused_by_the_launcher() {
    if !is_root() {
        return;
    }
    let store = store();
    mode(store.path(), 0o500);
    let dir = format!("--store={}", store.path().display());
    let mut bed = Bed::of_users(&[&dir], AGENT, USER);
    bed.attach(0);
    assert_eq!(bed.ended(0), Some(1));
    let said = bed.said(0);
    assert!(
        said.contains(&format!("as user {USER}"))
            && said.contains("let the job's user write there"),
        "{said}"
    );
}
