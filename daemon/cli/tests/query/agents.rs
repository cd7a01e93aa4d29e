//! Agents to ask, a launcher to talk about, and the command.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muster_daemon::agent::{Handle, NetSetup, Node, Setup};
use muster_daemon::socket::{Conn, Listener, connect};
use muster_daemon::state::StateDir;
use muster_protocol::codec;
use muster_protocol::local::{Register, ToAgent, ToLauncher};
use muster_protocol::record::Place;
use muster_protocol::spec::JobSpec;
use muster_protocol::{LauncherId, Span};
use serde_json::Value;
use tempfile::TempDir;
use tokio::sync::oneshot;

/// The bound of every wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Polls until there is something.
pub(crate) fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "never came true: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A folder in which each test keeps everything; also the runtime directory of its commands.
pub(crate) struct World {
    pub(crate) dir: TempDir,
}

impl World {
    pub(crate) fn new() -> World {
        let machines = std::os::unix::net::UnixStream::connect("/run/muster/musterd.sock");
        assert!(
            machines.is_err(),
            "stop this machine's own musterd first: commands would find it"
        );
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("muster")).unwrap();
        World { dir }
    }

    /// The socket where commands look first.
    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("muster/musterd.sock")
    }

    pub(crate) fn agent(&self, name: &str, socket: &Path) -> Agent {
        self.agent_with(name, socket, Vec::new())
    }

    pub(crate) fn agent_with(&self, name: &str, socket: &Path, peers: Vec<String>) -> Agent {
        Agent::start(&self.dir.path().join(name), name, socket, peers)
    }

    /// Runs the command, with nothing of this process' own surroundings.
    pub(crate) fn muster(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_muster"));
        command
            .args(args)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.dir.path())
            .env("XDG_RUNTIME_DIR", self.dir.path());
        command
    }

    /// Output of `-o json`.
    pub(crate) fn json(&self, args: &[&str]) -> Value {
        let output = self.muster(&[args, &["-o", "json"]].concat());
        assert!(output.status.success(), "{args:?}: {output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// An agent on a thread of its own.
pub(crate) struct Agent {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
    pub(crate) id: String,
}

impl Agent {
    fn start(state: &Path, host: &str, socket: &Path, bootstrap: Vec<String>) -> Agent {
        let (state, socket, host) = (state.to_owned(), socket.to_owned(), host.to_owned());
        let (tell, told) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let setup = Setup {
                    labels: std::collections::BTreeMap::new(),
                    slot_memory: u64::MAX,
                    slot_lease: muster_protocol::Span::from_secs(600),
                    embedded: false,
                    place: muster_protocol::record::Place::default(),
                    state: StateDir::open(&state).unwrap(),
                    listener: Some(Listener::bind(&socket).unwrap()),
                    net: NetSetup {
                        cluster: "test".into(),
                        secret: Some(vec![7; 32]),
                        listen: vec![SocketAddr::from(([127, 0, 0, 1], 0))],
                        otherwise: None,
                        quic: false,
                        mdns: false,
                        bootstrap,
                    },
                    http: None,
                    host,
                    suspect_after: Span::from_secs(2),
                    agent_grace: Span::from_secs(30),
                    sigterm_grace: Span::from_secs(5),
                    notifier: None,
                };
                let node = Node::start(setup).await.unwrap();
                let _gone = tell.send((node.handle(), node.node_id().hex()));
                node.run().await;
            });
        });
        let (handle, id) = told.blocking_recv().unwrap();
        Agent {
            handle,
            thread: Some(thread),
            id,
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|t| !t.is_finished())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let handle = self.handle.clone();
        let quit = async move { handle.quit().await };
        tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap()
            .block_on(quit);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking());
        }
    }
}

/// A launcher's registration.
pub(crate) fn registration(job: &str, nodes: (u16, u16)) -> Register {
    Register {
        launcher: LauncherId([9; 8]),
        job: job.into(),
        spec: JobSpec {
            min_nodes: nodes.0,
            max_nodes: nodes.1,
            ..JobSpec::default()
        },
        slots: 2,
        guard_port: 1,
        addrs: vec![[127, 0, 0, 1].into()],
        place: Place::default(),
        running: None,
        waited_ms: 0,
        began: None,
        lineage: None,
        gate: None,
        store: None,
        parity: 0,
        pid: std::process::id(),
        command: "train".into(),
        log_dir: None,
    }
}

/// A launcher that only speaks: it says that workers run which nobody started.
pub(crate) struct Launcher {
    runtime: tokio::runtime::Runtime,
    conn: Conn,
}

impl Launcher {
    pub(crate) fn register(
        socket: &Path,
        job: &str,
        nodes: (u16, u16),
        log_dir: Option<&Path>,
    ) -> Launcher {
        let mut register = registration(job, nodes);
        register.log_dir = log_dir.map(|d| d.to_str().unwrap().to_owned());
        Launcher::say(socket, register)
    }

    /// Connects and registers.
    pub(crate) fn say(socket: &Path, register: Register) -> Launcher {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let conn = runtime.block_on(async {
            let conn = connect(socket).await.unwrap();
            let frames = [ToAgent::Register(register), ToAgent::MasterPort { port: 2 }];
            for frame in frames {
                conn.send(codec::encode_frame(&frame).unwrap(), Vec::new())
                    .unwrap();
            }
            conn
        });
        Launcher { runtime, conn }
    }

    pub(crate) fn recv(&mut self) -> ToLauncher {
        let received = async { tokio::time::timeout(PATIENCE, self.conn.recv()).await };
        let frame = self.runtime.block_on(received).unwrap().unwrap().unwrap().0;
        codec::decode_frame(&frame).unwrap()
    }

    pub(crate) fn send(&mut self, frame: &ToAgent) {
        let frame = codec::encode_frame(frame).unwrap();
        let Launcher { runtime, conn } = self;
        runtime.block_on(async { conn.send(frame, Vec::new()).unwrap() });
    }

    /// Does as it is told until the job's workers are to run, and says that they do.
    pub(crate) fn run(&mut self) {
        loop {
            if let ToLauncher::Start(start) = self.recv() {
                let (digest, attempt) = (start.digest, start.attempt);
                return self.send(&ToAgent::Started { digest, attempt });
            }
        }
    }

    /// Goes on until the job is over here: workers that are told to stop have stopped.
    pub(crate) fn end(&mut self) {
        loop {
            match self.recv() {
                ToLauncher::Stop { digest, .. } | ToLauncher::Preempt { digest, .. } => {
                    self.send(&ToAgent::Stopped { digest });
                }
                ToLauncher::End { .. } => return,
                _ => {}
            }
        }
    }
}
