//! The control page of a worker: one page of sealed, shared memory, created per worker and inherited
//! by it.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use memmap2::{MmapOptions, MmapRaw};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

/// The environment variable that holds the number of the inherited descriptor.
pub const FD_ENV: &str = "MUSTER_CONTROL_FD";

/// Length of the page in bytes.
pub const PAGE_LEN: usize = 4096;

/// The launcher's mapping of one worker's page.
#[derive(Debug)]
pub struct ControlPage {
    _map: MmapRaw,
}

impl ControlPage {
    /// Creates a zeroed page that can neither shrink nor grow, and the descriptor for the worker.
    pub fn create() -> io::Result<(ControlPage, OwnedFd)> {
        let name = CString::new("muster-control").map_err(io::Error::other)?;
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = File::from(memfd_create(name.as_c_str(), flags)?);
        file.set_len(PAGE_LEN as u64)?;
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
        let map = MmapOptions::new().len(PAGE_LEN).map_raw(&file)?;
        Ok((ControlPage { _map: map }, file.into()))
    }
}
