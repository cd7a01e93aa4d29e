//! The functions of NCCL and of the CUDA driver that are used, found in a library at run time.
//!
//! Types and constants are cudarc's, and the compiler checks every parameter here against cudarc's own
//! declaration. Its loader is not used: it panics where a library or a symbol is missing, does not know
//! the name `libnccl.so.2`, takes no path, and returns what a newer library may say as a Rust `enum`,
//! for which a value that it does not list is undefined behaviour.

use std::ffi::{c_char, c_int, c_uint, c_void};

use cudarc::driver::sys as cu;
use cudarc::nccl::sys as nc;
use libloading::os::unix::Library;

/// What NCCL or the driver returns.
pub(super) type Code = c_uint;

/// A symbol that a library does not have.
pub(super) type NotFound = (&'static str, libloading::Error);

macro_rules! functions {
    (
        $(#[$doc:meta])*
        $table:ident from $sys:ident, returning $result:ident;
        $($field:ident: $symbol:ident($($parameter:ty),*);)*
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub(super) struct $table {
            $(pub(super) $field: unsafe extern "C" fn($($parameter),*) -> Code,)*
        }

        // The same parameters as in cudarc's declaration.
        $(const _: unsafe fn($($parameter),*) -> $sys::$result = $sys::$symbol;)*

        impl $table {
            /// # Safety
            /// The library's functions of these names are what their headers declare.
            pub(super) unsafe fn find(library: &Library) -> Result<$table, NotFound> {
                Ok($table {
                    $($field: {
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

functions! {
    /// NCCL; see its `nccl.h`.
    Nccl from nc, returning ncclResult_t;
    version: ncclGetVersion(*mut c_int);
    unique_id: ncclGetUniqueId(*mut nc::ncclUniqueId);
    init: ncclCommInitRankConfig(
        *mut nc::ncclComm_t, c_int, nc::ncclUniqueId, c_int, *mut nc::ncclConfig_t
    );
    async_error: ncclCommGetAsyncError(nc::ncclComm_t, *mut nc::ncclResult_t);
    abort: ncclCommAbort(nc::ncclComm_t);
    all_reduce: ncclAllReduce(
        *const c_void, *mut c_void, usize, nc::ncclDataType_t, nc::ncclRedOp_t,
        nc::ncclComm_t, nc::cudaStream_t
    );
    reduce_scatter: ncclReduceScatter(
        *const c_void, *mut c_void, usize, nc::ncclDataType_t, nc::ncclRedOp_t,
        nc::ncclComm_t, nc::cudaStream_t
    );
    all_gather: ncclAllGather(
        *const c_void, *mut c_void, usize, nc::ncclDataType_t, nc::ncclComm_t, nc::cudaStream_t
    );
    broadcast: ncclBroadcast(
        *const c_void, *mut c_void, usize, nc::ncclDataType_t, c_int,
        nc::ncclComm_t, nc::cudaStream_t
    );
    send: ncclSend(
        *const c_void, usize, nc::ncclDataType_t, c_int, nc::ncclComm_t, nc::cudaStream_t
    );
    receive: ncclRecv(
        *mut c_void, usize, nc::ncclDataType_t, c_int, nc::ncclComm_t, nc::cudaStream_t
    );
    group_start: ncclGroupStart();
    group_end: ncclGroupEnd();
}

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
    event_create: cuEventCreate(*mut cu::CUevent, c_uint);
    event_record: cuEventRecord(cu::CUevent, cu::CUstream);
    event_query: cuEventQuery(cu::CUevent);
    event_destroy: cuEventDestroy_v2(cu::CUevent);
    alloc: cuMemAlloc_v2(*mut cu::CUdeviceptr, usize);
    free: cuMemFree_v2(cu::CUdeviceptr);
    copy_to_device: cuMemcpyHtoD_v2(cu::CUdeviceptr, *const c_void, usize);
    copy_to_host: cuMemcpyDtoH_v2(*mut c_void, cu::CUdeviceptr, usize);
}

/// `ncclGetErrorString`, of any number.
pub(super) type NcclText = unsafe extern "C" fn(Code) -> *const c_char;
/// `ncclGetLastError`.
pub(super) type NcclLast = unsafe extern "C" fn(nc::ncclComm_t) -> *const c_char;
/// `cuGetErrorString`, of any number.
pub(super) type CudaText = unsafe extern "C" fn(Code, *mut *const c_char) -> Code;
