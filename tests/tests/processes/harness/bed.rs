//! One job's nodes.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{self, Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use muster_protocol::local::Query;
use nix::sys::signal::Signal;

use super::events::{self, Group, Noted};
use super::hosts::Hosts;
use super::{now_ns, procs, project};
use crate::ground::{PATIENCE, eventually, free_port, program, without_our_environment};

/// Nodes of a bed that does not say.
const NODES: usize = 6;
/// Hosts of a bed on hosts, numbered from 1.
const HOSTS: usize = 3;

#[derive(Default)]
struct Node {
    agent: Option<Child>,
    launcher: Option<Child>,
    /// How often a launcher was started: each has its own log.
    launched: usize,
}

/// One job on nodes n0, n1 and so on, all on this machine. Dropping it ends every process.
pub(crate) struct Bed {
    dir: tempfile::TempDir,
    mark: String,
    flags: Vec<String>,
    /// The launchers' command, with the flags that belong to it.
    script: Vec<String>,
    env: Vec<(String, String)>,
    ports: Vec<u16>,
    /// The network in which node I is host I; none: all nodes are on loopback.
    hosts: Option<Hosts>,
    /// User and group of agents and launchers; none: those of whoever runs the test.
    users: Option<(u32, u32)>,
    nodes: Vec<Node>,
    /// When a launcher was started on which node.
    launches: Vec<(usize, u64)>,
}

impl Bed {
    /// `flags` are those of every `muster run`.
    pub(crate) fn new(flags: &[&str]) -> Bed {
        Bed::of(NODES, flags)
    }

    /// Up to so many nodes.
    pub(crate) fn of(nodes: usize, flags: &[&str]) -> Bed {
        let dir = tempfile::Builder::new().prefix("mst").tempdir().unwrap();
        std::fs::create_dir(dir.path().join("control")).unwrap();
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        // Each node has a home of its own, and they are one cluster.
        let secret = dir.path().join("secret");
        let mut options = File::options();
        options.write(true).create_new(true).mode(0o600);
        let mut file = options.open(&secret).unwrap();
        writeln!(file, "{}", "5ec2e7".repeat(10)).unwrap();
        let script = vec![
            "--".into(),
            "python3".into(),
            project("tests/tests/processes/harness/worker.py"),
            text(dir.path().join("events")),
            text(dir.path().join("control")),
        ];
        Bed {
            script,
            env: vec![("MUSTER_SECRET_FILE".into(), text(secret))],
            launches: Vec::new(),
            hosts: None,
            users: None,
            mark: format!("TEST_BED={}-{}", process::id(), now_ns()),
            dir,
            flags: flags.iter().map(|f| (*f).to_owned()).collect(),
            ports: (0..nodes).map(|_| free_port()).collect(),
            nodes: (0..nodes).map(|_| Node::default()).collect(),
        }
    }

    /// On hosts of their own, n1 to n3. There is no node 0.
    pub(crate) fn on_hosts(flags: &[&str]) -> Bed {
        let mut bed = Bed::new(flags);
        bed.hosts = Some(Hosts::up(HOSTS));
        bed
    }

    /// Agents that belong to one user, and launchers to another. Wants root.
    pub(crate) fn of_users(flags: &[&str], agent: u32, launcher: u32) -> Bed {
        let mut bed = Bed::new(flags);
        bed.users = Some((agent, launcher));
        open_to_all(bed.dir.path());
        std::os::unix::fs::chown(bed.path("secret"), Some(agent), None).unwrap();
        bed
    }

    /// Another flag of every `muster run` from now on.
    pub(crate) fn flag(&mut self, flag: &str) {
        self.flags.push(flag.to_owned());
    }

    /// Another script than `worker.py`, with the flags that belong to it.
    pub(crate) fn script(&mut self, argv: &[&str]) {
        self.script = argv.iter().map(|a| (*a).to_owned()).collect();
    }

    /// Workers that have attached to their control pages, and step: `stepper.py`.
    pub(crate) fn steps(&mut self) {
        self.script[2] = project("tests/tests/processes/harness/stepper.py");
    }

    /// The launchers' command, with the flags that belong to it.
    pub(crate) fn job_command(&self) -> &[String] {
        &self.script
    }

