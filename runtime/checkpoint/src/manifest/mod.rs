//! The manifest: everything about a checkpoint but its tensors' bytes.
//!
//! JSON in one canonical form: the same checkpoint is the same bytes, so the BLAKE3 digest of the
//! bytes names it, in the file's name and in the commit's record. Reading is strict: what is not
//! canonical, not known, or not consistent is refused, by name.

mod check;
mod codec;

use serde::{Deserialize, Serialize};

use crate::Dtype;
use crate::hex::{self, Bytes, Id};
use crate::slice::{Slice, dims};

pub use check::{ManifestError, check_path};
pub use codec::{MAX_MANIFEST, VERSION};

/// A checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Origin of this state.
    pub origin: Origin,
    /// Bytes of a chunk: [`crate::sum::CHUNK`].
    pub chunk: u64,
    /// Ascending by path, each once.
    pub files: Vec<DataFile>,
    /// Ascending by name, each once.
    pub tensors: Vec<Tensor>,
    /// Ascending by name, each once.
    pub blobs: Vec<Blob>,
}

/// Job, generation and time of a checkpoint's state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// The job's id, for people.
    pub job: String,
    /// Digest of the job's birth: checkpoints of another lineage are never restored.
    pub lineage: Id,
    /// Digest of the generation that saved it.
    pub generation: Id,
    /// That generation's number.
    pub number: u64,
    /// Which attempt of this generation to save this step; from 0.
    pub attempt: u32,
    /// Steps done before this state.
    pub step: u64,
    /// Ranks that saved it.
    pub world: u32,
    /// When, in seconds since 1970, by the clock of the node that wrote it: for people.
    pub saved_at: u64,
}

/// A data file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataFile {
    /// Relative to the checkpoint directory, `/` between components.
    pub path: String,
    /// Its length.
    pub bytes: u64,
    /// [`crate::sum::file_digest`].
    pub digest: Bytes<16>,
    /// CRC-64/NVME of each chunk, big-endian.
    pub chunks: Vec<Bytes<8>>,
}

/// A tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tensor {
    pub name: String,
    pub dtype: Dtype,
    /// Of the whole tensor, over all ranks.
    #[serde(deserialize_with = "dims")]
    pub shape: Vec<u64>,
    /// Ascending; together they cover the tensor, each element once.
    pub slices: Vec<Placed>,
}

/// Where a slice of a tensor lies, its elements in C order, little-endian.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placed {
    pub slice: Slice,
    /// Index into the manifest's files.
    pub file: u32,
    /// Where it begins in that file.
    pub at: u64,
    /// Its length.
    pub bytes: u64,
}

/// State that is not a tensor: sampler, random generators, schedule, loss scaler, metrics.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Blob {
    pub name: String,
    #[serde(with = "hex::blob")]
    pub data: Vec<u8>,
}

/// Name of the blob with a checkpoint's metrics: a JSON object of numbers by name. Retention keeps the
/// best by one of them.
pub const METRICS: &str = "metrics";

impl Blob {
    /// Metrics by name. Values that are not finite are left out.
    pub fn metrics<'a>(values: impl IntoIterator<Item = (&'a str, f64)>) -> Blob {
        let finite = values.into_iter().filter(|(_, value)| value.is_finite());
        let all: serde_json::Map<String, serde_json::Value> = finite
            .map(|(name, value)| (name.to_owned(), value.into()))
            .collect();
        Blob {
            name: METRICS.to_owned(),
            data: serde_json::Value::Object(all).to_string().into_bytes(),
        }
    }
}

impl Manifest {
    /// A metric that was saved with [`Blob::metrics`].
    pub fn metric(&self, name: &str) -> Option<f64> {
        let all: serde_json::Value = serde_json::from_slice(self.blob(METRICS)?).ok()?;
        all.get(name)?.as_f64()
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        let at = self
            .tensors
            .binary_search_by(|tensor| tensor.name.as_str().cmp(name));
        at.ok().and_then(|at| self.tensors.get(at))
    }

    /// The blob of this name.
    pub fn blob(&self, name: &str) -> Option<&[u8]> {
        let at = self
            .blobs
            .binary_search_by(|blob| blob.name.as_str().cmp(name));
        at.ok()
            .and_then(|at| self.blobs.get(at))
            .map(|blob| &*blob.data)
    }

    /// The tensors whose name matches any of these patterns: `*` is any number of characters, dots
    /// among them, `?` is one.
    pub fn matching<'a>(&'a self, patterns: &'a [&'a str]) -> impl Iterator<Item = &'a Tensor> {
        self.tensors.iter().filter(|tensor| {
            patterns
                .iter()
                .any(|pattern| crate::glob::matches(pattern, &tensor.name))
        })
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files
            .iter()
            .fold(0, |sum, file| sum.saturating_add(file.bytes))
    }
}

#[cfg(test)]
mod tests;
