//! Settings of a training, and why one cannot be.

use std::ops::Range;

use super::model::BoxError;
use super::reserve::NoMemory;
use crate::data::{LoadError, SamplerConfig, SamplerError};
use crate::gradient::ScalerConfig;
use crate::gradient::compress::{Codec, CodecError};
use crate::saving::{RestoreError, SaveError};
use crate::schedule::{Schedule, Span};

/// How a model is trained. The same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The data set's size, the seed, and the sizes of batches and microbatches.
    pub sampler: SamplerConfig,
    /// The training's length.
    pub until: Span,
    /// The learning rate, scaled by the global batch as it says.
    pub schedule: Schedule,
    /// How long the rise to a larger batch's rate takes, when the world grows.
    pub ramp: Span,
    /// How gradients travel.
    pub codecs: Codecs,
    /// Dynamic loss scaling, for gradients in 16 bits. Without it, a gradient that is not finite ends the
    /// training.
    pub mixed: Option<ScalerConfig>,
    /// The mean gradient is shortened to this norm at most, over all buckets.
    pub max_norm: Option<f64>,
    /// Which evaluation is the best one.
    pub better: Better,
    /// Whether the best model is kept, as [`Model::encode`](super::Model::encode) gives it: a copy in the memory
    /// of every rank.
    pub keep_best: bool,
    /// Whether every rank keeps memory for a second state, where ranks may join: what a newcomer copies is held in it,
    /// and a newcomer's copy comes into it. Without it that memory is had when it is needed, and all wait while the
    /// state is copied into pages that were not there before: about ten times as long.
    pub reserve: bool,
}

impl Config {
    /// Uncompressed, in single precision, without clipping; a larger world's rate is reached within an epoch; memory
    /// for newcomers is kept.
    pub fn new(sampler: SamplerConfig, until: Span, schedule: Schedule) -> Config {
        Config {
            sampler,
            until,
            schedule,
            ramp: Span::Epochs(1.0),
            codecs: Codecs::All(Codec::None),
            mixed: None,
            max_norm: None,
            better: Better::LowerLoss,
            keep_best: false,
            reserve: true,
        }
    }
}

/// The codec of each bucket.
#[derive(Clone, Debug, PartialEq)]
pub enum Codecs {
    /// One for all.
    All(Codec),
    /// By the number of the bucket.
    Each(Vec<Codec>),
}

/// Which of two evaluations is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// The one with the lower mean loss.
    LowerLoss,
    /// The one with the higher mean of [`Measured::extra`](super::Measured::extra) at this place, such as right
    /// answers per sample.
    Higher(usize),
}

/// A training cannot be set up, or cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    #[error("bucket {bucket}")]
    Codec {
        bucket: usize,
        #[source]
        source: CodecError,
    },
    #[error("{codecs} codecs were given for {buckets} buckets")]
    Codecs { codecs: usize, buckets: usize },
    #[error(
        "bucket {bucket} of the model is {range:?}; buckets must cover 0..{parameters} once, and none is empty"
    )]
    Buckets {
        bucket: usize,
        range: Range<usize>,
        parameters: usize,
    },
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error("the model cannot be made")]
    Make {
        #[source]
        source: BoxError,
    },
    #[error("the model failed in step {step}")]
    Model {
        step: u64,
        #[source]
        source: BoxError,
    },
    #[error("the model gives no state after step {step}; what it encodes is empty")]
    NoState { step: u64 },
    #[error(
        "there is no memory for the {bytes} bytes of a second state, for newcomers; look how much memory is free"
    )]
    Memory { bytes: usize },
    #[error(
        "the state that the other ranks hand out is not of this model: start all workers with one program and one configuration"
    )]
    Handed {
        #[source]
        source: BoxError,
    },
    #[error("no thread can be started; is the limit on processes reached?")]
    Thread(#[source] std::io::Error),
    #[error("the model gave {got} extra sums, not the {expected} that it announced")]
    Extras { got: usize, expected: usize },
    #[error(
        "a gradient of step {step} is not finite; lower the learning rate, clip (`max_norm`), or scale the loss (`mixed`)"
    )]
    NotFinite { step: u64 },
    #[error(
        "the ranks trained on {got} samples in step {step}, not on the {expected} of its batch: their states differ; restore a checkpoint"
    )]
    Samples { step: u64, got: u64, expected: u64 },
    #[error("the state before step {step} cannot be saved")]
    Save {
        step: u64,
        #[source]
        source: Box<SaveError>,
    },
    #[error("the checkpoint that this generation begins with cannot be opened")]
    Restore(#[from] RestoreError),
    #[error("the checkpoint of step {step} cannot be loaded")]
    Checkpoint {
        step: u64,
        #[source]
        source: BoxError,
    },
    #[error(
        "the checkpoint of step {step} has no `{name}` of this training: was it saved with another configuration? Its tensors can be loaded alone (`load_model`)"
    )]
    Piece { step: u64, name: &'static str },
    #[error(
        "the checkpoint of step {step} has the tensor `{name}`, and this model has none of that name: was the model changed? What both have can be loaded alone (`load_model`)"
    )]
    Left { step: u64, name: String },
    #[error("none of the model's tensors is to be loaded from the checkpoint of step {step}")]
    NothingPicked { step: u64 },
    #[error("cannot look for a checkpoint")]
    Store(#[source] BoxError),
    #[error(
        "no rank has a checkpoint, and none is at a training's beginning; give the trainer a `Store`, or start the workers anew"
    )]
    Nothing,
    #[error(
        "the state that rank {rank} gave (step {step}) is not of this training; use another place for its checkpoints, or the configuration and model that it was saved with"
    )]
    Foreign { step: u64, rank: u32 },
    #[error(
        "this rank's state has {ours} steps, the step is number {theirs}: restore a checkpoint"
    )]
    OutOfStep { ours: u64, theirs: u64 },
}

impl From<NoMemory> for TrainError {
    fn from(NoMemory(bytes): NoMemory) -> TrainError {
        TrainError::Memory { bytes }
    }
}

/// Ranges that cover the arena once, none of them empty.
pub(super) fn check(buckets: &[Range<usize>], parameters: usize) -> Result<(), TrainError> {
    let mut sorted: Vec<(usize, &Range<usize>)> = buckets.iter().enumerate().collect();
    sorted.sort_by_key(|(_, range)| range.start);
    let mut end = 0;
    for (bucket, range) in &sorted {
        if range.start != end || range.end <= range.start {
            return Err(TrainError::Buckets {
                bucket: *bucket,
                range: (*range).clone(),
                parameters,
            });
        }
        end = range.end;
    }
    match sorted.last() {
        Some((bucket, range)) if end != parameters => Err(TrainError::Buckets {
            bucket: *bucket,
            range: (*range).clone(),
            parameters,
        }),
        None if parameters > 0 => Err(TrainError::Buckets {
            bucket: 0,
            range: 0..0,
            parameters,
        }),
        _ => Ok(()),
    }
}
