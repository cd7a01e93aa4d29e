//! One generation after another on this node: started when the one before is gone, ended with
//! everything that belongs to it.

use std::net::IpAddr;

use muster_protocol::local::{Start, ToAgent, WorkerExit, plain_tail};
use muster_protocol::{Digest, Span, Time};

use super::{Current, Effect, LEFTOVER_GRACE, Left, Pending, SLOW, Session, Stopping, remember};
use crate::report;
use crate::signal::SIGTERM;

impl Session {
    pub(super) fn start(&mut self, start: Start, now: Time) {
        let (digest, lineage) = (start.digest, start.lineage);
        // It was stopped, perhaps before this START came: that is the answer, now or when nothing runs.
        if self.ending.is_some() || self.owed.contains(&digest) {
            return;
        }
        let known = self.newest.filter(|(newest, _)| *newest == digest);
        if known.is_some_and(|(_, tried)| self.over.contains(&digest) || start.attempt <= tried) {
            if let Some(pending) = self.pending.as_mut().filter(|p| p.start.digest == digest) {
                pending.confirmed = true;
                self.try_spawn();
            }
            // Say again what became of it.
            return self.facts_again();
        }
        let reached = self.numbers.iter().find(|(l, _)| *l == lineage);
        let older = reached.is_some_and(|(_, number)| start.number <= *number);
        if self.over.contains(&digest) || (known.is_none() && older) {
            return self.outdated(digest);
        }
        remember(&mut self.seen, digest);
        self.numbers.retain(|(l, _)| *l != lineage);
        remember(&mut self.numbers, (lineage, start.number));
        self.newest = Some((digest, start.attempt));
        self.facts.clear();
        self.register.gate = None;
        let failures = std::mem::take(&mut self.failures);
        match (self.elsewhere.take(), report::root_cause(&failures)) {
            (Some((node, exit)), _) => self.say(report::root_elsewhere(&node, &exit)),
            // Its own last lines stand on this console.
            (None, Some(exit)) => self.say(report::ended_here(exit)),
            (None, None) => {}
        }
        self.waiting.clear();
        let verified = if start.master_launcher == self.register.launcher {
            Some(Ok(start.master.ip()))
        } else {
            self.effects.push_back(Effect::VerifyMaster(start.clone()));
            None
        };
        self.pending = Some(Pending {
            start,
            verified,
            confirmed: true,
        });
        let current = self.current.as_ref().filter(|c| c.stopping.is_none());
        if current.is_some_and(|c| !c.parked || self.ends_processes()) {
            // A decided newer generation ends the one before, should its stop have been lost; and live
            // workers have no place in another lineage.
            let grace = self.register.spec.loss_grace();
            self.begin_stop(SIGTERM, grace, now);
        }
        self.try_spawn();
    }

    /// A START of something that is over, or older than what was begun since.
    fn outdated(&mut self, digest: Digest) {
        match self.current.as_ref().filter(|c| c.start.digest == digest) {
            Some(current) if !current.parked => remember(&mut self.owed, digest),
            _ => self.send(ToAgent::Stopped { digest }),
        }
    }

    /// Live workers end with their generation: the job is over here, or goes on in another lineage.
    pub(super) fn ends_processes(&self) -> bool {
        let current = self.current.as_ref().map(|c| c.start.lineage);
        let next = self.pending.as_ref().map(|p| p.start.lineage);
        self.ending.is_some() || next.is_some_and(|next| current != Some(next))
    }

    /// Spawns once the master is verified and what ran before is gone, if the agent has been heard lately: the others
    /// may have gone on without this node.
    pub(super) fn try_spawn(&mut self) {
        let current = self.current.as_ref();
        let busy = current.is_some_and(|c| !c.parked || c.stopping.is_some());
        if busy || self.alone.is_some() || self.ending.is_some() {
            return;
        }
        let pending = self.pending.as_mut().filter(|p| p.confirmed);
        let Some((start, verified)) =
            pending.and_then(|p| Some((p.start.clone(), p.verified.take()?)))
        else {
            return;
        };
        match verified {
            Ok(local) => {
                self.say(report::starts(&start));
                self.effects.push_back(Effect::Spawn { start, local });
            }
            Err(reason) => {
                self.pending = None;
                self.fact(ToAgent::StartFailed {
                    digest: start.digest,
                    attempt: start.attempt,
                    reason,
                });
                self.answer_stops(None);
            }
        }
    }

