//! For whom a start waits, and how long workers go on that nobody hears of.

use std::sync::Arc;

use super::super::scripted::{
    START, Scripted, config, holds, key, member, next, node, record, timeouts, witness,
};
use super::super::{Agent, Event, Notice};
use super::{leaders, promise};
use crate::ids::Digest;
use crate::local::ToAgent;
use crate::membership::Answer;
use crate::record::{Cause, Kind, Record};
use crate::time::{Span, Time};
use crate::wire::{Ballot, Grant, JobMessage, Leave, MAX_LIST, Message, Status, Ticket};

/// An agent that hears of a generation that it leads, and knows nothing of the one before; and when.
fn leads_unknown() -> (Scripted, Digest, Time) {
    let r = Record {
        members: vec![member(5)],
        ..record(1, 5)
    };
    let digest = r.digest();
    let mut s = Scripted::new(config(5, 1), Vec::new());
    s.peer(0);
    s.launcher(5, 4, None);
    let at = s.now;
    s.hears(
        0,
        JobMessage::Decided {
            record: Arc::new(r),
        },
    );
    (s, digest, at)
}

#[test]
fn a_leader_that_does_not_know_the_generation_before_waits_until_all_of_it_has_ended() {
    let (mut s, digest, at) = leads_unknown();
    s.pass(Span::from_millis(29_900));
    assert_eq!(s.started(digest), None);
    s.pass(Span::from_secs(1));
    let waited = s.started(digest).map(|t| t.since(at));
    assert_eq!(waited, Some(Span::from_secs(30)));
}

#[test]
fn whoever_had_it_decided_tells_the_leader_how_long_to_wait() {
    let (mut s, digest, at) = leads_unknown();
    let held = |ms| JobMessage::Held {
        digest,
        ms,
        nodes: Vec::new(),
    };
    s.hears(0, held(700));
    // Once, and of this generation.
    s.hears(0, held(0));
    s.pass(Span::from_secs(3));
    let waited = s.started(digest).map(|t| t.since(at));
    assert_eq!(waited, Some(Span::from_millis(700)));
}

/// The witness of a job of one node, which is lost, and for which another asks to be let in.
#[test]
fn a_witness_that_decides_says_so() {
    let r = Record {
        witnesses: vec![witness(1), witness(2)],
        ..record(1, 2)
    };
    let mut r = r;
    r.spec.max_nodes = 4;
    let mut s = Scripted::new(config(1, 2), vec![holds(&r, 1)]);
    (0..4).filter(|i| *i != 1).for_each(|i| s.peer(i));
    s.probes.insert(node(0), (Answer::Refused, Answer::Refused));
    s.on(Event::Disconnected { node: node(0) });
    s.pass(Span::from_secs(1));
    let ticket = Ticket {
        member: member(3),
        spec: r.spec.clone(),
        knows: Digest::ZERO,
        store: None,
        host: "h3".into(),
        command: String::new(),
        unreachable: Vec::new(),
        held_ms: 0,
        waited_ms: 0,
    };
    s.hears(3, JobMessage::Ticket(Box::new(ticket)));
    let parent = r.digest();
    for _ in 0..20 {
        s.pass(Span::from_millis(100));
        if let Some(ballot) = s.prepares().last().copied() {
            promise(&mut s, 2, parent, ballot);
            s.pass(Span::from_millis(10));
            let grants = Vec::new();
            s.hears(
                2,
                JobMessage::Accepted {
                    parent,
                    ballot,
                    grants,
                },
            );
        }
    }
    let held = s.sent.iter().find_map(|(to, body)| match body {
        JobMessage::Held { ms, .. } if *to == node(3) => Some(*ms),
        _ => None,
    });
    // Its death is confirmed.
    assert_eq!(held, Some(0), "{:?}", s.sent);
}

/// Three nodes train, and the third's agent is away while its launcher answers.
pub(super) fn one_is_away() -> (Scripted, Record, Time) {
    let r = record(3, 2);
    let digest = r.digest();
    let mut s = Scripted::new(config(0, 2), vec![holds(&r, 1)]);
    (1..3).for_each(|i| s.peer(i));
    s.launcher(0, 3, Some(digest));
    s.says(ToAgent::Started { digest, attempt: 1 });
    (1..3).for_each(|i| s.status(i, digest, 1, |_| {}));
    s.pass(Span::from_secs(4));
    let away = s.now;
    s.grants.remove(&node(2));
    s.probes
        .insert(node(2), (Answer::Refused, Answer::Answered));
    s.on(Event::Disconnected { node: node(2) });
    s.pass(Span::from_secs(4));
    (s, r, away)
}

