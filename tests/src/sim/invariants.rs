//! RENDEZVOUS.md's invariants, one function each, judged against the truth after every event.

mod barriers;
mod ends;
mod orders;
mod saves;
mod workers;

use std::collections::BTreeSet;
use std::sync::Arc;

use muster_protocol::codec::CodecError;
use muster_protocol::record::{Arbiter, Cause, CommitRef, Kind, Record};
use muster_protocol::wire::{Ballot, WireError};
use muster_protocol::{Digest, NodeId, StateId};

use super::clock::MS;
use super::truth::Truth;
use super::world::World;
pub use barriers::{
    HangError, SaveError, StopStepError, i14_one_save_step, i14_one_stop_step,
    i14_saved_before_going_on, no_hang_ends_what_moves,
};
pub use ends::{EndError, ends_are_told_to_their_own};
pub use orders::{CancelError, cancels_are_answered};
pub use saves::{NotWholeError, checkpoints_are_whole};
use workers::overlaps;
pub use workers::{
    Overlap, OverlapError, RanksError, RestoreError, UnansweredError, WorkersError,
    i08_all_restore_the_same, i09_workers_only_for_decided, i10_ranks_are_dense,
    i11_no_removed_worker_runs, orders_are_answered,
};

/// How much later than the rule says a worker may be gone: clocks drift, and a kill takes a moment.
const SLACK: u64 = 150 * MS;

