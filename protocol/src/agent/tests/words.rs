//! Words of other agents on how long a start waits after an end: which of them counts, and what is passed on.

use std::sync::Arc;

use super::super::scripted::{Scripted, config, holds, key, member, next, node, record};
use crate::agent::Event;
use crate::ids::{Digest, NodeId};
use crate::local::ToAgent;
use crate::membership::Answer;
use crate::record::{Kind, Record};
use crate::time::Span;
use crate::wire::JobMessage;

/// An agent without a part hears of the end of a job, from agent 1.
fn hears_of_end() -> (Scripted, Digest) {
    let last = record(3, 2);
    let end = Record {
        kind: Kind::End { cancelled: true },
        members: Vec::new(),
        ..next(&last, 1)
    };
    let mut s = Scripted::new(config(9, 2), Vec::new());
    (1..5).for_each(|i| s.peer(i));
    let digest = end.digest();
    let record = Arc::new(end);
    s.hears(1, JobMessage::Decided { record });
    (s, digest)
}

/// Agent `from` says for how many seconds a start waits for node 0; for nobody that it names where not `named`.
fn says(s: &mut Scripted, from: usize, digest: Digest, seconds: u32, named: bool) {
    let ms = seconds * 1_000;
    let nodes = if named { vec![(node(0), ms)] } else { vec![] };
    s.hears(from, JobMessage::Held { digest, ms, nodes });
}

/// For how many seconds a start waits, rounded up, and for whom.
fn waits(s: &Scripted) -> Option<(Vec<NodeId>, u64)> {
    let job = s.agent.job(&key("j")).unwrap();
    let (nodes, left) = job.left_running(s.now)?;
    Some((nodes, left.as_millis().div_ceil(1_000)))
}

#[test]
fn the_longest_word_counts_until_its_teller_takes_it_back() {
    let (mut s, end) = hears_of_end();
    says(&mut s, 1, end, 2, true);
    says(&mut s, 2, end, 9, true);
    assert_eq!(waits(&s), Some((vec![node(0)], 9)));
    // That one was started again, and does not know any more for whom.
    says(&mut s, 2, end, 8, false);
    assert_eq!(waits(&s), Some((vec![node(0)], 8)));
    says(&mut s, 2, end, 0, false);
    assert_eq!(waits(&s), Some((vec![node(0)], 2)));
    says(&mut s, 1, end, 0, false);
    assert_eq!(waits(&s), None);
}

#[test]
fn a_word_that_was_taken_back_is_not_believed_again_from_another() {
    let (mut s, end) = hears_of_end();
    says(&mut s, 1, end, 9, true);
    says(&mut s, 1, end, 0, false);
    says(&mut s, 2, end, 9, true);
    assert_eq!(waits(&s), None);
}

#[test]
fn a_word_counts_for_no_longer_than_workers_can_go_on() {
    let (mut s, end) = hears_of_end();
    let digest = end;
    let nodes = vec![(node(0), u32::MAX)];
    let ms = u32::MAX;
    s.hears(1, JobMessage::Held { digest, ms, nodes });
    let most = config(9, 2);
    let most = Span(most.agent_grace.0 + most.suspect_after.0);
    let seconds = waits(&s).map(|(_, seconds)| seconds);
    assert_eq!(seconds, Some(most.as_millis().div_ceil(1_000)));
}

/// Those that heard of the end from here hear the word of the first teller, and not those of others: these would go round.
#[test]
fn one_word_goes_on_and_not_back() {
    let (mut s, end) = hears_of_end();
    says(&mut s, 1, end, 9, true);
    s.hears(3, JobMessage::Ask { have: end });
    let told = |s: &mut Scripted, to: usize| {
        let sent = std::mem::take(&mut s.sent).into_iter();
        let held = sent.filter_map(|(peer, body)| match body {
            JobMessage::Held { ms, .. } if peer == node(to) => Some((ms + 500) / 1_000),
            _ => None,
        });
        held.collect::<Vec<_>>()
    };
    assert_eq!(told(&mut s, 3), [9]);
    says(&mut s, 2, end, 11, true);
    assert!(told(&mut s, 3).is_empty());
    says(&mut s, 1, end, 0, false);
    assert_eq!(told(&mut s, 3), [0]);
    s.hears(1, JobMessage::Ask { have: end });
    says(&mut s, 4, end, 5, false);
    assert_eq!(told(&mut s, 1), [0]);
}

