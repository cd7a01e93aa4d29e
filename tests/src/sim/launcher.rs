//! A launcher with its workers, reduced to what its agent and its peers can see of it. It answers
//! the frames of `local` as the real one does; how long things take is the conductor's to draw.

mod steps;

use std::net::{IpAddr, Ipv4Addr};

use muster_protocol::agent::ConnId;
use muster_protocol::hang::{Limits, Watch};
use muster_protocol::local::{Register, Start, ToAgent, ToLauncher, WorkerExit};
use muster_protocol::record::Place;
use muster_protocol::spec::JobSpec;
use muster_protocol::{Digest, LauncherId, NodeId, Span, StoreUuid};
use serde::{Deserialize, Serialize};

use self::steps::Steps;
pub use self::steps::{Idle, LOOK};
use super::clock::MS;

/// How long a step takes.
pub const STEP: u64 = 50 * MS;
/// From SIGKILL until the process is reaped.
const KILL: u64 = 15 * MS;

/// Something that falls due in a launcher. The number is its run's epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Due {
    Spawned(u64),
    Dead(u64),
    /// The stop step is reached and what the worker saves is saved.
    AtStop(u64),
    /// The step of a checkpoint is reached, and what the worker saves is saved.
    Saved(u64),
    /// A look at how far the workers are.
    Look(u64),
    /// The last step is done, if nothing keeps the workers from it any more.
    Finish(u64),
    /// The agent may not have been heard for longer than its grace.
    AgentGone,
}

/// What a launcher wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Out {
    Say(ToAgent),
    /// Call back after this time; `exact` when it is a limit and not a duration.
    Wait {
        due: Due,
        ns: u64,
        exact: bool,
    },
    /// The workers of this start exist from now on.
    Spawned(Start),
    /// They do not any more.
    Died(Digest),
    /// The ranks here stopped at this step of a confirmed barrier.
    StoppedAt {
        digest: Digest,
        step: u64,
        installed: Option<(u32, u64)>,
    },
    /// The ranks here save at this step of a confirmed checkpoint, and go on.
    SavesAt {
        digest: Digest,
        barrier: u32,
        step: u64,
        installed: Option<(u32, u64)>,
    },
    /// The launcher itself is gone.
    Exit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Starting,
    Running,
    Stopping,
}

/// One generation's workers.
#[derive(Clone, Debug)]
pub struct Run {
    pub start: Start,
    pub phase: Phase,
    epoch: u64,
    began: u64,
    dies_at: u64,
    /// The stop that was asked for, when it named a later generation.
    told: Option<Digest>,
    exit: Option<WorkerExit>,
    pub steps: Steps,
    confirmed: bool,
    /// The launcher's eye on the workers, if it keeps one.
    watch: Option<Watch>,
}

#[derive(Clone, Debug)]
pub struct Launcher {
    pub id: LauncherId,
    /// Unique in the run of the simulation.
    pub token: u32,
    pub conn: Option<ConnId>,
    /// The connection before, which the agent still asks about.
    pub last_conn: Option<ConnId>,
    pub run: Option<Run>,
    pub stubborn: bool,
    /// Starts that will fail.
    pub trouble: u32,
    /// Where this launcher's guard and its masters listen.
    pub address: u8,
    node: NodeId,
    slots: u16,
    stop_steps: bool,
    /// How long the ranks here save for a checkpoint.
    save: u64,
    watches: bool,
    /// A worker that is named as hung is ended.
    ends_hung: bool,
    next: Option<Start>,
    seen: Vec<Digest>,
    newest: Option<(Digest, u64, u32)>,
    /// What is told again on every new connection: about the newest generation, and for good.
    facts: Vec<ToAgent>,
    wishes: Vec<ToAgent>,
    port: u16,
    epochs: u64,
    /// When an agent last said that it is there.
    heard: u64,
    watching: bool,
    /// No agent has taken this launcher up since it lost the last one.
    alone: bool,
    grace: u64,
    ending: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct NewLauncher {
    pub id: LauncherId,
    pub token: u32,
    pub node: NodeId,
    pub index: usize,
    pub slots: u16,
    pub stop_steps: bool,
    pub stubborn: bool,
    pub trouble: u32,
    pub save: u64,
    pub watches: bool,
    pub ends_hung: bool,
    /// How long workers run on without an agent.
    pub agent_grace: u64,
}

impl Launcher {
    pub fn new(new: &NewLauncher) -> Launcher {
        Launcher {
            id: new.id,
            token: new.token,
            conn: None,
            last_conn: None,
            run: None,
            stubborn: new.stubborn,
            trouble: new.trouble,
            address: new.index as u8 + 1,
            node: new.node,
            slots: new.slots,
            stop_steps: new.stop_steps,
            save: new.save,
            watches: new.watches,
            ends_hung: new.ends_hung,
            next: None,
            seen: Vec::new(),
            newest: None,
            facts: Vec::new(),
            wishes: Vec::new(),
            port: 20_000,
            epochs: 0,
            heard: 0,
            watching: false,
            alone: false,
            // As the real one: gone well before the others stop waiting for its agent.
            grace: new.agent_grace / 4 * 3,
            ending: false,
        }
    }

