//! An agent inside the launcher, for where none is installed: a single node needs no set-up, and
//! several nodes need a first peer to call and the cluster secret, but no daemon.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use muster_daemon::agent::{NetSetup, Node, Setup, says_loopback};
use muster_daemon::config::{self, AgentConfig, DEFAULT_PORT, Flags, Inputs, Secret};
use muster_daemon::serve;
use muster_daemon::socket::Listener;
use muster_daemon::state::{StateDir, StateError};
use muster_store::Location;
use tokio::sync::oneshot;

use super::console::{self, Console, Log};
use super::options::Plan;
use crate::query::utc;
use crate::sockets;

/// Resolves when the agent's thread has ended; to an error if it panicked.
pub type Gone = oneshot::Receiver<()>;

/// A running embedded agent.
#[derive(Debug)]
pub struct Embedded {
    pub socket: PathBuf,
    /// Whether only this host can reach it.
    pub loopback: bool,
    handle: muster_daemon::agent::Handle,
    thread: Option<std::thread::JoinHandle<()>>,
    ended: Option<Gone>,
    _temporary: Option<tempfile::TempDir>,
}

impl Embedded {
    /// Starts an agent on a thread of its own, and waits until it serves.
    pub fn start(plan: &mut Plan) -> anyhow::Result<Embedded> {
        // The terminal is the user's: the agent's log shows only when it is asked for.
        let logs = std::env::var_os("MUSTER_LOG").is_some_and(|filter| !filter.is_empty());
        let (listen, loopback) = listen(&plan.endpoints)?;
        let config = configuration(plan, listen)?;
        let found = plan.standalone || config.mdns || !config.bootstrap.is_empty();
        if plan.spec.min_nodes > 1 && !found {
            console::say(
                "no other node can find this one: give every node of the job the same --rdzv-endpoint HOST (any of \
                 them), or run musterd on each",
            );
        }
        if logs {
            // A log that nobody reads must not stop the agent: it shares the launcher's console.
            let console = Log(Console::standard()?);
            serve::log_to(&config, move || console.clone())?;
        }
        let (state, temporary) = state(plan, loopback)?;
        let socket = socket_path()?;
        let (told, ready) = oneshot::channel();
        let path = socket.clone();
        let own_state = plan.state_dir.is_none() && temporary.is_none();
        let (thread, ended) = watched(move || agent(config, state, &path, own_state, told))
            .context("cannot start a thread")?;
        let handle = match ready.blocking_recv() {
            Ok(Ok(handle)) => handle,
            Ok(Err(error)) => return Err(error),
            Err(_) => bail!("the embedded agent ended before it served"),
        };
        Ok(Embedded {
            socket,
            loopback,
            handle,
            thread: Some(thread),
            ended: Some(ended),
            _temporary: temporary,
        })
    }

    /// A future that resolves when the agent has ended; only the first caller gets it.
    pub fn ended(&mut self) -> Option<Gone> {
        self.ended.take()
    }

    /// Lets the agent say what it still has to say, and ends it.
    pub fn stop(mut self) {
        let handle = self.handle.clone();
        let quit = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().build();
            if let Ok(runtime) = runtime {
                runtime.block_on(handle.quit());
            }
        });
        let _quit = quit.join();
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
        let _gone = std::fs::remove_file(&self.socket);
        let _gone = std::fs::remove_file(self.socket.with_extension("sock.lock"));
    }
}

/// Starts the agent's thread, and tells when it has ended.
fn watched(
    work: impl FnOnce() + Send + 'static,
) -> std::io::Result<(std::thread::JoinHandle<()>, Gone)> {
    let (over, ended) = oneshot::channel();
    let thread = std::thread::Builder::new()
        .name("muster-agent".into())
        .spawn(move || {
            // A panic drops it, which the other side sees too.
            let over = over;
            work();
            let _gone = over.send(());
        })?;
    Ok((thread, ended))
}

fn agent(
    config: AgentConfig,
    state: StateDir,
    socket: &Path,
    own_state: bool,
    told: oneshot::Sender<anyhow::Result<muster_daemon::agent::Handle>>,
) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            let _gone = told.send(Err(error.into()));
            return;
        }
    };
    runtime.block_on(async {
        match start(config, state, socket).await {
            Ok(node) => {
                let _gone = told.send(Ok(node.handle()));
                let ended = node.run().await;
                // A job that goes on finds the same voter here when its launcher comes back.
                if own_state
                    && ended.finished
                    && let Some(state) = ended.state
                    && let Err(error) = state.remove_all()
                {
                    tracing::warn!(%error, "the state of a job that is over stays");
                }
            }
            Err(error) => {
                let _gone = told.send(Err(error));
            }
        }
    });
    runtime.shutdown_timeout(Duration::from_millis(100));
}

