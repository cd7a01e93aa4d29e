//! A bucket's state when ranks come and go.

use proptest::prelude::*;

use super::*;
use crate::collective::Op;
use crate::gradient::compress::{Own, reshard};

const LEN: usize = 300;

fn steps(bucket: &mut Bucket, group: &mut Group, steps: std::ops::Range<u64>) -> Vec<Reduced> {
    let mut all = Vec::new();
    for step in steps {
        let input = gradient(LEN, group.rank(), step);
        let reduced = reduce(bucket, group, &input);
        bucket.commit(&reduced);
        all.push(reduced);
    }
    all
}

#[test]
fn a_leaving_ranks_residual_goes_to_the_first_that_stays() {
    for codec in all_codecs(LEN) {
        let ranks = on_ranks(4, HOSTS[2], |mut group| {
            let mut bucket = bucket(&codec, LEN);
            steps(&mut bucket, &mut group, 0..5);
            let before = bucket.own().clone();
            bucket.hand_over(&mut group, &[0, 2]).unwrap();
            (before, bucket.own().clone())
        });
        let expected = {
            let mut leaving = ranks[0].0.clone();
            assert!(leaving.absorb(&ranks[2].0));
            let mut heir = ranks[1].0.clone();
            assert!(heir.absorb(&leaving));
            heir
        };
        assert_eq!(ranks[1].1, expected, "{codec:?}");
        assert_eq!(ranks[3].1, ranks[3].0);
        assert!([0, 2].iter().all(|rank| ranks[*rank].1.norm() == 0.0));
        let keeps = !matches!(
            codec,
            Codec::None
                | Codec::Fp16
                | Codec::Bf16
                | Codec::Int8 {
                    feedback: false,
                    ..
                }
        );
        assert_eq!(ranks[0].0.norm() > 0.0, keeps, "{codec:?}");
    }
}

/// A rank that listens contributes nothing; what it replays makes it the others' equal.
#[test]
fn a_newcomer_listens_replays_and_enters() {
    for codec in all_codecs(LEN) {
        let with = on_ranks(3, HOSTS[0], |mut group| {
            let mut bucket = bucket(&codec, LEN);
            if group.rank() < 2 {
                let frozen = bucket.encode_shared();
                let mut all = steps(&mut bucket, &mut group, 0..3);
                all.extend(steps(&mut bucket, &mut group, 3..5));
                return (frozen, all, bucket);
            }
            let heard: Vec<Reduced> = (0..3)
                .map(|_| {
                    let mut reduced = Reduced::default();
                    bucket.listen(&mut group, &mut reduced).unwrap();
                    reduced
                })
                .collect();
            for reduced in &heard {
                let copy = Reduced::decode(&reduced.encode()).unwrap();
                bucket.commit(&copy);
            }
            assert_eq!(bucket.own().norm(), 0.0);
            let mut all = heard;
            all.extend(steps(&mut bucket, &mut group, 3..5));
            (Vec::new(), all, bucket)
        });
        for (_, all, bucket) in &with[1..] {
            assert_eq!(all, &with[0].1, "{codec:?}");
            assert_eq!(bucket.encode_shared(), with[0].2.encode_shared());
        }
        // As if nobody had listened. (In 8 bits, parts are cut by the world, and so are blocks.)
        if !matches!(codec, Codec::Int8 { .. } | Codec::Fp16) {
            let without = on_ranks(2, HOSTS[0], |mut group| {
                steps(&mut bucket(&codec, LEN), &mut group, 0..3)
            });
            assert_eq!(without[0], with[0].1[..3], "{codec:?}");
        }
    }
}

#[test]
fn a_lost_peer_changes_nothing() {
    for codec in all_codecs(LEN) {
        on_ranks(2, HOSTS[0], |mut group| {
            let mut bucket = bucket(&codec, LEN);
            steps(&mut bucket, &mut group, 0..2);
            if group.rank() == 1 {
                return;
            }
            let (own, shared) = (bucket.own().clone(), bucket.encode_shared());
            let input = gradient(LEN, 0, 2);
            let mut reduced = Reduced::default();
            let lost = bucket.reduce(&mut group, &input, &mut reduced);
            assert!(lost.is_err(), "{codec:?}");
            assert_eq!((bucket.own(), bucket.encode_shared()), (&own, shared));
            assert_eq!(input, gradient(LEN, 0, 2));
        });
    }
}

