//! An agent that did not have an end decided: what it says of those that may still train, and what it asks.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::scripted::{
    STORE, Scripted, by_store, config, holds, key, next, node, record, registers,
};
use crate::ids::{Digest, NodeId};
use crate::job::Job;
use crate::local::{Register, ToAgent};
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

/// A launcher is started with the store on an agent that reads the job's end there: node 1 had it decided, and says
/// that, or nothing. Whether the next life has begun after half a second and after five.
fn begins(says_ms: Option<u32>) -> (bool, bool) {
    let first = by_store(record(2, 1));
    let end = end_of(&first);
    let mut log = BTreeMap::new();
    let mut prev = Digest::ZERO;
    for (seq, record) in [(1, &first), (2, &end)] {
        let entry = Entry {
            seq,
            prev,
            writer: node(1),
            nonce: seq,
            body: Body::Claim(Box::new(record.clone())),
        };
        let bytes = entry.encode().unwrap();
        prev = Entry::digest(&bytes);
        log.insert(seq, bytes);
    }
    let mut s = Scripted::new(config(0, 2), Vec::new());
    s.log = Some(log);
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
    (begun(&mut s, 500), begun(&mut s, 4_500))
}

#[test]
fn a_start_after_an_end_that_is_read_in_the_log_waits_for_the_word_of_one_that_knows() {
    assert_eq!(begins(Some(3_000)), (false, true));
    assert_eq!(begins(Some(0)), (true, true));
    assert_eq!(begins(None), (true, true));
}
