//! Data-parallel training: a [`Model`] and its data, on as many ranks as there are.
//!
//! [`Parallel`] is what a step is: it deals the batch, adds gradients up, reduces them bucket by bucket while
//! backward goes on, and has the model step at commit. [`Trainer`] is the loop around it: with live membership,
//! with a launcher that restarts workers, or alone. An example is at [`Trainer`].

mod buckets;
mod bytes;
mod config;
mod feed;
mod handed;
mod held_out;
mod hooks;
mod lane;
mod made;
mod model;
pub mod optim;
mod parallel;
mod progress;
mod report;
mod reserve;
mod residuals;
mod restore;
mod results;
pub(crate) mod rules;
mod saves;
mod state;
mod sums;
mod tensors;
mod trainer;

#[cfg(test)]
mod tests;

pub use buckets::{BUCKET_SIZES, buckets_of};
pub use config::{Better, Codecs, Config, TrainError};
pub use feed::Feed;
pub use held_out::HeldOut;
pub use hooks::{Boundary, Hooks, Place};
pub use made::Outline;
pub use model::{BoxError, Gradients, Measured, Micro, Model, Update};
pub use parallel::Parallel;
pub use report::{Best, Evaluation, News, Report, Save, Times};
pub use restore::{Files, Store};
pub use results::Results;
pub use tensors::{Bytes, Layout, Load, Named, Room, load_model};
pub use trainer::{Ending, Options, RunError, Trainer};
