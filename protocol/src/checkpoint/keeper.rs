//! Keeper of checkpoints: carries out decisions to retire and to delete, in the one order that loses nothing.
//!
//! Which checkpoints are worth keeping is decided elsewhere (the newest few, the best, pinned ones), on
//! the strength of a log that may have grown since. So each decision is judged here once more, against
//! the log as it has been read: nothing is deleted before its RETIRE was read there, nothing that a
//! checkpoint in force needs, nothing of a generation that may still commit, and two that are known to
//! be good always stay.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use super::Flaws;
use crate::ids::Digest;
use crate::record::CommitRef;
use crate::storelog::{Body, Snapshot};

/// The fewest verified checkpoints that are left.
const FLOOR: usize = 2;

/// Known state of a checkpoint's data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// Read back and right, or loaded.
    Verified,
    Unchecked,
    Damaged {
        why: String,
    },
    /// Nothing can be said of it now: it stays, and counts for nothing.
    Unreadable {
        why: String,
    },
}

impl State {
    /// The fault, if there is one.
    pub fn why(&self) -> Option<&str> {
        match self {
            State::Damaged { why } | State::Unreadable { why } => Some(why),
            State::Verified | State::Unchecked => None,
        }
    }
}

/// The log's statements on a COMMIT, and the known state of its data: the basis of a decision on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    pub seq: u64,
    pub commit: CommitRef,
    pub pinned: bool,
    pub retired: bool,
    pub rejected: bool,
    /// The newest generation restores it, and not all of its ranks are known to have.
    pub in_use: bool,
    /// Read back and right, or loaded.
    pub verified: bool,
}

/// A folder of data or a manifest in the store.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Item {
    pub name: String,
    /// The generation that wrote it.
    pub generation: Digest,
}

/// A decision that somebody made on the strength of the log and of what is in the store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// Slots of COMMITs.
    pub retire: Vec<u64>,
    pub delete: Vec<Item>,
}

/// Valid entries come in the order of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A generation was decided.
    Claimed {
        generation: Digest,
        restore: Option<CommitRef>,
    },
    Committed {
        seq: u64,
        commit: CommitRef,
    },
    Retired {
        seq: u64,
    },
    Rejected {
        seq: u64,
    },
    Pinned {
        seq: u64,
    },
    Unpinned {
        seq: u64,
    },
    /// Every rank of the newest generation has loaded what it restores.
    Loaded {
        generation: Digest,
    },
    /// The names in the store that this commit needs, by its manifest; its own name among them.
    Needs {
        seq: u64,
        names: Vec<String>,
    },
    Checked {
        seq: u64,
        state: State,
    },
    Decided(Decision),
    /// A RETIRE or REJECT of this commit is not in the log, and will not be.
    NotAppended {
        seq: u64,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Append this to the log.
    Append(Body),
    Delete {
        name: String,
    },
    /// A part of a decision was not carried out.
    Refused {
        what: String,
        why: Refused,
    },
}

/// Why a part of a decision was not carried out. The log has grown since, or it was wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("the log has no such checkpoint in force")]
    Unknown,
    #[error("it is pinned")]
    Pinned,
    #[error("the newest generation restores it")]
    InUse,
    #[error("fewer than two verified checkpoints would be left")]
    Floor,
    #[error("a checkpoint in force needs it")]
    Needed,
    #[error("it, or what a checkpoint in force needs, cannot be read")]
    Unread,
    #[error("it belongs to no retired checkpoint, and its generation may still commit it")]
    NotFenced,
}

#[derive(Clone, Debug)]
struct Kept {
    commit: CommitRef,
    needs: Option<BTreeSet<String>>,
    state: State,
    pinned: bool,
    rejected: bool,
    retired: bool,
    /// A RETIRE, or a REJECT, is on its way into the log.
    retiring: bool,
    rejecting: bool,
}

impl Kept {
    fn is_good(&self) -> bool {
        let leaves = self.retired || self.retiring || self.rejected || self.rejecting;
        self.state == State::Verified && !leaves
    }
}

