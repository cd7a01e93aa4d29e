//! Every operation against a plain reference, on every transport.

use half::{bf16, f16};
use proptest::prelude::*;

use super::*;

const OPS: [Op; 4] = [Op::Sum, Op::Mean, Op::Min, Op::Max];

/// Elements of any bits, NaN and infinity among them: a rank's input to a case.
fn elements<T: Element>(seed: u64, rank: u32, len: usize) -> Vec<T> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    hasher.update(&rank.to_le_bytes());
    let mut out = vec![T::zeroed(); len];
    hasher
        .finalize_xof()
        .fill(bytemuck::cast_slice_mut(&mut out));
    out
}

fn bits<T: Element>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

/// All operations on `len` elements of a type, on this rank, compared with what they must give.
fn check_all<T: Element>(group: &mut Group, seed: u64, len: usize) {
    let (rank, world) = (group.rank(), group.world());
    let inputs: Vec<Vec<T>> = (0..world).map(|rank| elements(seed, rank, len)).collect();
    let slices: Vec<&[T]> = inputs.iter().map(Vec::as_slice).collect();
    let own = &inputs[rank as usize];
    let untouched = own.clone();
    for op in OPS {
        let expected = group.layout().reduce(op, &slices).unwrap();
        let mut out = vec![T::zeroed(); len];
        group.all_reduce(op, own, &mut out).unwrap();
        assert!(bits(&out) == bits(&expected), "all-reduce {op:?} {len}");
        let part = group.part(len, rank);
        let mut out = vec![T::zeroed(); part.len()];
        group.reduce_scatter(op, own, &mut out).unwrap();
        assert!(
            bits(&out) == bits(&expected[part]),
            "reduce-scatter {op:?} {len}"
        );
    }
    let mut out = vec![T::zeroed(); len * world as usize];
    group.all_gather(own, &mut out).unwrap();
    assert!(bits(&out) == bits(&inputs.concat()), "all-gather {len}");

    let counts: Vec<usize> = (0..world as usize)
        .map(|rank| (len + rank) % 5 * 7)
        .collect();
    let piece = |rank: u32| elements::<T>(!seed, rank, counts[rank as usize]);
    let expected: Vec<T> = (0..world).flat_map(piece).collect();
    let mut out = vec![T::zeroed(); expected.len()];
    group
        .all_gather_uneven(&piece(rank), &counts, &mut out)
        .unwrap();
    assert!(
        bits(&out) == bits(&expected),
        "uneven all-gather {counts:?}"
    );

    let root = u32::try_from(seed % u64::from(world)).unwrap();
    let mut out = vec![T::zeroed(); len];
    group.broadcast(root, own, &mut out).unwrap();
    assert!(
        bits(&out) == bits(&inputs[root as usize]),
        "broadcast {len}"
    );

    // Each part is one rank's word to another.
    let part = |from: u32, to: u32| elements::<T>(seed ^ u64::from(to) << 32, from, len);
    let input: Vec<T> = (0..world).flat_map(|to| part(rank, to)).collect();
    let expected: Vec<T> = (0..world).flat_map(|from| part(from, rank)).collect();
    let mut out = vec![T::zeroed(); input.len()];
    group.all_to_all(&input, &mut out).unwrap();
    assert!(bits(&out) == bits(&expected), "all-to-all {len}");
    group.barrier().unwrap();
    assert!(bits(own) == bits(&untouched), "an input was written");
}

fn check_type(group: &mut Group, dtype: usize, seed: u64, len: usize) {
    let all: [fn(&mut Group, u64, usize); 12] = [
        check_all::<f32>,
        check_all::<f64>,
        check_all::<f16>,
        check_all::<bf16>,
        check_all::<i8>,
        check_all::<i16>,
        check_all::<i32>,
        check_all::<i64>,
        check_all::<u8>,
        check_all::<u16>,
        check_all::<u32>,
        check_all::<u64>,
    ];
    all[dtype](group, seed, len);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn every_operation_gives_what_the_layout_says(
        world in 1u32..=9,
        hosts in prop::collection::vec(0u64..4, 9),
        cases in prop::collection::vec((0usize..12, any::<u64>(), 0usize..3000), 4),
    ) {
        on_ranks(
            world,
            |rank| Sharing::Among(hosts[rank as usize]),
            |mut group| for (dtype, seed, len) in &cases {
                check_type(&mut group, *dtype, *seed, *len);
            },
        );
    }
}

