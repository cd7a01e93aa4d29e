//! Groups of one job that were born apart: which of them is joined, left or taken in.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::super::scripted::{Scripted, config, holds, key, member, next, node, record, witness};
use super::super::{Config, ConnId, Event};
use super::members::trains;
use crate::ids::{Digest, LauncherId, NodeId, StateId};
use crate::local::ToAgent;
use crate::membership::Answer;
use crate::record::{Cause, Kind, Member, Record};
use crate::time::Span;
use crate::wire::{Advert, JobMessage};

/// Another group of the job, by the word of who leads it.
pub(super) fn other_group(lineage: u8, leader: usize) -> Advert {
    let lineage = Digest([lineage; 32]);
    Advert {
        key: key("j"),
        lineage,
        digest: lineage,
        number: 1,
        leader: Some(node(leader)),
        belongs: true,
        deserted: false,
        left_behind: false,
        started: false,
        unresponsive: false,
    }
}

/// The nodes that were asked to take this node's group in since the last look.
fn asked_in(s: &mut Scripted) -> BTreeSet<NodeId> {
    let sent = std::mem::take(&mut s.sent).into_iter();
    let asks = |body: &JobMessage| matches!(body, JobMessage::MergeAsk { .. });
    sent.filter(|(_, b)| asks(b)).map(|(to, _)| to).collect()
}

/// One that can decide nothing without it, not one that trains, or is about to.
#[test]
fn a_group_whose_launchers_are_all_dead_lets_in_one_that_is_stuck() {
    for (dead, stuck) in [(false, true), (true, false), (true, true)] {
        let (mut s, digest) = trains(0, 2, &[]);
        s.status(1, digest, 2, |st| (st.gone, st.stopped) = (true, true));
        if dead {
            s.on(Event::LauncherGone {
                conn: ConnId(1),
                guard: Answer::Refused,
            });
            s.probes
                .insert(node(0), (Answer::Answered, Answer::Refused));
            s.pass(Span::from_secs(3));
        }
        let loser = Digest([255; 32]);
        s.peer(3);
        s.sent.clear();
        s.hears(3, JobMessage::MergeAsk { loser, stuck });
        let grants = |(to, body): &(NodeId, JobMessage)| {
            *to == node(3) && matches!(body, JobMessage::MergeGranted { .. })
        };
        let granted = s.sent.iter().any(grants);
        assert_eq!(granted, dead && stuck, "dead: {dead}, stuck: {stuck}");
    }
}

#[test]
fn a_group_that_another_does_not_answer_asks_the_next_one() {
    let ours = record(1, 1);
    assert!(ours.digest() > Digest([2; 32]));
    let mut s = Scripted::new(config(0, 2), vec![holds(&ours, 1)]);
    s.launcher(0, 1, Some(ours.digest()));
    for peer in [1, 2] {
        s.peer(peer);
        s.says_hello(peer, vec![other_group(peer as u8, peer)]);
    }
    s.pass(Span::from_secs(2));
    assert_eq!(asked_in(&mut s), BTreeSet::from([node(1)]));
    s.pass(Span::from_secs(20));
    assert_eq!(asked_in(&mut s), BTreeSet::from([node(1), node(2)]));
    // The first has ended: only the other is asked.
    let end = Record {
        birth: Digest([1; 32]),
        number: 2,
        kind: Kind::Tombstone {
            winner: Digest([2; 32]),
        },
        members: Vec::new(),
        ..ours
    };
    let record = Arc::new(end);
    s.hears(2, JobMessage::Decided { record });
    asked_in(&mut s);
    s.pass(Span::from_secs(30));
    assert_eq!(asked_in(&mut s), BTreeSet::from([node(2)]));
}

#[test]
fn a_member_that_lives_in_another_group_does_not_lead() {
    let ours = record(3, 1);
    let parent = ours.digest();
    let mut s = Scripted::new(config(1, 2), vec![holds(&ours, 1)]);
    s.launcher(1, 3, Some(parent));
    for peer in [0, 2] {
        s.peer(peer);
    }
    s.pass(Span::from_secs(2));
    s.says_hello(0, vec![other_group(1, 0)]);
    s.pass(Span::from_secs(2));
    assert_eq!(asked_in(&mut s), BTreeSet::from([node(0)]));
    let head = |s: &Scripted| s.agent.job(&key("j")).and_then(|j| j.head()).map(|h| h.1);
    assert_eq!(head(&s), Some(parent));
    // With a second vote gone this group cannot even decide its end.
    s.hears(2, JobMessage::Forfeited { parent });
    s.pass(Span::from_secs(2));
    assert_eq!(head(&s), None);
}

/// A node that lost its disk was told of a generation of its earlier self, of which nobody is left.
#[test]
fn a_node_without_part_in_its_group_joins_the_one_where_all_others_live() {
    let before = Member {
        launcher: LauncherId([98; 8]),
        ..member(0)
    };
    let ours = Record {
        members: vec![before],
        witnesses: vec![witness(1), witness(2)],
        ..record(1, 2)
    };
    let cfg = Config {
        state: StateId([99; 8]),
        ..config(0, 2)
    };
    let mut s = Scripted::new(cfg, vec![holds(&ours, 1)]);
    s.launcher(0, 1, None);
    for peer in [1, 2] {
        s.peer(peer);
    }
    s.pass(Span::from_secs(3));
    let head = |s: &Scripted| s.agent.job(&key("j")).and_then(|j| j.head()).map(|h| h.1);
    assert_eq!(head(&s), Some(ours.digest()));
    for peer in [1, 2] {
        s.says_hello(peer, vec![other_group(1, 1)]);
    }
    let digest = ours.digest();
    s.says(ToAgent::Stopped { digest });
    s.sent.clear();
    s.pass(Span::from_secs(2));
    let asks =
        |(to, body): &(NodeId, JobMessage)| *to == node(1) && matches!(body, JobMessage::Ticket(_));
    assert!(s.sent.iter().any(asks));
    assert_eq!(head(&s), None);
}

/// Those who lived in a group that was taken in live here, whatever they said before.
#[test]
fn a_member_of_a_group_that_was_taken_in_leads() {
    let ours = record(3, 1);
    let mut s = Scripted::new(config(1, 2), vec![holds(&ours, 1)]);
    s.launcher(1, 3, Some(ours.digest()));
    for peer in [0, 2] {
        s.peer(peer);
    }
    s.pass(Span::from_secs(2));
    let other = other_group(1, 0);
    let lineage = other.lineage;
    s.says_hello(0, vec![other.clone()]);
    let record = Arc::new(Record {
        cause: Cause::Merged { other: lineage },
        ..next(&ours, 7)
    });
    s.hears(2, JobMessage::Decided { record });
    s.says_hello(0, vec![other]);
    s.sent.clear();
    s.pass(Span::from_secs(2));
    let heard = s
        .sent
        .iter()
        .filter(|(_, b)| matches!(b, JobMessage::Status(_)));
    assert_eq!(
        heard.map(|(to, _)| *to).collect::<BTreeSet<_>>(),
        BTreeSet::from([node(0)])
    );
}
