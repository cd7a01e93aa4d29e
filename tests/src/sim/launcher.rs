//! A launcher: the real [`Session`], around workers, pages and processes that are modelled. How long
//! things take is the conductor's to draw.

mod sidecar;
mod slots;
mod steps;
mod workers;

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};

use muster_launcher::{Effect, Event, Left, Session, patience};
use muster_protocol::agent::ConnId;
use muster_protocol::checkpoint::Save;
use muster_protocol::local::{Question, Register, Review, SaveAsk, Start, ToAgent, ToLauncher};
use muster_protocol::record::Place;
use muster_protocol::spec::JobSpec;
use muster_protocol::{Digest, LauncherId, Span, StoreUuid};
use serde::{Deserialize, Serialize};

pub use self::sidecar::ANSWER;
use self::slots::Slots;
pub use self::slots::{Left as LeftSlots, Saving, SlotDue, manifest, step_of};
use self::steps::Steps;
pub use self::steps::{Idle, LOOK};
pub use self::workers::{Phase, Run};
use super::clock::{Clock, MS, SEC, US};
use super::step::Found;

/// How long a step takes.
pub const STEP: u64 = 50 * MS;

/// How often the launcher looks at what is left of a generation.
const LOOK_LEFT: u64 = 10 * MS;

/// To make processes, and to dial the guard of rank 0's launcher.
const SPAWN: u64 = 20 * MS;
/// How long an answer of that guard is awaited, and how often.
const DIALS: (u64, u32) = (2 * SEC, 3);

/// An order is answered so much later at most than its grace is over: live workers that compute are
/// waited for, and what runs before it may have a grace of its own.
const ANSWERS: u64 = 30 * SEC;

/// Something that falls due in a launcher or its workers. The number is the run's epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Due {
    /// The processes that the launcher makes exist.
    Spawned(u64),
    /// Rank 0's guard was dialled, so often.
    Verified {
        digest: Digest,
        attempt: u32,
        dials: u32,
    },
    Dead(u64),
    Parked(u64),
    /// The stop step is reached and what the worker saves is saved.
    AtStop(u64),
    /// The step of a checkpoint is reached, and what the worker saves is saved.
    Saved(u64),
    /// A look at how far the workers are.
    Look(u64),
    /// The last step is done, if nothing keeps the workers from it any more.
    Finish(u64),
    /// The launcher hears which of its children have ended.
    Reap,
    /// It looks at what is left of a generation.
    Left,
    /// The session wanted to be called then.
    Timer(u64),
    /// The sidecar of a launcher that is stopped since then looks after its workers.
    Sidecar(u64),
    Slot(SlotDue),
}

/// Effects that a launcher wants done.
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
    /// They have left this generation, and live on.
    Parked(Digest),
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
    /// A rank's file is durable, or all of a save's manifest.
    Wrote {
        save: Save,
        rank: u32,
    },
    Manifest {
        save: Save,
        world: u32,
    },
    /// It looks which of these checkpoints are in the store, and which should go.
    Review(Review),
    /// It reads a checkpoint that somebody found damaged.
    LookAgain(Question),
    Delete(String),
    /// The sidecar asks the agent for how long the workers may go on.
    AskLease,
    /// Nobody's word covers them any more.
    LeaseOver,
    /// It drops its connection for a new one.
    Relink,
    /// The launcher itself is gone.
    Exit,
}

/// Traits of its workers, and faults that befall them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Habits {
    /// They stay in their processes while generations change.
    pub live: bool,
    /// They link the runtime and take stop steps.
    pub stop_steps: bool,
    /// They ignore SIGTERM.
    pub stubborn: bool,
    /// Starts that will fail.
    pub trouble: u32,
    /// How long the ranks here save for a checkpoint.
    pub save: u64,
    /// The launcher looks for those that stand still.
    pub watches: bool,
    /// One that is named as hung is ended.
    pub ends_hung: bool,
    /// How much later than they ended it hears of it.
    pub reaped_after: u64,
    /// No signal ends them before this time.
    pub unkillable_until: u64,
    /// How long they may go on by the launcher's last word alone, while it is stopped.
    pub word: u64,
    /// How they save into slots, if they do.
    pub saving: Option<Saving>,
}

