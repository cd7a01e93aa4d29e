//! Ranks that die, leave, join and deviate, under the loop that a user runs.

use std::io::Write;
use std::os::fd::AsRawFd;

use muster_protocol::control::{Reason, Stop, encode_step, fresh_page, word};

use super::harness::{Heard, Job};
use super::model::{PARAMETERS, Point};
use super::*;
use crate::data::{LoaderConfig, Sampler};
use crate::live::LiveError;
use crate::page::Page;
use crate::session::Session;

/// One process that does what the log says: in each step so many ranks had samples, the first ones of the
/// world. All ranks of a test share memory, so their sums are added in the order of ranks.
pub(super) fn replay(model: &mut Net, config: &Config, ranks: &[u32]) {
    let mut sampler = Sampler::new(config.sampler).unwrap();
    let ranges = model.buckets();
    for (step, world) in (0..).zip(ranks) {
        let plan = sampler.plan(*world as usize);
        let mut total: Vec<Vec<f32>> = Vec::new();
        let mut measured = Measured::default();
        for rank in 0..*world {
            let mut sums: Vec<Vec<f32>> = ranges.iter().map(|r| vec![0.0; r.len()]).collect();
            // As the reduction of 64-bit floats: each rank's sum first.
            let mut own = Measured {
                extra: vec![0.0; 2],
                ..Measured::default()
            };
            let numbers = plan.part(&all(*world, rank));
            for number in numbers.clone() {
                let indices: Vec<u64> = plan.indices(number).collect();
                let micro = Micro {
                    step,
                    epoch: plan.epoch(),
                    number,
                    samples: indices.clone(),
                    indices,
                    seed: plan.seed_of(number),
                    scale: 1.0,
                    last: number + 1 == numbers.end,
                };
                let mut into = Gradients::new(&ranges, &mut sums);
                own.add(&model.backward(&micro, &mut into).unwrap());
            }
            if rank == 0 {
                (total, measured) = (sums, own);
                continue;
            }
            for (total, sums) in total.iter_mut().zip(sums) {
                total
                    .iter_mut()
                    .zip(sums)
                    .for_each(|(to, from)| *to += from);
            }
            measured.add(&own);
        }
        let factor = (1.0 / measured.samples as f64) as f32;
        total.iter_mut().flatten().for_each(|sum| *sum *= factor);
        model.update(&Update {
            step,
            rate: 0.01,
            gradient: &total,
            measured: &measured,
        });
        sampler.commit(&plan).unwrap();
    }
}

pub(super) fn some(config: &Config, count: usize) -> Vec<Parallel<Net>> {
    // Each begins with values of its own: rank 0's are handed out.
    let nets = (0..count as u64).map(|seed| Net::new(seed + 1, Faults::default()));
    nets.map(|net| {
        let feed = Feed::ahead(LoaderConfig::default(), Ok).unwrap();
        overlapping(net, feed, config)
    })
    .collect()
}

pub(super) fn with(
    config: &Config,
    count: usize,
    who: usize,
    faults: Faults,
) -> Vec<Parallel<Net>> {
    let mut all = some(config, count);
    all[who].model.faults = faults;
    all
}

/// The end of every rank: complete, and all alike. With the events that each heard.
#[track_caller]
pub(super) fn alike(job: Job, case: &str) -> (Vec<Parallel<Net>>, Vec<Vec<Heard>>) {
    let (ends, heard): (Vec<_>, Vec<_>) = job.finish().into_iter().unzip();
    let trainings: Vec<Parallel<Net>> = ends
        .into_iter()
        .map(|end| {
            let (ending, training) = end.unwrap_or_else(|error| panic!("{case}: {error:?}"));
            assert_eq!(ending, Ending::Complete, "{case}");
            training
        })
        .collect();
    let first = trainings[0].encode();
    assert!(trainings.iter().all(|t| t.encode() == first), "{case}");
    (trainings, heard)
}

/// The world of each step, from a rank that was there from the beginning.
pub(super) fn log(heard: &[Heard], case: &str) -> Vec<u32> {
    let steps = heard.iter().filter_map(|heard| match heard {
        Heard::Step(step, ranks) => Some((*step, *ranks)),
        _ => None,
    });
    let (numbers, ranks): (Vec<u64>, Vec<u32>) = steps.unzip();
    let expected: Vec<u64> = (1..=numbers.len() as u64).collect();
    assert_eq!(numbers, expected, "{case}: none is lost, none done twice");
    ranks
}

