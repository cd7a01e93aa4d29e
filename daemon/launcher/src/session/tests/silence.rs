//! An agent that is connected and says nothing.

use super::*;

#[test]
fn workers_end_when_the_agent_falls_silent() {
    let mut world = World::running(1);
    world.on(Event::LinkUp);
    world.frame(welcome());
    assert_eq!(world.pass(2_999), []);
    assert_eq!(world.pass(1), [Effect::EndTerm(SIGTERM)]);
    // The others are to go on as soon as nothing runs here.
    assert!(world.session.vouches());
    world.gone();
    assert!(!world.session.vouches());
    world.frame(welcome());
    assert!(world.session.vouches());

    // The whole machine slept, or the launcher was stopped, however long: the agent has a moment to say
    // on a new link that it is there.
    for ms in [1_500, 3_101, 4_500, 60_000] {
        let mut world = World::running(1);
        world.on(Event::LinkUp);
        world.frame(welcome());
        assert!(world.sleeps(ms));
        assert_eq!(world.pass(0), []);
        world.on(Event::LinkDown);
        assert_eq!(world.pass(1_499), []);
        world.on(Event::LinkUp);
        world.frame(welcome());
        assert_eq!(world.pass(2_999), []);
        assert_eq!(world.pass(1), [Effect::EndTerm(SIGTERM)]);

        let mut world = World::running(1);
        world.on(Event::LinkUp);
        world.frame(welcome());
        assert!(world.sleeps(ms));
        assert_eq!(world.pass(3_000), [Effect::EndTerm(SIGTERM)]);
    }
    // A launcher that is slow ends its workers, too.
    let mut world = World::running(1);
    world.on(Event::LinkUp);
    world.frame(welcome());
    assert!(!world.sleeps(1_499));
    assert_eq!(world.pass(1_501), [Effect::EndTerm(SIGTERM)]);
}

/// A launcher was stopped before it had read START and STOP of a generation, without which the others went on. It would
/// start its workers, and read a moment later that they have to end.
#[test]
fn what_the_agent_said_to_a_launcher_that_was_stopped_is_old() {
    let mut world = World::new();
    world.frame(welcome());
    assert!(world.sleeps(1_500));
    assert_eq!(world.start(1), []);
    assert_eq!(world.frame(welcome()), []);
    // Ctrl-C waits for the new link, on which the agent hears of it, and the others by it.
    assert_eq!(world.on(Event::Interrupt), []);
    world.on(Event::LinkDown);
    let told = world.on(Event::LinkUp);
    assert!(told.contains(&Effect::Send(ToAgent::Cancel)), "{told:?}");

    // The last word of an agent that is gone counts.
    let mut world = World::new();
    world.frame(welcome());
    assert!(world.sleeps(1_500));
    let report = String::new();
    let told = world.frame(ToLauncher::End { code: 3, report });
    assert!(ends(&told, 3), "{told:?}");

    // Nor does what was about to be started when it stopped.
    let mut world = World::running(1);
    world.frame(welcome());
    world.start(2);
    assert!(world.sleeps(1_500));
    let spawns = |told: &[Effect]| told.iter().any(|e| matches!(e, Effect::Spawn { .. }));
    let told = world.gone();
    assert!(!spawns(&told), "{told:?}");
    let mut world = World::running(1);
    world.frame(welcome());
    world.start(2);
    (0..2).for_each(|k| drop(world.on(exit(k, 143))));
    world.session.handle(Event::Left(Left::Nothing), world.now);
    assert!(world.sleeps(1_500));
    let told = world.effects();
    assert!(!spawns(&told), "{told:?}");
    // It does once the agent says so again.
    world.on(Event::LinkUp);
    world.frame(welcome());
    let told = world.start(2);
    assert!(spawns(&told), "{told:?}");
}

