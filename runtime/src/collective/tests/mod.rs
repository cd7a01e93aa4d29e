mod faults;
mod forming;
mod misuse;
mod results;

use std::net::TcpListener;

use super::*;

/// A free port of this host. Freed at once: the group binds it anew.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

fn config(rank: u32, world: u32, port: u16) -> GroupConfig {
    GroupConfig {
        rank,
        world,
        master: Some(("127.0.0.1".to_owned(), port)),
        token: [9; 32],
        digest: [7; 32],
        sharing: Sharing::Off,
        form_within: Duration::from_secs(20),
        op_within: Duration::from_secs(20),
    }
}

/// The ways that ranks can lie on hosts, so that each transport and their composition is used.
const HOSTS: [fn(u32) -> Sharing; 4] = [
    |_| Sharing::Off,
    |_| Sharing::Auto,
    // Neighbours: 0 1 | 2 3 | ...
    |rank| Sharing::Among(u64::from(rank / 2)),
    // Interleaved and uneven: 0 3 6 | 1 2 4 5 7 8
    |rank| Sharing::Among(u64::from(!rank.is_multiple_of(3))),
];

/// Runs `body` on every rank of a new group; the results in the order of ranks.
fn on_ranks<T: Send>(
    world: u32,
    adjust: impl Fn(GroupConfig) -> GroupConfig,
    body: impl Fn(Group) -> T + Sync,
) -> Vec<T> {
    let port = free_port();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                let config = adjust(config(rank, world, port));
                let body = &body;
                scope.spawn(move || body(Group::form(&config).unwrap()))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A group for each way that ranks can lie on hosts.
fn on_all_hosts<T: Send>(world: u32, body: impl Fn(Group) -> T + Sync) -> Vec<Vec<T>> {
    HOSTS
        .into_iter()
        .map(|hosts| {
            let adjust = |config: GroupConfig| GroupConfig {
                sharing: hosts(config.rank),
                ..config
            };
            on_ranks(world, adjust, &body)
        })
        .collect()
}
