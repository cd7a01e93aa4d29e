//! True contents of the log, by rules written down here a second time, and the invariants.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use muster_protocol::checkpoint::{Outcome, Save, Stage, ToNode};
use muster_protocol::record::{CommitRef, Record};
use muster_protocol::storelog::{Body, Entry};
use muster_protocol::{Digest, NodeId};

use super::disk::{Disk, Token, manifest_name};
use crate::sim::store::Store;

/// An invariant that does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// I6, I7, I8 of the protocol; `slot`, `stale`, `floor`, `live` of saving alone.
    pub name: &'static str,
    pub text: String,
}

#[derive(Clone, Debug)]
pub(super) struct Committed {
    pub commit: CommitRef,
    pub world: u32,
    pub retired: bool,
    pub rejected: bool,
    pub pinned: bool,
}

impl Committed {
    pub(super) fn in_force(&self) -> bool {
        !self.retired && !self.rejected
    }
}

#[derive(Debug, Default)]
pub(super) struct Truth {
    next: u64,
    pub latest: Option<(Arc<Record>, Digest)>,
    pub commits: BTreeMap<u64, Committed>,
    pub claims: u64,
    /// Decisions of leaders about each generation's saves.
    decided: BTreeMap<Digest, BTreeSet<ToNode>>,
    /// Commits that leaders told people of.
    pub told: Vec<(Save, Digest)>,
}

fn broken(name: &'static str, text: String) -> Result<(), Violation> {
    Err(Violation { name, text })
}

impl Truth {
    pub(super) fn said(&mut self, message: ToNode) {
        let all = self.decided.entry(message.save.generation).or_default();
        all.insert(message);
    }

    /// Whether a leader of the generation has decided that copies of this step are not needed.
    fn is_let_go(&self, token: &Token) -> bool {
        let all = self.decided.get(&token.generation);
        all.into_iter().flatten().any(|m| {
            let own = m.save.step == token.step
                && matches!(
                    m.stage,
                    Stage::Over(Outcome::Committed) | Stage::Over(Outcome::Dropped)
                );
            own || token.step < m.save.step && m.keep != Some(token.step)
        })
    }

    /// A sealed copy is about to be lost; `ended` where its generation is over on its node.
    pub(super) fn may_free(
        &self,
        token: &Token,
        disk: &Disk,
        ended: bool,
    ) -> Result<(), Violation> {
        let durable = |f: &super::disk::File| f.token == *token && f.synced && f.whole;
        if ended || self.is_let_go(token) || disk.files.values().any(durable) {
            return Ok(());
        }
        broken(
            "slot",
            format!("{token:?} is freed before it is durable or given up"),
        )
    }

    /// Reads on in the log.
    pub(super) fn read(&mut self, store: &Store, disk: &Disk) -> Result<(), Violation> {
        while let Some(bytes) = store.get(self.next + 1) {
            self.next += 1;
            let Ok(entry) = Entry::decode(bytes) else {
                return broken("log", format!("slot {} is not an entry", self.next));
            };
            self.entry(&entry, disk)?;
        }
        Ok(())
    }

    fn is_member(&self, node: NodeId) -> bool {
        self.latest.as_ref().is_some_and(|(r, _)| r.has(node))
    }

    fn newest(&self) -> Option<&Committed> {
        self.commits.values().rev().find(|c| c.in_force())
    }

