//! What strangers and broken peers may send.

use futures::{AsyncWriteExt as _, StreamExt};
use libp2p::{Stream, swarm::SwarmEvent};
use muster_protocol::codec::{self, MAX_FRAME};
use rand::Rng;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::AbortHandle,
};

use super::{
    super::{
        Limits, Refusal,
        handshake::{self, Hello, Local, decides},
        identity::{Carrier, node_of, to_multiaddr},
        transport::{self, BehaviourEvent},
    },
    *,
};

/// A peer that knows the secret and then says whatever the test wants.
struct Rogue {
    node: NodeId,
    stream: Stream,
    swarm: AbortHandle,
}

impl Drop for Rogue {
    fn drop(&mut self) {
        self.swarm.abort();
    }
}

/// Connects and opens the substream; says nothing.
async fn stranger(to: &Agent, config: &NetConfig) -> Rogue {
    let mut swarm = transport::swarm(config).unwrap();
    swarm.dial(to_multiaddr(to.addr(), Carrier::Tcp)).unwrap();
    let stream = loop {
        let event = timeout(PATIENCE, swarm.select_next_some()).await.unwrap();
        if let SwarmEvent::Behaviour(BehaviourEvent::Substream(opened)) = event {
            break opened.stream.unwrap();
        }
    };
    assert_eq!(node_of(swarm.local_peer_id()), Some(config.identity.node()));
    let polling = tokio::spawn(async move {
        loop {
            swarm.select_next_some().await;
        }
    });
    Rogue {
        node: config.identity.node(),
        stream,
        swarm: polling.abort_handle(),
    }
}

/// A stranger that has gone through the handshake.
async fn rogue(to: &mut Agent) -> Rogue {
    let config = config();
    let mut rogue = stranger(to, &config).await;
    let hello = Hello {
        cluster: config.cluster.clone(),
        secured: true,
        nonce: [7; 32],
        instance: 1,
        lost: Vec::new(),
        port: 0,
        observed: [127, 0, 0, 1].into(),
    };
    let local = Local {
        node: rogue.node,
        version: config.wire_version,
        secret: config.secret.as_deref().unwrap(),
        hello,
        dialler: true,
    };
    handshake::prove(&mut rogue.stream, &local, to.node())
        .await
        .unwrap();
    match decides(rogue.node, to.node()) {
        true => handshake::accept(&mut rogue.stream).await.unwrap(),
        false => handshake::await_verdict(&mut rogue.stream).await.unwrap(),
    }
    to.connected(rogue.node).await;
    rogue
}

/// Frames of the control stream, by hand.
fn frame(kind: u8, len: usize, body: &[u8]) -> Vec<u8> {
    let mut out = (len as u32).to_le_bytes().to_vec();
    out.push(kind);
    out.extend_from_slice(body);
    out
}

/// After the bytes the rogue is dropped for `why`, and the agent still makes friends.
async fn check(bytes: &[u8], why: Gone) {
    let mut a = start(config()).await;
    let mut rogue = rogue(&mut a).await;
    rogue.stream.write_all(bytes).await.unwrap();
    rogue.stream.flush().await.unwrap();
    if why == Gone::Closed {
        rogue.stream.close().await.unwrap();
    }
    assert_eq!(a.disconnected(rogue.node).await, why);
    let mut b = start_with(&[&a]).await;
    a.connected(b.node()).await;
    b.connected(a.node()).await;
}

#[tokio::test]
async fn frames_that_break_the_rules_end_the_connection() {
    let peers = |n: usize| -> Vec<u8> {
        let addr: SocketAddr = "127.0.0.1:9".parse().unwrap();
        codec::encode_body(&vec![(NodeId([1; 32]), addr); n]).unwrap()
    };
    let many = peers(65);
    check(&frame(0, MAX_FRAME + 1, &[]), Gone::Malformed).await;
    check(&frame(0, u32::MAX as usize, &[]), Gone::Malformed).await;
    check(&frame(9, 0, &[]), Gone::Malformed).await;
    check(&frame(1, MAX_FRAME, &[]), Gone::Malformed).await;
    check(&frame(1, many.len(), &many), Gone::Malformed).await;
    check(&frame(1, 4, &[255; 4]), Gone::Malformed).await;
    check(&frame(2, 1, &[0]), Gone::Malformed).await;
    check(&frame(3, 0, &[]), Gone::Left).await;
    // Cut off inside a head, and inside a body.
    check(&[1, 0], Gone::Closed).await;
    check(&frame(0, 100, &[1; 50]), Gone::Closed).await;
}

#[tokio::test]
async fn hearsay_of_nonsense_is_passed_over() {
    let mut a = start(config()).await;
    let mut rogue = rogue(&mut a).await;
    let nonsense = ["0.0.0.0:1", "224.0.0.1:5", "10.0.0.1:0", "[fe80::1]:7"];
    let nonsense: Vec<(NodeId, SocketAddr)> = nonsense
        .iter()
        .map(|a| (NodeId([1; 32]), a.parse().unwrap()))
        .collect();
    let body = codec::encode_body(&nonsense).unwrap();
    let mut bytes = frame(1, body.len(), &body);
    bytes.extend(frame(0, 2, b"hi"));
    rogue.stream.write_all(&bytes).await.unwrap();
    rogue.stream.flush().await.unwrap();
    assert_eq!(a.message().await, b"hi");
}

