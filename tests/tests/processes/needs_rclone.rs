//! A server that ignores conditions: `MUSTER_TEST_RCLONE` names its program.

use crate::clouds::{lend, open, server};
use crate::harness::Bed;

#[test]
fn no_job_starts_with_it() {
    const LOCATION: &str = "s3://bucket/team";
    let (_server, port) = server::rclone(|port| match open(LOCATION, port).put("ready", b"x") {
        Ok(()) => Ok(()),
        Err(error) => Err(error.to_string()),
    });
    let mut bed = Bed::new(&["--nnodes=1", &format!("--store={LOCATION}")]);
    lend(&mut bed, port);
    bed.run(0, 0);
    assert_eq!(bed.ended(0), Some(1));
    let said = bed.said(0);
    assert!(said.contains("honours `If-None-Match: *`"), "{said}");
    assert!(bed.events().is_empty(), "no worker was started");
}