/// The agent of node 2 is started again, and hears late that node 0 went on without 1 and 2; the agent of node 1 may be
/// `away`, while its launcher goes on. Returns that generation.
fn was_dropped(away: bool) -> (Scripted, Digest) {
    let last = record(3, 2);
    let mut after = next(&last, 1);
    after.members.truncate(1);
    let mut s = Scripted::new(config(2, 2), vec![holds(&last, 1)]);
    [0, 1, 3].into_iter().for_each(|i| s.peer(i));
    if away {
        s.pass(Span::from_secs(1));
        s.probes
            .insert(node(1), (Answer::Refused, Answer::Answered));
        s.on(Event::Disconnected { node: node(1) });
        s.pass(Span::from_secs(4));
    }
    let digest = after.digest();
    let record = Arc::new(after);
    s.hears(0, JobMessage::Decided { record });
    s.sent.clear();
    (s, digest)
}

/// For how long this agent says that a start of the generation waits, in ms, and for how many nodes.
fn says_of(s: &mut Scripted, have: Digest) -> Vec<(u32, usize)> {
    s.hears(
        3,
        JobMessage::Ask {
            have: record(3, 2).digest(),
        },
    );
    let sent = std::mem::take(&mut s.sent).into_iter();
    let held = sent.filter_map(|(peer, body)| match body {
        JobMessage::Held { digest, ms, nodes } if digest == have && peer == node(3) => {
            Some((ms, nodes.len()))
        }
        _ => None,
    });
    held.collect()
}

#[test]
fn the_word_of_a_member_replaces_what_a_dropped_one_estimates() {
    let (mut s, now) = was_dropped(false);
    let [(ms, 1)] = says_of(&mut s, now)[..] else {
        panic!("it waits for node 1");
    };
    assert!((1_900..=2_100).contains(&ms), "{ms}");
    // Another one that was dropped knows no more than this one.
    says(&mut s, 1, now, 0, false);
    assert_eq!(says_of(&mut s, now).len(), 1);
    assert!(says_of(&mut s, now)[0].0 >= 1_900);
    says(&mut s, 0, now, 0, false);
    assert_eq!(says_of(&mut s, now), [(0, 0)]);
}

#[test]
fn the_wait_that_a_member_tells_a_dropped_one_goes_on_from_there() {
    let (mut s, now) = was_dropped(false);
    // An older word of another, which is first.
    says(&mut s, 3, now, 1, true);
    let nodes = vec![(node(1), 1_500)];
    let word = JobMessage::Held {
        digest: now,
        ms: 1_500,
        nodes,
    };
    s.hears(0, word);
    let [(ms, 1)] = says_of(&mut s, now)[..] else {
        panic!("it waits for node 1");
    };
    assert!((1_400..=1_600).contains(&ms), "{ms}");
}

#[test]
fn no_word_replaces_what_a_dropped_one_saw() {
    let (mut s, now) = was_dropped(true);
    for told in [false, true] {
        if told {
            says(&mut s, 0, now, 0, false);
        }
        let waits = says_of(&mut s, now);
        assert!(waits[0].0 > 20_000, "{told}: {waits:?}");
    }
}

/// A launcher is told to leave as it gets the only place that is left, for all others leave, too: its agent ends the job
/// before it hears of whom the others know that they have stopped.
#[test]
fn a_word_that_comes_after_the_end_says_for_whom_the_end_waits() {
    for (seconds, then) in [(0, None), (9, Some((vec![node(0)], 9)))] {
        let mut s = Scripted::new(config(3, 1), Vec::new());
        (0..3).for_each(|i| s.peer(i));
        s.launcher_of(3, (1, 4), None);
        s.pass(Span::from_millis(50));
        let alone = Record {
            members: vec![member(3)],
            ..next(&record(3, 1), 1)
        };
        let digest = alone.digest();
        let record = Arc::new(alone);
        s.hears(0, JobMessage::Decided { record });
        s.says(ToAgent::Leave { grace_ms: 1_000 });
        s.says(ToAgent::Stopped { digest });
        s.pass(Span::from_millis(10));
        let job = s.agent.job(&key("j")).unwrap();
        assert_eq!(job.head().map(|(r, _)| r.kind), Some(Kind::Dormant));
        // Those of the generation before may run.
        assert_eq!(waits(&s).map(|(nodes, _)| nodes), Some(vec![]));
        says(&mut s, 0, digest, seconds, seconds > 0);
        assert_eq!(waits(&s), then);
        // What is said of another generation does not count, nor a shorter time; a longer one does, and goes on.
        says(&mut s, 1, Digest([7; 32]), 25, true);
        says(&mut s, 1, digest, 0, false);
        assert_eq!(waits(&s), then);
        s.sent.clear();
        says(&mut s, 1, digest, 20, true);
        assert_eq!(waits(&s), Some((vec![node(0)], 20)));
        let told = |(to, body): &(NodeId, JobMessage)| match body {
            JobMessage::Held { ms, .. } => *to == node(2) && *ms > 19_000,
            _ => false,
        };
        assert!(s.sent.iter().any(told), "{:?}", s.sent);
    }
}
