//! A model of tch as the trainer wants it.

use std::ops::Range;

use tch::{Device, Tensor};

use super::arena::{Arena, blob};
use super::buffers::{Buffers, in_model};
use super::pass::{Pass, Way};
use super::shim::Hooks;
use super::{Net, Optimizer, Rule, TorchError, tensors};
use crate::gradient::compress::Shape;
use crate::train::{
    BUCKET_SIZES, BoxError, Gradients, Load, Measured, Micro, Model, Named, Update,
};

/// One microbatch as tensors, its samples along the first dimension; on any device.
#[derive(Debug)]
pub struct Labelled {
    pub input: Tensor,
    pub target: Tensor,
}

/// Makes tensors of a microbatch. Whatever it draws at random it should draw from tch's generator, which is
/// seeded before each call, or from [`Micro::seed`].
pub type Source<S> = Box<dyn Fn(&Micro<S>) -> Result<Labelled, BoxError> + Send>;

/// The *sum* of the losses of a microbatch's samples, by what the net gives for it and the target: one
/// element, in `f32`.
pub type Loss = Box<dyn Fn(&Tensor, &Tensor) -> Tensor + Send>;

/// Other sums over a microbatch's samples, such as the number of right answers.
pub struct Score {
    /// How many numbers there are; always as many.
    pub len: usize,
    pub of: Scoring,
}

/// The numbers, by what the net gives for a microbatch and the target.
pub type Scoring = Box<dyn Fn(&Tensor, &Tensor) -> Vec<f64> + Send>;

impl std::fmt::Debug for Score {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Score")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// Parts of a [`TorchModel`].
pub struct Parts<S> {
    pub net: Net,
    pub loss: Loss,
    pub train: Source<S>,
    pub held_out: Source<S>,
    /// Score that an evaluation also sums up: [`TorchModel::scores`].
    pub score: Option<Score>,
}

impl<S> std::fmt::Debug for Parts<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parts")
            .field("net", &self.net)
            .finish_non_exhaustive()
    }
}

/// How buckets get ready while the rest of backward is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overlap {
    /// By hooks on the gradients, as soon as a bucket's last one is there.
    #[default]
    Hooks,
    /// Backward goes through the net's stages one after the other; a bucket is ready when the stage that
    /// made its first variable is done. Costs one product and one sum over what passes between two stages.
    Staged,
    /// Not at all: all are ready at the end.
    None,
}

/// How a [`TorchModel`] is trained.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    pub rule: Rule,
    /// Parameters of the first bucket and of the later ones.
    pub buckets: [usize; 2],
    pub overlap: Overlap,
}

impl Options {
    /// With buckets of 1 MiB and 25 MiB, and hooks.
    pub fn new(rule: Rule) -> Options {
        Options {
            rule,
            buckets: BUCKET_SIZES,
            overlap: Overlap::default(),
        }
    }
}

/// A [`Net`] with its loss, data and optimizer.
///
/// An error of the device that [`update`](Model::update) or [`decode`](Model::decode) meets is told by
/// [`fault`](Model::fault), and what [`encode`](Model::encode) meets makes an empty encoding, which is neither
/// saved nor handed out.
#[derive(Debug)]
pub struct TorchModel<S> {
    parts: Parts<S>,
    overlap: Overlap,
    /// Taken off before the arena goes.
    hooks: Option<Hooks>,
    arena: Arena,
    buffers: Buffers,
    optimizer: Optimizer,
    failed: Option<TorchError>,
}

const MAGIC: &[u8; 8] = b"MTORCH 1";

impl<S> TorchModel<S> {
    /// The net's variables are moved into one flat tensor; they stay usable.
    ///
    /// # Errors
    /// The net has no stage, or trains variables that are not in `f32` or not on its device.
    pub fn new(parts: Parts<S>, options: &Options) -> Result<TorchModel<S>, TorchError> {
        if parts.net.stages.is_empty() {
            return Err(TorchError::NoStage);
        }
        // First: it looks which buffers are the variables themselves.
        let buffers = Buffers::new(parts.net.variables())?;
        let arena = Arena::new(parts.net.variables(), options.buckets)?;
        let hooks = match options.overlap {
            Overlap::Hooks => Some(arena.hooks()?),
            Overlap::Staged | Overlap::None => None,
        };
        Ok(TorchModel {
            optimizer: Optimizer::new(options.rule, arena.len(), arena.device)?,
            parts,
            overlap: options.overlap,
            hooks,
            arena,
            buffers,
            failed: None,
        })
    }

