//! Interface of a model to the trainer: gradients of samples, and a step of its optimizer.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::tensors::{Load, Named, STATE};

/// Any failure of a user's code.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why a model does not decode a state.
pub(super) const OTHER: &str = "what was saved is the state of another model";

/// A model with its optimizer, on one rank.
///
/// Its parameters are thought of as one list of `f32`, the arena, tensor after tensor; `buckets` cuts that
/// list into what is reduced together. *Registered* is all that [`encode`](Self::encode) shows: parameters,
/// the optimizer's state, and buffers such as the running statistics of a batch normalization. It changes in
/// [`update`](Self::update) and [`decode`](Self::decode) alone: a step that was interrupted is done again,
/// perhaps with other samples, from exactly the state it began with.
///
/// Every rank makes its model with the same sizes. Initial values may differ: rank 0's are handed to all.
pub trait Model {
    /// Data that is loaded for one sample. `()` or `u64`, if the model has its data in memory
    /// ([`Feed::direct`](super::Feed::direct)).
    type Sample: Send + 'static;

    /// The length of the arena.
    fn parameters(&self) -> usize;

    /// Ranges of the arena, which cover it without overlap, in the order in which `backward` completes
    /// them: usually from the last layer to the first. [`buckets_of`](super::buckets_of) makes good ones.
    /// Called once.
    fn buckets(&self) -> Vec<Range<usize>>;

    /// The length of [`Measured::extra`]; the same at all times and on all ranks.
    fn extras(&self) -> usize {
        0
    }

    /// Adds the gradient of [`Micro::scale`] × the *sum* of the samples' losses to what `into` holds. Says
    /// [`into.ready`](Gradients::ready) as soon as a bucket has its last addition, so that it is reduced
    /// while the rest is computed.
    ///
    /// Nothing registered may change. A framework that moves running statistics by itself has them put back
    /// before this returns; what they should become goes through [`Measured::extra`] to `update`. Whatever
    /// is drawn (dropout, augmentation) is drawn from [`Micro::seed`].
    ///
    /// # Errors
    /// The training cannot go on, in this process.
    fn backward(
        &mut self,
        micro: &Micro<Self::Sample>,
        into: &mut Gradients<'_>,
    ) -> Result<Measured, BoxError>;

    /// The loss of held-out samples (and, in `extra`, whatever else is to be summed, such as right answers),
    /// without gradients. Nothing registered may change.
    ///
    /// # Errors
    /// The training cannot go on, in this process.
    fn evaluate(&mut self, micro: &Micro<Self::Sample>) -> Result<Measured, BoxError>;

    /// One step of the optimizer. By what it is given alone, so that every rank comes to the same bits: no
    /// collectives, no clock, no randomness. Every rank gets the same bits.
    fn update(&mut self, update: &Update<'_>);

    /// The error of [`update`](Self::update), [`encode`](Self::encode) or [`decode`](Self::decode), which cannot fail:
    /// asked for after each, and told once. The training ends with it; what the model is then is neither saved nor
    /// handed to others.
    fn fault(&mut self) -> Option<BoxError> {
        None
    }

    /// All that is registered. The same bytes on every rank; never none, unless there are no parameters.
    fn encode(&self) -> Vec<u8>;

    /// Becomes that; false, and nothing changed, if it is of another model.
    fn decode(&mut self, bytes: &[u8]) -> bool;

    /// All that is registered as tensors with names, for newcomers, and for checkpoints that any program can read: the
    /// same on every rank, and at all times of the same names, types and shapes. Borrowed tensors are copied once, and
    /// nothing waits for more. None, as here: [`encode`](Self::encode) is saved and handed over, as one tensor of
    /// bytes.
    ///
    /// # Errors
    /// The training cannot go on, in this process.
    fn tensors(&self) -> Result<Vec<Named<'_>>, BoxError> {
        Ok(Vec::new())
    }

    /// Fills those of its [`tensors`](Self::tensors) that are to be loaded, from a checkpoint or from what others hand
    /// over. Also called with none that is to be loaded, when it is made, so that the memory is there before it is
    /// filled: what is not [picked](Load::picks) stays as it is.
    ///
    /// # Errors
    /// One of them is not there, or not what this model has. The model is of no use then.
    fn load(&mut self, from: &mut Load<'_>) -> Result<(), BoxError> {
        match from.bytes(STATE)? {
            Some(state) if !self.decode(&state) => Err(OTHER.into()),
            _ => Ok(()),
        }
    }
}

/// Some samples, computed together.
#[derive(Clone, Debug, PartialEq)]
pub struct Micro<S> {
    /// The step, counted from 0, and the epoch of the samples. In an evaluation: the steps and epochs that
    /// are over.
    pub step: u64,
    pub epoch: u64,
    /// The number of this microbatch within the step's batch, or within the held-out samples.
    pub number: usize,
    /// The samples' indices in the data set, in order.
    pub indices: Vec<u64>,
    /// As the [`Feed`](super::Feed) loaded them, in the same order.
    pub samples: Vec<S>,
    /// The seed of all that is drawn. Doing these samples again, on any rank, draws the same.
    pub seed: u64,
    /// Factor of the loss before its gradient is taken: 1 without mixed precision.
    pub scale: f32,
    /// This rank's last one in the step: its gradients complete the sums.
    pub last: bool,
}

