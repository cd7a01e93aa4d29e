//! The own host name, as scripts resolve it, and the interface that peers would be given.

use std::net::{IpAddr, ToSocketAddrs};

use super::Check;
use crate::run::net::{self, Address};

const NAME: &str = "host name";

/// Resolves the own host name as a script does that makes MASTER_ADDR from it. May block.
pub(super) fn host_name() -> Vec<Check> {
    let Some(name) = nix::unistd::gethostname()
        .ok()
        .and_then(|n| n.into_string().ok())
    else {
        return vec![Check::warn(
            NAME,
            "the kernel has no host name",
            "set one: hostnamectl hostname NAME",
        )];
    };
    let found = (name.as_str(), 0u16)
        .to_socket_addrs()
        .map(|all| all.map(|a| a.ip()).collect::<Vec<_>>())
        .map_err(|e| e.to_string());
    vec![resolved(&name, found)]
}

fn resolved(name: &str, found: Result<Vec<IpAddr>, String>) -> Check {
    const FIX: &str = "Muster uses verified addresses and does not need it; scripts that make MASTER_ADDR from the host name do: put this node's address and name into /etc/hosts or DNS";
    match found {
        Err(why) => Check::warn(NAME, format!("{name} does not resolve: {why}"), FIX),
        Ok(all) if all.is_empty() => Check::warn(NAME, format!("{name} has no address"), FIX),
        Ok(mut all) => {
            all.sort();
            all.dedup();
            let texts: Vec<String> = all.iter().map(IpAddr::to_string).collect();
            let detail = format!("{name} is {}", texts.join(", "));
            if all.iter().all(IpAddr::is_loopback) {
                Check::warn(NAME, format!("{detail}: other hosts cannot use that"), FIX)
            } else {
                Check::ok(NAME, detail)
            }
        }
    }
}

/// The addresses of this node, the ones that peers would be given first.
pub(super) fn interfaces() -> Check {
    used(&net::addresses(), &net::offered(None))
}

fn used(all: &[Address], offered: &[IpAddr]) -> Check {
    const NAME: &str = "interfaces";
    let name = |ip: &IpAddr| {
        let owner = all.iter().find(|a| a.ip == *ip);
        let card = owner.map_or("?", |a| a.interface.as_str());
        format!("{ip} ({card})")
    };
    let Some((best, rest)) = offered.split_first() else {
        return Check::fail(
            NAME,
            "no interface is up, not even loopback",
            "ip link set lo up",
        );
    };
    let mut detail = format!("peers would be given {}", name(best));
    if !rest.is_empty() {
        let rest: Vec<String> = rest.iter().map(name).collect();
        detail.push_str(&format!(", then {}", rest.join(", ")));
    }
    if best.is_loopback() {
        return Check::warn(
            NAME,
            detail,
            "only loopback is up: right for a single node; for several, bring a network interface up",
        );
    }
    Check::ok(
        NAME,
        format!("{detail}; `muster run --local-addr` chooses another"),
    )
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|t| t.parse().unwrap()).collect()
    }

    #[test]
    fn a_name_that_only_this_host_understands_is_named() {
        let judge = |found| resolved("n1", found).verdict;
        assert_eq!(judge(Ok(ips(&["10.0.0.1", "127.0.1.1"]))), Verdict::Ok);
        assert_eq!(judge(Ok(ips(&["127.0.1.1"]))), Verdict::Warn);
        assert_eq!(judge(Ok(Vec::new())), Verdict::Warn);
        assert_eq!(judge(Err("no such name".into())), Verdict::Warn);
    }

    #[test]
    fn the_interface_that_would_be_used_comes_first() {
        let all = [Address {
            interface: "eth7".into(),
            ip: "10.0.0.2".parse().unwrap(),
        }];
        let check = used(&all, &ips(&["10.0.0.2", "10.1.0.2"]));
        assert!(
            check
                .detail
                .contains("given 10.0.0.2 (eth7), then 10.1.0.2 (?)")
        );
        assert_eq!(used(&all, &ips(&["127.0.0.1"])).verdict, Verdict::Warn);
        assert_eq!(used(&[], &[]).verdict, Verdict::Fail);
    }
}
