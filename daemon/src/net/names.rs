//! First peers: literal addresses, and names that are looked up again and again.

use std::{net::SocketAddr, time::Duration};

use tokio::sync::mpsc;

use super::{NetEvent, StartError, book::jitter};

/// Addresses of one name that are taken at most.
const MAX_ADDRESSES: usize = 1_024;

/// A name is forgotten this long after it was last found.
pub(super) const LIFETIME: Duration = Duration::from_secs(60);

/// First peers by kind.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FirstPeers {
    pub(super) addrs: Vec<SocketAddr>,
    /// `name:port`.
    pub(super) names: Vec<String>,
}

/// Tells literal addresses from names.
pub(super) fn parse(texts: &[String]) -> Result<FirstPeers, StartError> {
    let mut first = FirstPeers::default();
    for text in texts {
        if let Ok(addr) = text.parse() {
            first.addrs.push(addr);
        } else if is_name(text) {
            first.names.push(text.clone());
        } else {
            return Err(StartError::Bootstrap { text: text.clone() });
        }
    }
    Ok(first)
}

fn is_name(text: &str) -> bool {
    let Some((name, port)) = text.rsplit_once(':') else {
        return false;
    };
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    let port = port.parse::<u16>().is_ok_and(|p| p != 0);
    !name.is_empty() && name.len() <= 253 && name.chars().all(good) && port
}

/// Looks the name up about every `every`, and sends what was found, until nobody listens. That it has no address any
/// more, or has one again, is an event.
pub(super) async fn resolve(
    name: String,
    every: Duration,
    found: mpsc::Sender<Vec<SocketAddr>>,
    events: mpsc::Sender<NetEvent>,
) {
    let mut known = true;
    loop {
        match tokio::net::lookup_host(&name).await {
            Ok(addrs) => {
                if !std::mem::replace(&mut known, true) {
                    let (name, failed) = (name.clone(), None);
                    let _ = events.try_send(NetEvent::Looked { name, failed });
                }
                let addrs = addrs.take(MAX_ADDRESSES).collect();
                if found.send(addrs).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                // A headless service has no addresses before its first pod: said once each time.
                if std::mem::take(&mut known) {
                    tracing::warn!(%name, %error, "cannot resolve the first peer's name yet");
                    let (name, failed) = (name.clone(), Some(error.to_string()));
                    let _ = events.try_send(NetEvent::Looked { name, failed });
                }
            }
        }
        tokio::time::sleep(jitter(every)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_peers_are_addresses_or_names() {
        let texts = [
            "10.0.0.1:7171",
            "[::1]:7171",
            "muster.ml.svc.cluster.local:7171",
        ];
        let first = parse(&texts.map(String::from)).unwrap();
        assert_eq!(first.addrs.len(), 2);
        assert_eq!(first.names, ["muster.ml.svc.cluster.local:7171"]);
        for bad in [
            "",
            "host",
            "host:",
            "host:0",
            "host:70000",
            ":7171",
            "a b:1",
            "::1:7x",
        ] {
            assert!(parse(&[bad.to_string()]).is_err(), "{bad:?}");
        }
    }
}
