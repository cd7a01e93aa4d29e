//! Against Azurite, Azure Blob Storage's emulator.

use muster_store::{Created, Kind, Options, Patience, Store, Variables, Verified};

use crate::azurite::{KEY, start, variables};
use crate::bed::{all, bytes, go_on, race};
use crate::http::Response;
use crate::proxy::{Fault, Proxy, Server};

fn store_at(port: u16, location: &str, key: &str) -> Store {
    let variables: Variables = variables(port, key).into_iter().collect();
    let options = Options {
        patience: Patience::default(),
        part: 5 << 20,
        ..Options::new(variables)
    };
    Store::open(&location.parse().unwrap(), &options).unwrap()
}

fn store(port: u16) -> Store {
    store_at(port, "az://box/team", KEY)
}

#[test]
fn it_is_taken_and_does_all_that_muster_does() {
    let (_server, port) = start();
    let store = store(port);
    let probed = store.probe().unwrap();
    println!("{probed:?}");
    let job = store.within("job").unwrap();
    assert_eq!(job.create("log/1.json", b"one").unwrap(), Created::Created);
    assert_eq!(job.create("log/1.json", b"two").unwrap(), Created::Exists);
    assert_eq!(job.get("log/1.json", 9).unwrap(), b"one");
    assert_eq!(job.get("log/2.json", 9).unwrap_err().kind, Kind::NotFound);
    assert_eq!(job.head("log/2.json").unwrap_err().kind, Kind::NotFound);
    let mut end = [0; 2];
    job.get_range("log/1.json", 1, &mut end).unwrap();
    assert_eq!(&end, b"ne");
    job.put("beacon", b"1").unwrap();
    job.put("beacon", b"2").unwrap();
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
fn large_objects_arrive_whole() {
    let (_server, port) = start();
    let (store, bytes) = (store(port), bytes(17 << 20));
    let total = bytes.len() as u64;
    let uploaded = store
        .upload("data/1/n0", &mut &bytes[..], total, &mut go_on)
        .unwrap();
    assert_eq!(uploaded.verified, Verified::Size);
    assert!(store.get("data/1/n0", total).unwrap() == bytes);
}

#[test]
fn keys_and_containers_that_are_wrong_are_told() {
    let (_server, port) = start();
    let wrong = KEY.replacen("Eby8", "Aby8", 1);
    let error = store_at(port, "az://box/x", &wrong)
        .create("a", b"a")
        .unwrap_err();
    // Azure itself says AuthenticationFailed, the emulator AuthorizationFailure.
    let told = matches!(error.kind, Kind::Credentials | Kind::Denied);
    assert!(told && !error.unknown, "{error}");
    let missing = store_at(port, "az://no-such-box/x", KEY);
    assert_eq!(missing.get("a", 9).unwrap_err().kind, Kind::NoBucket);
    assert_eq!(missing.head("a").unwrap_err().kind, Kind::NoBucket);
    assert_eq!(missing.create("a", b"a").unwrap_err().kind, Kind::NoBucket);
}

#[test]
fn what_goes_wrong_on_the_way_changes_nothing() {
    let (_server, port) = start();
    let proxy = Proxy::start(Server::Port(port));
    let store = store_at(proxy.port, "az://box/faults", KEY);
    let failed = Response::new(500);
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
}