/// News that wait for a launcher to handle them.
#[derive(Clone, Debug)]
enum News {
    Event(Event),
    Ask(SaveAsk),
    Reap,
    Timer,
}

#[derive(Debug)]
pub struct Launcher {
    pub id: LauncherId,
    /// Unique in the run of the simulation.
    pub token: u32,
    pub conn: Option<ConnId>,
    /// The connection before, which the agent still asks about.
    pub last_conn: Option<ConnId>,
    pub run: Option<Run>,
    pub habits: Habits,
    /// Where this launcher's guard and its masters listen.
    pub address: u8,
    /// SIGSTOP, since when.
    pub paused: Option<u64>,
    /// The generation of which all workers here have finished.
    pub finished: Option<Digest>,
    /// It, or its node, was to leave.
    pub leaves: bool,
    /// Somebody has cancelled the job since it was started.
    pub cancelled: bool,
    /// When it last went on after it was stopped.
    pub went_on: u64,
    /// When it last heard its agent, or went on after it was stopped.
    heard: u64,
    /// Until when somebody's word covers the workers of a launcher that is stopped.
    covered: u64,
    /// The generation whose workers the sidecar ended.
    lease_over: Option<Digest>,
    clock: Clock,
    session: Session,
    slots: Slots,
    port: u16,
    inbox: VecDeque<News>,
    /// It makes processes and handles nothing until they exist.
    making: Option<Start>,
    /// Waits that fell due while it was stopped.
    late: Vec<(Due, Found)>,
    armed: Option<u64>,
    looks: bool,
    epochs: u64,
    /// The generations about which orders came, and by when these are to be answered.
    orders: BTreeMap<Digest, u64>,
    /// The barrier of the confirm that was heard last.
    confirms: u32,
    /// No agent has taken this launcher up since it lost the last one.
    alone: bool,
    over: bool,
}

#[derive(Clone, Debug)]
pub struct NewLauncher {
    pub id: LauncherId,
    pub token: u32,
    pub index: usize,
    pub clock: Clock,
    pub job: String,
    pub spec: JobSpec,
    pub store: Option<StoreUuid>,
    pub slots: u16,
    pub habits: Habits,
}

impl Launcher {
    pub fn new(new: NewLauncher, now: u64) -> Launcher {
        let address = new.index as u8 + 1;
        let register = Register {
            launcher: new.id,
            job: new.job,
            spec: new.spec,
            slots: new.slots,
            guard_port: guard_port(new.token),
            addrs: vec![IpAddr::V4(Ipv4Addr::new(10, 0, 0, address))],
            place: Place::default(),
            running: None,
            waited_ms: 0,
            began: None,
            lineage: None,
            gate: None,
            store: new.store,
            parity: 0,
            pid: new.token,
            command: "train".into(),
            log_dir: None,
        };
        let mut launcher = Launcher {
            id: new.id,
            token: new.token,
            conn: None,
            last_conn: None,
            run: None,
            habits: new.habits,
            address,
            paused: None,
            finished: None,
            leaves: false,
            cancelled: false,
            went_on: 0,
            heard: now,
            covered: 0,
            lease_over: None,
            clock: new.clock,
            slots: Slots::new(new.habits.saving, register.slots),
            session: Session::new(register),
            port: 20_000,
            inbox: VecDeque::new(),
            making: None,
            late: Vec::new(),
            armed: None,
            looks: false,
            epochs: 0,
            orders: BTreeMap::new(),
            confirms: 0,
            alone: false,
            over: false,
        };
        launcher.event(Event::Port(launcher.port), now);
        launcher
    }

    pub fn guard_port(&self) -> u16 {
        guard_port(self.token)
    }

    /// Whether it answers for its node.
    pub fn vouches(&self) -> bool {
        self.session.vouches()
    }

    /// Whether it has lost its agent, and no other has taken it up.
    pub fn is_alone(&self) -> bool {
        self.alone
    }

    /// When it last heard that there is an agent; not before it was last able to.
    pub fn heard(&self) -> u64 {
        self.heard
    }

