//! Dynamic loss scaling for 16-bit gradients.

/// How a [`Scaler`] moves. The defaults are those of PyTorch's `GradScaler`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalerConfig {
    pub initial: f32,
    /// After an overflow, the scale is multiplied with this.
    pub backoff: f32,
    /// After `interval` good steps in a row, with this.
    pub growth: f32,
    pub interval: u32,
    /// The scale stays between these.
    pub least: f32,
    pub most: f32,
}

impl Default for ScalerConfig {
    fn default() -> ScalerConfig {
        ScalerConfig {
            initial: 65_536.0,
            backoff: 0.5,
            growth: 2.0,
            interval: 2000,
            least: f32::MIN_POSITIVE,
            most: 16_777_216.0,
        }
    }
}

/// The scaler's decision about a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Apply,
    /// A gradient overflowed: the parameters, and all other state, stay as they are.
    Skip,
}

/// The factor of the loss that keeps small gradients from vanishing in 16 bits (Micikevicius et al.: Mixed
/// Precision Training, ICLR 2018, section 3.2). It halves when a gradient overflows, and the step is
/// skipped; after a run of good steps it doubles.
///
/// Gradients should be [unscaled](Self::unscale) before they are compressed, for what an error feedback
/// keeps must not depend on the scale of its step.
#[derive(Clone, Debug, PartialEq)]
pub struct Scaler {
    config: ScalerConfig,
    scale: f32,
    good: u32,
}

const MAGIC: [u8; 8] = *b"MSCALER1";
const ENCODED: usize = 16;

impl Scaler {
    pub fn new(config: ScalerConfig) -> Scaler {
        Scaler {
            scale: config
                .initial
                .clamp(config.least, config.most.max(config.least)),
            config,
            good: 0,
        }
    }

    /// Factor of the loss.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// Good steps in a row.
    pub fn good(&self) -> u32 {
        self.good
    }

    /// `gradient` divided by the scale, in any precision that `f32` contains. The shorter of both slices
    /// counts. Infinity and NaN stay what they are.
    pub fn unscale<T: Copy + Into<f32>>(&self, gradient: &[T], to: &mut [f32]) {
        for (to, value) in to.iter_mut().zip(gradient) {
            *to = (*value).into() / self.scale;
        }
    }

    /// Judges a step by its reduced gradients, all of them: so every rank comes to the same verdict.
    /// Compression keeps what is not finite: a lossy codec's results are as good as any.
    pub fn judge(reduced: &[&[f32]]) -> Verdict {
        if reduced.iter().all(|values| all_finite(values)) {
            Verdict::Apply
        } else {
            Verdict::Skip
        }
    }

    /// Moves the scale. A part of the step's commit, for skipped steps too.
    pub fn commit(&mut self, verdict: Verdict) {
        let ScalerConfig { least, most, .. } = self.config;
        let scale = match verdict {
            Verdict::Skip => {
                self.good = 0;
                self.scale * self.config.backoff
            }
            Verdict::Apply => {
                self.good = self.good.saturating_add(1);
                if self.good < self.config.interval {
                    return;
                }
                self.good = 0;
                self.scale * self.config.growth
            }
        };
        self.scale = scale.clamp(least, most.max(least));
    }

    /// For checkpoints and newcomers.
    pub fn encode(&self) -> [u8; ENCODED] {
        let mut out = [0; ENCODED];
        let words = [self.scale.to_le_bytes(), self.good.to_le_bytes()];
        let (magic, rest) = out.split_at_mut(MAGIC.len());
        magic.copy_from_slice(&MAGIC);
        rest.copy_from_slice(words.as_flattened());
        out
    }

    /// Becomes what was encoded; false, and nothing changed, if it is none.
    pub fn decode(&mut self, bytes: &[u8]) -> bool {
        let Some(Some(([scale, good], []))) =
            bytes
                .strip_prefix(&MAGIC)
                .map(|words| match words.as_chunks() {
                    ([scale, good], rest) => Some(([*scale, *good], rest)),
                    _ => None,
                })
        else {
            return false;
        };
        let scale = f32::from_le_bytes(scale);
        if !scale.is_normal() || scale < 0.0 {
            return false;
        }
        (self.scale, self.good) = (scale, u32::from_le_bytes(good));
        true
    }
}

