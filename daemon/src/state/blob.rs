//! How a blob lies in its file: a header that tells a whole blob from a torn or foreign one.
//!
//! ```text
//! magic    8 bytes  "MUSTERST"
//! version  u32 little-endian
//! length   u64 little-endian, of the payload
//! checksum 32 bytes BLAKE3 of name, a zero byte, payload
//! payload
//! ```
//! The name is part of the checksum, so that a blob copied under another name is not taken for
//! that one. Bytes behind the payload are left over from an earlier, longer blob and mean nothing.

const MAGIC: [u8; 8] = *b"MUSTERST";
const VERSION: u32 = 1;
pub(super) const HEADER: usize = 8 + 4 + 8 + 32;

/// Why a file is no blob of ours. Nothing has been changed by finding out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BlobError {
    #[error("it does not begin with Muster's mark: it is empty, torn or foreign")]
    Magic,
    #[error(
        "it has format version {0}, this build knows version {VERSION}: run the Muster version that wrote it"
    )]
    Version(u32),
    #[error("it ends after {have} of {want} bytes")]
    Short { have: u64, want: u64 },
    #[error("its checksum does not match: it was damaged, or written under another name")]
    Checksum,
    #[error("this build cannot read what is in it")]
    Content,
}

fn checksum(name: &str, payload: &[u8]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(name.as_bytes());
    hasher.update(&[0]);
    hasher.update(payload);
    *hasher.finalize().as_bytes()
}

pub(super) fn wrap(name: &str, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER + payload.len());
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&(payload.len() as u64).to_le_bytes());
    out.extend_from_slice(&checksum(name, payload));
    out.extend_from_slice(payload);
    out
}

pub(super) fn unwrap(name: &str, file: &[u8]) -> Result<Vec<u8>, BlobError> {
    let (magic, rest) = file.split_first_chunk::<8>().ok_or(BlobError::Magic)?;
    if *magic != MAGIC {
        return Err(BlobError::Magic);
    }
    let short = BlobError::Short {
        have: file.len() as u64,
        want: HEADER as u64,
    };
    let (version, rest) = rest.split_first_chunk::<4>().ok_or(short.clone())?;
    let version = u32::from_le_bytes(*version);
    if version != VERSION {
        return Err(BlobError::Version(version));
    }
    let (length, rest) = rest.split_first_chunk::<8>().ok_or(short.clone())?;
    let length = u64::from_le_bytes(*length);
    let (sum, rest) = rest.split_first_chunk::<32>().ok_or(short)?;
    let payload = usize::try_from(length)
        .ok()
        .and_then(|n| rest.get(..n))
        .ok_or(BlobError::Short {
            have: file.len() as u64,
            want: length.saturating_add(HEADER as u64),
        })?;
    if checksum(name, payload) != *sum {
        return Err(BlobError::Checksum);
    }
    Ok(payload.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cut_and_every_flipped_bit_is_noticed() {
        let file = wrap("a", b"some payload");
        assert_eq!(unwrap("a", &file).unwrap(), b"some payload");
        for cut in 0..file.len() {
            assert!(unwrap("a", &file[..cut]).is_err(), "cut at {cut}");
        }
        for bit in 0..file.len() * 8 {
            let mut bad = file.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(unwrap("a", &bad).is_err(), "bit {bit}");
        }
        assert_eq!(unwrap("b", &file), Err(BlobError::Checksum));
    }

    #[test]
    fn what_an_earlier_longer_blob_left_behind_means_nothing() {
        let mut file = wrap("a", b"short");
        file.extend_from_slice(&[0xee; 100]);
        assert_eq!(unwrap("a", &file).unwrap(), b"short");
        assert_eq!(unwrap("a", &wrap("a", b"")).unwrap(), b"");
    }
}
