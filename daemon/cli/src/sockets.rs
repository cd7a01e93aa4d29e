//! Where agents' sockets are: those of agents that run as a service, and those of agents that a
//! `muster run` carries in itself.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use muster_daemon::config::socket_candidates;
use nix::fcntl::{Flock, FlockArg, OFlag};

/// The most sockets that are asked.
const MAX_SOCKETS: usize = 64;

/// The folder with the sockets of embedded agents, `run-<pid>.sock`: `$XDG_RUNTIME_DIR/muster`, or
/// a folder of the user's own under the temporary directory (containers, batch jobs).
pub fn embedded_dir() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|d| !d.is_empty()) {
        Some(dir) => PathBuf::from(dir).join("muster"),
        None => std::env::temp_dir().join(format!("muster-{}", nix::unistd::getuid())),
    }
}

/// The socket of the agent embedded in the launcher with this process id.
pub fn embedded_socket(dir: &Path, pid: u32) -> PathBuf {
    dir.join(format!("run-{pid}.sock"))
}

/// Makes a folder for sockets, for this user alone.
///
/// # Errors
/// When it cannot be made, or belongs to somebody else: the temporary directory is everybody's, and
/// whoever made the folder first would own every socket in it, also where this user is root.
pub fn prepare_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let meta = fs::symlink_metadata(dir)?;
    if !meta.is_dir() || meta.uid() != nix::unistd::getuid().as_raw() {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!(
                "{} belongs to another user: remove it, or set XDG_RUNTIME_DIR to a directory of your own",
                dir.display()
            ),
        ));
    }
    if meta.mode() & 0o077 != 0 {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o700))?;
    }
    Ok(())
}

/// Removes the sockets of launchers that were killed, which nobody else removes.
pub fn remove_stale(dir: &Path) {
    for socket in embedded_in(dir) {
        if let Some(lock) = stale(&socket) {
            let _gone = fs::remove_file(&socket);
            let _gone = fs::remove_file(lock_of(&socket));
            drop(lock);
        }
    }
}

fn lock_of(socket: &Path) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(".lock");
    PathBuf::from(name)
}

/// The lock of a socket that its agent held until it ended; `None` while it lives. The process id in the name tells
/// nothing where containers share the folder.
fn stale(socket: &Path) -> Option<Flock<File>> {
    let mut options = File::options();
    options.write(true).custom_flags(OFlag::O_NOFOLLOW.bits());
    let lock = options.open(lock_of(socket)).ok()?;
    Flock::lock(lock, FlockArg::LockExclusiveNonblock).ok()
}

/// Whether a folder is this user's and no other user can put anything there.
fn is_ours(dir: &Path) -> bool {
    fs::symlink_metadata(dir).is_ok_and(|m| {
        m.is_dir() && m.uid() == nix::unistd::getuid().as_raw() && m.mode() & 0o022 == 0
    })
}

/// The sockets that there are, in the order in which a command looks, each once: the user's own
/// agent, the machine's, then the embedded ones that have not ended. Whether anybody listens is not known yet.
pub fn existing(environment: &BTreeMap<String, String>, embedded: &Path) -> Vec<PathBuf> {
    let mut all = socket_candidates(environment);
    if is_ours(embedded) {
        all.extend(embedded_in(embedded).filter(|socket| stale(socket).is_none()));
    }
    let mut found: Vec<PathBuf> = Vec::new();
    let mut seen = Vec::new();
    for path in all {
        let Ok(meta) = fs::metadata(&path) else {
            continue;
        };
        let identity = (meta.dev(), meta.ino());
        if meta.file_type().is_socket() && !seen.contains(&identity) && found.len() < MAX_SOCKETS {
            seen.push(identity);
            found.push(path);
        }
    }
    found
}

/// `run-<pid>.sock`, by process id.
fn embedded_in(dir: &Path) -> impl Iterator<Item = PathBuf> {
    let mut all: Vec<(u32, PathBuf)> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let pid = name.strip_prefix("run-")?.strip_suffix(".sock")?;
            Some((pid.parse().ok()?, entry.path()))
        })
        .collect();
    all.sort();
    all.into_iter().map(|(_, path)| path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn sockets_are_found_once_and_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("muster");
        prepare_dir(&own).unwrap();
        let env = BTreeMap::from([(
            "XDG_RUNTIME_DIR".to_owned(),
            dir.path().to_str().unwrap().to_owned(),
        )]);
        let names = ["run-20.sock", "run-3.sock", "run-x.sock", "musterd.sock"];
        let _open = names.map(|name| UnixListener::bind(own.join(name)).unwrap());
        fs::write(own.join("run-4.sock"), "no socket").unwrap();
        std::os::unix::fs::symlink(own.join("run-3.sock"), own.join("run-5.sock")).unwrap();
        let found: Vec<PathBuf> = existing(&env, &own)
            .into_iter()
            .filter(|p| p.starts_with(&own))
            .collect();
        assert_eq!(
            found,
            ["musterd.sock", "run-3.sock", "run-20.sock"].map(|n| own.join(n))
        );
    }

    #[test]
    fn sockets_of_agents_that_were_killed_hide_no_other_and_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("muster");
        prepare_dir(&own).unwrap();
        let made = |pid| {
            let socket = embedded_socket(&own, pid);
            let _bound = UnixListener::bind(&socket).unwrap();
            File::create(lock_of(&socket)).unwrap()
        };
        for pid in 1..=MAX_SOCKETS as u32 + 2 {
            drop(made(pid));
        }
        let live = Flock::lock(made(1_000), FlockArg::LockExclusive).unwrap();
        let ours = || -> Vec<PathBuf> {
            let found = existing(&BTreeMap::new(), &own).into_iter();
            found.filter(|p| p.starts_with(&own)).collect()
        };
        assert_eq!(ours(), [embedded_socket(&own, 1_000)]);
        remove_stale(&own);
        assert_eq!(fs::read_dir(&own).unwrap().count(), 2);
        drop(live);
        assert!(ours().is_empty());
    }

    #[test]
    fn a_folder_that_others_can_write_to_is_not_trusted() {
        let dir = tempfile::tempdir().unwrap();
        let open = dir.path().join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
        let _listener = UnixListener::bind(open.join("run-1.sock")).unwrap();
        let found = existing(&BTreeMap::new(), &open);
        assert!(!found.iter().any(|p| p.starts_with(&open)));
        prepare_dir(&open).unwrap();
        let found = existing(&BTreeMap::new(), &open);
        assert!(found.contains(&embedded_socket(&open, 1)));
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&open, &link).unwrap();
        assert!(prepare_dir(&link).is_err());
    }
}
