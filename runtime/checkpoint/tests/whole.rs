//! A checkpoint's whole way: plan, images, files, manifest, and back to another number of ranks.

#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use muster_checkpoint::dir::Dir;
use muster_checkpoint::hex::{Bytes, Id};
use muster_checkpoint::load::{LoadError, Team, Want, load};
use muster_checkpoint::manifest::{Blob, Manifest, Origin};
use muster_checkpoint::newest::{Reason, newest};
use muster_checkpoint::part::{Note, keep};
use muster_checkpoint::persist::Options;
use muster_checkpoint::plan::{Held, Piece, Plan, Rank};
use muster_checkpoint::shard::{Header, PAD};
use muster_checkpoint::slot::{Image, Slot, Source};
use muster_checkpoint::source::Directory;
use muster_checkpoint::verify::{Depth, verify};
use muster_checkpoint::{Dtype, ExportError, Slice, export, shelf};

const LINEAGE: Id = Bytes([0x11; 32]);
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/v1/checkpoint");

/// Element `at` of a tensor, as f32.
fn value(name: &str, at: u64, step: u64) -> f32 {
    (name.len() as u64 * 100_000 + at + step) as f32
}

/// A slice's elements as bytes.
fn bytes(name: &str, shape: &[u64], slice: &Slice, step: u64) -> Vec<u8> {
    let count: u64 = slice.extent.iter().product();
    (0..count)
        .flat_map(|element| {
            let (mut rest, mut at, mut stride) = (element, 0, 1);
            for dim in (0..shape.len()).rev() {
                at += (slice.offset[dim] + rest % slice.extent[dim]) * stride;
                rest /= slice.extent[dim];
                stride *= shape[dim];
            }
            value(name, at, step).to_le_bytes()
        })
        .collect()
}

/// Rank `rank` of `world` holds all of `bias` and `norm`, rows of `w`, columns of `v`.
fn held(rank: u64, world: u64, rows: u64) -> Vec<Held> {
    let part = |len: u64| {
        let from = len * rank / world;
        (from, len * (rank + 1) / world - from)
    };
    let tensor = |name: &str, shape: &[u64], slice| Held {
        name: name.to_owned(),
        dtype: Dtype::F32,
        shape: shape.to_vec(),
        slices: vec![slice],
    };
    let (row, row_count) = part(rows);
    let (column, column_count) = part(30);
    let w = Slice {
        offset: vec![row, 0],
        extent: vec![row_count, 48],
    };
    let v = Slice {
        offset: vec![0, column],
        extent: vec![17, column_count],
    };
    vec![
        tensor("bias", &[40], Slice::whole(&[40])),
        tensor("norm.scale", &[], Slice::whole(&[])),
        tensor("v", &[17, 30], v),
        tensor("w", &[rows, 48], w),
    ]
}

fn plan(world: u64, rows: u64) -> (Plan, Vec<Vec<Held>>) {
    let held: Vec<Vec<Held>> = (0..world).map(|rank| held(rank, world, rows)).collect();
    let ranks: Vec<Rank<'_>> = (0..)
        .zip(&held)
        .map(|(rank, held)| Rank {
            node: rank / 2,
            held,
        })
        .collect();
    (Plan::new(&ranks).unwrap(), held)
}

