//! Tools that several tests need: mounts of their own.

use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change, mount_remount};
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// A tmpfs that only the calling test sees.
pub(crate) struct TinyDisk {
    pub(crate) path: PathBuf,
}

impl TinyDisk {
    pub(crate) fn remount_read_only(&self) {
        mount_remount(&self.path, MountFlags::RDONLY, c"").unwrap();
    }

    /// Writes until nothing fits any more; the caller removes the file to make room again.
    pub(crate) fn fill(&self) -> PathBuf {
        use std::io::Write;
        let path = self.path.join("filler");
        let mut file = std::fs::File::create(&path).unwrap();
        while file.write_all(&[1; 512]).is_ok() {}
        path
    }
}

/// Runs `test` in a thread that has its own mount namespace with a tmpfs of `kib` KiB. The mount
/// goes when the thread ends, however it ends. Without the right to mount, the test is skipped and
/// says so.
pub(crate) fn on_tiny_disk(kib: u32, test: impl FnOnce(&TinyDisk) + Send) {
    let dir = tempfile::tempdir().unwrap();
    let path: &Path = dir.path();
    std::thread::scope(|scope| {
        let done = scope.spawn(move || {
            // SAFETY: only this thread leaves the shared mount namespace, and it ends here.
            if let Err(e) = unsafe { unshare_unsafe(UnshareFlags::NEWNS) } {
                eprintln!("SKIPPED: no right to make a mount namespace ({e}); run as root");
                return;
            }
            mount_change(
                "/",
                MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
            )
            .unwrap();
            let size = std::ffi::CString::new(format!("size={kib}k,mode=0700")).unwrap();
            mount("tmpfs", path, "tmpfs", MountFlags::empty(), size.as_c_str()).unwrap();
            test(&TinyDisk {
                path: path.to_owned(),
            });
        });
        if let Err(panic) = done.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

/// Runs `test` in a thread that has no rights (user 65534). Skipped, and says so, unless root.
pub(crate) fn as_nobody(test: impl FnOnce() + Send) {
    as_user(65534, test);
}

/// As [`as_nobody`], of any user.
pub(crate) fn as_user(uid: u32, test: impl FnOnce() + Send) {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can become another user");
        return;
    }
    std::thread::scope(|scope| {
        let done = scope.spawn(|| {
            let user = rustix::process::Uid::from_raw(uid);
            // The system call changes this thread only, and the thread ends here.
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            test();
        });
        if let Err(panic) = done.join() {
            std::panic::resume_unwind(panic);
        }
    });
}
