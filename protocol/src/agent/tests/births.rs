//! Lives that begin at an agent that has no part in them, and hears of nothing but their ends.

use std::sync::Arc;

use super::super::scripted::{Scripted, by_store, config, member, next, node, record, witness};
use super::told::ticket;
use crate::ids::NodeId;
use crate::record::{Kind, Member, Record};
use crate::spec::JobSpec;
use crate::time::Span;
use crate::wire::JobMessage;

/// Launchers of `nodes` ask node 0 for a life that needs both.
fn ask(s: &mut Scripted, nodes: [usize; 2], record: &Record) {
    let spec = JobSpec {
        min_nodes: 2,
        max_nodes: 2,
        ..JobSpec::default()
    };
    for k in nodes {
        s.hears(k, ticket(k, &spec, record.store()));
    }
}

fn births(s: &mut Scripted) -> Vec<Arc<Record>> {
    let sent = std::mem::take(&mut s.sent).into_iter();
    let births = sent.filter_map(|(_, body)| match body {
        JobMessage::Birth { record } | JobMessage::ClaimBirth { record } => Some(record),
        _ => None,
    });
    births.collect()
}

/// The end of a life that was finished.
fn end() -> Arc<Record> {
    Arc::new(Record {
        kind: Kind::End { cancelled: false },
        members: Vec::new(),
        ..next(&record(2, 2), 7)
    })
}

fn meeting_place() -> Scripted {
    let mut s = Scripted::new(config(0, 2), Vec::new());
    (1..5).for_each(|i| s.peer(i));
    s
}

#[test]
fn a_claim_of_the_life_before_holds_the_next_one_not_up() {
    let mut s = meeting_place();
    let stored = by_store(record(2, 2));
    ask(&mut s, [1, 2], &stored);
    assert_eq!(births(&mut s).len(), 1);
    // That life is over before the claim would be asked for again; others come.
    (1..3).for_each(|k| s.hears(k, JobMessage::Withdraw));
    s.pass(Span::from_millis(200));
    ask(&mut s, [3, 4], &stored);
    assert_eq!(births(&mut s).len(), 1);
    // The same ones are not asked twice at once.
    ask(&mut s, [3, 4], &stored);
    assert_eq!(births(&mut s).len(), 0);
}

#[test]
fn an_end_that_a_birth_must_name_is_no_reason_to_forget_those_that_ask_for_it() {
    let mut s = meeting_place();
    let end = end();
    ask(&mut s, [1, 2], &record(2, 2));
    let asked = births(&mut s);
    assert!(asked.len() == 2 && asked.iter().all(|r| r.parent.is_zero()));
    // They know of an end: the birth is withdrawn, and the next one names it at once.
    let record = end.clone();
    s.hears(1, JobMessage::Decided { record });
    let asked = births(&mut s);
    assert_eq!(asked.len(), 2);
    let of = |r: &Arc<Record>| r.parent == end.digest() && r.has(node(1)) && r.has(node(2));
    assert!(asked.iter().all(of));
    assert_eq!(asked[0].member(node(1)), Some(&member(1)));
}

#[test]
fn a_node_that_is_let_in_takes_its_request_back_where_it_asked() {
    let mut s = Scripted::new(config(3, 2), Vec::new());
    (0..3).for_each(|i| s.peer(i));
    s.launcher_of(3, (4, 4), None);
    s.pass(Span::from_millis(100));
    let to_door = |s: &Scripted, asks: bool| {
        let mut sent = s.sent.iter().filter(|(to, _)| *to == node(0));
        sent.any(|(_, body)| match asks {
            true => matches!(body, JobMessage::Ticket(_)),
            false => matches!(body, JobMessage::Withdraw),
        })
    };
    assert!(to_door(&s, true) && !to_door(&s, false), "{:?}", s.sent);
    let record = Arc::new(record(4, 1));
    s.hears(1, JobMessage::Decided { record });
    s.pass(Span::from_millis(100));
    assert!(to_door(&s, false), "{:?}", s.sent);
}

/// The agents whose tickets this one was given, in order and each once in a row.
fn asked(s: &mut Scripted) -> Vec<NodeId> {
    let sent = std::mem::take(&mut s.sent).into_iter();
    let asked = sent.filter(|(_, body)| matches!(body, JobMessage::Ticket(_)));
    let mut asked: Vec<NodeId> = asked.map(|(to, _)| to).collect();
    asked.dedup();
    asked
}

