use std::fs;
use std::path::Path;

use muster_protocol::Digest;

use super::*;
use crate::WorkerEnv;
use crate::collective::GroupError;
use crate::testing::HeldPort;

/// Runs one worker per rank, as threads with real sockets between them.
fn train(world: u32, args: &WorkerArgs) -> Vec<Result<Ending, WorkerError>> {
    let held = HeldPort::new();
    let port = held.port();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                let env = WorkerEnv {
                    rank,
                    world,
                    local_rank: 0,
                    master: Some(("127.0.0.1".to_owned(), port)),
                    restart: 0,
                    generation: 1,
                    digest: Digest([5; 32]),
                };
                scope.spawn(move || run(args, &env, None))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn outcome(endings: Vec<Result<Ending, WorkerError>>) -> Outcome {
    let mut outcomes = endings.into_iter().map(|ending| match ending.unwrap() {
        Ending::Done(outcome) => outcome,
        other => panic!("{other:?}"),
    });
    let first = outcomes.next().unwrap();
    assert!(outcomes.all(|outcome| outcome == first), "ranks differ");
    first
}

fn events(dir: &Path, rank: u32) -> Vec<Event> {
    let text = fs::read_to_string(dir.join(EventLog::file_name(rank))).unwrap();
    text.lines()
        .map(|line| {
            let line: Line = serde_json::from_str(line).unwrap();
            assert_eq!((line.rank, line.generation), (rank, 1));
            line.event
        })
        .collect()
}

fn args(dir: &Path, steps: u64) -> WorkerArgs {
    WorkerArgs {
        steps,
        save_every: 5,
        report_every: 4,
        ..WorkerArgs::new(dir.join("checkpoints"), dir.join("events"))
    }
}

#[test]
fn parameters_are_the_same_bits_in_every_world() {
    const STEPS: u64 = 13;
    let reference = undisturbed(1, STEPS).unwrap();
    assert_ne!(undisturbed(2, STEPS).unwrap().hash, reference.hash);
    assert_ne!(undisturbed(1, STEPS + 1).unwrap().hash, reference.hash);
    for world in 1..=4 {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(
            outcome(train(world, &args(dir.path(), STEPS))),
            reference,
            "world {world}"
        );
    }
}

#[test]
fn a_training_that_was_cut_and_resharded_ends_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    // Cut in the middle: from here to the end as if the job had died after step 9.
    outcome(train(3, &args(dir.path(), 9)));
    fs::write(
        dir.path()
            .join("checkpoints")
            .join(format!("step-{:020}.ckpt", 99)),
        b"torn",
    )
    .unwrap();
    let resumed = outcome(train(2, &args(dir.path(), 16)));
    assert_eq!(resumed, undisturbed(1, 16).unwrap());

    let told = events(&dir.path().join("events"), 0);
    let starts: Vec<_> = told
        .iter()
        .filter_map(|event| match event {
            Event::Start {
                step,
                world,
                restored_from,
                ..
            } => Some((*step, *world, *restored_from)),
            _ => None,
        })
        .collect();
    assert_eq!(starts, [(0, 3, None), (9, 2, Some(9))]);
    assert!(matches!(told.last(), Some(Event::Done { step: 16, outcome }) if *outcome == resumed));
    let saved: Vec<_> = told
        .iter()
        .filter_map(|event| match event {
            Event::Saved { step } => Some(*step),
            _ => None,
        })
        .collect();
    assert_eq!(saved, [5, 9, 10, 15, 16]);

    let other = WorkerArgs {
        seed: 2,
        ..args(dir.path(), 20)
    };
    let refused = train(1, &other).pop().unwrap();
    assert!(
        matches!(
            refused,
            Err(WorkerError::ForeignCheckpoint { step: 16, .. })
        ),
        "{refused:?}"
    );
}

#[test]
fn a_failing_disk_ends_the_training_with_the_cause() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, b"").unwrap();
    let args = WorkerArgs {
        checkpoints: file.join("below"),
        ..args(dir.path(), 6)
    };
    let mut endings = train(2, &args);
    let (one, zero) = (endings.pop().unwrap(), endings.pop().unwrap());
    assert!(matches!(zero, Err(WorkerError::Checkpoint(_))), "{zero:?}");
    assert!(
        matches!(
            one,
            Err(WorkerError::Group(GroupError::PeerLost { rank: 0, .. })
                | WorkerError::Checkpoint(_))
        ),
        "{one:?}"
    );
}

#[test]
fn held_out_accuracy_is_that_of_a_working_classifier() {
    let outcome = undisturbed(1, 300).unwrap();
    println!("{outcome:?}");
    assert!(outcome.accuracy() >= 0.93, "{outcome:?}");
}
