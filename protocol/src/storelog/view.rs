//! Meaning of the entries read so far: which of them are valid, which claim is the latest, which
//! checkpoints may be restored. Every reader of one log comes to the same view.

use std::collections::BTreeMap;

use super::Flaws;
use super::entry::{Body, Entry, OPERATOR, cut};
use super::rules::Rules;
use super::snapshot::{Compaction, Snapshot, Standing};
use crate::ids::{Digest, JobKey, NodeId, StoreUuid};
use crate::record::{Arbiter, CommitRef, Record, RecordError};

/// A COMMIT has to have this many newer restorable ones before it can be retired, unless it was
/// rejected: retention never goes below two.
pub const KEPT_COMMITS: usize = 2;

/// Why an entry is invalid: readers go on as if it were not there, writers do not write it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Why {
    #[error("the record is of another job than this log")]
    OtherJob,
    #[error("the record's arbiter is not this store: generations never change their arbiter")]
    OtherArbiter,
    #[error("the record does not hold together: {0}")]
    Record(#[from] RecordError),
    #[error("the record does not follow the latest claim of the log")]
    NotFollowing,
    #[error("the record restores something else than the newest commit below it")]
    Restore,
    #[error("the writer is not a member of the latest claim")]
    NotMember,
    #[error("the commit's generation is not the latest claim")]
    NotLatest,
    #[error("slot {0} holds no valid commit")]
    NoCommit(u64),
    #[error("the same is in the log already, at slot {0}")]
    Again(u64),
    #[error("the commit is pinned")]
    Pinned,
    #[error("the commit is not pinned")]
    NotPinned,
    #[error("fewer than two newer commits can be restored")]
    Needed,
    #[error("the checkpoint in slot {0}, which was to be left, is retired or rejected by now")]
    NotLeft(u64),
    #[error("the snapshot says something else than the slots below it")]
    OtherView,
    #[error("too long for an entry")]
    TooLong,
    #[error("more than {} appends wait already", super::MAX_QUEUE)]
    Busy,
    #[error("the log is broken")]
    Broken,
    #[error("given up while the outcome was unknown")]
    GivenUp,
}

/// The fold over slots 1 to n.
#[derive(Clone, Debug)]
pub(super) struct View {
    key: JobKey,
    arbiter: Arbiter,
    flaws: Flaws,
    compaction: Compaction,
    /// Valid claims by digest of their record.
    claims: BTreeMap<Digest, u64>,
    latest: Option<(Record, Digest, u64)>,
    /// Valid commits by slot.
    commits: BTreeMap<u64, Standing>,
    /// The greatest number of a valid commit, retired and rejected ones included.
    last_number: u64,
    rules: Option<Rules>,
}

impl View {
    pub(super) fn new(key: JobKey, store: StoreUuid, flaws: Flaws, compaction: Compaction) -> View {
        View {
            key,
            arbiter: Arbiter::Store(store),
            flaws,
            compaction,
            claims: BTreeMap::new(),
            latest: None,
            commits: BTreeMap::new(),
            last_number: 0,
            rules: None,
        }
    }

    pub(super) fn compact(&mut self, compaction: Compaction) {
        self.compaction = compaction;
    }

    /// The snapshot from which others can go on; none before the first claim.
    pub(super) fn snapshot(&self) -> Option<Snapshot> {
        let (claim, ..) = self.latest.as_ref()?;
        let claims: BTreeMap<u64, Digest> = self.claims.iter().map(|(d, s)| (*s, *d)).collect();
        let over = claims.len().saturating_sub(self.compaction.claims.max(1));
        let retired = self.commits.values().filter(|c| c.retired.is_some());
        let mut forgotten = retired.count().saturating_sub(self.compaction.retired);
        let kept = |c: &&Standing| {
            let forget = c.retired.is_some() && forgotten > 0;
            forgotten -= usize::from(forget);
            !forget
        };
        Some(Snapshot {
            claim: claim.clone(),
            claims: claims.into_iter().skip(over).collect(),
            last_number: self.last_number,
            commits: self.commits.values().filter(kept).cloned().collect(),
            rules: self.rules.clone(),
        })
    }

    /// Whether a snapshot is of this job's log.
    pub(super) fn is_of(&self, snapshot: &Snapshot) -> bool {
        let claim = &snapshot.claim;
        claim.key == self.key && claim.arbiter == self.arbiter && claim.check().is_ok()
    }

