//! What a launcher does about what it hears: a state machine that never touches a process, a socket
//! or a clock.
//!
//! It is monotonic: once a generation's START was accepted, nothing that names an older one acts on
//! what runs (R17). It holds the facts of the newest generation and tells them again to an agent
//! that comes back, so that a crash of the agent at any moment loses none; every fact is idempotent.

use std::collections::VecDeque;
use std::net::IpAddr;

use muster_protocol::local::{Register, Start, ToAgent, ToLauncher, WorkerExit};
use muster_protocol::{Digest, Span, Time};

use super::report;
use super::workers::Left;

/// Generations that are remembered by digest, to tell older from newer.
const REMEMBERED: usize = 64;

/// After a finish, the longest that what the workers left behind may take to end.
const LEFTOVER_GRACE: Span = Span::from_millis(2_000);

/// SIGKILL is sent again this often: a process that forks may have been missed.
const KILL_AGAIN: Span = Span::from_millis(50);

/// What cannot be killed for this long is named.
const STUCK: Span = Span::from_secs(5);

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    LinkUp,
    LinkDown,
    Frame(ToLauncher),
    /// The answer to [`Effect::VerifyMaster`]: the local address by which the master is reached.
    Verified {
        digest: Digest,
        attempt: u32,
        result: Result<IpAddr, String>,
    },
    /// The answer to [`Effect::Spawn`].
    Spawned {
        result: Result<(), String>,
    },
    /// The answer to [`Effect::FreshPort`].
    Port(u16),
    /// A worker was reaped; `acknowledged` when it ended because it was told to stop at a step.
    Exit {
        exit: WorkerExit,
        acknowledged: bool,
    },
    /// What is left, after something ended.
    Left(Left),
    /// Every worker took the stop step (the answer to [`Effect::InstallStop`]).
    StopInstalled {
        digest: Digest,
        barrier: u32,
        step: u64,
    },
    /// Every worker has a runtime attached, or no longer.
    TakesStopSteps(bool),
    /// Ctrl-C.
    Interrupt,
    /// Told to leave: SIGTERM, or another signal that was asked for.
    Terminate {
        signal: i32,
    },
}

/// Something to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    Send(ToAgent),
    /// Dial the guard of rank 0's launcher from this network namespace.
    VerifyMaster(Start),
    /// Start the workers. `local` is this node's address towards the master.
    Spawn {
        start: Start,
        local: IpAddr,
    },
    /// The port that was reserved is in use if it is this one: reserve another.
    FreshPort {
        used: Option<u16>,
    },
    /// A signal to the workers' process groups.
    Signal(i32),
    /// SIGKILL to everything.
    Kill,
    InstallStop {
        digest: Digest,
        barrier: u32,
        step: u64,
        grace: Span,
        why: String,
    },
    ConfirmStop {
        step: u64,
    },
    CancelStop,
    /// A line for the user.
    Say(String),
    /// Name what cannot be killed.
    NameSurvivors,
    /// Nothing runs: print the report and exit.
    Exit {
        code: i32,
        report: String,
    },
    /// Kill what runs and exit without waiting for anyone.
    Abort {
        code: i32,
    },
}

#[derive(Clone, Debug)]
struct Pending {
    start: Start,
    verified: Option<Result<IpAddr, String>>,
}

#[derive(Clone, Debug)]
struct Stopping {
    kill_at: Time,
    since_kill: Option<Time>,
    named: bool,
    /// Ended by itself with code 0 everywhere.
    finished: bool,
    /// The newest generation that was told to stop.
    told: Option<Digest>,
}

#[derive(Clone, Debug)]
struct Current {
    start: Start,
    running: u16,
    failed: Vec<WorkerExit>,
    /// Some worker ended at a stop step.
    acknowledged: bool,
    /// Its workers could not all be started, and why; told once nothing of it runs.
    unstarted: Option<String>,
    stopping: Option<Stopping>,
}

