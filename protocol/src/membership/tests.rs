use proptest::prelude::*;

use super::*;

const PEER: NodeId = NodeId([2; 32]);

fn guard() -> Guard {
    guard_at(4000)
}

fn guard_at(port: u16) -> Guard {
    let launcher = LauncherId(u64::from(port).to_be_bytes());
    Some((SocketAddr::from(([10, 0, 0, 2], port)), launcher))
}

fn ms(n: u64) -> Time {
    Time::ZERO + Span::from_millis(n)
}

/// Behaviour of the peer's machine in a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum World {
    /// Pings are answered.
    Well,
    /// A probe gets these answers, a ping none.
    Broken(Answer, Answer),
}

/// One detector and one peer, driven by its timers; probes take 2 ms, silent ones 200 ms.
struct Bench {
    core: Membership,
    now: Time,
    world: World,
    due: Vec<(Time, Event)>,
    verdicts: Vec<(Time, State)>,
    /// The guard that answers though the others do not.
    answers: Option<Guard>,
    pings: usize,
}

impl Bench {
    fn new() -> Bench {
        let mut bench = Bench {
            core: Membership::new(Config::default()),
            now: ms(1_000),
            world: World::Well,
            due: Vec::new(),
            verdicts: Vec::new(),
            answers: None,
            pings: 0,
        };
        bench.tell(Event::Watch {
            node: PEER,
            guard: guard(),
            asks: true,
        });
        bench
    }

    fn tell(&mut self, event: Event) {
        self.core.handle(event, self.now).unwrap();
        self.effects();
    }

    fn effects(&mut self) {
        while let Some(effect) = self.core.poll_effect() {
            match (effect, self.world) {
                (Effect::Verdict { state, .. }, _) => self.verdicts.push((self.now, state)),
                (Effect::Ping { node, seq }, world) => {
                    self.pings += 1;
                    if world == World::Well {
                        let at = self.now + Span::from_millis(1);
                        self.due.push((at, Event::Pong { node, seq }));
                    }
                }
                (Effect::Probe { node, id, guard }, world) => {
                    let answers = self.answers == Some(guard);
                    let (agent, guard) = match world {
                        World::Broken(agent, _) if answers => (agent, Answer::Answered),
                        World::Well => (Answer::Answered, Answer::Answered),
                        World::Broken(agent, guard) => (agent, guard),
                    };
                    let silent = agent == Answer::Silent || guard == Answer::Silent;
                    let takes = Span::from_millis(if silent { 200 } else { 2 });
                    let probed = Event::Probed {
                        node,
                        id,
                        agent,
                        guard,
                    };
                    self.due.push((self.now + takes, probed));
                }
            }
        }
    }

    fn run_until(&mut self, end: Time) {
        for _ in 0..1_000_000 {
            self.due.sort_by_key(|(at, _)| *at);
            let event = self.due.first().map(|(at, _)| *at);
            let timer = self.core.poll_timeout().map(|(at, _)| at);
            let Some(at) = event.into_iter().chain(timer).min().filter(|at| *at <= end) else {
                self.now = end;
                return;
            };
            self.now = self.now.max(at);
            if event == Some(at) {
                let (_, event) = self.due.remove(0);
                self.tell(event);
            } else {
                self.core.handle_timeout(self.now);
                self.effects();
            }
        }
        panic!("the detector never lets time pass");
    }

    fn run_for(&mut self, millis: u64) {
        self.run_until(self.now + Span::from_millis(millis));
    }

    fn state(&self) -> State {
        self.core.peer(PEER, guard()).unwrap().state
    }
}

#[test]
fn a_peer_that_answers_stays_alive_and_costs_four_pings_a_second() {
    let mut bench = Bench::new();
    bench.run_for(60_000);
    assert_eq!(bench.verdicts, []);
    assert!((239..=242).contains(&bench.pings), "{}", bench.pings);
    let rtt = bench.core.peer(PEER, guard()).unwrap().rtt.unwrap();
    assert_eq!(rtt.as_millis(), 1);
}

