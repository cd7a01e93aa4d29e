//! A person's order to end a job: of which life it is, to whom it is said, and how it ends.

use std::sync::Arc;

use super::super::scripted::{
    Scripted, by_store, config, key, member, next, node, record, registers,
};
use super::super::{ConnId, Error, Event};
use super::members::trains;
use super::told::ticket;
use crate::ids::{Digest, NodeId};
use crate::job::CancelStage;
use crate::local::{Began, Command, Register, ToAgent, ToLauncher};
use crate::membership::Answer;
use crate::record::{Arbiter, Kind, Record};
use crate::spec::JobSpec;
use crate::time::Span;
use crate::wire::{Action, Advert, JobMessage, Leave, Ticket, Wait};

fn orders(s: &mut Scripted) {
    s.on(Event::Launcher {
        conn: ConnId(9),
        owner: "0".into(),
        frame: ToAgent::Command(Command::Cancel {
            job: "j".into(),
            given: s.now,
        }),
    });
}

fn stage(s: &Scripted) -> Option<CancelStage> {
    s.agent.job(&key("j")).and_then(|j| j.cancelling())
}

/// Whether the launcher here was told that the user stopped the job.
fn is_stopped(s: &Scripted) -> bool {
    let mut told = s.told.iter().map(|(_, frame)| frame);
    told.any(|f| matches!(f, ToLauncher::End { code: 130, .. }))
}

/// A member's statement about its generation.
fn lives(record: &Record) -> Advert {
    Advert {
        key: key("j"),
        lineage: record.lineage(),
        digest: record.digest(),
        number: record.number,
        leader: record.leader(),
        belongs: record.kind == Kind::Next,
        deserted: false,
        left_behind: false,
        started: false,
        unresponsive: false,
    }
}

fn end_of(record: &Record) -> Record {
    Record {
        kind: Kind::End { cancelled: true },
        members: Vec::new(),
        ..next(record, 7)
    }
}

/// Node 3 has no part in the job of nodes 0 and 1.
fn outside(record: &Record) -> Scripted {
    let mut s = Scripted::new(config(3, 2), Vec::new());
    for i in 0..2 {
        s.peer(i);
        s.says_hello(i, vec![lives(record)]);
    }
    s
}

/// The nodes that were told since the last look to end a life, and which one.
fn asked(s: &mut Scripted) -> Vec<(NodeId, Digest)> {
    let sent = std::mem::take(&mut s.sent).into_iter();
    let asks = sent.filter_map(|(to, body)| match body {
        JobMessage::CancelAsk { lineage, .. } => Some((to, lineage)),
        _ => None,
    });
    asks.collect()
}

#[test]
fn an_order_is_said_until_its_life_is_over_and_not_to_the_next_one() {
    let first = record(2, 3);
    let mut s = outside(&first);
    orders(&mut s);
    let both = [0, 1].map(|i| (node(i), first.lineage()));
    assert_eq!(asked(&mut s), both);
    // What was lost on the way is said again.
    s.pass(Span::from_millis(1_100));
    assert_eq!(asked(&mut s), both);
    assert_eq!(stage(&s), Some(CancelStage::Asked { sure: false }));
    // The leader says that it is over, and the next life begins at once.
    let second = Record {
        parent: end_of(&first).digest(),
        ..record(2, 1)
    };
    s.says_hello(0, vec![lives(&end_of(&first))]);
    s.says_hello(1, vec![lives(&second)]);
    s.says_hello(0, vec![lives(&second)]);
    s.pass(Span::from_secs(3));
    assert_eq!(asked(&mut s), []);
    assert_eq!(stage(&s), Some(CancelStage::Over));
    // It is remembered for as long as somebody may want to read it.
    s.pass(Span::from_secs(60));
    assert!(s.agent.job(&key("j")).is_none());
}

#[test]
fn a_life_whose_nodes_cannot_be_reached_any_more_is_not_taken_for_over() {
    let mut s = outside(&record(2, 3));
    orders(&mut s);
    for i in 0..2 {
        s.on(Event::Disconnected { node: node(i) });
    }
    s.pass(Span::from_secs(1));
    assert_eq!(stage(&s), Some(CancelStage::Asked { sure: false }));
    s.pass(Span::from_secs(10));
    assert!(matches!(stage(&s), Some(CancelStage::Failed { .. })));
}

