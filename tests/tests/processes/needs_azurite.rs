//! A job whose store is a container of Azurite, Azure Blob Storage's emulator.

use crate::clouds::azurite;
use crate::clouds::proxy::{Fault, Proxy, Server};
use crate::clouds::{lend, open};
use crate::real::saves::Saves;

const LOCATION: &str = "az://box/team";

#[test]
fn two_nodes_both_die_and_others_go_on_from_the_container() {
    let (_server, port) = azurite::start();
    let proxy = Proxy::start(Server::Port(port));
    let store = open(LOCATION, proxy.port);
    // Of the blocks of 16 MiB in which files go, each rank's has two.
    let mut saves = Saves::at(LOCATION, &store, &["--max-restarts=1"], "2", 40, 40);
    lend(&mut saves.bed, proxy.port);
    proxy.inject("PUT", "comp=block&", 2, Fault::LoseAnswer);
    proxy.inject("PUT", "comp=blocklist", 1, Fault::LoseAnswer);
    proxy.inject("PUT", "/log/", 2, Fault::LoseAnswer);
    saves.train(&[0, 1], 0);
    saves
        .bed
        .until("two commits", |_| saves.committed().len() >= 2);
    let at = (0..2).map(|node| saves.bed.kill(node)).max().unwrap();
    let committed = *saves.committed().last().unwrap();
    proxy.inject("GET", "/data/", 3, Fault::Reset);
    let next = saves.train(&[2, 3], at);
    assert!(saves.restored(&next) >= committed);
    assert!(
        proxy.count("PUT", "comp=block&") >= 4,
        "files went in blocks"
    );
    saves.bed.order(None, 0);
    assert_eq!((saves.bed.ended(2), saves.bed.ended(3)), (Some(0), Some(0)));
}
