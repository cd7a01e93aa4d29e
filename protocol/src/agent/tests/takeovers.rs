//! A node is no member of what a job's log says is running, and its launcher waits to go on with it: on whose word it
//! takes the job over (R14).

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::scripted::{
    STORE, Scripted, belongs_to, by_store, config, member, node, record, registers,
};
use crate::local::{Register, ToAgent};
use crate::record::Record;
use crate::storelog::{Body, Entry};
use crate::time::Span;
use crate::wire::{Advert, JobMessage};

/// The first generation of nodes 1 and 2.
fn running() -> Record {
    Record {
        members: vec![member(1), member(2)],
        ..by_store(record(2, 1))
    }
}

/// How many entries are in the log once node 0 was asked to go on with it. Its members' agents are connected, and say
/// these things.
fn claims(words: [Option<bool>; 2]) -> usize {
    let running = running();
    let entry = Entry {
        seq: 1,
        prev: crate::ids::Digest::ZERO,
        writer: node(1),
        nonce: 7,
        body: Body::Claim(Box::new(running.clone())),
    };
    let mut s = Scripted::new(config(0, 2), Vec::new());
    s.log = Some(BTreeMap::from([(1, entry.encode().unwrap())]));
    (1..3).for_each(|i| s.peer(i));
    for (i, left_behind) in (1..3).zip(words) {
        let said = left_behind.map(|left_behind| Advert {
            leader: (!left_behind).then_some(node(1)),
            left_behind,
            started: left_behind,
            ..belongs_to(running.digest())
        });
        s.says_hello(i, Vec::from_iter(said));
    }
    s.says(ToAgent::Register(Register {
        store: Some(STORE),
        ..registers(0, running.spec.clone())
    }));
    s.says(ToAgent::MasterPort { port: 9 });
    s.pass(Span::from_millis(500));
    let record = Arc::new(Record {
        parent: running.digest(),
        members: vec![member(0)],
        ..running
    });
    s.hears(2, JobMessage::ClaimBirth { record });
    s.pass(Span::from_millis(500));
    s.log.unwrap().len()
}

#[test]
fn what_all_members_agents_say_is_left_is_taken_over_at_once() {
    assert_eq!(claims([Some(true); 2]), 2);
}

/// The other's failure detector may be wrong: here it has the address of a host that refuses.
#[test]
fn a_member_whose_agent_is_there_speaks_for_itself() {
    for other in [Some(false), None] {
        assert_eq!(claims([Some(true), other]), 1, "{other:?}");
        assert_eq!(claims([other, Some(true)]), 1, "{other:?}");
    }
}
