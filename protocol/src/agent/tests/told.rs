//! Messages about a job to launchers, people and other agents.

use std::sync::Arc;

use super::super::scripted::{
    Scripted, config, holds, key, member, next, node, record, worker_exit,
};
use super::super::{ConnId, Event, Notice, Phases, Told};
use super::members::{ghost, trains, trains_with, waits};
use crate::ids::{Boot, Digest, NodeId, StoreUuid};
use crate::local::{ToAgent, ToLauncher};
use crate::membership::Answer;
use crate::record::{Cause, Kind, Record};
use crate::spec::JobSpec;
use crate::time::{Span, Time};
use crate::wire::{Action, Advert, JobMessage, Order, Ticket, Wait};

/// Node 3 is no member of the job of nodes 0 and 1, and its launcher `k` asks to be let in.
fn asks(s: &mut Scripted, k: usize, wait: Wait) {
    s.launcher(k, 2, None);
    s.pass(Span::from_millis(100));
    let body = JobMessage::TicketAck {
        launcher: member(k).launcher,
        lineage: record(2, 2).lineage(),
        wait,
    };
    s.hears(0, body);
}

pub(super) fn outside() -> Scripted {
    let mut s = Scripted::new(config(3, 2), vec![holds(&record(2, 2), 1)]);
    (0..2).for_each(|i| s.peer(i));
    s
}

fn told_to_wait(s: &Scripted) -> usize {
    let waiting = |f: &&ToLauncher| matches!(f, ToLauncher::Waiting { .. });
    s.told.iter().map(|(_, f)| f).filter(waiting).count()
}

#[test]
fn a_launcher_that_goes_leaves_no_wait_behind_and_the_next_one_is_told_its_own() {
    let mut s = outside();
    asks(&mut s, 3, Wait::Spare { max: 2 });
    assert_eq!(told_to_wait(&s), 1);
    assert!(!waits(&s).is_empty());
    s.on(Event::LauncherGone {
        conn: ConnId(1),
        guard: Answer::Refused,
    });
    assert_eq!(waits(&s), "");
    asks(&mut s, 4, Wait::Spare { max: 2 });
    assert_eq!(told_to_wait(&s), 2);
    // One that is told to stop waits no longer, though its process is still there.
    s.says(ToAgent::Cancel);
    assert_eq!(waits(&s), "");
}

/// It stood still, and reads nothing of what the link before had brought.
#[test]
fn a_launcher_that_comes_back_hears_again_what_it_waits_for() {
    let mut s = outside();
    asks(&mut s, 3, Wait::Spare { max: 2 });
    assert_eq!(told_to_wait(&s), 1);
    s.launcher(3, 2, None);
    assert_eq!(told_to_wait(&s), 2);
    // Its life has not changed: it is not said again.
    let lives = s
        .told
        .iter()
        .filter(|(_, f)| matches!(f, ToLauncher::Life { .. }));
    assert_eq!(lives.count(), 2);
}

#[test]
fn a_node_that_is_left_out_for_a_while_reads_for_how_long_and_where_to_look() {
    let mut s = outside();
    asks(&mut s, 3, Wait::Parked { ms: 1_500 });
    let text = waits(&s);
    assert!(
        text.contains("1.5 s") && text.contains("log of this"),
        "{text}"
    );
}

pub(super) fn ticket(k: usize, spec: &JobSpec, store: Option<StoreUuid>) -> JobMessage {
    JobMessage::Ticket(Box::new(Ticket {
        member: member(k),
        spec: spec.clone(),
        knows: Digest::ZERO,
        store,
        host: format!("h{k}"),
        command: String::new(),
        unreachable: Vec::new(),
        held_ms: 0,
        waited_ms: 0,
    }))
}

/// Whether node `k` is refused with this store.
fn refused(s: &mut Scripted, k: usize, spec: &JobSpec, store: Option<StoreUuid>) -> bool {
    s.sent.clear();
    s.hears(k, ticket(k, spec, store));
    let answer = s.sent.iter().find_map(|(to, body)| match body {
        JobMessage::TicketRefused { .. } if *to == node(k) => Some(true),
        JobMessage::TicketAck { .. } if *to == node(k) => Some(false),
        _ => None,
    });
    answer.unwrap_or_else(|| panic!("no answer: {:?}", s.sent))
}

