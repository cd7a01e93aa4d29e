//! Reads, and what may happen to them on the way.

use std::ops::ControlFlow;
use std::time::Duration;

use muster_store::{Checksum, Entry, Kind};

use crate::bed::{Bed, all, at_once, bounded, bytes, hasty, s3};
use crate::fake::Faults;
use crate::http::Response;
use crate::proxy::Fault;

const NAME: &str = "job/data/1/n0";

fn bed(faults: Faults) -> Bed {
    let bed = Bed::with(faults);
    bed.place(NAME, &bytes(100_000));
    bed
}

fn faults() -> Vec<Fault> {
    vec![
        Fault::Reset,
        Fault::LoseAnswer,
        Fault::Truncate,
        Fault::Stall,
        Fault::Silence,
        Fault::Junk,
        Fault::Instead(Response::new(500)),
        Fault::Instead(Response::new(503).with("retry-after", 0)),
    ]
}

#[test]
fn what_is_read_is_right_whatever_happens_to_one_try() {
    at_once(faults(), |fault| {
        let bed = bed(Faults::default());
        bed.proxy.inject("GET", NAME, 2, fault.clone());
        let got = bounded(|| bed.store.get(NAME, 100_000));
        assert!(got.unwrap() == bytes(100_000), "{fault:?}");
        bed.proxy.inject("GET", NAME, 2, fault.clone());
        let mut range = vec![0; 5000];
        bounded(|| bed.store.get_range(NAME, 777, &mut range)).unwrap();
        assert!(range == bytes(100_000)[777..5777], "{fault:?}");
    });
}

#[test]
fn what_cannot_be_read_is_an_error_of_its_kind() {
    let cases = [
        (Fault::Reset, Kind::Network),
        (Fault::Truncate, Kind::Network),
        (Fault::Stall, Kind::Timeout),
        (Fault::Silence, Kind::Timeout),
        (Fault::Drip(Duration::from_millis(100)), Kind::Timeout),
        (Fault::Corrupt, Kind::Damaged),
        (Fault::Junk, Kind::Network),
        (Fault::Instead(Response::new(500)), Kind::Server),
        (Fault::Instead(Response::new(503)), Kind::Throttled),
    ];
    at_once(cases, |(fault, kind)| {
        let bed = bed(Faults::default());
        bed.proxy.inject("GET", NAME, 99, fault.clone());
        let error = bounded(|| bed.store.get(NAME, 100_000)).unwrap_err();
        assert_eq!(error.kind, kind, "{fault:?}: {error}");
        assert!(!error.unknown);
        assert!(error.tries > 1, "{error}");
    });
}

#[test]
fn what_arrives_damaged_is_read_again() {
    let bed = bed(Faults::default());
    bed.proxy.inject("GET", NAME, 1, Fault::Corrupt);
    assert!(bed.store.get(NAME, 100_000).unwrap() == bytes(100_000));
    assert_eq!(bed.proxy.count("GET", NAME), 2);
}

#[test]
fn nothing_is_read_beyond_the_limit() {
    let bed = bed(Faults::default());
    let error = bounded(|| bed.store.get(NAME, 99_999)).unwrap_err();
    assert_eq!((error.kind, error.tries), (Kind::TooLarge, 1), "{error}");
    bed.proxy.inject("GET", NAME, 99, Fault::Endless);
    let error = bounded(|| bed.store.get(NAME, 1 << 20)).unwrap_err();
    assert_eq!(error.kind, Kind::TooLarge, "{error}");
    // A listing has a limit, too; it is no XML besides.
    bed.proxy.inject("GET", "list-type", 99, Fault::Endless);
    let error = bounded(|| bed.store.list("job", &mut |_| ControlFlow::Continue(())));
    assert_eq!(error.unwrap_err().kind, Kind::TooLarge);
}

#[test]
fn ranges_are_exact_or_an_error() {
    let bed = bed(Faults::default());
    let mut range = [0; 10];
    let short = bed.store.get_range(NAME, 99_995, &mut range).unwrap_err();
    assert_eq!(short.kind, Kind::Short, "{short}");
    let beyond = bed.store.get_range(NAME, 100_000, &mut range).unwrap_err();
    assert_eq!(beyond.kind, Kind::Short, "{beyond}");
    bed.store.get_range(NAME, 99_990, &mut range).unwrap();
    assert_eq!(range, bytes(100_000)[99_990..]);
    bed.store.get_range(NAME, 5, &mut []).unwrap();

    let rangeless = Faults {
        rangeless: true,
        ..Faults::default()
    };
    let error = self::bed(rangeless).store.get_range(NAME, 5, &mut range);
    assert!(error.is_err());
}

