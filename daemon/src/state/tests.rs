use std::os::unix::fs::PermissionsExt;
use std::time::Instant;

use super::*;
use crate::testing::{as_nobody, on_tiny_disk};

fn open(path: &Path) -> StateDir {
    StateDir::open(path).unwrap()
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn what_was_saved_is_there_after_a_restart() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("a/b/state");
    let mut state = open(&path);
    let (node, id) = (state.node_id(), state.state_id());
    assert_eq!(state.boot(), Boot(1));
    assert!(!id.is_zero());
    assert_eq!(
        state
            .identity()
            .public()
            .try_into_ed25519()
            .unwrap()
            .to_bytes(),
        node.0
    );
    state
        .save("aa", b"long enough to leave something behind")
        .unwrap();
    state.save("bb", b"goes").unwrap();
    for n in 0..5u8 {
        state.save("aa", &[n; 3]).unwrap();
    }
    state.remove("bb").unwrap();
    state.remove("cc").unwrap();
    state.save_peers(b"peers").unwrap();
    assert_eq!(mode(&path), 0o700);
    assert_eq!(mode(&path.join("identity")), 0o600);
    drop(state);

    let mut state = open(&path);
    assert_eq!((state.node_id(), state.state_id()), (node, id));
    assert_eq!(state.boot(), Boot(2));
    assert_eq!(state.load_all(), [("aa".to_owned(), vec![4; 3])]);
    assert_eq!(state.load_peers().unwrap().as_deref(), Some(&b"peers"[..]));
    assert!(state.quarantined().is_empty());
    // The spares of the first run are gone.
    let left: Vec<_> = std::fs::read_dir(path.join("jobs")).unwrap().collect();
    assert_eq!(left.len(), 1);
}

#[test]
fn what_is_removed_is_made_anew() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("state");
    let mut first = open(&path);
    first.save("aa", b"a vote").unwrap();
    let node = first.node_id();
    // Another agent that opened the directory just before, and takes its lock just after.
    let late = open_root(&path).unwrap();
    first.remove_all().unwrap();
    assert!(matches!(
        take_lock(&path, &late),
        Err(StateError::InUse { .. })
    ));
    assert_eq!(std::fs::read_dir(tmp.path()).unwrap().count(), 0);
    let again = open(&path);
    assert_ne!(again.node_id(), node);
    assert_eq!(again.boot(), Boot(1));
}

#[test]
fn a_second_agent_is_refused_naming_the_first() {
    let tmp = tempfile::tempdir().unwrap();
    let first = open(tmp.path());
    let error = StateDir::open(tmp.path()).unwrap_err();
    assert!(
        matches!(&error, StateError::InUse { pid: Some(pid), since_ms: Some(_), .. } if *pid == std::process::id()),
        "{error}"
    );
    drop(first);
    open(tmp.path());
}