/// A rule that was broken, or a core that misbehaved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    #[error("I1: {0}")]
    OneValue(#[from] OneValueError),
    #[error("I2: {0}")]
    OneLineage(#[from] OneLineageError),
    #[error("I3: {0}")]
    Arbiter(#[from] ArbiterError),
    #[error("I4: {0}")]
    VoteWithoutRecord(#[from] VoteWithoutRecordError),
    #[error("I5: {0}")]
    BallotValue(#[from] BallotValueError),
    #[error("I6: {0}")]
    LostCommit(#[from] LostCommitError),
    #[error("I7: {0}")]
    DeletedData(#[from] DeletedDataError),
    #[error("I8: {0}")]
    Restore(#[from] RestoreError),
    #[error("I9: {0}")]
    Workers(#[from] WorkersError),
    #[error("I10: {0}")]
    Ranks(#[from] RanksError),
    #[error("I11: {0}")]
    Overlap(#[from] OverlapError),
    #[error("I12: {0}")]
    Terminal(#[from] TerminalError),
    #[error("I13: {0}")]
    Restarts(#[from] RestartsError),
    #[error("checkpoint: {0}")]
    NotWhole(#[from] NotWholeError),
    #[error("I14: {0}")]
    StopStep(#[from] StopStepError),
    #[error("I14: {0}")]
    Save(#[from] SaveError),
    #[error("order: {0}")]
    Unanswered(#[from] UnansweredError),
    #[error("order: {0}")]
    Cancel(#[from] CancelError),
    #[error("end: {0}")]
    End(#[from] EndError),
    #[error("hang: {0}")]
    Hang(#[from] HangError),
    #[error("R11: {0}")]
    Log(#[from] LogError),
    #[error("liveness: {0}")]
    Liveness(#[from] super::liveness::LivenessError),
    #[error("node {node} gave more effects for one event than could be counted")]
    RunsWild { node: usize },
    #[error("{events} events in one run: messages or timers feed on each other")]
    TooManyEvents { events: u64 },
    #[error("node {node}'s timer was due again and again without time going by: {why}")]
    BusyTimer { node: usize, why: String },
    #[error("an agent sent a frame that does not decode: {0}")]
    OwnFrame(String),
    #[error("an agent sent a message that does not encode: {0}")]
    Unsendable(CodecError),
    #[error("an agent persisted a state that does not decode: {0}")]
    OwnState(CodecError),
    #[error("an agent does not start on its own state: {0}")]
    CannotStart(muster_protocol::agent::Error),
    #[error("a core panicked: {0}")]
    Panic(String),
}

impl Violation {
    pub(super) fn own_frame(error: WireError) -> Violation {
        Violation::OwnFrame(error.to_string())
    }

    pub(super) fn unsendable(error: CodecError) -> Violation {
        Violation::Unsendable(error)
    }

    pub(super) fn own_state(error: CodecError) -> Violation {
        Violation::OwnState(error)
    }

    pub(super) fn cannot_start(error: muster_protocol::agent::Error) -> Violation {
        Violation::CannotStart(error)
    }

    /// A short name, the same for the same rule.
    pub fn name(&self) -> &'static str {
        match self {
            Violation::OneValue(_) => "I1",
            Violation::OneLineage(_) => "I2",
            Violation::Arbiter(_) => "I3",
            Violation::VoteWithoutRecord(_) => "I4",
            Violation::BallotValue(_) => "I5",
            Violation::LostCommit(_) => "I6",
            Violation::DeletedData(_) => "I7",
            Violation::Restore(_) => "I8",
            Violation::Workers(_) => "I9",
            Violation::Ranks(_) => "I10",
            Violation::Overlap(_) => "I11",
            Violation::Terminal(_) => "I12",
            Violation::Restarts(_) => "I13",
            Violation::NotWhole(_) => "checkpoint",
            Violation::StopStep(_) | Violation::Save(_) => "I14",
            Violation::Unanswered(_) | Violation::Cancel(_) => "order",
            Violation::End(_) => "end",
            Violation::Hang(_) => "hang",
            Violation::Log(_) => "R11",
            Violation::Liveness(_) => "liveness",
            Violation::RunsWild { .. } => "runs wild",
            Violation::TooManyEvents { .. } => "too many events",
            Violation::BusyTimer { .. } => "busy timer",
            Violation::OwnFrame(_) => "own frame",
            Violation::Unsendable(_) => "unsendable",
            Violation::OwnState(_) => "own state",
            Violation::CannotStart(_) => "cannot start",
            Violation::Panic(_) => "panic",
        }
    }
}

/// All of them. Those that depend on facts alone are judged only when a fact was added; the result
/// is the same, since nothing else can change it.
pub fn after_event(world: &mut World) -> Result<(), Violation> {
    if std::mem::take(&mut world.truth.dirty) {
        facts(&mut world.truth)?;
        checkpoints_are_whole(world)?;
        no_hang_ends_what_moves(world)?;
        world.truth.judged();
        world.overlaps = overlaps(world);
    }
    i11_no_removed_worker_runs(world)?;
    i14_saved_before_going_on(world)?;
    orders_are_answered(world)?;
    cancels_are_answered(world)?;
    Ok(())
}

fn facts(truth: &mut Truth) -> Result<(), Violation> {
    i05_one_value_per_ballot(truth)?;
    i04_no_vote_without_record(truth)?;
    i01_one_decided_value(truth)?;
    i02_one_lineage(truth)?;
    i03_only_the_arbiter_decides(truth)?;
    i06_commits_are_restored(truth)?;
    i07_no_needed_data_deleted(truth)?;
    i08_all_restore_the_same(truth)?;
    i09_workers_only_for_decided(truth)?;
    i10_ranks_are_dense(truth)?;
    i12_one_terminal(truth)?;
    i13_restarts_follow_from_the_chain(truth)?;
    i14_one_stop_step(truth)?;
    i14_one_save_step(truth)?;
    r11_log_is_dense(truth)?;
    ends_are_told_to_their_own(truth)?;
    Ok(())
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OneValueError {
    #[error("after {parent} both {a} and {b} were chosen by majorities")]
    Chosen {
        parent: Digest,
        a: Digest,
        b: Digest,
    },
    #[error("after {parent} in lineage {lineage} agents decided both {a} and {b}")]
    Announced {
        lineage: Digest,
        parent: Digest,
        a: Digest,
        b: Digest,
    },
}

/// I1: one decided value per lineage and digest.
pub fn i01_one_decided_value(truth: &Truth) -> Result<(), OneValueError> {
    for (parent, values) in &truth.chosen {
        let mut values = values.iter();
        if let (Some(a), Some(b)) = (values.next(), values.next()) {
            return Err(OneValueError::Chosen {
                parent: *parent,
                a: *a,
                b: *b,
            });
        }
    }
    for (key, children) in &truth.children {
        let mut children = children.iter();
        if let (Some(a), Some(b)) = (children.next(), children.next()) {
            let (lineage, parent) = *key;
            return Err(OneValueError::Announced {
                lineage,
                parent,
                a: *a,
                b: *b,
            });
        }
    }
    Ok(())
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OneLineageError {
    #[error("{node} is bound to birth {birth} while it holds live lineage {lineage}")]
    BoundElsewhere {
        node: NodeId,
        birth: Digest,
        lineage: Digest,
    },
}

/// I2: one lineage per bound node and key.
pub fn i02_one_lineage(truth: &Truth) -> Result<(), OneLineageError> {
    for (node, (_, disk)) in &truth.disks {
        if let (Some(head), Some(bound)) = (&disk.head, &disk.bound)
            && head.kind == Kind::Next
            && head.lineage() != bound.digest()
        {
            return Err(OneLineageError::BoundElsewhere {
                node: *node,
                birth: bound.digest(),
                lineage: head.lineage(),
            });
        }
    }
    Ok(())
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ArbiterError {
    #[error("{digest} (number {number}) was announced, but its arbiter did not decide it")]
    NotDecided { digest: Digest, number: u64 },
    #[error("{digest} follows {parent}, which nobody has ever seen")]
    NoParent { digest: Digest, parent: Digest },
    #[error("{digest} does not follow its parent {parent}: another arbiter, key, spec or number")]
    NotFollowing { digest: Digest, parent: Digest },
}

/// I3: n's arbiter alone decided n+1.
pub fn i03_only_the_arbiter_decides(truth: &Truth) -> Result<(), ArbiterError> {
    for (digest, record) in truth.fresh_announced() {
        if !truth.is_decided(digest) {
            return Err(ArbiterError::NotDecided {
                digest: *digest,
                number: record.number,
            });
        }
        if record.number > 1 {
            let (digest, parent) = (*digest, record.parent);
            match truth.records.get(&parent) {
                None => return Err(ArbiterError::NoParent { digest, parent }),
                Some(p) if !record.follows(p) => {
                    return Err(ArbiterError::NotFollowing { digest, parent });
                }
                Some(_) => {}
            }
        }
    }
    for digest in &truth.fresh.voters {
        let record = truth.records.get(digest);
        let before = record.and_then(|r| truth.records.get(&r.parent));
        let follows = |r: &Record| before.is_some_and(|b| r.changes_voters_of(b));
        let wrong = |r: &&Arc<Record>| !truth.is_decided(digest) || !follows(r);
        if let Some(record) = record.filter(wrong) {
            return Err(ArbiterError::NotDecided {
                digest: *digest,
                number: record.number,
            });
        }
    }
    Ok(())
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VoteWithoutRecordError {
    #[error("{node} with state {state:?} votes on what follows {parent}, which it never held")]
    NeverHeld {
        node: NodeId,
        state: StateId,
        parent: Digest,
    },
    #[error("{node} with state {state:?} votes on what follows {parent}, of which it is no voter")]
    NoVoter {
        node: NodeId,
        state: StateId,
        parent: Digest,
    },
}

/// I4: no vote without record n.
pub fn i04_no_vote_without_record(truth: &Truth) -> Result<(), VoteWithoutRecordError> {
    for vote in &truth.fresh.said {
        let ((node, state), parent) = (vote.by, vote.parent);
        let held = truth
            .heads
            .get(&vote.by)
            .is_some_and(|h| h.contains(&parent));
        if !held {
            return Err(VoteWithoutRecordError::NeverHeld {
                node,
                state,
                parent,
            });
        }
        let record = truth.records.get(&parent);
        if !record.is_some_and(|r| r.voters().any(|v| (v.node, v.state) == vote.by)) {
            return Err(VoteWithoutRecordError::NoVoter {
                node,
                state,
                parent,
            });
        }
    }
    Ok(())
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("at ballot {ballot:?} after {parent} both {a} and {b} were proposed")]
pub struct BallotValueError {
    parent: Digest,
    ballot: Ballot,
    a: Digest,
    b: Digest,
}

/// I5: at most one ballot-0 value per instance; and one value per ballot of any round.
pub fn i05_one_value_per_ballot(truth: &Truth) -> Result<(), BallotValueError> {
    for (parent, ballot) in &truth.fresh.proposed {
        let (parent, ballot) = (*parent, *ballot);
        let at = |b: Ballot| truth.proposed.get(&(parent, b)).into_iter().flatten();
        let mut values: BTreeSet<Digest> = at(ballot).copied().collect();
        if ballot.round == 0 {
            // Whoever proposes in round 0, in whatever boot: there is one value.
            let lowest = Ballot::default();
            let all = truth.proposed.range((parent, lowest)..);
            let zero = all.take_while(|((p, b), _)| *p == parent && b.round == 0);
            values.extend(zero.flat_map(|(_, v)| v.iter().copied()));
        }
        let mut all = values.iter();
        if let (Some(a), Some(b)) = (all.next(), all.next()) {
            return Err(BallotValueError {
                parent,
                ballot,
                a: *a,
                b: *b,
            });
        }
    }
    Ok(())
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LostCommitError {
    #[error(
        "{value} was decided after {parent} and restores {restores:?}, but {commit:?} was acknowledged"
    )]
    Acknowledged {
        parent: Digest,
        value: Digest,
        commit: CommitRef,
        restores: Option<CommitRef>,
    },
    #[error("{value} restores {restores:?}, older than its parent's {parents:?}")]
    Backwards {
        value: Digest,
        restores: Option<CommitRef>,
        parents: Option<CommitRef>,
    },
    #[error(
        "the claim of {value} restores {restores:?}, the newest valid commit below is {newest:?}"
    )]
    Claim {
        value: Digest,
        restores: Option<CommitRef>,
        newest: Option<CommitRef>,
    },
    #[error("{commit:?} was announced as committed, but no valid entry of the log says so")]
    NotInLog { commit: CommitRef },
    #[error("{commit:?} was announced as committed without a majority's acknowledgement")]
    NotAcknowledged { commit: CommitRef },
}

/// I6: every valid commit precedes the next claim; a generation restores the newest one (without a
/// store: at least every one that a majority acknowledged).
pub fn i06_commits_are_restored(truth: &Truth) -> Result<(), LostCommitError> {
    let number = |c: Option<CommitRef>| c.map_or(0, |c| c.number);
    for parent in &truth.fresh.parents {
        let Some(values) = truth.chosen.get(parent) else {
            continue;
        };
        let parents = truth.records.get(parent).and_then(|r| r.restore);
        for (digest, value) in values
            .iter()
            .filter_map(|v| Some((*v, truth.records.get(v)?)))
        {
            let restores = value.restore;
            if number(restores) < number(parents) {
                return Err(LostCommitError::Backwards {
                    value: digest,
                    restores,
                    parents,
                });
            }
            let acknowledged = truth.acknowledged(parent);
            if let Some(commit) = acknowledged.last().copied()
                && number(restores) < commit.number
            {
                let (parent, value) = (*parent, digest);
                return Err(LostCommitError::Acknowledged {
                    parent,
                    value,
                    commit,
                    restores,
                });
            }
        }
    }
    for (_, record, digest) in truth.log.claims.iter().skip(truth.fresh.claims) {
        let newest = truth.log.due.get(digest).copied().flatten();
        if record.restore != newest {
            let (value, restores) = (*digest, record.restore);
            return Err(LostCommitError::Claim {
                value,
                restores,
                newest,
            });
        }
    }
    for commit in truth.committed.iter().skip(truth.fresh.committed) {
        let commit = *commit;
        let arbiter = truth.records.get(&commit.generation).map(|r| r.arbiter);
        match arbiter {
            Some(Arbiter::Store(_)) if !truth.log.commits.values().any(|(c, _)| *c == commit) => {
                return Err(LostCommitError::NotInLog { commit });
            }
            Some(Arbiter::Members) if !truth.is_acknowledged(&commit) => {
                return Err(LostCommitError::NotAcknowledged { commit });
            }
            Some(_) | None => {}
        }
    }
    Ok(())
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the data of {commit:?}, valid and not retired in slot {slot}, was deleted")]
pub struct DeletedDataError {
    pub commit: CommitRef,
    pub slot: u64,
}

/// I7: no data of a valid, unretired commit is deleted.
pub fn i07_no_needed_data_deleted(truth: &Truth) -> Result<(), DeletedDataError> {
    for (slot, (commit, gone)) in &truth.log.commits {
        if !gone && truth.deleted.contains(&commit.manifest) {
            return Err(DeletedDataError {
                commit: *commit,
                slot: *slot,
            });
        }
    }
    Ok(())
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TerminalError {
    #[error("lineage {lineage} ended twice: in {a} and in {b}")]
    Two {
        lineage: Digest,
        a: Digest,
        b: Digest,
    },
    #[error("lineage {lineage} ended in {terminal}, yet {after} goes on")]
    Followed {
        lineage: Digest,
        terminal: Digest,
        after: Digest,
    },
}

/// I12: at most one terminal value per lineage, and nothing behind it.
pub fn i12_one_terminal(truth: &Truth) -> Result<(), TerminalError> {
    for (digest, record) in truth.fresh_announced() {
        let lineage = record.lineage();
        for (_, theirs) in truth.announced.iter().filter(|(d, _)| *d != digest) {
            let (first, last) = match record.number <= theirs.number {
                true => (record, theirs),
                false => (theirs, record),
            };
            if !first.kind.is_terminal() || theirs.lineage() != lineage {
                continue;
            }
            let (a, b) = (first.digest(), last.digest());
            return Err(match last.kind.is_terminal() {
                true => TerminalError::Two { lineage, a, b },
                false => TerminalError::Followed {
                    lineage,
                    terminal: a,
                    after: b,
                },
            });
        }
    }
    Ok(())
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RestartsError {
    #[error("{digest} counts {counted} restarts, the chain gives {expected}")]
    Counted {
        digest: Digest,
        counted: u32,
        expected: u32,
    },
    #[error("{digest} restarts the job for the {counted}th time, the limit is {limit}")]
    Beyond {
        digest: Digest,
        counted: u32,
        limit: u32,
    },
}

/// I13: the restarts used are a function of the chain: a script's fault costs one, nothing else
/// costs any.
pub fn i13_restarts_follow_from_the_chain(truth: &Truth) -> Result<(), RestartsError> {
    let charge = |record: &Record| {
        u32::from(
            record.kind == Kind::Next
                && matches!(
                    record.cause,
                    Cause::WorkerFailed { .. } | Cause::WorkerHung { .. }
                ),
        )
    };
    for (digest, record) in truth.fresh_announced() {
        let before = match record.number {
            1 => 0,
            _ => match truth.records.get(&record.parent) {
                Some(parent) => parent.restarts_used,
                None => continue,
            },
        };
        let (counted, expected) = (record.restarts_used, before + charge(record));
        if counted != expected {
            return Err(RestartsError::Counted {
                digest: *digest,
                counted,
                expected,
            });
        }
        let limit = record.spec.max_restarts;
        if record.kind == Kind::Next && counted > limit {
            return Err(RestartsError::Beyond {
                digest: *digest,
                counted,
                limit,
            });
        }
    }
    Ok(())
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LogError {
    #[error("slot {0} is empty and a later one is not")]
    Gap(u64),
    #[error("slot {0} does not continue the log")]
    Chain(u64),
}

/// R11: the log is dense, and each entry continues the one before.
pub fn r11_log_is_dense(truth: &Truth) -> Result<(), LogError> {
    match (truth.log.gap, truth.log.broken) {
        (Some(slot), _) => Err(LogError::Gap(slot)),
        (_, Some(slot)) => Err(LogError::Chain(slot)),
        (None, None) => Ok(()),
    }
}
