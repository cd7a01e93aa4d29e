mod away;
mod orders;
mod parking;
mod progress;
mod silence;

use std::net::SocketAddr;

use muster_protocol::LauncherId;
use muster_protocol::record::Place;
use muster_protocol::spec::JobSpec;

use super::*;

const ME: LauncherId = LauncherId([1; 8]);
const LOCAL: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

struct World {
    session: Session,
    now: Time,
}

fn digest(n: u8) -> Digest {
    Digest([n; 32])
}

pub(crate) fn start(n: u8, attempt: u32) -> Start {
    let addr = SocketAddr::from(([127, 0, 0, 1], 1000 + u16::from(n)));
    Start {
        digest: digest(n),
        lineage: digest(1),
        attempt,
        number: n.into(),
        node_rank: 0,
        nodes: 1,
        first_rank: 0,
        slots: 2,
        world: 2,
        master: addr,
        master_guard: addr,
        master_launcher: ME,
        restart_count: 0,
        restore: None,
        peers: Box::default(),
        why: String::new(),
    }
}

fn exit(local_rank: u16, code: i32) -> Event {
    let exit = WorkerExit {
        rank: local_rank.into(),
        local_rank,
        pid: 10,
        code,
        signal: None,
        hung: false,
        out_of_memory: None,
        damaged: None,
        at_ms: 0,
        tail: String::new(),
    };
    Event::Exit {
        exit,
        acknowledged: false,
    }
}

impl World {
    fn new() -> World {
        let session = Session::new(Register {
            launcher: ME,
            job: "j".into(),
            spec: JobSpec::default(),
            slots: 2,
            guard_port: 1,
            addrs: vec![LOCAL],
            place: Place::default(),
            running: None,
            waited_ms: 0,
            began: None,
            lineage: None,
            gate: None,
            store: None,
            parity: 0,
            pid: 1,
            log_dir: None,
            command: String::new(),
        });
        let mut world = World {
            session,
            now: Time(1_000_000_000),
        };
        world.on(Event::LinkUp);
        world
    }

    /// Nothing runs here for this long; whether the link has to be renewed.
    fn sleeps(&mut self, ms: u64) -> bool {
        let since = self.now;
        self.now += Span::from_millis(ms);
        self.session.runs_again(since, self.now)
    }

    /// The effects of an event, without what is said.
    fn on(&mut self, event: Event) -> Vec<Effect> {
        self.session.handle(event, self.now);
        self.effects()
    }

    fn effects(&mut self) -> Vec<Effect> {
        std::iter::from_fn(|| self.session.poll_effect())
            .filter(|e| !matches!(e, Effect::Say(_)))
            .collect()
    }

    fn frame(&mut self, frame: ToLauncher) -> Vec<Effect> {
        self.on(Event::Frame(frame))
    }

    fn start(&mut self, n: u8) -> Vec<Effect> {
        self.frame(ToLauncher::Start(start(n, 1)))
    }

    fn running(n: u8) -> World {
        let mut world = World::new();
        assert_eq!(world.start(n), [spawn(n)]);
        world.on(Event::Spawned { result: Ok(()) });
        world
    }

    fn stop(&mut self, n: u8, grace_ms: u32) -> Vec<Effect> {
        self.frame(ToLauncher::Stop {
            digest: digest(n),
            grace_ms,
            why: String::new(),
        })
    }

    fn gone(&mut self) -> Vec<Effect> {
        self.on(exit(0, 143));
        self.on(exit(1, 143));
        self.on(Event::Left(Left::Nothing))
    }

    fn pass(&mut self, ms: u64) -> Vec<Effect> {
        self.now += Span::from_millis(ms);
        self.session.handle_timeout(self.now);
        self.effects()
    }
}

fn spawn(n: u8) -> Effect {
    Effect::Spawn {
        start: start(n, 1),
        local: LOCAL,
    }
}