/// The launcher's core.
#[derive(Debug)]
pub struct Session {
    register: Register,
    port: Option<u16>,
    link: bool,
    /// Digests of accepted STARTs, oldest first.
    seen: VecDeque<Digest>,
    newest: Option<(Digest, u64, u32)>,
    pending: Option<Pending>,
    current: Option<Current>,
    /// About the newest generation; told again on every link.
    facts: Vec<ToAgent>,
    /// What the user asked for; told again on every link.
    wishes: Vec<ToAgent>,
    /// Set once the job is over for this launcher.
    ending: Option<(i32, String)>,
    failures: Vec<WorkerExit>,
    interrupts: u32,
    leave_by: Option<(Time, i32)>,
    waiting: String,
    effects: VecDeque<Effect>,
}

impl Session {
    pub fn new(register: Register) -> Session {
        Session {
            register,
            port: None,
            link: false,
            seen: VecDeque::new(),
            newest: None,
            pending: None,
            current: None,
            facts: Vec::new(),
            wishes: Vec::new(),
            ending: None,
            failures: Vec::new(),
            interrupts: 0,
            leave_by: None,
            waiting: String::new(),
            effects: VecDeque::new(),
        }
    }

    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// When [`handle_timeout`](Self::handle_timeout) is due, and why.
    pub fn poll_timeout(&self) -> Option<(Time, &'static str)> {
        let stopping = self.current.as_ref().and_then(|c| c.stopping.as_ref());
        let kill = stopping.map(|s| match s.since_kill {
            None => (s.kill_at, "the grace is over"),
            Some(_) => (s.kill_at, "kill again"),
        });
        let leave = self
            .leave_by
            .map(|(at, _)| (at, "the time to leave is over"));
        kill.into_iter().chain(leave).min_by_key(|(at, _)| *at)
    }

    /// Whether workers were started and something of them may still run.
    pub fn has_workers(&self) -> bool {
        self.current.is_some()
    }

    /// Whether what is left should be looked at: all workers ended.
    pub fn is_draining(&self) -> bool {
        self.current.as_ref().is_some_and(|c| c.running == 0)
    }

    pub fn handle(&mut self, event: Event, now: Time) {
        match event {
            Event::LinkUp => self.link_up(),
            Event::LinkDown => self.link = false,
            Event::Frame(frame) => self.frame(frame, now),
            Event::Verified {
                digest,
                attempt,
                result,
            } => {
                self.verified(digest, attempt, result);
            }
            Event::Spawned { result } => self.spawned(result, now),
            Event::Port(port) => {
                self.port = Some(port);
                self.send(ToAgent::MasterPort { port });
            }
            Event::Exit { exit, acknowledged } => self.exit(exit, acknowledged, now),
            Event::Left(left) => self.left(left, now),
            Event::StopInstalled {
                digest,
                barrier,
                step,
            } => {
                if self.runs(digest) {
                    self.send(ToAgent::StopInstalled {
                        digest,
                        barrier,
                        step,
                    });
                }
            }
            Event::TakesStopSteps(yes) => self.takes_stop_steps(yes),
            Event::Interrupt => self.interrupt(now),
            Event::Terminate { signal } => self.terminate(signal, now),
        }
    }

    pub fn handle_timeout(&mut self, now: Time) {
        if let Some((_, code)) = self.leave_by.filter(|(at, _)| now >= *at) {
            self.say("the agent did not take this node out in time: stopping its workers");
            self.end(code, String::new(), now);
        }
        let Some(stopping) = self.current.as_mut().and_then(|c| c.stopping.as_mut()) else {
            return;
        };
        if now >= stopping.kill_at {
            let since = *stopping.since_kill.get_or_insert(now);
            stopping.kill_at = now + KILL_AGAIN;
            self.effects.push_back(Effect::Kill);
            if !stopping.named && now.since(since) >= STUCK {
                stopping.named = true;
                self.effects.push_back(Effect::NameSurvivors);
            }
        }
    }

    fn say(&mut self, text: impl Into<String>) {
        self.effects.push_back(Effect::Say(text.into()));
    }

    fn send(&mut self, frame: ToAgent) {
        if self.link {
            self.effects.push_back(Effect::Send(frame));
        }
    }

    /// A fact about the newest generation: sent now, and again on every later link.
    fn fact(&mut self, frame: ToAgent) {
        if !self.facts.contains(&frame) {
            self.facts.push(frame.clone());
        }
        self.send(frame);
    }