/// The second node's worker fails: the others go on without the third.
pub(super) fn goes_on_without_it(s: &mut Scripted, r: &Record) -> Digest {
    let digest = r.digest();
    let seq = 1_000;
    s.status(1, digest, seq, |st| {
        st.leave = Some(Leave {
            grace_ms: 1_000,
            reason: "drained".into(),
        });
        st.stopped = true;
    });
    s.pass(Span::from_millis(10));
    s.says(ToAgent::Stopped { digest });
    s.pass(Span::from_millis(10));
    for _ in 0..20 {
        let ballots: Vec<Ballot> = s.prepares();
        if let Some(ballot) = ballots.last().copied() {
            promise(s, 1, digest, ballot);
        }
        if let Some((ballot, _)) = s.accepts().last().copied() {
            let parent = digest;
            // The voters' last acknowledgements are long over.
            let grants = Vec::new();
            s.hears(
                1,
                JobMessage::Accepted {
                    parent,
                    ballot,
                    grants,
                },
            );
        }
        s.pass(Span::from_millis(100));
        if s.decided().last() != Some(&digest) && !s.decided().is_empty() {
            break;
        }
    }
    let decided = s.decided().last().copied().unwrap();
    assert_ne!(decided, digest);
    decided
}

#[test]
fn a_member_that_is_away_is_waited_for_when_another_change_drops_it() {
    let (mut s, r, away) = one_is_away();
    let next = goes_on_without_it(&mut s, &r);
    s.pass(Span::from_secs(40));
    let waited = s.started(next).map(|t| t.since(away));
    assert!(waited >= Some(Span::from_secs(30)), "{waited:?}");
    assert!(waited <= Some(Span::from_secs(32)), "{waited:?}");
}

#[test]
fn the_death_of_its_launcher_ends_the_wait() {
    let (mut s, r, away) = one_is_away();
    let next = goes_on_without_it(&mut s, &r);
    s.pass(Span::from_secs(2));
    assert_eq!(s.started(next), None);
    s.probes.insert(node(2), (Answer::Refused, Answer::Refused));
    s.pass(Span::from_secs(3));
    let waited = s.started(next).map(|t| t.since(away));
    assert!(
        waited.is_some_and(|t| t < Span::from_secs(15)),
        "{waited:?}"
    );
}

// ---- nodes that keep other times ----

#[test]
fn a_start_waits_for_the_longest_lease_that_a_member_may_have() {
    let r = record(3, 2);
    let digest = r.digest();
    let mut s = Scripted::new(config(0, 2), vec![holds(&r, 1)]);
    s.peer(1);
    s.peer_with(2, timeouts(20, 30));
    let other = |n: &Notice| matches!(n, Notice::OtherTimes { node: n, .. } if *n == node(2));
    assert_eq!(s.notices.iter().filter(|n| other(n)).count(), 1);
    s.launcher(0, 3, Some(digest));
    s.says(ToAgent::Started { digest, attempt: 1 });
    (1..3).for_each(|i| s.status(i, digest, 1, |_| {}));
    s.pass(Span::from_secs(4));
    // Its node falls silent, and another agent that restarts knows it still.
    let (mut s, cut) = {
        let cut = s.now;
        (s.restart(Span::from_millis(10)), cut)
    };
    s.peer(1);
    s.launcher(0, 3, Some(digest));
    s.says(ToAgent::Started { digest, attempt: 1 });
    s.status(1, digest, 2, |_| {});
    let next = loses_the_silent_one(&mut s, &r);
    s.pass(Span::from_secs(30));
    let waited = s.started(next).map(|t| t.since(cut));
    assert!(waited >= Some(Span::from_secs(20)), "{waited:?}");
}