#[test]
fn every_type_at_sizes_around_every_border() {
    // Around the small thresholds, chunks and slots; and in several of them.
    for world in [2, 3, 4] {
        on_all_hosts(world, |mut group| {
            for dtype in 0..12 {
                check_type(&mut group, dtype, 3, 1);
                check_type(&mut group, dtype, 4, 0);
            }
            for len in [4095, 4096, 4097, 65_535, 131_073, 700_001] {
                check_type(&mut group, 0, 5, len);
            }
            check_type(&mut group, 2, 6, 1_500_001);
        });
    }
}

#[test]
fn more_ranks_than_talk_directly() {
    for world in [9, 13, 16] {
        on_ranks(
            world,
            |_| Sharing::Off,
            |mut group| {
                for len in [0, 1, 100, 4096, 5000] {
                    check_type(&mut group, 0, 8, len);
                }
            },
        );
    }
}

#[test]
fn the_order_of_summation_is_that_of_ranks_then_hosts() {
    // Terms whose sum depends on the order of addition.
    let term = |rank: u32, i: usize| 0.1f64 * 7f64.powi(rank as i32 * 3) + i as f64 * 1e-3;
    for (hosts, got) in HOSTS.into_iter().zip(on_all_hosts(5, |mut group| {
        [10, 30_000].map(|len| {
            let own: Vec<f64> = (0..len).map(|i| term(group.rank(), i)).collect();
            let mut out = vec![0.0; len];
            group.all_reduce(Op::Sum, &own, &mut out).unwrap();
            out
        })
    })) {
        let mut order: Vec<Vec<u32>> = Vec::new();
        for rank in 0..5 {
            let same =
                |host: &&mut Vec<u32>| hosts(rank) != Sharing::Off && hosts(host[0]) == hosts(rank);
            match order.iter_mut().find(same) {
                Some(host) => host.push(rank),
                None => order.push(vec![rank]),
            }
        }
        let sum = |terms: Vec<f64>| terms.into_iter().reduce(|a, b| a + b).unwrap();
        let expected = |i| {
            let of_host = |host: &Vec<u32>| sum(host.iter().map(|rank| term(*rank, i)).collect());
            sum(order.iter().map(of_host).collect())
        };
        for out in got.iter().flatten() {
            for (i, value) in out.iter().enumerate() {
                assert_eq!(value.to_bits(), expected(i).to_bits(), "{order:?} {i}");
            }
        }
    }
}

#[test]
fn bytes_of_any_length() {
    for group in on_all_hosts(4, |mut group| {
        let rank = group.rank();
        let said = group.broadcast_bytes(3, &[rank as u8; 5]).unwrap();
        let own = vec![rank as u8; rank as usize * 100_000];
        (said, group.all_gather_bytes(&own).unwrap())
    }) {
        for (said, all) in group {
            assert_eq!(said, [3; 5]);
            for (rank, bytes) in all.iter().enumerate() {
                assert_eq!(*bytes, vec![rank as u8; rank * 100_000]);
            }
        }
    }
}

#[test]
fn many_small_operations_in_a_row() {
    for group in on_all_hosts(3, |mut group| {
        let mut sum = [0u64];
        for i in 0..2000 {
            let mut out = [0];
            group.all_reduce(Op::Sum, &[i], &mut out).unwrap();
            sum[0] += out[0];
        }
        sum
    }) {
        assert_eq!(group, [[3 * 1999 * 1000]; 3]);
    }
}
