//! Whether five lives went as they must.

use std::sync::Arc;

use muster_protocol::local::ToLauncher;
use muster_protocol::record::{Cause, CommitRef, Kind, Record};
use muster_tests::sim::conductor::Conductor;
use muster_tests::sim::launcher::STEP;
use muster_tests::sim::step::Step;
use muster_tests::sim::trace;
use muster_tests::sim::truth::{Spawn, Truth};

use super::case::{BOUND, Case, End, LIVES, SILENCE};

/// Runs a case; why it is not as it must be.
pub(super) fn judge(case: Case) -> Result<(), String> {
    let mut conductor = Conductor::new(case.setup());
    conductor.log = Some(Vec::new());
    conductor.relaunches = false;
    let mut newest = Vec::new();
    for life in 0..LIVES - 1 {
        run_until(&mut conductor, case.ends(life) - 1)?;
        newest.push(newest_commit(&conductor.world.truth));
        let before = dormant(&conductor.world.truth);
        if case.end_of(life) == End::Continued && !is_continued(&conductor.world.truth, life) {
            return Err(format!("nobody continued life {life}"));
        }
        run_until(&mut conductor, case.launch(life + 1, 0) - 1)?;
        if case.end_of(life) == End::Dormant && dormant(&conductor.world.truth) == before {
            return Err(format!("the job of life {life} did not become dormant"));
        }
    }
    run_until(&mut conductor, u64::MAX)?;
    ends_are_of_their_lives(&case, &mut conductor)?;
    let truth = &conductor.world.truth;
    all_train(&case, &truth.spawns)?;
    newest_are_restored(&case, truth, &newest)
}

fn run_until(conductor: &mut Conductor, until: u64) -> Result<(), String> {
    conductor.run_until(until).map_err(|v| v.to_string())
}

/// The last commit that was announced as done.
fn newest_commit(truth: &Truth) -> Option<CommitRef> {
    truth.committed.iter().max_by_key(|c| c.step).copied()
}

fn dormant(truth: &Truth) -> usize {
    let all = truth.announced.values();
    all.filter(|r| r.kind == Kind::Dormant).count()
}

/// Whether as many lives as that were continued, this one after those before.
fn is_continued(truth: &Truth, life: u64) -> bool {
    let continued = |r: &&Arc<Record>| matches!(r.cause, Cause::Continued { .. });
    truth.announced.values().filter(continued).count() as u64 > life
}

fn ends_are_of_their_lives(case: &Case, conductor: &mut Conductor) -> Result<(), String> {
    let traced = std::env::var_os("MUSTER_SIM_LIFE").is_some();
    for (at, step) in conductor.log.take().into_iter().flatten() {
        if let Some(line) = trace::line(at, &step).filter(|_| traced) {
            println!("{line}");
        }
        match step {
            Step::LauncherHears {
                node,
                frame: ToLauncher::End { code, report },
                ..
            } => {
                let mut starts = conductor.world.started.iter().rev();
                let born = starts.find(|(n, born)| *n == node && *born <= at);
                let born = born.map_or(0, |(_, born)| *born);
                let own = (0..LIVES).any(|life| (born..=at).contains(&case.ends(life)));
                if !own {
                    return Err(format!(
                        "node {node}, started at {:.3} s, was told at {:.3} s that the job had ended \
                         ({code}: {report})",
                        born as f64 / 1e9,
                        at as f64 / 1e9
                    ));
                }
            }
            Step::LauncherHears {
                node,
                frame: ToLauncher::Refused { reason },
                ..
            } => return Err(format!("node {node} was refused: {reason}")),
            _ => {}
        }
    }
    Ok(())
}

fn all_train(case: &Case, spawns: &[Spawn]) -> Result<(), String> {
    for life in 0..LIVES {
        let nodes = case.nodes_of(life);
        let from = match life {
            0 => 0,
            _ => case.ends(life - 1) + 1,
        };
        let last = case.launch(life, nodes.len() - 1).max(from);
        let silent = life > 0 && case.ends_silently(life - 1);
        let bound = last + BOUND + if silent { SILENCE } else { 0 };
        for node in nodes {
            let trains = |s: &&Spawn| s.node == node && (from..bound).contains(&s.at);
            if spawns.iter().find(trains).is_none() {
                return Err(format!(
                    "node {node} did not train in life {life} by {:.3} s",
                    bound as f64 / 1e9
                ));
            }
        }
    }
    Ok(())
}

/// Every life has checkpoints, and those after it go on from the newest: from all that the job's log has, or, without a
/// store, from those of a life that they go on with.
fn newest_are_restored(
    case: &Case,
    truth: &Truth,
    newest: &[Option<CommitRef>],
) -> Result<(), String> {
    for (life, commit) in (0..).zip(newest) {
        let begins = case.launch(life, 0) / STEP;
        let Some(commit) = commit.filter(|c| c.step >= begins) else {
            return Err(format!("life {life} has no checkpoint: {commit:?}"));
        };
        let lineage = |digest| truth.records.get(digest).map(|r| r.lineage());
        let of = lineage(&commit.generation);
        let later = truth.spawns.iter().filter(|s| s.at > case.ends(life));
        for spawn in later.filter(|s| s.start.digest != commit.generation) {
            let bound = case.store || lineage(&spawn.start.digest) == of;
            let restores = truth.records.get(&spawn.start.digest);
            let restores = restores.and_then(|r| r.restore);
            if bound && restores.is_none_or(|c| c.step < commit.step) {
                return Err(format!(
                    "node {} began at {:.3} s from {restores:?}, after life {life} with {commit:?}",
                    spawn.node,
                    spawn.at as f64 / 1e9
                ));
            }
        }
    }
    Ok(())
}