    pub fn net(&self) -> &Net {
        &self.parts.net
    }

    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// All parameters in one tensor: variables in the order in which they were made, each beginning at a
    /// multiple of 16 elements.
    pub fn flat(&self) -> &Tensor {
        &self.arena.flat
    }

    /// The results of [`Score`], of the sums of an evaluation.
    pub fn scores<'a>(&self, measured: &'a Measured) -> &'a [f64] {
        measured.extra.get(self.buffers.len()..).unwrap_or(&[])
    }

    /// The matrices of a bucket, for PowerSGD: a variable's first dimension by all others.
    pub fn shapes(&self, bucket: usize) -> Vec<Shape> {
        self.arena.shapes(bucket)
    }

    fn score_len(&self) -> usize {
        self.parts.score.as_ref().map_or(0, |score| score.len)
    }

    /// Forward and backward; the loss.
    fn compute(
        &mut self,
        batch: &Labelled,
        scale: f32,
        into: &mut Gradients<'_>,
    ) -> Result<f64, TorchError> {
        let arena = self.arena.lend(|bucket| {
            let memory = into.bucket(bucket);
            (memory.as_mut_ptr(), memory.len())
        })?;
        let device = arena.device;
        let (input, target) = (
            batch.input.f_to_device(device)?,
            batch.target.f_to_device(device)?,
        );
        let net = &self.parts.net;
        let pass = match self.overlap {
            Overlap::Staged => Pass::staged(net, &input),
            Overlap::Hooks | Overlap::None => Pass::whole(net, &input),
        };
        let loss = (self.parts.loss)(pass.output(), &target);
        if loss.numel() != 1 {
            let elements = loss.numel();
            return Err(TorchError::Loss { elements });
        }
        let root = if scale == 1.0 {
            loss.shallow_clone()
        } else {
            loss.f_mul_scalar(f64::from(scale))?
        };
        let last = into.is_last();
        let mut way = Way::new(&arena, into)?;
        match (&self.hooks, self.overlap) {
            (Some(hooks), _) if last => {
                hooks.during(&mut |bucket| way.ready(bucket), || root.f_backward())?;
            }
            (_, Overlap::Staged) => {
                let ends = &net.ends;
                pass.backward(root, |stage| {
                    let start = stage.checked_sub(1).and_then(|before| ends.get(before));
                    for bucket in 0..arena.ranges.len() {
                        if arena.first_made(bucket) >= start.copied() {
                            way.ready(bucket);
                        }
                    }
                })?;
            }
            _ => root.f_backward()?,
        }
        way.finish()?;
        Ok(loss.f_double_value(&[])?)
    }

    fn apply(&mut self, update: &Update<'_>) -> Result<(), TorchError> {
        let mut parts = Vec::new();
        for (range, gradient) in self.arena.ranges.iter().zip(update.gradient) {
            let expected = range.len();
            if gradient.len() != expected {
                let got = gradient.len();
                return Err(TorchError::Bucket { got, expected });
            }
            // SAFETY: the gradient outlives this call, after which the tensor is gone; it is only read.
            let here = unsafe { blob(gradient.as_ptr(), &[expected as i64])? };
            parts.push((range.start, here.f_to_device(self.arena.device)?));
        }
        self.optimizer
            .step_parts(&self.arena.flat, &parts, update.rate)?;
        let measured = update.measured;
        self.buffers.commit(measured.samples, &measured.extra)
    }

    fn encoded(&self) -> Result<Vec<u8>, TorchError> {
        let mut out = MAGIC.to_vec();
        for len in [self.arena.len(), self.buffers.len()] {
            out.extend_from_slice(&(len as u64).to_le_bytes());
        }
        tensors::put(&mut out, &self.arena.flat)?;
        self.optimizer.encode(&mut out)?;
        self.buffers.encode(&mut out)?;
        Ok(out)
    }
}

