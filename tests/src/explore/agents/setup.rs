//! The clusters that are explored: the nodes, their story, and the deviations from it.

use muster_protocol::agent::Flaws;

/// The disk with which an agent starts again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disks {
    Same,
    /// Another state directory: it is another voter, and knows nothing.
    New,
    /// It left the generation meanwhile: its vote there is forfeited, and it may be taught the
    /// generation again.
    Left,
}

/// Something that happens to the nodes. They are named by their places in the first generation:
/// members by rank, then witnesses, then the others.
#[derive(Clone, Copy, Debug)]
pub enum Deed {
    LauncherDies(usize),
    LauncherComes(usize),
    /// Another launcher in the place of one that died.
    LauncherReplaced(usize),
    /// Agent and launcher at once, for good.
    NodeDies(usize),
    Restart(usize, Disks),
    /// The link between two nodes, for so many milliseconds.
    Cut(usize, usize, u64),
    /// A checkpoint is to be committed.
    Commit(usize),
}

/// Which deviations are tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Messages lost, late or repeated, and agents that crash, with any disk.
    Votes,
    /// Also messages that come in another order, writes that fail, agents that are down for a while,
    /// time that passes before anything arrives, and all that may happen to launchers, nodes and links.
    All,
}

/// A small cluster and its story.
#[derive(Clone, Debug)]
pub struct Setup {
    pub name: &'static str,
    pub nodes: usize,
    /// The first so many nodes have a launcher.
    pub launchers: usize,
    pub min: u16,
    pub max: u16,
    /// Milliseconds after the job has formed.
    pub script: Vec<(u64, Deed)>,
    /// How much virtual time is looked at from then on.
    pub horizon_ms: u64,
    pub suspect_ms: u64,
    /// A node whose agent keeps another one.
    pub other_suspect: Option<(usize, u64)>,
    pub flaws: Flaws,
}

impl Setup {
    /// A job of `launchers` among `nodes` agents.
    pub fn new(name: &'static str, nodes: usize, launchers: usize) -> Setup {
        Setup {
            name,
            nodes,
            launchers,
            min: 1,
            max: launchers as u16,
            script: Vec::new(),
            horizon_ms: 4_000,
            suspect_ms: 8_000,
            other_suspect: None,
            flaws: Flaws::default(),
        }
    }

    #[must_use]
    pub fn with(self, script: &[(u64, Deed)]) -> Setup {
        Setup {
            script: script.to_vec(),
            ..self
        }
    }
}