#[test]
fn survivors_and_newcomers_end_as_a_replay_of_the_log_wherever_a_rank_is_killed() {
    let config = config();
    let mut points = vec![Point::Begin, Point::InsideUpdate];
    points.extend((0..3).map(Point::AfterReady));
    for point in points {
        for victim in 0..3 {
            let case = format!("rank {victim} killed at {point:?}");
            let faults = Faults {
                kill: Some((3, point)),
                ..Faults::default()
            };
            let mut job = Job::start(Options::default(), with(&config, 3, victim, faults));
            job.allow(10);
            job.until_dead();
            job.regroup(Vec::new());
            job.until_steps(8);
            job.regroup(some(&config, 1));
            job.until_steps(14);
            let (trainings, heard) = alike(job, &case);
            let ranks = log(&heard[0], &case);
            assert_eq!((ranks.len() as u64, ranks[0]), (STEPS, 3), "{case}");
            let ended = heard[0]
                .iter()
                .filter(|h| matches!(h, Heard::Ended(why) if !why.is_empty()));
            assert!(ended.count() >= 2, "{case}: one is lost, and one comes");
            assert_eq!(
                (ranks[5], *ranks.last().unwrap()),
                (2, 3),
                "{case}: {ranks:?}"
            );
            let mut replayed = Net::new(1, Faults::default());
            replay(&mut replayed, &config, &ranks);
            assert_eq!(
                trainings[0].model().encode(),
                replayed.encode(),
                "{case}: {ranks:?}"
            );
        }
    }
}

#[test]
fn with_every_codec_survivors_and_newcomers_are_alike() {
    for codecs in all_codecs() {
        let config = Config {
            codecs: codecs.clone(),
            max_norm: Some(1.0),
            ..config()
        };
        let case = format!("{codecs:?}");
        let faults = Faults {
            kill: Some((3, Point::AfterReady(1))),
            ..Faults::default()
        };
        let mut job = Job::start(Options::default(), with(&config, 3, 1, faults));
        job.allow(6);
        job.until_dead();
        job.regroup(some(&config, 1));
        job.until_steps(12);
        job.leave(0, some(&config, 1));
        job.until_steps(20);
        let (_, heard) = alike(job, &case);
        assert!(heard[0].contains(&Heard::Boundary(Reason::Drain)), "{case}");
        assert!(heard[2].contains(&Heard::Regrouped(false)), "{case}");
    }
}

/// A rank dies in the step that begins with an evaluation, so this is done again; another comes, and catches up
/// when the training is over already.
#[test]
fn evaluations_are_known_to_all_whatever_the_world_does() {
    let config = Config {
        until: Span::Steps(25),
        ..config()
    };
    let evaluated = |trainings: Vec<Parallel<Net>>| -> Vec<Parallel<Net>> {
        let held_out = || HeldOut::new(Feed::indices(), 23, 4, Span::Steps(8));
        let each = trainings.into_iter();
        each.map(|training| training.evaluated_by(held_out()))
            .collect()
    };
    let faults = Faults {
        kill: Some((16, Point::AfterReady(1))),
        ..Faults::default()
    };
    let job = with(&config, 3, 0, faults);
    let mut job = Job::start(Options::default(), evaluated(job));
    job.allow(u64::MAX);
    job.until_dead();
    job.allow(0);
    job.regroup(Vec::new());
    job.until_steps(20);
    job.allow(0);
    job.regroup(evaluated(some(&config, 1)));
    let (trainings, heard) = alike(job, "evaluated");
    for heard in &heard[..2] {
        let evaluations = heard.iter().filter_map(|heard| match heard {
            Heard::Evaluated(step) => Some(*step),
            _ => None,
        });
        assert_eq!(evaluations.collect::<Vec<_>>(), [8, 16, 24, 25]);
        assert_eq!(log(heard, "evaluated").len(), 25);
    }
    assert_eq!(heard[2][0], Heard::Regrouped(false));
    assert!(trainings.iter().all(|t| t.best().is_some()));
}

/// Of so many ranks, which compare their states each four steps, the second one's deviates from step 5 on.
fn one_deviates(world: usize) -> Job {
    let faults = Faults {
        flip: Some(5),
        ..Faults::default()
    };
    let options = Options {
        compare_every: Some(4),
        ..Options::default()
    };
    Job::start(options, with(&config(), world, 1, faults))
}

#[test]
fn a_rank_whose_state_deviates_is_named_and_fed_anew() {
    let job = one_deviates(3);
    job.until_steps(20);
    let (_, heard) = alike(job, "one deviates");
    for heard in &heard {
        let named = heard.iter().filter(|h| matches!(h, Heard::Quarantined(_)));
        assert_eq!(named.collect::<Vec<_>>(), [&Heard::Quarantined(vec![1])]);
        let steps = log(heard, "one deviates");
        assert_eq!((steps.len(), steps[7], steps[8]), (STEPS as usize, 3, 2));
        assert_eq!(*steps.last().unwrap(), 3, "it counts again: {steps:?}");
        assert_eq!(
            heard[0],
            Heard::Regrouped(true),
            "in its process: {heard:?}"
        );
    }
}

