//! Orders of the leader, and how this node's launcher is told them (R17, R18, R20).

use std::collections::BTreeMap;

use super::{Ctx, Job, REPEAT};
use crate::agent::Notice;
use crate::barrier;
use crate::ids::{Digest, NodeId};
use crate::local::{Start, ToLauncher};
use crate::memory::Peers;
use crate::record::Record;
use crate::time::Time;
use crate::wire::{Action, JobMessage, Order, Status};

/// The newest order to each member, and when it was said.
#[derive(Clone, Debug, Default)]
pub(super) struct Orders(BTreeMap<NodeId, (Action, Time)>);

impl Orders {
    fn is(&self, node: NodeId, is: impl Fn(&Action) -> bool) -> bool {
        self.0.get(&node).is_some_and(|(action, _)| is(action))
    }

    /// An order that does not show in this member's status is said again at once.
    pub(super) fn say_again(&mut self, node: NodeId) {
        if let Some((_, said)) = self.0.get_mut(&node) {
            *said = Time::ZERO;
        }
    }

    /// Those to say again now, and when the next ones are due: what does not show in the member's status yet.
    fn due(
        &mut self,
        statuses: &BTreeMap<NodeId, Status>,
        now: Time,
    ) -> (Vec<(NodeId, Action)>, Option<Time>) {
        let (mut again, mut next) = (Vec::new(), None::<Time>);
        for (node, (action, said)) in &mut self.0 {
            let shows = statuses.get(node).is_some_and(|s| match action {
                Action::Run { attempt, .. } => s.started >= Some(*attempt) || s.stopped,
                Action::Preempt { .. } | Action::End { .. } => s.stopped,
            });
            if shows {
                continue;
            }
            if now >= *said + REPEAT {
                *said = now;
                again.push((*node, action.clone()));
            }
            let due = *said + REPEAT;
            next = Some(next.map_or(due, |t| t.min(due)));
        }
        (again, next)
    }
}

impl Job {
    pub(super) fn is_ordered(&self, node: NodeId, is: impl Fn(&Action) -> bool) -> bool {
        self.lead.as_ref().is_some_and(|l| l.orders.is(node, is))
    }

    pub(super) fn order(&mut self, ctx: &mut Ctx<'_>, node: NodeId, action: Action) {
        if let Some(lead) = &mut self.lead {
            lead.orders.0.insert(node, (action.clone(), ctx.now));
            self.say_order(ctx, node, action);
        }
    }

    fn say_order(&mut self, ctx: &mut Ctx<'_>, node: NodeId, action: Action) {
        self.seq += 1;
        let order = Order {
            digest: self.head_digest(),
            boot: ctx.cfg.boot,
            seq: self.seq,
            action,
        };
        self.send(ctx, node, JobMessage::Order(Box::new(order)));
        self.wake_at(ctx.now + REPEAT, "say the orders again");
    }

    pub(super) fn repeat_orders(&mut self, ctx: &mut Ctx<'_>) {
        let Some(lead) = &mut self.lead else { return };
        let (again, next) = lead.orders.due(&lead.statuses, ctx.now);
        for (node, action) in again {
            self.say_order(ctx, node, action);
        }
        if let Some(at) = next {
            self.wake_at(at, "say the orders again");
        }
    }

    pub(super) fn on_order(&mut self, ctx: &mut Ctx<'_>, from: NodeId, order: Order) {
        if order.digest != self.head_digest() {
            let have = self.head_digest();
            if from != ctx.me() {
                self.send(ctx, from, JobMessage::Ask { have });
                let about = order.digest;
                let past = self.before.as_ref().is_some_and(|b| b.digest == about);
                if !past {
                    self.came_early(ctx, from, about, JobMessage::Order(Box::new(order)));
                }
            }
            return;
        }
        let Some(head) = self.live() else { return };
        let record = head.record.clone();
        self.merge.is_here(from);
        // A deputy is obeyed only by those who miss the leader too (R18).
        if self.acting_leader(ctx, &record) != Some(from) {
            return;
        }
        let Some(mine) = &mut self.member else { return };
        if let Some((node, known)) = &mine.last_order
            && (known.boot, *node) == (order.boot, from)
            && order.seq <= known.seq
        {
            return;
        }
        mine.last_order = Some((from, order.clone()));
        self.obey(ctx, &record, order);
    }

    /// A member that misses the leader takes this node for it: that the generation ends it can hear from here.
    pub(super) fn pass_end_on(&mut self, ctx: &Ctx<'_>, to: NodeId) {
        let last = self.member.as_ref().and_then(|m| m.last_order.clone());
        if let Some((_, order)) = last
            && let Action::End { .. } = order.action
        {
            self.send(ctx, to, JobMessage::Order(Box::new(order)));
        }
    }

