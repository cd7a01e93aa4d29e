//! The workers of a launcher: how they fail, finish, park and end.

use muster_launcher::Event;
use muster_protocol::hang::{Limits, Watch};
use muster_protocol::local::{Start, WorkerExit};
use muster_protocol::{Digest, Span};

use super::steps::SAVES;
use super::{Due, LOOK, Launcher, News, Out, Steps};
use crate::sim::clock::MS;

/// From SIGTERM until a worker that heeds it has ended.
const TERM: u64 = 60 * MS;
/// From SIGKILL until the process is gone.
const KILL: u64 = 15 * MS;
/// Time that a live worker takes to leave its generation.
const PARK: u64 = 20 * MS;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Running,
    /// Told to end or to park.
    Stopping,
    /// Live workers have left the generation and wait for the next.
    Parked,
    /// The processes are gone.
    Dead,
}

/// One generation's workers.
#[derive(Clone, Debug)]
pub struct Run {
    pub start: Start,
    pub phase: Phase,
    pub(super) epoch: u64,
    /// The epoch in which it began.
    pub(super) number: u64,
    pub began: u64,
    dies_at: u64,
    /// When they were first sent SIGKILL.
    pub killed: Option<u64>,
    /// Of the workers these exist yet.
    there: u16,
    pub(super) exit: Option<WorkerExit>,
    /// Those that have ended and are not reaped, each with whether it stopped at a step.
    pub(super) ends: Vec<(WorkerExit, bool)>,
    pub steps: Steps,
    pub(super) confirmed: bool,
    /// The launcher's eye on the workers, if it keeps one.
    pub(super) watch: Option<Watch>,
}

impl Run {
    pub(super) fn new(start: Start, epoch: u64, now: u64) -> Run {
        Run {
            there: start.slots,
            start,
            phase: Phase::Running,
            epoch,
            number: epoch,
            began: now,
            dies_at: u64::MAX,
            killed: None,
            exit: None,
            ends: Vec::new(),
            steps: Steps::begin(now),
            confirmed: false,
            watch: None,
        }
    }

    pub(super) fn watches(&mut self) {
        self.watch = Some(Watch::new(Limits {
            factor: 20,
            least: Span::from_secs(2),
        }));
    }

    /// The processes are gone, and their launcher knows.
    pub(super) fn is_reaped(&self) -> bool {
        self.phase == Phase::Dead && self.ends.is_empty()
    }

    /// Its workers exist, and were not told otherwise.
    pub(super) fn runs(&self) -> bool {
        self.phase == Phase::Running && self.exit.is_none()
    }

    /// No rank was told to stop yet, and none has failed.
    pub fn goes_on(&self) -> bool {
        self.runs() && !self.confirmed
    }

    /// Its workers exist, and do steps unless something keeps them from it.
    pub fn alive_steps(&self) -> bool {
        self.phase == Phase::Running
    }

    pub(super) fn ended(
        &mut self,
        local_rank: u16,
        code: i32,
        acknowledged: bool,
    ) -> &mut WorkerExit {
        let exit = WorkerExit {
            rank: self.start.first_rank + u32::from(local_rank),
            local_rank,
            pid: u32::from(local_rank) + 1,
            code,
            signal: None,
            hung: false,
            out_of_memory: None,
            damaged: None,
            at_ms: 0,
            tail: String::new(),
        };
        self.there -= 1;
        self.ends.push((exit, acknowledged));
        let last = self.ends.len() - 1;
        &mut self.ends[last].0
    }

    /// All that are there end.
    fn all_ended(&mut self, code: i32, acknowledged: bool) {
        let first = self.start.slots - self.there;
        for local_rank in first..self.start.slots {
            self.ended(local_rank, code, acknowledged);
        }
    }
}

impl Launcher {
    /// The workers that exist now and have not left their generation.
    pub fn alive(&self) -> Option<&Run> {
        let there = |r: &&Run| matches!(r.phase, Phase::Running | Phase::Stopping);
        self.run.as_ref().filter(there)
    }

    /// Workers that train: nobody told them to stop and none has failed.
    pub fn training(&self) -> Option<&Run> {
        self.run.as_ref().filter(|r| r.runs())
    }

    /// The first worker ends by itself with this code. `at_ms` is its node's wall clock.
    pub fn fail(&mut self, code: i32, at_ms: u64, now: u64) -> Vec<Out> {
        let mut out = Vec::new();
        if let Some(run) = self.run.as_mut().filter(|r| r.runs()) {
            let exit = run.ended(0, code, false);
            exit.at_ms = at_ms;
            run.exit = Some(exit.clone());
            self.some_ended(&mut out);
            self.go_on(now, &mut out);
        }
        out
    }

    /// The workers of this generation lost one elsewhere: live ones park, others fail.
    pub fn lose_peers(&mut self, at_ms: u64, now: u64) -> Vec<Out> {
        if !self.habits.live {
            return self.fail(1, at_ms, now);
        }
        let mut out = Vec::new();
        if self.training().is_some() {
            self.park(false, now, &mut out);
            self.go_on(now, &mut out);
        }
        out
    }

    /// All workers exit 0, once nothing keeps them from their last step.
    pub fn finishes(&mut self, digest: Digest, now: u64) -> Vec<Out> {
        let mut out = Vec::new();
        self.finish(Some(digest), &mut out);
        self.go_on(now, &mut out);
        out
    }

