//! Whether the kernel has killed for want of memory, by its own count.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Kills that are counted in one moment are of all who were reaped in it.
const MOMENT: Duration = Duration::from_millis(200);

/// Between two looks while nothing ends: on a busy host each costs a launcher that has to move.
const PASS: Duration = Duration::from_secs(5);

/// The counts of such kills among the processes of this one's control group, and on this host.
#[derive(Debug)]
pub(super) struct OomKills {
    group: Count,
    host: Count,
    passed: Instant,
}

impl OomKills {
    pub(super) fn of_this_process() -> OomKills {
        let groups = read_to_string("/proc/self/cgroup").unwrap_or_default();
        let group = files(&groups, Path::new("/sys/fs/cgroup")).find(|file| count(file).is_some());
        OomKills {
            group: Count::of(group.unwrap_or_default()),
            host: Count::of("/proc/vmstat".into()),
            passed: Instant::now(),
        }
    }

    /// Takes in now and then what was counted by now, so that it is not taken for a later end's cause.
    pub(super) fn pass(&mut self) {
        if self.passed.elapsed() >= PASS {
            self.passed = Instant::now();
            let _risen = self.group.look();
        }
    }

    /// Workers start now: what was counted by now is no cause of their end.
    pub(super) fn forget(&mut self) {
        self.group.forget();
        self.host.forget();
    }

    /// Whether there were any just now; `None`: nobody can say whether they were of this group.
    pub(super) fn look(&mut self) -> Option<bool> {
        match (self.group.look(), self.host.look()) {
            (Some(true), _) => Some(true),
            (_, Some(false)) => Some(false),
            _ => None,
        }
    }
}

#[derive(Debug)]
struct Count {
    file: PathBuf,
    seen: Option<u64>,
    rose: Option<Instant>,
}

impl Count {
    fn of(file: PathBuf) -> Count {
        let seen = count(&file);
        Count {
            file,
            seen,
            rose: None,
        }
    }

    fn forget(&mut self) {
        self.seen = count(&self.file);
        self.rose = None;
    }

    /// Whether it has risen; `None`: it cannot be read.
    fn look(&mut self) -> Option<bool> {
        let before = std::mem::replace(&mut self.seen, count(&self.file));
        if self.seen? > before? {
            self.rose = Some(Instant::now());
        }
        Some(self.rose.is_some_and(|at| at.elapsed() < MOMENT))
    }
}

/// Where the kernel may count for a process of these groups (`proc_pid_cgroup(5)`): `memory.events` of version 2,
/// `memory.oom_control` of version 1.
fn files<'a>(groups: &'a str, root: &'a Path) -> impl Iterator<Item = PathBuf> + 'a {
    groups.lines().filter_map(move |line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?.trim_start_matches('/'));
        match controllers {
            "" => Some(root.join(path).join("memory.events")),
            named if named.split(',').any(|c| c == "memory") => {
                Some(root.join("memory").join(path).join("memory.oom_control"))
            }
            _ => None,
        }
    })
}

/// The number behind `oom_kill`.
fn count(file: &Path) -> Option<u64> {
    let text = read_to_string(file).ok()?;
    let found = text.lines().find_map(|l| l.strip_prefix("oom_kill "));
    found?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_of_the_own_group_is_read() {
        let root = tempfile::tempdir().unwrap();
        let v2 = "0::/pods/a\n";
        let v1 = "5:cpu,memory:/b\n2:cpuset:/\n0::/\n";
        let all = |groups| files(groups, root.path()).collect::<Vec<_>>();
        let events = root.path().join("pods/a/memory.events");
        assert_eq!(all(v2), std::slice::from_ref(&events));
        let control = root.path().join("memory/b/memory.oom_control");
        assert_eq!(all(v1), [control, root.path().join("memory.events")]);

        std::fs::create_dir_all(events.parent().unwrap()).unwrap();
        let write = |kills| {
            let text = format!("low 0\noom 3\noom_kill {kills}\noom_group_kill 0\n");
            std::fs::write(&events, text).unwrap();
        };
        write(7);
        let mut kills = Count::of(events.clone());
        assert_eq!(kills.look(), Some(false));
        write(8);
        // Of all that are reaped in this moment.
        for _ in 0..2 {
            assert_eq!(kills.look(), Some(true));
        }
        let earlier = Instant::now().checked_sub(MOMENT);
        kills.rose = earlier;
        assert_eq!(kills.look(), Some(false));
        // Those that start after it was counted did not end for it.
        write(9);
        assert_eq!(kills.look(), Some(true));
        write(10);
        kills.forget();
        assert_eq!(kills.look(), Some(false));
        std::fs::remove_file(&events).unwrap();
        assert_eq!(kills.look(), None);
    }
}
