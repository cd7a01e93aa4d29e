//! Whether a checkpoint is whole.

use std::ops::ControlFlow;

use crate::load::{Damage, LoadError, buffer, check_sizes, read_chunk};
use crate::manifest::Manifest;
use crate::pool;
use crate::source::{Readers, Source};
use crate::sum::{CHUNK, ChunkSum, file_digest};

/// How closely to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// That all files are there and have the right length. Cheap; loading verifies the rest.
    Sizes,
    /// Every byte, by this many threads.
    Everything { threads: usize },
}

/// A file of a checkpoint, or a chunk of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spot {
    /// Its place in the manifest.
    pub file: usize,
    pub chunk: Option<u64>,
}

impl Spot {
    /// The part of this checkpoint that a text names, as [`Damage`] words it: where to look first. None where it names
    /// nothing.
    pub fn named(manifest: &Manifest, text: &str) -> Option<Spot> {
        let files = manifest.files.iter().enumerate();
        let named = files.filter(|(_, file)| text.contains(&file.path));
        let (file, of) = named.max_by_key(|(_, file)| file.path.len())?;
        let (_, rest) = text.split_once(&of.path)?;
        let number = |before: &str| -> Option<u64> {
            let (_, behind) = rest.split_once(before)?;
            let digits = behind.find(|c: char| !c.is_ascii_digit());
            behind.get(..digits.unwrap_or(behind.len()))?.parse().ok()
        };
        let cut = || Some(number("chunk at byte ")? / CHUNK);
        let chunk = number("in chunk ").or_else(cut);
        let chunk = chunk.filter(|chunk| (*chunk as usize) < of.chunks.len());
        Some(Spot { file, chunk })
    }
}

/// How far [`verify_watched`] is, for who may end it: told after each file that was looked at (1) and each chunk that
/// was read (its bytes). By several threads.
pub type GoOn<'a> = &'a (dyn Fn(u64) -> ControlFlow<()> + Sync);

/// That the checkpoint's files are what its manifest says.
///
/// # Errors
/// The first damage found, or what keeps it from being looked for.
pub fn verify(manifest: &Manifest, source: &impl Source, depth: Depth) -> Result<(), LoadError> {
    verify_watched(
        manifest,
        source,
        depth,
        None,
        &|_| ControlFlow::Continue(()),
    )
}

/// As [`verify`], beginning with the spot, all bytes of which are read even where only the sizes of the others are
/// looked at.
///
/// # Errors
/// As [`verify`]; [`LoadError::Stopped`].
pub fn verify_watched(
    manifest: &Manifest,
    source: &impl Source,
    depth: Depth,
    first: Option<Spot>,
    go_on: GoOn<'_>,
) -> Result<(), LoadError> {
    manifest
        .check()
        .map_err(|error| LoadError::Manifest(Box::new(error)))?;
    let goes_on = |done: u64| match go_on(done) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(LoadError::Stopped),
    };
    let size = |index: usize| {
        check_sizes(manifest, source, std::iter::once(index))?;
        goes_on(1)
    };
    let read = |buffer: &mut crate::Pages, index: usize, chunk: u64| {
        let bytes = read_chunk(manifest, source, index, chunk, buffer, Readers::One)?;
        let (sum, count) = (ChunkSum::of(bytes), bytes.len() as u64);
        goes_on(count).map(|()| sum)
    };
    let whole = |index: usize, threads: usize| -> Result<(), LoadError> {
        let Some(file) = manifest.files.get(index) else {
            return Ok(());
        };
        let sums = pool::each(threads, file.chunks.len(), buffer, |buffer, chunk| {
            read(buffer, index, chunk as u64)
        })?;
        match file_digest(&sums) == file.digest {
            true => Ok(()),
            false => Err(Damage::Digest {
                path: file.path.clone(),
            }
            .into()),
        }
    };
    let threads = match depth {
        Depth::Sizes => 1,
        Depth::Everything { threads } => threads,
    };
    if let Some(Spot { file, chunk }) = first {
        size(file)?;
        match chunk {
            Some(chunk) => {
                read(&mut buffer()?, file, chunk)?;
            }
            None => whole(file, threads)?,
        }
    }
    (0..manifest.files.len()).try_for_each(size)?;
    if depth == Depth::Sizes {
        return Ok(());
    }
    // What was read first is not read again.
    let done = first.filter(|spot| spot.chunk.is_none()).map(|s| s.file);
    let mut rest = (0..manifest.files.len()).filter(|index| Some(*index) != done);
    rest.try_for_each(|index| whole(index, threads))
}

#[cfg(test)]
mod tests;