#[test]
fn nobody_watched_means_no_timer() {
    let mut bench = Bench::new();
    let guard = guard();
    bench.tell(Event::Unwatch { node: PEER, guard });
    assert_eq!(bench.core.poll_timeout(), None);
    bench.tell(Event::Disconnected { node: PEER });
    assert_eq!(bench.core.peer(PEER, guard), None);
    assert_eq!(bench.verdicts, []);
}

#[test]
fn a_killed_node_is_lost_at_once() {
    for guard in [Answer::Refused, Answer::Other] {
        let mut bench = Bench::new();
        bench.run_for(1_000);
        bench.world = World::Broken(Answer::Refused, guard);
        let killed = bench.now;
        bench.tell(Event::Disconnected { node: PEER });
        bench.run_for(1_000);
        assert_eq!(bench.state(), State::Lost { confirmed: true });
        let (at, _) = bench.verdicts.last().unwrap();
        let took = at.since(killed);
        assert!(
            took >= Span::from_millis(25) && took <= Span::from_millis(60),
            "{took}"
        );
    }
}

#[test]
fn a_silent_peer_is_suspect_at_half_time_and_lost_at_the_end() {
    let mut bench = Bench::new();
    bench.run_for(1_010);
    let heard = ms(2_001);
    bench.world = World::Broken(Answer::Silent, Answer::Silent);
    bench.run_for(5_000);
    let suspect = (heard + Span::from_secs(1), SUSPECT);
    let lost = (heard + Span::from_secs(2), State::Lost { confirmed: false });
    assert_eq!(bench.verdicts, [suspect, lost]);
    // It is called now and then, so that two peers that lost each other find out.
    let pings = bench.pings;
    bench.run_for(20_000);
    assert!((9..=11).contains(&(bench.pings - pings)));
    bench.tell(Event::Heard { node: PEER });
    assert_eq!(bench.state(), State::Alive);
}

#[test]
fn an_agent_that_goes_alone_is_away_for_its_grace() {
    let mut bench = Bench::new();
    bench.run_for(1_000);
    bench.world = World::Broken(Answer::Refused, Answer::Answered);
    let gone = bench.now;
    bench.tell(Event::Disconnected { node: PEER });
    bench.run_for(9_900);
    let since = gone + Span::from_millis(2);
    assert_eq!(bench.state(), State::Away { since });
    let mut back = Bench { ..bench };
    back.world = World::Well;
    back.tell(Event::Connected { node: PEER });
    back.run_for(20_000);
    assert_eq!(back.state(), State::Alive);
    // The next time it stays away.
    back.world = World::Broken(Answer::Refused, Answer::Answered);
    let gone = back.now;
    back.tell(Event::Disconnected { node: PEER });
    back.run_for(20_000);
    let (at, state) = back.verdicts.last().unwrap();
    assert_eq!(*state, State::Lost { confirmed: false });
    assert_eq!(at.since(gone), Span::from_millis(10_002));
}

#[test]
fn an_agent_whose_launcher_has_another_one_is_lost_though_the_launcher_answers() {
    let [(_, launcher), other] = [4000, 4001].map(|port| guard_at(port).unwrap());
    let moved = |launcher| Event::Moved {
        launcher,
        to: NodeId([3; 32]),
    };
    let mut bench = Bench::new();
    bench.tell(Event::Connected { node: PEER });
    bench.run_for(1_000);
    // It is there, whatever others say.
    bench.tell(moved(launcher));
    assert_eq!(bench.state(), State::Alive);
    bench.world = World::Broken(Answer::Other, Answer::Answered);
    bench.tell(Event::Disconnected { node: PEER });
    bench.run_for(100);
    bench.tell(moved(other.1));
    bench.tell(Event::Moved { launcher, to: PEER });
    assert!(matches!(bench.state(), State::Away { .. }));
    bench.tell(moved(launcher));
    bench.run_for(30_000);
    assert_eq!(bench.state(), State::Lost { confirmed: true });
    bench.tell(Event::Connected { node: PEER });
    assert_eq!(bench.state(), State::Alive);
}

