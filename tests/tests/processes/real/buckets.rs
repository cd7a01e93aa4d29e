//! A job whose store is a bucket, against a small S3 in memory behind a proxy that injects faults.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use nix::sys::signal::Signal;

use crate::clouds::fake::{BUCKET, Fake, Faults};
use crate::clouds::http::Response;
use crate::clouds::proxy::{Fault, Proxy, Server};
use crate::clouds::{lend, open};
use crate::harness::Bed;

use super::saves::Saves;

/// A server, and the store in it.
pub(crate) fn bucket(faults: Faults) -> (Arc<Fake>, Proxy, String) {
    let fake = Arc::new(Fake::new(faults));
    let proxy = Proxy::start(Server::Fake(Arc::clone(&fake)));
    (fake, proxy, format!("s3://{BUCKET}/team"))
}

#[test]
fn a_job_whose_nodes_all_die_goes_on_from_a_bucket_on_others() {
    let (fake, proxy, location) = bucket(Faults::default());
    let store = open(&location, proxy.port);
    let mut saves = Saves::at(&location, &store, &["--max-restarts=1"], "3", 3, 5);
    // What agents do in the bucket their launchers do for them: they are lent nothing.
    for node in 0..6 {
        saves.bed.agent(node);
    }
    lend(&mut saves.bed, proxy.port);
    for node in 0..3 {
        saves.bed.attach(node);
    }
    let first = saves.bed.group(&[0, 1, 2], 0);
    saves
        .bed
        .until("two commits", |_| saves.committed().len() >= 2);
    let at = (0..3).map(|node| saves.bed.kill(node)).max().unwrap();
    let committed = *saves.committed().last().unwrap();
    assert!(saves.noted("restored", first.generation).is_empty());
    // Half of what has to be there is asked for twice.
    proxy.inject("GET", "/data/", 2, Fault::Reset);
    proxy.inject("GET", "/manifest/", 1, Fault::Truncate);
    for node in 3..6 {
        saves.bed.attach(node);
    }
    let next = saves.bed.group(&[3, 4, 5], at);
    let restored = saves.restored(&next);
    assert!(restored >= committed, "{restored} of {committed}");
    assert!(saves.committed().contains(&restored));
    saves.bed.order(None, 0);
    for node in 3..6 {
        assert_eq!(saves.bed.ended(node), Some(0));
    }
    // All of it is in the job's folder, but for what names the store.
    let state = fake.state.lock().unwrap();
    let elsewhere = |key: &&String| !key.starts_with("team/job/");
    let other: Vec<&String> = state.objects.keys().filter(elsewhere).collect();
    assert_eq!(other, ["team/muster-store"]);
    assert!(state.uploads.is_empty(), "{:?}", state.uploads.keys());
}

#[test]
fn faults_on_the_way_lose_nothing_and_commit_nothing_twice() {
    let (_fake, proxy, location) = bucket(Faults::default());
    let store = open(&location, proxy.port);
    let mut saves = Saves::at(&location, &store, &["--max-restarts=1"], "2", 3, 5);
    lend(&mut saves.bed, proxy.port);
    let failed = || Response::new(500).body("<Error><Code>InternalError</Code></Error>");
    let busy = Response::new(503).body("<Error><Code>SlowDown</Code></Error>");
    // Each of these costs a try, and none of them an outcome: records, data, parts and manifests.
    for part in ["/log/", "/data/", "rank-0.json", "/manifest/", "/beacon"] {
        for fault in [
            Fault::LoseAnswer,
            Fault::Afterwards(failed()),
            Fault::Instead(failed()),
            Fault::Instead(busy.clone()),
            Fault::Reset,
        ] {
            proxy.inject("PUT", part, 1, fault);
        }
    }
    proxy.inject("GET", "/log/", 3, Fault::Reset);
    let first = saves.train(&[0, 1], 0);
    saves
        .bed
        .until("three commits", |_| saves.committed().len() >= 3);
    let steps = saves.committed();
    assert!(steps.windows(2).all(|two| two[0] < two[1]), "{steps:?}");
    let at = first.began().max(saves.bed.kill(0)).max(saves.bed.kill(1));
    let next = saves.train(&[2, 3], at);
    let restored = saves.restored(&next);
    assert!(saves.committed().contains(&restored) && restored >= *steps.last().unwrap());
    saves.bed.order(None, 0);
    assert_eq!((saves.bed.ended(2), saves.bed.ended(3)), (Some(0), Some(0)));
}