    /// A variable for all that is started from now on.
    pub(crate) fn env(&mut self, name: &str, value: &str) {
        self.env.push((name.to_owned(), value.to_owned()));
    }

    pub(crate) fn hosts(&self) -> &Hosts {
        self.hosts.as_ref().unwrap()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn marks(&self, node: usize) -> Vec<String> {
        vec![self.mark.clone(), format!("NODE_NAME=n{node}")]
    }

    /// Where the node's agent listens. Embedded ones listen there only on the endpoint's node.
    pub(crate) fn address(&self, node: usize) -> String {
        if self.hosts.is_some() {
            return format!("10.77.0.{node}:7970");
        }
        format!("127.0.0.1:{}", self.ports[node])
    }

    /// The node's folder; home, state and sockets lie in it.
    pub(super) fn home(&self, node: usize) -> PathBuf {
        let dir = self.path(&format!("n{node}"));
        for name in ["run", "state", "tmp", "points"] {
            std::fs::create_dir_all(dir.join(name)).unwrap();
            if self.users.is_some() {
                open_to_all(&dir);
                open_to_all(&dir.join(name));
            }
        }
        dir
    }

    fn command(&self, node: usize, argv: &[String], log: &Path) -> process::Command {
        let home = self.home(node);
        let log = File::options().create(true).append(true).open(log).unwrap();
        let inside = self.hosts.as_ref().map(|h| h.exec(node));
        let argv: Vec<String> = inside.into_iter().flatten().chain(argv.to_vec()).collect();
        let mut command = process::Command::new(&argv[0]);
        let (name, value) = self.mark.split_once('=').unwrap();
        without_our_environment(&mut command);
        command
            .args(&argv[1..])
            .env(name, value)
            .env("NODE_NAME", format!("n{node}"))
            .env("HOME", &home)
            .env("XDG_RUNTIME_DIR", home.join("run"))
            .env("XDG_STATE_HOME", home.join("state"))
            .env("TMPDIR", home.join("tmp"))
            .env(muster_fault::FOLDER, home.join("points"))
            .env("MUSTER_LOG", "info")
            .env("MUSTER_MDNS", "false")
            .envs(self.env.iter().cloned())
            .current_dir(home)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        command
    }

    // ---- starting ----

    /// `muster run` with an agent of its own; node `first` is the endpoint.
    pub(crate) fn run(&mut self, node: usize, first: usize) {
        let endpoint = self.address(first);
        self.launch(node, &["--rdzv-endpoint", &endpoint]);
    }

    /// `muster run` with an agent of its own, which calls all nodes and listens where one of them would.
    pub(crate) fn run_among_all(&mut self, node: usize) {
        let all: Vec<String> = (0..self.nodes.len()).map(|n| self.address(n)).collect();
        self.launch(node, &["--rdzv-endpoint", &all.join(",")]);
    }

    /// `muster run` as on a machine without anything else.
    pub(crate) fn run_alone(&mut self, node: usize) {
        self.launch(node, &[]);
    }

    /// `muster run` attached to the node's agent.
    pub(crate) fn attach(&mut self, node: usize) {
        let socket = self.socket(node);
        self.launch(node, &["--socket", socket.to_str().unwrap()]);
    }

    fn launch(&mut self, node: usize, how: &[&str]) {
        let mut argv = vec![program("muster"), "run".into(), "--rdzv-id=job".into()];
        argv.extend(how.iter().map(|h| (*h).to_owned()));
        argv.extend(self.flags.clone());
        argv.extend(self.script.clone());
        self.start(node, &argv);
    }

    /// Any command in the launcher's place.
    pub(crate) fn start(&mut self, node: usize, argv: &[String]) {
        self.nodes[node].launched += 1;
        self.launches.push((node, now_ns()));
        let log = self.log(node);
        let mut command = self.command(node, argv, &log);
        if let Some((_, uid)) = self.users {
            command.uid(uid).gid(uid);
        }
        let child = command.spawn().unwrap();
        self.nodes[node].launcher = Some(child);
    }

    /// `musterd`, which calls the agents of all other nodes first; returns once it serves.
    pub(crate) fn agent(&mut self, node: usize) {
        let all = match self.hosts {
            Some(_) => 1..HOSTS + 1,
            None => 0..self.nodes.len(),
        };
        let others: Vec<usize> = all.filter(|n| *n != node).collect();
        self.agent_that_calls(node, &others);
    }

    /// `musterd`, which calls the agents of these nodes first.
    pub(crate) fn agent_that_calls(&mut self, node: usize, others: &[usize]) {
        self.start_agent(node, others, "off");
    }

    /// `musterd` with its HTTP port; the address.
    pub(crate) fn agent_with_http(&mut self, node: usize) -> String {
        let others: Vec<usize> = (0..self.nodes.len()).filter(|n| *n != node).collect();
        let address = format!("127.0.0.1:{}", free_port());
        self.start_agent(node, &others, &address);
        address
    }

    fn start_agent(&mut self, node: usize, others: &[usize], http: &str) {
        let bootstrap: Vec<String> = others.iter().map(|n| self.address(*n)).collect();
        let home = self.home(node);
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        let argv = [
            program("musterd"),
            "--listen".into(),
            self.address(node),
            format!("--bootstrap={}", bootstrap.join(",")),
            "--state-dir".into(),
            text(home.join("agent")),
            "--socket".into(),
            text(home.join("agent.sock")),
            "--http".into(),
            http.into(),
        ];
        let log = self.path(&format!("n{node}.agent.log"));
        let mut command = self.command(node, &argv, &log);
        if let Some((uid, _)) = self.users {
            command.uid(uid).gid(uid);
        }
        let child = command.spawn().unwrap();
        self.nodes[node].agent = Some(child);
        self.until("the agent serves", |bed| {
            bed.query(node, Query::Status).is_some()
        });
    }

    /// The socket of the node's agent, of its own or embedded.
    pub(crate) fn socket(&self, node: usize) -> PathBuf {
        match (&self.nodes[node].agent, &self.nodes[node].launcher) {
            (None, Some(launcher)) => {
                let name = format!("n{node}/run/muster/run-{}.sock", launcher.id());
                self.path(&name)
            }
            _ => self.path(&format!("n{node}/agent.sock")),
        }
    }

    /// How many jobs' state the node's embedded agents have left.
    pub(crate) fn state_folders(&self, node: usize) -> usize {
        let hosts = std::fs::read_dir(self.path(&format!("n{node}/state/muster"))).unwrap();
        let folders = |host: std::fs::DirEntry| std::fs::read_dir(host.path()).unwrap().count();
        hosts.map(|host| folders(host.unwrap())).sum()
    }

    pub(crate) fn log(&self, node: usize) -> PathBuf {
        let count = self.nodes[node].launched;
        self.path(&format!("n{node}.run{count}.log"))
    }

    /// Output of the node's newest launcher and its workers.
    pub(crate) fn said(&self, node: usize) -> String {
        std::fs::read_to_string(self.log(node)).unwrap_or_default()
    }

    pub(crate) fn events(&self) -> Vec<Noted> {
        events::read(&self.path("events"))
    }

    /// Whether the ranks of `stepper.py` have met at this step of a generation.
    pub(crate) fn has_met(&self, generation: u64, step: u64) -> bool {
        let folders = std::fs::read_dir(self.path("control")).unwrap();
        let prefix = format!("meeting-{generation}-");
        let mut ours = folders.filter_map(|f| Some(f.ok()?.path())).filter(|path| {
            path.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with(&prefix))
        });
        ours.any(|path| {
            let at =
                |file: std::path::PathBuf| std::fs::read_to_string(file).ok()?.parse::<u64>().ok();
            at(path.join("0")) >= Some(step)
        })
    }