/// An agent that is gone, or stopped too, is waited for for 5 s, whether it has taken the new link or not.
#[test]
fn a_launcher_that_was_stopped_and_finds_no_agent_ends_alone() {
    for (event, code) in goodbyes() {
        for accepts in [false, true] {
            let mut world = World::new();
            world.frame(welcome());
            assert!(world.sleeps(1_500));
            world.on(Event::LinkDown);
            if accepts {
                world.on(Event::LinkUp);
            }
            let mut told = world.on(event.clone());
            told.extend(world.pass(5_000));
            assert!(ends(&told, code), "{told:?}");
        }
    }
}

/// Ctrl-C and SIGTERM, and the code with which a launcher ends then.
fn goodbyes() -> [(Event, i32); 2] {
    [
        (Event::Interrupt, 130),
        (Event::Terminate { signal: 15 }, 143),
    ]
}

/// Whether this launcher is told to exit with this code.
fn ends(told: &[Effect], with: i32) -> bool {
    told.iter()
        .any(|e| matches!(e, Effect::Exit { code, .. } if *code == with))
}

/// How many lines the user is shown while this time passes, or once the agent has said that it is there.
fn lines(world: &mut World, ms: u64, heard: bool) -> usize {
    world.now += Span::from_millis(ms);
    match (heard, welcome()) {
        (
            true,
            ToLauncher::Welcome {
                node,
                agent_pid,
                lease_ms,
                ..
            },
        ) => {
            let agent_grace_ms = 30_000;
            let frame = ToLauncher::Welcome {
                node,
                agent_pid,
                agent_grace_ms,
                lease_ms,
            };
            world.session.handle(Event::Frame(frame), world.now);
        }
        _ => world.session.handle_timeout(world.now),
    }
    let told = std::iter::from_fn(|| world.session.poll_effect());
    told.filter(|e| matches!(e, Effect::Say(_))).count()
}

#[test]
fn an_agent_that_says_nothing_is_named_once() {
    let heard = || {
        let mut world = World::running(1);
        world.on(Event::LinkUp);
        lines(&mut world, 0, true);
        world
    };
    let mut world = heard();
    assert_eq!(lines(&mut world, 4_999, false), 0);
    assert_eq!(lines(&mut world, 1, false), 1);
    assert_eq!(lines(&mut world, 10_000, false), 0);
    // It is back, and goes again.
    assert_eq!(lines(&mut world, 0, true), 1);
    assert_eq!(lines(&mut world, 0, true), 0);
    assert_eq!(lines(&mut world, 5_000, false), 1);

    // This process was stopped itself.
    let mut world = heard();
    assert!(world.sleeps(9_000));
    assert_eq!(lines(&mut world, 0, false), 0);
    world.on(Event::LinkDown);
    world.on(Event::LinkUp);
    assert_eq!(lines(&mut world, 0, true), 0);
    assert_eq!(lines(&mut world, 4_999, false), 0);
    // A lost link is said elsewhere.
    world.on(Event::LinkDown);
    assert_eq!(lines(&mut world, 1, false), 0);
}

/// The agent reads when it goes on what it was told; nobody waits for that.
#[test]
fn an_agent_that_says_nothing_holds_up_neither_ctrl_c_nor_sigterm() {
    for (event, code) in goodbyes() {
        for known in [false, true] {
            let mut world = World::running(1);
            world.on(Event::LinkUp);
            lines(&mut world, 0, true);
            let mut told = match known {
                true => world.pass(5_000),
                false => Vec::new(),
            };
            told.extend(world.on(event.clone()));
            let sent =
                |e: &Effect| matches!(e, Effect::Send(ToAgent::Cancel | ToAgent::Leave { .. }));
            assert!(told.iter().any(sent), "{told:?}");
            told.extend(world.pass(5_000));
            assert!(
                told.iter().any(|e| matches!(e, Effect::Signal(_))),
                "{told:?}"
            );
            let told = world.gone();
            assert!(ends(&told, code), "{told:?}");
        }
    }
}