impl<S: Send + 'static> Model for TorchModel<S> {
    type Sample = S;

    fn parameters(&self) -> usize {
        self.arena.len()
    }

    fn buckets(&self) -> Vec<Range<usize>> {
        self.arena.ranges.clone()
    }

    fn extras(&self) -> usize {
        self.buffers.len() + self.score_len()
    }

    fn backward(
        &mut self,
        micro: &Micro<S>,
        into: &mut Gradients<'_>,
    ) -> Result<Measured, BoxError> {
        if let Some(error) = self.failed.take() {
            return Err(error.into());
        }
        tch::manual_seed(micro.seed.cast_signed());
        let batch = (self.parts.train)(micro)?;
        let samples = micro.indices.len() as u64;
        let loss = self.compute(&batch, micro.scale, into);
        let mut extra = vec![0.0; self.extras()];
        self.buffers.put_back(samples, &mut extra)?;
        Ok(Measured {
            loss: loss?,
            samples,
            extra,
        })
    }

    fn evaluate(&mut self, micro: &Micro<S>) -> Result<Measured, BoxError> {
        let _guard = tch::no_grad_guard();
        tch::manual_seed(micro.seed.cast_signed());
        let batch = (self.parts.held_out)(micro)?;
        let device: Device = self.arena.device;
        let output = self
            .parts
            .net
            .forward(&batch.input.f_to_device(device)?, false);
        let target = batch.target.f_to_device(device)?;
        let mut extra = vec![0.0; self.buffers.len()];
        if let Some(score) = &self.parts.score {
            let numbers = (score.of)(&output, &target);
            if numbers.len() != score.len {
                let (got, expected) = (numbers.len(), score.len);
                return Err(TorchError::Score { got, expected }.into());
            }
            extra.extend(numbers);
        }
        Ok(Measured {
            loss: (self.parts.loss)(&output, &target).f_double_value(&[])?,
            samples: micro.indices.len() as u64,
            extra,
        })
    }

    fn update(&mut self, update: &Update<'_>) {
        if let Err(error) = self.apply(update) {
            self.failed.get_or_insert(error);
        }
    }

    fn fault(&mut self) -> Option<BoxError> {
        self.failed.take().map(Into::into)
    }

    fn encode(&self) -> Vec<u8> {
        self.encoded().unwrap_or_default()
    }

    /// Parameters and buffers by the names of the `VarStore`, and the optimizer's state by PyTorch's.
    fn tensors(&self) -> Result<Vec<Named<'_>>, BoxError> {
        let layout = &self.arena.layout;
        let mut all = tensors::named(layout, &self.arena.flat, in_model)?;
        all.extend(self.buffers.named()?);
        all.extend(self.optimizer.named(layout)?);
        Ok(all)
    }

    fn load(&mut self, from: &mut Load<'_>) -> Result<(), BoxError> {
        let layout = &self.arena.layout;
        tensors::load(layout, &mut self.arena.flat, in_model, from)?;
        self.buffers.load(from)?;
        self.optimizer.load(layout, from)
    }

    fn decode(&mut self, bytes: &[u8]) -> bool {
        let Some(decoded) = self.decoded(bytes) else {
            return false;
        };
        let (parameters, optimizer, buffers) = decoded;
        let taken = tensors::write(&mut self.arena.flat, &parameters)
            .and_then(|()| self.optimizer.restore(&optimizer))
            .and_then(|()| self.buffers.restore(&buffers));
        match taken {
            Ok(()) => true,
            Err(error) => {
                // What it is now is neither.
                self.failed = Some(error);
                true
            }
        }
    }
}

impl<S> TorchModel<S> {
    fn decoded<'a>(
        &self,
        bytes: &'a [u8],
    ) -> Option<(Vec<f32>, super::State, super::buffers::Decoded<'a>)> {
        let mut rest = bytes.strip_prefix(MAGIC)?;
        for expected in [self.arena.len(), self.buffers.len()] {
            let (len, after) = rest.split_first_chunk()?;
            if u64::from_le_bytes(*len) != expected as u64 {
                return None;
            }
            rest = after;
        }
        let parameters = tensors::take(&mut rest, self.arena.len())?;
        let optimizer = self.optimizer.decode(&mut rest)?;
        let buffers = self.buffers.decode(&mut rest)?;
        rest.is_empty().then_some((parameters, optimizer, buffers))
    }
}

/// A source whose data set is two tensors in memory, with the samples along the first dimension.
pub fn rows<S>(input: Tensor, target: Tensor) -> Source<S> {
    Box::new(move |micro| {
        let indices: Vec<i64> = micro.indices.iter().map(|i| i.cast_signed()).collect();
        let indices = Tensor::f_from_slice(&indices)?.f_to_device(input.device())?;
        Ok(Labelled {
            input: input.f_index_select(0, &indices)?,
            target: target.f_index_select(0, &indices)?,
        })
    })
}
