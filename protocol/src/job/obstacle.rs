//! The obstacles to an order to end a job: nobody is there who could decide that.

use std::collections::BTreeSet;

use super::cancel::Life;
use super::{Ctx, Job, REPEAT};
use crate::ids::{Digest, NodeId};
use crate::record::{Arbiter, Record};
use crate::time::Time;
use crate::wire::{Advert, JobMessage, MAX_LIST, Unable};

/// Why nobody is asked to end a life.
pub(super) enum Obstacle {
    InStore { generation: Digest, known: bool },
    Silent(String),
}

impl Life {
    /// Whom this node misses, if it has just said that it cannot have the life ended.
    fn misses(&self, node: NodeId, now: Time) -> Option<&[NodeId]> {
        let said = self.unable.get(&node);
        let said = said.filter(|(at, _)| now < *at + REPEAT.times(3));
        said.map(|(_, missed)| missed.as_slice())
    }
}

impl Job {
    /// Why nobody is there who could decide that a life ends.
    pub(super) fn obstacle(&self, ctx: &Ctx<'_>, lineage: Digest, life: &Life) -> Option<Obstacle> {
        let id = &self.key.id;
        let known = self.live().filter(|h| h.lineage() == lineage);
        // Those that are heard of a life that this node has no part in know more of it.
        let known =
            known.filter(|_| !life.heard || self.head_taken_part_in(ctx, lineage).is_some());
        let Some(head) = known else {
            if !life.heard {
                return Some(Obstacle::Silent(format!(
                    "the launcher of job {id} on this node is stopped, and no agent that this one sees knows what it \
                     took part in. If the job runs on other nodes, say `muster cancel {id}` on one of them"
                )));
            }
            let newest = || {
                let told = self.told_of(ctx, lineage);
                let number = told.map(|(_, a)| a.number).max();
                let told = self.told_of(ctx, lineage);
                told.filter(move |(_, a)| Some(a.number) == number && a.belongs)
            };
            let Some((_, advert)) = newest().next() else {
                let gone: Vec<NodeId> = life.tellers.iter().copied().collect();
                return Some(self.unreached(ctx, &gone));
            };
            // One that is not connected here may hear of it from those who name it.
            let stopped = |n: NodeId| ctx.peers.connected(n) && self.is_silent(ctx, n);
            let missed_by = |(node, advert): (NodeId, &Advert)| {
                let leader = advert.leader;
                let said = life.misses(node, ctx.now);
                let said = said.or_else(|| life.misses(leader?, ctx.now));
                said.map(<[_]>::to_vec)
                    .or_else(|| leader.filter(|n| stopped(*n)).map(|n| vec![n]))
            };
            let heard = newest().filter(|(n, a)| a.leader.is_some() && !self.is_silent(ctx, *n));
            let missed: Option<Vec<Vec<NodeId>>> = heard.map(missed_by).collect();
            if let Some(missed) = missed.filter(|m| !m.is_empty()) {
                let missed: BTreeSet<NodeId> = missed.into_iter().flatten().collect();
                return Some(self.unreached(ctx, &Vec::from_iter(missed)));
            }
            if newest().all(|(n, _)| self.is_silent(ctx, n)) {
                let tellers = life.tellers.iter().copied();
                let silent = tellers.filter(|n| self.is_silent(ctx, *n));
                return Some(self.unreached(ctx, &silent.collect::<Vec<_>>()));
            }
            return newest()
                .all(|(_, a)| a.leader.is_none())
                .then(|| Obstacle::InStore {
                    generation: advert.digest,
                    known: newest().any(|(_, a)| a.deserted),
                });
        };
        let record = &head.record;
        let leader = self.acting_leader(ctx, record);
        if leader.is_none() && matches!(record.arbiter, Arbiter::Store(_)) {
            return Some(Obstacle::InStore {
                generation: head.digest,
                known: self.has_no_store_left(ctx.me(), ctx.peers.all),
            });
        }
        if self.is_stranded(ctx) && self.others_may_decide(ctx) {
            return Some(self.unreached(ctx, &self.missed(ctx, record)));
        }
        if let Some(missed) = leader.and_then(|n| life.misses(n, ctx.now)) {
            return Some(self.unreached(ctx, missed));
        }
        let led = leader.is_some_and(|n| ctx.reachable(n));
        // Its launcher here ends its own part at least.
        let here = self.is_member(ctx);
        (!led && !here && !self.is_hopeless(ctx)).then(|| {
            let lead = leader.map_or_else(|| "its members".to_owned(), |n| ctx.name(n));
            Obstacle::Silent(format!(
                "nobody that leads job {id} can be reached from this node ({lead}): say `muster cancel {id}` on a node \
                 that reaches it"
            ))
        })
    }

    pub(super) fn unreached(&self, ctx: &Ctx<'_>, gone: &[NodeId]) -> Obstacle {
        Obstacle::Silent(self.do_not_answer(ctx, gone))
    }

    pub(super) fn do_not_answer(&self, ctx: &Ctx<'_>, gone: &[NodeId]) -> String {
        let id = &self.key.id;
        format!(
            "the agents of job {id} on {} do not answer: they are gone, stopped or cut off from this node. Start them \
             again (a stopped one: `kill -CONT`), or say `muster cancel {id}` on another node of the job",
            ctx.names(gone)
        )
    }

    /// Those that decide on this generation, and may only be cut off from here.
    fn missed(&self, ctx: &Ctx<'_>, record: &Record) -> Vec<NodeId> {
        let voting = self.voting().map_or(record, |r| r);
        let nodes = voting.voters().map(|v| v.node);
        let missed = nodes.filter(|n| ctx.peers.lost(*n) == Some(false));
        missed.take(MAX_LIST).collect()
    }

    /// Tells one that passes an order on that nobody whom this node sees can end the life: it leads it without a
    /// majority, or no member is left here that has a way to the store.
    pub(super) fn say_missed(&mut self, ctx: &Ctx<'_>, to: NodeId, record: &Record) {
        let stuck = match self.acting_leader(ctx, record) {
            None => record.has(ctx.me()),
            Some(leader) => {
                leader == ctx.me() && self.is_stranded(ctx) && self.others_may_decide(ctx)
            }
        };
        let nodes = self.missed(ctx, record);
        if stuck && to != ctx.me() && !nodes.is_empty() {
            let (lineage, why) = (record.lineage(), Unable::Misses { nodes });
            self.send(ctx, to, JobMessage::CancelUnable { lineage, why });
        }
    }

    /// Whether an agent that is asked each second says nothing: one that is stopped keeps its connection.
    pub(super) fn is_silent(&self, ctx: &Ctx<'_>, node: NodeId) -> bool {
        !ctx.was_there(node, ctx.now - ctx.cfg.suspect_after)
    }
}