/// In blocks without a branch inside, so that the compiler uses vectors.
fn all_finite(values: &[f32]) -> bool {
    const INFINITY: u32 = f32::INFINITY.to_bits();
    values.chunks(1024).all(|block| {
        let odd = block.iter().fold(false, |odd, value| {
            odd | (value.to_bits() & INFINITY == INFINITY)
        });
        !odd
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn short() -> Scaler {
        Scaler::new(ScalerConfig {
            initial: 1024.0,
            interval: 3,
            ..ScalerConfig::default()
        })
    }

    #[test]
    fn halves_on_overflow_and_doubles_after_a_good_run() {
        let mut scaler = short();
        let mut scales = Vec::new();
        for step in "ggsgggggsss".chars() {
            let gradient = if step == 's' { f32::INFINITY } else { 1.0 };
            scaler.commit(Scaler::judge(&[&[0.5], &[1.0, gradient]]));
            scales.push(scaler.scale());
        }
        let expected = [1024, 1024, 512, 512, 512, 1024, 1024, 1024, 512, 256, 128];
        assert_eq!(scales, expected.map(|scale| scale as f32));
    }

    #[test]
    fn stays_in_its_bounds() {
        let config = ScalerConfig {
            initial: 1e30,
            least: 1.0,
            most: 4.0,
            interval: 1,
            ..ScalerConfig::default()
        };
        let mut scaler = Scaler::new(config);
        assert_eq!(scaler.scale(), 4.0);
        scaler.commit(Verdict::Apply);
        assert_eq!(scaler.scale(), 4.0);
        (0..200).for_each(|_| scaler.commit(Verdict::Skip));
        assert_eq!(scaler.scale(), 1.0);
    }

    #[test]
    fn unscaling_keeps_what_is_not_finite() {
        let mut to = [0.0; 4];
        let gradient = [1024.0, f32::NAN, f32::NEG_INFINITY, -512.0];
        short().unscale(&gradient, &mut to);
        assert!(to[1].is_nan());
        assert_eq!((to[0], to[2], to[3]), (1.0, f32::NEG_INFINITY, -0.5));
    }

    proptest! {
        #[test]
        fn one_odd_value_anywhere_is_seen(
            mut values in prop::collection::vec(-1e38f32..1e38, 1..5000), at: prop::sample::Index,
            odd in prop::sample::select(vec![f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY]),
        ) {
            prop_assert_eq!(Scaler::judge(&[&values]), Verdict::Apply);
            let at = at.index(values.len());
            values[at] = odd;
            prop_assert_eq!(Scaler::judge(&[&[], &values]), Verdict::Skip);
        }

        #[test]
        fn a_copy_goes_on_alike(before in prop::collection::vec(any::<bool>(), 0..40), after in prop::collection::vec(any::<bool>(), 0..40)) {
            let verdict = |good: &bool| if *good { Verdict::Apply } else { Verdict::Skip };
            let mut scaler = short();
            before.iter().for_each(|good| scaler.commit(verdict(good)));
            let mut copy = short();
            prop_assert!(copy.decode(&scaler.encode()));
            for good in &after {
                scaler.commit(verdict(good));
                copy.commit(verdict(good));
            }
            prop_assert_eq!(scaler, copy);
        }

        #[test]
        fn damaged_states_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..32), cut in 0usize..16) {
            let mut scaler = short();
            if !scaler.decode(&bytes) {
                prop_assert_eq!(&scaler, &short());
            }
            prop_assert!(!scaler.decode(&short().encode()[..cut]));
            let mut zero = short().encode();
            zero[8..12].fill(0);
            prop_assert!(!scaler.decode(&zero));
        }
    }
}
