//! The addresses that might be peers, and when each is dialled next. Never dials, never reads a
//! clock.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use muster_protocol::NodeId;

/// The first wait after a failure, and after a loss.
const FIRST_WAIT: Duration = Duration::from_millis(50);
/// The longest wait between two dials of an address that does not answer.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// The first and the longest wait after an agent there has refused us, or was ourselves: people
/// have to act first.
const REFUSED_WAIT: Duration = Duration::from_secs(5);
const LONGEST_REFUSED_WAIT: Duration = Duration::from_secs(60);
/// A connection that lived this long counts as a success, and the back-off starts anew.
const SETTLED: Duration = Duration::from_secs(5);
/// How long an address is tried after it was last good.
pub(super) const FORGET: Duration = Duration::from_secs(3600);

#[derive(Debug)]
struct Entry {
    /// The node that was last found there.
    node: Option<NodeId>,
    /// `None` for an address that the user gave.
    expires: Option<Instant>,
    wait: Duration,
    due: Instant,
    dialling: bool,
    attempts: u32,
}

/// An address whose turn it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Due {
    pub(super) addr: SocketAddr,
    /// Counts from 0.
    pub(super) attempt: u32,
}

#[derive(Debug)]
pub(super) struct Book {
    entries: BTreeMap<SocketAddr, Entry>,
    limit: usize,
}

impl Book {
    pub(super) fn new(limit: usize) -> Book {
        Book {
            entries: BTreeMap::new(),
            limit,
        }
    }

    /// Takes an address in, or keeps it for `lifetime` more (`None`: for good). A full book takes
    /// only addresses that the user gave.
    pub(super) fn add(
        &mut self,
        addr: SocketAddr,
        node: Option<NodeId>,
        lifetime: Option<Duration>,
        now: Instant,
    ) {
        let until = lifetime.map(|d| now + d);
        if let Some(entry) = self.entries.get_mut(&addr) {
            entry.expires = match (entry.expires, until) {
                (Some(a), Some(b)) => Some(a.max(b)),
                _ => None,
            };
            entry.node = entry.node.or(node);
            return;
        }
        if self.entries.len() >= self.limit && until.is_some() {
            return;
        }
        let entry = Entry {
            node,
            expires: until,
            wait: FIRST_WAIT,
            due: now,
            dialling: false,
            attempts: 0,
        };
        self.entries.insert(addr, entry);
    }

    /// An address to be dialled as soon as possible, whatever its back-off says.
    pub(super) fn hurry(&mut self, addr: SocketAddr, now: Instant) {
        self.add(addr, None, Some(FORGET), now);
        if let Some(entry) = self.entries.get_mut(&addr) {
            entry.due = now;
            entry.wait = FIRST_WAIT;
        }
    }

    /// Whether the user gave the address.
    pub(super) fn given(&self, addr: &SocketAddr) -> bool {
        self.entries.get(addr).is_some_and(|e| e.expires.is_none())
    }

    /// When an address is due next, leaving out those whose node is `busy` (connected).
    pub(super) fn next(&self, busy: impl Fn(&NodeId) -> bool) -> Option<Instant> {
        self.entries
            .values()
            .filter(|e| !e.dialling && !e.node.is_some_and(|n| busy(&n)))
            .map(|e| e.due)
            .min()
    }

    /// An address that is due; it counts as being dialled from here on. Forgets what has expired.
    /// Of several addresses of one node only one is dialled at a time.
    pub(super) fn take(&mut self, now: Instant, busy: impl Fn(&NodeId) -> bool) -> Option<Due> {
        self.entries.retain(|_, e| {
            e.dialling || e.node.is_some_and(|n| busy(&n)) || e.expires.is_none_or(|t| t > now)
        });
        let dialling = self.entries.values().filter(|e| e.dialling);
        let under_way: BTreeSet<NodeId> = dialling.filter_map(|e| e.node).collect();
        let addr = self
            .entries
            .iter()
            .filter(|(_, e)| !e.dialling && e.due <= now)
            .filter(|(_, e)| !e.node.is_some_and(|n| busy(&n) || under_way.contains(&n)))
            .min_by_key(|(_, e)| e.due)
            .map(|(addr, _)| *addr)?;
        let entry = self.entries.get_mut(&addr)?;
        entry.dialling = true;
        let attempt = entry.attempts;
        entry.attempts = attempt.wrapping_add(1);
        Some(Due { addr, attempt })
    }

    /// Somebody's key was seen at the address.
    pub(super) fn identify(&mut self, addr: SocketAddr, node: NodeId) {
        if let Some(entry) = self.entries.get_mut(&addr) {
            entry.node = Some(node);
        }
    }

    /// A dial is over without a connection to keep: nobody there, or there is one already.
    pub(super) fn failed(&mut self, addr: SocketAddr, now: Instant) {
        self.put_off(addr, now, FIRST_WAIT, LONGEST_WAIT);
    }

    /// A connection that was dialled is over before it was kept, unless a refusal said so already.
    pub(super) fn ended(&mut self, addr: SocketAddr, now: Instant) {
        if self.entries.get(&addr).is_some_and(|e| e.dialling) {
            self.failed(addr, now);
        }
    }

    /// An agent there does not want us, or we are there ourselves.
    pub(super) fn refused(&mut self, addr: SocketAddr, now: Instant) {
        self.put_off(addr, now, REFUSED_WAIT, LONGEST_REFUSED_WAIT);
    }

    fn put_off(&mut self, addr: SocketAddr, now: Instant, least: Duration, most: Duration) {
        if let Some(entry) = self.entries.get_mut(&addr) {
            entry.dialling = false;
            entry.wait = entry.wait.clamp(least, most);
            entry.due = now + jitter(entry.wait);
            entry.wait = (entry.wait * 2).min(most);
        }
    }

