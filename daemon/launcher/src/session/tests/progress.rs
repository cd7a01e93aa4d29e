use muster_protocol::barrier::Held;
use muster_protocol::wire::Saved;

use super::*;

#[test]
fn a_worker_that_stands_still_is_told_and_told_again_to_a_new_agent() {
    let mut world = World::running(1);
    let stalled = |yes| ToAgent::Stalled {
        digest: digest(1),
        yes,
    };
    assert_eq!(
        world.on(Event::Stalled(true)),
        [Effect::Send(stalled(true))]
    );
    world.on(Event::LinkDown);
    let again = world.on(Event::LinkUp);
    assert!(again.contains(&Effect::Send(stalled(true))), "{again:?}");
    world.on(Event::Stalled(false));
    world.on(Event::LinkDown);
    let again = world.on(Event::LinkUp);
    assert!(again.contains(&Effect::Send(stalled(false))), "{again:?}");
    assert!(!again.contains(&Effect::Send(stalled(true))), "{again:?}");
}

#[test]
fn the_leaders_questions_are_about_what_runs() {
    let mut world = World::running(2);
    let number = 3;
    let look = |n| ToLauncher::Look {
        digest: digest(n),
        number,
    };
    assert_eq!(world.frame(look(1)), []);
    let digest = digest(2);
    assert_eq!(world.frame(look(2)), [Effect::Look { digest, number }]);
    let hung = ToLauncher::Hung {
        digest,
        text: "hung".into(),
        ranks: vec![1],
    };
    let kept = Effect::Hung {
        digest,
        ranks: vec![1],
        text: "hung".into(),
    };
    assert_eq!(world.frame(hung.clone()), [kept]);
    let moves = ToLauncher::Hung {
        digest,
        text: String::new(),
        ranks: Vec::new(),
    };
    assert!(world.frame(moves).contains(&Effect::Moves));
    // Nobody expects progress of workers that are told to stop.
    assert!(world.session.expects_progress(world.now));
    world.stop(2, 1_000);
    assert!(!world.session.expects_progress(world.now));
    assert_eq!(world.frame(hung), []);
}

#[test]
fn behind_a_checkpoint_the_workers_go_on_and_a_stop_waits_for_it() {
    let mut world = World::running(1);
    let digest = digest(1);
    let install = |barrier, reason| ToLauncher::InstallStop {
        digest,
        barrier,
        step: 5,
        grace_ms: 1_000,
        reason,
    };
    let confirm = |barrier, reason| ToLauncher::ConfirmStop {
        digest,
        barrier,
        step: 5,
        reason,
    };
    assert_eq!(world.frame(install(1, Reason::Checkpoint)).len(), 1);
    let told = |ranks: &[u32], all| {
        let (step, ranks) = (5, ranks.to_vec());
        let saved = Saved {
            step,
            ranks,
            all,
            failed: None,
        };
        Effect::Send(ToAgent::Saved { digest, saved })
    };
    assert_eq!(
        world.frame(confirm(1, Reason::Checkpoint)),
        [Effect::ConfirmCheckpoint { step: 5 }, told(&[], false)],
        "the agent learns that it was heard"
    );
    assert_eq!(world.session.saves(), Some(5));
    // Not before all have saved: the leader asks again, or gives the stop up.
    assert_eq!(world.frame(install(2, Reason::Drain)), []);
    let cancel = |barrier| ToLauncher::CancelStop { digest, barrier };
    assert_eq!(world.frame(cancel(2)), []);
    // An agent that was restarted tells it again, and has its answer again.
    assert_eq!(
        world.frame(confirm(1, Reason::Checkpoint)),
        [told(&[], false)]
    );
    assert_eq!(world.session.saves(), Some(5));
    let saved = |ranks: &[u32], all| Event::Saved {
        ranks: ranks.to_vec(),
        all,
        passed: all,
        failed: None,
    };
    assert_eq!(world.on(saved(&[0], false)), [told(&[0], false)]);
    assert_eq!(world.on(saved(&[0], false)), [], "nothing new");
    assert_eq!(
        world.on(saved(&[0, 1], true)),
        [told(&[0, 1], true), Effect::CancelStop]
    );
    assert!(world.session.saves().is_none() && world.session.expects_progress(world.now));
    assert_eq!(
        world.frame(confirm(1, Reason::Checkpoint)),
        [told(&[0, 1], true)],
        "it is over"
    );
    assert!(world.session.expects_progress(world.now));
    assert_eq!(world.frame(install(3, Reason::Drain)).len(), 1);
    assert_eq!(
        world.frame(confirm(3, Reason::Drain)),
        [Effect::ConfirmStop { step: 5 }]
    );
    // Why one could not save is passed on.
    let mut world = World::running(1);
    world.frame(install(1, Reason::Checkpoint));
    world.frame(confirm(1, Reason::Checkpoint));
    let failed = Some("rank 1 could not save: no room".to_owned());
    let saved = Saved {
        step: 5,
        ranks: vec![0],
        all: true,
        failed: failed.clone(),
    };
    let told = world.on(Event::Saved {
        ranks: vec![0],
        all: true,
        passed: true,
        failed,
    });
    let saved = Effect::Send(ToAgent::Saved { digest, saved });
    assert_eq!(told, [saved, Effect::CancelStop]);
    // Workers that go on without having saved hold no stop up.
    let mut world = World::running(1);
    world.frame(install(1, Reason::Checkpoint));
    world.frame(confirm(1, Reason::Checkpoint));
    world.on(Event::Saved {
        ranks: Vec::new(),
        all: false,
        passed: true,
        failed: None,
    });
    assert!(world.session.expects_progress(world.now));
    assert_eq!(world.frame(install(2, Reason::Drain)).len(), 1);
    assert_eq!(
        world.frame(confirm(2, Reason::Drain)),
        [Effect::ConfirmStop { step: 5 }]
    );
}