    fn entry(&mut self, entry: &Entry, disk: &Disk) -> Result<(), Violation> {
        let seq = entry.seq;
        match &entry.body {
            Body::Claim(record) => {
                let follows = match &self.latest {
                    Some((latest, _)) => record.follows(latest),
                    None => record.number == 1,
                };
                if !follows {
                    return Ok(());
                }
                let due = self.newest().map(|c| c.commit);
                if record.restore != due {
                    let had = record.restore;
                    return broken("I6", format!("claim {seq} restores {had:?}, not {due:?}"));
                }
                if let Some(newest) = self.newest()
                    && let Some(why) = disk.damage(&newest.commit.manifest, newest.world)
                {
                    return broken("I6", format!("claim {seq} restores what is damaged: {why}"));
                }
                self.claims += 1;
                self.latest = Some((Arc::new((**record).clone()), record.digest()));
            }
            Body::Commit(commit) => {
                let Some((record, digest)) = &self.latest else {
                    return Ok(());
                };
                let again = |c: &Committed| {
                    c.commit.generation == commit.generation && c.commit.manifest == commit.manifest
                };
                let known = self.commits.values().any(again);
                if *digest != commit.generation || !record.has(entry.writer) || known {
                    return Ok(());
                }
                let world = record.world();
                if let Some(why) = disk.damage(&commit.manifest, world) {
                    return broken(
                        "I6",
                        format!("commit {seq} names what is not durable: {why}"),
                    );
                }
                let committed = Committed {
                    commit: *commit,
                    world,
                    retired: false,
                    rejected: false,
                    pinned: false,
                };
                self.commits.insert(seq, committed);
            }
            Body::Retire { seq: of, .. } => {
                let newer = self.commits.range(of + 1..).filter(|(_, c)| c.in_force());
                let enough = newer.count() >= 2;
                let member = self.is_member(entry.writer);
                let Some(of) = self.commits.get_mut(of) else {
                    return Ok(());
                };
                if member && !of.retired && !of.pinned && (enough || of.rejected) {
                    of.retired = true;
                    if of.rejected {
                        // It counted for nothing, however many are left.
                        return Ok(());
                    }
                    return self.floor(disk, &format!("RETIRE in slot {seq}"));
                }
            }
            Body::Reject { seq: of, .. } => {
                if self.is_member(entry.writer)
                    && let Some(of) = self.commits.get_mut(of)
                {
                    of.rejected = true;
                    let gone = of.retired || disk.is_rotten(&of.commit.manifest);
                    if !gone {
                        return broken("I7", format!("slot {seq} rejects a good checkpoint"));
                    }
                }
            }
            Body::Pin { seq: of } => {
                if let Some(of) = self.commits.get_mut(of) {
                    of.pinned = true;
                }
            }
            Body::Rules(_) => {}
            Body::Snapshot(snapshot) => {
                let said = snapshot.commits.iter().filter(|c| c.in_force());
                let force = self.commits.iter().filter(|(_, c)| c.in_force());
                let same = said
                    .map(|c| (c.seq, c.commit))
                    .eq(force.map(|(seq, c)| (*seq, c.commit)));
                if !same {
                    return broken("log", format!("the snapshot in slot {seq} says otherwise"));
                }
            }
            Body::Unpin { seq: of } => {
                if self.is_member(entry.writer)
                    && let Some(of) = self.commits.get_mut(of)
                {
                    of.pinned = false;
                }
            }
        }
        Ok(())
    }

    /// Never below two that are good.
    fn floor(&self, disk: &Disk, by: &str) -> Result<(), Violation> {
        let good =
            |c: &&Committed| c.in_force() && disk.damage(&c.commit.manifest, c.world).is_none();
        match self.commits.values().filter(good).count() {
            0 | 1 => broken(
                "floor",
                format!("{by} leaves fewer than two good checkpoints"),
            ),
            _ => Ok(()),
        }
    }

    /// Somebody is about to delete this.
    pub(super) fn may_delete(&self, name: &str, disk: &Disk) -> Result<(), Violation> {
        for (seq, c) in &self.commits {
            let needs = disk.needs(&c.commit.manifest).unwrap_or_default();
            if !c.retired && needs.iter().any(|n| n == name) {
                return broken(
                    "I7",
                    format!("{name} is deleted, and commit {seq} needs it"),
                );
            }
        }
        let latest = self.latest.as_ref().map(|(_, digest)| *digest);
        let item = disk.items().into_iter().find(|i| i.name == name);
        let Some(item) = item.filter(|i| Some(i.generation) == latest) else {
            return Ok(());
        };
        // Of the newest generation only what was retired: the rest may still be committed.
        let retired = |c: &Committed| {
            let own = manifest_name(&c.commit.manifest) == item.name;
            let needs = disk.needs(&c.commit.manifest).unwrap_or_default();
            c.retired && (own || needs.contains(&item.name))
        };
        match self.commits.values().any(retired) {
            true => Ok(()),
            false => broken(
                "I7",
                format!("{name} is deleted, and may still be committed"),
            ),
        }
    }

    /// After every event: what is in force can be restored, and what people were told is so.
    pub(super) fn check(&self, disk: &Disk) -> Result<(), Violation> {
        for (seq, c) in self.commits.iter().filter(|(_, c)| c.in_force()) {
            if let Some(why) = disk.damage(&c.commit.manifest, c.world) {
                return broken(
                    "I7",
                    format!("commit {seq} can no longer be restored: {why}"),
                );
            }
        }
        for (save, manifest) in &self.told {
            let is = |c: &Committed| {
                c.commit.manifest == *manifest && c.commit.generation == save.generation
            };
            if !self.commits.values().any(is) {
                return broken("stale", format!("{save} was called committed, and is not"));
            }
        }
        Ok(())
    }
}
