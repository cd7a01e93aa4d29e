//! The demo's nodes: for each an agent and a launcher, as real processes of this program. They die
//! with the demo, however it goes, and nothing of them stays.

use std::fs::{self, File};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use muster_protocol::local::Query;
use muster_runtime::demo::WorkerArgs;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use rand::TryRngCore;

use super::follow::last_lines;
use super::recording::Down;
use crate::query::client::ask_now;
use crate::run::{procs, sidecar, spawn};

/// The job's name.
pub(super) const JOB: &str = "demo";
/// Time that an agent's SIGTERM leaves for a drain.
const SIGTERM_DEADLINE: &str = "10s";
/// The longest that an agent may take for an answer.
pub(super) const ANSWER: Duration = Duration::from_secs(2);
/// The longest that what was killed takes to be gone.
const GONE: Duration = Duration::from_secs(5);

/// One node.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) name: String,
    dir: PathBuf,
    pub(super) agent: Process,
    pub(super) launcher: Option<Process>,
    /// The agent's address and id, once it answers.
    pub(super) known: Option<(SocketAddr, String)>,
    pub(super) down: Option<Down>,
}

/// A child and how it ended.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    pub(super) ended: Option<ExitStatus>,
}

impl Process {
    /// Looks whether it ended, and reaps it.
    pub(super) fn look(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait()?;
        }
        Ok(self.ended)
    }

    pub(super) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        match self.ended {
            // The number may be another process's by now.
            Some(_) => Ok(()),
            None => kill(Pid::from_raw(self.pid()), signal).map_err(io::Error::from),
        }
    }
}

impl Node {
    pub(super) fn socket(&self) -> PathBuf {
        self.dir.join("s")
    }

    /// Where its workers write their events.
    pub(super) fn events(&self) -> PathBuf {
        self.dir.join("events")
    }

    /// Whether it is neither killed nor drained.
    pub(super) fn is_up(&self) -> bool {
        self.down.is_none()
    }

    /// Asks the agent for its address and id.
    pub(super) fn learn(&mut self) -> bool {
        if self.known.is_none()
            && let Some(status) = ask_now(&self.socket(), Query::Status, ANSWER)
        {
            let addr = status["listening"][0].as_str().and_then(|a| a.parse().ok());
            let id = status["node"].as_str().map(str::to_owned);
            self.known = addr.zip(id);
        }
        self.known.is_some()
    }

    /// How many other agents this one is connected with.
    pub(super) fn peers(&self) -> usize {
        ask_now(&self.socket(), Query::Status, ANSWER)
            .and_then(|s| s["peers_connected"].as_u64())
            .map_or(0, |n| n as usize)
    }

    /// The end of its logs, for the report of a failure.
    pub(super) fn logs(&self) -> String {
        let mut text = String::new();
        for name in ["agent.log", "run.log"] {
            let lines = last_lines(&self.dir.join(name), 20);
            if !lines.is_empty() {
                text.push_str(&format!("---- {} {name}\n{lines}\n", self.name));
            }
        }
        text
    }
}

/// All nodes, and the folder that they live in.
#[derive(Debug)]
pub(super) struct Cluster {
    root: tempfile::TempDir,
    exe: PathBuf,
    name: String,
    nnodes: String,
    worker: WorkerArgs,
    pub(super) nodes: Vec<Node>,
}

impl Cluster {
    /// Makes the folder and the cluster's secret. Starts nothing.
    ///
    /// # Errors
    /// The temporary directory cannot be written.
    pub(super) fn new(nodes: u16, worker: impl FnOnce(&Path) -> WorkerArgs) -> io::Result<Cluster> {
        spawn::become_subreaper()?;
        let root = tempfile::Builder::new().prefix("muster-demo-").tempdir()?;
        let mut secret = [0u8; 32];
        rand::rngs::OsRng
            .try_fill_bytes(&mut secret)
            .map_err(io::Error::other)?;
        let hex: String = secret.iter().map(|b| format!("{b:02x}")).collect();
        let mut file = File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(root.path().join("secret"))?;
        writeln!(file, "{hex}")?;
        // An empty configuration, so that one of this machine's own agent has no say.
        File::create(root.path().join("empty.toml"))?;
        let checkpoints = root.path().join("checkpoints");
        fs::create_dir(&checkpoints)?;
        Ok(Cluster {
            exe: sidecar::this_program(),
            name: format!("demo-{}", std::process::id()),
            nnodes: format!("2:{nodes}"),
            worker: worker(&checkpoints),
            nodes: Vec::new(),
            root,
        })
    }

