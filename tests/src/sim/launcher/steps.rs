//! How far the workers of a run are, where they wait, save and hang. All ranks of a node are at one step;
//! of those of a node that hangs the first stands still, and the others wait for it.

use std::collections::BTreeSet;

use muster_launcher::Event;
use muster_protocol::Digest;
use muster_protocol::control::Reason;
use muster_protocol::control::report::ALIVE;
use muster_protocol::hang::{Point, Standing, Watch};
use muster_protocol::local::ToAgent;

use super::{Due, Launcher, News, Out, Phase, Run, STEP};
use crate::sim::clock::{MS, SEC};

/// How often a launcher looks at its workers.
pub const LOOK: u64 = 500 * MS;

/// How often workers look whether what they wait for is saved.
pub(super) const SAVES: u64 = 20 * MS;

/// Longest wait of a real worker at a checkpoint's step before it fails.
const GIVES_UP: u64 = 60 * SEC;

/// Behind this step of its run a rank is judged for certain.
const STEPS_KNOWN: u64 = 100;

/// Answers about where the ranks stand that are remembered.
const ANSWERS: usize = 4;

/// Why a node's ranks do not get beyond a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Idle {
    /// They wait for another node's.
    Waits,
    /// The first of them stands still.
    Hangs,
    /// The first of them does something long in this step, and says so.
    Busy,
}

/// Where the ranks of a run are.
#[derive(Clone, Debug, Default)]
pub struct Steps {
    /// They were at this step at this time, and free to go on.
    from: (u64, u64),
    /// They wait at this step of this barrier, or will, since when.
    gate: Option<(u32, u64, Reason)>,
    /// They save at this step, or will.
    saving: Option<u64>,
    /// Since when they wait there.
    saving_since: Option<u64>,
    /// They do not get beyond this step.
    pub stuck: Option<(u64, Idle)>,
    /// The step at which they hung last: until they have passed it they stand still.
    hung: Option<u64>,
    /// The steps that they have saved at.
    pub saved: BTreeSet<u64>,
    /// Since when they wait at a step that is not decided.
    waits_since: Option<u64>,
    /// Whether the first rank hung when the launcher last said where they stand; newest last.
    pub answers: Vec<bool>,
    /// Where the first rank stood then.
    told: Option<Point>,
}

impl Steps {
    pub(super) fn begin(now: u64) -> Steps {
        Steps {
            from: (0, now),
            ..Steps::default()
        }
    }

    fn free(&self, now: u64) -> u64 {
        self.from.0 + now.saturating_sub(self.from.1) / STEP
    }

    /// The step that they are at: they wait before it where it is a gate's, else they have begun it.
    pub fn at(&self, now: u64) -> u64 {
        let gate = self.gate.map(|(_, s, _)| s);
        let stuck = self.stuck.map(|(s, _)| s);
        let limits = gate.into_iter().chain(self.saving).chain(stuck);
        limits.fold(self.free(now), u64::min)
    }

    /// Whether they have begun this step.
    pub fn has_begun(&self, step: u64, now: u64) -> bool {
        let at = self.at(now);
        let waits = self.saving == Some(at) || self.gate.is_some_and(|(_, s, _)| s == at);
        at > step || (at == step && !waits)
    }

    /// Call before what holds them is taken away.
    fn rebase(&mut self, now: u64) {
        let at = self.at(now);
        if self.free(now) > at {
            self.from = (at, now);
        }
    }

    /// Neither stop nor checkpoint is under way, and nobody hangs.
    pub(super) fn is_free(&self) -> bool {
        self.gate.is_none() && self.saving.is_none() && self.stuck.is_none()
    }

    pub(super) fn is_at_gate(&self, now: u64) -> bool {
        self.gate.is_some_and(|(_, step, _)| self.at(now) == step)
    }

    /// Since when they wait at a step of a barrier that is not decided.
    pub fn waits_since(&self, confirmed: bool) -> Option<u64> {
        self.waits_since
            .filter(|_| self.gate.is_some() && !confirmed)
    }

    pub(super) fn cancel(&mut self, now: u64) {
        self.rebase(now);
        self.gate = None;
        self.waits_since = None;
    }

    /// From now on they do not get beyond `step`.
    pub fn stick(&mut self, step: u64, idle: Idle) {
        self.stuck = Some((step, idle));
    }

