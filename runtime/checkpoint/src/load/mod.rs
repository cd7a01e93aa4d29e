//! Reading what a rank needs, of a checkpoint that any other world wrote.
//!
//! Only the chunks that hold something wanted are read, by several threads; each is verified before
//! anything of it is used.

mod error;
mod scatter;
mod sink;

use std::collections::BTreeMap;
use std::io;

use crate::hex::Bytes;
use crate::manifest::Manifest;
use crate::reshard::{Overlap, overlaps};
use crate::slice::Slice;
use crate::source::{Readers, Source};
use crate::sum::{CHUNK, crc};
use crate::{Dtype, Pages, pool};

pub use error::{Damage, LoadError};
use scatter::Targets;
pub use sink::{Part, Room, Sink};

/// A slice of a tensor, and the memory that it is to fill.
#[derive(Debug)]
pub struct Want<'a> {
    pub name: &'a str,
    /// Must be the saved one: nothing is converted.
    pub dtype: Dtype,
    /// The whole tensor's shape; must be the saved one.
    pub shape: &'a [u64],
    pub slice: Slice,
    /// Exactly the slice's bytes, in C order. After an error its content is undefined.
    pub into: &'a mut [u8],
}

/// The same with memory of any kind.
#[derive(Debug)]
pub struct Wanted<'a, M> {
    pub name: &'a str,
    pub dtype: Dtype,
    pub shape: &'a [u64],
    pub slice: Slice,
    pub into: M,
}

/// The threads and ranks that load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Team {
    /// Threads of this rank that read and verify.
    pub threads: usize,
    /// Ranks on this host that load at the same time, with this one: what all of them want is read from a disk once.
    pub ranks: u32,
}

impl Team {
    /// So many threads of the only rank here.
    pub fn alone(threads: usize) -> Team {
        Team { threads, ranks: 1 }
    }
}

/// Outcome of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// Bytes that were asked for.
    pub wanted: u64,
    /// Bytes that were read and verified for it.
    pub read: u64,
}

/// Fills all wants from the checkpoint.
///
/// # Errors
/// The wants do not fit the checkpoint, or something of it is damaged, missing or unreadable:
/// [`LoadError::damage`] tells which.
pub fn load(
    manifest: &Manifest,
    source: &impl Source,
    wants: &mut [Want<'_>],
    team: Team,
) -> Result<Loaded, LoadError> {
    let here = wants.iter_mut().map(|want| Wanted {
        name: want.name,
        dtype: want.dtype,
        shape: want.shape,
        slice: want.slice.clone(),
        into: Room::Here(&mut *want.into),
    });
    load_to(manifest, source, here.collect(), &(), team)
}

/// The same, where some wants are in memory that only `sink` can write to.
///
/// # Errors
/// As [`load`]; or [`LoadError::Far`].
pub fn load_to<S: Sink>(
    manifest: &Manifest,
    source: &impl Source,
    mut wants: Vec<Wanted<'_, Room<'_>>>,
    sink: &S,
    team: Team,
) -> Result<Loaded, LoadError> {
    // Threads write to the wants' memory on the strength of it.
    manifest
        .check()
        .map_err(|error| LoadError::Manifest(Box::new(error)))?;
    // For each chunk of each file the overlaps that it holds something of.
    let mut found: Vec<(usize, Overlap)> = Vec::new();
    for (index, want) in wants.iter().enumerate() {
        found.extend(overlaps_of(manifest, want)?.map(|overlap| (index, overlap)));
    }
    let mut chunks: BTreeMap<(u32, u64), Piece> = BTreeMap::new();
    for (at, (want, overlap)) in found.iter().enumerate() {
        let (begin, end) = overlap.span();
        for chunk in begin / CHUNK..end.div_ceil(CHUNK) {
            let (first, last) = (chunk * CHUNK, (chunk + 1) * CHUNK);
            let runs = overlap.within(first, last).map(|run| run.bytes);
            let bytes = runs.sum::<u64>();
            if bytes > 0 {
                let piece = chunks.entry((overlap.file, chunk)).or_default();
                piece.overlaps.push(at);
                piece.wanted += bytes;
                let want = &wants[*want];
                piece.by_all |= team.ranks > 1 && want.slice.is_whole(want.shape);
            }
        }
    }
    for placed in manifest.tensors.iter().flat_map(|tensor| &tensor.slices) {
        let (begin, end) = (placed.at, placed.at + placed.bytes);
        for chunk in begin / CHUNK..end.div_ceil(CHUNK) {
            if let Some(piece) = chunks.get_mut(&(placed.file, chunk)) {
                piece.held += end.min((chunk + 1) * CHUNK) - begin.max(chunk * CHUNK);
            }
        }
    }
    check_sizes(
        manifest,
        source,
        chunks.keys().map(|(file, _)| *file as usize),
    )?;

    let wanted = wants.iter().map(|want| want.into.bytes()).sum();
    let is_far = |want: &Wanted<'_, Room<'_>>| matches!(want.into, Room::Far(_));
    let far: Vec<bool> = wants.iter().map(is_far).collect();
    let targets = Targets::new(wants.iter_mut().map(|want| match &mut want.into {
        Room::Here(bytes) => &mut **bytes,
        Room::Far(_) => &mut [],
    }));
    let work: Vec<((u32, u64), Piece)> = chunks.into_iter().collect();
    let read = pool::each(
        team.threads,
        work.len(),
        || sink.buffer(),
        |buffer, at| {
            let ((file, chunk), piece) = &work[at];
            // What this rank does not want of it, another one does.
            let readers = match piece.by_all || piece.held > piece.wanted {
                true => Readers::Several,
                false => Readers::One,
            };
            let bytes =
                read_chunk(manifest, source, *file as usize, *chunk, buffer, readers)?.len();
            muster_fault::point("load.chunk");
            let begin = chunk * CHUNK;
            for (want, overlap) in piece.overlaps.iter().map(|at| &found[*at]) {
                for run in overlap.within(begin, begin + bytes as u64) {
                    // Within the chunk, which is in memory.
                    let part = Part {
                        at: (run.src - begin) as usize,
                        bytes: run.bytes as usize,
                    };
                    if far[*want] {
                        sink.put(*want, run.dst, buffer, part)?;
                    } else {
                        let src = &buffer[part.at..][..part.bytes];
                        targets.copy(*want, run.dst as usize, src);
                    }
                }
            }
            sink.flush(buffer)?;
            Ok(bytes as u64)
        },
    )?;
    Ok(Loaded {
        wanted,
        read: read.iter().sum(),
    })
}

/// The wanted part of a chunk.
#[derive(Default)]
struct Piece {
    overlaps: Vec<usize>,
    /// Bytes of it that are wanted, and all that are of tensors.
    wanted: u64,
    held: u64,
    /// It is wanted by the other ranks too: of a tensor that is not sharded.
    by_all: bool,
}

/// Memory for one chunk.
pub(crate) fn buffer() -> Result<Pages, LoadError> {
    Pages::new(CHUNK as usize).map_err(LoadError::Memory)
}

fn overlaps_of<'a>(
    manifest: &'a Manifest,
    want: &'a Wanted<'_, Room<'_>>,
) -> Result<impl Iterator<Item = Overlap> + 'a, LoadError> {
    let name = || want.name.to_owned();
    let Some(tensor) = manifest.tensor(want.name) else {
        return Err(LoadError::Missing { name: name() });
    };
    if tensor.dtype != want.dtype || tensor.shape != want.shape {
        return Err(LoadError::Differs {
            name: name(),
            saved: (tensor.dtype, tensor.shape.clone()),
            wanted: (want.dtype, want.shape.to_vec()),
        });
    }
    let count = want
        .slice
        .check(&tensor.shape)
        .map_err(|why| LoadError::Slice { name: name(), why })?;
    if want.into.bytes() != count * want.dtype.size() {
        return Err(LoadError::Buffer {
            name: name(),
            slice: count * want.dtype.size(),
            given: want.into.bytes(),
        });
    }
    Ok(overlaps(tensor, &want.slice))
}

