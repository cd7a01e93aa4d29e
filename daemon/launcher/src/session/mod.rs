//! Reactions of a launcher to what it hears: a state machine that never touches a process, a socket
//! or a clock.
//!
//! It is monotonic: once a generation's START was accepted, nothing that names an older one acts on
//! what runs (R17). It holds the facts of the newest generation and tells them again to an agent
//! that comes back, so that a crash of the agent at any moment loses none; every fact is idempotent.

mod generation;
mod leaving;
mod link;
mod parking;
mod progress;

use std::collections::VecDeque;
use std::net::IpAddr;

use muster_protocol::barrier::Held;
use muster_protocol::control::Reason;
use muster_protocol::local::{Register, Start, ToAgent, ToLauncher, WorkerExit};
use muster_protocol::{Digest, Span, Time};

use self::link::Link;
use self::progress::{Installed, Saves};
use crate::report;
use crate::signal::SIGTERM;
pub use link::is_said_once;
pub use parking::patience;

/// Generations that are remembered by digest, to tell older from newer.
const REMEMBERED: usize = 64;

/// After a finish, the longest that what the workers left behind may take to end.
const LEFTOVER_GRACE: Span = Span::from_millis(2_000);

/// SIGKILL is sent again this often: a process that forks may have been missed.
const KILL_AGAIN: Span = Span::from_millis(50);

/// Live workers that lost each other may park before anybody here knows why. When no agent has told
/// this launcher to stop after so long, it reports that they gave up.
const ALONE: Span = Span::from_secs(5);

/// Exit code that a worker that gave up counts as: EX_TEMPFAIL of sysexits.h.
const GAVE_UP: i32 = 75;

/// An agent that says nothing for so long is stopped or blocked: it says something every second.
const MUTE: Span = Span::from_secs(5);

/// Workers that have not ended so long after their signal are named, where at least as much of their grace is left.
const SLOW: Span = Span::from_secs(4);

/// Workers that cannot be killed for this long are named.
const STUCK: Span = Span::from_secs(5);

/// Processes that are left of a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Workers themselves run.
    Workers,
    /// The workers are gone, other processes of their groups run.
    Groups,
    /// Only processes that left their group run.
    Escaped,
    /// The workers that run are live ones that have left their generation; nothing else runs.
    Parked,
    Nothing,
}

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
    /// The processes that are left, after something ended.
    Left(Left),
    /// Every worker took the stop step (the answer to [`Effect::InstallStop`]).
    StopInstalled {
        digest: Digest,
        barrier: u32,
        step: u64,
    },
    /// Every worker has a runtime attached, or no longer.
    TakesStopSteps(bool),
    /// Some worker makes no progress for too long, or all do again.
    Stalled(bool),
    /// These workers have saved for the checkpoint that is under way; `all` that run have, or have
    /// `failed` to, and why. Once all have saved or gone on without, they have `passed` it.
    Saved {
        ranks: Vec<u32>,
        all: bool,
        passed: bool,
        failed: Option<String>,
    },
    /// All workers that run have left the generation by themselves: at a stop step that they
    /// acknowledged, or because they lost each other.
    ParkedAlone {
        acknowledged: bool,
        /// Unix milliseconds.
        at_ms: u64,
    },
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
    /// The generation is over: live workers are told to park, the others get the signal.
    EndTerm(i32),
    /// SIGKILL to everything that has not parked.
    KillUnparked,
    /// A signal to the workers' process groups: the job is over here.
    Signal(i32),
    /// SIGKILL to everything.
    Kill,
    InstallStop {
        digest: Digest,
        barrier: u32,
        step: u64,
        grace: Span,
        reason: Reason,
    },
    ConfirmStop {
        step: u64,
    },
    CancelStop,
    /// The workers save at this step, and go on.
    ConfirmCheckpoint {
        step: u64,
    },
    /// Tell the agent where the workers stand.
    Look {
        digest: Digest,
        number: u32,
    },
    /// Everybody waits for some rank, these ones here among them: keep the stacks.
    Hung {
        digest: Digest,
        ranks: Vec<u32>,
        text: String,
    },
    /// They wait no more.
    Moves,
    /// A line for the user.
    Say(String),
    /// Name the workers that take their time to end, and when they are killed.
    NameRunning {
        left: Span,
    },
    /// Name what cannot be killed.
    NameSurvivors,
    /// Nothing runs: print the report and exit. `root` is the local rank of the root cause, if it
    /// was on this node.
    Exit {
        code: i32,
        report: String,
        root: Option<u16>,
    },
    /// Kill what runs and exit without waiting for anyone.
    Abort {
        code: i32,
    },
}

