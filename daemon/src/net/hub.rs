//! The one task that owns the swarm: it dials, settles on one connection per peer, and passes
//! addresses on. It never waits for the agent or for a link; they wait for it.

mod settle;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use futures::StreamExt;
use libp2p::{
    Stream, Swarm,
    core::ConnectedPoint,
    mdns,
    swarm::{ConnectionId, DialError, SwarmEvent, dial_opts::DialOpts},
};
use muster_protocol::NodeId;
use rand::seq::IteratorRandom;
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
};

use super::{
    Command, Gone, NetConfig, NetEvent, Refusal, StartError,
    book::{self, Book},
    handshake::{Hello, MAX_CLUSTER, Tag},
    identity::{Carrier, from_multiaddr, node_of, to_multiaddr},
    link::{Context, FromLink, Link},
    names,
    queue::{Frame, Queue, Shared},
    refusals::{self, Reported},
    transport::{self, Behaviour, BehaviourEvent},
};
use crate::clock;

/// How long saying goodbye may take.
const PATIENCE: Duration = Duration::from_secs(1);

/// A connection from its establishment to the end of both the swarm's and the link's part in it.
struct Conn {
    node: NodeId,
    remote: SocketAddr,
    /// The address that was dialled; `None` for an inbound connection.
    dialled: Option<SocketAddr>,
    stream: Option<oneshot::Sender<Option<Stream>>>,
    end: watch::Sender<Option<Gone>>,
    since: Instant,
    link_ended: bool,
    swarm_closed: bool,
}

/// A peer with an established connection.
struct Peer {
    connection: ConnectionId,
    tag: Tag,
    instance: u64,
    queue: Queue,
    /// Where it accepts connections, if it does.
    listens: Option<SocketAddr>,
    over_loopback: bool,
    /// Resolves when the connection's link has reported its end.
    done: oneshot::Receiver<()>,
}

pub(super) struct Hub {
    swarm: Swarm<Behaviour>,
    config: NetConfig,
    node: NodeId,
    instance: u64,
    context: Arc<Context>,
    shared: Arc<Shared>,
    book: Book,
    conns: HashMap<ConnectionId, Conn>,
    peers: BTreeMap<NodeId, Peer>,
    /// For whom others make room.
    preferred: BTreeSet<NodeId>,
    dials: HashMap<ConnectionId, SocketAddr>,
    lost: BTreeMap<NodeId, Vec<Tag>>,
    reported: Reported,
    tasks: JoinSet<()>,
    from_links: mpsc::Receiver<FromLink>,
    commands: mpsc::Receiver<Command>,
    found: mpsc::Receiver<Vec<SocketAddr>>,
    gossip_at: Instant,
    closing: Option<Closing>,
}

struct Closing {
    until: Instant,
    done: oneshot::Sender<()>,
}

type Started = (Hub, Arc<Shared>, mpsc::Receiver<NetEvent>);

