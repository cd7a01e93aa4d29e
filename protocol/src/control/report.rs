//! The part of the control page by which a worker tells how it trains: for `/metrics`, and for
//! whoever looks for a rank that hangs.
//!
//! | word | writer | meaning |
//! |---|---|---|
//! | [`OPERATION`](word::OPERATION) | worker | grows by one when it begins to wait for other ranks, and by one when it has them: odd while it waits; by [`ALIVE`] when it says that it is alive; 0 again when a step begins |
//! | [`SEQUENCE`](word::SEQUENCE) | worker | odd while the metrics are written, even otherwise; 0: never written |
//! | [`VALUES`](word::VALUES) | worker | [`Metrics`], packed |
//!
//! The metrics lie under a seqlock: a reader takes values between two equal, even numbers of SEQUENCE
//! only. A worker that dies while it writes leaves an odd number, and nothing more is read.

use serde::{Deserialize, Serialize};

/// The amount that a sign of life adds to [`OPERATION`](word::OPERATION): it tells that the rank moves, and nothing
/// about the operations that it has entered, which are counted below.
pub const ALIVE: u64 = 1 << 32;

/// Words of the page, in bytes.
pub mod word {
    use super::METRICS_WORDS;

    pub const OPERATION: usize = 304;
    pub const SEQUENCE: usize = 1024;
    pub const VALUES: usize = 1032;

    /// Every word of this module.
    pub fn all() -> impl Iterator<Item = usize> {
        [OPERATION, SEQUENCE].into_iter().chain(values())
    }

    /// The words of the metrics, in the order of [`super::Metrics::encode`].
    pub fn values() -> impl Iterator<Item = usize> {
        (0..METRICS_WORDS).map(|i| VALUES + 8 * i)
    }
}

/// Words of packed metrics.
pub const METRICS_WORDS: usize = 10;

/// How a worker trains. A number that a worker does not know is NaN, and is shown nowhere.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Metrics {
    /// Steps that this process has done.
    pub steps: u64,
    /// Ranks that train together; 0: unknown.
    pub world: u32,
    pub training_loss: f64,
    /// Of this rank: what all ranks say adds up to what the job does.
    pub samples_per_second: f64,
    pub learning_rate: f64,
    /// The factor of dynamic loss scaling.
    pub loss_scale: f64,
    /// Seconds since the process began that it waited for data.
    pub data_seconds: f64,
    /// Seconds of forward, backward and optimizer.
    pub compute_seconds: f64,
    /// Seconds in collectives.
    pub communication_seconds: f64,
    /// Seconds of those that the step waited for gradients, not hidden behind computation.
    pub gradient_sync_seconds: f64,
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics {
            steps: 0,
            world: 0,
            training_loss: f64::NAN,
            samples_per_second: f64::NAN,
            learning_rate: f64::NAN,
            loss_scale: f64::NAN,
            data_seconds: f64::NAN,
            compute_seconds: f64::NAN,
            communication_seconds: f64::NAN,
            gradient_sync_seconds: f64::NAN,
        }
    }
}

impl Metrics {
    pub fn encode(&self) -> [u64; METRICS_WORDS] {
        [
            self.steps,
            self.world.into(),
            self.training_loss.to_bits(),
            self.samples_per_second.to_bits(),
            self.learning_rate.to_bits(),
            self.loss_scale.to_bits(),
            self.data_seconds.to_bits(),
            self.compute_seconds.to_bits(),
            self.communication_seconds.to_bits(),
            self.gradient_sync_seconds.to_bits(),
        ]
    }

    /// The inverse of [`encode`](Self::encode), total.
    pub fn decode(words: &[u64; METRICS_WORDS]) -> Metrics {
        let [
            steps,
            world,
            loss,
            rate,
            lr,
            scale,
            data,
            compute,
            comm,
            sync,
        ] = *words;
        Metrics {
            steps,
            world: u32::try_from(world).unwrap_or(u32::MAX),
            training_loss: f64::from_bits(loss),
            samples_per_second: f64::from_bits(rate),
            learning_rate: f64::from_bits(lr),
            loss_scale: f64::from_bits(scale),
            data_seconds: f64::from_bits(data),
            compute_seconds: f64::from_bits(compute),
            communication_seconds: f64::from_bits(comm),
            gradient_sync_seconds: f64::from_bits(sync),
        }
    }
}

/// One rank's newest metrics, as its launcher passes them on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankMetrics {
    pub rank: u32,
    /// [`Metrics::encode`]'s words.
    pub words: [u64; METRICS_WORDS],
}

/// The most ranks in one frame.
pub const MAX_RANKS: usize = 256;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::{PAGE_LEN, live, word as older};
    use super::*;

    #[test]
    fn words_are_aligned_and_apart_and_the_launchers_are_on_other_lines() {
        let all: Vec<usize> = word::all()
            .chain(live::word::all())
            .chain(older::ALL)
            .collect();
        let unique: BTreeSet<usize> = all.iter().copied().collect();
        assert_eq!(unique.len(), all.len());
        assert!(all.iter().all(|at| at % 8 == 0 && at + 8 <= PAGE_LEN));
        let lines = |words: &[usize]| words.iter().map(|at| at / 128).collect::<BTreeSet<_>>();
        let ours: Vec<usize> = word::all().collect();
        let launchers: Vec<usize> = [older::STOP, live::word::ENDED, live::word::FEATURES]
            .into_iter()
            .chain(live::word::SEQUENCE..live::word::ASSIGNMENT + 8 * live::ASSIGNMENT_WORDS)
            .collect();
        assert!(lines(&ours).is_disjoint(&lines(&launchers)));
    }

    /// A worker may run another release than its launcher: these words stay as they are.
    #[test]
    fn the_encoding_is_frozen() {
        assert_eq!(
            (word::OPERATION, word::SEQUENCE, word::VALUES),
            (304, 1024, 1032)
        );
        let metrics = Metrics {
            steps: 7,
            world: 4,
            training_loss: 1.5,
            samples_per_second: 2.0,
            learning_rate: 3.0,
            loss_scale: 4.0,
            data_seconds: 5.0,
            compute_seconds: 6.0,
            communication_seconds: 7.0,
            gradient_sync_seconds: 8.0,
        };
        let words = metrics.encode();
        assert_eq!(words[..3], [7, 4, 0x3ff8_0000_0000_0000]);
        assert_eq!(words[9], 8.0f64.to_bits());
        assert_eq!(Metrics::decode(&words), metrics);
        let none = Metrics::decode(&Metrics::default().encode());
        assert!(none.training_loss.is_nan() && none.gradient_sync_seconds.is_nan());
        assert_eq!(Metrics::decode(&[u64::MAX; METRICS_WORDS]).world, u32::MAX);
    }
}
