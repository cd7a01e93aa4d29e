use proptest::prelude::*;

use super::*;
use crate::slice::SliceError;
use crate::sum::CHUNK;
use crate::testing::{ramp, tensor_of, tiling};

/// Kept, so that a later version is measured against what this one writes.
const GOLDEN: &[u8] = include_bytes!("../../tests/golden/v1/manifest.json");

fn file(path: &str, bytes: u64) -> DataFile {
    let chunk = |at: u64| Bytes((at + 0x0123_4567_89ab_cdef).to_be_bytes());
    DataFile {
        path: path.to_owned(),
        bytes,
        digest: Bytes([0x5a; 16]),
        chunks: (0..bytes.div_ceil(CHUNK)).map(chunk).collect(),
    }
}

fn slice(offset: &[u64], extent: &[u64]) -> Slice {
    Slice {
        offset: offset.to_vec(),
        extent: extent.to_vec(),
    }
}

fn sample() -> Manifest {
    let placed = |slice, file, at, bytes| Placed {
        slice,
        file,
        at,
        bytes,
    };
    let tensor = |name: &str, dtype, shape: &[u64], slices| Tensor {
        name: name.to_owned(),
        dtype,
        shape: shape.to_vec(),
        slices,
    };
    let blob = |name: &str, data: &[u8]| Blob {
        name: name.to_owned(),
        data: data.to_vec(),
    };
    Manifest {
        origin: Origin {
            job: "demo \"ü\"".to_owned(),
            lineage: Bytes([1; 32]),
            generation: Bytes([2; 32]),
            number: 3,
            attempt: 0,
            step: 400,
            world: 2,
            saved_at: 1_790_000_000,
        },
        chunk: CHUNK,
        files: vec![
            file("data/400-3-0/n0-0.safetensors", 5 << 20),
            file("data/400-3-0/n1-0.safetensors", 12288),
        ],
        tensors: vec![
            tensor(
                "empty",
                Dtype::F32,
                &[0, 4],
                vec![placed(slice(&[0, 0], &[0, 4]), 0, 0, 0)],
            ),
            tensor(
                "scale",
                Dtype::F64,
                &[],
                vec![placed(slice(&[], &[]), 1, 8192, 8)],
            ),
            tensor(
                "w",
                Dtype::BF16,
                &[4, 6],
                vec![
                    placed(slice(&[0, 0], &[4, 2]), 0, 4096, 16),
                    placed(slice(&[0, 2], &[4, 4]), 1, 4096, 32),
                ],
            ),
        ],
        blobs: vec![blob("rng.0", &[0, 1, 254, 255]), blob("sampler", b"")],
    }
}

#[test]
fn the_golden_manifest_reads_and_is_written_again() {
    let bytes = sample().encode().unwrap();
    if std::env::var_os("MUSTER_BLESS").is_some() {
        std::fs::write(
            concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/v1/manifest.json"),
            &bytes,
        )
        .unwrap();
    }
    assert_eq!(
        String::from_utf8_lossy(&bytes),
        String::from_utf8_lossy(GOLDEN),
        "a change of the format needs a new version"
    );
    assert_eq!(Manifest::decode(GOLDEN).unwrap(), sample());
    // Names the file and stands in the log: must never change for the same bytes.
    assert_eq!(
        Manifest::digest(GOLDEN).to_string(),
        include_str!("../../tests/golden/v1/manifest.digest").trim()
    );
}

#[test]
fn another_version_is_refused_by_name() {
    let text = String::from_utf8(GOLDEN.to_vec()).unwrap();
    let newer = text.replacen("\"version\":1", "\"version\":7,\"more\":[{}]", 1);
    let error = Manifest::decode(newer.as_bytes()).unwrap_err();
    assert!(matches!(error, ManifestError::Version(7)), "{error}");
    let other = text.replacen("muster-checkpoint", "something", 1);
    assert!(matches!(
        Manifest::decode(other.as_bytes()),
        Err(ManifestError::Format(_))
    ));
    // The same meaning in other bytes would be another digest.
    for edited in [format!("{text}\n"), text.replacen(":", ": ", 1)] {
        assert!(matches!(
            Manifest::decode(edited.as_bytes()),
            Err(ManifestError::NotCanonical)
        ));
    }
    let unknown = text.replacen("\"chunk\"", "\"extra\":1,\"chunk\"", 1);
    assert!(matches!(
        Manifest::decode(unknown.as_bytes()),
        Err(ManifestError::Json(_))
    ));
}

