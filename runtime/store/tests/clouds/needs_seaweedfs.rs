//! Against SeaweedFS: `MUSTER_TEST_WEED` names its program.

use muster_store::{Checksum, Created, Kind, Patience, Store, Verified};

use crate::bed::{all, bytes, go_on, hasty, options, race, s3};
use crate::http::Response;
use crate::proxy::{Fault, Proxy, Server};
use crate::server::{self, Running};

fn start() -> (Running, u16) {
    server::seaweedfs(
        |port| match s3("s3://bucket", port, hasty()).create("ready", b"") {
            Ok(_) => Ok(()),
            Err(error) => Err(error.to_string()),
        },
    )
}

fn store(port: u16) -> Store {
    s3("s3://bucket/team", port, Patience::default())
}

#[test]
fn it_is_taken_and_does_all_that_muster_does() {
    let (_server, port) = start();
    let store = store(port);
    let probed = store.probe().unwrap();
    println!("{probed:?}");
    assert_eq!(self::store(port).probe().unwrap().uuid, probed.uuid);
    let job = store.within("job").unwrap();
    assert_eq!(job.create("log/1.json", b"one").unwrap(), Created::Created);
    assert_eq!(job.create("log/1.json", b"two").unwrap(), Created::Exists);
    assert_eq!(job.create("log/1.json", b"one").unwrap(), Created::Created);
    assert_eq!(job.get("log/1.json", 9).unwrap(), b"one");
    assert_eq!(job.get("log/2.json", 9).unwrap_err().kind, Kind::NotFound);
    assert_eq!(job.head("log/2.json").unwrap_err().kind, Kind::NotFound);
    assert_eq!(job.get("log/1.json", 2).unwrap_err().kind, Kind::TooLarge);
    let mut end = [0; 2];
    job.get_range("log/1.json", 1, &mut end).unwrap();
    assert_eq!(&end, b"ne");
    let short = job.get_range("log/1.json", 2, &mut end).unwrap_err();
    assert_eq!(short.kind, Kind::Short, "{short}");
    job.put("beacon", b"1").unwrap();
    job.put("beacon", b"2").unwrap();
    assert_eq!(job.get("beacon", 9).unwrap(), b"2");
    assert_eq!(job.folders("").unwrap(), ["log"]);
    let names: Vec<String> = all(&job, "").into_iter().map(|entry| entry.name).collect();
    assert_eq!(names, ["beacon", "log/1.json"]);
    job.delete("beacon").unwrap();
    job.delete("beacon").unwrap();
    assert_eq!(job.get("beacon", 9).unwrap_err().kind, Kind::NotFound);
}

#[test]
fn of_a_hundred_creators_one_wins() {
    let (_server, port) = start();
    race(&store(port), 3);
}

#[test]
fn listings_have_pages() {
    let (_server, port) = start();
    let store = store(port);
    std::thread::scope(|scope| {
        for part in 0..8 {
            let store = &store;
            scope.spawn(move || {
                for number in 0..150 {
                    store
                        .create(&format!("log/{:08}", part * 150 + number), b"x")
                        .unwrap();
                }
            });
        }
    });
    let names: Vec<String> = all(&store, "log")
        .into_iter()
        .map(|entry| entry.name)
        .collect();
    let expected: Vec<String> = (0..1200).map(|number| format!("log/{number:08}")).collect();
    assert_eq!(names, expected);
}

#[test]
fn large_objects_arrive_whole_and_are_compared() {
    let (_server, port) = start();
    let (store, bytes) = (store(port), bytes(23 << 20));
    let total = bytes.len() as u64;
    let uploaded = store
        .upload("data/1/n0", &mut &bytes[..], total, &mut go_on)
        .unwrap();
    assert_eq!(uploaded.verified, Verified::Checksum);
    let head = store.head("data/1/n0").unwrap();
    assert_eq!(
        (head.size, head.checksum),
        (total, Some(Checksum::Crc64Nvme(uploaded.crc64)))
    );
    assert!(store.get("data/1/n0", total).unwrap() == bytes);
    let mut range = vec![0; 4 << 20];
    store.get_range("data/1/n0", 7 << 20, &mut range).unwrap();
    assert!(range == bytes[7 << 20..11 << 20]);
}

#[test]
fn credentials_and_buckets_that_are_wrong_are_told() {
    let (_server, port) = start();
    let mut options = options(port, Patience::default());
    let endpoint = format!("http://127.0.0.1:{}", port);
    options.variables = [
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "wrong"),
        ("AWS_ENDPOINT_URL", &endpoint),
    ]
    .into_iter()
    .collect();
    let wrong = Store::open(&"s3://bucket/x".parse().unwrap(), &options).unwrap();
    let error = wrong.create("a", b"a").unwrap_err();
    assert!(
        matches!(error.kind, Kind::Credentials | Kind::Denied),
        "{error}"
    );
    assert!(!error.unknown);
    let missing = s3("s3://no-such-bucket/x", port, Patience::default());
    let error = missing.get("a", 9).unwrap_err();
    assert_eq!(error.kind, Kind::NoBucket, "{error}");
    assert_eq!(missing.head("a").unwrap_err().kind, Kind::NoBucket);
}

#[test]
fn what_goes_wrong_on_the_way_changes_nothing() {
    let (_server, port) = start();
    let proxy = Proxy::start(Server::Port(port));
    let store = s3("s3://bucket/faults", proxy.port, Patience::default());
    let failed = Response::new(500).body("<Error><Code>InternalError</Code></Error>");
    let faults = [
        Fault::LoseAnswer,
        Fault::Reset,
        Fault::Afterwards(failed.clone()),
        Fault::Instead(failed),
    ];
    for (number, fault) in faults.into_iter().enumerate() {
        let name = format!("log/{number}");
        proxy.inject("PUT", &name, 1, fault.clone());
        assert_eq!(
            store.create(&name, b"mine").unwrap(),
            Created::Created,
            "{fault:?}"
        );
        proxy.inject("PUT", &name, 1, fault.clone());
        assert_eq!(
            store.create(&name, b"other").unwrap(),
            Created::Exists,
            "{fault:?}"
        );
        proxy.inject("GET", &name, 1, fault);
        assert_eq!(store.get(&name, 9).unwrap(), b"mine");
    }
    proxy.inject("GET", "log/0", 1, Fault::Corrupt);
    assert_eq!(store.get("log/0", 9).unwrap(), b"mine");
    let bytes = bytes(11 << 20);
    proxy.inject("PUT", "partNumber=1&", 1, Fault::LoseAnswer);
    proxy.inject("PUT", "partNumber=2&", 1, Fault::Reset);
    proxy.inject("POST", "uploadId", 1, Fault::LoseAnswer);
    let uploaded = store.upload("data", &mut &bytes[..], bytes.len() as u64, &mut go_on);
    assert_eq!(uploaded.unwrap().verified, Verified::Checksum);
    assert!(store.get("data", bytes.len() as u64).unwrap() == bytes);
}
