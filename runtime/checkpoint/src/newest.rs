//! The newest checkpoint that can be used, and why no newer one.
//!
//! For readers that have no log: [`newest`] takes what manifests there are. A job begins with what its
//! log committed last.

use std::io;

use rustix::io::Errno;

use crate::hex::Id;
use crate::load::LoadError;
use crate::manifest::{Manifest, ManifestError};
use crate::source::Source;

/// Where manifests are found, beside the data that they speak of.
pub trait Shelf: Source {
    /// The digests by which manifests are named, in any order.
    ///
    /// # Errors
    /// That cannot be told: no checkpoint is chosen then.
    fn list(&self) -> io::Result<Vec<Id>>;

    /// The manifest of this name, as it lies there.
    ///
    /// # Errors
    /// As [`Source::read`].
    fn manifest(&self, digest: Id) -> io::Result<Vec<u8>>;
}

/// A checkpoint that was accepted, and those passed over on the way to it. [`newest`] cannot know the
/// age of those whose manifests it cannot use: they come first.
#[derive(Debug)]
pub struct Found<T> {
    pub chosen: Option<Chosen<T>>,
    pub skipped: Vec<Skipped>,
}

/// The checkpoint that was accepted.
#[derive(Debug)]
pub struct Chosen<T> {
    pub digest: Id,
    pub manifest: Manifest,
    /// The result of accepting it.
    pub value: T,
}

/// A checkpoint that was passed over.
#[derive(Debug)]
pub struct Skipped {
    pub digest: Id,
    /// Its step, if its manifest could be read.
    pub step: Option<u64>,
    pub why: Reason,
}

/// Why a checkpoint was passed over.
#[derive(Debug, thiserror::Error)]
pub enum Reason {
    #[error("its manifest is not there")]
    Gone,
    #[error("this node gets an input/output error (EIO) when it reads its manifest")]
    Disk,
    #[error("its manifest is damaged: its digest is {found}")]
    Digest { found: Id },
    #[error("its manifest cannot be used: {0}")]
    Manifest(#[source] ManifestError),
    #[error("it is another job's, of lineage {0}")]
    Foreign(Id),
    #[error(transparent)]
    Damage(crate::load::Damage),
}

/// Why none could be chosen. Choosing an older one instead would lose steps that may be there.
#[derive(Debug, thiserror::Error)]
pub enum SearchError {
    #[error("cannot list the checkpoints: check that the store is mounted and answers")]
    List(#[source] io::Error),
    #[error("cannot read the manifest {digest}: check that the store is mounted and answers")]
    Manifest {
        digest: Id,
        #[source]
        source: io::Error,
    },
    #[error("checkpoint {digest} of step {step} was neither loaded nor found damaged")]
    Load {
        digest: Id,
        step: u64,
        #[source]
        source: Box<LoadError>,
    },
}

/// Walks from the newest manifest back until `accept` succeeds. Newer is: a higher generation, then
/// more steps, then a later attempt; at last the digest, so that all agree.
///
/// # Errors
/// Something is neither whole nor found damaged.
pub fn newest<T>(
    shelf: &impl Shelf,
    lineage: Id,
    mut accept: impl FnMut(&Manifest) -> Result<T, LoadError>,
) -> Result<Found<T>, SearchError> {
    let mut skipped = Vec::new();
    let mut good = Vec::new();
    let mut listed = shelf.list().map_err(SearchError::List)?;
    listed.sort_unstable();
    for digest in listed {
        match read(shelf, lineage, digest)? {
            Ok(manifest) => {
                let origin = &manifest.origin;
                good.push((
                    (origin.number, origin.step, origin.attempt, digest),
                    manifest,
                ));
            }
            Err(reason) => skipped.push(reason),
        }
    }
    good.sort_by(|(a, _), (b, _)| b.cmp(a));
    for ((.., digest), manifest) in good {
        let step = manifest.origin.step;
        match accept(&manifest) {
            Ok(value) => {
                let chosen = Some(Chosen {
                    digest,
                    manifest,
                    value,
                });
                return Ok(Found { chosen, skipped });
            }
            Err(LoadError::Damage(damage)) => skipped.push(Skipped {
                digest,
                step: Some(step),
                why: Reason::Damage(damage),
            }),
            Err(error) => {
                let source = Box::new(error);
                return Err(SearchError::Load {
                    digest,
                    step,
                    source,
                });
            }
        }
    }
    Ok(Found {
        chosen: None,
        skipped,
    })
}

/// A manifest that is what its name says, of this lineage; or why it is passed over.
fn read(
    shelf: &impl Shelf,
    lineage: Id,
    digest: Id,
) -> Result<Result<Manifest, Skipped>, SearchError> {
    let skip = |step, why| Ok(Err(Skipped { digest, step, why }));
    let bytes = match shelf.manifest(digest) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return skip(None, Reason::Gone),
        Err(error) if error.raw_os_error() == Some(Errno::IO.raw_os_error()) => {
            return skip(None, Reason::Disk);
        }
        Err(source) => return Err(SearchError::Manifest { digest, source }),
    };
    let found = Manifest::digest(&bytes);
    if found != digest {
        return skip(None, Reason::Digest { found });
    }
    match Manifest::decode(&bytes) {
        Ok(manifest) if manifest.origin.lineage == lineage => Ok(Ok(manifest)),
        Ok(manifest) => skip(
            Some(manifest.origin.step),
            Reason::Foreign(manifest.origin.lineage),
        ),
        Err(error) => skip(None, Reason::Manifest(error)),
    }
}

#[cfg(test)]
mod tests;