    /// The connection to an agent stands.
    pub fn connected(&mut self, conn: ConnId, now: u64) -> Vec<Out> {
        self.conn = Some(conn);
        self.last_conn = Some(conn);
        self.tell(Event::LinkUp, now)
    }

    /// The agent is gone, or the connection to it.
    pub fn disconnected(&mut self, now: u64) -> Vec<Out> {
        self.conn = None;
        self.alone = true;
        self.orders.clear();
        self.tell(Event::LinkDown, now)
    }

    /// A frame of the agent.
    pub fn receive(&mut self, frame: ToLauncher, now: u64) -> Vec<Out> {
        let mut out = Vec::new();
        if matches!(frame, ToLauncher::Welcome { .. }) {
            self.alone = false;
            if self.paused.is_none() {
                out.push(Out::Say(ToAgent::Alive));
            }
        }
        let by = |grace_ms: u32| now + u64::from(grace_ms) * MS + ANSWERS;
        match &frame {
            ToLauncher::Start(start) => {
                // What was ordered before counts no more.
                self.orders.clear();
                self.orders.insert(start.digest, by(0));
            }
            ToLauncher::Stop {
                digest, grace_ms, ..
            }
            | ToLauncher::Preempt {
                digest, grace_ms, ..
            } => {
                self.orders.entry(*digest).or_insert(by(*grace_ms));
            }
            ToLauncher::End { .. } | ToLauncher::Refused { .. } => self.orders.clear(),
            _ => {}
        }
        if let ToLauncher::Save(ask) = frame {
            self.inbox.push_back(News::Ask(ask));
            self.go_on(now, &mut out);
            return out;
        }
        out.extend(self.tell(Event::Frame(frame), now));
        out
    }

    /// An order that should have been answered by now.
    pub fn unanswered(&self, now: u64) -> Option<Digest> {
        let late = self.orders.iter().find(|(_, by)| now > **by);
        late.map(|(digest, _)| *digest)
    }

    /// A frame about a generation answers the orders about it.
    fn answers(&mut self, frame: &ToAgent) {
        if let ToAgent::Started { digest, .. }
        | ToAgent::StartFailed { digest, .. }
        | ToAgent::Stopped { digest }
        | ToAgent::Finished { digest } = frame
        {
            self.orders.remove(digest);
        }
    }

    /// Something happens to the launcher, which learns of it once it runs and has time.
    pub fn tell(&mut self, event: Event, now: u64) -> Vec<Out> {
        let mut out = Vec::new();
        self.inbox.push_back(News::Event(event));
        self.go_on(now, &mut out);
        out
    }

    /// `found`: who dials the guard of rank 0's launcher finds that.
    pub fn due(&mut self, due: Due, found: Found, now: u64) -> Vec<Out> {
        let mut out = Vec::new();
        let thread = matches!(
            due,
            Due::Slot(SlotDue::Made { .. } | SlotDue::Wrote { .. } | SlotDue::Assembled { .. })
        );
        let own = thread || matches!(due, Due::Spawned(_) | Due::Verified { .. } | Due::Reap);
        if own && self.paused.is_some() {
            self.late.push((due, found));
            return out;
        }
        match due {
            Due::Spawned(epoch) if epoch == self.epochs => {
                if let Some(start) = self.making.take() {
                    self.begin(start, now, &mut out);
                    self.lapse(now, &mut out);
                }
            }
            Due::Spawned(_) => {}
            Due::Verified {
                digest,
                attempt,
                dials,
            } if found == Found::Mute && dials < DIALS.1 => out.push(Out::Wait {
                due: Due::Verified {
                    digest,
                    attempt,
                    dials: dials + 1,
                },
                ns: DIALS.0,
                exact: true,
            }),
            Due::Verified {
                digest, attempt, ..
            } => {
                let result = match found {
                    Found::Answered => Ok(IpAddr::V4(Ipv4Addr::new(10, 0, 0, self.address))),
                    _ => Err("the launcher of rank 0 cannot be verified".to_owned()),
                };
                self.inbox.push_back(News::Event(Event::Verified {
                    digest,
                    attempt,
                    result,
                }));
            }
            Due::Reap => self.inbox.push_back(News::Reap),
            Due::Left => {
                self.looks = false;
                self.look_left(now);
            }
            Due::Timer(at) if self.armed == Some(at) => {
                self.armed = None;
                self.inbox.push_back(News::Timer);
            }
            Due::Timer(_) => {}
            Due::Sidecar(since) => self.sidecar(since, now, &mut out),
            Due::Dead(epoch) if self.is_at(epoch) => self.dead(143, &mut out),
            Due::Parked(epoch) if self.is_at(epoch) => self.park_if_free(now, &mut out),
            Due::AtStop(epoch) => self.at_stop(epoch, now, &mut out),
            Due::Saved(epoch) => self.save_over(epoch, now, &mut out),
            Due::Look(epoch) => self.look(epoch, now, &mut out),
            Due::Slot(due) => self.slot_due(due, now, &mut out),
            Due::Finish(epoch) if self.is_at(epoch) => self.finish(None, &mut out),
            Due::Dead(_) | Due::Parked(_) | Due::Finish(_) => {}
        }
        self.go_on(now, &mut out);
        out
    }

