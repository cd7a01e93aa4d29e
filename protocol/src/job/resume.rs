//! `muster job continue` (R9, R10): the majority of a generation is gone for good, and an operator,
//! who knows that, has the nodes that are left start a new lineage with the old one as its parent.
//!
//! This core cannot tell a dead node from one that cannot be reached. So the operator names every
//! node that is given up, and each node that changes over forfeits its vote on the old lineage for
//! good. A node that comes back with the old lineage is told, stops its workers, and joins the new one.

use serde::{Deserialize, Serialize};

use super::durable::EVERY_NUMBER;
use super::{Ctx, Job};
use crate::agent::Notice;
use crate::ids::{Digest, LauncherId, NodeId};
use crate::record::{Arbiter, Record};
use crate::wire::JobMessage;

/// The lineage from which the next birth on this agent goes on.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Continues {
    /// The newest generation of the lineage that is given up.
    pub parent: Digest,
    /// The nodes that were given up with it.
    pub without: Vec<NodeId>,
    /// The launcher that was here when the operator said so; none on a witness.
    pub launcher: Option<LauncherId>,
}

impl Job {
    /// An operator gives up the nodes named (by the beginning of an id, or a host name).
    ///
    /// # Errors
    /// Why it cannot be done here and now, and what to do instead. Nothing has changed.
    pub(crate) fn go_on_without(
        &mut self,
        ctx: &mut Ctx<'_>,
        named: &[String],
        confirmed: bool,
    ) -> Result<(), String> {
        let id = self.key.id.clone();
        let Some(head) = self.live() else {
            return Err(format!(
                "job {id} has no generation that could be continued"
            ));
        };
        let record = head.record.clone();
        // Another launcher of this node may have taken part: it is known to have ended.
        let place = record.member(ctx.me()).filter(|m| m.state == ctx.cfg.state);
        if place.is_none() || self.local.is_none() || self.waits_for_place(ctx) {
            return Err(format!(
                "this node is no member of the job's generation {}: continue it on one that is",
                record.number
            ));
        }
        if record.arbiter != Arbiter::Members {
            return Err(format!(
                "job {id} keeps its log in a shared directory: whoever reaches that goes on by itself"
            ));
        }
        let voting = head.configuration().0.clone();
        let gone = gone(ctx, &voting);
        if !self.is_stranded(ctx) {
            return Err(format!(
                "job {id} needs nobody's word: a majority of the nodes that decide is here, or has \
                 been silent for less than suspect_after"
            ));
        }
        let is_called = |node: NodeId, name: &str| {
            let host = ctx.peers.heard_host(node);
            !name.is_empty() && (node.hex().starts_with(name) || host == Some(name))
        };
        if let Some(name) = named
            .iter()
            .find(|name| !gone.iter().any(|n| is_called(*n, name)))
        {
            return Err(format!(
                "no lost node of this job is called {name}; lost are {}",
                ctx.names(&gone)
            ));
        }
        let unnamed: Vec<NodeId> = gone
            .iter()
            .copied()
            .filter(|n| !named.iter().any(|name| is_called(*n, name)))
            .collect();
        if !unnamed.is_empty() {
            return Err(format!(
                "{} cannot be reached either, and would be given up: name every such node with \
                 --dead, or bring it back",
                ctx.names(&unnamed)
            ));
        }
        match self.acting_leader(ctx, &record) {
            Some(leader) if leader != ctx.me() => {
                return Err(format!(
                    "{} leads what is left of job {id}: continue it there",
                    ctx.name(leader)
                ));
            }
            _ => {}
        }
        self.agreed(ctx, &record, &gone)?;
        if !confirmed {
            return Ok(());
        }
        let parent = self.head_digest();
        let others = record.members.iter().map(|m| m.node);
        let others = others.chain(voting.witnesses.iter().map(|w| w.node));
        for node in others.filter(|n| *n != ctx.me()).collect::<Vec<_>>() {
            let without = gone.clone();
            self.send(ctx, node, JobMessage::Continue { parent, without });
        }
        self.begin_anew(ctx, gone);
        Ok(())
    }

    /// Whether all members that are left are enough, and none of them reaches a node that is to be
    /// given up: that one is no dead node.
    fn agreed(&self, ctx: &Ctx<'_>, record: &Record, gone: &[NodeId]) -> Result<(), String> {
        let left = record.members.iter().filter(|m| !gone.contains(&m.node));
        let left: Vec<NodeId> = left.map(|m| m.node).collect();
        let min = record.spec.min_nodes;
        if left.len() < usize::from(min) {
            return Err(format!(
                "{} of the job's nodes are left, and --nnodes asks for at least {min}: start anew with \
                 another --rdzv-id",
                left.len()
            ));
        }
        for node in left.into_iter().filter(|n| *n != ctx.me()) {
            let status = self.lead.as_ref().and_then(|l| l.status(node));
            let Some(status) = status else {
                return Err(format!(
                    "{} has not said yet whom it reaches: try again in a moment",
                    ctx.name(node)
                ));
            };
            let reached = gone
                .iter()
                .find(|n| record.has(**n) && !status.unreachable.contains(n));
            if let Some(reached) = reached {
                return Err(format!(
                    "{} still reaches {}, which therefore is not dead: mend the network between \
                     this node and that one",
                    ctx.name(node),
                    ctx.name(*reached)
                ));
            }
        }
        Ok(())
    }

