//! Checkpoints that are durable though every rank dies right after its copy.
//!
//! A rank copies what it has to write into a *slot*, memory that its launcher holds, and goes on training
//! or ends: the launcher makes the copy durable, and the job's agents commit the checkpoint once all ranks'
//! are. A rank's writes follow from a *plan*, which every rank computes from what all of them hold:
//! a tensor that several hold is written by one.
//!
//! ```no_run
//! use muster_runtime::saving::{Held, Peer, Restore, Saver, Slice, Want, Dtype};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut session = muster_runtime::Session::from_env()?.ok_or("start it with muster run")?;
//! let env = muster_runtime::WorkerEnv::from_env()?;
//! let mut weights = vec![0u8; 4096 * 4];
//! let (mut step, shape) = (0, [4096]);
//!
//! // What the generation begins with, if there is anything.
//! if let Some(checkpoint) = Restore::from_env()? {
//!     let want = Want { name: "weights", dtype: Dtype::F32, shape: &shape, slice: Slice::whole(&shape), into: &mut weights };
//!     checkpoint.load(&mut [want])?;
//!     step = checkpoint.step();
//! }
//! // Every rank holds the same.
//! let held = vec![Held::whole("weights", Dtype::F32, &shape)];
//! let peers: Vec<Peer> = (0..env.world).map(|_| Peer { node: 0, held: held.clone() }).collect();
//! let mut saver = Saver::new(&mut session, &env, &peers)?;
//! loop {
//!     if step % 1000 == 0 {
//!         saver.save(step, |_, _| Some(&weights), Vec::new())?;
//!     }
//!     // … train …
//!     step += 1;
//! #   break;
//! }
//! # Ok(()) }
//! ```
//!
//! A tensor may lie in a GPU's memory ([`Memory::Device`], [`MemoryMut::Device`]; feature `cuda`). Its bytes are
//! copied straight into the slot where the driver registers its memory, else through pinned memory ([`Saver::way`]);
//! either way after what is in the tensor's stream, and the slot is sealed after that copy. On the way back they are
//! verified in the host's memory before they go to the GPU's.

#[cfg_attr(not(feature = "cuda"), path = "no_devices.rs")]
mod devices;
mod memory;
mod restore;
mod saver;
mod slots;
mod tiers;

pub use memory::{Memory, MemoryMut, OnDevice, OnDeviceMut, Way};
pub use muster_checkpoint::inventory::SAMPLE;
pub use muster_checkpoint::load::{Damage, LoadError, Loaded, Want, Wanted};
pub use muster_checkpoint::manifest::Blob;
pub use muster_checkpoint::plan::{Held, PlanError, Rank};
pub use muster_checkpoint::slot::SlotError;
pub use muster_checkpoint::{Dtype, Slice};
pub use restore::{Restore, RestoreError};
pub use saver::{Peer, SaveError, Saved, Saver};
pub use tiers::Origins;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tiers_tests;
