//! A job of the same name in the same store, by another user.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::super::drill::judge::Judge;
use crate::ground::program;
use crate::harness::Bed;

const AGENT: u32 = 65_534;
const FIRST: u32 = 12_345;
const SECOND: u32 = 12_346;

/// Every file below, with what is in it.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            match entry.path() {
                path if path.is_dir() => folders.push(path),
                path => drop(all.insert(path.clone(), std::fs::read(path).unwrap())),
            }
        }
    }
    all
}

/// A job of one node, whose launcher is this user's.
fn bed(store: &Path, user: u32) -> Bed {
    let dir = format!("--store={}", store.display());
    let mut bed = Bed::of_users(&["--nnodes=1", &dir], AGENT, user);
    let text = |path: PathBuf| path.to_str().unwrap().to_owned();
    let (events, control) = (text(bed.path("events")), text(bed.path("control")));
    bed.script(&["--", &program("saver"), &events, &control, "1", "8"]);
    for folder in ["control", ""] {
        let mode = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(bed.path(folder), mode).unwrap();
    }
    bed.agent(0);
    bed.attach(0);
    bed
}

#[test]
fn a_job_of_the_same_name_by_another_user_is_refused_and_touches_nothing() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED: only root can start processes of other users");
        return;
    }
    let store = tempfile::tempdir().unwrap();
    // Both may write there: it is not the rights that keep them apart.
    let mode = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(store.path(), mode).unwrap();
    let mut judge = Judge::new(store.path().join("job"));
    let mut first = bed(store.path(), FIRST);
    first.until("it commits", |_| judge.log().step() > 0);
    first.kill(0);
    let log = judge.check(&first.events());
    let before = files(store.path());

    let mut second = bed(store.path(), SECOND);
    assert_ne!(second.ended(0), Some(0), "it is refused");
    let said = second.said(0);
    for part in ["job called job", &format!("user {FIRST}"), "--rdzv-id"] {
        assert!(said.contains(part), "{said}");
    }
    assert!(second.events().is_empty(), "no worker of it has started");
    assert!(
        files(store.path()) == before,
        "something in the store has changed"
    );

    // Nothing of the first one's is lost.
    let mut again = bed(store.path(), FIRST);
    again.until("the first user's goes on", |_| {
        judge.log().step() > log.step()
    });
    let now = judge.check(&again.events());
    let restored = now.claims[log.claims.len()].restore;
    assert_eq!(restored, log.newest().map(|c| c.commit));
    again.order(None, 0);
    assert_eq!(again.ended(0), Some(0));
}