#[test]
fn two_that_differ_are_not_judged() {
    let job = one_deviates(2);
    for (end, _) in job.finish() {
        match end {
            Err(RunError::Live(LiveError::StatesDiffer { step, groups })) => {
                assert_eq!((step, groups), (8, vec![vec![0], vec![1]]));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn who_cannot_stay_is_restarted_from_a_checkpoint_in_another_world() {
    let config = config();
    let dir = tempfile::tempdir().unwrap();
    let options = Options {
        save_every: Some(5),
        ..Options::default()
    };
    let run = |world: u32, kill: Option<(u64, Point)>| {
        let held = HeldPort::new();
        let port = held.port();
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..world)
                .map(|rank| {
                    let mut training = some(&config, rank as usize + 1).remove(rank as usize);
                    training.model.faults.kill = kill.filter(|_| rank == 1);
                    let training = training.restored_from(Files(dir.path().join("states")));
                    scope.spawn(move || run_at(training, (), options, (rank, world, port)))
                })
                .collect();
            let ends: Vec<_> = ranks.into_iter().map(|rank| rank.join().ok()).collect();
            ends
        })
    };
    let ends = run(2, Some((12, Point::AfterReady(0))));
    assert!(ends[1].is_none(), "killed");
    match ends[0].as_ref().unwrap() {
        Err(RunError::Group(crate::collective::GroupError::PeerLost { rank: 1, .. })) => {}
        other => panic!("{other:?}"),
    }
    let ends: Vec<_> = run(3, None)
        .into_iter()
        .map(|end| end.unwrap().unwrap())
        .collect();
    let mut replayed = Net::new(1, Faults::default());
    let worlds: Vec<u32> = (0..STEPS)
        .map(|step| if step < 10 { 2 } else { 3 })
        .collect();
    replay(&mut replayed, &config, &worlds);
    for (ending, training) in &ends {
        assert_eq!((*ending, training.steps()), (Ending::Complete, STEPS));
        assert_eq!(training.model().encode(), replayed.encode());
    }
    // It is complete: started once more, it ends at once, alone too.
    let alone = run(1, None).remove(0).unwrap().unwrap();
    assert_eq!(alone.1.encode(), ends[0].1.encode());
}

#[test]
fn in_one_generation_too_a_rank_that_deviates_is_fed_anew() {
    #[derive(Default)]
    struct Named(Vec<Vec<u32>>);
    impl Hooks<Net> for &mut Named {
        fn on_quarantine(&mut self, ranks: &[u32]) -> Result<(), BoxError> {
            self.0.push(ranks.to_vec());
            Ok(())
        }
    }
    let config = config();
    let held = HeldPort::new();
    let port = held.port();
    let options = Options {
        compare_every: Some(3),
        ..Options::default()
    };
    let ends: Vec<_> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                let faults = Faults {
                    flip: (rank == 0).then_some(7),
                    ..Faults::default()
                };
                let training = with(&config, 3, rank as usize, faults).remove(rank as usize);
                scope.spawn(move || {
                    let mut named = Named::default();
                    let end = run_at(training, &mut named, options, (rank, 3, port));
                    (end.unwrap().1.encode(), named.0)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for (state, named) in &ends {
        assert_eq!((state, named), (&ends[0].0, &vec![vec![0]]));
    }
}

/// A launcher that restarts workers: they stop at the agreed step, with the state saved, and go on from there.
#[test]
fn a_stop_that_was_agreed_is_kept_and_resumed() {
    let config = config();
    let dir = tempfile::tempdir().unwrap();
    let training = |seed| {
        let training = some(&config, seed).remove(seed - 1);
        training.restored_from(Files(dir.path().to_owned()))
    };
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&fresh_page()).unwrap();
    let page = Page::from_file(&file).unwrap();
    page.store(word::STOP, Stop::Confirmed(7).encode());
    let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
    let stopped = Trainer::new(training(1)).run(Some(&mut session)).unwrap();
    assert_eq!((stopped.0, stopped.1.steps()), (Ending::Stopped, 7));
    assert_eq!(page.load(word::ACK), encode_step(Some(7)));
    drop(session);

    page.store(word::STOP, 0);
    let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
    let ended = Trainer::new(training(2)).run(Some(&mut session)).unwrap();
    assert_eq!((ended.0, ended.1.steps()), (Ending::Complete, STEPS));
    let mut replayed = Net::new(1, Faults::default());
    replay(&mut replayed, &config, &[1; STEPS as usize]);
    assert_eq!(ended.1.model().encode(), replayed.encode());
}

#[test]
fn alone_without_a_launcher_it_trains_by_the_same_call() {
    let config = config();
    let trainer = Trainer::new(some(&config, 1).remove(0));
    let (ending, training) = trainer.run(None).unwrap();
    assert_eq!(ending, Ending::Complete);
    let mut replayed = Net::new(1, Faults::default());
    replay(&mut replayed, &config, &[1; STEPS as usize]);
    assert_eq!(training.model().encode(), replayed.encode());
    assert_eq!(training.model().parameters.len(), PARAMETERS);
}
