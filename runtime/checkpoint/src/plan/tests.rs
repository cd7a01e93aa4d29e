use proptest::prelude::*;

use super::*;
use crate::manifest::{DataFile, Manifest, ManifestError};
use crate::part::Part;
use crate::sum::CHUNK;
use crate::testing::{Random, origin, tiling};

fn held(name: &str, shape: &[u64], slices: &[Slice]) -> Held {
    Held {
        name: name.to_owned(),
        dtype: Dtype::F32,
        shape: shape.to_vec(),
        slices: slices.to_vec(),
    }
}

/// The manifest of a save in which every file's checksums are made up.
fn check(plan: &Plan) -> Manifest {
    let files: Vec<DataFile> = (plan.shards.iter().enumerate())
        .filter_map(|(rank, shard)| {
            Some(DataFile {
                path: plan.path("data/1-1-0", rank)?,
                bytes: shard.layout.bytes,
                digest: crate::hex::Bytes([0; 16]),
                chunks: vec![
                    crate::hex::Bytes([0; 8]);
                    shard.layout.bytes.div_ceil(CHUNK) as usize
                ],
            })
        })
        .rev()
        .collect();
    // It checks that every element is there once, in the bounds of its file, no two on one byte.
    let manifest = |files: &[DataFile]| {
        let part = |file: &DataFile| Part {
            file: Some(file.clone()),
            ..crate::part::Part::default()
        };
        let parts = files.iter().map(part).collect();
        plan.draft().manifest(origin(), "data/1-1-0", parts)
    };
    if let Some(first) = files.first() {
        let without = manifest(&files[1..]);
        assert!(matches!(without, Err(ManifestError::Unplanned(_))));
        let mut other = first.clone();
        other.path += "x";
        let more = manifest(&[&files[..], &[other]].concat());
        assert!(matches!(more, Err(ManifestError::Unplanned(_))));
    }
    manifest(&files).unwrap()
}

fn loads(plan: &Plan) -> Vec<u64> {
    plan.shards
        .iter()
        .map(|shard| shard.pieces.iter().map(|piece| piece.bytes).sum())
        .collect()
}

#[test]
fn replicated_tensors_are_written_once_and_evenly() {
    // A model of 40 tensors, one of them large, on 2 nodes with 4 ranks each.
    let mut model = vec![held(
        "embedding",
        &[50_000, 1024],
        &[Slice::whole(&[50_000, 1024])],
    )];
    for layer in 0..39u64 {
        let shape = [1000 + 13 * layer, 1024];
        model.push(held(
            &format!("layer.{layer}"),
            &shape,
            &[Slice::whole(&shape)],
        ));
    }
    let ranks: Vec<Rank<'_>> = (0..8)
        .map(|rank| Rank {
            node: rank / 4,
            held: &model,
        })
        .collect();
    let plan = Plan::new(&ranks).unwrap();
    let manifest = check(&plan);
    let loads = loads(&plan);
    let total: u64 = loads.iter().sum();
    let sizes = manifest
        .tensors
        .iter()
        .map(|t| t.shape.iter().product::<u64>() * 4);
    assert_eq!(total, sizes.sum::<u64>(), "each byte once");
    let share = total / 8;
    assert!(
        loads.iter().all(|load| *load < share + share / 8),
        "{loads:?}"
    );
    let nodes: Vec<u64> = loads.chunks(4).map(|loads| loads.iter().sum()).collect();
    assert!(nodes[0].abs_diff(nodes[1]) < share / 4, "{nodes:?}");
    assert_eq!(plan.shards[5].file, "n1-1.safetensors");
    assert_eq!(Plan::new(&ranks).unwrap(), plan, "the same again");
}

#[test]
fn sharded_tensors_are_written_where_they_are() {
    let shape = [8, 6];
    let slices = [
        Slice {
            offset: vec![0, 0],
            extent: vec![8, 2],
        },
        Slice {
            offset: vec![0, 2],
            extent: vec![8, 4],
        },
    ];
    let nothing = Slice {
        offset: vec![0, 6],
        extent: vec![8, 0],
    };
    let held = [
        [held("w", &shape, &slices[..1])],
        [held("w", &shape, &slices[1..])],
        [held("w", &shape, &[nothing])],
    ];
    let ranks: Vec<Rank<'_>> = (0..)
        .zip(&held)
        .map(|(node, held)| Rank { node, held })
        .collect();
    let plan = Plan::new(&ranks).unwrap();
    assert_eq!(loads(&plan), [64, 128, 0]);
    assert_eq!(plan.name(&plan.shards[1].pieces[0]), "w");
    let manifest = check(&plan);
    assert_eq!(manifest.files.len(), 2, "who writes nothing has no file");
}

