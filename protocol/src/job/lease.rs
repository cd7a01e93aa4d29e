//! The lease without which no worker of this node runs (R16).

use super::member::Mine;
use super::{Ctx, Job};
use crate::ids::{Digest, NodeId};
use crate::local::ToLauncher;
use crate::record::{Arbiter, Record};
use crate::time::Time;

impl Job {
    /// Generations whose lease this node asks its voters to acknowledge.
    pub(crate) fn lease_wanted(&self) -> Option<Digest> {
        let mine = self.member.as_ref()?;
        let head = self.live()?;
        (head.record.arbiter == Arbiter::Members && !mine.status.stopped).then_some(head.digest)
    }

    /// A voter acknowledged the heartbeat that was sent at `sent`.
    pub(crate) fn lease_granted(&mut self, from: NodeId, digest: Digest, sent: Time) {
        if digest == self.head_digest()
            && let Some(mine) = &mut self.member
        {
            let at = mine.acks.entry(from).or_default();
            *at = sent.max(*at);
        }
    }

    pub(super) fn tail_seen(&mut self, asked: Time) {
        if let Some(mine) = &mut self.member {
            mine.tail_seen = mine.tail_seen.max(asked);
        }
    }

    /// Until when this member may train.
    fn lease_end(ctx: &Ctx<'_>, record: &Record, mine: &Mine) -> Time {
        let from = match record.arbiter {
            Arbiter::Store(_) => mine.tail_seen,
            Arbiter::Members => {
                let mut times: Vec<Time> = mine.acks.values().copied().collect();
                times.sort_unstable_by(|a, b| b.cmp(a));
                let held =
                    |at: Time| record.is_majority(|n| mine.acks.get(&n).is_some_and(|t| *t >= at));
                // The older the time, the more voters have acknowledged one at least as new.
                let newest = times.partition_point(|at| !held(*at));
                times.get(newest).copied().unwrap_or(Time::ZERO)
            }
        };
        match from.max(mine.adopted) {
            // Never: also on a machine that has just booted.
            Time::ZERO => Time::ZERO,
            at => at + ctx.cfg.lease(),
        }
    }

    // ---- the leases of those who are no members any more ----

    /// A new head, `before` being set already: whoever was dropped and is not known to have stopped
    /// may go on until its lease ends. Who leads the new generation need not be who decided it, and
    /// the next one may follow at once: so every agent keeps this for itself.
    pub(super) fn note_dropped(&mut self, ctx: &Ctx<'_>, record: &Record) {
        let leases = self.leases_ended.take();
        let before = self.before.clone();
        let Some(before) = before.filter(|b| b.lineage() == record.lineage()) else {
            self.dropped.clear();
            return;
        };
        self.dropped
            .retain(|node, until| !record.has(*node) && ctx.now < *until);
        let gone = before.members.iter().map(|m| m.node);
        let gone = gone.filter(|n| *n != ctx.me() && !record.has(*n));
        let gone = gone.filter(|n| ctx.peers.lost(*n) != Some(true) && !self.stopped_for_good(*n));
        for node in gone.collect::<Vec<_>>() {
            let until = match &leases {
                // The voters told whom they had acknowledged: nobody else holds a lease. But whoever
                // was never heard in `before` may still train for the one before that.
                Some(leases) => {
                    let heard = before.number == 1 || self.status_of(node).is_some();
                    let older = (!heard).then_some(self.installed_at + ctx.cfg.suspect_after);
                    leases.get(&node).copied().max(older)
                }
                None => Some(ctx.now + ctx.cfg.suspect_after),
            };
            if let Some(until) = until {
                self.dropped.insert(node, until);
            }
        }
    }

    /// Until when a start is held back, for those who may still be training (R16).
    pub(super) fn held_until(&self, ctx: &Ctx<'_>) -> Option<Time> {
        let dropped = self.dropped.iter();
        let dropped = dropped.filter(|(node, _)| ctx.peers.lost(**node) != Some(true));
        let until = dropped.map(|(_, at)| *at).chain(self.forgotten).max();
        until.filter(|at| ctx.now < *at && !ctx.cfg.flaws.skip_r16)
    }

    /// Whether a start waits for this lease, so that it is worth asking for it more often.
    pub(crate) fn lease_urgent(&self) -> bool {
        self.member.as_ref().is_some_and(|m| m.pending.is_some())
    }

    /// Starts the workers that the leader ordered, once the lease to run them is held.
    pub(super) fn drive_pending(&mut self, ctx: &mut Ctx<'_>, record: &Record) {
        let Some(mine) = &self.member else { return };
        let Some(start) = mine.pending.clone() else {
            return;
        };
        if ctx.now >= Self::lease_end(ctx, record, mine) && !ctx.cfg.flaws.skip_r16 {
            return;
        }
        if let Some(mine) = &mut self.member {
            mine.pending = None;
            mine.attempt = start.attempt;
        }
        if let Some(local) = &mut self.local {
            local.running = Some(start.digest);
        }
        self.tell_launcher(ToLauncher::Start(start));
    }

    pub(super) fn drive_lease(&mut self, ctx: &mut Ctx<'_>, record: &Record) {
        if ctx.cfg.flaws.skip_r16 {
            return;
        }
        let Some(mine) = self.member.as_ref().filter(|m| m.trains()) else {
            return;
        };
        let (end, digest) = (Self::lease_end(ctx, record, mine), mine.status.digest);
        if ctx.now < end {
            return self.wake_at(end, "the lease ends");
        }
        if mine.status.lease_lost {
            return;
        }
        self.update(true, |s| s.lease_lost = true);
        if let Some(mine) = &mut self.member {
            mine.pending = None;
        }
        self.stop_launcher(digest, 0, "no majority of the job's nodes can be reached");
        let missing = self.missing_voters(ctx, record);
        let text = self.explain(ctx, &crate::wire::Wait::NoQuorum { missing });
        self.tell_waiting(text);
    }
}
