//! Which samples a step trains on, and how they are in memory when it begins.
//!
//! [`Sampler`] is a cursor over shuffled epochs, [`Plan`] one step's batch, cut into microbatches,
//! [`Loader`] loads this rank's part of it ahead of time. None of them talks to another rank: all ranks
//! hold the same cursor, and [`Share`](crate::live::Share) says which microbatches are whose.
//!
//! ```
//! use muster_runtime::data::{Batch, Loader, LoaderConfig, Sampler, SamplerConfig, Tail};
//! use muster_runtime::live::Share;
//!
//! let config = SamplerConfig {
//!     samples: 10,
//!     seed: 7,
//!     batch: Batch::Global(4),
//!     microbatch: 2,
//!     tail: Tail::Keep,
//! };
//! let mut sampler = Sampler::new(config)?;
//! let mut loader = Loader::new(LoaderConfig::default(), |index| Ok::<_, std::io::Error>(index * index))?;
//! let alone = Share { entered: vec![0], rank: 0, world: 1 };
//!
//! let mut seen = Vec::new();
//! while sampler.state().epoch == 0 {
//!     let step = loader.step(&sampler, &alone)?;
//!     for microbatch in &step.microbatches {
//!         seen.extend(microbatch.samples.iter().copied());
//!     }
//!     sampler.commit(&step.plan)?;
//! }
//! seen.sort_unstable();
//! assert_eq!(seen, [0, 1, 4, 9, 16, 25, 36, 49, 64, 81]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod loader;
mod permutation;
mod sampler;

pub use loader::{LoadError, Loaded, Loader, LoaderConfig, Microbatch, Totals};
pub use sampler::{Batch, Plan, Sampler, SamplerConfig, SamplerError, State, Tail};
