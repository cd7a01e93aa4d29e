//! The CUDA driver, loaded at run time.

use std::ffi::{CStr, c_char};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::CudaError;
use super::loading::{named, not_found, open};
use super::sys::{Code, Cuda, CudaText, SUCCESS};

/// Names the driver's file, where the system's loader does not find it.
pub const DRIVER_ENV: &str = "MUSTER_CUDA_LIBRARY";

const NAME: &str = "libcuda.so.1";

/// The driver. It stays loaded for the life of the process.
pub struct Driver {
    pub(crate) cuda: Cuda,
    text: CudaText,
    path: PathBuf,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl Driver {
    /// The file that `MUSTER_CUDA_LIBRARY` names, else `libcuda.so.1`, as the system's loader finds it. Where
    /// PyTorch with CUDA is loaded in this process, it is that one's.
    ///
    /// # Errors
    /// It is missing, too old, or not usable here.
    pub fn load() -> Result<Arc<Driver>, CudaError> {
        let named = std::env::var_os(DRIVER_ENV).filter(|name| !name.is_empty());
        Self::load_from(Path::new(&named.unwrap_or_else(|| NAME.into())))
    }

    /// As [`load`](Self::load), from another file.
    ///
    /// # Errors
    /// As there.
    pub fn load_from(path: &Path) -> Result<Arc<Driver>, CudaError> {
        let handle = open(path)?;
        // SAFETY: the names are those of the CUDA driver's functions, declared as in its header.
        let cuda = unsafe { Cuda::find(&handle) }.map_err(|error| not_found(path, error))?;
        // SAFETY: as above; `CUresult` is a C enum without negative values, which is passed as `unsigned int`.
        let text = unsafe { named::<CudaText>(&handle, path, "cuGetErrorString") };
        let text = *text?;
        // Never unloaded.
        std::mem::forget(handle);
        let path = path.to_owned();
        let driver = Driver { cuda, text, path };
        // SAFETY: it may be called any number of times, from any thread.
        let code = unsafe { (driver.cuda.init)(0) };
        driver.check("cuInit", code)?;
        Ok(Arc::new(driver))
    }

    /// Where it was asked for.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn check(&self, call: &'static str, code: Code) -> Result<(), CudaError> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: the pointer is to a live one; an unknown code leaves it null.
        let known = unsafe { (self.text)(code, &raw mut text) } == SUCCESS;
        // SAFETY: a known code's text lives as long as the library.
        let text = unsafe { read(if known { text } else { std::ptr::null() }) };
        Err(CudaError::Call { call, code, text })
    }
}

/// # Safety
/// Null, or a text with an end that lives for the call.
pub(crate) unsafe fn read(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller vouches for it.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().trim().to_owned()
}
