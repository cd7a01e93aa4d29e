//! Stops in good order: a drain, a join, a cancel, a merge. Every rank is told to save and leave, by a
//! stop step that all agree on (R20) where all take one, else by the agreed signal.

use super::plan::Assessment;
use super::{Ctx, Job};
use crate::agent::Notice;
use crate::barrier;
use crate::checkpoint::{Cause, Choice};
use crate::control::Reason;
use crate::ids::NodeId;
use crate::record::Record;
use crate::time::{Span, Time};
use crate::wire::{Action, JobMessage};

/// Of a notice's time, what is kept back for the decision and the way out.
const RESERVE: Span = Span::from_millis(500);

/// Workers may take so long to end before anybody is told.
const SLOW: Span = Span::from_secs(4);

const STOPPED_BY_USER: &str = "the user stops the job";

/// Why a generation should stop in good order, and how long that may take.
struct Wish {
    why: String,
    grace: Span,
    reason: Reason,
}

/// A stop that was announced: a drain, a join, a cancel.
#[derive(Clone, Debug)]
pub(super) struct Planned {
    why: String,
    since: Time,
    deadline: Time,
    /// Those that have ended were told for whom they wait.
    told_slow: bool,
    reason: Reason,
    /// The choice of what is saved, where one was made.
    pub(super) choice: Option<Choice>,
    /// The ranks were told by the agreed signal.
    signalled: bool,
}

impl Planned {
    /// Why what the ranks save now is saved.
    pub(super) fn cause(&self) -> Cause {
        match self.reason {
            Reason::Join => Cause::Join,
            _ => Cause::Preemption,
        }
    }
}

/// A ticket is renewed within this time of the answer that its node lacks a link to a member.
const LINKS_TOLD: Span = Span::from_millis(50);

impl Job {
    pub(super) fn drive_planned(&mut self, ctx: &mut Ctx<'_>, record: &Record, a: &Assessment) {
        if record.is_short() {
            // Nothing runs.
            if self.reason_to_stop(ctx, record, a).is_some() {
                self.decide(ctx, record);
            }
            return;
        }
        let Some(lead) = &self.lead else { return };
        if lead.planned.is_none() {
            let Some(wish) = self.reason_to_stop(ctx, record, a) else {
                return;
            };
            self.begin_stop(ctx, record, a, wish);
        } else if a.cancel {
            self.hurry_stop(ctx, record);
        }
        self.drive_barrier(ctx, record, a);
        if self.all_stopped(record, a) {
            return self.decide(ctx, record);
        }
        self.tell_slow(ctx, record, a);
        let planned = self.lead.as_ref().and_then(|l| l.planned.as_ref());
        if let Some(due) = planned.map(|p| p.deadline + RESERVE) {
            if ctx.now >= due {
                // A node that heard of no stop, or of no confirmation, has none of its own.
                self.end(ctx, record, a);
            } else {
                self.wake_at(due, "nodes that do not stop");
            }
        }
    }

    /// Where the workers of some members take long to end, the others are told for whom they wait. A node whose workers
    /// run says so itself.
    fn tell_slow(&mut self, ctx: &mut Ctx<'_>, record: &Record, a: &Assessment) {
        let planned = self.lead.as_ref().and_then(|l| l.planned.as_ref());
        let ending = self.lead.as_ref().is_some_and(|l| l.ending.is_some());
        let Some(planned) = planned.filter(|p| !p.told_slow && !ending) else {
            return;
        };
        let (due, left) = (planned.since + SLOW, planned.deadline.since(ctx.now));
        if ctx.now < due {
            return self.wake_at(due, "workers that take long to end");
        }
        let there =
            |n: &NodeId| !(a.lost.contains(n) || a.away.contains(n) || a.unresponsive.contains(n));
        let members = record.members.iter().map(|m| m.node).filter(there);
        let (ended, slow): (Vec<NodeId>, Vec<NodeId>) =
            members.partition(|n| self.stopped_for_good(*n));
        if ended.is_empty() || slow.is_empty() || left < Span::from_millis(1_000) {
            return;
        }
        let text = format!(
            "waiting for the workers on {} to end: they have {} s left",
            ctx.names(&slow),
            left.as_millis().div_ceil(1_000)
        );
        let digest = self.head_digest();
        for node in ended {
            let text = text.clone();
            self.send(ctx, node, JobMessage::SaveSaid { digest, text });
        }
        if let Some(planned) = self.lead.as_mut().and_then(|l| l.planned.as_mut()) {
            planned.told_slow = true;
        }
    }

