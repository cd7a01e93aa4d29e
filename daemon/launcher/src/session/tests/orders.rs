//! Every STOP and every START is answered, in whatever state it comes.

use std::collections::{BTreeMap, BTreeSet};

use muster_protocol::rng::Rng;

use super::*;

fn start_of(lineage: u8, number: u8, attempt: u32) -> Start {
    Start {
        digest: digest_of(lineage, number),
        lineage: digest(lineage),
        number: number.into(),
        ..start(number, attempt)
    }
}

/// Its own for every generation of every lineage. Those of the first are what [`start`] has.
fn digest_of(lineage: u8, number: u8) -> Digest {
    let mut digest = digest(number);
    digest.0[0] = lineage;
    digest
}

fn take_up(world: &mut World, lineage: u8, number: u8) -> Vec<Effect> {
    world.frame(ToLauncher::Start(start_of(lineage, number, 1)))
}

fn spawns(effects: &[Effect]) -> Vec<Digest> {
    let spawn = |e: &Effect| match e {
        Effect::Spawn { start, .. } => Some(start.digest),
        _ => None,
    };
    effects.iter().filter_map(spawn).collect()
}

#[test]
fn parked_workers_are_no_reason_to_leave_a_stop_unanswered() {
    // Generation 2 was decided, its START is held, and it is stopped.
    let mut world = parked(1);
    assert_eq!(world.stop(2, 200), [stopped(2)]);
    assert_eq!(world.stop(2, 200), [stopped(2)], "as often as it is told");
    // An agent that comes back hears it again.
    world.on(Event::LinkDown);
    assert!(world.on(Event::LinkUp).contains(&stopped(2)));
    // Its START was on its way.
    assert_eq!(world.start(2), [stopped(2)]);
    assert_eq!(world.start(3), [spawn(3)]);
}

#[test]
fn a_stop_of_what_never_started_waits_for_what_runs() {
    let mut world = World::running(1);
    assert_eq!(world.stop(2, 200), [], "what runs may be newer");
    assert_eq!(world.stop(1, 200), [Effect::EndTerm(SIGTERM)]);
    assert_eq!(world.gone(), [stopped(2), stopped(1)]);
    assert_eq!(world.start(2), [stopped(2)]);

    // The other way round, and with live workers.
    let mut world = World::running(1);
    world.stop(1, 200);
    assert_eq!(world.stop(2, 200), []);
    assert_eq!(
        world.on(Event::Left(Left::Parked)),
        [stopped(1), stopped(2)]
    );
}

#[test]
fn a_stop_of_an_older_generation_does_not_take_the_answer_of_a_newer_ones() {
    let mut world = World::running(1);
    assert_eq!(world.start(2), [Effect::EndTerm(SIGTERM)]);
    world.stop(2, 200);
    world.stop(1, 200);
    assert_eq!(world.gone(), [stopped(2), stopped(1)]);
}

#[test]
fn another_attempt_is_not_told_to_have_stopped() {
    let mut world = World::running(1);
    let again = start(1, 2);
    let ended = world.frame(ToLauncher::Start(again.clone()));
    assert_eq!(ended, [Effect::EndTerm(SIGTERM)]);
    let local = LOCAL;
    let start = again.clone();
    assert_eq!(world.gone(), [Effect::Spawn { start, local }]);
    world.on(Event::Spawned { result: Ok(()) });
    // But once it has stopped, no attempt begins it again.
    world.stop(1, 200);
    assert_eq!(world.gone(), [stopped(1)]);
    let third = Start {
        attempt: 3,
        ..again
    };
    let told = world.frame(ToLauncher::Start(third));
    assert!(
        told.contains(&stopped(1)) && spawns(&told).is_empty(),
        "{told:?}"
    );
}

#[test]
fn parked_workers_end_where_another_lineage_begins() {
    let mut world = parked(7);
    assert_eq!(take_up(&mut world, 9, 1), [Effect::Signal(SIGTERM)]);
    assert_eq!(world.pass(200), [Effect::Kill]);
    let effects = world.gone();
    assert_eq!(spawns(&effects), [digest_of(9, 1)]);

    // They had yet to park.
    let mut world = World::running(7);
    assert_eq!(world.stop(7, 200), [Effect::EndTerm(SIGTERM)]);
    assert_eq!(take_up(&mut world, 9, 1), []);
    assert_eq!(
        world.on(Event::Left(Left::Parked)),
        [stopped(7), Effect::Signal(SIGTERM)]
    );
    assert_eq!(spawns(&world.gone()), [digest_of(9, 1)]);

    // Nobody told them to stop: what an agent is bound to last counts.
    let mut world = World::running(7);
    assert_eq!(take_up(&mut world, 9, 1), [Effect::Signal(SIGTERM)]);
    assert_eq!(spawns(&world.gone()), [digest_of(9, 1)]);
    // No earlier generation of a lineage that it has left is taken up.
    assert_eq!(world.start(6), [stopped(6)]);
}