    pub(super) fn root(&self) -> &Path {
        self.root.path()
    }

    pub(super) fn node(&mut self, name: &str) -> Option<&mut Node> {
        self.nodes.iter_mut().find(|n| n.name == name)
    }

    pub(super) fn up(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|n| n.is_up())
    }

    /// Starts the next node's agent, which calls every node that is up. Returns the node's name.
    ///
    /// # Errors
    /// The process cannot be started.
    pub(super) fn add_agent(&mut self) -> io::Result<String> {
        let name = format!("n{}", self.nodes.len() + 1);
        let dir = self.root.path().join(&name);
        fs::create_dir(&dir)?;
        let mut command = self.command();
        command
            .arg("agent")
            .arg("--config")
            .arg(self.root.path().join("empty.toml"))
            .arg("--cluster")
            .arg(&self.name)
            .arg("--secret-file")
            .arg(self.root.path().join("secret"))
            .args(["--listen", "127.0.0.1:0", "--http", "off", "--mdns=false"])
            .args(["--log-format", "text", "--log", "info"])
            .args(["--sigterm-deadline", SIGTERM_DEADLINE])
            .arg("--state-dir")
            .arg(dir.join("state"))
            .arg("--socket")
            .arg(dir.join("s"));
        for (addr, _) in self.up().filter_map(|n| n.known.as_ref()) {
            command.arg("--bootstrap").arg(addr.to_string());
        }
        let agent = start(command, &dir.join("agent.log"))?;
        self.nodes.push(Node {
            name: name.clone(),
            dir,
            agent,
            launcher: None,
            known: None,
            down: None,
        });
        Ok(name)
    }

    /// Starts a node's launcher.
    ///
    /// # Errors
    /// The process cannot be started.
    pub(super) fn launch(&mut self, name: &str) -> io::Result<()> {
        let mut command = self.command();
        let exe = self.exe.clone();
        let mut worker = self.worker.clone();
        let nnodes = self.nnodes.clone();
        let Some(node) = self.node(name) else {
            return Err(io::Error::other(format!("there is no node {name}")));
        };
        worker.events = node.events();
        command
            .args(["run", "--nnodes", &nnodes, "--nproc-per-node", "1"])
            .args(["--max-restarts", "10", "--rdzv-id", JOB])
            .args(["--local-addr", "127.0.0.1", "--redirects", "3"])
            .arg("--socket")
            .arg(node.socket())
            .arg("--log-dir")
            .arg(node.dir.join("logs"))
            .arg("--")
            .arg(exe)
            .arg("demo-worker")
            .args(worker.to_args());
        let log = node.dir.join("run.log");
        node.launcher = Some(start(command, &log)?);
        Ok(())
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.exe);
        // What this shell has set for Muster, torchrun or Slurm is not for the demo.
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            let theirs = ["MUSTER_", "PET_", "SLURM_", "TORCHELASTIC_"];
            if theirs.iter().any(|p| text.starts_with(p)) {
                command.env_remove(&name);
            }
        }
        command
    }

    /// SIGKILL to agent, launcher and worker at once, as when a machine is gone.
    ///
    /// # Errors
    /// A process cannot be signalled or waited for.
    pub(super) fn kill_node(&mut self, name: &str, worker: Option<u32>) -> io::Result<()> {
        let Some(node) = self.node(name) else {
            return Ok(());
        };
        node.down = Some(Down::Killed);
        let worker = worker.and_then(|pid| i32::try_from(pid).ok());
        let launcher = node.launcher.as_ref().map(Process::pid);
        // Only a child of this launcher: the number of one that ended may be another's.
        let worker = worker.filter(|pid| procs::parent(*pid) == launcher);
        node.agent.signal(Signal::SIGKILL)?;
        if let Some(pid) = worker {
            procs::kill(pid);
        }
        if let Some(launcher) = &node.launcher {
            launcher.signal(Signal::SIGKILL)?;
        }
        for process in [Some(&mut node.agent), node.launcher.as_mut()] {
            let Some(process) = process else { continue };
            process.ended = Some(process.child.wait()?);
        }
        Ok(())
    }

    /// SIGTERM to the agent: the node is to leave.
    ///
    /// # Errors
    /// The agent cannot be signalled.
    pub(super) fn drain_node(&mut self, name: &str) -> io::Result<()> {
        let Some(node) = self.node(name) else {
            return Ok(());
        };
        node.down = Some(Down::Drained);
        node.agent.signal(Signal::SIGTERM)
    }

    /// SIGTERM to the agents that are left.
    pub(super) fn dismiss(&mut self) {
        for node in self.nodes.iter().filter(|n| n.is_up()) {
            // One that just ended is seen as ended.
            let _gone = node.agent.signal(Signal::SIGTERM);
        }
    }

    /// The first process that ended although it was not asked to, in words.
    ///
    /// # Errors
    /// A process cannot be waited for.
    pub(super) fn unexpected_end(&mut self) -> io::Result<Option<String>> {
        for node in self.nodes.iter_mut().filter(|n| n.down.is_none()) {
            if let Some(status) = node.agent.look()? {
                return Ok(Some(format!("the agent of {} ended: {status}", node.name)));
            }
            let Some(launcher) = &mut node.launcher else {
                continue;
            };
            if let Some(status) = launcher.look()?.filter(|s| !s.success()) {
                return Ok(Some(format!(
                    "the launcher of {} ended: {status}",
                    node.name
                )));
            }
        }
        Ok(None)
    }

    /// Ends what still runs, and looks that nothing is left; the processes that are.
    pub(super) fn end(&mut self) -> Vec<i32> {
        for node in &mut self.nodes {
            for process in [Some(&mut node.agent), node.launcher.as_mut()] {
                let Some(process) = process else { continue };
                if process.ended.is_none() {
                    // `kill` fails for what has ended, and then `wait` says how.
                    let _gone = process.child.kill();
                    process.ended = process.child.wait().ok();
                }
            }
        }
        // Orphans come to this process, because it is their subreaper. Workers die with their
        // launcher, and the launcher's sidecar ends what they started.
        let deadline = Instant::now() + GONE;
        loop {
            let any = Pid::from_raw(-1);
            while let Ok(status) = waitpid(any, Some(WaitPidFlag::WNOHANG)) {
                if status == WaitStatus::StillAlive {
                    break;
                }
            }
            let left = procs::descendants(&[]);
            if left.is_empty() || Instant::now() > deadline {
                left.iter().copied().for_each(procs::kill);
                return left;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Leaves the folder behind, whatever happens after this.
    pub(super) fn keep(&mut self) {
        self.root.disable_cleanup(true);
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.end();
    }
}

/// Starts one process that dies with this thread, in a process group of its own, so that a
/// terminal's Ctrl-C reaches the demo alone.
fn start(mut command: Command, log: &Path) -> io::Result<Process> {
    let demo = std::process::id() as i32;
    let out = File::options().create(true).append(true).open(log)?;
    command
        .stdin(Stdio::null())
        .stderr(out.try_clone()?)
        .stdout(out)
        .process_group(0);
    // SAFETY: only async-signal-safe calls between fork and exec, and no allocation.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) < 0 {
                return Err(io::Error::last_os_error());
            }
            // Died before prctl: the signal will not come.
            if libc::getppid() != demo {
                libc::_exit(125);
            }
            Ok(())
        });
    }
    let child = command.spawn()?;
    Ok(Process { child, ended: None })
}
