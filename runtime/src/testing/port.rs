//! Ports of this host for groups of tests.

use std::net::SocketAddr;

use socket2::{Domain, Socket, Type};

/// A port that nobody else is given as long as it is held. One that is looked for and freed again may be another
/// test's by the time that a group listens there, and groups of tests have the same secrets.
///
/// Bound, and never listening: who asks for any port gets another one, while a listener, which sets `SO_REUSEADDR`
/// as this does, may have it.
pub(crate) struct HeldPort {
    pub(crate) address: SocketAddr,
    _socket: Socket,
}

impl HeldPort {
    pub(crate) fn new() -> HeldPort {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_reuse_address(true).unwrap();
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        socket.bind(&any.into()).unwrap();
        HeldPort {
            address: socket.local_addr().unwrap().as_socket().unwrap(),
            _socket: socket,
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.address.port()
    }
}
