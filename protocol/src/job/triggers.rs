//! Saves without anybody's order: after so many steps, after so much time, or as often as keeps stalls at a
//! share of the time. The leader opens them, and the ranks agree on the step as for one by order: nobody
//! has to count.

use std::collections::BTreeMap;

use super::{Ctx, Job};
use crate::checkpoint::{
    Bounds, Busy, Cause, Leader, LeaderNotice, Measured, NodeEvent, Pace, Rhythm, interval,
    mean_time_between_failures,
};
use crate::control::Reason;
use crate::ids::{Digest, NodeId};
use crate::local::{SaveNews, short};
use crate::record::{self, Record};
use crate::time::{Span, Time};
use crate::wire::JobMessage;

/// How long before they reach a step the ranks are told that they save before it: more than telling
/// all takes, so that nobody waits for it.
const AHEAD: Span = Span::from_millis(500);

/// When the first save is made that shows what one takes.
const FIRST: Span = Span::from_secs(5);

/// After one that came to nothing.
const AGAIN: Span = Span::from_secs(5);

/// How long after a save its measures are expected.
const MEASURES: Span = Span::from_secs(30);

/// Between saves, where the interval is chosen.
const LEAST: Span = Span::from_secs(1);
const MOST: Span = Span::from_secs(3_600);

/// The time between two failures of one node that is reckoned with before any was seen: 419 in 54 days on
/// 2,048 nodes ("The Llama 3 Herd of Models", 2024, section 3.3.4).
const PER_NODE: Span = Span::from_secs(264 * 86_400);

/// The leader's memory of the saves that it opens by itself.
#[derive(Clone, Debug, Default)]
pub(super) struct Triggers {
    /// The step and the time that the next one is counted from.
    last: Option<(u64, Time)>,
    /// None is opened before this.
    not_before: Time,
    /// People know why the one that is due is not opened.
    explained: bool,
    /// They know that the newest came to nothing.
    judged: bool,
    /// When the save under way was sealed everywhere, and when all its files were durable.
    sealed: Option<Time>,
    prepared: Option<Time>,
    /// How long the newest one took from there to its commit.
    durable: Option<Span>,
    commit: Option<Span>,
    /// The interval that people were told.
    every: Option<Span>,
    unmeasured: bool,
    /// Since when failures of the job are counted here, and how many there were.
    since: Option<Time>,
    failures: u64,
}

impl Triggers {
    /// All files of a save are durable.
    pub(super) fn prepared(&mut self, now: Time) {
        self.prepared = Some(now);
    }

    /// Measures how long saves take, by the notices to people.
    pub(super) fn told(&mut self, notice: &LeaderNotice, now: Time) {
        match notice {
            LeaderNotice::Opened { .. } => (self.sealed, self.prepared) = (Some(now), None),
            LeaderNotice::Committed { .. } => {
                let took = |since: Option<Time>| since.map(|at| now.since(at));
                self.durable = took(self.sealed.take()).or(self.durable);
                self.commit = took(self.prepared.take()).or(self.commit);
            }
            LeaderNotice::GivenUp { .. } | LeaderNotice::InDoubt { .. } => {}
        }
    }

    /// From the last durable file to the commit.
    pub(super) fn commit(&self) -> Span {
        self.commit.unwrap_or_default()
    }

    /// The save that is due is left for later, and people know it.
    fn put_off(&mut self, until: Time) -> bool {
        self.not_before = until;
        !std::mem::replace(&mut self.explained, true)
    }
}

/// So many steps at least, of this length.
fn steps_in(span: Span, step: Span) -> u64 {
    span.0.checked_div(step.0).unwrap_or(1).max(1)
}

impl Job {
    /// Handles the launcher's news of how its ranks get on.
    pub(super) fn on_ranks_news(&mut self, ctx: &mut Ctx<'_>, news: SaveNews) {
        match news {
            SaveNews::At {
                digest,
                step,
                step_us,
            } => {
                if digest == self.head_digest() {
                    let usual = Span(step_us.saturating_mul(1_000));
                    self.saves.meter.at = Some((step, usual));
                }
            }
            SaveNews::Copied {
                step,
                bytes,
                copied_us,
                waited_us,
                ..
            } => {
                let meter = &mut self.saves.meter;
                meter.copied(step, bytes, copied_us, waited_us);
            }
            SaveNews::Waits { k, step } => self.rank_waits(ctx, k, step),
            SaveNews::Loaded { digest } => self.ranks_loaded(digest),
            _ => {}
        }
    }

    /// A rank here has no free slot. A save by order, or because the job stops, is never left out.
    fn rank_waits(&mut self, ctx: &mut Ctx<'_>, k: u16, step: u64) {
        let held = self.member.as_ref().and_then(|m| m.barrier.held());
        let held = held.filter(|h| h.confirmed);
        let ordered = held.is_some_and(|h| h.step == step || h.reason != Reason::Checkpoint);
        let skips = self
            .live()
            .is_some_and(|h| h.record.spec.triggers.busy == Busy::Skip);
        if ordered && skips {
            let first = self.live().and_then(|h| h.record.ranks_of(ctx.me()));
            let rank = first.map_or(0, |(first, _)| first) + u32::from(k);
            return self.tell_saving(format!(
                "rank {rank} has no free slot for step {step} and waits: this save is not left out"
            ));
        }
        self.at_saves_node(ctx, NodeEvent::Wants { k, step });
    }