async fn start(config: AgentConfig, state: StateDir, socket: &Path) -> anyhow::Result<Node> {
    let setup = Setup {
        listener: Some(Listener::bind(socket)?),
        state,
        net: NetSetup {
            // Several launchers of one host may reach for the endpoint at once.
            otherwise: config.listen.first().map(|a| SocketAddr::new(a.ip(), 0)),
            ..serve::net_setup(&config)
        },
        http: None,
        host: serve::host_name(),
        suspect_after: config.suspect_after,
        agent_grace: config.agent_grace,
        sigterm_grace: config.sigterm_deadline,
        notifier: None,
        labels: config.labels.clone(),
        // The launcher says itself where it is.
        place: muster_protocol::record::Place::default(),
        // It serves one launcher, which bounds them itself.
        slot_memory: u64::MAX,
        slot_lease: config.checkpoint_lease,
        embedded: true,
    };
    Ok(Node::start(setup).await?)
}

/// The agent's own settings come from the environment and the machine's file; where it listens and
/// whom it calls from the launcher's flags.
fn configuration(plan: &Plan, listen: SocketAddr) -> anyhow::Result<AgentConfig> {
    let mut flags = Flags {
        listen: vec![listen.to_string()],
        bootstrap: plan
            .endpoints
            .iter()
            .map(|e| with_port(e))
            // torchrun's way of saying "any port": nobody can be called there.
            .filter(|e| !e.ends_with(":0"))
            .collect(),
        http: Some("off".into()),
        ..Flags::default()
    };
    if std::env::var_os("MUSTER_MDNS").is_none() {
        // Nobody asked to be found: a launcher calls the peers that it was given.
        flags.mdns = Some("false".into());
    }
    let inputs = Inputs::from_process(flags);
    if plan.standalone || plan.endpoints.is_empty() {
        let (mut config, _) = config::read(&inputs)?;
        if config.secret.is_none() && !config.insecure {
            // Nobody else is to talk to it, and loopback is open to every user of the machine.
            config.secret = Some(Secret::random()?);
        }
        return Ok(config);
    }
    Ok(config::load_for_user(&inputs)?.0)
}

fn with_port(endpoint: &str) -> String {
    let bare_v6 = endpoint.parse::<std::net::Ipv6Addr>().is_ok();
    if bare_v6 {
        format!("[{endpoint}]:{DEFAULT_PORT}")
    } else if endpoint.contains(':') {
        endpoint.to_owned()
    } else {
        format!("{endpoint}:{DEFAULT_PORT}")
    }
}

/// Whether the address is this host's, and nobody listens there yet.
fn is_ours(addr: SocketAddr) -> bool {
    for _ in 0..8 {
        match TcpListener::bind(addr) {
            Ok(_) => return true,
            Err(error) if error.kind() != std::io::ErrorKind::AddrInUse => return false,
            Err(_) => {}
        }
        if TcpStream::connect_timeout(&addr, Duration::from_millis(200)).is_ok() {
            return false;
        }
        // Two launchers that try at the same moment may both be refused: one of them must get it.
        std::thread::sleep(Duration::from_millis(rand::random_range(1..=30)));
    }
    false
}

/// Where to listen: on loopback unless an endpoint of another host is named; at the endpoint's own
/// port where that is this host's and free, else at any.
fn listen(endpoints: &[String]) -> anyhow::Result<(SocketAddr, bool)> {
    let free = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let mut first: Option<SocketAddr> = None;
    let mut far = false;
    for endpoint in endpoints {
        // Debian gives a host's own name a loopback address (127.0.1.1): other hosts are meant all
        // the same, unless loopback is what was written.
        far |= !says_loopback(endpoint);
        // A name that cannot be resolved yet is tried again by the agent; it is not this host's.
        let Ok(addrs) = with_port(endpoint).to_socket_addrs() else {
            continue;
        };
        for addr in addrs {
            first = first.or_else(|| is_ours(addr).then_some(addr));
        }
    }
    if !far {
        return Ok((first.unwrap_or(free), true));
    }
    let any = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    let port = first.map_or(0, |a| a.port());
    let wanted = SocketAddr::new(any, port);
    let bound = TcpListener::bind(wanted).is_ok();
    let port = if bound { port } else { 0 };
    Ok((SocketAddr::new(any, port), false))
}