impl Hub {
    /// Checks the configuration and listens.
    pub(super) async fn start(
        mut config: NetConfig,
        commands: mpsc::Receiver<Command>,
    ) -> Result<Started, StartError> {
        let len = config.cluster.len();
        if len == 0 || len > MAX_CLUSTER {
            return Err(StartError::Cluster { len });
        }
        if config.secret.as_ref().is_some_and(Vec::is_empty) {
            return Err(StartError::EmptySecret);
        }
        let first = names::parse(&config.bootstrap)?;
        let mut swarm = transport::swarm(&config)?;
        let shared = Arc::new(Shared::default());
        let (events, told) = mpsc::channel(config.limits.events.max(1));
        let (hub, from_links) = mpsc::channel(256);
        let (find, found) = mpsc::channel(16);
        let now = Instant::now();
        let mut book = Book::new(config.limits.addresses);
        for addr in first.addrs {
            book.add(addr, None, None, now);
        }
        for addr in config.remembered.drain(..) {
            book.add(addr, None, Some(book::FORGET), now);
        }
        transport::listen(&mut swarm, &config, &shared).await?;
        for addr in shared.listening() {
            // There is room, or the agent asked for fewer events than it has addresses.
            let _ = events.try_send(NetEvent::Listening(addr));
        }
        let mut tasks = JoinSet::new();
        for name in first.names {
            tasks.spawn(names::resolve(
                name,
                config.limits.resolve,
                find.clone(),
                events.clone(),
            ));
        }
        let node = config.identity.node();
        let context = Arc::new(Context {
            node,
            version: config.wire_version,
            secret: config.secret.clone().unwrap_or_default(),
            limits: config.limits.clone(),
            shared: shared.clone(),
            events,
            hub,
        });
        let gossip_at = now + book::jitter(config.limits.gossip);
        let hub = Hub {
            swarm,
            config,
            node,
            instance: rand::random(),
            context,
            shared: shared.clone(),
            book,
            conns: HashMap::new(),
            peers: BTreeMap::new(),
            preferred: BTreeSet::new(),
            dials: HashMap::new(),
            lost: BTreeMap::new(),
            reported: Reported::default(),
            tasks,
            from_links,
            commands,
            found,
            gossip_at,
            closing: None,
        };
        Ok((hub, shared, told))
    }

    /// Runs until the agent lets go of [`Net`](super::Net).
    pub(super) async fn run(mut self) {
        loop {
            self.dial_due();
            let wake = self.next_wake();
            tokio::select! {
                event = self.swarm.select_next_some() => self.on_swarm(event),
                Some(event) = self.from_links.recv() => self.on_link(event),
                command = self.commands.recv() => match command {
                    Some(command) => self.on_command(command),
                    None => return,
                },
                Some(addrs) = self.found.recv() => self.on_found(&addrs),
                Some(ended) = self.tasks.join_next() => {
                    if let Err(error) = ended {
                        tracing::error!(%error, "a task of the network layer failed");
                    }
                }
                () = tokio::time::sleep_until(wake.into()) => self.on_wake(),
            }
            if let Some(closing) = self
                .closing
                .take_if(|c| self.conns.is_empty() || c.until <= Instant::now())
            {
                // The caller may have given up waiting.
                let _ = closing.done.send(());
                return;
            }
        }
    }

    fn next_wake(&self) -> Instant {
        let dial = match self.may_dial() {
            true => self.book.next(|n| self.peers.contains_key(n)),
            false => None,
        };
        let closing = self.closing.as_ref().map(|c| c.until);
        [dial, closing]
            .into_iter()
            .flatten()
            .fold(self.gossip_at, Instant::min)
    }

    fn on_wake(&mut self) {
        let now = Instant::now();
        if self.gossip_at > now {
            return;
        }
        self.gossip_at = now + book::jitter(self.config.limits.gossip);
        // Heals what a first exchange missed, at one small message a minute.
        if let Some(node) = self.peers.keys().copied().choose(&mut rand::rng()) {
            self.tell_peers(node);
        }
    }

    fn may_dial(&self) -> bool {
        self.closing.is_none() && self.dials.len() < self.config.limits.dials
    }

    fn dial_due(&mut self) {
        while self.may_dial() {
            let now = Instant::now();
            let Some(due) = self.book.take(now, |n| self.peers.contains_key(n)) else {
                return;
            };
            let carrier = match self.config.quic && due.attempt % 2 == 1 {
                true => Carrier::Quic,
                false => Carrier::Tcp,
            };
            // A new port: dialling from the listening port makes two agents that dial each other
            // meet in one half-open socket.
            let dial = DialOpts::unknown_peer_id()
                .address(to_multiaddr(due.addr, carrier))
                .allocate_new_port()
                .build();
            let id = dial.connection_id();
            match self.swarm.dial(dial) {
                Ok(()) => {
                    self.dials.insert(id, due.addr);
                }
                Err(error) => {
                    tracing::debug!(addr = %due.addr, %error, "cannot dial");
                    self.book.failed(due.addr, now);
                }
            }
        }
    }

