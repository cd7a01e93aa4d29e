//! Agents find each other, prove that they belong together, and exchange small control messages.
//!
//! Every connection carries one substream. On it the ends first prove the cluster's secret to each
//! other (`handshake`); nothing else is read before. Then control messages travel in order, and
//! each end tells the other which peers it is connected with, so that one first address leads to
//! all. Two agents keep exactly one connection.
//!
//! This module promises to its user: for each peer the events are `Connected`, any number of
//! `Message`, `Disconnected`, in this order; a message that [`Net::send`] took either arrives, in
//! order, or a `Disconnected` follows. Nothing here judges whether a node is alive: a closed
//! connection is only reported.

mod book;
mod handshake;
mod hub;
mod identity;
mod link;
mod names;
mod queue;
mod refusals;
mod substream;
mod transport;

#[cfg(test)]
mod tests;

use std::{
    collections::BTreeSet,
    fmt, io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use muster_protocol::{
    NodeId,
    codec::{MAX_FRAME, WIRE_VERSION},
};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};

pub use identity::{Identity, node_of, peer_of};

/// Settings that an agent needs to take part in a cluster.
pub struct NetConfig {
    pub identity: Identity,
    /// TCP addresses to accept connections on. Port 0 takes a free one.
    pub listen: Vec<SocketAddr>,
    /// Also accept QUIC on the same port numbers, and try it where TCP fails. TCP comes first
    /// because its end of a dead process is seen at once, QUIC's only after ten seconds.
    pub quic: bool,
    /// Agents of other clusters are refused. 1 to 64 bytes.
    pub cluster: String,
    /// Proven by both ends of every connection. `None` is an open cluster: whoever reaches the
    /// port is a member, so the caller has to keep it on loopback.
    pub secret: Option<Vec<u8>>,
    /// First peers: `ip:port`, `[ip]:port` or `name:port`. A name is resolved again every few
    /// seconds, and every address it has is dialled.
    pub bootstrap: Vec<String>,
    /// Look for agents on the LAN by multicast.
    pub mdns: bool,
    /// Where peers were found in an earlier life.
    pub remembered: Vec<SocketAddr>,
    /// Wire version that this agent speaks. Anything but the default only makes sense to a test.
    pub wire_version: u8,
    pub limits: Limits,
}

impl NetConfig {
    /// A configuration that listens nowhere, knows nobody, and has no secret.
    pub fn new(identity: Identity, cluster: impl Into<String>) -> NetConfig {
        NetConfig {
            identity,
            listen: Vec::new(),
            quic: false,
            cluster: cluster.into(),
            secret: None,
            bootstrap: Vec::new(),
            mdns: false,
            remembered: Vec::new(),
            wire_version: WIRE_VERSION,
            limits: Limits::default(),
        }
    }
}

impl fmt::Debug for NetConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NetConfig")
            .field("identity", &self.identity)
            .field("listen", &self.listen)
            .field("quic", &self.quic)
            .field("cluster", &self.cluster)
            .field("secret", &self.secret.as_ref().map(|_| "..."))
            .field("bootstrap", &self.bootstrap)
            .field("mdns", &self.mdns)
            .field("remembered", &self.remembered)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

/// Every bound of the network layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Peers connected at once.
    pub peers: u32,
    /// Inbound connections that have not proven the secret yet; half of them from one host.
    pub strangers: u32,
    /// Connections per peer: until one is settled on, and while dead ones are being closed.
    pub per_peer: u32,
    /// Dials under way at once.
    pub dials: usize,
    /// Addresses known at once.
    pub addresses: usize,
    /// Bytes that may wait for one peer, 64 for each message included.
    pub queue_bytes: usize,
    /// Events that may wait for the agent. When it is full, peers are no longer read.
    pub events: usize,
    /// From an open connection to both proofs.
    pub handshake: Duration,
    /// A connection without traffic says this often that it is there.
    pub keep_alive: Duration,
    /// A connection on which nothing at all arrives for this long is given up.
    pub silence: Duration,
    /// Between two look-ups of a name.
    pub resolve: Duration,
    /// Between two exchanges of peers' addresses with some peer.
    pub gossip: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            peers: 1_024,
            strangers: 128,
            per_peer: 8,
            dials: 32,
            addresses: 4_096,
            queue_bytes: 4 * 1024 * 1024,
            events: 256,
            handshake: Duration::from_secs(3),
            keep_alive: Duration::from_secs(10),
            silence: Duration::from_secs(30),
            resolve: Duration::from_secs(5),
            gossip: Duration::from_secs(60),
        }
    }
}

/// Events on the network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NetEvent {
    /// Connections are accepted on this TCP address.
    Listening(SocketAddr),
    Connected {
        node: NodeId,
        /// Where the peer can be dialled, as far as is known: an address that was dialled, or the
        /// one it came from with the port that it says it listens on.
        addr: SocketAddr,
        /// Our own address as the peer sees it.
        observed: IpAddr,
        /// By how many milliseconds the peer's wall clock was ahead of ours then.
        clock_ahead_ms: i64,
    },
    Disconnected {
        node: NodeId,
        why: Gone,
    },
    /// An agent answers at an address that the user gave: one that is connected already, perhaps, by another
    /// address, or one that does not take part.
    Answers {
        addr: SocketAddr,
    },
    /// The name of a first peer (`name:port`) has no address, and why; or has one again.
    Looked {
        name: String,
        failed: Option<String>,
    },
    Message {
        from: NodeId,
        bytes: Vec<u8>,
    },
    /// No connection came about. Repetitions from the same address are left out for a minute, and
    /// when the agent does not keep up with its events.
    Refused {
        addr: SocketAddr,
        /// Whether this agent called.
        dialled: bool,
        why: Refusal,
    },
}