#[test]
fn who_hangs_in_a_checkpoint_or_before_it_is_judged_in_the_end() {
    let install = |barrier, grace_ms, reason| ToLauncher::InstallStop {
        digest: digest(1),
        barrier,
        step: 5,
        grace_ms,
        reason,
    };
    let confirm = |barrier| ToLauncher::ConfirmStop {
        digest: digest(1),
        barrier,
        step: 5,
        reason: Reason::Checkpoint,
    };
    let mut world = World::running(1);
    world.frame(install(1, 30_000, Reason::Checkpoint));
    let expects = |world: &World, seconds| {
        let at = world.now + Span::from_secs(seconds);
        world.session.expects_progress(at)
    };
    assert!(!expects(&world, 29) && expects(&world, 30), "never decided");
    // Decided late: it still is a checkpoint.
    world.now += Span::from_secs(40);
    assert_eq!(
        world.frame(confirm(1)).first(),
        Some(&Effect::ConfirmCheckpoint { step: 5 })
    );
    assert!(!expects(&world, 599) && expects(&world, 600), "never saved");
    // Rank 0 hangs in it: the others' reports change nothing about that.
    world.now += Span::from_secs(300);
    world.on(Event::Saved {
        ranks: vec![1],
        all: false,
        passed: false,
        failed: None,
    });
    assert!(!expects(&world, 299) && expects(&world, 300));
    assert_eq!(world.frame(install(2, 0, Reason::Drain)), []);
    world.now += Span::from_secs(300);
    assert_eq!(world.session.saves(), Some(5), "it may still save");
    // And it holds up no stop.
    assert_eq!(world.frame(install(3, 0, Reason::Drain)).len(), 1);
    assert!(!expects(&world, 599) && expects(&world, 600));
}

