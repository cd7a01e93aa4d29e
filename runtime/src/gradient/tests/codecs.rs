//! Results of each codec, against plain arithmetic.

use super::*;
use crate::collective::GroupError;
use crate::gradient::compress::CodecError;
use crate::gradient::{Scaler, Verdict};

/// Sizes with nothing, one value, less than a part, and an uneven rest.
const LENGTHS: [usize; 5] = [0, 1, 7, 130, 2501];

#[test]
fn all_ranks_have_the_same_bits_and_nothing_changes_before_the_commit() {
    for (hosts, world) in HOSTS.into_iter().zip([3, 2, 5]) {
        let ranks = on_ranks(world, hosts, |mut group| {
            let mut all = Vec::new();
            for len in LENGTHS {
                for codec in all_codecs(len) {
                    let mut bucket = bucket(&codec, len);
                    for step in 0..3 {
                        let input = gradient(len, group.rank(), step);
                        let (given, own) = (input.clone(), bucket.own().clone());
                        let shared = bucket.encode_shared();
                        let once = reduce(&mut bucket, &mut group, &input);
                        assert_eq!((bits(&input), bucket.own()), (bits(&given), &own));
                        assert_eq!(bucket.encode_shared(), shared);
                        // A skipped step, or one that is done again.
                        bucket.skip();
                        let again = reduce(&mut bucket, &mut group, &input);
                        assert_eq!(bits(&once.sum), bits(&again.sum), "{codec:?}");
                        bucket.commit(&again);
                        all.push((bits(&again.sum), bucket.encode_shared()));
                    }
                }
            }
            all
        });
        assert!(ranks.iter().all(|rank| rank == &ranks[0]), "world {world}");
    }
}

