//! Memory of this process that a device reads and writes by itself.

use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use super::device::Device;
use super::error::CudaError;

/// `CU_MEMHOSTREGISTER_PORTABLE` and `CU_MEMHOSTALLOC_PORTABLE`: for all devices.
const PORTABLE: u32 = 1;

/// Memory that somebody else mapped, and that is registered with the driver until this is dropped.
#[derive(Debug)]
pub(crate) struct Registered {
    device: Arc<Device>,
    at: *mut c_void,
}

// SAFETY: the driver's functions on the address may be called from any thread; nothing is read through it.
unsafe impl Send for Registered {}
// SAFETY: as above; there is nothing that a shared one could do.
unsafe impl Sync for Registered {}

impl Registered {
    /// For all devices of this process.
    ///
    /// # Safety
    /// The memory stays mapped until this is dropped.
    ///
    /// # Errors
    /// The driver does not register such memory, here or at all.
    pub(crate) unsafe fn new(
        device: &Arc<Device>,
        memory: *mut [u8],
    ) -> Result<Registered, CudaError> {
        let at = memory.cast::<c_void>();
        let _current = device.enter()?;
        let driver = device.driver();
        // SAFETY: the memory is mapped, by the caller's word.
        let code = unsafe { (driver.cuda.host_register)(at, memory.len(), PORTABLE) };
        driver.check("cuMemHostRegister", code)?;
        Ok(Registered {
            device: device.clone(),
            at,
        })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: registered when this was made.
            let _code = unsafe { (self.device.driver().cuda.host_unregister)(self.at) };
        }
    }
}

/// Memory of the driver's that the kernel does not move, freed when this is dropped.
#[derive(Debug)]
pub(crate) struct Pinned {
    device: Arc<Device>,
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it is plain memory that this owns.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Zeros, for all devices of this process.
    ///
    /// # Errors
    /// There is no such memory left.
    pub(crate) fn new(device: &Arc<Device>, bytes: usize) -> Result<Pinned, CudaError> {
        let _current = device.enter()?;
        let driver = device.driver();
        let mut at = std::ptr::null_mut();
        // SAFETY: the pointer is to a live one. No bytes at all are refused by the driver.
        let code = unsafe { (driver.cuda.host_alloc)(&raw mut at, bytes.max(1), PORTABLE) };
        driver.check("cuMemHostAlloc", code)?;
        let Some(at) = NonNull::new(at.cast::<u8>()) else {
            return Err(CudaError::Call {
                call: "cuMemHostAlloc",
                code: super::sys::SUCCESS,
                text: "the driver says that it succeeded, and gives no memory".to_owned(),
            });
        };
        // SAFETY: so long, and nobody else's.
        unsafe { at.as_ptr().write_bytes(0, bytes) };
        Ok(Pinned {
            device: device.clone(),
            at,
            bytes,
        })
    }

    /// Where it begins, for a device that writes there.
    pub(crate) fn as_mut_ptr(&self) -> *mut u8 {
        self.at.as_ptr()
    }
}

impl Deref for Pinned {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: so long, and all of it was written at the beginning. A device writes to it only while
        // its user does not look.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.bytes) }
    }
}

impl DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed by nobody else.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: allocated when this was made.
            let _code = unsafe { (self.device.driver().cuda.host_free)(self.at.as_ptr().cast()) };
        }
    }
}
