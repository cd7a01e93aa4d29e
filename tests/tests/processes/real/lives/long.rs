//! Every turn in every setting, five lives each: hundreds of jobs, some at once, since they mostly wait.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use super::job::live;
use super::plan::{Agents, Setting, State, Store, Turn, five};

/// Jobs at once.
const AT_ONCE: usize = 3;
/// Only the turns whose text has this: `MUSTER_TEST_LIVES=AllLeft`.
const CHOICE: &str = "MUSTER_TEST_LIVES";

fn all(agents: Agents, store: Store) {
    let choice = std::env::var(CHOICE).unwrap_or_default();
    let of = |state| Setting {
        agents,
        store,
        state,
    };
    let possible = |setting: Setting| {
        let turns = Turn::all().filter(move |turn| turn.is_possible(setting));
        turns.map(move |turn| (setting, turn))
    };
    let rows = State::ALL.into_iter().flat_map(|state| possible(of(state)));
    let rows = rows.filter(|row| format!("{row:?}").contains(&choice));
    let left = Mutex::new(rows.collect::<Vec<_>>());
    let failed = Mutex::new(Vec::new());
    let work = || {
        loop {
            let Some((setting, turn)) = left.lock().unwrap().pop() else {
                break;
            };
            let lived = catch_unwind(AssertUnwindSafe(|| live(setting, &five(turn))));
            eprintln!(
                "{}: {setting:?} {turn:?}",
                if lived.is_ok() { "ok" } else { "FAILED" }
            );
            if lived.is_err() {
                failed.lock().unwrap().push((setting, turn));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(work);
        }
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "{} failed: {failed:#?}", failed.len());
}

#[test]
fn every_turn_with_agents_in_launchers_and_no_store() {
    all(Agents::Embedded, Store::None);
}

#[test]
fn every_turn_with_agents_in_launchers_and_a_directory() {
    all(Agents::Embedded, Store::Directory);
}

#[test]
fn every_turn_with_agents_in_launchers_and_a_bucket() {
    all(Agents::Embedded, Store::Bucket);
}

#[test]
fn every_turn_with_daemons_and_no_store() {
    all(Agents::Daemons, Store::None);
}

#[test]
fn every_turn_with_daemons_and_a_directory() {
    all(Agents::Daemons, Store::Directory);
}

#[test]
fn every_turn_with_daemons_and_a_bucket() {
    all(Agents::Daemons, Store::Bucket);
}