    /// A generation begins: who leads it counts from its first step.
    pub(super) fn triggers_begin(&mut self, ctx: &Ctx<'_>, record: &Record) {
        let triggers = &mut self.saves.triggers;
        let fails = matches!(
            record.cause,
            record::Cause::NodesLost { .. }
                | record::Cause::LinksLost { .. }
                | record::Cause::LeasesLost { .. }
                | record::Cause::WorkerFailed { .. }
                | record::Cause::WorkerHung { .. }
        );
        // The failure before the first generation known here was not waited for.
        triggers.failures += u64::from(fails && triggers.since.is_some());
        triggers.since.get_or_insert(ctx.now);
        triggers.last = None;
        triggers.not_before = Time::ZERO;
        (triggers.explained, triggers.judged) = (false, true);
        (triggers.sealed, triggers.prepared) = (None, None);
    }

    /// Opens the save that is due.
    pub(super) fn drive_triggers(&mut self, ctx: &mut Ctx<'_>, record: &Record) {
        let wanted = record.spec.triggers;
        let free = |l: &super::lead::Lead| l.planned.is_none() && l.ending.is_none();
        let leads = self.saves.leader.is_some() && self.lead.as_ref().is_some_and(free);
        let Some((step, usual)) = self.saves.meter.at.filter(|_| leads && wanted.any()) else {
            return;
        };
        let last = self.note_saved(ctx.now, record, step);
        let every = match wanted.overhead_ppm {
            0 => wanted.every(),
            _ => self.chosen_interval(ctx, record),
        };
        let by_steps = Rhythm {
            steps: wanted.steps,
            every: Span::ZERO,
        };
        let by_time = Rhythm { steps: 0, every };
        let soon = step.saturating_add(steps_in(AHEAD, usual));
        let due = by_steps.due(soon, last, ctx.now);
        let Some(cause) = due.or_else(|| by_time.due(step, last, ctx.now)) else {
            self.saves.triggers.explained = false;
            if every > Span::ZERO && ctx.now < last.1 + every {
                self.wake_at(last.1 + every, "a checkpoint by time");
            }
            return;
        };
        let at = match cause {
            Cause::Steps => last.0.saturating_add(wanted.steps),
            // The nodes raise it to what their ranks can still stop at.
            _ => 1,
        };
        if ctx.now < self.saves.triggers.not_before {
            let until = self.saves.triggers.not_before;
            return self.wake_at(until, "a checkpoint that is due");
        }
        if self.may_open(ctx, record, step.max(at)) {
            (self.saves.triggers.explained, self.saves.triggers.judged) = (false, false);
            self.open_checkpoint(ctx, record, BTreeMap::new(), at, cause);
        }
    }

    /// Keeps what the next save is counted from: the newest one, whoever asked for it.
    fn note_saved(&mut self, now: Time, record: &Record, step: u64) -> (u64, Time) {
        let saving = self.lead.as_ref().and_then(|l| l.saving.as_ref());
        let agreed = saving.and_then(super::checkpoint::Saving::step);
        let failed = saving.and_then(|s| s.failed()).map(str::to_owned);
        let opened = self.saves.leader.as_ref().and_then(Leader::opened);
        let triggers = &mut self.saves.triggers;
        // What is restored is known; else the training may have begun anywhere.
        let restored = record.restore.map_or(0, |commit| commit.step);
        let last = triggers.last.get_or_insert((restored.min(step), now));
        let newest = agreed.max(opened).filter(|newest| *newest > last.0);
        if let Some(newest) = newest {
            *last = (newest, now);
        }
        let last = *last;
        if let Some(why) = failed
            && !std::mem::replace(&mut triggers.judged, true)
        {
            triggers.not_before = now + AGAIN;
            self.tell_saving(format!(
                "the checkpoint that was due came to nothing: {why}"
            ));
        }
        last
    }