    /// Goes on from a snapshot, whatever was known before.
    pub(super) fn begin(&mut self, snapshot: &Snapshot) {
        let claims = snapshot.claims.iter();
        self.claims = claims
            .clone()
            .map(|(seq, digest)| (*digest, *seq))
            .collect();
        let latest = claims.last();
        self.latest = latest.map(|(seq, digest)| (snapshot.claim.clone(), *digest, *seq));
        let commits = snapshot.commits.iter().map(|c| (c.seq, c.clone()));
        self.commits = commits.collect();
        self.last_number = snapshot.last_number;
        self.rules = snapshot.rules.clone();
    }

    /// The latest valid claim, its record's digest, and its slot.
    pub(super) fn latest(&self) -> Option<(&Record, Digest, u64)> {
        self.latest.as_ref().map(|(r, d, s)| (r, *d, *s))
    }

    /// The newest commit that is neither retired nor rejected: what a claim at the next slot
    /// restores (R13).
    pub(super) fn restorable(&self) -> Option<(CommitRef, u64)> {
        let newest = self.commits.iter().rev().find(|(_, c)| c.in_force());
        newest.map(|(seq, c)| (c.commit, *seq))
    }

    /// The valid commit in this slot.
    pub(super) fn committed(&self, seq: u64) -> Option<CommitRef> {
        self.commits.get(&seq).map(|of| of.commit)
    }

    /// The greatest number of a commit, retired and rejected ones included; 0 for none.
    pub(super) fn last_number(&self) -> u64 {
        self.last_number
    }

    pub(super) fn claim_slot(&self, generation: &Digest) -> Option<u64> {
        self.claims.get(generation).copied()
    }

    /// The slot of the valid commit of this manifest by this generation, whatever its number: a leader
    /// that was restarted while the outcome was unknown asks for it again.
    pub(super) fn commit_slot(&self, commit: &CommitRef) -> Option<u64> {
        let same =
            |c: &CommitRef| (c.generation, c.manifest) == (commit.generation, commit.manifest);
        let mut all = self.commits.iter();
        all.find(|(_, c)| same(&c.commit)).map(|(seq, _)| *seq)
    }

    /// Whether a valid commit that is not retired names this manifest.
    pub(super) fn keeps(&self, manifest: &Digest) -> bool {
        self.commits
            .values()
            .any(|c| c.retired.is_none() && c.commit.manifest == *manifest)
    }

    /// Whether an entry at the next slot would be valid. The same for writers and readers, and a
    /// function of the slots below alone (R11, R13, R15).
    pub(super) fn judge(&self, writer: NodeId, body: &Body) -> Result<(), Why> {
        match body {
            Body::Claim(record) => self.judge_claim(record),
            Body::Commit(commit) => self.judge_commit(writer, commit),
            Body::Pin { seq } => self.existing(*seq).map(|_| ()),
            Body::Rules(_) => self.keeper(writer),
            Body::Unpin { seq } => {
                let pinned = self.existing(*seq)?.pinned;
                self.keeper(writer)?;
                match pinned {
                    true => Ok(()),
                    false => Err(Why::NotPinned),
                }
            }
            Body::Reject { seq, .. } => {
                let rejected = self.existing(*seq)?.rejected.is_some();
                self.keeper(writer)?;
                if rejected {
                    return Err(Why::Again(*seq));
                }
                Ok(())
            }
            Body::Retire { seq, good } => self.judge_retire(writer, *seq, *good),
            Body::Snapshot(snapshot) => match self.snapshot().as_ref() == Some(&**snapshot) {
                true => Ok(()),
                false => Err(Why::OtherView),
            },
        }
    }

    fn judge_claim(&self, record: &Record) -> Result<(), Why> {
        if record.key != self.key {
            return Err(Why::OtherJob);
        }
        if record.arbiter != self.arbiter {
            return Err(Why::OtherArbiter);
        }
        record.check()?;
        if record.change_of_voters() > 0 {
            // Here the log decides, and nobody votes.
            return Err(Why::NotFollowing);
        }
        let follows = match &self.latest {
            // R9: a birth after a lineage's end names that end as its parent.
            Some((latest, digest, _)) if record.number == 1 => {
                latest.kind.is_terminal() && record.parent == *digest
            }
            Some((latest, ..)) => record.follows(latest),
            None => record.number == 1,
        };
        if !follows {
            return Err(Why::NotFollowing);
        }
        if !self.flaws.skip_r13 && record.restore != self.restorable().map(|(c, _)| c) {
            return Err(Why::Restore);
        }
        Ok(())
    }

