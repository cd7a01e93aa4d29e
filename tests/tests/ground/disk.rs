//! Small disks, of memory, that only the test and what it starts can see.

use std::path::Path;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

/// Mounts one of so many KiB; says so and returns false without the right to. The mount belongs to this
/// thread and what it starts, and goes with them.
pub(crate) fn small(at: &Path, kib: usize) -> bool {
    std::fs::create_dir_all(at).unwrap();
    let options = format!("size={kib}k,mode=700");
    let none = None::<&str>;
    let mounted = unshare(CloneFlags::CLONE_NEWNS)
        .and_then(|()| {
            let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
            mount(none, "/", none, private, none)
        })
        .and_then(|()| {
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