    pub(crate) fn is_alive(&self, pid: i32) -> bool {
        procs::carries(pid, std::slice::from_ref(&self.mark))
    }

    pub(crate) fn agent_pid(&self, node: usize) -> i32 {
        self.nodes[node].agent.as_ref().unwrap().id() as i32
    }

    pub(crate) fn launcher_pid(&self, node: usize) -> i32 {
        self.nodes[node].launcher.as_ref().unwrap().id() as i32
    }

    // ---- waiting ----

    pub(crate) fn until(&self, what: &str, mut holds: impl FnMut(&Bed) -> bool) {
        eventually(PATIENCE, what, || holds(self).then_some(()));
    }

    /// The newest generation, once it is complete, on exactly these nodes, and all of its workers
    /// began after `after`. No worker of an older one runs on them.
    pub(crate) fn group(&self, nodes: &[usize], after: u64) -> Group {
        let what = format!("a generation of {nodes:?}; logs below");
        let group = eventually(PATIENCE, &what, || self.newest(nodes, after));
        self.runs_alone(&group, nodes);
        group
    }

    /// The newest generation, if it is one as [`group`](Self::group) waits for.
    pub(crate) fn newest(&self, nodes: &[usize], after: u64) -> Option<Group> {
        let events = self.events();
        let groups = events::groups(&events, &self.launches).into_iter();
        // Not by number, of which a job that began anew has others, nor by time, where a clock jumps.
        let last = |group: &Group| {
            let of = |r: &Noted, e: &Noted| (r.pid, r.generation) == (e.pid, e.generation);
            let is = |e: &Noted| e.event == "start" && group.ranks.iter().any(|r| of(r, e));
            events.iter().rposition(is)
        };
        let group = groups.max_by_key(last)?;
        let sorted = |nodes: &[usize]| {
            let mut nodes = nodes.to_vec();
            nodes.sort_unstable();
            nodes
        };
        let new = group.ranks.iter().all(|r| r.t > after);
        (new && sorted(&group.nodes()) == sorted(nodes)).then_some(group)
    }

