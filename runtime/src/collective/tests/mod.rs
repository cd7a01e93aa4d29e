mod faults;
mod forming;
mod misuse;
mod results;
mod words;

use std::net::TcpListener;

use super::*;
use crate::testing::{HeldPort, LONG, group_config, on_ranks, on_ranks_with};

/// The ways that ranks can lie on hosts, so that each transport and their composition is used.
const HOSTS: [fn(u32) -> Sharing; 4] = [
    |_| Sharing::Off,
    |_| Sharing::Auto,
    // Neighbours: 0 1 | 2 3 | ...
    |rank| Sharing::Among(u64::from(rank / 2)),
    // Interleaved and uneven: 0 3 6 | 1 2 4 5 7 8
    |rank| Sharing::Among(u64::from(!rank.is_multiple_of(3))),
];

/// A group for each way that ranks can lie on hosts.
fn on_all_hosts<T: Send>(world: u32, body: impl Fn(Group) -> T + Sync) -> Vec<Vec<T>> {
    let hosts = HOSTS.into_iter();
    hosts.map(|hosts| on_ranks(world, hosts, &body)).collect()
}
