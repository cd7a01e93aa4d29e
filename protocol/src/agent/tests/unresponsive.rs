//! Launchers that are connected and answer nothing, as after Ctrl-Z.

use super::super::scripted::{
    Scripted, by_store, config, holds, member, next, node, record, registers, witness, worker_exit,
};
use super::super::{ConnId, Event, Notice};
use super::members::{trains, trains_with, waits};
use super::told::ticket;
use crate::ids::{Digest, NodeId};
use crate::local::{ToAgent, ToLauncher};
use crate::record::{Cause, Kind, Record};
use crate::spec::JobSpec;
use crate::time::Span;
use crate::wire::{JobMessage, Wait};

/// Its proposal once nodes 1 and 2 have promised to hear it; none where it does not ask them.
fn proposed(s: &mut Scripted, parent: Digest) -> Option<Record> {
    let ballot = *s.prepares().last()?;
    for from in [1, 2] {
        let promise = JobMessage::Promise {
            parent,
            ballot,
            accepted: None,
            acked: None,
        };
        s.hears(from, promise);
    }
    s.sent.iter().rev().find_map(|(_, body)| match body {
        JobMessage::Accept { record, .. } => Some((**record).clone()),
        _ => None,
    })
}

fn nodes(record: &Record) -> Vec<NodeId> {
    record.members.iter().map(|m| m.node).collect()
}

#[test]
fn one_that_answers_nothing_disturbs_nobody_and_is_left_out_of_a_change() {
    let (mut s, digest) = trains(0, 4, &[]);
    s.status(2, digest, 2, |st| st.unresponsive = true);
    s.pass(Span::from_secs(60));
    let stop = |(_, f): &(_, ToLauncher)| matches!(f, ToLauncher::Stop { .. });
    assert!(s.prepares().is_empty() && !s.told.iter().any(stop));
    // The others stop, and it cannot say so: nobody waits for it.
    s.status(3, digest, 2, |st| st.gone = true);
    for i in [0, 1] {
        s.status(i, digest, 9, |st| st.stopped = true);
    }
    s.pass(Span::from_secs(1));
    let record = proposed(&mut s, digest).unwrap();
    assert_eq!(nodes(&record), [node(0), node(1)]);
    let lost = Cause::NodesLost {
        nodes: vec![node(3), node(2)],
    };
    assert_eq!(record.cause, lost);
}

#[test]
fn one_that_answers_again_goes_on_with_the_others() {
    let (mut s, digest) = trains(0, 4, &[]);
    s.status(2, digest, 2, |st| st.unresponsive = true);
    s.pass(Span::from_secs(10));
    s.status(2, digest, 3, |_| {});
    s.status(3, digest, 2, |st| st.gone = true);
    s.pass(Span::from_secs(1));
    assert_eq!(
        nodes(&proposed(&mut s, digest).unwrap()),
        [node(0), node(1), node(2)]
    );
}

#[test]
fn an_agent_says_that_its_launcher_answers_nothing_until_it_does() {
    let (mut s, _) = trains(1, 3, &[]);
    let said = |s: &Scripted| {
        let mut sent = s.sent.iter().rev();
        sent.find_map(|(to, body)| match body {
            JobMessage::Status(status) if *to == node(0) => Some(status.unresponsive),
            _ => None,
        })
    };
    let advert = |s: &Scripted| {
        let last = s.hellos.last().and_then(|(_, h)| h.jobs.first());
        last.is_some_and(|a| a.unresponsive)
    };
    s.pass(Span::from_secs(30));
    assert_eq!((said(&s), advert(&s)), (Some(false), false));
    s.mute = true;
    s.pass(Span::from_secs(3));
    assert_eq!((said(&s), advert(&s)), (Some(false), false));
    s.pass(Span::from_secs(3));
    assert_eq!((said(&s), advert(&s)), (Some(true), true));
    let warned = |n: &&Notice| matches!(n, Notice::Warning { .. });
    assert_eq!(s.notices.iter().filter(warned).count(), 1);
    s.mute = false;
    s.says(ToAgent::Alive);
    s.pass(Span::from_millis(100));
    assert_eq!((said(&s), advert(&s)), (Some(false), false));
}