/// Why a connection is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Gone {
    #[error("the peer closed the connection, or its process ended")]
    Closed,
    #[error("the peer said goodbye")]
    Left,
    #[error("nothing arrived from the peer, not even a sign of life")]
    Silent,
    #[error("more waited for the peer than its queue holds")]
    Overflow,
    #[error("a newer connection with the same peer took its place")]
    Replaced,
    #[error("the peer sent something that is no control message")]
    Malformed,
    #[error("this agent closed it")]
    Local,
    #[error(
        "this agent has as many peers as it may, and made room for a member of one of its jobs"
    )]
    Crowded,
}

/// Why no connection came about.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the cluster secrets differ: give every node the same one")]
    WrongSecret,
    #[error("the other agent has no cluster secret: give it the one of this cluster")]
    NoSecret,
    #[error("the other agent wants a cluster secret and this one has none: configure it here")]
    SecretWanted,
    #[error("the other agent belongs to the cluster {theirs:?}")]
    OtherCluster { theirs: String },
    #[error(
        "the other agent speaks wire version {theirs}: run the same Muster version on every node"
    )]
    OtherVersion { theirs: u8 },
    #[error("whoever is there does not speak Muster")]
    NotMuster,
    #[error("the other agent broke the rules of the handshake")]
    Malformed,
    #[error("the other agent did not finish the handshake in time")]
    TimedOut,
    #[error("the limit on connections is reached")]
    Full,
    #[error("a first peer does not answer ({0}): check the address, and that an agent runs there")]
    Unreachable(io::ErrorKind),
}

/// Why a message was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    #[error("there is no connection to the peer")]
    NotConnected,
    #[error("too much waits for the peer already: its connection is dropped")]
    Overflow,
    #[error("the message has {len} bytes, the limit is {MAX_FRAME}")]
    TooLong { len: usize },
}

/// Why the network layer did not start. Nothing is left behind.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("a cluster's name has 1 to 64 bytes, this one has {len}")]
    Cluster { len: usize },
    #[error("the cluster secret is empty: remove it, or put at least 16 random bytes there")]
    EmptySecret,
    #[error("cannot read the first peer {text:?}: write ip:port or name:port")]
    Bootstrap { text: String },
    #[error("cannot listen on {addr}: choose another address, or stop who listens there")]
    Listen { addr: SocketAddr, source: io::Error },
    #[error("cannot set up encryption: {0}")]
    Encryption(String),
    #[error("cannot use multicast: turn mDNS off, or allow UDP port 5353")]
    Mdns(io::Error),
}

/// The running network layer. Dropping it closes every connection at once; see
/// [`close`](Self::close) for a goodbye.
#[derive(Debug)]
pub struct Net {
    node: NodeId,
    shared: Arc<queue::Shared>,
    commands: mpsc::Sender<Command>,
    task: JoinHandle<()>,
}

/// Requests of the agent to the hub.
#[derive(Debug)]
enum Command {
    Dial(SocketAddr),
    Disconnect(NodeId),
    Prefer(BTreeSet<NodeId>),
    Close(oneshot::Sender<()>),
}

impl Net {
    /// Starts to listen, then runs on a task of its own. Needs a tokio runtime with time and I/O.
    pub async fn start(config: NetConfig) -> Result<(Net, mpsc::Receiver<NetEvent>), StartError> {
        let node = config.identity.node();
        let (commands, orders) = mpsc::channel(64);
        let (hub, shared, events) = hub::Hub::start(config, orders).await?;
        let task = tokio::spawn(hub.run());
        let net = Net {
            node,
            shared,
            commands,
            task,
        };
        Ok((net, events))
    }

    pub fn node(&self) -> NodeId {
        self.node
    }

    /// Puts a message into the peer's queue; never blocks. At most [`MAX_FRAME`] bytes.
    ///
    /// # Errors
    /// Nothing was sent. After [`SendError::Overflow`] a `Disconnected` follows.
    pub fn send(&self, to: NodeId, bytes: Vec<u8>) -> Result<(), SendError> {
        self.shared.send(to, bytes)
    }

    /// Dials an address soon, and again until it is forgotten. False when so many orders wait that
    /// this one was not taken.
    pub fn dial(&self, addr: SocketAddr) -> bool {
        self.commands.try_send(Command::Dial(addr)).is_ok()
    }

    /// Gives a connection up, when the caller knows better than the socket that it is dead; it is
    /// dialled again. False as in [`dial`](Self::dial).
    pub fn disconnect(&self, node: NodeId) -> bool {
        self.commands.try_send(Command::Disconnect(node)).is_ok()
    }

    /// With as many peers as there may be, these are let in all the same: others make room for them.
    /// False as in [`dial`](Self::dial).
    pub fn prefer(&self, nodes: BTreeSet<NodeId>) -> bool {
        self.commands.try_send(Command::Prefer(nodes)).is_ok()
    }

    /// The TCP addresses that connections are accepted on, one for each interface.
    pub fn local_addrs(&self) -> Vec<SocketAddr> {
        self.shared.listening()
    }

    /// Writes what waits, says goodbye to every peer and closes all connections; takes a second at
    /// most.
    pub async fn close(mut self) {
        let (done, told) = oneshot::channel();
        if self.commands.send(Command::Close(done)).await.is_ok() {
            let _ = told.await;
        }
        // The hub ends by itself now.
        let _ = (&mut self.task).await;
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        self.task.abort();
    }
}
