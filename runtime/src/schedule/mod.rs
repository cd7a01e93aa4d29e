//! Learning rates that follow the training and the size of the global batch.
//!
//! ```
//! use muster_runtime::schedule::{At, Base, Rate, Schedule, Scaling, Span, WarmUp};
//!
//! let schedule = Schedule {
//!     rate: 0.1,
//!     base: Base::Cosine { period: Span::Epochs(90.0), floor: 0.0, growth: None },
//!     scaling: Scaling::default(),
//!     warm_up: Some(WarmUp::goyal()),
//! };
//! // 1,024 samples a step are 4 times the reference of 256, and so is the rate, once warm.
//! let warm = schedule.factor(At { step: 10_000, epoch: 8.0 }, 1024);
//! assert_eq!(warm, 4.0);
//!
//! // The world shrinks to half in epoch 10: the rate follows at once.
//! let mut rate = Rate::new(schedule, 1024, Span::Epochs(1.0));
//! let at = At { step: 12_500, epoch: 10.0 };
//! let before = rate.at(at);
//! rate.set_batch(512, at);
//! assert_eq!(rate.at(at), before / 2.0);
//! ```
//!
//! A rate is a pure function, computed with additions, multiplications, divisions and square roots alone,
//! which IEEE 754 defines to the last bit: the mathematics library of the host, which may differ between the
//! nodes of a job, has no part in it.

mod cosine;
mod rate;

pub use rate::Rate;

use cosine::half_cosine;

/// How far a training is. `epoch` counts the samples that are committed, with the part of the epoch under
/// way ([`Sampler::epochs`](crate::data::Sampler::epochs)), so it goes on evenly when the batch changes;
/// `step` counts the steps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct At {
    pub step: u64,
    pub epoch: f64,
}

/// A length of training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Span {
    Steps(u64),
    Epochs(f64),
}

impl Span {
    /// How far `at` is, in this span's unit.
    fn reached(self, at: At) -> f64 {
        match self {
            Span::Steps(_) => at.step as f64,
            Span::Epochs(_) => at.epoch,
        }
    }

    fn len(self) -> f64 {
        match self {
            Span::Steps(steps) => steps as f64,
            Span::Epochs(epochs) => epochs,
        }
    }

    /// The part of this span, begun at `from`, that is over: 0 to 1. A span without length is over.
    fn part(self, from: At, at: At) -> f64 {
        let gone = self.reached(at) - self.reached(from);
        // Without a length this is no number, or infinite.
        let part = gone / self.len();
        if part < 1.0 { part.max(0.0) } else { 1.0 }
    }
}

/// How the rate grows with the global batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    /// Not at all.
    None,
    /// As the batch, the reference having factor 1 (Goyal et al.: Accurate, Large Minibatch SGD, 2017,
    /// section 2.1), up to a batch from which on it grows as the batch's square root, without a jump:
    /// there linear scaling was seen to fail (same, figure 1), and the square root keeps the noise of a
    /// step's update constant (Krizhevsky: One Weird Trick, 2014, section 5; Hoffer et al.: Train Longer,
    /// Generalize Better, 2017, section 4).
    Linear { reference: u64, up_to: u64 },
    /// As the batch's square root from the beginning.
    SquareRoot { reference: u64 },
}

impl Default for Scaling {
    /// Linear from 256 to 8,192 samples, the square root beyond.
    fn default() -> Scaling {
        Scaling::Linear {
            reference: 256,
            up_to: 8192,
        }
    }
}

impl Scaling {
    /// Factor of a rate that is right for the reference. A reference of zero counts as one.
    pub fn factor(self, batch: u64) -> f64 {
        let ratio = |batch: u64, to: u64| batch as f64 / to.max(1) as f64;
        match self {
            Scaling::None => 1.0,
            Scaling::Linear { reference, up_to } if batch <= up_to => ratio(batch, reference),
            Scaling::Linear { reference, up_to } => {
                ratio(up_to, reference) * ratio(batch, up_to).sqrt()
            }
            Scaling::SquareRoot { reference } => ratio(batch, reference).sqrt(),
        }
    }
}

