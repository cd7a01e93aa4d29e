//! Messages to people about saves.

use std::fmt;

use super::super::{Cause, Save};
use crate::ids::{Digest, NodeId};
use crate::time::Span;

/// For people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    Opened {
        save: Save,
        cause: Cause,
    },
    Committed {
        save: Save,
        manifest: Digest,
    },
    GivenUp {
        save: Save,
        why: GivenUp,
    },
    /// Its time is over, and nobody knows yet whether it is committed.
    InDoubt {
        save: Save,
    },
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Notice::Opened { save, cause } => write!(f, "{save} begins ({})", cause.word()),
            Notice::Committed { save, .. } => write!(f, "{save} is committed"),
            Notice::GivenUp { save, why } => write!(f, "{save} is given up: {why}"),
            Notice::InDoubt { save } => write!(
                f,
                "{save} has not been committed in time; it may be once the store answers"
            ),
        }
    }
}

/// Why a save came to nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GivenUp {
    Late(Vec<Laggard>),
    Lost(NodeId),
    Failed {
        node: NodeId,
        why: String,
    },
    /// This rank has ended without it.
    RankEnded {
        rank: u32,
    },
    Manifest {
        why: String,
    },
    NotCommitted {
        why: String,
    },
    /// A newer one took its place.
    Superseded {
        by: u64,
    },
    /// Its nodes know that an earlier run of this leader gave it up.
    Before,
    /// The generation ended.
    Ended,
}

impl fmt::Display for GivenUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GivenUp::Late(laggards) => {
                f.write_str("its time is over")?;
                for (i, laggard) in laggards.iter().enumerate() {
                    write!(f, "{}{laggard}", if i == 0 { ": " } else { "; " })?;
                }
                Ok(())
            }
            GivenUp::Lost(node) => write!(f, "node {node} was lost before its files were durable"),
            GivenUp::Failed { node, why } => write!(f, "node {node} cannot write: {why}"),
            GivenUp::RankEnded { rank } => write!(
                f,
                "rank {rank} has ended with 0 before it saved that step, and no later step can be saved either"
            ),
            GivenUp::Manifest { why } => write!(f, "the manifest cannot be written: {why}"),
            GivenUp::NotCommitted { why } => write!(f, "the commit was refused: {why}"),
            GivenUp::Superseded { by } => write!(f, "step {by} is saved instead, which is urgent"),
            GivenUp::Before => f.write_str("it was before the agent restarted"),
            GivenUp::Ended => f.write_str("the generation ended"),
        }
    }
}

/// A node that a save waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Laggard {
    pub node: NodeId,
    pub what: Lags,
    /// How long it has said nothing new.
    pub since: Span,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lags {
    /// It has not answered.
    Silent,
    /// These ranks have not sealed a copy.
    NotSealed { ranks: Vec<u32> },
    /// So many bytes are left to write.
    Writing { left: u64 },
    /// It has no copy of the manifest.
    Manifest,
}

impl fmt::Display for Laggard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Laggard { node, what, since } = self;
        match what {
            Lags::Silent => write!(f, "node {node} has not answered for {since}"),
            Lags::NotSealed { ranks } => {
                write!(
                    f,
                    "on node {node} ranks {ranks:?} have not saved for {since}"
                )
            }
            Lags::Writing { left } => write!(f, "node {node} has {left} bytes left to write"),
            Lags::Manifest => write!(f, "node {node} has no copy of the manifest"),
        }
    }
}
