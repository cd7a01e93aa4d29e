//! Saves: their ranks, times and contents; and how ranks end.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::elastic::{alike, log, replay, some, with};
use super::harness::{Heard, Job};
use super::model::Point;
use super::*;
use crate::live::Patience;

/// One place for all ranks; a save takes some time.
#[derive(Clone, Debug, Default)]
struct Kept {
    states: Arc<Mutex<BTreeMap<u64, Vec<u8>>>>,
    takes: Duration,
}

impl Store for Kept {
    fn newest(&mut self) -> Result<Option<(u64, Vec<u8>)>, BoxError> {
        Ok(None)
    }

    fn save(&mut self, step: u64, state: &[u8]) -> Result<(), BoxError> {
        std::thread::sleep(self.takes);
        self.states.lock().unwrap().insert(step, state.to_vec());
        Ok(())
    }
}

impl Kept {
    fn by(&self, trainings: Vec<Parallel<Net>>) -> Vec<Parallel<Net>> {
        let each = trainings.into_iter();
        each.map(|training| training.restored_from(self.clone()))
            .collect()
    }

    fn steps(&self) -> Vec<u64> {
        self.states.lock().unwrap().keys().copied().collect()
    }
}

/// Far longer than an operation inside a step may take, which is a tenth of the patience after such short steps.
#[test]
fn a_save_may_take_longer_than_an_operation_inside_a_step() {
    let config = Config {
        until: Span::Steps(12),
        ..config()
    };
    let kept = Kept {
        takes: Duration::from_secs(2),
        ..Kept::default()
    };
    let options = Options {
        save_every: Some(8),
        patience: Patience {
            operation: Duration::from_secs(15),
            ..Patience::default()
        },
        ..Options::default()
    };
    let job = Job::start(options, kept.by(some(&config, 2)));
    let (_, heard) = alike(job, "slow");
    for heard in &heard {
        let began = heard.iter().filter(|h| matches!(h, Heard::Regrouped(_)));
        assert_eq!(began.count(), 1, "nobody is taken for lost");
    }
    assert_eq!(kept.steps(), [8, 12]);
}

#[test]
fn the_state_is_saved_while_rank_0_has_none() {
    let config = config();
    let kept = Kept::default();
    let options = Options {
        save_every: Some(1),
        ..Options::default()
    };
    let faults = Faults {
        kill: Some((3, Point::Begin)),
        ..Faults::default()
    };
    let mut job = Job::start(options, kept.by(with(&config, 3, 1, faults)));
    job.allow(10);
    job.until_dead();
    job.regroup_behind(kept.by(some(&config, 1)));
    let (_, heard) = alike(job, "first");
    assert_eq!(heard[0][0], Heard::Regrouped(false));
    let worlds = log(&heard[1], "first");
    let without: Vec<u64> = (1..)
        .zip(worlds)
        .filter(|(_, ranks)| *ranks == 2)
        .map(|(step, _)| step)
        .collect();
    let saved = kept.steps();
    assert!(!without.is_empty());
    assert!(
        without.iter().all(|step| saved.contains(step)),
        "{without:?} {saved:?}"
    );
}

#[test]
fn nobody_ends_before_all_have_got_to_the_end() {
    let config = Config {
        until: Span::Steps(12),
        ..config()
    };
    for victim in 0..3 {
        let faults = Faults {
            kill: Some((11, Point::InsideUpdate)),
            ..Faults::default()
        };
        let mut job = Job::start(Options::default(), with(&config, 3, victim, faults));
        job.allow(u64::MAX);
        job.until_dead();
        // The others are over too, but one of them may have been lost with the results still on their way.
        job.regroup(some(&config, 1));
        let (trainings, heard) = alike(job, "the last step");
        assert_eq!(log(&heard[0], "the last step"), [3; 12]);
        assert_eq!(heard[2][0], Heard::Regrouped(false));
        let mut replayed = Net::new(1, Faults::default());
        replay(&mut replayed, &config, &[3; 12]);
        assert_eq!(trainings[2].model().encode(), replayed.encode());
    }
}

