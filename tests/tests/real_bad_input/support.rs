//! A test bed: agents, launchers and workers as real processes, in a folder of their own, talking
//! over loopback only. Whatever is left when a test ends is killed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use muster_protocol::local::Query;
use serde_json::Value;
use tempfile::TempDir;

use crate::ground::{
    LOOK, PATIENCE, ask, eventually, free_port, pids, program, without_our_environment,
};

/// From linux/capability.h: the right to write what the mode forbids.
const CAP_DAC_OVERRIDE: libc::c_ulong = 1;

/// The job that all tests run.
pub(crate) const JOB: &str = "job";

/// Polls until the condition holds.
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    eventually(PATIENCE, what, || holds().then_some(()));
}

/// A child of the test; killed when it is dropped.
pub(crate) struct Proc {
    child: Child,
    log: PathBuf,
}

impl Proc {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, number: i32) {
        signal(self.pid(), number);
    }

    /// Its output so far.
    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    pub(crate) fn is_alive(&mut self) -> bool {
        self.ended().is_none()
    }

    /// Waits for the end; the exit code, or 128 plus the signal.
    pub(crate) fn code(&mut self) -> i32 {
        use std::os::unix::process::ExitStatusExt;
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.ended() {
                let code = status.code();
                return code.unwrap_or_else(|| 128 + status.signal().unwrap());
            }
            assert!(Instant::now() < deadline, "goes on: {}", self.log());
            std::thread::sleep(LOOK);
        }
    }

    /// SIGKILL, and the end of it.
    pub(crate) fn kill(&mut self) {
        let _gone = self.child.kill();
        self.child.wait().unwrap();
    }

    pub(crate) fn until_says(&mut self, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.log().contains(text) {
            assert!(
                Instant::now() < deadline && (self.is_alive() || self.log().contains(text)),
                "never said {text:?}: {}",
                self.log()
            );
            std::thread::sleep(LOOK);
        }
    }
}

impl Drop for Proc {
    fn drop(&mut self) {
        if self.is_alive() {
            self.signal(libc::SIGCONT);
            self.kill();
        }
        if std::thread::panicking() {
            eprintln!("==== {}\n{}", self.log.display(), self.log());
        }
    }
}

/// Sends a signal to a process that this test knows to be its own.
pub(crate) fn signal(pid: u32, number: i32) {
    // SAFETY: kill(2) with plain numbers; the process was started by this test.
    unsafe { libc::kill(i32::try_from(pid).unwrap(), number) };
}

/// A worker that runs now.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Worker {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) node: String,
    pub(crate) digest: String,
    pub(crate) generation: u64,
    pub(crate) pid: u32,
}

pub(crate) struct Bed {
    pub(crate) dir: TempDir,
    ports: BTreeMap<String, u16>,
    starts: u32,
    /// Processes that start while this is set may write only where the file modes let them, as root too.
    pub(crate) without_root: bool,
    /// Set for whatever is started.
    pub(crate) env: Vec<(String, String)>,
}

/// Says where it runs, and waits until the test opens the pipe.
const WORKER: &str = r#"
f="$BED/w/$$"
echo "$RANK $WORLD_SIZE $NODE $MUSTER_GENERATION_DIGEST $MUSTER_GENERATION" >"$f.new"
mv "$f.new" "$f"
: <"$BED/end"
"#;

