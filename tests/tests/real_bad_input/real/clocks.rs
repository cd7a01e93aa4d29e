//! Time that does not pass as it should: an agent that stands still, and a wall clock that jumps.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::ground::clock::FalseClock;
use crate::ground::sources::that_name;
use crate::support::{Bed, Proc, until};

fn three(bed: &mut Bed, more: &[&str]) -> (Vec<Proc>, Vec<Proc>) {
    let agents = vec![
        bed.agent_and("a", &[], more),
        bed.agent_and("b", &["a"], more),
        bed.agent_and("c", &["a"], more),
    ];
    let flags = ["--nnodes=1:3", "--join-quiet=100ms", "--stop-grace=1s"];
    let launchers = ["a", "b", "c"]
        .iter()
        .map(|n| bed.launch(n, &flags))
        .collect();
    (agents, launchers)
}

/// Lets this much time pass, and requires all the while that the same workers run.
fn nothing_changes(bed: &Bed, time: Duration) {
    let before = bed.workers();
    let end = Instant::now() + time;
    while Instant::now() < end {
        assert_eq!(bed.workers(), before);
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn an_agent_that_stands_still_for_less_than_suspect_after_is_not_lost() {
    let mut bed = Bed::new();
    let (agents, mut launchers) = three(&mut bed, &["--suspect-after=4s"]);
    let before = bed.until_runs_on(&["a", "b", "c"]);
    for agent in &agents {
        agent.signal(libc::SIGSTOP);
        nothing_changes(&bed, Duration::from_millis(800));
        agent.signal(libc::SIGCONT);
        nothing_changes(&bed, Duration::from_millis(300));
    }
    assert_eq!(bed.until_runs_on(&["a", "b", "c"]), before);
    let _open = bed.finish();
    for launcher in &mut launchers {
        assert_eq!(launcher.code(), 0, "{}", launcher.log());
    }
}

#[test]
fn an_agent_that_stands_still_is_away_then_lost_and_comes_back() {
    let mut bed = Bed::new();
    let grace = ["--suspect-after=1s", "--agent-grace=6s"];
    let (agents, mut launchers) = three(&mut bed, &grace);
    let first = bed.until_runs_on(&["a", "b", "c"]);
    // The leader, so that another one has to propose.
    let leader = first[0].node.clone();
    let others: Vec<&str> = ["a", "b", "c"]
        .into_iter()
        .filter(|n| *n != leader)
        .collect();
    let at = ["a", "b", "c"].iter().position(|n| *n == leader).unwrap();
    agents[at].signal(libc::SIGSTOP);
    // Its launcher answers, so that the node is not taken for lost: the agent is only away.
    nothing_changes(&bed, Duration::from_secs(2));
    until("the others go on without it", || {
        let workers = bed.workers().unwrap_or_default();
        let theirs: Vec<_> = workers.iter().filter(|w| w.node != leader).collect();
        let ranks: BTreeSet<u32> = theirs.iter().map(|w| w.rank).collect();
        theirs.len() == 2
            && ranks.len() == 2
            && theirs
                .iter()
                .all(|w| w.world == 2 && w.generation > first[0].generation)
            && theirs.iter().all(|w| others.contains(&w.node.as_str()))
    });
    agents[at].signal(libc::SIGCONT);
    let last = bed.until_runs_on(&["a", "b", "c"]);
    assert!(
        last.iter().all(|w| !first.contains(w)),
        "everybody started anew"
    );
    let _open = bed.finish();
    for launcher in &mut launchers {
        assert_eq!(launcher.code(), 0, "{}", launcher.log());
    }
}

#[test]
fn a_wall_clock_that_jumps_changes_nothing() {
    let mut bed = Bed::new();
    let Some(clock) = FalseClock::build(bed.dir.path()) else {
        return;
    };
    bed.env = (clock.env().into_iter())
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    let (_agents, mut launchers) = three(&mut bed, &["--suspect-after=2s"]);
    bed.until_runs_on(&["a", "b", "c"]);
    for seconds in [86_400, -86_400, 400_000_000, -40_000_000] {
        clock.jump(seconds);
        nothing_changes(&bed, Duration::from_millis(700));
    }
    // The false clock is in force, or this test proved nothing.
    let time = |node: &str| crate::support::events(&bed.socket(node))[0]["time_ms"].as_u64();
    let before = time("a");
    let mut b = launchers.remove(1);
    b.kill();
    bed.until_runs_on(&["a", "c"]);
    let after = crate::support::events(&bed.socket("a")).last().unwrap()["time_ms"].as_u64();
    assert!(after < before, "{before:?} {after:?}");
    let _open = bed.finish();
    for launcher in &mut launchers {
        assert_eq!(launcher.code(), 0, "{}", launcher.log());
    }
}

/// Code that decides reads no wall clock. The clock is there to show a time to people and by how much those of two
/// nodes differ, to date a worker's end as torchrun's error files do, and to tell a worker its deadline.
#[test]
fn the_wall_clock_is_read_in_few_places() {
    let found = that_name(
        &["protocol/src", "daemon/src", "daemon/cli/src/run"],
        &["SystemTime", "ClockId::Realtime", "unix_ms()"],
    );
    let allowed = [
        "daemon/cli/src/run/drive.rs",
        "daemon/cli/src/run/drive/stops.rs",
        "daemon/cli/src/run/workers.rs",
        "daemon/src/agent/history.rs",
        "daemon/src/agent/query.rs",
        "daemon/src/clock.rs",
        "daemon/src/net/handshake.rs",
        "daemon/src/net/hub.rs",
    ];
    assert_eq!(found, allowed);
}