/// Saves the state of `step` from `world` ranks, each by a slot of its own; the manifest's digest.
fn save(place: &Path, world: u64, rows: u64, step: u64) -> Id {
    let (plan, held) = plan(world, rows);
    let dir = Dir::open(place).unwrap();
    let name = format!("{step}-1-0");
    let mut parts = Vec::new();
    for (rank, (shard, held)) in plan.shards.iter().zip(&held).enumerate() {
        let mine: Vec<(&Piece, Vec<u8>)> = (shard.pieces.iter())
            .map(|piece| {
                let name = plan.name(piece);
                let tensor = held.iter().find(|held| held.name == name).unwrap();
                (piece, bytes(name, &tensor.shape, &piece.held, step))
            })
            .collect();
        let header = Source {
            at: 0,
            bytes: &shard.layout.header,
        };
        let mut sources: Vec<Source<'_>> = (mine.iter())
            .map(|(piece, bytes)| Source {
                at: piece.at,
                bytes: &bytes[piece.skip as usize..][..piece.bytes as usize],
            })
            .chain([header])
            .collect();
        sources.sort_by_key(|source| source.at);
        let note = Note {
            file: (!shard.pieces.is_empty()).then(|| shard.file.clone()),
            blobs: match rank {
                0 => vec![Blob {
                    name: "sampler".to_owned(),
                    data: step.to_le_bytes().to_vec(),
                }],
                _ => Vec::new(),
            },
            draft: (rank == 0).then(|| plan.draft()),
            inventory: Some(plan.inventory().clone()),
        };
        let note = note.encode().unwrap();
        let bytes = shard.layout.bytes;
        let (slot, _) = Slot::create(bytes, note.len() as u64, 1).unwrap();
        let image = Image {
            step,
            generation: Bytes([0x22; 32]),
            bytes,
            sources: &sources,
            note: &note,
        };
        slot.fill(&image, 2).unwrap();
        let sealed = slot.take().unwrap().unwrap();
        let go_on = |_| ControlFlow::Continue(());
        let rank = rank as u32;
        let kept = keep(&sealed, &dir, &name, rank, None, Options::default(), &go_on).unwrap();
        parts.push(kept.digest);
    }
    let origin = Origin {
        job: "whole".to_owned(),
        lineage: LINEAGE,
        generation: Bytes([0x22; 32]),
        number: 1,
        attempt: 0,
        step,
        world: world as u32,
        saved_at: 1_790_000_000,
    };
    let manifest = plan.draft().assemble(origin, &dir, &name, &parts).unwrap();
    shelf::put(&dir, &manifest).unwrap()
}

/// Loads everything that each rank of `world` holds, and compares it.
fn load_and_compare(
    manifest: &Manifest,
    source: &Directory,
    world: u64,
    rows: u64,
) -> Result<(), LoadError> {
    let step = manifest.origin.step;
    for rank in 0..world {
        let held = held(rank, world, rows);
        let mut into: Vec<Vec<u8>> = held
            .iter()
            .map(|held| vec![0; held.slices[0].extent.iter().product::<u64>() as usize * 4])
            .collect();
        let mut wants: Vec<Want<'_>> = (held.iter().zip(&mut into))
            .map(|(held, into)| Want {
                name: &held.name,
                dtype: held.dtype,
                shape: &held.shape,
                slice: held.slices[0].clone(),
                into,
            })
            .collect();
        load(manifest, source, &mut wants, Team::alone(2))?;
        for (held, into) in held.iter().zip(&into) {
            assert!(
                *into == bytes(&held.name, &held.shape, &held.slices[0], step),
                "{} of rank {rank}",
                held.name
            );
        }
    }
    Ok(())
}

/// The step that is restored in a world of this size, and the reasons why no newer one is.
fn restore(place: &Path, world: u64, rows: u64, direct: bool) -> (Option<u64>, Vec<Reason>) {
    let source = Directory::new(Dir::open(place).unwrap(), direct);
    let found = newest(&source, LINEAGE, |manifest| {
        load_and_compare(manifest, &source, world, rows)
    })
    .unwrap();
    (
        found.chosen.map(|chosen| chosen.manifest.origin.step),
        found
            .skipped
            .into_iter()
            .map(|skipped| skipped.why)
            .collect(),
    )
}

#[test]
fn it_comes_back_in_any_world_and_damage_is_passed_over() {
    let place = tempfile::tempdir().unwrap();
    // Several chunks for each rank.
    let rows = 60_000;
    save(place.path(), 3, rows, 100);
    save(place.path(), 1, rows, 200);
    let newest = save(place.path(), 2, rows, 300);
    assert_eq!(
        save_again(place.path()),
        newest,
        "the same manifest again is no error"
    );
    for world in [1, 2, 3, 5] {
        let (step, skipped) = restore(place.path(), world, rows, world % 2 == 0);
        assert_eq!((step, skipped.len()), (Some(300), 0), "world {world}");
    }
    let flip = |path: &str, at: usize| {
        let path = place.path().join(path);
        let mut bytes = fs::read(&path).unwrap();
        bytes[at] ^= 4;
        fs::write(path, bytes).unwrap();
    };
    flip("data/300-1-0/n0-1.safetensors", 5 << 20);
    let (step, skipped) = restore(place.path(), 4, rows, true);
    assert_eq!(step, Some(200));
    assert!(
        skipped[0]
            .to_string()
            .contains("n0-1.safetensors is damaged in chunk 1"),
        "{}",
        skipped[0]
    );
    fs::remove_dir_all(place.path().join("data/200-1-0")).unwrap();
    let (step, skipped) = restore(place.path(), 4, rows, false);
    assert_eq!((step, skipped.len()), (Some(100), 2));
    flip(&format!("manifest/{newest}.json"), 100);
    let (step, skipped) = restore(place.path(), 4, rows, false);
    assert_eq!(step, Some(100));
    assert!(
        skipped
            .iter()
            .any(|why| matches!(why, Reason::Digest { .. }))
    );
}