/// An agent that is stopped keeps its connection, and says nothing: the order is given up with a reason, where the one
/// that leads is such an agent (node 0).
#[test]
fn a_life_whose_leader_says_nothing_any_more_is_not_waited_for_without_end() {
    for (speak, gives_up) in [(0..2, false), (0..1, false), (1..2, true), (0..0, true)] {
        let first = record(2, 3);
        let mut s = outside(&first);
        s.pass(Span::from_secs(10));
        orders(&mut s);
        for _ in 0..10 {
            for i in speak.clone() {
                s.says_hello(i, vec![lives(&first)]);
            }
            s.pass(Span::from_secs(1));
        }
        let failed = matches!(stage(&s), Some(CancelStage::Failed { .. }));
        assert_eq!(failed, gives_up, "{speak:?}: {:?}", stage(&s));
    }
}

#[test]
fn launchers_that_wait_are_told_and_not_taken_for_gone_with_the_link() {
    let gathers = || vec![Advert::gathering(key("j"))];
    for gone in [false, true] {
        let mut s = Scripted::new(config(3, 2), Vec::new());
        s.peer(0);
        s.says_hello(0, gathers());
        orders(&mut s);
        s.pass(Span::from_secs(3));
        // What was lost on the way is said again.
        assert_eq!(asked(&mut s), [(node(0), Digest::ZERO); 4]);
        assert_eq!(stage(&s), Some(CancelStage::Asked { sure: false }));
        match gone {
            true => s.on(Event::Disconnected { node: node(0) }),
            false => s.says_hello(0, Vec::new()),
        }
        s.pass(Span::from_secs(10));
        let failed = matches!(stage(&s), Some(CancelStage::Failed { .. }));
        assert_eq!(failed, gone, "{:?}", stage(&s));
        assert_eq!(stage(&s) == Some(CancelStage::Over), !gone);
    }
}

/// The launcher here asks another node to be let in, which does not say yet that others wait there.
#[test]
fn the_node_that_the_launcher_here_asks_is_told() {
    let mut s = Scripted::new(config(3, 2), Vec::new());
    s.peer(0);
    s.says_hello(0, Vec::new());
    s.launcher_of(3, (3, 3), None);
    s.pass(Span::from_millis(200));
    let mut sent = s.sent.iter();
    assert!(sent.any(|(to, m)| *to == node(0) && matches!(m, JobMessage::Ticket(_))));
    orders(&mut s);
    assert_eq!(asked(&mut s), [(node(0), Digest::ZERO)]);
}

#[test]
fn a_life_that_nobody_takes_part_in_any_more_is_over() {
    let mut s = outside(&record(2, 3));
    orders(&mut s);
    (0..2).for_each(|i| s.says_hello(i, Vec::new()));
    s.pass(Span::from_secs(1));
    assert_eq!(stage(&s), Some(CancelStage::Over));
}

#[test]
fn an_order_that_only_the_store_can_carry_out_says_so_at_once() {
    let left = by_store(record(2, 3));
    let mut s = outside(&left);
    for i in 0..2 {
        let deserted = Advert {
            leader: None,
            deserted: true,
            ..lives(&left)
        };
        s.says_hello(i, vec![deserted]);
    }
    orders(&mut s);
    s.pass(Span::from_millis(100));
    let generation = left.digest();
    let known = true;
    assert_eq!(stage(&s), Some(CancelStage::InStore { generation, known }));
    assert_eq!(asked(&mut s), []);
    // Written by this node's user.
    let record = end_of(&left);
    assert!(matches!(record.arbiter, Arbiter::Store(_)));
    s.on(Event::Launcher {
        conn: ConnId(9),
        owner: "0".into(),
        frame: ToAgent::Command(Command::Ended {
            job: "j".into(),
            record: Box::new(record.clone()),
        }),
    });
    let told = |i| {
        let decided =
            |body: &JobMessage| matches!(body, JobMessage::Decided { record: r } if **r == record);
        s.sent
            .iter()
            .any(|(to, body)| *to == node(i) && decided(body))
    };
    assert!(told(0) && told(1), "{:?}", s.sent);
}

