//! Casts of more than the caches hold: results go to memory without being read from it first. That is a quarter to a
//! third of the traffic of a cast to or from 16 bits, and what reads them would find them in memory in any case.

#[cfg(not(target_arch = "x86_64"))]
use self::other as here;
#[cfg(target_arch = "x86_64")]
use self::x86 as here;

/// Bytes, read and written, that the last cache does not hold for one rank, where it is not a very large one.
const LARGE: usize = 32 << 20;

/// Rounds `from` times `factor` to bfloat16 (`BRAIN`) or to the 16 bits of IEEE 754, where these are many values, the
/// processor has what it takes and `to` is aligned as its stores want it. Both are equally long. So many are done.
pub(super) fn narrow<const BRAIN: bool>(from: &[f32], factor: f32, to: &mut [u16]) -> usize {
    match size_of_val(from) + size_of_val(to) >= LARGE {
        true => here::narrow::<BRAIN>(from, factor, to),
        false => 0,
    }
}

/// The inverse.
pub(super) fn widen<const BRAIN: bool>(from: &[u16], factor: f32, to: &mut [f32]) -> usize {
    match size_of_val(from) + size_of_val(to) >= LARGE {
        true => here::widen::<BRAIN>(from, factor, to),
        false => 0,
    }
}

/// Processors for which this is not written: nothing is done.
#[cfg(not(target_arch = "x86_64"))]
mod other {
    pub(super) fn narrow<const BRAIN: bool>(_: &[f32], _: f32, _: &mut [u16]) -> usize {
        0
    }

    pub(super) fn widen<const BRAIN: bool>(_: &[u16], _: f32, _: &mut [f32]) -> usize {
        0
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256, __m256i, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_sfence,
        _mm256_add_epi32, _mm256_and_si256, _mm256_blendv_epi8, _mm256_castps_si256,
        _mm256_castsi256_ps, _mm256_cmp_ps, _mm256_cvtepu16_epi32, _mm256_cvtph_ps,
        _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_mul_ps, _mm256_or_si256, _mm256_packus_epi32,
        _mm256_permute4x64_epi64, _mm256_set_m128i, _mm256_set1_epi32, _mm256_set1_ps,
        _mm256_slli_epi32, _mm256_srli_epi32, _mm256_stream_ps, _mm256_stream_si256,
    };

    use super::super::cast::QUIET;

    /// Alignment of each store, in bytes.
    const ALIGNED: usize = 32;

    pub(super) fn narrow<const BRAIN: bool>(from: &[f32], factor: f32, to: &mut [u16]) -> usize {
        match suits(to) {
            // SAFETY: `suits` has just said so.
            true => unsafe { narrow_aligned::<BRAIN>(from, factor, to) },
            false => 0,
        }
    }

    pub(super) fn widen<const BRAIN: bool>(from: &[u16], factor: f32, to: &mut [f32]) -> usize {
        match suits(to) {
            // SAFETY: as above.
            true => unsafe { widen_aligned::<BRAIN>(from, factor, to) },
            false => 0,
        }
    }

    /// Whether the processor has these features, and `to` is aligned.
    fn suits<T>(to: &[T]) -> bool {
        to.as_ptr().addr().is_multiple_of(ALIGNED)
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("f16c")
    }

    /// Quarters 0, 2, 1, 3: undoes how packing mixes the halves of its two arguments.
    const IN_ORDER: i32 = 0b11_01_10_00;

    #[target_feature(enable = "avx2,f16c")]
    fn sixteen<const BRAIN: bool>(low: __m256, high: __m256) -> __m256i {
        if BRAIN {
            let packed = _mm256_packus_epi32(brain(low), brain(high));
            _mm256_permute4x64_epi64::<IN_ORDER>(packed)
        } else {
            let low = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(low);
            _mm256_set_m128i(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(high), low)
        }
    }

