//! Activity of a worker at this moment, as the kernel and the debuggers of this machine tell it: for
//! a worker that hangs. Nothing is installed and nothing is sent to the worker; `py-spy`, `gdb` and
//! `eu-stack` are used where they are there.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use muster_protocol::hang::{Doing, Point};

use super::procs;
use super::spawn::find;

/// The file in a worker's log folder.
const FILE: &str = "stacks.txt";

/// Threads that are described.
const MAX_THREADS: usize = 256;

/// How long one debugger may take.
const TOOL_TIME: Duration = Duration::from_secs(15);

/// How long a debugger that was killed may take to end: the kernel may hold it as it holds the worker.
const KILL_TIME: Duration = Duration::from_secs(1);

/// The debuggers, best first, with `{}` for the process id.
const TOOLS: [&[&str]; 3] = [
    &["py-spy", "dump", "--pid", "{}"],
    &["eu-stack", "-p", "{}"],
    &[
        "gdb",
        "-q",
        "-batch",
        "-nx",
        "-p",
        "{}",
        "-ex",
        "thread apply all bt",
    ],
];

/// A worker to be described.
#[derive(Clone, Debug)]
pub struct Target {
    pub rank: u32,
    pub pid: i32,
    /// Where it stood when the verdict came.
    pub point: Option<Point>,
    /// Its log folder.
    pub dir: PathBuf,
    /// It is one of those for which everybody waits: debuggers, which stop it for a moment, are used.
    pub named: bool,
}

impl Target {
    /// Whether this is the worker that was judged, and it has not moved since.
    pub fn is_still(&self, pid: i32, rank: u32, point: Option<Point>) -> bool {
        let moved = self.point.is_none() || self.point != point;
        (pid, rank) == (self.pid, self.rank) && !moved
    }
}

/// Activity of the worker's main thread.
pub fn doing(pid: i32) -> Doing {
    let task = PathBuf::from(format!("/proc/{pid}/task/{pid}"));
    Doing {
        state: state(&task).unwrap_or(0),
        call: read(&task.join("syscall")).and_then(|text| text.split(' ').next()?.parse().ok()),
    }
}

/// Appends the stacks of a worker to its file, and returns that.
///
/// # Errors
/// The file cannot be written.
pub fn dump(target: &Target, why: &str) -> io::Result<PathBuf> {
    let path = target.dir.join(FILE);
    // The worker can write to its folder: what it puts there must neither block nor lead elsewhere.
    let mut file = OpenOptions::new()
        .create(true)
        .append(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW)
        .open(&path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("stacks.txt is no file"));
    }
    let pid = target.pid;
    writeln!(file, "==== rank {}, pid {pid}: {why}", target.rank)?;
    let (text, counters) = threads(pid);
    file.write_all(text.as_bytes())?;
    if target.named {
        for tool in TOOLS {
            // Another process may have its number by now.
            if !is_child(pid) {
                writeln!(file, "-- it is gone")?;
                return Ok(path);
            }
            run(tool, pid, &mut file)?;
        }
    }
    // Last: this needs a lock of the process that one in trouble may never let go.
    let maps = read(Path::new(&format!("/proc/{pid}/maps"))).unwrap_or_default();
    for (thread, counter) in counters {
        if let Some(code) = place(&maps, &counter) {
            writeln!(file, "-- thread {thread} is at {code}")?;
        }
    }
    Ok(path)
}

fn is_child(pid: i32) -> bool {
    procs::parent(pid) == i32::try_from(std::process::id()).ok()
}

/// All threads, from /proc: name, state, where the kernel has it wait, the system call; the kernel's
/// stack where that may be read (as root). And the address of the code that made each call.
fn threads(pid: i32) -> (String, Vec<(String, String)>) {
    let mut text = String::new();
    let mut counters = Vec::new();
    let tasks = fs::read_dir(format!("/proc/{pid}/task"));
    let mut tasks: Vec<PathBuf> = tasks
        .into_iter()
        .flatten()
        .flatten()
        .map(|t| t.path())
        .collect();
    tasks.sort();
    for task in tasks.iter().take(MAX_THREADS) {
        let get = |name: &str| {
            let text = read(&task.join(name)).unwrap_or_default();
            text.trim().to_owned()
        };
        let state = state(task).map_or('?', char::from);
        let wait = match get("wchan").as_str() {
            "" | "0" => String::new(),
            wchan => format!(", kernel waits in {wchan}"),
        };
        let id = task.file_name().unwrap_or_default().to_string_lossy();
        let _ = writeln!(
            text,
            "-- thread {id} `{}`, state {state}{wait}",
            get("comm")
        );
        let call = get("syscall");
        if !call.is_empty() {
            let _ = writeln!(text, "   system call: {call}");
        }
        if let Some(counter) = call.rsplit(' ').next() {
            counters.push((id.into_owned(), counter.to_owned()));
        }
        for line in get("stack").lines() {
            let _ = writeln!(text, "   {line}");
        }
    }
    if tasks.is_empty() {
        text.push_str("-- it is gone\n");
    }
    (text, counters)
}

