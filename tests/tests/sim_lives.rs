//! A job that ends and is started again under its name, five times in a row: every end, whoever comes
//! back, with and without the agents' state. An end is told only to launchers of its own life, and every
//! start trains.

#[path = "sim_lives/case.rs"]
mod case;
#[path = "sim_lives/judge.rs"]
mod judge;

use case::{Back, Case, End, FAILED_ONCE, Gap, LIVES, Starts};
use judge::judge;
use muster_tests::sim::clock::MS;
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::trace;

/// Judges every `stride`-th of these cases that ends so; one alone, with a trace, where `MUSTER_SIM_LIFE` names it.
#[track_caller]
fn check(end: End, stride: u64, cases: impl Iterator<Item = Case>) {
    let only = std::env::var("MUSTER_SIM_LIFE").ok();
    let only: Option<u64> = only.and_then(|s| s.parse().ok());
    let chosen = |c: &Case| match only {
        Some(seed) => c.seed == seed,
        None => c.end == end && (c.seed.is_multiple_of(stride) || FAILED_ONCE.contains(&c.seed)),
    };
    let cases: Vec<Case> = cases.filter(chosen).collect();
    let wrong: Vec<String> = cases
        .iter()
        .filter_map(|case| judge(*case).err().map(|why| format!("{case:?}: {why}")))
        .collect();
    assert!(
        wrong.is_empty(),
        "{} of {} cases:\n{}",
        wrong.len(),
        cases.len(),
        wrong.join("\n")
    );
}

/// In CI every fifth case: the numbers of settings have no divisor in common with that.
fn check_some(end: End) {
    check(end, 5, case::some());
}

#[test]
fn a_job_that_finished_is_started_again() {
    check_some(End::Finished);
}

#[test]
fn a_job_that_failed_is_started_again() {
    check_some(End::Failed);
}

#[test]
fn a_job_that_was_cancelled_is_started_again() {
    check_some(End::Cancelled);
}

#[test]
fn a_job_that_all_nodes_left_is_started_again() {
    check_some(End::AllLeave);
}

#[test]
fn a_job_whose_launchers_were_killed_is_started_again() {
    check_some(End::LaunchersKilled);
}

#[test]
fn a_job_that_became_dormant_is_started_again() {
    check(End::Dormant, 1, case::some());
}

#[test]
fn a_job_that_a_person_continued_is_started_again() {
    check(End::Continued, 1, case::some());
}

#[test]
fn a_job_whose_nodes_lost_power_is_started_again() {
    check_some(End::NodesKilled);
}

#[test]
fn a_job_that_ends_in_another_way_each_time_is_started_again() {
    check_some(End::Mixed);
}

/// From the last start of each life until all its nodes train, in ms.
fn delays(case: Case) -> Vec<Option<u64>> {
    let mut setup = case.setup();
    // With all that it wants a life begins at once.
    setup.spec.max_nodes -= u16::from(case.seed % 4 < 2);
    let mut conductor = Conductor::new(setup);
    conductor.relaunches = false;
    conductor.log = Some(Vec::new());
    let ran = conductor.run();
    assert!(ran.is_ok(), "{case:?}: {ran:?}");
    if std::env::var("MUSTER_SIM_LIFE").is_ok_and(|only| only == case.seed.to_string()) {
        let log = conductor.log.take().into_iter().flatten();
        log.filter_map(|(at, step)| trace::line(at, &step))
            .for_each(|line| println!("{line}"));
    }
    let spawns = &conductor.world.truth.spawns;
    let delay = |life: u64| {
        let nodes = case.nodes_of(life);
        let last = case.launch(life, nodes.len() - 1);
        let first = |node: usize| spawns.iter().find(|s| s.node == node && s.at >= last);
        let began = nodes.map(|node| first(node).map(|s| (s.at - last) / MS));
        began.collect::<Option<Vec<_>>>()?.into_iter().max()
    };
    (0..LIVES).map(delay).collect()
}

/// Agents without launchers of the job, the one among them at which launchers meet: with the lowest id of all. They
/// see nothing of a life but that it begins and ends.
#[test]
fn agents_that_only_look_on_do_not_hold_up_the_next_life() {
    let (mut slow, mut late, mut all) = (Vec::new(), 0, 0);
    for seed in 0..120 {
        let case = Case {
            seed,
            nodes: 3,
            end: [End::Finished, End::Failed, End::Cancelled][seed as usize % 3],
            back: Back::Same,
            // At once after the end, or long after.
            starts: match (seed / 4).is_multiple_of(2) && seed.is_multiple_of(3) {
                true => Starts::Overlapping,
                false => Starts::Together,
            },
            store: seed.is_multiple_of(2),
            embedded: false,
            state_lost: false,
            gap: Gap::Short,
            other_flags: false,
        };
        let delays = delays(case);
        let first = delays[0].expect("a first life");
        all += delays.len();
        let by = |most: u64| {
            let late = move |ms: &&Option<u64>| ms.is_none_or(|ms| ms > first + most);
            delays.iter().filter(late).count()
        };
        late += by(300);
        // A launcher that comes when its log is just being read to its end asks again after a second.
        if by(1_300) > 0 {
            slow.push((seed, delays));
        }
    }
    assert!(
        slow.is_empty() && 100 * late <= 2 * all,
        "{late} of {all} lives: {slow:?}"
    );
}

mod long {
    use super::*;

    #[test]
    fn every_case() {
        for end in [
            End::Finished,
            End::Failed,
            End::Cancelled,
            End::AllLeave,
            End::LaunchersKilled,
            End::Dormant,
            End::NodesKilled,
            End::Continued,
            End::Mixed,
        ] {
            check(end, 1, case::every());
        }
    }
}