    fn on_command(&mut self, command: Command) {
        match command {
            Command::Dial(addr) => self.book.hurry(addr, Instant::now()),
            Command::Disconnect(node) => {
                let conn = self
                    .peers
                    .get(&node)
                    .and_then(|p| self.conns.get(&p.connection));
                if let Some(conn) = conn {
                    conn.end.send_replace(Some(Gone::Local));
                }
            }
            Command::Prefer(nodes) => self.preferred = nodes,
            Command::Close(done) => {
                let established: Vec<_> = self.peers.values().map(|p| p.connection).collect();
                for peer in self.peers.values() {
                    // One that is over already needs no goodbye.
                    let _ = peer.queue.push(Frame::Bye);
                }
                for (id, conn) in &self.conns {
                    if !established.contains(id) {
                        conn.end.send_replace(Some(Gone::Local));
                    }
                }
                self.closing = Some(Closing {
                    until: Instant::now() + PATIENCE,
                    done,
                });
            }
        }
    }

    fn on_found(&mut self, addrs: &[SocketAddr]) {
        let now = Instant::now();
        let own = self.shared.listening();
        for addr in addrs.iter().filter(|a| !own.contains(a)) {
            self.book.add(*addr, None, Some(names::LIFETIME), now);
        }
    }

    fn on_swarm(&mut self, event: SwarmEvent<BehaviourEvent>) {
        match event {
            SwarmEvent::Behaviour(BehaviourEvent::Substream(opened)) => {
                let conn = self.conns.get_mut(&opened.connection);
                if let Some(to_link) = conn.and_then(|c| c.stream.take()) {
                    // A link that is over drops the stream.
                    let _ = to_link.send(opened.stream);
                }
            }
            SwarmEvent::Behaviour(BehaviourEvent::Mdns(mdns::Event::Discovered(found))) => {
                let now = Instant::now();
                for (peer, addr) in found {
                    let Some((addr, Carrier::Tcp)) = from_multiaddr(&addr) else {
                        continue;
                    };
                    let Some(node) = node_of(&peer) else { continue };
                    // Multicast reaches other hosts, whose loopback is not ours.
                    if node != self.node && book::dialable(&addr, false) {
                        let lifetime = mdns::Config::default().ttl;
                        self.book.add(addr, Some(node), Some(lifetime), now);
                    }
                }
            }
            SwarmEvent::ConnectionEstablished {
                peer_id,
                connection_id,
                endpoint,
                ..
            } => {
                self.on_established(connection_id, node_of(&peer_id), &endpoint);
            }
            SwarmEvent::ConnectionClosed { connection_id, .. } => {
                if let Some(conn) = self.conns.get_mut(&connection_id) {
                    // A link that still waits for its stream ends by this; one that reads first
                    // delivers what has arrived.
                    conn.stream = None;
                    conn.swarm_closed = true;
                    self.forget_finished(connection_id);
                }
            }
            SwarmEvent::OutgoingConnectionError {
                connection_id,
                error,
                ..
            } => {
                self.on_dial_failed(connection_id, &error);
            }
            SwarmEvent::IncomingConnectionError {
                send_back_addr,
                error,
                ..
            } => {
                let Some((addr, _)) = from_multiaddr(&send_back_addr) else {
                    return;
                };
                tracing::debug!(%addr, %error, "an inbound connection came to nothing");
                if let Some(why) = refusals::of_inbound(&error) {
                    self.report(addr, false, why);
                }
            }
            SwarmEvent::NewListenAddr { address, .. } => {
                if let Some((addr, Carrier::Tcp)) = from_multiaddr(&address)
                    && self.shared.listen(addr)
                {
                    self.tell(NetEvent::Listening(addr));
                }
            }
            SwarmEvent::ExpiredListenAddr { address, .. } => {
                if let Some((addr, Carrier::Tcp)) = from_multiaddr(&address) {
                    self.shared.unlisten(addr);
                }
            }
            SwarmEvent::ListenerClosed {
                addresses, reason, ..
            } => {
                tracing::error!(?addresses, ?reason, "an address is no longer listened on");
                for (addr, _) in addresses.iter().filter_map(from_multiaddr) {
                    self.shared.unlisten(addr);
                }
            }
            SwarmEvent::ListenerError { error, .. } => {
                tracing::warn!(%error, "cannot accept a connection");
            }
            _ => {}
        }
    }

