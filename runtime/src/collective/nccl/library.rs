//! NCCL, loaded at run time.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cudarc::nccl::sys as nc;

use super::error::{NcclError, Version};
use super::sys::{Nccl, NcclLast, NcclText};
use crate::cuda::Driver;
use crate::cuda::driver::read;
use crate::cuda::loading::{named, not_found, open};
use crate::cuda::sys::{Code, SUCCESS};

/// `ncclInProgress`.
pub(super) const IN_PROGRESS: Code = nc::ncclResult_t::ncclInProgress as Code;

/// The first version whose abort may come from a thread that did not make the communicator
/// (NVIDIA/nccl issue 992).
pub const LEAST_VERSION: Version = Version(21_900);

/// NCCL, with the driver. Both stay loaded for the life of the process: NCCL has threads of its own.
pub struct Library {
    pub(super) nccl: Nccl,
    driver: Arc<Driver>,
    nccl_text: NcclText,
    nccl_last: NcclLast,
    version: Version,
    path: PathBuf,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library")
            .field("path", &self.path)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

impl Library {
    /// `libnccl.so.2`, as the system's loader finds it, and the driver ([`Driver::load`]). Where PyTorch with
    /// CUDA is loaded in this process, these are its own.
    ///
    /// # Errors
    /// One of them is missing, too old, or not usable here.
    pub fn load() -> Result<Arc<Library>, NcclError> {
        Self::with(Path::new("libnccl.so.2"), Driver::load()?)
    }

    /// As [`load`](Self::load), from other files.
    ///
    /// # Errors
    /// As there.
    pub fn load_from(nccl: &Path, cuda: &Path) -> Result<Arc<Library>, NcclError> {
        Self::with(nccl, Driver::load_from(cuda)?)
    }

    /// The driver comes first: without one there is nothing to be done, and NCCL says less about it.
    fn with(nccl: &Path, driver: Arc<Driver>) -> Result<Arc<Library>, NcclError> {
        let handle = open(nccl)?;
        // SAFETY: the names are those of NCCL's functions, declared as in its header.
        let table = unsafe { Nccl::find(&handle) };
        let table = table.map_err(|error| not_found(nccl, error))?;
        // SAFETY: the signatures are those of the header; `ncclResult_t` is a C enum without negative values,
        // which is passed as `unsigned int`.
        let (nccl_text, nccl_last) = unsafe {
            (
                *named::<NcclText>(&handle, nccl, "ncclGetErrorString")?,
                *named::<NcclLast>(&handle, nccl, "ncclGetLastError")?,
            )
        };
        let mut library = Library {
            nccl: table,
            driver,
            nccl_text,
            nccl_last,
            version: Version(0),
            path: nccl.to_owned(),
        };
        // Never unloaded.
        std::mem::forget(handle);
        let mut version = 0;
        // SAFETY: the pointer is to a live integer.
        let code = unsafe { (library.nccl.version)(&raw mut version) };
        library.check_nccl("ncclGetVersion", code)?;
        library.version = Version(u32::try_from(version).unwrap_or(0));
        if library.version < LEAST_VERSION {
            return Err(NcclError::TooOld {
                found: library.version,
                least: LEAST_VERSION,
            });
        }
        Ok(Arc::new(library))
    }

    pub fn version(&self) -> Version {
        self.version
    }

    /// Where NCCL was asked for.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    pub(super) fn check_nccl(&self, call: &'static str, code: Code) -> Result<(), NcclError> {
        if code == SUCCESS || code == IN_PROGRESS {
            return Ok(());
        }
        let text = self.nccl_text(code);
        Err(NcclError::Nccl { call, code, text })
    }

    /// NCCL's text for a code, and the last thing that it warned of in this thread, if any.
    pub(super) fn nccl_text(&self, code: Code) -> String {
        // SAFETY: any code may be asked for; the answer is a constant.
        let text = unsafe { read((self.nccl_text)(code)) };
        // SAFETY: no communicator is allowed here; the text is copied at once.
        let last = unsafe { read((self.nccl_last)(std::ptr::null_mut())) };
        if last.is_empty() {
            text
        } else {
            format!("{text}; {last}")
        }
    }
}
