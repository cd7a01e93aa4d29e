//! Small disks, of memory, that only the test and what it starts can see.

use std::io::Write;
use std::path::Path;

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
pub(crate) fn apart() -> nix::Result<()> {
    let none = None::<&str>;
    unshare(CloneFlags::CLONE_NEWNS)?;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(none, "/", none, private, none)
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
