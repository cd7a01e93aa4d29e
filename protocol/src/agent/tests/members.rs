//! Members that are away, that cannot end their workers, or whose launchers all are dead.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::super::scripted::{
    Scripted, belongs_to, by_store, config, holds, key, member, next, node, record, registers,
    witness, worker_exit,
};
use super::super::{ConnId, Event, Notice};
use super::groups::other_group;
use super::told::ticket;
use crate::ids::{Boot, Digest, NodeId};
use crate::local::{Began, Command, Register, ToAgent, ToLauncher};
use crate::membership::Answer;
use crate::record::{Kind, Member, Record};
use crate::spec::JobSpec;
use crate::time::Span;
use crate::wire::{Action, Advert, JobMessage, Order, Status, Ticket};

/// Node `me` of a generation of `n` nodes, in which all train.
pub(super) fn trains(me: usize, n: usize, witnesses: &[usize]) -> (Scripted, Digest) {
    let r = Record {
        witnesses: witnesses.iter().map(|w| witness(*w)).collect(),
        ..record(n, 2)
    };
    trains_with(me, r)
}

pub(super) fn trains_with(me: usize, r: Record) -> (Scripted, Digest) {
    let digest = r.digest();
    let (n, most) = (r.members.len(), r.spec.max_nodes);
    let mut s = Scripted::new(config(me, 2), vec![holds(&r, 1)]);
    let all = r.voters().chain(r.members.iter().map(Member::voter));
    let others: BTreeSet<NodeId> = all.map(|v| v.node).collect();
    let others = (0..8).filter(|i| others.contains(&node(*i)));
    others.filter(|i| *i != me).for_each(|i| s.peer(i));
    s.launcher(me, most, Some(digest));
    s.says(ToAgent::Started { digest, attempt: 1 });
    let others = (0..n).filter(|i| *i != me);
    others.for_each(|i| s.status(i, digest, 1, |_| {}));
    s.pass(Span::from_secs(3));
    (s, digest)
}

/// kill -9 of an agent: its launcher's guard still answers.
fn agent_dies(s: &mut Scripted, i: usize) {
    s.grants.remove(&node(i));
    s.probes
        .insert(node(i), (Answer::Refused, Answer::Answered));
    s.on(Event::Disconnected { node: node(i) });
}

fn stopped(s: &Scripted) -> bool {
    let stop = |n: &Notice| matches!(n, Notice::Stopping { .. });
    let told = |f: &ToLauncher| matches!(f, ToLauncher::Stop { .. });
    s.notices.iter().any(stop) || s.told.iter().any(|(_, f)| told(f))
}

/// A heartbeat serves all jobs of two nodes: one that has no vote in a job refuses nothing of it.
#[test]
fn only_a_voter_that_refuses_a_lease_is_asked_what_followed() {
    let (mut s, digest) = trains(0, 3, &[]);
    s.peer(5);
    for (of, asked) in [(5, false), (1, true)] {
        s.sent.clear();
        let now = s.now;
        s.agent.granted(node(of), &[], now, now);
        let ask = |(to, m): &(NodeId, JobMessage)| {
            *to == node(of) && matches!(m, JobMessage::Ask { have } if *have == digest)
        };
        s.carry_out();
        assert_eq!(s.sent.iter().any(ask), asked, "{of}");
    }
}

#[test]
fn a_spare_does_not_take_the_place_of_a_node_whose_agent_restarts() {
    let (mut s, _) = trains(0, 2, &[2]);
    s.peer(3);
    let ticket = Ticket {
        member: member(3),
        spec: JobSpec {
            min_nodes: 1,
            max_nodes: 2,
            ..JobSpec::default()
        },
        knows: Digest::ZERO,
        store: None,
        host: "spare".into(),
        command: String::new(),
        unreachable: Vec::new(),
        held_ms: 0,
        waited_ms: 0,
    };
    let asks = |s: &mut Scripted| {
        s.hears(3, JobMessage::Ticket(Box::new(ticket.clone())));
        s.pass(Span::from_secs(1));
    };
    (0..3).for_each(|_| asks(&mut s));
    agent_dies(&mut s, 1);
    (0..25).for_each(|_| asks(&mut s));
    assert!(!stopped(&s), "{:?}", s.notices);
    // Its launcher waits no longer than that, and neither do the others.
    (0..15).for_each(|_| asks(&mut s));
    assert!(!(s.accepts().is_empty() && s.prepares().is_empty()));
}

