//! Models that are made while their ranks take part already.

use std::sync::mpsc::{Receiver, Sender, channel};

use super::elastic::{alike, log, replay, some};
use super::harness::{Heard, Job};
use super::*;
use crate::live::LiveError;
use crate::testing::eventually;

/// A training whose model is made when the test says so.
fn later(
    config: &Config,
    make: impl FnOnce() -> Result<Net, BoxError> + Send + 'static,
) -> (Parallel<Net>, Sender<()>) {
    let (say, said): (Sender<()>, Receiver<()>) = channel();
    let outline = Outline::of(&Net::new(0, Faults::default()));
    let make = move || {
        said.recv()?;
        make()
    };
    let training = Parallel::later(outline, make, Feed::indices(), config.clone());
    (training.unwrap(), say)
}

#[test]
fn the_others_go_on_while_a_newcomers_model_is_made() {
    let config = config();
    let mut job = Job::start(Options::default(), some(&config, 2));
    job.until_steps(3);
    let (training, say) = later(&config, || Ok(Net::new(9, Faults::default())));
    job.allow(3);
    job.regroup(vec![training]);
    // Steps of a world of three, in which it has no samples: it listens.
    let two = |count: usize| {
        move |heard: &[Heard]| {
            let steps = heard.iter().filter(|h| matches!(h, Heard::Step(_, 2)));
            steps.count() >= count
        }
    };
    job.allow(15);
    eventually("the others get on", || two(15)(&job.ranks[0].heard()));
    assert_eq!(
        job.ranks[2].heard(),
        [],
        "it is told of its place with its model"
    );
    say.send(()).unwrap();
    job.until_steps(20);
    let (trainings, heard) = alike(job, "late");
    assert_eq!(heard[2][0], Heard::Regrouped(false));
    let ranks = log(&heard[0], "late");
    assert_eq!((ranks[14], ranks[STEPS as usize - 1]), (2, 3));
    let mut replayed = Net::new(1, Faults::default());
    replay(&mut replayed, &config, &ranks);
    assert_eq!(trainings[2].model().encode(), replayed.encode());
}

#[test]
fn a_generation_that_begins_waits_for_all_models() {
    let config = config();
    let (first, say) = later(&config, || Ok(Net::new(1, Faults::default())));
    let (second, say_too) = later(&config, || Ok(Net::new(2, Faults::default())));
    let job = Job::start(Options::default(), vec![first, second]);
    say.send(()).unwrap();
    say_too.send(()).unwrap();
    let (trainings, heard) = alike(job, "first");
    assert_eq!(heard[0][0], Heard::Regrouped(true));
    let mut replayed = Net::new(1, Faults::default());
    replay(&mut replayed, &config, &[2; STEPS as usize]);
    assert_eq!(trainings[1].model().encode(), replayed.encode());
}

/// How a newcomer ends whose model is made so; the others go on.
fn ends(make: impl FnOnce() -> Result<Net, BoxError> + Send + 'static) -> TrainError {
    let config = config();
    let mut job = Job::start(Options::default(), some(&config, 2));
    job.until_steps(3);
    let (training, say) = later(&config, make);
    say.send(()).unwrap();
    job.regroup(vec![training]);
    job.allow(u64::MAX);
    job.until_dead();
    let newcomer = job.ranks.remove(2);
    let error = newcomer.end_of().expect_err("it has no model");
    job.regroup(Vec::new());
    alike(job, "without it");
    match error {
        RunError::Train(error) => error,
        RunError::Live(LiveError::Training(error)) => *error.downcast().unwrap(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_model_that_cannot_be_made_or_is_another_ends_its_process_alone() {
    let error = ends(|| Err("no such file".into()));
    assert!(matches!(&error, TrainError::Make { source } if source.to_string() == "no such file"));
}

#[test]
fn a_model_that_is_not_what_was_said_is_refused() {
    let net = Net::new(1, Faults::default());
    let wrong = Outline {
        extras: 3,
        ..Outline::of(&net)
    };
    let training = Parallel::later(wrong, || Ok(net), Feed::indices(), config());
    let mut training = training.unwrap();
    assert!(training.landing().is_none());
    training.model.start();
    let error = loop {
        assert!(training.landing().is_none());
        if let Some(error) = training.fault() {
            break error;
        }
        std::thread::yield_now();
    };
    let said = error.source().unwrap().to_string();
    assert!(said.contains("extras: 3"), "{said}");
}

#[test]
fn what_is_touched_stays_as_it_is() {
    for (_, optimizer) in super::model::Optimizer::all() {
        let mut net = Net::new(4, Faults::default()).by(&optimizer);
        let before = net.encode();
        net.load(&mut Load::touch()).unwrap();
        assert_eq!(net.encode(), before);
    }
    // Nothing to touch.
    let mut unnamed = Net::new(
        4,
        Faults {
            unnamed: true,
            ..Faults::default()
        },
    );
    let before = unnamed.encode();
    assert!(unnamed.load(&mut Load::touch()).is_err());
    assert_eq!(unnamed.encode(), before);
}
