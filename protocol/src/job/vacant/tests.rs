use std::collections::BTreeMap;

use super::super::alone::Alone;
use crate::agent::{ConnId, Event};
use crate::ids::{Digest, LauncherId, NodeId};
use crate::local::{ToAgent, ToLauncher};
use crate::membership::Answer;
use crate::record::Kind;
use crate::time::Span;

/// The agent is killed, and another run of it begins with what it stored.
fn restarted(alone: &mut Alone) {
    let stored: BTreeMap<_, _> = alone.stored.clone();
    alone.boot += 1;
    alone.conn += 1;
    alone.agent = Alone::agent(alone.boot, stored, alone.now);
    alone.told.clear();
    alone.asked.clear();
    alone.carry_out();
}

/// Lets time pass; the guard of the launcher before answers each question so.
fn pass(alone: &mut Alone, span: Span, guard: Answer) {
    let until = alone.now + span;
    while alone.now < until {
        alone.pass(Span::from_millis(50).min(until.since(alone.now)));
        for (id, launcher) in std::mem::take(&mut alone.asked) {
            assert_eq!(launcher, LauncherId([1; 8]));
            let node = NodeId([1; 32]);
            let agent = Answer::Silent;
            let event = Event::Probed {
                node,
                id,
                agent,
                guard,
            };
            alone.agent.handle(event, alone.now).unwrap();
            alone.carry_out();
        }
    }
}

fn gone(alone: &mut Alone, conn: u64, guard: Answer) {
    let conn = ConnId(conn);
    let event = Event::LauncherGone { conn, guard };
    alone.agent.handle(event, alone.now).unwrap();
    alone.carry_out();
}

fn starts(alone: &Alone) -> Vec<Digest> {
    let start = |frame: &ToLauncher| match frame {
        ToLauncher::Start(start) => Some(start.digest),
        _ => None,
    };
    // An order is said again until it is answered.
    let mut starts: Vec<_> = alone.told.iter().filter_map(start).collect();
    starts.dedup();
    starts
}

fn told(alone: &Alone, what: &str) -> bool {
    alone.told.iter().any(|frame| match frame {
        ToLauncher::Waiting { text } | ToLauncher::Refused { reason: text } => text.contains(what),
        _ => false,
    })
}

#[test]
fn another_launcher_waits_while_the_one_before_may_have_workers() {
    let mut alone = Alone::new();
    alone.trains();
    restarted(&mut alone);
    alone.launcher = 2;
    alone.registers(None);
    // It is there, and may come back.
    pass(&mut alone, Span::from_secs(8), Answer::Answered);
    assert!(told(
        &alone,
        "has another launcher on this node, which answers"
    ));
    // Stopped by now. What it answered before says nothing of now.
    pass(&mut alone, Span::from_millis(500), Answer::Mute);
    assert!(told(&alone, "which says nothing"));
    assert_eq!(starts(&alone), []);
    pass(&mut alone, Span::from_secs(1), Answer::Refused);
    assert_eq!(starts(&alone).len(), 1);
}

#[test]
fn a_launcher_that_is_stopped_counts_as_gone_once_its_sidecar_has_asked_in_vain() {
    let mut alone = Alone::new();
    alone.trains();
    restarted(&mut alone);
    let lease = |alone: &Alone| alone.agent.lease_of(LauncherId([1; 8]), alone.now);
    assert_eq!(lease(&alone), Span::ZERO);
    alone.launcher = 2;
    alone.registers(None);
    pass(&mut alone, Span::from_secs(3), Answer::Mute);
    assert_eq!((starts(&alone).len(), lease(&alone)), (0, Span::ZERO));
    pass(&mut alone, Span::from_secs(2), Answer::Mute);
    assert_eq!(starts(&alone).len(), 1);
    // Where nothing is known of it, for as long as it would go on by itself.
    let mut alone = Alone::new();
    alone.trains();
    restarted(&mut alone);
    alone.launcher = 2;
    alone.registers(None);
    pass(&mut alone, Span::from_millis(9_500), Answer::Silent);
    assert_eq!(starts(&alone).len(), 0);
    pass(&mut alone, Span::from_secs(3), Answer::Silent);
    assert_eq!(starts(&alone).len(), 1);
}

#[test]
fn the_launcher_before_comes_back_and_the_one_that_waits_is_refused() {
    let mut alone = Alone::new();
    let (digest, _) = alone.trains();
    restarted(&mut alone);
    alone.launcher = 2;
    alone.registers(None);
    pass(&mut alone, Span::from_secs(1), Answer::Answered);
    alone.launcher = 1;
    let other = alone.conn;
    alone.conn = 77;
    alone.comes_back(digest);
    alone.says(ToAgent::Started { digest, attempt: 1 });
    assert!(told(&alone, "already has a launcher"));
    // What the other still says is no word of this one.
    let event = Event::Launcher {
        conn: ConnId(other),
        owner: "0".into(),
        frame: ToAgent::Cancel,
    };
    assert!(alone.agent.handle(event, alone.now).is_err());
    alone.pass(Span::from_secs(20));
    let stop = |frame: &ToLauncher| matches!(frame, ToLauncher::Stop { .. });
    assert!(!alone.told.iter().any(stop), "{:?}", alone.told);
    let job = alone.agent.jobs().next().unwrap();
    assert_eq!(job.head().map(|(_, d)| d), Some(digest));
    assert_eq!(job.launcher(), Some(LauncherId([1; 8])));
}