/// Where they are known to be dead, it is over.
#[test]
fn a_minority_does_not_end_what_a_majority_that_it_does_not_see_goes_on_with() {
    for dead in [false, true] {
        let (mut s, _) = trains(2, 3, &[]);
        let lineage = record(3, 2).lineage();
        for i in 0..2 {
            let answer = if dead {
                Answer::Refused
            } else {
                Answer::Silent
            };
            s.grants.remove(&node(i));
            s.probes.insert(node(i), (answer, answer));
            s.on(Event::Disconnected { node: node(i) });
        }
        s.pass(Span::from_secs(6));
        orders(&mut s);
        s.pass(Span::from_secs(1));
        assert!(is_stopped(&s));
        assert_eq!(stage(&s), Some(CancelStage::Asked { sure: dead }));
        s.on(Event::LauncherGone {
            conn: ConnId(1),
            guard: Answer::Refused,
        });
        s.pass(Span::from_secs(10));
        match (stage(&s), dead) {
            (Some(CancelStage::Failed { why }), false) => {
                assert!(why.contains("h0") && why.contains("h1"), "{why}");
            }
            (Some(CancelStage::Over), true) => {}
            other => panic!("{other:?}"),
        }
        let job = s.agent.job(&key("j"));
        let given_up = job.is_some_and(|j| j.durable().has_given_up(lineage, 2));
        assert_eq!(given_up, dead);
    }
}

/// Each of two nodes may take the other for the leader.
#[test]
fn an_order_is_passed_on_once_in_a_while_and_never_back() {
    let (mut s, _) = trains(2, 3, &[]);
    let lineage = record(3, 2).lineage();
    let ask = || JobMessage::CancelAsk { lineage, ago_ms: 0 };
    s.sent.clear();
    s.hears(0, ask());
    assert_eq!(asked(&mut s), []);
    (0..3).for_each(|_| s.hears(1, ask()));
    assert_eq!(asked(&mut s), [(node(0), lineage)]);
    s.pass(Span::from_secs(1));
    s.sent.clear();
    s.hears(1, ask());
    assert_eq!(asked(&mut s), [(node(0), lineage)]);
}

/// A launcher whose agent has lost its state took part in what others go on with.
#[test]
fn a_launcher_that_its_agent_does_not_know_as_a_member_is_not_all_of_the_job() {
    let running = record(2, 3);
    let began = |s: &mut Scripted| {
        s.launcher(3, 2, None);
        let Some(job) = s.agent.job(&key("j")) else {
            panic!("no job")
        };
        assert!(job.launcher().is_some());
    };
    let mut s = outside(&running);
    began(&mut s);
    orders(&mut s);
    let both = [0, 1].map(|i| (node(i), running.lineage()));
    assert_eq!(asked(&mut s), both);
    assert!(is_stopped(&s));
    assert_eq!(stage(&s), Some(CancelStage::Asked { sure: false }));
    // Nobody that this agent sees knows that life: others may run it all the same.
    let mut s = Scripted::new(config(3, 2), Vec::new());
    let (lineage, digest) = (running.lineage(), running.digest());
    s.says(ToAgent::Register(Register {
        began: Some(Box::new(Began { lineage, digest })),
        running: Some(digest),
        ..registers(3, record(2, 1).spec)
    }));
    orders(&mut s);
    s.pass(Span::from_secs(1));
    assert_eq!(stage(&s), Some(CancelStage::Asked { sure: false }));
    assert!(is_stopped(&s));
    s.pass(Span::from_secs(10));
    assert!(matches!(stage(&s), Some(CancelStage::Failed { .. })));
}

/// A node whose user ended a job may be gone before it is over, with all that it knew: the others end it all the same.
#[test]
fn a_job_that_is_cancelled_ends_without_the_node_that_said_so() {
    let (mut s, _) = trains(1, 3, &[]);
    s.says(ToAgent::Cancel);
    let lineage = record(3, 2).lineage();
    let told = |s: &Scripted, i: usize| {
        let ask = (node(i), JobMessage::CancelAsk { lineage, ago_ms: 0 });
        s.sent.contains(&ask)
    };
    assert!(told(&s, 0) && told(&s, 2));
    let (mut s, digest) = trains(2, 3, &[]);
    s.hears(0, JobMessage::CancelAsk { lineage, ago_ms: 0 });
    s.pass(Span::from_secs(1));
    let says = |(to, body): &(NodeId, JobMessage)| match body {
        JobMessage::Status(st) => *to == node(0) && st.digest == digest && st.cancel,
        _ => false,
    };
    assert!(s.sent.iter().any(says));
}

