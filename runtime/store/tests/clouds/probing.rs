//! Which stores are refused.

use muster_store::Kind;

use crate::bed::{Bed, bounded};
use crate::fake::Faults;
use crate::http::Response;
use crate::proxy::Fault;

#[test]
fn a_good_store_is_taken_and_named() {
    let bed = Bed::new();
    let probed = bounded(|| bed.store.probe()).unwrap();
    assert!(probed.checksums);
    let uuid = bed.there("muster-store").unwrap();
    let text = format!("{{\"format\":1,\"uuid\":\"{}\"}}\n", probed.uuid);
    assert_eq!(uuid, text.as_bytes());
    assert_eq!(bed.fake.state.lock().unwrap().objects.len(), 1);
    assert_eq!(
        bed.store.within("job").unwrap().probe().unwrap().uuid,
        probed.uuid
    );
    // Somebody empties the bucket: that nothing is there says nothing now.
    bed.store.create("job/log/1", b"x").unwrap();
    bed.fake.state.lock().unwrap().objects.clear();
    let job = bed.store.within("job").unwrap();
    assert_eq!(job.get("log/1", 9).unwrap_err().kind, Kind::Gone);
    assert_eq!(job.create("log/1", b"x").unwrap_err().kind, Kind::Gone);
}

#[test]
fn a_store_that_ignores_conditions_is_refused_by_name() {
    let bed = Bed::with(Faults {
        unconditional: true,
        ..Faults::default()
    });
    let error = bounded(|| bed.store.probe()).unwrap_err();
    assert_eq!(error.kind, Kind::NotCreateOnly, "{error}");
    let text = error.to_string();
    for part in ["s3://bucket/team", "Fake/1", "If-None-Match", "SeaweedFS"] {
        assert!(text.contains(part), "{text}");
    }
    // What the probe made is gone.
    assert!(bed.fake.state.lock().unwrap().objects.is_empty());
}

#[test]
fn a_store_that_is_atomic_for_one_only_is_refused() {
    let bed = Bed::with(Faults {
        racy: true,
        ..Faults::default()
    });
    let error = bounded(|| bed.store.probe()).unwrap_err();
    assert_eq!(error.kind, Kind::NotCreateOnly, "{error}");
}

#[test]
fn a_store_that_ignores_ranges_or_order_is_refused() {
    for faults in [
        Faults {
            rangeless: true,
            ..Faults::default()
        },
        Faults {
            disorderly: true,
            ..Faults::default()
        },
    ] {
        let error = bounded(|| Bed::with(faults).store.probe()).unwrap_err();
        assert_eq!(error.kind, Kind::Unsupported, "{error}");
    }
}

#[test]
fn a_probe_bears_what_a_create_bears() {
    let bed = Bed::new();
    for method in ["PUT", "GET", "HEAD", "DELETE"] {
        bed.proxy.inject(method, "", 2, Fault::LoseAnswer);
        let broken = Response::new(500);
        bed.proxy.inject(method, "", 1, Fault::Instead(broken));
    }
    bounded(|| bed.store.probe()).unwrap();
}
