//! Reports of a training as it goes on.

use std::time::Duration;

use super::model::Measured;
use crate::session::Metrics;

/// A step that is committed.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Steps that are over, this one included.
    pub step: u64,
    /// Epochs that are over, with the part of the one under way.
    pub epochs: f64,
    /// Ranks whose samples counted.
    pub ranks: u32,
    /// Samples of the step, over all ranks.
    pub samples: u64,
    /// The mean loss over them.
    pub training_loss: f64,
    /// The learning rate.
    pub rate: f64,
    /// Factor of the loss, if there was one.
    pub scale: Option<f32>,
    /// A gradient overflowed, and the step changed no parameter.
    pub skipped: bool,
    /// The norm of the mean gradient before clipping, if it is clipped.
    pub norm: Option<f64>,
    /// On this rank. `None`: it was not there, and committed the results of others.
    pub times: Option<Times>,
}

impl Report {
    /// Samples a second, of all ranks.
    pub fn throughput(&self) -> Option<f64> {
        let total = self.times.as_ref()?.total.as_secs_f64();
        (total > 0.0).then(|| self.samples as f64 / total)
    }

    /// Adds this step to the metrics that the agent shows of this rank.
    pub(super) fn add_to(&self, metrics: &mut Metrics) {
        metrics.steps += 1;
        metrics.world = self.ranks;
        metrics.training_loss = self.training_loss;
        metrics.learning_rate = self.rate;
        metrics.loss_scale = self.scale.map_or(f64::NAN, f64::from);
        // An equal part: what all ranks show adds up to what the job does.
        let of_each = |all: f64| all / f64::from(self.ranks.max(1));
        metrics.samples_per_second = self.throughput().map_or(f64::NAN, of_each);
        let times = self.times.unwrap_or_default();
        metrics.data_seconds += times.loading.as_secs_f64();
        metrics.compute_seconds += (times.computing + times.updating).as_secs_f64();
        metrics.communication_seconds += times.communicating.as_secs_f64();
        metrics.gradient_sync_seconds += times.exposed.as_secs_f64();
    }
}

/// How long a step took on one rank, and what for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// From its beginning to the end of its commit, without evaluations.
    pub total: Duration,
    /// Waiting for samples.
    pub loading: Duration,
    /// Forward and backward.
    pub computing: Duration,
    /// In collectives, most of it beside the computation.
    pub communicating: Duration,
    /// Of that, with nothing left to compute: what synchronizing gradients costs.
    pub exposed: Duration,
    /// Clipping, and the optimizer.
    pub updating: Duration,
}

/// Held-out samples, gone through by all ranks together.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// Of the model after so many steps.
    pub step: u64,
    pub epochs: f64,
    pub measured: Measured,
    /// Better than all before.
    pub best: bool,
}

/// The best evaluation, and its model.
#[derive(Clone, Debug, PartialEq)]
pub struct Best {
    pub evaluation: Evaluation,
    /// As [`Model::encode`](super::Model::encode) gave it, if it was to be kept and this rank was there.
    pub model: Option<Vec<u8>>,
}

/// This rank's part of a save is sealed: from now on the save does not depend on this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Save {
    /// Of the state before this step.
    pub step: u64,
    /// Bytes that this rank copied.
    pub bytes: u64,
    /// How long it copied.
    pub copied: Duration,
    /// How long it waited before for a slot.
    pub waited: Duration,
}

/// News of a commit.
#[derive(Clone, Debug, PartialEq)]
pub enum News {
    Step(Report),
    /// An epoch is over; so many are now.
    Epoch(u64),
    Evaluated(Evaluation),
    Saved(Save),
    /// This rank had no slot free in time, so the step is left out on all.
    NotSaved {
        step: u64,
        why: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ranks_show_adds_up_to_what_the_job_does() {
        let report = Report {
            step: 1,
            epochs: 0.5,
            ranks: 4,
            samples: 80,
            training_loss: 0.25,
            rate: 0.1,
            scale: None,
            skipped: false,
            norm: None,
            times: Some(Times {
                total: Duration::from_millis(500),
                ..Times::default()
            }),
        };
        let mut metrics = Metrics::default();
        report.add_to(&mut metrics);
        assert_eq!(report.throughput(), Some(160.0));
        assert_eq!((metrics.world, metrics.samples_per_second), (4, 40.0));
        let absent = Report {
            times: None,
            ..report
        };
        absent.add_to(&mut metrics);
        assert!(metrics.samples_per_second.is_nan());
    }
}
