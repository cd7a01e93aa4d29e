//! Steps, one after the other, in groups that the test forms.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::gradient::ScalerConfig;

fn new(config: &Config, world: usize) -> Vec<Parallel<Net>> {
    let ranks = (0..world).map(|_| parallel(config, Faults::default()));
    ranks.collect()
}

/// Ranks that reduce when backward is over, whatever cores there are.
fn apart(config: &Config, world: usize) -> Vec<Parallel<Net>> {
    let mut ranks = new(config, world);
    for rank in &mut ranks {
        rank.beside = Some(false);
    }
    ranks
}

fn states(ranks: &[Parallel<Net>]) -> Vec<Vec<u8>> {
    ranks.iter().map(Parallel::encode).collect()
}

#[track_caller]
fn assert_alike(ranks: &[Parallel<Net>], case: &str) {
    let states = states(ranks);
    assert!(states.iter().all(|state| *state == states[0]), "{case}");
}

fn trained(ranks: Vec<Parallel<Net>>, steps: u64) -> Vec<Parallel<Net>> {
    on_ranks(ranks, |mut training, group| {
        train(&mut training, group, steps);
        training
    })
}

#[test]
fn every_codec_gives_all_ranks_the_same_bits_and_learns() {
    for codecs in all_codecs() {
        let config = Config {
            codecs: codecs.clone(),
            max_norm: Some(2.0),
            ..config()
        };
        let ranks = on_ranks(new(&config, 3), |mut training, group| {
            let reports = train(&mut training, group, 200);
            (training, reports)
        });
        let (ranks, reports): (Vec<_>, Vec<_>) = ranks.into_iter().unzip();
        assert_alike(&ranks, &format!("{codecs:?}"));
        let mean = |reports: &[Report]| {
            let sum: f64 = reports.iter().map(|report| report.training_loss).sum();
            sum / reports.len() as f64
        };
        let (first, last) = (mean(&reports[0][..10]), mean(&reports[0][190..]));
        assert!(last < 0.75 * first, "{codecs:?}: {first} to {last}");
        for report in reports.iter().flatten() {
            let times = report.times.unwrap();
            assert!(times.total >= times.computing && report.norm.unwrap() > 0.0);
            assert_eq!(
                (report.ranks, report.skipped, report.scale),
                (3, false, None)
            );
        }
    }
}

/// The reduction of a bucket ends while the model still computes: it waits for that.
#[test]
fn communication_overlaps_backward() {
    let ranks = on_ranks(vec![(); 2], |(), group| {
        let overlapped = Arc::new(AtomicBool::new(false));
        let faults = Faults {
            waits: Some(overlapped.clone()),
            ..Faults::default()
        };
        let mut training = parallel(&config(), faults);
        train(&mut training, group, 5);
        assert!(overlapped.load(Ordering::Acquire));
        training
    });
    assert_alike(&ranks, "overlapped");
    let plain = trained(apart(&config(), 2), 5);
    assert_eq!(states(&plain), states(&ranks));
}

#[test]
fn buckets_are_reduced_in_order_however_they_become_ready() {
    let expected = states(&trained(apart(&config(), 2), 6));
    for who in [[true, false], [true, true]] {
        let ranks = on_ranks(who.to_vec(), |backwards, group| {
            let faults = Faults {
                backwards,
                ..Faults::default()
            };
            let mut training = parallel(&config(), faults);
            train(&mut training, group, 6);
            training
        });
        assert_eq!(states(&ranks), expected);
    }
}

