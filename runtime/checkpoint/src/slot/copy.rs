//! Copying into a slot, fused with its checksum.
//!
//! Each source byte is read from memory once: a piece is hashed, which brings it into the cache, and copied
//! from there. The copy goes around the cache (SSE2's non-temporal stores, which every x86-64 has): a plain
//! store would read the line that it is about to overwrite. That is what `memcpy` does for large
//! blocks, too; for pieces as small as these it would not.

use crc_fast::{CrcAlgorithm, Digest};

use crate::slot::Source;

/// Hashed and copied at a time: it stays in a second-level cache.
const PIECE: usize = 128 << 10;

/// What no source covers.
static ZEROS: [u8; 4096] = [0; 4096];

/// The bytes of a part of an image, in order.
pub(super) struct Cursor<'a> {
    sources: &'a [Source<'a>],
    at: u64,
    end: u64,
}

impl<'a> Cursor<'a> {
    /// Of `begin..end`. The sources ascend and do not overlap.
    pub(super) fn new(sources: &'a [Source<'a>], begin: u64, end: u64) -> Self {
        let first = sources.partition_point(|s| s.at + s.bytes.len() as u64 <= begin);
        Self {
            sources: &sources[first..],
            at: begin,
            end,
        }
    }

    /// The next bytes, at most a piece of them; none at the end.
    fn next(&mut self) -> Option<&'a [u8]> {
        let left = usize::try_from(self.end - self.at).unwrap_or(usize::MAX);
        if left == 0 {
            return None;
        }
        // A source that ends here, or is empty, has nothing more to give.
        while let Some(source) = self.sources.first()
            && source.at + source.bytes.len() as u64 <= self.at
        {
            self.sources = &self.sources[1..];
        }
        let bytes = match self.sources.first() {
            Some(source) if source.at <= self.at => {
                let from = (self.at - source.at) as usize;
                let len = (source.bytes.len() - from).min(PIECE).min(left);
                &source.bytes[from..from + len]
            }
            next => {
                let gap = next.map_or(left, |source| (source.at - self.at) as usize);
                &ZEROS[..gap.min(ZEROS.len()).min(left)]
            }
        };
        self.at += bytes.len() as u64;
        Some(bytes)
    }

    /// Copies them all, and returns their CRC-64/NVME. `to` is as long as they are.
    pub(super) fn copy_into(mut self, mut to: &mut [u8]) -> u64 {
        let mut crc = Digest::new(CrcAlgorithm::Crc64Nvme);
        while let Some(bytes) = self.next() {
            crc.update(bytes);
            let (here, rest) = to.split_at_mut(bytes.len());
            stream(bytes, here);
            to = rest;
        }
        fence();
        crc.finalize()
    }
}

/// Copies around the cache where that is possible. Both are equally long.
#[cfg(target_arch = "x86_64")]
fn stream(from: &[u8], to: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    const LINE: usize = 64;

    let head = to.as_ptr().align_offset(LINE).min(to.len());
    let (first, from) = from.split_at(head);
    let (start, to) = to.split_at_mut(head);
    start.copy_from_slice(first);
    let (lines, last) = from.as_chunks::<LINE>();
    let (places, end) = to.as_chunks_mut::<LINE>();
    for (line, place) in lines.iter().zip(places) {
        let (line, place) = (line.as_ptr().cast::<__m128i>(), place.as_mut_ptr());
        let place = place.cast::<__m128i>();
        // SAFETY: four times 16 bytes of 64, and the places are aligned to 64, as `head` left out what
        // is before that. x86-64 has SSE2.
        unsafe {
            let words = [
                _mm_loadu_si128(line),
                _mm_loadu_si128(line.add(1)),
                _mm_loadu_si128(line.add(2)),
                _mm_loadu_si128(line.add(3)),
            ];
            for (at, word) in words.into_iter().enumerate() {
                _mm_stream_si128(place.add(at), word);
            }
        }
    }
    end.copy_from_slice(last);
}

#[cfg(not(target_arch = "x86_64"))]
fn stream(from: &[u8], to: &mut [u8]) {
    to.copy_from_slice(from);
}

/// Makes the stores around the cache visible before whatever this thread stores next.
fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: x86-64 has SSE.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}
