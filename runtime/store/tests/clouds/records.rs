//! Creates, and what may happen to them on the way.

use std::time::{Duration, Instant};

use muster_store::{Created, Kind};

use crate::bed::{BOUND, Bed, at_once, bounded, hasty, race, s3};
use crate::fake::BUCKET;
use crate::http::Response;
use crate::proxy::Fault;

const NAME: &str = "job/log/00000001.json";

fn status(status: u16, code: &str) -> Response {
    Response::new(status).body(format!("<Error><Code>{code}</Code></Error>"))
}

fn throttled() -> Response {
    status(503, "SlowDown").with("retry-after", 1)
}

/// Faults of a put after which its outcome is open.
fn open_faults() -> Vec<Fault> {
    vec![
        Fault::LoseAnswer,
        Fault::Reset,
        Fault::Silence,
        Fault::Junk,
        Fault::Instead(status(500, "InternalError")),
        Fault::Afterwards(status(500, "InternalError")),
        Fault::Instead(status(502, "BadGateway")),
        Fault::Afterwards(status(504, "GatewayTimeout")),
        Fault::Instead(throttled()),
        Fault::Afterwards(throttled()),
        Fault::Instead(status(409, "ConditionalRequestConflict")),
        Fault::Afterwards(status(409, "ConditionalRequestConflict")),
        Fault::Instead(status(412, "PreconditionFailed")),
        Fault::Afterwards(status(412, "PreconditionFailed")),
        // A success whose head lacks what every success has.
        Fault::Afterwards(Response::new(200)),
    ]
}

#[test]
fn a_record_is_created_whatever_happens_to_one_try() {
    at_once(open_faults(), |fault| {
        let bed = Bed::new();
        bed.proxy.inject("PUT", NAME, 1, fault.clone());
        let created = bounded(|| bed.store.create(NAME, b"mine"));
        assert_eq!(created.unwrap(), Created::Created, "{fault:?}");
        assert_eq!(bed.there(NAME).unwrap(), b"mine");
        assert!(bed.proxy.count("PUT", NAME) <= 2);
    });
}

#[test]
fn another_ones_record_is_never_taken_for_ones_own() {
    at_once(open_faults(), |fault| {
        let bed = Bed::new();
        bed.place(NAME, b"theirs");
        bed.proxy.inject("PUT", NAME, 1, fault.clone());
        // Even a lie about success ends in the truth where the outcome was open; the probe refuses
        // stores that lie in earnest.
        let created = bounded(|| bed.store.create(NAME, b"mine"));
        assert_eq!(created.unwrap(), Created::Exists, "{fault:?}");
        assert_eq!(bed.there(NAME).unwrap(), b"theirs");
    });
}

#[test]
fn what_stays_open_is_said_to_be_and_the_same_bytes_settle_it() {
    at_once([Fault::LoseAnswer, Fault::Reset, Fault::Silence], |fault| {
        let bed = Bed::new();
        bed.proxy.inject("PUT", NAME, 99, fault.clone());
        bed.proxy.inject("GET", NAME, 99, Fault::Reset);
        let error = bounded(|| bed.store.create(NAME, b"mine")).unwrap_err();
        assert!(error.unknown, "{error}");
        assert!(
            matches!(error.kind, Kind::Network | Kind::Timeout),
            "{error}"
        );
        assert!(error.to_string().contains("is not known"), "{error}");
        bed.proxy.heal();
        assert_eq!(bed.store.create(NAME, b"mine").unwrap(), Created::Created);
        assert_eq!(bed.there(NAME).unwrap(), b"mine");
    });
}

#[test]
fn a_store_says_again_and_again_that_there_is_one_and_none() {
    let bed = Bed::new();
    let conflict = status(409, "ConditionalRequestConflict");
    bed.proxy.inject("PUT", NAME, 99, Fault::Instead(conflict));
    let error = bounded(|| bed.store.create(NAME, b"mine")).unwrap_err();
    assert_eq!((error.kind, error.unknown), (Kind::Server, true));
    assert_eq!(error.tries, 4);
}