    pub fn guard_port(&self) -> u16 {
        10_000 + (self.token % 10_000) as u16
    }

    /// Whether it has lost its agent, and no other has taken it up.
    pub fn is_alone(&self) -> bool {
        self.alone
    }

    /// The workers that exist now.
    pub fn alive(&self) -> Option<&Run> {
        let run = self.run.as_ref()?;
        matches!(run.phase, Phase::Running | Phase::Stopping)
            .then_some(run)
            .filter(|r| r.began != u64::MAX)
    }

    /// Workers that train: nobody told them to stop and none has failed.
    pub fn training(&self) -> Option<&Run> {
        self.run
            .as_ref()
            .filter(|r| r.phase == Phase::Running && r.exit.is_none())
    }

    /// The connection to an agent stands: the first frames on it.
    pub fn connected(
        &mut self,
        conn: ConnId,
        job: &str,
        spec: &JobSpec,
        store: Option<StoreUuid>,
    ) -> Vec<ToAgent> {
        self.conn = Some(conn);
        self.last_conn = Some(conn);
        let running = self
            .run
            .as_ref()
            .filter(|r| matches!(r.phase, Phase::Running | Phase::Stopping));
        let gate = running.filter(|r| r.phase == Phase::Running && r.exit.is_none());
        let gate = gate.and_then(|r| r.steps.held);
        let running = running.map(|r| r.start.digest);
        let mut frames = vec![
            ToAgent::Register(Register {
                launcher: self.id,
                job: job.to_owned(),
                spec: spec.clone(),
                slots: self.slots,
                guard_port: self.guard_port(),
                addrs: vec![IpAddr::V4(Ipv4Addr::new(10, 0, 0, self.address))],
                place: Place::default(),
                running,
                gate,
                store,
                parity: 0,
                pid: self.token,
                command: "train".into(),
                log_dir: None,
            }),
            ToAgent::MasterPort { port: self.port },
        ];
        frames.extend(self.facts.iter().cloned());
        frames.extend(self.wishes.iter().cloned());
        frames
    }

    /// The agent is gone, or the connection to it.
    pub fn disconnected(&mut self) {
        self.conn = None;
        self.alone = true;
    }

    /// Waits for the agent's next word.
    fn watch(&mut self, now: u64, out: &mut Vec<Out>) {
        self.watching = true;
        out.push(Out::Wait {
            due: Due::AgentGone,
            ns: (self.heard + self.grace).saturating_sub(now),
            exact: true,
        });
    }

    pub fn receive(&mut self, frame: ToLauncher, now: u64) -> Vec<Out> {
        let mut out = Vec::new();
        match frame {
            ToLauncher::Welcome { .. } => {
                self.alone = false;
                self.heard = now;
                if !self.watching {
                    self.watch(now, &mut out);
                }
            }
            // The core speaks to its store by effects, which the world carries out.
            ToLauncher::Waiting { .. }
            | ToLauncher::Store { .. }
            | ToLauncher::Failed { .. }
            | ToLauncher::Save(_) => {}
            ToLauncher::Look { digest, number } => self.look_asked(digest, number, now, &mut out),
            ToLauncher::Hung { digest, ranks, .. } => self.named(digest, &ranks, now, &mut out),
            ToLauncher::Refused { .. } | ToLauncher::End { .. } => {
                self.ending = true;
                self.next = None;
                match self.run.is_some() {
                    true => self.end_run(200 * MS, None, now, &mut out),
                    false => out.push(Out::Exit),
                }
            }
            ToLauncher::Start(start) => self.start(start, now, &mut out),
            ToLauncher::Stop {
                digest, grace_ms, ..
            } => {
                self.stop(digest, u64::from(grace_ms) * MS, now, &mut out);
            }
            // Another signal, the same end.
            ToLauncher::Preempt {
                digest, grace_ms, ..
            } => self.stop(digest, u64::from(grace_ms) * MS, now, &mut out),
            ToLauncher::InstallStop {
                digest,
                barrier,
                step,
                reason,
                ..
            } => {
                self.install(digest, (barrier, step, reason), now, &mut out);
            }
            ToLauncher::ConfirmStop {
                digest,
                barrier,
                step,
                reason,
            } => {
                self.confirm(digest, (barrier, step, reason), now, &mut out);
            }
            ToLauncher::CancelStop { digest, .. } => {
                if let Some(run) = self.running(digest)
                    && !run.confirmed
                {
                    run.steps.cancel(now);
                }
            }
        }
        out
    }

