//! A job that no launcher takes part in any more: all were killed. It is kept for those that come back,
//! and ends after a while, or by a person's word, or when a start asks for another specification.

use super::plan::Assessment;
use super::{Ctx, Job};
use crate::ids::NodeId;
use crate::record::Record;
use crate::time::{Span, Time};
use crate::wire::JobMessage;

/// How long a job without launchers is kept while some member may only be cut off.
const UNSURE: Span = Span::from_secs(24 * 3_600);

/// Since when the acting leader sees no launcher of the job, and whether all are known to be dead.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deserted {
    pub(super) since: Time,
    sure: bool,
}

impl Job {
    /// Watches for a job without launchers.
    pub(super) fn drive_deserted(&mut self, ctx: &mut Ctx<'_>, record: &Record, a: &Assessment) {
        let here = !(a.survivors.is_empty() && a.away.is_empty() && a.leaving.is_empty());
        let dead = |node: &NodeId| {
            let gone = self.status_of(*node).is_some_and(|s| s.gone);
            let member = record.member(*node);
            gone || ctx.peers.lost(*node) == Some(true) || member.is_some_and(|m| self.replaced(m))
        };
        let sure = a.lost.iter().all(dead);
        let Some(lead) = &mut self.lead else { return };
        if here || !a.stuck.is_empty() {
            lead.deserted = None;
            return;
        }
        let deserted = lead.deserted.get_or_insert(Deserted {
            since: ctx.now,
            sure,
        });
        deserted.sure = sure;
        let at = deserted.since + Self::kept_for(ctx, *deserted);
        if ctx.now < at {
            self.wake_at(at, "a job without launchers");
        }
    }

    /// Its slots are kept for so long, too.
    fn kept_for(ctx: &Ctx<'_>, deserted: Deserted) -> Span {
        match deserted.sure {
            true => ctx.cfg.slot_lease,
            false => UNSURE,
        }
    }

    /// Whether the job is to end because nobody is left: its time is over, or it is held up by the
    /// specification of launchers that are all dead.
    pub(super) fn is_given_up(&self, ctx: &Ctx<'_>, record: &Record) -> bool {
        let Some(deserted) = self.lead.as_ref().and_then(|l| l.deserted) else {
            return false;
        };
        let over = ctx.now >= deserted.since + Self::kept_for(ctx, deserted);
        let mut tickets = self.desk.tickets.values();
        over || deserted.sure
            && tickets.any(|h| !h.ticket.spec.differences(&record.spec).is_empty())
    }

    /// Whether every launcher of the generation is known to be dead, so that another specification may
    /// follow.
    pub(super) fn has_died_out(&self) -> bool {
        let deserted = self.lead.as_ref().and_then(|l| l.deserted);
        deserted.is_some_and(|d| d.sure)
    }

    /// A person ends the job from a node without a launcher of it.
    ///
    /// # Errors
    /// Why nothing could be done. Nothing has changed.
    pub(crate) fn cancel_from_here(&mut self, ctx: &mut Ctx<'_>) -> Result<(), String> {
        let id = self.key.id.clone();
        let Some(head) = self.head.as_ref() else {
            let hellos = ctx.peers.map.values().filter(|p| p.connected);
            let mut adverts = hellos
                .filter_map(|p| p.hello.as_ref())
                .flat_map(|h| &h.jobs);
            let live = adverts.find(|a| a.key == self.key && a.belongs);
            let (Some(advert), Some(leader)) = (live, live.and_then(|a| a.leader)) else {
                return Err(format!("job {id} does not run, as far as this agent knows"));
            };
            let digest = advert.digest;
            self.send(ctx, leader, JobMessage::CancelAsk { digest });
            return Ok(());
        };
        let record = head.record.clone();
        if record.kind.is_terminal() {
            return Err(format!("job {id} is over: {}", self.why(ctx, &record)));
        }
        let digest = head.digest;
        match self.acting_leader(ctx, &record) {
            Some(leader) if leader == ctx.me() => self.on_cancel_ask(ctx, digest),
            Some(leader) if ctx.reachable(leader) => {
                self.send(ctx, leader, JobMessage::CancelAsk { digest });
            }
            _ => {
                return Err(format!(
                    "nobody that leads job {id} can be reached from this node: say it on one of its nodes"
                ));
            }
        }
        Ok(())
    }

    /// The leader is told that a person ends the job.
    pub(super) fn on_cancel_ask(&mut self, ctx: &Ctx<'_>, digest: crate::ids::Digest) {
        let is_head = digest == self.head_digest();
        if let Some(lead) = self.lead.as_mut().filter(|_| is_head) {
            lead.cancelled = true;
            self.wake_at(ctx.now, "a person ends the job");
        }
    }
}