#[test]
fn a_launcher_with_a_store_is_refused_by_a_job_that_has_none() {
    let (some, other) = (Some(StoreUuid([1; 16])), Some(StoreUuid([2; 16])));
    let running = record(1, 2).spec;
    let (mut s, _) = trains(0, 1, &[]);
    s.peer(3);
    // Its launchers may just have died, all of them.
    assert!(!refused(&mut s, 3, &running, some));
    let told = |body: &JobMessage| {
        matches!(
            body,
            JobMessage::TicketAck {
                wait: Wait::OtherSpec,
                ..
            }
        )
    };
    assert!(s.sent.iter().any(|(_, body)| told(body)), "{:?}", s.sent);
    s.pass(Span::from_secs(2));
    assert!(refused(&mut s, 3, &running, some));
    assert!(!refused(&mut s, 3, &running, None));
    // Where its launchers are all dead another job may follow it.
    for store in [some, None] {
        let (mut s, _) = ghost();
        s.peer(3);
        assert!(!refused(&mut s, 3, &running, store));
    }
    // So is whoever comes with another store than the first, or with none, before the job has formed.
    let spec = JobSpec {
        min_nodes: 3,
        max_nodes: 3,
        ..JobSpec::default()
    };
    for (first, second) in [(None, some), (some, None), (some, other)] {
        let mut s = Scripted::new(config(0, 2), Vec::new());
        (3..5).for_each(|i| s.peer(i));
        assert!(!refused(&mut s, 3, &spec, first));
        assert!(refused(&mut s, 4, &spec, second), "{first:?} {second:?}");
        assert!(!refused(&mut s, 4, &spec, first));
    }
}

/// Ctrl-C as a job forms, whose end was voted on and not learnt by all; then all start it again. The votes make that
/// end the next record, and it is none for those who came since.
#[test]
fn who_comes_when_all_launchers_are_gone_waits_for_the_next_life() {
    let mut r = record(2, 2);
    r.spec.min_nodes = 2;
    let lineage = |s: &mut Scripted| waits_in(s, 3, &r.spec);
    let gone = |s: &mut Scripted, k: usize, digest: Digest| match k {
        0 => s.on(Event::LauncherGone {
            conn: ConnId(1),
            guard: Answer::Refused,
        }),
        _ => s.status(k, digest, 2, |st| (st.gone, st.stopped) = (true, true)),
    };
    for (dead, expected) in [
        (vec![], r.lineage()),
        (vec![1], r.lineage()),
        (vec![1, 0], Digest::ZERO),
    ] {
        let (mut s, digest) = trains_with(0, r.clone());
        s.peer(3);
        // The other side of a cut may have ended it just now.
        assert_eq!(lineage(&mut s), Digest::ZERO, "{dead:?}");
        s.pass(Span::from_secs(1));
        assert_eq!(lineage(&mut s), r.lineage(), "{dead:?}");
        dead.iter().for_each(|k| gone(&mut s, *k, digest));
        assert_eq!(lineage(&mut s), expected, "{dead:?}");
    }
}

/// The life in which the launcher of this node waits, by the leader's newest answer.
fn waits_in(s: &mut Scripted, i: usize, spec: &JobSpec) -> Digest {
    s.sent.clear();
    s.hears(i, ticket(i, spec, None));
    let ack = s.sent.iter().rev().find_map(|(to, body)| match body {
        JobMessage::TicketAck { lineage, .. } if *to == node(i) => Some(*lineage),
        _ => None,
    });
    ack.expect("an answer")
}

/// Three of five are left, where five are needed: nothing runs, and a cancel has to reach those that wait.
#[test]
fn a_launcher_that_waits_beside_a_stopped_group_is_of_its_life_where_a_majority_says_so() {
    let mut r = record(5, 2);
    r.spec.min_nodes = 5;
    let (mut s, digest) = trains_with(0, r.clone());
    for k in [3, 4] {
        s.status(k, digest, 2, |st| (st.gone, st.stopped) = (true, true));
    }
    s.says(ToAgent::Stopped { digest });
    for k in [1, 2] {
        s.status(k, digest, 3, |st| st.stopped = true);
    }
    s.peer(5);
    s.peer(6);
    assert_eq!(waits_in(&mut s, 5, &r.spec), Digest::ZERO);
    s.pass(Span::from_secs(1));
    assert_eq!(waits_in(&mut s, 5, &r.spec), r.lineage());
    s.grants.clear();
    s.pass(Span::from_secs(1));
    assert_eq!(waits_in(&mut s, 6, &r.spec), Digest::ZERO);
    s.pass(Span::from_secs(1));
    assert_eq!(waits_in(&mut s, 6, &r.spec), Digest::ZERO);
}