    pub fn due(&mut self, due: Due, now: u64) -> Vec<Out> {
        let mut out = Vec::new();
        match due {
            Due::Spawned(epoch) => self.spawned(epoch, now, &mut out),
            Due::Dead(epoch) => {
                if self
                    .run
                    .as_ref()
                    .is_some_and(|r| r.epoch == epoch && r.phase == Phase::Stopping)
                {
                    self.died(&mut out);
                }
            }
            Due::AtStop(epoch) => {
                let ready = self
                    .run
                    .as_ref()
                    .filter(|r| r.epoch == epoch && r.phase == Phase::Running && r.confirmed);
                match ready.map(|r| r.steps.is_at_gate(now)) {
                    Some(true) => self.died(&mut out),
                    // It waits for a rank that hangs.
                    Some(false) => out.push(Out::Wait {
                        due,
                        ns: LOOK,
                        exact: true,
                    }),
                    None => {}
                }
            }
            Due::Saved(epoch) => self.save_over(epoch, now, &mut out),
            Due::Look(epoch) => self.look(epoch, now, &mut out),
            Due::Finish(epoch) => {
                let run = self.run.as_ref().filter(|r| r.epoch == epoch);
                if let Some(digest) = run.map(|r| r.start.digest) {
                    self.finish(digest, &mut out);
                }
            }
            // An agent that is stopped keeps the connection, and says nothing.
            Due::AgentGone if now < self.heard + self.grace => self.watch(now, &mut out),
            Due::AgentGone => {
                self.watching = false;
                self.next = None;
                self.end_run(0, None, now, &mut out);
            }
        }
        out
    }

    /// A worker ends by itself with this code. `at_ms` is its node's wall clock.
    pub fn fail(&mut self, code: i32, at_ms: u64) -> Option<ToAgent> {
        let run = self.run.as_mut()?;
        if run.phase != Phase::Running || run.exit.is_some() {
            return None;
        }
        let exit = WorkerExit {
            rank: run.start.first_rank,
            local_rank: 0,
            pid: self.token,
            code,
            signal: None,
            hung: false,
            damaged: None,
            at_ms,
            tail: String::new(),
        };
        run.exit = Some(exit.clone());
        let frame = ToAgent::Exited {
            digest: run.start.digest,
            exit,
        };
        self.facts.push(frame.clone());
        Some(frame)
    }

    /// The user's wish, told to every agent that comes.
    pub fn wish(&mut self, frame: ToAgent) -> Vec<Out> {
        self.wishes.push(frame.clone());
        vec![Out::Say(frame)]
    }

    fn fact(&mut self, frame: ToAgent, out: &mut Vec<Out>) {
        if !self.facts.contains(&frame) {
            self.facts.push(frame.clone());
        }
        out.push(Out::Say(frame));
    }

    fn running(&mut self, digest: Digest) -> Option<&mut Run> {
        self.run
            .as_mut()
            .filter(|r| r.start.digest == digest && r.phase == Phase::Running)
    }

    fn start(&mut self, start: Start, now: u64, out: &mut Vec<Out>) {
        if self.ending {
            return;
        }
        if let Some((digest, number, attempt)) = self.newest {
            if (digest, attempt) == (start.digest, start.attempt) {
                return out.extend(self.facts.iter().cloned().map(Out::Say));
            }
            let newer = if digest == start.digest {
                start.attempt > attempt
            } else if self.age(start.digest).is_some() {
                false
            } else {
                // A lower number is another lineage, taken up when nothing runs.
                start.number > number || (self.run.is_none() && self.next.is_none())
            };
            if !newer {
                return;
            }
        }
        if self.age(start.digest).is_none() {
            self.seen.push(start.digest);
        }
        self.newest = Some((start.digest, start.number, start.attempt));
        self.facts.clear();
        if self.run.is_none() {
            return self.spawn(start, out);
        }
        self.next = Some(start);
        self.end_run(200 * MS, None, now, out);
    }

