//! The agent's one loop: wait for something, turn it into a typed event, apply it to the core
//! synchronously, and carry out the effects in their order. No lock is shared between tasks.

mod clients;
mod disk;
mod effects;
mod heirs;
mod held;
mod history;
mod listen;
mod looks;
mod probe;
mod query;
mod reports;
mod restore;
mod stores;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use muster_protocol::agent::{Agent, Config, ConnId, Event, Flaws};
use muster_protocol::membership::Answer;
use muster_protocol::record::Place;
use muster_protocol::wire::Message;
use muster_protocol::{Home, JobKey, NodeId, Span, Time, codec};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

#[cfg(test)]
pub(crate) use probe::agent as probe_agent;
pub use probe::{GUARD_MAGIC, GUARD_VERSION};

use crate::clock;
use crate::http::{Health, Server};
use crate::metrics::Metrics;
use crate::net::{Identity, Net, NetConfig, NetEvent, Refusal};
use crate::notify::Notifier;
use crate::seldom::Seldom;
use crate::socket::{Conn, Listener, NoRoom, Received, Sender};
use crate::state::{StateDir, StateError};

/// Inputs that may wait for the loop.
const QUEUE: usize = 1_024;
/// After this long launchers that wait are told that nobody answers at a first peer: several start at once.
const UNANSWERED: std::time::Duration = std::time::Duration::from_secs(2);
/// How often the loop does what is due now and then, and tells the service manager that it turns.
const BEAT: Duration = Duration::from_secs(2);
const MIN_BEAT: Duration = Duration::from_millis(100);
/// How long a drained agent stays for what others may still ask.
const LINGER: Span = Span::from_millis(300);

/// How an agent is set up; made from the configuration, or by a launcher that embeds one.
#[derive(Debug)]
pub struct Setup {
    pub state: StateDir,
    pub listener: Option<Listener>,
    pub net: NetSetup,
    pub http: Option<SocketAddr>,
    pub host: String,
    pub suspect_after: Span,
    pub agent_grace: Span,
    /// Time that a SIGTERM without a deadline of its own leaves.
    pub sigterm_grace: Span,
    /// Where the service manager listens; an embedded agent has none.
    pub notifier: Option<Notifier>,
    /// The operator's labels, for people.
    pub labels: BTreeMap<String, String>,
    /// Where the node is; launchers that say nothing else are there too.
    pub place: Place,
    /// The most bytes of the checkpoint slots of all jobs here.
    pub slot_memory: u64,
    /// How long those of a launcher that is gone are held for its job's next one.
    pub slot_lease: Span,
    /// It lives in a launcher's process, and ends with it.
    pub embedded: bool,
}

/// The network part of a [`Setup`].
#[derive(Debug)]
pub struct NetSetup {
    pub cluster: String,
    pub secret: Option<Vec<u8>>,
    pub listen: Vec<SocketAddr>,
    /// Where to listen instead when somebody else has those addresses.
    pub otherwise: Option<SocketAddr>,
    pub quic: bool,
    pub mdns: bool,
    pub bootstrap: Vec<String>,
}