/// A linear rise at the beginning, step by step (Goyal et al. 2017, section 2.2).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WarmUp {
    pub over: Span,
    pub from: WarmUpFrom,
}

impl WarmUp {
    /// Over 5 epochs from the unscaled rate, as the paper has it.
    pub fn goyal() -> WarmUp {
        WarmUp {
            over: Span::Epochs(5.0),
            from: WarmUpFrom::Unscaled,
        }
    }
}

/// Where a warm-up begins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WarmUpFrom {
    /// At the rate of the reference batch; for a smaller batch there is no warm-up.
    Unscaled,
    /// At this part of the full rate, 0 to 1.
    Part(f64),
}

/// Course of the rate over the training, before scaling. Counted from its beginning, warm-up included.
#[derive(Clone, Debug, PartialEq)]
pub enum Base {
    Constant,
    /// Multiplied with `factor` at each of these.
    Step {
        at: Vec<Span>,
        factor: f64,
    },
    /// WarmUpFrom 1 down to `floor` (a part of the rate) along half a cosine, `period` long (Loshchilov and
    /// Hutter: SGDR, 2017, equation 5). Then it stays there, or with `growth` starts again, each period as
    /// many times as long as the one before; below 1 counts as 1.
    Cosine {
        period: Span,
        floor: f64,
        growth: Option<f64>,
    },
}

/// The most restarts of a cosine that are counted; after them it stays in the last one's period.
const MOST_RESTARTS: u32 = 10_000;

impl Base {
    /// 0 to 1.
    pub fn factor(&self, at: At) -> f64 {
        match self {
            Base::Constant => 1.0,
            Base::Step { at: steps, factor } => {
                let passed = steps.iter().filter(|span| span.reached(at) >= span.len());
                passed.fold(1.0, |product, _| product * factor)
            }
            Base::Cosine {
                period,
                floor,
                growth,
            } => floor + (1.0 - floor) * half_cosine(turn(*period, *growth, at)),
        }
    }
}

/// The part of the current period that is over.
fn turn(period: Span, growth: Option<f64>, at: At) -> f64 {
    let Some(growth) = growth.map(|growth| growth.max(1.0)) else {
        return period.part(At::default(), at);
    };
    let (mut gone, mut len) = (period.reached(at), period.len());
    if len.is_nan() || len <= 0.0 {
        return 1.0;
    }
    if growth == 1.0 {
        return (gone % len) / len;
    }
    for _ in 0..MOST_RESTARTS {
        if gone < len {
            break;
        }
        gone -= len;
        len *= growth;
    }
    (gone / len).min(1.0)
}

/// A learning rate over a training, for any global batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// For the reference batch, after the warm-up.
    pub rate: f64,
    pub base: Base,
    pub scaling: Scaling,
    pub warm_up: Option<WarmUp>,
}

impl Schedule {
    /// The rate of a step of `batch` samples over all ranks.
    pub fn at(&self, at: At, batch: u64) -> f64 {
        self.rate * self.base.factor(at) * self.factor(at, batch)
    }

    /// The part of [`at`](Self::at) that depends on the batch: scaling and warm-up.
    pub fn factor(&self, at: At, batch: u64) -> f64 {
        self.warmed(at, self.scaling.factor(batch))
    }

    fn warmed(&self, at: At, full: f64) -> f64 {
        let Some(WarmUp { over, from }) = self.warm_up else {
            return full;
        };
        let begin = match from {
            WarmUpFrom::Unscaled => full.min(1.0),
            WarmUpFrom::Part(part) => full * part.clamp(0.0, 1.0),
        };
        between(begin, full, over.part(At::default(), at))
    }
}

/// Exactly `to` at 1.
fn between(from: f64, to: f64, part: f64) -> f64 {
    if part < 1.0 {
        from + (to - from) * part
    } else {
        to
    }
}

#[cfg(test)]
mod tests;
