//! The functions of NCCL that are used, found in a library at run time, as [`cuda::sys`](crate::cuda::sys) says.

use std::ffi::{c_char, c_int, c_void};

use cudarc::nccl::sys as nc;

use crate::cuda::sys::{Code, functions};

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

/// `ncclGetErrorString`, of any number.
pub(super) type NcclText = unsafe extern "C" fn(Code) -> *const c_char;
/// `ncclGetLastError`.
pub(super) type NcclLast = unsafe extern "C" fn(nc::ncclComm_t) -> *const c_char;