fn stopped(n: u8) -> Effect {
    Effect::Send(ToAgent::Stopped { digest: digest(n) })
}

fn finished(n: u8) -> Effect {
    Effect::Send(ToAgent::Finished { digest: digest(n) })
}

#[test]
fn a_newer_start_ends_the_older_workers_first() {
    let mut world = World::running(1);
    assert_eq!(world.start(2), [Effect::EndTerm(SIGTERM)]);
    assert_eq!(world.pass(199), []);
    assert_eq!(world.pass(1), [Effect::KillUnparked]);
    assert_eq!(world.pass(50), [Effect::KillUnparked]);
    assert_eq!(world.gone(), [stopped(1), spawn(2)]);
}

#[test]
fn nothing_older_acts_on_what_runs() {
    let mut world = World::running(1);
    world.stop(1, 100);
    world.start(2);
    assert_eq!(world.gone(), [stopped(1), spawn(2)]);
    world.on(Event::Spawned { result: Ok(()) });
    assert_eq!(world.stop(1, 0), [stopped(1)]);
    assert_eq!(world.start(1), [stopped(1)]);
    // One that never started here may be older: it stops nothing.
    assert_eq!(world.stop(9, 0), []);
    // A lower number does not end newer workers either.
    assert_eq!(world.start(0), [stopped(0)]);
    assert!(world.session.runs(digest(2)));
}

#[test]
fn a_start_of_an_earlier_link_is_begun_only_once_it_is_said_again() {
    let mut world = World::running(1);
    assert_eq!(world.start(2), [Effect::EndTerm(SIGTERM)]);
    world.on(Event::LinkDown);
    world.on(Event::LinkUp);
    // The agent may have lost its disk, and the generation may be over.
    assert_eq!(world.gone(), [stopped(1)]);
    assert!(world.start(2).contains(&spawn(2)));
    // Once.
    assert!(!world.start(2).contains(&spawn(2)));
}

#[test]
fn a_lineage_with_lower_numbers_is_joined_when_nothing_runs() {
    let mut world = World::running(7);
    world.stop(7, 100);
    world.gone();
    let other = Start {
        lineage: digest(2),
        ..start(3, 1)
    };
    let effects = world.frame(ToLauncher::Start(other));
    assert!(matches!(effects[..], [Effect::Spawn { .. }]), "{effects:?}");
    // What was left behind stays behind.
    world.on(Event::Spawned { result: Ok(()) });
    assert_eq!(world.start(7), [stopped(7)]);
}

#[test]
fn a_grace_is_only_ever_shortened() {
    let mut world = World::running(1);
    assert_eq!(world.stop(1, 30_000), [Effect::EndTerm(SIGTERM)]);
    assert_eq!(world.stop(1, 60_000), []);
    assert_eq!(world.stop(1, 100), [Effect::EndTerm(SIGTERM)]);
    assert_eq!(world.pass(100), [Effect::KillUnparked]);
    assert_eq!(world.stop(1, 60_000), []);
    assert_eq!(world.gone(), [stopped(1)]);
}

#[test]
fn workers_that_take_long_to_end_are_named_once() {
    let mut world = World::running(1);
    world.stop(1, 30_000);
    assert_eq!(world.pass(3_900), []);
    let left = Span::from_secs(26);
    assert_eq!(world.pass(100), [Effect::NameRunning { left }]);
    assert_eq!(world.pass(20_000), []);
    // Where they are killed soon anyway, nobody is told.
    let mut world = World::running(1);
    world.stop(1, 7_000);
    assert_eq!(world.pass(6_900), []);
}