#[test]
fn that_no_launcher_is_left_is_told_at_once() {
    let (mut s, digest) = trains(0, 1, &[]);
    s.peer(3);
    s.pass(Span::from_secs(60));
    s.hellos.clear();
    s.on(Event::LauncherGone {
        conn: ConnId(1),
        guard: Answer::Refused,
    });
    s.probes
        .insert(node(0), (Answer::Answered, Answer::Refused));
    s.pass(Span::from_secs(2));
    let deserted = s.hellos.iter().find(|(to, hello)| {
        let mut jobs = hello.jobs.iter();
        *to == node(3) && jobs.any(|a| a.digest == digest && a.deserted)
    });
    assert!(deserted.is_some(), "{:?}", s.hellos);
    // And once: nothing changes from here on.
    assert!(s.hellos.len() <= 2, "{:?}", s.hellos);
}

/// A launcher that comes in the place of a dead one makes the leader say them again.
#[test]
fn the_times_of_a_change_are_said_once() {
    let (mut s, digest) = trains(1, 2, &[]);
    let phases = Phases {
        detected: Time(1),
        ..Phases::default()
    };
    let times = |s: &Scripted| {
        let said = |n: &&Notice| matches!(n, Notice::Changed { .. });
        s.notices.iter().filter(said).count()
    };
    s.hears(0, JobMessage::Changed { digest, phases });
    assert_eq!(times(&s), 1);
    s.on(Event::LauncherGone {
        conn: ConnId(1),
        guard: Answer::Refused,
    });
    s.probes
        .insert(node(1), (Answer::Answered, Answer::Refused));
    s.launcher(3, 2, None);
    s.pass(Span::from_secs(2));
    s.hears(0, JobMessage::Changed { digest, phases });
    assert_eq!(times(&s), 1);
}

/// The order to end went to one that did not know yet who leads; the leader dies before all workers run.
#[test]
fn a_decision_that_is_heard_alone_is_timed_from_when_the_lost_were_heard_last() {
    let (mut s, _) = trains(1, 3, &[]);
    s.grants.remove(&node(2));
    s.pass(Span::from_secs(1));
    let two = Record {
        members: (0..2).map(member).collect(),
        ..next(&record(3, 2), 7)
    };
    let three = Record {
        members: vec![member(1)],
        cause: Cause::NodesLost {
            nodes: vec![node(0)],
        },
        ..next(&two, 8)
    };
    let digest = two.digest();
    s.hears(0, JobMessage::Decided { record: two.into() });
    let action = Action::Run {
        attempt: 1,
        master_port: 9,
        restart_count: 2,
        why: String::new(),
    };
    let (boot, seq) = (Boot(1), 1);
    let order = Order {
        digest,
        boot,
        seq,
        action,
    };
    s.hears(0, JobMessage::Order(Box::new(order)));
    s.hears(
        0,
        JobMessage::Decided {
            record: three.into(),
        },
    );
    let told = s.notices.iter().find_map(|n| match n {
        Notice::Changed {
            digest: of,
            phases,
            told: Told::Unfinished,
            ..
        } if *of == digest => Some(*phases),
        _ => None,
    });
    let seen = told.unwrap();
    assert!(seen.detected > Time::ZERO && seen.decided > seen.detected);
}

/// So that an order to cancel it from any node reaches it.
#[test]
fn that_a_next_life_gathers_is_told_beside_the_end_of_the_last() {
    let end = Record {
        kind: Kind::End { cancelled: false },
        members: Vec::new(),
        ..next(&record(2, 2), 7)
    };
    let ended = end.digest();
    let mut s = Scripted::new(config(0, 2), vec![holds(&end, 1)]);
    s.peer(3);
    s.launcher_of(0, (2, 2), None);
    s.pass(Span::from_secs(60));
    let told = s.hellos.iter().rev().find(|(to, _)| *to == node(3));
    let jobs = told.map(|(_, hello)| &hello.jobs[..]);
    let digests: Vec<Digest> = jobs.unwrap_or_default().iter().map(|a| a.digest).collect();
    assert_eq!(digests, [ended, Digest::ZERO]);
    s.hears(
        3,
        JobMessage::CancelAsk {
            lineage: Digest::ZERO,
            ago_ms: 0,
        },
    );
    let mut told = s.told.iter().map(|(_, frame)| frame);
    assert!(told.any(|f| matches!(f, ToLauncher::End { .. })));
}

