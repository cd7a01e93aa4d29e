//! An agent that is started anew still knows of leases and waits.

use std::sync::Arc;

use super::super::scripted::{Scripted, config, holds, key, member, next, node, record};
use super::holds::{goes_on_without_it, one_is_away};
use super::leaders;
use crate::ids::Boot;
use crate::job::Durable;
use crate::local::ToLauncher;
use crate::record::{Kind, Record};
use crate::time::{Span, Time};
use crate::wire::{Action, Grant, JobMessage, Order};

#[test]
fn a_leader_that_restarts_waits_for_those_for_whom_it_waited_and_nobody_else() {
    let (mut s, r, _) = one_is_away();
    let next = goes_on_without_it(&mut s, &r);
    // It is back before the generation was started.
    let mut s = s.restart(Span::from_millis(100));
    let at = s.now;
    s.launcher(0, 3, None);
    s.pass(Span::from_secs(40));
    let waited = s.started(next).map(|t| t.since(at));
    assert!(waited >= Some(Span::from_secs(20)), "{waited:?}");
    // Where nobody was dropped, nobody is waited for.
    let r = record(1, 7);
    let mut s = Scripted::new(config(0, 2), vec![holds(&r, 1)]);
    s.launcher(0, 1, None);
    let at = s.now;
    s.pass(Span::from_secs(5));
    assert_eq!(s.started(r.digest()).map(|t| t.since(at)), Some(Span::ZERO));
}

/// It is started anew, and the word of the one for whom it waits counts as before.
#[test]
fn a_leader_that_restarts_knows_for_whom_it_waits() {
    let (mut s, r, _) = one_is_away();
    let next = goes_on_without_it(&mut s, &r);
    let mut s = s.restart(Span::from_millis(100));
    s.launcher(0, 3, None);
    s.pass(Span::from_secs(1));
    assert_eq!(s.started(next), None);
    let stored = Durable::decode(&s.stored[&key("j")]).unwrap();
    assert_eq!(stored.held_for.len(), 1, "{stored:?}");
    s.peer(2);
    s.status(2, r.digest(), 9, |st| {
        (st.stopped, st.gone) = (true, true);
    });
    s.pass(Span::from_millis(100));
    assert!(s.started(next).is_some());
}

/// Two nodes may still train after an end, one of them for a shorter time, of which another agent told later. The one
/// that is started anew tells of both.
#[test]
fn an_agent_that_restarts_after_an_end_tells_of_all_that_were_waited_for() {
    let r = record(4, 2);
    let end = Record {
        kind: Kind::End { cancelled: true },
        members: Vec::new(),
        ..next(&r, 1)
    };
    let digest = end.digest();
    let mut s = Scripted::new(config(1, 2), vec![holds(&r, 1)]);
    s.peer(0);
    let record = Arc::new(end);
    s.hears(0, JobMessage::Decided { record });
    let held = |nodes: &[(usize, u32)]| JobMessage::Held {
        digest,
        ms: nodes.iter().map(|(_, ms)| *ms).max().unwrap_or(0),
        nodes: nodes.iter().map(|(n, ms)| (node(*n), *ms)).collect(),
    };
    s.hears(0, held(&[(2, 10_000)]));
    s.peer(3);
    s.hears(3, held(&[(3, 6_000)]));
    let mut s = s.restart(Span::from_millis(100));
    s.peer(4);
    let mut told = s.sent.iter().filter_map(|(to, body)| match body {
        JobMessage::Held { nodes, .. } if *to == node(4) => Some(nodes.clone()),
        _ => None,
    });
    let told: Vec<_> = told.next_back().unwrap_or_default();
    let nodes: Vec<_> = told.iter().map(|(node, _)| *node).collect();
    assert_eq!(nodes, [node(2), node(3)], "{told:?}");
    assert!(told.iter().all(|(_, ms)| *ms > 5_000), "{told:?}");
}