    /// Whether the save that is due can be opened now; else people are told why not.
    fn may_open(&mut self, ctx: &mut Ctx<'_>, record: &Record, step: u64) -> bool {
        let Some(lead) = &self.lead else { return false };
        let saves = lead.saving.as_ref().is_some_and(|s| !s.is_over());
        let busy = saves || lead.finishing.is_some();
        // A leader that is new has not heard them all yet.
        if busy || record.members.iter().any(|m| lead.status(m.node).is_none()) {
            return false;
        }
        let without = self.without_runtime(record);
        if !without.is_empty() {
            if self.saves.triggers.put_off(ctx.now + AGAIN) {
                let names = ctx.names(&without);
                self.tell_saving(format!(
                    "a checkpoint is due and cannot be agreed on: not every worker has attached the runtime \
                     (on {names})"
                ));
            }
            self.wake_at(ctx.now + AGAIN, "a checkpoint that is due");
            return false;
        }
        let full = self.saves.leader.iter().flat_map(Leader::full);
        let full: Vec<String> = full
            .map(|(node, steps)| {
                let steps: Vec<String> = steps.iter().map(u64::to_string).collect();
                format!("{} (steps {})", ctx.name(node), steps.join(" and "))
            })
            .collect();
        if full.is_empty() {
            return true;
        }
        let late = self.saves.leader.iter().flat_map(|l| l.laggards(ctx.now));
        let late: Vec<String> = late.take(4).map(|l| l.to_string()).collect();
        let since = self.saves.triggers.sealed.map(|at| ctx.now.since(at));
        let since = since.map_or_else(String::new, |s| format!(" for {s}"));
        let under_way = self.saves.leader.as_ref().and_then(Leader::under_way);
        let by = match (under_way, late.is_empty()) {
            (None, _) => "not every rank has sealed these steps".to_owned(),
            (Some((save, _)), true) => format!("{save} is under way{since}: its commit is awaited"),
            (Some((save, _)), false) => format!("{save} is under way{since}: {}", late.join("; ")),
        };
        let full = full.join(", ");
        match record.spec.triggers.busy {
            Busy::Wait => {
                if self.saves.triggers.put_off(Time::ZERO) {
                    self.tell_saving(format!(
                        "a checkpoint is due and waits: both slots are occupied on {full}; {by}"
                    ));
                }
            }
            Busy::Skip => {
                let triggers = &mut self.saves.triggers;
                triggers.last = Some((step, ctx.now));
                self.tell_saving(format!(
                    "the checkpoint that is due is left out: both slots are occupied on {full}; {by}"
                ));
            }
        }
        false
    }

    /// The interval that keeps stalls at the share of the time that they may take.
    fn chosen_interval(&mut self, ctx: &mut Ctx<'_>, record: &Record) -> Span {
        let paces: Vec<Pace> = self.paces(record).into_iter().map(|(_, p)| p).collect();
        let stall = paces.iter().filter_map(Pace::stall).max();
        let (stall, durable) = match (stall, self.saves.triggers.durable) {
            (Some(stall), Some(durable)) => (stall, durable),
            _ => return self.unmeasured(ctx.now),
        };
        let triggers = &mut self.saves.triggers;
        let observed = triggers.since.map(|at| ctx.now.since(at));
        let nodes = record.members.len() as u64;
        let mtbf = mean_time_between_failures(
            triggers.failures,
            observed.unwrap_or_default(),
            nodes,
            PER_NODE,
        );
        let measured = Measured {
            stall,
            durable: stall + durable,
            mtbf: Some(mtbf),
        };
        let bounds = Bounds {
            overhead: record.spec.triggers.overhead(),
            least: LEAST,
            most: MOST,
        };
        let chosen = interval(measured, bounds);
        let known = triggers.every.unwrap_or_default();
        let (less, more) = (known.min(chosen.every), known.max(chosen.every));
        // What is measured differs a little each time.
        if more.0 - less.0 > more.0 / 4 {
            triggers.every = Some(chosen.every);
            self.tell_all(ctx, record, chosen.why);
        }
        chosen.every
    }

    /// The interval while nobody knows what a save takes.
    fn unmeasured(&mut self, now: Time) -> Span {
        let saving = self.lead.as_ref().and_then(|l| l.saving.as_ref());
        let made = saving.and_then(super::checkpoint::Saving::step).is_some();
        let triggers = &mut self.saves.triggers;
        if !made {
            return FIRST;
        }
        let since = triggers.last.map_or(now, |(_, at)| at);
        if now >= since + MEASURES {
            if !std::mem::replace(&mut triggers.unmeasured, true) {
                self.tell_saving(format!(
                    "what a checkpoint takes is not known, for the script does not save by the runtime's \
                     slots: one is made every {MOST}; --checkpoint-every sets another time"
                ));
            }
        } else {
            self.wake_at(since + MEASURES, "what a save took");
        }
        MOST
    }

    /// Measurements of the members.
    pub(super) fn paces(&self, record: &Record) -> Vec<(NodeId, Pace)> {
        let status = |node| self.lead.as_ref()?.status(node);
        let members = record.members.iter().map(|m| m.node);
        let pace = |node| Some((node, status(node)?.pace));
        members.filter_map(pace).collect()
    }

    /// Tells the people of every node.
    pub(super) fn tell_all(&mut self, ctx: &Ctx<'_>, record: &Record, text: String) {
        let (digest, text) = (self.head_digest(), short(text));
        for m in &record.members {
            let text = text.clone();
            self.send(ctx, m.node, JobMessage::SaveSaid { digest, text });
        }
    }

    pub(super) fn on_save_said(
        &mut self,
        ctx: &Ctx<'_>,
        from: NodeId,
        digest: Digest,
        text: String,
    ) {
        let head = self.live().filter(|h| h.digest == digest);
        if head.is_some_and(|h| self.acting_leader(ctx, &h.record) == Some(from)) {
            self.tell_saving(text);
        }
    }
}

#[cfg(test)]
mod tests;