/// It begins the next life of the job instead. That the job was stopped, or has failed, ends it too.
#[test]
fn that_all_others_left_is_no_end_for_a_launcher_that_waits() {
    let cancelled = Kind::End { cancelled: true };
    let failed = Kind::Failed { code: 3 };
    for (kind, ends) in [(Kind::Dormant, false), (cancelled, true), (failed, true)] {
        let mut s = outside();
        asks(&mut s, 3, Wait::Spare { max: 2 });
        let record = Record {
            kind,
            members: Vec::new(),
            ..next(&record(2, 2), 7)
        };
        let record = Arc::new(record);
        s.hears(0, JobMessage::Decided { record });
        s.pass(Span::from_millis(100));
        let mut told = s.told.iter().map(|(_, frame)| frame);
        let ended = told.any(|f| matches!(f, ToLauncher::End { .. }));
        assert_eq!(ended, ends, "{kind:?}");
    }
}

/// Three nodes that the job needs, of which this one is `me`; all have ended their workers.
fn ended(me: usize) -> (Scripted, Digest) {
    let r = Record {
        spec: JobSpec {
            min_nodes: 3,
            max_nodes: 3,
            ..JobSpec::default()
        },
        ..record(3, 2)
    };
    let (mut s, digest) = trains_with(me, r);
    s.told.clear();
    s.says(ToAgent::Stopped { digest });
    (s, digest)
}

/// How often people were told that a start waits.
fn pauses(s: &Scripted) -> usize {
    let waits = |n: &&Notice| matches!(n, Notice::Waiting { .. });
    s.notices.iter().filter(waits).count()
}

#[test]
fn a_script_that_fails_at_once_is_started_later_and_later_and_that_is_said() {
    let r = Record {
        spec: JobSpec {
            max_restarts: 9,
            ..record(1, 2).spec
        },
        ..record(1, 2)
    };
    let (mut s, mut digest) = trains_with(0, r);
    // The first failure comes long after the start, and the first soon after one waits for nothing, too.
    for said in [0, 0, 1, 2, 3, 4] {
        let exit = worker_exit(0);
        s.says(ToAgent::Exited { digest, exit });
        s.says(ToAgent::Stopped { digest });
        s.says(ToAgent::MasterPort { port: 9 });
        let failed = s.now;
        s.pass(Span::from_millis(10));
        assert_eq!(pauses(&s), said);
        assert_eq!(waits(&s).is_empty(), said == 0);
        s.pass(Span::from_secs(5));
        digest = s.decided().pop().unwrap();
        let waited = s.started(digest).unwrap().since(failed);
        assert!(waited >= Span::from_millis(if said == 0 { 0 } else { 125 << said }));
        s.says(ToAgent::Started { digest, attempt: 1 });
        assert_eq!(waits(&s), "");
    }
}

fn there(s: &Scripted) -> Option<u16> {
    s.agent.job(&key("j")).and_then(|job| job.waits_with())
}

/// A launcher that was killed alone only the leader misses: its agent answers everybody.
#[test]
fn members_whose_job_lacks_a_node_hear_it_of_their_leader() {
    let (mut s, digest) = ended(0);
    s.status(2, digest, 2, |st| (st.gone, st.stopped) = (true, true));
    // What was proposed before is tried again after 1.3 s, at most.
    s.pass(Span::from_secs(2));
    assert_eq!(there(&s), Some(2));
    s.sent.clear();
    s.status(1, digest, 2, |st| st.stopped = true);
    let ack = |(to, body): &(NodeId, JobMessage)| match body {
        JobMessage::TicketAck { launcher, wait, .. } if *to == node(1) => {
            assert_eq!(*launcher, member(1).launcher);
            Some(wait.clone())
        }
        _ => None,
    };
    let said = s.sent.iter().find_map(ack).unwrap();
    let Wait::Forming {
        have: 2, min: 3, ..
    } = said
    else {
        panic!("{said:?}")
    };

    let (mut s, _) = ended(1);
    s.pass(Span::from_secs(10));
    assert_eq!((there(&s), told_to_wait(&s)), (None, 0));
    let launcher = member(1).launcher;
    let lineage = Digest::ZERO;
    for _ in 0..5 {
        let wait = said.clone();
        s.hears(
            0,
            JobMessage::TicketAck {
                launcher,
                lineage,
                wait,
            },
        );
        s.pass(Span::from_secs(1));
    }
    // Once.
    assert_eq!((there(&s), told_to_wait(&s)), (Some(2), 1));
}

