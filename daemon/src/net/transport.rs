//! The libp2p swarm: TCP with Noise and yamux, QUIC and mDNS where asked for, and limits.

use std::{
    collections::HashMap,
    error::Error,
    io,
    net::{Ipv4Addr, SocketAddr},
    num::NonZeroUsize,
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr as UnixAddr, UnixListener},
    },
    time::Duration,
};

use futures::StreamExt;

use libp2p::{
    PeerId, Swarm, Transport,
    connection_limits::{self, ConnectionLimits},
    core::{
        muxing::StreamMuxerBox,
        transport::{Boxed, ListenerId, OrTransport, timeout::TransportTimeoutError},
        upgrade::{NegotiationError, ProtocolError, Version},
    },
    futures::future::Either,
    identity::Keypair,
    mdns, noise, quic,
    swarm::{
        self, NetworkBehaviour, SwarmEvent, behaviour::toggle::Toggle,
        derive_prelude::Either as Layer,
    },
    tcp, yamux,
};

use super::{
    Limits, NetConfig, StartError,
    identity::{Carrier, from_multiaddr, to_multiaddr},
    queue::Shared,
    substream,
};

/// How long listening may take to begin.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often, and how far apart, an agent asks for its turn to listen: a turn takes microseconds.
const CLAIM_TRIES: u32 = 100;
const CLAIM_PAUSE: Duration = Duration::from_millis(5);
/// Substreams of one connection at once: one is used.
const MAX_STREAMS: usize = 4;
/// Bytes under way on a QUIC stream; a TCP connection's yamux stream starts with as many.
const WINDOW: u32 = 256 * 1024;

#[derive(NetworkBehaviour)]
pub(super) struct Behaviour {
    limits: connection_limits::Behaviour,
    pub(super) substream: substream::Behaviour,
    mdns: Toggle<mdns::tokio::Behaviour>,
}

/// A swarm that listens nowhere yet.
pub(super) fn swarm(config: &NetConfig) -> Result<Swarm<Behaviour>, StartError> {
    let keypair = config.identity.keypair();
    let peer = keypair.public().to_peer_id();
    let limits = &config.limits;
    let total = limits.peers.saturating_add(limits.strangers);
    let connection_limits = ConnectionLimits::default()
        .with_max_established_per_peer(Some(limits.per_peer))
        .with_max_established(Some(total));
    let mdns = match config.mdns {
        true => Some(
            mdns::tokio::Behaviour::new(mdns::Config::default(), peer).map_err(StartError::Mdns)?,
        ),
        false => None,
    };
    let behaviour = Behaviour {
        limits: connection_limits::Behaviour::new(connection_limits),
        substream: substream::Behaviour::new(limits.strangers as usize, limits.handshake),
        mdns: Toggle::from(mdns),
    };
    let settings = swarm::Config::with_tokio_executor()
        .with_max_negotiating_inbound_streams(MAX_STREAMS)
        .with_notify_handler_buffer_size(NonZeroUsize::MIN)
        .with_per_connection_event_buffer_size(2)
        // The agent's own handler keeps connections alive; this is for what remains.
        .with_idle_connection_timeout(limits.silence);
    let transport = transport(&keypair, config.quic, limits)?;
    Ok(Swarm::new(transport, behaviour, peer, settings))
}

fn transport(
    keypair: &Keypair,
    with_quic: bool,
    limits: &Limits,
) -> Result<Boxed<(PeerId, StreamMuxerBox)>, StartError> {
    let encryption =
        noise::Config::new(keypair).map_err(|e| StartError::Encryption(e.to_string()))?;
    let mut mux = yamux::Config::default();
    mux.set_max_num_streams(MAX_STREAMS);
    let tcp = tcp::tokio::Transport::new(tcp::Config::new().nodelay(true))
        .upgrade(Version::V1Lazy)
        .authenticate(encryption)
        .multiplex(mux)
        .timeout(limits.handshake)
        .map_err(|error| match error {
            TransportTimeoutError::Timeout => io::ErrorKind::TimedOut.into(),
            TransportTimeoutError::TimerError(error) => error,
            TransportTimeoutError::Other(Layer::Left(Layer::Left(socket))) => socket,
            TransportTimeoutError::Other(Layer::Left(Layer::Right(e))) => plain(e),
            TransportTimeoutError::Other(Layer::Right(e)) => plain(e),
        })
        .map(|(peer, muxer), _| (peer, StreamMuxerBox::new(muxer)))
        .boxed();
    if !with_quic {
        return Ok(tcp);
    }
    let mut settings = quic::Config::new(keypair);
    settings.handshake_timeout = limits.handshake;
    settings.max_idle_timeout = 10_000;
    settings.keep_alive_interval = Duration::from_secs(4);
    settings.max_concurrent_stream_limit = MAX_STREAMS as u32;
    settings.max_stream_data = WINDOW;
    settings.max_connection_data = WINDOW * MAX_STREAMS as u32;
    let quic = quic::tokio::Transport::new(settings)
        .map(|(peer, muxer), _| (peer, StreamMuxerBox::new(muxer)));
    let both = OrTransport::new(quic, tcp).map(|either, _| match either {
        Either::Left(out) | Either::Right(out) => out,
    });
    Ok(both.boxed())
}