#[test]
fn a_silent_peer_is_known_to_be_dead_once_another_is_in_its_place_and_its_launcher_refuses() {
    let silent = World::Broken(Answer::Silent, Answer::Silent);
    let unsure = State::Lost { confirmed: false };
    let after = |guard| {
        let mut bench = Bench::new();
        bench.run_for(1_000);
        bench.world = silent;
        bench.run_for(60_000);
        assert_eq!(bench.state(), unsure);
        bench.world = World::Broken(Answer::Other, guard);
        // Nobody asks by himself.
        bench.run_for(10_000);
        assert_eq!(bench.state(), unsure);
        bench.tell(Event::Succeeded { node: PEER });
        bench.run_for(500);
        bench
    };
    let dead = State::Lost { confirmed: true };
    assert_eq!(after(Answer::Refused).state(), dead);
    assert_eq!(after(Answer::Other).state(), dead);
    // Its launcher lives, or nothing is known of it.
    assert!(matches!(
        after(Answer::Answered).state(),
        State::Away { .. }
    ));
    let mut bench = after(Answer::Silent);
    bench.world = World::Broken(Answer::Other, Answer::Refused);
    bench.run_for(10_000);
    assert_eq!(bench.state(), unsure);
    bench.tell(Event::Succeeded { node: PEER });
    bench.run_for(500);
    assert_eq!(bench.state(), dead);
    // One that is there is not asked for.
    bench.tell(Event::Connected { node: PEER });
    bench.tell(Event::Succeeded { node: PEER });
    assert_eq!(bench.state(), State::Alive);
}

#[test]
fn an_away_agent_whose_guard_goes_is_lost() {
    let mut bench = Bench::new();
    bench.world = World::Broken(Answer::Refused, Answer::Answered);
    bench.tell(Event::Disconnected { node: PEER });
    bench.run_for(3_000);
    assert!(matches!(bench.state(), State::Away { .. }));
    bench.world = World::Broken(Answer::Refused, Answer::Refused);
    bench.run_for(300);
    assert_eq!(bench.state(), State::Lost { confirmed: true });

    let mut bench = Bench::new();
    bench.world = World::Broken(Answer::Refused, Answer::Answered);
    bench.tell(Event::Disconnected { node: PEER });
    bench.run_for(3_000);
    bench.world = World::Broken(Answer::Silent, Answer::Silent);
    bench.run_for(2_000);
    assert_eq!(bench.state(), State::Lost { confirmed: false });
}

#[test]
fn a_stuck_agent_with_a_live_guard_is_away_not_lost() {
    let mut bench = Bench::new();
    bench.world = World::Broken(Answer::Mute, Answer::Answered);
    bench.run_for(4_000);
    let heard = ms(1_001);
    let (half, whole) = (heard + Span::from_secs(1), heard + Span::from_secs(2));
    let guarded = (
        half + Span::from_millis(2),
        State::Suspect { guarded: true },
    );
    let away = (whole, State::Away { since: whole });
    assert_eq!(bench.verdicts, [(half, SUSPECT), guarded, away]);
    bench.run_for(12_000);
    assert_eq!(bench.state(), State::Lost { confirmed: false });
}

#[test]
fn a_stuck_agent_whose_launcher_ends_is_lost() {
    let mut bench = Bench::new();
    bench.world = World::Broken(Answer::Mute, Answer::Answered);
    bench.run_for(4_000);
    assert!(matches!(bench.state(), State::Away { .. }));
    bench.world = World::Broken(Answer::Mute, Answer::Other);
    bench.run_for(300);
    assert_eq!(bench.state(), State::Lost { confirmed: true });

    // A witness has no launcher, and only its agent is stopped.
    let mut bench = Bench::new();
    let (node, asks) = (NodeId([9; 32]), true);
    bench.tell(Event::Watch {
        node,
        guard: None,
        asks,
    });
    bench.world = World::Broken(Answer::Mute, Answer::Refused);
    bench.run_for(4_000);
    let state = bench.core.peer(node, None).unwrap().state;
    assert_eq!(state, State::Lost { confirmed: false });
}

