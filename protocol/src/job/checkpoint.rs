//! A checkpoint that somebody asks for: all ranks agree on a step by the stop barrier (R20), save before
//! they begin it, and go on. The leader keeps the state and tells whoever asked; nothing is decided by
//! it.

use std::collections::BTreeMap;

use super::lead::Lead;
use super::{Ctx, Job, REPEAT};
use crate::barrier;
use crate::checkpoint::Cause;
use crate::control::Reason;
use crate::ids::{Digest, NodeId};
use crate::record::{Member, Record};
use crate::time::{Span, Time};
use crate::wire::{CheckpointStage, CheckpointState, JobMessage, MAX_SAVED, Saved};

/// How long the ranks may take to agree on the step.
const AGREE: Span = Span::from_secs(30);

/// How long workers may take to attach the runtime, from their start: one that has none never does.
const ATTACH: Span = Span::from_secs(60);

/// How long they may take to save.
const SAVE: Span = Span::from_secs(600);

const NOT_HERE: &str = "the job does not train on this node now: `muster jobs` says what it does";

const STOPS: &str = "the job is about to stop";

const FINISHED: &str = "some ranks have finished, so there is no step that all ranks come to";

/// A checkpoint as its leader sees it.
#[derive(Clone, Debug)]
pub(super) struct Saving {
    /// When it is given up.
    until: Time,
    /// Not before this step.
    from: u64,
    pub(super) cause: Cause,
    /// The nodes that asked, and the number of each question.
    askers: BTreeMap<NodeId, u64>,
    state: CheckpointState,
    said: CheckpointState,
}

impl Saving {
    pub(super) fn is_over(&self) -> bool {
        self.state.stage.is_over()
    }

    /// Ranks may stand still for its sake.
    pub(super) fn holds_ranks(&self) -> bool {
        match self.state.stage {
            CheckpointStage::Agreeing | CheckpointStage::Saving { .. } => true,
            CheckpointStage::Waiting { .. }
            | CheckpointStage::Done { .. }
            | CheckpointStage::Failed { .. } => false,
        }
    }

    /// The step that the ranks agreed on.
    pub(super) fn step(&self) -> Option<u64> {
        match self.state.stage {
            CheckpointStage::Saving { step } | CheckpointStage::Done { step } => Some(step),
            CheckpointStage::Agreeing
            | CheckpointStage::Failed { .. }
            | CheckpointStage::Waiting { .. } => None,
        }
    }

    /// Why it came to nothing.
    pub(super) fn failed(&self) -> Option<&str> {
        match &self.state.stage {
            CheckpointStage::Failed { why } => Some(why),
            _ => None,
        }
    }

    fn fail(&mut self, why: impl Into<String>) {
        if !self.is_over() {
            self.state.stage = CheckpointStage::Failed { why: why.into() };
        }
    }
}

impl Lead {
    /// The step of a checkpoint that members still save for, by the word of a leader before this one.
    /// It is waited for once.
    fn unfinished_save(&self, record: &Record) -> Option<u64> {
        let saved = |m: &Member| self.status(m.node).and_then(|s| s.saved.as_ref());
        let all = || record.members.iter().map(saved);
        let newest = all().flatten().map(|s| s.step).max()?;
        let done = |s: Option<&Saved>| s.is_some_and(|s| s.step == newest && s.all);
        let waits = !self.whole && self.unsaved < Some(newest) && !all().all(done);
        waits.then_some(newest)
    }
}

/// A checkpoint that somebody on this node asked for.
#[derive(Clone, Debug)]
pub struct Asked {
    /// The number of the question.
    pub ask: u64,
    pub state: CheckpointState,
    /// When the leader was asked last.
    said: Time,
}

impl Job {
    /// State of the checkpoint that was last asked for here.
    pub fn checkpoint(&self) -> Option<&Asked> {
        self.checkpoint.as_ref()
    }

    fn trains(&self) -> bool {
        let mine = self.member.as_ref().filter(|_| self.live().is_some());
        mine.is_some_and(super::member::Mine::trains)
    }

    /// Somebody here wants a checkpoint.
    pub(crate) fn ask_checkpoint(&mut self, ctx: &mut Ctx<'_>) -> Result<(), String> {
        if !self.trains() {
            return Err(NOT_HERE.into());
        }
        self.checkpoint = Some(Asked {
            ask: ctx.rng.next_u64(),
            state: CheckpointState::default(),
            said: Time::ZERO,
        });
        Ok(())
    }

