//! Data-parallel training: a [`Model`] and its data, on as many ranks as there are.

mod buckets;
mod feed;
mod model;

pub use buckets::{BUCKET_SIZES, buckets_of};
pub use feed::Feed;
pub use model::{BoxError, Gradients, Measured, Micro, Model, Update};
