//! Mounts that make a directory no store.
//!
//! A mount may be missing: below it is an empty directory, which would become another store with another uuid, and the
//! job would begin anew in it. A fresh directory is a legitimate store, so only what this machine says itself counts:
//! a line of `/etc/fstab` for the store's directory, or for one above it, where nothing is mounted now.
//!
//! An NFS mount may have `nocto` (nfs(5)): then opening a directory does not ask the server whether it has changed, and
//! the log's newest entry, which is a lease, may be an old one.

use std::fs;
use std::path::{Path, PathBuf};

/// Made anew at each mount, and empty then: nobody keeps a store there by such a line.
const FLEETING: [&str; 4] = ["swap", "tmpfs", "ramfs", "proc"];

/// The directory at which something should be mounted for this path, and is not.
pub(super) fn missing(path: &Path) -> Option<PathBuf> {
    // As the kernel sees it: a link may lead below a mount.
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    // Where either cannot be read nothing is known.
    let wanted = fs::read_to_string("/etc/fstab").ok()?;
    let mounted = fs::read_to_string("/proc/self/mountinfo").ok()?;
    missing_of(&path, &wanted, &mounted)
}

/// The mount of this path, if it is NFS without close-to-open consistency.
pub(super) fn unseen(path: &Path) -> Option<PathBuf> {
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let mounted = fs::read_to_string("/proc/self/mountinfo").ok()?;
    unseen_of(&path, &mounted)
}

/// By mountinfo (proc(5)): a line's options of the mount are its sixth field, and behind a dash stand type, source and
/// the file system's options.
fn unseen_of(path: &Path, mounted: &str) -> Option<PathBuf> {
    let mounts = mounted.lines().filter_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        let at = plain(mount.split_whitespace().nth(4)?);
        path.starts_with(&at).then_some((at, file_system))
    });
    // Of two at one place the later one is seen.
    let (at, file_system) = mounts.max_by_key(|(at, _)| at.components().count())?;
    let mut fields = file_system.split_whitespace();
    let kind = fields.next()?;
    let options = fields.nth(1)?;
    let nocto = matches!(kind, "nfs" | "nfs4") && options.split(',').any(|o| o == "nocto");
    nocto.then_some(at)
}

/// By fstab(5), and mountinfo (proc(5)).
fn missing_of(path: &Path, wanted: &str, mounted: &str) -> Option<PathBuf> {
    let mounted: Vec<PathBuf> = (mounted.lines())
        .filter_map(|line| line.split_whitespace().nth(4))
        .map(plain)
        .collect();
    let wanted = wanted.lines().filter_map(|line| {
        let mut fields = line.split_whitespace();
        let (source, at, kind) = (fields.next()?, fields.next()?, fields.next()?);
        let counts = !source.starts_with('#') && !FLEETING.contains(&kind);
        counts.then(|| plain(at))
    });
    // Whatever runs has a root, which need not be a mount: chroot(2).
    let above = wanted.filter(|at| path.starts_with(at) && at.parent().is_some());
    above
        .filter(|at| !mounted.contains(at))
        .max_by_key(|at| at.components().count())
}

/// A field without its escapes: a space, for one, is `\040`.
fn plain(field: &str) -> PathBuf {
    let mut out = String::new();
    let mut rest = field;
    while let Some((before, behind)) = rest.split_once('\\') {
        out.push_str(before);
        let code = behind.get(..3).and_then(|c| u8::from_str_radix(c, 8).ok());
        match code {
            Some(code) => {
                out.push(char::from(code));
                rest = behind.get(3..).unwrap_or_default();
            }
            None => {
                out.push('\\');
                rest = behind;
            }
        }
    }
    out.push_str(rest);
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: &str = "\
# /etc/fstab
UUID=1 /            ext4  defaults 0 1
UUID=2 none         swap  sw       0 0
tmpfs  /tmp         tmpfs size=1g  0 0
nas:/x /shared      nfs   defaults 0 0
nas:/y /shared/deep nfs   noauto   0 0
nas:/z /mnt/my\\040runs nfs defaults 0 0
";

    fn mounted(at: &[&str]) -> String {
        let line = |at: &&str| format!("36 35 98:0 / {at} rw,noatime shared:1 - nfs nas:/x rw\n");
        at.iter().map(line).collect()
    }

    #[test]
    fn a_mount_that_the_machine_is_to_have_and_has_not_is_named() {
        let of = |path: &str, at: &[&str]| missing_of(Path::new(path), WANTED, &mounted(at));
        assert_eq!(of("/home/me", &[]), None);
        let none = None;
        assert_eq!(of("/shared/store", &["/"]), Some("/shared".into()));
        assert_eq!(of("/shared", &["/"]), Some("/shared".into()));
        assert_eq!(of("/shared/store", &["/", "/shared"]), none);
        assert_eq!(of("/shared2", &["/"]), none);
        // The nearest one.
        let deep = Some("/shared/deep".into());
        assert_eq!(of("/shared/deep/store", &["/", "/shared"]), deep);
        assert_eq!(of("/shared/deep/store", &["/"]), deep);
        assert_eq!(of("/mnt/my runs/a", &["/"]), Some("/mnt/my runs".into()));
        assert_eq!(of("/mnt/my runs/a", &["/", "/mnt/my\\040runs"]), none);
        // A directory of its own, and what is new each time.
        for fresh in ["/home/me/store", "/tmp/store", "/none", "relative"] {
            assert_eq!(of(fresh, &["/"]), none, "{fresh}");
        }
        for nonsense in ["", "\n\n", "x", "# /shared nfs", "a \\ b", "a \\04 b c"] {
            assert_eq!(missing_of(Path::new("/shared"), nonsense, nonsense), none);
        }
    }

    #[test]
    fn a_mount_without_close_to_open_consistency_is_named() {
        let mounted = "\
22 1 0:20 / / rw shared:1 - ext4 /dev/sda rw
23 22 0:21 / /shared rw,relatime shared:2 - nfs4 nas:/x rw,vers=4.2,nocto,hard
24 23 0:22 / /shared/good rw shared:3 - nfs nas:/y rw,hard
25 22 0:23 / /late rw - nfs nas:/z rw,nocto
26 25 0:24 / /late rw - nfs nas:/z rw
";
        let of = |path: &str| unseen_of(Path::new(path), mounted);
        assert_eq!(of("/shared/store"), Some("/shared".into()));
        for well in ["/home/me", "/shared2", "/shared/good/store", "/late/store"] {
            assert_eq!(of(well), None, "{well}");
        }
        for nonsense in ["", "x", " - ", "1 2 3 4 / 6 - nfs", "1 2 3 4 / 6 - nfs a"] {
            assert_eq!(unseen_of(Path::new("/shared"), nonsense), None);
        }
    }
}