#[test]
fn of_two_nodes_neither_ends_its_workers_while_the_others_agent_restarts() {
    for me in [0, 1] {
        let (mut s, _) = trains(me, 2, &[]);
        agent_dies(&mut s, 1 - me);
        s.pass(Span::from_secs(20));
        assert!(!stopped(&s), "node {me}: {:?}", s.told);
    }
    // With its launcher it is lost, and only rank 0 may go on alone.
    let (mut s, _) = trains(1, 2, &[]);
    agent_dies(&mut s, 0);
    s.pass(Span::from_secs(5));
    s.probes.insert(node(0), (Answer::Silent, Answer::Silent));
    s.pass(Span::from_secs(5));
    assert!(stopped(&s));
}

#[test]
fn a_node_whose_workers_do_not_end_is_left_behind() {
    let (mut s, digest) = trains(0, 3, &[]);
    let exit = worker_exit(8);
    let fails = |s: &mut Scripted, seq: u64| {
        s.status(1, digest, seq, |st| {
            st.exit = Some(exit.clone());
            st.stopped = true;
        });
        s.status(2, digest, seq, |_| {});
    };
    fails(&mut s, 2);
    s.says(ToAgent::Stopped { digest });
    for seq in 3..60 {
        fails(&mut s, seq);
        s.pass(Span::from_millis(500));
        if !s.accepts().is_empty() {
            break;
        }
    }
    let proposed = s.sent.iter().find_map(|(_, body)| match body {
        JobMessage::Accept { record, .. } => Some(record.clone()),
        JobMessage::Prepare { .. } => None,
        _ => None,
    });
    let asked = !s.prepares().is_empty() || proposed.is_some();
    assert!(asked, "nothing was proposed");
    assert!(proposed.is_none_or(|r| r.has(node(0)) && r.has(node(1)) && !r.has(node(2))));
    let said = |n: &Notice| matches!(n, Notice::Trouble { text, .. } if text.contains("h2"));
    assert!(s.notices.iter().any(said));
}

/// The launcher of a job of one node is killed.
pub(super) fn ghost() -> (Scripted, Digest) {
    let r = record(1, 2);
    let digest = r.digest();
    let mut s = Scripted::new(config(0, 2), vec![holds(&r, 1)]);
    s.launcher(0, 1, Some(digest));
    s.says(ToAgent::Started { digest, attempt: 1 });
    s.on(Event::LauncherGone {
        conn: ConnId(1),
        guard: Answer::Refused,
    });
    s.probes
        .insert(node(0), (Answer::Answered, Answer::Refused));
    s.pass(Span::from_secs(60));
    (s, digest)
}

/// The text on the job's wait that people are told.
pub(super) fn waits(s: &Scripted) -> &str {
    s.agent.job(&key("j")).map_or("", |j| j.waiting())
}

fn kind(s: &Scripted) -> Option<Kind> {
    let job = s.agent.job(&key("j"))?;
    Some(job.head()?.0.kind)
}

#[test]
fn a_job_without_launchers_is_seen_kept_for_a_while_and_then_over() {
    let (mut s, _) = ghost();
    let deserted = |s: &Scripted| {
        let job = s.agent.job(&key("j"));
        job.is_some_and(|j| j.is_deserted(s.agent.peers()))
    };
    assert!(deserted(&s));
    assert_eq!(kind(&s), Some(Kind::Next));
    // As long as its slots.
    s.pass(Span::from_secs(600));
    assert_eq!(kind(&s), Some(Kind::Dormant));
    assert!(!deserted(&s));
}

#[test]
fn a_job_without_launchers_is_ended_by_a_persons_word() {
    let (mut s, _) = ghost();
    assert!(!waits(&s).is_empty());
    s.on(Event::Launcher {
        conn: ConnId(9),
        owner: "0".into(),
        frame: ToAgent::Command(Command::Cancel {
            job: "j".into(),
            given: s.now,
        }),
    });
    s.pass(Span::from_secs(1));
    assert_eq!(kind(&s), Some(Kind::End { cancelled: true }));
    assert_eq!(waits(&s), "");
}

#[test]
fn what_follows_dead_launchers_may_have_another_specification() {
    let (mut s, dead) = ghost();
    s.told.clear();
    // The same launcher id would be the same start of it.
    s.launcher(5, 7, None);
    s.pass(Span::from_secs(3));
    let starts: Vec<Digest> = s
        .told
        .iter()
        .filter_map(|(_, f)| match f {
            ToLauncher::Start(start) => Some(start.digest),
            _ => None,
        })
        .collect();
    assert!(
        !starts.is_empty() && !starts.contains(&dead),
        "{:?}",
        s.told
    );
    let job = s.agent.job(&key("j"));
    let spec = job
        .and_then(|j| j.head())
        .map(|(r, _)| (r.number, r.spec.max_nodes));
    assert_eq!(spec, Some((1, 7)));
}

