//! The checkpoint that a generation begins with.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use muster_checkpoint::dir::Dir;
use muster_checkpoint::hex::Id;
use muster_checkpoint::load::{LoadError, Loaded, Want, load};
use muster_checkpoint::manifest::{Manifest, ManifestError};
use muster_checkpoint::newest::Shelf;
use muster_checkpoint::source::Directory;
use muster_protocol::control::slots::{RESTORE_ENV, STORE_ENV};

/// Threads that read and verify.
const THREADS: usize = 4;

/// A committed checkpoint, open for reading.
#[derive(Debug)]
pub struct Restore {
    digest: Id,
    manifest: Manifest,
    source: Directory,
}

/// Why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    #[error(
        "{RESTORE_ENV} is {value:?}, which is not the digest of a manifest; unset it, or start the worker with `muster run`"
    )]
    Digest { value: String },
    #[error("{RESTORE_ENV} is set and {STORE_ENV} is not; start the worker with `muster run`")]
    NoStore,
    #[error("cannot open the checkpoints in {path}: check that the store is mounted on this node")]
    Store {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot read the manifest {digest}: check that the store is mounted on this node")]
    Manifest {
        digest: Id,
        #[source]
        source: io::Error,
    },
    #[error("the manifest {digest} is damaged: its digest is {found}")]
    Damaged { digest: Id, found: Id },
    #[error("the manifest {digest} cannot be used")]
    Unusable {
        digest: Id,
        #[source]
        source: Box<ManifestError>,
    },
}

impl Restore {
    /// What this worker's generation begins with; `None` when there is nothing, or the worker was not
    /// started by Muster. All ranks of a generation are told the same.
    ///
    /// # Errors
    /// It is there, and cannot be used.
    pub fn from_env() -> Result<Option<Restore>, RestoreError> {
        Self::from_lookup(|name| std::env::var_os(name))
    }

    fn from_lookup(
        get: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Option<Restore>, RestoreError> {
        let Some(value) = get(RESTORE_ENV) else {
            return Ok(None);
        };
        let value = value.to_string_lossy().into_owned();
        let Some(digest) = Id::parse(&value) else {
            return Err(RestoreError::Digest { value });
        };
        let path = get(STORE_ENV).ok_or(RestoreError::NoStore)?;
        Self::open(Path::new(&path), digest).map(Some)
    }

    /// Opens the checkpoint of this manifest, in a job's folder of a store.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn open(path: &Path, digest: Id) -> Result<Restore, RestoreError> {
        let dir = Dir::open(path).map_err(|source| RestoreError::Store {
            path: path.to_owned(),
            source,
        })?;
        let source = Directory::new(dir, true);
        let bytes = (source.manifest(digest))
            .map_err(|source| RestoreError::Manifest { digest, source })?;
        let found = Manifest::digest(&bytes);
        if found != digest {
            return Err(RestoreError::Damaged { digest, found });
        }
        let manifest = (Manifest::decode(&bytes)).map_err(|error| RestoreError::Unusable {
            digest,
            source: Box::new(error),
        })?;
        Ok(Restore {
            digest,
            manifest,
            source,
        })
    }

    /// The digest of its manifest, which names it.
    pub fn digest(&self) -> Id {
        self.digest
    }

    /// The step that its state has not begun yet.
    pub fn step(&self) -> u64 {
        self.manifest.origin.step
    }

    /// Ranks that saved it.
    pub fn world(&self) -> u32 {
        self.manifest.origin.world
    }

    /// Everything about it.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// State that is no tensor.
    pub fn blob(&self, name: &str) -> Option<&[u8]> {
        self.manifest.blob(name)
    }

    /// Fills these slices, in any slicing, reading no more than they need and verifying all of that.
    ///
    /// # Errors
    /// They do not fit what was saved, or it is damaged: [`LoadError::damage`] tells which.
    pub fn load(&self, wants: &mut [Want<'_>]) -> Result<Loaded, LoadError> {
        load(&self.manifest, &self.source, wants, THREADS)
    }
}
