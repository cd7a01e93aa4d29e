//! A port for the next generation's master, held until its workers run.
//!
//! The socket is bound with `SO_REUSEADDR` and never listens. On Linux that keeps the port from
//! everyone who asks for any free one and from everyone who binds without the option, while a
//! `TCPStore` (which sets it) can bind and listen. Held past the spawn, so that no one slips in
//! between.

use std::collections::VecDeque;
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

/// Ports of the masters that this launcher's workers had, the newest last. A worker of an older generation
/// that runs on somewhere may still call there.
#[derive(Debug, Default)]
pub struct Masters(VecDeque<u16>);

impl Masters {
    /// So many are remembered.
    const KNOWN: usize = 1024;
    /// Ports that are looked at for one that none of them had.
    const TRIES: usize = 16;

    /// A generation's workers meet there.
    pub fn met(&mut self, port: u16) {
        self.0.retain(|known| *known != port);
        self.0.push_back(port);
        if self.0.len() > Self::KNOWN {
            self.0.pop_front();
        }
    }

    /// Reserves a port that none of them had, where one is found soon.
    ///
    /// # Errors
    /// No port can be reserved.
    pub fn reserve_another(
        &self,
        mut reserve: impl FnMut() -> io::Result<ReservedPort>,
    ) -> io::Result<ReservedPort> {
        // Held meanwhile, so that each is another one.
        let mut refused = Vec::new();
        for _ in 1..Self::TRIES {
            let port = reserve()?;
            if !self.0.contains(&port.port()) {
                return Ok(port);
            }
            refused.push(port);
        }
        reserve()
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
    fn a_master_gets_a_port_that_none_before_had() {
        let mut masters = Masters::default();
        let free = ReservedPort::reserve_on(ANY).unwrap();
        let ports: Vec<ReservedPort> = (0..3)
            .map(|_| ReservedPort::reserve_on(ANY).unwrap())
            .collect();
        for _ in 0..2 {
            ports.iter().for_each(|port| masters.met(port.port()));
        }
        let expected = free.port();
        let mut offered = ports.into_iter().chain([free]);
        let reserved = masters.reserve_another(|| Ok(offered.next().unwrap()));
        assert_eq!(reserved.unwrap().port(), expected);
        // A used one is better than none.
        let all: Vec<u16> = (1..=u16::MAX).collect();
        all.iter().for_each(|port| masters.met(*port));
        assert_eq!(masters.0.len(), Masters::KNOWN);
        assert!(
            masters
                .reserve_another(|| ReservedPort::reserve_on(ANY))
                .is_ok()
        );
        let none = masters.reserve_another(|| Err(io::ErrorKind::AddrInUse.into()));
        assert_eq!(none.unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }

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
