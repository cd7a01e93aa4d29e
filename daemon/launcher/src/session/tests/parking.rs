//! Live workers that park between two generations.

use super::*;

#[test]
fn parked_workers_get_the_next_generation() {
    let mut world = parked(1);
    assert_eq!(world.pass(10_000), [], "they wait without end");
    // Told again, it says so again.
    assert_eq!(world.stop(1, 200), [stopped(1)]);
    assert_eq!(world.start(2), [spawn(2)]);
    world.on(Event::Spawned { result: Ok(()) });
    assert_eq!(world.stop(2, 200), [Effect::EndTerm(SIGTERM)]);
    // One does not park in time.
    assert_eq!(world.pass(200), [Effect::KillUnparked]);
    world.on(exit(1, 137));
    assert_eq!(world.on(Event::Left(Left::Parked)), [stopped(2)]);
    assert_eq!(world.start(3), [spawn(3)]);
}

#[test]
fn parked_workers_end_with_the_job() {
    let mut world = parked(1);
    let end = ToLauncher::End {
        code: 0,
        report: String::new(),
    };
    assert_eq!(world.frame(end.clone()), [Effect::Signal(SIGTERM)]);
    let exits = |effects: Vec<Effect>| matches!(effects[..], [.., Effect::Exit { code: 0, .. }]);
    assert!(exits(world.gone()));
    // Said while they park.
    let mut world = World::running(1);
    assert_eq!(world.stop(1, 200), [Effect::EndTerm(SIGTERM)]);
    world.frame(end);
    let effects = world.on(Event::Left(Left::Parked));
    assert!(effects.contains(&Effect::Signal(SIGTERM)), "{effects:?}");
    assert!(exits(world.gone()));
}

#[test]
fn a_stop_step_may_end_in_parking() {
    let mut world = World::running(1);
    world.on(Event::ParkedAlone {
        acknowledged: true,
        at_ms: 7,
    });
    assert!(world.session.awaits_parking());
    assert_eq!(world.on(Event::Left(Left::Parked)), [stopped(1)]);
}

#[test]
fn workers_that_lose_each_other_for_no_reason_are_reported() {
    let mut world = World::running(1);
    let alone = || Event::ParkedAlone {
        acknowledged: false,
        at_ms: 7,
    };
    assert_eq!(world.on(alone()), []);
    assert_eq!(world.pass(4_000), []);
    assert_eq!(world.on(alone()), []);
    let said = world.pass(1_000);
    assert!(
        matches!(&said[..], [Effect::Send(ToAgent::Exited { exit, .. })] if exit.code == 75 && exit.at_ms == 7),
        "{said:?}"
    );
    // A stop that comes first is the explanation.
    let mut world = World::running(1);
    world.on(alone());
    world.stop(1, 200);
    world.on(Event::Left(Left::Parked));
    assert_eq!(world.pass(10_000), []);
}

#[test]
fn a_parked_worker_that_dies_is_started_anew() {
    let mut world = parked(1);
    assert_eq!(world.on(exit(0, 137)), []);
    assert!(world.session.has_workers());
    assert_eq!(world.on(exit(1, 137)), []);
    assert!(!world.session.has_workers());
    assert_eq!(world.start(2), [spawn(2)]);
}

#[test]
fn live_workers_that_compute_are_waited_for() {
    let killed = |effects: &[Effect]| effects.contains(&Effect::KillUnparked);
    let mut world = World::running(1);
    world
        .session
        .set_patience(patience(Some(Span::from_secs(3))));
    world.stop(1, 200);
    assert!(!killed(&world.pass(11_000)) && killed(&world.pass(2_000)));
    // Short steps leave a few seconds all the same, long ones no more than others wait for a start.
    let usual = |ms| patience(Some(Span::from_millis(ms)));
    assert_eq!(usual(20), Span::from_secs(5));
    assert_eq!(
        (usual(60_000), patience(None)),
        (Span::from_secs(20), Span::from_secs(20))
    );

    // Whoever may not go on is ended at once, and so is whoever is not live.
    let mut world = World::running(1);
    world.session.set_patience(usual(3_000));
    world.stop(1, 0);
    assert!(killed(&world.pass(1)));
    let mut world = World::running(1);
    world.session.set_patience(Span::ZERO);
    world.stop(1, 200);
    assert!(killed(&world.pass(201)));
}