/// Where the other ranks end a step and this one sees a loss in its last collective, it commits their
/// results: what it has sent is in them, and not sent again.
#[test]
fn who_misses_the_end_of_a_step_commits_it_all_the_same() {
    // In the first collective of two, the other one contributes nothing.
    let first: fn(&mut Group, &Codec) = |group, codec| match codec {
        Codec::Int8 { block, .. } => {
            let part = (LEN / 2).div_ceil(*block) * (4 + block);
            let zeros = vec![0u8; 2 * part];
            group.all_to_all(&zeros, &mut vec![1; 2 * part]).unwrap();
        }
        Codec::PowerSgd { rank, shapes } => {
            let zeros = vec![0.0f32; rank * shapes[0].rows];
            group
                .all_reduce(Op::Sum, &zeros, &mut zeros.clone())
                .unwrap();
        }
        _ => {}
    };
    for codec in all_codecs(LEN) {
        let input = gradient(LEN, 0, 0);
        let whole = on_ranks(2, HOSTS[1], |mut group| {
            let mut bucket = bucket(&codec, LEN);
            let mut reduced = Reduced::default();
            if group.rank() == 0 {
                bucket.reduce(&mut group, &input, &mut reduced).unwrap();
            } else {
                bucket.listen(&mut group, &mut reduced).unwrap();
            }
            bucket.commit(&reduced);
            (reduced, bucket)
        });
        let (results, undisturbed) = &whole[0];
        on_ranks(2, HOSTS[1], |mut group| {
            if group.rank() == 1 {
                return first(&mut group, &codec);
            }
            let mut bucket = bucket(&codec, LEN);
            let lost = bucket.reduce(&mut group, &input, &mut Reduced::default());
            assert!(lost.is_err());
            assert_eq!(bucket.own().norm(), 0.0);
            bucket.commit(results);
            assert_eq!(bucket.own(), undisturbed.own(), "{codec:?}");
            assert_eq!(bucket.encode_shared(), undisturbed.encode_shared());
        });
    }
}

#[test]
fn a_checkpoint_goes_on_with_the_same_bits() {
    for codec in all_codecs(LEN) {
        on_ranks(2, HOSTS[0], |mut group| {
            let mut first = bucket(&codec, LEN);
            steps(&mut first, &mut group, 0..3);
            let mut second = Bucket::new(codec.clone(), LEN, 99).unwrap();
            assert!(second.decode_shared(&first.encode_shared()));
            let own = Own::decode(&first.own().encode()).unwrap();
            assert!(second.set_own(own));
            let (a, b) = (
                steps(&mut first, &mut group, 3..6),
                steps(&mut second, &mut group, 3..6),
            );
            assert_eq!(a, b, "{codec:?}");
        });
    }
}

#[test]
fn another_codecs_state_is_refused() {
    let mut topk = bucket(
        &Codec::TopK {
            density: 0.1,
            momentum: None,
        },
        LEN,
    );
    let other = bucket(
        &Codec::TopK {
            density: 0.1,
            momentum: Some(0.5),
        },
        LEN,
    );
    assert!(!topk.set_own(other.own().clone()));
    let power = bucket(&power(LEN, 2), LEN);
    assert!(!topk.decode_shared(&power.encode_shared()));
    assert!(reshard(&[topk.own().clone(), other.own().clone()], 1).is_none());
    assert!(reshard(&[], 3).is_none());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn resharding_keeps_the_sum(from in 1u32..7, to in 1usize..7) {
        let template = bucket(&Codec::TopK { density: 0.1, momentum: None }, LEN);
        let parts: Vec<Own> = (0..from).map(|rank| {
            // What a decoder takes: magic, length, values, no velocity.
            let mut bytes = template.own().encode();
            for (i, value) in gradient(LEN, rank, 0).iter().enumerate() {
                bytes[16 + 4 * i..20 + 4 * i].copy_from_slice(&value.to_le_bytes());
            }
            Own::decode(&bytes).unwrap()
        }).collect();
        let sum = |parts: &[Own]| sum_of(parts.iter().map(|own| own.residual().to_vec()));
        let after = reshard(&parts, to).unwrap();
        prop_assert_eq!(after.len(), to);
        for (a, b) in sum(&parts).iter().zip(sum(&after)) {
            prop_assert!((a - b).abs() < 1e-5);
        }
    }

    #[test]
    fn damaged_bytes_are_refused(
        bytes in prop::collection::vec(any::<u8>(), 0..80), cut in any::<prop::sample::Index>(),
    ) {
        prop_assert_eq!(Own::decode(&bytes), None);
        prop_assert_eq!(Reduced::decode(&bytes), None);
        let mut power = bucket(&power(LEN, 2), LEN);
        prop_assert!(!power.decode_shared(&bytes));
        let own = power.own().encode();
        prop_assert_eq!(Own::decode(&own[..cut.index(own.len())]), None);
        // A length that no memory holds.
        let mut long = own.clone();
        long[8..16].fill(0xff);
        prop_assert_eq!(Own::decode(&long), None);
        let longer = [&own[..], &[0]].concat();
        prop_assert_eq!(Own::decode(&longer), None);
    }
}