#[test]
fn workers_are_signalled_before_anything_is_said() {
    let deeds = |world: &mut World| -> Vec<Effect> {
        std::iter::from_fn(|| world.session.poll_effect()).collect()
    };
    let said = |effects: &[Effect]| effects.iter().position(|e| matches!(e, Effect::Say(_)));
    let done = |effects: &[Effect]| {
        let last = effects.iter().rposition(|e| !matches!(e, Effect::Say(_)));
        last.map_or(0, |at| at + 1)
    };
    let check = |effects: &[Effect]| {
        let said = said(effects);
        assert!(said.is_some_and(|at| at >= done(effects)), "{effects:?}");
    };
    let mut world = World::running(1);
    let stop = ToLauncher::Stop {
        digest: digest(1),
        grace_ms: 0,
        why: "no majority".into(),
    };
    world.session.handle(Event::Frame(stop), world.now);
    check(&deeds(&mut world));
    // Told to leave, and no agent helps.
    let mut world = World::running(1);
    world
        .session
        .handle(Event::Terminate { signal: 15 }, world.now);
    check(&deeds(&mut world));
    world.now += Span::from_secs(30);
    world.session.handle_timeout(world.now);
    check(&deeds(&mut world));
    // Some workers of a start exist, others do not.
    let mut world = World::new();
    world.start(1);
    let result = Err("no".into());
    world.session.handle(Event::Spawned { result }, world.now);
    let effects = deeds(&mut world);
    check(&effects);
    assert!(effects.contains(&Effect::KillUnparked), "{effects:?}");
    // Before the end everything is said.
    let mut world = World::new();
    world.on(Event::LinkDown);
    world.session.handle(Event::Interrupt, world.now);
    let effects = deeds(&mut world);
    assert!(
        matches!(effects[..], [Effect::Say(_), Effect::Exit { .. }]),
        "{effects:?}"
    );
}

/// Bound on the delay of an answer: a grace, or the patience with live workers, and the time to notice an end.
const BOUND: Span = Span::from_secs(40);

/// An order whose answer is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Asked {
    Stop(Digest),
    Start(Digest, u32),
}

/// A node with workers that end or park some time after they were told to, and an agent that gives
/// orders as they come.
struct Node {
    world: World,
    rng: Rng,
    /// Workers can park.
    live: bool,
    running: Option<Start>,
    parked: bool,
    dies: Option<Time>,
    parks: Option<Time>,
    verdicts: Vec<(Time, Digest, u32)>,
    link: bool,
    over: bool,
    /// Since when an answer is due.
    asked: BTreeMap<Asked, Time>,
    /// The newest START.
    newest: Option<Start>,
    stopped: BTreeSet<Digest>,
    /// The newest generation of each lineage that was spawned.
    spawned: BTreeMap<Digest, u64>,
    /// Generations that the agent has told to start, and not yet to stop.
    told: BTreeSet<Digest>,
    history: Vec<String>,
}

impl Node {
    fn new(seed: u64) -> Node {
        let mut rng = Rng::new(seed);
        let live = rng.below(2) == 0;
        let mut node = Node {
            world: World::new(),
            rng,
            live,
            running: None,
            parked: false,
            dies: None,
            parks: None,
            verdicts: Vec::new(),
            link: true,
            over: false,
            asked: BTreeMap::new(),
            newest: None,
            stopped: BTreeSet::new(),
            spawned: BTreeMap::new(),
            told: BTreeSet::new(),
            history: vec![format!("seed {seed}, live {live}")],
        };
        let patience = if live { patience(None) } else { Span::ZERO };
        node.world.session.set_patience(patience);
        node
    }

    fn some_time(&mut self, most_ms: u64) -> Time {
        self.world.now + Span::from_millis(self.rng.below(most_ms))
    }

    fn fail(&self, why: &str) -> ! {
        panic!("{why}\n{}", self.history.join("\n"))
    }

    fn event(&mut self, event: Event) {
        let now = self.world.now;
        self.history
            .push(format!("{:?} {event:?}", now.0 / 1_000_000));
        self.world.session.handle(event, now);
        self.carry_out();
    }

