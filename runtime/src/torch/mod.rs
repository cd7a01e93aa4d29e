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

/// What goes wrong with tensors.
#[derive(Debug, thiserror::Error)]
pub enum TorchError {
    #[error(transparent)]
    Torch(#[from] TchError),
    #[error("libtorch refuses a hook on a gradient: {0}")]
    Shim(String),
    #[error(
        "the variable {name} is of kind {kind:?}; train in Float (autocast computes in 16 bits), and convert others before the model is made"
    )]
    Kind { name: String, kind: tch::Kind },
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
