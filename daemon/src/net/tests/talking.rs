//! Messages between two agents.

use std::time::{Duration, Instant};

use muster_protocol::codec::MAX_FRAME;

use super::{
    super::{Limits, SendError},
    *,
};

#[tokio::test]
async fn ten_thousand_messages_arrive_in_order_both_ways() {
    const COUNT: u32 = 10_000;
    let (mut a, mut b) = pair().await;
    for n in 0..COUNT {
        a.net.send(b.node(), n.to_le_bytes().to_vec()).unwrap();
        b.net.send(a.node(), n.to_le_bytes().to_vec()).unwrap();
    }
    for agent in [&mut a, &mut b] {
        for n in 0..COUNT {
            assert_eq!(agent.message().await, n.to_le_bytes());
        }
    }
}

#[tokio::test]
async fn the_largest_message_arrives_and_a_larger_one_is_not_taken() {
    let (a, mut b) = pair().await;
    let largest: Vec<u8> = (0..MAX_FRAME).map(|n| (n % 251) as u8).collect();
    for _ in 0..5 {
        a.net.send(b.node(), largest.clone()).unwrap();
        a.net.send(b.node(), Vec::new()).unwrap();
    }
    for _ in 0..5 {
        assert!(b.message().await == largest);
        assert_eq!(b.message().await, Vec::<u8>::new());
    }
    let len = MAX_FRAME + 1;
    assert_eq!(
        a.net.send(b.node(), vec![0; len]),
        Err(SendError::TooLong { len })
    );
}

#[tokio::test]
async fn a_queue_that_overflows_drops_the_connection_and_says_so() {
    let (mut a, b) = pair().await;
    // `b` takes no events, so after a while nothing is read any more.
    let mut taken = 0;
    let overflow = loop {
        match a.net.send(b.node(), vec![0; 64 * 1024]) {
            Ok(()) => taken += 1,
            Err(error) => break error,
        }
        assert!(taken < 10_000, "the queue is bounded");
        tokio::task::yield_now().await;
    };
    assert_eq!(overflow, SendError::Overflow);
    assert_eq!(a.disconnected(b.node()).await, Gone::Overflow);
    // Its user catches up, and they find each other again.
    let mut b = b;
    b.disconnected(a.node()).await;
    b.connected(a.node()).await;
    a.connected(b.node()).await;
}

#[tokio::test]
async fn a_connection_at_rest_stays_and_a_silent_one_is_given_up() {
    let limits = |keep_alive, silence| Limits {
        keep_alive: Duration::from_millis(keep_alive),
        silence: Duration::from_millis(silence),
        ..Limits::default()
    };
    let mut a = start(NetConfig {
        limits: limits(50, 1_000),
        ..config()
    })
    .await;
    let bootstrap = vec![a.addr().to_string()];
    let quiet = limits(3_600_000, 3_600_000);
    let mut b = start(NetConfig {
        limits: quiet,
        bootstrap,
        ..config()
    })
    .await;
    let bootstrap = vec![a.addr().to_string()];
    let lively = limits(50, 1_000);
    let mut c = start(NetConfig {
        limits: lively,
        bootstrap,
        ..config()
    })
    .await;
    for agent in [&mut b, &mut c] {
        agent.connected(a.node()).await;
    }
    // Of the two, only `b` never says anything.
    assert_eq!(a.disconnected(b.node()).await, Gone::Silent);
    a.net.send(c.node(), vec![7]).unwrap();
    let message = |e: NetEvent| match e {
        NetEvent::Message { bytes, .. } => Some(bytes),
        NetEvent::Disconnected { node, .. } => {
            assert_ne!(node, a.net.node(), "it has signs of life");
            None
        }
        _ => None,
    };
    let mut got = None;
    while got.is_none() {
        got = message(c.next().await);
    }
    assert_eq!(got, Some(vec![7]));
}

/// A figure to look at with `--nocapture`; the bound is a hundred times the usual.
#[tokio::test]
async fn a_round_trip_is_quick() {
    let (mut a, mut b) = pair().await;
    let mut times = Vec::new();
    for _ in 0..2_000 {
        let start = Instant::now();
        a.net.send(b.node(), vec![0; 32]).unwrap();
        b.message().await;
        b.net.send(a.node(), vec![0; 32]).unwrap();
        a.message().await;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    let at = |percent: usize| times[times.len() * percent / 100];
    println!(
        "round trip: median {:?}, 90 % {:?}, 99 % {:?}",
        at(50),
        at(90),
        at(99)
    );
    assert!(at(50) < Duration::from_millis(50));
}

#[tokio::test]
async fn an_agent_answers_a_probe_and_says_nothing_of_it() {
    let mut a = start(config()).await;
    for _ in 0..5 {
        let found = crate::agent::probe_agent(Some(a.addr()), PATIENCE).await;
        assert_eq!(found, muster_protocol::membership::Answer::Answered);
    }
    let b = start_with(&[&a]).await;
    a.until(|e| match e {
        NetEvent::Connected { node, .. } => (*node == b.node()).then_some(()),
        NetEvent::Refused { why, .. } => panic!("a probe is no stranger: {why}"),
        _ => None,
    })
    .await;
}
