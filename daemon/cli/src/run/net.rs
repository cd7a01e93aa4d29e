//! This network namespace's own addresses and interfaces.

use std::net::{IpAddr, SocketAddr};

use muster_protocol::local::MAX_ADDRS;
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

/// One address of this namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub interface: String,
    pub ip: IpAddr,
}

/// All addresses of interfaces that are up. Empty when the kernel cannot be asked.
pub fn addresses() -> Vec<Address> {
    let Ok(all) = getifaddrs() else {
        return Vec::new();
    };
    all.filter(|a| a.flags.contains(InterfaceFlags::IFF_UP))
        .filter_map(|a| {
            let storage = a.address?;
            let ip = if let Some(v4) = storage.as_sockaddr_in() {
                IpAddr::V4(v4.ip())
            } else {
                IpAddr::V6(storage.as_sockaddr_in6()?.ip())
            };
            Some(Address {
                interface: a.interface_name,
                ip,
            })
        })
        .collect()
}

/// The addresses to offer to peers, best first: the one asked for, then the one that the default
/// route uses, then IPv4 before IPv6 and bridges last. Loopback only when there is nothing else.
pub fn offered(wanted: Option<IpAddr>) -> Vec<IpAddr> {
    order(addresses(), wanted, default_route_ip())
}

fn order(mut all: Vec<Address>, wanted: Option<IpAddr>, route: Option<IpAddr>) -> Vec<IpAddr> {
    let bridge = |name: &str| {
        ["docker", "veth", "virbr", "br-", "cni", "flannel", "cali"]
            .iter()
            .any(|p| name.starts_with(p))
    };
    let link_local = |ip: IpAddr| match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    all.retain(|a| !link_local(a.ip) || Some(a.ip) == wanted);
    if all.iter().any(|a| !a.ip.is_loopback()) {
        all.retain(|a| !a.ip.is_loopback() || Some(a.ip) == wanted);
    }
    all.sort_by_key(|a| {
        (
            Some(a.ip) != wanted,
            Some(a.ip) != route,
            bridge(&a.interface),
            a.ip.is_ipv6(),
        )
    });
    let mut ips: Vec<IpAddr> = Vec::new();
    for address in all {
        if !ips.contains(&address.ip) && ips.len() < MAX_ADDRS {
            ips.push(address.ip);
        }
    }
    ips
}

/// The source address that the kernel would use for the outside. Connecting a UDP socket sends
/// nothing; the target is TEST-NET-3 (RFC 5737).
fn default_route_ip() -> Option<IpAddr> {
    let socket = std::net::UdpSocket::bind(("0.0.0.0", 0)).ok()?;
    socket
        .connect(SocketAddr::from(([203, 0, 113, 1], 9)))
        .ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_unspecified()).then_some(ip)
}

/// The interface for `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME`: the one that owns `local`, the
/// address that peers verified. Loopback is named only when the master is on it too: elsewhere it
/// would be a card on which nobody can be reached.
pub fn interface_for(all: &[Address], local: IpAddr, master: IpAddr) -> Option<String> {
    if local.is_loopback() && !master.is_loopback() {
        return None;
    }
    let owner = all.iter().find(|a| a.ip == local);
    match owner {
        Some(a) => Some(a.interface.clone()),
        // 127.0.0.0/8 is all on one interface, of which only 127.0.0.1 is listed.
        None if local.is_loopback() => all
            .iter()
            .find(|a| a.ip.is_loopback())
            .map(|a| a.interface.clone()),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Address> {
        [
            ("lo", "127.0.0.1"),
            ("docker0", "172.17.0.1"),
            ("eth1", "10.1.0.2"),
            ("eth0", "fd00::2"),
            ("eth0", "10.0.0.2"),
            ("eth0", "fe80::1"),
        ]
        .map(|(interface, ip)| Address {
            interface: interface.into(),
            ip: ip.parse().unwrap(),
        })
        .to_vec()
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn the_default_route_comes_first_and_loopback_never() {
        let route = Some(ip("10.0.0.2"));
        assert_eq!(
            order(all(), None, route),
            ["10.0.0.2", "10.1.0.2", "fd00::2", "172.17.0.1"].map(ip)
        );
        assert_eq!(order(all(), Some(ip("10.1.0.2")), route)[0], ip("10.1.0.2"));
        let lone = all()[..1].to_vec();
        assert_eq!(order(lone, None, None), [ip("127.0.0.1")]);
    }

    #[test]
    fn the_interface_is_the_one_that_peers_reach() {
        let name = |local: &str, master: &str| interface_for(&all(), ip(local), ip(master));
        assert_eq!(name("10.1.0.2", "10.1.0.9").as_deref(), Some("eth1"));
        assert_eq!(name("127.0.0.1", "127.0.0.1").as_deref(), Some("lo"));
        assert_eq!(name("127.0.0.5", "127.0.0.1").as_deref(), Some("lo"));
        assert_eq!(name("127.0.0.1", "10.0.0.2"), None);
        assert_eq!(name("10.9.0.1", "10.0.0.2"), None);
    }

    #[test]
    fn this_machine_has_a_loopback() {
        assert!(addresses().iter().any(|a| a.ip.is_loopback()));
        assert!(!offered(None).is_empty());
    }
}
