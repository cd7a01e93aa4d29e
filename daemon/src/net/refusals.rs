//! Which refusals the agent is told about, so that a stranger who knocks all day fills no log.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use libp2p::{
    TransportError,
    swarm::{DialError, ListenError},
};

use super::Refusal;

/// The same is told again after this long.
const AGAIN: Duration = Duration::from_secs(60);
/// Refusals that are remembered for that; beyond it nothing is told.
const MAX_REPORTED: usize = 512;

/// Refusals that were told lately.
#[derive(Debug, Default)]
pub(super) struct Reported(BTreeMap<(SocketAddr, u8), Instant>);

impl Reported {
    /// Once a minute for each address and kind. An inbound connection counts by its host alone:
    /// its port is another one each time.
    pub(super) fn is_news(
        &mut self,
        addr: SocketAddr,
        outbound: bool,
        why: &Refusal,
        now: Instant,
    ) -> bool {
        self.0.retain(|_, at| now - *at < AGAIN);
        let addr = match outbound {
            true => addr,
            false => SocketAddr::new(addr.ip(), 0),
        };
        let key = (addr, kind_of(why));
        if self.0.contains_key(&key) || self.0.len() >= MAX_REPORTED {
            return false;
        }
        self.0.insert(key, now);
        true
    }
}

fn kind_of(why: &Refusal) -> u8 {
    match why {
        Refusal::WrongSecret => 0,
        Refusal::NoSecret => 1,
        Refusal::SecretWanted => 2,
        Refusal::OtherCluster { .. } => 3,
        Refusal::OtherVersion { .. } => 4,
        Refusal::NotMuster => 5,
        Refusal::Malformed => 6,
        Refusal::TimedOut => 7,
        Refusal::Full => 8,
        Refusal::Unreachable(_) => 9,
    }
}

/// The error that kept a connection from coming about, from below libp2p's wrappings.
pub(super) fn io_kind(error: &TransportError<io::Error>) -> io::ErrorKind {
    let TransportError::Other(error) = error else {
        return io::ErrorKind::Unsupported;
    };
    let mut error = error;
    // Each transport that is boxed wraps once; the bound is against a cycle.
    for _ in 0..8 {
        match error
            .get_ref()
            .and_then(|inner| inner.downcast_ref::<io::Error>())
        {
            Some(inner) => error = inner,
            None => break,
        }
    }
    error.kind()
}

/// Why an inbound connection came to nothing before it was encrypted; `None` where the other end
/// only hung up.
pub(super) fn of_inbound(error: &ListenError) -> Option<Refusal> {
    match error {
        ListenError::Denied { .. } => Some(Refusal::Full),
        ListenError::Transport(error) => match io_kind(error) {
            io::ErrorKind::InvalidData => Some(Refusal::NotMuster),
            io::ErrorKind::TimedOut => Some(Refusal::TimedOut),
            _ => None,
        },
        _ => None,
    }
}

/// Why a dial came to nothing; `None` where that says nothing about who is there.
pub(super) fn of_outbound(error: &DialError) -> Option<Refusal> {
    let DialError::Transport(tried) = error else {
        return None;
    };
    let (_, error) = tried.first()?;
    Some(match io_kind(error) {
        io::ErrorKind::InvalidData | io::ErrorKind::ConnectionAborted => Refusal::NotMuster,
        kind => Refusal::Unreachable(kind),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_refusal_is_news_once_a_minute() {
        let mut reported = Reported::default();
        let now = Instant::now();
        let (a, b) = ("10.0.0.1:1".parse().unwrap(), "10.0.0.1:2".parse().unwrap());
        assert!(reported.is_news(a, false, &Refusal::WrongSecret, now));
        assert!(!reported.is_news(b, false, &Refusal::WrongSecret, now));
        assert!(reported.is_news(b, false, &Refusal::NotMuster, now));
        assert!(reported.is_news(a, true, &Refusal::WrongSecret, now));
        assert!(reported.is_news(b, true, &Refusal::WrongSecret, now));
        assert!(reported.is_news(b, false, &Refusal::WrongSecret, now + AGAIN));
        for port in 0..2_000 {
            let addr = SocketAddr::new([10, 0, 0, 2].into(), port);
            reported.is_news(addr, true, &Refusal::Full, now + AGAIN);
        }
        assert_eq!(reported.0.len(), MAX_REPORTED);
    }
}