fn loses_the_silent_one(s: &mut Scripted, r: &Record) -> Digest {
    let parent = r.digest();
    s.probes.insert(node(2), (Answer::Silent, Answer::Silent));
    s.pass(Span::from_secs(3));
    for seq in 10..200 {
        s.pass(Span::from_millis(100));
        s.status(1, parent, seq, |st| st.stopped = true);
        s.says(ToAgent::Stopped { digest: parent });
        if let Some(ballot) = s.prepares().last().copied() {
            promise(s, 1, parent, ballot);
        }
        if let Some((ballot, _)) = s.accepts().last().copied() {
            let grants = Vec::new();
            s.hears(
                1,
                JobMessage::Accepted {
                    parent,
                    ballot,
                    grants,
                },
            );
        }
        if let Some(next) = s.decided().last().filter(|d| **d != parent) {
            return *next;
        }
    }
    panic!("nothing is decided: {:?}", s.notices);
}

#[test]
fn a_voter_tells_how_long_a_lease_may_last_by_the_times_of_who_holds_it() {
    let r = record(3, 2);
    let parent = r.digest();
    let mut s = Scripted::new(config(1, 2), vec![holds(&r, 1)]);
    s.peer(0);
    s.peer_with(2, timeouts(20, 30));
    let leases = vec![parent];
    s.pass(Span::from_secs(25));
    s.on(Event::Message {
        from: node(2),
        message: Message::Ping { seq: 1, leases },
    });
    s.pass(Span::from_secs(5));
    let mut without = next(&r, 3);
    without.members.pop();
    let record = Arc::new(without);
    s.hears(
        0,
        JobMessage::Accept {
            parent,
            ballot: leaders(1),
            record,
        },
    );
    let grants = s.sent.iter().find_map(|(_, body)| match body {
        JobMessage::Accepted { grants, .. } => Some(grants.clone()),
        _ => None,
    });
    let expected = Grant {
        node: node(2),
        left_ms: 15_001,
    };
    assert_eq!(grants, Some(vec![expected]));
}

/// The agent was stopped a moment ago, and its launcher answers: its workers have as long as those of one that
/// is away.
#[test]
fn a_voter_names_the_workers_of_a_member_whose_agent_is_stopped() {
    let r = record(3, 2);
    let parent = r.digest();
    let mut s = Scripted::new(config(1, 2), vec![holds(&r, 1)]);
    [0, 2].into_iter().for_each(|i| s.peer(i));
    s.launcher(1, 3, Some(parent));
    s.pass(Span::from_secs(4));
    s.grants.remove(&node(2));
    s.probes.insert(node(2), (Answer::Mute, Answer::Answered));
    s.pass(Span::from_millis(1_800));
    let mut without = next(&r, 3);
    without.members.pop();
    let record = Arc::new(without);
    s.hears(
        0,
        JobMessage::Accept {
            parent,
            ballot: leaders(1),
            record,
        },
    );
    let grants = s.sent.iter().find_map(|(_, body)| match body {
        JobMessage::Accepted { grants, .. } => Some(grants.clone()),
        _ => None,
    });
    let expected = Grant {
        node: node(2),
        left_ms: 30_001,
    };
    assert_eq!(grants, Some(vec![expected]));
}

/// It is a voter as any other, and the only one that knows of its lease may be it.
#[test]
fn a_voter_that_is_dropped_names_its_own_workers() {
    let r = record(3, 2);
    let parent = r.digest();
    let mut s = Scripted::new(config(2, 2), vec![holds(&r, 1)]);
    (0..2).for_each(|i| s.peer(i));
    s.launcher(2, 3, Some(parent));
    s.pass(Span::from_secs(4));
    let mut without = next(&r, 3);
    without.members.pop();
    let record = Arc::new(without);
    s.hears(
        0,
        JobMessage::Accept {
            parent,
            ballot: leaders(1),
            record,
        },
    );
    let named = s.sent.iter().find_map(|(_, body)| match body {
        JobMessage::Accepted { grants, .. } => Some(grants.iter().map(|g| g.node).collect()),
        _ => None,
    });
    assert_eq!(named, Some(vec![node(2)]));
}

#[test]
fn a_voter_that_cannot_name_all_leases_leaves_none_out() {
    let n = MAX_LIST + 2;
    let r = record(n + 2, 2);
    let parent = r.digest();
    let mut s = Scripted::new(config(1, 2), vec![holds(&r, 1)]);
    s.peer(0);
    let mut without = next(&r, 3);
    without.members.truncate(2);
    let record = Arc::new(without);
    s.hears(
        0,
        JobMessage::Accept {
            parent,
            ballot: leaders(1),
            record,
        },
    );
    let named = s.sent.iter().find_map(|(_, body)| match body {
        JobMessage::Accepted { grants, .. } => Some(grants.len()),
        _ => None,
    });
    assert_eq!(named, Some(MAX_LIST));
}