/// That these files are as long as the manifest says.
pub(crate) fn check_sizes(
    manifest: &Manifest,
    source: &impl Source,
    files: impl Iterator<Item = usize>,
) -> Result<(), LoadError> {
    let mut before = None;
    for index in files {
        if before.replace(index) == Some(index) {
            continue;
        }
        let file = &manifest.files[index];
        match source.size(&file.path) {
            Ok(found) if found == file.bytes => {}
            Ok(found) => {
                let (path, expected) = (file.path.clone(), file.bytes);
                return Err(Damage::Size {
                    path,
                    expected,
                    found,
                }
                .into());
            }
            Err(error) => return Err(LoadError::reading(&file.path, error)),
        }
    }
    Ok(())
}

/// Reads and verifies a chunk.
pub(crate) fn read_chunk<'b>(
    manifest: &Manifest,
    source: &impl Source,
    index: usize,
    chunk: u64,
    buffer: &'b mut [u8],
    readers: Readers,
) -> Result<&'b [u8], LoadError> {
    let file = &manifest.files[index];
    let begin = chunk * CHUNK;
    let bytes = (file.bytes - begin).min(CHUNK) as usize;
    let buffer = &mut buffer[..bytes];
    let expected = file.chunks[chunk as usize];
    loop {
        if let Err(error) = source.read(&file.path, begin, buffer, readers) {
            return Err(match error.kind() {
                io::ErrorKind::UnexpectedEof => Damage::Cut {
                    path: file.path.clone(),
                    at: begin,
                }
                .into(),
                _ => LoadError::reading(&file.path, error),
            });
        }
        let found = Bytes(crc(buffer).to_be_bytes());
        if found == expected {
            break;
        }
        if source.refuse(&file.path, begin) {
            continue;
        }
        return Err(Damage::Chunk {
            path: file.path.clone(),
            chunk,
            begin,
            end: begin + bytes as u64,
            tensors: tensors_in(manifest, index, begin, begin + bytes as u64),
            expected,
            found,
        }
        .into());
    }
    Ok(buffer)
}

/// Names of tensors that have bytes in this range of a file; a few of them.
fn tensors_in(manifest: &Manifest, file: usize, begin: u64, end: u64) -> Vec<String> {
    (manifest.tensors.iter())
        .filter(|tensor| {
            tensor.slices.iter().any(|placed| {
                placed.file as usize == file && placed.at < end && placed.at + placed.bytes > begin
            })
        })
        .map(|tensor| tensor.name.clone())
        .take(8)
        .collect()
}

#[cfg(test)]
pub(crate) mod tests;
