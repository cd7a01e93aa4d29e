//! The shared store: a row of objects that can be created once, a beacon, and the files of checkpoints. The state here
//! is the truth; when and whether anybody is told is the conductor's to decide.

use std::collections::{BTreeMap, BTreeSet};

use muster_protocol::checkpoint::{Save, Standing, State};
use muster_protocol::local::{KeepNews, Left, Review};
use muster_protocol::{Digest, StoreUuid};

use super::launcher::manifest;

pub const UUID: StoreUuid = StoreUuid([0x5a; 16]);

/// Checkpoints that retention leaves.
const KEPT: usize = 2;

#[derive(Clone, Debug, Default)]
pub struct Store {
    /// Each with the time when it came to be.
    slots: BTreeMap<u64, (u64, Vec<u8>)>,
    pub beacon: Option<u64>,
    /// Folders of checkpoints: the generation that wrote each, and the ranks whose files are there.
    data: BTreeMap<String, (Digest, BTreeSet<u32>)>,
    /// Manifests that were made, each with its folder, its ranks, and whether it is still there.
    manifests: BTreeMap<Digest, (String, u32, bool)>,
}

impl Store {
    /// Create-only: false when something is there, whatever it is.
    pub fn create(&mut self, slot: u64, bytes: &[u8], now: u64) -> bool {
        if self.slots.contains_key(&slot) {
            return false;
        }
        self.slots.insert(slot, (now, bytes.to_vec()));
        true
    }

    pub fn get(&self, slot: u64) -> Option<&[u8]> {
        self.get_as_of(slot, u64::MAX)
    }

    /// The content of a slot at this time.
    pub fn get_as_of(&self, slot: u64, at: u64) -> Option<&[u8]> {
        let there = self.slots.get(&slot).filter(|(created, _)| *created <= at);
        there.map(|(_, bytes)| bytes.as_slice())
    }

    /// The first slot that is empty.
    pub fn next(&self) -> u64 {
        (1..)
            .find(|s| !self.slots.contains_key(s))
            .unwrap_or(u64::MAX)
    }

    pub fn iter(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.slots.iter().map(|(s, (_, b))| (*s, b.as_slice()))
    }

    /// The file of a rank is durable; false where it was before.
    pub fn wrote(&mut self, save: &Save, rank: u32) -> bool {
        let folder = self.data.entry(save.folder());
        let (_, ranks) = folder.or_insert((save.generation, BTreeSet::new()));
        ranks.insert(rank)
    }

    /// The manifest of a save is durable.
    pub fn made(&mut self, save: &Save, world: u32) {
        let made = (save.folder(), world, true);
        self.manifests.insert(manifest(save), made);
    }

    pub fn delete(&mut self, name: &str) {
        self.data.remove(name);
        for (digest, made) in &mut self.manifests {
            made.2 &= name != manifest_name(digest);
        }
    }

    /// Whether all of a checkpoint is there; none of one that no launcher made.
    pub fn is_whole(&self, manifest: &Digest) -> Option<bool> {
        let (folder, world, there) = self.manifests.get(manifest)?;
        let files = self.data.get(folder);
        let all = files.is_some_and(|(_, ranks)| (0..*world).all(|rank| ranks.contains(&rank)));
        Some(*there && all)
    }

    /// The state of a checkpoint when all of it is read.
    pub fn state_of(&self, manifest: &Digest) -> State {
        match self.is_whole(manifest) {
            Some(true) => State::Verified,
            _ => State::Damaged {
                why: "a file is missing".to_owned(),
            },
        }
    }

    /// The answer of a launcher that looks at what is there and keeps the newest checkpoints.
    pub fn review(&self, review: &Review) -> Vec<KeepNews> {
        let round = review.round;
        let in_force = |c: &&Standing| !(c.retired || c.rejected);
        let mut news = Vec::new();
        let mut needed = BTreeSet::new();
        for of in &review.commits {
            let Some((folder, _, there)) = self.manifests.get(&of.commit.manifest) else {
                continue;
            };
            needed.insert(folder.clone());
            let state = self.state_of(&of.commit.manifest);
            news.push(KeepNews::Looked {
                round,
                seq: of.seq,
                needs: vec![folder.clone(), manifest_name(&of.commit.manifest)],
                state,
                gone: of.retired && !there && !self.data.contains_key(folder),
            });
        }
        let older = review.commits.iter().filter(in_force).rev().skip(KEPT);
        let retire: Vec<u64> = older
            .filter(|c| !c.pinned && !c.in_use)
            .map(|c| c.seq)
            .collect();
        let left = self.data.iter().filter(|(name, _)| !needed.contains(*name));
        let left = left.map(|(name, (generation, _))| {
            let mut first = [0; 8];
            first.copy_from_slice(&generation.0[..8]);
            Left {
                name: name.clone(),
                generation: first,
            }
        });
        let left: Vec<Left> = left.collect();
        news.extend(KeepNews::decided(round, &retire, &left));
        news
    }
}

fn manifest_name(digest: &Digest) -> String {
    format!("manifest/{}", digest.hex())
}
