//! Keeping checkpoints, on the socket: the agent of the job's leader asks what the store holds of the
//! checkpoints in the log, and which of them should go by the policy that the launcher was started
//! with.
//!
//! Nothing that a launcher says here deletes anything: the agent judges it against the log
//! ([`Keeper`](crate::checkpoint::Keeper)), and asks for each deletion by name.

use serde::{Deserialize, Serialize};

use super::{MAX_PATH, MAX_REASON, TooMuch};
use crate::checkpoint::{Standing, State};
use crate::ids::Digest;
use crate::storelog::{MAX_METRIC, Rules};

/// The most names in the store that one checkpoint needs.
pub const MAX_NEEDS: usize = 8;

/// The most bytes of a name in the store.
pub const MAX_NAME: usize = 160;

/// Checkpoints, or names, in one frame.
pub const MAX_KEPT: usize = 256;

/// From the agent: these checkpoints are in the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Review {
    /// Counts the questions; an answer names its own.
    pub round: u32,
    /// The newest generation, which may still commit what it has written.
    pub generation: Digest,
    /// The oldest first.
    pub commits: Vec<Standing>,
    /// Nothing follows this frame.
    pub last: bool,
}

/// From the agent: look again at a checkpoint that somebody found damaged, or could not read. Asked again while there
/// is no answer: what nobody asks for any more need not be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question {
    pub number: u64,
    pub manifest: Digest,
    /// The fault: what is named there is looked at first.
    pub why: String,
    /// All of it is to be read; else what is named, which a node could not read, and the rest at a glance.
    pub all: bool,
}

/// From the launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KeepNews {
    /// Where the store is, for commands; the agent never opens it.
    Place { store: String },
    /// The needs of a COMMIT of the log in the store, and how it was found at a glance.
    Looked {
        round: u32,
        seq: u64,
        needs: Vec<String>,
        state: State,
        /// It is retired, and nothing of it is there any more.
        gone: bool,
    },
    /// The decision on what should go now.
    Decided {
        round: u32,
        /// Slots of COMMITs.
        retire: Vec<u64>,
        left: Vec<Left>,
        last: bool,
    },
    /// The store does not answer, or not so that anything can be decided.
    Failed { round: u32, why: String },
    /// All bytes of a checkpoint were read.
    Checked {
        seq: u64,
        manifest: Digest,
        state: State,
    },
    /// The answer to the question of this number.
    LookedAgain { number: u64, state: State },
    /// It is being read, and so far that is: this grows while the reading goes on.
    LooksAgain { number: u64, read: u64 },
    /// The rules that this launcher was started with.
    Rules(Rules),
}

/// Something in the store that no checkpoint in force needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    pub name: String,
    /// The first bytes of the digest of the generation that wrote it.
    pub generation: [u8; 8],
}

impl Review {
    /// The question, in as many frames as it takes.
    pub fn all(round: u32, generation: Digest, commits: &[Standing]) -> Vec<Review> {
        let count = commits.len().div_ceil(MAX_KEPT).max(1);
        let frame = |at: usize| Review {
            round,
            generation,
            commits: (commits.iter().skip(at * MAX_KEPT).take(MAX_KEPT))
                .copied()
                .collect(),
            last: at + 1 == count,
        };
        (0..count).map(frame).collect()
    }
}

impl KeepNews {
    /// A decision, in as many frames as it takes.
    pub fn decided(round: u32, retire: &[u64], left: &[Left]) -> Vec<KeepNews> {
        let count = (retire.len().max(left.len())).div_ceil(MAX_KEPT).max(1);
        let frame = |at: usize| KeepNews::Decided {
            round,
            retire: (retire.iter().skip(at * MAX_KEPT).take(MAX_KEPT))
                .copied()
                .collect(),
            left: (left.iter().skip(at * MAX_KEPT).take(MAX_KEPT))
                .cloned()
                .collect(),
            last: at + 1 == count,
        };
        (0..count).map(frame).collect()
    }

