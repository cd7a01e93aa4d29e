//! Against a real server that ignores conditional puts: `MUSTER_TEST_RCLONE` names its program.

use muster_store::Kind;

use crate::bed::{bounded, hasty, s3};
use crate::server;

#[test]
fn it_is_refused_by_name() {
    let team = |port| s3("s3://bucket/team", port, hasty());
    let (_server, port) = server::rclone(|port| match team(port).put("ready", b"x") {
        Ok(()) => Ok(()),
        Err(error) => Err(error.to_string()),
    });
    let error = bounded(|| team(port).probe()).unwrap_err();
    assert_eq!(error.kind, Kind::NotCreateOnly, "{error}");
    assert!(error.to_string().contains("s3://bucket/team"), "{error}");
    println!("{error}");
}
