//! Disks that only the test and what it starts can see: small ones, of memory, and ones that stall.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

/// Mounts one of so many KiB; says so and returns false without the right to. The mount belongs to this
/// thread and what it starts, and goes with them.
pub(crate) fn small(at: &Path, kib: usize) -> bool {
    std::fs::create_dir_all(at).unwrap();
    let options = format!("size={kib}k,mode=700");
    let mounted = apart().and_then(|()| {
        mount(
            Some("tmpfs"),
            at,
            Some("tmpfs"),
            MsFlags::empty(),
            Some(&*options),
        )
    });
    if let Err(error) = mounted {
        eprintln!("skipped: mounting a small disk takes root: {error}");
        return false;
    }
    true
}

/// From now on this thread, and what it starts, mounts for itself.
fn apart() -> nix::Result<()> {
    let none = None::<&str>;
    unshare(CloneFlags::CLONE_NEWNS)?;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(none, "/", none, private, none)
}

/// Mounts a file system at each of these, of an image beside it, that can be stalled; says so and returns false where
/// that cannot be.
pub(crate) fn stallable(at: &[PathBuf]) -> bool {
    let run = |command: &mut Command| match command.output() {
        Ok(out) if out.status.success() => Ok(()),
        Ok(out) => Err(String::from_utf8_lossy(&out.stderr).into_owned()),
        Err(error) => Err(error.to_string()),
    };
    let mount = |at: &PathBuf| {
        std::fs::create_dir_all(at).unwrap();
        let image = at.with_extension("image");
        let file = std::fs::File::create(&image).unwrap();
        file.set_len(16 << 20).unwrap();
        run(Command::new("mkfs.ext4").arg("-q").arg(&image))?;
        run(Command::new("mount")
            .args(["-o", "loop"])
            .args([&image, at]))
    };
    let apart = apart().map_err(|error| error.to_string());
    match apart.and_then(|()| at.iter().try_for_each(mount)) {
        Ok(()) => true,
        Err(error) => {
            eprintln!(
                "skipped: a disk that stalls takes root, mkfs.ext4 and a loop device: {error}"
            );
            false
        }
    }
}

/// A file system that takes no write until this is dropped: each waits.
pub(crate) struct Stalled(PathBuf);

impl Stalled {
    pub(crate) fn new(disk: &Path) -> Stalled {
        freeze(disk, "--freeze");
        Stalled(disk.to_owned())
    }
}

impl Drop for Stalled {
    fn drop(&mut self) {
        freeze(&self.0, "--unfreeze");
    }
}

fn freeze(disk: &Path, how: &str) {
    let status = Command::new("fsfreeze").arg(how).arg(disk).status();
    assert!(status.unwrap().success(), "{how} {}", disk.display());
}

/// Leaves so many bytes free at most.
pub(crate) fn fill(disk: &Path, leave: usize) {
    let mut file = std::fs::File::create(disk.join("ballast")).unwrap();
    for size in [1 << 20, 4096, 1] {
        while file.write_all(&vec![7; size]).is_ok() {}
    }
    let len = file.metadata().unwrap().len();
    file.set_len(len.saturating_sub(leave as u64)).unwrap();
}

pub(crate) fn free(disk: &Path) {
    std::fs::remove_file(disk.join("ballast")).unwrap();
}
