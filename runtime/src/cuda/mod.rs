//! The CUDA driver, found at run time: devices, streams, events, and memory that a device reaches.
//!
//! Nothing of CUDA is needed to build or to start; the driver is loaded by [`Driver::load`]. Collectives between
//! GPUs ([`nccl`](crate::collective::nccl)) and checkpoints of tensors on GPUs ([`saving`](crate::saving)) use it.
//!
//! A device is used by its primary context, the one that PyTorch, tch and the CUDA runtime use. Every call of the
//! driver that fails is an error with its name and the driver's words. Nothing here panics, and what is
//! dropped is given back; a driver that refuses that, as one does whose context is lost, is not asked again.

mod device;
pub(crate) mod driver;
mod error;
mod host;
pub(crate) mod loading;
pub(crate) mod sys;

pub(crate) use device::Event;
pub use device::{Device, Memory, RawStream, Stream};
pub use driver::{DRIVER_ENV, Driver};
pub use error::{CudaError, LibraryError};
pub(crate) use host::{Pinned, Registered};