#[test]
fn a_step_that_overflows_on_one_rank_is_skipped_on_all() {
    let config = Config {
        mixed: Some(ScalerConfig {
            initial: 1024.0,
            interval: 4,
            ..ScalerConfig::default()
        }),
        codecs: Codecs::All(Codec::TopK {
            density: 0.3,
            momentum: None,
        }),
        ..config()
    };
    let ranks = on_ranks(vec![None, Some(5), None], |overflow, group| {
        let faults = Faults {
            overflow,
            ..Faults::default()
        };
        let mut training = parallel(&config, faults);
        let mut reports = train(&mut training, group, 5);
        let before = (training.model().encode(), training.buckets[1].own().clone());
        reports.extend(train(&mut training, group, 6));
        let after = (training.model().encode(), training.buckets[1].own().clone());
        assert_eq!(before, after, "a skipped step changes no parameter");
        reports.extend(train(&mut training, group, 12));
        (training, reports)
    });
    let (ranks, reports): (Vec<_>, Vec<_>) = ranks.into_iter().unzip();
    assert_alike(&ranks, "skipped");
    let scales: Vec<f32> = reports[0]
        .iter()
        .filter_map(|report| report.scale)
        .collect();
    // Doubled after 4 good steps, halved by the one that overflowed, doubled after 4 more.
    let expected = [
        1024.0, 1024.0, 1024.0, 1024.0, 2048.0, 2048.0, 1024.0, 1024.0, 1024.0, 1024.0, 2048.0,
        2048.0,
    ];
    assert_eq!(scales, expected);
    let skipped: Vec<u64> = reports[0]
        .iter()
        .filter(|report| report.skipped)
        .map(|report| report.step)
        .collect();
    assert_eq!(skipped, [6]);
    // The batch of the skipped step is over all the same.
    assert_eq!(ranks[0].epochs(), 2.0 + 24.0 / SAMPLES as f64);
}

#[test]
fn without_loss_scaling_a_gradient_that_is_not_finite_is_an_error_everywhere() {
    on_ranks(vec![None, Some(2)], |overflow, group| {
        let faults = Faults {
            overflow,
            ..Faults::default()
        };
        let mut training = parallel(&config(), faults);
        train(&mut training, group, 2);
        let before = training.encode();
        let share = all(2, group.rank());
        let error = RunError::from(training.results(2, &share, group).unwrap_err());
        assert!(
            matches!(error, RunError::Train(TrainError::NotFinite { step: 2 })),
            "{error}"
        );
        assert_eq!(training.encode(), before);
    });
}

/// One process that adds up what each rank would, in the order of ranks, as shared memory does.
#[test]
fn a_group_does_what_one_process_does_that_plays_all_ranks() {
    let config = config();
    let group = trained(new(&config, 3), 20);
    let mut alone = Net::new(1, Faults::default());
    super::elastic::replay(&mut alone, &config, &[3; 20]);
    assert_eq!(alone.encode(), group[0].model().encode());
}

#[test]
fn the_rate_follows_the_world() {
    let mut config = config();
    config.sampler.batch = Batch::PerRank(8);
    config.schedule.scaling = Scaling::Linear {
        reference: 8,
        up_to: 1000,
    };
    config.ramp = Span::Steps(4);
    let rates = |reports: &[Report]| -> Vec<f64> {
        reports
            .iter()
            .map(|report| (report.rate * 1e6).round() / 1e6)
            .collect()
    };
    let mut three = on_ranks(new(&config, 3), |mut training, group| {
        let reports = train(&mut training, group, 3);
        assert_eq!(rates(&reports), [0.03; 3], "the first world's, at once");
        training
    });
    three.truncate(1);
    let one = on_ranks(three, |mut training, group| {
        let reports = train(&mut training, group, 5);
        assert_eq!(rates(&reports), [0.01; 2], "a smaller one's, at once");
        assert!(reports.iter().all(|report| report.samples <= 8));
        training
    });
    let state = one[0].encode();
    let two = on_ranks(new(&config, 2), |mut training, group| {
        assert!(training.decode(&state));
        let reports = train(&mut training, group, 11);
        let ramp = [0.01, 0.0125, 0.015, 0.0175, 0.02, 0.02];
        assert_eq!(rates(&reports), ramp, "a larger one's, in time");
        training
    });
    assert_alike(&two, "after the worlds");
}

