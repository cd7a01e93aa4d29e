//! NCCL and the CUDA driver, loaded at run time.

use std::ffi::{CStr, c_char};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cudarc::nccl::sys as nc;
use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

use super::error::{NcclError, Version};
use super::sys::{Code, Cuda, CudaText, Nccl, NcclLast, NcclText};

pub(super) const SUCCESS: Code = 0;
/// `ncclInProgress`.
pub(super) const IN_PROGRESS: Code = nc::ncclResult_t::ncclInProgress as Code;
/// `CUDA_ERROR_NOT_READY`.
pub(super) const NOT_READY: Code = cudarc::driver::sys::CUresult::CUDA_ERROR_NOT_READY as Code;

/// The first version whose abort may come from a thread that did not make the communicator
/// (NVIDIA/nccl issue 992).
pub const LEAST_VERSION: Version = Version(21_900);

/// Both libraries. They stay loaded for the life of the process: NCCL has threads of its own.
pub struct Library {
    pub(super) nccl: Nccl,
    pub(super) cuda: Cuda,
    nccl_text: NcclText,
    nccl_last: NcclLast,
    cuda_text: CudaText,
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
    /// `libnccl.so.2` and `libcuda.so.1`, as the system's loader finds them. Where PyTorch with CUDA is
    /// loaded in this process, these are its own.
    ///
    /// # Errors
    /// One of them is missing, too old, or not usable here.
    pub fn load() -> Result<Arc<Library>, NcclError> {
        Self::load_from(Path::new("libnccl.so.2"), Path::new("libcuda.so.1"))
    }

    /// As [`load`](Self::load), from other files.
    ///
    /// # Errors
    /// As there.
    pub fn load_from(nccl: &Path, cuda: &Path) -> Result<Arc<Library>, NcclError> {
        // The driver first: without one there is nothing to be done, and NCCL says less about it.
        let cuda_handle = open(cuda)?;
        let handle = open(nccl)?;
        // SAFETY: the names are those of the CUDA driver's functions, declared as in its header.
        let cuda_table = unsafe { Cuda::find(&cuda_handle) };
        let cuda_table = cuda_table.map_err(|(symbol, source)| not_found(cuda, symbol, source))?;
        // SAFETY: the names are those of NCCL's functions, declared as in its header.
        let table = unsafe { Nccl::find(&handle) };
        let table = table.map_err(|(symbol, source)| not_found(nccl, symbol, source))?;
        // SAFETY: the signatures are those of the headers; `CUresult` and `ncclResult_t` are C enums
        // without negative values, which are passed as `unsigned int`.
        let (cuda_text, nccl_text, nccl_last) = unsafe {
            (
                *named::<CudaText>(&cuda_handle, cuda, "cuGetErrorString")?,
                *named::<NcclText>(&handle, nccl, "ncclGetErrorString")?,
                *named::<NcclLast>(&handle, nccl, "ncclGetLastError")?,
            )
        };
        let mut library = Library {
            nccl: table,
            cuda: cuda_table,
            nccl_text,
            nccl_last,
            cuda_text,
            version: Version(0),
            path: nccl.to_owned(),
        };
        // Never unloaded.
        std::mem::forget((cuda_handle, handle));
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
        // SAFETY: it may be called any number of times, from any thread.
        let code = unsafe { (library.cuda.init)(0) };
        library.check_cuda("cuInit", code)?;
        Ok(Arc::new(library))
    }

    pub fn version(&self) -> Version {
        self.version
    }

    /// Where NCCL was asked for.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn check_cuda(&self, call: &'static str, code: Code) -> Result<(), NcclError> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: the pointer is to a live one; an unknown code leaves it null.
        let known = unsafe { (self.cuda_text)(code, &raw mut text) } == SUCCESS;
        // SAFETY: a known code's text lives as long as the library.
        let text = unsafe { read(if known { text } else { std::ptr::null() }) };
        Err(NcclError::Cuda { call, code, text })
    }

    pub(super) fn check_nccl(&self, call: &'static str, code: Code) -> Result<(), NcclError> {
        if code == SUCCESS || code == IN_PROGRESS {
            return Ok(());
        }
        let text = self.nccl_text(code);
        Err(NcclError::Nccl { call, code, text })
    }

    /// What NCCL says of a code, and the last thing that it warned of in this thread, if any.
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

/// # Safety
/// Null, or a text with an end that lives for the call.
unsafe fn read(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller vouches for it.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().trim().to_owned()
}

fn open(path: &Path) -> Result<Handle, NcclError> {
    // SAFETY: what such a library does when it is loaded is its maker's affair; NCCL and the driver
    // expect to be loaded so.
    let opened = unsafe { Handle::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
    opened.map_err(|source| NcclError::Missing {
        path: path.to_owned(),
        source,
    })
}

/// # Safety
/// The symbol is of this type.
unsafe fn named<T>(
    library: &Handle,
    path: &Path,
    name: &'static str,
) -> Result<libloading::os::unix::Symbol<T>, NcclError> {
    // SAFETY: the caller vouches for it.
    let found = unsafe { library.get(name.as_bytes()) };
    found.map_err(|source| not_found(path, name, source))
}

fn not_found(path: &Path, symbol: &'static str, source: libloading::Error) -> NcclError {
    NcclError::NoSymbol {
        path: path.to_owned(),
        symbol,
        source,
    }
}
