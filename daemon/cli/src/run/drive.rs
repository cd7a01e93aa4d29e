//! The launcher's loop: wait for something, turn it into an event, apply it to the [`Session`],
//! carry out the effects.

mod agent;
mod progress;
mod stops;
mod telling;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use muster_launcher::{Effect, Event, Left, Session};
use muster_protocol::local::{Start, ToAgent, WorkerExit};
use muster_protocol::{Digest, Span, Time};
use nix::sys::signal::Signal;
use nix::time::{ClockId, clock_gettime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::console::{print, say};
use super::control::ControlPage;
use super::embedded::Gone;
use super::guard::{self, Guard};
use super::link::{Dial, LinkEvent, Out, keep};
use super::logs::has_files;
use super::net;
use super::options::Handled;
use super::port::{Masters, ReservedPort};
use super::saves::{self, Saves, Told};
use super::store::{self, JobStore, Keeper};
use super::workers::{Workers, unix_ms};

pub use progress::{Hangs, OnHang, limits};

/// How often what the workers left behind is looked at while it ends: nothing signals the end of a
/// process that is not our child.
const LOOK: Duration = Duration::from_millis(10);

/// How often the sidecar is told that this process moves, and into how many parts a short lease is
/// divided for that.
const BEAT: (Duration, u32) = (Duration::from_millis(100), 15);

/// How often live workers that are to leave their generation are looked at.
const PARKING: Duration = Duration::from_millis(1);

/// How often checkpoint slots are looked at, where there are any.
const SLOTS: Duration = Duration::from_millis(5);

/// How often the control pages are looked at for workers that attach a runtime.
const PAGES: Duration = Duration::from_millis(100);

/// Workers that are killed sooner after their signal had no grace to speak of.
const GRACE: Duration = Duration::from_secs(1);
/// The longest that the dial to rank 0's guard takes, and how often it is tried.
const VERIFY: (Duration, u32) = (Duration::from_secs(2), 3);

/// How long a port stays reserved after its workers were started.
const HOLD_PORT: Duration = Duration::from_secs(60);

/// The longest that an abort waits for what it killed.
const ABORT: Duration = Duration::from_secs(5);

/// `CLOCK_BOOTTIME`, the clock of [`Time`].
pub fn now() -> Time {
    let Ok(spec) = clock_gettime(ClockId::CLOCK_BOOTTIME) else {
        return Time::ZERO;
    };
    let seconds = u64::try_from(spec.tv_sec()).unwrap_or(0);
    let nanos = u64::try_from(spec.tv_nsec()).unwrap_or(0);
    Time(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
}

/// The launcher's parts that touch the machine.
#[derive(Debug)]
pub struct Driver {
    pub workers: Workers,
    pub handled: Handled,
    guard: Guard,
    /// Carries out what the agent asks of the job's store.
    store: Option<Keeper<JobStore>>,
    saves: Saves,
    /// The unspecified address of the family that peers use.
    unspecified: IpAddr,
    next_port: Option<ReservedPort>,
    used_ports: Vec<(Instant, ReservedPort)>,
    masters: Masters,
    link: Option<mpsc::Sender<Out>>,
    /// Since when the agent is away, where people know that.
    away: Option<Instant>,
    /// Whether the agent is a process of its own, which keeps slots for whoever comes after this launcher.
    leaves: bool,
    was_linked: bool,
    /// The generation whose workers were started last.
    running: Option<Digest>,
    /// When this process last noted that it runs.
    awake_at: Time,
    /// When it last said so to the sidecar, while there are workers.
    beaten: Option<Instant>,
    /// When the workers were first told to end.
    signalled: Option<Instant>,
    verdicts: (mpsc::Sender<Verdict>, mpsc::Receiver<Verdict>),
    progress: progress::Progress,
    telling: telling::Telling,
}

type Verdict = (Digest, u32, Result<IpAddr, String>);

/// The reason why the loop's wait ended.
#[derive(Debug)]
enum Woken {
    Child,
    Signal(i32),
    Link(LinkEvent),
    Stored(store::Done),
    Save(saves::Done),
    Verdict(Verdict),
    Dumped(progress::Dumped),
    Timer,
    /// This process says that it runs.
    Pulse,
    Look,
    Parking,
    Slots,
    Pages,
}

/// Result of the loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub code: i32,
}

impl Driver {
    /// `best` is the address that is offered to peers first.
    pub fn new(
        workers: Workers,
        handled: Handled,
        guard: Guard,
        store: Option<Keeper<JobStore>>,
        saves: Saves,
        best: Option<IpAddr>,
        hangs: Hangs,
    ) -> Driver {
        Driver {
            unspecified: match best {
                Some(IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
                _ => Ipv4Addr::UNSPECIFIED.into(),
            },
            workers,
            handled,
            guard,
            store,
            saves,
            next_port: None,
            used_ports: Vec::new(),
            masters: Masters::default(),
            link: None,
            away: None,
            signalled: None,
            leaves: true,
            was_linked: false,
            running: None,
            awake_at: now(),
            beaten: None,
            verdicts: mpsc::channel(16),
            progress: progress::Progress::new(hangs),
            telling: telling::Telling::default(),
        }
    }

    /// Runs until the job is over for this launcher. An error means that it could not start at all.
    /// Once `agent` resolves there is none to wait for, and the job ends here.
    pub async fn run(
        mut self,
        mut session: Session,
        dialer: impl Dial,
        agent: Option<Gone>,
    ) -> io::Result<Outcome> {
        let mut children = signal(SignalKind::child())?;
        let mut signals = self.listen()?;
        let (events, mut link_events) = mpsc::channel(64);
        if let Some(agent) = agent {
            self.leaves = false;
            tokio::spawn(agent::watch(agent, events.clone()));
        }
        tokio::spawn(keep(dialer, events));
        self.fresh_port(None, &mut session);
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut parking = tokio::time::interval(PARKING);
        parking.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut slots = tokio::time::interval(SLOTS);
        slots.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut pages = tokio::time::interval(PAGES);
        pages.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            self.awake(&mut session);
            self.beat(&session);
            if let Some(outcome) = self.carry_out(&mut session) {
                return Ok(outcome);
            }
            let timer = session
                .poll_timeout()
                .map(|(at, _)| Instant::now() + at.since(now()).to_std());
            // A beat comes sooner than a pulse.
            let beat = self.beat_due(&session);
            let pulse = beat.unwrap_or_else(|| Instant::now() + session.pulse().to_std());
            let woken = tokio::select! {
                biased;
                _ = children.recv() => Woken::Child,
                Some(number) = signals.recv() => Woken::Signal(number),
                Some(event) = link_events.recv() => Woken::Link(event),
                done = store::next(&mut self.store) => Woken::Stored(done),
                Some(done) = self.saves.next() => Woken::Save(done),
                Some(verdict) = self.verdicts.1.recv() => Woken::Verdict(verdict),
                Some(done) = self.progress.dumped() => Woken::Dumped(done),
                () = sleep_until(timer.unwrap_or_else(Instant::now)), if timer.is_some() => Woken::Timer,
                () = sleep_until(pulse) => Woken::Pulse,
                _ = look.tick(), if session.is_draining() => Woken::Look,
                _ = parking.tick(), if self.workers.have_live() && session.awaits_parking() => {
                    Woken::Parking
                }
                _ = slots.tick(), if self.saves.is_used() => Woken::Slots,
                _ = pages.tick(), if session.has_workers() => Woken::Pages,
            };
            self.awake(&mut session);
            match woken {
                Woken::Child => self.reap(&mut session),
                Woken::Signal(number) => {
                    // Whoever has attached by now is stopped at a step, not in the middle of one.
                    self.look_who_takes_stop_steps(&mut session);
                    session.handle(asked(number), now());
                }
                Woken::Link(event) => self.link_event(event, &mut session),
                Woken::Stored(done) => self.stored(done),
                Woken::Save(done) => {
                    let told = self.saves.finished(done, &self.workers);
                    self.tell(told);
                }
                Woken::Verdict((digest, attempt, result)) => {
                    let event = Event::Verified {
                        digest,
                        attempt,
                        result,
                    };
                    session.handle(event, now());
                }
                Woken::Dumped(done) => self.dumped(done, &session),
                Woken::Timer => session.handle_timeout(now()),
                Woken::Pulse => {}
                Woken::Look => self.look(&mut session),
                Woken::Parking => self.look_for_parked(&mut session),
                Woken::Slots => {
                    if let Some(outcome) = self.look_at_pages(&mut session) {
                        return Ok(outcome);
                    }
                }
                Woken::Pages => {
                    self.release_ports();
                    if let Some(outcome) = self.look_at_pages(&mut session) {
                        return Ok(outcome);
                    }
                    self.look_for_parked(&mut session);
                    self.watch_progress(&mut session);
                    self.tell_step(&session);
                    if let Some(step) = session.saves() {
                        let saved = self.workers.saved(step);
                        session.handle(saved, now());
                    }
                }
            }
        }
    }

    /// One queue for all signals that were asked for.
    fn listen(&self) -> io::Result<mpsc::Receiver<i32>> {
        let (sender, receiver) = mpsc::channel(16);
        let interrupt = self.handled.interrupt.then_some(Signal::SIGINT);
        // `nohup` asks for a job that outlives its terminal.
        let nohup = |s: &Signal| *s == Signal::SIGHUP && is_ignored(*s);
        let leave = self.handled.leave.iter().copied().filter(|s| !nohup(s));
        for wanted in leave.chain(interrupt) {
            let number = wanted as i32;
            let mut stream = signal(SignalKind::from_raw(number))?;
            let sender = sender.clone();
            tokio::spawn(async move {
                while stream.recv().await.is_some() && sender.send(number).await.is_ok() {}
            });
        }
        Ok(receiver)
    }

    /// A process that was stopped ends its link: a new one brings what holds.
    fn awake(&mut self, session: &mut Session) {
        let since = std::mem::replace(&mut self.awake_at, now());
        if session.runs_again(since, self.awake_at) {
            self.link = None;
        }
    }

    /// The sidecar ended the workers, for this process was stopped.
    fn lapsed(&mut self, digest: Digest, session: &mut Session) {
        if session.lapsed(digest, now()) {
            self.link = None;
        }
    }

    /// Says to the sidecar that this process moves, and whether there are workers.
    fn beat(&mut self, session: &Session) {
        let at = Instant::now();
        let lease = lease(session);
        let beats = session.has_workers() && !lease.is_zero();
        if self.beat_due(session).is_some_and(|due| beats && at < due)
            || (self.beaten, beats) == (None, false)
        {
            return;
        }
        self.workers
            .beat(if beats { lease } else { Duration::ZERO });
        self.beaten = beats.then_some(at);
    }

    /// When the sidecar is told again, while there are workers.
    fn beat_due(&self, session: &Session) -> Option<Instant> {
        let every = BEAT.0.min(lease(session) / BEAT.1);
        self.beaten.map(|at| at + every)
    }

    fn reap(&mut self, session: &mut Session) {
        // What they sealed before they ended is said before their end: the next generation is decided
        // on that word.
        self.look_at_slots();
        let exits = self.workers.reap();
        let killed = |exit: &WorkerExit| exit.signal == Some(libc::SIGKILL);
        if let Some(digest) = self.running
            && exits.iter().any(|(exit, _)| killed(exit))
            && self.workers.were_killed()
        {
            self.lapsed(digest, session);
        }
        if !exits.is_empty() {
            // What they sealed may have come between the two. One that failed has loaded nothing, though it is ended.
            let told = self.saves.look(&self.workers, now());
            self.tell(told);
        }
        for (exit, acknowledged) in exits {
            // One that acknowledged its stop, or was ended, makes way for the next generation.
            if exit.code == 0 && !acknowledged && self.signalled.is_none() {
                self.ended_by_itself(&exit);
            }
            session.handle(Event::Exit { exit, acknowledged }, now());
        }
        if session.is_draining() {
            self.look(session);
        }
    }

    fn look(&mut self, session: &mut Session) {
        let left = self.workers.left();
        if left == Left::Nothing {
            // What was killed last may still be a zombie, its SIGCHLD on the way.
            self.workers.reap();
            self.workers.close_output();
        }
        session.handle(Event::Left(left), now());
    }

    /// Live workers leave no exit status behind: their pages say how far they are.
    fn look_for_parked(&mut self, session: &mut Session) {
        if !self.workers.have_parked() {
            return;
        }
        self.look_at_slots();
        let acknowledged = self.workers.pages().all(|p| p.acknowledged().is_some());
        let at_ms = unix_ms();
        let parked = Event::ParkedAlone {
            acknowledged,
            at_ms,
        };
        session.handle(parked, now());
        if session.awaits_parking() {
            self.look(session);
        }
    }

    fn look_at_slots(&mut self) {
        let told = self.saves.look(&self.workers, now());
        self.tell(told);
        self.tell_saves();
    }

    fn tell(&mut self, told: Told) {
        for text in told.people {
            say(&text);
        }
        for news in told.agent {
            self.send(ToAgent::Save(news));
        }
    }

    /// An operation on the store ended.
    fn stored(&mut self, done: store::Done) {
        let Some(store) = &mut self.store else { return };
        let (answers, news) = store.done(done);
        if let Some(text) = news {
            say(&text);
        }
        for frame in answers {
            self.send(frame);
        }
    }

    fn release_ports(&mut self) {
        let at = Instant::now();
        self.used_ports.retain(|(until, _)| *until > at);
    }

    fn fresh_port(&mut self, used: Option<u16>, session: &mut Session) {
        let taken = self
            .next_port
            .as_ref()
            .is_none_or(|p| Some(p.port()) == used);
        if taken {
            if let Some(port) = self.next_port.take() {
                self.used_ports.push((Instant::now() + HOLD_PORT, port));
            }
            let reserve = || ReservedPort::reserve_on(self.unspecified);
            match self.masters.reserve_another(reserve) {
                Ok(port) => self.next_port = Some(port),
                Err(error) => say(&format!("no port could be reserved for a master: {error}")),
            }
        }
        if let Some(port) = &self.next_port {
            session.handle(Event::Port(port.port()), now());
        }
    }

    fn carry_out(&mut self, session: &mut Session) -> Option<Outcome> {
        self.guard.vouch(session.vouches());
        while let Some(effect) = session.poll_effect() {
            match effect {
                Effect::Send(frame) => self.send_with_slots(frame),
                Effect::VerifyMaster(start) => self.verify(&start),
                Effect::Spawn { start, local } => {
                    let master = start.master.ip();
                    let interface = net::interface_for(&net::addresses(), local, master);
                    self.masters.met(start.master.port());
                    self.was_linked = false;
                    (self.running, self.signalled) = (Some(start.digest), None);
                    self.progress.begin();
                    // What the dead were filling: behind the spawn it would be the new ones'.
                    self.look_at_slots();
                    self.saves.begins(&start);
                    if self.leaves {
                        // The agent may have had no room for their descriptors until now.
                        for news in self.saves.slots() {
                            self.send(ToAgent::Save(news));
                        }
                    }
                    self.telling.begin(&start);
                    // Before there is a worker, or the sidecar takes it for one of those before.
                    self.workers.begin(lease(session));
                    self.beaten = Some(Instant::now());
                    let result = self.workers.spawn(&start, interface.as_deref());
                    muster_fault::point("launcher.spawned");
                    session.handle(Event::Spawned { result }, now());
                    if self.workers.were_killed() {
                        // Stopped in the middle of that: the sidecar may not have seen those that came last.
                        self.lapsed(start.digest, session);
                    }
                    // A child may have ended while nobody was allowed to reap.
                    self.reap(session);
                }
                Effect::FreshPort { used } => self.fresh_port(used, session),
                Effect::EndTerm(number) => {
                    self.signalled.get_or_insert_with(Instant::now);
                    self.workers.end_term(number);
                }
                Effect::KillUnparked => {
                    self.name_killed();
                    self.workers.kill_unparked();
                }
                Effect::Signal(number) => {
                    self.signalled.get_or_insert_with(Instant::now);
                    self.workers.signal(number);
                }
                Effect::Kill => {
                    self.name_killed();
                    self.workers.kill_all();
                }
                Effect::InstallStop {
                    digest,
                    barrier,
                    step,
                    grace,
                    reason,
                } => {
                    if let Some(step) = self.install_stop(step, grace, reason) {
                        let event = Event::StopInstalled {
                            digest,
                            barrier,
                            step,
                        };
                        session.handle(event, now());
                    }
                }
                Effect::ConfirmStop { step } => self.confirm_stop(step),
                Effect::ConfirmCheckpoint { step } => self.confirm_checkpoint(step),
                Effect::Look { digest, number } => {
                    // As they are now: another node may have looked later.
                    self.watch_progress(session);
                    self.tell_standings(digest, number);
                }
                Effect::Hung {
                    digest,
                    ranks,
                    text,
                } => self.hung(digest, &ranks, text),
                Effect::Moves => self.progress.moves(),
                Effect::CancelStop => self.workers.pages().for_each(ControlPage::cancel),
                Effect::Say(text) => say(&text),
                Effect::NameRunning { left } => self.name_running(left),
                Effect::NameSurvivors => say(&format!(
                    "these processes do not end although they were killed (a device or a file system hangs): {:?}",
                    self.workers.survivors()
                )),
                Effect::Exit { code, report, root } => {
                    self.workers.close(code == 0);
                    // The lines behind the first one are of workers.
                    if !report.is_empty() {
                        print(&format!("muster: {report}"));
                    }
                    if let Some(dir) = root.and_then(|rank| self.workers.dir_of(rank)) {
                        say(&match has_files(&dir) {
                            true => format!("logs of that rank: {}", dir.display()),
                            false => "that rank has no log files; --log-dir DIR --tee 3 keeps them"
                                .to_owned(),
                        });
                    }
                    return Some(Outcome { code });
                }
                Effect::Abort { code } => {
                    say("killing the workers");
                    self.abort();
                    return Some(Outcome { code });
                }
            }
        }
        None
    }

    /// A stop that takes long: the script ends by itself, or has not heard the signal.
    fn name_running(&self, left: Span) {
        let running = self.workers.unended();
        if !running.is_empty() {
            say(&format!(
                "not ended yet: {}; what still runs in {:.0} s is killed",
                running.join(", "),
                left.as_secs_f64()
            ));
        }
    }

    /// Workers that had a grace to end in, and did not.
    fn name_killed(&mut self) {
        let had_grace = self.signalled.take().filter(|at| at.elapsed() >= GRACE);
        let running = self.workers.unended();
        if let Some(at) = had_grace
            && !running.is_empty()
        {
            say(&format!(
                "killed, for they had not ended {:.0} s after their signal: {}",
                at.elapsed().as_secs_f64(),
                running.join(", ")
            ));
        }
    }

    /// A script that leaves its loop by itself ends well. On its other ranks it may go on, and no save of theirs is whole
    /// without this one.
    fn ended_by_itself(&mut self, exit: &WorkerExit) {
        if let Some(news) = self.saves.ended(exit.local_rank) {
            self.send(ToAgent::Save(news));
        }
        let step = self.workers.ended_at(exit.local_rank);
        if let Some(step) = step.filter(|_| self.store.is_some()) {
            say(&format!(
                "rank {} has ended with 0 in step {step}, before the end of its training: nothing that it did since the last \
                 save is saved, and no rank that goes on can save any more",
                exit.rank
            ));
        }
    }

    fn abort(&mut self) {
        let deadline = std::time::Instant::now() + ABORT;
        loop {
            self.workers.kill_all();
            self.workers.reap();
            if self.workers.left() == Left::Nothing || std::time::Instant::now() > deadline {
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        self.workers.close(false);
    }

    /// Dials rank 0's guard on a thread of its own, a few times.
    fn verify(&self, start: &Start) {
        let (guard, launcher) = (start.master_guard, start.master_launcher);
        let (digest, attempt) = (start.digest, start.attempt);
        let verdicts = self.verdicts.0.clone();
        tokio::task::spawn_blocking(move || {
            let mut result = Err(String::new());
            for again in 0..VERIFY.1 {
                if again > 0 {
                    std::thread::sleep(Duration::from_millis(50));
                }
                result = guard::verify(guard, launcher, VERIFY.0).map_err(|e| {
                    format!("the launcher of rank 0 cannot be verified from this network namespace: {e}; check firewall and --local-addr")
                });
                if result.is_ok() {
                    break;
                }
            }
            let _ = verdicts.blocking_send((digest, attempt, result));
        });
    }
}

fn lease(session: &Session) -> Duration {
    session.lease().to_std()
}

fn asked(number: i32) -> Event {
    if number == libc::SIGINT {
        Event::Interrupt
    } else {
        Event::Terminate { signal: number }
    }
}

/// Whether this process was started with the signal ignored (`SigIgn` of proc(5)).
fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|m| u64::from_str_radix(m.trim(), 16).ok());
    mask.is_some_and(|m| m & 1 << (signal as i32 - 1) != 0)
}