#[test]
fn an_agent_that_answers_or_is_cut_off_does_not_seem_stopped() {
    for agent in [Answer::Answered, Answer::Silent] {
        let mut bench = Bench::new();
        bench.world = World::Broken(agent, Answer::Answered);
        bench.run_for(4_000);
        let states: Vec<State> = bench.verdicts.iter().map(|(_, s)| *s).collect();
        assert!(states.contains(&SUSPECT), "{agent:?}: {states:?}");
        let stopped = State::Suspect { guarded: true };
        assert!(!states.contains(&stopped), "{agent:?}: {states:?}");
    }
}

/// Both were stopped, and only the launcher goes on.
#[test]
fn a_launcher_that_wakes_before_its_agent_is_seen_while_its_lease_may_last() {
    // One that keeps longer times has a longer lease.
    let (own, longer) = (Span::from_secs(2), Span::from_secs(8));
    for (theirs, wakes, seen) in [
        (own, 500, true),
        (own, 1_500, true),
        (own, 2_500, false),
        (longer, 2_500, true),
        (longer, 13_500, true),
        (longer, 14_500, false),
    ] {
        let mut bench = Bench::new();
        bench.core.allow_for(theirs);
        bench.run_for(1_000);
        bench.world = World::Broken(Answer::Mute, Answer::Mute);
        while !bench.state().is_lost() {
            bench.run_for(10);
        }
        bench.run_for(wakes);
        bench.world = World::Broken(Answer::Mute, Answer::Answered);
        bench.run_for(500);
        let away = matches!(bench.state(), State::Away { .. });
        assert_eq!(away, seen, "{theirs} {wakes} {:?}", bench.state());
        bench.run_for(40_000);
        assert_eq!(bench.state(), State::Lost { confirmed: false });
    }
}

#[test]
fn a_leftover_message_does_not_hide_a_closed_connection() {
    let mut bench = Bench::new();
    bench.world = World::Broken(Answer::Refused, Answer::Refused);
    bench.tell(Event::Disconnected { node: PEER });
    bench.tell(Event::Heard { node: PEER });
    bench.run_for(60);
    assert_eq!(bench.state(), State::Lost { confirmed: true });

    // It was heard, and its agent answers: it is there, even if nobody says that it reconnected.
    let mut bench = Bench::new();
    bench.tell(Event::Disconnected { node: PEER });
    bench.run_for(10);
    assert_eq!(bench.state(), State::Alive);
}

#[test]
fn one_refusal_is_not_two() {
    let mut bench = Bench::new();
    bench.due.clear();
    bench.world = World::Broken(Answer::Refused, Answer::Refused);
    bench.tell(Event::Disconnected { node: PEER });
    bench.run_for(10);
    // A restart took a moment: the second probe is answered.
    bench
        .due
        .retain(|(_, event)| !matches!(event, Event::Pong { .. }));
    bench.world = World::Broken(Answer::Answered, Answer::Answered);
    bench.run_for(100);
    assert_eq!(bench.state(), SUSPECT);
    // An answer to an earlier probe is no answer to this one.
    let (agent, guard) = (Answer::Refused, Answer::Refused);
    for id in [1, 1, 99] {
        bench.tell(Event::Probed {
            node: PEER,
            id,
            agent,
            guard,
        });
    }
    assert_eq!(bench.state(), SUSPECT);
}

