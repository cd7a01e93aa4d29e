//! Ranks that are threads of one process, for the tests of all modules.

mod keeper;
mod port;

use std::time::{Duration, Instant};

pub(crate) use self::keeper::Keeper;
pub(crate) use self::port::HeldPort;
use crate::collective::{Group, GroupConfig, Sharing};

/// Longer than anything takes that goes well.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Waits until it holds.
#[track_caller]
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < until, "not within {LONG:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Each rank as if on a host of its own.
pub(crate) fn group_config(rank: u32, world: u32, port: u16) -> GroupConfig {
    GroupConfig {
        rank,
        world,
        master: Some(("127.0.0.1".to_owned(), port)),
        token: [9; 32],
        digest: [7; 32],
        sharing: Sharing::Off,
        form_within: LONG,
        op_within: LONG,
    }
}

/// Runs `body` on each rank of a new group, whose ranks share memory as `sharing` says; the results in the order
/// of ranks.
pub(crate) fn on_ranks<T: Send>(
    world: u32,
    sharing: impl Fn(u32) -> Sharing,
    body: impl Fn(Group) -> T + Sync,
) -> Vec<T> {
    let adjust = |config: GroupConfig| GroupConfig {
        sharing: sharing(config.rank),
        ..config
    };
    on_ranks_with(vec![(); world as usize], adjust, |(), group| body(group))
}

/// The same with something for each rank, and groups that are configured otherwise.
pub(crate) fn on_ranks_with<A: Send, T: Send>(
    given: Vec<A>,
    adjust: impl Fn(GroupConfig) -> GroupConfig,
    body: impl Fn(A, Group) -> T + Sync,
) -> Vec<T> {
    let (world, held) = (given.len() as u32, HeldPort::new());
    let port = held.port();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..)
            .zip(given)
            .map(|(rank, given)| {
                let config = adjust(group_config(rank, world, port));
                let body = &body;
                scope.spawn(move || body(given, Group::form(&config).unwrap()))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn a_listener_gets_it_and_nobody_else() {
    use std::net::TcpListener;
    let held = HeldPort::new();
    let others: Vec<HeldPort> = (0..300).map(|_| HeldPort::new()).collect();
    assert!(others.iter().all(|other| other.address != held.address));
    for _ in 0..2 {
        TcpListener::bind(held.address).unwrap();
    }
}