/// An upgrade's error as an I/O error whose kind tells a peer that hung up from one that talks
/// nonsense ([`io::ErrorKind::InvalidData`]), and from one that ends the negotiation
/// ([`io::ErrorKind::ConnectionAborted`]): so does an agent that only looks whether this one is there. libp2p does not
/// export the upgrade's own type.
fn plain(upgrade: impl Error + Send + Sync + 'static) -> io::Error {
    let kind = match upgrade.source() {
        Some(cause) => match (
            cause.downcast_ref(),
            cause.downcast_ref(),
            cause.downcast_ref(),
        ) {
            (Some(NegotiationError::ProtocolError(ProtocolError::IoError(e))), _, _) => e.kind(),
            (_, Some(noise::Error::Io(e)), _) | (_, _, Some(e)) => e.kind(),
            (Some(NegotiationError::Failed), ..) => io::ErrorKind::ConnectionAborted,
            (Some(_), ..) | (_, Some(_), _) => io::ErrorKind::InvalidData,
            _ => io::ErrorKind::Other,
        },
        None => io::ErrorKind::Other,
    };
    io::Error::new(kind, upgrade)
}

/// libp2p lets several processes of one user listen on the same port (SO_REUSEPORT) and the kernel
/// spreads connections over them: an agent started twice would go unnoticed. So a plain socket has
/// to get the address first.
fn check_free(addr: SocketAddr) -> Result<(), StartError> {
    match addr.port() {
        0 => Ok(()),
        _ => std::net::TcpListener::bind(addr)
            .map(drop)
            .map_err(|source| StartError::Listen { addr, source }),
    }
}

/// Held from [`check_free`] until libp2p listens, so that two agents that start at once do not both
/// find the port free. A name in the network namespace, like the port itself; it goes with its
/// process. A process that squats on the name only takes this protection away: the wait ends.
async fn one_at_a_time(port: u16) -> Option<UnixListener> {
    if port == 0 {
        return None;
    }
    let name = format!("muster-listen-{port}");
    let name = UnixAddr::from_abstract_name(name).ok()?;
    for _ in 0..CLAIM_TRIES {
        match UnixListener::bind_addr(&name) {
            Ok(held) => return Some(held),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(_) => return None,
        }
        tokio::time::sleep(CLAIM_PAUSE).await;
    }
    None
}

/// Listens on every configured address and waits until each has begun.
pub(super) async fn listen(
    swarm: &mut Swarm<Behaviour>,
    config: &NetConfig,
    shared: &Shared,
) -> Result<(), StartError> {
    let mut waiting: HashMap<ListenerId, SocketAddr> = HashMap::new();
    for addr in &config.listen {
        let held = one_at_a_time(addr.port()).await;
        check_free(*addr)?;
        let id = listen_on(swarm, *addr, Carrier::Tcp)?;
        drop(held);
        waiting.insert(id, *addr);
    }
    let begun = tokio::time::timeout(PATIENCE, async {
        while !waiting.is_empty() {
            let SwarmEvent::NewListenAddr {
                listener_id,
                address,
            } = swarm.select_next_some().await
            else {
                continue;
            };
            let Some((addr, Carrier::Tcp)) = from_multiaddr(&address) else {
                continue;
            };
            shared.listen(addr);
            let asked = waiting.remove(&listener_id);
            if let Some(asked) = asked.filter(|_| config.quic) {
                let same_port = SocketAddr::new(asked.ip(), addr.port());
                listen_on(swarm, same_port, Carrier::Quic)?;
            }
        }
        Ok(())
    });
    match begun.await {
        Ok(result) => result,
        Err(_) => Err(StartError::Listen {
            addr: waiting
                .into_values()
                .next()
                .unwrap_or((Ipv4Addr::UNSPECIFIED, 0).into()),
            source: io::ErrorKind::TimedOut.into(),
        }),
    }
}

fn listen_on(
    swarm: &mut Swarm<Behaviour>,
    addr: SocketAddr,
    carrier: Carrier,
) -> Result<ListenerId, StartError> {
    swarm
        .listen_on(to_multiaddr(addr, carrier))
        .map_err(|error| StartError::Listen {
            addr,
            source: io::Error::other(error),
        })
}