/// Its machine has lost power: the connection to it stands, and nothing comes over it.
#[test]
fn an_agent_that_says_nothing_is_passed_over_by_those_that_meet() {
    let mut s = Scripted::new(config(3, 2), Vec::new());
    (0..3).for_each(|i| s.peer(i));
    // These answer pings, and are behind the first.
    s.grants = [node(1), node(2)].into();
    s.pass(Span::from_millis(10));
    s.launcher_of(3, (4, 4), None);
    s.pass(Span::from_millis(300));
    assert_eq!(asked(&mut s), [node(0)]);
    s.pass(Span::from_millis(1_200));
    assert_eq!(asked(&mut s), [node(1)]);
    s.pass(Span::from_millis(3_000));
    assert_eq!(asked(&mut s), [node(1)]);
    // It was stopped, and goes on.
    s.hears(0, JobMessage::Withdraw);
    s.pass(Span::from_millis(1_100));
    assert_eq!(asked(&mut s), [node(0)]);

    // All before this one are silent: it gathers the others' tickets itself.
    let mut s = Scripted::new(config(2, 2), Vec::new());
    [0, 1, 3].into_iter().for_each(|i| s.peer(i));
    s.grants = [node(3)].into();
    s.pass(Span::from_millis(10));
    s.launcher_of(2, (2, 2), None);
    s.pass(Span::from_millis(1_500));
    let spec = JobSpec {
        min_nodes: 2,
        max_nodes: 2,
        ..JobSpec::default()
    };
    s.hears(3, ticket(3, &spec, None));
    s.pass(Span::from_millis(1_100));
    let born = births(&mut s);
    assert!(born.iter().any(|r| r.has(node(2)) && r.has(node(3))));
}

/// All nodes died as the job formed, and come back: nobody waits for the outcome of a birth that nobody could train in.
#[test]
fn a_birth_whose_launchers_are_all_replaced_binds_nobody() {
    let birth = |ks: [usize; 2]| {
        let members = ks.iter().enumerate().map(|(i, k)| Member {
            node: node(i),
            state: member(i).state,
            ..member(*k)
        });
        Arc::new(Record {
            members: members.collect(),
            ..record(2, 1)
        })
    };
    for (first, second, taken) in [
        ([0, 1], [4, 5], true),
        ([0, 1], [0, 5], false),
        ([0, 1], [4, 1], false),
    ] {
        let mut s = Scripted::new(config(1, 2), Vec::new());
        s.peer(0);
        let accepted = |s: &mut Scripted, ks: [usize; 2]| {
            let record = birth(ks);
            let wanted = record.digest();
            s.launcher_of(ks[1], (2, 2), None);
            s.sent.clear();
            s.hears(0, JobMessage::Birth { record });
            let is_it = |m: &JobMessage| matches!(m, JobMessage::BirthAccepted { lineage } if *lineage == wanted);
            s.sent.iter().any(|(_, m)| is_it(m))
        };
        assert!(accepted(&mut s, first));
        s = s.restart(Span::from_millis(300));
        s.peer(0);
        assert_eq!(accepted(&mut s, second), taken, "{second:?}");
        // One that comes late frees nobody from the newer one.
        let record = birth(first);
        s.hears(0, JobMessage::Birth { record });
        s.sent.clear();
        let record = birth(second);
        s.hears(0, JobMessage::Birth { record });
        let is_it = |m: &JobMessage| matches!(m, JobMessage::BirthAccepted { .. });
        assert_eq!(s.sent.iter().any(|(_, m)| is_it(m)), taken, "{second:?}");
    }
}

/// One of its nodes left in good order with all that it knew, and comes back as another node.
#[test]
fn a_birth_with_a_node_that_is_not_there_binds_for_as_long_as_its_proposer_tries() {
    let birth = |nodes: [usize; 2], ks: [usize; 2]| {
        let members = nodes.iter().zip(ks).map(|(i, k)| Member {
            node: node(*i),
            state: member(*i).state,
            ..member(k)
        });
        Arc::new(Record {
            members: members.collect(),
            ..record(2, 1)
        })
    };
    let mut s = Scripted::new(config(1, 2), Vec::new());
    s.peer(0);
    let accepted = |s: &mut Scripted, from: usize, record: Arc<Record>| {
        s.sent.clear();
        s.hears(from, JobMessage::Birth { record });
        let is_it = |m: &JobMessage| matches!(m, JobMessage::BirthAccepted { .. });
        s.sent.iter().any(|(_, m)| is_it(m))
    };
    s.launcher_of(1, (2, 2), None);
    assert!(accepted(&mut s, 0, birth([0, 1], [0, 1])));
    s = s.restart(Span::from_millis(300));
    s.peer(2);
    s.launcher_of(5, (2, 2), None);
    assert!(!accepted(&mut s, 2, birth([2, 1], [6, 5])));
    s.pass(Span::from_millis(2_500));
    assert!(accepted(&mut s, 2, birth([2, 1], [6, 5])));
}

/// It has lost its state, is bound to the birth of another, and hears from two others of an end that it does not know.
/// Each of its own births is refused by them, with that end.
#[test]
fn an_agent_that_is_bound_to_anothers_birth_does_not_propose_its_own_without_end() {
    let mut s = meeting_place();
    let end = end();
    // It votes in that one.
    let theirs = Arc::new(Record {
        members: vec![member(3)],
        witnesses: [0, 4].map(witness).to_vec(),
        ..record(1, 1)
    });
    s.hears(4, JobMessage::Birth { record: theirs });
    let spec = JobSpec {
        max_nodes: 2,
        ..JobSpec::default()
    };
    s.hears(1, ticket(1, &spec, None));
    s.pass(Span::from_millis(400));
    let mut proposed = births(&mut s).len();
    assert!(proposed > 0);
    for _ in 0..20 {
        for from in [2, 3] {
            let record = end.clone();
            s.hears(from, JobMessage::Decided { record });
        }
        s.pass(Span::from_millis(1));
        proposed += births(&mut s).len();
    }
    assert!(proposed <= 8, "{proposed}");
}