/// A START that waits for what ran before.
#[derive(Clone, Debug)]
struct Pending {
    start: Start,
    /// Whether the master was found; taken once its workers are spawned.
    verified: Option<Result<IpAddr, String>>,
    /// It came on the present link, or again on it: an agent that lost its disk knows nothing of those
    /// before, and its generation may be over.
    confirmed: bool,
}

#[derive(Clone, Debug)]
struct Stopping {
    kill_at: Time,
    /// When people are told who runs still, where that is long before they are killed.
    slow_at: Option<Time>,
    since_kill: Option<Time>,
    named: bool,
    /// Ended by itself with code 0 everywhere.
    finished: bool,
    /// Live workers got the signal, too.
    processes: bool,
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
    /// A stop step is being agreed on: workers may wait at it.
    installed: Option<Installed>,
    /// The newest stop step that all workers took or were told to stop or save at, for an agent that
    /// comes back.
    held: Option<Held>,
    /// The newest that was confirmed of those behind which the workers go on: whoever cancels a later
    /// one leaves it.
    passed: Option<Held>,
    /// The workers save, and go on.
    saves: Option<Saves>,
    /// A stop step was confirmed.
    confirmed: bool,
    /// All that runs has parked since when, though nobody told it to.
    alone_since: Option<(Time, u64)>,
    /// The generation is over here; its live workers wait for the next.
    parked: bool,
}

impl Current {
    /// Its workers may do steps.
    fn trains(&self) -> bool {
        self.stopping.is_none() && !self.parked
    }
}

/// The launcher's core.
#[derive(Debug)]
pub struct Session {
    /// As it is when nothing runs.
    register: Register,
    /// When there was an agent first.
    since: Option<Time>,
    port: Option<u16>,
    link: Link,
    /// Digests of accepted STARTs, oldest first.
    seen: VecDeque<Digest>,
    /// Digest and attempt of the newest of them, and the newest number of each lineage.
    newest: Option<(Digest, u32)>,
    numbers: VecDeque<(Digest, u64)>,
    /// Generations that have stopped or finished here, or were stopped before they began: no START
    /// begins them any more.
    over: VecDeque<Digest>,
    /// Generations that were told to stop, and of which, or of others, something runs yet.
    owed: VecDeque<Digest>,
    pending: Option<Pending>,
    current: Option<Current>,
    /// About the newest generation; told again on every link.
    facts: Vec<ToAgent>,
    /// Requests of the user; told again on every link.
    wishes: Vec<ToAgent>,
    /// Set once the job is over for this launcher.
    ending: Option<(i32, String)>,
    failures: Vec<WorkerExit>,
    /// The failure from which those here follow, and the other node where it was.
    elsewhere: Option<(String, WorkerExit)>,
    interrupts: u32,
    leave_by: Option<(Time, i32)>,
    /// By when an agent that is to hear of Ctrl-C or SIGTERM has to answer, and the exit code otherwise.
    return_by: Option<(Time, i32)>,
    /// How long workers may go on without an agent, and until when they may now.
    agent_grace: Option<Span>,
    alone_by: Option<Time>,
    /// Since when they may not: nothing trains or is started until the agent is heard again.
    alone: Option<Time>,
    /// When the user is told that the agent says nothing, and whether that was told.
    mute_at: Option<Time>,
    mute: bool,
    /// How long a lease of the workers is.
    lease: Span,
    /// How long workers that compute are waited for when their generation ends.
    patience: Span,
    waiting: String,
    effects: VecDeque<Effect>,
    /// Lines for the user, handed out behind the other effects: nobody may read them, and what is to
    /// be done does not wait for that.
    texts: VecDeque<String>,
}

/// Adds to a list that keeps the newest.
fn remember<T: PartialEq>(list: &mut VecDeque<T>, item: T) {
    if !list.contains(&item) {
        if list.len() == REMEMBERED {
            list.pop_front();
        }
        list.push_back(item);
    }
}

impl Session {
    pub fn new(register: Register) -> Session {
        Session {
            register,
            since: None,
            port: None,
            link: Link::Down,
            seen: VecDeque::new(),
            newest: None,
            numbers: VecDeque::new(),
            over: VecDeque::new(),
            owed: VecDeque::new(),
            pending: None,
            current: None,
            facts: Vec::new(),
            wishes: Vec::new(),
            ending: None,
            failures: Vec::new(),
            elsewhere: None,
            interrupts: 0,
            leave_by: None,
            return_by: None,
            agent_grace: None,
            alone_by: None,
            alone: None,
            mute_at: None,
            mute: false,
            lease: Span::ZERO,
            patience: Span::ZERO,
            waiting: String::new(),
            effects: VecDeque::new(),
            texts: VecDeque::new(),
        }
    }