/// Why an agent could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Net(#[from] crate::net::StartError),
    #[error(transparent)]
    Http(#[from] crate::http::BindError),
    #[error("metrics cannot be set up: {0}")]
    Metrics(String),
    #[error(
        "the agent's identity cannot be used: remove the state directory's `identity`, and the node joins as a new one"
    )]
    Identity,
    #[error(transparent)]
    Core(#[from] muster_protocol::agent::Error),
    #[error(transparent)]
    State(#[from] crate::state::StateError),
}

/// Inputs of the loop from its tasks.
#[derive(Debug)]
enum Input {
    Accepted(Conn),
    Frame {
        conn: ConnId,
        frame: Vec<u8>,
        fds: Result<Received, NoRoom>,
    },
    Closed(ConnId),
    /// A launcher whose connection closed was looked for at its guard.
    LauncherLooked {
        conn: ConnId,
        guard: Answer,
    },
    Probed {
        node: NodeId,
        id: u64,
        agent: Answer,
        guard: Answer,
    },
    /// A first peer did not answer a while ago.
    Unanswered {
        addr: SocketAddr,
    },
    /// A write of a job's state is over.
    Stored {
        key: JobKey,
        took: Duration,
        result: Result<(), StateError>,
    },
    /// That of the peers' addresses is.
    PeersStored,
    /// This node goes away.
    Drain {
        grace: Option<Span>,
        reason: String,
    },
    /// Stop without ceremony.
    Quit,
}

/// Orders to a running agent from the process around it.
#[derive(Clone, Debug)]
pub struct Handle {
    tx: mpsc::Sender<Input>,
}

impl Handle {
    /// Drains this node within the grace, or the configured one.
    pub async fn drain(&self, grace: Option<Span>, reason: &str) {
        let reason = reason.to_owned();
        let _ended = self.tx.send(Input::Drain { grace, reason }).await;
    }

    pub async fn quit(&self) {
        let _ended = self.tx.send(Input::Quit).await;
    }
}

/// State that an ended agent leaves.
#[derive(Debug)]
pub struct Ended {
    /// Its state directory, still locked; none where its disk does not answer.
    pub state: Option<StateDir>,
    /// Every job that it knew is over, and every node of these knows that: nobody asks for what is in its state.
    pub finished: bool,
}

/// One client of the socket.
#[derive(Debug)]
struct Client {
    sender: Sender,
    uid: u32,
    pid: i32,
    launcher: Option<clients::Launcher>,
    /// The wait that its launcher was last told of, until it was told to start.
    waiting: Option<String>,
    /// Whether it was told that this agent is there.
    welcomed: bool,
}

/// A running agent.
#[derive(Debug)]
pub struct Node {
    core: Agent,
    net: Net,
    disk: disk::Disk,
    state_dir: PathBuf,
    clients: BTreeMap<ConnId, Client>,
    next_conn: u64,
    looks: looks::Looks,
    seldom: Seldom,
    history: history::History,
    held: held::Held,
    facts: query::Facts,
    metrics: Metrics,
    health: Health,
    tx: mpsc::Sender<Input>,
    rx: mpsc::Receiver<Input>,
    net_rx: mpsc::Receiver<NetEvent>,
    sigterm_grace: Span,
    listening: BTreeSet<SocketAddr>,
    /// Errors with the agents that this one called.
    refused: BTreeMap<String, String>,
    /// Jobs whose state could not be stored when that was last tried, and why.
    unstored: BTreeMap<JobKey, String>,
    probe_limit: Duration,
    notifier: Option<Notifier>,
    peers_changed: bool,
    /// Their addresses are being written.
    writes_peers: bool,
    quit: bool,
    /// Since when nobody is waited for.
    drained: Option<Time>,
}

/// Whether a first peer is named by this host alone: `localhost`, or a loopback address.
pub fn says_loopback(peer: &str) -> bool {
    let host = match peer.parse::<IpAddr>() {
        Ok(_) => peer,
        Err(_) => peer.rsplit_once(':').map_or(peer, |(host, _)| host),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Whether all first peers are named so: then the whole cluster is on this host.
fn on_one_host(bootstrap: &[String]) -> bool {
    !bootstrap.is_empty() && bootstrap.iter().all(|peer| says_loopback(peer))
}

/// Where a state directory lies, whether or not the one before it there is the same.
fn home_of(state: &Path) -> Home {
    let path = std::path::absolute(state);
    let path = path.as_deref().unwrap_or(state);
    Home::of(path.as_os_str().as_encoded_bytes())
}

impl Node {
    /// Binds everything and restores what an earlier run stored. Needs a tokio runtime.
    pub async fn start(mut setup: Setup) -> Result<Node, StartError> {
        let commit = option_env!("MUSTER_COMMIT").unwrap_or("unknown");
        let metrics = Metrics::new(env!("CARGO_PKG_VERSION"), commit)
            .map_err(|e| StartError::Metrics(e.to_string()))?;
        let health = Health::default();
        if let Some(addr) = setup.http {
            let server = Server::bind(addr, metrics.clone(), &health).await?;
            tokio::spawn(server.serve());
        }
        let identity = identity(&setup.state).ok_or(StartError::Identity)?;
        let known = remembered(&mut setup.state);
        let config = |listen: Vec<SocketAddr>| {
            let mut config = NetConfig::new(identity.clone(), setup.net.cluster.clone());
            config.secret = setup.net.secret.clone();
            config.listen = listen;
            config.quic = setup.net.quic;
            config.mdns = setup.net.mdns;
            config.bootstrap = setup.net.bootstrap.clone();
            config.remembered = known.addrs.clone();
            config
        };
        let (wanted, otherwise) = (setup.net.listen.clone(), setup.net.otherwise);
        let (net, net_rx) = listen::start(config, wanted, otherwise).await?;
        let now = clock::now();
        let stored = restore::restore(&mut setup.state)?;
        let mut core = Agent::new(
            Config {
                node: setup.state.node_id(),
                state: setup.state.state_id(),
                boot: setup.state.boot(),
                cluster: setup.net.cluster.clone(),
                host: setup.host.clone(),
                version: env!("CARGO_PKG_VERSION").into(),
                pid: std::process::id(),
                home: home_of(setup.state.path()),
                seed: rand::random(),
                suspect_after: setup.suspect_after,
                agent_grace: setup.agent_grace,
                birth_timeout: Span::from_secs(4),
                start_timeout: Span::from_secs(30),
                minority_wait: setup.suspect_after.times(3),
                // By then an agent that is away has come back, or its launcher has ended its workers.
                orphan_after: Span(setup.agent_grace.0.saturating_add(setup.suspect_after.0)),
                one_host: on_one_host(&setup.net.bootstrap),
                slot_memory: setup.slot_memory,
                slot_lease: setup.slot_lease,
                embedded: setup.embedded,
                place: setup.place,
                memory: muster_protocol::memory::Key::of_cluster(setup.net.secret.as_deref()),
                compaction: muster_protocol::storelog::Compaction::default(),
                flaws: Flaws::default(),
            },
            stored,
            now,
        )?;
        core.remember_hosts(known.hosts);
        let (tx, rx) = mpsc::channel(QUEUE);
        if let Some(listener) = setup.listener.take() {
            tokio::spawn(accept(listener, tx.clone()));
        }
        let history = history::History::open(setup.state.path());
        let node = Node {
            core,
            net,
            state_dir: setup.state.path().to_owned(),
            disk: disk::Disk::start(setup.state, tx.clone()),
            clients: BTreeMap::new(),
            next_conn: 0,
            looks: looks::Looks::default(),
            seldom: Seldom::default(),
            history,
            held: held::Held::default(),
            facts: query::Facts::new(
                setup.net.secret.is_some(),
                std::mem::take(&mut setup.labels),
            ),
            metrics,
            health,
            tx,
            rx,
            net_rx,
            sigterm_grace: setup.sigterm_grace,
            listening: BTreeSet::new(),
            refused: BTreeMap::new(),
            unstored: BTreeMap::new(),
            probe_limit: setup.suspect_after.to_std() / 4,
            notifier: setup.notifier,
            peers_changed: false,
            writes_peers: false,
            quit: false,
            drained: None,
        };
        node.health.not_ready.send_replace(Vec::new());
        // Of jobs that an earlier run left.
        node.prefer_members();
        Ok(node)
    }

    pub fn handle(&self) -> Handle {
        Handle {
            tx: self.tx.clone(),
        }
    }

    pub fn node_id(&self) -> NodeId {
        self.core.config().node
    }

    /// Runs until told to quit, or until a drain is complete.
    pub async fn run(mut self) -> Ended {
        self.effects();
        self.tell_manager(|n| n.ready("serving"));
        // Sooner where the service manager waits for less than twice as long; tokio refuses zero.
        let asked = self.notifier.as_ref().and_then(Notifier::watchdog_interval);
        let every = asked.map_or(BEAT, |half| half.clamp(MIN_BEAT, BEAT));
        let mut beat = tokio::time::interval(every);
        beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        while !self.quit {
            let due = self.due();
            tokio::select! {
                Some(event) = self.net_rx.recv() => self.on_net(event),
                Some(input) = self.rx.recv() => self.on_input(input),
                () = sleep_until(due) => self.core.handle_timeout(clock::now()),
                _ = beat.tick() => self.beat(),
            }
            self.health.watchdog.touch();
            self.expire_stores();
            self.effects();
            self.follow_slots();
            self.leave_when_done();
        }
        self.remember();
        self.net.close().await;
        // Nobody hears how the last writes went.
        self.rx.close();
        let waited = self.drained.map(|since| clock::now().since(since).to_std());
        let wait = disk::LAST_WAIT.saturating_sub(waited.unwrap_or_default());
        Ended {
            finished: self.core.jobs().all(|job| job.is_settled()),
            state: self.disk.close(wait).await,
        }
    }

    /// Tells the service manager; a manager that does not listen is no reason to stop.
    fn tell_manager(&self, tell: impl FnOnce(&Notifier) -> std::io::Result<()>) {
        if let Some(notifier) = &self.notifier
            && let Err(error) = tell(notifier)
        {
            tracing::debug!(%error, "the service manager was not told");
        }
    }

    fn beat(&mut self) {
        if self.peers_changed && !self.writes_peers {
            self.peers_changed = false;
            self.remember();
        }
        self.tell_manager(Notifier::watchdog);
        if self.core.is_draining() {
            self.tell_manager(|n| n.extend_timeout(Duration::from_secs(10)));
        }
    }

    fn due(&self) -> Option<Time> {
        let core = self.core.poll_timeout().map(|(at, _)| at);
        let others = [self.stays_until(), self.stores_due(), self.held.due()];
        core.into_iter().chain(others.into_iter().flatten()).min()
    }

    /// A drained agent goes once its launchers are gone; the others have what they need by then.
    fn leave_when_done(&mut self) {
        let now = clock::now();
        if !self.core.is_draining() || self.core.is_drain_awaited(now) {
            self.drained = None;
            return;
        }
        self.drained.get_or_insert(now);
        self.quit |= self.stays_until().is_some_and(|until| now >= until);
    }

    /// A drained agent stays for what others may still ask, and until what waits for its disk is said.
    fn stays_until(&self) -> Option<Time> {
        let since = self.drained?;
        let writes = clock::now() >= since + LINGER && !self.core.is_carried_out();
        Some(match writes {
            true => since + Span::from(disk::LAST_WAIT),
            false => since + LINGER,
        })
    }

    fn apply(&mut self, event: Event) {
        muster_fault::point_on("agent.event", || format!("{event:?}"));
        if let Err(error) = self.core.handle(event, clock::now()) {
            self.warn_refused(&error.to_string());
        }
    }

    fn on_net(&mut self, event: NetEvent) {
        match event {
            NetEvent::Listening(addr) => {
                tracing::info!(%addr, "listening for agents");
                self.listening.insert(addr);
            }
            NetEvent::Connected {
                node,
                addr,
                observed,
                clock_ahead_ms,
            } => {
                tracing::info!(%node, %addr, "connected");
                self.facts.clocks.insert(node, clock_ahead_ms);
                self.metrics.peers_connected.inc();
                self.peers_changed = true;
                self.refused.remove(&addr.to_string());
                self.refused.remove(&addr.ip().to_string());
                self.facts.reached(addr, true);
                self.apply(Event::Connected {
                    node,
                    addr,
                    observed,
                });
            }
            NetEvent::Answers { addr } => {
                self.facts.reached(addr, false);
                self.refused.remove(&addr.to_string());
            }
            NetEvent::Looked { name, failed } => match failed {
                Some(why) => {
                    let text = format!(
                        "the name {name} cannot be resolved ({why}): correct --rdzv-endpoint or `bootstrap`, or the name service"
                    );
                    self.facts.unresolved.insert(name.clone(), why);
                    self.warn_launchers(name, text);
                }
                None => {
                    self.facts.unresolved.remove(&name);
                    self.refused.remove(&name);
                }
            },
            NetEvent::Disconnected { node, why } => {
                tracing::info!(%node, %why, "disconnected");
                self.facts.clocks.remove(&node);
                self.refused.remove(&node.hex());
                self.metrics.peers_connected.dec();
                self.apply(Event::Disconnected { node });
            }
            NetEvent::Message { from, bytes } => {
                self.metrics.messages_received.inc();
                match Message::decode(&bytes) {
                    Ok(message) => {
                        let answer = matches!(message, Message::Pong { .. });
                        self.apply(Event::Message { from, message });
                        if answer && let Some(rtt) = self.core.rtt(from) {
                            self.metrics.heartbeat_rtt(rtt.to_std());
                        }
                    }
                    Err(error) => {
                        tracing::warn!(%from, %error, "a message that cannot be used; cut off");
                        self.net.disconnect(from);
                    }
                }
            }
            NetEvent::Refused {
                addr,
                dialled: true,
                why: Refusal::Unreachable(why),
            } if self.core.peers().has_left(addr) => {
                tracing::info!(%addr, %why, "a first peer that left is not there");
            }
            NetEvent::Refused { addr, dialled, why } => {
                tracing::warn!(%addr, %why, "refused");
                self.metrics.auth_failure(refusal_word(&why));
                self.facts.refused(addr, why.clone());
                match (&why, dialled) {
                    (Refusal::Full, _) => {}
                    // An agent that is not there yet may still come.
                    (Refusal::Unreachable(_), true) => {
                        let tx = self.tx.clone();
                        tokio::spawn(async move {
                            tokio::time::sleep(UNANSWERED).await;
                            let _over = tx.send(Input::Unanswered { addr }).await;
                        });
                    }
                    (_, true) => {
                        let text = format!("{addr} was called, but {why}");
                        self.warn_launchers(addr.to_string(), text);
                    }
                    // Its user watches the terminal of one node, perhaps this one. Strangers have no agent.
                    (
                        Refusal::WrongSecret
                        | Refusal::NoSecret
                        | Refusal::SecretWanted
                        | Refusal::OtherCluster { .. }
                        | Refusal::OtherVersion { .. },
                        false,
                    ) => {
                        let host = addr.ip().to_string();
                        let text = format!("an agent on {host} called, but {why}");
                        self.warn_launchers(host, text);
                    }
                    (_, false) => {}
                }
            }
        }
    }

    fn on_input(&mut self, input: Input) {
        match input {
            Input::Accepted(conn) => self.on_client(conn),
            Input::Frame { conn, frame, fds } => self.on_frame(conn, &frame, fds),
            Input::Closed(conn) => self.on_closed(conn),
            Input::LauncherLooked { conn, guard } => {
                self.apply(Event::LauncherGone { conn, guard });
                match guard.is_gone() {
                    false => self.looks.answers(conn, guard),
                    true => self.looks.end(conn),
                }
            }
            Input::Probed {
                node,
                id,
                agent,
                guard,
            } => self.apply(Event::Probed {
                node,
                id,
                agent,
                guard,
            }),
            Input::Unanswered { addr } => {
                if let Some(why) = self.facts.unreachable(addr) {
                    let text = format!("{addr} was called, but {why}");
                    self.warn_launchers(addr.to_string(), text);
                }
            }
            Input::Stored { key, took, result } => self.stored(key, took, result),
            Input::PeersStored => self.writes_peers = false,
            Input::Drain { grace, reason } => {
                let grace = grace.unwrap_or(self.sigterm_grace);
                tracing::info!(%grace, reason, "draining this node");
                self.tell_manager(|n| n.stopping("draining"));
                self.apply(Event::Drain {
                    grace_ms: u32::try_from(grace.as_millis()).unwrap_or(u32::MAX),
                    reason,
                });
            }
            Input::Quit => self.quit = true,
        }
    }

    /// Keeps the addresses of peers for the next start, and what their hosts are called: of those that are
    /// connected, then of those seen last. A node that is cut off from all of them finds them again after a restart.
    fn remember(&mut self) {
        let known = self.core.peers();
        let mut peers: Vec<_> = known.map.iter().collect();
        peers.sort_by_key(|(_, p)| std::cmp::Reverse((p.connected, p.seen)));
        let addrs = peers.iter().filter_map(|(_, p)| p.addr);
        let met = peers.iter().map(|(node, _)| **node);
        let before = known.hosts.keys().filter(|n| !known.map.contains_key(n));
        let hosts = met.chain(before.copied());
        let hosts = hosts.filter_map(|n| Some((n, known.host(n)?.to_owned())));
        let remembered = Remembered {
            addrs: addrs.take(REMEMBERED).collect(),
            hosts: hosts.take(REMEMBERED).collect(),
        };
        if let Ok(bytes) = codec::encode_frame(&remembered) {
            self.writes_peers = true;
            self.disk.write(disk::Write::Peers { bytes });
        }
    }
}

/// Peers that are remembered over a restart.
const REMEMBERED: usize = 256;

/// The memory of them, only as a hint.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Remembered {
    addrs: Vec<SocketAddr>,
    hosts: Vec<(NodeId, String)>,
}

fn remembered(state: &mut StateDir) -> Remembered {
    match state.load_peers() {
        Ok(Some(bytes)) => codec::decode_frame(&bytes).unwrap_or_default(),
        Ok(None) => Remembered::default(),
        Err(error) => {
            tracing::warn!(%error, "the peers' addresses of the last run are lost");
            Remembered::default()
        }
    }
}

fn identity(state: &StateDir) -> Option<Identity> {
    let pair = state.identity().clone().try_into_ed25519().ok()?;
    let mut secret = [0u8; Identity::SECRET_LEN];
    for (byte, from) in secret.iter_mut().zip(pair.secret().as_ref()) {
        *byte = *from;
    }
    Identity::from_secret(secret)
}

fn blob_name(key: &JobKey) -> String {
    let text = format!("{}\0{}\0{}", key.cluster, key.owner, key.id);
    let hex = blake3::hash(text.as_bytes()).to_hex();
    hex.get(..32).unwrap_or_default().to_owned()
}

fn refusal_word(why: &crate::net::Refusal) -> &'static str {
    match why {
        Refusal::WrongSecret => "wrong_secret",
        Refusal::NoSecret | Refusal::SecretWanted => "no_secret",
        Refusal::OtherCluster { .. } => "other_cluster",
        Refusal::OtherVersion { .. } => "other_version",
        Refusal::NotMuster | Refusal::Malformed => "malformed",
        Refusal::TimedOut => "timed_out",
        Refusal::Full => "full",
        Refusal::Unreachable(_) => "unreachable",
    }
}

async fn sleep_until(at: Option<Time>) {
    match at {
        Some(at) => tokio::time::sleep(at.since(clock::now()).to_std()).await,
        None => std::future::pending().await,
    }
}

async fn accept(listener: Listener, tx: mpsc::Sender<Input>) {
    loop {
        match listener.accept().await {
            Ok(conn) => {
                if tx.send(Input::Accepted(conn)).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                tracing::warn!(%error, "a connection to the socket was not accepted");
                // An error of the listener itself (no descriptors left) would repeat at once.
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        if tx.is_closed() {
            return;
        }
    }
}
