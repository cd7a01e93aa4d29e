//! How far the workers of a run are, where they wait, save and hang. All ranks of a node are at one step;
//! of those of a node that hangs the first stands still, and the others wait for it.

use std::collections::BTreeSet;

use muster_protocol::barrier::Held;
use muster_protocol::control::Reason;
use muster_protocol::control::report::ALIVE;
use muster_protocol::hang::{Point, Standing, Watch};
use muster_protocol::local::{ToAgent, WorkerExit};
use muster_protocol::wire::Saved;
use muster_protocol::{Digest, Time};

use super::{Due, Launcher, Out, Phase, Run, STEP};
use crate::sim::clock::MS;

/// How often a launcher looks at its workers.
pub const LOOK: u64 = 500 * MS;

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
    /// They do not get beyond this step.
    pub stuck: Option<(u64, Idle)>,
    pub held: Option<Held>,
    /// The newest checkpoint that was confirmed.
    passed: Option<Held>,
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
        if self.held.is_some_and(|h| !h.confirmed) {
            self.held = self.passed;
        }
    }

    /// From now on they do not get beyond `step`.
    pub fn stick(&mut self, step: u64, idle: Idle) {
        self.stuck = Some((step, idle));
    }

    pub fn thaw(&mut self, now: u64) {
        self.rebase(now);
        self.stuck = None;
    }

    /// They save, or will.
    pub fn saves(&self) -> bool {
        self.saving.is_some()
    }

    /// Whether the first rank stands still for no reason.
    pub fn hangs(&self, now: u64) -> bool {
        matches!(self.stuck, Some((step, Idle::Hangs)) if self.at(now) == step)
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
    fn points(&self, now: u64) -> Vec<(u32, Point)> {
        let points = self.steps.points(self.start.slots, now);
        (self.start.first_rank..).zip(points).collect()
    }

    /// Whether its workers stand still by themselves, if they do.
    fn expects_progress(&self) -> bool {
        let steps = &self.steps;
        self.phase == Phase::Running
            && self.exit.is_none()
            && steps.gate.is_none()
            && steps.saving.is_none()
    }

    /// Since when ranks wait at a step that is not decided.
    pub fn waits_since(&self) -> Option<u64> {
        let there = self.phase == Phase::Running && self.exit.is_none();
        self.steps.waits_since(self.confirmed).filter(|_| there)
    }

    /// No rank was told to stop yet, and none has failed.
    pub fn goes_on(&self) -> bool {
        self.phase == Phase::Running && self.exit.is_none() && !self.confirmed
    }

    /// A worker hangs, and its usual step is known.
    pub fn is_judged(&self, now: u64) -> bool {
        let known = self.steps.stuck.is_some_and(|(step, _)| step > STEPS_KNOWN);
        known && self.watch.is_some() && self.expects_progress() && self.steps.hangs(now)
    }

    /// Its workers exist, and do steps unless something keeps them from it.
    pub fn alive_steps(&self) -> bool {
        self.phase == Phase::Running
    }
}

impl Launcher {
    /// All workers exit 0, once nothing keeps them from their last step.
    pub fn finish(&mut self, digest: Digest, out: &mut Vec<Out>) {
        let run = self.run.as_ref().filter(|r| r.start.digest == digest);
        let Some(run) = run.filter(|r| r.goes_on()) else {
            return;
        };
        if !run.steps.is_free() {
            let due = Due::Finish(run.epoch);
            return out.push(Out::Wait {
                due,
                ns: LOOK,
                exact: true,
            });
        }
        self.run = None;
        let frame = ToAgent::Finished { digest };
        self.facts.push(frame.clone());
        out.extend([Out::Died(digest), Out::Say(frame)]);
    }

    pub(super) fn install(
        &mut self,
        digest: Digest,
        (barrier, step, reason): (u32, u64, Reason),
        now: u64,
        out: &mut Vec<Out>,
    ) {
        let takes = self.stop_steps;
        let Some(run) = self.running(digest) else {
            return;
        };
        // Nobody's checkpoint is taken away.
        if !takes || run.exit.is_some() || run.confirmed || run.steps.saving.is_some() {
            return;
        }
        let steps = &mut run.steps;
        let at = steps.at(now);
        let step = step.max(if steps.is_at_gate(now) { at } else { at + 1 });
        steps.rebase(now);
        steps.gate = Some((barrier, step, reason));
        steps.waits_since.get_or_insert(now);
        steps.held = Some(Held {
            barrier,
            step,
            reason,
            confirmed: false,
        });
        out.push(Out::Say(ToAgent::StopInstalled {
            digest,
            barrier,
            step,
        }));
    }