    pub fn poll_effect(&mut self) -> Option<Effect> {
        if let None | Some(Effect::Exit { .. }) = self.effects.front()
            && let Some(text) = self.texts.pop_front()
        {
            return Some(Effect::Say(text));
        }
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
        let back = self.return_by.map(|(at, _)| (at, "no agent to leave by"));
        let alone = self.alone_by.map(|at| (at, "no agent for too long"));
        let mute = self.mute_at.map(|at| (at, "the agent says nothing"));
        let no_agent = self.no_agent_by().map(|at| (at, "no agent any more"));
        let since = self.current.as_ref().and_then(|c| c.alone_since);
        let gave_up = since.map(|(at, _)| (at + ALONE, "the workers parked, and nobody says why"));
        let slow = stopping.and_then(|s| s.slow_at.filter(|_| s.since_kill.is_none()));
        let slow = slow.map(|at| (at, "a stop that takes long"));
        kill.into_iter()
            .chain(slow)
            .chain(leave)
            .chain(back)
            .chain(gave_up)
            .chain(alone)
            .chain(mute)
            .chain(no_agent)
            .min_by_key(|(at, _)| *at)
    }

    /// Whether workers were started and something of them may still run.
    pub fn has_workers(&self) -> bool {
        self.current.is_some()
    }

    /// Whether live workers are about to leave their generation.
    pub fn awaits_parking(&self) -> bool {
        let current = self.current.as_ref();
        current.is_some_and(|c| !c.parked && (c.stopping.is_some() || c.confirmed))
    }

    /// Whether what is left should be looked at: all workers ended.
    pub fn is_draining(&self) -> bool {
        self.current
            .as_ref()
            .is_some_and(|c| c.running == 0 && (!c.parked || c.stopping.is_some()))
    }