/// It would be a member that starts nothing.
#[test]
fn one_that_waits_and_answers_nothing_asks_to_be_let_in_no_more() {
    let mut s = Scripted::new(config(2, 1), Vec::new());
    s.peer(0);
    s.launcher(2, 4, None);
    let asks = |s: &mut Scripted, span| {
        s.sent.clear();
        s.pass(span);
        let ticket = |(_, body): &(_, JobMessage)| matches!(body, JobMessage::Ticket(_));
        s.sent.iter().any(ticket)
    };
    assert!(asks(&mut s, Span::from_secs(2)));
    s.mute = true;
    assert!(asks(&mut s, Span::from_secs(6)));
    let withdrawn = |(_, body): &(_, JobMessage)| matches!(body, JobMessage::Withdraw);
    assert!(s.sent.iter().any(withdrawn));
    assert!(!asks(&mut s, Span::from_secs(10)));
    s.mute = false;
    s.says(ToAgent::Alive);
    assert!(asks(&mut s, Span::from_secs(2)));
}

/// A healthy node did not find rank 0's launcher, which was stopped: that is no fault of its own.
#[test]
fn a_start_that_a_stopped_rank_0_prevents_is_no_fault_of_the_others() {
    let (mut s, digest) = trains(0, 3, &[]);
    let starts = |st: &mut crate::wire::Status| st.started = None;
    s.status(1, digest, 2, starts);
    s.status(2, digest, 2, |st| {
        starts(st);
        st.unresponsive = true;
    });
    s.pass(Span::from_secs(1));
    assert_eq!(
        nodes(&proposed(&mut s, digest).unwrap()),
        [node(0), node(1)]
    );
}

/// The node of rank 2 goes with its agent, and the workers of the two others have stopped.
fn the_third_is_lost(s: &mut Scripted, digest: Digest) {
    s.status(2, digest, 2, |st| st.gone = true);
    s.on(Event::Disconnected { node: node(2) });
    s.pass(Span::from_millis(200));
    s.says(ToAgent::Stopped { digest });
    s.status(1, digest, 2, |st| st.stopped = true);
}

#[test]
fn those_that_wait_for_a_vote_which_cannot_be_stored_are_told() {
    let (mut s, digest) = trains(0, 3, &[]);
    s.says_unstored(1, 28);
    the_third_is_lost(&mut s, digest);
    s.pass(Span::from_secs(4));
    s.status(1, digest, 3, |st| st.stopped = true);
    assert!(waits(&s).contains("h1"), "{}", waits(&s));
    let expected = Wait::Unstored {
        nodes: vec![node(1)],
    };
    let mut acks = s.sent.iter().filter(|(to, _)| *to == node(1));
    assert!(
        acks.any(|(_, b)| matches!(b, JobMessage::TicketAck { wait, .. } if *wait == expected))
    );
}

#[test]
fn a_witness_is_an_agent_that_can_store_its_vote_where_there_is_one() {
    let (mut s, digest) = trains(0, 3, &[]);
    s.peer(3);
    s.peer(4);
    s.says_unstored(3, 28);
    the_third_is_lost(&mut s, digest);
    s.pass(Span::from_secs(2));
    let next = proposed(&mut s, digest).unwrap();
    assert_eq!(next.witnesses, [witness(4)]);
}

#[test]
fn a_worker_that_fails_meanwhile_is_the_cause_and_is_charged() {
    let (mut s, digest) = trains(0, 4, &[]);
    s.status(2, digest, 2, |st| st.unresponsive = true);
    s.status(3, digest, 2, |st| {
        st.exit = Some(worker_exit(3));
        st.stopped = true;
    });
    s.pass(Span::from_millis(100));
    s.says(ToAgent::Stopped { digest });
    s.status(1, digest, 9, |st| st.stopped = true);
    s.pass(Span::from_secs(2));
    let end = proposed(&mut s, digest).unwrap();
    // No restart is allowed.
    assert_eq!(end.kind, Kind::Failed { code: 1 });
    assert!(matches!(end.cause, Cause::WorkerFailed { node: n, .. } if n == node(3)));
}