/// It crashed while its disk wrote a generation, after it had acknowledged the lease of a member that was new in it.
#[test]
fn a_voter_that_restarts_names_members_of_a_generation_that_its_disk_did_not_take() {
    let r = record(3, 2);
    let mut s = Scripted::new(config(1, 2), vec![holds(&r, 1)]);
    [0, 3].into_iter().for_each(|i| s.peer(i));
    let mut joined = next(&r, 3);
    joined.members.push(member(3));
    let mut without = next(&joined, 4);
    without.members.pop();
    let parent = joined.digest();
    let [joined, record] = [joined, without].map(Arc::new);
    s.hears(0, JobMessage::Decided { record: joined });
    s.pass(Span::from_millis(500));
    let ballot = leaders(1);
    s.hears(
        0,
        JobMessage::Accept {
            parent,
            ballot,
            record,
        },
    );
    let grants = s.sent.iter().find_map(|(_, body)| match body {
        JobMessage::Accepted { grants, .. } => Some(grants.clone()),
        _ => None,
    });
    let lease = |g: &Grant| g.node == node(3) && g.left_ms > 1_000;
    assert!(grants.iter().flatten().any(lease), "{grants:?}");
}

/// The agent of a member of three starts again and again, and no voter answers it.
#[test]
fn an_agent_that_crashes_again_and_again_gives_its_workers_no_further_time() {
    let r = record(3, 2);
    let digest = r.digest();
    let mut s = Scripted::new(config(0, 2), vec![holds(&r, 1)]);
    let begin = s.now;
    let mut stopped = None;
    for _ in 0..5 {
        s.launcher(0, 3, Some(digest));
        s.pass(Span::from_millis(900));
        let stop = s
            .told
            .iter()
            .find(|(_, f)| matches!(f, ToLauncher::Stop { .. }));
        stopped = stopped.or(stop.map(|(at, _)| at.since(begin)));
        s = s.restart(Span::from_millis(100));
    }
    assert!(
        stopped.is_some_and(|t| t <= Span::from_secs(2)),
        "{stopped:?}"
    );
    // Once a lease is confirmed, the next start gives as much again.
    let mut s = Scripted::new(config(0, 2), vec![holds(&r, 1)]);
    for _ in 0..5 {
        s.launcher(0, 3, Some(digest));
        s.pass(Span::from_millis(900));
        (1..3).for_each(|i| s.peer(i));
        s.pass(Span::from_millis(600));
        assert!(
            !s.told
                .iter()
                .any(|(_, f)| matches!(f, ToLauncher::Stop { .. }))
        );
        s = s.restart(Span::from_millis(900));
    }
}

#[test]
fn an_agent_that_restarts_after_the_start_waits_for_nobody_again() {
    // It joined, and did not know who was dropped before; then all were started.
    let r = record(2, 5);
    let durable = Durable {
        held_ms: 30_000,
        ..holds(&r, 1)
    };
    let mut s = Scripted::new(config(1, 2), vec![durable]);
    s.peer(0);
    s.launcher(1, 2, None);
    let order = Order {
        digest: r.digest(),
        boot: Boot(1),
        seq: 1,
        action: Action::Run {
            attempt: 1,
            master_port: 9,
            restart_count: 0,
            why: "test".into(),
        },
    };
    s.hears(0, JobMessage::Order(Box::new(order)));
    s.pass(Span::from_secs(1));
    let stored = Durable::decode(&s.stored[&key("j")]).unwrap();
    assert_eq!(stored.held_ms, 0);
}

/// Its end was decided while somebody could still train; it is started anew much later, or by another clock.
#[test]
fn what_was_waited_for_before_a_restart_is_counted_from_then() {
    let mut stored = Durable::new(key("j"));
    stored.hold(2_000, Vec::new(), Time(Span::from_secs(100).0));
    let left = |ms: u64, of: &Durable| of.held(Time(Span::from_millis(ms).0));
    assert_eq!(left(100_500, &stored), Span::from_millis(1_500));
    assert_eq!(left(120_000, &stored), Span::ZERO);
    // Another clock says nothing of it, whatever it shows.
    assert!(stored.forget_moments());
    assert!(!stored.forget_moments());
    assert_eq!(left(3_000, &stored), Span::from_secs(2));
    assert_eq!(left(120_000, &stored), Span::from_secs(2));
}