#[test]
fn the_best_model_is_found_by_all_ranks_together() {
    let config = Config {
        until: Span::Epochs(2.5),
        keep_best: true,
        better: Better::Higher(1),
        ..config()
    };
    let ranks = on_ranks(vec![(); 3], |(), group| {
        let held_out = HeldOut::new(Feed::indices(), 23, 4, Span::Steps(4));
        let mut training = parallel(&config, Faults::default()).evaluated_by(held_out);
        let share = all(3, group.rank());
        let mut models = vec![training.model().encode()];
        while !training.is_complete(3) {
            let step = training.progress.transactions;
            let results = training.results(step, &share, group).unwrap();
            training.commit(step, &results);
            models.push(training.model().encode());
        }
        (training, models)
    });
    let (mut ranks, models): (Vec<_>, Vec<_>) = ranks.into_iter().unzip();
    assert_alike(&ranks, "evaluated");
    let training = &mut ranks[0];
    let news: Vec<News> = training.take_news().collect();
    let evaluations = news.iter().filter_map(|news| match news {
        News::Evaluated(evaluation) => Some(evaluation),
        _ => None,
    });
    let evaluations: Vec<&Evaluation> = evaluations.collect();
    // 50 samples by 12 are 5 steps an epoch, the last of 2; 2.5 epochs end within the 13th.
    let steps: Vec<u64> = evaluations
        .iter()
        .map(|evaluation| evaluation.step)
        .collect();
    assert_eq!(steps, [4, 8, 12, 13]);
    assert_eq!(training.steps(), 13);
    for evaluation in &evaluations {
        let mut model = Net::new(0, Faults::default());
        assert!(model.decode(&models[0][evaluation.step as usize]));
        let mut alone = HeldOut::new(Feed::indices(), 23, 23, Span::Steps(4));
        let (samples, measured) = alone.evaluate(&mut model, &all(1, 0), 0, 0).unwrap();
        assert_eq!((samples, measured.samples), (23, 23));
        assert!((measured.loss - evaluation.measured.loss).abs() < 1e-9);
        assert_eq!(measured.extra, evaluation.measured.extra);
    }
    let right = |evaluation: &Evaluation| evaluation.measured.extra[1];
    let most = evaluations.iter().map(|e| right(e)).fold(0.0, f64::max);
    let first_best = evaluations.iter().find(|e| right(e) == most).unwrap();
    let best = training.best().unwrap();
    assert_eq!(best.evaluation.step, first_best.step);
    let model = &models[0][best.evaluation.step as usize];
    assert_eq!(best.model.as_ref(), Some(model));
    let mut copy = parallel(&config, Faults::default());
    assert!(copy.decode(&training.encode()));
    assert_eq!(copy.encode(), training.encode());
    assert_eq!(copy.best().unwrap().evaluation, best.evaluation);
    let epochs = news.iter().filter(|news| matches!(news, News::Epoch(_)));
    assert_eq!(epochs.count(), 2);
}

#[test]
fn what_ranks_kept_back_stays_when_some_leave_in_good_order() {
    for codecs in all_codecs().into_iter().skip(3) {
        let config = Config {
            codecs: codecs.clone(),
            ..config()
        };
        let sum = |ranks: &[Parallel<Net>]| -> Vec<f64> {
            let mut sum = Vec::new();
            for training in ranks {
                for (at, value) in training
                    .buckets
                    .iter()
                    .flat_map(|bucket| bucket.own().residual().to_vec())
                    .enumerate()
                {
                    sum.resize(sum.len().max(at + 1), 0.0);
                    sum[at] += f64::from(value);
                }
            }
            sum
        };
        let mut ranks = on_ranks(new(&config, 4), |mut training, group| {
            train(&mut training, group, 7);
            training.boundary(group).unwrap();
            training
        });
        let before = sum(&ranks);
        assert!(before.iter().any(|value| value.abs() > 1e-3), "{codecs:?}");
        // Ranks 0 and 2 leave; a newcomer comes.
        let stay = vec![(ranks.remove(3), true), (ranks.remove(1), true)];
        let state = stay[0].0.encode();
        let mut stay: Vec<_> = stay.into_iter().rev().collect();
        stay.push((parallel(&config, Faults::default()), false));
        let after = on_ranks(stay, |(mut training, survived), group| {
            training.regrouped(group, survived).unwrap();
            if !survived {
                assert!(training.decode(&state));
            }
            training
        });
        for (before, after) in before.iter().zip(sum(&after)) {
            assert!((before - after).abs() < 1e-4, "{codecs:?}");
        }
        assert!(
            after[2]
                .buckets
                .iter()
                .all(|bucket| bucket.own().norm() == 0.0)
        );
        let after = trained(after, 10);
        assert_alike(&after, "after the boundary");
        // A loss is not a boundary: what the dead kept back is gone, and the others' stays as it is.
        let before: Vec<_> = after[..2]
            .iter()
            .map(|t| t.buckets[1].own().clone())
            .collect();
        let survivors = after.into_iter().take(2).map(|training| (training, true));
        on_ranks(survivors.collect(), |(mut training, _), group| {
            training.regrouped(group, true).unwrap();
            assert_eq!(*training.buckets[1].own(), before[group.rank() as usize]);
        });
    }
}