#[test]
fn a_stop_of_our_own_is_held_against_nobody() {
    for gap in [600, 3_000, 3_600_000] {
        let mut bench = Bench::new();
        bench.run_for(1_000);
        bench.due.clear();
        bench.now += Span::from_millis(gap);
        // Timers run before the messages that wait in the sockets.
        bench.core.handle_timeout(bench.now);
        bench.effects();
        assert_eq!(bench.state(), State::Alive, "after {gap} ms");
        bench.run_for(10_000);
        assert_eq!(bench.verdicts, [], "after {gap} ms");
    }
    // A peer that died meanwhile is found, one whole period later.
    let mut bench = Bench::new();
    bench.run_for(1_000);
    bench.due.clear();
    bench.world = World::Broken(Answer::Silent, Answer::Silent);
    bench.now += Span::from_secs(60);
    let resumed = bench.now;
    bench.core.handle_timeout(resumed);
    bench.effects();
    bench.run_for(3_000);
    let lost = (
        resumed + Span::from_secs(2),
        State::Lost { confirmed: false },
    );
    assert_eq!(bench.verdicts.last(), Some(&lost));
}

#[test]
fn a_new_launcher_starts_afresh() {
    let mut bench = Bench::new();
    bench.world = World::Broken(Answer::Refused, Answer::Refused);
    bench.tell(Event::Leaving {
        node: PEER,
        deadline: ms(9_000),
    });
    bench.tell(Event::Disconnected { node: PEER });
    bench.run_for(100);
    assert!(bench.state().is_lost());
    let (node, asks) = (PEER, true);
    let guard = guard();
    bench.tell(Event::Watch { node, guard, asks });
    assert!(bench.state().is_lost());
    let peer = bench.core.peer(PEER, guard).unwrap();
    assert_eq!(peer.leaving, Some(ms(9_000)));
    let guard = guard_at(4001);
    bench.tell(Event::Watch { node, guard, asks });
    let peer = bench.core.peer(PEER, guard).unwrap();
    assert_eq!((peer.state, peer.leaving), (State::Alive, None));
}

#[test]
fn launchers_of_one_node_are_judged_apart_and_pinged_together() {
    let mut bench = Bench::new();
    let (node, asks) = (PEER, false);
    let other = guard_at(4001);
    for guard in [other, None] {
        bench.tell(Event::Watch { node, guard, asks });
    }
    bench.run_for(60_000);
    assert!((239..=242).contains(&bench.pings), "{}", bench.pings);
    // The agent is gone, and of its launchers one is left.
    bench.world = World::Broken(Answer::Refused, Answer::Refused);
    bench.answers = Some(other);
    let gone = bench.now;
    bench.tell(Event::Disconnected { node: PEER });
    bench.run_for(9_000);
    let state = |bench: &Bench, guard| bench.core.peer(PEER, guard).unwrap().state;
    let lost = State::Lost { confirmed: true };
    assert_eq!(state(&bench, guard()), lost);
    assert_eq!(state(&bench, None), lost);
    let since = gone + Span::from_millis(2);
    assert_eq!(state(&bench, other), State::Away { since });
    bench.world = World::Well;
    bench.tell(Event::Connected { node: PEER });
    for guard in [guard(), other, None] {
        assert_eq!(state(&bench, guard), State::Alive);
    }
    // What is not watched any more is neither probed nor pinged.
    bench.tell(Event::Unwatch { node, guard: other });
    bench.tell(Event::Unwatch { node, guard: None });
    bench.run_for(1_000);
    assert_eq!(bench.core.peer(PEER, other), None);
    assert_eq!(bench.state(), State::Alive);
}

#[test]
fn a_peer_that_pings_is_not_pinged() {
    let mut bench = Bench::new();
    let (node, guard, asks) = (PEER, guard(), false);
    bench.tell(Event::Watch { node, guard, asks });
    bench.due.clear();
    let pings = bench.pings;
    for _ in 0..100 {
        bench.run_for(250);
        bench.tell(Event::Heard { node });
    }
    assert_eq!(bench.pings, pings);
    // It falls silent: now it is asked, and found out as soon as any other.
    let heard = bench.now;
    bench.world = World::Broken(Answer::Silent, Answer::Silent);
    bench.run_for(5_000);
    let suspect = (heard + Span::from_secs(1), SUSPECT);
    let lost = (heard + Span::from_secs(2), State::Lost { confirmed: false });
    assert_eq!(bench.verdicts, [suspect, lost]);
    assert!((7..=9).contains(&(bench.pings - pings)), "{}", bench.pings);
}