    fn carry_out(&mut self) {
        while let Some(effect) = self.world.session.poll_effect() {
            self.history.push(format!("    {effect:?}"));
            let now = self.world.now;
            match effect {
                Effect::Send(frame) => self.heard(&frame),
                Effect::VerifyMaster(start) => {
                    let at = self.some_time(2_000);
                    self.verdicts.push((at, start.digest, start.attempt));
                }
                Effect::Spawn { start, .. } => self.spawn(start),
                Effect::EndTerm(_) if self.parked => {}
                Effect::EndTerm(_) if self.live => {
                    let at = self.some_time(3_000);
                    self.parks.get_or_insert(at);
                }
                Effect::EndTerm(_) | Effect::Signal(_) if self.rng.below(4) > 0 => {
                    let at = self.some_time(3_000);
                    self.dies = Some(self.dies.map_or(at, |d| d.min(at)));
                }
                Effect::KillUnparked if self.parked => {}
                Effect::KillUnparked | Effect::Kill => {
                    let at = now + Span::from_millis(5);
                    self.dies = Some(self.dies.map_or(at, |d| d.min(at)));
                }
                Effect::Exit { .. } => {
                    if self.running.is_some() {
                        self.fail("it exits while workers run");
                    }
                    self.over = true;
                }
                Effect::Abort { .. } => self.over = true,
                _ => {}
            }
        }
    }

    fn heard(&mut self, frame: &ToAgent) {
        match frame {
            ToAgent::Stopped { digest } | ToAgent::Finished { digest } => {
                let runs = self.running.as_ref().filter(|_| !self.parked);
                if runs.is_some_and(|r| r.digest == *digest) {
                    self.fail("what is said to have stopped runs");
                }
                self.stopped.insert(*digest);
                self.asked.remove(&Asked::Stop(*digest));
                self.asked
                    .retain(|a, _| !matches!(a, Asked::Start(d, _) if d == digest));
            }
            ToAgent::Started { digest, attempt }
            | ToAgent::StartFailed {
                digest, attempt, ..
            } => {
                let by = |a: &Asked| matches!(a, Asked::Start(d, n) if d == digest && n <= attempt);
                self.asked.retain(|asked, _| !by(asked));
            }
            _ => {}
        }
    }

    fn spawn(&mut self, start: Start) {
        if self.running.is_some() && !self.parked {
            self.fail("two generations at once");
        }
        if self
            .running
            .as_ref()
            .is_some_and(|r| r.lineage != start.lineage)
        {
            self.fail("workers live on into another lineage");
        }
        if self.stopped.contains(&start.digest) {
            self.fail("what has stopped runs again");
        }
        let newest = self.spawned.entry(start.lineage).or_insert(0);
        if start.number < *newest {
            self.fail("an older generation of its lineage");
        }
        *newest = start.number;
        let result = match self.rng.below(8) {
            0 => Err("no room".to_owned()),
            _ => Ok(()),
        };
        let live_on = result.is_err() && self.parked;
        self.parked = live_on;
        (self.parks, self.dies) = (None, None);
        self.running = Some(start);
        if live_on {
            // The processes are there, and wait on.
            self.parks = Some(self.world.now);
        } else if result.is_err() {
            self.dies = Some(self.world.now + Span::from_millis(5));
        } else if self.rng.below(4) == 0 {
            // They end by themselves.
            self.dies = Some(self.some_time(20_000));
        }
        self.event(Event::Spawned { result });
    }

    /// The workers are gone.
    fn die(&mut self) {
        (self.dies, self.parks) = (None, None);
        let code = if self.rng.below(3) == 0 { 0 } else { 143 };
        for rank in 0..2 {
            self.event(exit(rank, code));
        }
        if self.rng.below(4) == 0 && self.world.session.is_draining() {
            self.event(Event::Left(Left::Groups));
        }
        self.running = None;
        self.parked = false;
        if self.world.session.is_draining() {
            self.event(Event::Left(Left::Nothing));
        }
    }

    fn park(&mut self) {
        self.parks = None;
        if self.running.is_none() {
            return;
        }
        self.parked = true;
        self.event(Event::ParkedAlone {
            acknowledged: false,
            at_ms: 1,
        });
        if self.world.session.awaits_parking() {
            self.event(Event::Left(Left::Parked));
        }
    }

