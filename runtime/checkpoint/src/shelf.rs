//! Manifests in a place: `manifest/<digest>.json`, beside the data.

use std::fs::File;
use std::io::{self, Read};

use crate::dir::Dir;
use crate::hex::Id;
use crate::manifest::{MAX_MANIFEST, Manifest, ManifestError};
use crate::newest::Shelf;
use crate::persist::{Fault, PersistError};
use crate::place::Place;
use crate::source::Directory;

const MANIFESTS: &str = "manifest";
const SUFFIX: &str = ".json";

/// Why a manifest is not durable.
#[derive(Debug, thiserror::Error)]
pub enum PutError {
    #[error("the manifest is not one: {0}")]
    Manifest(#[source] ManifestError),
    #[error(
        "cannot make the directory for manifests durable: check the right to write beside the data"
    )]
    Directory(#[source] io::Error),
    #[error(transparent)]
    Persist(PersistError),
    #[error("there is another manifest of this name, {0}: it is damaged; remove it and save again")]
    Damaged(Id),
}

/// Writes the manifest durably; its digest, which names it. One that is there already is left.
///
/// # Errors
/// It is inconsistent, or cannot be written.
pub fn put(dir: &impl Place, manifest: &Manifest) -> Result<Id, PutError> {
    put_encoded(dir, &manifest.encode().map_err(PutError::Manifest)?)
}

/// The same of a manifest that is [encoded](Manifest::encode) already.
///
/// # Errors
/// It cannot be written.
pub fn put_encoded(dir: &impl Place, bytes: &[u8]) -> Result<Id, PutError> {
    let digest = Manifest::digest(bytes);
    let place = dir.make(MANIFESTS).map_err(PutError::Directory)?;
    match place.put(&format!("{digest}{SUFFIX}"), bytes) {
        Ok(()) => Ok(digest),
        Err(error) if matches!(error.fault, Fault::Exists) => Err(PutError::Damaged(digest)),
        Err(error) => Err(PutError::Persist(error)),
    }
}

fn read(dir: &Dir, digest: Id) -> io::Result<Vec<u8>> {
    let file = dir.open_file(&format!("{MANIFESTS}/{digest}{SUFFIX}"))?;
    let mut bytes = Vec::new();
    File::from(file)
        .take(MAX_MANIFEST as u64 + 1)
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

impl Shelf for Directory {
    fn list(&self) -> io::Result<Vec<Id>> {
        let names = match self.dir().enter(MANIFESTS) {
            Ok(place) => place.names()?,
            // Nothing was ever saved here.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        let id = |name: &String| Id::parse(name.strip_suffix(SUFFIX)?);
        Ok(names.iter().filter_map(id).collect())
    }

    fn manifest(&self, digest: Id) -> io::Result<Vec<u8>> {
        read(self.dir(), digest)
    }
}