#[test]
fn those_that_have_finished_are_told_for_whom_they_wait() {
    let (mut s, digest) = trains(0, 3, &[]);
    s.says(ToAgent::Finished { digest });
    s.status(1, digest, 2, |st| st.finished = true);
    s.status(2, digest, 2, |_| {});
    s.pass(Span::from_secs(1));
    assert_eq!(waits(&s), "", "others may be slower");
    s.pass(Span::from_secs(5));
    let told = |s: &Scripted, i: usize| {
        let mut sent = s.sent.iter().filter(|(to, _)| *to == node(i));
        sent.any(|(_, body)| {
            let nodes = vec![node(2)];
            let expected = Wait::Finishing { nodes };
            matches!(body, JobMessage::TicketAck { wait, .. } if *wait == expected)
        })
    };
    assert!(waits(&s).contains("h2") && told(&s, 1), "{}", waits(&s));
    assert!(!told(&s, 2), "its ranks run");
    // Said again to one that asks again, which may not have heard it.
    s.sent.clear();
    s.status(1, digest, 3, |st| st.finished = true);
    assert!(told(&s, 1));
}

#[test]
fn who_has_finished_reads_for_whom_the_job_waits() {
    let (mut s, digest) = trains(1, 3, &[]);
    s.says(ToAgent::Finished { digest });
    let nodes = vec![node(2)];
    s.hears(
        0,
        JobMessage::TicketAck {
            launcher: member(1).launcher,
            lineage: Digest::ZERO,
            wait: Wait::Finishing { nodes },
        },
    );
    assert!(waits(&s).contains("h2"), "{}", waits(&s));
    assert_eq!(told_to_wait(&s), 1);
}

#[test]
fn an_agent_that_restarts_is_no_fault_of_the_network() {
    let r = record(2, 2);
    let mut s = outside();
    s.launcher(3, 2, None);
    s.pass(Span::from_millis(100));
    let leads = || Wait::Elsewhere {
        advert: Advert {
            key: key("j"),
            lineage: r.lineage(),
            digest: r.digest(),
            number: r.number,
            leader: Some(node(0)),
            belongs: true,
            deserted: false,
            left_behind: false,
            started: false,
            unresponsive: false,
        },
    };
    let tell = |s: &mut Scripted| {
        let (lineage, wait) = (r.lineage(), leads());
        let launcher = member(3).launcher;
        s.hears(
            1,
            JobMessage::TicketAck {
                launcher,
                lineage,
                wait,
            },
        );
        waits(s).to_owned()
    };
    s.probes
        .insert(node(0), (Answer::Refused, Answer::Answered));
    s.on(Event::Disconnected { node: node(0) });
    for _ in 0..5 {
        let text = tell(&mut s);
        assert!(text.contains("h0") && !text.contains("network"), "{text}");
        s.pass(Span::from_secs(1));
    }
    // Neither its agent nor its launcher says anything.
    s.probes.insert(node(0), (Answer::Silent, Answer::Silent));
    s.pass(Span::from_secs(40));
    let text = tell(&mut s);
    assert!(text.contains("h0") && text.contains("network"), "{text}");
}

#[test]
fn a_node_that_died_before_this_run_has_a_name() {
    let r = record(3, 2);
    let mut s = Scripted::new(config(0, 2), vec![holds(&r, 1)]);
    s.agent.remember_hosts([(node(2), "n2".to_owned())]);
    s.launcher(0, 3, None);
    s.pass(Span::from_secs(60));
    let text = waits(&s);
    // That host may be another node by now: a command names the one that is meant.
    let dead = format!("--dead {}", node(2));
    assert!(text.contains("n2 (") && text.contains(&dead), "{text}");
}

