//! Limits of this shell, which the workers inherit, and shared memory.

use std::path::Path;

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use nix::sys::statvfs::statvfs;

use super::Check;

/// Descriptors that a rank with a data loader and a few hundred peers can need.
const FILES: u64 = 4_096;
/// Processes of one user: ranks, their data loaders, and their threads.
const PROCESSES: u64 = 4_096;
/// Shared memory below which data loaders and NCCL run out: Docker gives 64 MiB.
const SHM: u64 = 1 << 30;
const SHM_NAME: &str = "shared memory";
const SHM_FIX: &str = "docker run --shm-size=8g; in Kubernetes an emptyDir with medium: Memory on /dev/shm; else: mount -o remount,size=50% /dev/shm";

pub(super) fn checks() -> Vec<Check> {
    let soft = |resource| getrlimit(resource).map(|(soft, _)| soft).ok();
    let rdma = std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut d| d.next().is_some());
    vec![
        files(soft(Resource::RLIMIT_NOFILE)),
        locked(soft(Resource::RLIMIT_MEMLOCK), rdma),
        processes(soft(Resource::RLIMIT_NPROC)),
        shared_memory(Path::new("/dev/shm")),
    ]
}

fn text(limit: u64) -> String {
    if limit == RLIM_INFINITY {
        "unlimited".into()
    } else {
        limit.to_string()
    }
}

fn unknown(name: &'static str) -> Check {
    Check::warn(name, "the kernel does not say", "check with: ulimit -a")
}

fn files(limit: Option<u64>) -> Check {
    const NAME: &str = "open files";
    match limit {
        None => unknown(NAME),
        Some(n) if n < FILES => Check::warn(
            NAME,
            format!("{n} for each process"),
            "ulimit -n 65536 before `muster run`, or LimitNOFILE=65536 in a unit, or nofile in /etc/security/limits.conf",
        ),
        Some(n) => Check::ok(NAME, format!("{} for each process", text(n))),
    }
}

fn locked(limit: Option<u64>, rdma: bool) -> Check {
    const NAME: &str = "locked memory";
    match limit {
        None => unknown(NAME),
        Some(n) if rdma && n != RLIM_INFINITY => Check::warn(
            NAME,
            format!(
                "{} MiB, and this node has InfiniBand or RoCE, whose buffers are locked",
                n >> 20
            ),
            "ulimit -l unlimited, or LimitMEMLOCK=infinity in a unit; in Docker: --ulimit memlock=-1",
        ),
        Some(RLIM_INFINITY) => Check::ok(NAME, "unlimited"),
        Some(n) => Check::ok(NAME, format!("{} KiB (no RDMA device needs more)", n >> 10)),
    }
}

fn processes(limit: Option<u64>) -> Check {
    const NAME: &str = "processes";
    match limit {
        None => unknown(NAME),
        Some(n) if n < PROCESSES => Check::warn(
            NAME,
            format!("{n} for this user, threads included"),
            "ulimit -u 65536, or TasksMax= and LimitNPROC= in a unit, or a larger pids limit of the container",
        ),
        Some(n) => Check::ok(NAME, format!("{} for this user", text(n))),
    }
}

fn shared_memory(path: &Path) -> Check {
    match statvfs(path) {
        Err(error) => Check::fail(SHM_NAME, format!("{}: {error}", path.display()), SHM_FIX),
        Ok(stat) => {
            let size = stat.blocks() * stat.fragment_size();
            let free = stat.blocks_available() * stat.fragment_size();
            judge_memory(size, free)
        }
    }
}

fn judge_memory(size: u64, free: u64) -> Check {
    let detail = format!("/dev/shm: {} MiB, {} MiB free", size >> 20, free >> 20);
    if size < SHM {
        return Check::warn(
            SHM_NAME,
            format!("{detail}: too little for data loaders with worker processes, and for NCCL"),
            SHM_FIX,
        );
    }
    if free < size / 10 {
        return Check::warn(
            SHM_NAME,
            detail,
            "processes that died left files there: look at `ls -l /dev/shm`, and remove what nobody uses (fuser /dev/shm/*)",
        );
    }
    Check::ok(SHM_NAME, detail)
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn limits_are_judged() {
        assert_eq!(files(Some(1024)).verdict, Verdict::Warn);
        assert_eq!(
            files(Some(RLIM_INFINITY)).detail,
            "unlimited for each process"
        );
        assert_eq!(locked(Some(64 << 10), false).verdict, Verdict::Ok);
        assert_eq!(locked(Some(64 << 10), true).verdict, Verdict::Warn);
        assert_eq!(locked(Some(RLIM_INFINITY), true).verdict, Verdict::Ok);
        assert_eq!(processes(Some(100)).verdict, Verdict::Warn);
        assert_eq!(processes(None).verdict, Verdict::Warn);
        assert_eq!(judge_memory(64 << 20, 64 << 20).verdict, Verdict::Warn);
        assert_eq!(judge_memory(8 << 30, 1 << 20).verdict, Verdict::Warn);
        assert_eq!(judge_memory(8 << 30, 7 << 30).verdict, Verdict::Ok);
        assert_eq!(shared_memory(Path::new("/nowhere")).verdict, Verdict::Fail);
    }
}
