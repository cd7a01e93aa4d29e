//! The rules that hold after every step: the simulation's invariants about what is decided, and
//! those that follow from every write of every agent.

use std::collections::BTreeMap;
use std::sync::Arc;

use muster_protocol::Digest;
use muster_protocol::codec::CodecError;
use muster_protocol::job::Durable;
use muster_protocol::record::Record;
use muster_protocol::wire::Ballot;

use crate::sim::invariants as sim;
use crate::sim::truth::{Holder, Truth};

/// A rule that was broken, or a core that misbehaved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    #[error("I1: {0}")]
    OneValue(#[from] sim::OneValueError),
    #[error("I2: {0}")]
    OneLineage(#[from] sim::OneLineageError),
    #[error("I3: {0}")]
    Arbiter(#[from] sim::ArbiterError),
    #[error("I4: {0}")]
    VoteWithoutRecord(#[from] sim::VoteWithoutRecordError),
    #[error("I5: {0}")]
    BallotValue(#[from] sim::BallotValueError),
    #[error("I6: {0}")]
    LostCommit(#[from] sim::LostCommitError),
    #[error("I9: {0}")]
    Workers(#[from] sim::WorkersError),
    #[error(
        "I11: on nodes {one} and {other} workers of two generations have run at once for {ms} ms"
    )]
    Overlap { one: usize, other: usize, ms: u64 },
    #[error("I12: {0}")]
    Terminal(#[from] sim::TerminalError),
    #[error("{by:?} takes back what it said about what follows {parent}: {before:?}, now {now:?}")]
    TakenBack {
        by: Holder,
        parent: Digest,
        before: Vote,
        now: Vote,
    },
    #[error("{by:?} held {before} as number {number} of its lineage, and holds {now} now")]
    Replaced {
        by: Holder,
        number: u64,
        before: Digest,
        now: Digest,
    },
    #[error("{by:?} orders {digest} to start, and does not know it as decided")]
    Ordered { by: Holder, digest: Digest },
    #[error("an agent does not start: {0}")]
    Start(muster_protocol::agent::Error),
    #[error("what an agent stored cannot be read or written: {0}")]
    Codec(CodecError),
    #[error("the job does not form")]
    DoesNotForm,
    #[error("messages or timers feed on each other")]
    RunsWild,
}

impl Broken {
    pub(super) fn codec(error: CodecError) -> Broken {
        Broken::Codec(error)
    }
}

/// All that one voter has made durable about what follows one generation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Vote {
    pub promised: Ballot,
    pub accepted: Option<(Ballot, Digest)>,
    /// The number of the commit that it acknowledged.
    pub acked: u64,
}

impl Vote {
    fn goes_back_on(&self, before: &Vote) -> bool {
        let (now, then) = (self.accepted, before.accepted);
        let ballot = |a: Option<(Ballot, Digest)>| a.map(|(b, _)| b);
        let other = ballot(now) == ballot(then) && now != then;
        self.promised < before.promised
            || ballot(now) < ballot(then)
            || other
            || self.acked < before.acked
    }
}

#[derive(Clone, Default)]
pub(super) struct Judge {
    votes: BTreeMap<(Holder, Digest), Vote>,
    held: BTreeMap<(Holder, Digest, u64), Digest>,
}

impl Judge {
    /// A write is durable.
    pub(super) fn persisted(&mut self, by: Holder, durable: &Durable) -> Result<(), Broken> {
        let Some(head) = &durable.head else {
            return Ok(());
        };
        let now = head.digest();
        let lineage = |r: &Arc<Record>| if r.number == 1 { now } else { r.birth };
        let key = (by, lineage(head), head.number);
        let before = *self.held.entry(key).or_insert(now);
        if before != now {
            return Err(Broken::Replaced {
                by,
                number: head.number,
                before,
                now,
            });
        }
        // A vote that was given up is never used again, so that nothing of it need be there.
        if !durable.may_vote() {
            return Ok(());
        }
        let acceptor = &durable.acceptor;
        let vote = Vote {
            promised: acceptor.promised,
            accepted: acceptor.accepted.as_ref().map(|(b, r)| (*b, r.digest())),
            acked: acceptor.acked.map_or(0, |c| c.number),
        };
        // Other voters of the same generation decide anew.
        let parent = durable.voters.as_ref().map_or(now, |r| r.digest());
        let known = self.votes.entry((by, parent)).or_default();
        if vote.goes_back_on(known) {
            return Err(Broken::TakenBack {
                by,
                parent,
                before: *known,
                now: vote,
            });
        }
        *known = vote;
        Ok(())
    }
}

/// A generation is ordered to start by one whose newest record is `head`; that need not be on its
/// disk, for a start is no vote.
pub(super) fn ordered(
    truth: &Truth,
    by: Holder,
    head: Option<Digest>,
    digest: Digest,
) -> Result<(), Broken> {
    match head == Some(digest) && truth.is_decided(&digest) {
        true => Ok(()),
        false => Err(Broken::Ordered { by, digest }),
    }
}

/// Judges what was added since the last time.
pub(super) fn look(truth: &mut Truth) -> Result<(), Broken> {
    truth.dirty = false;
    sim::i05_one_value_per_ballot(truth)?;
    sim::i04_no_vote_without_record(truth)?;
    sim::i01_one_decided_value(truth)?;
    sim::i02_one_lineage(truth)?;
    sim::i03_only_the_arbiter_decides(truth)?;
    sim::i06_commits_are_restored(truth)?;
    sim::i09_workers_only_for_decided(truth)?;
    sim::i12_one_terminal(truth)?;
    truth.judged();
    Ok(())
}