    fn age(&self, digest: Digest) -> Option<usize> {
        self.seen.iter().position(|d| *d == digest)
    }

    fn spawn(&mut self, start: Start, out: &mut Vec<Out>) {
        if self.trouble > 0 {
            self.trouble -= 1;
            if start.node_rank == 0 {
                self.port += 1;
                out.push(Out::Say(ToAgent::MasterPort { port: self.port }));
            }
            return self.fact(refused(&start), out);
        }
        self.epochs += 1;
        self.run = Some(Run {
            start,
            phase: Phase::Starting,
            epoch: self.epochs,
            began: u64::MAX,
            dies_at: u64::MAX,
            told: None,
            exit: None,
            steps: Steps::default(),
            confirmed: false,
            watch: None,
        });
        out.push(Out::Wait {
            due: Due::Spawned(self.epochs),
            ns: 20 * MS,
            exact: false,
        });
    }

    fn spawned(&mut self, epoch: u64, now: u64, out: &mut Vec<Out>) {
        let Some(run) = self
            .run
            .as_mut()
            .filter(|r| r.epoch == epoch && r.phase == Phase::Starting)
        else {
            return;
        };
        run.phase = Phase::Running;
        run.began = now;
        run.steps = Steps::begin(now);
        let (digest, attempt) = (run.start.digest, run.start.attempt);
        let leads = run.start.node_rank == 0;
        out.push(Out::Spawned(run.start.clone()));
        self.fact(ToAgent::Started { digest, attempt }, out);
        if leads {
            self.port += 1;
            out.push(Out::Say(ToAgent::MasterPort { port: self.port }));
        }
        if self.stop_steps {
            self.fact(ToAgent::TakesStopSteps { digest, yes: true }, out);
        }
        if self.watches
            && let Some(run) = &mut self.run
        {
            run.watch = Some(Watch::new(Limits {
                factor: 20,
                least: Span::from_secs(2),
            }));
            out.push(Out::Wait {
                due: Due::Look(epoch),
                ns: LOOK,
                exact: true,
            });
        }
    }

    /// STOP and PREEMPT: both end this generation and every earlier one.
    fn stop(&mut self, digest: Digest, grace: u64, now: u64, out: &mut Vec<Out>) {
        let Some(age) = self.age(digest) else {
            // Never started here. What runs may be newer, so it is left alone.
            if self.run.is_none() && self.next.is_none() {
                out.push(Out::Say(ToAgent::Stopped { digest }));
            }
            return;
        };
        let upto = |s: &Start| self.seen.iter().position(|d| *d == s.digest) <= Some(age);
        if self.next.as_ref().is_some_and(upto) {
            self.next = None;
        }
        match self.run.as_ref().map(|r| upto(&r.start)) {
            Some(true) => self.end_run(grace, Some(digest), now, out),
            Some(false) => out.push(Out::Say(ToAgent::Stopped { digest })),
            None => self.fact(ToAgent::Stopped { digest }, out),
        }
    }

    /// SIGTERM, then SIGKILL after the grace.
    fn end_run(&mut self, grace: u64, told: Option<Digest>, now: u64, out: &mut Vec<Out>) {
        let stubborn = self.stubborn;
        let Some(run) = &mut self.run else {
            return;
        };
        run.told = told.or(run.told);
        let at = match run.phase {
            Phase::Starting => return self.died(out),
            Phase::Running if stubborn => now + grace + KILL,
            Phase::Running => now + grace.min(60 * MS) + KILL,
            Phase::Stopping => run.dies_at.min(now + grace + KILL),
        };
        if run.phase == Phase::Stopping && at >= run.dies_at {
            return;
        }
        self.epochs += 1;
        run.epoch = self.epochs;
        run.phase = Phase::Stopping;
        run.dies_at = at;
        out.push(Out::Wait {
            due: Due::Dead(run.epoch),
            ns: at - now,
            exact: true,
        });
    }

    fn died(&mut self, out: &mut Vec<Out>) {
        let Some(run) = self.run.take() else {
            return;
        };
        let digest = run.start.digest;
        out.push(Out::Died(digest));
        let digest = run.told.unwrap_or(digest);
        self.fact(ToAgent::Stopped { digest }, out);
        if self.ending {
            return out.push(Out::Exit);
        }
        if let Some(next) = self.next.take() {
            self.spawn(next, out);
        }
    }

    pub fn node(&self) -> NodeId {
        self.node
    }
}

fn refused(start: &Start) -> ToAgent {
    ToAgent::StartFailed {
        digest: start.digest,
        attempt: start.attempt,
        reason: "the port is taken".into(),
    }
}