    /// The upper halves, rounded to the nearest, ties to even.
    #[target_feature(enable = "avx2")]
    fn brain(values: __m256) -> __m256i {
        let bits = _mm256_castps_si256(values);
        let cut = _mm256_srli_epi32::<16>(bits);
        let odd = _mm256_and_si256(cut, _mm256_set1_epi32(1));
        let up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, up));
        let quiet = _mm256_or_si256(cut, _mm256_set1_epi32(QUIET.cast_signed()));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(values, values));
        _mm256_blendv_epi8(rounded, quiet, nan)
    }

    /// # Safety
    /// [`suits`].
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn narrow_aligned<const BRAIN: bool>(
        from: &[f32],
        factor: f32,
        to: &mut [u16],
    ) -> usize {
        let by = _mm256_set1_ps(factor);
        let (from, to) = (from.as_chunks::<32>().0, to.as_chunks_mut::<32>().0);
        for (from, to) in from.iter().zip(&mut *to) {
            let (from, to) = (from.as_ptr(), to.as_mut_ptr());
            // SAFETY: both are 32 values, of 32 and of 16 bits, and `to` is aligned, as are all chunks after it.
            unsafe {
                let eight = |at| _mm256_mul_ps(_mm256_loadu_ps(from.add(at)), by);
                let low = sixteen::<BRAIN>(eight(0), eight(8));
                let high = sixteen::<BRAIN>(eight(16), eight(24));
                _mm256_stream_si256(to.cast(), low);
                _mm256_stream_si256(to.add(16).cast(), high);
            }
        }
        // From here on what was written is seen in order, as other writes are.
        _mm_sfence();
        32 * from.len()
    }

    /// # Safety
    /// [`suits`].
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn widen_aligned<const BRAIN: bool>(from: &[u16], factor: f32, to: &mut [f32]) -> usize {
        let by = _mm256_set1_ps(factor);
        let (from, to) = (from.as_chunks::<16>().0, to.as_chunks_mut::<16>().0);
        for (from, to) in from.iter().zip(&mut *to) {
            let (from, to) = (from.as_ptr(), to.as_mut_ptr());
            // SAFETY: both are 16 values, of 16 and of 32 bits, and `to` is aligned, as are all chunks after it.
            unsafe {
                for at in [0, 8] {
                    let eight = _mm_loadu_si128(from.add(at).cast());
                    let wide = if BRAIN {
                        let bits = _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(eight));
                        _mm256_castsi256_ps(bits)
                    } else {
                        _mm256_cvtph_ps(eight)
                    };
                    _mm256_stream_ps(to.add(at), _mm256_mul_ps(wide, by));
                }
            }
        }
        _mm_sfence();
        16 * from.len()
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::{LARGE, here};
    use crate::gradient::compress::{Half, narrow, widen};

    /// Where a line of the cache begins.
    fn aligned<T>(all: &mut [T]) -> &mut [T] {
        let at = all.as_ptr().align_offset(64);
        &mut all[at..]
    }

    /// All kinds of numbers there and back as few values are cast: as many as were done, which are all but a rest.
    fn alike<T: Half, const BRAIN: bool>() {
        const LEN: usize = 10_003;
        let bits = |i: usize| f32::from_bits((i as u32).wrapping_mul(0x9e37_79b9));
        let values: Vec<f32> = (0..LEN).map(bits).collect();
        let (mut half, mut back) = (vec![T::zeroed(); LEN], vec![0.0; LEN]);
        narrow(&values, &mut half);
        widen(&half, &mut back);
        let (mut streamed, mut wide) = (vec![0_u16; LEN + 64], vec![0.0; LEN + 64]);
        let (streamed, wide) = (aligned(&mut streamed), aligned(&mut wide));
        let streamed = &mut streamed[..LEN];
        let done = here::narrow::<BRAIN>(&values, 1.0, streamed);
        assert_eq!(
            &streamed[..done],
            &bytemuck::cast_slice::<T, u16>(&half)[..done]
        );
        assert!(streamed[done..].iter().all(|half| *half == 0));
        let of = bytemuck::cast_slice(&half);
        let widened = here::widen::<BRAIN>(of, 1.0, &mut wide[..LEN]);
        assert!(
            (wide.iter().zip(&back))
                .take(widened)
                .all(|(a, b)| a.to_bits() == b.to_bits())
        );
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
            assert_eq!((done, widened), (LEN / 32 * 32, LEN / 16 * 16));
        }
        // What is not aligned is left to others.
        assert_eq!(
            here::narrow::<BRAIN>(&values[1..], 1.0, &mut streamed[1..]),
            0
        );
        assert_eq!(here::widen::<BRAIN>(&of[1..], 1.0, &mut wide[1..LEN]), 0);
    }

    #[test]
    fn what_is_streamed_is_what_is_cast_otherwise() {
        alike::<f16, false>();
        alike::<bf16, true>();
    }

    #[test]
    fn many_values_are_cast_whole_from_any_place_on() {
        const MANY: usize = LARGE / 6 + 1000;
        let values = vec![1.5; MANY];
        let (mut half, mut back) = (vec![f16::ZERO; MANY], vec![0.0; MANY]);
        narrow(&values[1..], &mut half[1..]);
        widen(&half[1..], &mut back[1..]);
        assert_eq!((half[0], back[0]), (f16::ZERO, 0.0));
        assert_eq!(back[1..], values[1..]);
    }
}