    /// Members all of whose ranks have exited with 0.
    fn finished(&self, record: &Record) -> impl Iterator<Item = NodeId> {
        let finished = |n: &NodeId| self.status_of(*n).is_some_and(|s| s.finished);
        record.members.iter().map(|m| m.node).filter(finished)
    }

    /// Why the generation should stop in good order, and how long that may take.
    fn reason_to_stop(
        &mut self,
        ctx: &mut Ctx<'_>,
        record: &Record,
        a: &Assessment,
    ) -> Option<Wish> {
        if a.cancel {
            return Some(Wish {
                why: STOPPED_BY_USER.into(),
                grace: record.spec.stop_grace(),
                reason: Reason::Interrupted,
            });
        }
        if let Some((node, leave)) = a.leaving.iter().min_by_key(|(_, l)| l.grace_ms) {
            let given = Span::from_millis(leave.grace_ms.into());
            let kept = RESERVE.min(Span(given.0 / 4));
            let why = format!("{} leaves: {}", ctx.name(*node), leave.reason);
            return Some(Wish {
                why,
                grace: Span(given.0.saturating_sub(kept.0)),
                reason: Reason::Drain,
            });
        }
        if self.merge.taking_in().is_some() {
            return Some(Wish {
                why: "another group of this job joins".into(),
                grace: record.spec.stop_grace(),
                reason: Reason::Join,
            });
        }
        if self.finished(record).next().is_some() {
            // It is about to end: whoever comes now is of the next life.
            return None;
        }
        if !(a.away.is_empty() && a.unresponsive.is_empty()) {
            // The next generation would be without them, and may be with them soon.
            return None;
        }
        let room = a.room(record);
        let joiners = self.joiners(ctx, record, room);
        let (first, newest) = (self.gathering.first(), self.gathering.last_new);
        if joiners.is_empty() {
            return None;
        }
        if self.lacks_votes(ctx) {
            // What stops for them could not go on.
            return None;
        }
        let quiet = newest + record.spec.join_quiet();
        let latest = first.unwrap_or(newest) + record.spec.join_max();
        // Which links a node lacks it tells once it has heard of the generation that it joins.
        let due = match joiners.len() < room {
            true => quiet.min(latest),
            false => newest + LINKS_TOLD,
        };
        if ctx.now < due {
            self.wake_at(due, "quiet before taking nodes in");
            return None;
        }
        let nodes: Vec<NodeId> = joiners.iter().map(|m| m.node).collect();
        Some(Wish {
            why: format!("{} joins", ctx.names(&nodes)),
            grace: record.spec.stop_grace(),
            reason: Reason::Join,
        })
    }