/// Preempted for two minutes, workers that no signal ends: who stops the job meanwhile waits no longer than for a stop.
#[test]
fn a_job_that_stops_for_a_node_that_leaves_is_ended_no_later_than_the_user_asks() {
    let (mut s, digest) = trains(0, 2, &[]);
    s.status(1, digest, 2, |st| {
        st.leave = Some(Leave {
            grace_ms: 120_000,
            reason: "reclaimed".into(),
        });
    });
    let graces = |s: &Scripted| -> Vec<u32> {
        let told = s.told.iter().filter_map(|(_, f)| match f {
            ToLauncher::Preempt { grace_ms, .. } => Some(*grace_ms),
            _ => None,
        });
        told.collect()
    };
    let long = graces(&s);
    assert!(
        long.iter().all(|ms| *ms > 60_000) && !long.is_empty(),
        "{long:?}"
    );
    s.says(ToAgent::Cancel);
    s.pass(Span::from_millis(100));
    let stop_grace = record(2, 2).spec.stop_grace_ms;
    let since = graces(&s).split_off(long.len());
    assert!(
        since.contains(&stop_grace) && since.iter().all(|ms| *ms <= stop_grace),
        "{since:?}"
    );
}

/// The life of those that waited at a door begins just before the order arrives there.
#[test]
fn an_order_to_those_that_wait_is_for_the_life_that_they_begin() {
    let mut s = Scripted::new(config(3, 2), Vec::new());
    s.peer(0);
    s.says_hello(0, vec![Advert::gathering(key("j"))]);
    orders(&mut s);
    assert_eq!(asked(&mut s), [(node(0), Digest::ZERO)]);
    let begun = Record::first((0..2).map(member).collect());
    s.says_hello(0, vec![lives(&begun)]);
    s.pass(Span::from_millis(1_100));
    assert_eq!(asked(&mut s), [(node(0), begun.lineage())]);
    assert_eq!(stage(&s), Some(CancelStage::Asked { sure: false }));
    // What begins later is not meant.
    s.says_hello(0, vec![lives(&end_of(&begun))]);
    let later = Record {
        parent: end_of(&begun).digest(),
        ..begun
    };
    s.says_hello(0, vec![lives(&later)]);
    s.pass(Span::from_millis(1_100));
    assert_eq!(asked(&mut s), []);
    assert_eq!(stage(&s), Some(CancelStage::Over));
}

/// The same with workers that stop at a step, where the ranks do not come to agree on one.
#[test]
fn the_ranks_of_a_job_that_is_hurried_have_time_to_save() {
    let (mut s, digest) = trains(0, 2, &[]);
    let yes = true;
    s.says(ToAgent::TakesStopSteps { digest, yes });
    let leave = || Leave {
        grace_ms: 120_000,
        reason: "reclaimed".into(),
    };
    s.status(1, digest, 2, |st| st.takes_stop_steps = true);
    s.status(1, digest, 3, |st| {
        st.takes_stop_steps = true;
        st.leave = Some(leave());
    });
    let signalled = |s: &Scripted| {
        let mut told = s.told.iter();
        told.any(|(_, f)| matches!(f, ToLauncher::Preempt { .. }))
    };
    s.pass(Span::from_secs(1));
    assert!(!signalled(&s));
    s.says(ToAgent::Cancel);
    let grace = record(2, 2).spec.stop_grace();
    s.pass(Span(grace.0 / 2) + Span::from_secs(1));
    assert!(signalled(&s), "half of the time is left for what they save");
}

/// Ctrl-C twice on one node kills what runs there. The others were told to save, and have their time for it.
#[test]
fn those_that_save_for_a_user_who_stops_the_job_are_not_hurried_by_a_launcher_that_goes_first() {
    let (mut s, digest) = trains(0, 3, &[]);
    s.says(ToAgent::Cancel);
    s.pass(Span::from_millis(100));
    s.sent.clear();
    s.status(2, digest, 2, |st| {
        st.cancel = true;
        st.gone = true;
    });
    s.pass(Span::from_secs(3));
    let ends = |(_, body): &(NodeId, JobMessage)| match body {
        JobMessage::Order(order) => matches!(order.action, Action::End { .. }),
        _ => false,
    };
    assert!(!s.sent.iter().any(ends) && s.prepares().is_empty());
    // It is over once the others have saved.
    s.says(ToAgent::Stopped { digest });
    s.status(1, digest, 2, |st| st.stopped = true);
    s.pass(Span::from_millis(100));
    assert!(!s.prepares().is_empty());
}

