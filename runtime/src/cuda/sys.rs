//! The functions of the CUDA driver that are used, found in a library at run time.
//!
//! Types and constants are cudarc's, and the compiler checks every parameter here against cudarc's own
//! declaration. Its loader is not used: it panics where a library or a symbol is missing, does not know
//! the name `libnccl.so.2`, takes no path, and returns what a newer library may say as a Rust `enum`,
//! for which a value that it does not list is undefined behaviour.

use std::ffi::{c_char, c_int, c_uint, c_void};

use cudarc::driver::sys as cu;

/// Return code of NCCL or the driver.
pub(crate) type Code = c_uint;

pub(crate) const SUCCESS: Code = 0;
/// `CUDA_ERROR_NOT_READY`.
#[cfg(feature = "nccl")]
pub(crate) const NOT_READY: Code = cu::CUresult::CUDA_ERROR_NOT_READY as Code;
/// `CUDA_ERROR_INVALID_VALUE`.
pub(crate) const INVALID_VALUE: Code = cu::CUresult::CUDA_ERROR_INVALID_VALUE as Code;

/// A table of functions that a library has.
macro_rules! functions {
    (
        $(#[$doc:meta])*
        $table:ident from $sys:ident, returning $result:ident;
        $($(#[$when:meta])* $field:ident: $symbol:ident($($parameter:ty),*);)*
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct $table {
            $($(#[$when])* pub(crate) $field:
                unsafe extern "C" fn($($parameter),*) -> $crate::cuda::sys::Code,)*
        }

        // The same parameters as in cudarc's declaration.
        $($(#[$when])* const _: unsafe fn($($parameter),*) -> $sys::$result = $sys::$symbol;)*

        impl $table {
            /// # Safety
            /// The library's functions of these names are what their headers declare.
            pub(crate) unsafe fn find(
                library: &libloading::os::unix::Library,
            ) -> Result<$table, $crate::cuda::loading::NotFound> {
                Ok($table {
                    $($(#[$when])* $field: {
                        let name = stringify!($symbol);
                        // SAFETY: the caller vouches for the signature.
                        let found = unsafe { library.get(name.as_bytes()) };
                        *found.map_err(|error| (name, error))?
                    },)*
                })
            }
        }
    };
}
#[cfg(feature = "nccl")]
pub(crate) use functions;

functions! {
    /// The CUDA driver; see its `cuda.h`.
    Cuda from cu, returning CUresult;
    init: cuInit(c_uint);
    count: cuDeviceGetCount(*mut c_int);
    device: cuDeviceGet(*mut cu::CUdevice, c_int);
    name: cuDeviceGetName(*mut c_char, c_int, cu::CUdevice);
    uuid: cuDeviceGetUuid_v2(*mut cu::CUuuid, cu::CUdevice);
    bus: cuDeviceGetPCIBusId(*mut c_char, c_int, cu::CUdevice);
    retain: cuDevicePrimaryCtxRetain(*mut cu::CUcontext, cu::CUdevice);
    release: cuDevicePrimaryCtxRelease_v2(cu::CUdevice);
    current: cuCtxGetCurrent(*mut cu::CUcontext);
    set_current: cuCtxSetCurrent(cu::CUcontext);
    stream_create: cuStreamCreate(*mut cu::CUstream, c_uint);
    stream_destroy: cuStreamDestroy_v2(cu::CUstream);
    stream_wait: cuStreamWaitEvent(cu::CUstream, cu::CUevent, c_uint);
    stream_synchronize: cuStreamSynchronize(cu::CUstream);
    event_create: cuEventCreate(*mut cu::CUevent, c_uint);
    event_record: cuEventRecord(cu::CUevent, cu::CUstream);
    #[cfg(feature = "nccl")]
    event_query: cuEventQuery(cu::CUevent);
    event_synchronize: cuEventSynchronize(cu::CUevent);
    event_destroy: cuEventDestroy_v2(cu::CUevent);
    alloc: cuMemAlloc_v2(*mut cu::CUdeviceptr, usize);
    free: cuMemFree_v2(cu::CUdeviceptr);
    copy_to_device: cuMemcpyHtoD_v2(cu::CUdeviceptr, *const c_void, usize);
    copy_to_host: cuMemcpyDtoH_v2(*mut c_void, cu::CUdeviceptr, usize);
    send_to_device: cuMemcpyHtoDAsync_v2(cu::CUdeviceptr, *const c_void, usize, cu::CUstream);
    send_to_host: cuMemcpyDtoHAsync_v2(*mut c_void, cu::CUdeviceptr, usize, cu::CUstream);
    host_register: cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    host_unregister: cuMemHostUnregister(*mut c_void);
    host_alloc: cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    host_free: cuMemFreeHost(*mut c_void);
    about: cuPointerGetAttribute(*mut c_void, cu::CUpointer_attribute, cu::CUdeviceptr);
}

/// `cuGetErrorString`, of any number.
pub(crate) type CudaText = unsafe extern "C" fn(Code, *mut *const c_char) -> Code;