    pub(super) fn verified(
        &mut self,
        digest: Digest,
        attempt: u32,
        result: Result<IpAddr, String>,
    ) {
        let asked = self
            .pending
            .as_mut()
            .filter(|p| (p.start.digest, p.start.attempt) == (digest, attempt));
        if let Some(pending) = asked {
            pending.verified = Some(result);
            self.try_spawn();
        }
    }

    pub(super) fn spawned(&mut self, result: Result<(), String>, now: Time) {
        let Some(Pending { start, .. }) = self.pending.take() else {
            return;
        };
        let mine = start.master_launcher == self.register.launcher;
        let used = mine.then_some(start.master.port());
        let (digest, attempt) = (start.digest, start.attempt);
        let mut current = Current {
            running: start.slots,
            start,
            failed: Vec::new(),
            acknowledged: false,
            unstarted: None,
            stopping: None,
            installed: None,
            held: None,
            passed: None,
            saves: None,
            confirmed: false,
            alone_since: None,
            parked: false,
        };
        match result {
            Ok(()) => self.fact(ToAgent::Started { digest, attempt }),
            Err(reason) => {
                self.say(reason.clone());
                // Those that started before the failure are killed, but not reaped yet.
                current.running = 0;
                current.unstarted = Some(reason);
                current.stopping = Some(Stopping {
                    kill_at: now,
                    slow_at: None,
                    since_kill: None,
                    named: false,
                    finished: false,
                    processes: false,
                });
            }
        }
        self.current = Some(current);
        self.handle_timeout(now);
        self.effects.push_back(Effect::FreshPort { used });
    }

    pub(super) fn exit(&mut self, exit: WorkerExit, acknowledged: bool, now: Time) {
        let Some(current) = &mut self.current else {
            return;
        };
        current.running = current.running.saturating_sub(1);
        current.acknowledged |= acknowledged;
        let all = current.running == 0;
        if current.stopping.is_some() {
            return;
        }
        if current.parked {
            // Its generation is over: the next one starts another in its place.
            self.current.take_if(|_| all);
            return;
        }
        let digest = current.start.digest;
        if exit.code != 0 {
            current.failed.push(exit.clone());
            self.failures.push(exit.clone());
            let tail = plain_tail(&exit.tail);
            let exit = WorkerExit { tail, ..exit };
            self.fact(ToAgent::Exited { digest, exit });
        }
        if all {
            let grace = self.register.spec.stop_grace().min(LEFTOVER_GRACE);
            self.begin_stop(SIGTERM, grace, now);
            if let Some(current) = &mut self.current {
                // A worker that stopped at a step has not finished its work.
                let clean = current.failed.is_empty() && !current.acknowledged;
                if let Some(stopping) = &mut current.stopping {
                    stopping.finished = clean;
                }
            }
        }
    }

    pub(super) fn left(&mut self, left: Left, now: Time) {
        let Some(current) = &mut self.current else {
            return;
        };
        let Some(stopping) = &mut current.stopping else {
            return;
        };
        match left {
            Left::Workers | Left::Groups => {}
            Left::Escaped => {
                // They left their group, so no signal reached them: no grace for them.
                if stopping.since_kill.is_none() {
                    stopping.kill_at = now;
                    self.handle_timeout(now);
                }
            }
            Left::Parked if current.parked => {}
            Left::Parked => self.parked(now),
            Left::Nothing => {
                let (finished, parked) = (stopping.finished, current.parked);
                let (digest, attempt) = (current.start.digest, current.start.attempt);
                let unstarted = current.unstarted.take();
                // Finished and StartFailed say already that nothing runs.
                let silent = finished || unstarted.is_some() || parked;
                let held = self.current.take().and_then(|c| c.held);
                if let Some(reason) = unstarted {
                    self.fact(ToAgent::StartFailed {
                        digest,
                        attempt,
                        reason,
                    });
                }
                if finished {
                    // Those of other nodes may still wait at that step.
                    let newest = self.newest.is_some_and(|(newest, _)| newest == digest);
                    self.register.gate = held.filter(|_| newest);
                    remember(&mut self.over, digest);
                    self.fact(ToAgent::Finished { digest });
                }
                self.answer_stops((!silent).then_some(digest));
                if let Some((code, report)) = self.ending.clone() {
                    self.exit_now(code, report);
                } else {
                    self.try_spawn();
                }
            }
        }
    }

