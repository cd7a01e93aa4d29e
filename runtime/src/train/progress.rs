//! How far a training is: counters, the same on every rank.

use super::bytes::{Fields, put_float, put_measured, put_word};
use super::config::Better;
use super::model::Measured;
use super::report::Evaluation;
use crate::data::{Plan, Sampler};
use crate::schedule::Span;

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Progress {
    /// Steps of the live rule: those of the training, and the ones at its end that only evaluate.
    pub(super) transactions: u64,
    /// Steps of the training, skipped ones included.
    pub(super) steps: u64,
    /// Where the last step's batch began: its epoch, and the place there.
    last: (u64, u64),
    /// After so many steps the model was evaluated last.
    pub(super) evaluated: Option<u64>,
    /// Epochs that were told to be over. The rest of one may be a batch in another world, so the next plan
    /// alone does not say whether it was.
    pub(super) told: u64,
    pub(super) best: Option<Evaluation>,
}

/// Where a batch begins, in epochs.
fn epochs((epoch, place): (u64, u64), sampler: &Sampler) -> f64 {
    epoch as f64 + place as f64 / sampler.config().samples as f64
}

fn begin(plan: &Plan) -> (u64, u64) {
    (plan.epoch(), plan.positions().start)
}

impl Progress {
    /// Whether as much is over, `next` being the step that would come.
    pub(super) fn reaches(&self, span: Span, next: &Plan, sampler: &Sampler) -> bool {
        match span {
            Span::Steps(steps) => self.steps >= steps,
            Span::Epochs(length) => epochs(begin(next), sampler) >= length,
        }
    }

    /// Whether a multiple of this was reached with the last step.
    pub(super) fn passes(&self, every: Span, next: &Plan, sampler: &Sampler) -> bool {
        match every {
            Span::Steps(steps) => steps > 0 && self.steps.is_multiple_of(steps),
            Span::Epochs(length) => {
                let times = |at| (epochs(at, sampler) / length).floor();
                length > 0.0 && times(begin(next)) > times(self.last)
            }
        }
    }

    /// A step of this batch is over.
    pub(super) fn trained(&mut self, plan: &Plan) {
        self.steps += 1;
        self.last = begin(plan);
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let (epoch, place) = self.last;
        let evaluated = self.evaluated.map_or(0, |steps| steps + 1);
        for word in [
            self.transactions,
            self.steps,
            epoch,
            place,
            evaluated,
            self.told,
        ] {
            put_word(&mut out, word);
        }
        if let Some(best) = &self.best {
            put_word(&mut out, best.step);
            put_float(&mut out, best.epochs);
            put_measured(&mut out, &best.measured);
        }
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Progress> {
        let mut fields = Fields(bytes);
        let mut progress = Progress {
            transactions: fields.word()?,
            steps: fields.word()?,
            last: (fields.word()?, fields.word()?),
            evaluated: fields.word()?.checked_sub(1),
            told: fields.word()?,
            best: None,
        };
        if !fields.0.is_empty() {
            progress.best = Some(Evaluation {
                step: fields.word()?,
                epochs: fields.float()?,
                measured: fields.measured()?,
                best: true,
            });
        }
        fields.end()?;
        Some(progress)
    }
}

impl Better {
    /// The value to compare.
    pub(super) fn value(self, measured: &Measured) -> f64 {
        match self {
            Better::LowerLoss => measured.mean_loss(),
            Better::Higher(at) => {
                let sum = measured.extra.get(at).copied();
                sum.map_or(f64::NAN, |sum| sum / measured.samples as f64)
            }
        }
    }

    pub(super) fn prefers(self, new: &Measured, old: &Measured) -> bool {
        let (new, old) = (self.value(new), self.value(old));
        let (new, old) = match self {
            Better::LowerLoss => (-new, -old),
            Better::Higher(_) => (new, old),
        };
        // What is no number is worse than any.
        new > old || (old.is_nan() && !new.is_nan())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn better_is_better_than_not_a_number() {
        let of = |value: f64| Measured {
            loss: 2.0 * value,
            samples: 2,
            extra: vec![0.0, -2.0 * value],
        };
        for better in [Better::LowerLoss, Better::Higher(1)] {
            assert!(better.prefers(&of(1.0), &of(1.5)));
            assert!(!better.prefers(&of(1.5), &of(1.0)) && !better.prefers(&of(1.0), &of(1.0)));
            assert!(better.prefers(&of(1.5), &of(f64::NAN)));
            assert!(!better.prefers(&of(f64::NAN), &of(1.5)));
        }
        // No such sum.
        assert!(!Better::Higher(2).prefers(&of(1.0), &of(2.0)));
    }
}
