//! Copying into a slot, fused with its checksum.
//!
//! Each source byte is read from memory once: a piece is hashed, which brings it into the cache, and copied
//! from there. The copy goes around the cache (non-temporal stores, whole lines at a time where the processor can):
//! a plain store would read the line that it is about to overwrite. That is what `memcpy` does for large
//! blocks, too; for pieces as small as these it would not. While a piece is stored the next one is fetched, so that
//! the hash, which would wait for each line, finds it in the cache.

use crc_fast::{CrcAlgorithm, Digest};

use crate::slot::{Source, Span};

/// Hashed and copied at a time: it stays in a first-level cache, together with the one that is fetched meanwhile.
const PIECE: usize = 16 << 10;

/// Bytes for ranges that no source covers.
static ZEROS: [u8; 4096] = [0; 4096];

/// The bytes of a part of an image, in order.
pub(super) struct Cursor<'a> {
    sources: &'a [Source<'a>],
    spans: &'a [Span],
    at: u64,
    end: u64,
}

/// The next piece.
enum Piece<'a> {
    /// To be copied.
    Here(&'a [u8]),
    /// So many bytes were brought, and are in their place.
    Brought(usize),
}

impl<'a> Cursor<'a> {
    /// Of `begin..end`. Sources and spans ascend, and none of them overlap.
    pub(super) fn new(sources: &'a [Source<'a>], spans: &'a [Span], begin: u64, end: u64) -> Self {
        let source = sources.partition_point(|s| s.at + s.bytes.len() as u64 <= begin);
        let span = spans.partition_point(|s| s.at + s.bytes <= begin);
        Self {
            sources: &sources[source..],
            spans: &spans[span..],
            at: begin,
            end,
        }
    }

    /// The next bytes, at most a piece of them; none at the end.
    fn next(&mut self) -> Option<Piece<'a>> {
        let left = usize::try_from(self.end - self.at).unwrap_or(usize::MAX);
        if left == 0 {
            return None;
        }
        // What ends here, or is empty, has nothing more to give.
        while let Some(source) = self.sources.first()
            && source.at + source.bytes.len() as u64 <= self.at
        {
            self.sources = &self.sources[1..];
        }
        while let Some(span) = self.spans.first()
            && span.at + span.bytes <= self.at
        {
            self.spans = &self.spans[1..];
        }
        let (source, span) = (self.sources.first(), self.spans.first());
        let piece = match (source, span) {
            (Some(source), _) if source.at <= self.at => {
                let from = (self.at - source.at) as usize;
                let len = (source.bytes.len() - from).min(PIECE).min(left);
                Piece::Here(&source.bytes[from..from + len])
            }
            (_, Some(span)) if span.at <= self.at => {
                let rest = span.at + span.bytes - self.at;
                let rest = usize::try_from(rest).unwrap_or(usize::MAX);
                Piece::Brought(rest.min(PIECE).min(left))
            }
            _ => {
                let next = source.map(|source| source.at).into_iter();
                let next = next.chain(span.map(|span| span.at)).min();
                let gap = next.map_or(left, |at| (at - self.at) as usize);
                Piece::Here(&ZEROS[..gap.min(ZEROS.len()).min(left)])
            }
        };
        self.at += match piece {
            Piece::Here(bytes) => bytes.len(),
            Piece::Brought(bytes) => bytes,
        } as u64;
        Some(piece)
    }

    /// Copies what is not there yet, and returns the CRC-64/NVME of all. `to` is as long as that.
    pub(super) fn copy_into(mut self, mut to: &mut [u8]) -> u64 {
        let mut crc = Digest::new(CrcAlgorithm::Crc64Nvme);
        while let Some(piece) = self.next() {
            to = match piece {
                Piece::Here(bytes) => {
                    crc.update(bytes);
                    let (here, rest) = to.split_at_mut(bytes.len());
                    stream(bytes, here);
                    rest
                }
                Piece::Brought(bytes) => {
                    let (here, rest) = to.split_at_mut(bytes);
                    crc.update(here);
                    rest
                }
            };
        }
        fence();
        crc.finalize()
    }
}

/// Copies around the cache where that is possible, and fetches what comes a piece later. Both are equally long.
#[cfg(target_arch = "x86_64")]
fn stream(from: &[u8], to: &mut [u8]) {
    let head = to.as_ptr().align_offset(x86::LINE).min(to.len());
    let (first, from) = from.split_at(head);
    let (start, to) = to.split_at_mut(head);
    start.copy_from_slice(first);
    let (lines, last) = from.as_chunks();
    let (places, end) = to.as_chunks_mut();
    // SAFETY: the processor has what they use, and the places are aligned to a line, as `head` left out what is before.
    unsafe {
        if is_x86_feature_detected!("avx512f") {
            x86::by_64(lines, places);
        } else if is_x86_feature_detected!("avx") {
            x86::by_32(lines, places);
        } else {
            x86::by_16(lines, places);
        }
    }
    end.copy_from_slice(last);
}

/// Non-temporal stores of 16, 32 and 64 bytes. A line that is stored at once needs no read of what was there.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_stream_si128, _mm256_loadu_si256,
        _mm256_stream_si256, _mm512_loadu_si512, _mm512_stream_si512,
    };

    use super::PIECE;

    pub(super) const LINE: usize = 64;

    macro_rules! by {
        ($name:ident, $feature:literal, $bytes:literal, $load:ident, $store:ident) => {
            /// # Safety
            /// The processor has the feature, and the places are aligned to a line.
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn $name(lines: &[[u8; LINE]], places: &mut [[u8; LINE]]) {
                for (line, place) in lines.iter().zip(places) {
                    let (line, place) = (line.as_ptr(), place.as_mut_ptr());
                    // Beyond the source's end nothing is fetched, and nothing goes wrong.
                    _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(PIECE).cast());
                    for at in (0..LINE).step_by($bytes) {
                        // SAFETY: both are a line long; the rest is the caller's.
                        unsafe {
                            let word = $load(line.add(at).cast());
                            $store(place.add(at).cast(), word);
                        }
                    }
                }
            }
        };
    }

    by!(by_16, "sse2", 16, _mm_loadu_si128, _mm_stream_si128);
    by!(by_32, "avx", 32, _mm256_loadu_si256, _mm256_stream_si256);
    by!(
        by_64,
        "avx512f",
        64,
        _mm512_loadu_si512,
        _mm512_stream_si512
    );
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
