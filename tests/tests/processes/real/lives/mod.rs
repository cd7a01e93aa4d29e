//! A job lives more than once: it ends in some way, and nodes come and start it again, in any number of ways. Every
//! launcher that comes after an end begins the next life and runs its script; none is told the end of an earlier one;
//! the exit codes are those of each launcher's own life; and all who came train together soon.
//!
//! Twelve jobs, one in each setting, with five lives each and every two things that may differ together at least
//! once; in `long`, all turns in all settings.

mod job;
mod long;
pub(crate) mod plan;

use std::collections::HashSet;

use nix::sys::signal::Signal;

use super::saves::Saves;
use crate::harness::{Bed, Noted, now_ns};
use plan::{
    Agents, Back, Coming, End, Life, Setting, State, Store, Turn, five, lives, pairs, rows,
};

use job::live;
pub(crate) use job::{Place, live_at};

/// The five lives of the job in this setting.
fn row(agents: Agents, store: Store, state: State) {
    let setting = Setting {
        agents,
        store,
        state,
    };
    let (_, turns) = rows().into_iter().find(|(of, _)| *of == setting).unwrap();
    live(setting, &lives(&turns));
}

#[test]
fn every_two_things_that_may_differ_meet_in_some_row() {
    let all = Setting::all().flat_map(|setting| {
        let possible = Turn::all().filter(move |turn| turn.is_possible(setting));
        possible.flat_map(move |turn| pairs(setting, turn))
    });
    let met = rows().into_iter().flat_map(|(setting, turns)| {
        let all = turns.into_iter().map(move |turn| pairs(setting, turn));
        all.flatten()
    });
    let met: HashSet<String> = met.collect();
    let missing: HashSet<String> = all.filter(|pair| !met.contains(pair)).collect();
    assert!(missing.is_empty(), "{missing:?} of {:#?}", rows());
}

#[test]
fn agents_in_launchers_with_their_state_and_no_store() {
    row(Agents::Embedded, Store::None, State::Kept);
}

#[test]
fn agents_in_launchers_that_forget_and_no_store() {
    row(Agents::Embedded, Store::None, State::Lost);
}

#[test]
fn agents_in_launchers_with_their_state_and_a_directory() {
    row(Agents::Embedded, Store::Directory, State::Kept);
}

#[test]
fn agents_in_launchers_that_forget_and_a_directory() {
    row(Agents::Embedded, Store::Directory, State::Lost);
}

#[test]
fn agents_in_launchers_with_their_state_and_a_bucket() {
    row(Agents::Embedded, Store::Bucket, State::Kept);
}

#[test]
fn agents_in_launchers_that_forget_and_a_bucket() {
    row(Agents::Embedded, Store::Bucket, State::Lost);
}

#[test]
fn daemons_with_their_state_and_no_store() {
    row(Agents::Daemons, Store::None, State::Kept);
}

#[test]
fn daemons_that_forget_and_no_store() {
    row(Agents::Daemons, Store::None, State::Lost);
}

#[test]
fn daemons_with_their_state_and_a_directory() {
    row(Agents::Daemons, Store::Directory, State::Kept);
}

#[test]
fn daemons_that_forget_and_a_directory() {
    row(Agents::Daemons, Store::Directory, State::Lost);
}

#[test]
fn daemons_with_their_state_and_a_bucket() {
    row(Agents::Daemons, Store::Bucket, State::Kept);
}

#[test]
fn daemons_that_forget_and_a_bucket() {
    row(Agents::Daemons, Store::Bucket, State::Lost);
}

/// One job of one node, which ends in the same way each time.
fn alone(end: End, store: Store) {
    let setting = Setting {
        agents: Agents::Alone,
        store,
        state: State::Kept,
    };
    let mut all: Vec<Life> = (0..5)
        .map(|_| Life::new(Coming::Together, vec![0], end))
        .collect();
    all[0].flags.push("--nnodes=1".into());
    live(setting, &all);
}

#[test]
fn one_node_with_a_directory_starts_its_job_again_each_time_it_was_stopped() {
    alone(End::Cancelled, Store::Directory);
}

#[test]
fn one_node_with_a_directory_starts_its_job_again_each_time_it_left() {
    alone(End::AllLeft, Store::Directory);
}

