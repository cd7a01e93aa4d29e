//! A worker that the kernel ends, as memory is short.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::ground::program;
use crate::harness::Bed;

/// A control group with little memory.
struct Group(PathBuf);

impl Group {
    /// Says so and returns nothing where none can be made.
    fn of_mib(mib: u64) -> Option<Group> {
        let name = format!("muster-test-{}", std::process::id());
        let kinds = [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            ("/sys/fs/cgroup", "memory.max"),
        ];
        for (root, limit) in kinds {
            let at = Path::new(root).join(&name);
            if std::fs::create_dir(&at).is_err() {
                continue;
            }
            let group = Group(at);
            let limit = group.0.join(limit);
            if limit.exists() {
                std::fs::write(&limit, (mib << 20).to_string()).unwrap();
                return Some(group);
            }
        }
        eprintln!("skipped: a control group with a limit of memory takes root");
        None
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Those who were in it may not be gone yet.
        for _ in 0..50 {
            if std::fs::remove_dir(&self.0).is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The first life takes all memory, the second one is killed by somebody, the third one ends well.
const SCRIPT: &str = "
import os, signal
life = int(os.environ['TORCHELASTIC_RESTART_COUNT'])
taken = []
while life == 0:
    taken.append(bytearray(4 << 20))
if life == 1:
    os.kill(os.getpid(), signal.SIGKILL)
";

#[test]
fn who_was_killed_for_want_of_memory_is_told_from_who_was_killed() {
    let Some(group) = Group::of_mib(192) else {
        return;
    };
    let mut bed = Bed::new(&[]);
    bed.agent(0);
    let script = bed.path("script.py");
    std::fs::write(&script, SCRIPT).unwrap();
    let inside = format!(
        "echo $$ > {}/cgroup.procs && exec {} run --rdzv-id=job --max-restarts=2 --socket {} {}",
        group.0.display(),
        program("muster"),
        bed.socket(0).display(),
        script.display()
    );
    bed.start(0, &["sh".into(), "-c".into(), inside]);
    assert_eq!(bed.ended(0), Some(0), "{}", bed.said(0));
    let failed = bed.history(0, "worker_failed");
    let causes: Vec<_> = failed.iter().map(|e| e["out_of_memory"].clone()).collect();
    assert_eq!(causes, [true, false]);
}