    /// No worker of an older generation runs on these nodes, nor an earlier one of this generation, whose start
    /// was given up and tried again.
    pub(crate) fn runs_alone(&self, group: &Group, nodes: &[usize]) {
        for old in self.events().iter().filter(|e| e.event == "start") {
            let replaced = group.ranks.iter().all(|rank| rank.pid != old.pid);
            let is_old = old.generation < group.generation
                || (old.generation == group.generation && replaced);
            let here = nodes.contains(&events::index(&old.node));
            assert!(
                !(is_old && here && self.is_alive(old.pid)),
                "{old:?} runs beside {group:?}"
            );
        }
    }

    /// The exit status of the node's launcher.
    pub(crate) fn exit(&mut self, node: usize) -> ExitStatus {
        let launcher = self.nodes[node].launcher.as_mut().unwrap();
        eventually(PATIENCE, "the launcher exits", || {
            launcher.try_wait().unwrap()
        })
    }

    /// The exit status of the node's launcher, if it has ended.
    pub(crate) fn try_exit(&mut self, node: usize) -> Option<ExitStatus> {
        let launcher = self.nodes[node].launcher.as_mut().unwrap();
        launcher.try_wait().unwrap()
    }

    /// The node's launcher, which the bed follows no more: another one comes in its place.
    pub(crate) fn part(&mut self, node: usize) -> Child {
        self.nodes[node].launcher.take().unwrap()
    }

    /// The exit code of the node's agent.
    pub(crate) fn agent_exit(&mut self, node: usize) -> Option<i32> {
        let mut agent = self.nodes[node].agent.take().unwrap();
        let status = eventually(PATIENCE, "the agent exits", || agent.try_wait().unwrap());
        status.code()
    }

    /// The launcher's exit code, and nothing of the node's processes is left but its agent.
    pub(crate) fn ended(&mut self, node: usize) -> Option<i32> {
        let status = self.exit(node);
        let agent = self.nodes[node].agent.as_ref().map(|a| a.id() as i32);
        self.until("nothing of the node is left", |bed| {
            let left = procs::carrying(&bed.marks(node));
            left.into_iter().all(|pid| Some(pid) == agent)
        });
        status.code()
    }

    // ---- faults ----

    pub(crate) fn signal(&self, pid: i32, signal: Signal) {
        procs::signal(pid, std::slice::from_ref(&self.mark), signal);
    }