#[test]
fn the_facts_are_told_again_to_an_agent_that_comes_back() {
    let mut world = World::running(1);
    world.on(Event::LinkDown);
    assert_eq!(world.on(exit(0, 3)), []);
    assert_eq!(
        world.on(Event::Terminate { signal: 15 }),
        [Effect::Signal(15)]
    );
    let told = world.on(Event::LinkUp);
    let Some(Effect::Send(ToAgent::Register(register))) = told.first() else {
        panic!("{told:?}")
    };
    assert_eq!(register.running, Some(digest(1)));
    assert!(told.contains(&Effect::Send(ToAgent::Started {
        digest: digest(1),
        attempt: 1
    })));
    assert!(
        told.iter()
            .any(|e| matches!(e, Effect::Send(ToAgent::Exited { .. })))
    );
}

#[test]
fn finished_means_that_all_ended_well_and_nothing_is_left() {
    let mut world = World::running(1);
    assert_eq!(world.on(exit(0, 0)), []);
    assert_eq!(world.on(exit(1, 0)), [Effect::EndTerm(SIGTERM)]);
    assert_eq!(world.on(Event::Left(Left::Groups)), []);
    // What left its group got no signal.
    assert_eq!(world.on(Event::Left(Left::Escaped)), [Effect::KillUnparked]);
    assert_eq!(world.on(Event::Left(Left::Nothing)), [finished(1)]);

    let mut world = World::running(1);
    let one_failed = world.on(exit(0, 3));
    assert!(matches!(
        one_failed[..],
        [Effect::Send(ToAgent::Exited { .. })]
    ));
    world.on(exit(1, 0));
    assert_eq!(world.on(Event::Left(Left::Nothing)), [stopped(1)]);

    // A stop that comes while what they left behind ends does not undo it.
    let mut world = World::running(1);
    world.on(exit(0, 0));
    world.on(exit(1, 0));
    assert_eq!(world.stop(1, 5_000), []);
    let both = [finished(1), stopped(1)];
    assert_eq!(world.on(Event::Left(Left::Nothing)), both);

    // Stopped at a step, with exit code 0: there is more to do.
    let mut world = World::running(1);
    world.on(exit(0, 0));
    let Event::Exit { exit, .. } = exit(1, 0) else {
        return;
    };
    world.on(Event::Exit {
        exit,
        acknowledged: true,
    });
    assert_eq!(world.on(Event::Left(Left::Nothing)), [stopped(1)]);
}

#[test]
fn a_failed_start_is_told_when_nothing_of_it_runs() {
    let mut world = World::new();
    world.start(1);
    let told = world.on(Event::Spawned {
        result: Err("no".into()),
    });
    let freed = Effect::FreshPort { used: Some(1001) };
    assert_eq!(told, [Effect::KillUnparked, freed]);
    let failed = Effect::Send(ToAgent::StartFailed {
        digest: digest(1),
        attempt: 1,
        reason: "no".into(),
    });
    let told = world.on(Event::Left(Left::Nothing));
    assert_eq!(told, std::slice::from_ref(&failed));
    // The same START again: the same answer, no second try.
    assert_eq!(world.start(1), [failed]);
    // Another attempt is another START.
    let again = world.frame(ToLauncher::Start(start(1, 2)));
    assert!(matches!(again[..], [Effect::Spawn { .. }]));
}

#[test]
fn a_late_verdict_about_a_stopped_generation_starts_nothing() {
    let mut world = World::new();
    let mut other = start(1, 1);
    other.master_launcher = LauncherId([2; 8]);
    let asked = world.frame(ToLauncher::Start(other));
    assert!(matches!(asked[..], [Effect::VerifyMaster(_)]));
    assert_eq!(world.stop(1, 0), [stopped(1)]);
    let verdict = Event::Verified {
        digest: digest(1),
        attempt: 1,
        result: Ok(LOCAL),
    };
    assert_eq!(world.on(verdict), []);
}

