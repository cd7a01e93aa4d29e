//! Places of connections that have proven nothing, by the host that they are from.
//!
//! A host is let in while it has fewer places than are free: the first may take half of them, the next a quarter, and
//! so on, so none can take those of others, and one that is alone has enough. (Dynamic thresholds: Choudhury and Hahne,
//! IEEE/ACM Transactions on Networking 6(2), 1998.)

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use super::serve::lock;

/// All places, and who has how many of them.
#[derive(Debug)]
pub(super) struct Places {
    most: usize,
    taken: Mutex<BTreeMap<u64, usize>>,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    of: Arc<Places>,
    host: u64,
}

/// The owner of an IPv6 address has its whole network.
fn host(ip: IpAddr) -> u64 {
    match ip.to_canonical() {
        // Of a network that nobody has, ::/64.
        IpAddr::V4(ip) => u32::from(ip).into(),
        IpAddr::V6(ip) => (u128::from(ip) >> 64) as u64,
    }
}

impl Places {
    pub(super) fn new(most: usize) -> Arc<Places> {
        Arc::new(Places {
            most,
            taken: Mutex::default(),
        })
    }

    /// A place for a connection from there, if it may have one more.
    pub(super) fn take(self: &Arc<Self>, ip: IpAddr) -> Option<Place> {
        let host = host(ip);
        let mut taken = lock(&self.taken);
        let free = self.most.saturating_sub(taken.values().sum());
        let mine = taken.get(&host).copied().unwrap_or(0);
        if mine >= free {
            return None;
        }
        taken.insert(host, mine + 1);
        drop(taken);
        let of = self.clone();
        Some(Place { of, host })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = lock(&self.of.taken);
        if let Some(count) = taken.get_mut(&self.host) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.host);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn take_all(places: &Arc<Places>, ip: IpAddr) -> Vec<Place> {
        std::iter::from_fn(|| places.take(ip)).collect()
    }

    #[test]
    fn each_host_leaves_as_many_places_as_it_takes() {
        let places = Places::new(256);
        let hosts = [
            "10.0.0.1",
            "10.0.0.2",
            "2001:db8::1",
            "2001:db8:0:1::1",
            "::1",
        ]
        .map(ip);
        let taken = hosts.map(|host| take_all(&places, host));
        assert_eq!(taken.each_ref().map(Vec::len), [128, 64, 32, 16, 8]);
        // Others find one still; who has many does not, by any of its addresses.
        assert!(places.take(ip("10.0.0.3")).is_some());
        assert!(places.take(ip("::ffff:10.0.0.1")).is_none());
        assert!(places.take(ip("2001:db8::2")).is_none());
        // All come back.
        drop(taken);
        assert_eq!(take_all(&places, hosts[4]).len(), 128);
        assert!(lock(&places.taken).is_empty());
    }
}