#[test]
fn jobs_that_only_are_remembered_keep_no_launcher_from_starting() {
    let jobs = (0..crate::wire::MAX_JOBS).map(|i| {
        let r = Record {
            key: key(&format!("j{i}")),
            ..record(1, 2)
        };
        holds(&r, 1)
    });
    let mut s = Scripted::new(config(0, 2), jobs.collect());
    s.launcher(0, 1, None);
    s.pass(Span::from_secs(3));
    let start = |(_, f): &(_, ToLauncher)| matches!(f, ToLauncher::Start(_));
    assert!(s.told.iter().any(start), "{:?}", s.told);
}

#[test]
fn a_newcomer_waits_while_the_agent_of_a_member_restarts() {
    let r = Record {
        spec: JobSpec {
            min_nodes: 1,
            max_nodes: 4,
            ..JobSpec::default()
        },
        ..record(3, 2)
    };
    let (mut s, _) = trains_with(0, r);
    s.peer(3);
    agent_dies(&mut s, 1);
    for _ in 0..20 {
        let ticket = Ticket {
            member: member(3),
            spec: JobSpec {
                min_nodes: 1,
                max_nodes: 4,
                ..JobSpec::default()
            },
            knows: Digest::ZERO,
            store: None,
            host: "new".into(),
            command: String::new(),
            unreachable: Vec::new(),
            held_ms: 0,
            waited_ms: 0,
        };
        s.hears(3, JobMessage::Ticket(Box::new(ticket)));
        s.pass(Span::from_secs(1));
    }
    assert!(!stopped(&s), "{:?}", s.notices);
}

#[test]
fn a_node_that_slept_through_an_end_learns_it_and_disturbs_nobody() {
    // Of two lineages the one with the lower digest would take the other in.
    for nonce in 0..8 {
        let old = Record {
            nonce,
            ..record(2, 1)
        };
        let end = Record {
            kind: Kind::End { cancelled: false },
            members: Vec::new(),
            ..next(&old, 0)
        };
        let new = Record {
            parent: end.digest(),
            ..record(2, 1)
        };
        let mut durable = holds(&new, 1);
        durable.ended.push(Arc::new(end.clone()));
        let mut s = Scripted::new(config(0, 2), vec![durable]);
        s.peer(1);
        s.launcher(0, 2, Some(new.digest()));
        s.peer(2);
        s.says_hello(2, vec![belongs_to(old.digest())]);
        s.pass(Span::from_secs(20));
        let told = |(to, body): &(NodeId, JobMessage)| {
            *to == node(2) && matches!(body, JobMessage::Decided { record } if **record == end)
        };
        assert!(s.sent.iter().any(told));
        let merges = |(_, body): &(NodeId, JobMessage)| {
            matches!(
                body,
                JobMessage::MergeAsk { .. } | JobMessage::MergeGranted { .. }
            )
        };
        assert!(!s.sent.iter().any(merges), "nonce {nonce}");
        let head = s.agent.job(&key("j")).and_then(|j| j.head());
        assert_eq!(head.map(|(_, digest)| digest), Some(new.digest()));
    }
}

#[test]
fn a_job_without_a_majority_is_given_up_by_a_persons_word() {
    let r = record(2, 2);
    let mut s = Scripted::new(config(1, 2), vec![holds(&r, 1)]);
    // Were it only cut off, it could go on alone.
    s.probes.insert(node(0), (Answer::Refused, Answer::Refused));
    s.probes
        .insert(node(1), (Answer::Answered, Answer::Refused));
    s.pass(Span::from_secs(60));
    let live = |s: &Scripted| s.agent.job(&key("j")).is_some_and(|j| j.is_live());
    assert!(live(&s) && !waits(&s).is_empty());
    s.on(Event::Launcher {
        conn: ConnId(9),
        owner: "0".into(),
        frame: ToAgent::Command(Command::Cancel {
            job: "j".into(),
            given: s.now,
        }),
    });
    s.pass(Span::from_secs(1));
    assert!(!live(&s) && waits(&s).is_empty());
    s.pass(Span::from_secs(60));
    assert!(s.agent.job(&key("j")).is_none_or(|j| !j.is_listed()));
    // The other node is back, with a launcher: it ends, too, and joins no other group.
    s.peer(0);
    s.sent.clear();
    let advert = Advert {
        lineage: r.lineage(),
        digest: r.digest(),
        number: r.number,
        ..other_group(0, 0)
    };
    s.says_hello(0, vec![advert]);
    let lineage = r.lineage();
    let asks = |(to, m): &&(NodeId, JobMessage)| match m {
        JobMessage::CancelAsk { lineage: of, .. } => *to == node(0) && *of == lineage,
        _ => false,
    };
    assert_eq!(s.sent.iter().filter(asks).count(), 1, "{:?}", s.sent);
}

