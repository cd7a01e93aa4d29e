//! A checkpoint's life: saved, committed, restored, retired, and found damaged.

use muster_protocol::job::Job;
use muster_protocol::local::Replicated;
use muster_protocol::membership::Answer;

use super::*;

#[track_caller]
fn saves_and_restores(store: bool) {
    let mut world = World::training(store);
    for step in [10, 20] {
        world.save(step);
        world.until("committed", |w| {
            w.committed.contains(&step) && w.slots_are_free()
        });
    }
    assert_eq!(world.nodes[1].written.len(), 2);
    assert!(
        world.nodes[1]
            .written
            .iter()
            .all(|p| p.starts_with("data/"))
    );
    // The node without rank 0 dies; what goes on restores what was committed last.
    let (record, _) = world.head(0).expect("a generation");
    let dead = (0..2)
        .find(|i| record.leader() != Some(node(*i)))
        .expect("one");
    world.stop_agent(dead);
    world.nodes[dead].running = None;
    world.until("it goes on", |w| w.trains(&[1 - dead]));
    let (record, _) = world.head(1 - dead).expect("a generation");
    assert_eq!(record.restore.map(|c| c.step), Some(20));
}

#[test]
fn what_is_committed_by_members_is_restored() {
    saves_and_restores(false);
}

#[test]
fn what_is_committed_in_the_log_is_restored() {
    saves_and_restores(true);
}

/// Whatever a launcher thinks should go: two stay, and nothing goes before the log says so.
#[test]
fn what_is_retired_in_the_log_is_deleted_and_nothing_else() {
    let mut world = World::training(true);
    (0..2).for_each(|i| world.damage(i, 13));
    for step in [11, 12, 13, 14, 15] {
        world.save(step);
        world.until("committed", |w| {
            w.committed.contains(&step) && w.slots_are_free()
        });
    }
    // The damaged one is rejected first; of the others the newest two stay.
    for _ in 0..STEPS {
        let (retired, rejected) = world.taken_back();
        for step in [11, 12, 13, 14, 15] {
            let early = world.deleted(step) && !retired.contains(&step);
            assert!(!early, "step {step} of {retired:?}");
        }
        assert!(!retired.contains(&13) || rejected == [13]);
        if [11, 12, 13].iter().all(|step| world.deleted(*step)) {
            break;
        }
        world.step();
    }
    let (mut retired, rejected) = world.taken_back();
    retired.sort_unstable();
    assert_eq!((retired, rejected), (vec![11, 12, 13], vec![13]));
    assert!(!world.deleted(14) && !world.deleted(15));
    // What was left behind by an attempt of this generation may still be committed.
    let of = |w: &World, name: &str| w.nodes.iter().any(|n| n.deleted.iter().any(|d| d == name));
    assert!(!of(&world, "data/orphan"));
    // Only the leader's launcher is asked.
    let (record, _) = world.head(0).expect("a generation");
    let leads = (0..2)
        .find(|i| record.leader() == Some(node(*i)))
        .expect("one");
    assert!(world.nodes[1 - leads].deleted.is_empty());
    // A leader whose agent was restarted asks anew, and goes on with it.
    world.stop_agent(leads);
    world.start(leads);
    world.give_slots(leads);
    world.save(16);
    world.until("the next one goes", |w| {
        w.committed.contains(&16) && w.deleted(14)
    });
    assert!(world.taken_back().0.contains(&14));
}

/// The leader's agent dies between its COMMIT and hearing of it.
#[test]
fn a_restarted_leader_finds_its_commit_in_the_log() {
    let mut world = World::training(true);
    world.stuck = true;
    world.save(10);
    world.until("it is in the log", |w| w.commits_in_log() == 1);
    assert!(world.committed.is_empty());
    let (record, _) = world.head(0).expect("a generation");
    let leads = (0..2)
        .find(|i| record.leader() == Some(node(*i)))
        .expect("one");
    world.stop_agent(leads);
    world.stuck = false;
    world.start(leads);
    world.give_slots(leads);
    world.until("committed", |w| w.committed == [10] && w.slots_are_free());
    assert_eq!(world.commits_in_log(), 1, "it is not written twice");
    assert_eq!(world.head(leads).expect("a generation").0, record);
}

