//! The end of this node's part in the job: its launcher leaves, is told how the job ended, or goes alone because nobody
//! can decide that.

use super::member::Mine;
use super::{Ctx, Job};
use crate::local::ToLauncher;
use crate::record::{Arbiter, Cause, Kind, Record};
use crate::time::Span;
use crate::wire::Leave;

impl Job {
    /// This node's part in the job is to end.
    pub(crate) fn leave(&mut self, ctx: &mut Ctx<'_>, leave: Leave) {
        let until = ctx.now + Span::from_millis(leave.grace_ms.into());
        let Some(local) = &mut self.local else {
            return;
        };
        let sooner = local.leave.as_ref().is_none_or(|(_, t)| until < *t);
        if sooner {
            local.leave = Some((leave, until));
        }
        if !self.is_member(ctx) {
            self.dismiss(143, "left while still waiting to join".into());
        }
    }

    pub(crate) fn cancel(&mut self, ctx: &mut Ctx<'_>) {
        if let Some(local) = &mut self.local {
            local.cancel = true;
        }
        if !self.is_member(ctx) {
            self.dismiss(130, "stopped by the user".into());
        }
    }

    /// The job is over: the launcher exits with the job's code.
    pub(super) fn end_launcher(&mut self, ctx: &Ctx<'_>, record: &Record) {
        let leaving = self.local.as_ref().is_some_and(|l| l.leave.is_some());
        let (code, report) = match record.kind {
            Kind::End { cancelled: true } => (130, "stopped by the user".to_owned()),
            Kind::End { cancelled: false } => self.finished_with(record),
            Kind::Failed { code } => match record.cause {
                Cause::StartFailed { .. } if !self.unstarted.is_empty() => {
                    let text = "the job cannot start anywhere, and every try fails for one reason";
                    (code, format!("{text}: {}", self.unstarted))
                }
                _ => (code, self.why(ctx, record)),
            },
            Kind::Dormant if leaving => (143, "left the job; no node remains".into()),
            Kind::Dormant => (143, "every node left the job".into()),
            Kind::Tombstone { .. } => {
                // The launcher stays and joins the winner.
                let old = self.local.as_ref().and_then(|l| l.running);
                if let Some(old) = old {
                    self.stop_launcher(
                        ctx.now,
                        old,
                        0,
                        "another group of this job goes on; joining it",
                    );
                }
                return;
            }
            Kind::Next | Kind::Voters { .. } => return,
        };
        self.dismiss(code, report);
    }

    /// Whether nothing can be decided from here: the voters that are lost make up a majority.
    pub(super) fn is_stranded(&self, ctx: &Ctx<'_>) -> bool {
        let there = |n| n == ctx.me() || ctx.peers.lost(n).is_none();
        let voting = self.voting().filter(|r| r.arbiter == Arbiter::Members);
        voting.is_some_and(|r| !r.is_majority(there))
    }

    /// Nobody can decide that the job ends, or that this node leaves it: the user's word holds for
    /// this node, and should the others come back, they find it lost. One that leaves has its workers
    /// save and exit first, and hears this `report`.
    pub(super) fn part_alone(&mut self, report: &str) {
        let runs = self.member.as_ref().is_some_and(Mine::trains);
        let Some(local) = self.local.as_ref().filter(|l| l.over.is_none()) else {
            return;
        };
        if local.cancel {
            self.forget_ctrl_c(None);
            let report = "stopped by the user on this node alone: the nodes that decide for the \
                          whole job cannot be reached";
            self.dismiss(130, report.into());
        } else if !runs {
            self.dismiss(143, report.into());
        }
    }

    /// All that are left go. Those that cannot be reached may live, so the job is not over.
    pub(super) fn part_from_unreached(&mut self) {
        let report = "left the job, and nothing runs here any more; the job is kept for the nodes that cannot be reached";
        self.part_alone(report);
    }

    /// A launcher that wants to go, and that no generation counts on any more, may go at once.
    pub(super) fn dismiss_unwilling(&mut self, ctx: &Ctx<'_>) {
        let Some(local) = self
            .local
            .as_ref()
            .filter(|l| l.conn.is_some() && l.over.is_none())
        else {
            return;
        };
        let (cancel, leave) = (local.cancel, local.leave.is_some());
        if !(cancel || leave) || self.is_member(ctx) {
            return;
        }
        if cancel {
            self.dismiss(130, "stopped by the user".into());
        } else {
            self.dismiss(143, "left the job".into());
        }
    }

    pub(super) fn dismiss(&mut self, code: i32, report: String) {
        self.part(ToLauncher::End { code, report });
    }

    /// The last word to the launcher. Should it be on its way back to this agent just now, or lose
    /// the connection before it has read that, it hears it when it registers again.
    pub(super) fn part(&mut self, frame: ToLauncher) {
        self.tell_launcher(frame.clone());
        self.applicant.told.clear();
        if let Some(local) = &mut self.local {
            local.over = Some(frame);
        }
    }
}
