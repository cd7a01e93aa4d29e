//! Machines that are replaced: their agents and launchers die with the state directories, and others take their place.

use super::super::Event;
use super::super::scripted::{Scripted, belongs_to, node};
use super::members::trains;
use super::told::ticket;
use crate::ids::{Digest, StateId};
use crate::local::ToAgent;
use crate::membership::Answer;
use crate::record::Record;
use crate::spec::JobSpec;
use crate::time::Span;
use crate::wire::{Action, JobMessage};

/// The machine of a node goes, and its address is then as these answers say.
fn goes(s: &mut Scripted, i: usize, answers: (Answer, Answer)) {
    s.grants.remove(&node(i));
    s.probes.insert(node(i), answers);
    s.on(Event::Disconnected { node: node(i) });
}

/// The same, and nobody notices but by its silence.
fn falls_silent(s: &mut Scripted, i: usize) {
    s.grants.remove(&node(i));
    s.probes.insert(node(i), SILENT);
}

fn proposed(
    in_place: bool,
    then: Option<(Answer, Answer)>,
    went: (Answer, Answer),
) -> Option<Record> {
    let (mut s, digest) = trains(0, 3, &[]);
    goes(&mut s, 1, went);
    goes(&mut s, 2, went);
    proposes(s, digest, in_place, then)
}

/// Node 0 of three is left, and nodes 3 and 4 come with launchers of the job. The first generation that it proposes
/// then.
fn proposes(
    mut s: Scripted,
    digest: Digest,
    in_place: bool,
    then: Option<(Answer, Answer)>,
) -> Option<Record> {
    s.pass(Span::from_secs(20));
    for (old, new) in [(1, 3), (2, 4)] {
        if let Some(answers) = then {
            s.probes.insert(node(old), answers);
        }
        match in_place {
            true => s.peer_in_place_of(new, old),
            false => s.peer(new),
        }
        let spec = JobSpec {
            max_nodes: 3,
            ..JobSpec::default()
        };
        s.hears(new, ticket(new, &spec, None));
    }
    s.says(ToAgent::Stopped { digest });
    for i in [1, 2] {
        if s.agent.peers().connected(node(i)) {
            s.on(Event::Disconnected { node: node(i) });
        }
    }
    s.pass(Span::from_secs(20));
    s.sent.into_iter().find_map(|(_, body)| match body {
        JobMessage::Birth { record } => Some((*record).clone()),
        _ => None,
    })
}

const ENDED: (Answer, Answer) = (Answer::Refused, Answer::Refused);
const SILENT: (Answer, Answer) = (Answer::Silent, Answer::Silent);

#[test]
fn one_that_is_left_goes_on_with_those_in_the_place_of_dead_ones() {
    let born = proposed(true, None, ENDED).unwrap();
    let members: Vec<_> = born.members.iter().map(|m| m.node).collect();
    assert!(
        members.contains(&node(0)) && members.len() > 1,
        "{members:?}"
    );
    assert!(members.iter().all(|m| [0, 3, 4].map(node).contains(m)));
    // These say nothing of the votes of the others, which may come back.
    assert_eq!(proposed(false, None, ENDED), None);
}

#[test]
fn machines_that_said_nothing_are_dead_once_they_are_back_and_refuse() {
    assert!(proposed(true, Some((Answer::Other, Answer::Refused)), SILENT).is_some());
    // Their connections seemed to stand when the others came.
    let (mut s, digest) = trains(0, 3, &[]);
    falls_silent(&mut s, 1);
    falls_silent(&mut s, 2);
    let late = proposes(s, digest, true, Some((Answer::Other, Answer::Refused)));
    assert!(late.is_some());
    // Only cut off, as far as is known: they may train.
    assert_eq!(proposed(true, None, SILENT), None);
    let lives = (Answer::Other, Answer::Answered);
    assert_eq!(proposed(true, Some(lives), SILENT), None);
}

/// Nodes 1 and 2 of four are left, and both give the group up. For how long the first start waits, as node 2 says.
fn waits(other_has_stopped: bool) -> u32 {
    let (mut s, digest) = trains(2, 4, &[]);
    goes(&mut s, 0, ENDED);
    goes(&mut s, 3, ENDED);
    s.pass(Span::from_secs(20));
    s.says(ToAgent::Stopped { digest });
    if other_has_stopped {
        // It left the group a moment ago.
        s.status(1, digest, 0, |s| s.stopped = true);
    }
    s.peer_in_place_of(4, 0);
    s.peer_in_place_of(5, 3);
    s.says(ToAgent::Stopped { digest });
    s.pass(Span::from_secs(1));
    let mut held = s.sent.iter().filter_map(|(_, body)| match body {
        JobMessage::Ticket(ticket) => Some(ticket.held_ms),
        _ => None,
    });
    held.next_back().unwrap()
}

#[test]
fn one_that_has_left_the_group_before_and_stopped_is_not_waited_for() {
    assert!(waits(false) > 20_000);
    assert_eq!(waits(true), 0);
}

/// A word of an earlier run of an agent may come after its next run has said hello, with another state directory.
#[test]
fn of_two_hellos_that_differ_neither_is_believed() {
    let (mut s, digest) = trains(0, 3, &[]);
    let asked = s.asked.len();
    // It says where it belongs, so that the job looks at it at once.
    let jobs = vec![belongs_to(digest)];
    let ends = |s: &Scripted| {
        let is_end = |m: &JobMessage| matches!(m, JobMessage::Order(o) if matches!(o.action, Action::End { .. }));
        s.sent.iter().any(|(_, m)| is_end(m))
    };
    s.says_hello_of(1, StateId([77; 8]), jobs.clone());
    assert_eq!(s.asked.get(asked..), Some(&[node(1)][..]));
    // It is not counted as lost.
    s.pass(Span::from_secs(1));
    assert!(!ends(&s));
    // The next one is believed.
    s.says_hello_of(1, StateId([77; 8]), jobs);
    s.pass(Span::from_secs(1));
    assert!(ends(&s));
}