/// Without a store: it asks the voters once more, for the same.
#[test]
fn a_restarted_leader_commits_what_was_prepared() {
    let mut world = World::training(false);
    let (record, _) = world.head(0).expect("a generation");
    let leads = (0..2)
        .find(|i| record.leader() == Some(node(*i)))
        .expect("one");
    world.save(10);
    world.until("all is written", |w| {
        w.nodes.iter().all(|n| n.written.len() == 1)
    });
    world.stop_agent(leads);
    world.start(leads);
    world.give_slots(leads);
    world.until("committed", |w| w.committed == [10] && w.slots_are_free());
    assert_eq!(world.head(leads).expect("a generation").0, record);
    // And what follows goes its usual way.
    world.save(20);
    world.until("committed", |w| w.committed == [10, 20]);
}

/// The slots of a launcher that is gone are told to nobody as free.
#[test]
fn a_sealed_copy_outlives_its_launcher() {
    let mut world = World::training(false);
    let (_, generation) = world.head(0).expect("a generation");
    // Sealed, and no save is open that would write it.
    world.seal(1, 5);
    world.until("sealed", |w| !w.slots_are_free());
    let boot = world.nodes[1].boot;
    world.nodes[1].running = None;
    world.put(
        1,
        Event::LauncherGone {
            conn: ConnId(boot),
            guard: Answer::Refused,
        },
    );
    world.until("another generation", |w| {
        w.head(0).is_some_and(|(_, digest)| digest != generation)
    });
    assert!(!world.slots_are_free());
}

/// A rank cannot load what was committed last: that is taken out of the log, and costs no restart.
#[test]
fn what_a_rank_finds_damaged_is_rejected_and_the_one_before_is_restored() {
    let mut world = World::training(true);
    for step in [10, 20] {
        world.save(step);
        world.until("committed", |w| {
            w.committed.contains(&step) && w.slots_are_free()
        });
    }
    world.fails(1, None);
    let restores = |w: &World, step: u64| {
        let restored = w.head(0).and_then(|(r, _)| r.restore).map(|c| c.step);
        w.trains(&[0, 1]) && restored == Some(step)
    };
    world.until("it restores the newest", |w| restores(w, 20));
    let (record, digest) = world.head(0).expect("a generation");
    assert_eq!(record.restarts_used, 1);
    // Nobody may begin before all have loaded.
    world.says(0, SaveNews::Loaded { digest });
    world.pass(Span::from_secs(3));
    assert!(world.nodes.iter().all(|n| n.go.is_none()));
    let manifest = record.restore.expect("a checkpoint").manifest;
    let why = String::from("a chunk is not what it was");
    (0..2).for_each(|i| world.damage(i, 20));
    let here = false;
    let damaged = Damaged {
        manifest,
        why,
        here,
    };
    world.fails(1, Some(damaged));
    world.until("it restores the one before", |w| restores(w, 10));
    let (record, digest) = world.head(0).expect("a generation");
    assert_eq!(record.restarts_used, 1, "no fault of the script");
    assert!(matches!(record.cause, Cause::Damaged { step: 20, .. }));
    assert_eq!(world.rejects_in_log(), 1);
    // People of every node read it once, in the words of who looked last.
    for n in &world.nodes {
        let said = "the checkpoint of step 20 is rejected: step 20 is cut";
        assert_eq!(
            n.told.iter().filter(|t| *t == said).count(),
            1,
            "{:?}",
            n.told
        );
    }
    (0..2).for_each(|i| world.says(i, SaveNews::Loaded { digest }));
    world.until("all may begin", |w| {
        w.nodes.iter().all(|n| n.go == Some(digest))
    });
}

#[test]
fn how_saves_get_to_other_nodes_is_known_while_their_launcher_is_there() {
    let mut world = World::training(true);
    let known = |world: &World, i: usize| {
        let agent = world.nodes[i].agent.as_ref().expect("an agent");
        agent.job(&key()).and_then(Job::replicated)
    };
    assert_eq!(known(&world, 0), None);
    for behind in [0, 3] {
        let says = Replicated {
            behind,
            missed: 7,
            whole: Some(20),
        };
        world.says(0, SaveNews::Replicas(says));
        world.pass(Span::from_secs(1));
        assert_eq!((known(&world, 0), known(&world, 1)), (Some(says), None));
    }
    let conn = ConnId(world.nodes[0].boot);
    world.nodes[0].running = None;
    world.put(
        0,
        Event::LauncherGone {
            conn,
            guard: Answer::Refused,
        },
    );
    world.pass(Span::from_secs(1));
    assert_eq!(known(&world, 0), None);
}