    /// A connection to the node is established, through this address if it was dialled.
    pub(super) fn connected(&mut self, addr: SocketAddr, node: NodeId) {
        if let Some(entry) = self.entries.get_mut(&addr) {
            entry.dialling = false;
            entry.node = Some(node);
            // An even count: the next dial takes the same way in.
            entry.attempts = 0;
        }
    }

    /// The connection to the node is lost after it `lived` that long.
    pub(super) fn lost(&mut self, node: NodeId, lived: Duration, now: Instant) {
        for entry in self.entries.values_mut().filter(|e| e.node == Some(node)) {
            if lived >= SETTLED {
                entry.wait = FIRST_WAIT;
            }
            entry.due = now + jitter(entry.wait);
            entry.wait = (entry.wait * 2).min(LONGEST_WAIT);
            entry.expires = entry.expires.map(|t| t.max(now + FORGET));
        }
    }
}

/// Between three and five quarters of the time, so that agents that lost each other together do
/// not all dial together.
pub(super) fn jitter(time: Duration) -> Duration {
    time.mul_f64(rand::random_range(0.75..1.25))
}

/// Whether an address that somebody else told us is worth a dial. `from_here`: the teller reached
/// us over loopback, so that its loopback is ours.
pub(super) fn dialable(addr: &SocketAddr, from_here: bool) -> bool {
    let kind = match addr.ip() {
        IpAddr::V4(ip) => !ip.is_broadcast() && !ip.is_link_local(),
        // A link-local address means nothing without the interface.
        IpAddr::V6(ip) => !ip.is_unicast_link_local() && ip.to_ipv4_mapped().is_none(),
    };
    let ip = addr.ip();
    kind && addr.port() != 0
        && !ip.is_unspecified()
        && !ip.is_multicast()
        && (from_here || !ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn nobody(_: &NodeId) -> bool {
        false
    }

    #[test]
    fn an_address_that_fails_is_tried_ever_more_slowly() {
        let mut book = Book::new(10);
        let start = Instant::now();
        let a = addr("10.0.0.1:1");
        book.add(a, None, None, start);
        let mut now = start;
        let mut waits = Vec::new();
        for attempt in 0..12 {
            assert_eq!(book.take(now, nobody), Some(Due { addr: a, attempt }));
            assert_eq!(book.take(now, nobody), None, "it is being dialled");
            assert_eq!(book.next(nobody), None);
            book.failed(a, now);
            let due = book.next(nobody).unwrap();
            waits.push(due - now);
            now = due;
        }
        assert!(waits[0] < Duration::from_millis(63), "{waits:?}");
        assert!(waits[11] >= LONGEST_WAIT.mul_f64(0.75), "{waits:?}");
        assert!(waits[11] <= LONGEST_WAIT.mul_f64(1.25), "{waits:?}");
    }

    #[test]
    fn a_loss_is_followed_by_a_quick_redial_unless_it_flaps() {
        let mut book = Book::new(10);
        let now = Instant::now();
        let (a, node) = (addr("10.0.0.1:1"), NodeId([1; 32]));
        book.add(a, None, Some(FORGET), now);
        book.take(now, nobody).unwrap();
        book.connected(a, node);
        assert_eq!(book.next(|n| *n == node), None);
        book.lost(node, SETTLED, now);
        assert!(book.next(nobody).unwrap() - now < Duration::from_millis(63));
        for _ in 0..10 {
            book.lost(node, Duration::ZERO, now);
        }
        assert!(book.next(nobody).unwrap() - now > Duration::from_secs(3));
    }

    #[test]
    fn what_was_learnt_is_forgotten_and_what_was_given_is_not() {
        let mut book = Book::new(2);
        let now = Instant::now();
        let (given, learnt, more) = (addr("10.0.0.1:1"), addr("10.0.0.2:1"), addr("10.0.0.3:1"));
        book.add(learnt, None, Some(Duration::from_secs(60)), now);
        book.add(given, None, None, now);
        book.add(more, None, Some(FORGET), now);
        assert!(!book.entries.contains_key(&more), "the book is full");
        let later = now + Duration::from_secs(61);
        let due = book.take(later, nobody).unwrap();
        assert_eq!(due.addr, given);
        assert_eq!(book.entries.len(), 1);
        assert!(book.given(&given));
    }

    #[test]
    fn one_node_is_dialled_at_one_address_at_a_time() {
        let mut book = Book::new(10);
        let now = Instant::now();
        let node = Some(NodeId([1; 32]));
        book.add(addr("10.0.0.1:1"), node, Some(FORGET), now);
        book.add(addr("10.0.0.2:1"), node, Some(FORGET), now);
        assert!(book.take(now, nobody).is_some());
        assert_eq!(book.take(now, nobody), None);
    }

    #[test]
    fn hearsay_is_checked() {
        for (text, here, anywhere) in [
            ("10.0.0.1:7171", true, true),
            ("127.0.0.1:7171", true, false),
            ("[::1]:7171", true, false),
            ("10.0.0.1:0", false, false),
            ("0.0.0.0:1", false, false),
            ("[::]:1", false, false),
            ("224.0.0.251:1", false, false),
            ("255.255.255.255:1", false, false),
            ("169.254.1.1:1", false, false),
            ("[fe80::1]:1", false, false),
            ("[::ffff:10.0.0.1]:1", false, false),
        ] {
            assert_eq!(dialable(&addr(text), true), here, "{text}");
            assert_eq!(dialable(&addr(text), false), anywhere, "{text}");
        }
    }
}