    fn judge_commit(&self, writer: NodeId, commit: &CommitRef) -> Result<(), Why> {
        if self.flaws.skip_r13 {
            return match self.claims.contains_key(&commit.generation) {
                true => Ok(()),
                false => Err(Why::NotLatest),
            };
        }
        match &self.latest {
            Some((_, digest, _)) if *digest == commit.generation => self.member(writer)?,
            _ => return Err(Why::NotLatest),
        }
        match self.commit_slot(commit) {
            Some(seq) => Err(Why::Again(seq)),
            None => Ok(()),
        }
    }

    fn judge_retire(&self, writer: NodeId, seq: u64, good: Option<[u64; 2]>) -> Result<(), Why> {
        let of = self.existing(seq)?;
        self.keeper(writer)?;
        if of.retired.is_some() {
            return Err(Why::Again(seq));
        }
        if of.pinned {
            return Err(Why::Pinned);
        }
        let newer = self.commits.range(seq..).skip(1);
        if of.rejected.is_none() && newer.filter(|(_, c)| c.in_force()).count() < KEPT_COMMITS {
            return Err(Why::Needed);
        }
        // Which ones are good no entry says: each writer knows of some. So it names two, and they stay.
        let [one, other] = good.unwrap_or_default();
        let left = |at: u64| at != seq && self.commits.get(&at).is_some_and(Standing::in_force);
        match good {
            Some(_) if !left(one) => Err(Why::NotLeft(one)),
            Some(_) if !left(other) || one == other => Err(Why::NotLeft(other)),
            Some(_) | None => Ok(()),
        }
    }

    fn existing(&self, seq: u64) -> Result<&Standing, Why> {
        self.commits.get(&seq).ok_or(Why::NoCommit(seq))
    }

    /// Checks that a writer may say what is kept: the members, and a person, also after the job's end.
    fn keeper(&self, writer: NodeId) -> Result<(), Why> {
        match writer == OPERATOR {
            true => Ok(()),
            false => self.member(writer),
        }
    }

    fn member(&self, writer: NodeId) -> Result<(), Why> {
        match &self.latest {
            Some((latest, ..)) if latest.has(writer) => Ok(()),
            _ => Err(Why::NotMember),
        }
    }

    /// Takes in the entry of the next slot; says whether it is valid.
    pub(super) fn apply(&mut self, entry: &Entry) -> Result<(), Why> {
        self.judge(entry.writer, &entry.body)?;
        match &entry.body {
            Body::Claim(record) => {
                let digest = record.digest();
                self.claims.insert(digest, entry.seq);
                self.latest = Some((Record::clone(record), digest, entry.seq));
            }
            Body::Commit(commit) => {
                let standing = Standing {
                    seq: entry.seq,
                    commit: *commit,
                    pinned: false,
                    retired: None,
                    rejected: None,
                };
                self.last_number = self.last_number.max(commit.number);
                self.commits.insert(entry.seq, standing);
            }
            Body::Retire { seq, .. } => self.mark(*seq, |c| c.retired = Some(entry.seq)),
            Body::Reject { seq, reason } => {
                let reason = cut(reason).to_owned();
                self.mark(*seq, |c| c.rejected = Some(reason));
            }
            Body::Pin { seq } => self.mark(*seq, |c| c.pinned = true),
            Body::Unpin { seq } => self.mark(*seq, |c| c.pinned = false),
            // For who decides what is kept: any of it is valid.
            Body::Rules(rules) => self.rules = Some(rules.clone()),
            // What it left out is forgotten by those, too, who have read it: validity is the same for all.
            Body::Snapshot(snapshot) => self.begin(snapshot),
        }
        Ok(())
    }

    fn mark(&mut self, seq: u64, change: impl FnOnce(&mut Standing)) {
        if let Some(standing) = self.commits.get_mut(&seq) {
            change(standing);
        }
    }
}
