//! Reports of a member to its leader about its part in a generation, and the answers.

use super::{Ctx, Head, Job, REPEAT, SETTLED_REPEAT};
use crate::ids::{Boot, Digest, NodeId};
use crate::record::{Arbiter, Record};
use crate::wire::{JobMessage, Leave, MAX_LIST, Status};

impl Job {
    /// The launcher has ended the workers of the generation before: the leader of this one times the phase by it, and
    /// a start may wait for it.
    pub(super) fn old_stopped(&mut self, ctx: &mut Ctx<'_>, digest: Digest) {
        self.dropped_has_stopped(ctx, ctx.me(), digest, false);
        let began = self.local.as_ref().and_then(|l| l.reg.began.as_ref());
        let left = self.before.as_ref().filter(|b| b.digest == digest);
        let mut stopped_here = None;
        let to: Vec<NodeId> = match self.live() {
            // The others of a group that this node has left may wait for it.
            None if let Some(left) = left => left.voting().voters_and_members().collect(),
            // With another state directory than it had, this agent does not know who waits for these.
            None if self.before.is_none() && began.is_some_and(|b| b.digest == digest) => {
                ctx.peers.connected_nodes().collect()
            }
            // Of a node that was dropped any of them may have to know, for the leader may leave next.
            Some(Head { record, .. })
                if !record.has(ctx.me()) && record.members.len() <= MAX_LIST =>
            {
                stopped_here = Some(digest);
                record.members.iter().map(|m| m.node).collect()
            }
            Some(Head { record, .. }) if record.parent == digest => {
                record.leader().into_iter().collect()
            }
            _ => return,
        };
        self.stopped_here = stopped_here.or(self.stopped_here);
        self.say_stopped(ctx, digest, to);
    }

    /// A generation that was too short to run has dropped this node, and nothing of an earlier one runs here.
    pub(super) fn rested(&mut self, ctx: &mut Ctx<'_>) {
        let left = self.before.as_ref().filter(|b| b.record.is_short());
        let was = left.and_then(|b| b.record.member(ctx.me()).map(|m| m.launcher));
        let ended = was.is_some() && was == self.launcher() && !self.is_member(ctx);
        let ended = ended && self.local.as_ref().is_some_and(|l| l.ended);
        let left = left.map(|b| b.digest).filter(|_| ended);
        if let Some(digest) = left.filter(|d| self.stopped_here != Some(*d)) {
            self.old_stopped(ctx, digest);
        }
    }

    fn say_stopped(&mut self, ctx: &Ctx<'_>, digest: Digest, to: Vec<NodeId>) {
        let status = Status {
            digest,
            boot: ctx.cfg.boot,
            stopped: true,
            ..Status::default()
        };
        for node in to {
            self.send(ctx, node, JobMessage::Status(Box::new(status.clone())));
        }
    }

    /// One that was not there when the workers of a dropped node ended here.
    pub(super) fn repeat_stopped(&mut self, ctx: &Ctx<'_>, to: NodeId) {
        if let Some(digest) = self.stopped_here
            && self.live().is_none_or(|h| h.has(to))
        {
            self.say_stopped(ctx, digest, vec![to]);
        }
    }

    /// The generations that dropped this node are over. Any agent may begin the next life, and waits for its workers.
    pub(super) fn say_stopped_at_end(&mut self, ctx: &Ctx<'_>) {
        if let Some(digest) = self.stopped_here.filter(|_| self.live().is_none()) {
            self.say_stopped(ctx, digest, ctx.peers.connected_nodes().collect());
        }
    }

    /// The launcher here that took part in what has ended is gone: these may wait for its workers before they begin
    /// the next life, for the job may have ended while this agent was away.
    pub(super) fn say_ended_here(&mut self, ctx: &Ctx<'_>, to: impl Iterator<Item = NodeId>) {
        let ended = |b: &&Head| {
            let place = b
                .record
                .member(ctx.me())
                .filter(|m| m.state == ctx.cfg.state);
            self.live().is_none() && place.is_some_and(|m| Some(m.launcher) == self.died)
        };
        let Some(before) = self.before.as_ref().filter(ended) else {
            return;
        };
        let status = Status {
            digest: before.digest,
            boot: ctx.cfg.boot,
            stopped: true,
            gone: true,
            ..Status::default()
        };
        for node in to.collect::<Vec<_>>() {
            self.send(ctx, node, JobMessage::Status(Box::new(status.clone())));
        }
    }

    /// The acting leader says what it has of this member.
    pub(super) fn on_status_heard(
        &mut self,
        ctx: &mut Ctx<'_>,
        from: NodeId,
        (digest, boot, seq): (Digest, Boot, u64),
    ) {
        let head = self.head_digest();
        if digest != head && (boot, seq) == (Boot(0), 0) {
            if self.head.is_none() {
                // The disk here did not take that this node is a member of what the other leads.
                return self.send(ctx, from, JobMessage::Ask { have: Digest::ZERO });
            }
            // It asks about a generation that is over: its machine was suspended, and nothing told it since.
            return self.on_ask(ctx, from, digest);
        }
        let Some(mine) = self.member.as_mut().filter(|_| digest == head) else {
            return;
        };
        if mine.said.is_none_or(|(to, _)| to != from) {
            // It leads by now, as far as it can see, and asks.
            let asks = (boot, seq) == (Boot(0), 0);
            let status = asks.then(|| Box::new(mine.status.clone()));
            if let Some(status) = status.filter(|_| self.live().is_some_and(|h| h.record.has(from)))
            {
                self.send(ctx, from, JobMessage::Status(status));
            }
            return;
        }
        mine.settled = boot == ctx.cfg.boot && seq >= mine.status.seq;
        mine.changed |= seq == 0;
    }

