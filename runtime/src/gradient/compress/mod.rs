//! Compressed all-reduces of gradients, one choice per bucket.
//!
//! | codec | bytes sent per rank and parameter, world w | what is lost | state per rank and parameter |
//! |---|---|---|---|
//! | [`Codec::None`] | 8 (w-1)/w | nothing | none |
//! | [`Codec::Fp16`], [`Codec::Bf16`] | 4 (w-1)/w | rounding | none |
//! | [`Codec::Int8`] | 2 (w-1)/w and the scales | rounding, fed back by choice | 4 bytes with feedback |
//! | [`Codec::TopK`] | 8 density (w-1) | what is not sent, until it is | 4 bytes, 8 with momentum |
//! | [`Codec::PowerSgd`] | 8 (w-1)/w of rank (rows + columns) / (rows columns) | what is not of low rank, until it is | 4 bytes |
//!
//! **Error feedback**: what a rank has not sent stays in its residual and is added to its next gradient
//! (Seide et al.: 1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al.: Error Feedback Fixes
//! SignSGD, 2019). At every commit, the result plus the change of all residuals is the sum of all inputs,
//! but for rounding in `f32`.
//!
//! **Lasting state** is in two parts. [`Own`] is one rank's: it goes with a dead rank, is handed to a survivor
//! when a rank leaves ([`Bucket::hand_over`]), and is zero for newcomers. The shared part
//! ([`Bucket::encode_shared`]) is the same on every rank, and belongs to the state that newcomers copy.
//!
//! **Not a number**, and infinity, reach the result in every codec, so that a step that overflowed is seen
//! ([`Scaler::judge`](super::Scaler::judge)).
//!
//! Inputs should be sums over samples, in units that do not change from step to step: unscaled, and divided
//! by the reduced number of samples only after the reduction.

mod cast;
mod int8;
mod powersgd;
mod select;
mod state;
mod streamed;
mod topk;

use half::{bf16, f16};

pub use cast::{Half, narrow, widen};
pub use powersgd::Shape;
pub use select::Largest;
pub use state::{Own, Reduced, reshard};

use crate::collective::{Group, GroupError, Op};
use cast::Cast;
use int8::Int8;
use powersgd::PowerSgd;
use topk::TopK;

/// The most parameters of one bucket.
pub const MAX_LEN: usize = 1 << 31;

/// How a bucket's gradients travel. All ranks choose the same.
#[derive(Clone, Debug, PartialEq)]
pub enum Codec {
    None,
    /// Divided by a power of two that the world fits in, rounded to 16 bits, added in `f32`.
    Fp16,
    /// Rounded to the upper 16 bits, added in `f32`.
    Bf16,
    /// 8 bits a value, one `f32` scale per `block` values (Dettmers: 8-Bit Approximations for Parallelism
    /// in Deep Learning, 2016). Each rank adds up one part, rounds it again and sends it to all; that
    /// rounding is in its own residual.
    Int8 {
        block: usize,
        feedback: bool,
    },
    /// The largest part of the values by their absolute, at least one; of equal ones the first (Lin et al.:
    /// Deep Gradient Compression, ICLR 2018). With `momentum`, its algorithm 4: each rank keeps a velocity,
    /// of which what is sent is cut off, and the optimizer should have no momentum of its own.
    TopK {
        density: f64,
        momentum: Option<f32>,
    },
    /// A product of two thin matrices for each of the bucket's (Vogels et al.: PowerSGD, NeurIPS 2019,
    /// algorithms 1 and 2), begun from the last step's. A matrix that is too small to gain travels as it
    /// is.
    PowerSgd {
        rank: usize,
        shapes: Vec<Shape>,
    },
}

/// A codec that cannot work.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum CodecError {
    #[error("a bucket of {len} parameters is larger than {MAX_LEN}; make more buckets")]
    TooLong { len: usize },
    #[error("a density of {density} is not above 0 and at most 1")]
    Density { density: f64 },
    #[error("a momentum of {momentum} is not between 0 and 1")]
    Momentum { momentum: f32 },
    #[error("blocks, and the rank of PowerSGD, must be one at least")]
    Zero,
    #[error("the shapes have {shapes} elements, the bucket {len}")]
    Shapes { shapes: usize, len: usize },
}