#[test]
fn heads_have_checksums_where_the_store_has() {
    let head = bed(Faults::default()).store.head(NAME).unwrap();
    let crc = muster_checkpoint::sum::crc(&bytes(100_000));
    assert_eq!(
        (head.size, head.checksum),
        (100_000, Some(Checksum::Crc64Nvme(crc)))
    );
    let sumless = Faults {
        sumless: true,
        ..Faults::default()
    };
    assert_eq!(bed(sumless).store.head(NAME).unwrap().checksum, None);
}

#[test]
fn a_missing_object_and_a_missing_bucket_are_told_apart() {
    let bed = bed(Faults::default());
    for (bucket, kind) in [("bucket", Kind::NotFound), ("other", Kind::NoBucket)] {
        let store = s3(&format!("s3://{bucket}/team"), bed.proxy.port, hasty());
        assert_eq!(store.get("none", 9).unwrap_err().kind, kind);
        assert_eq!(store.head("none").unwrap_err().kind, kind);
        let range = store.get_range("none", 0, &mut [0; 4]);
        assert_eq!(range.unwrap_err().kind, kind);
        let listed = store.list("none", &mut |_| ControlFlow::Continue(()));
        assert_eq!(listed.is_ok(), kind == Kind::NotFound);
    }
}

#[test]
fn listings_have_pages_and_an_order() {
    let bed = bed(Faults {
        page: Some(3),
        ..Faults::default()
    });
    for number in 0..10 {
        bed.place(&format!("job/log/{number:08}.json"), &[0; 5]);
    }
    bed.place("jobs/x", b"x");
    bed.place("job/.hidden", b"x");
    let listed = all(&bed.store, "job");
    assert_eq!(listed.len(), 11);
    assert!(listed.is_sorted_by(|a, b| a.name < b.name));
    let entry = |name: &str, size| Entry {
        name: name.into(),
        size,
    };
    assert_eq!(listed[0], entry(NAME, 100_000));
    assert_eq!(listed[10], entry("job/log/00000009.json", 5));
    let job = bed.store.within("job").unwrap();
    assert_eq!(all(&job, "log")[0], entry("log/00000000.json", 5));
    assert_eq!(bed.store.folders("").unwrap(), ["job", "jobs"]);
    assert_eq!(job.folders("").unwrap(), ["data", "log"]);
    assert_eq!(job.folders("none").unwrap(), [""; 0]);

    let bed = self::bed(Faults {
        disorderly: true,
        ..Faults::default()
    });
    bed.place("job/log/1", b"x");
    let error = bed.store.list("job", &mut |_| ControlFlow::Continue(()));
    assert_eq!(error.unwrap_err().kind, Kind::Unsupported);
}

#[test]
fn a_delete_whose_answer_is_lost_is_done_all_the_same() {
    for fault in [
        Fault::LoseAnswer,
        Fault::Reset,
        Fault::Instead(Response::new(500)),
    ] {
        let bed = bed(Faults::default());
        bed.proxy.inject("DELETE", NAME, 1, fault);
        bounded(|| bed.store.delete(NAME)).unwrap();
        assert_eq!(bed.there(NAME), None);
    }
}

#[test]
fn tls_with_a_server_that_has_none_is_told() {
    let bed = bed(Faults::default());
    let mut options = crate::bed::options(bed.proxy.port, hasty());
    options.variables = [
        ("AWS_ACCESS_KEY_ID", "a".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "b".to_owned()),
        (
            "AWS_ENDPOINT_URL",
            format!("https://127.0.0.1:{}", bed.proxy.port),
        ),
    ]
    .into_iter()
    .collect();
    let location = "s3://bucket/team".parse().unwrap();
    // Without certificates of its own a system says so at once.
    let error = match muster_store::Store::open(&location, &options) {
        Ok(store) => bounded(|| store.create("x", b"x")).unwrap_err(),
        Err(error) => error,
    };
    assert!(matches!(error.kind, Kind::Setup | Kind::Network), "{error}");
    assert!(!error.unknown, "{error}");
    assert_eq!(bed.there("x"), None);
}
