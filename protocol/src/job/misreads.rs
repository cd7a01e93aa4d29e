//! Nodes that cannot read what others can: each time it is a fault of the node, like a start that fails, and
//! after [`MISREADS`] of these in a row its launcher ends.

use super::{Ctx, Job};
use crate::ids::{Digest, LauncherId, NodeId};
use crate::local::short;
use crate::record::{CommitRef, Record};
use crate::wire::JobMessage;

/// So often a node may find damaged what others find whole. A generation that all its ranks have loaded ends
/// the row.
const MISREADS: u32 = 3;

/// The exit code of a launcher whose node cannot read the job's checkpoints.
const UNFIT: i32 = 1;

impl Job {
    /// The ranks of these could not load what others find whole: a fault of their nodes.
    pub(super) fn misread(
        &mut self,
        ctx: &mut Ctx<'_>,
        record: &Record,
        commit: &CommitRef,
        by: NodeId,
    ) {
        let digest = self.head_digest();
        for (node, rank, damaged) in self.complaints(record, commit) {
            let fresh = self.lead.as_mut().is_some_and(|l| l.misread.insert(node));
            if !fresh {
                continue;
            }
            self.strike(ctx, node);
            let row = 1 + self.misreads_of(node);
            if row >= MISREADS {
                let (step, by, why) = (commit.step, ctx.name(by), damaged.why);
                let what = match damaged.here {
                    true => format!(
                        "cannot read a checkpoint that others can. Rank {rank} could not load that of step \
                         {step}: {why}. What it could not read {by} can"
                    ),
                    false => format!(
                        "cannot read a checkpoint that is whole. Rank {rank} found that of step {step} damaged \
                         ({why}), and {by} has read all of it"
                    ),
                };
                let text = short(format!(
                    "this node is of no use to the job: for the {row}th time in a row its ranks {what}. Check this \
                     node's memory, its mount of the store and the disk of its --checkpoint-cache, and start it \
                     again: a checkpoint that its ranks load ends the row"
                ));
                if let Some(member) = record.member(node) {
                    let unfit = (member.launcher, text.clone());
                    self.saves.looks.unfit.insert(node, unfit);
                }
                self.send(ctx, node, JobMessage::Unfit { digest, text });
            }
        }
    }

    /// Why this launcher is not let in again: it was told to end, and has not heard it.
    pub(super) fn is_unfit(&self, node: NodeId, launcher: LauncherId) -> Option<&str> {
        let known = self.saves.looks.unfit.get(&node);
        known
            .filter(|(of, _)| *of == launcher)
            .map(|(_, why)| &**why)
    }

    fn misreads_of(&self, node: NodeId) -> u32 {
        let known = self.saves.looks.misreads.get(&node);
        known.copied().unwrap_or_default()
    }

    /// Members whose ranks could not load what others find whole, where that is why the generation ends.
    pub(super) fn misread_by(&self) -> Vec<NodeId> {
        let of = |l: &super::lead::Lead| l.misread.iter().copied().collect();
        self.lead.as_ref().map(of).unwrap_or_default()
    }

    /// A generation follows one that ended so. Everybody counts, for anybody may come to lead.
    pub(super) fn count_misreads(&mut self, ctx: &Ctx<'_>, nodes: &[NodeId]) {
        for node in nodes {
            let row = self.saves.looks.misreads.entry(*node).or_default();
            *row = row.saturating_add(1);
            if self.parked_ms(ctx, *node).is_none() {
                self.strike(ctx, *node);
            }
        }
    }

    /// All ranks of this generation have loaded what it begins with.
    pub(super) fn members_read(&mut self, record: &Record) {
        let misreads = &mut self.saves.looks.misreads;
        misreads.retain(|node, _| !record.has(*node));
    }

    /// By the leader's word, which counts: this node's launcher ends.
    pub(super) fn on_unfit(&mut self, ctx: &Ctx<'_>, from: NodeId, digest: Digest, text: String) {
        let head = self.live().filter(|h| h.digest == digest);
        if head.is_some_and(|h| self.acting_leader(ctx, &h.record) == Some(from)) {
            self.dismiss(UNFIT, text);
        }
    }
}