/// Sums over samples; not scaled.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measured {
    pub loss: f64,
    pub samples: u64,
    /// Whatever else the model wants summed over all samples of the step and all ranks, such as the sums that
    /// the statistics of a batch normalization are made of, or the number of right answers. Rounded in
    /// `f64`, in an order that depends on the world, as the gradients are.
    pub extra: Vec<f64>,
}

impl Measured {
    /// The loss per sample; NaN of none.
    pub fn mean_loss(&self) -> f64 {
        self.loss / self.samples as f64
    }

    /// Adds another's sums. An `extra` that is missing counts as zeros.
    pub fn add(&mut self, other: &Measured) {
        self.loss += other.loss;
        self.samples += other.samples;
        if self.extra.len() < other.extra.len() {
            self.extra.resize(other.extra.len(), 0.0);
        }
        for (sum, value) in self.extra.iter_mut().zip(&other.extra) {
            *sum += value;
        }
    }
}

/// Update of the model by a step: the same on every rank.
#[derive(Clone, Copy, Debug)]
pub struct Update<'a> {
    /// The step, counted from 0. Skipped ones count, so a step of Adam should be counted by the optimizer.
    pub step: u64,
    /// The learning rate.
    pub rate: f64,
    /// By bucket: the mean gradient over all samples of the step, clipped. It lies in the memory that
    /// [`Gradients::bucket`] shows during backward.
    pub gradient: &'a [Vec<f32>],
    /// Summed over all ranks and samples.
    pub measured: &'a Measured,
}

/// The sums that backward adds to, bucket by bucket.
///
/// The memory of a bucket is allocated once and stays where it is for the life of the trainer, so a
/// framework's tensor may be a view into it. Between [`ready`](Self::ready) and the end of the step it
/// belongs to the communication and must be neither read nor written; before the first microbatch of a
/// step it is zeroed.
pub struct Gradients<'a> {
    ranges: &'a [Range<usize>],
    buffers: &'a mut [Vec<f32>],
    /// Takes the buckets that are complete. `None`: more microbatches come.
    sink: Option<(&'a mut Sink<'a>, &'a AtomicUsize)>,
}

pub(super) type Sink<'a> = dyn FnMut(usize, Vec<f32>) + Send + 'a;

impl std::fmt::Debug for Gradients<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gradients")
            .field("ranges", &self.ranges)
            .field("last", &self.sink.is_some())
            .finish_non_exhaustive()
    }
}

impl<'a> Gradients<'a> {
    /// Over buffers of one's own, as long as the ranges: for models that are tried without a trainer.
    pub fn new(ranges: &'a [Range<usize>], buffers: &'a mut [Vec<f32>]) -> Gradients<'a> {
        Gradients {
            ranges,
            buffers,
            sink: None,
        }
    }

    pub(super) fn last(
        ranges: &'a [Range<usize>],
        buffers: &'a mut [Vec<f32>],
        sink: &'a mut Sink<'a>,
        done: &'a AtomicUsize,
    ) -> Gradients<'a> {
        Gradients {
            sink: Some((sink, done)),
            ..Gradients::new(ranges, buffers)
        }
    }

    /// The ranges of [`Model::buckets`].
    pub fn ranges(&self) -> &'a [Range<usize>] {
        self.ranges
    }

    /// The sums of a bucket. Empty, if it is ready, or there is none of that number.
    pub fn bucket(&mut self, bucket: usize) -> &mut [f32] {
        self.buffers
            .get_mut(bucket)
            .map_or(&mut [], Vec::as_mut_slice)
    }

    /// The sums of a part of the arena, such as a tensor. `None`, if it does not lie within one bucket, or
    /// that one is ready.
    pub fn part(&mut self, part: Range<usize>) -> Option<&mut [f32]> {
        let holds = |range: &Range<usize>| range.start <= part.start && part.end <= range.end;
        let bucket = self.ranges.iter().position(holds)?;
        let start = self.ranges.get(bucket)?.start;
        self.buffers
            .get_mut(bucket)?
            .get_mut(part.start - start..part.end - start)
    }

    /// Whether [`ready`](Self::ready) has an effect: this is the rank's last microbatch of the step.
    pub fn is_last(&self) -> bool {
        self.sink.is_some()
    }

    /// How many buckets of this step are reduced by now.
    pub fn reduced(&self) -> usize {
        let done = self.sink.as_ref().map(|(_, done)| done);
        done.map_or(0, |done| done.load(Ordering::Acquire))
    }

    /// The bucket has its last addition: it is reduced from now on, in the order of numbers, after those
    /// before it. Has no effect before the last microbatch, and when it is said again. Buckets of which it was
    /// never said are reduced when backward returns.
    pub fn ready(&mut self, bucket: usize) {
        let Some((sink, _)) = &mut self.sink else {
            return;
        };
        if let Some(buffer) = self.buffers.get_mut(bucket)
            && !buffer.is_empty()
        {
            sink(bucket, std::mem::take(buffer));
        }
    }
}
