//! Launchers that nobody leads meet at the first of all agents. One whose machine has lost power keeps its connections
//! for half a minute: it is passed over once it has been asked for a word and has said none.

use std::collections::{BTreeMap, BTreeSet};

use super::{Ctx, Job};
use crate::ids::NodeId;
use crate::time::{Span, Time};

/// So many agents are asked for a word at once.
const MOST: usize = 64;

/// Agents that say nothing to the launcher that asks for a place.
#[derive(Clone, Debug, Default)]
pub(super) struct Unanswered {
    /// The agent that has the tickets, and when the first of them went there since it was heard last.
    ticket: Option<(NodeId, Time)>,
    /// The agents that are still to say that they are there, and since when.
    asked: Option<(BTreeSet<NodeId>, Time)>,
    /// Those that have not, and when they were asked last.
    silent: BTreeMap<NodeId, Time>,
}

fn heard(ctx: &Ctx<'_>, node: NodeId, since: Time) -> bool {
    ctx.peers.get(node).is_some_and(|p| p.seen >= since)
}

/// How long an answer may take.
fn patience(ctx: &Ctx<'_>) -> Span {
    Span(ctx.cfg.suspect_after.0 / 4)
}

impl Unanswered {
    pub(super) fn is_silent(&self, node: NodeId) -> bool {
        self.silent.contains_key(&node)
    }

    pub(super) fn asked(&self) -> impl Iterator<Item = NodeId> {
        let asked = self.asked.iter().flat_map(|(nodes, _)| nodes);
        asked.copied()
    }

    /// A ticket goes to this agent.
    pub(super) fn note_ticket(&mut self, ctx: &Ctx<'_>, to: NodeId) {
        let again = |(node, at): &(NodeId, Time)| *node == to && !heard(ctx, to, *at);
        if !self.ticket.as_ref().is_some_and(again) {
            self.ticket = Some((to, ctx.now));
        }
    }

    /// Takes stock of those that were asked for a word.
    fn judge(&mut self, ctx: &Ctx<'_>) {
        self.silent.retain(|node, at| !heard(ctx, *node, *at));
        if let Some((nodes, at)) = &mut self.asked {
            nodes.retain(|n| !heard(ctx, *n, *at));
        }
        let over = |(nodes, at): &mut (BTreeSet<NodeId>, Time)| {
            nodes.is_empty() || ctx.now >= *at + patience(ctx)
        };
        if let Some((nodes, at)) = self.asked.take_if(over) {
            self.silent.extend(nodes.into_iter().map(|n| (n, at)));
        }
    }

    /// When those that are silent are asked again: nobody else may have anything to say to them, nor they to anybody.
    fn again(&self, ctx: &Ctx<'_>) -> Option<Time> {
        let last = self.silent.values().max()?;
        Some(*last + ctx.cfg.suspect_after)
    }
}

impl Job {
    /// Where the agent that launchers meet at does not answer this one, it and those that come next are asked for a word.
    pub(super) fn pass_over_silent(&mut self, ctx: &Ctx<'_>) {
        self.applicant.unanswered.judge(ctx);
        let unanswered = &self.applicant.unanswered;
        if unanswered.asked.is_none() {
            let (due, ask) = match (self.unanswered_door(ctx), unanswered.again(ctx)) {
                (Some((door, at)), _) => (at + patience(ctx), self.before_me(ctx, door)),
                (None, Some(at)) => (at, unanswered.silent.keys().copied().collect()),
                (None, None) => return,
            };
            if ctx.now < due {
                return self.wake_at(due, "an agent that does not answer");
            }
            self.applicant.unanswered.asked = Some((ask, ctx.now));
        }
        if let Some((_, at)) = self.applicant.unanswered.asked {
            self.wake_at(at + patience(ctx), "agents that are asked for a word");
        }
    }

    /// The agent that this one asks for a place, if it has not answered, and since when.
    fn unanswered_door(&self, ctx: &Ctx<'_>) -> Option<(NodeId, Time)> {
        let ticket = self.applicant.unanswered.ticket;
        let ticket = ticket.filter(|(door, at)| *door != ctx.me() && !heard(ctx, *door, *at));
        let nobody_leads = self.live().is_none();
        ticket.filter(|(door, _)| nobody_leads && self.meeting_place(ctx) == Some(*door))
    }

    /// That agent, and others at which launchers would meet before they do here.
    fn before_me(&self, ctx: &Ctx<'_>, door: NodeId) -> BTreeSet<NodeId> {
        let own = self.meeting_order(ctx, ctx.me());
        let before = |n: &NodeId| {
            self.meeting_order(ctx, *n) < own && !self.applicant.unanswered.is_silent(*n)
        };
        let mut others: Vec<NodeId> = ctx.peers.connected_nodes().filter(before).collect();
        others.sort_unstable_by_key(|n| self.meeting_order(ctx, *n));
        others.truncate(MOST);
        others.into_iter().chain([door]).collect()
    }
}