    fn begin_stop(&mut self, ctx: &mut Ctx<'_>, record: &Record, a: &Assessment, wish: Wish) {
        let Wish { why, grace, reason } = wish;
        self.change_begins(ctx.now, ctx.now);
        let chosen = match reason {
            Reason::Drain => self.choose_save(ctx, record, a, grace),
            _ => None,
        };
        let Some(lead) = &self.lead else { return };
        let steps = record
            .members
            .iter()
            .filter(|m| !a.lost.contains(&m.node))
            .all(|m| lead.takes_stop_steps(m.node));
        let chosen = chosen.filter(|_| steps);
        let choice = chosen.as_ref().map(|c| c.choice);
        let fresh = choice.is_none_or(|c| c == Choice::Fresh);
        if steps && fresh {
            self.begin_barrier(record);
        } else {
            // Whoever waits for a checkpoint's step hears the signal only once it goes on.
            self.at_lead_barrier(ctx, Some(barrier::LeaderEvent::GiveUp));
        }
        if let Some(lead) = &mut self.lead {
            lead.planned = Some(Planned {
                why: why.clone(),
                since: ctx.now,
                deadline: ctx.now + grace,
                told_slow: false,
                reason,
                choice,
                signalled: false,
            });
        }
        self.notice(Notice::Stopping {
            key: self.key.clone(),
            why: why.clone(),
        });
        if let Some(chosen) = chosen {
            self.tell_all(ctx, record, format!("{why}: {}", chosen.why));
        }
        if !fresh {
            // Nothing that they could save would be there in time: what they do now is done again.
            let grace = grace.min(record.spec.loss_grace());
            self.order_signal(ctx, record, grace);
        } else if steps {
            self.drain_by(ctx, ctx.now + grace, reason);
        } else {
            self.order_signal(ctx, record, grace);
        }
    }

    /// Has the ranks agree on a step at which they stop, in time for what they save there.
    fn drain_by(&mut self, ctx: &mut Ctx<'_>, deadline: Time, reason: Reason) {
        let event = barrier::LeaderEvent::Drain {
            // The nodes raise it to what their ranks can still stop at.
            step: 1,
            deadline,
            save_time: Span(deadline.since(ctx.now).0 / 2),
            reason,
        };
        self.at_lead_barrier(ctx, Some(event));
    }

    /// The user stops a job that stops already, for a node that leaves or one that joins: no worker has longer than
    /// the user gave it.
    fn hurry_stop(&mut self, ctx: &mut Ctx<'_>, record: &Record) {
        let grace = record.spec.stop_grace();
        let planned = self.lead.as_mut().and_then(|l| l.planned.as_mut());
        let Some(planned) = planned.filter(|p| ctx.now + grace < p.deadline) else {
            return;
        };
        planned.deadline = ctx.now + grace;
        planned.why = STOPPED_BY_USER.into();
        let (signalled, reason) = (planned.signalled, planned.reason);
        if signalled {
            self.order_signal(ctx, record, grace);
        } else {
            self.drain_by(ctx, ctx.now + grace, reason);
        }
    }

    /// The leader's part of this generation's barriers, from now on.
    pub(super) fn begin_barrier(&mut self, record: &Record) {
        let digest = self.head_digest();
        let heard = self.member.as_ref().map_or(0, |m| m.barrier.heard());
        let nodes = record.members.iter().map(|m| m.node);
        let Some(lead) = &mut self.lead else { return };
        let whole = lead.whole;
        lead.barrier.get_or_insert_with(|| match whole {
            true => barrier::Leader::new(digest, nodes, heard),
            false => barrier::Leader::taking_over(digest, nodes, heard),
        });
    }

    /// Ranks of a member wait at a step that is not decided as far as it knows.
    pub(super) fn member_gated(&mut self, ctx: &mut Ctx<'_>, node: NodeId, number: u32) {
        let Some(record) = self.live().map(|h| h.record.clone()) else {
            return;
        };
        let ending = self.lead.as_ref().is_none_or(|l| l.ending.is_some());
        if ending || ctx.cfg.flaws.skip_r20 {
            return;
        }
        self.begin_barrier(&record);
        let barrier = number;
        self.at_lead_barrier(ctx, Some(barrier::LeaderEvent::Gated { node, barrier }));
    }