    /// Asks the leader, again and again until it is over.
    pub(super) fn drive_asked(&mut self, ctx: &mut Ctx<'_>) {
        let Some(head) = self.live() else {
            // This node has left its group for another one.
            return self.checkpoint_ends();
        };
        let digest = head.digest;
        let leader = self.acting_leader(ctx, &head.record.clone());
        let trains = self.trains();
        let Some(asked) = self
            .checkpoint
            .as_mut()
            .filter(|a| !a.state.stage.is_over())
        else {
            return;
        };
        let agreed = matches!(asked.state.stage, CheckpointStage::Saving { .. });
        if !trains && !agreed {
            let why = NOT_HERE.into();
            asked.state.stage = CheckpointStage::Failed { why };
            return;
        }
        let due = asked.said + REPEAT;
        if asked.said > Time::ZERO && ctx.now < due {
            return self.wake_at(due, "ask for the checkpoint again");
        }
        asked.said = ctx.now;
        let ask = asked.ask;
        if let Some(leader) = leader {
            self.send(ctx, leader, JobMessage::CheckpointAsk { digest, ask });
        }
        self.wake_at(ctx.now + REPEAT, "ask for the checkpoint again");
    }

    /// The generation ends, and with it a checkpoint that is under way.
    pub(super) fn checkpoint_ends(&mut self) {
        if let Some(asked) = self
            .checkpoint
            .as_mut()
            .filter(|a| !a.state.stage.is_over())
        {
            let why = "the generation ended meanwhile".into();
            asked.state.stage = CheckpointStage::Failed { why };
        }
    }

    pub(super) fn on_checkpoint(
        &mut self,
        ctx: &Ctx<'_>,
        from: NodeId,
        ask: u64,
        state: CheckpointState,
    ) {
        let led = self
            .live()
            .is_some_and(|h| self.acting_leader(ctx, &h.record) == Some(from));
        let asked = self.checkpoint.as_mut();
        if let Some(asked) = asked.filter(|a| led && a.ask == ask && !a.state.stage.is_over()) {
            asked.state = state;
        }
    }

    // ---- the leader ----

    pub(super) fn on_checkpoint_ask(
        &mut self,
        ctx: &mut Ctx<'_>,
        from: NodeId,
        digest: Digest,
        ask: u64,
    ) {
        let Some(head) = self
            .live()
            .filter(|h| h.digest == digest && h.record.has(from))
        else {
            return;
        };
        let record = head.record.clone();
        let Some(lead) = &mut self.lead else { return };
        let known = lead.saving.as_mut();
        if let Some(saving) = known.filter(|s| !s.is_over() || s.askers.get(&from) == Some(&ask)) {
            saving.askers.insert(from, ask);
            let state = saving.state.clone();
            return self.send(ctx, from, JobMessage::Checkpoint { ask, state });
        }
        if record.members.iter().any(|m| lead.status(m.node).is_none()) {
            // Whoever leads anew has not heard them yet: it is asked again.
            return;
        }
        if let Some(step) = lead.unfinished_save(&record) {
            // An earlier leader's, or of an earlier run of this agent.
            self.checkpoint_resumed(ctx.now, step);
            if let Some(saving) = self.lead.as_mut().and_then(|l| l.saving.as_mut()) {
                saving.askers.insert(from, ask);
            }
            return self.drive_saving(ctx, &record);
        }
        let askers = BTreeMap::from([(from, ask)]);
        // The nodes raise the step to what their ranks can still stop at.
        self.open_checkpoint(ctx, &record, askers, 1, Cause::Ordered);
    }

    /// Members of which a worker has not attached the runtime: no step can be agreed on with it.
    pub(super) fn without_runtime(&self, record: &Record) -> Vec<NodeId> {
        let lead = self.lead.as_ref();
        let attached = |m: &Member| lead.is_some_and(|l| l.takes_stop_steps(m.node));
        let members = record.members.iter().filter(|m| !attached(m));
        members.map(|m| m.node).collect()
    }

    /// Until when this generation's workers are waited for that have not attached the runtime yet.
    fn attach_until(&self) -> Time {
        let run_at = self.lead.as_ref().and_then(|l| l.start.run_at);
        self.installed_at.max(run_at.unwrap_or(self.installed_at)) + ATTACH
    }

    /// Has the ranks agree on a step, not before this one, and save at it.
    pub(super) fn open_checkpoint(
        &mut self,
        ctx: &mut Ctx<'_>,
        record: &Record,
        askers: BTreeMap<NodeId, u64>,
        step: u64,
        cause: Cause,
    ) {
        let until = self.attach_until();
        let Some(lead) = &mut self.lead else { return };
        lead.saving = Some(Saving {
            until,
            from: step,
            cause,
            askers,
            state: CheckpointState {
                stage: CheckpointStage::Waiting { why: String::new() },
                world: record.world(),
                ..CheckpointState::default()
            },
            said: CheckpointState::default(),
        });
        self.drive_saving(ctx, record);
    }