    /// The leader of what is left goes on by an operator's word.
    pub(super) fn on_continue(
        &mut self,
        ctx: &mut Ctx<'_>,
        from: NodeId,
        parent: Digest,
        without: Vec<NodeId>,
    ) {
        let Some(head) = self.live().filter(|h| h.digest == parent) else {
            return;
        };
        let record = head.record.clone();
        let voting = head.configuration().0.clone();
        let of_it = |n: NodeId| record.has(n) || voting.voters().any(|v| v.node == n);
        if of_it(from) && !without.contains(&ctx.me()) && self.is_stranded(ctx) {
            self.begin_anew(ctx, without);
        }
    }

    fn begin_anew(&mut self, ctx: &mut Ctx<'_>, without: Vec<NodeId>) {
        let Some(head) = self.live() else { return };
        let (parent, lineage) = (head.digest, head.record.lineage());
        self.notice(Notice::Warning {
            key: self.key.clone(),
            text: format!(
                "an operator gives up {}: the nodes that are left go on as a new lineage",
                ctx.names(&without)
            ),
        });
        self.durable.continues = Some(Continues {
            parent,
            without,
            launcher: self.launcher(),
        });
        self.durable.supersede(lineage, EVERY_NUMBER);
        self.leave_group(
            ctx,
            parent,
            "an operator has the job go on without the nodes that are lost",
        );
    }

    /// An operator's word is for those who heard it: when the last of them has left before anything
    /// was decided, whoever starts the job later forms it as always.
    pub(super) fn drive_continues(&mut self, ctx: &mut Ctx<'_>) {
        let stays = self.local.as_ref().is_some_and(|l| l.over.is_none());
        if stays || self.is_gathering() {
            self.continuing = true;
        } else if std::mem::take(&mut self.continuing) {
            self.forget_continue(ctx);
        }
    }

    /// A launcher registers. One that was not here when the operator spoke, after an agent's restart
    /// say, starts the job anew, unless there are others here who go on.
    pub(super) fn continue_for(&mut self, ctx: &mut Ctx<'_>, launcher: LauncherId) {
        let heard = self.durable.continues.as_ref().and_then(|c| c.launcher);
        let others = self.gathering.tickets.keys().any(|n| *n != ctx.me());
        if heard.is_some_and(|l| l != launcher) && !others {
            self.forget_continue(ctx);
        }
    }

    fn forget_continue(&mut self, ctx: &mut Ctx<'_>) {
        if self.durable.continues.take().is_some() {
            self.persist(ctx);
        }
    }

    /// Whether this generation of a lineage ended, or was given up; a peer that still holds it is told.
    pub(super) fn is_over(
        &mut self,
        ctx: &Ctx<'_>,
        from: NodeId,
        lineage: Digest,
        number: u64,
    ) -> bool {
        let mut ended = self.durable.ended.iter();
        let ended = ended.rfind(|e| e.lineage() == lineage).cloned();
        if let Some(record) = ended {
            if from != ctx.me() {
                self.send(ctx, from, JobMessage::Decided { record });
            }
            return true;
        }
        self.is_superseded(ctx, from, lineage, number)
    }

    /// Whether this generation of a lineage was given up; a peer that still holds it is told.
    pub(super) fn is_superseded(
        &mut self,
        ctx: &Ctx<'_>,
        from: NodeId,
        lineage: Digest,
        number: u64,
    ) -> bool {
        let known = self.durable.superseded(lineage, number);
        let Some(up_to) = known.or_else(|| ctx.past.over(&lineage, number)) else {
            return false;
        };
        if from != ctx.me() {
            self.repeat_cancel(ctx, from, lineage);
            self.send(ctx, from, JobMessage::Superseded { lineage, up_to });
        }
        true
    }

    /// Somebody asks here to be let in, perhaps for a lineage that was given up.
    pub(super) fn tell_superseded(&mut self, ctx: &Ctx<'_>, to: NodeId) {
        if self.live().is_none() && to != ctx.me() {
            for (lineage, up_to) in self.durable.superseded.clone() {
                self.send(ctx, to, JobMessage::Superseded { lineage, up_to });
            }
        }
    }

    /// Whether this node has left a lineage that was given up, and another one trains: that one is
    /// joined, and no third is begun with those who asked to be let into the one that was left.
    pub(super) fn joins_successor(&self, ctx: &Ctx<'_>) -> bool {
        !self.durable.superseded.is_empty()
            && self.durable.continues.is_none()
            && self.best_hint(ctx).is_some()
    }

    /// The lineage here was given up while this node was away, up to a generation. The node that said
    /// so may not know of a later one, which goes on.
    pub(super) fn on_superseded(&mut self, ctx: &mut Ctx<'_>, lineage: Digest, up_to: u64) {
        let meant = |r: &Record| r.lineage() == lineage && r.number <= up_to;
        let Some(head) = self.live().filter(|h| meant(&h.record)) else {
            return;
        };
        let mine = head.digest;
        self.durable.supersede(lineage, up_to);
        self.leave_group(ctx, mine, "the job goes on in another group; joining it");
    }
}

/// The members and voters that cannot be reached.
fn gone(ctx: &Ctx<'_>, record: &Record) -> Vec<NodeId> {
    let members = record.members.iter().map(|m| m.node);
    let all = members.chain(record.witnesses.iter().map(|w| w.node));
    let reached = |n: NodeId| ctx.reachable(n) && ctx.peers.lost(n).is_none();
    all.filter(|n| *n != ctx.me() && !reached(*n))
        .take(crate::wire::MAX_LIST)
        .collect()
}