    fn order_signal(&mut self, ctx: &mut Ctx<'_>, record: &Record, grace: Span) {
        let planned = self.lead.as_mut().and_then(|l| l.planned.as_mut());
        let planned = planned.map(|p| {
            p.signalled = true;
            (p.why.clone(), p.reason == Reason::Interrupted)
        });
        let (why, interrupted) = planned.unwrap_or_default();
        let grace_ms = u32::try_from(grace.as_millis()).unwrap_or(u32::MAX);
        let signal = record.spec.signal_to_stop(interrupted);
        for m in &record.members {
            let why = why.clone();
            let action = Action::Preempt {
                signal,
                grace_ms,
                why,
            };
            self.order(ctx, m.node, action);
        }
    }

    pub(super) fn on_stop_answer(
        &mut self,
        ctx: &mut Ctx<'_>,
        from: NodeId,
        message: barrier::ToLeader,
    ) {
        self.at_lead_barrier(ctx, Some(barrier::LeaderEvent::Message { from, message }));
    }

    /// Hands an event, or the time, to the barrier, and carries its effects out.
    pub(super) fn at_lead_barrier(
        &mut self,
        ctx: &mut Ctx<'_>,
        event: Option<barrier::LeaderEvent>,
    ) {
        let Some(barrier) = self.lead.as_mut().and_then(|l| l.barrier.as_mut()) else {
            return;
        };
        match event {
            // What is refused came late or twice, and nothing has changed.
            Some(event) => drop(barrier.handle(event, ctx.now)),
            None => barrier.handle_timeout(ctx.now),
        }
        let mut effects = Vec::new();
        while let Some(effect) = barrier.poll_effect() {
            effects.push(effect);
        }
        let next = barrier.poll_timeout();
        for effect in effects {
            match effect {
                barrier::LeaderEffect::Send { to, message } => {
                    self.send(ctx, to, JobMessage::Stop(message));
                }
                barrier::LeaderEffect::Decided { outcome, .. }
                    if self.lead.as_ref().is_some_and(|l| l.planned.is_none()) =>
                {
                    self.checkpoint_decided(outcome);
                }
                barrier::LeaderEffect::Decided {
                    outcome: barrier::Outcome::Cancelled(_),
                    ..
                } => self.fall_back_to_signal(ctx),
                barrier::LeaderEffect::Resumed {
                    step,
                    reason: Reason::Checkpoint,
                } => self.checkpoint_resumed(ctx.now, step),
                barrier::LeaderEffect::Resumed { .. } => {}
                barrier::LeaderEffect::Decided { .. } | barrier::LeaderEffect::Shared { .. } => {}
            }
        }
        if let Some((at, why)) = next {
            self.wake_at(at, why);
        }
    }

    /// The ranks did not agree on a step in time: they are told by the signal instead.
    fn fall_back_to_signal(&mut self, ctx: &mut Ctx<'_>) {
        let Some(record) = self.live().map(|h| h.record.clone()) else {
            return;
        };
        let planned = self.lead.as_ref().and_then(|l| l.planned.as_ref());
        let Some((left, chosen)) = planned.map(|p| (p.deadline.since(ctx.now), p.choice.is_some()))
        else {
            return;
        };
        if chosen {
            let text = self.without_fresh_save(&record);
            let text = format!("the ranks did not agree on a step in time: {text}");
            self.tell_all(ctx, &record, text);
        }
        self.order_signal(ctx, &record, left);
    }

    /// Also behind a fall back to the signal: whoever has not heard the cancel is told again.
    fn drive_barrier(&mut self, ctx: &mut Ctx<'_>, record: &Record, a: &Assessment) {
        let planned = |l: &super::lead::Lead| l.planned.is_some();
        if !self.lead.as_ref().is_some_and(planned) {
            return;
        }
        // Those that have finished have no rank left that could stop.
        let without: Vec<NodeId> = self
            .finished(record)
            .chain(a.lost.iter().chain(&a.unresponsive).copied())
            .collect();
        for node in without {
            self.at_lead_barrier(ctx, Some(barrier::LeaderEvent::NodeLost { node }));
        }
        self.at_lead_barrier(ctx, None);
    }
}