/// After any number of steps, what was delivered plus what is kept is what went in.
#[test]
fn error_feedback_loses_nothing() {
    const STEPS: u64 = 12;
    for (hosts, world) in HOSTS.into_iter().zip([1, 3, 4]) {
        for len in LENGTHS {
            for codec in all_codecs(len).iter().filter(|codec| has_feedback(codec)) {
                let ranks = on_ranks(world, hosts, |mut group| {
                    let mut bucket = bucket(codec, len);
                    let sums = (0..STEPS).map(|step| {
                        let input = gradient(len, group.rank(), step);
                        let reduced = reduce(&mut bucket, &mut group, &input);
                        bucket.commit(&reduced);
                        reduced.sum
                    });
                    let sums: Vec<_> = sums.collect();
                    (sums, bucket.own().residual().to_vec())
                });
                let delivered = ranks[0].0.iter().cloned();
                let kept = ranks.iter().map(|rank| rank.1.clone());
                let out = sum_of(delivered.chain(kept));
                let ins =
                    (0..world).flat_map(|rank| (0..STEPS).map(move |s| gradient(len, rank, s)));
                let ins = sum_of(ins);
                for (i, (out, expected)) in out.iter().zip(&ins).enumerate() {
                    assert!(
                        (out - expected).abs() < 1e-4,
                        "{codec:?} {len} at {i}: {out} {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn lossless_and_rounding_codecs_are_near_the_sum() {
    const LEN: usize = 1000;
    let world = 3;
    let expected = sum_of((0..world).map(|rank| gradient(LEN, rank, 1)));
    let within = [
        (Codec::None, 1e-6),
        (Codec::Fp16, 2e-3),
        (Codec::Bf16, 2e-2),
        (
            Codec::Int8 {
                block: 64,
                feedback: false,
            },
            3e-2,
        ),
    ];
    for (codec, bound) in within {
        let ranks = on_ranks(world, HOSTS[1], |mut group| {
            let input = gradient(LEN, group.rank(), 1);
            reduce(&mut bucket(&codec, LEN), &mut group, &input).sum
        });
        for (got, expected) in ranks[0].iter().zip(&expected) {
            assert!((f64::from(*got) - expected).abs() <= bound, "{codec:?}");
        }
    }
}

/// Three ranks whose sum exceeds what 16 bits hold, while their mean does not.
#[test]
fn sixteen_bits_hold_a_sum_whose_mean_they_hold() {
    let ranks = on_ranks(3, HOSTS[0], |mut group| {
        reduce(
            &mut bucket(&Codec::Fp16, 2),
            &mut group,
            &[60_000.0, 70_000.0],
        )
        .sum
    });
    for (got, sum) in ranks[0].iter().zip([180_000.0, 210_000.0f32]) {
        assert!((got - sum).abs() <= sum / 2048.0, "{got}");
    }
    let too_large = on_ranks(2, HOSTS[0], |mut group| {
        reduce(&mut bucket(&Codec::Fp16, 1), &mut group, &[140_000.0]).sum
    });
    assert_eq!(too_large[0], [f32::INFINITY]);
}

#[test]
fn an_overflow_on_one_rank_is_seen_by_all_and_leaves_no_trace() {
    const LEN: usize = 400;
    for codec in all_codecs(LEN) {
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            on_ranks(3, HOSTS[0], |mut group| {
                let rank = group.rank();
                let mut bucket = bucket(&codec, LEN);
                let first = reduce(&mut bucket, &mut group, &gradient(LEN, rank, 0));
                bucket.commit(&first);
                let (own, shared) = (bucket.own().clone(), bucket.encode_shared());
                let mut input = gradient(LEN, group.rank(), 1);
                if group.rank() == 1 {
                    input[321] = odd;
                }
                let reduced = reduce(&mut bucket, &mut group, &input);
                assert_eq!(
                    Scaler::judge(&[&reduced.sum]),
                    Verdict::Skip,
                    "{codec:?} {odd}"
                );
                bucket.skip();
                assert_eq!((bucket.own(), bucket.encode_shared()), (&own, shared));
                let next = reduce(&mut bucket, &mut group, &gradient(LEN, rank, 2));
                assert_eq!(Scaler::judge(&[&next.sum]), Verdict::Apply, "{codec:?}");
            });
        }
    }
}

/// Lin et al.'s algorithm 4, written down plainly for all ranks at once.
#[test]
fn top_k_is_deep_gradient_compression() {
    const LEN: usize = 60;
    const WORLD: u32 = 3;
    for momentum in [None, Some(0.9)] {
        let codec = Codec::TopK {
            density: 0.1,
            momentum,
        };
        let ranks = on_ranks(WORLD, HOSTS[1], |mut group| {
            let mut bucket = bucket(&codec, LEN);
            let sums = (0..8).map(|step| {
                let input = gradient(LEN, group.rank(), step);
                let reduced = reduce(&mut bucket, &mut group, &input);
                bucket.commit(&reduced);
                reduced.sum
            });
            sums.collect::<Vec<_>>()
        });
        let mut u = vec![vec![0.0f32; LEN]; WORLD as usize];
        let mut v = u.clone();
        for (step, got) in ranks[0].iter().enumerate() {
            let mut sum = vec![0.0f32; LEN];
            for rank in 0..WORLD {
                let (u, v) = (&mut u[rank as usize], &mut v[rank as usize]);
                for (i, g) in gradient(LEN, rank, step as u64).iter().enumerate() {
                    u[i] = g + momentum.unwrap_or(0.0) * u[i];
                    v[i] += u[i];
                }
                let mut order: Vec<usize> = (0..LEN).collect();
                order.sort_by(|a, b| v[*b].abs().total_cmp(&v[*a].abs()));
                for i in &order[..6] {
                    sum[*i] += v[*i];
                    (u[*i], v[*i]) = (0.0, 0.0);
                }
            }
            assert_eq!(got, &sum, "step {step}");
        }
    }
}

#[test]
fn power_sgd_finds_a_sum_of_low_rank() {
    // All ranks' matrices have the same two directions, so their sum has rank 2.
    let (rows, columns) = (30, 20);
    let matrix = |rank: u32| -> Vec<f32> {
        let (a, b) = (gradient(rows, 100, 0), gradient(rows, 101, 0));
        let (c, d) = (gradient(columns, 102, 0), gradient(columns, 103, 0));
        let factor = 1.0 + rank as f32;
        let value = |i: usize| {
            let (row, column) = (i / columns, i % columns);
            factor * a[row] * c[column] + b[row] * d[column] / factor
        };
        (0..rows * columns).map(value).collect()
    };
    let codec = Codec::PowerSgd {
        rank: 2,
        shapes: vec![shape(rows, columns)],
    };
    let ranks = on_ranks(3, HOSTS[2], |mut group| {
        let mut bucket = bucket(&codec, rows * columns);
        let input = matrix(group.rank());
        reduce(&mut bucket, &mut group, &input).sum
    });
    let expected = sum_of((0..3).map(matrix));
    for (got, expected) in ranks[0].iter().zip(expected) {
        assert!((f64::from(*got) - expected).abs() < 1e-4);
    }
}

/// Without the last step's Q, a step of power iteration would find less and less new.
#[test]
fn power_sgd_closes_in_on_the_best_approximation() {
    let (rows, columns) = (24, 24);
    let len = rows * columns;
    // Singular values 1, 1/2, 1/4, ... on coordinates: the best of rank 1 leaves 1/2, 1/4, ...
    let mut matrix = vec![0.0; len];
    (0..rows).for_each(|i| matrix[i * columns + i] = 0.5f32.powi(i as i32));
    let codec = Codec::PowerSgd {
        rank: 1,
        shapes: vec![shape(rows, columns)],
    };
    let mut errors = Vec::new();
    let ranks = on_ranks(1, HOSTS[0], |mut group| {
        let mut bucket = bucket(&codec, len);
        let mut errors = Vec::new();
        for _ in 0..12 {
            let reduced = reduce(&mut bucket, &mut group, &matrix);
            // Only Q is kept, so that each step sees the same matrix.
            bucket.skip();
            bucket.commit(&reduced);
            let rest = matrix
                .iter()
                .zip(&reduced.sum)
                .map(|(a, b)| (a - b).powi(2));
            errors.push(rest.sum::<f32>().sqrt());
        }
        errors
    });
    errors.extend(ranks.into_iter().flatten());
    let best = (1.0f32 / 3.0).sqrt();
    assert!(
        errors[0] > best + 0.01 && errors[11] < best + 1e-3,
        "{errors:?}"
    );
}

#[test]
fn an_index_from_outside_is_refused() {
    let errors = on_ranks(2, HOSTS[1], |mut group| {
        let codec = Codec::TopK {
            density: 0.5,
            momentum: None,
        };
        if group.rank() == 0 {
            let mut into = Reduced::default();
            return bucket(&codec, 4)
                .reduce(&mut group, &[1.0; 4], &mut into)
                .err();
        }
        group.all_gather(&[0u32, 4, 0, 0], &mut [0; 8]).unwrap();
        None
    });
    assert!(
        matches!(errors[0], Some(GroupError::Protocol { rank: 1, .. })),
        "{errors:?}"
    );
}

#[test]
fn mistakes_are_named() {
    let error = |codec| Bucket::new(codec, 10, 0).unwrap_err();
    let topk = |density, momentum| Codec::TopK { density, momentum };
    assert_eq!(error(topk(0.0, None)), CodecError::Density { density: 0.0 });
    assert!(matches!(
        error(topk(f64::NAN, None)),
        CodecError::Density { .. }
    ));
    assert_eq!(
        error(topk(1.0, Some(1.0))),
        CodecError::Momentum { momentum: 1.0 }
    );
    assert_eq!(
        error(Codec::Int8 {
            block: 0,
            feedback: true
        }),
        CodecError::Zero
    );
    let shapes = vec![shape(3, 3)];
    let wrong = Codec::PowerSgd { rank: 1, shapes };
    assert_eq!(error(wrong), CodecError::Shapes { shapes: 9, len: 10 });
    let huge = Codec::PowerSgd {
        rank: 1,
        shapes: vec![shape(usize::MAX, 3)],
    };
    assert!(matches!(error(huge), CodecError::Shapes { .. }));
    assert!(matches!(
        Bucket::new(Codec::None, usize::MAX, 0),
        Err(CodecError::TooLong { .. })
    ));
}
