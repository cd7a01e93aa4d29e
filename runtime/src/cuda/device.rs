//! One device, with memory, streams and events.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use cudarc::driver::sys as cu;

use super::driver::Driver;
use super::error::CudaError;
use super::sys::INVALID_VALUE;
#[cfg(feature = "nccl")]
use super::sys::{NOT_READY, SUCCESS};
use crate::collective::Element;

/// Streams that do not wait for the legacy default stream.
const NON_BLOCKING: u32 = 1;
/// Events without a time, which are cheaper, and for which a thread sleeps: the processor has other work.
const EVENT: u32 = 2 | 1;
/// `0000:00:00.0` with a longer domain, and its end.
const BUS_ID: usize = 32;
const NAME: usize = 128;

/// A GPU (or a part of one), with its primary context: the one that frameworks use too.
#[derive(Debug)]
pub struct Device {
    driver: Arc<Driver>,
    device: cu::CUdevice,
    context: cu::CUcontext,
    name: String,
    bus: String,
    uuid: [u8; 16],
}

// SAFETY: a context may be used from any thread that makes it current.
unsafe impl Send for Device {}
// SAFETY: as above; the driver's functions may be called from several threads at once.
unsafe impl Sync for Device {}

impl Device {
    /// A device by its number among the visible ones, usually LOCAL_RANK.
    ///
    /// # Errors
    /// There is no such device, or it cannot be used.
    pub fn open(driver: &Arc<Driver>, ordinal: u32) -> Result<Arc<Device>, CudaError> {
        let cuda = driver.cuda;
        let mut count = 0;
        // SAFETY: the pointer is to a live integer, here and below.
        let code = unsafe { (cuda.count)(&raw mut count) };
        driver.check("cuDeviceGetCount", code)?;
        let count = u32::try_from(count).unwrap_or(0);
        let number = i32::try_from(ordinal).ok().filter(|_| ordinal < count);
        let number = number.ok_or(CudaError::NoDevice { ordinal, count })?;
        let mut device = 0;
        // SAFETY: as above.
        let code = unsafe { (cuda.device)(&raw mut device, number) };
        driver.check("cuDeviceGet", code)?;
        let mut uuid = cu::CUuuid { bytes: [0; 16] };
        // SAFETY: as above; the driver writes sixteen bytes.
        let code = unsafe { (cuda.uuid)(&raw mut uuid, device) };
        driver.check("cuDeviceGetUuid", code)?;
        let bus = text::<BUS_ID>(|to, len| {
            // SAFETY: the driver writes at most so many bytes.
            let code = unsafe { (cuda.bus)(to, len, device) };
            driver.check("cuDeviceGetPCIBusId", code)
        })?;
        let name = text::<NAME>(|to, len| {
            // SAFETY: the driver writes at most so many bytes.
            let code = unsafe { (cuda.name)(to, len, device) };
            driver.check("cuDeviceGetName", code)
        })?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the pointer is to a live one; released when the device is dropped.
        let code = unsafe { (cuda.retain)(&raw mut context, device) };
        driver.check("cuDevicePrimaryCtxRetain", code)?;
        Ok(Arc::new(Device {
            driver: driver.clone(),
            device,
            context,
            name,
            bus,
            uuid: uuid.bytes.map(|byte| byte.to_ne_bytes()[0]),
        }))
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its place on the host, for example `0000:17:00.0`.
    pub fn bus(&self) -> &str {
        &self.bus
    }

    /// Unlike any other device's in the world.
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    pub fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// The number of the device that this memory is of.
    ///
    /// # Errors
    /// It is of none.
    pub(crate) fn ordinal_of(driver: &Driver, address: u64) -> Result<u32, CudaError> {
        let about = |attribute| {
            let mut value = 0i32;
            // SAFETY: both attributes that are asked for are integers of this size. Any address may be asked for.
            let code = unsafe { (driver.cuda.about)((&raw mut value).cast(), attribute, address) };
            match code {
                INVALID_VALUE => Err(CudaError::NotOfDevice { address }),
                code => driver.check("cuPointerGetAttribute", code).map(|()| value),
            }
        };
        let kind = about(cu::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE)?;
        if kind == cu::CUmemorytype::CU_MEMORYTYPE_HOST as i32 {
            return Err(CudaError::NotOfDevice { address });
        }
        let ordinal = about(cu::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)?;
        u32::try_from(ordinal).map_err(|_| CudaError::NotOfDevice { address })
    }

    /// Makes this device the calling thread's, until the result is dropped.
    pub(crate) fn enter(&self) -> Result<Current<'_>, CudaError> {
        let mut before = std::ptr::null_mut();
        // SAFETY: the pointer is to a live one.
        let code = unsafe { (self.driver.cuda.current)(&raw mut before) };
        self.driver.check("cuCtxGetCurrent", code)?;
        if before != self.context {
            // SAFETY: the context lives as long as `self`.
            let code = unsafe { (self.driver.cuda.set_current)(self.context) };
            self.driver.check("cuCtxSetCurrent", code)?;
        }
        Ok(Current {
            device: self,
            before,
        })
    }

