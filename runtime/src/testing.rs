//! Ranks that are threads of one process, for the tests of all modules.

use std::net::SocketAddr;
use std::time::Duration;

use socket2::{Domain, Socket, Type};

use crate::collective::{Group, GroupConfig, Sharing};

/// Longer than anything takes that goes well.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// A port that nobody else is given as long as it is held. One that is looked for and freed again may be another
/// test's by the time that a group listens there, and groups of tests have the same secrets.
///
/// Bound, and never listening: who asks for any port gets another one, while a listener, which sets `SO_REUSEADDR`
/// as this does, may have it.
pub(crate) struct HeldPort {
    pub(crate) address: SocketAddr,
    _socket: Socket,
}

impl HeldPort {
    pub(crate) fn new() -> HeldPort {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_reuse_address(true).unwrap();
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        socket.bind(&any.into()).unwrap();
        HeldPort {
            address: socket.local_addr().unwrap().as_socket().unwrap(),
            _socket: socket,
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.address.port()
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