/// The checkpoints of one job's log.
#[derive(Clone, Debug, Default)]
pub struct Keeper {
    commits: BTreeMap<u64, Kept>,
    /// Every generation that was claimed.
    claimed: BTreeSet<Digest>,
    newest: Option<Digest>,
    /// The commit that the newest generation restores, until all its ranks have.
    in_use: Option<CommitRef>,
    flaws: Flaws,
    effects: VecDeque<Effect>,
}

impl Keeper {
    pub fn new(flaws: Flaws) -> Keeper {
        Keeper {
            flaws,
            ..Keeper::default()
        }
    }

    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// Slots of the checkpoints in force that are known to be good.
    pub fn verified(&self) -> impl Iterator<Item = u64> + '_ {
        let good = self.commits.iter().filter(|(_, c)| c.is_good());
        good.map(|(seq, _)| *seq)
    }

    /// Every checkpoint of the log, the oldest first.
    pub fn standings(&self) -> impl Iterator<Item = Standing> + '_ {
        self.commits.iter().map(|(seq, kept)| Standing {
            seq: *seq,
            commit: kept.commit,
            pinned: kept.pinned,
            retired: kept.retired,
            rejected: kept.rejected,
            in_use: self.in_use == Some(kept.commit),
            verified: kept.state == State::Verified,
        })
    }

    /// The newest generation that was claimed.
    pub fn newest(&self) -> Option<Digest> {
        self.newest
    }

    /// The generation whose digest begins with these bytes, as folders of data are named; none where
    /// none or several do.
    pub fn generation_of(&self, first: [u8; 8]) -> Option<Digest> {
        let mut all = (self.claimed.iter()).filter(|digest| digest.0.starts_with(&first));
        all.next().filter(|_| all.next().is_none()).copied()
    }

    pub fn handle(&mut self, event: Event) {
        match event {
            Event::Claimed {
                generation,
                restore,
            } => {
                self.claimed.insert(generation);
                self.newest = Some(generation);
                self.in_use = restore;
            }
            Event::Committed { seq, commit } => {
                let kept = Kept {
                    commit,
                    needs: None,
                    state: State::Unchecked,
                    pinned: false,
                    rejected: false,
                    retired: false,
                    retiring: false,
                    rejecting: false,
                };
                self.commits.entry(seq).or_insert(kept);
            }
            Event::Retired { seq } => self.with(seq, |c| {
                c.retired = true;
                c.retiring = false;
            }),
            Event::Rejected { seq } => self.with(seq, |c| {
                c.rejected = true;
                c.rejecting = false;
            }),
            Event::Pinned { seq } => self.with(seq, |c| c.pinned = true),
            Event::Unpinned { seq } => self.with(seq, |c| c.pinned = false),
            Event::Loaded { generation } => {
                if self.newest == Some(generation) {
                    self.in_use = None;
                }
            }
            Event::Needs { seq, names } => {
                self.with(seq, |c| c.needs = Some(names.into_iter().collect()));
            }
            Event::Checked { seq, state } => self.checked(seq, state),
            Event::Decided(decision) => self.decided(decision),
            Event::NotAppended { seq } => self.with(seq, |c| {
                c.retiring = false;
                c.rejecting = false;
            }),
        }
    }

    /// The log is read from this snapshot on: what it holds, as if it had been read entry by entry.
    pub fn begin(&mut self, snapshot: &Snapshot) {
        for (_, generation) in &snapshot.claims {
            let (generation, restore) = (*generation, snapshot.claim.restore);
            self.handle(Event::Claimed {
                generation,
                restore,
            });
        }
        for known in &snapshot.commits {
            let (seq, commit) = (known.seq, known.commit);
            self.handle(Event::Committed { seq, commit });
            // All its ranks have sealed a state of their own: none reads what it began from.
            let generation = commit.generation;
            self.handle(Event::Loaded { generation });
            let marks = [
                (known.pinned, Event::Pinned { seq }),
                (known.rejected.is_some(), Event::Rejected { seq }),
                (known.retired.is_some(), Event::Retired { seq }),
            ];
            for (_, event) in marks.into_iter().filter(|(marked, _)| *marked) {
                self.handle(event);
            }
        }
    }

    /// A snapshot was read in its turn: what it left out is over.
    pub fn forget(&mut self, snapshot: &Snapshot) {
        let kept: BTreeSet<u64> = snapshot.commits.iter().map(|c| c.seq).collect();
        self.commits
            .retain(|seq, c| !c.retired || kept.contains(seq));
        let claimed: BTreeSet<Digest> = snapshot.claims.iter().map(|(_, d)| *d).collect();
        self.claimed.retain(|digest| claimed.contains(digest));
    }

    fn with(&mut self, seq: u64, change: impl FnOnce(&mut Kept)) {
        if let Some(kept) = self.commits.get_mut(&seq) {
            change(kept);
        }
    }

    fn checked(&mut self, seq: u64, state: State) {
        let Some(kept) = self.commits.get_mut(&seq) else {
            return;
        };
        if let State::Damaged { why } = &state
            && !kept.rejected
            && !kept.rejecting
            && !kept.retired
        {
            kept.rejecting = true;
            let reason = why.clone();
            let entry = Body::Reject { seq, reason };
            self.effects.push_back(Effect::Append(entry));
        }
        kept.state = state;
    }

    fn decided(&mut self, decision: Decision) {
        for seq in decision.retire {
            match self.may_retire(seq) {
                Ok(good) => {
                    self.with(seq, |c| c.retiring = true);
                    let entry = Body::Retire { seq, good };
                    self.effects.push_back(Effect::Append(entry));
                    if self.flaws.skip_retire {
                        let needs = self.commits.get(&seq).and_then(|c| c.needs.clone());
                        for name in needs.into_iter().flatten() {
                            self.effects.push_back(Effect::Delete { name });
                        }
                    }
                }
                Err(why) => self.refused(format!("retire the commit in slot {seq}"), why),
            }
        }
        for item in decision.delete {
            match self.may_delete(&item) {
                Ok(()) => {
                    let name = item.name;
                    self.effects.push_back(Effect::Delete { name });
                }
                Err(why) => self.refused(format!("delete {}", item.name), why),
            }
        }
    }

    fn refused(&mut self, what: String, why: Refused) {
        self.effects.push_back(Effect::Refused { what, why });
    }

    /// The two that are counted on, the newest, of one that is.
    fn may_retire(&self, seq: u64) -> Result<Option<[u64; FLOOR]>, Refused> {
        let of = self.commits.get(&seq).ok_or(Refused::Unknown)?;
        if of.retired || of.retiring {
            return Err(Refused::Unknown);
        }
        if of.pinned {
            return Err(Refused::Pinned);
        }
        if self.in_use == Some(of.commit) {
            return Err(Refused::InUse);
        }
        if matches!(of.state, State::Unreadable { .. }) && !of.rejected {
            return Err(Refused::Unread);
        }
        if of.rejected {
            return Ok(None);
        }
        let others: Vec<u64> = self.verified().filter(|s| *s != seq).collect();
        match others.last_chunk() {
            Some(newest) => Ok(Some(*newest)),
            None => Err(Refused::Floor),
        }
    }

    /// Whether an item may go now.
    pub fn may_delete(&self, item: &Item) -> Result<(), Refused> {
        let mut retired = false;
        for kept in self.commits.values() {
            let gone = kept.retired && self.in_use != Some(kept.commit);
            let needs = kept.needs.as_ref().map(|names| names.contains(&item.name));
            match (gone, needs) {
                (true, Some(true)) => retired = true,
                (true, _) => {}
                (false, Some(true)) => return Err(Refused::Needed),
                (false, Some(false)) => {}
                (false, None) => return Err(Refused::Unread),
            }
        }
        let decided = self.claimed.contains(&item.generation);
        let fenced = decided && self.newest != Some(item.generation);
        match retired || fenced || self.flaws.skip_fence {
            true => Ok(()),
            false => Err(Refused::NotFenced),
        }
    }
}
