//! A port for the next generation's master, held until its workers run.
//!
//! The socket is bound with `SO_REUSEADDR` and never listens. On Linux that keeps the port from
//! everyone who asks for any free one and from everyone who binds without the option, while a
//! `TCPStore` (which sets it) can bind and listen. Held past the spawn, so that no one slips in
//! between.

use std::io;
use std::net::{IpAddr, SocketAddr};

use socket2::{Domain, Protocol, Socket, Type};

/// A port that nobody else is given while this lives.
#[derive(Debug)]
pub struct ReservedPort {
    _socket: Socket,
    port: u16,
}

impl ReservedPort {
    /// Reserves a free port on an address; on all of a family for the unspecified one.
    pub fn reserve_on(ip: IpAddr) -> io::Result<ReservedPort> {
        let addr = SocketAddr::new(ip, 0);
        let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        socket.bind(&addr.into())?;
        let port = socket
            .local_addr()?
            .as_socket()
            .ok_or_else(|| io::Error::other("a TCP socket without an address"))?
            .port();
        Ok(ReservedPort {
            _socket: socket,
            port,
        })
    }

    pub fn port(&self) -> u16 {
        self.port
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const ANY: IpAddr = IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED);

    /// Binds as a worker's TCPStore does (dual-stack when `host` is `::`) and takes a connection.
    const STORE: &str = "
import socket, sys
host, port = sys.argv[1], int(sys.argv[2])
s = socket.socket(socket.AF_INET6 if ':' in host else socket.AF_INET)
if ':' in host: s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind((host, port)); s.listen(16)
c = socket.create_connection(('127.0.0.1', port)); s.accept()
";

    #[test]
    fn a_worker_can_listen_on_it_and_nobody_else_gets_it() {
        let held = ReservedPort::reserve_on(ANY).unwrap();
        for host in ["0.0.0.0", "127.0.0.1", "::"] {
            let status = Command::new("python3")
                .args(["-c", STORE, host, &held.port().to_string()])
                .status()
                .unwrap();
            assert!(status.success(), "listening on {host}");
        }
        // Without SO_REUSEADDR the port is refused, and asking for any port never yields it.
        let plain = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        let addr = SocketAddr::from(([0, 0, 0, 0], held.port()));
        assert!(plain.bind(&addr.into()).is_err());
        let others: Vec<ReservedPort> = (0..300)
            .map_while(|_| ReservedPort::reserve_on(ANY).ok())
            .collect();
        assert!(others.len() == 300 && others.iter().all(|o| o.port() != held.port()));
    }
}