    pub(super) fn finish(&mut self, digest: Option<Digest>, out: &mut Vec<Out>) {
        let named = |r: &&mut Run| digest.is_none_or(|d| d == r.start.digest);
        let run = self.run.as_mut().filter(named);
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
        run.all_ended(0, false);
        self.some_ended(out);
    }

    /// Some have ended, perhaps all.
    pub(super) fn some_ended(&mut self, out: &mut Vec<Out>) {
        let Some(run) = &mut self.run else { return };
        if run.there == 0 {
            run.phase = Phase::Dead;
            self.epochs += 1;
            run.epoch = self.epochs;
            out.push(Out::Died(run.start.digest));
        }
        match self.habits.reaped_after {
            0 => self.inbox.push_back(News::Reap),
            ns => out.push(Out::Wait {
                due: Due::Reap,
                ns,
                exact: true,
            }),
        }
    }

    pub(super) fn dead(&mut self, code: i32, out: &mut Vec<Out>) {
        if let Some(run) = self.run.as_mut().filter(|r| r.phase != Phase::Dead) {
            run.all_ended(code, false);
            self.some_ended(out);
        }
    }

    pub(super) fn at_stop(&mut self, epoch: u64, now: u64, out: &mut Vec<Out>) {
        let live = self.habits.live;
        let run = self.run.as_mut().filter(|r| r.epoch == epoch);
        let Some(run) = run.filter(|r| r.phase == Phase::Running && r.confirmed) else {
            return;
        };
        let ns = match run.steps.is_at_gate(now) {
            // It waits for a rank that hangs.
            false => Some(LOOK),
            true => (!self.slots.have_saved(run.steps.at(now))).then_some(SAVES),
        };
        if let Some(ns) = ns {
            let due = Due::AtStop(epoch);
            return out.push(Out::Wait {
                due,
                ns,
                exact: true,
            });
        }
        if live && run.exit.is_none() {
            return self.park(true, now, out);
        }
        run.all_ended(0, true);
        self.some_ended(out);
    }

    /// Live workers leave their generation.
    pub(super) fn park(&mut self, acknowledged: bool, now: u64, out: &mut Vec<Out>) {
        let at_ms = now / MS;
        let Some(run) = &mut self.run else { return };
        if matches!(run.phase, Phase::Parked | Phase::Dead) {
            return;
        }
        run.phase = Phase::Parked;
        self.epochs += 1;
        run.epoch = self.epochs;
        run.dies_at = u64::MAX;
        out.push(Out::Parked(run.start.digest));
        self.inbox.push_back(News::Event(Event::ParkedAlone {
            acknowledged,
            at_ms,
        }));
    }

    /// Live workers are told to park, the others get SIGTERM.
    pub(super) fn end_term(&mut self, now: u64, out: &mut Vec<Out>) {
        let live = self.habits.live;
        let run = self.run.as_mut().filter(|r| r.phase == Phase::Running);
        let Some(run) = run else { return };
        if !live || run.exit.is_some() {
            return self.terminate(now, out);
        }
        run.phase = Phase::Stopping;
        out.push(Out::Wait {
            due: Due::Parked(run.epoch),
            ns: PARK,
            exact: false,
        });
    }

    /// Live workers that were told to park do, unless one of them stands still: that one comes to no look.
    pub(super) fn park_if_free(&mut self, now: u64, out: &mut Vec<Out>) {
        let stuck = self.run.as_ref().filter(|r| r.steps.stuck.is_some());
        match stuck.map(|r| r.epoch) {
            Some(epoch) => out.push(Out::Wait {
                due: Due::Parked(epoch),
                ns: LOOK,
                exact: true,
            }),
            None => self.park(false, now, out),
        }
    }

    /// SIGTERM.
    pub(super) fn terminate(&mut self, now: u64, out: &mut Vec<Out>) {
        let Some(run) = &mut self.run else { return };
        if run.phase == Phase::Running {
            run.phase = Phase::Stopping;
        }
        if !self.habits.stubborn {
            self.dies(TERM + KILL, now, out);
        }
    }

    /// SIGKILL.
    pub(super) fn kill(&mut self, now: u64, out: &mut Vec<Out>) {
        if let Some(run) = self.run.as_mut().filter(|r| r.phase == Phase::Running) {
            run.phase = Phase::Stopping;
        }
        if let Some(run) = &mut self.run {
            run.killed.get_or_insert(now);
        }
        self.dies(KILL, now, out);
    }

    /// No signal ends them before then; what they were sent before that ends them then.
    pub fn unkillable(&mut self, until: u64, now: u64) -> Vec<Out> {
        let mut out = Vec::new();
        self.habits.unkillable_until = until.max(now);
        if self.run.as_ref().is_some_and(|r| r.killed.is_some()) {
            self.dies(KILL, now, &mut out);
        }
        out
    }

    fn dies(&mut self, ns: u64, now: u64, out: &mut Vec<Out>) {
        let at = (now + ns).max(self.habits.unkillable_until);
        let Some(run) = &mut self.run else { return };
        if run.phase == Phase::Dead || run.dies_at <= at {
            return;
        }
        run.dies_at = at;
        self.epochs += 1;
        run.epoch = self.epochs;
        out.push(Out::Wait {
            due: Due::Dead(run.epoch),
            ns: at - now,
            exact: true,
        });
    }
}