#[derive(Clone, Debug)]
enum Act {
    Wait(u64),
    Heard,
    Disconnected,
    Connected,
    Succeeded,
    Become(World),
    /// The process does not run for a while.
    Stop(u64),
}

fn act() -> impl Strategy<Value = Act> {
    let answer = || {
        prop_oneof![
            Just(Answer::Answered),
            Just(Answer::Refused),
            Just(Answer::Silent),
            Just(Answer::Other)
        ]
    };
    let world = prop_oneof![
        Just(World::Well),
        (answer(), answer()).prop_map(|(agent, guard)| World::Broken(agent, guard))
    ];
    prop_oneof![
        4 => (1u64..3_000).prop_map(Act::Wait),
        1 => Just(Act::Heard),
        1 => Just(Act::Disconnected),
        1 => Just(Act::Connected),
        1 => Just(Act::Succeeded),
        2 => world.prop_map(Act::Become),
        1 => (1u64..20_000).prop_map(Act::Stop),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 256,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn verdicts_are_earned(acts in proptest::collection::vec(act(), 1..40)) {
        let mut bench = Bench::new();
        // The last time that any sign of life was told, and that a stop ended.
        let mut sign = bench.now;
        // What it was before it changed last, and when that was.
        let mut was = (bench.world, bench.now);
        for act in acts {
            let before = bench.verdicts.len();
            match act {
                Act::Wait(n) => bench.run_for(n),
                Act::Heard => bench.tell(Event::Heard { node: PEER }),
                Act::Disconnected => bench.tell(Event::Disconnected { node: PEER }),
                Act::Connected => bench.tell(Event::Connected { node: PEER }),
                Act::Succeeded => bench.tell(Event::Succeeded { node: PEER }),
                Act::Become(world) => {
                    if bench.now > was.1 {
                        was = (bench.world, bench.now);
                    }
                    bench.world = world;
                }
                Act::Stop(n) => {
                    bench.now += Span::from_millis(n);
                    bench.core.handle_timeout(bench.now);
                    bench.effects();
                }
            }
            let mut state = None;
            for (at, verdict) in &bench.verdicts[before..] {
                match verdict {
                    // Never without a whole period of silence that we listened to.
                    State::Lost { confirmed: false } => {
                        prop_assert!(at.since(sign) >= Span::from_secs(2), "{verdict:?} at {at:?}");
                    }
                    State::Lost { confirmed: true } => {
                        let gone = |world| match world {
                            World::Broken(agent, guard) => agent.is_gone() && guard.is_gone(),
                            World::Well => false,
                        };
                        // An answer may be under way while it becomes well.
                        let late = at.since(was.1) < Span::from_millis(10);
                        prop_assert!(gone(bench.world) || late && gone(was.0));
                    }
                    State::Alive => sign = *at,
                    State::Suspect { .. } | State::Away { .. } => {}
                }
                prop_assert_ne!(state, Some(*verdict), "a verdict without a change");
                state = Some(*verdict);
            }
            if matches!(act, Act::Heard | Act::Connected) {
                sign = bench.now;
                prop_assert!(!bench.state().is_lost());
            }
            if matches!(act, Act::Connected) {
                prop_assert_eq!(bench.state(), State::Alive);
            }
        }
        // Whatever came before, the end is judged by what is true then.
        bench.due.clear();
        bench.world = World::Broken(Answer::Refused, Answer::Refused);
        bench.tell(Event::Connected { node: PEER });
        let gone = bench.now;
        bench.tell(Event::Disconnected { node: PEER });
        bench.run_for(60);
        prop_assert_eq!(bench.state(), State::Lost { confirmed: true });
        prop_assert!(bench.verdicts.last().unwrap().0.since(gone) <= Span::from_millis(60));
        bench.world = World::Well;
        bench.tell(Event::Connected { node: PEER });
        bench.run_for(30_000);
        prop_assert_eq!(bench.state(), State::Alive);
    }
}