#[test]
fn a_new_life_waits_for_the_workers_of_a_member_that_was_away_at_the_end() {
    let (mut s, digest) = trains(0, 2, &[]);
    agent_dies(&mut s, 1);
    s.pass(Span::from_secs(1));
    s.says(ToAgent::Cancel);
    s.says(ToAgent::Stopped { digest });
    s.pass(Span::from_secs(2));
    assert_eq!(kind(&s), Some(Kind::End { cancelled: true }));
    s.on(Event::LauncherGone {
        conn: ConnId(1),
        guard: Answer::Refused,
    });
    s.told.clear();
    let end = s.now;
    s.launcher(5, 2, None);
    let start = |s: &Scripted| {
        let mut starts = s.told.iter();
        let start = starts.find(|(_, f)| matches!(f, ToLauncher::Start(_)))?;
        Some(start.0.since(end))
    };
    s.pass(Span::from_secs(60));
    // Its launcher ends its workers when its agent was away for three quarters of 30 s.
    let waited = start(&s).unwrap();
    let bounds = Span::from_secs(19)..Span::from_secs(35);
    assert!(bounds.contains(&waited), "{waited}");
}

#[test]
fn a_generation_whose_start_was_held_is_told_from_one_that_had_started() {
    for started in [None, Some(1)] {
        let r = by_store(record(2, 2));
        let digest = r.digest();
        let mut s = Scripted::new(config(1, 2), vec![holds(&r, 1)]);
        s.probes
            .insert(node(1), (Answer::Answered, Answer::Refused));
        s.peer(0);
        s.launcher(1, 2, started.map(|_| digest));
        s.on(Event::LauncherGone {
            conn: ConnId(1),
            guard: Answer::Refused,
        });
        s.status(0, digest, 2, |status| {
            status.started = started;
            status.storeless = true;
            status.gone = true;
        });
        s.pass(Span::from_secs(3));
        let (_, hello) = s.hellos.last().unwrap();
        let [advert] = &hello.jobs[..] else {
            panic!("{hello:?}");
        };
        // No launcher is left; but workers of the generation before may run where none of this one's did.
        assert!(advert.deserted);
        assert!(advert.left_behind);
        assert_eq!(advert.started, started.is_some());
    }
}

/// Its disk was full when it became a member, and its agent starts anew: it has to hear that it is one.
#[test]
fn a_member_that_comes_back_without_its_job_asks_for_it() {
    let mut s = Scripted::new(config(1, 3), Vec::new());
    s.peer(0);
    let digest = record(2, 2).digest();
    let asks = JobMessage::StatusHeard {
        digest,
        boot: Boot(0),
        seq: 0,
    };
    s.hears(0, asks);
    let have = Digest::ZERO;
    assert!(s.sent.contains(&(node(0), JobMessage::Ask { have })));
}

/// The agent of rank 0's node comes back when its ranks have finished, and the other's still run, or have not begun.
#[test]
fn ranks_that_have_finished_are_not_started_again() {
    for begun in [true, false] {
        let r = record(2, 2);
        let (lineage, digest) = (r.lineage(), r.digest());
        let mut s = Scripted::new(config(0, 3), vec![holds(&r, 1)]);
        s.peer(1);
        s.says(ToAgent::Register(Register {
            began: Some(Box::new(Began { lineage, digest })),
            ..registers(0, r.spec.clone())
        }));
        s.says(ToAgent::Started { digest, attempt: 1 });
        s.says(ToAgent::Finished { digest });
        s.says(ToAgent::MasterPort { port: 9 });
        s.status(1, digest, 1, |st| st.started = begun.then_some(1));
        s.pass(Span::from_secs(3));
        let runs = |(_, body): &(NodeId, JobMessage)| match body {
            JobMessage::Order(order) => matches!(order.action, Action::Run { .. }),
            _ => false,
        };
        assert!(!s.sent.iter().any(runs), "{:?}", s.sent);
        // The other is missed in time.
        s.pass(s.agent.config().start_timeout);
        assert_eq!(s.prepares().is_empty() && s.accepts().is_empty(), begun);
    }
}

