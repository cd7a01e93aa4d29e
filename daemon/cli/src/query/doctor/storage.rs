//! The state directory, and a store.

use std::path::Path;

use muster_daemon::state::refused_file_system;
use muster_store::{Location, Options, Patience, Store};
use nix::sys::statvfs::statvfs;
use nix::unistd::{AccessFlags, access};

use super::super::output::duration_ms;
use super::Check;

/// Free space below which a state directory is about to fail.
const FREE: u64 = 64 << 20;
/// A store slower than this makes every decision slow, in milliseconds.
const SLOW: f64 = 1_000.0;

/// Looks at the place for the agent's state, and creates nothing there.
pub(super) fn state_dir(dir: &Path) -> Check {
    const NAME: &str = "state directory";
    let shown = dir.display();
    let elsewhere = "choose another one: state_dir, --state-dir or MUSTER_STATE_DIR";
    // Where it does not exist, it would be made in the nearest directory that does.
    let Some(place) = dir.ancestors().find(|p| p.is_dir()) else {
        return Check::fail(NAME, format!("{shown}: no such place"), elsewhere);
    };
    let needed = AccessFlags::W_OK | AccessFlags::X_OK;
    if let Err(error) = access(place, needed) {
        return Check::warn(
            NAME,
            format!(
                "{shown}: {} is not writable for this user: {error}",
                place.display()
            ),
            match nix::unistd::geteuid().is_root() {
                true => {
                    format!("look whether it is mounted read-only or immutable, or {elsewhere}")
                }
                false => format!(
                    "run as the agent's user (a service's state is root's: use sudo), or {elsewhere}"
                ),
            },
        );
    }
    match refused_file_system(place) {
        Ok(None) => {}
        Ok(Some(kind)) => {
            return Check::fail(
                NAME,
                format!(
                    "{shown} is on {kind}: a network file system can be locked from two hosts at once"
                ),
                format!("use a local disk; {elsewhere}"),
            );
        }
        Err(error) => {
            return Check::fail(NAME, format!("{shown}: {error}"), elsewhere);
        }
    }
    match statvfs(place) {
        Ok(stat) if (stat.blocks_available() * stat.fragment_size()) < FREE => Check::warn(
            NAME,
            format!("{shown}: less than {} MiB are free", FREE >> 20),
            "free some space: an agent that cannot store its votes abstains",
        ),
        Ok(_) => Check::ok(NAME, format!("{shown}: local and writable")),
        Err(error) => Check::fail(NAME, format!("{shown}: {error}"), elsewhere),
    }
}

/// Probes a store as a launcher does: create-only must hold. Blocking.
pub(super) fn store(location: &Location) -> Check {
    const NAME: &str = "store";
    let probed = Store::open(location, &Options::of_process())
        .and_then(|store| store.with_patience(Patience::brief()).probe());
    match probed {
        Err(error) => Check::fail(NAME, error.to_string(), "see the end of the line above"),
        Ok(probed) => {
            let ms = probed.latency.as_secs_f64() * 1e3;
            let detail = format!(
                "{location} keeps create-only promises, a create takes {}, id {}: the id must be the same on every node",
                duration_ms(ms),
                probed.uuid
            );
            if ms > SLOW {
                Check::warn(
                    NAME,
                    detail,
                    "each decision waits for it: use a faster store, or none (members decide then)",
                )
            } else {
                Check::ok(NAME, detail)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn a_place_for_state() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(state_dir(&dir.path().join("not/yet")).verdict, Verdict::Ok);
        assert!(!dir.path().join("not").exists());
        let proc = state_dir(Path::new("/proc/muster"));
        assert_ne!(proc.verdict, Verdict::Ok, "{proc:?}");
    }

    #[test]
    fn a_store_is_probed_and_left_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let store = |path: &Path| store(&Location::Directory(path.to_owned()));
        let first = store(dir.path());
        assert_eq!(first.verdict, Verdict::Ok, "{first:?}");
        let entries = std::fs::read_dir(dir.path()).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["muster-probe", "muster-store"]);
        assert!(
            std::fs::remove_dir(dir.path().join("muster-probe")).is_ok(),
            "it is empty"
        );
        assert_eq!(store(&dir.path().join("none")).verdict, Verdict::Fail);
        assert_eq!(store(Path::new("/proc")).verdict, Verdict::Fail);
    }

    /// A user whose files are for nobody else begins a store that others share.
    #[test]
    fn a_store_is_named_for_all_users() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let before = nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
        let made = store(&Location::Directory(dir.path().to_owned()));
        nix::sys::stat::umask(before);
        assert_eq!(made.verdict, Verdict::Ok, "{made:?}");
        let mode = |name: &str| {
            let there = std::fs::metadata(dir.path().join(name)).unwrap();
            there.permissions().mode() & 0o7777
        };
        assert_eq!(
            (mode("muster-store"), mode("muster-probe")),
            (0o644, 0o1777)
        );
    }
}