    fn wish(&mut self, frame: ToAgent) {
        self.wishes.push(frame.clone());
        self.send(frame);
    }

    fn link_up(&mut self) {
        self.link = true;
        let mut register = self.register.clone();
        register.running = self.current.as_ref().map(|c| c.start.digest);
        self.send(ToAgent::Register(register));
        if let Some(port) = self.port {
            self.send(ToAgent::MasterPort { port });
        }
        for frame in self.facts.clone().into_iter().chain(self.wishes.clone()) {
            self.send(frame);
        }
    }

    fn runs(&self, digest: Digest) -> bool {
        self.current
            .as_ref()
            .is_some_and(|c| c.start.digest == digest && c.stopping.is_none())
    }

    /// Position in the order of generations; `None` for one that never started here.
    fn age(&self, digest: Digest) -> Option<usize> {
        self.seen.iter().position(|d| *d == digest)
    }

    fn frame(&mut self, frame: ToLauncher, now: Time) {
        match frame {
            ToLauncher::Welcome { .. } => {}
            ToLauncher::Refused { reason } => {
                self.end(1, format!("the agent refused this launcher: {reason}"), now);
            }
            ToLauncher::Waiting { text } => {
                if text != self.waiting && !text.is_empty() {
                    self.say(text.clone());
                }
                self.waiting = text;
            }
            ToLauncher::Start(start) => self.start(start, now),
            ToLauncher::Stop {
                digest,
                grace_ms,
                why,
            } => {
                self.stop(digest, libc::SIGTERM, grace_ms, &why, now);
            }
            ToLauncher::Preempt {
                digest,
                signal,
                grace_ms,
                why,
            } => {
                let signal = if (1..=64).contains(&signal) {
                    signal
                } else {
                    libc::SIGTERM
                };
                self.stop(digest, signal, grace_ms, &why, now);
            }
            ToLauncher::InstallStop {
                digest,
                barrier,
                step,
                grace_ms,
                why,
            } => {
                if self.runs(digest) {
                    let grace = Span::from_millis(grace_ms.into());
                    self.effects.push_back(Effect::InstallStop {
                        digest,
                        barrier,
                        step,
                        grace,
                        why,
                    });
                }
            }
            ToLauncher::ConfirmStop { digest, step, .. } => {
                if self.runs(digest) {
                    self.effects.push_back(Effect::ConfirmStop { step });
                }
            }
            ToLauncher::CancelStop { digest, .. } => {
                if self.runs(digest) {
                    self.effects.push_back(Effect::CancelStop);
                }
            }
            ToLauncher::End { code, report } => self.end(code, report, now),
        }
    }

