//! The voters of a generation change while it trains.

use std::sync::Arc;

use super::super::scripted::{Scripted, config, holds, key, node, record, witness};
use super::super::{Event, Notice};
use super::told::ticket;
use crate::ids::{Digest, NodeId};
use crate::record::{CommitRef, Record};
use crate::spec::JobSpec;
use crate::time::Span;
use crate::wire::{JobMessage, Leave};

/// Two members with ranks 0 and 1, and node 2 as their witness.
fn witnessed() -> Record {
    let r = record(2, 1);
    Record {
        witnesses: vec![witness(2)],
        spec: JobSpec {
            max_nodes: MOST,
            ..r.spec
        },
        ..r
    }
}

/// One of the two, whose workers run; the other nodes up to `peers` are there.
fn trains(i: usize, peers: usize) -> (Scripted, Record, Digest) {
    trains_in(1, i, peers)
}

/// In this boot of its agent, which learnt the generation in the first.
fn trains_in(boot: u64, i: usize, peers: usize) -> (Scripted, Record, Digest) {
    let r = witnessed();
    let digest = r.digest();
    let mut s = Scripted::new(config(i, boot), vec![holds(&r, 1)]);
    s.launcher(i, MOST, Some(digest));
    (0..peers).filter(|p| *p != i).for_each(|p| s.peer(p));
    if i == 0 {
        s.status(1, digest, 1, |_| {});
    }
    s.pass(Span::from_millis(100));
    (s, r, digest)
}

const MOST: u16 = 4;

fn commit(of: Digest) -> CommitRef {
    CommitRef {
        generation: of,
        number: 1,
        step: 7,
        manifest: Digest([6; 32]),
    }
}

/// The changes of voters that this agent knows of.
fn changes(s: &Scripted) -> Vec<Vec<NodeId>> {
    let change = |n: &Notice| match n {
        Notice::Voters { record, .. } => Some(record.witnesses.iter().map(|v| v.node).collect()),
        _ => None,
    };
    s.notices.iter().filter_map(change).collect()
}

/// All promises and acceptances that it asked for come from node 1.
fn agrees(s: &mut Scripted) {
    for _ in 0..8 {
        for (to, body) in std::mem::take(&mut s.sent) {
            let answer = match body {
                JobMessage::Prepare { parent, ballot } => JobMessage::Promise {
                    parent,
                    ballot,
                    accepted: None,
                    acked: None,
                },
                JobMessage::Accept { parent, ballot, .. } => JobMessage::Accepted {
                    parent,
                    ballot,
                    grants: Vec::new(),
                },
                _ => continue,
            };
            if to == node(1) {
                s.hears(1, answer);
            }
        }
    }
}

#[test]
fn only_those_who_vote_now_acknowledge_a_commit() {
    let (mut s, r, generation) = trains(1, 3);
    let change = r.with_witnesses(Vec::new());
    let (commit, changed) = (commit(generation), change.digest());
    let acknowledged = |s: &Scripted| {
        let is = |(_, body): &&(NodeId, JobMessage)| matches!(body, JobMessage::Committed { .. });
        s.sent.iter().filter(is).count()
    };
    // The leader counts by the voters of a change that has not been heard of here.
    let vote = changed;
    s.hears(0, JobMessage::Commit { commit, vote });
    assert_eq!(acknowledged(&s), 0);
    s.hears(
        0,
        JobMessage::Voters {
            generation: Arc::new(r),
            record: Arc::new(change),
        },
    );
    let vote = generation;
    s.hears(0, JobMessage::Commit { commit, vote });
    assert_eq!(acknowledged(&s), 0);
    let vote = changed;
    s.hears(0, JobMessage::Commit { commit, vote });
    assert_eq!(acknowledged(&s), 1);
}

/// The witness goes, the change is begun, and the witness is back before the other member has answered.
#[test]
fn a_change_that_was_begun_comes_to_an_end() {
    let (mut s, _, generation) = trains(0, 3);
    s.grants.remove(&node(2));
    let gone = Event::Disconnected { node: node(2) };
    s.on(gone);
    s.pass(Span::from_secs(3));
    assert!(!(s.accepts().is_empty() && s.prepares().is_empty()));
    assert!(changes(&s).is_empty());
    s.peer(2);
    s.sent.clear();
    for _ in 0..12 {
        s.pass(Span::from_secs(1));
        agrees(&mut s);
    }
    let last = changes(&s);
    assert_eq!(last.last(), Some(&vec![node(2)]), "{last:?}");
    // Leases are granted and checkpoints committed again.
    s.sent.clear();
    s.on(Event::Commit {
        key: key("j"),
        step: 7,
        manifest: Digest([6; 32]),
    });
    let commits = s.sent.iter().filter_map(|(to, body)| match body {
        JobMessage::Commit { commit, vote } => Some((*to, commit.generation, *vote)),
        _ => None,
    });
    let commits: Vec<_> = commits.collect();
    let of = |to| {
        commits
            .iter()
            .any(|(n, g, v)| *n == node(to) && *g == generation && *v != generation)
    };
    assert!(of(1) && of(2), "{commits:?}");
}

/// A witness that answers, but takes no part: it lives in another group of the job, or has no room for it.
#[test]
fn a_witness_that_takes_no_part_is_done_without() {
    let (mut s, _, digest) = trains(0, 3);
    s.refuses.insert(node(2));
    let mut seq = 1;
    let mut refuse = |s: &mut Scripted, seconds: u64| {
        for _ in 0..seconds * 4 {
            s.pass(Span::from_millis(250));
            seq += 1;
            s.status(1, digest, seq, |_| {});
            agrees(s);
        }
    };
    refuse(&mut s, 5);
    assert!(changes(&s).is_empty());
    refuse(&mut s, 8);
    assert_eq!(changes(&s), [vec![]]);
    // It is taken again, in case that it takes part now, and less and less often.
    refuse(&mut s, 600);
    let tried = changes(&s).len();
    assert!((4..=20).contains(&tried), "{tried}");
}

/// Nodes may ask to be let in, and a member may have to save before it leaves: a change of the voters, whose round asks
/// for promises, takes none of that up.
#[test]
fn a_change_of_voters_becomes_no_generation() {
    let spec = witnessed().spec;
    for leaves in [false, true] {
        let (mut s, _, digest) = trains_in(2, 0, 3);
        s.sent.clear();
        s.grants.remove(&node(2));
        s.on(Event::Disconnected { node: node(2) });
        s.pass(Span::from_secs(2));
        assert!(!s.prepares().is_empty());
        match leaves {
            false => {
                s.peer(3);
                s.hears(3, ticket(3, &spec, None));
            }
            true => s.status(1, digest, 2, |st| {
                st.leave = Some(Leave {
                    grace_ms: 30_000,
                    reason: "reclaimed".into(),
                });
            }),
        }
        agrees(&mut s);
        assert_eq!(s.decided(), []);
        assert!(leaves || changes(&s) == [vec![]]);
    }
}
