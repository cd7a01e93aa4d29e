//! Checkpoints are found and verified straight from a store.

use std::io;

use muster_checkpoint::hex::{Bytes, Id};
use muster_checkpoint::load::LoadError;
use muster_checkpoint::manifest::{DataFile, Manifest, Origin};
use muster_checkpoint::newest::{Reason, SearchError, newest};
use muster_checkpoint::sum::{CHUNK, ChunkSum, file_digest};
use muster_checkpoint::verify::{Depth, verify};
use muster_store::{Created, Store};

use crate::bed::{Bed, bounded, bytes, go_on};
use crate::http::Response;
use crate::proxy::Fault;

const OURS: Id = Bytes([7; 32]);

/// A checkpoint of one file, in a job's folder.
fn save(job: &Store, step: u64) -> String {
    let data = bytes(5 << 20 | step as usize);
    let name = format!("data/{step}-1-1/n0-0.safetensors");
    let total = data.len() as u64;
    job.upload(&name, &mut &data[..], total, &mut go_on)
        .unwrap();
    let sums: Vec<ChunkSum> = data.chunks(CHUNK as usize).map(ChunkSum::of).collect();
    let manifest = Manifest {
        origin: Origin {
            job: "job".into(),
            lineage: OURS,
            generation: Bytes([1; 32]),
            number: 1,
            attempt: 1,
            step,
            world: 1,
            saved_at: 0,
        },
        chunk: CHUNK,
        files: vec![DataFile {
            path: name.clone(),
            bytes: total,
            digest: file_digest(&sums),
            chunks: sums
                .iter()
                .map(|sum| Bytes(sum.crc.to_be_bytes()))
                .collect(),
        }],
        tensors: Vec::new(),
        blobs: Vec::new(),
    };
    let encoded = manifest.encode().unwrap();
    let place = format!("manifest/{}.json", Manifest::digest(&encoded));
    assert_eq!(job.create(&place, &encoded).unwrap(), Created::Created);
    name
}

fn find(job: &Store) -> Result<(Option<u64>, Vec<Reason>), SearchError> {
    let all = Depth::Everything { threads: 2 };
    let found = newest(job, OURS, |manifest| verify(manifest, job, all))?;
    let step = found.chosen.map(|chosen| chosen.manifest.origin.step);
    Ok((
        step,
        found
            .skipped
            .into_iter()
            .map(|skipped| skipped.why)
            .collect(),
    ))
}

#[test]
fn the_newest_good_one_is_found_in_any_store() {
    let (bed, place) = (Bed::new(), tempfile::tempdir().unwrap());
    let directory = std::fs::File::open(place.path()).unwrap();
    let directory = Store::in_directory(directory.into(), place.path());
    for store in [&bed.store, &directory] {
        let job = store.within("job").unwrap();
        assert_eq!(find(&job).unwrap().0, None);
        save(&job, 10);
        let newer = save(&job, 20);
        assert_eq!(find(&job).unwrap().0, Some(20));
        job.delete(&newer).unwrap();
        let (step, skipped) = find(&store.within("job").unwrap()).unwrap();
        assert_eq!(step, Some(10));
        assert!(matches!(skipped[..], [Reason::Damage(_)]), "{skipped:?}");
    }
}

#[test]
fn damage_on_the_way_is_read_again_or_found_and_silence_is_no_damage() {
    let bed = Bed::new();
    let job = bed.store.within("job").unwrap();
    save(&job, 10);
    let newer = save(&job, 20);
    // Broken answers are asked for again.
    bed.proxy.inject("GET", &newer, 1, Fault::Truncate);
    bed.proxy.inject("GET", &newer, 1, Fault::Reset);
    bed.proxy.inject("GET", "manifest", 1, Fault::Corrupt);
    assert_eq!(find(&job).unwrap().0, Some(20));
    // A range has no checksum of the store's; the manifest's finds what is wrong.
    bed.proxy.heal();
    bed.proxy.inject("GET", &newer, 1, Fault::Corrupt);
    let (step, skipped) = find(&job).unwrap();
    assert_eq!(step, Some(10));
    assert!(matches!(skipped[..], [Reason::Damage(_)]), "{skipped:?}");
    // One that does not answer loses no steps.
    for answer in [
        Fault::Reset,
        Fault::Instead(Response::new(503)),
        Fault::Instead(Response::new(403)),
    ] {
        bed.proxy.heal();
        bed.proxy.inject("GET", &newer, 99, answer);
        let error = bounded(|| find(&job)).unwrap_err();
        let SearchError::Load { source, .. } = error else {
            panic!("{error}")
        };
        let LoadError::Unreadable { source, .. } = *source else {
            panic!("{source}")
        };
        assert_ne!(source.kind(), io::ErrorKind::NotFound);
    }
}