    pub fn thaw(&mut self, now: u64) {
        self.rebase(now);
        if let Some((step, Idle::Hangs)) = self.stuck.take() {
            self.hung = Some(step);
        }
    }

    /// They save, or will.
    pub fn saves(&self) -> bool {
        self.saving.is_some()
    }

    /// Whether the first rank stands still for no reason.
    pub fn hangs(&self, now: u64) -> bool {
        let stuck = match self.stuck {
            Some((step, Idle::Hangs)) => Some(step),
            _ => self.hung,
        };
        stuck == Some(self.at(now))
    }

    /// How far each rank is.
    fn points(&self, ranks: u16, now: u64) -> Vec<Point> {
        let at = self.at(now);
        let point = |first: bool| {
            let operation = match self.stuck.filter(|(step, _)| *step == at) {
                Some((_, Idle::Hangs)) if first => 0,
                Some((_, Idle::Busy)) if first => now / LOOK * ALIVE,
                // In an operation that somebody else has not entered.
                Some(_) => 1,
                None => 0,
            };
            Point {
                step: at,
                operation,
            }
        };
        (0..ranks).map(|rank| point(rank == 0)).collect()
    }
}

impl Run {
    /// The step at which the workers wait until they have saved.
    pub(super) fn saves_at(&self, now: u64) -> Option<u64> {
        let at = self.steps.at(now);
        let stops = self.confirmed && self.steps.is_at_gate(now);
        (stops || self.steps.saving == Some(at)).then_some(at)
    }

    fn points(&self, now: u64) -> Vec<(u32, Point)> {
        let points = self.steps.points(self.start.slots, now);
        (self.start.first_rank..).zip(points).collect()
    }

    /// Whether its workers stand still by themselves, if they do.
    fn expects_progress(&self) -> bool {
        let steps = &self.steps;
        self.runs() && steps.gate.is_none() && steps.saving.is_none()
    }

    /// Since when ranks wait at a step that is not decided.
    pub fn waits_since(&self) -> Option<u64> {
        self.steps
            .waits_since(self.confirmed)
            .filter(|_| self.runs())
    }

    /// A worker hangs, and its usual step is known.
    pub fn is_judged(&self, now: u64) -> bool {
        let known = self.steps.stuck.is_some_and(|(step, _)| step > STEPS_KNOWN);
        known && self.watch.is_some() && self.expects_progress() && self.steps.hangs(now)
    }
}

impl Launcher {
    /// Where the workers can stop, as their pages say.
    pub(super) fn install(
        &mut self,
        (barrier, step, reason): (u32, u64, Reason),
        now: u64,
    ) -> Option<u64> {
        let takes = self.habits.stop_steps;
        let run = self.run.as_mut().filter(|r| takes && r.goes_on())?;
        let steps = &mut run.steps;
        let at = steps.at(now);
        let step = step.max(if steps.is_at_gate(now) { at } else { at + 1 });
        steps.rebase(now);
        steps.gate = Some((barrier, step, reason));
        steps.waits_since.get_or_insert(now);
        Some(step)
    }

    pub(super) fn confirm_stop(&mut self, step: u64, now: u64, out: &mut Vec<Out>) {
        let barrier = self.confirms;
        let Some(run) = self.run.as_mut().filter(|r| r.goes_on()) else {
            return;
        };
        let steps = &mut run.steps;
        let installed = steps.gate.map(|(b, s, _)| (b, s));
        let left = step.saturating_sub(steps.at(now));
        steps.gate = Some((barrier, step, Reason::Drain));
        run.confirmed = true;
        out.push(Out::StoppedAt {
            digest: run.start.digest,
            step,
            installed,
        });
        out.push(Out::Wait {
            due: Due::AtStop(run.epoch),
            ns: left * STEP + 40 * MS,
            exact: true,
        });
    }

    pub(super) fn confirm_checkpoint(&mut self, step: u64, now: u64, out: &mut Vec<Out>) {
        let (barrier, save) = (self.confirms, self.habits.save);
        let Some(run) = self.run.as_mut().filter(|r| r.goes_on()) else {
            return;
        };
        let steps = &mut run.steps;
        let installed = steps.gate.take().map(|(b, s, _)| (b, s));
        let left = step.saturating_sub(steps.at(now));
        steps.saving = Some(step);
        steps.saving_since = None;
        out.push(Out::SavesAt {
            digest: run.start.digest,
            barrier,
            step,
            installed,
        });
        out.push(Out::Wait {
            due: Due::Saved(run.epoch),
            ns: left * STEP + save,
            exact: true,
        });
    }

