//! Where an agent listens that may have to take another port than the one it wants.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::mpsc;

use crate::net::{Net, NetConfig, NetEvent, StartError};

/// Two that reach for one port at the same moment may both be refused it (`listen(2)` tells both
/// that it is in use): so often it is tried again before another port is taken.
const TRIES: u32 = 8;

/// Starts the network on the addresses that are wanted, or, where another agent of this host
/// listens there already, on `otherwise`.
pub(super) async fn start(
    config: impl Fn(Vec<SocketAddr>) -> NetConfig,
    wanted: Vec<SocketAddr>,
    otherwise: Option<SocketAddr>,
) -> Result<(Net, mpsc::Receiver<NetEvent>), StartError> {
    let Some(otherwise) = otherwise else {
        return Net::start(config(wanted)).await;
    };
    for _ in 0..TRIES {
        match Net::start(config(wanted.clone())).await {
            Err(StartError::Listen { .. }) => {}
            started => return started,
        }
        if is_served(&wanted).await {
            break;
        }
        tokio::time::sleep(Duration::from_millis(rand::random_range(1..=30))).await;
    }
    Net::start(config(vec![otherwise])).await
}

async fn is_served(addrs: &[SocketAddr]) -> bool {
    for addr in addrs {
        let dial = TcpStream::connect(addr);
        if let Ok(Ok(_)) = tokio::time::timeout(Duration::from_millis(200), dial).await {
            return true;
        }
    }
    false
}
