//! Launchers that nobody leads meet at the first of all agents. One whose machine has lost power keeps its connections
//! for half a minute: it is passed over once it has been asked for a word and has said none.

use std::collections::BTreeMap;

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
    /// The agents that are to say that they are there, and since when.
    asked: Option<(Vec<NodeId>, Time)>,
    /// Those that have not, and when they were asked.
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

    pub(super) fn asked(&self) -> &[NodeId] {
        self.asked.as_ref().map_or(&[], |(nodes, _)| nodes)
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
        let over = |(_, at): &mut (Vec<NodeId>, Time)| ctx.now >= *at + patience(ctx);
        if let Some((nodes, at)) = self.asked.take_if(over) {
            let silent = nodes.into_iter().filter(|n| !heard(ctx, *n, at));
            self.silent.extend(silent.map(|n| (n, at)));
        }
    }
}

impl Job {
    /// Where the agent that launchers meet at does not answer this one, it and those that come next are asked for a word.
    pub(super) fn pass_over_silent(&mut self, ctx: &Ctx<'_>) {
        self.applicant.unanswered.judge(ctx);
        let unanswered = &self.applicant.unanswered;
        if let Some((_, at)) = unanswered.asked {
            return self.wake_at(at + patience(ctx), "agents that are asked for a word");
        }
        let Some((door, at)) = unanswered.ticket else {
            return;
        };
        let waits = !heard(ctx, door, at) && door != ctx.me() && self.live().is_none();
        if !waits || self.meeting_place(ctx) != Some(door) {
            return;
        }
        let due = at + patience(ctx);
        if ctx.now >= due {
            let before = self.meeting_order(ctx, ctx.me());
            let others = ctx.peers.connected_nodes();
            let others = others.filter(|n| self.meeting_order(ctx, *n) < before);
            let mut others: Vec<NodeId> = others.collect();
            others.sort_unstable_by_key(|n| self.meeting_order(ctx, *n));
            others.truncate(MOST);
            self.applicant.unanswered.asked = Some((others, ctx.now));
            self.wake_at(ctx.now + patience(ctx), "agents that are asked for a word");
        } else {
            self.wake_at(due, "an agent that does not answer");
        }
    }
}