#[test]
fn disagreement_is_refused() {
    let whole = Slice::whole(&[4]);
    let one = [held("w", &[4], std::slice::from_ref(&whole))];
    let two = [held("w", &[5], std::slice::from_ref(&whole))];
    let rank = |held| Rank { node: 0, held };
    assert_eq!(Plan::new(&[]), Err(PlanError::NoRanks));
    assert!(matches!(
        Plan::new(&[rank(&one), rank(&two)]),
        Err(PlanError::Disagree { rank: 1, .. })
    ));
    assert!(
        matches!(Plan::new(&[rank(&two)]), Err(PlanError::Slices { .. })),
        "a hole"
    );
    let twice = [one[0].clone(), one[0].clone()];
    assert!(matches!(
        Plan::new(&[rank(&twice)]),
        Err(PlanError::Twice { .. })
    ));
    let part = [held(
        "w",
        &[4],
        &[Slice {
            offset: vec![1],
            extent: vec![2],
        }],
    )];
    assert!(matches!(
        Plan::new(&[rank(&one), rank(&part)]),
        Err(PlanError::Slices {
            why: SliceError::Overlap(..),
            ..
        })
    ));
    let reserved = [held("__pad_1", &[4], &[whole])];
    assert!(matches!(
        Plan::new(&[rank(&reserved)]),
        Err(PlanError::Layout(_))
    ));
}

proptest! {
    /// Any mixture of replicated and sharded tensors on any nodes.
    #[test]
    fn every_byte_has_one_writer_who_holds_it(
        nodes in proptest::collection::vec(0u32..3, 1..7),
        shapes in proptest::collection::vec(proptest::collection::vec(0u64..2000, 0..3), 1..6),
        seed: u64,
    ) {
        let mut random = Random(seed);
        let mut held_by: Vec<Vec<Held>> = nodes.iter().map(|_| Vec::new()).collect();
        for (at, shape) in shapes.iter().enumerate() {
            let slices = match shape.contains(&0) {
                true => vec![Slice::whole(shape)],
                false => tiling(shape, random.below(u64::MAX)),
            };
            let mut of: Vec<Vec<Slice>> = nodes.iter().map(|_| Vec::new()).collect();
            for slice in slices {
                let first = random.below(nodes.len() as u64) as usize;
                for (rank, mine) in of.iter_mut().enumerate() {
                    if rank == first || random.below(2) == 0 {
                        mine.push(slice.clone());
                    }
                }
            }
            for (mine, slices) in held_by.iter_mut().zip(of) {
                if !slices.is_empty() {
                    mine.push(held(&format!("t{at}"), shape, &slices));
                }
            }
        }
        let ranks: Vec<Rank<'_>> = (nodes.iter().zip(&held_by)).map(|(node, held)| Rank { node: *node, held }).collect();
        let plan = Plan::new(&ranks).unwrap();
        check(&plan);
        for (shard, held) in plan.shards.iter().zip(&held_by) {
            for piece in &shard.pieces {
                let tensor = held.iter().find(|held| held.name == plan.name(piece)).unwrap();
                prop_assert!(tensor.slices.contains(&piece.held));
                // The piece is the bytes from `skip` on, in the slice that is held.
                let whole: u64 = piece.held.elements().unwrap() * 4;
                prop_assert!(piece.skip + piece.bytes <= whole);
                prop_assert_eq!(piece.held.intersect(&piece.slice).unwrap_or_else(|| piece.slice.clone()), piece.slice.clone());
                let first = |slice: &Slice| (0..slice.extent.len()).rev().fold((0, 4), |(at, stride), dim| {
                    (at + (slice.offset[dim] - piece.held.offset[dim]) * stride, stride * piece.held.extent[dim])
                }).0;
                prop_assert_eq!(first(&piece.slice), piece.skip);
            }
        }
    }

    #[test]
    fn what_all_hold_is_spread_evenly(nodes in 1u32..5, per_node in 1u32..5, rows in proptest::collection::vec(1u64..60_000, 1..12)) {
        let model: Vec<Held> = (rows.iter().enumerate())
            .map(|(at, rows)| held(&format!("t{at}"), &[*rows, 256], &[Slice::whole(&[*rows, 256])]))
            .collect();
        let ranks: Vec<Rank<'_>> = (0..nodes * per_node).map(|rank| Rank { node: rank / per_node, held: &model }).collect();
        let plan = Plan::new(&ranks).unwrap();
        let loads = loads(&plan);
        let piece = plan.shards.iter().flat_map(|s| &s.pieces).map(|p| p.bytes).max().unwrap();
        let share = loads.iter().sum::<u64>() / loads.len() as u64;
        prop_assert!(loads.iter().all(|load| *load <= share + piece), "{:?}, a piece is {}", loads, piece);
        // Alone, a rank writes everything as it is.
        prop_assert!(ranks.len() == 1 || piece <= (share / 4).max(4 << 20) + 1024);
    }
}