#[test]
fn a_start_whose_agent_went_begins_once_an_agent_says_it_again() {
    let mut world = World::new();
    let mut other = start(1, 1);
    other.master_launcher = LauncherId([2; 8]);
    world.frame(ToLauncher::Start(other.clone()));
    world.on(Event::LinkDown);
    let verdict = Event::Verified {
        digest: digest(1),
        attempt: 1,
        result: Ok(LOCAL),
    };
    assert_eq!(world.on(verdict), [], "it may have been taken back");
    world.on(Event::LinkUp);
    let (start, local) = (other.clone(), LOCAL);
    let told = world.frame(ToLauncher::Start(other));
    assert_eq!(told, [Effect::Spawn { start, local }]);
}

#[test]
fn a_stop_does_not_wait_for_a_start_that_nobody_says_again() {
    let mut world = World::new();
    let mut other = start(1, 1);
    other.master_launcher = LauncherId([2; 8]);
    world.frame(ToLauncher::Start(other));
    world.on(Event::LinkDown);
    world.on(Event::LinkUp);
    assert_eq!(world.stop(2, 200), [stopped(1), stopped(2)]);
}

#[test]
fn the_end_waits_for_the_workers() {
    let mut world = World::running(1);
    let end = ToLauncher::End {
        code: 3,
        report: "r".into(),
    };
    assert_eq!(world.frame(end.clone()), [Effect::Signal(SIGTERM)]);
    assert_eq!(world.start(2), []);
    let exit = Effect::Exit {
        code: 3,
        report: "r".into(),
        root: None,
    };
    assert_eq!(world.gone(), [stopped(1), exit.clone()]);
    let mut idle = World::new();
    assert_eq!(idle.frame(end), [exit]);
}

#[test]
fn a_failure_elsewhere_is_told_once_it_is_clear_what_follows() {
    let failed = |rank: u32| {
        let exit = WorkerExit {
            rank,
            local_rank: 0,
            pid: 77,
            code: 3,
            signal: None,
            hung: false,
            out_of_memory: None,
            damaged: None,
            at_ms: 5,
            tail: "Traceback\nboom".into(),
        };
        let node = "b (22)".into();
        Event::Frame(ToLauncher::Failed { node, exit })
    };
    let says = |world: &mut World| -> Vec<String> {
        let all = std::iter::from_fn(|| world.session.poll_effect());
        all.filter_map(|e| match e {
            Effect::Say(text) | Effect::Exit { report: text, .. } => Some(text),
            _ => None,
        })
        .filter(|text| text.contains("the cause"))
        .collect()
    };
    let cause =
        "the cause: rank 5 (local rank 0, pid 77) on b (22): exit code 3\n    Traceback\n    boom";
    // The job goes on: said before the next generation, and not again.
    let mut world = World::running(1);
    let now = world.now;
    world.session.handle(failed(5), now);
    assert!(
        says(&mut world).is_empty(),
        "it may be the end, which tells it"
    );
    world
        .session
        .handle(Event::Frame(ToLauncher::Start(start(2, 1))), now);
    assert_eq!(says(&mut world), [cause]);
    // It ends: told in the report.
    let mut world = World::new();
    world.session.handle(failed(5), now);
    let end = ToLauncher::End {
        code: 3,
        report: "r".into(),
    };
    world.session.handle(Event::Frame(end.clone()), now);
    assert_eq!(says(&mut world), [format!("r\n{cause}")]);
    // The failure was here: the report tells it as this node's own.
    let mut world = World::running(1);
    world.on(exit(0, 3));
    world.session.handle(failed(0), now);
    world.session.handle(Event::Frame(end), now);
    let report = world.gone().into_iter().find_map(|e| match e {
        Effect::Exit { report, .. } => Some(report),
        _ => None,
    });
    let report = report.unwrap();
    assert!(
        report.contains("first failure on this node: rank 0") && !report.contains("the cause"),
        "{report}"
    );
}

