//! What a new generation does about the step that the one before did not finish: a pure function of
//! what every rank brings, so that all ranks come to the same verdict without another message.

use serde::{Deserialize, Serialize};

use crate::ids::Digest;

/// What a rank brings into a new generation. All ranks exchange these first.
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
}

impl Report {
    /// A process that has just started.
    pub fn empty(lineage: Digest) -> Report {
        Report {
            lineage,
            settled: None,
            committed: 0,
            holds: None,
        }
    }
}

/// What the ranks of a generation do before its first step.
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
/// Survivors are the ranks of `lineage` that settled in the newest generation that any rank of it
/// did. Who settled only in an older one was left out since, or its newer part was cut short: it
/// comes back as a newcomer, whatever it holds.
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
    Ok(Verdict {
        next,
        behind: survivors
            .iter()
            .filter(|(_, r)| r.committed < next)
            .map(|(rank, _)| *rank)
            .collect(),
        survivors: survivors.iter().map(|(rank, _)| *rank).collect(),
        holders,
    })
}
