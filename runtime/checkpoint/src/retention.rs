//! Rules of deletion. A pure function of what the log and the store hold: it deletes nothing.
//!
//! Two steps, so that nothing is deleted that anyone may still restore: first a RETIRE in the log,
//! then, once that has been read there, the data.

use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Numbers of checkpoints to keep beyond pinned ones and those in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// How many of the newest; at least 1.
    pub last: usize,
    /// How many of those with the best metric.
    pub best: Option<(Best, usize)>,
}

impl Default for Policy {
    /// The newest three.
    fn default() -> Self {
        Self {
            last: 3,
            best: None,
        }
    }
}

/// Which metric is the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Best {
    Lowest,
    Highest,
}

/// A valid COMMIT of the log.
#[derive(Clone, Debug, PartialEq)]
pub struct Commit {
    /// Its slot in the log: higher is newer.
    pub seq: u64,
    /// Its needs in the store: names of [`Item`]s.
    pub needs: Vec<String>,
    pub state: State,
    pub metric: Option<f64>,
    /// The log has a PIN of it.
    pub pinned: bool,
    /// The log has a RETIRE of it.
    pub retired: bool,
    /// Someone is restoring it: the newest CLAIM names it, and not all have loaded it.
    pub in_use: bool,
}

/// Known state of a checkpoint's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Read back and right, or loaded.
    Verified,
    Unchecked,
    /// The log has a REJECT of it: it is damaged.
    Rejected,
}

/// A directory of data or a manifest, as it is there in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    pub name: String,
    /// Number of the generation that wrote it.
    pub number: u64,
}

/// Everything that the decision depends on.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    pub commits: &'a [Commit],
    /// Items of the store.
    pub items: &'a [Item],
    /// Number of the newest CLAIM that was read in the log: what older generations have not
    /// committed by then they never will.
    pub claimed: u64,
    /// Items that the records name whose slots are not known yet.
    pub unresolved: &'a [String],
}

/// Retirements and deletions that are due.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// Slots of COMMITs to append a RETIRE for, oldest first.
    pub retire: Vec<u64>,
    /// Names of items that may be deleted now: what only retired commits need, and what fenced
    /// attempts left.
    pub delete: Vec<String>,
}

/// The fewest verified checkpoints that are left, if there are as many.
const FLOOR: usize = 2;

/// Decides what to retire and what to delete now.
pub fn review(policy: Policy, view: View<'_>) -> Decision {
    let kept = kept(policy, view.commits);
    let verified =
        |commit: &&&Commit| commit.state == State::Verified && kept.contains(&commit.seq);
    let live: Vec<&Commit> = view
        .commits
        .iter()
        .filter(|commit| !commit.retired)
        .collect();
    let enough = live.iter().filter(verified).count() >= FLOOR;
    let mut retire: Vec<u64> = (live.iter())
        .filter(|commit| !kept.contains(&commit.seq))
        // With fewer than two known to be good, one that nobody has checked may be the good one.
        .filter(|commit| enough || commit.state == State::Rejected)
        .map(|commit| commit.seq)
        .collect();
    retire.sort_unstable();

    let mut needed: BTreeSet<&str> = view.unresolved.iter().map(String::as_str).collect();
    let mut retired: BTreeSet<&str> = BTreeSet::new();
    for commit in view.commits {
        let names = commit.needs.iter().map(String::as_str);
        match commit.retired && !commit.in_use {
            true => retired.extend(names),
            false => needed.extend(names),
        }
    }
    let mut delete: Vec<String> = (view.items.iter())
        .filter(|item| !needed.contains(item.name.as_str()))
        .filter(|item| retired.contains(item.name.as_str()) || item.number < view.claimed)
        .map(|item| item.name.clone())
        .collect();
    delete.sort_unstable();
    Decision { retire, delete }
}

/// The slots of what is not retired.
fn kept(policy: Policy, commits: &[Commit]) -> BTreeSet<u64> {
    let mut live: Vec<&Commit> = commits.iter().filter(|commit| !commit.retired).collect();
    live.sort_unstable_by_key(|commit| Reverse(commit.seq));
    let usable = || live.iter().filter(|commit| commit.state != State::Rejected);

    let mut kept: BTreeSet<u64> = (live.iter())
        .filter(|commit| commit.pinned || commit.in_use)
        .map(|commit| commit.seq)
        .collect();
    kept.extend(usable().take(policy.last.max(1)).map(|commit| commit.seq));
    if let Some((best, count)) = policy.best {
        let measured = usable()
            .filter_map(|commit| Some((commit.metric.filter(|m| !m.is_nan())?, commit.seq)));
        let mut measured: Vec<(f64, u64)> = measured.collect();
        // Stable: of equals the newest come first.
        measured.sort_by(|(a, _), (b, _)| match best {
            Best::Lowest => a.total_cmp(b),
            Best::Highest => b.total_cmp(a),
        });
        kept.extend(measured.iter().take(count).map(|(_, seq)| *seq));
    }
    // Never below two that are known to be good.
    let verified = || usable().filter(|commit| commit.state == State::Verified);
    let missing = FLOOR.saturating_sub(
        verified()
            .filter(|commit| kept.contains(&commit.seq))
            .count(),
    );
    let more: Vec<u64> = (verified().map(|commit| commit.seq))
        .filter(|seq| !kept.contains(seq))
        .take(missing)
        .collect();
    kept.extend(more);
    kept
}

#[cfg(test)]
mod tests;