    /// The leader tells of the generation that is known here. A status that it has not answered came before it knew it:
    /// where the job's log decides, members may read it first.
    pub(super) fn say_status_again(&mut self, leader: NodeId) {
        if let Some(mine) = &mut self.member {
            mine.changed |= !mine.settled && mine.said.is_some_and(|(to, _)| to == leader);
        }
    }

    /// The connection with an agent ended or stands anew: what it had heard it may have forgotten.
    pub(crate) fn link_changed(&mut self, node: NodeId) {
        if let Some(mine) = &mut self.member {
            mine.settled &= mine.said.is_none_or(|(to, _)| to != node);
            mine.changed |= mine.tells_all;
        }
    }

    pub(super) fn update(&mut self, current: bool, change: impl FnOnce(&mut Status)) {
        if current && let Some(mine) = &mut self.member {
            change(&mut mine.status);
            mine.changed = true;
        }
    }

    /// Whether the store decides, and this member has no way to it: its launcher has brought none, or it lost its
    /// lease and has read the log's tail no more.
    fn is_storeless(&self, ctx: &Ctx<'_>, record: &Record) -> bool {
        // A launcher that replaced the member's has brought the store again.
        let brought = self.local.as_ref().is_some_and(|l| l.store.is_some());
        let cut = self.member.as_ref().is_some_and(|mine| {
            mine.status.lease_lost && ctx.now >= mine.tail_seen + ctx.cfg.lease()
        });
        matches!(record.arbiter, Arbiter::Store(_)) && (cut || !brought)
    }

    pub(super) fn drive_member(&mut self, ctx: &mut Ctx<'_>) {
        let Some(head) = self.live() else {
            return;
        };
        let (record, voting) = (head.record.clone(), head.configuration().0.clone());
        let lead = self.acting_leader(ctx, &record);
        self.drive_vacant(ctx, &record);
        // This node's own voter acknowledges without a message.
        if self.ask_lease(ctx.cfg, ctx.me(), ctx.now) {
            self.lease_answered(ctx.me(), true, ctx.now);
        }
        self.count_away(ctx, &voting);
        self.drive_pending(ctx, &voting);
        self.drive_lease(ctx, &voting);
        self.drive_stopping(ctx);
        let leave = self.local.as_ref().and_then(|l| l.leave.clone());
        let cancel = self.local.as_ref().is_some_and(|l| l.cancel);
        if (cancel || leave.is_some()) && self.is_stranded(ctx) {
            let report = "left the job, and nothing runs here any more; the nodes that decide for \
                          the whole job cannot be reached, and count this one as lost";
            self.part_alone(report);
        }
        self.seq += 1;
        let seq = self.seq;
        self.explain_pause(ctx, &record);
        self.explain_short(ctx, &record);
        let storeless = self.is_storeless(ctx, &record);
        let unresponsive = self.is_unresponsive();
        // Nobody is left whom a status could move.
        let left = self.has_no_store_left(ctx.me(), ctx.peers.all);
        let Some(mine) = &mut self.member else {
            return;
        };
        if mine.status.pace != self.saves.meter.pace {
            mine.status.pace = self.saves.meter.pace;
            mine.changed = true;
        }
        if mine.status.storeless != storeless {
            mine.status.storeless = storeless;
            mine.changed = true;
        }
        if mine.status.unresponsive != unresponsive {
            mine.status.unresponsive = unresponsive;
            mine.changed = true;
        }
        let dark = super::apply::unreachable(ctx, &record);
        if mine.status.unreachable != dark || mine.status.cancel != cancel {
            mine.status.unreachable = dark;
            mine.status.cancel = cancel;
            mine.changed = true;
        }
        if mine.status.leave.is_some() != leave.is_some() {
            mine.changed = true;
        }
        mine.status.leave = leave.map(|(l, until)| Leave {
            grace_ms: u32::try_from(until.since(ctx.now).as_millis()).unwrap_or(u32::MAX),
            reason: l.reason,
        });
        // Without a way to the store it leads nothing, and its leader may have none either: all are told, also
        // that it has one again.
        let by_store = matches!(record.arbiter, Arbiter::Store(_));
        mine.tells_all |= by_store && (mine.status.gone || mine.status.lease_lost);
        let Some(lead) = lead.or(record.leader().filter(|_| mine.tells_all)) else {
            return;
        };
        let repeat = match left {
            true => SETTLED_REPEAT,
            false => mine.repeat(),
        };
        let due = match mine.said {
            Some((to, at)) if to == lead && !mine.changed => at + repeat,
            _ => ctx.now,
        };
        if ctx.now >= due {
            mine.said = Some((lead, ctx.now));
            mine.changed = false;
            mine.settled = false;
            mine.status.seq = seq;
            let status = Box::new(mine.status.clone());
            if mine.tells_all {
                for m in record.members.iter().filter(|m| m.node != lead) {
                    self.send(ctx, m.node, JobMessage::Status(status.clone()));
                }
            }
            self.send(ctx, lead, JobMessage::Status(status));
            self.wake_at(ctx.now + REPEAT, "say the status again");
        } else {
            self.wake_at(due, "say the status again");
        }
    }
}
