//! Finding each other, losing each other, and settling on one connection.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
    time::{Duration, Instant},
};

use super::{
    super::{Limits, StartError},
    *,
};

#[tokio::test]
async fn three_agents_find_each_other_through_one_address() {
    let mut a = start(config()).await;
    let mut b = start_with(&[&a]).await;
    let mut c = start_with(&[&a]).await;
    let known: BTreeMap<_, _> = [&a, &b, &c].map(|x| (x.node(), x.addr())).into();
    for agent in [&mut a, &mut b, &mut c] {
        let me = agent.node();
        let mut others: BTreeSet<_> = known.keys().filter(|n| **n != me).copied().collect();
        while !others.is_empty() {
            let NetEvent::Connected {
                node,
                addr,
                observed,
                clock_ahead_ms,
            } = agent.next().await
            else {
                continue;
            };
            assert_eq!(addr, known[&node], "an address that can be dialled");
            assert_eq!(observed, IpAddr::V4(Ipv4Addr::LOCALHOST));
            assert!(clock_ahead_ms.abs() < 10_000, "{clock_ahead_ms}");
            others.remove(&node);
        }
    }
}

#[tokio::test]
async fn a_name_is_resolved_and_a_dead_address_does_no_harm() {
    let mut a = start(config()).await;
    let mut b = start(NetConfig {
        bootstrap: vec![
            "127.0.0.1:1".into(),
            format!("localhost:{}", a.addr().port()),
        ],
        ..config()
    })
    .await;
    a.connected(b.node()).await;
    b.connected(a.node()).await;
}

#[tokio::test]
async fn a_remembered_address_is_dialled() {
    let mut a = start(config()).await;
    let remembered = vec![a.addr()];
    let b = start(NetConfig {
        remembered,
        ..config()
    })
    .await;
    a.connected(b.node()).await;
}

#[tokio::test]
async fn an_agent_among_its_own_first_peers_does_not_call_itself() {
    let mut a = start(config()).await;
    assert!(a.net.dial(a.addr()));
    let b = start_with(&[&a]).await;
    assert_eq!(a.connected(b.node()).await, b.addr());
    // Had it found itself, that would have come first.
    assert_eq!(
        a.net.send(a.node(), vec![1]),
        Err(super::super::SendError::NotConnected)
    );
}

#[tokio::test]
async fn a_taken_port_is_refused_though_libp2p_would_share_it() {
    let a = start(config()).await;
    let listen = vec![a.addr()];
    let second = Net::start(NetConfig { listen, ..config() }).await;
    assert!(matches!(second, Err(StartError::Listen { .. })));
}

#[tokio::test]
async fn a_peer_that_dies_is_reported_at_once() {
    let (mut a, b) = pair().await;
    let node = b.node();
    let died = Instant::now();
    drop(b);
    assert_eq!(a.disconnected(node).await, Gone::Closed);
    let took = died.elapsed();
    assert!(
        took < Duration::from_millis(500),
        "usually about a millisecond: {took:?}"
    );
}

#[tokio::test]
async fn a_goodbye_comes_after_the_last_message() {
    let (mut a, b) = pair().await;
    let node = b.node();
    for n in 0..100u8 {
        b.net.send(a.node(), vec![n]).unwrap();
    }
    b.net.close().await;
    for n in 0..100u8 {
        assert_eq!(a.message().await, [n]);
    }
    assert_eq!(a.disconnected(node).await, Gone::Left);
}