    fn start(&mut self, start: Start, now: Time) {
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
        self.waiting.clear();
        if self.current.as_ref().is_some_and(|c| c.stopping.is_none()) {
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
    fn try_spawn(&mut self) {
        if self.current.is_some() || self.ending.is_some() {
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

    fn verified(&mut self, digest: Digest, attempt: u32, result: Result<IpAddr, String>) {
        let asked = self
            .pending
            .as_mut()
            .filter(|p| (p.start.digest, p.start.attempt) == (digest, attempt));
        if let Some(pending) = asked {
            pending.verified = Some(result);
            self.try_spawn();
        }
    }

    fn spawned(&mut self, result: Result<(), String>, now: Time) {
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

    fn exit(&mut self, exit: WorkerExit, acknowledged: bool, now: Time) {
        let Some(current) = &mut self.current else {
            return;
        };
        current.running = current.running.saturating_sub(1);
        current.acknowledged |= acknowledged;
        let all = current.running == 0;
        if current.stopping.is_some() {
            return;
        }
        let digest = current.start.digest;
        if exit.code != 0 {
            current.failed.push(exit.clone());
            self.failures.push(exit.clone());
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

    fn left(&mut self, left: Left, now: Time) {
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
            Left::Nothing => {
                let (finished, told) = (stopping.finished, stopping.told);
                let (digest, attempt) = (current.start.digest, current.start.attempt);
                let unstarted = current.unstarted.take();
                self.current = None;
                if let Some(reason) = unstarted {
                    self.fact(ToAgent::StartFailed {
                        digest,
                        attempt,
                        reason,
                    });
                }
                match told {
                    // What was told to stop is this generation or a newer one.
                    Some(digest) => self.fact(ToAgent::Stopped { digest }),
                    None if finished => self.fact(ToAgent::Finished { digest }),
                    None => self.fact(ToAgent::Stopped { digest }),
                }
                if let Some((code, report)) = self.ending.clone() {
                    self.effects.push_back(Effect::Exit { code, report });
                } else {
                    self.try_spawn();
                }
            }
        }
    }

    /// STOP and PREEMPT: both end this generation and every earlier one.
    fn stop(&mut self, digest: Digest, signal: i32, grace_ms: u32, why: &str, now: Time) {
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
            Some((true, already)) => {
                if !already && !why.is_empty() {
                    self.say(format!("stopping the workers: {why}"));
                }
                self.begin_stop(
                    signal,
                    Span::from_millis(grace_ms.into()),
                    Some(digest),
                    now,
                );
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
    fn begin_stop(&mut self, signal: i32, grace: Span, told: Option<Digest>, now: Time) {
        let Some(current) = &mut self.current else {
            return;
        };
        let kill_at = now + grace;
        match &mut current.stopping {
            None => {
                current.stopping = Some(Stopping {
                    kill_at,
                    since_kill: None,
                    named: false,
                    finished: false,
                    told,
                });
                self.effects.push_back(Effect::Signal(signal));
            }
            Some(stopping) => {
                if stopping.since_kill.is_none() && kill_at < stopping.kill_at {
                    stopping.kill_at = kill_at;
                    self.effects.push_back(Effect::Signal(signal));
                }
                stopping.told = told.or(stopping.told);
            }
        }
    }

    /// The job is over for this launcher.
    fn end(&mut self, code: i32, report: String, now: Time) {
        if self.ending.is_some() {
            return;
        }
        let report = report::with_local(&report, code, &self.failures);
        self.pending = None;
        self.leave_by = None;
        self.ending = Some((code, report.clone()));
        if self.current.is_some() {
            let grace = self.register.spec.loss_grace();
            self.begin_stop(libc::SIGTERM, grace, None, now);
        } else {
            self.effects.push_back(Effect::Exit { code, report });
        }
    }

    /// No agent to ask: stop what runs here with the agreed signal and exit.
    fn end_alone(&mut self, code: i32, now: Time) {
        self.pending = None;
        self.ending = Some((code, String::new()));
        if self.current.is_some() {
            let spec = &self.register.spec;
            let (signal, grace) = (spec.preempt_signal, spec.stop_grace());
            self.begin_stop(signal, grace, None, now);
        } else {
            self.effects.push_back(Effect::Exit {
                code,
                report: String::new(),
            });
        }
    }

    fn interrupt(&mut self, now: Time) {
        const CODE: i32 = 128 + libc::SIGINT;
        self.interrupts += 1;
        if self.interrupts > 1 {
            self.effects.push_back(Effect::Abort { code: CODE });
        } else if self.ending.is_none() {
            self.say("stopping; Ctrl-C again kills");
            if self.link {
                self.wish(ToAgent::Cancel);
            } else {
                self.end_alone(CODE, now);
            }
        }
    }

    fn terminate(&mut self, signal: i32, now: Time) {
        if self.ending.is_some() || self.leave_by.is_some() {
            return;
        }
        let code = 128 + signal;
        let grace = self.register.spec.stop_grace();
        self.say(format!(
            "told to leave by signal {signal}; this node goes within {grace}"
        ));
        if self.link {
            self.leave_by = Some((now + grace, code));
            let grace_ms = self.register.spec.stop_grace_ms;
            self.wish(ToAgent::Leave { grace_ms });
        } else {
            self.end_alone(code, now);
        }
    }

    fn takes_stop_steps(&mut self, yes: bool) {
        let Some(digest) = self.current.as_ref().map(|c| c.start.digest) else {
            return;
        };
        if !self.runs(digest) {
            return;
        }
        self.facts
            .retain(|f| !matches!(f, ToAgent::TakesStopSteps { .. }));
        self.fact(ToAgent::TakesStopSteps { digest, yes });
    }
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