    /// The ranks begin to agree once every worker has attached the runtime.
    fn begin_saving(&mut self, ctx: &mut Ctx<'_>, record: &Record) {
        let without = self.without_runtime(record);
        let Some(lead) = &mut self.lead else { return };
        let stops = lead.planned.is_some() || lead.ending.is_some();
        let waits = |s: &&mut Saving| matches!(s.state.stage, CheckpointStage::Waiting { .. });
        let Some(saving) = lead.saving.as_mut().filter(waits) else {
            return;
        };
        if stops {
            return saving.fail(STOPS);
        }
        if lead.finishing.is_some() {
            // The others would wait for them at the step.
            return saving.fail(FINISHED);
        }
        if !without.is_empty() {
            let names = ctx.names(&without);
            let why = format!("not every worker has attached the runtime: {names}");
            if ctx.now >= saving.until {
                return saving.fail(why);
            }
            saving.state.stage = CheckpointStage::Waiting { why };
            return;
        }
        saving.state.stage = CheckpointStage::Agreeing;
        saving.until = ctx.now + AGREE + SAVE;
        let step = saving.from;
        self.begin_barrier(record);
        let event = barrier::LeaderEvent::Drain {
            step,
            // The ranks' own limit lies well behind: the cancel is there before they fail by it.
            deadline: ctx.now + AGREE.times(2),
            save_time: AGREE,
            reason: Reason::Checkpoint,
        };
        self.at_lead_barrier(ctx, Some(event));
    }

    /// The barrier of a checkpoint was decided.
    pub(super) fn checkpoint_decided(&mut self, outcome: barrier::Outcome) {
        let saving = self.lead.as_mut().and_then(|l| l.saving.as_mut());
        let Some(saving) = saving.filter(|s| s.state.stage == CheckpointStage::Agreeing) else {
            return;
        };
        match outcome {
            barrier::Outcome::Confirmed { step } => {
                saving.state.stage = CheckpointStage::Saving { step };
            }
            barrier::Outcome::Cancelled(why) => {
                saving.fail(format!("the ranks did not agree on a step: {why}"));
            }
        }
    }

    /// An earlier leader has confirmed a checkpoint, and not all members know of it.
    pub(super) fn checkpoint_resumed(&mut self, now: Time, step: u64) {
        let Some(world) = self.live().map(|h| h.record.world()) else {
            return;
        };
        let Some(lead) = &mut self.lead else { return };
        let state = CheckpointState {
            world,
            stage: CheckpointStage::Saving { step },
            ..CheckpointState::default()
        };
        match lead.saving.as_mut().filter(|s| !s.is_over()) {
            Some(saving) => {
                saving.state = state;
                saving.until = saving.until.max(now + SAVE);
            }
            None => {
                lead.saving = Some(Saving {
                    until: now + SAVE,
                    from: step,
                    cause: Cause::Ordered,
                    askers: BTreeMap::new(),
                    state,
                    said: CheckpointState::default(),
                });
            }
        }
    }

    /// Looks at who has saved, and tells who asked.
    pub(super) fn drive_saving(&mut self, ctx: &mut Ctx<'_>, record: &Record) {
        self.begin_saving(ctx, record);
        let Some(lead) = &mut self.lead else { return };
        let stops = lead.planned.is_some() || lead.ending.is_some();
        let Some(saving) = lead.saving.as_mut() else {
            return;
        };
        let statuses = &lead.statuses;
        let mut gives_up = false;
        let at = match saving.state.stage {
            CheckpointStage::Agreeing if stops => {
                saving.fail(STOPS);
                None
            }
            CheckpointStage::Agreeing if lead.finishing.is_some() => {
                saving.fail(FINISHED);
                gives_up = true;
                None
            }
            CheckpointStage::Saving { step } => Some(step),
            _ => None,
        };
        if let Some(step) = at {
            let (mut ranks, mut all, mut failed) = (Vec::new(), true, None);
            for m in &record.members {
                let saved = statuses.get(&m.node).and_then(|s| s.saved.as_ref());
                let saved = saved.filter(|s| s.step >= step);
                all &= saved.is_some_and(|s| s.all);
                ranks.extend(saved.iter().flat_map(|s| s.ranks.iter().copied()));
                failed = failed.or_else(|| saved?.failed.clone());
            }
            ranks.sort_unstable();
            ranks.dedup();
            ranks.truncate(MAX_SAVED);
            saving.state.saved = ranks;
            if let Some(why) = failed.filter(|_| !saving.askers.is_empty()) {
                // Whoever waits for it waits in vain. What was due is made again when it is due again.
                saving.fail(why);
            } else if all {
                saving.state.stage = CheckpointStage::Done { step };
            }
        }
        if ctx.now >= saving.until {
            if let CheckpointStage::Saving { step } = saving.state.stage {
                lead.unsaved = lead.unsaved.max(Some(step));
            }
            saving.fail("not every rank has saved in time");
        }
        let until = saving.until;
        let open = !saving.is_over();
        if saving.said != saving.state {
            saving.said.clone_from(&saving.state);
            let askers: Vec<(NodeId, u64)> = saving.askers.clone().into_iter().collect();
            let state = saving.state.clone();
            for (to, ask) in askers {
                let state = state.clone();
                self.send(ctx, to, JobMessage::Checkpoint { ask, state });
            }
        }
        if open {
            self.wake_at(until, "a checkpoint that is not saved");
        }
        if gives_up {
            self.at_lead_barrier(ctx, Some(barrier::LeaderEvent::GiveUp));
        }
    }
}

#[cfg(test)]
mod tests;