/// Starts an agent on a port that one before it may not have let go of yet.
async fn start_again(identity: &Identity, listen: SocketAddr, bootstrap: Vec<String>) -> Agent {
    let until = Instant::now() + PATIENCE;
    loop {
        let again = NetConfig {
            identity: identity.clone(),
            listen: vec![listen],
            bootstrap: bootstrap.clone(),
            ..config()
        };
        match Net::start(again).await {
            Ok((net, events)) => return Agent { net, events },
            Err(StartError::Listen { .. }) if Instant::now() < until => {
                tokio::task::yield_now().await;
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[tokio::test]
async fn an_agent_that_restarts_is_found_again_without_being_told_anything() {
    let identity = Identity::generate();
    let mut a = start(config()).await;
    let listen = "127.0.0.1:0".parse().unwrap();
    let mut b = start_again(&identity, listen, vec![a.addr().to_string()]).await;
    let addr = b.addr();
    for round in 0..3u8 {
        assert_eq!(a.connected(b.node()).await, addr);
        b.connected(a.node()).await;
        b.net.send(a.node(), vec![round]).unwrap();
        assert_eq!(a.message().await, [round]);
        drop(b);
        a.disconnected(identity.node()).await;
        // No first peers now: `a` has to redial.
        b = start_again(&identity, addr, Vec::new()).await;
    }
}

#[tokio::test]
async fn a_connection_that_is_given_up_comes_back() {
    let (mut a, mut b) = pair().await;
    assert!(a.net.disconnect(b.node()));
    assert_eq!(a.disconnected(b.node()).await, Gone::Local);
    assert_eq!(b.disconnected(a.node()).await, Gone::Closed);
    a.connected(b.node()).await;
    b.connected(a.node()).await;
}

#[tokio::test]
async fn two_that_dial_each_other_at_once_settle_on_one_connection() {
    for _ in 0..20 {
        let mut a = start(config()).await;
        let mut b = start(config()).await;
        a.net.dial(b.addr());
        b.net.dial(a.addr());
        a.connected(b.node()).await;
        b.connected(a.node()).await;
        // Whatever would replace the connection comes before an answer to the second round.
        for round in 0..20u8 {
            a.net.send(b.node(), vec![round]).unwrap();
            assert!(matches!(b.next().await, NetEvent::Message { bytes, .. } if bytes == [round]));
            b.net.send(a.node(), vec![round]).unwrap();
            assert!(matches!(a.next().await, NetEvent::Message { bytes, .. } if bytes == [round]));
        }
    }
}

#[tokio::test]
async fn a_dozen_that_all_dial_each_other_at_once_form_a_mesh_without_a_flap() {
    let mut agents = Vec::new();
    for _ in 0..12 {
        // On a busy machine 132 handshakes on one thread can take longer than one should.
        let limits = Limits {
            handshake: PATIENCE,
            ..Limits::default()
        };
        agents.push(start(NetConfig { limits, ..config() }).await);
    }
    let addrs: Vec<_> = agents.iter().map(Agent::addr).collect();
    for agent in &agents {
        for addr in &addrs {
            assert!(agent.net.dial(*addr));
        }
    }
    let nodes: BTreeSet<_> = agents.iter().map(Agent::node).collect();
    for agent in &mut agents {
        let mut others = nodes.clone();
        others.remove(&agent.node());
        while !others.is_empty() {
            match agent.next().await {
                NetEvent::Listening(_) => {}
                NetEvent::Connected { node, .. } => assert!(others.remove(&node), "twice"),
                other => panic!("nothing else is due: {other:?}"),
            }
        }
    }
    // Each pair agrees on the connection: what one sends, the other gets.
    for agent in &agents {
        for to in nodes.iter().filter(|n| **n != agent.node()) {
            agent.net.send(*to, vec![1]).unwrap();
        }
    }
    for agent in &mut agents {
        let mut others = nodes.clone();
        others.remove(&agent.node());
        while !others.is_empty() {
            match agent.next().await {
                NetEvent::Message { from, .. } => assert!(others.remove(&from), "twice"),
                other => panic!("nothing else is due: {other:?}"),
            }
        }
    }
}

#[tokio::test]
async fn quic_is_another_way_in() {
    let quic = || NetConfig {
        quic: true,
        ..config()
    };
    let mut a = start(quic()).await;
    let b = start(NetConfig {
        bootstrap: vec![a.addr().to_string()],
        ..quic()
    })
    .await;
    a.connected(b.node()).await;
}