#[test]
fn a_launcher_that_was_told_to_exit_holds_the_next_one_not_up() {
    for cancelled in [false, true] {
        let mut alone = Alone::new();
        let (digest, _) = alone.trains();
        match cancelled {
            true => alone.says(ToAgent::Cancel),
            false => alone.says(ToAgent::Finished { digest }),
        }
        alone.pass(Span::from_millis(50));
        let before = alone.conn;
        alone.launcher = 2;
        let next = Event::Launcher {
            conn: ConnId(before + 1),
            owner: "0".into(),
            frame: alone.registration(None, None),
        };
        // Its workers may not have ended.
        assert!(alone.agent.handle(next, alone.now).is_err());
        alone.says(ToAgent::Stopped { digest });
        alone.pass(Span::from_millis(50));
        alone.conn = before + 1;
        let over = |f: &ToLauncher| matches!(f, ToLauncher::End { .. });
        assert!(alone.told.iter().any(over), "{:?}", alone.told);
        alone.registers(None);
        gone(&mut alone, before, Answer::Refused);
        alone.pass(Span::from_millis(500));
        assert!(starts(&alone).iter().any(|d| *d != digest));
    }
}

#[test]
fn a_launcher_that_goes_right_behind_its_cancel_ends_the_job_all_the_same() {
    let mut alone = Alone::new();
    let (digest, _) = alone.trains();
    let conn = alone.conn;
    alone.says(ToAgent::Cancel);
    alone.pass(Span::from_millis(50));
    // The second Ctrl-C: it kills its workers and is gone, and reports nothing any more.
    gone(&mut alone, conn, Answer::Refused);
    alone.pass(Span::from_millis(500));
    let job = alone.agent.jobs().next().unwrap();
    let ended = job.head().map(|(record, _)| record.kind);
    assert!(
        matches!(ended, Some(Kind::End { cancelled: true })),
        "{ended:?}"
    );
    alone.conn += 1;
    alone.launcher = 2;
    alone.registers(None);
    alone.pass(Span::from_millis(500));
    assert!(starts(&alone).iter().any(|d| *d != digest));
}

#[test]
fn silence_of_a_launcher_is_no_death() {
    let mut alone = Alone::new();
    let (digest, _) = alone.trains();
    let conn = alone.conn;
    let lease = |alone: &Alone| alone.agent.lease_of(LauncherId([1; 8]), alone.now);
    assert!(lease(&alone) > Span::from_secs(1));
    gone(&mut alone, conn, Answer::Silent);
    // It is not known to be dead, nor is it answered for.
    assert_eq!(lease(&alone), Span::ZERO);
    let gone_for_good = |alone: &Alone| alone.agent.jobs().next().unwrap().launcher().is_none();
    alone.pass(Span::from_millis(9_900));
    assert!(!gone_for_good(&alone));
    alone.pass(Span::from_millis(200));
    assert!(gone_for_good(&alone));
    // One that answers again is as if it had never been silent.
    let mut alone = Alone::new();
    alone.trains();
    gone(&mut alone, conn, Answer::Silent);
    alone.pass(Span::from_secs(5));
    gone(&mut alone, conn, Answer::Answered);
    alone.pass(Span::from_secs(60));
    assert!(!gone_for_good(&alone));
    alone.comes_back(digest);
    assert!(lease(&alone) > Span::from_secs(1));
    // Refused is dead.
    gone(&mut alone, conn, Answer::Refused);
    assert!(gone_for_good(&alone));
}

#[test]
fn nobody_answers_for_workers_that_were_to_end() {
    let mut alone = Alone::new();
    alone.trains();
    let lease = |alone: &Alone| alone.agent.lease_of(LauncherId([1; 8]), alone.now);
    assert!(lease(&alone) > Span::from_secs(1));
    assert_eq!(
        alone.agent.lease_of(LauncherId([9; 8]), alone.now),
        Span::ZERO
    );
    // It leaves: its workers have the time that they were given, and no more.
    alone.says(ToAgent::Leave { grace_ms: 5_000 });
    let told = |frame: &ToLauncher| matches!(frame, ToLauncher::Preempt { .. });
    for _ in 0..100 {
        if alone.told.iter().any(told) {
            break;
        }
        alone.pass(Span::from_millis(100));
    }
    assert!(alone.told.iter().any(told), "{:?}", alone.told);
    assert!(lease(&alone) > Span::ZERO);
    alone.pass(Span::from_secs(40));
    assert_eq!(lease(&alone), Span::ZERO);
}