/// The job is not over for a launcher that is stopped while the last other one leaves.
#[test]
fn a_job_waits_for_a_stopped_launcher_when_the_others_leave() {
    let (mut s, digest) = trains(0, 2, &[]);
    s.status(1, digest, 2, |st| st.unresponsive = true);
    s.says(ToAgent::Leave { grace_ms: 5_000 });
    s.pass(Span::from_millis(100));
    s.says(ToAgent::Stopped { digest });
    s.pass(Span::from_secs(1));
    let next = proposed(&mut s, digest).unwrap();
    assert_eq!((next.kind, nodes(&next)), (Kind::Next, vec![node(1)]));
}

#[test]
fn whatever_a_launcher_says_it_answers() {
    let (mut s, digest) = trains(1, 3, &[]);
    s.mute = true;
    for _ in 0..30 {
        s.pass(Span::from_secs(1));
        s.says(ToAgent::TakesStopSteps { digest, yes: false });
    }
    let warned = |n: &&Notice| matches!(n, Notice::Warning { .. });
    assert_eq!(s.notices.iter().filter(warned).count(), 0);
}

/// The others look for rank 0's launcher, and fail where it says nothing: it is not known yet whose fault that is.
#[test]
fn a_start_that_fails_before_rank_0_has_said_anything_is_nobodys_fault() {
    let r = record(3, 2);
    let digest = r.digest();
    let mut s = Scripted::new(config(0, 2), vec![holds(&r, 1)]);
    [1, 2].into_iter().for_each(|i| s.peer(i));
    s.launcher(0, 3, None);
    s.says(ToAgent::MasterPort { port: 9 });
    s.pass(Span::from_secs(3));
    for i in [1, 2] {
        s.status(i, digest, 1, |st| {
            st.started = None;
            st.start_failed = Some((1, "rank 0 does not answer".into()));
        });
    }
    s.pass(Span::from_secs(5));
    assert!(s.prepares().is_empty());
    s.pass(Span::from_secs(30));
    assert!(!s.prepares().is_empty(), "it does not start in time");
}

#[test]
fn by_the_store_nobody_waits_for_votes() {
    let r = by_store(record(2, 2));
    let (mut s, digest) = trains_with(0, r);
    s.says_unstored(1, 28);
    s.says(ToAgent::Stopped { digest });
    s.status(1, digest, 2, |st| st.gone = true);
    s.pass(Span::from_secs(5));
    assert!(!waits(&s).contains("refuses writes"), "{}", waits(&s));
}

/// It was stopped while its node was drained, and comes again when it wakes.
#[test]
fn a_launcher_of_a_drained_node_hears_how_it_ended_when_it_comes_again() {
    let (mut s, _) = trains(1, 3, &[]);
    s.on(Event::Drain {
        grace_ms: 5_000,
        reason: "drained".into(),
    });
    let record = Record {
        members: [0, 2].map(member).to_vec(),
        cause: Cause::NodesLeft {
            nodes: vec![node(1)],
        },
        ..next(&record(3, 2), 7)
    };
    let record = record.into();
    s.hears(0, JobMessage::Decided { record });
    let ends = |s: &Scripted| {
        let told = s.told.iter().map(|(_, frame)| frame);
        let is_end = |f: &&ToLauncher| matches!(f, ToLauncher::End { code: 143, .. });
        told.filter(is_end).count()
    };
    assert_eq!(ends(&s), 1);
    s.launcher(1, 3, None);
    assert_eq!(ends(&s), 2);
    let frame = ToAgent::Register(registers(4, JobSpec::default()));
    let another = Event::Launcher {
        conn: ConnId(2),
        owner: "0".into(),
        frame,
    };
    assert!(s.agent.handle(another, s.now).is_err());
}

/// A generation that stops for it could not go on.
#[test]
fn a_node_that_joins_stops_nothing_while_votes_cannot_be_stored() {
    for unstored in [true, false] {
        let spec = JobSpec {
            max_nodes: 4,
            ..record(3, 2).spec
        };
        let r = Record {
            spec: spec.clone(),
            ..record(3, 2)
        };
        let (mut s, _) = trains_with(0, r);
        s.peer(3);
        for _ in 0..10 {
            if unstored {
                [1, 2].into_iter().for_each(|i| s.says_unstored(i, 28));
            }
            s.hears(3, ticket(3, &spec, None));
            s.pass(Span::from_secs(1));
        }
        let stopping = |n: &Notice| matches!(n, Notice::Stopping { .. });
        assert_eq!(s.notices.iter().any(stopping), !unstored);
    }
}