    fn order(&mut self, frame: ToLauncher) {
        let now = self.world.now;
        match &frame {
            ToLauncher::Start(start) => {
                self.newest = Some(start.clone());
                self.told.insert(start.digest);
                // A later order takes the place of what was asked before.
                self.asked.clear();
                self.asked
                    .insert(Asked::Start(start.digest, start.attempt), now);
            }
            ToLauncher::Stop { digest, .. } => {
                self.told.remove(digest);
                self.asked.retain(|a, _| matches!(a, Asked::Stop(_)));
                self.asked.entry(Asked::Stop(*digest)).or_insert(now);
            }
            _ => {}
        }
        self.event(Event::Frame(frame));
    }

    fn act(&mut self) {
        if !self.link {
            return self.link_changes();
        }
        let lineage = 1 + self.rng.below(2) as u8;
        let newest = *self.spawned.get(&digest(lineage)).unwrap_or(&0);
        let number = 1 + (newest + self.rng.below(3)).min(200) as u8 - self.rng.below(2) as u8;
        let digest = digest_of(lineage, number);
        match self.rng.below(12) {
            0..5 => {
                let mut start = start_of(lineage, number, 1 + self.rng.below(2) as u32);
                if self.rng.below(2) == 0 {
                    start.master_launcher = LauncherId([2; 8]);
                }
                self.order(ToLauncher::Start(start));
            }
            5..9 => {
                // An agent stops what it has started before it stops what it never did.
                let mut all: Vec<Digest> = self.told.iter().copied().collect();
                all.retain(|told| *told != digest);
                all.push(digest);
                for digest in all {
                    let grace_ms = self.rng.below(10_000) as u32;
                    self.order(ToLauncher::Stop {
                        digest,
                        grace_ms,
                        why: String::new(),
                    });
                }
            }
            9 | 10 => self.link_changes(),
            _ if self.rng.below(20) == 0 => {
                let (code, report) = (0, String::new());
                self.asked.clear();
                self.order(ToLauncher::End { code, report });
            }
            _ => {}
        }
    }

    fn link_changes(&mut self) {
        self.link = !self.link;
        let event = match self.link {
            true => Event::LinkUp,
            false => Event::LinkDown,
        };
        for at in self.asked.values_mut() {
            *at = self.world.now;
        }
        self.event(event);
        // On a new link the agent gives its order anew.
        if let Some(start) = self.newest.clone().filter(|_| self.link)
            && self
                .asked
                .contains_key(&Asked::Start(start.digest, start.attempt))
        {
            self.order(ToLauncher::Start(start));
        }
    }

    /// To the next thing that is due, or until then.
    fn pass(&mut self, until: Time) {
        while !self.over {
            let timer = self.world.session.poll_timeout().map(|(at, _)| at);
            let verdict = self.verdicts.iter().map(|(at, ..)| *at).min();
            let due = [timer, verdict, self.dies, self.parks];
            let Some(at) = due.into_iter().flatten().min().filter(|at| *at <= until) else {
                break;
            };
            self.world.now = self.world.now.max(at);
            let now = self.world.now;
            if self.dies.is_some_and(|d| d <= now) {
                self.die();
            } else if self.parks.is_some_and(|p| p <= now) {
                self.park();
            } else if let Some(i) = self.verdicts.iter().position(|(at, ..)| *at <= now) {
                let (_, digest, attempt) = self.verdicts.remove(i);
                let result = match self.rng.below(6) {
                    0 => Err("refused".to_owned()),
                    _ => Ok(LOCAL),
                };
                self.event(Event::Verified {
                    digest,
                    attempt,
                    result,
                });
            } else {
                self.world.session.handle_timeout(now);
                self.carry_out();
            }
            self.look();
        }
        self.world.now = self.world.now.max(until);
        self.look();
    }

    fn look(&self) {
        let late = |at: &&Time| self.world.now > **at + BOUND;
        if self.link && !self.over && self.asked.values().any(|at| late(&at)) {
            self.fail(&format!("no answer: {:?}", self.asked));
        }
    }
}

#[test]
fn every_order_is_answered() {
    let mut answered = 0;
    for seed in 0..20_000 {
        let mut node = Node::new(seed);
        for _ in 0..40 {
            if node.over {
                break;
            }
            if node.link || node.rng.below(3) == 0 {
                node.act();
            }
            let most = if node.rng.below(4) == 0 {
                60_000
            } else {
                4_000
            };
            let until = node.some_time(most);
            node.pass(until);
        }
        answered += node.stopped.len();
    }
    assert!(answered > 20_000, "{answered}");
}
