//! The manifest as bytes.
//!
//! ```json
//! {"format":"muster-checkpoint","version":1,"body":{"origin":…,"chunk":4194304,"files":[…],"tensors":[…],"blobs":[…]}}
//! ```

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use crate::hex::{Bytes, Id};
use crate::manifest::{Manifest, ManifestError};

/// The version that this build writes, and the only one that it reads.
pub const VERSION: u32 = 1;

/// The most bytes of a manifest. 16 bytes of it are one chunk of 4 MiB, so this is far beyond any
/// checkpoint whose tensors are not tiny.
pub const MAX_MANIFEST: usize = 256 << 20;

const FORMAT: &str = "muster-checkpoint";

/// Borrowed for writing, owned for reading.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope<F, B> {
    format: F,
    version: u32,
    body: B,
}

/// Fields of every version.
#[derive(Deserialize)]
struct Probe {
    format: String,
    version: u64,
    #[serde(rename = "body")]
    _body: Option<IgnoredAny>,
}

impl Manifest {
    /// As bytes, after a [`Self::check`].
    ///
    /// # Errors
    /// It is inconsistent, or too long.
    pub fn encode(&self) -> Result<Vec<u8>, ManifestError> {
        self.check()?;
        let bytes = self.bytes_unchecked()?;
        if bytes.len() > MAX_MANIFEST {
            return Err(ManifestError::TooLong(bytes.len()));
        }
        Ok(bytes)
    }

    fn bytes_unchecked(&self) -> Result<Vec<u8>, ManifestError> {
        serde_json::to_vec(&Envelope {
            format: FORMAT,
            version: VERSION,
            body: self,
        })
        .map_err(ManifestError::Json)
    }

    /// From bytes. Its allocations are at most proportional to their number.
    ///
    /// # Errors
    /// Not a manifest, of another version, inconsistent, or not in the canonical form.
    pub fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        if bytes.len() > MAX_MANIFEST {
            return Err(ManifestError::TooLong(bytes.len()));
        }
        let probe: Probe = serde_json::from_slice(bytes).map_err(ManifestError::Json)?;
        if probe.format != FORMAT {
            let found = probe.format.chars().take(100).collect();
            return Err(ManifestError::Format(found));
        }
        if probe.version != u64::from(VERSION) {
            return Err(ManifestError::Version(probe.version));
        }
        let Envelope::<String, Self> { body, .. } =
            serde_json::from_slice(bytes).map_err(ManifestError::Json)?;
        body.check()?;
        if body.bytes_unchecked()? != bytes {
            return Err(ManifestError::NotCanonical);
        }
        Ok(body)
    }

    /// BLAKE3 of these bytes: their name in the manifest's file name and in the commit's record.
    pub fn digest(bytes: &[u8]) -> Id {
        Bytes(*blake3::hash(bytes).as_bytes())
    }
}
