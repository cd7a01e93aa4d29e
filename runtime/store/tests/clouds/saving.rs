//! Images that ranks sealed in their slots go straight to a store, and become one checkpoint there.

use std::ops::ControlFlow;
use std::sync::Arc;

use muster_checkpoint::hex::Bytes;
use muster_checkpoint::load::{Team, Want, load};
use muster_checkpoint::manifest::{Blob, Manifest, Origin};
use muster_checkpoint::newest::Shelf as _;
use muster_checkpoint::part::{self, Kept, Note, PartError};
use muster_checkpoint::persist::{self, Fault as Trouble};
use muster_checkpoint::plan::{Held, Plan, Rank};
use muster_checkpoint::slot::{Image, Sealed, Slot, Source};
use muster_checkpoint::{Dtype, Slice, shelf};
use muster_store::Store;

use crate::bed::{Bed, all, bytes};
use crate::http::Response;
use crate::proxy::Fault;

const GENERATION: Bytes<32> = Bytes([9; 32]);
/// More than two parts of 5 MiB, and three chunks.
const LENGTH: usize = 11 << 20;

fn go_on(_: persist::Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// The slots of two ranks that hold one tensor, which each writes a half of.
fn slots(step: u64) -> Vec<Arc<Slot>> {
    let (held, state) = ([Held::whole("w", Dtype::U8, &[LENGTH as u64])], state(step));
    let rank = |node| Rank { node, held: &held };
    let plan = Plan::new(&[rank(0), rank(1)]).unwrap();
    let fill = |(rank, shard): (u32, &muster_checkpoint::plan::Shard)| {
        let mut sources = vec![Source {
            at: 0,
            bytes: &shard.layout.header,
        }];
        for piece in &shard.pieces {
            let bytes = &state[piece.skip as usize..][..piece.bytes as usize];
            sources.push(Source {
                at: piece.at,
                bytes,
            });
        }
        let note = Note {
            file: Some(shard.file.clone()),
            blobs: vec![Blob {
                name: format!("rng/{rank}"),
                data: vec![rank as u8],
            }],
            draft: (rank == 0).then(|| plan.draft()),
            inventory: Some(plan.inventory().clone()),
        };
        let image = Image {
            step,
            generation: GENERATION,
            bytes: shard.layout.bytes,
            sources: &sources,
            note: &note.encode().unwrap(),
        };
        let (slot, _) = Slot::create(image.bytes, image.note.len() as u64, 2).unwrap();
        slot.fill(&image, 2).unwrap();
        slot
    };
    (0..).zip(&plan.shards).map(fill).collect()
}

fn state(step: u64) -> Vec<u8> {
    let mut state = bytes(LENGTH);
    state.iter_mut().for_each(|byte| *byte ^= step as u8);
    state
}

fn keep(job: &Store, sealed: &Sealed, rank: u32) -> Result<Kept, PartError> {
    let options = persist::Options::default();
    part::keep(sealed, job, "7-9-1", rank, None, options, &go_on)
}

/// Saves as launchers do, and loads as workers do.
fn save_and_load(job: &Store) -> Vec<Kept> {
    let sealed: Vec<Sealed> = slots(7)
        .iter()
        .map(|slot| slot.take().unwrap().unwrap())
        .collect();
    let keep = |(rank, sealed)| keep(job, sealed, rank).unwrap();
    let kept: Vec<Kept> = (0..).zip(&sealed).map(keep).collect();
    let digests: Vec<_> = kept.iter().map(|kept| kept.digest).collect();
    let origin = Origin {
        job: "job".into(),
        lineage: Bytes([8; 32]),
        generation: GENERATION,
        number: 3,
        attempt: 1,
        step: 7,
        world: 2,
        saved_at: 5,
    };
    let draft = Note::decode(&sealed[0].note).unwrap().draft.unwrap();
    let manifest = draft.assemble(origin, job, "7-9-1", &digests).unwrap();
    let digest = shelf::put(job, &manifest).unwrap();
    // Another launcher makes the same one.
    assert_eq!(shelf::put(job, &manifest).unwrap(), digest);

    let found = Manifest::decode(&job.manifest(digest).unwrap()).unwrap();
    assert_eq!(found, manifest);
    assert_eq!(found.blob("rng/1"), Some(&[1][..]));
    let mut into = vec![0; LENGTH];
    let want = Want {
        name: "w",
        dtype: Dtype::U8,
        shape: &[LENGTH as u64],
        slice: Slice::whole(&[LENGTH as u64]),
        into: &mut into,
    };
    load(&found, job, &mut [want], Team::alone(4)).unwrap();
    assert!(into == state(7));
    kept
}

#[test]
fn ranks_save_to_any_store_and_others_load_it() {
    let (bed, place) = (Bed::new(), tempfile::tempdir().unwrap());
    let directory = std::fs::File::open(place.path()).unwrap();
    let directory = Store::in_directory(directory.into(), place.path());
    for store in [&bed.store, &directory] {
        let job = store.within("job").unwrap();
        let paths: Vec<_> = save_and_load(&job).iter().map(|kept| kept.path).collect();
        let there: Vec<String> = all(&job, "data").into_iter().map(|e| e.name).collect();
        let files = [
            "n0-0.safetensors",
            "n1-0.safetensors",
            "rank-0.json",
            "rank-1.json",
        ];
        assert_eq!(there, files.map(|file| format!("data/7-9-1/{file}")));
        // Whoever wrote them died before anybody heard of it: they are found, and sent no more.
        let sent = bed.proxy.count("PUT", "/data/");
        let again: Vec<_> = save_and_load(&job).iter().map(|kept| kept.path).collect();
        assert_ne!(paths, again);
        assert_eq!(again, [Some(persist::Path::Found); 2]);
        // But for two creates of the parts, which find themselves.
        assert!(bed.proxy.count("PUT", "/data/") <= sent + 2);
        // A folder goes with all that is in it, and one that only begins like it stays.
        job.create("data/7-9-10/rank-0.json", b"{}").unwrap();
        job.delete_folder("data/7-9-1").unwrap();
        job.delete_folder("data/7-9-1").unwrap();
        assert_eq!(all(&job, "data").len(), 1);
        job.delete_folder("data").unwrap();
        assert_eq!(job.folders("").unwrap(), ["manifest"]);
    }
    assert!(!place.path().join("job/data").exists());
}

#[test]
fn what_was_not_sealed_so_never_gets_there() {
    let bed = Bed::new();
    let job = bed.store.within("job").unwrap();
    let slot = slots(7).remove(0);
    let at = 4096 + (4 << 20) + 9;
    rustix::io::pwrite(slot.fd(), &[0xaa], at).unwrap();
    let sealed = slot.take().unwrap().unwrap();
    let error = keep(&job, &sealed, 0).unwrap_err();
    let PartError::Persist(error) = error else {
        panic!("{error}")
    };
    assert!(
        matches!(error.fault, Trouble::Damaged { at: 4_194_304 }),
        "{error}"
    );
    assert_eq!(all(&job, ""), []);
    assert!(bed.fake.state.lock().unwrap().uploads.is_empty());
}

#[test]
fn nothing_is_overwritten_and_what_fails_says_why() {
    let bed = Bed::new();
    let job = bed.store.within("job").unwrap();
    let slot = slots(7).remove(1);
    let sealed = slot.take().unwrap().unwrap();
    let other = vec![1; sealed.image().len()];
    bed.place("job/data/7-9-1/n1-0.safetensors", &other);
    let error = keep(&job, &sealed, 1).unwrap_err().to_string();
    assert!(error.contains("is there already"), "{error}");
    assert!(bed.there("job/data/7-9-1/n1-0.safetensors") == Some(other));
    job.delete_folder("data").unwrap();

    bed.place("job/data/7-9-1/rank-1.json", b"{}");
    let error = keep(&job, &sealed, 1).unwrap_err().to_string();
    assert!(
        error.contains("rank 1") && error.contains("damaged"),
        "{error}"
    );
    job.delete_folder("data").unwrap();

    let options = persist::Options::default();
    let stop = |_| ControlFlow::Break(());
    let error = part::keep(&sealed, &job, "7-9-1", 1, None, options, &stop).unwrap_err();
    let PartError::Persist(error) = error else {
        panic!("{error}")
    };
    assert!(matches!(error.fault, Trouble::Cancelled), "{error}");

    let refused = Response::new(403).body("<Error><Code>AccessDenied</Code></Error>");
    bed.proxy
        .inject("PUT", "/data/", 9, Fault::Instead(refused));
    let error = keep(&job, &sealed, 1).unwrap_err().to_string();
    assert!(error.contains("s3://bucket/team/job/data/7-9-1"), "{error}");
    assert!(error.contains("docs/stores.md"), "{error}");
    drop(sealed);
    // The slot is still sealed, and another try may succeed.
    bed.proxy.heal();
    let sealed = slot.take().unwrap().unwrap();
    assert_eq!(
        keep(&job, &sealed, 1).unwrap().path,
        Some(persist::Path::Uploaded)
    );
}
