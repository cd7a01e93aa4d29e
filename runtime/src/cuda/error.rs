//! Errors of a driver.

use std::path::PathBuf;

use super::DRIVER_ENV;

/// A library cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    #[error("cannot load {}; install it, or name the folder that holds it in LD_LIBRARY_PATH", .path.display())]
    Missing {
        path: PathBuf,
        #[source]
        source: libloading::Error,
    },
    #[error("{} has no {symbol}; is it the right library, and a current one?", .path.display())]
    NoSymbol {
        path: PathBuf,
        symbol: &'static str,
        #[source]
        source: libloading::Error,
    },
}

/// The driver, or a device, cannot do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    #[error(
        "the driver of NVIDIA's GPUs cannot be used; install it, or name its file in {DRIVER_ENV}"
    )]
    Driver(#[from] LibraryError),
    #[error("there is no device {ordinal}, but {count} are visible; look at CUDA_VISIBLE_DEVICES")]
    NoDevice { ordinal: u32, count: u32 },
    #[error("{call}: {text} (CUDA error {code})")]
    Call {
        call: &'static str,
        code: u32,
        text: String,
    },
    #[error(
        "{address:#x} is no memory of a GPU; hand over a CUDA tensor's address (data_ptr), or the memory as this process's own"
    )]
    NotOfDevice { address: u64 },
    #[error("{what}: {got} elements, not {expected}")]
    Length {
        what: &'static str,
        got: usize,
        expected: usize,
    },
}