#[test]
fn what_is_inconsistent_is_refused() {
    let refused = |change: &dyn Fn(&mut Manifest)| {
        let mut manifest = sample();
        change(&mut manifest);
        manifest.encode().unwrap_err()
    };
    use ManifestError as E;
    assert!(matches!(refused(&|m| m.chunk = 1), E::Chunk(1)));
    assert!(matches!(refused(&|m| m.files.swap(0, 1)), E::Order(_)));
    assert!(matches!(refused(&|m| m.tensors.swap(0, 1)), E::Order(_)));
    assert!(matches!(
        refused(&|m| m.blobs[1].name = "rng.0".into()),
        E::Order(_)
    ));
    assert!(matches!(
        refused(&|m| m.tensors[2].slices.swap(0, 1)),
        E::Order(_)
    ));
    assert!(matches!(
        refused(&|m| m.blobs[0].name = String::new()),
        E::Name(_)
    ));
    assert!(matches!(
        refused(&|m| m.tensors[1].name = "__pad_0".into()),
        E::Order(_) | E::Name(_)
    ));
    assert!(matches!(
        refused(&|m| m.files[0].chunks.truncate(1)),
        E::Chunks { .. }
    ));
    for path in [
        "/etc/x",
        "data/../../x",
        "a//b",
        ".hidden",
        "",
        "a/",
        "ü",
        "a b",
    ] {
        assert!(check_path(path).is_err(), "{path}");
    }
    assert!(matches!(
        refused(&|m| m.files[1].path = "z/../x".into()),
        E::Path(_)
    ));
    let slices = |change: &dyn Fn(&mut Tensor)| refused(&|m| change(&mut m.tensors[2]));
    assert!(matches!(
        slices(&|t| drop(t.slices.pop())),
        E::Slices {
            why: SliceError::Hole {
                covered: 8,
                elements: 24
            },
            ..
        }
    ));
    assert!(matches!(
        slices(&|t| t.slices[1].slice.offset[1] = 1),
        E::Slices { .. }
    ));
    assert!(matches!(slices(&|t| t.slices[1].file = 2), E::Range { .. }));
    assert!(matches!(
        slices(&|t| t.slices[1].bytes = 33),
        E::Range { .. }
    ));
    assert!(matches!(
        slices(&|t| t.slices[1].at = u64::MAX),
        E::Range { .. }
    ));
    assert!(matches!(
        slices(&|t| t.slices[1].at = 12288 - 31),
        E::Range { .. }
    ));
    assert!(matches!(
        slices(&|t| t.slices[1].at = 8192 - 31),
        E::Shared { at: 8192, .. }
    ));
}

#[test]
fn names_are_found() {
    let manifest = sample();
    assert_eq!(manifest.tensor("w").unwrap().shape, [4, 6]);
    assert!(manifest.tensor("v").is_none());
    assert_eq!(manifest.blob("rng.0"), Some(&[0, 1, 254, 255][..]));
    let names = |patterns: &[&str]| -> Vec<String> {
        manifest
            .matching(patterns)
            .map(|tensor| tensor.name.clone())
            .collect()
    };
    assert_eq!(names(&["?", "em*"]), ["empty", "w"]);
    assert_eq!(manifest.bytes(), (5 << 20) + 12288);
}

proptest! {
    #[test]
    fn any_slicing_comes_back(
        shape in proptest::collection::vec(0u64..9, 0..4),
        seed: u64,
        blob in proptest::collection::vec(any::<u8>(), 0..50),
    ) {
        let whole = ramp(&shape, 4);
        let (tensor, files) = tensor_of(&shape, Dtype::F32, &tiling(&shape, seed), &whole);
        let mut manifest = sample();
        manifest.files = (files.iter().enumerate())
            .map(|(at, bytes)| file(&format!("f{at}"), bytes.len() as u64))
            .collect();
        manifest.tensors = vec![tensor];
        manifest.blobs[1].data = blob;
        let bytes = manifest.encode().unwrap();
        prop_assert_eq!(Manifest::decode(&bytes).unwrap(), manifest);
    }

    #[test]
    fn no_bytes_are_too_much(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(Manifest::decode(&bytes).is_err());
    }

    /// A text that still is a manifest after damage encodes to the same bytes.
    #[test]
    fn damage_is_an_answer(at in 0usize..GOLDEN.len(), with in "[0-9a-z{}\\[\\]\",:.-]{0,3}", cut in 0usize..6) {
        let mut bytes = GOLDEN.to_vec();
        let end = (at + cut).min(bytes.len());
        bytes.splice(at..end, with.into_bytes());
        if let Ok(manifest) = Manifest::decode(&bytes) {
            prop_assert_eq!(manifest.encode().unwrap(), bytes);
        }
    }
}

#[test]
fn metrics_are_numbers_by_name() {
    let mut manifest = sample();
    assert_eq!(manifest.metric("loss"), None);
    let values = [("loss", 0.25), ("bad", f64::NAN), ("acc", 3.0)];
    manifest.blobs = vec![Blob::metrics(values)];
    manifest.check().unwrap();
    assert_eq!(manifest.metric("loss"), Some(0.25));
    assert_eq!(manifest.metric("acc"), Some(3.0));
    assert_eq!(manifest.metric("bad"), None);
    manifest.blobs[0].data = b"not JSON".to_vec();
    assert_eq!(manifest.metric("loss"), None);
}
