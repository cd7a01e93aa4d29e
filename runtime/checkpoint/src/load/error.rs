//! Why a checkpoint could not be loaded, and whether an older one is to be tried.

use std::io;

use crate::Dtype;
use crate::hex::Bytes;
use crate::manifest::ManifestError;
use crate::slice::SliceError;
use crate::slot::FarError;

/// A load failed. The wants' memory is undefined.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Saved data is missing or has changed: restore it from a copy, or load an older one.
    #[error(transparent)]
    Damage(#[from] Damage),
    #[error("the manifest: {0}")]
    Manifest(#[source] Box<ManifestError>),
    #[error(
        "the checkpoint has no tensor `{name}`: was the model changed since? Load only what both have"
    )]
    Missing { name: String },
    #[error(
        "`{name}` was saved as {} {:?}, and is wanted as {} {:?}: was the model changed since?",
        saved.0, saved.1, wanted.0, wanted.1
    )]
    Differs {
        name: String,
        saved: (Dtype, Vec<u64>),
        wanted: (Dtype, Vec<u64>),
    },
    #[error("of `{name}`: {why}")]
    Slice {
        name: String,
        #[source]
        why: SliceError,
    },
    #[error("for `{name}` {given} bytes of memory were given, the slice has {slice}")]
    Buffer {
        name: String,
        slice: u64,
        given: u64,
    },
    #[error("no memory to read into")]
    Memory(#[source] io::Error),
    /// The watching process had it end.
    #[error("it was stopped before its end")]
    Stopped,
    #[error("what was read could not be taken to the memory that it was wanted in")]
    Far(#[source] FarError),
    /// Whether the data is damaged is not known.
    #[error(
        "cannot read {path}: check that the store is mounted and answers, and that the job's user may read it"
    )]
    Unreadable {
        path: String,
        #[source]
        source: io::Error,
    },
}

/// How a data file is not what the manifest says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    #[error("{path} is not there")]
    Gone { path: String },
    #[error("{path} has {found} bytes, {expected} were written")]
    Size {
        path: String,
        expected: u64,
        found: u64,
    },
    #[error("{path} ends before chunk at byte {at} does")]
    Cut { path: String, at: u64 },
    #[error(
        "{path} is damaged in chunk {chunk} (bytes {begin} to {end}, with {}): its checksum is {found}, {expected} was written",
        of(tensors)
    )]
    Chunk {
        path: String,
        chunk: u64,
        begin: u64,
        end: u64,
        /// Tensors that have bytes there; at most 8 are named.
        tensors: Vec<String>,
        expected: Bytes<8>,
        found: Bytes<8>,
    },
    #[error("{path}: its chunks are right, its digest is not")]
    Digest { path: String },
    /// No word about the checkpoint: on another node it may be whole ([`is_certain`](Self::is_certain)).
    #[error(
        "this node gets an input/output error (EIO) when it reads {path}: its disk or mount fails, and the checkpoint may be whole; look for its errors in the kernel's log, or leave this node out"
    )]
    Disk { path: String },
}

impl Damage {
    /// Whether the checkpoint is damaged for everybody. An error of the disk is the trouble of whoever
    /// reads from it.
    pub fn is_certain(&self) -> bool {
        !matches!(self, Self::Disk { .. })
    }
}

fn of(tensors: &[String]) -> String {
    match tensors {
        [] => "no tensor".to_owned(),
        some => format!("`{}`", some.join("`, `")),
    }
}

impl LoadError {
    /// Error for a failed read: a file that is gone, or that the disk has lost, is damage; a store
    /// that does not answer is not.
    pub(crate) fn reading(path: &str, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::NotFound => Damage::Gone { path }.into(),
            _ if source.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error()) => {
                Damage::Disk { path }.into()
            }
            _ => Self::Unreadable { path, source },
        }
    }

    /// The damage, if that is what it is: an older checkpoint is the answer. To anything else it is
    /// not: the caller asked wrongly, or nobody can tell yet.
    pub fn damage(&self) -> Option<&Damage> {
        match self {
            Self::Damage(damage) => Some(damage),
            _ => None,
        }
    }
}