    /// Memory on the device; what it holds is unspecified.
    ///
    /// # Errors
    /// There is not so much left.
    pub fn alloc(self: &Arc<Self>, bytes: usize) -> Result<Memory, CudaError> {
        let _current = self.enter()?;
        let mut address = 0;
        // SAFETY: the pointer is to a live integer. No bytes at all are refused by the driver.
        let code = unsafe { (self.driver.cuda.alloc)(&raw mut address, bytes.max(1)) };
        self.driver.check("cuMemAlloc", code)?;
        Ok(Memory {
            device: self.clone(),
            address,
            bytes,
        })
    }

    /// Memory that holds these elements.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn upload<T: Element>(self: &Arc<Self>, values: &[T]) -> Result<Memory, CudaError> {
        let mut memory = self.alloc(size_of_val(values))?;
        memory.write(values)?;
        Ok(memory)
    }

    /// # Errors
    /// The driver refuses.
    pub fn stream(self: &Arc<Self>) -> Result<Stream, CudaError> {
        let _current = self.enter()?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: the pointer is to a live one.
        let code = unsafe { (self.driver.cuda.stream_create)(&raw mut stream, NON_BLOCKING) };
        self.driver.check("cuStreamCreate", code)?;
        Ok(Stream {
            device: self.clone(),
            raw: RawStream(stream),
        })
    }

    pub(crate) fn event(self: &Arc<Self>) -> Result<Event, CudaError> {
        let _current = self.enter()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: the pointer is to a live one.
        let code = unsafe { (self.driver.cuda.event_create)(&raw mut event, EVENT) };
        self.driver.check("cuEventCreate", code)?;
        Ok(Event {
            device: self.clone(),
            event,
        })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained once, when this was made.
        let _code = unsafe { (self.driver.cuda.release)(self.device) };
    }
}

/// Reads a text that the driver writes, of at most `N` bytes with its end.
fn text<const N: usize>(
    write: impl FnOnce(*mut c_char, i32) -> Result<(), CudaError>,
) -> Result<String, CudaError> {
    let mut bytes = [0u8; N];
    write(bytes.as_mut_ptr().cast(), i32::try_from(N - 1).unwrap_or(0))?;
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(N);
    Ok(String::from_utf8_lossy(&bytes[..end]).into_owned())
}

/// A device that is the thread's for now; the one before is again when this is dropped.
pub(crate) struct Current<'a> {
    device: &'a Device,
    before: cu::CUcontext,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if self.before != self.device.context {
            // SAFETY: it was the thread's context before.
            let _code = unsafe { (self.device.driver.cuda.set_current)(self.before) };
        }
    }
}

/// Memory on a device, freed when this is dropped.
#[derive(Debug)]
pub struct Memory {
    device: Arc<Device>,
    address: u64,
    bytes: usize,
}

impl Memory {
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where it begins on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Copies elements to the beginning of it, and waits.
    ///
    /// # Errors
    /// They are more than fit, or the device failed.
    pub fn write<T: Element>(&mut self, values: &[T]) -> Result<(), CudaError> {
        let bytes = size_of_val(values);
        fits::<T>("what is written to a device's memory", bytes, self.bytes)?;
        let _current = self.device.enter()?;
        let driver = &self.device.driver;
        // SAFETY: both are at least as long as what is copied.
        let code = unsafe {
            (driver.cuda.copy_to_device)(self.address, values.as_ptr().cast::<c_void>(), bytes)
        };
        driver.check("cuMemcpyHtoD", code)
    }

    /// Copies the first elements of it, and waits.
    ///
    /// # Errors
    /// They are more than there are, or the device failed.
    pub fn read<T: Element>(&self, values: &mut [T]) -> Result<(), CudaError> {
        let bytes = size_of_val(values);
        fits::<T>("what is read from a device's memory", bytes, self.bytes)?;
        let _current = self.device.enter()?;
        let driver = &self.device.driver;
        // SAFETY: both are at least as long as what is copied; every bit pattern is an element.
        let code = unsafe {
            (driver.cuda.copy_to_host)(values.as_mut_ptr().cast::<c_void>(), self.address, bytes)
        };
        driver.check("cuMemcpyDtoH", code)
    }
}

