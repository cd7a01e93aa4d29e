//! Stages between a gradient and the optimizer: accumulation, compression, loss scaling, clipping.
//!
//! All of it works on slices, keeps to the rule of the live step ([`live`](crate::live)), and gives the
//! same bits on every rank:
//!
//! - Inside a step nothing changes that lasts. [`compress::Bucket::reduce`] only prepares what
//!   [`commit`](compress::Bucket::commit) then does; [`Scaler::judge`] only reads.
//! - A gradient that is given is never overwritten.
//! - Decisions derive from reduced values, which all ranks share.
//!
//! ```
//! use std::time::Duration;
//! use muster_runtime::collective::{Group, GroupConfig, Sharing};
//! use muster_runtime::gradient::compress::{Bucket, Codec, Reduced};
//! use muster_runtime::gradient::{Accumulator, Scaler, ScalerConfig, Verdict, clip};
//!
//! # let mut group = Group::form(&GroupConfig {
//! #     rank: 0, world: 1, master: None, token: [0; 32], digest: [0; 32], sharing: Sharing::Auto,
//! #     form_within: Duration::ZERO, op_within: Duration::ZERO,
//! # })?;
//! let mut scaler = Scaler::new(ScalerConfig::default());
//! let mut bucket = Bucket::new(Codec::TopK { density: 0.5, momentum: None }, 4, 1)?;
//!
//! // Backward of two microbatches, at places 0 to 3 and 4 to 7 of epoch 0, of a loss times the scale.
//! let mut sum = Accumulator::new(4);
//! let todo = sum.begin(0, 0, 0..8);
//! assert_eq!(todo, 0..8);
//! for places in [0..4, 4..8] {
//!     let gradient = [4.0, 0.5, -8.0, 0.0].map(|g: f32| g * scaler.scale());
//!     sum.add(places, &gradient)?;
//! }
//! let mut own = vec![0.0; 4];
//! scaler.unscale(sum.sum(), &mut own);
//!
//! // All ranks' sums and sample counts.
//! let mut reduced = Reduced::default();
//! bucket.reduce(&mut group, &own, &mut reduced)?;
//! let mut samples = [0];
//! group.all_reduce(muster_runtime::collective::Op::Sum, &[sum.samples()], &mut samples)?;
//!
//! // The commit: the same on every rank.
//! let verdict = Scaler::judge(&[&reduced.sum]);
//! scaler.commit(verdict);
//! match verdict {
//!     Verdict::Skip => bucket.skip(),
//!     Verdict::Apply => {
//!         let norm = clip::norm(&[&reduced.sum]) / samples[0] as f64;
//!         let factor = clip::factor(norm, 1.0).unwrap_or(0.0) / samples[0] as f32;
//!         let step: Vec<f32> = reduced.sum.iter().map(|g| g * factor).collect();
//!         assert!((clip::norm(&[&step]) - 1.0).abs() < 1e-5);
//!         bucket.commit(&reduced);
//!     }
//! }
//! // Half of the four were sent; the others wait for the next step.
//! assert_eq!(reduced.sum, [8.0, 0.0, -16.0, 0.0]);
//! assert_eq!(bucket.own().residual(), [0.0, 1.0, 0.0, 0.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod accumulate;
mod bytes;
pub mod clip;
pub mod compress;
mod scaler;

pub use accumulate::{Accumulator, OutOfOrder};
pub use scaler::{Scaler, ScalerConfig, Verdict};

#[cfg(test)]
mod tests;