#[test]
fn what_a_rank_has_computed_is_not_computed_again() {
    let ranks = on_ranks(new(&config(), 3), |mut training, group| {
        train(&mut training, group, 2);
        let share = all(3, group.rank());
        // The last collective fails on all ranks alike, for the group is over.
        group.aborter().abort();
        let lost = training.results(2, &share, group);
        assert!(lost.is_err());
        training
    });
    let computed: Vec<u64> = ranks
        .iter()
        .map(|training| training.model().computed)
        .collect();
    let again = trained(ranks, 3);
    let then: Vec<u64> = again
        .iter()
        .map(|training| training.model().computed)
        .collect();
    assert_eq!(then, computed, "the sums of step 2 were there");
    assert_eq!(states(&again), states(&trained(new(&config(), 3), 3)));
}

/// A framework's tensors are views into the buckets: these never move.
#[test]
fn buckets_stay_where_they_are() {
    let scaled = Config {
        mixed: Some(ScalerConfig::default()),
        ..config()
    };
    for config in [config(), scaled] {
        let mut three = trained(new(&config, 3), 4);
        three.truncate(2);
        let two = trained(three, 8);
        let state = two[1].encode();
        let mut alone: Vec<_> = two.into_iter().take(1).collect();
        assert!(alone[0].decode(&state));
        let alone = trained(alone, 12);
        assert_eq!(alone[0].model().places.len(), 1);
    }
}

#[test]
fn other_trainings_states_are_refused_and_change_nothing() {
    let scaled = Config {
        mixed: Some(ScalerConfig::default()),
        ..config()
    };
    let power = Config {
        codecs: all_codecs().remove(5),
        ..config()
    };
    let mut other_data = config();
    other_data.sampler.samples += 1;
    let configs = [config(), scaled, power, other_data];
    for (i, ours) in configs.iter().enumerate() {
        let mut training = parallel(ours, Faults::default());
        let before = training.encode();
        for (j, theirs) in configs.iter().enumerate() {
            let state = parallel(theirs, Faults::default()).encode();
            assert_eq!(training.decode(&state), i == j, "{i} {j}");
            assert!(!training.decode(&state[..state.len() - 1]));
            assert!(training.decode_results(&state).is_none());
        }
        for len in 0..before.len() {
            assert!(!training.decode(&before[..len]), "{len} bytes");
        }
        assert_eq!(training.encode(), before);
    }
}

#[test]
fn buckets_that_do_not_cover_the_parameters_are_refused() {
    for (buckets, parameters) in [
        (vec![0..3, 3..5], 6),
        (vec![0..3, 4..6], 6),
        (vec![0..3, 2..6], 6),
        (vec![0..3, 3..3, 3..6], 6),
        (vec![0..3, 3..7], 6),
        (vec![], 1),
    ] {
        let refused = config::check(&buckets, parameters);
        assert!(refused.is_err(), "{buckets:?}");
    }
    assert!(config::check(&[3..6, 0..3], 6).is_ok() && config::check(&[], 0).is_ok());
    let each = Config {
        codecs: Codecs::Each(vec![Codec::None]),
        ..config()
    };
    let net = Net::new(1, Faults::default());
    let refused = Parallel::new(net, Feed::indices(), each).unwrap_err();
    let expected = TrainError::Codecs {
        codecs: 1,
        buckets: 3,
    };
    assert_eq!(refused.to_string(), expected.to_string());
}
