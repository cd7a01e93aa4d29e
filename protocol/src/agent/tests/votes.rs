//! No vote is given twice, and none that was not stored.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::scripted::{
    START, Scripted, by_store, config, ended, holds, key, next, node, record, timeouts, witness,
};
use super::super::{Notice, Past};
use super::{leaders, promise};
use crate::codec::CodecError;
use crate::ids::{Boot, Digest, Home, NodeId, StateId};
use crate::job::Durable;
use crate::record::{Cause, MAX_SLOTS, Record};
use crate::spec::MAX_MEMBERS;
use crate::time::Span;
use crate::wire::{Advert, Ballot, Hello, JobMessage, MAX_JOBS, Message};

/// A leader that has forfeited its vote and was taught the same generation again, and its peers.
fn without_a_vote() -> (Scripted, Digest) {
    let r = record(5, 2);
    let mut durable = Durable::new(r.key.clone());
    durable.forfeit(r.lineage(), r.number);
    let mut s = Scripted::new(config(0, 2), vec![durable]);
    s.launcher(0, 5, None);
    (1..5).for_each(|i| s.peer(i));
    let digest = r.digest();
    s.hears(
        1,
        JobMessage::Decided {
            record: Arc::new(r),
        },
    );
    (1..5).for_each(|i| s.status(i, digest, 1, |_| {}));
    s.status(4, digest, 2, |st| {
        st.gone = true;
        st.stopped = true;
    });
    s.pass(Span::from_millis(50));
    (s, digest)
}

#[test]
fn a_proposer_without_a_vote_uses_no_ballot_twice() {
    let (mut s, parent) = without_a_vote();
    let first = s.prepares()[0];
    (1..4).for_each(|i| promise(&mut s, i, parent, first));
    let (_, one) = s.accepts()[0];
    s.sent.clear();
    s.pass(Span::from_millis(1_500));
    let second = s.prepares()[0];
    assert!(second > first, "{second:?} after {first:?}");
    (2..5).for_each(|i| promise(&mut s, i, parent, second));
    let (_, other) = s.accepts()[0];
    assert_ne!(one, other);
    // What was accepted of the first value comes late, and counts for nothing.
    let accepted = |ballot| JobMessage::Accepted {
        parent,
        ballot,
        grants: Vec::new(),
    };
    s.hears(1, accepted(first));
    s.hears(2, accepted(second));
    s.hears(3, accepted(second));
    assert_eq!(s.decided(), [parent]);
    s.hears(4, accepted(second));
    assert_eq!(s.decided(), [parent, other]);
}

#[test]
fn a_round_that_was_used_is_not_used_again_when_the_generation_is_left_and_taught_anew() {
    let (mut s, parent) = without_a_vote();
    let first = s.prepares()[0];
    let r = record(5, 2);
    let (lineage, up_to) = (r.lineage(), r.number);
    s.hears(1, JobMessage::Superseded { lineage, up_to });
    assert!(s.agent.jobs().next().is_some_and(|j| j.head().is_none()));
    // A job that is forgotten and heard of again is the same as one that was left.
    let again = s.agent.remove_job(&key("j")).map(|j| j.used_round());
    assert_eq!(again, Some(first.round));
    s.sent.clear();
    s.hears(
        1,
        JobMessage::Decided {
            record: Arc::new(r),
        },
    );
    let used = s.agent.job(&key("j")).map(|j| j.used_round());
    assert_eq!(used, Some(first.round), "{parent}");
}

#[test]
fn above_the_highest_round_nothing_is_proposed() {
    let (mut s, parent) = without_a_vote();
    let promised = Ballot {
        round: u32::MAX,
        ..s.prepares()[0]
    };
    s.hears(1, JobMessage::Rejected { parent, promised });
    s.sent.clear();
    s.pass(Span::from_secs(10));
    assert_eq!(s.prepares(), []);
}

/// A record as long as one can be.
fn longest(number: u64) -> Record {
    let most = |c: char| c.to_string().repeat(64);
    let mut r = record(MAX_MEMBERS, number);
    r.key.cluster = most('c');
    r.key.owner = most('o');
    r.key.id = most('j');
    r.members.iter_mut().for_each(|m| m.slots = MAX_SLOTS);
    r.witnesses = (2_000..2_003).map(witness).collect();
    r.cause = Cause::NodesJoined {
        nodes: (0..MAX_MEMBERS).map(node).collect(),
    };
    r.restarts_used = u32::MAX;
    r.nonce = u64::MAX;
    by_store(r)
}

#[test]
fn a_vote_on_a_generation_of_1024_members_is_stored_before_it_is_sent() {
    let r = longest(2);
    assert_eq!(r.check(), Ok(()));
    let members = Record {
        arbiter: crate::record::Arbiter::Members,
        witnesses: Vec::new(),
        key: key("j"),
        ..r
    };
    let mut s = Scripted::new(config(1, 2), vec![holds(&members, 1)]);
    s.peer(0);
    let (parent, before) = (members.digest(), s.persists);
    let record = Arc::new(next(&members, 5));
    s.hears(
        0,
        JobMessage::Accept {
            parent,
            ballot: leaders(1),
            record: record.clone(),
        },
    );
    assert_eq!((s.votes(), s.persists), (1, before + 1));
    let stored = Durable::decode(&s.stored[&key("j")]).unwrap();
    assert_eq!(stored.acceptor.accepted, Some((leaders(1), record)));
}