/// Live workers that compute, of a generation that others followed up, while this node is cut off.
#[test]
fn workers_of_an_older_generation_end_with_the_lease_of_the_next() {
    let (mut s, old) = trains(1, 3, &[]);
    let r = next(&record(3, 2), 7);
    s.hears(
        0,
        JobMessage::Decided {
            record: Arc::new(r),
        },
    );
    let stops = |s: &Scripted| -> Vec<u32> {
        let of = s.told.iter().filter_map(|(_, f)| match f {
            ToLauncher::Stop {
                digest, grace_ms, ..
            } if *digest == old => Some(*grace_ms),
            _ => None,
        });
        of.collect()
    };
    let told = stops(&s);
    assert!(!told.is_empty() && !told.contains(&0), "{told:?}");
    s.pass(Span::from_secs(3));
    assert_eq!(stops(&s), told, "the lease is held");
    for i in [0, 2] {
        s.grants.remove(&node(i));
        s.probes.insert(node(i), (Answer::Silent, Answer::Silent));
        s.on(Event::Disconnected { node: node(i) });
    }
    s.pass(Span::from_secs(2));
    assert_eq!(stops(&s).split_off(told.len()), [0]);
}

/// Node 0 trains with so many others. Of these the first `lost` lose agents and state directories; their launchers
/// live, and ask to be let in by agents of other identities.
fn moves(others: usize, lost: usize) -> (Scripted, Digest) {
    let (mut s, digest) = trains(0, others + 1, &[]);
    for i in 1..=lost {
        agent_dies(&mut s, i);
        s.peer(i + others);
    }
    s.pass(Span::from_millis(300));
    let spec = record(others + 1, 2).spec;
    for i in 1..=lost {
        let Member { launcher, .. } = member(i);
        let mut moved = ticket(i + others, &spec, None);
        if let JobMessage::Ticket(ticket) = &mut moved {
            ticket.member.launcher = launcher;
        }
        s.hears(i + others, moved);
    }
    s.says(ToAgent::Stopped { digest });
    (s, digest)
}

fn births(s: &Scripted) -> BTreeSet<NodeId> {
    let births = s.sent.iter().filter_map(|(to, body)| match body {
        JobMessage::Birth { .. } => Some(*to),
        _ => None,
    });
    births.collect()
}

#[test]
fn a_group_whose_agents_come_back_under_other_identities_forms_anew() {
    let (mut s, _) = moves(2, 2);
    s.pass(Span::from_secs(2));
    assert_eq!(births(&s), BTreeSet::from([node(3), node(4)]));
}

#[test]
fn the_next_life_waits_for_a_member_that_may_train_without_the_lost() {
    let (mut s, digest) = moves(4, 3);
    s.pass(Span::from_millis(1_500));
    assert_eq!(births(&s), BTreeSet::new());
    // It was told to leave the group, and its workers have ended.
    let body = Status {
        digest,
        boot: Boot(1),
        stopped: true,
        ..Status::default()
    };
    s.hears(4, JobMessage::Status(Box::new(body)));
    s.pass(Span::from_millis(1_200));
    assert_eq!(births(&s).len(), 3);
}

/// The path from the leader to a member is cut one way: that member takes the next node for the leader.
#[test]
fn one_that_misses_the_leader_hears_from_another_that_the_generation_ends() {
    let (mut s, digest) = trains(1, 3, &[]);
    let orders = |s: &Scripted| {
        let to = |(n, m): &&(NodeId, JobMessage)| {
            *n == node(2)
                && matches!(m, JobMessage::Order(o) if matches!(o.action, Action::End { .. }))
        };
        s.sent.iter().filter(to).count()
    };
    s.status(2, digest, 1, |_| {});
    assert_eq!(orders(&s), 0);
    s.hears(
        0,
        JobMessage::Order(Box::new(Order {
            digest,
            boot: Boot(1),
            seq: 1,
            action: Action::End {
                grace_ms: 200,
                why: "lost node 2".into(),
            },
        })),
    );
    s.status(2, digest, 2, |_| {});
    assert_eq!(orders(&s), 1);
    s.status(2, digest, 3, |st| st.stopped = true);
    assert_eq!(orders(&s), 1);
}
