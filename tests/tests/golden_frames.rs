//! A version's bytes never change once they are committed. A changed or a new kind of
//! frame needs `WIRE_VERSION` raised, and with it a folder of its own, which `MUSTER_BLESS=1` fills. The same
//! holds for entries of the log and for what agents store.

#![expect(clippy::panic, clippy::expect_used, reason = "helpers of tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Debug, Write as _};
use std::path::PathBuf;

use muster_protocol::agent::Past;
use muster_protocol::codec::{self, CodecError};
use muster_protocol::job::Durable;
use muster_protocol::local::{Answer, ToAgent, ToLauncher};
use muster_protocol::memory;
use muster_protocol::storelog::{Body, ENTRY_VERSION, Entry};
use muster_protocol::wire::Message;
use muster_tests::golden;
use muster_tests::sim::log::hex;

/// A sample: its name, its bytes, and what they decode to again.
struct Sample<T> {
    name: String,
    value: T,
    bytes: Vec<u8>,
}

fn path_of(file: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/golden")).join(file)
}

fn kept_in(file: &str) -> BTreeMap<String, Vec<u8>> {
    let text = std::fs::read_to_string(path_of(file));
    golden::parse(&text.expect("the golden file"))
}

/// Writes a version's file once. Later it only adds further samples of kinds that the file has: their encoding
/// is the version's.
fn bless<T>(file: &str, samples: &[Sample<T>]) {
    let path = path_of(file);
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("a writable folder");
    let mut text = std::fs::read_to_string(&path).unwrap_or_default();
    let kept = golden::parse(&text);
    for sample in samples.iter().filter(|s| !kept.contains_key(&s.name)) {
        let is_known = kept.keys().any(|name| kind(name) == kind(&sample.name));
        assert!(
            kept.is_empty() || is_known,
            "`{}` is a new kind: raise the version",
            sample.name
        );
        writeln!(text, "{} {}", sample.name, hex(&sample.bytes)).expect("a string");
    }
    std::fs::write(&path, text).expect("a writable folder");
}

fn kind(name: &str) -> &str {
    name.split('#').next().expect("a first part")
}

/// Compares samples with their file, both ways, and wants one of every name.
#[track_caller]
fn check<T: PartialEq + Debug>(
    file: &str,
    names: &[&str],
    samples: Vec<Sample<T>>,
    decode: impl Fn(&[u8]) -> T,
) {
    let covered: BTreeSet<&str> = samples.iter().map(|s| kind(&s.name)).collect();
    for name in names {
        assert!(
            covered.contains(name),
            "`{name}` has no sample in golden.rs"
        );
    }
    if std::env::var_os("MUSTER_BLESS").is_some() {
        bless(file, &samples);
    }
    let kept = kept_in(file);
    for sample in samples {
        let bytes = kept.get(&sample.name);
        let bytes = bytes.unwrap_or_else(|| panic!("{file} has no `{}`", sample.name));
        assert_eq!(
            hex(&sample.bytes),
            hex(bytes),
            "{file}: `{}` changed: raise the version",
            sample.name
        );
        assert_eq!(decode(bytes), sample.value, "{file}: `{}`", sample.name);
    }
}

/// Numbers the samples of one name, so that each has a line of its own.
fn samples<T>(
    values: Vec<T>,
    name: impl Fn(&T) -> &'static str,
    encode: impl Fn(&T) -> Vec<u8>,
) -> Vec<Sample<T>> {
    let mut seen = std::collections::BTreeMap::<&str, u32>::new();
    let values = values.into_iter();
    values
        .map(|value| {
            let plain = name(&value);
            let count = seen.entry(plain).or_default();
            *count += 1;
            Sample {
                name: format!("{plain}#{count}"),
                bytes: encode(&value),
                value,
            }
        })
        .collect()
}

/// The place of the frames of this wire version.
fn wire(file: &str) -> String {
    format!("wire{}/{file}", codec::WIRE_VERSION)
}

fn frame<T: serde::Serialize>(value: &T) -> Vec<u8> {
    codec::encode_frame(value).expect("a sample within the limits")
}

#[test]
fn messages_between_agents() {
    let name = |m: &Message| match m {
        Message::Job { body, .. } => golden::job_name(body),
        other => golden::message_name(other),
    };
    let names: Vec<&str> = golden::MESSAGES
        .iter()
        .filter(|n| **n != "job")
        .chain(golden::JOB_MESSAGES)
        .copied()
        .collect();
    let all = samples(golden::messages(), name, frame);
    check(&wire("message.txt"), &names, all, |b| {
        Message::decode(b).expect("a message")
    });
}

#[test]
fn frames_to_the_agent() {
    let all = samples(golden::to_agent(), golden::to_agent_name, frame);
    check(&wire("to_agent.txt"), golden::TO_AGENT, all, |b| {
        codec::decode_frame::<ToAgent>(b).expect("a frame")
    });
}

#[test]
fn frames_to_the_launcher() {
    let all = samples(golden::to_launcher(), golden::to_launcher_name, frame);
    check(&wire("to_launcher.txt"), golden::TO_LAUNCHER, all, |b| {
        codec::decode_frame::<ToLauncher>(b).expect("a frame")
    });
}

#[test]
fn answers_to_the_command_line() {
    let all = samples(golden::answers(), golden::answer_name, frame);
    check(&wire("answer.txt"), golden::ANSWERS, all, |b| {
        codec::decode_frame::<Answer>(b).expect("a frame")
    });
}

