//! A new generation's decision about the step that the one before did not finish: a pure function of
//! what every rank brings, so that all ranks come to the same verdict without another message.

use serde::{Deserialize, Serialize};

use crate::ids::Digest;

/// State that a rank brings into a new generation. All ranks exchange these first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Report {
    /// The lineage that its state belongs to.
    pub lineage: Digest,
    /// The newest generation in which this process carried the verdict out, and so trained or could
    /// have. `None`: it holds no state.
    pub settled: Option<u64>,
    /// Steps that are committed to its state, and so the number of the next one.
    pub committed: u64,
    /// The step whose results it holds, all of them and unmodified.
    pub holds: Option<u64>,
    /// The name of what has been committed to its state.
    pub history: History,
    /// The same without the newest step.
    pub before: History,
}

/// The name of all that was committed to a state, in order: from which checkpoint it comes, and in which generation the
/// results of each step were made. A generation has one set of results for a step, so states of one name are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct History(Digest);

impl History {
    /// A state that all ranks of this generation loaded, or began with.
    pub(super) fn restored(generation: u64) -> History {
        History::default().and(generation)
    }

    /// With the next step committed, whose results were made in this generation.
    pub(super) fn and(self, generation: u64) -> History {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.0.0).update(&generation.to_le_bytes());
        History(Digest(*hasher.finalize().as_bytes()))
    }
}

impl Report {
    /// A process that has just started.
    pub fn empty(lineage: Digest) -> Report {
        Report {
            lineage,
            settled: None,
            committed: 0,
            holds: None,
            history: History::default(),
            before: History::default(),
        }
    }
}

/// Actions of the ranks of a generation before its first step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// The first step of the generation: every rank that trains has committed exactly the steps
    /// before it.
    pub next: u64,
    /// Ranks that keep their state, in order. None: nobody has any, and all restore.
    pub survivors: Vec<u32>,
    /// Survivors that have yet to commit step `next - 1`, of which some survivor holds all results.
    pub behind: Vec<u32>,
    /// Survivors that hold those results.
    pub holders: Vec<u32>,
    /// The names of what is committed before step `next`, and before the step in front of it.
    pub history: (History, History),
}

impl Verdict {
    pub fn is_survivor(&self, rank: u32) -> bool {
        self.survivors.binary_search(&rank).is_ok()
    }

    /// From whom a rank that is behind gets the results: holders take turns.
    pub fn holder_for(&self, rank: u32) -> Option<u32> {
        let turn = self.behind.iter().position(|r| *r == rank)?;
        self.holders.get(turn % self.holders.len().max(1)).copied()
    }
}

/// Why reports do not go together: some rank broke the rule, and nobody can tell which state is
/// right. Nothing may be committed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Disagreement {
    #[error(
        "rank {low} has committed {low_steps} steps and rank {high} {high_steps}, though both come from generation {generation}: survivors are at most one step apart; restore a checkpoint"
    )]
    TooFarApart {
        generation: u64,
        low: u32,
        low_steps: u64,
        high: u32,
        high_steps: u64,
    },
    #[error(
        "rank {rank} has not committed step {step} and nobody holds its results, though rank {ahead} has committed it; restore a checkpoint"
    )]
    ResultsGone { rank: u32, ahead: u32, step: u64 },
}

/// The rule (after a loss: *if any survivor holds all results of step s, all commit exactly those;
/// otherwise all results of s are discarded and s is redone*).
///
/// Survivors are the ranks of `lineage` that settled in the newest generation that any rank of it did, and those whose
/// state one of these has too, or had one step ago. A rank may have settled only in an older one though it lost
/// nothing: a generation may end while its reports are exchanged, when some ranks have all of them and others do not.
/// Any other that settled only in an older one was left out since, and comes back as a newcomer, whatever it holds.
///
/// # Errors
/// The survivors are more than one step apart, or results that one has committed are gone.
pub fn verdict(lineage: Digest, reports: &[Report]) -> Result<Verdict, Disagreement> {
    let ranked = || (0u32..).zip(reports);
    let of_lineage = |r: &Report| (r.lineage == lineage).then_some(r.settled).flatten();
    let newest = reports.iter().filter_map(of_lineage).max();
    let survivors: Vec<(u32, &Report)> = ranked()
        .filter(|(_, r)| newest.is_some() && of_lineage(r) == newest)
        .collect();
    let survivors: Vec<(u32, &Report)> = ranked()
        .filter(|(_, r)| {
            of_lineage(r).is_some_and(|at| newest == Some(at) || is_known(r, &survivors))
        })
        .collect();
    let steps = |(_, r): &&(u32, &Report)| r.committed;
    let (low, high) = (
        survivors.iter().min_by_key(steps),
        survivors.iter().max_by_key(steps),
    );
    let (Some(generation), Some(low), Some(high)) = (newest, low, high) else {
        return Ok(Verdict::default());
    };
    if high.1.committed.saturating_sub(low.1.committed) > 1 {
        return Err(Disagreement::TooFarApart {
            generation,
            low: low.0,
            low_steps: low.1.committed,
            high: high.0,
            high_steps: high.1.committed,
        });
    }
    // The step in doubt is the first that not every survivor has committed.
    let doubt = low.1.committed;
    let holders: Vec<u32> = survivors
        .iter()
        .filter(|(_, r)| r.holds == Some(doubt))
        .map(|(rank, _)| *rank)
        .collect();
    let committed_by_some = high.1.committed > doubt;
    if committed_by_some && holders.is_empty() {
        return Err(Disagreement::ResultsGone {
            rank: low.0,
            ahead: high.0,
            step: doubt,
        });
    }
    let next = if holders.is_empty() { doubt } else { doubt + 1 };
    let there = survivors.iter().find(|(_, r)| r.committed == next);
    Ok(Verdict {
        next,
        history: there
            .map(|(_, r)| (r.history, r.before))
            .unwrap_or_default(),
        behind: survivors
            .iter()
            .filter(|(_, r)| r.committed < next)
            .map(|(rank, _)| *rank)
            .collect(),
        survivors: survivors.iter().map(|(rank, _)| *rank).collect(),
        holders,
    })
}

/// Whether a rank that settled only in an older generation has a state that one of these has, or had before a step
/// whose results it still holds.
fn is_known(report: &Report, settled: &[(u32, &Report)]) -> bool {
    let is = |committed: u64, history: History| {
        (report.committed, report.history) == (committed, history)
    };
    // Where these are one step apart already, it would be two behind.
    let together = settled
        .windows(2)
        .all(|pair| pair[0].1.committed == pair[1].1.committed);
    settled.iter().any(|(_, r)| {
        let one_ago = together && r.holds.is_some_and(|step| is(step, r.before));
        is(r.committed, r.history) || one_ago
    })
}