#[test]
fn what_is_refused_is_not_tried_again_and_told_with_what_helps() {
    let region = status(301, "PermanentRedirect").with("x-amz-bucket-region", "eu-west-1");
    for (answer, kind, fix) in [
        (
            status(403, "InvalidAccessKeyId"),
            Kind::Credentials,
            "AWS_ACCESS_KEY_ID",
        ),
        (
            status(403, "SignatureDoesNotMatch"),
            Kind::Credentials,
            "AWS_SECRET_ACCESS_KEY",
        ),
        (
            status(400, "ExpiredToken"),
            Kind::Credentials,
            "AWS_SESSION_TOKEN",
        ),
        (
            status(401, "Unauthorized"),
            Kind::Credentials,
            "AWS_PROFILE",
        ),
        (status(403, "AccessDenied"), Kind::Denied, "docs/stores.md"),
        (status(403, "RequestTimeTooSkewed"), Kind::Clock, "clock"),
        (
            status(404, "NoSuchBucket"),
            Kind::NoBucket,
            "create the bucket",
        ),
        (region, Kind::Region, "AWS_REGION"),
        (
            status(501, "NotImplemented"),
            Kind::Unsupported,
            "another store",
        ),
        (status(507, "InsufficientStorage"), Kind::Full, "free space"),
        (
            status(405, "MethodNotAllowed"),
            Kind::Unsupported,
            "upgrade",
        ),
    ] {
        let bed = Bed::new();
        bed.proxy
            .inject("PUT", NAME, 99, Fault::Instead(answer.clone()));
        let error = bounded(|| bed.store.create(NAME, b"mine")).unwrap_err();
        assert_eq!(error.kind, kind, "{error}");
        assert!(error.to_string().contains(fix), "{error}");
        assert!(
            error.to_string().contains("s3://bucket/team/job/log"),
            "{error}"
        );
        if answer.status < 500 {
            assert!(!error.unknown, "{error}");
            assert_eq!(bed.proxy.count("PUT", NAME), 1);
        }
    }
}

#[test]
fn a_store_that_wants_rest_gets_it() {
    let bed = Bed::new();
    bed.proxy
        .inject("PUT", NAME, 1, Fault::Instead(throttled()));
    let began = Instant::now();
    assert_eq!(bed.store.create(NAME, b"mine").unwrap(), Created::Created);
    assert!(began.elapsed() >= Duration::from_secs(1));

    // One that wants more than there is time for is an error at once.
    let long = status(429, "TooManyRequests").with("retry-after", 3600);
    bed.proxy.inject("GET", NAME, 1, Fault::Instead(long));
    let error = bounded(|| bed.store.get(NAME, 9)).unwrap_err();
    assert_eq!((error.kind, error.tries), (Kind::Throttled, 1));
}

#[test]
fn nobody_there_means_that_nothing_changed() {
    // No test is ever given port 1; one that was free a moment ago may be another's by now.
    let store = s3(&format!("s3://{BUCKET}"), 1, hasty());
    let error = bounded(|| store.create(NAME, b"x")).unwrap_err();
    assert_eq!(
        (error.kind, error.unknown),
        (Kind::Network, false),
        "{error}"
    );
    assert!(error.to_string().contains("AWS_ENDPOINT_URL"), "{error}");
    assert_eq!(error.tries, 4);
}

#[test]
fn every_operation_ends_within_its_bound_whatever_the_store_does() {
    let endings = || {
        vec![
            Fault::Reset,
            Fault::Silence,
            Fault::Junk,
            Fault::Endless,
            Fault::Instead(status(500, "InternalError")),
            Fault::Drip(Duration::from_millis(300)),
        ]
    };
    at_once(endings(), |fault| {
        let bed = Bed::new();
        bed.place(NAME, b"theirs");
        for method in ["PUT", "GET", "HEAD", "DELETE", "POST"] {
            bed.proxy.inject(method, "", 999, fault.clone());
        }
        let began = Instant::now();
        std::thread::scope(|scope| {
            let store = &bed.store;
            let mut all: Vec<Box<dyn FnOnce() -> bool + Send>> = vec![
                Box::new(|| store.create("x", b"x").is_err()),
                Box::new(|| store.put("x", b"x").is_err()),
                Box::new(|| store.get(NAME, 99).is_err()),
                Box::new(|| store.get_range(NAME, 1, &mut [0; 3]).is_err()),
                Box::new(|| store.delete(NAME).is_err()),
                Box::new(|| store.folders("").is_err()),
            ];
            if !matches!(fault, Fault::Endless) {
                all.push(Box::new(|| store.head(NAME).is_err()));
            }
            let runs: Vec<_> = all.into_iter().map(|run| scope.spawn(run)).collect();
            for (at, run) in runs.into_iter().enumerate() {
                // An endless answer to a put is a success with junk behind it, or an error: either is
                // within the bound.
                let failed = run.join().unwrap();
                assert!(failed || matches!(fault, Fault::Endless), "{at} {fault:?}");
            }
        });
        assert!(began.elapsed() < BOUND, "{fault:?}");
    });
}

#[test]
fn of_a_hundred_creators_one_wins() {
    race(&Bed::new().store, 3);
}

#[test]
fn of_a_hundred_creators_one_wins_though_answers_are_lost() {
    let bed = Bed::new();
    for fault in [
        Fault::LoseAnswer,
        Fault::Reset,
        Fault::Instead(status(500, "InternalError")),
    ] {
        bed.proxy.inject("PUT", "race/0", 25, fault);
    }
    race(&bed.store, 1);
}