#[test]
fn a_node_restores_from_its_own_disk_and_from_the_bucket_where_that_is_damaged() {
    let (_fake, proxy, location) = bucket(Faults::default());
    let store = open(&location, proxy.port);
    let mut saves = Saves::at(&location, &store, &["--max-restarts=1"], "2", 3, 5);
    let disk = tempfile::tempdir().unwrap();
    lend(&mut saves.bed, proxy.port);
    let path = disk.path().join("cache");
    saves
        .bed
        .env("PET_CHECKPOINT_CACHE", path.to_str().unwrap());
    let mut group = saves.train(&[0, 1], 0);
    for damaged in [false, true] {
        let before = saves.committed().len();
        saves.bed.until("two commits more", |_| {
            saves.committed().len() >= before + 2
        });
        saves.bed.signal(saves.bed.launcher_pid(0), Signal::SIGSTOP);
        saves.bed.signal(saves.bed.launcher_pid(1), Signal::SIGSTOP);
        let data = path.join("job/data");
        let names = || std::fs::read_dir(&data).unwrap().map(|e| e.unwrap().path());
        let kept: Vec<PathBuf> = names().collect();
        assert!((1..=3).contains(&kept.len()), "{kept:?}");
        if damaged {
            for file in kept
                .iter()
                .flat_map(|save| std::fs::read_dir(save).unwrap())
            {
                let file = File::options().write(true).open(file.unwrap().path());
                file.unwrap().write_all_at(&[0xee; 64], 5000).unwrap();
            }
        }
        let at = (0..2).map(|node| saves.bed.kill(node)).max().unwrap();
        group = saves.train(&[0, 1], at.max(group.began()));
        saves.restored(&group);
        let cached = saves.noted("cached", group.generation);
        // Both nodes are on this disk. What each rank wants is a little more than 3 MiB.
        assert!(
            cached.iter().all(|e| (e.step > 3 << 20) != damaged),
            "{cached:?}"
        );
        for line in saves.origins(&[0, 1], 2) {
            let near = line.contains(" from this node's disk, 0 B from the store");
            assert_eq!(near, !damaged, "{line}");
        }
    }
    saves.bed.order(None, 0);
    assert_eq!((saves.bed.ended(0), saves.bed.ended(1)), (Some(0), Some(0)));
}

#[test]
fn a_store_that_cannot_be_used_is_refused_at_the_start_with_the_fix() {
    let unconditional = Faults {
        unconditional: true,
        ..Faults::default()
    };
    let (_fake, proxy, location) = bucket(unconditional);
    let (_fine, other, _) = bucket(Faults::default());
    let wrong = |text: &str| text.to_owned();
    for (location, port, fix) in [
        (&location, proxy.port, "honours `If-None-Match: *`"),
        (
            &wrong("s3://no-such-bucket/x"),
            other.port,
            "create the bucket",
        ),
        (&wrong("s3://Bucket/x"), other.port, "lower-case"),
        (&wrong("ftp://host/x"), other.port, "s3://"),
    ] {
        let mut bed = Bed::new(&["--nnodes=1", &format!("--store={location}")]);
        lend(&mut bed, port);
        bed.run(0, 0);
        let code = bed.ended(0);
        let said = bed.said(0);
        assert!(matches!(code, Some(1 | 2)), "{location}: {code:?}: {said}");
        assert!(said.contains(fix), "{location}: {said}");
        assert!(bed.events().is_empty(), "no worker was started");
    }
}