#[test]
fn what_a_deviating_rank_has_saved_is_saved_over() {
    let config = Config {
        until: Span::Steps(12),
        ..config()
    };
    // In the middle, and in the last step; by a bit, and so that no step can be made of it.
    for (step, breaks) in [(5, false), (5, true), (11, false), (11, true)] {
        let kept = Kept::default();
        let options = Options {
            save_every: Some(3),
            compare_every: Some(1000),
            ..Options::default()
        };
        let faults = Faults {
            flip: (!breaks).then_some(step),
            breaks: breaks.then_some(step),
            ..Faults::default()
        };
        let job = Job::start(options, kept.by(with(&config, 3, 0, faults)));
        let case = format!("the saver in step {step}, to no number: {breaks}");
        let (_, heard) = alike(job, &case);
        for heard in &heard {
            assert!(heard.contains(&Heard::Quarantined(vec![0])), "{heard:?}");
        }
        let mut replayed = Net::new(1, Faults::default());
        replay(&mut replayed, &config, &vec![3; step as usize + 1]);
        let states = kept.states.lock().unwrap();
        let saved = &states[&(step + 1)];
        assert!(saved.ends_with(&replayed.encode()), "{case}");
    }
}

#[test]
fn a_model_that_failed_is_not_saved() {
    let kept = Kept::default();
    let options = Options {
        save_every: Some(1),
        ..Options::default()
    };
    let faults = Faults {
        fails: Some(4),
        ..Faults::default()
    };
    let training = kept.by(vec![parallel(&config(), faults)]).remove(0);
    match run_at(training, (), options, (0, 1, 0)) {
        Err(RunError::Train(TrainError::Model { .. })) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(kept.steps(), [1, 2, 3, 4]);

    let mute = Faults {
        mute: true,
        unnamed: true,
        ..Faults::default()
    };
    let mut mute = parallel(&config(), mute);
    assert!(matches!(mute.whole(), Err(TrainError::NoState { .. })));
    assert_eq!(mute.freeze().total(), 0);
    assert!(mute.fault().is_some() && mute.fault().is_none());
}

#[test]
fn an_epoch_is_told_once_whatever_the_world_does() {
    let sampler = SamplerConfig {
        batch: Batch::PerRank(12),
        tail: Tail::Drop,
        ..config().sampler
    };
    let config = Config {
        sampler,
        ..config()
    };
    // What is left of the first epoch is a batch for one rank, and none for two.
    for worlds in [&[1, 1, 1, 2][..], &[1, 2, 1]] {
        let ranks = (0..2).map(|_| parallel(&config, Faults::default()));
        let told = on_ranks(ranks.collect(), |mut training, group| {
            for (step, world) in (0..).zip(worlds) {
                let share = Share {
                    entered: (0..*world).collect(),
                    ..all(2, group.rank())
                };
                let results = training.results(step, &share, group).unwrap();
                training.commit(step, &results);
            }
            let news = training.take_news();
            news.filter(|news| matches!(news, News::Epoch(1))).count()
        });
        assert_eq!(told, [1, 1], "{worlds:?}");
    }
}

#[test]
fn in_quarantine_nothing_of_the_old_state_is_kept() {
    let config = Config {
        codecs: all_codecs().remove(4),
        ..config()
    };
    let ranks = (0..2).map(|_| parallel(&config, Faults::default()));
    let kept = on_ranks(ranks.collect(), |mut training, group| {
        train(&mut training, group, 3);
        training.boundary(group).unwrap();
        let keeps = |training: &mut Parallel<Net>| {
            training.buckets.iter().any(|bucket| {
                let mut own = bucket.own().clone();
                let lists = own.lists_mut();
                lists.iter().any(|list| list.iter().any(|x| *x != 0.0))
            })
        };
        let before = keeps(&mut training) && training.kept_back.is_some();
        training.quarantined();
        (before, keeps(&mut training) || training.kept_back.is_some())
    });
    assert_eq!(kept, [(true, false); 2]);
}