#[test]
fn what_cannot_be_stored_is_no_vote() {
    let r = record(3, 2);
    let mut durable = holds(&r, 1);
    // More than the limits on each part allow.
    let many = 0..(crate::codec::MAX_STORED - 40_000) / 33;
    durable.past = many.map(|n| (Digest([n as u8; 32]), 1)).collect();
    let mut s = Scripted::new(config(1, 2), vec![durable.clone()]);
    (0..3).filter(|i| *i != 1).for_each(|i| s.peer(i));
    let parent = r.digest();
    // It fits as it is, and not with a vote on a long record.
    let long = Record {
        members: record(MAX_MEMBERS, 2).members,
        ..next(&r, 5)
    };
    assert!(durable.encode().is_ok());
    let accept = |ballot, record: &Record| JobMessage::Accept {
        parent,
        ballot,
        record: Arc::new(record.clone()),
    };
    let before = s.persists;
    s.hears(0, accept(leaders(1), &long));
    assert_eq!((s.votes(), s.persists), (0, before));
    assert!(
        s.notices
            .iter()
            .any(|n| matches!(n, Notice::Trouble { .. }))
    );
}

#[test]
fn every_message_with_the_longest_record_fits_a_frame() {
    let r = longest(u64::MAX);
    let record = Arc::new(r.clone());
    let (parent, ballot) = (
        Digest([255; 32]),
        Ballot {
            round: u32::MAX,
            ..leaders(u64::MAX)
        },
    );
    let commit = crate::record::CommitRef {
        generation: parent,
        number: u64::MAX,
        step: u64::MAX,
        manifest: parent,
    };
    let bodies = [
        JobMessage::Birth {
            record: record.clone(),
        },
        JobMessage::ClaimBirth {
            record: record.clone(),
        },
        JobMessage::Decided {
            record: record.clone(),
        },
        JobMessage::Follows {
            have: parent,
            record: record.clone(),
        },
        JobMessage::Accept {
            parent,
            ballot,
            record: record.clone(),
        },
        JobMessage::Promise {
            parent,
            ballot,
            accepted: Some((ballot, record.clone())),
            acked: Some(commit),
        },
    ];
    for body in bodies {
        let message = Message::Job {
            key: r.key.clone(),
            body: Box::new(body),
        };
        assert!(Message::decode(&message.encode().unwrap()).is_ok());
    }
    assert_ne!(r.digest(), Digest::ZERO);
    // And what is stored of it, with everything else as long as it can be.
    let mut durable = holds(&r, 1);
    durable.acceptor.accepted = Some((ballot, record.clone()));
    durable.bound = Some(record);
    for n in 0..3_000u64 {
        let lineage = Digest(*blake3::hash(&n.to_le_bytes()).as_bytes());
        durable.supersede(lineage, u64::MAX);
        durable.forfeit(lineage, u64::MAX);
    }
    assert_eq!(
        Durable::decode(&durable.encode().unwrap()),
        Ok(durable.clone())
    );
    let room = crate::codec::MAX_STORED - durable.encode().unwrap().len();
    // Sixteen ends, and what the cores of saving keep.
    assert!(room > 256 * 1024, "{room}");
}

#[test]
fn what_was_stored_in_another_format_is_refused_by_name() {
    let durable = holds(&record(2, 2), 1);
    // As builds stored it that knew no version of what is stored.
    let unversioned = crate::codec::encode_frame(&durable).unwrap();
    let mut first = unversioned.clone();
    first[0] = 1;
    let refused = Durable::decode(&first);
    assert_eq!(refused, Err(CodecError::StoredVersion { theirs: 1 }));
    assert!(refused.unwrap_err().to_string().contains("format 1"));
}

/// The newest generation of the job called `id`, which this agent ended with the others.
fn life(id: &str) -> (Durable, Record) {
    let durable = ended(id);
    let last = Record {
        key: key(id),
        ..record(3, 1)
    };
    let end = Record {
        birth: last.lineage(),
        parent: last.digest(),
        ..(**durable.head.as_ref().unwrap()).clone()
    };
    (holds(&end, 1), last)
}

/// An agent that has forgotten the job "old".
fn forgetful() -> (Scripted, Record) {
    let (old, last) = life("old");
    // All were learnt at the same time: the first by name goes.
    let many = (0..MAX_JOBS / 2).map(|i| life(&format!("others-{i:03}")).0);
    let s = Scripted::new(config(1, 2), many.chain([old]).collect());
    assert!(!s.stored.contains_key(&key("old")) && s.agent.job(&key("old")).is_none());
    (s, last)
}