#[test]
fn a_directory_that_others_can_read_is_made_private() {
    let tmp = tempfile::tempdir().unwrap();
    std::fs::set_permissions(tmp.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    open(tmp.path());
    assert_eq!(mode(tmp.path()), 0o700);
}

#[test]
fn a_torn_job_is_put_aside_and_the_agent_becomes_another_voter() {
    let tmp = tempfile::tempdir().unwrap();
    let mut state = open(tmp.path());
    state.save("aa", b"votes").unwrap();
    state.save("bb", b"other votes").unwrap();
    let (node, old) = (state.node_id(), state.state_id());
    drop(state);
    let torn = tmp.path().join("jobs/aa");
    let bytes = std::fs::read(&torn).unwrap();
    std::fs::write(&torn, &bytes[..bytes.len() - 1]).unwrap();

    let mut state = open(tmp.path());
    assert_eq!(state.node_id(), node);
    assert_ne!(state.state_id(), old);
    assert_eq!(state.boot(), Boot(1));
    assert_eq!(
        state.load_all(),
        [("bb".to_owned(), b"other votes".to_vec())]
    );
    let [entry] = state.quarantined() else {
        panic!("{:?}", state.quarantined())
    };
    assert!(entry.votes_lost);
    assert_eq!(entry.path, torn);
    assert_eq!(
        std::fs::read(&entry.kept_as).unwrap(),
        bytes[..bytes.len() - 1]
    );
    assert!(!torn.exists());
    // Reported once, and not mistaken for new damage afterwards.
    let now = state.state_id();
    drop(state);
    let state = open(tmp.path());
    assert_eq!(state.state_id(), now);
    assert!(state.quarantined().is_empty());
}

#[test]
fn foreign_things_are_put_aside_without_a_new_voter() {
    let tmp = tempfile::tempdir().unwrap();
    let id = open(tmp.path()).state_id();
    std::fs::write(tmp.path().join("jobs/README"), b"hello").unwrap();
    std::fs::create_dir(tmp.path().join("jobs/directory")).unwrap();
    std::os::unix::fs::symlink("/etc/hostname", tmp.path().join("jobs/link")).unwrap();
    std::fs::write(tmp.path().join("peers"), b"").unwrap();
    let mut state = open(tmp.path());
    assert_eq!(state.state_id(), id);
    assert_eq!(state.load_peers().unwrap(), None);
    assert_eq!(state.quarantined().len(), 4);
    assert!(state.quarantined().iter().all(|q| !q.votes_lost));
    assert!(tmp.path().join("jobs/README.corrupt-1").exists());
    assert!(tmp.path().join("peers.corrupt-1").exists());
}

#[test]
fn a_lost_or_damaged_counter_makes_another_voter() {
    for (file, damage) in [
        ("boot", true),
        ("boot", false),
        ("state-id", true),
        ("state-id", false),
    ] {
        let tmp = tempfile::tempdir().unwrap();
        let old = open(tmp.path()).state_id();
        let path = tmp.path().join(file);
        if damage {
            std::fs::write(&path, b"???").unwrap();
        } else {
            std::fs::remove_file(&path).unwrap();
        }
        let state = open(tmp.path());
        assert_ne!(state.state_id(), old, "{file} {damage}");
        assert_eq!(state.quarantined().len(), usize::from(damage));
    }
}

#[test]
fn a_damaged_identity_is_never_replaced_silently() {
    let tmp = tempfile::tempdir().unwrap();
    drop(open(tmp.path()));
    let path = tmp.path().join("identity");
    std::fs::write(&path, b"garbage").unwrap();
    let error = StateDir::open(tmp.path()).unwrap_err();
    assert!(
        matches!(&error, StateError::Damaged { path: p, .. } if *p == path),
        "{error}"
    );
    assert_eq!(std::fs::read(&path).unwrap(), b"garbage");
}

#[test]
fn names_that_are_not_hexadecimal_are_refused() {
    let tmp = tempfile::tempdir().unwrap();
    let mut state = open(tmp.path());
    for name in ["", "..", "a/b", "../boot", "AA", "g", &"a".repeat(65)] {
        assert!(
            matches!(state.save(name, b""), Err(StateError::Name { .. })),
            "{name}"
        );
        assert!(
            matches!(state.remove(name), Err(StateError::Name { .. })),
            "{name}"
        );
    }
    assert!(matches!(
        state.save("aa", &vec![0; MAX_BLOB + 1]),
        Err(StateError::Io {
            unchanged: true,
            ..
        })
    ));
}

#[test]
fn a_file_in_the_way_is_named() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("file");
    std::fs::write(&path, b"").unwrap();
    let error = StateDir::open(&path).unwrap_err().to_string();
    assert!(
        error.contains(path.to_str().unwrap()) && error.contains("in the way"),
        "{error}"
    );
}

