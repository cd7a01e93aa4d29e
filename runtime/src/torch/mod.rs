//! Models of tch (PyTorch's C++ library), trained on live membership. Feature `torch`.
//!
//! [`Net`] is a model: variables, and a forward pass in one stage or several. [`TorchModel`] makes of it, of a
//! loss and of data what a [`Trainer`](crate::train::Trainer) trains. [`Optimizer`] is SGD, Adam and AdamW with
//! a state that can be read and handed over. [`horovod`] is for training loops of one's own, in workers that are
//! restarted with every generation.
//!
//! - Parameters lie in one flat tensor, and so do the running statistics of batch normalizations; a
//!   variable of the `VarStore` is a view into it.
//! - On a CPU a gradient is a view into the memory that is reduced: nothing is copied. On a GPU it goes
//!   through pinned memory of the host, a bucket at a time.
//! - A bucket is reduced while the gradients of earlier layers are computed: see [`Overlap`].
//!
//! How to build it, and what it costs: docs/torch.md.
//!
//! A whole worker, which learns what lies within a circle. `muster run --nproc-per-node 2 -- ./worker` trains it on two
//! ranks, `torchrun` too, and `./worker` alone:
//!
//! ```
//! use std::error::Error;
//!
//! use muster_runtime::Session;
//! use muster_runtime::data::{Batch, SamplerConfig, Tail};
//! use muster_runtime::schedule::{Base, Scaling, Schedule, Span};
//! use muster_runtime::torch::{Net, Options, Parts, Rule, TorchModel, rows};
//! use muster_runtime::train::{Config, Ending, Feed, Parallel, Trainer};
//! use tch::nn::{self, Module};
//! use tch::{Device, Kind, Reduction, Tensor};
//!
//! fn main() -> Result<(), Box<dyn Error>> {
//!     // Points of a square, and which of them lie within a circle.
//!     let axis = Tensor::linspace(-1.0, 1.0, 24, (Kind::Float, Device::Cpu));
//!     let points = Tensor::cartesian_prod(&[&axis, &axis]);
//!     let squares = points.square().sum_dim_intlist(1, false, Kind::Float);
//!     let inside = squares.lt(0.6).to_kind(Kind::Int64);
//!     let samples = points.size()[0] as u64;
//!
//!     let device = Device::cuda_if_available();
//!     let mut net = Net::new(device);
//!     net.stage("hidden", |path| {
//!         let layer = nn::linear(path, 2, 32, Default::default());
//!         move |x, _train| layer.forward(x).tanh()
//!     });
//!     net.stage("scores", |path| {
//!         let layer = nn::linear(path, 32, 2, Default::default());
//!         move |x, _train| layer.forward(x)
//!     });
//!     let parts = Parts {
//!         net,
//!         // The sum over a microbatch's samples.
//!         loss: Box::new(|scores, inside| {
//!             scores.cross_entropy_loss::<Tensor>(inside, None, Reduction::Sum, -100, 0.0)
//!         }),
//!         train: rows(points.copy(), inside.copy()),
//!         held_out: rows(points, inside),
//!         score: None,
//!     };
//!     let model = TorchModel::new(parts, &Options::new(Rule::adam_w()))?;
//!
//!     // 64 samples a step over all ranks, dealt to them by 16.
//!     let sampler = SamplerConfig { samples, seed: 1, batch: Batch::Global(64), microbatch: 16, tail: Tail::Keep };
//!     let schedule = Schedule { rate: 0.05, base: Base::Constant, scaling: Scaling::None, warm_up: None };
//!     let config = Config::new(sampler, Span::Epochs(10.0), schedule);
//!     let training = Parallel::new(model, Feed::direct(|_| Ok(())), config)?;
//!
//!     // None without Muster.
//!     let mut session = Session::from_env()?;
//!     let (ending, training) = Trainer::new(training).run(session.as_mut())?;
//!     if ending == Ending::Complete {
//!         let net = training.model().net();
//!         let two = Tensor::from_slice(&[0.1f32, 0.2, 0.9, -0.9]).view([2, 2]);
//!         let within = net.forward(&two.to_device(device), false).argmax(1, false);
//!         println!("the first point lies within, the second does not: {within}");
//! #       assert_eq!(Vec::<i64>::try_from(within)?, [1, 0]);
//!     }
//!     Ok(())
//! }
//! ```

mod arena;
mod buffers;
pub mod horovod;
mod model;
mod net;
mod optimizer;
mod pass;
mod shim;
mod tensors;

use tch::TchError;

pub use model::{
    Labelled, Loss, Options, Overlap, Parts, Score, Scoring, Source, TorchModel, rows,
};
pub use net::{Net, Stage};
pub use optimizer::{Adam, Optimizer, Rule, State};

/// Errors of libtorch and of tensors.
#[derive(Debug, thiserror::Error)]
pub enum TorchError {
    #[error(transparent)]
    Torch(#[from] TchError),
    #[error("libtorch refuses: {0}")]
    Shim(String),
    #[error(
        "the variable {name} is of kind {kind:?}; train in Float (autocast computes in 16 bits), and convert others before the model is made"
    )]
    Kind { name: String, kind: tch::Kind },
    #[error(
        "the variable {name} is of kind {kind:?}, which no checkpoint has; keep it outside of the model's variables"
    )]
    NoDtype { name: String, kind: tch::Kind },
    #[error("{what} has shape, kind and device {got}, not {expected}")]
    Shape {
        what: &'static str,
        got: String,
        expected: String,
    },
    #[error("the loss has {elements} elements; return one, the sum over the microbatch's samples")]
    Loss { elements: usize },
    #[error("the score has {got} numbers, not {expected}")]
    Score { got: usize, expected: usize },
    #[error("the model has no stage; add its forward pass with Net::stage")]
    NoStage,
    #[error("the variables were made on {got:?}, not on {expected:?}; make all on one device")]
    Device {
        got: tch::Device,
        expected: tch::Device,
    },
    #[error(
        "a bucket of gradients has {got} elements, not {expected}; is this the memory of another model?"
    )]
    Bucket { got: usize, expected: usize },
}

#[cfg(test)]
mod tests;