    fn on_dial_failed(&mut self, id: ConnectionId, error: &DialError) {
        let Some(addr) = self.dials.remove(&id) else {
            return;
        };
        let now = Instant::now();
        tracing::debug!(%addr, %error, "a dial came to nothing");
        match error {
            DialError::LocalPeerId { .. } => self.book.refused(addr, now),
            _ => {
                self.book.failed(addr, now);
                if self.book.given(&addr)
                    && let Some(why) = refusals::of_outbound(error)
                {
                    self.report(addr, true, why);
                }
            }
        }
    }

    fn on_established(&mut self, id: ConnectionId, node: Option<NodeId>, at: &ConnectedPoint) {
        let dialled = self.dials.remove(&id);
        let now = Instant::now();
        let known = node.zip(from_multiaddr(at.get_remote_address()));
        let Some((node, (remote, _))) = known.filter(|_| self.closing.is_none()) else {
            self.swarm.close_connection(id);
            if let Some(addr) = dialled {
                self.book.refused(addr, now);
            }
            return;
        };
        if let Some(addr) = dialled {
            self.book.identify(addr, node);
            if self.book.given(&addr) {
                self.tell(NetEvent::Answers { addr });
            }
            if self.peers.get(&node).is_some_and(|p| self.is_up(p)) {
                self.book.failed(addr, now);
                self.swarm.close_connection(id);
                return;
            }
        }
        let (to_link, stream) = oneshot::channel();
        let (end, ends) = watch::channel(None);
        let link = Link {
            context: self.context.clone(),
            connection: id,
            node,
            dialler: at.is_dialer(),
            hello: self.hello(node, remote.ip()),
            stream,
            end: ends,
        };
        let conn = Conn {
            node,
            remote,
            dialled,
            stream: Some(to_link),
            end,
            since: now,
            link_ended: false,
            swarm_closed: false,
        };
        self.conns.insert(id, conn);
        self.tasks.spawn(link.run());
    }

    fn hello(&self, node: NodeId, remote: IpAddr) -> Hello {
        Hello {
            cluster: self.config.cluster.clone(),
            secured: self.config.secret.is_some(),
            nonce: rand::random(),
            instance: self.instance,
            lost: self.lost.get(&node).cloned().unwrap_or_default(),
            port: self.port_for(remote),
            observed: remote,
            clock_ms: clock::unix_ms(),
        }
    }

    /// The port that somebody at `remote` is told to dial.
    fn port_for(&self, remote: IpAddr) -> u16 {
        let likeness = |addr: &SocketAddr| {
            (
                addr.is_ipv4() == remote.is_ipv4(),
                addr.ip().is_loopback() == remote.is_loopback(),
            )
        };
        self.shared
            .listening()
            .iter()
            .max_by_key(|a| likeness(a))
            .map_or(0, SocketAddr::port)
    }

    /// Tells the agent about a refusal that is news.
    fn report(&mut self, addr: SocketAddr, outbound: bool, why: Refusal) {
        if self.reported.is_news(addr, outbound, &why, Instant::now()) {
            self.tell(NetEvent::Refused {
                addr,
                dialled: outbound,
                why,
            });
        }
    }

    /// For events that nothing depends on: an agent that is behind misses them.
    fn tell(&self, event: NetEvent) {
        if let Err(error) = self.context.events.try_send(event) {
            tracing::warn!(%error, "the agent does not keep up with the network's events");
        }
    }
}