#[test]
fn an_agent_that_comes_back_is_told_what_is_held() {
    let mut world = World::running(1);
    let digest = digest(1);
    let held = |world: &mut World| {
        world.on(Event::LinkDown);
        let effects = world.on(Event::LinkUp);
        let register = effects.into_iter().find_map(|e| match e {
            Effect::Send(ToAgent::Register(register)) => Some(register),
            _ => None,
        });
        register.unwrap().gate
    };
    assert_eq!(held(&mut world), None);
    let (barrier, reason) = (3, Reason::Checkpoint);
    world.frame(ToLauncher::InstallStop {
        digest,
        barrier,
        step: 5,
        grace_ms: 1_000,
        reason,
    });
    assert_eq!(held(&mut world), None, "the workers have not taken it");
    let installed = Event::StopInstalled {
        digest,
        barrier,
        step: 7,
    };
    world.on(installed.clone());
    let gate = |confirmed| {
        Some(Held {
            barrier,
            step: 7,
            reason,
            confirmed,
        })
    };
    assert_eq!(held(&mut world), gate(false));
    world.frame(ToLauncher::CancelStop { digest, barrier });
    assert_eq!(held(&mut world), None);
    world.frame(ToLauncher::InstallStop {
        digest,
        barrier,
        step: 7,
        grace_ms: 1_000,
        reason,
    });
    world.on(installed);
    world.frame(ToLauncher::ConfirmStop {
        digest,
        barrier,
        step: 7,
        reason,
    });
    assert_eq!(held(&mut world), gate(true));
    world.on(Event::Saved {
        ranks: vec![0, 1],
        all: true,
        passed: true,
        failed: None,
    });
    assert_eq!(
        held(&mut world),
        gate(true),
        "whoever leads next has to know"
    );
    world.on(exit(0, 0));
    world.on(exit(1, 0));
    world.on(Event::Left(Left::Nothing));
    assert_eq!(
        held(&mut world),
        gate(true),
        "the ranks of other nodes may wait at it"
    );
    world.start(2);
    assert_eq!(held(&mut world), None, "it is of the generation before");
}

/// Their leftovers take a moment to end, and the next generation is decided meanwhile.
#[test]
fn what_finished_workers_held_is_not_said_of_the_next_generation() {
    let mut world = World::running(1);
    let (digest, reason) = (digest(1), Reason::Checkpoint);
    world.frame(ToLauncher::InstallStop {
        digest,
        barrier: 3,
        step: 7,
        grace_ms: 1_000,
        reason,
    });
    world.on(Event::StopInstalled {
        digest,
        barrier: 3,
        step: 7,
    });
    world.on(exit(0, 0));
    world.on(exit(1, 0));
    world.start(2);
    world.on(Event::LinkDown);
    world.on(Event::Left(Left::Nothing));
    let effects = world.on(Event::LinkUp);
    let gates = effects.into_iter().filter_map(|e| match e {
        Effect::Send(ToAgent::Register(register)) => Some(register.gate),
        _ => None,
    });
    assert_eq!(gates.collect::<Vec<_>>(), [None]);
}

#[test]
fn what_is_cancelled_leaves_the_checkpoint_before_it() {
    let mut world = World::running(1);
    let digest = digest(1);
    let reason = Reason::Checkpoint;
    let held = |barrier, step, confirmed| {
        Some(Held {
            barrier,
            step,
            reason,
            confirmed,
        })
    };
    let gate = |world: &World| world.session.current.as_ref().and_then(|c| c.held);
    let install = |world: &mut World, barrier, step| {
        world.frame(ToLauncher::InstallStop {
            digest,
            barrier,
            step,
            grace_ms: 1_000,
            reason,
        });
        world.on(Event::StopInstalled {
            digest,
            barrier,
            step,
        });
    };
    let confirm = |barrier, step| ToLauncher::ConfirmStop {
        digest,
        barrier,
        step,
        reason,
    };
    install(&mut world, 3, 5);
    world.frame(confirm(3, 5));
    let (ranks, all) = (vec![0, 1], true);
    let done = Event::Saved {
        ranks: ranks.clone(),
        all,
        passed: true,
        failed: None,
    };
    world.on(done);
    install(&mut world, 4, 9);
    assert_eq!(gate(&world), held(4, 9, false));
    assert_eq!(
        world.frame(ToLauncher::CancelStop { digest, barrier: 4 }),
        [Effect::CancelStop]
    );
    assert_eq!(gate(&world), held(3, 5, true));
    // A new leader may tell of it once more, under its own number: nobody saves again, and it is heard.
    let saved = Saved {
        step: 5,
        ranks,
        all,
        failed: None,
    };
    let told = Effect::Send(ToAgent::Saved { digest, saved });
    assert_eq!(world.frame(confirm(6, 5)), [told]);
    assert_eq!(world.session.saves(), None);
    assert_eq!(world.frame(confirm(6, 7)), [], "nobody saved for that one");
    // The next is agreed on as ever.
    install(&mut world, 7, 12);
    assert_eq!(
        world.frame(confirm(7, 12)).first(),
        Some(&Effect::ConfirmCheckpoint { step: 12 })
    );
    assert_eq!(gate(&world), held(7, 12, true));
}