/// One bucket of parameters: a codec with its state.
#[derive(Debug)]
pub struct Bucket {
    len: usize,
    work: Work,
    own: Own,
    /// The `own` of the next commit, if it is `prepared`: from the beginning of the step's last
    /// collective on, whether or not this rank sees that one's end.
    next: Own,
    prepared: bool,
    /// The same on every rank; empty but for PowerSGD.
    shared: Vec<f32>,
}

#[derive(Debug)]
enum Work {
    Plain,
    Fp16(Cast<f16>),
    Bf16(Cast<bf16>),
    Int8(Int8),
    TopK(TopK),
    PowerSgd(PowerSgd),
}

/// Operands of a codec in one step.
struct Step<'a> {
    input: &'a [f32],
    /// Empty, for zero.
    own: &'a Own,
    next: &'a mut Own,
    /// To be set when `next` is complete, before the last collective.
    prepared: &'a mut bool,
    sum: &'a mut [f32],
}

impl Bucket {
    /// Of `len` parameters. The seed, the same on every rank, draws where PowerSGD begins.
    ///
    /// # Errors
    /// The codec cannot work with its sizes.
    pub fn new(codec: Codec, len: usize, seed: u64) -> Result<Bucket, CodecError> {
        if len > MAX_LEN {
            return Err(CodecError::TooLong { len });
        }
        let (mut residual, mut velocity, mut shared) = (0, 0, Vec::new());
        let work = match codec {
            Codec::None => Work::Plain,
            Codec::Fp16 => Work::Fp16(Cast::default()),
            Codec::Bf16 => Work::Bf16(Cast::default()),
            Codec::Int8 { block: 0, .. } => return Err(CodecError::Zero),
            Codec::Int8 { block, feedback } => {
                residual = if feedback { len } else { 0 };
                Work::Int8(Int8::new(block))
            }
            Codec::TopK { density, momentum } => {
                if !(density > 0.0 && density <= 1.0) {
                    return Err(CodecError::Density { density });
                }
                if let Some(momentum) = momentum {
                    if !(0.0..1.0).contains(&momentum) {
                        return Err(CodecError::Momentum { momentum });
                    }
                    velocity = len;
                }
                residual = len;
                Work::TopK(TopK::new(density, momentum, len))
            }
            Codec::PowerSgd { rank: 0, .. } => return Err(CodecError::Zero),
            Codec::PowerSgd { rank, shapes } => {
                let total = shapes
                    .iter()
                    .fold(0, |sum: usize, s| sum.saturating_add(s.len()));
                if total != len {
                    return Err(CodecError::Shapes { shapes: total, len });
                }
                residual = len;
                let power = PowerSgd::new(rank, &shapes, seed);
                shared = power.initial();
                Work::PowerSgd(power)
            }
        };
        Ok(Bucket {
            len,
            work,
            own: Own::zero(residual, velocity),
            next: Own::zero(residual, velocity),
            prepared: false,
            shared,
        })
    }

    /// Parameters.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The sum of all ranks' inputs, as the codec has it, the same bits on every rank. This bucket's state changes at
    /// [`commit`](Self::commit) only; a step that is done again calls this again.
    ///
    /// # Errors
    /// A peer is lost or out of step, or the input is not as long as the bucket. `into` holds nothing of
    /// use then.
    pub fn reduce(
        &mut self,
        group: &mut Group,
        input: &[f32],
        into: &mut Reduced,
    ) -> Result<(), GroupError> {
        self.prepared = false;
        if input.len() != self.len {
            return Err(GroupError::Length {
                what: "the input of a bucket",
                got: input.len(),
                expected: self.len,
            });
        }
        let own = std::mem::take(&mut self.own);
        let done = self.run(group, input, &own, into);
        self.own = own;
        done
    }

    /// As [`reduce`](Self::reduce), for a rank that has no state yet and contributes nothing: a newcomer
    /// that listens. Its own part stays as it is. (With [`Codec::Int8`] the rounding of the part that it adds
    /// up is lost.)
    ///
    /// # Errors
    /// A peer is lost or out of step.
    pub fn listen(&mut self, group: &mut Group, into: &mut Reduced) -> Result<(), GroupError> {
        let zeros = vec![0.0; self.len];
        let done = self.run(group, &zeros, &Own::default(), into);
        self.prepared = false;
        done
    }

