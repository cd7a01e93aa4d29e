//! An agent that is away: what the node does meanwhile, and for how long.

use super::*;

/// The workers before could not be ended for a while, and the agent was stopped meanwhile.
#[test]
fn a_start_waits_where_the_agent_was_away_for_too_long() {
    let mut world = World::running(1);
    world.frame(welcome());
    world.start(2);
    (0..6).for_each(|_| drop(world.pass(1_000)));
    world.on(Event::LinkDown);
    let spawns = |told: &[Effect]| told.iter().any(|e| matches!(e, Effect::Spawn { .. }));
    let gone = world.gone();
    assert!(!spawns(&gone), "{gone:?}");
    world.on(Event::LinkUp);
    let heard = world.frame(welcome());
    let again = world.start(2);
    assert!(spawns(&heard) || spawns(&again), "{heard:?} {again:?}");
}

/// The agent was last heard just in time for the start, and not any more once the workers ran.
#[test]
fn workers_that_begin_while_the_agent_is_away_for_too_long_end() {
    let mut world = World::running(1);
    world.frame(welcome());
    world.start(2);
    world.gone();
    (0..6).for_each(|_| drop(world.pass(1_000)));
    let told = world.on(Event::Spawned { result: Ok(()) });
    assert!(told.contains(&Effect::EndTerm(SIGTERM)), "{told:?}");
}

/// Only the agent can say whether that was the end of the job: the others wait for its word.
#[test]
fn a_launcher_whose_workers_have_finished_waits_for_its_agent_and_not_for_ever() {
    let mut world = World::running(1);
    world.frame(welcome());
    world.on(Event::LinkDown);
    world.on(exit(0, 0));
    world.on(exit(1, 0));
    world.on(Event::Left(Left::Nothing));
    assert_eq!(world.pass(3_100), []);
    assert!(world.session.vouches());
    assert_eq!(world.pass(14 * 60_000), []);
    let told = world.pass(60_000);
    assert!(
        matches!(told[..], [Effect::Exit { code: 1, .. }]),
        "{told:?}"
    );
}

/// Its end shows that the node does nothing. A launcher whose agent is back in time goes on.
#[test]
fn a_launcher_without_workers_waits_for_an_agent_for_a_quarter_of_an_hour() {
    let ends = |told: &[Effect]| {
        told.iter()
            .any(|e| matches!(e, Effect::Exit { code: 1, .. }))
    };
    for back in [false, true] {
        let mut world = World::running(1);
        world.frame(welcome());
        world.on(Event::LinkDown);
        world.pass(3_000);
        world.gone();
        assert!(!ends(&world.pass(15 * 60_000 - 1_000)));
        if back {
            world.on(Event::LinkUp);
            world.frame(welcome());
        }
        assert_eq!(ends(&world.pass(1_000)), !back);
    }
}

#[test]
fn workers_end_when_the_agent_stays_away() {
    let mut world = World::running(1);
    world.frame(welcome());
    world.on(Event::LinkDown);
    assert_eq!(world.pass(2_998), []);
    world.on(Event::LinkUp);
    assert_eq!(world.pass(1), []);
    for _ in 0..10 {
        world.frame(welcome());
        assert_eq!(world.pass(1_000), []);
    }
    // An agent that does not take it up is none. What counts is its last word, a second ago.
    world.on(Event::LinkDown);
    assert_eq!(world.pass(1_000), []);
    world.on(Event::LinkUp);
    assert_eq!(world.pass(1_000), [Effect::EndTerm(SIGTERM)]);
}
