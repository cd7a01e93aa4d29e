//! Agents that are not let in, and what both ends are told.

use super::{super::Refusal, *};

/// Two agents that must not come together, each with what it is told.
async fn check(one: NetConfig, other: NetConfig, told_one: Refusal, told_other: Refusal) {
    let mut a = start(one).await;
    let bootstrap = vec![a.addr().to_string()];
    let mut b = start(NetConfig { bootstrap, ..other }).await;
    let refused = |e: &NetEvent| match e {
        NetEvent::Refused { addr, why, .. } => Some((*addr, why.clone())),
        NetEvent::Connected { .. } => panic!("they must not connect"),
        _ => None,
    };
    assert_eq!(a.until(refused).await.1, told_one);
    assert_eq!(b.until(refused).await, (a.addr(), told_other));
    // Right ones are unaffected.
    let mut c = start_with_secret_of(&a).await;
    c.connected(a.node()).await;
    a.until(|e| match e {
        NetEvent::Connected { node, .. } => (*node == c.node()).then_some(()),
        NetEvent::Refused { why, .. } => panic!("told twice: {why}"),
        _ => None,
    })
    .await;
}

async fn start_with_secret_of(a: &Agent) -> Agent {
    start_with(&[a]).await
}

#[tokio::test]
async fn a_wrong_secret() {
    let secret = Some(b"another".to_vec());
    let wrong = NetConfig { secret, ..config() };
    check(config(), wrong, Refusal::WrongSecret, Refusal::WrongSecret).await;
}

#[tokio::test]
async fn no_secret() {
    let open = NetConfig {
        secret: None,
        ..config()
    };
    check(config(), open, Refusal::NoSecret, Refusal::SecretWanted).await;
}

#[tokio::test]
async fn another_cluster() {
    let other = NetConfig {
        cluster: "prod".into(),
        ..config()
    };
    check(
        config(),
        other,
        Refusal::OtherCluster {
            theirs: "prod".into(),
        },
        Refusal::OtherCluster {
            theirs: "test".into(),
        },
    )
    .await;
}

#[tokio::test]
async fn another_version() {
    let ours = config().wire_version;
    let newer = NetConfig {
        wire_version: ours + 1,
        ..config()
    };
    check(
        config(),
        newer,
        Refusal::OtherVersion { theirs: ours + 1 },
        Refusal::OtherVersion { theirs: ours },
    )
    .await;
}

#[tokio::test]
async fn an_open_cluster_connects() {
    let open = || NetConfig {
        secret: None,
        ..config()
    };
    let mut a = start(open()).await;
    let bootstrap = vec![a.addr().to_string()];
    let mut b = start(NetConfig {
        bootstrap,
        ..open()
    })
    .await;
    a.connected(b.node()).await;
    b.connected(a.node()).await;
}

#[tokio::test]
async fn a_first_peer_that_does_not_answer_is_named() {
    // A port that was free a moment ago.
    let free = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let mut a = start(NetConfig {
        bootstrap: vec![free.to_string()],
        ..config()
    })
    .await;
    let why = a
        .until(|e| match e {
            NetEvent::Refused { addr, why, .. } if *addr == free => Some(why.clone()),
            _ => None,
        })
        .await;
    assert_eq!(
        why,
        Refusal::Unreachable(std::io::ErrorKind::ConnectionRefused)
    );
    // An agent comes there, and that is told too.
    let _b = start(NetConfig {
        listen: vec![free],
        ..config()
    })
    .await;
    a.until(|e| match e {
        NetEvent::Answers { addr } if *addr == free => Some(()),
        _ => None,
    })
    .await;
}

#[tokio::test]
async fn a_first_peer_that_is_something_else_is_named() {
    use tokio::io::AsyncWriteExt;
    let other = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = other.local_addr().unwrap();
    let serving = tokio::spawn(async move {
        let mut open = Vec::new();
        while let Ok((mut stream, _)) = other.accept().await {
            let answer = "HTTP/1.1 400 Bad Request\r\nServer: something\r\n".repeat(10);
            let _ = stream.write_all(answer.as_bytes()).await;
            // Hanging up could overtake the answer.
            open.push(stream);
        }
    });
    let bootstrap = vec![addr.to_string()];
    let mut a = start(NetConfig {
        bootstrap,
        ..config()
    })
    .await;
    let why = a
        .until(|e| match e {
            NetEvent::Refused { why, .. } => Some(why.clone()),
            _ => None,
        })
        .await;
    assert_eq!(why, Refusal::NotMuster);
    serving.abort();
}

#[tokio::test]
async fn bad_configurations_are_refused_by_name() {
    use super::super::StartError;
    let start = async |c: NetConfig| Net::start(c).await.map(drop);
    let long = "x".repeat(65);
    for cluster in [String::new(), long] {
        let result = start(NetConfig {
            cluster,
            ..config()
        })
        .await;
        assert!(matches!(result, Err(StartError::Cluster { .. })));
    }
    let result = start(NetConfig {
        secret: Some(Vec::new()),
        ..config()
    })
    .await;
    assert!(matches!(result, Err(StartError::EmptySecret)));
    let result = start(NetConfig {
        bootstrap: vec!["nowhere".into()],
        ..config()
    })
    .await;
    assert!(matches!(result, Err(StartError::Bootstrap { .. })));
}

#[test]
fn of_agents_that_start_at_once_on_one_port_one_listens() {
    const AGENTS: usize = 4;
    for round in 0..10 {
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap();
        let all_ready = std::sync::Barrier::new(AGENTS);
        let all_tried = std::sync::Barrier::new(AGENTS);
        let listening = std::thread::scope(|scope| {
            let tries: Vec<_> = (0..AGENTS)
                .map(|_| {
                    scope.spawn(|| {
                        let runtime = tokio::runtime::Builder::new_current_thread()
                            .enable_all()
                            .build()
                            .unwrap();
                        runtime.block_on(async {
                            let listen = vec![port];
                            let config = NetConfig { listen, ..config() };
                            all_ready.wait();
                            let started = Net::start(config).await;
                            all_tried.wait();
                            started.is_ok()
                        })
                    })
                })
                .collect();
            let each = tries.into_iter().map(|t| t.join().unwrap());
            each.filter(|listens| *listens).count()
        });
        assert_eq!(listening, 1, "in round {round}");
    }
}
