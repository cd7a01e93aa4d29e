//! Whole agents' network layers on loopback.

mod finding;
mod misuse;
mod refusing;
mod talking;

use std::{net::SocketAddr, time::Duration};

use muster_protocol::NodeId;
use tokio::{sync::mpsc, time::timeout};

use super::{Gone, Identity, Net, NetConfig, NetEvent};

/// A hundred times what anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

struct Agent {
    net: Net,
    events: mpsc::Receiver<NetEvent>,
}

fn config() -> NetConfig {
    NetConfig {
        listen: vec!["127.0.0.1:0".parse().unwrap()],
        secret: Some(b"sixteen random bytes".to_vec()),
        ..NetConfig::new(Identity::generate(), "test")
    }
}

async fn start(config: NetConfig) -> Agent {
    let (net, events) = Net::start(config).await.unwrap();
    Agent { net, events }
}

/// An agent whose first peers are the others.
async fn start_with(first: &[&Agent]) -> Agent {
    let bootstrap = first.iter().map(|a| a.addr().to_string()).collect();
    start(NetConfig {
        bootstrap,
        ..config()
    })
    .await
}

impl Agent {
    fn node(&self) -> NodeId {
        self.net.node()
    }

    fn addr(&self) -> SocketAddr {
        self.net.local_addrs()[0]
    }

    async fn next(&mut self) -> NetEvent {
        let next = timeout(PATIENCE, self.events.recv()).await;
        next.expect("an event in time").expect("the hub runs")
    }

    /// The first event that `pick` wants; those before it are passed over.
    async fn until<T>(&mut self, mut pick: impl FnMut(&NetEvent) -> Option<T>) -> T {
        let mut passed = Vec::new();
        let found = timeout(PATIENCE, async {
            while let Some(event) = self.events.recv().await {
                if let Some(found) = pick(&event) {
                    return Some(found);
                }
                passed.push(event);
            }
            None
        });
        match found.await {
            Ok(Some(found)) => found,
            _ => panic!("did not come; came instead: {passed:?}"),
        }
    }

    async fn connected(&mut self, to: NodeId) -> SocketAddr {
        self.until(|e| match e {
            NetEvent::Connected { node, addr, .. } if *node == to => Some(*addr),
            _ => None,
        })
        .await
    }

    async fn disconnected(&mut self, from: NodeId) -> Gone {
        self.until(|e| match e {
            NetEvent::Disconnected { node, why } if *node == from => Some(*why),
            _ => None,
        })
        .await
    }

    async fn message(&mut self) -> Vec<u8> {
        self.until(|e| match e {
            NetEvent::Message { bytes, .. } => Some(bytes.clone()),
            _ => None,
        })
        .await
    }
}

/// Two agents with a connection.
async fn pair() -> (Agent, Agent) {
    let mut a = start(config()).await;
    let mut b = start_with(&[&a]).await;
    a.connected(b.node()).await;
    b.connected(a.node()).await;
    (a, b)
}
