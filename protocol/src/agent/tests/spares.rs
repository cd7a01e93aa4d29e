//! In which life of the job a launcher waits that has no place in it: its leader tells it once, and also where the job
//! changes meanwhile.

use std::sync::Arc;

use super::super::scripted::{Scripted, config, holds, next, node, record};
use super::members::trains;
use super::told::ticket;
use crate::ids::Digest;
use crate::job::Durable;
use crate::record::{Kind, Record};
use crate::time::Span;
use crate::wire::JobMessage;

/// The lives that the launcher of node 3 was told that it waits in, one after the other.
fn told_lives(s: &Scripted) -> Vec<Digest> {
    let lives = s.sent.iter().filter_map(|(to, body)| match body {
        JobMessage::TicketAck { lineage, .. } if *to == node(3) => Some(*lineage),
        _ => None,
    });
    lives.filter(|lineage| *lineage != Digest::ZERO).collect()
}

/// The next generation of the same nodes is decided, as another member says.
fn goes_on(s: &mut Scripted, before: &Record) -> Digest {
    let record = next(before, 7);
    let digest = record.digest();
    let record = Arc::new(record);
    s.hears(1, JobMessage::Decided { record });
    digest
}

/// Launchers gather at an agent that does not know yet that it leads what runs.
#[test]
fn a_launcher_that_came_before_its_leader_knew_of_the_life_is_told_of_it() {
    let running = record(3, 2);
    let mut s = Scripted::new(config(0, 2), Vec::new());
    (1..4).for_each(|i| s.peer(i));
    s.launcher(0, 3, None);
    s.hears(3, ticket(3, &running.spec, None));
    assert_eq!(told_lives(&s), []);
    let (lineage, digest) = (running.lineage(), running.digest());
    let record = Arc::new(running);
    s.hears(1, JobMessage::Decided { record });
    for i in [1, 2] {
        s.status(i, digest, 1, |_| {});
    }
    s.pass(Span::from_millis(900));
    assert_eq!(told_lives(&s).first(), Some(&lineage));
}

/// One that came when this life had begun to end waits for the next one, whatever generation the end is found in.
#[test]
fn a_launcher_that_came_as_a_life_was_ending_is_not_told_of_it_in_a_further_generation() {
    for ends in [false, true] {
        let (mut s, digest) = trains(0, 3, &[]);
        s.peer(3);
        s.status(1, digest, 2, |st| st.finished = ends);
        s.sent.clear();
        let running = record(3, 2);
        s.hears(3, ticket(3, &running.spec, None));
        let digest = goes_on(&mut s, &running);
        for i in [1, 2] {
            s.status(i, digest, 1, |_| {});
        }
        s.pass(Span::from_millis(900));
        let expected = (!ends).then_some(running.lineage());
        assert_eq!(told_lives(&s).first().copied(), expected, "{ends}");
    }
}

/// A start would wait for what is not there, once the agent has been restarted.
#[test]
fn a_wait_that_is_over_by_anothers_word_is_over_on_disk_too() {
    let running = record(3, 2);
    let end = Record {
        kind: Kind::End { cancelled: true },
        members: Vec::new(),
        ..next(&running, 1)
    };
    let digest = end.digest();
    let mut s = Scripted::new(config(1, 2), vec![holds(&running, 1)]);
    s.peer(0);
    s.peer(2);
    let record = Arc::new(end.clone());
    s.hears(0, JobMessage::Decided { record });
    let kept = |s: &Scripted| {
        let stored = Durable::decode(&s.stored[&end.key]).unwrap();
        stored.held(s.now)
    };
    for (ms, least, most) in [(20_000, 19_000, 21_000), (0, 0, 0)] {
        let nodes = Vec::new();
        s.hears(0, JobMessage::Held { digest, ms, nodes });
        let kept = kept(&s).as_millis();
        assert!((least..=most).contains(&kept), "{kept} ms of {ms}");
    }
}

/// Where the job's log decides, a member may read a generation before the leader has: its status goes to one that does
/// not know it yet.
#[test]
fn a_status_that_came_before_its_leader_knew_the_generation_is_said_again_at_once() {
    let (mut s, _) = trains(1, 3, &[]);
    let digest = goes_on(&mut s, &record(3, 2));
    s.pass(Span::from_millis(1));
    let statuses = |s: &mut Scripted| {
        let sent = std::mem::take(&mut s.sent);
        let of = |(to, body): &(_, JobMessage)| {
            *to == node(0) && matches!(body, JobMessage::Status(status) if status.digest == digest)
        };
        sent.iter().filter(|said| of(said)).count()
    };
    assert_eq!(statuses(&mut s), 1);
    let record = Arc::new(next(&record(3, 2), 7));
    s.hears(0, JobMessage::Decided { record });
    s.pass(Span::from_millis(1));
    assert_eq!(statuses(&mut s), 1);
}
