//! The frames of this version are as they were when they were first committed. After a deliberate
//! change of the format, and of its version, `MUSTER_BLESS=1` writes the files anew.

#![expect(clippy::panic, clippy::expect_used, reason = "helpers of tests")]

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::path::PathBuf;

use muster_protocol::agent::Past;
use muster_protocol::codec::{self, CodecError};
use muster_protocol::job::Durable;
use muster_protocol::local::{Answer, ToAgent, ToLauncher};
use muster_protocol::memory;
use muster_protocol::storelog::{Body, Entry};
use muster_protocol::wire::Message;
use muster_tests::golden;
use muster_tests::sim::log::hex;

/// A sample: its name, its bytes, and what they decode to again.
struct Sample<T> {
    name: String,
    value: T,
    bytes: Vec<u8>,
}

/// Compares samples with their file, both ways, and wants one of every name.
#[track_caller]
fn check<T: PartialEq + Debug>(
    file: &str,
    names: &[&str],
    samples: Vec<Sample<T>>,
    decode: impl Fn(&[u8]) -> T,
) {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/golden/v1")).join(file);
    let covered: BTreeSet<&str> = samples
        .iter()
        .map(|s| s.name.split('#').next().expect("a first part"))
        .collect();
    for name in names {
        assert!(
            covered.contains(name),
            "`{name}` has no sample in golden.rs"
        );
    }
    if std::env::var_os("MUSTER_BLESS").is_some() {
        let lines = samples
            .iter()
            .map(|s| format!("{} {}\n", s.name, hex(&s.bytes)));
        std::fs::write(&path, lines.collect::<String>()).expect("a writable folder");
    }
    let text = std::fs::read_to_string(&path).expect("the golden file");
    let kept = golden::parse(&text);
    for sample in samples {
        let bytes = kept.get(&sample.name);
        let bytes = bytes.unwrap_or_else(|| panic!("{file} has no `{}`", sample.name));
        assert_eq!(hex(&sample.bytes), hex(bytes), "{file}: `{}`", sample.name);
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
    check("message.txt", &names, all, |b| {
        Message::decode(b).expect("a message")
    });
}

#[test]
fn frames_to_the_agent() {
    let all = samples(golden::to_agent(), golden::to_agent_name, frame);
    check("to_agent.txt", golden::TO_AGENT, all, |b| {
        codec::decode_frame::<ToAgent>(b).expect("a frame")
    });
}

#[test]
fn frames_to_the_launcher() {
    let all = samples(golden::to_launcher(), golden::to_launcher_name, frame);
    check("to_launcher.txt", golden::TO_LAUNCHER, all, |b| {
        codec::decode_frame::<ToLauncher>(b).expect("a frame")
    });
}

#[test]
fn answers_to_the_command_line() {
    let all = samples(golden::answers(), golden::answer_name, frame);
    check("answer.txt", golden::ANSWERS, all, |b| {
        codec::decode_frame::<Answer>(b).expect("a frame")
    });
}

#[test]
fn questions_to_memory() {
    let all = samples(golden::memory_asks(), golden::memory_ask_name, frame);
    check("memory_ask.txt", golden::MEMORY_ASKS, all, |b| {
        codec::decode_frame::<memory::Ask>(b).expect("a frame")
    });
}

#[test]
fn answers_from_memory() {
    let all = samples(golden::memory_answers(), golden::memory_answer_name, frame);
    check("memory_answer.txt", golden::MEMORY_ANSWERS, all, |b| {
        codec::decode_frame::<memory::Answer>(b).expect("a frame")
    });
}

#[test]
fn entries_of_the_log() {
    let name = |e: &Entry| golden::entry_name(&e.body);
    let encode = |e: &Entry| e.encode().expect("a sample within the limits");
    let all = samples(golden::entries(), name, encode);
    check("../v4/entry.txt", golden::ENTRIES, all, |b| {
        Entry::decode(b).expect("an entry")
    });
}

/// As builds wrote them that knew no version 3, or no version 4: they lie in stores, too.
#[test]
fn entries_of_versions_2_and_3() {
    for version in ["v2", "v3"] {
        let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/golden");
        let path = PathBuf::from(golden).join(version).join("entry.txt");
        let text = std::fs::read_to_string(path).expect("the golden file");
        let kept = golden::parse(&text);
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
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/v1/entry.txt");
    let text = std::fs::read_to_string(path).expect("the golden file");
    let kept = golden::parse(&text);
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

/// An agent finds its votes again after an upgrade, or knows that it does not: what is stored changes with
/// its own version only.
#[test]
fn what_an_agent_stores() {
    let encode = |d: &Durable| d.encode().expect("a sample within the limits");
    let all = samples(golden::durables(), |_| "durable", encode);
    check("../stored3/durable.txt", &["durable"], all, |b| {
        Durable::decode(b).expect("a job's state")
    });
    let mut past = Past::default();
    for (lineage, number, over) in golden::forgotten() {
        past.add(lineage, number, over);
    }
    let encode = |p: &Past| p.encode().expect("a sample within the limits");
    check(
        "../stored3/past.txt",
        &["past"],
        samples(vec![past], |_| "past", encode),
        |b| Past::decode(b).expect("a list"),
    );
}

/// As builds stored it that did not note since when a start is held back: it is still read.
#[test]
fn what_an_agent_stored_before() {
    let kept = |name: &str| {
        let path = format!("{}/golden/stored2/{name}", env!("CARGO_MANIFEST_DIR"));
        golden::parse(&std::fs::read_to_string(path).expect("the golden file"))
    };
    let jobs = kept("durable.txt");
    assert_eq!(jobs.len(), golden::durables().len());
    for (i, mut wanted) in golden::durables().into_iter().enumerate() {
        wanted.held_from = None;
        assert_eq!(
            Durable::decode(&jobs[&format!("durable#{}", i + 1)]),
            Ok(wanted)
        );
    }
    for bytes in kept("past.txt").values() {
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
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/stored1/durable.txt");
    let text = std::fs::read_to_string(path).expect("the golden file");
    let kept = golden::parse(&text);
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
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/v1/digest.txt");
    if std::env::var_os("MUSTER_BLESS").is_some() {
        std::fs::write(path, &lines).expect("a writable folder");
    }
    assert_eq!(
        std::fs::read_to_string(path).expect("the golden file"),
        lines
    );
}