/// The job ended twice, and the other node takes the other end for the last one: a birth that is proposed here after
/// ours is refused there, and is given up at once.
#[test]
fn whoever_proposes_a_birth_after_an_earlier_end_takes_up_the_later_one_at_once() {
    let end = |nonce| Record {
        kind: Kind::Dormant,
        members: Vec::new(),
        birth: Digest([nonce; 32]),
        nonce: nonce.into(),
        ..record(2, 2)
    };
    let mut ends = [end(1), end(2)];
    ends.sort_by_key(Record::digest);
    let [ours, theirs] = ends;
    for know_theirs in [true, false] {
        let mut durable = holds(&ours, 1);
        durable.ended = know_theirs
            .then(|| Arc::new(theirs.clone()))
            .into_iter()
            .collect();
        let mut s = Scripted::new(config(0, 2), vec![durable]);
        s.peer(1);
        s.launcher_of(0, (2, 2), None);
        let ticket = Ticket {
            member: member(1),
            spec: JobSpec {
                min_nodes: 2,
                max_nodes: 2,
                ..JobSpec::default()
            },
            knows: theirs.digest(),
            store: None,
            host: "h1".into(),
            command: String::new(),
            unreachable: Vec::new(),
            held_ms: 0,
            waited_ms: 0,
        };
        s.hears(1, JobMessage::Ticket(Box::new(ticket)));
        s.pass(Span::from_millis(10));
        let proposed = |(to, body): &(NodeId, JobMessage)| {
            *to == node(1) && matches!(body, JobMessage::Birth { .. })
        };
        assert!(s.sent.iter().any(proposed), "{:?}", s.sent);
        let (have, record) = (ours.digest(), Arc::new(theirs.clone()));
        s.hears(1, JobMessage::Follows { have, record });
        let head = s.agent.job(&key("j")).and_then(|j| j.head());
        assert_eq!(head.map(|(_, d)| d), Some(theirs.digest()));
    }
}

/// Its node was killed, and the others ended the job: the launcher that comes next there is of another life, though its
/// agent hears of the end only then.
#[test]
fn a_launcher_that_came_after_the_end_is_not_told_it() {
    for me in 0..3 {
        let first = record(3, 1);
        let end = Record {
            kind: Kind::End { cancelled: true },
            members: Vec::new(),
            cause: Cause::Cancelled,
            ..next(&first, 3)
        };
        let mut s = Scripted::new(config(me, 2), vec![holds(&first, 1)]);
        s.launcher_of(me + 3, (2, 3), None);
        for i in (0..3).filter(|i| *i != me) {
            s.probes.insert(node(i), (Answer::Refused, Answer::Refused));
        }
        s.pass(Span::from_secs(5));
        let other = (me + 1) % 3;
        s.peer(other);
        // It asks to be let in before the other says a word.
        s.pass(Span::from_secs(1));
        let record = Arc::new(end);
        s.hears(other, JobMessage::Decided { record });
        s.pass(Span::from_secs(1));
        let told = |(_, frame): &(Time, ToLauncher)| matches!(frame, ToLauncher::End { .. });
        assert!(!s.told.iter().any(told), "{me}: {:?}", s.told);
        assert!(s.agent.job(&key("j")).is_some_and(|j| !j.is_live()), "{me}");
    }
}

/// Its place is kept, and nothing changes: training goes on.
#[test]
fn a_launcher_without_a_place_is_a_spare_though_the_agent_of_a_member_is_away() {
    for away in [false, true] {
        let (mut s, _) = trains(0, 3, &[]);
        s.peer(3);
        if away {
            s.grants.remove(&node(2));
            s.probes
                .insert(node(2), (Answer::Refused, Answer::Answered));
            s.on(Event::Disconnected { node: node(2) });
            s.pass(Span::from_secs(3));
        }
        s.sent.clear();
        s.hears(3, ticket(3, &record(3, 2).spec, None));
        let wait = s.sent.iter().find_map(|(to, body)| match body {
            JobMessage::TicketAck { wait, .. } if *to == node(3) => Some(wait),
            _ => None,
        });
        assert_eq!(wait, Some(&Wait::Spare { max: 3 }), "{away}");
    }
}
