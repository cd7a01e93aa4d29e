//! The state that survivors hand to newcomers: frozen while they go on, and taken over whole or not at all.

use std::time::Instant;

use super::elastic::{alike, some};
use super::harness::Job;
use super::model::Optimizer;
use super::*;
use crate::gradient::ScalerConfig;
use crate::live::Frozen;
use crate::testing::{LONG, eventually};

/// All bytes of what is frozen.
fn bytes_of(frozen: &dyn Frozen) -> Vec<u8> {
    let mut all = Vec::new();
    while all.len() < frozen.total() {
        let piece = frozen.piece(all.len());
        assert!(!piece.is_empty(), "at {} of {}", all.len(), frozen.total());
        all.extend_from_slice(piece);
    }
    assert!(frozen.piece(all.len()).is_empty());
    all
}

/// Where a copy may come to: asked for before each step, until there is one.
#[track_caller]
fn place_of(training: &mut Parallel<Net>) -> Box<dyn crate::live::Landing> {
    let until = Instant::now() + LONG;
    loop {
        if let Some(landing) = training.landing() {
            return landing;
        }
        assert!(training.fault().is_none());
        assert!(Instant::now() < until, "no memory is made");
        std::thread::yield_now();
    }
}

/// A copy comes whole.
#[track_caller]
fn comes(training: &mut Parallel<Net>, bytes: &[u8]) -> bool {
    let mut landing = place_of(training);
    let mut left = bytes;
    for place in landing.places(bytes.len()).unwrap() {
        let (now, rest) = left.split_at(place.len());
        place.copy_from_slice(now);
        left = rest;
    }
    assert!(left.is_empty());
    training.adopt_state(landing)
}

fn alone<T: Send>(
    training: Parallel<Net>,
    body: impl Fn(Parallel<Net>, &mut Group) -> T + Sync,
) -> T {
    on_ranks(vec![training], body).remove(0)
}

#[test]
fn with_every_optimizer_codec_and_scaler_a_newcomer_goes_on_as_the_one_that_it_copied() {
    for (name, optimizer) in Optimizer::all() {
        for codecs in all_codecs() {
            for mixed in [None, Some(ScalerConfig::default())] {
                for unnamed in [false, true] {
                    let case = format!("{name}, {codecs:?}, {mixed:?}, unnamed: {unnamed}");
                    let config = Config {
                        codecs: codecs.clone(),
                        mixed,
                        ..config()
                    };
                    let faults = Faults {
                        unnamed,
                        ..Faults::default()
                    };
                    let of = |seed| {
                        let net = Net::new(seed, faults.clone()).by(&optimizer);
                        Parallel::new(net, Feed::indices(), config.clone()).unwrap()
                    };
                    alone(of(1), |mut one, group| {
                        train(&mut one, group, 4);
                        let bytes = bytes_of(&*one.freeze());
                        let mut other = of(2);
                        assert_ne!(other.encode(), one.encode(), "{case}");
                        // What it has kept back in a life before is not the others'.
                        train(&mut other, group, 2);
                        assert!(comes(&mut other, &bytes), "{case}");
                        assert!(other.fault().is_none(), "{case}");
                        assert_eq!(other.encode(), one.encode(), "{case}");
                        assert_eq!(bytes_of(&*other.freeze()), bytes, "{case}");
                        assert_eq!(other.digest_state(), one.digest_state(), "{case}");
                        // Residuals are a rank's own.
                        one.forget_own();
                        assert!(
                            one.buckets
                                .iter()
                                .zip(&other.buckets)
                                .all(|(one, other)| one.own() == other.own()),
                            "{case}"
                        );
                        train(&mut one, group, 7);
                        train(&mut other, group, 7);
                        assert_eq!(other.encode(), one.encode(), "{case}");
                    });
                }
            }
        }
    }
}

#[test]
fn what_is_frozen_stays_as_it_was_while_steps_are_committed() {
    alone(
        parallel(&config(), Faults::default()),
        |mut training, group| {
            train(&mut training, group, 3);
            let (first, then) = (training.freeze(), training.encode());
            let before = bytes_of(&*first);
            train(&mut training, group, 8);
            let (second, later) = (training.freeze(), training.encode());
            train(&mut training, group, 12);
            assert_ne!(then, later);
            assert_eq!(bytes_of(&*first), before);
            assert_ne!(bytes_of(&*second), before);
            for (frozen, then) in [(first, then), (second, later)] {
                let mut other = parallel(&config(), Faults::default());
                assert!(comes(&mut other, &bytes_of(&*frozen)));
                assert_eq!(other.encode(), then);
            }
        },
    );
}