#[test]
fn times_that_do_not_fit_together_are_refused() {
    let mut short = config(0, 1);
    short.orphan_after = Span::from_secs(10);
    let error = Agent::new(short, Vec::new(), START);
    let text = error.map(|_| ()).unwrap_err().to_string();
    assert!(text.contains("orphan_after (10.0 s)"), "{text}");
}

/// Its job ended while its agent was away, and its launcher went by itself: the others are told once it is back.
#[test]
fn a_node_whose_launcher_went_while_its_agent_was_away_says_that_it_ended() {
    for guard in [Answer::Refused, Answer::Answered] {
        let r = record(3, 2);
        let parent = r.digest();
        let end = Record {
            kind: Kind::End { cancelled: true },
            members: Vec::new(),
            cause: Cause::Cancelled,
            ..next(&r, 3)
        };
        let mut s = Scripted::new(config(1, 2), vec![holds(&r, 1)]);
        s.probes.insert(node(1), (Answer::Answered, guard));
        s.peer(0);
        let record = Arc::new(end);
        s.hears(0, JobMessage::Decided { record });
        s.pass(Span::from_secs(1));
        let said = s.sent.iter().find_map(|(to, body)| match body {
            JobMessage::Status(st) if *to == node(0) && st.digest == parent => Some(st.stopped),
            _ => None,
        });
        // One that answers may have workers, and comes back to hear the end.
        let ended = (guard == Answer::Refused).then_some(true);
        assert_eq!(said, ended);
    }
}

/// Its node was dropped while its agent was away, and so was the last generation's end decided: any agent may begin the
/// next life, and wait for its workers.
#[test]
fn a_node_that_was_dropped_before_the_end_says_to_all_that_it_ended() {
    let r = record(3, 2);
    let mut without = next(&r, 3);
    without.members.truncate(1);
    let end = Record {
        kind: Kind::End { cancelled: true },
        members: Vec::new(),
        cause: Cause::Cancelled,
        ..next(&without, 4)
    };
    let mut s = Scripted::new(config(1, 2), vec![holds(&r, 1)]);
    s.probes
        .insert(node(1), (Answer::Answered, Answer::Refused));
    s.peer(0);
    s.peer(4);
    for record in [without, end].map(Arc::new) {
        s.hears(0, JobMessage::Decided { record });
        s.pass(Span::from_secs(1));
    }
    s.peer(5);
    for to in [4, 5] {
        let said = s.sent.iter().any(|(n, body)| {
            let ended = |st: &Status| st.stopped && st.digest == r.digest();
            *n == node(to) && matches!(body, JobMessage::Status(st) if ended(st))
        });
        assert!(said, "{to}: {:?}", s.sent);
    }
}

/// The only member of a group comes back, and hears that the others gave the group up: they wait for its workers.
#[test]
fn the_last_of_a_group_that_was_given_up_says_that_its_launcher_is_gone() {
    let r = Record {
        witnesses: vec![witness(1), witness(2)],
        ..record(1, 2)
    };
    let mut s = Scripted::new(config(0, 2), vec![holds(&r, 1)]);
    let refused = (Answer::Answered, Answer::Refused);
    s.probes.insert(node(0), refused);
    s.peer(1);
    let (lineage, up_to) = (r.lineage(), r.number);
    s.hears(1, JobMessage::Superseded { lineage, up_to });
    s.pass(Span::from_secs(1));
    let said = s.sent.iter().filter(|(to, body)| {
        let over = |st: &Status| st.digest == r.digest() && st.stopped && st.gone;
        *to == node(1) && matches!(body, JobMessage::Status(st) if over(st))
    });
    assert_eq!(said.count(), 1, "{:?}", s.sent);
}

