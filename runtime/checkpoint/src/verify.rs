//! Whether a checkpoint is whole.

use crate::load::{Damage, LoadError, buffer, check_sizes, read_chunk};
use crate::manifest::Manifest;
use crate::pool;
use crate::source::Source;
use crate::sum::{ChunkSum, file_digest};

/// How closely to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// That all files are there and have the right length. Cheap; loading verifies the rest.
    Sizes,
    /// Every byte, by this many threads.
    Everything { threads: usize },
}

/// That the checkpoint's files are what its manifest says.
///
/// # Errors
/// The first damage found, or what keeps it from being looked for.
pub fn verify(manifest: &Manifest, source: &impl Source, depth: Depth) -> Result<(), LoadError> {
    manifest
        .check()
        .map_err(|error| LoadError::Manifest(Box::new(error)))?;
    check_sizes(manifest, source, 0..manifest.files.len())?;
    let Depth::Everything { threads } = depth else {
        return Ok(());
    };
    for (index, file) in manifest.files.iter().enumerate() {
        let sums = pool::each(threads, file.chunks.len(), buffer, |buffer, chunk| {
            read_chunk(manifest, source, index, chunk as u64, buffer).map(ChunkSum::of)
        })?;
        if file_digest(&sums) != file.digest {
            return Err(Damage::Digest {
                path: file.path.clone(),
            }
            .into());
        }
    }
    Ok(())
}