    pub(super) fn save_over(&mut self, epoch: u64, now: u64, out: &mut Vec<Out>) {
        let run = self.run.as_mut();
        let Some(run) = run.filter(|r| r.epoch == epoch && r.phase == Phase::Running) else {
            return;
        };
        let Some(step) = run.steps.saving else { return };
        let ns = match run.steps.at(now) < step {
            // It waits for a rank that hangs.
            true => Some(LOOK),
            false => (!self.slots.have_saved(step)).then_some(SAVES),
        };
        let since = match ns {
            Some(SAVES) => *run.steps.saving_since.get_or_insert(now),
            _ => now,
        };
        if now > since + GIVES_UP {
            let exit = run.ended(0, 1, false);
            run.exit = Some(exit.clone());
            return self.some_ended(out);
        }
        if let Some(ns) = ns {
            let due = Due::Saved(epoch);
            return out.push(Out::Wait {
                due,
                ns,
                exact: true,
            });
        }
        run.steps.saved.insert(step);
        run.steps.rebase(now);
        run.steps.saving = None;
        run.steps.waits_since = None;
        let first = run.start.first_rank;
        let saved = Event::Saved {
            ranks: (first..first + u32::from(run.start.slots)).collect(),
            all: true,
            passed: true,
            failed: None,
        };
        self.inbox.push_back(News::Event(saved));
    }

    pub(super) fn look(&mut self, epoch: u64, now: u64, out: &mut Vec<Out>) {
        let run = self.run.as_ref();
        if run.is_none_or(|r| r.epoch != epoch || r.phase != Phase::Running) {
            return;
        }
        out.push(Out::Wait {
            due: Due::Look(epoch),
            ns: LOOK,
            exact: true,
        });
        if self.paused.is_none() {
            self.watch(now);
        }
    }

    /// Looks at how far the workers are.
    fn watch(&mut self, now: u64) {
        let time = self.clock.local(now);
        let expects = self.session.expects_progress(time);
        let Some(run) = &mut self.run else { return };
        let (points, progress) = (run.points(now), run.expects_progress());
        let Some(watch) = &mut run.watch else { return };
        if !expects || !progress {
            return watch.rest(time);
        }
        if let Some(yes) = watch.look(points, time) {
            self.inbox.push_back(News::Event(Event::Stalled(yes)));
        }
    }

    pub(super) fn look_asked(&mut self, digest: Digest, number: u32, now: u64, out: &mut Vec<Out>) {
        let asked = |r: &&mut Run| r.start.digest == digest && r.alive_steps();
        let Some(run) = self.run.as_mut().filter(asked) else {
            return;
        };
        run.steps.told = run.points(now).first().map(|(_, point)| *point);
        let hangs = run.steps.hangs(now);
        run.steps.answers.push(hangs);
        if run.steps.answers.len() > ANSWERS {
            run.steps.answers.remove(0);
        }
        self.watch(now);
        let watch = self.run.as_ref().and_then(|r| r.watch.as_ref());
        let list: Vec<Standing> = watch.map_or(Vec::new(), Watch::standings);
        out.push(Out::Say(ToAgent::Standings {
            digest,
            number,
            list,
        }));
    }

    /// The leader says for whom everybody waits.
    pub(super) fn named(&mut self, digest: Digest, ranks: &[u32], now: u64, out: &mut Vec<Out>) {
        let ends = self.habits.ends_hung;
        let named = |r: &&mut Run| r.start.digest == digest && r.runs();
        let Some(run) = self.run.as_mut().filter(named) else {
            return;
        };
        let first = run.start.first_rank;
        let stands = run.points(now).first().map(|(_, point)| *point) == run.steps.told;
        if !ends || !ranks.contains(&first) || !stands {
            return;
        }
        let exit = run.ended(0, 137, false);
        exit.signal = Some(9);
        exit.hung = true;
        run.exit = Some(exit.clone());
        self.some_ended(out);
    }
}