#[test]
fn a_copy_that_never_gets_whole_leaves_what_the_newcomer_began_with() {
    let bytes = alone(
        parallel(&config(), Faults::default()),
        |mut training, group| {
            train(&mut training, group, 3);
            bytes_of(&*training.freeze())
        },
    );
    for reserve in [true, false] {
        let config = Config {
            reserve,
            ..config()
        };
        let mut newcomer = parallel(&config, Faults::default());
        let began = newcomer.encode();
        let memory = newcomer.reserve.clone();
        // Half of a copy; then one that is not of this length.
        for (total, written) in [
            (bytes.len(), bytes.len() / 2),
            (bytes.len() + (1 << 20), 1 << 20),
        ] {
            let mut landing = place_of(&mut newcomer);
            let mut places = landing.places(total).unwrap();
            assert_eq!(places.len(), 1);
            places[0][..written].fill(0xff);
            assert_eq!(memory.counts().0, 1);
            drop(landing);
            assert_eq!((memory.counts().0, newcomer.encode()), (0, began.clone()));
        }
        // Whole, but damaged: nobody would have let it through.
        for at in [0, 9, bytes.len() / 2] {
            let mut damaged = bytes.clone();
            damaged.truncate(at);
            assert!(!comes(&mut newcomer, &damaged), "cut at {at}");
        }
        assert_eq!(newcomer.encode(), began);
        // It begins anew, with others or from the beginning.
        let end = |training: Parallel<Net>| {
            alone(training, |mut training, group| {
                assert_eq!(
                    training.restore(group).unwrap(),
                    training.progress.transactions
                );
                train(&mut training, group, 9);
                training.encode()
            })
        };
        let fresh = parallel(&config, Faults::default());
        assert_eq!(end(newcomer), end(fresh));
        let mut again = parallel(&config, Faults::default());
        drop(place_of(&mut again));
        assert!(comes(&mut again, &bytes));
        assert_eq!(again.steps(), 3);
    }
}

#[test]
fn the_state_of_another_model_or_training_is_refused_by_name() {
    let config = config();
    let of =
        |net: Net, config: &Config| Parallel::new(net, Feed::indices(), config.clone()).unwrap();
    let net = || Net::new(1, Faults::default());
    let renamed = |first, columns| {
        let mut net = net();
        net.layout = Net::layout(first, columns);
        net
    };
    let mut shorter = net();
    shorter.layout_without_last();
    let said = |net: Net| -> String {
        let mut one = of(net, &config);
        let bytes = bytes_of(&*one.freeze());
        let mut other = parallel(&config, Faults::default());
        // It is asked why, and the process ends.
        assert!(comes(&mut other, &bytes));
        let error = other.fault().expect("it is of another model");
        let source = error.source().map(ToString::to_string);
        format!("{error}: {}", source.unwrap_or_default())
    };
    for (net, expected) in [
        (renamed("first.kernel", 6), "no tensor `model.first.weight`"),
        (
            renamed("first.weight", 5),
            "`model.first.weight` was saved as",
        ),
        (shorter, "no tensor `model.second.bias`"),
    ] {
        let said = said(net);
        assert!(
            said.contains("not of this model") && said.contains(expected),
            "{said}"
        );
    }
    // More than this model has.
    let mut one = parallel(&config, Faults::default());
    let bytes = bytes_of(&*one.freeze());
    let mut less = net();
    less.layout_without_last();
    let mut less = of(less, &config);
    assert!(comes(&mut less, &bytes));
    let error = less.fault().expect("it is of another model");
    let source = error.source().map(ToString::to_string).unwrap_or_default();
    assert!(source.contains("`model.second.bias`"), "{error}: {source}");

    // Another configuration: no state for this one, and nothing has changed.
    let scaled = Config {
        mixed: Some(ScalerConfig::default()),
        ..config.clone()
    };
    let mut scaled = parallel(&scaled, Faults::default());
    let before = scaled.encode();
    assert!(!comes(&mut scaled, &bytes));
    assert!(scaled.fault().is_none());
    assert_eq!(scaled.encode(), before);
}

#[test]
fn no_bytes_make_a_newcomer_panic() {
    let mut one = parallel(&config(), Faults::default());
    let bytes = bytes_of(&*one.freeze());
    let mut other = parallel(&config(), Faults::default());
    for len in 0..bytes.len() {
        assert!(!comes(&mut other, &bytes[..len]), "of {len} bytes");
    }
    // Each bit of the head, and lengths that nothing has.
    for at in 0..bytes.len().min(2000) {
        for flip in [1, 0x80, 0xff] {
            let mut changed = bytes.clone();
            changed[at] ^= flip;
            // Values may well be others; what is no state is refused, what is another one's is named.
            let _refused = comes(&mut other, &changed);
            let _named = other.fault();
        }
    }
    assert!(comes(&mut other, &bytes) && other.fault().is_none());
    assert_eq!(other.encode(), one.encode());
}

#[test]
fn of_all_memory_for_newcomers_nothing_is_left_in_use() {
    for reserve in [true, false] {
        let config = Config {
            reserve,
            ..config()
        };
        let mut memory = Vec::new();
        let mut come = |count: usize| {
            let trainings = some(&config, count);
            memory.extend(trainings.iter().map(|training| training.reserve.clone()));
            trainings
        };
        let mut job = Job::start(Options::default(), come(2));
        job.until_steps(3);
        for round in 0..6 {
            let newcomers = come(1 + round % 2);
            job.regroup(newcomers);
            // Some are ended in the middle of a copy, some are not.
            if round % 3 > 0 {
                job.until_steps(4 + 3 * round as u64);
            }
        }
        let case = format!("kept: {reserve}");
        alike(job, &case);
        for memory in memory {
            eventually("nobody copies any more", || memory.counts().0 == 0);
            assert!(reserve || !memory.counts().1, "{case}");
        }
    }
}