/// A member that is not there when its job ends may come back and go on from what it knows: the others must be able to
/// tell it.
#[test]
fn an_end_that_a_member_may_have_missed_is_to_be_kept() {
    let first = record(3, 1);
    let end = |before: &Record| Record {
        kind: Kind::End { cancelled: true },
        members: Vec::new(),
        cause: Cause::Cancelled,
        ..next(before, 3)
    };
    let mut without = next(&first, 2);
    without.members.truncate(2);
    let cases = [
        (vec![end(&first)], vec![0, 2], true),
        (vec![end(&first)], vec![0], false),
        (vec![without.clone(), end(&without)], vec![0, 2], false),
    ];
    for (records, there, settled) in cases {
        let mut s = Scripted::new(config(1, 1), vec![holds(&first, 1)]);
        there.iter().for_each(|i| s.peer(*i));
        for record in records {
            let record = Arc::new(record);
            s.hears(0, JobMessage::Decided { record });
        }
        let job = s
            .agent
            .job(&key("j"))
            .map(|j| (j.is_live(), j.is_settled()));
        assert_eq!(job, Some((false, settled)), "{there:?}");
    }
}

/// The user ends a job while workers of a node that it has lost may still run. The node that begins the next life has
/// to wait for them, also one that took no part and comes only now.
#[test]
fn one_that_comes_after_the_end_hears_for_how_long_to_wait() {
    let (mut s, r, _) = one_is_away();
    let next = goes_on_without_it(&mut s, &r);
    s.peer(4);
    s.says(ToAgent::Cancel);
    s.says(ToAgent::Stopped { digest: next });
    s.pass(Span::from_millis(100));
    let end = s.decided().last().copied().unwrap();
    assert!(s.agent.jobs().all(|j| !j.is_live()));
    s.peer(3);
    let told = |s: &Scripted, to: usize| {
        let mut held = s.sent.iter().filter_map(|(n, body)| match body {
            JobMessage::Held { digest, ms, .. } if *n == node(to) && *digest == end => Some(*ms),
            _ => None,
        });
        held.next_back()
    };
    for to in [3, 4] {
        assert!(told(&s, to).is_some_and(|ms| ms > 10_000), "{to}");
    }
    s.sent.clear();
    let have = Digest([3; 32]);
    s.hears(3, JobMessage::Ask { have });
    assert!(told(&s, 3).is_some_and(|ms| ms > 10_000));
    // And when the wait is over.
    s.probes.insert(node(2), (Answer::Refused, Answer::Refused));
    s.pass(Span::from_secs(3));
    s.peer(2);
    s.status(2, r.digest(), 9, |st| (st.stopped, st.gone) = (true, true));
    for to in [3, 4] {
        assert_eq!(told(&s, to), Some(0), "{to}");
    }
}

/// Another node had the end decided and says for how long a start waits, and perhaps has no link to one that asks here.
#[test]
fn a_wait_after_an_end_is_passed_on_with_the_end() {
    let r = record(3, 2);
    let end = Record {
        kind: Kind::End { cancelled: true },
        members: Vec::new(),
        ..next(&r, 1)
    };
    let digest = end.digest();
    let held = |ms| JobMessage::Held {
        digest,
        ms,
        nodes: Vec::new(),
    };
    let told = |s: &mut Scripted| {
        let sent = std::mem::take(&mut s.sent);
        let mut held = sent.into_iter().filter_map(|(to, body)| match body {
            JobMessage::Held { digest: of, ms, .. } if to == node(2) && of == digest => Some(ms),
            _ => None,
        });
        held.next_back()
    };
    for asks_first in [false, true] {
        let mut s = Scripted::new(config(1, 2), vec![holds(&r, 1)]);
        for peer in [0, 2] {
            s.peer(peer);
        }
        let record = Arc::new(end.clone());
        s.hears(0, JobMessage::Decided { record });
        let asks = JobMessage::Ask { have: r.digest() };
        s.sent.clear();
        match asks_first {
            true => {
                s.hears(2, asks);
                assert_eq!(told(&mut s), None);
                s.hears(0, held(2_000));
            }
            false => {
                s.hears(0, held(2_000));
                s.hears(2, asks);
            }
        }
        assert!(told(&mut s).is_some_and(|ms| ms > 1_900), "{asks_first}");
        // The way here takes time: what is said again is no news, or two nodes that hear it of each other never end.
        s.pass(Span::from_millis(40));
        s.hears(0, held(2_000));
        assert_eq!(told(&mut s), None, "{asks_first}");
        // The node for which all wait has ended its workers.
        s.hears(0, held(0));
        assert_eq!(told(&mut s), Some(0), "{asks_first}");
    }
}