/// As above, where one of them does not end: it has no longer than the user gave it.
#[test]
fn a_rank_that_saves_for_ever_does_not_keep_a_job_that_the_user_stops() {
    let (mut s, digest) = trains(0, 3, &[]);
    s.says(ToAgent::Cancel);
    s.status(2, digest, 2, |st| st.gone = true);
    s.says(ToAgent::Stopped { digest });
    s.pass(record(3, 2).spec.stop_grace() + Span::from_secs(2));
    s.status(1, digest, 3, |_| {});
    assert!(!s.prepares().is_empty());
}

#[test]
fn those_that_have_ended_are_told_once_whose_workers_they_wait_for() {
    let (mut s, digest) = trains(0, 3, &[]);
    s.says(ToAgent::Cancel);
    s.status(1, digest, 2, |st| st.stopped = true);
    let told = |s: &Scripted, i: usize| {
        let mut said = s.sent.iter().filter(|(to, _)| *to == node(i));
        said.any(|(_, body)| matches!(body, JobMessage::SaveSaid { .. }))
    };
    s.pass(Span::from_secs(3));
    assert!(!told(&s, 1));
    s.pass(Span::from_secs(2));
    assert!(told(&s, 1) && !told(&s, 2));
    s.sent.clear();
    s.pass(Span::from_secs(10));
    assert!(!told(&s, 1));
}

/// The order is given here, or heard of from another node; the launcher waits for a place in what goes on elsewhere.
#[test]
fn a_launcher_that_was_started_after_an_order_is_not_ended_by_it() {
    let first = record(2, 3);
    let lineage = first.lineage();
    for own in [true, false] {
        for before in [true, false] {
            let mut s = outside(&first);
            if before {
                s.launcher(3, 2, None);
            }
            s.pass(Span::from_millis(10));
            match own {
                true => orders(&mut s),
                // Another job of this node knows of it already.
                false => {
                    s.says_hello(0, vec![lives(&first)]);
                    s.hears(1, JobMessage::CancelAsk { lineage, ago_ms: 0 });
                }
            }
            s.pass(Span::from_millis(10));
            if !before {
                s.launcher(3, 2, None);
            }
            let ack = JobMessage::TicketAck {
                launcher: member(3).launcher,
                lineage,
                wait: Wait::Spare { max: 2 },
            };
            s.hears(0, ack);
            let ago_ms = if before { 0 } else { 5 };
            s.hears(1, JobMessage::CancelAsk { lineage, ago_ms });
            s.pass(Span::from_secs(3));
            assert_eq!(is_stopped(&s), before, "own {own}");
            // Those that decide hear of it later.
            let record = Arc::new(end_of(&first));
            s.hears(0, JobMessage::Decided { record });
            s.pass(Span::from_millis(100));
            assert_eq!(is_stopped(&s), before, "own {own}");
        }
    }
}

/// An order is said again and again, by the agent that was given it and by the one that they ask: it is none for those
/// that came later.
#[test]
fn launchers_that_wait_are_ended_if_they_came_before_the_order() {
    let ask = |ago_ms| JobMessage::CancelAsk {
        lineage: Digest::ZERO,
        ago_ms,
    };
    let spec = JobSpec {
        min_nodes: 4,
        max_nodes: 4,
        ..JobSpec::default()
    };
    let waits = |k: usize, waited_ms: u32| match ticket(k, &spec, None) {
        JobMessage::Ticket(ticket) => JobMessage::Ticket(Box::new(Ticket {
            waited_ms,
            ..*ticket
        })),
        other => other,
    };
    let mut s = Scripted::new(config(0, 2), Vec::new());
    (1..4).for_each(|k| s.peer(k));
    s.launcher_of(0, (4, 4), None);
    s.pass(Span::from_secs(2));
    s.hears(1, waits(1, 5_000));
    s.hears(2, waits(2, 0));
    s.sent.clear();
    s.hears(3, ask(1_000));
    assert!(is_stopped(&s));
    assert_eq!(asked(&mut s), [(node(1), Digest::ZERO)]);
    // One whose agent did not hear of it asks again.
    s.pass(Span::from_secs(1));
    s.hears(1, waits(1, 6_000));
    s.hears(2, waits(2, 1_000));
    assert_eq!(asked(&mut s), [(node(1), Digest::ZERO)]);
    // Much later there is no such order.
    s.pass(Span::from_secs(40));
    s.hears(1, waits(1, 47_000));
    assert_eq!(asked(&mut s), []);
    // A launcher that came after it.
    let mut s = Scripted::new(config(3, 2), Vec::new());
    s.peer(0);
    s.launcher_of(3, (3, 3), None);
    s.pass(Span::from_secs(1));
    s.hears(0, ask(2_000));
    assert!(!is_stopped(&s));
    s.hears(0, ask(500));
    assert!(is_stopped(&s));
}

