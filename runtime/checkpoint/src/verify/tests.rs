use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::Dtype;
use crate::hex::Bytes;
use crate::load::tests::{Memory, saved};
use crate::slice::Slice;

const ALL: Depth = Depth::Everything { threads: 2 };

/// Files f0 of four chunks, f1 and f2.
fn four_chunks() -> (Manifest, Memory) {
    let shape = [3 * CHUNK + 9];
    let (manifest, memory, _) = saved(&shape, Dtype::U8, &[Slice::whole(&shape)]);
    (manifest, memory)
}

fn read_of(memory: &Memory) -> Vec<(String, u64)> {
    memory.read.lock().unwrap().drain(..).collect()
}

#[test]
fn what_a_text_about_damage_names_is_found_in_the_manifest() {
    let (manifest, _) = four_chunks();
    let path = || "f0".to_owned();
    let chunk = Damage::Chunk {
        path: path(),
        chunk: 2,
        begin: 2 * CHUNK,
        end: 3 * CHUNK,
        tensors: vec!["chunk 1".into()],
        expected: Bytes([0; 8]),
        found: Bytes([1; 8]),
    };
    let (bytes, at) = (7, 3 * CHUNK);
    let size = Damage::Size {
        path: path(),
        expected: bytes,
        found: at,
    };
    for (damage, expected) in [
        (chunk, Some(2)),
        (Damage::Cut { path: path(), at }, Some(3)),
        (Damage::Gone { path: path() }, None),
        (Damage::Disk { path: path() }, None),
        (Damage::Digest { path: path() }, None),
        (size, None),
    ] {
        let (text, chunk) = (damage.to_string(), expected);
        let named = Some(Spot { file: 0, chunk });
        assert_eq!(Spot::named(&manifest, &text), named, "{text}");
    }
    for (text, named) in [
        ("its manifest is not there", None),
        ("", None),
        // No such chunk.
        ("f0 is damaged in chunk 4 (", Some((0, None))),
        (
            "f2 is damaged in chunk 99999999999999999999999",
            Some((2, None)),
        ),
        ("f1 in chunk ", Some((1, None))),
    ] {
        let named = named.map(|(file, chunk)| Spot { file, chunk });
        assert_eq!(Spot::named(&manifest, text), named, "{text}");
    }
}

#[test]
fn what_was_named_is_looked_at_first() {
    let (manifest, mut memory) = four_chunks();
    let look = |memory: &Memory, first, depth| {
        verify_watched(&manifest, memory, depth, first, &|_| {
            ControlFlow::Continue(())
        })
    };
    let spot = |file, chunk| Some(Spot { file, chunk });
    look(&memory, spot(0, Some(2)), Depth::Sizes).unwrap();
    assert_eq!(read_of(&memory), [("f0".into(), 2 * CHUNK)]);
    look(&memory, spot(1, None), Depth::Sizes).unwrap();
    assert_eq!(read_of(&memory), [("f1".into(), 0)]);
    // Everything else is read as well, and a whole file once.
    look(&memory, spot(1, None), ALL).unwrap();
    let mut all = read_of(&memory);
    assert_eq!(all[0], ("f1".into(), 0));
    all.sort();
    let expected = (0..4).map(|chunk| ("f0".to_owned(), chunk * CHUNK));
    assert_eq!(all[..4], expected.collect::<Vec<_>>());
    assert_eq!(all[4..], [("f1".into(), 0)]);

    let file = memory.files.get_mut("f0").unwrap();
    file[3 * CHUNK as usize] ^= 1;
    let error = look(&memory, spot(0, Some(3)), ALL).unwrap_err();
    assert!(matches!(
        error.damage(),
        Some(Damage::Chunk { chunk: 3, .. })
    ));
    assert_eq!(read_of(&memory), [("f0".into(), 3 * CHUNK)]);
    // Damage elsewhere is found all the same.
    look(&memory, spot(0, Some(0)), ALL).unwrap_err();
}

#[test]
fn it_says_how_far_it_is_and_can_be_stopped() {
    let (manifest, memory) = four_chunks();
    let all: u64 = manifest.files.iter().map(|file| file.bytes + 1).sum();
    let read = AtomicU64::new(0);
    let until = |limit: u64| {
        read.store(0, Ordering::Relaxed);
        verify_watched(&manifest, &memory, ALL, None, &|bytes| match read
            .fetch_add(bytes, Ordering::Relaxed)
            + bytes
            < limit
        {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        })
    };
    until(u64::MAX).unwrap();
    assert_eq!(read.load(Ordering::Relaxed), all);
    let stopped = until(CHUNK).unwrap_err();
    assert!(matches!(stopped, LoadError::Stopped), "{stopped}");
    assert!(read.load(Ordering::Relaxed) < all);
}
