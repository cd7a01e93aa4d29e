//! File systems that stall, which only the test and what it starts can see.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::ground::disk::apart;

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