#[tokio::test]
async fn random_bytes_on_an_authenticated_stream_end_the_connection() {
    for _ in 0..10 {
        let mut a = start(config()).await;
        let mut rogue = rogue(&mut a).await;
        let mut bytes = vec![0; 4_096];
        rand::rng().fill(bytes.as_mut_slice());
        // Half of all lengths are above 2 GiB; this one always is.
        bytes[3] |= 0x80;
        rogue.stream.write_all(&bytes).await.unwrap();
        rogue.stream.flush().await.unwrap();
        assert_eq!(a.disconnected(rogue.node).await, Gone::Malformed);
    }
}

fn refusal(event: &NetEvent) -> Option<Refusal> {
    match event {
        NetEvent::Refused { why, .. } => Some(why.clone()),
        NetEvent::Connected { .. } => panic!("a stranger was let in"),
        _ => None,
    }
}

#[tokio::test]
async fn nonsense_instead_of_a_hello_is_refused() {
    let hello = [1, b'm', b'u', b's', b't', b'e', b'r', config().wire_version];
    let with_len = |body: &[u8]| {
        let mut out = (body.len() as u16).to_le_bytes().to_vec();
        out.extend_from_slice(body);
        out
    };
    for (bytes, why) in [
        (vec![255; 100], Refusal::Malformed),
        (with_len(b""), Refusal::NotMuster),
        (with_len(b"GET / HTTP/1.1"), Refusal::NotMuster),
        (with_len(&hello), Refusal::Malformed),
        (
            with_len(&[hello.as_slice(), &[255; 500]].concat()),
            Refusal::Malformed,
        ),
    ] {
        let mut a = start(config()).await;
        let mut stranger = stranger(&a, &config()).await;
        stranger.stream.write_all(&bytes).await.unwrap();
        stranger.stream.flush().await.unwrap();
        assert_eq!(a.until(refusal).await, why, "{bytes:?}");
    }
}

#[tokio::test]
async fn who_never_proves_anything_is_dropped() {
    let limits = Limits {
        handshake: Duration::from_millis(300),
        ..Limits::default()
    };
    let mut a = start(NetConfig { limits, ..config() }).await;
    let _silent = stranger(&a, &config()).await;
    assert_eq!(a.until(refusal).await, Refusal::TimedOut);
    // One that does not even encrypt.
    let mut raw = TcpStream::connect(a.addr()).await.unwrap();
    let mut byte = [0; 64];
    let closed = timeout(PATIENCE, async {
        while raw.read(&mut byte).await.is_ok_and(|n| n > 0) {}
    });
    closed.await.unwrap();
}

#[tokio::test]
async fn strangers_are_limited_in_number() {
    let limits = Limits {
        strangers: 3,
        handshake: Duration::from_secs(2),
        ..Limits::default()
    };
    let mut a = start(NetConfig { limits, ..config() }).await;
    let mut strangers = Vec::new();
    for _ in 0..3 {
        strangers.push(stranger(&a, &config()).await);
    }
    let one_more = start_with(&[&a]).await;
    assert_eq!(a.until(refusal).await, Refusal::Full);
    // The strangers' time is up, and there is room.
    a.until(|e| match e {
        NetEvent::Connected { node, .. } => Some(*node == one_more.node()),
        _ => None,
    })
    .await;
}

#[tokio::test]
async fn garbage_on_the_raw_port_does_no_harm() {
    let mut a = start(config()).await;
    for len in [0, 1, 7, 100, 5_000, 200_000] {
        let mut bytes = vec![0; len];
        rand::rng().fill(bytes.as_mut_slice());
        let mut raw = TcpStream::connect(a.addr()).await.unwrap();
        // The agent may hang up before everything is sent.
        let _ = raw.write_all(&bytes).await;
        let _ = raw.shutdown().await;
        let mut answer = Vec::new();
        let _ = timeout(PATIENCE, raw.read_to_end(&mut answer))
            .await
            .unwrap();
    }
    // A greeting in the right protocol, then noise.
    let mut raw = TcpStream::connect(a.addr()).await.unwrap();
    raw.write_all(b"\x13/multistream/1.0.0\n\x07/noise\n")
        .await
        .unwrap();
    let _ = raw.write_all(&[0xff; 70_000]).await;
    let _ = raw.shutdown().await;
    let mut answer = Vec::new();
    let _ = timeout(PATIENCE, raw.read_to_end(&mut answer))
        .await
        .unwrap();
    assert_eq!(a.until(refusal).await, Refusal::NotMuster);
    let mut b = start_with(&[&a]).await;
    a.connected(b.node()).await;
    b.connected(a.node()).await;
}
