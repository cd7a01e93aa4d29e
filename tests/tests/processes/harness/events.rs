//! Notes of the workers of `worker.py`, sorted into generations.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Deserialize;

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Noted {
    pub(crate) event: String,
    /// Nanoseconds since 1970.
    pub(crate) t: u64,
    pub(crate) pid: i32,
    pub(crate) node: String,
    pub(crate) rank: u32,
    pub(crate) node_rank: u32,
    pub(crate) world: u32,
    pub(crate) restart: u32,
    pub(crate) generation: u64,
    /// The digest of the generation: other lives of the job have the same numbers.
    pub(crate) of: String,
    pub(crate) master: String,
    #[serde(default)]
    pub(crate) signal: i32,
    /// Of `stepper.py`.
    #[serde(default)]
    pub(crate) step: u64,
    /// Of `trainer.py`.
    #[serde(default)]
    pub(crate) digest: String,
}

/// All ranks of one generation, by rank.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) generation: u64,
    pub(crate) ranks: Vec<Noted>,
}

impl Group {
    pub(crate) fn rank0(&self) -> usize {
        index(&self.ranks[0].node)
    }

    /// The nodes, in the order of their ranks.
    pub(crate) fn nodes(&self) -> Vec<usize> {
        let mut nodes: Vec<usize> = self.ranks.iter().map(|r| index(&r.node)).collect();
        nodes.dedup();
        nodes
    }

    /// The first worker of a node.
    pub(crate) fn pid(&self, node: usize) -> i32 {
        let found = self.ranks.iter().find(|r| index(&r.node) == node);
        found.map(|r| r.pid).unwrap()
    }

    /// When the last rank began.
    pub(crate) fn began(&self) -> u64 {
        self.ranks.iter().map(|r| r.t).max().unwrap()
    }
}

/// The number in a node's name.
pub(crate) fn index(node: &str) -> usize {
    node.trim_start_matches('n').parse().unwrap()
}

/// Everything noted so far; a line that is still being written is left out.
pub(crate) fn read(path: &Path) -> Vec<Noted> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |at| &text[..at]);
    whole
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// The complete generations, oldest first. Fails where one breaks what ranks promise: exactly
/// 0..world, those of a node contiguous, one master that no other generation of one of its launchers has.
/// `launches`: when a launcher was started on which node, in this order.
pub(crate) fn groups(events: &[Noted], launches: &[(usize, u64)]) -> Vec<Group> {
    let launcher = |r: &Noted| {
        let is = |(node, at): &(usize, u64)| *node == index(&r.node) && *at <= r.t;
        launches.iter().rposition(is)
    };
    let mut by_key: BTreeMap<(u64, &str, &str), Vec<Noted>> = BTreeMap::new();
    for start in events.iter().filter(|e| e.event == "start") {
        let key = (start.generation, start.of.as_str(), start.master.as_str());
        let ranks = by_key.entry(key).or_default();
        // A start that was given up, as the leader's agent was killed, is tried again.
        ranks.retain(|r| (r.rank, &r.node) != (start.rank, &start.node));
        ranks.push(start.clone());
    }
    let mut masters: BTreeMap<&str, BTreeSet<Option<usize>>> = BTreeMap::new();
    let mut found = Vec::new();
    for ((generation, _, master), mut ranks) in by_key {
        ranks.sort_by_key(|r| r.rank);
        let world = ranks[0].world;
        assert!(
            ranks.iter().all(|r| r.world == world),
            "one generation, several world sizes: {ranks:?}"
        );
        let given: Vec<u32> = ranks.iter().map(|r| r.rank).collect();
        let unique: BTreeSet<u32> = given.iter().copied().collect();
        assert!(
            unique.len() == given.len() && given.iter().all(|r| *r < world),
            "generation {generation}: ranks {given:?} of {world}"
        );
        if given.len() < world as usize {
            continue;
        }
        assert!(
            ranks.is_sorted_by_key(|r| r.node_rank),
            "generation {generation}: the ranks of a node are not contiguous: {ranks:?}"
        );
        // Launchers that know nothing of each other may be given the same port.
        let mine: BTreeSet<_> = ranks.iter().map(launcher).collect();
        let before = masters.entry(master).or_default();
        assert!(
            before.is_disjoint(&mine),
            "generation {generation}: the master {master} was used before"
        );
        before.extend(mine);
        found.push(Group { generation, ranks });
    }
    found
}