#[test]
fn questions_to_memory() {
    let all = samples(golden::memory_asks(), golden::memory_ask_name, frame);
    check(&wire("memory_ask.txt"), golden::MEMORY_ASKS, all, |b| {
        codec::decode_frame::<memory::Ask>(b).expect("a frame")
    });
}

#[test]
fn answers_from_memory() {
    let all = samples(golden::memory_answers(), golden::memory_answer_name, frame);
    check(
        &wire("memory_answer.txt"),
        golden::MEMORY_ANSWERS,
        all,
        |b| codec::decode_frame::<memory::Answer>(b).expect("a frame"),
    );
}

#[test]
fn entries_of_the_log() {
    let name = |e: &Entry| golden::entry_name(&e.body);
    let encode = |e: &Entry| e.encode().expect("a sample within the limits");
    let all = samples(golden::entries(), name, encode);
    check(
        &format!("log{}/entry.txt", ENTRY_VERSION),
        golden::ENTRIES,
        all,
        |b| Entry::decode(b).expect("an entry"),
    );
}

/// As builds wrote them that knew no version 3, or no version 4: they lie in stores, too.
#[test]
fn entries_of_versions_2_and_3() {
    for version in ["log2", "log3"] {
        let kept = kept_in(&format!("{version}/entry.txt"));
        let name = |e: &Entry| golden::entry_name(&e.body);
        let mut entries = golden::entries();
        entries.retain(|e| !matches!(e.body, Body::Snapshot(_)));
        assert_eq!(kept.len(), entries.len());
        for Sample { name, value, .. } in samples(entries, name, |_| Vec::new()) {
            assert_eq!(Entry::decode(&kept[&name]), Ok(value), "{version}: {name}");
        }
    }
}

/// Entries without checksums lie in stores, and are read for ever.
#[test]
fn entries_of_version_1() {
    let kept = kept_in("log1/entry.txt");
    // A claim's record is of the version of its day, and others came with version 2.
    let newer = |e: &Entry| match e.body {
        Body::Claim(_) | Body::Unpin { .. } | Body::Rules(_) | Body::Snapshot(_) => true,
        Body::Retire { good, .. } => good.is_some(),
        Body::Commit(_) | Body::Reject { .. } | Body::Pin { .. } => false,
    };
    for entry in golden::entries().into_iter().filter(|e| !newer(e)) {
        let name = format!("{}#1", golden::entry_name(&entry.body));
        assert_eq!(Entry::decode(&kept[&name]), Ok(entry));
    }
}

/// The place of what agents of this version store.
fn stored(file: &str) -> String {
    format!("stored{}/{file}", codec::STORED_VERSION)
}

/// An agent finds its votes again after an upgrade, or knows that it does not: what is stored changes with
/// its own version only.
#[test]
fn what_an_agent_stores() {
    let encode = |d: &Durable| d.encode().expect("a sample within the limits");
    let all = samples(golden::durables(), |_| "durable", encode);
    check(&stored("durable.txt"), &["durable"], all, |b| {
        Durable::decode(b).expect("a job's state")
    });
    let mut past = Past::default();
    for (lineage, number, over) in golden::forgotten() {
        past.add(lineage, number, over);
    }
    let encode = |p: &Past| p.encode().expect("a sample within the limits");
    check(
        &stored("past.txt"),
        &["past"],
        samples(vec![past], |_| "past", encode),
        |b| Past::decode(b).expect("a list"),
    );
}

/// As builds stored it that did not keep for whom a start waits: it is still read.
#[test]
fn what_an_agent_stored_before() {
    let jobs = kept_in("stored4/durable.txt");
    assert_eq!(jobs.len(), golden::durables().len());
    for (i, mut wanted) in golden::durables().into_iter().enumerate() {
        wanted.held_for = Vec::new();
        assert_eq!(
            Durable::decode(&jobs[&format!("durable#{}", i + 1)]),
            Ok(wanted)
        );
    }
    for bytes in kept_in("stored4/past.txt").values() {
        let mut past = Past::default();
        for (lineage, number, over) in golden::forgotten() {
            past.add(lineage, number, over);
        }
        assert_eq!(Past::decode(bytes), Ok(past));
    }
}

/// As builds stored it whose format had no version: it is refused, for what it says of votes cannot be
/// known.
#[test]
fn what_an_agent_stored_without_a_version() {
    let kept = kept_in("stored1/durable.txt");
    assert_eq!(kept.len(), 1);
    for bytes in kept.values() {
        let refused = CodecError::StoredVersion { theirs: 1 };
        assert_eq!(Durable::decode(bytes), Err(refused));
    }
}

/// A record's digest names it for ever: it must not depend on the version of this program.
#[test]
fn digests_of_records() {
    let all = golden::records();
    let lines = all.iter().enumerate().map(|(i, r)| (i, r.digest().hex()));
    let lines: String = lines.map(|(i, d)| format!("record#{i} {d}\n")).collect();
    let path = path_of("digest.txt");
    let mut kept = std::fs::read_to_string(&path).expect("the golden file");
    // Further samples only.
    if std::env::var_os("MUSTER_BLESS").is_some() && lines.starts_with(&kept) {
        std::fs::write(&path, &lines).expect("a writable folder");
        kept.clone_from(&lines);
    }
    assert_eq!(kept, lines);
}
