//! An agent that only speaks the local frames, and a launcher process to talk to.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use muster_protocol::codec::{self, Deframer};
use muster_protocol::local::{
    Answer, Query, Register, SaveNews, Start, StoreAnswer, StoreAsk, ToAgent, ToLauncher,
};
use muster_protocol::{Digest, LauncherId, NodeId};
use tempfile::TempDir;

/// The bound of every wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Polls until the condition holds.
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "never came true: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) struct Agent {
    listener: UnixListener,
    socket: Option<UnixStream>,
    deframer: Deframer,
    /// Facts that came between the registration and the port.
    facts: VecDeque<ToAgent>,
    pub(crate) register: Option<Register>,
    pub(crate) port: u16,
    /// Its periods, which it says only once on each connection.
    pub(crate) grace_ms: u32,
    pub(crate) lease_ms: u32,
    pub(crate) dir: TempDir,
}

impl Agent {
    pub(crate) fn new() -> Agent {
        let dir = tempfile::tempdir().unwrap();
        // The script of launchers whose workers are never started.
        std::fs::write(dir.path().join("x.py"), "").unwrap();
        let listener = UnixListener::bind(dir.path().join("sock")).unwrap();
        Agent {
            listener,
            socket: None,
            deframer: Deframer::default(),
            facts: VecDeque::new(),
            register: None,
            port: 0,
            grace_ms: 600_000,
            lease_ms: 600_000,
            dir,
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Takes the next connection and its registration.
    pub(crate) fn accept(&mut self) {
        self.listener.set_nonblocking(true).unwrap();
        self.register = Some(loop {
            let mut found = None;
            until("a launcher connects", || {
                found = self.listener.accept().ok();
                found.is_some()
            });
            let socket = found.unwrap().0;
            socket.set_nonblocking(false).unwrap();
            self.socket = Some(socket);
            self.deframer = Deframer::default();
            self.facts.clear();
            match self.recv() {
                ToAgent::Register(register) => break register,
                // A sidecar that got no answer.
                ToAgent::Query(Query::Lease { .. }) => {}
                other => panic!("the first frame is the registration, not {other:?}"),
            }
        });
        let mut facts = VecDeque::new();
        self.port = loop {
            match self.recv() {
                ToAgent::MasterPort { port } => break port,
                // What it has to say of saves comes behind the registration, too.
                ToAgent::Save(_) => {}
                fact => facts.push_back(fact),
            }
        };
        self.facts = facts;
        self.welcome();
    }

    /// Says that it is there.
    pub(crate) fn welcome(&mut self) {
        self.send(ToLauncher::Welcome {
            node: NodeId([1; 32]),
            agent_pid: std::process::id(),
            agent_grace_ms: self.grace_ms,
            lease_ms: self.lease_ms,
        });
    }

    pub(crate) fn send(&mut self, frame: ToLauncher) {
        let bytes = codec::with_length(&codec::encode_frame(&frame).unwrap());
        self.socket.as_mut().unwrap().write_all(&bytes).unwrap();
    }

    /// The next frame, if one comes within the time.
    pub(crate) fn try_recv(&mut self, within: Duration) -> Option<ToAgent> {
        if let Some(fact) = self.facts.pop_front() {
            return Some(fact);
        }
        let deadline = Instant::now() + within;
        loop {
            if let Some(frame) = self.deframer.next_frame().unwrap() {
                match codec::decode_frame(frame).unwrap() {
                    // It answers each welcome.
                    ToAgent::Alive => continue,
                    frame => return Some(frame),
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let socket = self.socket.as_mut().unwrap();
            socket.set_read_timeout(Some(left)).unwrap();
            let mut buffer = [0; 4096];
            let Ok(length) = socket.read(&mut buffer) else {
                return None;
            };
            if length == 0 {
                return None;
            }
            self.deframer.push(&buffer[..length]);
        }
    }

    pub(crate) fn recv(&mut self) -> ToAgent {
        self.try_recv(PATIENCE).expect("a frame in time")
    }

    /// The next frame that is no news of a port, or of how far the ranks are.
    pub(crate) fn fact(&mut self) -> ToAgent {
        self.fact_within(PATIENCE).expect("a frame in time")
    }

    pub(crate) fn fact_within(&mut self, patience: Duration) -> Option<ToAgent> {
        loop {
            match self.try_recv(patience)? {
                ToAgent::MasterPort { port } => self.port = port,
                ToAgent::Save(SaveNews::At { .. }) => {}
                other => return Some(other),
            }
        }
    }

    /// Asks something of the store; the answer, or its first part.
    pub(crate) fn store(&mut self, id: u64, ask: StoreAsk) -> StoreAnswer {
        self.send(ToLauncher::Store { id, ask });
        self.stored(id)
    }

    /// The next answer, or part of one.
    pub(crate) fn stored(&mut self, id: u64) -> StoreAnswer {
        match self.fact() {
            ToAgent::Store { id: of, answer } if of == id => answer,
            other => panic!("no answer to {id}: {other:?}"),
        }
    }

    pub(crate) fn me(&self) -> LauncherId {
        self.register.as_ref().unwrap().launcher
    }

    /// A START for a job of this one node.
    pub(crate) fn start(&self, number: u8) -> Start {
        let register = self.register.as_ref().unwrap();
        Start {
            digest: Digest([number; 32]),
            lineage: Digest([1; 32]),
            attempt: 1,
            number: number.into(),
            node_rank: 0,
            nodes: 1,
            first_rank: 0,
            slots: register.slots,
            world: register.slots.into(),
            master: SocketAddr::from(([127, 0, 0, 1], self.port)),
            master_guard: SocketAddr::from(([127, 0, 0, 1], register.guard_port)),
            master_launcher: register.launcher,
            restart_count: u32::from(number) - 1,
            restore: None,
            peers: Box::default(),
            why: "test".into(),
        }
    }

    /// Starts a generation and waits for its workers.
    pub(crate) fn run(&mut self, number: u8) -> Digest {
        let start = self.start(number);
        let digest = start.digest;
        self.send(ToLauncher::Start(start));
        assert_eq!(self.fact(), ToAgent::Started { digest, attempt: 1 });
        digest
    }

    pub(crate) fn stop(&mut self, digest: Digest, grace_ms: u32) {
        self.send(ToLauncher::Stop {
            digest,
            grace_ms,
            why: "test".into(),
        });
    }

    /// Tells the sidecar, when it asks, for how long the workers may go on.
    pub(crate) fn grants(&mut self, lease_ms: u32) {
        let mut found = None;
        until("the sidecar asks", || {
            found = self.listener.accept().ok();
            found.is_some()
        });
        let mut stream = found.unwrap().0;
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut deframer = Deframer::default();
        let mut buffer = [0; 4096];
        let asked = loop {
            if let Some(frame) = deframer.next_frame().unwrap() {
                break codec::decode_frame::<ToAgent>(frame).unwrap();
            }
            let length = stream.read(&mut buffer).unwrap();
            assert!(length > 0, "the sidecar asks nothing");
            deframer.push(&buffer[..length]);
        };
        let launcher = self.me();
        assert_eq!(asked, ToAgent::Query(Query::Lease { launcher }));
        let answer = Answer::Json(format!("{{\"lease_ms\":{lease_ms}}}"));
        let frame = codec::encode_frame(&answer).unwrap();
        // It may have given up on this one meanwhile.
        let _ = stream.write_all(&codec::with_length(&frame));
    }

    /// As when the agent was killed.
    pub(crate) fn hang_up(&mut self) {
        self.socket = None;
    }

    pub(crate) fn end(&mut self, code: i32, report: &str) {
        self.send(ToLauncher::End {
            code,
            report: report.into(),
        });
    }
}

pub(crate) struct Launcher {
    child: Child,
    out: PathBuf,
    err: PathBuf,
}

impl Launcher {
    /// `muster run` on the agent's socket, in the agent's directory.
    pub(crate) fn start(agent: &Agent, args: &[&str]) -> Launcher {
        Self::start_with(agent, args, &[])
    }

    pub(crate) fn start_with(agent: &Agent, args: &[&str], env: &[(&str, &str)]) -> Launcher {
        Self::spawn(agent, &[env!("CARGO_BIN_EXE_muster")], args, env)
    }

    /// With a terminal as stdin, stdout and stderr; all of its output is in [`out`](Self::out).
    pub(crate) fn start_on_terminal(agent: &Agent, args: &[&str]) -> Launcher {
        let program =
            "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))";
        let before = ["python3", "-c", program, env!("CARGO_BIN_EXE_muster")];
        Self::spawn(agent, &before, args, &[])
    }

    /// With pipes as stdout and stderr whose readers are gone.
    pub(crate) fn start_unread(agent: &Agent, args: &[&str]) -> Launcher {
        let closed = || Stdio::from(nix::unistd::pipe().unwrap().1);
        let mut command = Self::command(agent, &[env!("CARGO_BIN_EXE_muster")], args, &[]);
        let child = command.stdout(closed()).stderr(closed()).spawn().unwrap();
        let (out, err) = (agent.path("out"), agent.path("err"));
        Launcher { child, out, err }
    }

    /// With one pipe as stdout and stderr, whose read end comes back: nobody reads it.
    pub(crate) fn start_blocked(agent: &Agent, args: &[&str]) -> (Launcher, OwnedFd) {
        let (read, write) = nix::unistd::pipe().unwrap();
        let mut command = Self::command(agent, &[env!("CARGO_BIN_EXE_muster")], args, &[]);
        command.stdout(write.try_clone().unwrap()).stderr(write);
        let child = command.spawn().unwrap();
        let (out, err) = (agent.path("out"), agent.path("err"));
        (Launcher { child, out, err }, read)
    }

    pub(crate) fn spawn(
        agent: &Agent,
        before: &[&str],
        args: &[&str],
        env: &[(&str, &str)],
    ) -> Launcher {
        let (out, err) = (agent.path("out"), agent.path("err"));
        let child = Self::command(agent, before, args, env)
            .stdout(std::fs::File::create(&out).unwrap())
            .stderr(std::fs::File::create(&err).unwrap())
            .spawn()
            .unwrap();
        Launcher { child, out, err }
    }

    fn command(agent: &Agent, before: &[&str], args: &[&str], env: &[(&str, &str)]) -> Command {
        let mut command = Command::new(before[0]);
        command
            .args(&before[1..])
            .arg("run")
            .arg("--socket")
            .arg(agent.path("sock"))
            .args(args)
            .envs(env.iter().copied())
            .env("TMPDIR", agent.dir.path())
            .current_dir(agent.dir.path())
            .stdin(Stdio::null());
        command
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: i32) {
        // SAFETY: our own child, not reaped yet.
        unsafe { libc::kill(self.child.id() as i32, signal) };
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        until("the launcher exits", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    pub(crate) fn out(&self) -> String {
        std::fs::read_to_string(&self.out).unwrap_or_default()
    }

    pub(crate) fn err(&self) -> String {
        std::fs::read_to_string(&self.err).unwrap_or_default()
    }

    /// Without the launcher's own lines, which may come in the middle of one that a worker has not ended.
    pub(crate) fn workers_err(&self) -> String {
        let err = self.err();
        let lines = err.split_inclusive('\n');
        lines.filter_map(|l| l.split("muster: ").next()).collect()
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!(
                "launcher's stdout:\n{}\nstderr:\n{}",
                self.out(),
                self.err()
            );
        }
    }
}

/// Processes that carry a launcher's id, and its sidecar; zombies too.
pub(crate) fn left_of(launcher: LauncherId) -> Vec<String> {
    let mark = format!("MUSTER_LAUNCHER={}", launcher.hex());
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let path = entry.path();
        let read = |name: &str| std::fs::read(path.join(name)).unwrap_or_default();
        let environ = read("environ");
        let cmdline = String::from_utf8_lossy(&read("cmdline")).replace('\0', " ");
        let carries = environ.split(|&b| b == 0).any(|e| e == mark.as_bytes());
        if carries || cmdline.contains(&format!("__reaper {}", launcher.hex())) {
            found.push(format!("{} {cmdline}", path.display()));
        }
    }
    found
}

pub(crate) fn nothing_left(launcher: LauncherId) {
    let mut left = Vec::new();
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        left = left_of(launcher);
        if left.is_empty() {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("still running: {left:#?}");
}

/// Zombies whose parent is this process.
pub(crate) fn zombies_of(pid: u32) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let Some((head, rest)) = stat.rsplit_once(')') else {
            continue;
        };
        let mut fields = rest.split_whitespace();
        let state = fields.next().unwrap_or_default();
        if state == "Z" && fields.next() == Some(&pid.to_string()) {
            found.push(head.to_owned());
        }
    }
    found
}

/// The process that a script wrote down. The shell makes the file before it writes into it.
pub(crate) fn pid(path: &Path) -> i32 {
    let whole = || read(path).strip_suffix('\n')?.parse().ok();
    let mut pid = None;
    until("a process is written down", || {
        pid = whole();
        pid.is_some()
    });
    pid.unwrap()
}

pub(crate) fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}
