//! Whether a file system keeps what a state directory needs: an exclusive lock that excludes, and
//! an fsync that means it. Network file systems are refused, because a second agent on another
//! host could hold "the same" lock.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use rustix::fs::{fstat, fstatfs};

/// File-system magics (`statfs(2)`, `linux/magic.h`, and the file systems' own headers).
const REFUSED: &[(u64, &str)] = &[
    (0x6969, "NFS"),
    (0x517b, "SMB"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB2"),
    (0x0102_1997, "9p"),
    (0x0bd0_0bd0, "Lustre"),
    (0x00c3_6400, "Ceph"),
    (0x4750_4653, "GPFS"),
    (0x1983_0326, "BeeGFS"),
    (0x5346_414f, "AFS"),
    (0x6b41_4653, "AFS"),
    (0x7375_7245, "Coda"),
    (0x0116_1970, "GFS2"),
    (0x7461_636f, "OCFS2"),
    (0x2003_0528, "OrangeFS"),
    (0xaad7_aaea, "PanFS"),
    (0x564c, "NCP"),
];
const FUSE: u64 = 0x6573_5546;
/// FUSE types that lie on a local disk. Every other one may be a network file system (sshfs,
/// gcsfuse, s3fs, virtiofs, ...) and is refused.
const FUSE_LOCAL: &[&str] = &["fuseblk", "fuse.fuse-overlayfs"];

/// The name of the refused file system, or `None` when the place will do.
fn refused(magic: u64, mount_type: Option<&str>) -> Option<String> {
    if magic == FUSE {
        return match mount_type {
            Some(kind) if FUSE_LOCAL.contains(&kind) => None,
            Some(kind) => Some(kind.to_owned()),
            None => Some("FUSE".to_owned()),
        };
    }
    let (_, name) = REFUSED.iter().find(|(m, _)| *m == magic)?;
    Some((*name).to_owned())
}

/// The type of the mount with this device number, from the text of `/proc/self/mountinfo`
/// (proc_pid_mountinfo(5): field 3 is major:minor, the type follows the separator "-").
fn mount_type(mountinfo: &str, major: u32, minor: u32) -> Option<&str> {
    let device = format!("{major}:{minor}");
    mountinfo.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        (before.split(' ').nth(2) == Some(device.as_str())).then(|| after.split(' ').next())?
    })
}

/// The name of the file system of a directory when it is one that a state directory must not be on.
pub fn check(dir: &Path) -> io::Result<Option<String>> {
    let dir = File::open(dir)?;
    Ok(refused_file_system(dir.as_fd())?)
}

/// The name of the file system of `dir` when it is one that a state directory must not be on.
pub(super) fn refused_file_system(dir: BorrowedFd<'_>) -> rustix::io::Result<Option<String>> {
    // The kernel's magics are 32 bits wide; the field's sign and width differ between machines.
    let magic = fstatfs(dir)?.f_type as u64 & 0xffff_ffff;
    if magic != FUSE {
        return Ok(refused(magic, None));
    }
    let device = fstat(dir)?.st_dev;
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let kind = mount_type(&table, rustix::fs::major(device), rustix::fs::minor(device));
    Ok(refused(magic, kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_file_systems_are_refused_and_local_ones_are_not() {
        for (magic, name) in [
            (0x6969, "NFS"),
            (0xff53_4d42, "CIFS"),
            (0x0102_1997, "9p"),
            (0x0bd0_0bd0, "Lustre"),
        ] {
            assert_eq!(refused(magic, None).as_deref(), Some(name));
        }
        // ext4, xfs, btrfs, tmpfs, overlayfs, zfs
        for magic in [
            0xef53,
            0x5846_5342,
            0x9123_683e,
            0x0102_1994,
            0x794c_7630,
            0x2fc1_2fc1,
        ] {
            assert_eq!(refused(magic, None), None);
        }
        assert_eq!(
            refused(FUSE, Some("fuse.sshfs")).as_deref(),
            Some("fuse.sshfs")
        );
        assert_eq!(refused(FUSE, Some("virtiofs")).as_deref(), Some("virtiofs"));
        assert_eq!(refused(FUSE, None).as_deref(), Some("FUSE"));
        assert_eq!(refused(FUSE, Some("fuseblk")), None);
    }

    #[test]
    fn the_mount_table_is_read_by_device() {
        let table = "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
                     40 22 0:53 / /mnt/x rw - fuse.sshfs host:/x rw,user_id=0\n";
        assert_eq!(mount_type(table, 0, 53), Some("fuse.sshfs"));
        assert_eq!(mount_type(table, 254, 0), Some("ext4"));
        assert_eq!(mount_type(table, 9, 9), None);
        assert_eq!(mount_type("nonsense\n", 9, 9), None);
    }
}
