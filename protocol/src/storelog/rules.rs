//! Rules on what a job keeps, as its launchers were started: in the log, so that a later pruner of the store
//! goes by the same.

use serde::{Deserialize, Serialize};

/// The most bytes of a metric's name.
pub const MAX_METRIC: usize = 128;

/// Which checkpoints stay besides those that are pinned or restored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rules {
    /// How many of the newest.
    pub last: u32,
    /// How many of the best.
    pub best: u32,
    /// By which metric.
    pub metric: String,
    /// Whether the highest are the best.
    pub highest: bool,
}