fn fits<T>(what: &'static str, bytes: usize, limit: usize) -> Result<(), CudaError> {
    if bytes <= limit {
        return Ok(());
    }
    Err(CudaError::Length {
        what,
        got: bytes / size_of::<T>(),
        expected: limit / size_of::<T>(),
    })
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: allocated when this was made.
            let _code = unsafe { (self.device.driver.cuda.free)(self.address) };
        }
    }
}

/// A stream that somebody else keeps, for example PyTorch's current one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawStream(pub(crate) cu::CUstream);

// SAFETY: a handle; the driver's functions on one may be called from any thread.
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

impl RawStream {
    /// The legacy default stream.
    pub const DEFAULT: RawStream = RawStream(std::ptr::null_mut());

    /// # Safety
    /// A `CUstream` or `cudaStream_t` of the device that it is used with, which lives as long.
    pub unsafe fn new(stream: *mut c_void) -> RawStream {
        RawStream(stream.cast())
    }

    /// As C has it.
    pub fn as_ptr(self) -> *mut c_void {
        self.0.cast()
    }
}

/// A stream, destroyed when this is dropped.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    raw: RawStream,
}

impl Stream {
    pub fn raw(&self) -> RawStream {
        self.raw
    }

    /// Begins a copy from a device to this process. The device is the calling thread's.
    ///
    /// # Safety
    /// Both are so long, and stay there, and nobody looks at `to`, until this stream is past the copy. Where `to`
    /// is neither registered nor pinned, that may be when this returns.
    pub(crate) unsafe fn to_host(
        &self,
        to: *mut u8,
        from: u64,
        bytes: usize,
    ) -> Result<(), CudaError> {
        let driver = &self.device.driver;
        // SAFETY: by the caller's word.
        let code = unsafe { (driver.cuda.send_to_host)(to.cast(), from, bytes, self.raw.0) };
        driver.check("cuMemcpyDtoHAsync", code)
    }

    /// Begins a copy from this process to a device. The device is the calling thread's.
    ///
    /// # Safety
    /// Both are so long, and stay there, and nobody writes to `from`, until this stream is past the copy.
    pub(crate) unsafe fn to_device(
        &self,
        to: u64,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), CudaError> {
        let driver = &self.device.driver;
        // SAFETY: by the caller's word.
        let code = unsafe { (driver.cuda.send_to_device)(to, from.cast(), bytes, self.raw.0) };
        driver.check("cuMemcpyHtoDAsync", code)
    }

    /// Waits until all that is in it is done.
    ///
    /// # Errors
    /// Something failed: in it, in another stream that the driver tells of here, or the device's context is lost. Then
    /// it is not known whether what is in it has ended.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        let driver = &self.device.driver;
        let _current = self.device.enter()?;
        // SAFETY: it lives as long as `self`.
        let code = unsafe { (driver.cuda.stream_synchronize)(self.raw.0) };
        driver.check("cuStreamSynchronize", code)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: made by this; what is queued in it goes on.
            let _code = unsafe { (self.device.driver.cuda.stream_destroy)(self.raw.0) };
        }
    }
}

/// A point in a stream.
#[derive(Debug)]
pub(crate) struct Event {
    device: Arc<Device>,
    event: cu::CUevent,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above, from several at once.
unsafe impl Sync for Event {}

impl Event {
    /// Is after all that is in the stream now.
    pub(crate) fn record(&self, stream: RawStream) -> Result<(), CudaError> {
        let driver = &self.device.driver;
        // SAFETY: the event lives as long as `self`, the stream by its maker's word.
        let code = unsafe { (driver.cuda.event_record)(self.event, stream.0) };
        driver.check("cuEventRecord", code)
    }

    /// Makes all that comes into the stream from now on wait for this.
    pub(crate) fn hold(&self, stream: RawStream) -> Result<(), CudaError> {
        let driver = &self.device.driver;
        // SAFETY: as above.
        let code = unsafe { (driver.cuda.stream_wait)(stream.0, self.event, 0) };
        driver.check("cuStreamWaitEvent", code)
    }

    /// Waits for it.
    ///
    /// # Errors
    /// Work before it failed, or the device's context is lost.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        let driver = &self.device.driver;
        // SAFETY: the event lives as long as `self`.
        let code = unsafe { (driver.cuda.event_synchronize)(self.event) };
        driver.check("cuEventSynchronize", code)
    }

    #[cfg(feature = "nccl")]
    pub(crate) fn has_passed(&self) -> Result<bool, CudaError> {
        let driver = &self.device.driver;
        // SAFETY: the event lives as long as `self`.
        match unsafe { (driver.cuda.event_query)(self.event) } {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            code => driver.check("cuEventQuery", code).map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: made by this; a stream that waits for it goes on.
            let _code = unsafe { (self.device.driver.cuda.event_destroy)(self.event) };
        }
    }
}
