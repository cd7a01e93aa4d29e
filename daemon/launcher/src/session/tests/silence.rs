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
    // that it is there, or has said so already.
    for late in [3_101, 4_500, 60_000] {
        let mut world = World::running(1);
        world.on(Event::LinkUp);
        world.frame(welcome());
        assert_eq!(world.pass(late), []);
        world.frame(welcome());
        assert_eq!(world.pass(2_999), []);
        assert_eq!(world.pass(1), [Effect::EndTerm(SIGTERM)]);
    }
    // Once: a launcher that is slow ends its workers, too.
    let mut world = World::running(1);
    world.on(Event::LinkUp);
    world.frame(welcome());
    assert_eq!(world.pass(3_200), []);
    assert_eq!(world.pass(2_200), [Effect::EndTerm(SIGTERM)]);
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
    assert_eq!(lines(&mut world, 9_000, false), 0);
    assert_eq!(lines(&mut world, 0, true), 0);
    assert_eq!(lines(&mut world, 4_999, false), 0);
    // A lost link is said elsewhere.
    world.on(Event::LinkDown);
    assert_eq!(lines(&mut world, 1, false), 0);
}

/// The agent reads when it goes on what it was told; nobody waits for that.
#[test]
fn an_agent_that_says_nothing_holds_up_neither_ctrl_c_nor_sigterm() {
    for (event, code) in [
        (Event::Interrupt, 130),
        (Event::Terminate { signal: 15 }, 143),
    ] {
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
            let ends = |e: &Effect| matches!(e, Effect::Exit { code: c, .. } if *c == code);
            assert!(told.iter().any(ends), "{told:?}");
        }
    }
}
