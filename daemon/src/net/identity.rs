//! Identity of an agent, and how libp2p writes the same things.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
};

use libp2p::{
    Multiaddr, PeerId,
    identity::{self, ed25519},
    multiaddr::Protocol,
};
use muster_protocol::NodeId;

/// An agent's Ed25519 key pair. Its public half is the [`NodeId`].
#[derive(Clone)]
pub struct Identity(ed25519::Keypair);

impl Identity {
    /// Bytes of the secret half, as kept in the state directory.
    pub const SECRET_LEN: usize = 32;

    /// A new identity from the operating system's randomness.
    pub fn generate() -> Identity {
        Identity(ed25519::Keypair::generate())
    }

    /// The identity that [`secret`](Self::secret) was taken from. Every 32 bytes are a valid
    /// Ed25519 seed (RFC 8032, section 5.1.5), so this is `None` only if the library disagrees.
    pub fn from_secret(mut secret: [u8; Self::SECRET_LEN]) -> Option<Identity> {
        let secret = ed25519::SecretKey::try_from_bytes(&mut secret).ok()?;
        Some(Identity(ed25519::Keypair::from(secret)))
    }

    /// The secret half. Anyone who has it can be this agent: store it readable by its owner only.
    pub fn secret(&self) -> [u8; Self::SECRET_LEN] {
        let mut out = [0; Self::SECRET_LEN];
        for (byte, from) in out.iter_mut().zip(self.0.secret().as_ref()) {
            *byte = *from;
        }
        out
    }

    pub fn node(&self) -> NodeId {
        NodeId(self.0.public().to_bytes())
    }

    pub(super) fn keypair(&self) -> identity::Keypair {
        identity::Keypair::from(self.0.clone())
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", self.node())
    }
}

/// The Ed25519 key inside a peer id; `None` for any other kind of key.
///
/// libp2p puts keys of up to 42 encoded bytes into the id itself (peer-ids specification,
/// "identity" multihash, code 0), and an Ed25519 key takes 36.
pub fn node_of(peer: &PeerId) -> Option<NodeId> {
    let hash = peer.as_ref();
    if hash.code() != 0 {
        return None;
    }
    let key = identity::PublicKey::try_decode_protobuf(hash.digest()).ok()?;
    Some(NodeId(key.try_into_ed25519().ok()?.to_bytes()))
}

/// The peer id of a node; `None` where the bytes are no point of the curve.
pub fn peer_of(node: &NodeId) -> Option<PeerId> {
    let key = ed25519::PublicKey::try_from_bytes(&node.0).ok()?;
    Some(PeerId::from_public_key(&identity::PublicKey::from(key)))
}

/// How a socket address is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Carrier {
    Tcp,
    Quic,
}

pub(super) fn to_multiaddr(addr: SocketAddr, carrier: Carrier) -> Multiaddr {
    let base = Multiaddr::from(addr.ip());
    match carrier {
        Carrier::Tcp => base.with(Protocol::Tcp(addr.port())),
        Carrier::Quic => base.with(Protocol::Udp(addr.port())).with(Protocol::QuicV1),
    }
}

/// The address and port at the front of a multiaddress; what comes behind is left out.
pub(super) fn from_multiaddr(addr: &Multiaddr) -> Option<(SocketAddr, Carrier)> {
    let mut parts = addr.iter();
    let ip: IpAddr = match parts.next()? {
        Protocol::Ip4(ip) => ip.into(),
        Protocol::Ip6(ip) => ip.into(),
        _ => return None,
    };
    match parts.next()? {
        Protocol::Tcp(port) => Some((SocketAddr::new(ip, port), Carrier::Tcp)),
        Protocol::Udp(port) => Some((SocketAddr::new(ip, port), Carrier::Quic)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_id_and_a_peer_id_name_the_same_key() {
        let identity = Identity::generate();
        let peer = PeerId::from_public_key(&identity.keypair().public());
        assert_eq!(node_of(&peer), Some(identity.node()));
        assert_eq!(peer_of(&identity.node()), Some(peer));
        let again = Identity::from_secret(identity.secret()).unwrap();
        assert_eq!(again.node(), identity.node());
        assert!(!format!("{identity:?}").contains(&identity.node().hex()));
    }

    #[test]
    fn a_peer_id_of_another_kind_is_no_node() {
        assert_eq!(node_of(&PeerId::random()), None);
    }

    #[test]
    fn addresses_go_both_ways() {
        for text in ["10.1.2.3:7171", "[fd00::7]:1"] {
            let addr: SocketAddr = text.parse().unwrap();
            for carrier in [Carrier::Tcp, Carrier::Quic] {
                let there = to_multiaddr(addr, carrier);
                assert_eq!(from_multiaddr(&there), Some((addr, carrier)));
            }
        }
        let other: Multiaddr = "/dns4/example.org/tcp/1".parse().unwrap();
        assert_eq!(from_multiaddr(&other), None);
    }
}