/// Somebody who slept through the end of the job comes back with its last generation.
fn wakes(s: &mut Scripted, last: &Record) {
    s.peer(0);
    s.peer(2);
    s.sent.clear();
    let record = Arc::new(last.clone());
    s.hears_of("old", 0, JobMessage::Decided { record });
    let parent = last.digest();
    for round in [0, 1] {
        let ballot = Ballot {
            round,
            ..leaders(9)
        };
        s.hears_of("old", 0, JobMessage::Prepare { parent, ballot });
        let record = Arc::new(next(last, 5));
        s.hears_of(
            "old",
            0,
            JobMessage::Accept {
                parent,
                ballot,
                record,
            },
        );
    }
}

#[test]
fn an_agent_that_forgot_a_job_never_votes_in_it_again() {
    let (mut s, last) = forgetful();
    wakes(&mut s, &last);
    assert_eq!(s.votes(), 0);
    let told = |(to, body): &(NodeId, JobMessage)| {
        *to == node(0) && matches!(body, JobMessage::Superseded { up_to: 2, .. })
    };
    assert!(s.sent.iter().any(told), "{:?}", s.sent);
    // After a restart neither.
    let mut s = s.restart(Span::from_secs(1));
    wakes(&mut s, &last);
    assert_eq!(s.votes(), 0);
}

#[test]
fn an_agent_that_forgot_a_job_takes_its_end_in_again() {
    let (mut s, _) = forgetful();
    let end = life("old").0.head.unwrap();
    s.peer(0);
    s.hears_of(
        "old",
        0,
        JobMessage::Decided {
            record: end.clone(),
        },
    );
    let head = s.agent.job(&key("old")).and_then(|j| j.head());
    assert_eq!(head.map(|(_, digest)| digest), Some(end.digest()));
}

#[test]
fn a_vote_that_was_given_up_stays_so_when_its_job_is_forgotten() {
    let last = Record {
        key: key("old"),
        ..record(3, 4)
    };
    let mut durable = Durable::new(key("old"));
    durable.forfeit(last.lineage(), last.number);
    let mut past = Past::default();
    past.take(&durable);
    let mut s = Scripted::restored(config(1, 3), BTreeMap::new(), past.encode().unwrap(), START);
    wakes(&mut s, &last);
    assert_eq!(s.votes(), 0);
    assert!(
        s.sent
            .iter()
            .any(|(_, b)| matches!(b, JobMessage::Forfeited { .. }))
    );
    // Of the generation after that it is a voter like any other.
    let later = next(&last, 3);
    let mut s = s.restart(Span::from_secs(1));
    wakes(&mut s, &later);
    assert!(s.votes() > 0);
}

#[test]
fn an_agent_that_forgot_too_much_votes_only_where_it_never_can_have_voted() {
    let mut past = Past::default();
    let mut taken = 0;
    while !past.is_lossy() {
        past.take(&life(&format!("job-{taken}")).0);
        taken += 1;
        assert!(taken < 100_000);
    }
    let bytes = past.encode().unwrap();
    assert_eq!(Past::decode(&bytes), Ok(past));
    // Of a generation that is not the first, and whose member here is unknown, it may be that it was
    // forgotten.
    let last = Record {
        key: key("old"),
        ..record(3, 4)
    };
    let start = START;
    let mut s = Scripted::restored(config(1, 3), BTreeMap::new(), bytes.clone(), start);
    wakes(&mut s, &last);
    assert_eq!(s.votes(), 0);
    // The launcher that it names is here: the vote is new.
    let mut s = Scripted::restored(config(1, 3), BTreeMap::new(), bytes, start);
    s.launcher(1, 3, None);
    s.peer(0);
    s.peer(2);
    let last = record(3, 4);
    let record = Arc::new(last.clone());
    s.hears(0, JobMessage::Decided { record });
    let (parent, ballot) = (
        last.digest(),
        Ballot {
            round: 1,
            ..leaders(9)
        },
    );
    s.hears(0, JobMessage::Prepare { parent, ballot });
    assert_eq!(s.votes(), 1);
}

#[test]
fn the_longest_hello_fits_a_frame() {
    let advert = |i: usize| Advert {
        deserted: false,
        left_behind: false,
        started: false,
        unresponsive: false,
        key: longest(2).key,
        lineage: Digest([255; 32]),
        digest: Digest([255; 32]),
        number: u64::MAX,
        leader: Some(node(i)),
        belongs: true,
    };
    let hello = Message::Hello(Hello {
        host: "h".repeat(256),
        version: "v".repeat(64),
        state: StateId([255; 8]),
        home: Home([255; 8]),
        boot: Boot(u64::MAX),
        timeouts: timeouts(u64::MAX, u64::MAX),
        unstored: Some(i32::MIN),
        embedded: true,
        jobs: (0..MAX_JOBS).map(advert).collect(),
    });
    assert_eq!(Message::decode(&hello.encode().unwrap()), Ok(hello));
}