    fn is_at(&self, epoch: u64) -> bool {
        self.run.as_ref().is_some_and(|r| r.epoch == epoch)
    }

    fn event(&mut self, event: Event, now: u64) {
        self.session.handle(event, self.clock.local(now));
    }

    /// Handles what waits and does what follows, until it has to wait itself.
    fn go_on(&mut self, now: u64, out: &mut Vec<Out>) {
        while self.paused.is_none() && self.making.is_none() && !self.over {
            if let Some(effect) = self.session.poll_effect() {
                self.carry_out(effect, now, out);
            } else if let Some(news) = self.inbox.pop_front() {
                self.handle(news, now, out);
            } else {
                break;
            }
        }
        if self.paused.is_some() || self.making.is_some() || self.over {
            return;
        }
        if self.run.as_ref().is_some_and(Run::is_reaped) && !self.session.has_workers() {
            self.run = None;
        }
        let due = self.session.poll_timeout().map(|(at, _)| at);
        if let Some(at) = due.map(|at| self.clock.global(at).max(now + US))
            && self.armed.is_none_or(|armed| at < armed)
        {
            self.armed = Some(at);
            out.push(Out::Wait {
                due: Due::Timer(at),
                ns: at - now,
                exact: true,
            });
        }
        let parked = self.run.as_ref().is_some_and(|r| r.phase == Phase::Parked);
        let look = self.session.is_draining() || (parked && self.session.awaits_parking());
        if look && !self.looks {
            self.looks = true;
            out.push(Out::Wait {
                due: Due::Left,
                ns: LOOK_LEFT,
                exact: true,
            });
        }
    }

    fn handle(&mut self, news: News, now: u64, out: &mut Vec<Out>) {
        match news {
            News::Event(event) => {
                if matches!(event, Event::Frame(ToLauncher::Welcome { .. })) {
                    self.heard = now;
                }
                if let Event::Frame(ToLauncher::ConfirmStop { barrier, .. }) = &event {
                    self.confirms = *barrier;
                }
                if matches!(event, Event::ParkedAlone { .. }) {
                    // Copies that they sealed before they parked are told before that.
                    self.tell_slots(out);
                }
                self.event(event, now);
            }
            News::Ask(ask) => self.save_asked(ask, out),
            News::Reap => {
                // Copies that they sealed before they ended are told before their end.
                self.tell_slots(out);
                let ends = self.run.as_mut().map(|r| std::mem::take(&mut r.ends));
                for (exit, acknowledged) in ends.into_iter().flatten() {
                    if exit.code == 0 && !acknowledged {
                        self.slots_ended(exit.local_rank, out);
                    }
                    self.event(Event::Exit { exit, acknowledged }, now);
                }
            }
            News::Timer => self.session.handle_timeout(self.clock.local(now)),
        }
    }