#[test]
fn one_node_with_a_directory_starts_its_job_again_each_time_it_was_killed() {
    alone(End::AllKilled, Store::Directory);
}

#[test]
fn one_node_with_a_directory_starts_its_job_again_each_time_it_finished() {
    alone(End::Finished, Store::Directory);
}

#[test]
fn four_nodes_without_a_store_that_all_left_all_train_again() {
    let setting = Setting {
        agents: Agents::Embedded,
        store: Store::None,
        state: State::Kept,
    };
    let life = || Life::new(Coming::Together, vec![0, 1, 2, 3], End::AllLeft);
    live(setting, &[life(), life(), life(), life(), life()]);
}

#[test]
fn a_node_that_missed_a_life_trains_in_the_next_one() {
    let setting = Setting {
        agents: Agents::Embedded,
        store: Store::None,
        state: State::Kept,
    };
    let turn = Turn {
        end: End::AllLeft,
        back: Back::Some,
        coming: Coming::Together,
    };
    live(setting, &five(turn));
}

/// Five lives with this turn, of nodes whose agents live on when all launchers are killed.
fn launchers_are_killed(back: Back) {
    let setting = Setting {
        agents: Agents::Daemons,
        store: Store::None,
        state: State::Kept,
    };
    let turn = Turn {
        end: End::LaunchersKilled,
        back,
        coming: Coming::Together,
    };
    live(setting, &five(turn));
}

#[test]
fn others_go_on_where_all_launchers_of_daemons_were_killed() {
    launchers_are_killed(Back::Others);
}

#[test]
fn some_go_on_where_all_launchers_of_daemons_were_killed() {
    launchers_are_killed(Back::Some);
}

#[test]
fn a_life_after_an_end_may_have_another_specification() {
    let lives: [(End, &[&str]); 5] = [
        (End::Finished, &[]),
        (End::Cancelled, &["--max-restarts=3"]),
        (End::Failed, &["--max-restarts=0", "--nnodes=1:3"]),
        (End::AllLeft, &["--loss-grace=1s"]),
        (End::Finished, &["--preempt-signal=SIGUSR1"]),
    ];
    let life = |(end, flags): (End, &[&str])| {
        let mut life = Life::new(Coming::Together, vec![0, 1, 2], end);
        life.flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
        life
    };
    let lives = lives.map(life);
    for (agents, store) in [
        (Agents::Daemons, Store::None),
        (Agents::Embedded, Store::Directory),
    ] {
        let setting = Setting {
            agents,
            store,
            state: State::Kept,
        };
        live(setting, &lives);
    }
}

#[test]
fn each_life_restores_the_newest_commit_of_the_one_before() {
    let mut saves = Saves::with(&["--max-restarts=0"], "2", 1, 5);
    let (mut newest, mut after) = (0, 0);
    for life in 0..5 {
        let group = saves.train(&[0, 1], after);
        if life > 0 {
            // Generations of several lives have the same numbers.
            let restored = |saves: &Saves| {
                let all = saves.noted("restored", group.generation).into_iter();
                let of_this = |e: &Noted| group.ranks.iter().any(|rank| rank.pid == e.pid);
                all.filter(of_this).map(|e| e.step).collect::<Vec<_>>()
            };
            let both = |_: &Bed| restored(&saves).len() == 2;
            saves.bed.until("both ranks have restored", both);
            assert_eq!(restored(&saves), [newest; 2], "life {}", life + 1);
        }
        let more = |_: &Bed| saves.committed().last().is_some_and(|last| *last > newest);
        saves.bed.until("it commits", more);
        let (signal, code) = match life % 3 {
            0 => (Signal::SIGTERM, Some(143)),
            1 => (Signal::SIGINT, Some(130)),
            _ => (Signal::SIGKILL, None),
        };
        let told = if code == Some(130) { 1..2 } else { 0..2 };
        told.for_each(|node| saves.bed.signal(saves.bed.launcher_pid(node), signal));
        for node in 0..2 {
            assert_eq!(saves.bed.ended(node), code, "life {}", life + 1);
        }
        (newest, after) = (*saves.committed().last().unwrap(), now_ns());
    }
}
