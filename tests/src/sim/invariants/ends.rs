//! An end of the job is told only to launchers of the life that ended.

use muster_protocol::record::{Kind, Record};

use crate::sim::truth::{ToldEnd, Truth};

/// All have finished, and what they saved last is not committed.
const NOT_SAVED: i32 = 74;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "node {node}'s launcher was told to exit with {code} ({report}), and had no part in a life of the job that ended so"
)]
pub struct EndError {
    pub node: usize,
    pub code: i32,
    pub report: String,
}

/// A launcher hears the end of a life that it had a part in, and of no other; that a person ended it, where one did;
/// and that it may leave, where it was to leave.
pub fn ends_are_told_to_their_own(truth: &Truth) -> Result<(), EndError> {
    for told in truth.fresh_told() {
        let asked = told.leaves && told.code == 143 || told.cancelled && told.code == 130;
        let ended = |r: &Record| ends_with(truth, r, told.code) && had_part(truth, told, r);
        if asked || truth.records.values().any(|r| ended(r)) {
            continue;
        }
        let ToldEnd { node, code, .. } = *told;
        let report = told.report.clone();
        return Err(EndError { node, code, report });
    }
    Ok(())
}

fn ends_with(truth: &Truth, record: &Record, code: i32) -> bool {
    match record.kind {
        Kind::End { cancelled: true } => code == 130,
        Kind::End { cancelled: false } if code == NOT_SAVED => {
            let commits = truth.log.commits.values().map(|(commit, _)| commit);
            let of = commits.filter(|commit| commit.generation == record.parent);
            truth.sealed.get(&record.parent).copied() > of.map(|commit| commit.step).max()
        }
        Kind::End { cancelled: false } => code == 0,
        Kind::Failed { code: failed } => code == failed,
        Kind::Dormant => code == 143,
        Kind::Next | Kind::Voters { .. } | Kind::Tombstone { .. } => false,
    }
}

/// One that waited for its turn when the job ended is of that life, too. That all others left is the end of those alone
/// that were members then: another one begins the next life.
fn had_part(truth: &Truth, told: &ToldEnd, end: &Record) -> bool {
    let digest = end.digest();
    if !truth.is_decided(&digest) {
        return false;
    }
    let is_in = |r: &Record| r.members.iter().any(|m| m.launcher == told.launcher);
    if end.kind == Kind::Dormant {
        return truth.records.get(&end.parent).is_some_and(|r| is_in(r));
    }
    let registered = truth.registered.get(&told.launcher);
    let before = registered
        .zip(truth.ended.get(&digest))
        .is_some_and(|(then, at)| then <= at);
    let waited = before && told.life == Some(end.lineage());
    let mut life = truth.records.values();
    waited || life.any(|r| r.lineage() == end.lineage() && is_in(r))
}