    fn look_left(&mut self, now: u64) {
        let left = match &self.run {
            None => Left::Nothing,
            Some(run) if run.is_reaped() => Left::Nothing,
            Some(run) if run.phase == Phase::Parked => Left::Parked,
            Some(_) => return,
        };
        if self.paused.is_some() || self.making.is_some() {
            return;
        }
        if left == Left::Nothing {
            self.run = None;
        }
        self.event(Event::Left(left), now);
    }

    fn carry_out(&mut self, effect: Effect, now: u64, out: &mut Vec<Out>) {
        match effect {
            Effect::Send(frame) => {
                self.answers(&frame);
                if let ToAgent::Finished { digest } = &frame {
                    self.finished = Some(*digest);
                }
                let begins = matches!(frame, ToAgent::Register(_));
                out.push(Out::Say(frame));
                if begins {
                    out.extend(self.slots_link_up());
                }
            }
            Effect::VerifyMaster(start) => out.push(Out::Wait {
                due: Due::Verified {
                    digest: start.digest,
                    attempt: start.attempt,
                    dials: 0,
                },
                ns: SPAWN,
                exact: false,
            }),
            Effect::Spawn { start, .. } => self.spawn(start, now, out),
            Effect::FreshPort { used } => {
                if used == Some(self.port) {
                    self.port += 1;
                }
                self.event(Event::Port(self.port), now);
            }
            Effect::EndTerm(_) => self.end_term(now, out),
            Effect::Signal(_) => self.terminate(now, out),
            Effect::KillUnparked if self.run.as_ref().is_some_and(|r| r.phase == Phase::Parked) => {
            }
            Effect::KillUnparked | Effect::Kill => self.kill(now, out),
            Effect::InstallStop {
                digest,
                barrier,
                step,
                reason,
                ..
            } => {
                if let Some(step) = self.install((barrier, step, reason), now) {
                    let event = Event::StopInstalled {
                        digest,
                        barrier,
                        step,
                    };
                    self.event(event, now);
                }
            }
            Effect::ConfirmStop { step } => self.confirm_stop(step, now, out),
            Effect::ConfirmCheckpoint { step } => self.confirm_checkpoint(step, now, out),
            Effect::CancelStop => {
                if let Some(run) = self.run.as_mut().filter(|r| !r.confirmed) {
                    run.steps.cancel(now);
                }
            }
            Effect::Look { digest, number } => self.look_asked(digest, number, now, out),
            Effect::Hung { digest, ranks, .. } => self.named(digest, &ranks, now, out),
            Effect::Moves | Effect::Say(_) | Effect::NameRunning { .. } | Effect::NameSurvivors => {
            }
            Effect::Exit { .. } | Effect::Abort { .. } => {
                self.over = true;
                out.push(Out::Exit);
            }
        }
    }

    fn spawn(&mut self, start: Start, now: u64, out: &mut Vec<Out>) {
        if self.habits.trouble > 0 {
            self.habits.trouble -= 1;
            let result = Err("the port is taken".to_owned());
            return self.event(Event::Spawned { result }, now);
        }
        if self.run.as_ref().is_some_and(|r| r.phase == Phase::Parked) {
            return self.begin(start, now, out);
        }
        self.epochs += 1;
        self.making = Some(start);
        out.push(Out::Wait {
            due: Due::Spawned(self.epochs),
            ns: SPAWN,
            exact: false,
        });
    }

    /// The workers of this start exist, or those that had parked have taken it up.
    fn begin(&mut self, start: Start, now: u64, out: &mut Vec<Out>) {
        self.epochs += 1;
        self.slots_begin(&start, out);
        let mut run = Run::new(start.clone(), self.epochs, now);
        if self.habits.watches {
            run.watches();
            out.push(Out::Wait {
                due: Due::Look(self.epochs),
                ns: LOOK,
                exact: true,
            });
        }
        self.run = Some(run);
        out.push(Out::Spawned(start));
        self.session.set_patience(match self.habits.live {
            true => patience(Some(Span(STEP))),
            false => Span::ZERO,
        });
        self.event(Event::Spawned { result: Ok(()) }, now);
        if self.habits.stop_steps {
            self.inbox
                .push_back(News::Event(Event::TakesStopSteps(true)));
        }
    }
}

fn guard_port(token: u32) -> u16 {
    10_000 + (token % 10_000) as u16
}
