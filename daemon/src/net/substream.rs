//! One substream per connection, opened by whoever dialled.
//!
//! libp2p-stream would hand out streams by peer, not by connection, picks any of a peer's
//! connections at random and keeps an entry for each connection that ever was; an agent has to
//! know which connection a proof and a message belong to.

use std::{
    collections::{BTreeMap, VecDeque},
    convert::Infallible,
    fmt,
    net::IpAddr,
    task::{Context, Poll},
    time::Duration,
};

use libp2p::{
    Multiaddr, PeerId, Stream, StreamProtocol,
    core::{Endpoint, transport::PortUse, upgrade::ReadyUpgrade},
    swarm::{
        ConnectionDenied, ConnectionHandler, ConnectionHandlerEvent, ConnectionId, FromSwarm,
        NetworkBehaviour, SubstreamProtocol, THandler, THandlerInEvent, THandlerOutEvent, ToSwarm,
        handler::{ConnectionEvent, FullyNegotiatedInbound, FullyNegotiatedOutbound},
    },
};

use super::identity::from_multiaddr;

/// The name both ends agree on. Only the wire version in the first frame changes, so that
/// agents of different versions can still tell each other so.
const PROTOCOL: StreamProtocol = StreamProtocol::new("/muster/control/1");

/// A connection's substream is there, or the far side does not speak Muster.
pub(super) struct Opened {
    pub(super) connection: ConnectionId,
    pub(super) stream: Option<Stream>,
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Opened({}, {})", self.connection, self.stream.is_some())
    }
}

/// Too many inbound connections are under way that have proven nothing yet.
#[derive(Debug, thiserror::Error)]
#[error("{waiting} connections are already waiting for their proof")]
pub(super) struct TooManyStrangers {
    waiting: usize,
}

pub(super) struct Behaviour {
    opened: VecDeque<Opened>,
    /// Inbound connections, from their first byte until they have proven the cluster's secret.
    strangers: BTreeMap<ConnectionId, Option<IpAddr>>,
    max_strangers: usize,
    open_within: Duration,
}

impl Behaviour {
    /// `max_strangers` bounds the inbound connections that have not proven the cluster's secret.
    /// One host gets half of the places, so that it cannot keep all others out.
    pub(super) fn new(max_strangers: usize, open_within: Duration) -> Behaviour {
        Behaviour {
            opened: VecDeque::new(),
            strangers: BTreeMap::new(),
            max_strangers,
            open_within,
        }
    }

    /// The connection has proven the cluster secret and counts no more as a stranger.
    pub(super) fn proven(&mut self, connection: ConnectionId) {
        self.strangers.remove(&connection);
    }

    fn handler(&self, role: Endpoint) -> Handler {
        Handler {
            ask: role.is_dialer(),
            expects: role.is_listener(),
            out: None,
            open_within: self.open_within,
        }
    }
}

impl NetworkBehaviour for Behaviour {
    type ConnectionHandler = Handler;
    type ToSwarm = Opened;

    fn handle_pending_inbound_connection(
        &mut self,
        connection: ConnectionId,
        _: &Multiaddr,
        remote: &Multiaddr,
    ) -> Result<(), ConnectionDenied> {
        let host = from_multiaddr(remote).map(|(addr, _)| addr.ip());
        let waiting = self.strangers.len();
        let from_there = self.strangers.values().filter(|h| **h == host).count();
        if waiting >= self.max_strangers || from_there >= self.max_strangers.div_ceil(2) {
            return Err(ConnectionDenied::new(TooManyStrangers { waiting }));
        }
        self.strangers.insert(connection, host);
        Ok(())
    }

    fn handle_established_inbound_connection(
        &mut self,
        _: ConnectionId,
        _: PeerId,
        _: &Multiaddr,
        _: &Multiaddr,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        Ok(self.handler(Endpoint::Listener))
    }

    fn handle_established_outbound_connection(
        &mut self,
        _: ConnectionId,
        _: PeerId,
        _: &Multiaddr,
        _: Endpoint,
        _: PortUse,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        Ok(self.handler(Endpoint::Dialer))
    }

    fn on_swarm_event(&mut self, event: FromSwarm<'_>) {
        match event {
            FromSwarm::ListenFailure(c) => {
                self.strangers.remove(&c.connection_id);
            }
            FromSwarm::ConnectionClosed(c) => {
                self.strangers.remove(&c.connection_id);
            }
            _ => {}
        }
    }

    fn on_connection_handler_event(
        &mut self,
        _: PeerId,
        connection: ConnectionId,
        stream: THandlerOutEvent<Self>,
    ) {
        self.opened.push_back(Opened { connection, stream });
    }

    fn poll(&mut self, _: &mut Context<'_>) -> Poll<ToSwarm<Self::ToSwarm, THandlerInEvent<Self>>> {
        // The swarm polls again after each event of a handler, so no waker is kept.
        match self.opened.pop_front() {
            Some(opened) => Poll::Ready(ToSwarm::GenerateEvent(opened)),
            None => Poll::Pending,
        }
    }
}

/// Opens or accepts the one substream and hands it over; closes every other one.
pub(super) struct Handler {
    ask: bool,
    expects: bool,
    out: Option<Option<Stream>>,
    open_within: Duration,
}

impl ConnectionHandler for Handler {
    type FromBehaviour = Infallible;
    type ToBehaviour = Option<Stream>;
    type InboundProtocol = ReadyUpgrade<StreamProtocol>;
    type OutboundProtocol = ReadyUpgrade<StreamProtocol>;
    type InboundOpenInfo = ();
    type OutboundOpenInfo = ();

    fn listen_protocol(&self) -> SubstreamProtocol<Self::InboundProtocol> {
        SubstreamProtocol::new(ReadyUpgrade::new(PROTOCOL), ()).with_timeout(self.open_within)
    }

    /// The agent closes connections itself, by its own rules.
    fn connection_keep_alive(&self) -> bool {
        true
    }

    fn poll(
        &mut self,
        _: &mut Context<'_>,
    ) -> Poll<ConnectionHandlerEvent<Self::OutboundProtocol, (), Self::ToBehaviour>> {
        if self.ask {
            self.ask = false;
            return Poll::Ready(ConnectionHandlerEvent::OutboundSubstreamRequest {
                protocol: self.listen_protocol(),
            });
        }
        match self.out.take() {
            Some(stream) => Poll::Ready(ConnectionHandlerEvent::NotifyBehaviour(stream)),
            None => Poll::Pending,
        }
    }

    fn on_behaviour_event(&mut self, event: Self::FromBehaviour) {
        match event {}
    }

    fn on_connection_event(
        &mut self,
        event: ConnectionEvent<'_, Self::InboundProtocol, Self::OutboundProtocol>,
    ) {
        match event {
            ConnectionEvent::FullyNegotiatedInbound(FullyNegotiatedInbound {
                protocol: stream,
                ..
            }) if self.expects => {
                self.expects = false;
                self.out = Some(Some(stream));
            }
            ConnectionEvent::FullyNegotiatedOutbound(FullyNegotiatedOutbound {
                protocol: stream,
                ..
            }) => self.out = Some(Some(stream)),
            ConnectionEvent::DialUpgradeError(_) => self.out = Some(None),
            // A second inbound stream is dropped here, which resets it.
            _ => {}
        }
    }
}