#[test]
fn told_to_leave_it_goes_even_if_the_agent_does_nothing() {
    let mut world = World::running(1);
    world.frame(welcome());
    let leave = Effect::Send(ToAgent::Leave { grace_ms: 30_000 });
    assert_eq!(world.on(Event::Terminate { signal: 15 }), [leave]);
    assert_eq!(world.on(Event::Terminate { signal: 15 }), []);
    for _ in 0..29 {
        assert_eq!(world.pass(1_000), []);
        assert_eq!(world.frame(welcome()), []);
    }
    assert_eq!(world.pass(999), []);
    assert_eq!(world.pass(1), [Effect::Signal(SIGTERM)]);
    let told = world.gone();
    assert!(
        matches!(told[..], [_, Effect::Exit { code: 143, .. }]),
        "{told:?}"
    );
}

#[test]
fn timers_end_with_the_session() {
    let mut world = World::running(1);
    world.on(Event::Terminate { signal: 15 });
    world.on(Event::LinkDown);
    assert_eq!(world.on(Event::Interrupt), [Effect::Signal(2)]);
    let told = world.gone();
    assert!(
        matches!(told[..], [Effect::Exit { code: 130, .. }]),
        "{told:?}"
    );
    assert_eq!(world.session.poll_timeout(), None);
}

/// The agent is gone for good, or comes back and is told again.
#[test]
fn after_ctrl_c_an_agent_that_is_gone_is_waited_for_a_moment() {
    for back in [false, true] {
        let mut world = World::running(1);
        world.frame(welcome());
        world.on(Event::Interrupt);
        world.on(Event::LinkDown);
        world.gone();
        world.pass(3_000);
        // A link is no word yet: an agent that is full closes each at once.
        let told = world.on(Event::LinkUp);
        assert!(told.contains(&Effect::Send(ToAgent::Cancel)), "{told:?}");
        match back {
            true => drop(world.frame(welcome())),
            false => drop(world.on(Event::LinkDown)),
        }
        let told = world.pass(3_000);
        let ends = |e: &Effect| matches!(e, Effect::Exit { code: 130, .. });
        assert_eq!(told.iter().any(ends), !back, "{told:?}");
    }
}

/// In both orders, and the agent goes: the one deadline is no other's.
#[test]
fn sigterm_beside_ctrl_c_keeps_its_own_deadline() {
    let ends = |told: &[Effect], code: i32| {
        let is = |e: &Effect| matches!(e, Effect::Exit { code: c, .. } if *c == code);
        told.iter().any(is)
    };
    let mut world = World::running(1);
    world.frame(welcome());
    world.on(Event::Interrupt);
    world.on(Event::LinkDown);
    world.on(Event::Terminate { signal: 15 });
    let told = world.gone();
    assert!(ends(&told, 143), "{told:?}");
    let says = |e: &Effect| matches!(e, Effect::Exit { report, .. } if !report.is_empty());
    assert!(told.iter().any(says), "no last word: {told:?}");

    let mut world = World::running(1);
    world.frame(welcome());
    world.on(Event::Terminate { signal: 15 });
    world.gone();
    world.on(Event::Interrupt);
    world.on(Event::LinkDown);
    world.on(Event::LinkUp);
    world.frame(welcome());
    let told: Vec<Effect> = (0..12).flat_map(|_| world.pass(5_000)).collect();
    assert!(ends(&told, 143), "{told:?}");
}

fn welcome() -> ToLauncher {
    ToLauncher::Welcome {
        node: muster_protocol::NodeId([1; 32]),
        agent_pid: 1,
        agent_grace_ms: 4_000,
        lease_ms: 1_500,
    }
}

/// Both workers are live and have parked from generation `n`, which they were told to leave.
fn parked(n: u8) -> World {
    let mut world = World::running(n);
    assert_eq!(world.stop(n, 200), [Effect::EndTerm(SIGTERM)]);
    assert!(world.session.awaits_parking());
    assert_eq!(world.on(Event::Left(Left::Workers)), []);
    assert_eq!(world.on(Event::Left(Left::Parked)), [stopped(n)]);
    assert!(!world.session.awaits_parking());
    world
}
