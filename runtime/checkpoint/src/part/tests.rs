use crate::dir::Dir;
use std::fs;
use std::sync::Arc;

use rustix::io::pwrite;

use super::*;
use crate::PAGE;
use crate::hex::Bytes;
use crate::slot::{Image, Slot, Source, State};
use crate::testing::ramp;

fn go_on(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// A slot that holds the save of a rank.
fn sealed(bytes: &[u8], note: &Note) -> Arc<Slot> {
    let note = note.encode().unwrap();
    let (slot, _) = Slot::create(bytes.len() as u64, 4096, 1).unwrap();
    let sources = [Source { at: 0, bytes }];
    let image = Image {
        step: 5,
        generation: Bytes([1; 32]),
        bytes: bytes.len() as u64,
        sources: &sources,
        note: &note,
    };
    slot.fill(&image, 1).unwrap();
    slot
}

fn note() -> Note {
    Note {
        file: Some("n0-0.safetensors".to_owned()),
        blobs: vec![Blob {
            name: "rng".to_owned(),
            data: vec![1, 2],
        }],
        draft: None,
        inventory: None,
    }
}

#[test]
fn what_was_kept_before_is_used_as_it_is() {
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open(place.path()).unwrap();
    let bytes = ramp(&[2 * CHUNK], 1);
    let slot = sealed(&bytes, &note());
    let keep = |slot: &Arc<Slot>| {
        let sealed = slot.take().unwrap().unwrap();
        keep(&sealed, &dir, "5-1-0", 3, None, Options::default(), &go_on)
    };
    let first = keep(&slot).unwrap();
    assert_eq!(first.bytes, 2 * CHUNK);
    // Whoever wrote it died before anybody heard: the slot is still sealed.
    let again = keep(&slot).unwrap();
    assert_eq!(
        (again.digest, again.path),
        (first.digest, Some(persist::Path::Found))
    );
    let data = place.path().join("data/5-1-0");
    fs::remove_file(data.join("rank-3.json")).unwrap();
    assert_eq!(keep(&slot).unwrap().digest, first.digest);
    let part = Part::get(
        &dir.enter(DATA).unwrap().enter("5-1-0").unwrap(),
        3,
        first.digest,
    );
    assert_eq!(part.unwrap().blobs, note().blobs);

    // What is there is another file: nothing is overwritten.
    for damage in [&bytes[1..], &[&bytes[1..], &[0]].concat()[..]] {
        fs::write(data.join("n0-0.safetensors"), damage).unwrap();
        let error = keep(&slot).unwrap_err().to_string();
        assert!(error.contains("is there already"), "{error}");
        assert!(fs::read(data.join("n0-0.safetensors")).unwrap() == damage);
    }
    fs::remove_file(data.join("n0-0.safetensors")).unwrap();
    fs::write(data.join("rank-3.json"), "{}").unwrap();
    let error = keep(&slot).unwrap_err().to_string();
    assert!(
        error.contains("rank 3") && error.contains("damaged"),
        "{error}"
    );
}

#[test]
fn a_bit_that_flips_in_a_slot_makes_no_file() {
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open(place.path()).unwrap();
    let slot = sealed(&ramp(&[2 * CHUNK], 1), &note());
    pwrite(slot.fd(), &[0xaa], PAGE as u64 + CHUNK + 9).unwrap();
    let sealed = slot.take().unwrap().unwrap();
    let error = keep(&sealed, &dir, "5-1-0", 0, None, Options::default(), &go_on).unwrap_err();
    assert!(error.to_string().contains("at byte 4194304"), "{error}");
    drop(sealed);
    assert_eq!(slot.state().0, State::Sealed);
    let left = dir.enter(DATA).unwrap().enter("5-1-0").unwrap();
    assert_eq!(left.names().unwrap(), [""; 0]);
}

#[test]
fn a_rank_without_a_file_has_a_part_all_the_same() {
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open(place.path()).unwrap();
    let slot = sealed(
        b"",
        &Note {
            file: None,
            ..note()
        },
    );
    let sealed = slot.take().unwrap().unwrap();
    let kept = keep(&sealed, &dir, "5-1-0", 7, None, Options::default(), &go_on).unwrap();
    assert_eq!((kept.bytes, kept.path), (0, None));
    sealed.release();
    let data = dir.enter(DATA).unwrap().enter("5-1-0").unwrap();
    assert_eq!(data.names().unwrap(), ["rank-7.json"]);
    assert!(Part::get(&data, 7, kept.digest).unwrap().file.is_none());
    assert!(Part::get(&data, 7, Bytes([0; 32])).is_err());
    assert!(Part::get(&data, 8, kept.digest).is_err());
}

#[test]
fn what_is_no_note_is_refused() {
    for bytes in [
        &b""[..],
        b"{}",
        br#"{"version":1,"body":{}}"#,
        b"[1]",
        &[0xff; 9],
    ] {
        assert!(Note::decode(bytes).is_err());
    }
    let other = br#"{"version":3,"body":{"file":null,"blobs":[],"draft":null}}"#;
    let error = Note::decode(other).unwrap_err().to_string();
    assert!(
        error.contains("version is 3") && error.contains("one release"),
        "{error}"
    );
    assert_eq!(Note::decode(&note().encode().unwrap()).unwrap(), note());
}