/// One that is stopped, and one at which others wait soon after.
#[test]
fn an_agent_at_which_launchers_wait_is_asked_for_a_while() {
    for speaks in [true, false] {
        let gathers = || vec![Advert::gathering(key("j"))];
        let mut s = Scripted::new(config(3, 2), Vec::new());
        s.peer(0);
        s.says_hello(0, gathers());
        orders(&mut s);
        for _ in 0..12 {
            if speaks {
                s.says_hello(0, gathers());
            }
            s.pass(Span::from_secs(1));
        }
        assert!(
            asked(&mut s)
                .iter()
                .all(|ask| *ask == (node(0), Digest::ZERO))
        );
        match (stage(&s), speaks) {
            (Some(CancelStage::Over), true) | (Some(CancelStage::Failed { .. }), false) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Rank 0's launcher is dead, and with it this agent's way to the store: it names the next member. That one's agent is
/// stopped, or was a moment ago.
#[test]
fn an_order_waits_for_no_leader_that_says_nothing() {
    for speaks in [true, false] {
        let first = by_store(record(2, 3));
        let mut s = outside(&first);
        s.pass(Span::from_secs(10));
        orders(&mut s);
        for _ in 0..10 {
            let next = Advert {
                leader: Some(node(1)),
                ..lives(&first)
            };
            s.says_hello(0, vec![next]);
            if speaks {
                s.says_hello(1, vec![lives(&first)]);
            }
            s.pass(Span::from_secs(1));
        }
        match (stage(&s), speaks) {
            (Some(CancelStage::Asked { .. }), true) => {}
            (Some(CancelStage::Failed { why }), false) => {
                assert!(why.contains("h1") && !why.contains("h0"), "{why}");
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Agent 3 knows how a job ended, and that it was started again on nodes 1 and 2. Their agents are gone without a word, and
/// their launchers may go on: the order is refused, as nobody is there to ask, and the job is not taken for over.
#[test]
fn an_order_is_no_success_where_the_agents_of_the_next_life_are_gone() {
    let over = end_of(&record(2, 2));
    let runs = Record {
        birth: Digest::ZERO,
        parent: over.digest(),
        ..record(2, 1)
    };
    let mut s = Scripted::new(config(3, 2), Vec::new());
    (1..3).for_each(|i| s.peer(i));
    let record = Arc::new(over);
    s.hears(1, JobMessage::Decided { record });
    (1..3).for_each(|i| s.says_hello(i, vec![lives(&runs)]));
    let ran = |s: &Scripted| {
        let job = s.agent.job(&key("j")).unwrap();
        job.ran_elsewhere(s.agent.peers(), s.now)
    };
    assert_eq!(ran(&s), []);
    for i in [1, 2] {
        s.on(Event::Disconnected { node: node(i) });
    }
    assert_eq!(ran(&s), [node(1), node(2)]);
    let (job, given) = ("j".into(), s.now);
    let order = Event::Launcher {
        conn: ConnId(9),
        owner: "0".into(),
        frame: ToAgent::Command(Command::Cancel { job, given }),
    };
    let answer = s.agent.handle(order, s.now);
    assert!(matches!(answer, Err(Error::Refused(_))));
    // Once their launchers must have ended, the end that is known counts again.
    s.pass(Span::from_secs(40));
    assert_eq!(ran(&s), []);
}