    pub fn handle(&mut self, event: Event, now: Time) {
        match event {
            Event::LinkUp => self.link_up(now),
            Event::LinkDown => self.link_down(now),
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
                    self.stop_held(barrier, step);
                    self.send(ToAgent::StopInstalled {
                        digest,
                        barrier,
                        step,
                    });
                }
            }
            Event::TakesStopSteps(yes) => self.takes_stop_steps(yes),
            Event::Stalled(yes) => self.stalled(yes),
            Event::Saved {
                ranks,
                all,
                passed,
                failed,
            } => self.saved(ranks, all, passed, failed),
            Event::ParkedAlone {
                acknowledged,
                at_ms,
            } => self.parked_alone(acknowledged, at_ms, now),
            Event::Interrupt => self.interrupt(now),
            Event::Terminate { signal } => self.terminate(signal, now),
        }
    }

    pub fn handle_timeout(&mut self, now: Time) {
        self.leave_in_time(now);
        self.say_mute(now);
        self.stop_alone(now);
        self.gave_up(now);
        let other = self.ends_processes();
        let Some(stopping) = self.current.as_mut().and_then(|c| c.stopping.as_mut()) else {
            return;
        };
        if stopping.since_kill.is_none() && stopping.slow_at.take_if(|at| now >= *at).is_some() {
            let left = stopping.kill_at.since(now);
            self.effects.push_back(Effect::NameRunning { left });
        }
        if now >= stopping.kill_at {
            let since = *stopping.since_kill.get_or_insert(now);
            stopping.kill_at = now + KILL_AGAIN;
            self.effects.push_back(match other || stopping.processes {
                true => Effect::Kill,
                false => Effect::KillUnparked,
            });
            if !stopping.named && now.since(since) >= STUCK {
                stopping.named = true;
                self.effects.push_back(Effect::NameSurvivors);
            }
        }
    }

    /// Whether all workers of the newest generation exited 0 here, and nothing else is to be started.
    fn has_finished(&self) -> bool {
        let finished = |f: &ToAgent| matches!(f, ToAgent::Finished { .. });
        self.current.is_none() && self.pending.is_none() && self.facts.iter().any(finished)
    }

    fn say(&mut self, text: impl Into<String>) {
        self.texts.push_back(text.into());
    }

    fn exit_now(&mut self, code: i32, report: String) {
        let root = report::root_cause(&self.failures).map(|e| e.local_rank);
        self.effects.push_back(Effect::Exit { code, report, root });
    }

    fn runs(&self, digest: Digest) -> bool {
        self.current
            .as_ref()
            .is_some_and(|c| c.start.digest == digest && c.trains())
    }

    /// Position in the order of generations; `None` for one that never started here.
    fn age(&self, digest: Digest) -> Option<usize> {
        self.seen.iter().position(|d| *d == digest)
    }

    fn frame(&mut self, frame: ToLauncher, now: Time) {
        if !self.takes(&frame) {
            return;
        }
        match frame {
            ToLauncher::Welcome {
                agent_grace_ms,
                lease_ms,
                ..
            } => {
                self.lease = Span::from_millis(lease_ms.into());
                // The others wait this long for the agent: the workers have to be gone by then.
                let grace = Span::from_millis(agent_grace_ms.into());
                self.agent_grace = Some(Span(grace.0 / 4 * 3));
                // Counted from the last word, not from the end of the connection: an agent that is
                // stopped, or hangs, keeps it.
                self.alone_by = self.agent_grace.map(|grace| now + grace);
                self.alone = None;
                self.heard(now);
                // It has heard of Ctrl-C again.
                self.return_by = None;
                self.try_spawn();
            }
            ToLauncher::Refused { reason } => {
                self.end(1, format!("the agent refused this launcher: {reason}"), now);
            }
            ToLauncher::Waiting { text } => {
                // Of what was said before, only what is new.
                let said = |line: &&str| self.waiting.lines().any(|before| before == *line);
                let new: Vec<&str> = text.lines().filter(|line| !said(line)).collect();
                if !new.is_empty() {
                    self.say(new.join("\n"));
                }
                self.waiting = text;
            }
            ToLauncher::Life { lineage } => self.register.lineage = lineage,
            ToLauncher::Start(start) => self.start(start, now),
            ToLauncher::Stop {
                digest,
                grace_ms,
                why,
            } => {
                self.stop(digest, SIGTERM, grace_ms, &why, now);
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
                    SIGTERM
                };
                self.stop(digest, signal, grace_ms, &why, now);
            }
            ToLauncher::InstallStop {
                digest,
                barrier,
                step,
                grace_ms,
                reason,
            } => {
                // Asked again until then: nobody's checkpoint is taken away.
                let saving = |c: &Current| c.is_saving(now);
                if self.runs(digest) && !self.current.as_ref().is_some_and(saving) {
                    let grace = Span::from_millis(grace_ms.into());
                    if let Some(current) = &mut self.current {
                        let until = now + progress::agreeing(grace);
                        current.installed = Some(Installed { reason, until });
                        current.saves = None;
                    }
                    self.effects.push_back(Effect::InstallStop {
                        digest,
                        barrier,
                        step,
                        grace,
                        reason,
                    });
                }
            }
            ToLauncher::ConfirmStop {
                digest,
                barrier,
                step,
                reason,
            } => {
                if self.runs(digest) {
                    let held = Held {
                        barrier,
                        step,
                        reason,
                        confirmed: true,
                    };
                    self.stop_confirmed(held, now);
                }
            }
            ToLauncher::CancelStop { digest, .. } => {
                // What workers save for is confirmed, and nothing is installed behind it.
                let saving = |c: &Current| c.is_saving(now);
                if self.runs(digest) && !self.current.as_ref().is_some_and(saving) {
                    if let Some(current) = &mut self.current {
                        current.cancelled();
                    }
                    self.effects.push_back(Effect::CancelStop);
                }
            }
            ToLauncher::End { code, report } => self.end(code, report, now),
            // The driver's: an answer changes nothing here.
            ToLauncher::Store { .. } | ToLauncher::Save(_) => {}
            ToLauncher::Failed { node, exit } => {
                // Told once it is clear whether the job goes on or ends by it.
                let here = self.failures.iter().any(|e| e.rank == exit.rank);
                self.elsewhere = (!here).then_some((node, exit));
            }
            ToLauncher::Look { digest, number } => {
                if self.runs(digest) {
                    self.effects.push_back(Effect::Look { digest, number });
                }
            }
            ToLauncher::Hung {
                digest,
                text,
                ranks,
            } => {
                if text.is_empty() {
                    self.say("all ranks make progress again");
                    self.effects.push_back(Effect::Moves);
                } else if self.runs(digest) {
                    self.say(text.clone());
                    self.effects.push_back(Effect::Hung {
                        digest,
                        ranks,
                        text,
                    });
                }
            }
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
pub(crate) mod tests;