    /// STOP and PREEMPT: both end this generation and every earlier one.
    pub(super) fn stop(
        &mut self,
        digest: Digest,
        signal: i32,
        grace_ms: u32,
        why: &str,
        now: Time,
    ) {
        let age = self.age(digest);
        let pending = self.pending.as_ref().map(|p| p.start.digest);
        if age.is_some() && pending.is_some_and(|d| self.age(d) <= age) {
            self.pending = None;
        }
        let current = self.current.as_ref().filter(|c| !c.parked);
        let running = current.map(|c| self.age(c.start.digest));
        if running.is_none()
            && age.is_none()
            && let Some(taken_back) = self.pending.take_if(|p| !p.confirmed)
        {
            // The agent of now has not said it: it may be older than what is to stop.
            self.stopped(taken_back.start.digest);
        }
        let current = self.current.as_ref().filter(|c| !c.parked);
        match (running, age) {
            // Newer workers run, and none of that generation.
            (Some(running), Some(_)) if running > age => self.send(ToAgent::Stopped { digest }),
            (Some(_), Some(_)) => {
                if current.is_some_and(|c| c.stopping.is_none()) && !why.is_empty() {
                    self.say(format!("stopping the workers: {why}"));
                }
                let grace = Span::from_millis(grace_ms.into());
                // Without any grace there is no time either for who computes.
                let grace = match grace {
                    Span::ZERO => grace,
                    grace => grace.max(self.patience),
                };
                remember(&mut self.owed, digest);
                self.begin_stop(signal, grace, now);
            }
            // Never started here. What runs, or is about to, may be newer, so it is left alone.
            (Some(_), None) => remember(&mut self.owed, digest),
            (None, None) if self.pending.is_some() => remember(&mut self.owed, digest),
            (None, Some(_)) if self.pending.is_some() => self.stopped(digest),
            (None, _) => {
                remember(&mut self.owed, digest);
                self.answer_stops(None);
            }
        }
    }

    /// Nothing runs of this generation nor of any before it, and nothing will.
    fn stopped(&mut self, digest: Digest) {
        remember(&mut self.over, digest);
        self.fact(ToAgent::Stopped { digest });
    }

    /// Nothing trains here any more; last this generation did.
    pub(super) fn answer_stops(&mut self, last: Option<Digest>) {
        let owed = std::mem::take(&mut self.owed);
        let pending = self.pending.as_ref().map(|p| p.start.digest);
        // Of one that is to begin another attempt it is not said, unless it was asked for.
        let last = last.filter(|d| !owed.contains(d) && pending != Some(*d));
        for digest in owed.into_iter().chain(last) {
            self.stopped(digest);
        }
    }

    /// Signals the workers, or shortens the grace of a stop under way: it is never made longer.
    pub(super) fn begin_stop(&mut self, signal: i32, grace: Span, now: Time) {
        let processes = self.ends_processes();
        let Some(current) = &mut self.current else {
            return;
        };
        let kill_at = now + grace;
        // While the job goes on here, live workers stay.
        let end = match processes {
            true => Effect::Signal,
            false => Effect::EndTerm,
        };
        match &mut current.stopping {
            None => {
                current.stopping = Some(Stopping {
                    kill_at,
                    slow_at: (grace >= SLOW + SLOW).then_some(now + SLOW),
                    since_kill: None,
                    named: false,
                    finished: false,
                    processes,
                });
                self.effects.push_back(end(signal));
            }
            Some(stopping) => {
                if stopping.since_kill.is_none() && kill_at < stopping.kill_at {
                    stopping.kill_at = kill_at;
                    stopping.processes |= processes;
                    self.effects.push_back(end(signal));
                }
            }
        }
    }
}
