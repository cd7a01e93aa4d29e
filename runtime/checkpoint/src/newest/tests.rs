use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;

use super::*;
use crate::hex::Bytes;
use crate::load::Damage;
use crate::load::tests::{Memory, manifest};
use crate::source::Readers;
use crate::verify::{Depth, verify};

const OURS: Id = Bytes([7; 32]);

/// Checkpoints of a file each.
#[derive(Default)]
struct Shelves {
    data: Memory,
    manifests: BTreeMap<Id, Vec<u8>>,
    silent: AtomicBool,
}

impl Shelves {
    fn add(&mut self, number: u64, step: u64) -> Id {
        let path = format!("f{number}-{step}");
        let files = BTreeMap::from([(path.clone(), vec![step as u8; 100])]);
        let mut manifest = manifest(Vec::new(), &files);
        (manifest.origin.number, manifest.origin.step) = (number, step);
        self.data.files.extend(files);
        let bytes = manifest.encode().unwrap();
        let digest = Manifest::digest(&bytes);
        self.manifests.insert(digest, bytes);
        digest
    }

    fn file(&mut self, name: &str) -> &mut Vec<u8> {
        self.data.files.get_mut(name).unwrap()
    }

    /// The step of the newest, and the reasons for the others.
    fn newest(&self) -> Result<(Option<u64>, Vec<Skipped>), SearchError> {
        let found = newest(self, OURS, |manifest| {
            verify(manifest, self, Depth::Everything { threads: 1 })
        })?;
        Ok((
            found.chosen.map(|chosen| chosen.manifest.origin.step),
            found.skipped,
        ))
    }
}

impl Source for Shelves {
    fn size(&self, path: &str) -> io::Result<u64> {
        self.data.size(path)
    }
    fn read(&self, path: &str, at: u64, into: &mut [u8], readers: Readers) -> io::Result<()> {
        match self.silent.load(Ordering::Relaxed) {
            true => Err(Errno::TIMEDOUT.into()),
            false => self.data.read(path, at, into, readers),
        }
    }
}

impl Shelf for Shelves {
    fn list(&self) -> io::Result<Vec<Id>> {
        Ok(self.manifests.keys().copied().collect())
    }
    fn manifest(&self, digest: Id) -> io::Result<Vec<u8>> {
        Ok(self
            .manifests
            .get(&digest)
            .ok_or(io::ErrorKind::NotFound)?
            .clone())
    }
}

#[test]
fn it_walks_back_past_anything_damaged() {
    let mut shelf = Shelves::default();
    assert_eq!(shelf.newest().unwrap().0, None, "there is none");
    for (number, step) in [(1, 90), (1, 100), (2, 40), (2, 50), (3, 60), (3, 70)] {
        shelf.add(number, step);
    }
    // A later generation went back to an earlier step: it is the newer all the same.
    assert_eq!(shelf.newest().unwrap().0, Some(70));
    shelf.file("f3-70")[50] ^= 1;
    shelf.file("f3-60").pop();
    shelf.data.files.remove("f2-50");
    let (step, skipped) = shelf.newest().unwrap();
    assert_eq!(step, Some(40));
    let skipped: Vec<(Option<u64>, &Reason)> = skipped.iter().map(|s| (s.step, &s.why)).collect();
    assert!(
        matches!(
            skipped[..],
            [
                (Some(70), Reason::Damage(Damage::Chunk { chunk: 0, .. })),
                (Some(60), Reason::Damage(Damage::Size { .. })),
                (Some(50), Reason::Damage(Damage::Gone { .. })),
            ]
        ),
        "{skipped:?}"
    );
}

#[test]
fn manifests_that_are_not_ours_or_not_whole_are_passed_over() {
    let mut shelf = Shelves::default();
    let (damaged, foreign) = (shelf.add(1, 30), Bytes([8; 32]));
    shelf.add(1, 10);
    shelf.manifests.get_mut(&damaged).unwrap()[40] ^= 1;
    let mut other = Manifest::decode(
        &shelf.manifests[&shelf
            .list()
            .unwrap()
            .into_iter()
            .find(|id| *id != damaged)
            .unwrap()],
    )
    .unwrap();
    other.origin.lineage = foreign;
    other.origin.step = 50;
    let bytes = other.encode().unwrap();
    shelf.manifests.insert(Manifest::digest(&bytes), bytes);
    let newer = String::from_utf8(other.encode().unwrap())
        .unwrap()
        .replacen("\"version\":1", "\"version\":2", 1);
    shelf
        .manifests
        .insert(Manifest::digest(newer.as_bytes()), newer.into_bytes());
    let (step, skipped) = shelf.newest().unwrap();
    assert_eq!((step, skipped.len()), (Some(10), 3));
    let count = |wanted: fn(&Reason) -> bool| skipped.iter().filter(|s| wanted(&s.why)).count();
    assert_eq!(count(|why| matches!(why, Reason::Digest { .. })), 1);
    assert_eq!(
        count(|why| matches!(why, Reason::Foreign(id) if *id == Bytes([8; 32]))),
        1
    );
    assert_eq!(
        count(|why| matches!(why, Reason::Manifest(ManifestError::Version(2)))),
        1
    );
}

#[test]
fn a_store_that_does_not_answer_chooses_nothing() {
    let mut shelf = Shelves::default();
    shelf.add(1, 10);
    shelf.add(1, 20);
    shelf.silent.store(true, Ordering::Relaxed);
    assert!(matches!(
        shelf.newest(),
        Err(SearchError::Load { step: 20, .. })
    ));
}
