//! Files that lie nearby, in front of where they belong.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::hex::Bytes;
use crate::manifest::{DataFile, Manifest};
use crate::source::{Readers, Source};
use crate::sum::{CHUNK, crc};

/// A checkpoint's files where they belong, and copies of some of them nearby: a chunk whose copy is
/// there, and is what the manifest says, comes from nearby.
///
/// Nothing nearby is trusted, and nothing that is wrong with it is an error: it may have been left by
/// a crash, a full disk, or another job of the same name.
#[derive(Debug)]
pub struct Nearby<N, F> {
    near: Option<N>,
    far: F,
    files: BTreeMap<String, DataFile>,
    from_near: AtomicU64,
}

impl<N: Source, F: Source> Nearby<N, F> {
    /// The files of this checkpoint, with the copies in `near`, if there is such a place.
    pub fn new(near: Option<N>, far: F, manifest: &Manifest) -> Self {
        let files = match near {
            Some(_) => (manifest.files.iter())
                .map(|file| (file.path.clone(), file.clone()))
                .collect(),
            None => BTreeMap::new(),
        };
        Self {
            near,
            far,
            files,
            from_near: AtomicU64::new(0),
        }
    }

    /// Bytes that came from nearby so far.
    pub fn from_near(&self) -> u64 {
        self.from_near.load(Ordering::Relaxed)
    }

    /// Whether the chunk that begins here was read from nearby, and is what it has to be.
    fn has_read(&self, path: &str, at: u64, into: &mut [u8], readers: Readers) -> bool {
        let (Some(near), Some(file)) = (&self.near, self.files.get(path)) else {
            return false;
        };
        let whole = at.is_multiple_of(CHUNK)
            && into.len() as u64 == file.bytes.saturating_sub(at).min(CHUNK);
        let expected = usize::try_from(at / CHUNK).ok();
        let Some(expected) = expected
            .and_then(|at| file.chunks.get(at))
            .filter(|_| whole)
        else {
            return false;
        };
        near.read(path, at, into, readers).is_ok() && Bytes(crc(into).to_be_bytes()) == *expected
    }
}

impl<N: Source, F: Source> Source for Nearby<N, F> {
    /// Where all of it is nearby nobody else is asked.
    fn size(&self, path: &str) -> io::Result<u64> {
        if let (Some(near), Some(file)) = (&self.near, self.files.get(path))
            && near.size(path).is_ok_and(|bytes| bytes == file.bytes)
        {
            return Ok(file.bytes);
        }
        self.far.size(path)
    }

    fn read(&self, path: &str, at: u64, into: &mut [u8], readers: Readers) -> io::Result<()> {
        if self.has_read(path, at, into, readers) {
            let bytes = into.len() as u64;
            self.from_near.fetch_add(bytes, Ordering::Relaxed);
            return Ok(());
        }
        self.far.read(path, at, into, readers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::tests::{Memory, manifest};
    use crate::testing::ramp;
    use crate::verify::{Depth, verify};

    fn memory(path: &str, bytes: &[u8]) -> Memory {
        let mut memory = Memory::default();
        memory.files.insert(path.to_owned(), bytes.to_vec());
        memory
    }

    #[test]
    fn what_is_nearby_and_right_is_not_fetched_and_the_rest_is() {
        let bytes = ramp(&[2 * CHUNK + 100], 1);
        let far = memory("data/f", &bytes);
        let manifest = manifest(Vec::new(), &far.files);
        let mut flipped = bytes.clone();
        flipped[CHUNK as usize + 7] ^= 1;
        for (near, from_near) in [
            (memory("data/f", &bytes), bytes.len() as u64),
            (memory("data/f", &flipped), CHUNK + 100),
            // Cut short: its chunks may do, and its length is not believed.
            (memory("data/f", &bytes[..CHUNK as usize + 5]), CHUNK),
            (memory("data/f", b""), 0),
            (memory("data/other", &bytes), 0),
        ] {
            let far = memory("data/f", &bytes);
            let nearby = Nearby::new(Some(near), far, &manifest);
            verify(&manifest, &nearby, Depth::Everything { threads: 2 }).unwrap();
            assert_eq!(nearby.from_near(), from_near);
            // Not a chunk: nobody could tell whether it is right.
            let mut some = [0; 5];
            nearby.read("data/f", 3, &mut some, Readers::One).unwrap();
            assert_eq!(some, bytes[3..8]);
            assert_eq!(nearby.from_near(), from_near);
        }
        let far = memory("data/f", &bytes);
        let alone = Nearby::new(None::<Memory>, far, &manifest);
        verify(&manifest, &alone, Depth::Everything { threads: 2 }).unwrap();
        assert_eq!(alone.from_near(), 0);
    }

    #[test]
    fn a_checkpoint_that_is_whole_nearby_asks_nobody() {
        let bytes = ramp(&[CHUNK + 9], 1);
        let manifest = manifest(Vec::new(), &memory("data/f", &bytes).files);
        let near = memory("data/f", &bytes);
        let nearby = Nearby::new(Some(near), Memory::default(), &manifest);
        verify(&manifest, &nearby, Depth::Everything { threads: 1 }).unwrap();
        let missing = Nearby::new(Some(Memory::default()), Memory::default(), &manifest);
        let error = verify(&manifest, &missing, Depth::Everything { threads: 1 });
        assert!(error.is_err());
    }
}