impl Bed {
    pub(crate) fn new() -> Bed {
        let dir = tempfile::Builder::new().prefix("bed-").tempdir().unwrap();
        fs::create_dir(dir.path().join("w")).unwrap();
        let bed = Bed {
            dir,
            ports: BTreeMap::new(),
            starts: 0,
            without_root: false,
            env: Vec::new(),
        };
        let end = std::ffi::CString::new(bed.path("end").to_str().unwrap()).unwrap();
        // SAFETY: mkfifo(3) with a path that ends in a zero.
        assert_eq!(unsafe { libc::mkfifo(end.as_ptr(), 0o600) }, 0);
        bed.script("worker.sh", WORKER);
        bed
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a shell script for workers; its path.
    pub(crate) fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, text).unwrap();
        path
    }

    pub(crate) fn port(&mut self, node: &str) -> u16 {
        *self.ports.entry(node.into()).or_insert_with(free_port)
    }

    pub(crate) fn socket(&self, node: &str) -> PathBuf {
        self.path(node).join("s")
    }

    fn spawn(&mut self, node: &str, what: &str, mut command: Command) -> Proc {
        self.starts += 1;
        let home = self.path(node);
        fs::create_dir_all(home.join("run")).unwrap();
        let log = home.join(format!("{what}-{}.log", self.starts));
        let file = fs::File::create(&log).unwrap();
        without_our_environment(&mut command);
        let test = std::process::id();
        let without_root = self.without_root;
        command
            .env("HOME", &home)
            .env("TMPDIR", &home)
            .env("XDG_RUNTIME_DIR", home.join("run"))
            .env("XDG_STATE_HOME", home.join("state-home"))
            // With the secret of all nodes.
            .env("XDG_CONFIG_HOME", self.path("config"))
            .env("NODE_NAME", node)
            .env("NODE", node)
            .env("BED", self.dir.path())
            .envs(self.env.iter().map(|(k, v)| (k, v)))
            .stdin(Stdio::null())
            .stdout(file.try_clone().unwrap())
            .stderr(file);
        // SAFETY: prctl and getppid are async-signal-safe, and nothing else is called.
        unsafe {
            command.pre_exec(move || {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                if without_root {
                    libc::prctl(libc::PR_CAPBSET_DROP, CAP_DAC_OVERRIDE);
                }
                if u32::try_from(libc::getppid()).unwrap_or(0) != test {
                    return Err(std::io::ErrorKind::NotFound.into());
                }
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        Proc { child, log }
    }

    /// An agent with the usual flags, and with these instead or besides.
    pub(crate) fn try_agent(&mut self, node: &str, first: &[&str], more: &[&str]) -> Proc {
        let name = |flag: &str| flag.split('=').next().unwrap_or_default().to_owned();
        let mut flags = self.agent_flags(node, first);
        flags.retain(|f| !more.iter().any(|m| name(m) == name(f)));
        flags.extend(more.iter().map(|f| (*f).to_owned()));
        let mut command = Command::new(program("muster"));
        command.arg("agent").args(&flags);
        self.spawn(node, "agent", command)
    }

    /// The usual flags of an agent that calls these nodes first.
    pub(crate) fn agent_flags(&mut self, node: &str, first: &[&str]) -> Vec<String> {
        let listen = format!("--listen=127.0.0.1:{}", self.port(node));
        let mut flags = vec![
            listen,
            format!("--state-dir={}", self.path(node).join("state").display()),
            format!("--socket={}", self.socket(node).display()),
            "--http=off".into(),
            "--mdns=false".into(),
        ];
        for other in first {
            flags.push(format!("--bootstrap=127.0.0.1:{}", self.port(other)));
        }
        flags
    }

    /// Starts an agent and waits until it serves.
    pub(crate) fn agent(&mut self, node: &str, first: &[&str]) -> Proc {
        self.agent_and(node, first, &[])
    }

    pub(crate) fn agent_and(&mut self, node: &str, first: &[&str], more: &[&str]) -> Proc {
        let mut agent = self.try_agent(node, first, more);
        agent.until_says("serving");
        agent
    }

    /// `muster run` with these flags and this command.
    pub(crate) fn run(&mut self, node: &str, flags: &[&str], command: &[&str]) -> Proc {
        self.run_with(node, flags, command, &[])
    }

    pub(crate) fn run_with(
        &mut self,
        node: &str,
        flags: &[&str],
        words: &[&str],
        env: &[(&str, &str)],
    ) -> Proc {
        let mut command = Command::new(program("muster"));
        command
            .args(["run", "--rdzv-id", JOB])
            .args(flags)
            .arg("--")
            .args(words);
        command.envs(env.iter().copied());
        self.spawn(node, "run", command)
    }

    /// A launcher at the node's agent, with workers that wait for [`finish`](Self::finish).
    pub(crate) fn launch(&mut self, node: &str, flags: &[&str]) -> Proc {
        let socket = self.socket(node);
        let worker = self.path("worker.sh");
        let mut all = vec!["--socket", socket.to_str().unwrap()];
        all.extend(flags);
        self.run(node, &all, &["sh", worker.to_str().unwrap()])
    }

    /// Every process that runs the worker's script, whether it has said so or not.
    pub(crate) fn worker_pids(&self) -> BTreeSet<u32> {
        let script = self.path("worker.sh");
        let wanted = format!("sh\0{}\0", script.display());
        processes().filter(|pid| cmdline(*pid) == wanted).collect()
    }

    /// The workers that run, by rank; `None` while one of them has not said where.
    pub(crate) fn workers(&self) -> Option<Vec<Worker>> {
        let mut out = Vec::new();
        for pid in self.worker_pids() {
            let text = fs::read_to_string(self.path("w").join(pid.to_string())).ok()?;
            let words: Vec<&str> = text.split_whitespace().collect();
            out.push(Worker {
                rank: words[0].parse().unwrap(),
                world: words[1].parse().unwrap(),
                node: words[2].into(),
                digest: words[3].into(),
                generation: words[4].parse().unwrap(),
                pid,
            });
        }
        out.sort();
        Some(out)
    }

    /// Waits until exactly these nodes run one worker each, all of one generation, with the ranks
    /// 0 to n.
    pub(crate) fn until_runs_on(&self, nodes: &[&str]) -> Vec<Worker> {
        let wanted: BTreeSet<&str> = nodes.iter().copied().collect();
        let mut found = None;
        let mut last = None;
        let deadline = Instant::now() + PATIENCE;
        while found.is_none() {
            let now = self.workers();
            found = now.clone().filter(|workers| is_whole(workers, &wanted));
            last = now.or(last);
            assert!(
                found.is_some() || Instant::now() < deadline,
                "never ran on {nodes:?}; at last: {last:?}"
            );
            std::thread::sleep(LOOK);
        }
        found.unwrap()
    }

    /// Lets all workers, present and future, exit with code 0.
    pub(crate) fn finish(&self) -> fs::File {
        fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(self.path("end"))
            .unwrap()
    }
}

fn is_whole(workers: &[Worker], nodes: &BTreeSet<&str>) -> bool {
    let here: BTreeSet<&str> = workers.iter().map(|w| w.node.as_str()).collect();
    workers.len() == nodes.len()
        && here == *nodes
        && workers.iter().all(|w| w.digest == workers[0].digest)
        && workers
            .iter()
            .enumerate()
            .all(|(at, w)| w.rank as usize == at && w.world as usize == workers.len())
}

pub(crate) fn processes() -> impl Iterator<Item = u32> {
    pids().map(i32::cast_unsigned)
}

/// The words of a process' command line, each with a zero behind it; empty for a zombie.
pub(crate) fn cmdline(pid: u32) -> String {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// An agent's answer; `None` when it gives none, or refuses.
pub(crate) fn query(socket: &Path, query: Query) -> Option<Value> {
    ask(socket, query)?.ok()
}

/// Events of the job's past by its agent, oldest first.
pub(crate) fn events(socket: &Path) -> Vec<Value> {
    let job = JOB.into();
    match query(socket, Query::Events { job, after: 0 }) {
        Some(Value::Array(list)) => list,
        _ => Vec::new(),
    }
}

/// The answer to a GET, head and body; `None` when there is none in time.
pub(crate) fn get(addr: SocketAddr, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(addr).ok()?;
    stream
        .set_read_timeout(Some(Duration::from_secs(10)))
        .ok()?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"
    )
    .ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(text)
}