    pub(super) fn check(&self) -> Result<(), TooMuch> {
        let fits = |what, len, limit| match len > limit {
            true => Err(TooMuch { what, len, limit }),
            false => Ok(()),
        };
        let state_fits = |state: &State| {
            let why = state.why().map_or(0, str::len);
            fits("the reason", why, MAX_REASON)
        };
        match self {
            KeepNews::Place { store } => fits("--store", store.len(), MAX_PATH),
            KeepNews::Rules(rules) => fits("--best-by", rules.metric.len(), MAX_METRIC),
            KeepNews::Looked { needs, state, .. } => {
                fits("a checkpoint's names", needs.len(), MAX_NEEDS)?;
                let longest = needs.iter().map(String::len).max();
                fits("a name", longest.unwrap_or(0), MAX_NAME)?;
                state_fits(state)
            }
            KeepNews::Decided { retire, left, .. } => {
                fits("what is to go", retire.len().max(left.len()), MAX_KEPT)?;
                let longest = left.iter().map(|left| left.name.len()).max();
                fits("a name", longest.unwrap_or(0), MAX_NAME)
            }
            KeepNews::Failed { why, .. } => fits("the reason", why.len(), MAX_REASON),
            KeepNews::Checked { state, .. } | KeepNews::LookedAgain { state, .. } => {
                state_fits(state)
            }
            KeepNews::LooksAgain { .. } => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec;
    use crate::local::{SaveAsk, SaveNews, ToAgent, ToLauncher};
    use crate::record::CommitRef;

    #[test]
    fn any_number_of_checkpoints_fits_into_frames() {
        for count in [0, 1, MAX_KEPT, 3 * MAX_KEPT + 1] {
            let standing = |seq| Standing {
                seq,
                commit: CommitRef {
                    generation: Digest([1; 32]),
                    number: u64::MAX,
                    step: u64::MAX,
                    manifest: Digest([2; 32]),
                },
                pinned: true,
                retired: false,
                rejected: false,
                in_use: true,
                verified: true,
            };
            let commits: Vec<Standing> = (0..count as u64).map(standing).collect();
            let frames = Review::all(1, Digest([3; 32]), &commits);
            let mut seen = Vec::new();
            let end = frames.len() - 1;
            for (at, review) in frames.into_iter().enumerate() {
                let frame = ToLauncher::Save(SaveAsk::Review(review.clone()));
                assert!(codec::encode_body(&frame).unwrap().len() < codec::MAX_FRAME / 2);
                assert_eq!(review.last, at == end);
                seen.extend(review.commits);
            }
            assert_eq!(seen, commits);

            let left = |seq: &Standing| Left {
                name: format!("{:0>MAX_NAME$}", seq.seq),
                generation: [9; 8],
            };
            let left: Vec<Left> = commits.iter().map(left).collect();
            let slots: Vec<u64> = commits.iter().map(|c| c.seq).take(3).collect();
            let (mut retired, mut named) = (Vec::new(), Vec::new());
            for news in KeepNews::decided(1, &slots, &left) {
                let frame = ToAgent::Save(SaveNews::Keep(news.clone()));
                assert!(frame.check().is_ok());
                assert!(codec::encode_body(&frame).unwrap().len() < codec::MAX_FRAME / 2);
                let KeepNews::Decided { retire, left, .. } = news else {
                    panic!("{news:?}");
                };
                retired.extend(retire);
                named.extend(left);
            }
            assert_eq!((retired, named), (slots, left));
        }
    }

    #[test]
    fn what_a_launcher_says_of_checkpoints_is_bounded() {
        let says = |news: KeepNews| ToAgent::Save(SaveNews::Keep(news)).check().is_ok();
        let looked = |needs: usize, name: usize, why: usize| {
            says(KeepNews::Looked {
                round: 1,
                seq: 1,
                needs: vec!["x".repeat(name); needs],
                state: State::Damaged {
                    why: "x".repeat(why),
                },
                gone: false,
            })
        };
        assert!(looked(MAX_NEEDS, MAX_NAME, MAX_REASON));
        assert!(!looked(MAX_NEEDS + 1, 1, 1));
        assert!(!looked(1, MAX_NAME + 1, 1));
        assert!(!looked(1, 1, MAX_REASON + 1));
        let why = "x".repeat(MAX_REASON + 1);
        let state = State::Unreadable { why };
        assert!(!says(KeepNews::LookedAgain { number: 1, state }));
        let store = "x".repeat(MAX_PATH + 1);
        assert!(!says(KeepNews::Place { store }));
        let rules = |metric: usize| Rules {
            last: 3,
            best: 0,
            metric: "x".repeat(metric),
            highest: false,
        };
        assert!(says(KeepNews::Rules(rules(MAX_METRIC))));
        assert!(!says(KeepNews::Rules(rules(MAX_METRIC + 1))));
        let why = "x".repeat(MAX_REASON + 1);
        assert!(!says(KeepNews::Failed { round: 1, why }));
        let retire = vec![1; MAX_KEPT + 1];
        assert!(!says(KeepNews::Decided {
            round: 1,
            retire,
            left: Vec::new(),
            last: true,
        }));
    }
}