fn save_again(place: &Path) -> Id {
    let dir = Dir::open(place).unwrap();
    let source = Directory::new(dir.clone(), false);
    let found = newest(&source, LINEAGE, |_| Ok(())).unwrap();
    shelf::put(&dir, &found.chosen.unwrap().manifest).unwrap()
}

#[test]
fn a_checkpoint_is_exported_to_one_file() {
    let place = tempfile::tempdir().unwrap();
    save(place.path(), 3, 50, 7);
    let dir = Dir::open(place.path()).unwrap();
    let source = Directory::new(dir.clone(), true);
    let found = newest(&source, LINEAGE, |_| Ok(()))
        .unwrap()
        .chosen
        .unwrap();
    assert_eq!(
        found.manifest.blob("sampler"),
        Some(&7u64.to_le_bytes()[..])
    );
    export(
        &found.manifest,
        &source,
        &["*"],
        (&dir, "all.safetensors"),
        Options::default(),
    )
    .unwrap();
    export(
        &found.manifest,
        &source,
        &["norm.*"],
        (&dir, "norm.safetensors"),
        Options::default(),
    )
    .unwrap();
    let nothing = export(
        &found.manifest,
        &source,
        &["x"],
        (&dir, "x"),
        Options::default(),
    );
    assert!(matches!(nothing, Err(ExportError::Nothing(_))));
    let content = fs::read(place.path().join("all.safetensors")).unwrap();
    let header =
        Header::read(&fs::File::open(place.path().join("all.safetensors")).unwrap()).unwrap();
    assert_eq!(header.tensors.len(), 4);
    // Header::read leaves padding out.
    let pads = content
        .windows(PAD.len())
        .filter(|at| *at == PAD.as_bytes());
    assert_eq!(pads.count(), 0);
    for entry in &header.tensors {
        let whole = bytes(&entry.name, &entry.shape, &Slice::whole(&entry.shape), 7);
        assert_eq!(
            content[entry.at as usize..][..entry.bytes as usize],
            whole,
            "{}",
            entry.name
        );
    }
    let header =
        Header::read(&fs::File::open(place.path().join("norm.safetensors")).unwrap()).unwrap();
    assert_eq!(header.tensors[0].name, "norm.scale");
}

/// Checkpoints of version 1 are read for ever, and are still written byte for byte.
#[test]
fn the_golden_checkpoint() {
    let place = tempfile::tempdir().unwrap();
    let digest = save(place.path(), 2, 9, 400);
    if std::env::var_os("MUSTER_BLESS").is_some() {
        save(Path::new(GOLDEN), 2, 9, 400);
    }
    for file in [
        "data/400-1-0/n0-0.safetensors",
        "data/400-1-0/n0-1.safetensors",
        &format!("manifest/{digest}.json"),
    ] {
        let now = fs::read(place.path().join(file)).unwrap();
        let then = fs::read(Path::new(GOLDEN).join(file)).unwrap();
        assert!(
            now == then,
            "{file}: a change of the format needs a new version"
        );
    }
    assert_eq!(restore(Path::new(GOLDEN), 3, 9, true).0, Some(400));
    let source = Directory::new(Dir::open(Path::new(GOLDEN)).unwrap(), false);
    let found = newest(&source, LINEAGE, |_| Ok(()))
        .unwrap()
        .chosen
        .unwrap();
    verify(&found.manifest, &source, Depth::Everything { threads: 2 }).unwrap();
}
