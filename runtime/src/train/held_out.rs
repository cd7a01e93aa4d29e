//! Evaluation over samples that are not trained on.

use super::config::TrainError;
use super::feed::Feed;
use super::model::{Measured, Micro, Model};
use crate::data::{Batch, Sampler, SamplerConfig, Tail};
use crate::live::Share;
use crate::schedule::Span;

/// Held-out samples, and how often the model is tried on them. It is at the training's end in any case.
///
/// An evaluation is a part of the step that comes next: all ranks share the work, and if one of them is
/// lost, it is done again with that step. So all ranks know its result, newcomers included.
///
/// A newcomer that still listens waits for the others meanwhile: one evaluation must take less than
/// [`Patience::operation`](crate::live::Patience::operation), a minute by default.
pub struct HeldOut<S> {
    feed: Feed<S>,
    samples: u64,
    microbatch: u64,
    pub(super) every: Span,
}

impl<S> std::fmt::Debug for HeldOut<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeldOut")
            .field("samples", &self.samples)
            .field("every", &self.every)
            .finish_non_exhaustive()
    }
}

impl<S: Send + 'static> HeldOut<S> {
    /// `samples` samples, by their indices in `feed`, computed `microbatch` at a time.
    pub fn new(feed: Feed<S>, samples: u64, microbatch: u64, every: Span) -> HeldOut<S> {
        HeldOut {
            feed,
            samples,
            microbatch,
            every,
        }
    }

    /// This rank's part: the number of its samples, and the model's sums over them.
    pub(super) fn evaluate<M: Model<Sample = S>>(
        &mut self,
        model: &mut M,
        share: &Share,
        step: u64,
        epoch: u64,
    ) -> Result<(u64, Measured), TrainError> {
        let mut sampler = Sampler::new(SamplerConfig {
            samples: self.samples,
            seed: 0,
            batch: Batch::PerRank(self.microbatch),
            microbatch: self.microbatch,
            tail: Tail::Keep,
        })?;
        let (mut samples, mut sum) = (0, Measured::default());
        while sampler.state().epoch == 0 {
            let plan = sampler.plan(share.entered.len());
            let (loaded, _) = self.feed.step(&sampler, share)?;
            for microbatch in loaded {
                let indices: Vec<u64> = plan.indices(microbatch.number).collect();
                samples += indices.len() as u64;
                let micro = Micro {
                    step,
                    epoch,
                    number: microbatch.number,
                    indices,
                    samples: microbatch.samples,
                    seed: plan.seed_of(microbatch.number),
                    scale: 1.0,
                    last: false,
                };
                let measured = model.evaluate(&micro);
                sum.add(&measured.map_err(|source| TrainError::Model { step, source })?);
            }
            sampler.commit(&plan)?;
        }
        Ok((samples, sum))
    }
}
