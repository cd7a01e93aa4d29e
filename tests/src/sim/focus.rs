//! Focus of a case: which faults it draws, and of how many nodes it is.

use serde::{Deserialize, Serialize};

use super::rng::Rng;
use super::setup::Fault;

/// Where a case should be at its most interesting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Focus {
    #[default]
    Everything,
    /// Disks that are replaced, with decisions under way (R5).
    Disks,
    /// Leaders that crash around their decision (R7).
    Leaders,
    /// Commits without a store while the leader loses its followers (R8).
    Commits,
    /// Stores whose puts land late (R12).
    LatePuts,
    /// Commits and claims that race in the store (R13).
    StoreRaces,
    /// Cut links under running workers (R16).
    Leases,
    /// Checkpoints by order, with leaders and agents that come and go (R20).
    Checkpoints,
    /// Workers that stand still.
    Hangs,
}

impl Focus {
    /// By the name that the command line and lists of seeds give it.
    pub fn named(name: &str) -> Option<Focus> {
        Some(match name {
            "everything" => Focus::Everything,
            "disks" => Focus::Disks,
            "leaders" => Focus::Leaders,
            "commits" => Focus::Commits,
            "late-puts" => Focus::LatePuts,
            "store-races" => Focus::StoreRaces,
            "leases" => Focus::Leases,
            "checkpoints" => Focus::Checkpoints,
            "hangs" => Focus::Hangs,
            _ => return None,
        })
    }
}

/// The faults that are drawn, as often as they are named.
pub(super) fn kinds(focus: Focus) -> &'static [&'static str] {
    match focus {
        Focus::Everything => &Fault::KINDS,
        Focus::Disks => &[
            "new disk",
            "new disk",
            "new disk",
            "cut both",
            "partition",
            "agent crash",
        ],
        Focus::Leaders => &[
            "agent crash",
            "agent crash",
            "torn write",
            "partition",
            "cut both",
            "worker fail",
            "launcher crash",
            "cut one way",
        ],
        Focus::Commits => &[
            "partition",
            "cut one way",
            "cut both",
            "slow link",
            "storm",
            "agent pause",
            "agent crash",
            "launcher crash",
        ],
        Focus::LatePuts => &[
            "store late put",
            "store late put",
            "store trouble",
            "launcher crash",
            "worker fail",
            "agent crash",
        ],
        Focus::StoreRaces => &[
            "store late put",
            "store trouble",
            "partition",
            "launcher crash",
            "worker fail",
            "cut both",
            "agent pause",
        ],
        Focus::Checkpoints | Focus::Hangs => &[
            "agent crash",
            "agent crash",
            "torn write",
            "launcher hiccup",
            "launcher hiccup",
            "agent pause",
            "cut both",
            "cut one way",
            "slow link",
            "storm",
            "worker fail",
            "drain",
            "late join",
        ],
        Focus::Leases => &[
            "partition",
            "cut one way",
            "cut both",
            "slow link",
            "storm",
            "flap",
        ],
    }
}

/// How many nodes there are.
pub(super) fn node_count(rng: &mut Rng, focus: Focus) -> usize {
    let sizes: &[usize] = match focus {
        Focus::Everything => &[1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 5, 6, 7],
        Focus::Disks | Focus::Leaders | Focus::Commits => &[3, 3, 3, 4, 5],
        Focus::LatePuts | Focus::StoreRaces => &[2, 3, 3, 4],
        Focus::Leases | Focus::Checkpoints | Focus::Hangs => &[2, 3, 3, 4, 5],
    };
    *rng.pick(sizes).unwrap_or(&3)
}
