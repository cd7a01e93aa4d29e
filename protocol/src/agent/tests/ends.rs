//! An agent that did not have an end decided: what it says of those that may still train, and what it asks.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::Event;
use super::super::scripted::{
    STORE, Scripted, by_store, config, holds, key, next, node, record, registers,
};
use crate::ids::{Digest, NodeId};
use crate::job::Job;
use crate::local::{Register, ToAgent};
use crate::membership::Answer;
use crate::record::{Kind, Record};
use crate::spec::JobSpec;
use crate::storelog::{Body, Entry};
use crate::time::Span;
use crate::wire::JobMessage;

fn end_of(last: &Record) -> Record {
    Record {
        kind: Kind::End { cancelled: true },
        members: Vec::new(),
        ..next(last, 1)
    }
}

/// A leader that was started again hears of an end that another node has had decided: it does not know who has stopped,
/// and makes nobody wait.
#[test]
fn one_that_led_and_did_not_have_the_end_decided_makes_nobody_wait() {
    let r = record(3, 2);
    let mut s = Scripted::new(config(0, 2), vec![holds(&r, 1)]);
    for peer in [1, 2] {
        s.peer(peer);
    }
    s.pass(Span::from_millis(100));
    assert!(s.agent.jobs().any(Job::is_led_here));
    let record = Arc::new(end_of(&r));
    s.hears(1, JobMessage::Decided { record });
    s.hears(2, JobMessage::Ask { have: r.digest() });
    let held = |(_, body): &(NodeId, JobMessage)| matches!(body, JobMessage::Held { .. });
    assert!(!s.sent.iter().any(held));
    let job = s.agent.job(&key("j")).unwrap();
    assert_eq!(job.left_running(s.now), None);
}

fn entry(seq: u64, prev: Digest, record: &Record) -> Vec<u8> {
    let entry = Entry {
        seq,
        prev,
        writer: node(1),
        nonce: seq,
        body: Body::Claim(Box::new(record.clone())),
    };
    entry.encode().unwrap()
}

/// The agent that has an end decided by a slow store hears of it from one that has read it there.
#[test]
fn one_that_has_an_end_decided_knows_for_how_long_a_start_waits_however_it_hears_of_it() {
    let first = by_store(record(2, 1));
    let digest = first.digest();
    let mut s = Scripted::new(config(0, 2), vec![holds(&first, 1)]);
    s.log = Some(BTreeMap::from([(1, entry(1, Digest::ZERO, &first))]));
    (1..3).for_each(|i| s.peer(i));
    s.says(ToAgent::Register(Register {
        store: Some(STORE),
        running: Some(digest),
        ..registers(0, first.spec.clone())
    }));
    s.says(ToAgent::MasterPort { port: 9 });
    s.says(ToAgent::Started { digest, attempt: 1 });
    s.status(1, digest, 1, |_| {});
    s.pass(Span::from_secs(4));
    // Its launcher answers.
    s.grants.remove(&node(1));
    s.probes
        .insert(node(1), (Answer::Refused, Answer::Answered));
    s.on(Event::Disconnected { node: node(1) });
    s.pass(Span::from_secs(4));
    s.says(ToAgent::Cancel);
    s.slow = Some(Vec::new());
    s.says(ToAgent::Stopped { digest });
    for _ in 0..40 {
        s.pass(Span::from_millis(100));
        let written = s.log.as_ref().and_then(|log| log.get(&2)).cloned();
        let under_way = s.slow.replace(Vec::new()).unwrap();
        let Some(end) = written else {
            under_way.into_iter().for_each(|e| s.on(e));
            continue;
        };
        let Body::Claim(end) = Entry::decode(&end).unwrap().body else {
            panic!("no claim")
        };
        let have = end.digest();
        let record = Arc::new(*end);
        s.hears(2, JobMessage::Decided { record });
        s.slow = None;
        under_way.into_iter().for_each(|e| s.on(e));
        s.pass(Span::from_millis(100));
        s.sent.clear();
        s.hears(2, JobMessage::Ask { have });
        let held = s.sent.iter().find_map(|(_, body)| match body {
            JobMessage::Held { ms, .. } => Some(*ms),
            _ => None,
        });
        return assert!(held > Some(10_000), "{held:?}");
    }
    panic!("no end");
}

/// A launcher is started with the store on an agent that reads the job's end there: node 1 had it decided, and says
/// that, or nothing. Whether the next life has begun after 0.2, 0.5 and 5 seconds.
fn begins(says_ms: Option<u32>) -> [bool; 3] {
    let first = by_store(record(2, 1));
    let end = end_of(&first);
    let one = entry(1, Digest::ZERO, &first);
    let two = entry(2, Entry::digest(&one), &end);
    let mut s = Scripted::new(config(0, 2), Vec::new());
    s.log = Some(BTreeMap::from([(1, one), (2, two)]));
    (1..3).for_each(|i| s.peer(i));
    let spec = JobSpec {
        min_nodes: 1,
        max_nodes: 1,
        ..first.spec
    };
    s.says(ToAgent::Register(Register {
        store: Some(STORE),
        ..registers(0, spec)
    }));
    s.says(ToAgent::MasterPort { port: 9 });
    let have = end.digest();
    assert!(s.sent.contains(&(node(1), JobMessage::Ask { have })));
    if let Some(ms) = says_ms {
        let (digest, nodes) = (have, Vec::new());
        s.hears(1, JobMessage::Held { digest, ms, nodes });
    }
    let begun = |s: &mut Scripted, ms| {
        s.pass(Span::from_millis(ms));
        s.log.as_ref().unwrap().len() > 2
    };
    [200, 300, 4_500].map(|ms| begun(&mut s, ms))
}

#[test]
fn a_start_after_an_end_that_is_read_in_the_log_waits_for_the_word_of_one_that_knows() {
    assert_eq!(begins(Some(3_000)), [false, false, true]);
    assert_eq!(begins(Some(0)), [true; 3]);
    assert_eq!(begins(None), [false, true, true]);
}
