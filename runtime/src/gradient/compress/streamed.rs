//! Casts of more than the caches hold: results go to memory without being read from it first. That is a quarter to a
//! third of the traffic of a cast to or from 16 bits, and what reads them would find them in memory in any case.

/// Bytes, read and written, that a core's share of the last cache does not hold.
const LARGE: usize = 16 << 20;

/// Rounds `from` times `factor` to bfloat16 (`BRAIN`) or to the 16 bits of IEEE 754, where these are many values, the
/// processor has what it takes and `to` begins a line of the cache. Both are equally long. So many are done.
pub(super) fn narrow<const BRAIN: bool>(from: &[f32], factor: f32, to: &mut [u16]) -> usize {
    #[cfg(target_arch = "x86_64")]
    if size_of_val(from) + size_of_val(to) >= LARGE && x86::suits(to) {
        // SAFETY: the processor has what the function was compiled for, and `to` is aligned.
        return unsafe { x86::narrow::<BRAIN>(from, factor, to) };
    }
    0
}

/// The inverse.
pub(super) fn widen<const BRAIN: bool>(from: &[u16], factor: f32, to: &mut [f32]) -> usize {
    #[cfg(target_arch = "x86_64")]
    if size_of_val(from) + size_of_val(to) >= LARGE && x86::suits(to) {
        // SAFETY: as above.
        return unsafe { x86::widen::<BRAIN>(from, factor, to) };
    }
    0
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

    /// What each store begins at a multiple of.
    const ALIGNED: usize = 32;

    pub(super) fn suits<T>(to: &[T]) -> bool {
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
    /// The processor has these features, and [`suits`] has seen `to`.
    #[target_feature(enable = "avx2,f16c")]
    pub(super) unsafe fn narrow<const BRAIN: bool>(
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
    /// The processor has these features, and [`suits`] has seen `to`.
    #[target_feature(enable = "avx2,f16c")]
    pub(super) unsafe fn widen<const BRAIN: bool>(
        from: &[u16],
        factor: f32,
        to: &mut [f32],
    ) -> usize {
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

    use super::LARGE;
    use crate::gradient::compress::{Half, narrow, widen};

    /// All kinds of numbers there and back: so many that they are streamed, from an odd place to the middle of a line;
    /// and by parts that are not.
    fn alike<T: Half>() {
        const MANY: usize = LARGE / 6 + 1000;
        const FEW: usize = 1 << 16;
        let bits = |i: usize| f32::from_bits((i as u32).wrapping_mul(0x9e37_79b9));
        let values: Vec<f32> = (0..MANY).map(bits).collect();
        let (mut half, mut back) = (vec![T::zeroed(); MANY], vec![0.0; MANY]);
        narrow(&values[1..], &mut half[1..]);
        widen(&half[1..], &mut back[1..]);
        let (mut few_half, mut few_back) = (vec![T::zeroed(); FEW], vec![0.0; FEW]);
        let bytes = |values: &[T]| bytemuck::cast_slice::<T, u8>(values).to_vec();
        for at in (1..MANY).step_by(FEW) {
            let here = at..MANY.min(at + FEW);
            let (few_half, few_back) = (&mut few_half[..here.len()], &mut few_back[..here.len()]);
            narrow(&values[here.clone()], few_half);
            widen(few_half, few_back);
            assert_eq!(bytes(few_half), bytes(&half[here.clone()]));
            assert!(
                few_back
                    .iter()
                    .zip(&back[here])
                    .all(|(a, b)| a.to_bits() == b.to_bits())
            );
        }
    }

    #[test]
    fn many_values_are_cast_as_few_are() {
        alike::<f16>();
        alike::<bf16>();
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn large_casts_are_streamed_where_the_processor_can() {
        let from = vec![1.5; LARGE / 4];
        let mut to = vec![0; LARGE / 4];
        let at = to.as_ptr().align_offset(64);
        let done = super::narrow::<false>(&from[at..], 2.0, &mut to[at..]);
        let can = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
        assert_eq!(done, if can { (from.len() - at) / 32 * 32 } else { 0 });
        let three = f16::from_f32(3.0).to_bits();
        assert!(to[at..at + done].iter().all(|half| *half == three));
        assert_eq!(super::narrow::<false>(&from[..32], 2.0, &mut to[..32]), 0);
    }
}
