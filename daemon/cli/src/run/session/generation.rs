//! One generation after another on this node: started when the one before is gone, ended with
//! everything that belongs to it.

use std::net::IpAddr;

use muster_protocol::local::{Start, ToAgent, WorkerExit, plain_tail};
use muster_protocol::{Digest, Span, Time};

use super::{Current, Effect, LEFTOVER_GRACE, Pending, REMEMBERED, Session, Stopping};
use crate::run::report;
use crate::run::workers::Left;

impl Session {
    pub(super) fn start(&mut self, start: Start, now: Time) {
        if self.ending.is_some() {
            return;
        }
        let key = (start.digest, start.attempt);
        if let Some((digest, number, attempt)) = self.newest {
            if (digest, attempt) == key {
                // Known: say again what became of it.
                for frame in self.facts.clone() {
                    self.send(frame);
                }
                return;
            }
            let newer = if digest == start.digest {
                start.attempt > attempt
            } else if self.age(start.digest).is_some() {
                false
            } else {
                // A lower number is another lineage, which this job joined; that is only taken up
                // when nothing runs, so that a late START never ends newer workers.
                start.number > number || (self.current.is_none() && self.pending.is_none())
            };
            if !newer {
                return;
            }
        }
        if self.age(start.digest).is_none() {
            if self.seen.len() == REMEMBERED {
                self.seen.pop_front();
            }
            self.seen.push_back(start.digest);
        }
        self.newest = Some((start.digest, start.number, start.attempt));
        self.facts.clear();
        self.failures.clear();
        if let Some((node, exit)) = self.elsewhere.take() {
            self.say(report::root_elsewhere(&node, &exit));
        }
        self.waiting.clear();
        if self.current.as_ref().is_some_and(Current::trains) {
            // A decided newer generation ends the one before, should its stop have been lost.
            let grace = self.register.spec.loss_grace();
            self.begin_stop(libc::SIGTERM, grace, None, now);
        }
        let verified = if start.master_launcher == self.register.launcher {
            Some(Ok(start.master.ip()))
        } else {
            self.effects.push_back(Effect::VerifyMaster(start.clone()));
            None
        };
        self.pending = Some(Pending { start, verified });
        self.try_spawn();
    }

    /// Spawns once the master is verified and what ran before is gone.
    pub(super) fn try_spawn(&mut self) {
        let busy = self.current.as_ref().is_some_and(|c| !c.parked);
        if busy || self.ending.is_some() {
            return;
        }
        let Some(Pending {
            start,
            verified: Some(verified),
        }) = self.pending.clone()
        else {
            return;
        };
        match verified {
            Ok(local) => self.effects.push_back(Effect::Spawn { start, local }),
            Err(reason) => {
                self.pending = None;
                self.fact(ToAgent::StartFailed {
                    digest: start.digest,
                    attempt: start.attempt,
                    reason,
                });
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
                    since_kill: None,
                    named: false,
                    finished: false,
                    told: None,
                });
            }
        }
        self.current = Some(current);
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
            self.begin_stop(libc::SIGTERM, grace, None, now);
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
            Left::Parked => self.parked(now),
            Left::Nothing => {
                let (finished, told) = (stopping.finished, stopping.told);
                let (digest, attempt) = (current.start.digest, current.start.attempt);
                let unstarted = current.unstarted.take();
                let never_ran = unstarted.is_some();
                self.current = None;
                if let Some(reason) = unstarted {
                    self.fact(ToAgent::StartFailed {
                        digest,
                        attempt,
                        reason,
                    });
                }
                if finished {
                    self.fact(ToAgent::Finished { digest });
                }
                match told {
                    // What was told to stop is this generation or a newer one.
                    Some(digest) => self.fact(ToAgent::Stopped { digest }),
                    // Finished and StartFailed say already that nothing runs.
                    None if finished || never_ran => {}
                    None => self.fact(ToAgent::Stopped { digest }),
                }
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
        let Some(age) = self.age(digest) else {
            // Never started here. What runs may be newer, so it is left alone.
            if self.current.is_none() && self.pending.is_none() {
                self.send(ToAgent::Stopped { digest });
            }
            return;
        };
        let pending = self.pending.as_ref().map(|p| p.start.digest);
        if pending.is_some_and(|d| self.age(d) <= Some(age)) {
            self.pending = None;
        }
        let current = self.current.as_ref();
        match current.map(|c| (self.age(c.start.digest) <= Some(age), c.stopping.is_some())) {
            Some((true, _)) if current.is_some_and(|c| c.parked) => {
                self.fact(ToAgent::Stopped { digest });
            }
            Some((true, already)) => {
                if !already && !why.is_empty() {
                    self.say(format!("stopping the workers: {why}"));
                }
                let grace = Span::from_millis(grace_ms.into());
                // Without any grace there is no time either for who computes.
                let grace = match grace {
                    Span::ZERO => grace,
                    grace => grace.max(self.patience),
                };
                self.begin_stop(signal, grace, Some(digest), now);
            }
            // Newer workers run, or nothing: either way none of that generation does.
            Some((false, _)) | None => {
                let stopped = ToAgent::Stopped { digest };
                if self.current.is_none() {
                    self.fact(stopped);
                } else {
                    self.send(stopped);
                }
            }
        }
    }

    /// Signals the workers, or shortens the grace of a stop under way: it is never made longer.
    pub(super) fn begin_stop(&mut self, signal: i32, grace: Span, told: Option<Digest>, now: Time) {
        let Some(current) = &mut self.current else {
            return;
        };
        let kill_at = now + grace;
        // While the job goes on here, live workers stay.
        let end = match self.ending {
            Some(_) => Effect::Signal,
            None => Effect::EndTerm,
        };
        match &mut current.stopping {
            None => {
                current.stopping = Some(Stopping {
                    kill_at,
                    since_kill: None,
                    named: false,
                    finished: false,
                    told,
                });
                self.effects.push_back(end(signal));
            }
            Some(stopping) => {
                if stopping.since_kill.is_none() && kill_at < stopping.kill_at {
                    stopping.kill_at = kill_at;
                    self.effects.push_back(end(signal));
                }
                stopping.told = told.or(stopping.told);
            }
        }
    }
}
