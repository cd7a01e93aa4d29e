//! Messages that strangers and broken peers may send.

use std::collections::BTreeSet;

use futures::{AsyncReadExt as _, AsyncWriteExt as _, StreamExt};
use libp2p::{Stream, swarm::SwarmEvent};
use muster_protocol::codec::{self, MAX_FRAME};
use rand::Rng;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    task::AbortHandle,
};

use super::{
    super::{
        Limits, Refusal,
        handshake::{self, Failure, Hello, Local, decides},
        identity::{Carrier, from_multiaddr, node_of, to_multiaddr},
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

/// A rogue's statements about itself.
struct Story {
    config: NetConfig,
    instance: u64,
    lost: Vec<u64>,
}

fn story() -> Story {
    Story {
        config: config(),
        instance: 1,
        lost: Vec::new(),
    }
}

/// Goes through the handshake. The connection's tag, or why it is not kept.
async fn try_rogue(to: &Agent, story: &Story) -> (Rogue, Result<u64, Failure>) {
    let config = &story.config;
    let mut rogue = stranger(to, config).await;
    let hello = Hello {
        cluster: config.cluster.clone(),
        secured: true,
        nonce: rand::random(),
        instance: story.instance,
        lost: story.lost.clone(),
        port: 0,
        observed: [127, 0, 0, 1].into(),
        clock_ms: 0,
    };
    let local = Local {
        node: rogue.node,
        version: config.wire_version,
        secret: config.secret.as_deref().unwrap(),
        hello,
        dialler: true,
    };
    let proven = handshake::prove(&mut rogue.stream, &local, to.node())
        .await
        .unwrap();
    let verdict = match decides(rogue.node, to.node()) {
        true => handshake::accept(&mut rogue.stream).await,
        false => handshake::await_verdict(&mut rogue.stream).await,
    };
    (rogue, verdict.map(|()| proven.tag))
}

/// A stranger that has gone through the handshake.
async fn rogue(to: &mut Agent) -> Rogue {
    let (rogue, verdict) = try_rogue(to, &story()).await;
    verdict.unwrap();
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
    let limits = Limits {
        handshake: Duration::from_millis(300),
        ..Limits::default()
    };
    // One that does not even encrypt.
    let mut a = start(NetConfig { limits, ..config() }).await;
    let mut raw = TcpStream::connect(a.addr()).await.unwrap();
    let mut byte = [0; 64];
    let closed = timeout(PATIENCE, async {
        while raw.read(&mut byte).await.is_ok_and(|n| n > 0) {}
    });
    closed.await.unwrap();
    assert_eq!(a.until(refusal).await, Refusal::TimedOut);
}

/// A plain connection from a host of the loopback net.
async fn knock(from: &str, at: &Agent) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(from.parse().unwrap()).unwrap();
    socket.connect(at.addr()).await.unwrap()
}

/// Whether the agent speaks first, as multistream-select has it, and not hangs up.
async fn is_let_in(stream: &mut TcpStream) -> bool {
    stream.write_all(b"\x13/multistream/1.0.0\n").await.unwrap();
    let mut byte = [0; 1];
    timeout(PATIENCE, stream.read(&mut byte))
        .await
        .unwrap()
        .is_ok_and(|n| n == 1)
}

#[tokio::test]
async fn strangers_are_limited_in_number_and_by_host() {
    let limits = Limits {
        strangers: 6,
        handshake: Duration::from_secs(2),
        ..Limits::default()
    };
    let mut a = start(NetConfig { limits, ..config() }).await;
    let mut strangers = Vec::new();
    for (host, fits) in [("127.0.0.2:0", 3), ("127.0.0.3:0", 2)] {
        for _ in 0..fits {
            let mut stranger = knock(host, &a).await;
            assert!(is_let_in(&mut stranger).await, "{host}");
            strangers.push(stranger);
        }
    }
    let mut fourth = knock("127.0.0.2:0", &a).await;
    assert!(!is_let_in(&mut fourth).await);
    assert_eq!(a.until(refusal).await, Refusal::Full);
    // The last place of all.
    let mut last = knock("127.0.0.4:0", &a).await;
    assert!(is_let_in(&mut last).await);
    let mut none = knock("127.0.0.5:0", &a).await;
    assert!(!is_let_in(&mut none).await);
    // Their time is up, and there is room for a friend that has kept trying.
    let mut friend = start_with(&[&a]).await;
    friend.connected(a.node()).await;
    a.connected(friend.node()).await;
}

#[tokio::test]
async fn a_proof_that_is_sent_back_to_its_author_proves_nothing() {
    // Whoever has no secret can still repeat every byte.
    let mut swarm = transport::swarm(&config()).unwrap();
    swarm
        .listen_on("/ip4/127.0.0.1/tcp/0".parse().unwrap())
        .unwrap();
    let addr = loop {
        if let SwarmEvent::NewListenAddr { address, .. } = swarm.select_next_some().await {
            break from_multiaddr(&address).unwrap().0;
        }
    };
    let echo = tokio::spawn(async move {
        let mut streams = Vec::new();
        loop {
            let event = swarm.select_next_some().await;
            if let SwarmEvent::Behaviour(BehaviourEvent::Substream(opened)) = event {
                let (reader, mut writer) = opened.stream.unwrap().split();
                streams.push(tokio::spawn(async move {
                    let _ = futures::io::copy(reader, &mut writer).await;
                }));
            }
        }
    });
    let bootstrap = vec![addr.to_string()];
    let mut a = start(NetConfig {
        bootstrap,
        ..config()
    })
    .await;
    assert_eq!(a.until(refusal).await, Refusal::WrongSecret);
    echo.abort();
}

#[tokio::test]
async fn the_deciding_end_keeps_a_connection_until_it_is_said_to_be_lost() {
    let mut a = start(config()).await;
    let mut story = story();
    while decides(story.config.identity.node(), a.node()) {
        story.config.identity = Identity::generate();
    }
    let (first, tag) = try_rogue(&a, &story).await;
    a.connected(first.node).await;
    let (_, again) = try_rogue(&a, &story).await;
    assert!(matches!(again, Err(Failure::Duplicate)));
    // The other end says that it has lost the first, which here still looks alive.
    story.lost = vec![1, tag.unwrap()];
    let (second, tag) = try_rogue(&a, &story).await;
    tag.unwrap();
    assert_eq!(a.disconnected(first.node).await, Gone::Replaced);
    a.connected(second.node).await;
    // The other end has restarted.
    story.instance = 2;
    story.lost = Vec::new();
    let (third, tag) = try_rogue(&a, &story).await;
    tag.unwrap();
    assert_eq!(a.disconnected(second.node).await, Gone::Replaced);
    a.connected(third.node).await;
    drop(third);
    assert_eq!(a.disconnected(second.node).await, Gone::Closed);
}

#[tokio::test]
async fn a_full_agent_says_so() {
    let limits = Limits {
        peers: 1,
        ..Limits::default()
    };
    let mut a = start(NetConfig { limits, ..config() }).await;
    let friend = rogue(&mut a).await;
    let mut story = story();
    while decides(story.config.identity.node(), a.node()) {
        story.config.identity = Identity::generate();
    }
    let (_, verdict) = try_rogue(&a, &story).await;
    assert!(matches!(verdict, Err(Failure::Refused(Refusal::Full))));
    assert_eq!(a.until(refusal).await, Refusal::Full);
    a.net.send(friend.node, vec![1]).unwrap();
    // A member of one of its jobs is let in all the same, and stays when another one comes.
    let member = story.config.identity.node();
    assert!(a.net.prefer(BTreeSet::from([member])));
    let (_member, verdict) = try_rogue(&a, &story).await;
    verdict.unwrap();
    assert_eq!(a.disconnected(friend.node).await, Gone::Crowded);
    a.connected(member).await;
    story.config.identity = Identity::generate();
    while decides(story.config.identity.node(), a.node()) {
        story.config.identity = Identity::generate();
    }
    let (_, verdict) = try_rogue(&a, &story).await;
    assert!(matches!(verdict, Err(Failure::Refused(Refusal::Full))));
    a.net.send(member, vec![1]).unwrap();
}

#[tokio::test]
async fn of_several_that_are_less_wanted_the_one_that_came_last_makes_room() {
    let limits = Limits {
        peers: 3,
        ..Limits::default()
    };
    let mut a = start(NetConfig { limits, ..config() }).await;
    let mut here = Vec::new();
    for _ in 0..3 {
        here.push(rogue(&mut a).await);
    }
    // The lowest id is one of the first two, or this proves nothing: once more with others.
    while here[2].node < here[0].node && here[2].node < here[1].node {
        let last = here.pop().unwrap();
        let node = last.node;
        drop(last);
        assert_eq!(a.disconnected(node).await, Gone::Closed);
        here.push(rogue(&mut a).await);
    }
    let mut story = story();
    while decides(story.config.identity.node(), a.node()) {
        story.config.identity = Identity::generate();
    }
    let member = story.config.identity.node();
    assert!(a.net.prefer(BTreeSet::from([member])));
    let (_member, verdict) = try_rogue(&a, &story).await;
    verdict.unwrap();
    assert_eq!(a.disconnected(here[2].node).await, Gone::Crowded);
    a.connected(member).await;
}

/// So does an agent that probes another one.
#[tokio::test]
async fn a_connection_that_is_closed_at_once_is_no_stranger() {
    let mut a = start(config()).await;
    drop(TcpStream::connect(a.addr()).await.unwrap());
    tokio::time::sleep(Duration::from_millis(200)).await;
    let mut raw = TcpStream::connect(a.addr()).await.unwrap();
    raw.write_all(&[0xff; 100]).await.unwrap();
    let refused = a
        .until(|e| match e {
            NetEvent::Refused { addr, .. } => Some(*addr),
            _ => None,
        })
        .await;
    assert_eq!(refused, raw.local_addr().unwrap());
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
