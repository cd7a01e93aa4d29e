//! Against a real server that ignores conditional puts: `MUSTER_TEST_RCLONE` names its program.

use muster_store::Kind;

use crate::bed::{bounded, hasty, s3};
use crate::server::{Running, ports};

#[test]
fn it_is_refused_by_name() {
    let [port] = ports();
    let mut server = Running::start("MUSTER_TEST_RCLONE", |place, command| {
        std::fs::create_dir_all(place.join("data/bucket")).unwrap();
        command
            .env("RCLONE_CONFIG", place.join("none"))
            .args(["serve", "s3", "--auth-key", "test,testsecret", "--addr"])
            .arg(format!("127.0.0.1:{port}"))
            .arg("data");
    });
    let store = s3("s3://bucket/team", port, hasty());
    server.until(|| match store.put("ready", b"x") {
        Ok(()) => Ok(()),
        Err(error) => Err(error.to_string()),
    });
    let error = bounded(|| store.probe()).unwrap_err();
    assert_eq!(error.kind, Kind::NotCreateOnly, "{error}");
    assert!(error.to_string().contains("s3://bucket/team"), "{error}");
    println!("{error}");
}