#[test]
fn a_full_disk_keeps_the_old_blob_and_says_what_to_do() {
    on_tiny_disk(256, |disk| {
        let path = disk.path.join("state");
        let mut state = open(&path);
        state.save("aa", b"old").unwrap();
        state.save("aa", b"old").unwrap();
        let filler = disk.fill();
        let error = state.save("aa", &vec![7; 100_000]).unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(
                error,
                StateError::Io {
                    unchanged: true,
                    ..
                }
            ),
            "{text}"
        );
        assert!(
            text.contains("jobs/aa") && text.contains("free some space"),
            "{text}"
        );
        drop(state);
        std::fs::remove_file(filler).unwrap();
        let mut state = open(&path);
        assert_eq!(state.load_all(), [("aa".to_owned(), b"old".to_vec())]);
        state.save("aa", &vec![7; 100_000]).unwrap();

        // Nor can a new agent start on a full disk.
        let filler = disk.fill();
        let text = StateDir::open(&disk.path.join("new"))
            .unwrap_err()
            .to_string();
        assert!(text.contains("free some space"), "{text}");
        std::fs::remove_file(filler).unwrap();
    });
}

#[test]
fn a_read_only_disk_is_refused_with_the_fix() {
    on_tiny_disk(256, |disk| {
        let old = disk.path.join("old");
        drop(open(&old));
        disk.remount_read_only();
        for path in [old, disk.path.join("new")] {
            let text = StateDir::open(&path).unwrap_err().to_string();
            assert!(
                text.contains(path.to_str().unwrap()) && text.contains("mount it writable"),
                "{text}"
            );
        }
    });
}

/// Kills a process in the middle of its saves, many times: the blob is always one that was saved,
/// and never older than the last one that was reported as saved.
#[test]
fn a_kill_at_any_moment_leaves_a_whole_blob() {
    use std::io::BufRead;
    const CHILD: &str = "MUSTER_TEST_SAVE_FOREVER";
    if let Ok(path) = std::env::var(CHILD) {
        let mut state = open(Path::new(&path));
        let mut n = state.boot().0 << 32;
        loop {
            n += 1;
            let length = usize::try_from(n % 3000).unwrap() + 8;
            let mut bytes = n.to_le_bytes().to_vec();
            bytes.resize(length, 0);
            state.save("aa", &bytes).unwrap();
            println!("saved {n}");
        }
    }
    let tmp = tempfile::tempdir().unwrap();
    for round in 1..=10u64 {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "state::tests::a_kill_at_any_moment_leaves_a_whole_blob",
                "--nocapture",
            ])
            .env(CHILD, tmp.path())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let out = io::BufReader::new(child.stdout.take().unwrap());
        let mut last = 0;
        let mut seen = 0;
        for line in out.lines().map_while(Result::ok) {
            if let Some(n) = line.strip_prefix("saved ") {
                last = n.parse::<u64>().unwrap();
                seen += 1;
                if seen == 20 + round * 7 {
                    child.kill().unwrap();
                }
            }
        }
        child.wait().unwrap();
        assert!(seen > 0);
        let mut state = open(tmp.path());
        assert!(state.quarantined().is_empty());
        let all = state.load_all();
        let (_, bytes) = all.first().unwrap();
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        assert!(n == last || n == last + 1, "saved {last}, found {n}");
        assert_eq!(bytes.len(), usize::try_from(n % 3000).unwrap() + 8);
    }
}

/// Prints what one save costs; asserts only that it is no disaster.
#[test]
fn the_time_of_a_save() {
    let tmp = tempfile::tempdir().unwrap();
    let mut state = open(tmp.path());
    let mut times: Vec<_> = (0..200u32)
        .map(|n| {
            let from = Instant::now();
            state.save("aa", &[n.to_le_bytes()[0]; 2000]).unwrap();
            from.elapsed()
        })
        .collect();
    times.sort_unstable();
    println!(
        "one save of 2,000 bytes: median {:?}, 99th of 100 {:?}",
        times[100], times[198]
    );
    assert!(times[100].as_secs() < 2);
}

#[test]
fn a_directory_without_the_rights_is_refused_naming_the_user() {
    let tmp = tempfile::tempdir().unwrap();
    std::fs::set_permissions(tmp.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    as_nobody(|| {
        for path in [tmp.path().to_owned(), tmp.path().join("new")] {
            let text = StateDir::open(&path).unwrap_err().to_string();
            assert!(
                text.contains(path.to_str().unwrap()) && text.contains("user 65534"),
                "{text}"
            );
        }
    });
}