    pub(super) fn confirm(
        &mut self,
        digest: Digest,
        (barrier, step, reason): (u32, u64, Reason),
        now: u64,
        out: &mut Vec<Out>,
    ) {
        let save = self.save;
        let Some(run) = self.running(digest) else {
            return;
        };
        if run.confirmed || run.exit.is_some() {
            return;
        }
        let goes_on = reason == Reason::Checkpoint;
        let steps = &mut run.steps;
        let gate = steps.gate;
        if goes_on && gate.is_none_or(|(_, _, r)| r != reason) {
            // Told again by an agent that was restarted meanwhile, or by a new leader.
            return self.says_again(digest, step, out);
        }
        let installed = gate.map(|(b, s, _)| (b, s));
        let left = step.saturating_sub(steps.at(now));
        steps.held = Some(Held {
            barrier,
            step,
            reason,
            confirmed: true,
        });
        let epoch = run.epoch;
        let (due, ns) = match goes_on {
            true => {
                steps.gate = None;
                steps.passed = steps.held;
                steps.saving = Some(step);
                (Due::Saved(epoch), left * STEP + save)
            }
            false => {
                steps.gate = Some((barrier, step, reason));
                run.confirmed = true;
                (Due::AtStop(epoch), left * STEP + 40 * MS)
            }
        };
        out.push(match goes_on {
            true => Out::SavesAt {
                digest,
                barrier,
                step,
                installed,
            },
            false => Out::StoppedAt {
                digest,
                step,
                installed,
            },
        });
        out.push(Out::Wait {
            due,
            ns,
            exact: true,
        });
        if goes_on {
            self.says_saved(digest, step, false, out);
        }
    }

    pub(super) fn save_over(&mut self, epoch: u64, now: u64, out: &mut Vec<Out>) {
        let run = self.run.as_mut();
        let Some(run) = run.filter(|r| r.epoch == epoch && r.phase == Phase::Running) else {
            return;
        };
        let Some(step) = run.steps.saving else { return };
        if run.steps.at(now) < step {
            // It waits for a rank that hangs.
            let due = Due::Saved(epoch);
            return out.push(Out::Wait {
                due,
                ns: LOOK,
                exact: true,
            });
        }
        run.steps.saved.insert(step);
        run.steps.rebase(now);
        run.steps.saving = None;
        run.steps.waits_since = None;
        let digest = run.start.digest;
        self.says_saved(digest, step, true, out);
    }

    fn says_saved(&mut self, digest: Digest, step: u64, all: bool, out: &mut Vec<Out>) {
        let Some(run) = &self.run else { return };
        let ranks = run.start.first_rank..run.start.first_rank + u32::from(run.start.slots);
        let ranks = if all { ranks.collect() } else { Vec::new() };
        let saved = Saved {
            step,
            ranks,
            all,
            failed: None,
        };
        self.facts.retain(|f| !matches!(f, ToAgent::Saved { .. }));
        self.fact(ToAgent::Saved { digest, saved }, out);
    }

    fn says_again(&self, digest: Digest, step: u64, out: &mut Vec<Out>) {
        let about = |f: &&ToAgent| match f {
            ToAgent::Saved { digest: d, saved } => *d == digest && saved.step == step,
            _ => false,
        };
        out.extend(self.facts.iter().find(about).cloned().map(Out::Say));
    }

    pub(super) fn look(&mut self, epoch: u64, now: u64, out: &mut Vec<Out>) {
        let run = self.run.as_mut();
        let Some(run) = run.filter(|r| r.epoch == epoch && r.phase == Phase::Running) else {
            return;
        };
        out.push(Out::Wait {
            due: Due::Look(epoch),
            ns: LOOK,
            exact: true,
        });
        let points = run.points(now);
        let progress = run.expects_progress();
        let digest = run.start.digest;
        let Some(watch) = &mut run.watch else { return };
        if !progress {
            return watch.rest(Time(now));
        }
        if let Some(yes) = watch.look(points, Time(now)) {
            self.facts.retain(|f| !matches!(f, ToAgent::Stalled { .. }));
            self.fact(ToAgent::Stalled { digest, yes }, out);
        }
    }

    pub(super) fn look_asked(&mut self, digest: Digest, number: u32, now: u64, out: &mut Vec<Out>) {
        let Some(run) = self.running(digest) else {
            return;
        };
        run.steps.told = run.points(now).first().map(|(_, point)| *point);
        let hangs = run.steps.hangs(now);
        run.steps.answers.push(hangs);
        if run.steps.answers.len() > ANSWERS {
            run.steps.answers.remove(0);
        }
        let points = run.points(now);
        let progress = run.expects_progress();
        if let Some(watch) = &mut run.watch {
            let change = match progress {
                true => watch.look(points, Time(now)),
                false => None,
            };
            if let Some(yes) = change {
                self.facts.retain(|f| !matches!(f, ToAgent::Stalled { .. }));
                self.fact(ToAgent::Stalled { digest, yes }, out);
            }
        }
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
        let (ends, token) = (self.ends_hung, self.token);
        let Some(run) = self.running(digest) else {
            return;
        };
        let first = run.start.first_rank;
        let stands = run.points(now).first().map(|(_, point)| *point) == run.steps.told;
        if !ends || !ranks.contains(&first) || run.exit.is_some() || !stands {
            return;
        }
        let exit = WorkerExit {
            rank: first,
            local_rank: 0,
            pid: token,
            code: 137,
            signal: Some(9),
            hung: true,
            damaged: None,
            at_ms: 0,
            tail: String::new(),
        };
        run.exit = Some(exit.clone());
        let frame = ToAgent::Exited { digest, exit };
        self.facts.push(frame.clone());
        out.push(Out::Say(frame));
    }
}