/// The state directory. A job of several nodes keeps its votes over a restart of the launcher, so
/// that a node that comes back is the voter that it was; a job with a store, so that it is the member
/// that the log names. Any other job of one node needs none. Its lock also refuses a second launcher of
/// the job on this node, unless all its nodes are on this host: then this is the next of them.
fn state(plan: &mut Plan, loopback: bool) -> anyhow::Result<(StateDir, Option<tempfile::TempDir>)> {
    if let Some(dir) = &plan.state_dir {
        return Ok((StateDir::open(dir)?, None));
    }
    let alone = plan.standalone || plan.endpoints.is_empty();
    let base = state_home().filter(|_| !alone || plan.store.is_some());
    let Some(base) = base else {
        if !alone {
            bail!(
                "a job of several nodes needs a place for its state: set HOME, or name one with \
                 --state-dir"
            );
        }
        let temporary = tempfile::Builder::new().prefix("muster-").tempdir()?;
        return Ok((StateDir::open(temporary.path())?, Some(temporary)));
    };
    let instances = match (loopback && !alone, plan.instance) {
        (true, 0) => 0..plan.spec.min_nodes,
        (_, named) => named..named.saturating_add(1),
    };
    let next = instances.end;
    let mut taken = None;
    for instance in instances {
        match state_in(&base, plan, instance) {
            Err(StateError::InUse { pid, since_ms, .. }) => {
                taken.get_or_insert((pid, since_ms));
            }
            opened => {
                if instance != plan.instance {
                    plan.instance = instance;
                    console::say(&format!(
                        "job {} has a launcher here already, and all its first peers are on this host: this one is another node, \
                         as with --instance {instance}",
                        plan.job
                    ));
                }
                return Ok((opened?, None));
            }
        }
    }
    let (pid, since_ms) = taken.unwrap_or_default();
    bail!(second_launcher(&plan.job, next, pid, since_ms))
}

/// The state directory of the launcher of this number.
fn state_in(base: &Path, plan: &Plan, instance: u16) -> Result<StateDir, StateError> {
    let mut name = format!("{}-{instance}", plan.job);
    if let Some(store) = &plan.store {
        // Jobs of one name in two stores are two jobs.
        name = format!("{name}-{}", short_name(store));
    }
    // A home directory may be shared between hosts, a state directory never is.
    let dir = base.join("muster").join(serve::host_name()).join(&name);
    match StateDir::open(&dir) {
        Err(StateError::NetworkFileSystem { .. }) => {
            let own = format!("muster-state-{}", nix::unistd::getuid());
            let own = std::env::temp_dir().join(own);
            // Whoever may write there could put a link in our way.
            sockets::prepare_dir(&own).map_err(|source| StateError::Io {
                doing: "preparing",
                path: own.clone(),
                source,
                unchanged: true,
            })?;
            StateDir::open(&own.join(&name))
        }
        opened => opened,
    }
}

fn state_home() -> Option<PathBuf> {
    let named = |name: &str| std::env::var_os(name).filter(|d| !d.is_empty());
    match named("XDG_STATE_HOME") {
        Some(dir) => Some(PathBuf::from(dir)),
        None => named("HOME").map(|home| PathBuf::from(home).join(".local/state")),
    }
}

/// A few letters that stand for a store, wherever it is named from.
fn short_name(store: &Location) -> String {
    let named = match store {
        Location::Directory(path) => std::path::absolute(path)
            .unwrap_or_else(|_| path.clone())
            .into_os_string()
            .into_encoded_bytes(),
        other => other.to_string().into_bytes(),
    };
    let hash = blake3::hash(&named).to_hex();
    hash.chars().take(8).collect()
}

/// Why the same command is not started twice on one node.
fn second_launcher(job: &str, next: u16, pid: Option<u32>, since_ms: Option<u64>) -> String {
    let first = match (pid, since_ms) {
        (Some(pid), Some(ms)) => {
            let (date, time) = utc(ms);
            format!(" (pid {pid}, started {date} {time} UTC)")
        }
        (Some(pid), None) => format!(" (pid {pid})"),
        (None, _) => String::new(),
    };
    format!(
        "job {job} already has a launcher on this node{first}: stop it first, or start this one as a node \
         of its own with --instance {next}"
    )
}

fn socket_path() -> anyhow::Result<PathBuf> {
    let dir = sockets::embedded_dir();
    sockets::prepare_dir(&dir).context("there is no place for the agent's socket")?;
    sockets::remove_stale(&dir);
    Ok(sockets::embedded_socket(&dir, std::process::id()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_ends_is_noticed_and_told_from_one_that_panics() {
        let (thread, ended) = watched(|| {}).unwrap();
        assert_eq!(ended.blocking_recv(), Ok(()));
        thread.join().unwrap();
        let (thread, ended) = watched(|| panic!("meant")).unwrap();
        assert!(ended.blocking_recv().is_err());
        assert!(thread.join().is_err());
    }
}