    /// SIGKILL to agent, launcher and workers at once. Returns the time just before.
    pub(crate) fn kill(&mut self, node: usize) -> u64 {
        let marks = self.marks(node);
        let mut pids = procs::carrying(&marks);
        let at = now_ns();
        let deadline = Instant::now() + PATIENCE;
        while !pids.is_empty() {
            assert!(Instant::now() < deadline, "{pids:?} outlive SIGKILL");
            for pid in pids {
                procs::signal(pid, &marks, Signal::SIGKILL);
            }
            pids = procs::carrying(&marks);
        }
        self.reap(node);
        at
    }

    /// SIGKILL to all that these nodes have. All of it stands still first, so that none of them hears of another's
    /// death.
    pub(crate) fn kill_together(&mut self, nodes: &[usize]) {
        let of = |node: &usize| procs::carrying(&self.marks(*node));
        let pids: Vec<i32> = nodes.iter().flat_map(of).collect();
        for signal in [Signal::SIGSTOP, Signal::SIGKILL] {
            pids.iter().for_each(|pid| self.signal(*pid, signal));
        }
        for node in nodes {
            self.kill(*node);
        }
    }

    /// At which step each rank of `stepper.py` is.
    pub(crate) fn steps_met(&self, generation: u64) -> Vec<u64> {
        let file = |rank| self.path(&format!("control/meeting-{generation}-0/{rank}"));
        let texts =
            (0..self.nodes.len()).map_while(|rank| std::fs::read_to_string(file(rank)).ok());
        texts.filter_map(|t| t.parse().ok()).collect()
    }

    /// SIGKILL to the node's agent alone.
    pub(crate) fn kill_agent(&mut self, node: usize) {
        let mut agent = self.nodes[node].agent.take().unwrap();
        agent.kill().unwrap();
        agent.wait().unwrap();
    }

    /// Removes what the node's agents have stored, while none of them runs.
    pub(crate) fn lose_state(&self, node: usize) {
        for name in ["state", "agent"] {
            match std::fs::remove_dir_all(self.path(&format!("n{node}/{name}"))) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => panic!("{error}"),
                _ => {}
            }
        }
    }

    fn reap(&mut self, node: usize) {
        let node = &mut self.nodes[node];
        for mut child in node.agent.take().into_iter().chain(node.launcher.take()) {
            child.wait().unwrap();
        }
    }

    /// Has a rank of `stepper.py` save for 8 s from now on.
    pub(crate) fn save_slowly(&self, rank: u32) {
        std::fs::write(self.path(&format!("control/slow-save-{rank}")), "").unwrap();
    }

    /// Makes a rank of `stepper.py` sleep for ever inside its next step.
    pub(crate) fn sleep(&self, rank: u32) {
        std::fs::write(self.path(&format!("control/sleep-{rank}")), "").unwrap();
    }

    /// Makes every worker, or the one of a rank, exit with a code.
    pub(crate) fn order(&self, rank: Option<u32>, code: i32) {
        let name = match rank {
            Some(rank) => format!("control/exit-{rank}"),
            None => "control/exit".into(),
        };
        let aside = self.path("order");
        std::fs::write(&aside, code.to_string()).unwrap();
        std::fs::rename(aside, self.path(&name)).unwrap();
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let marks = std::slice::from_ref(&self.mark);
            let left = procs::carrying(marks);
            if left.is_empty() || Instant::now() > deadline {
                break;
            }
            for pid in left {
                procs::signal(pid, marks, Signal::SIGKILL);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        for child in self
            .nodes
            .iter_mut()
            .flat_map(|n| n.agent.take().into_iter().chain(n.launcher.take()))
        {
            let mut child = child;
            let _ = child.wait();
        }
        if std::thread::panicking() {
            self.show();
        }
    }
}

impl Bed {
    fn show(&self) {
        let mut files: Vec<PathBuf> = std::fs::read_dir(self.dir.path())
            .into_iter()
            .flatten()
            .filter_map(|e| Some(e.ok()?.path()))
            .filter(|p| p.is_file())
            .collect();
        files.sort();
        for file in files {
            let text = std::fs::read_to_string(&file).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            let from = lines.len().saturating_sub(2_000);
            eprintln!("--- {}\n{}", file.display(), lines[from..].join("\n"));
        }
    }
}

fn open_to_all(dir: &Path) {
    let mode = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(dir, mode).unwrap();
}