    fn obey(&mut self, ctx: &mut Ctx<'_>, record: &Record, order: Order) {
        let digest = order.digest;
        if let Action::Run { .. } = order.action {
            self.all_waited_for(ctx);
        }
        match order.action {
            // The leader times the whole change; the others keep what a successor would need.
            Action::Run { .. } if record.leader() != Some(ctx.me()) => {
                self.keep_own_times();
            }
            Action::Run { .. } => {}
            Action::Preempt { ref why, .. } => self.stop_begins(ctx, record, why),
            Action::End { .. } => self.change_begins(ctx.now, ctx.now),
        }
        let Some(mine) = &mut self.member else { return };
        match order.action {
            Action::Run {
                attempt,
                master_port,
                restart_count,
                why,
            } => {
                if mine.status.lease_lost || mine.status.stopped {
                    return;
                }
                if mine.status.started >= Some(attempt) {
                    mine.changed = true;
                    return;
                }
                let start = self.start_frame(ctx, record, digest, attempt, master_port);
                if let (Some(mut start), Some(mine)) = (start, &mut self.member) {
                    start.restart_count = restart_count;
                    start.why = why;
                    mine.pending = Some(start);
                }
            }
            Action::Preempt {
                signal,
                grace_ms,
                why,
            } => {
                mine.pending = None;
                let frame = ToLauncher::Preempt {
                    digest,
                    signal,
                    grace_ms,
                    why,
                };
                self.tell_launcher(frame);
            }
            Action::End { grace_ms, why } => {
                mine.pending = None;
                self.stop_launcher(ctx.now, digest, grace_ms, &why);
            }
        }
    }

    /// The workers here are told to stop in good order. The leader's people read of it when that was planned.
    fn stop_begins(&mut self, ctx: &Ctx<'_>, record: &Record, why: &str) {
        let was_known = self.stops();
        self.change_begins(ctx.now, ctx.now);
        if !was_known && self.stops() && record.leader() != Some(ctx.me()) {
            self.notice(Notice::Stopping {
                key: self.key.clone(),
                why: why.to_owned(),
            });
        }
    }

    pub(super) fn on_stop(&mut self, ctx: &mut Ctx<'_>, from: NodeId, message: barrier::ToNode) {
        let Some(record) = self.live().map(|h| h.record.clone()) else {
            return;
        };
        if self.acting_leader(ctx, &record) == Some(from) {
            if let Some(reason) = message.stop_reason() {
                self.stop_begins(ctx, &record, reason.as_str());
            }
            let confirmed = match message {
                barrier::ToNode::Confirm { digest, step, .. } => Some((digest, step)),
                _ => None,
            };
            self.at_barrier(ctx, barrier::NodeEvent::Leader(message));
            // Where nothing runs any more nobody has to save.
            let over = |m: &super::member::Mine| m.status.stopped || m.status.finished;
            if let Some((digest, step)) =
                confirmed.filter(|_| self.member.as_ref().is_some_and(over))
            {
                self.at_barrier(ctx, barrier::NodeEvent::Saves { digest, step });
            }
        }
    }

    pub(super) fn at_barrier(&mut self, ctx: &mut Ctx<'_>, event: barrier::NodeEvent) {
        let leader = self.live().and_then(|h| self.acting_leader(ctx, &h.record));
        let Some(mine) = &mut self.member else { return };
        // What is refused came late or twice, and nothing has changed.
        let _refused = mine.barrier.handle(event, ctx.now);
        mine.status.gate = mine.barrier.open();
        let mut effects = Vec::new();
        while let Some(effect) = mine.barrier.poll_effect() {
            effects.push(effect);
        }
        for effect in effects {
            match effect {
                barrier::NodeEffect::ToLauncher(frame) => self.tell_launcher(frame),
                barrier::NodeEffect::ToLeader(answer) => {
                    if let Some(leader) = leader {
                        self.send(ctx, leader, JobMessage::StopAnswer(answer));
                    }
                }
            }
        }
    }

    fn start_frame(
        &self,
        ctx: &Ctx<'_>,
        record: &Record,
        digest: Digest,
        attempt: u32,
        master_port: u16,
    ) -> Option<Start> {
        let (first_rank, slots) = record.ranks_of(ctx.me())?;
        let first = record.members.first()?;
        let over = self.local.as_ref().map_or(0, |local| local.reg.parity);
        let node_rank = record.members.iter().position(|m| m.node == ctx.me())?;
        Some(Start {
            digest,
            lineage: record.lineage(),
            attempt,
            number: record.number,
            node_rank: u32::try_from(node_rank).ok()?,
            nodes: u32::try_from(record.members.len()).ok()?,
            first_rank,
            slots,
            world: record.world(),
            master: std::net::SocketAddr::new(first.guard.ip(), master_port),
            master_guard: first.guard,
            master_launcher: first.launcher,
            restart_count: 0,
            restore: record.restore.map(|commit| commit.manifest),
            peers: Box::new(Peers::of(record, ctx.me(), ctx.cfg.memory, over)),
            why: String::new(),
        })
    }
}
