//! A job whose store is a bucket of SeaweedFS: `MUSTER_TEST_WEED` names its program.

use crate::clouds::proxy::{Fault, Proxy, Server};
use crate::clouds::server::{self, Running};
use crate::clouds::{lend, open};
use crate::real::lives::plan::{Agents, Coming, End, Life, Setting, State, Store};
use crate::real::lives::{Place, live_at};
use crate::real::saves::Saves;

const LOCATION: &str = "s3://bucket/team";

fn start() -> (Running, u16) {
    server::seaweedfs(|port| match open(LOCATION, port).create("ready", b"") {
        Ok(_) => Ok(()),
        Err(error) => Err(error.to_string()),
    })
}

#[test]
fn three_nodes_all_die_and_two_others_go_on_from_the_bucket() {
    let (_server, port) = start();
    let proxy = Proxy::start(Server::Port(port));
    let store = open(LOCATION, proxy.port);
    // Of the parts of 16 MiB in which files go, each rank's has two.
    let mut saves = Saves::at(LOCATION, &store, &["--max-restarts=1"], "2:3", 66, 40);
    lend(&mut saves.bed, proxy.port);
    proxy.inject("PUT", "partNumber=2&", 2, Fault::LoseAnswer);
    proxy.inject("POST", "uploadId", 1, Fault::LoseAnswer);
    proxy.inject("PUT", "/log/", 2, Fault::LoseAnswer);
    saves.train(&[0, 1, 2], 0);
    saves
        .bed
        .until("two commits", |_| saves.committed().len() >= 2);
    let at = (0..3).map(|node| saves.bed.kill(node)).max().unwrap();
    let committed = *saves.committed().last().unwrap();
    proxy.inject("GET", "/data/", 3, Fault::Reset);
    let next = saves.train(&[3, 4], at);
    assert!(saves.restored(&next) >= committed);
    assert!(
        proxy.count("PUT", "partNumber=2&") >= 6,
        "files went in parts"
    );
    saves.bed.order(None, 0);
    assert_eq!((saves.bed.ended(3), saves.bed.ended(4)), (Some(0), Some(0)));
}

#[test]
fn a_job_ends_in_every_way_and_is_started_again_from_the_bucket() {
    let (server, port) = start();
    let proxy = Proxy::start(Server::Port(port));
    let setting = Setting {
        agents: Agents::Embedded,
        store: Store::Bucket,
        state: State::Kept,
    };
    let lives = End::ALL.map(|end| Life::new(Coming::Together, vec![0, 1, 2], end));
    live_at(setting, &lives, Place::behind(server, proxy, LOCATION));
}
