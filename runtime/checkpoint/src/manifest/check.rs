//! Conditions on a manifest beyond its form.

use crate::manifest::codec::{MAX_MANIFEST, VERSION};
use crate::manifest::{DataFile, Manifest, Placed};
use crate::shard::{LayoutError, MAX_NAME, check_name};
use crate::slice::{Slice, SliceError, tile};
use crate::sum::{CHUNK, chunks_of};

/// The most bytes of a data file's path.
const MAX_PATH: usize = 512;

/// Why bytes are not a manifest that can be used. None of these goes away by trying again.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    #[error("{0} bytes, the limit is {MAX_MANIFEST}")]
    TooLong(usize),
    #[error("not JSON of this form: {0}")]
    Json(#[source] serde_json::Error),
    #[error("its format is `{0}`: not a checkpoint of Muster")]
    Format(String),
    #[error(
        "version {0}, this build reads version {VERSION}: use the Muster version that wrote it, or a newer one"
    )]
    Version(u64),
    #[error("not in canonical form: it was edited, or written by something else")]
    NotCanonical,
    #[error("chunks of {0} bytes; version {VERSION} has {CHUNK}")]
    Chunk(u64),
    #[error("`{0}` is missing, or not as the plan has it: some rank saved by another plan")]
    Unplanned(String),
    #[error("`{0}` is not in ascending order, or there twice")]
    Order(String),
    #[error("the path `{0}` is not one that Muster writes")]
    Path(String),
    #[error(transparent)]
    Name(LayoutError),
    #[error("file `{path}` has {bytes} bytes and {chunks} checksums of chunks")]
    Chunks {
        path: String,
        bytes: u64,
        chunks: usize,
    },
    #[error("tensor `{name}`: {why}")]
    Slices {
        name: String,
        #[source]
        why: SliceError,
    },
    #[error(
        "slice {slice} of `{name}` has {bytes} bytes at {at} of file {file}, which is not its size or not within the file"
    )]
    Range {
        name: String,
        slice: Box<Slice>,
        file: u32,
        at: u64,
        bytes: u64,
    },
    #[error("file `{path}`: two slices lie on byte {at}")]
    Shared { path: String, at: u64 },
}

/// That a path is relative, and made of letters, digits, `-`, `_` and dots that begin no component.
///
/// # Errors
/// [`ManifestError::Path`].
pub fn check_path(path: &str) -> Result<(), ManifestError> {
    let plain = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.');
    let component =
        |part: &str| !part.is_empty() && !part.starts_with('.') && part.bytes().all(plain);
    if path.len() > MAX_PATH || !path.split('/').all(component) {
        return Err(ManifestError::Path(path.chars().take(100).collect()));
    }
    Ok(())
}

fn ascending<'a>(names: impl Iterator<Item = &'a str>) -> Result<(), ManifestError> {
    let mut before: Option<&str> = None;
    for name in names {
        if before.is_some_and(|before| before >= name) {
            return Err(ManifestError::Order(name.chars().take(100).collect()));
        }
        before = Some(name);
    }
    Ok(())
}

impl Manifest {
    /// That it is consistent: names in order, slices that cover their tensors, byte ranges within
    /// their files and apart from each other.
    ///
    /// # Errors
    /// The first thing that is not.
    pub fn check(&self) -> Result<(), ManifestError> {
        if self.chunk != CHUNK {
            return Err(ManifestError::Chunk(self.chunk));
        }
        if self.origin.job.len() > MAX_NAME {
            return Err(ManifestError::Name(LayoutError::Name(
                "the job's".to_owned(),
            )));
        }
        ascending(self.files.iter().map(|file| file.path.as_str()))?;
        ascending(self.tensors.iter().map(|tensor| tensor.name.as_str()))?;
        ascending(self.blobs.iter().map(|blob| blob.name.as_str()))?;
        for blob in &self.blobs {
            check_name(&blob.name).map_err(ManifestError::Name)?;
        }
        self.files.iter().try_for_each(check_file)?;
        let mut ranges = Vec::new();
        for tensor in &self.tensors {
            check_name(&tensor.name).map_err(ManifestError::Name)?;
            let slices: Vec<&Slice> = tensor.slices.iter().map(|placed| &placed.slice).collect();
            tile(&tensor.shape, &slices).map_err(|why| ManifestError::Slices {
                name: tensor.name.clone(),
                why,
            })?;
            if !slices.is_sorted() {
                return Err(ManifestError::Order(tensor.name.clone()));
            }
            for placed in &tensor.slices {
                if !self.fits(placed, tensor.dtype.size()) {
                    return Err(ManifestError::Range {
                        name: tensor.name.clone(),
                        slice: Box::new(placed.slice.clone()),
                        file: placed.file,
                        at: placed.at,
                        bytes: placed.bytes,
                    });
                }
                if placed.bytes > 0 {
                    ranges.push((placed.file, placed.at, placed.bytes));
                }
            }
        }
        ranges.sort_unstable();
        for pair in ranges.windows(2) {
            if let [(file, at, bytes), (next, begin, _)] = pair
                && file == next
                && at + bytes > *begin
            {
                return Err(ManifestError::Shared {
                    path: self.files[*file as usize].path.clone(),
                    at: *begin,
                });
            }
        }
        Ok(())
    }

    fn fits(&self, placed: &Placed, size: u64) -> bool {
        let file = usize::try_from(placed.file)
            .ok()
            .and_then(|file| self.files.get(file));
        let end = placed.at.checked_add(placed.bytes);
        placed
            .slice
            .elements()
            .is_ok_and(|count| count * size == placed.bytes)
            && file.is_some_and(|file| end.is_some_and(|end| end <= file.bytes))
    }
}

fn check_file(file: &DataFile) -> Result<(), ManifestError> {
    check_path(&file.path)?;
    if chunks_of(file.bytes) != file.chunks.len() as u64 {
        return Err(ManifestError::Chunks {
            path: file.path.clone(),
            bytes: file.bytes,
            chunks: file.chunks.len(),
        });
    }
    Ok(())
}
