//! A disk that takes its time: what rests on a write waits for it, and nothing else.

use super::super::TIMED_OUT;
use super::super::scripted::{Scripted, node};
use super::members::trains;
use crate::ids::{Boot, Digest};
use crate::local::{ToAgent, ToLauncher};
use crate::time::Span;
use crate::wire::{Action, Ballot, JobMessage, Order};

fn ballot(round: u32, i: usize) -> Ballot {
    Ballot {
        round,
        node: node(i),
        boot: Boot(1),
    }
}

/// Asks for the promise of this round.
fn prepare(s: &mut Scripted, i: usize, parent: Digest, round: u32) {
    let ballot = ballot(round, i);
    s.hears(i, JobMessage::Prepare { parent, ballot });
}

fn promised(s: &Scripted) -> Vec<Ballot> {
    let ballot = |(_, body): &(_, JobMessage)| match body {
        JobMessage::Promise { ballot, .. } => Some(*ballot),
        _ => None,
    };
    s.sent.iter().filter_map(ballot).collect()
}

/// The leader has the workers ended.
fn end(s: &mut Scripted, digest: Digest) {
    let (grace_ms, why) = (0, "test".into());
    let order = Order {
        digest,
        boot: Boot(1),
        seq: 9,
        action: Action::End { grace_ms, why },
    };
    s.hears(0, JobMessage::Order(Box::new(order)));
}

#[test]
fn a_vote_waits_for_the_disk_and_the_end_of_workers_does_not() {
    let (mut s, digest) = trains(1, 3, &[]);
    s.disk_takes_time();
    prepare(&mut s, 0, digest, 1);
    end(&mut s, digest);
    let stops = |s: &Scripted| {
        let stop = |(_, f): &&(_, ToLauncher)| matches!(f, ToLauncher::Stop { digest: d, .. } if *d == digest);
        s.told.iter().filter(stop).count()
    };
    assert_eq!((promised(&s).len(), stops(&s)), (0, 1));
    s.sent.clear();
    s.says(ToAgent::Stopped { digest });
    let stopped = |(to, body): &(_, JobMessage)| {
        *to == node(0) && matches!(body, JobMessage::Status(status) if status.stopped)
    };
    assert!(s.sent.iter().any(stopped), "{:?}", s.sent);
    assert_eq!(promised(&s), []);
    s.disk_is_done();
    assert_eq!(promised(&s), [ballot(1, 0)]);
}

/// Others ask again and again while the disk takes its time.
#[test]
fn a_vote_that_waits_for_the_disk_is_not_queued_again() {
    let (mut s, digest) = trains(1, 3, &[]);
    s.disk_takes_time();
    (0..9).for_each(|_| prepare(&mut s, 0, digest, 1));
    (0..1_000).for_each(|round| prepare(&mut s, 2, digest, round + 2));
    s.disk_is_done();
    s.disk_is_done();
    let promised = promised(&s);
    assert_eq!(promised.len(), 256);
    assert_eq!(promised.last(), Some(&ballot(1_001, 2)));
}

#[test]
fn one_more_write_holds_all_that_changed_during_the_one_before() {
    let (mut s, digest) = trains(1, 3, &[]);
    s.disk_takes_time();
    let before = s.persists;
    (1..=5).for_each(|round| prepare(&mut s, 0, digest, round));
    assert_eq!(s.persists - before, 1, "one is under way");
    s.disk_is_done();
    assert_eq!(promised(&s), [ballot(1, 0)], "the others rest on the next");
    assert_eq!(s.persists - before, 2);
    s.disk_is_done();
    assert_eq!(promised(&s).len(), 5);
    assert_eq!(s.persists - before, 2);
}

#[test]
fn votes_that_rest_on_a_refused_write_are_not_given() {
    let (mut s, digest) = trains(1, 3, &[]);
    s.disk_takes_time();
    (1..=2).for_each(|round| prepare(&mut s, 0, digest, round));
    s.disk_refuses(28);
    assert_eq!(s.agent.unstored(), Some(28));
    s.pass(Span::from_millis(900));
    assert_eq!(promised(&s), []);
    // It is tried again, and what was promised is promised once it is asked for again.
    s.pass(Span::from_millis(200));
    s.disk_is_done();
    prepare(&mut s, 0, digest, 2);
    s.disk_is_done();
    assert_eq!(promised(&s), [ballot(2, 0)]);
}

#[test]
fn a_write_that_takes_longer_than_suspect_after_is_known_to_all() {
    let (mut s, digest) = trains(1, 3, &[]);
    s.disk_takes_time();
    prepare(&mut s, 0, digest, 1);
    let suspect = s.agent.config().suspect_after;
    s.pass(Span(suspect.0 - 1_000_000));
    assert_eq!(s.agent.unstored(), None);
    s.hellos.clear();
    s.pass(Span::from_millis(10));
    let said = |s: &Scripted| s.hellos.last().and_then(|(_, hello)| hello.unstored);
    assert_eq!(
        (s.agent.unstored(), said(&s)),
        (Some(TIMED_OUT), Some(TIMED_OUT))
    );
    s.pass(Span::from_secs(10));
    assert_eq!(
        s.agent.unstored(),
        Some(TIMED_OUT),
        "it still takes that long"
    );
    s.disk_is_done();
    s.pass(Span::from_secs(3));
    assert_eq!((s.agent.unstored(), said(&s)), (None, None));
    assert_eq!(promised(&s).len(), 1);
}