/// The file, and the offset in it, that an address belongs to, by the text of `/proc/PID/maps`.
fn place(maps: &str, address: &str) -> Option<String> {
    let address = u64::from_str_radix(address.strip_prefix("0x")?, 16).ok()?;
    for line in maps.lines() {
        let mut fields = line.split_ascii_whitespace();
        let (from, to) = fields.next()?.split_once('-')?;
        let from = u64::from_str_radix(from, 16).ok()?;
        let to = u64::from_str_radix(to, 16).ok()?;
        if (from..to).contains(&address) {
            let offset = u64::from_str_radix(fields.nth(1)?, 16).ok()?;
            let file = fields.nth(2).unwrap_or("memory without a file");
            return Some(format!("{file}+{:#x}", address - from + offset));
        }
    }
    None
}

/// The letter of a task's state (proc_pid_stat(5)).
fn state(task: &Path) -> Option<u8> {
    let stat = read(&task.join("stat"))?;
    let (_, rest) = stat.rsplit_once(')')?;
    rest.trim_start().bytes().next()
}

fn read(path: &Path) -> Option<String> {
    let bytes = fs::read(path).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Runs a debugger if there is one, with its output into the file. It never takes longer than
/// [`TOOL_TIME`].
fn run(tool: &[&str], pid: i32, file: &mut File) -> io::Result<()> {
    let Some((name, args)) = tool.split_first() else {
        return Ok(());
    };
    if find(name.as_ref(), std::env::var_os("PATH").as_deref()).is_err() {
        return Ok(());
    }
    let pid = pid.to_string();
    let args = args
        .iter()
        .map(|arg| if *arg == "{}" { pid.as_str() } else { *arg });
    writeln!(file, "-- {name}")?;
    let child = Command::new(name)
        .args(args)
        // They would ask a server for symbols.
        .env_remove("DEBUGINFOD_URLS")
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file.try_clone()?)
        .spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => return writeln!(file, "   it cannot be started: {error}"),
    };
    let until = Instant::now() + TOOL_TIME;
    // The launcher reaps every child: that nothing is there to wait for means that it has ended.
    while let Ok(None) = child.try_wait() {
        if Instant::now() >= until {
            writeln!(file, "   no answer within {} s", TOOL_TIME.as_secs())?;
            let id = child.id() as i32;
            if is_child(id) {
                procs::kill(id);
            }
            let until = Instant::now() + KILL_TIME;
            while let Ok(None) = child.try_wait()
                && Instant::now() < until
            {
                std::thread::sleep(Duration::from_millis(10));
            }
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_found_in_its_file() {
        let maps = "00400000-00452000 r-xp 00001000 08:02 173521 /usr/bin/x\n\
                    7f0000000000-7f0000001000 rw-p 00000000 00:00 0\n";
        assert_eq!(place(maps, "0x400010").unwrap(), "/usr/bin/x+0x1010");
        assert_eq!(
            place(maps, "0x7f0000000001").unwrap(),
            "memory without a file+0x1"
        );
        for none in ["0x1", "running", "", "0xzz"] {
            assert_eq!(place(maps, none), None, "{none}");
        }
        assert_eq!(place("broken\n\n-\n", "0x400010"), None);
    }

    #[test]
    fn only_the_worker_that_was_judged_and_has_not_moved_is_meant() {
        let point = |step, operation| Some(Point { step, operation });
        let target = Target {
            rank: 3,
            pid: 77,
            point: point(8, 2),
            dir: PathBuf::new(),
            named: true,
        };
        assert!(target.is_still(77, 3, point(8, 2)));
        assert!(!target.is_still(78, 3, point(8, 2)) && !target.is_still(77, 2, point(8, 2)));
        for moved in [point(8, 3), point(9, 2), None] {
            assert!(!target.is_still(77, 3, moved), "{moved:?}");
        }
        let unknown = Target {
            point: None,
            ..target
        };
        assert!(!unknown.is_still(77, 3, None));
    }

    #[test]
    fn a_process_that_sleeps_is_described() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let pid = child.id() as i32;
        let until = Instant::now() + Duration::from_secs(10);
        while doing(pid).state != b'S' {
            assert!(Instant::now() < until, "{:?}", doing(pid));
            std::thread::sleep(Duration::from_millis(1));
        }
        let dir = tempfile::tempdir().unwrap();
        let target = Target {
            rank: 3,
            pid,
            point: None,
            dir: dir.path().to_owned(),
            named: false,
        };
        let path = dump(&target, "no progress").unwrap();
        // What a worker puts in the way neither blocks nor leads elsewhere.
        let trap = |make: &dyn Fn(&Path)| {
            let dir = tempfile::tempdir().unwrap();
            make(&dir.path().join(FILE));
            let dir = dir.path().to_owned();
            dump(
                &Target {
                    dir,
                    ..target.clone()
                },
                "no progress",
            )
            .unwrap_err()
        };
        let other = dir.path().join("other");
        trap(&|at| std::os::unix::fs::symlink(&other, at).unwrap());
        assert!(!other.exists());
        trap(&|at| nix::unistd::mkfifo(at, nix::sys::stat::Mode::S_IRWXU).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        let text = fs::read_to_string(path).unwrap();
        assert!(
            text.contains("rank 3") && text.contains("`sleep`, state S"),
            "{text}"
        );
        assert_eq!(doing(pid), Doing::default());
        assert!(threads(pid).0.contains("it is gone"));
    }
}
