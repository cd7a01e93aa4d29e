//! Checksums: CRC-64/NVME of each chunk, and one XXH3-128 of a file.
//!
//! Chunks are hashed by several threads in any order, so a file's digest is XXH3-128 over the
//! XXH3-128 of its chunks (16 bytes each, big-endian as its canonical form is). Both are far faster
//! than the disks they feed (see docs/checkpoints.md); they find damage, not forgery: who can write
//! the files can write the manifest. The manifest itself is named by its BLAKE3 digest.

use crc_fast::{CrcAlgorithm, Digest};
use twox_hash::XxHash3_128;

use crate::hex::Bytes;

/// Bytes of a chunk; a file's last one may be shorter.
pub const CHUNK: u64 = 4 << 20;

/// Hashed at a time, so that the second hash finds the bytes in the cache.
const PIECE: usize = 128 << 10;

/// Checksum of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkSum {
    /// CRC-64/NVME, kept for each chunk.
    pub crc: u64,
    /// XXH3-128, of which a file's digest is made.
    pub xxh: u128,
}

impl ChunkSum {
    /// Of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        let mut crc = Digest::new(CrcAlgorithm::Crc64Nvme);
        let mut xxh = XxHash3_128::new();
        for piece in bytes.chunks(PIECE) {
            crc.update(piece);
            xxh.write(piece);
        }
        Self {
            crc: crc.finalize(),
            xxh: xxh.finish_128(),
        }
    }
}

/// CRC-64/NVME of these bytes.
pub fn crc(bytes: &[u8]) -> u64 {
    let mut crc = Digest::new(CrcAlgorithm::Crc64Nvme);
    crc.update(bytes);
    crc.finalize()
}

/// A file's digest, from the sums of its chunks in order.
pub fn file_digest(chunks: &[ChunkSum]) -> Bytes<16> {
    let mut xxh = XxHash3_128::new();
    for chunk in chunks {
        xxh.write(&chunk.xxh.to_be_bytes());
    }
    Bytes(xxh.finish_128().to_be_bytes())
}

/// Chunks of a file of this length.
pub fn chunks_of(bytes: u64) -> u64 {
    bytes.div_ceil(CHUNK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_the_published_ones() {
        // The check value of CRC-64/NVME (NVM Express NVM Command Set Specification 1.0, 5.2.1.3.4).
        assert_eq!(crc(b"123456789"), 0xae8b_1486_0a79_9888);
        // XXH3-128 of nothing, seed 0.
        assert_eq!(
            XxHash3_128::oneshot(b""),
            0x99aa_06d3_0147_98d8_6001_c324_468d_497f
        );
        let long: Vec<u8> = (0..3 * PIECE + 5)
            .map(|at| (at * 7 + at / 251) as u8)
            .collect();
        let sum = ChunkSum::of(&long);
        assert_eq!(
            (sum.crc, sum.xxh),
            (crc(&long), XxHash3_128::oneshot(&long))
        );
    }
}