    /// An `own` without values counts as zero.
    fn run(
        &mut self,
        group: &mut Group,
        input: &[f32],
        own: &Own,
        into: &mut Reduced,
    ) -> Result<(), GroupError> {
        let Reduced { sum, shared } = into;
        sum.resize(self.len, 0.0);
        shared.resize(self.shared.len(), 0.0);
        let step = Step {
            input,
            own,
            next: &mut self.next,
            prepared: &mut self.prepared,
            sum,
        };
        match &mut self.work {
            Work::Plain => group.all_reduce(Op::Sum, step.input, step.sum),
            Work::Fp16(cast) => cast.reduce(group, step.input, step.sum),
            Work::Bf16(cast) => cast.reduce(group, step.input, step.sum),
            Work::Int8(int8) => int8.reduce(group, step),
            Work::TopK(topk) => topk.reduce(group, step),
            Work::PowerSgd(power) => power.reduce(group, step, &self.shared, shared),
        }
    }

    /// Takes over what the step has changed. A rank whose last collective failed, and that got the results
    /// from another, commits them too: its contribution is in them.
    pub fn commit(&mut self, reduced: &Reduced) {
        if std::mem::take(&mut self.prepared) {
            std::mem::swap(&mut self.own, &mut self.next);
        }
        if reduced.shared.len() == self.shared.len() {
            self.shared.copy_from_slice(&reduced.shared);
        }
    }

    /// Keeps nothing back any more: for a rank that was left out, and returns as a newcomer.
    pub fn clear_own(&mut self) {
        self.prepared = false;
        self.own.clear();
    }

    /// The step is skipped on all ranks: nothing changes.
    pub fn skip(&mut self) {
        self.prepared = false;
    }

    /// Values that this rank has not sent yet.
    pub fn own(&self) -> &Own {
        &self.own
    }

    /// Takes another one's place, at a boundary; false, and nothing changed, if it is of another codec or
    /// size.
    pub fn set_own(&mut self, own: Own) -> bool {
        let fits = self.own.fits(&own);
        if fits {
            self.own = own;
        }
        fits
    }

    /// A boundary before which the ranks `leaving`, in ascending order, go for good: the first rank that
    /// stays takes over what they have not sent. All ranks call it.
    ///
    /// # Errors
    /// A peer is lost or out of step; nothing is changed.
    pub fn hand_over(&mut self, group: &mut Group, leaving: &[u32]) -> Result<(), GroupError> {
        let heir = (0..group.world()).find(|rank| !leaving.contains(rank));
        let Some(heir) = heir else {
            return Ok(());
        };
        let mut all = Own::zero(self.own.residual.len(), self.own.velocity.len());
        let mut came = all.clone();
        for rank in leaving {
            group.broadcast(*rank, &self.own.residual, &mut came.residual)?;
            group.broadcast(*rank, &self.own.velocity, &mut came.velocity)?;
            all.absorb(&came);
        }
        if group.rank() == heir {
            self.own.absorb(&all);
        } else if leaving.contains(&group.rank()) {
            self.own.clear();
        }
        Ok(())
    }

    /// The part that is the same on every rank; empty but for PowerSGD.
    pub(crate) fn shared(&self) -> &[f32] {
        &self.shared
    }

    /// Becomes that, if it is as long.
    pub(crate) fn set_shared(&mut self, shared: &[f32]) {
        if shared.len() == self.shared.len() {
            self.shared.copy_from_slice(shared);
        }
    }

    /// The part that is the same on every rank, for newcomers and checkpoints.
    pub fn encode_shared(&self) -> Vec<u8> {
        state::encode_shared(&self.shared)
    }

    /// Becomes that; false, and nothing changed, if it is of another codec or size.
    pub fn decode_shared(&mut self, bytes: &[u8]) -> bool {
        match state::decode_shared(bytes) {
            Some(shared) if shared.len() == self.shared.len() => {
                self.shared = shared;
                true
            }
            _ => false,
        }
    }
}

/// `to` becomes the input with what was kept back: all of one length, or nothing kept.
fn compensate(to: &mut [f32], input: &[f32], residual: &[f32]) {
    if residual.is_empty() {
        return to.copy_from_slice(input);
    }
    for ((to, input), kept) in to.iter_mut().zip(input).zip(residual) {
        *to = input + kept;
    }
}
