//! One device, and the little of CUDA that collectives need: memory, streams and events.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use cudarc::driver::sys as cu;

use super::super::element::{DType, Element};
use super::elements::Elements;
use super::error::NcclError;
use super::library::{Library, NOT_READY, SUCCESS};

/// Streams that do not wait for the legacy default stream.
const NON_BLOCKING: u32 = 1;
/// Events without a time, which are cheaper.
const NO_TIMING: u32 = 2;
/// `0000:00:00.0` with a longer domain, and its end.
const BUS_ID: usize = 32;
const NAME: usize = 128;

/// A GPU (or a part of one), with its primary context: the one that frameworks use too.
#[derive(Debug)]
pub struct Device {
    library: Arc<Library>,
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
    pub fn open(library: &Arc<Library>, ordinal: u32) -> Result<Arc<Device>, NcclError> {
        let cuda = library.cuda;
        let mut count = 0;
        // SAFETY: the pointer is to a live integer, here and below.
        let code = unsafe { (cuda.count)(&raw mut count) };
        library.check_cuda("cuDeviceGetCount", code)?;
        let count = u32::try_from(count).unwrap_or(0);
        let number = i32::try_from(ordinal).ok().filter(|_| ordinal < count);
        let number = number.ok_or(NcclError::NoDevice { ordinal, count })?;
        let mut device = 0;
        // SAFETY: as above.
        let code = unsafe { (cuda.device)(&raw mut device, number) };
        library.check_cuda("cuDeviceGet", code)?;
        let mut uuid = cu::CUuuid { bytes: [0; 16] };
        // SAFETY: as above; the driver writes sixteen bytes.
        let code = unsafe { (cuda.uuid)(&raw mut uuid, device) };
        library.check_cuda("cuDeviceGetUuid", code)?;
        let bus = text::<BUS_ID>(|to, len| {
            // SAFETY: the driver writes at most so many bytes.
            let code = unsafe { (cuda.bus)(to, len, device) };
            library.check_cuda("cuDeviceGetPCIBusId", code)
        })?;
        let name = text::<NAME>(|to, len| {
            // SAFETY: the driver writes at most so many bytes.
            let code = unsafe { (cuda.name)(to, len, device) };
            library.check_cuda("cuDeviceGetName", code)
        })?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the pointer is to a live one; released when the device is dropped.
        let code = unsafe { (cuda.retain)(&raw mut context, device) };
        library.check_cuda("cuDevicePrimaryCtxRetain", code)?;
        Ok(Arc::new(Device {
            library: library.clone(),
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

    pub fn library(&self) -> &Arc<Library> {
        &self.library
    }

    /// Makes this device the calling thread's, until the result is dropped.
    pub(super) fn enter(&self) -> Result<Current<'_>, NcclError> {
        let mut before = std::ptr::null_mut();
        // SAFETY: the pointer is to a live one.
        let code = unsafe { (self.library.cuda.current)(&raw mut before) };
        self.library.check_cuda("cuCtxGetCurrent", code)?;
        if before != self.context {
            // SAFETY: the context lives as long as `self`.
            let code = unsafe { (self.library.cuda.set_current)(self.context) };
            self.library.check_cuda("cuCtxSetCurrent", code)?;
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
    pub fn alloc(self: &Arc<Self>, bytes: usize) -> Result<Memory, NcclError> {
        let _current = self.enter()?;
        let mut address = 0;
        // SAFETY: the pointer is to a live integer. No bytes at all are refused by the driver.
        let code = unsafe { (self.library.cuda.alloc)(&raw mut address, bytes.max(1)) };
        self.library.check_cuda("cuMemAlloc", code)?;
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
    pub fn upload<T: Element>(self: &Arc<Self>, values: &[T]) -> Result<Memory, NcclError> {
        let mut memory = self.alloc(size_of_val(values))?;
        memory.write(values)?;
        Ok(memory)
    }

    /// # Errors
    /// The driver refuses.
    pub fn stream(self: &Arc<Self>) -> Result<Stream, NcclError> {
        let _current = self.enter()?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: the pointer is to a live one.
        let code = unsafe { (self.library.cuda.stream_create)(&raw mut stream, NON_BLOCKING) };
        self.library.check_cuda("cuStreamCreate", code)?;
        Ok(Stream {
            device: self.clone(),
            raw: RawStream(stream),
        })
    }

    pub(super) fn event(self: &Arc<Self>) -> Result<Event, NcclError> {
        let _current = self.enter()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: the pointer is to a live one.
        let code = unsafe { (self.library.cuda.event_create)(&raw mut event, NO_TIMING) };
        self.library.check_cuda("cuEventCreate", code)?;
        Ok(Event {
            device: self.clone(),
            event,
        })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained once, when this was made.
        let _code = unsafe { (self.library.cuda.release)(self.device) };
    }
}

/// What the driver writes as a text of at most `N` bytes with its end.
fn text<const N: usize>(
    write: impl FnOnce(*mut c_char, i32) -> Result<(), NcclError>,
) -> Result<String, NcclError> {
    let mut bytes = [0u8; N];
    write(bytes.as_mut_ptr().cast(), i32::try_from(N - 1).unwrap_or(0))?;
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(N);
    Ok(String::from_utf8_lossy(&bytes[..end]).into_owned())
}

/// A device that is the thread's for now; the one before is again when this is dropped.
pub(super) struct Current<'a> {
    device: &'a Device,
    before: cu::CUcontext,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if self.before != self.device.context {
            // SAFETY: it was the thread's context before.
            let _code = unsafe { (self.device.library.cuda.set_current)(self.before) };
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

    /// All of it as elements of a type; a rest that is no whole element is left out.
    ///
    /// # Safety
    /// See [`Elements::new`]: the memory is kept until the operations that use it have ended.
    pub unsafe fn elements(&self, dtype: DType) -> Elements {
        // SAFETY: the caller vouches for it.
        unsafe { Elements::new(self.address, self.bytes / dtype.size(), dtype) }
    }

    /// Copies elements to the beginning of it, and waits.
    ///
    /// # Errors
    /// They are more than fit, or the device failed.
    pub fn write<T: Element>(&mut self, values: &[T]) -> Result<(), NcclError> {
        let bytes = size_of_val(values);
        fits::<T>("what is written to a device's memory", bytes, self.bytes)?;
        let _current = self.device.enter()?;
        let library = &self.device.library;
        // SAFETY: both are at least as long as what is copied.
        let code = unsafe {
            (library.cuda.copy_to_device)(self.address, values.as_ptr().cast::<c_void>(), bytes)
        };
        library.check_cuda("cuMemcpyHtoD", code)
    }

    /// Copies the first elements of it, and waits.
    ///
    /// # Errors
    /// They are more than there are, or the device failed.
    pub fn read<T: Element>(&self, values: &mut [T]) -> Result<(), NcclError> {
        let bytes = size_of_val(values);
        fits::<T>("what is read from a device's memory", bytes, self.bytes)?;
        let _current = self.device.enter()?;
        let library = &self.device.library;
        // SAFETY: both are at least as long as what is copied; every bit pattern is an element.
        let code = unsafe {
            (library.cuda.copy_to_host)(values.as_mut_ptr().cast::<c_void>(), self.address, bytes)
        };
        library.check_cuda("cuMemcpyDtoH", code)
    }
}

fn fits<T>(what: &'static str, bytes: usize, limit: usize) -> Result<(), NcclError> {
    if bytes <= limit {
        return Ok(());
    }
    Err(NcclError::Length {
        what,
        got: bytes / size_of::<T>(),
        expected: limit / size_of::<T>(),
    })
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: allocated when this was made.
            let _code = unsafe { (self.device.library.cuda.free)(self.address) };
        }
    }
}

/// A stream that somebody else keeps, for example PyTorch's current one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawStream(pub(super) cu::CUstream);

// SAFETY: a handle; the driver's functions on one may be called from any thread.
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

impl RawStream {
    /// The legacy default stream.
    pub const DEFAULT: RawStream = RawStream(std::ptr::null_mut());

    /// # Safety
    /// A `CUstream` or `cudaStream_t` of the communicator's device that lives as long as it is used.
    pub unsafe fn new(stream: *mut c_void) -> RawStream {
        RawStream(stream.cast())
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
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: made by this; what is queued in it goes on.
            let _code = unsafe { (self.device.library.cuda.stream_destroy)(self.raw.0) };
        }
    }
}

/// A point in a stream.
#[derive(Debug)]
pub(super) struct Event {
    device: Arc<Device>,
    event: cu::CUevent,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// Is after all that is in the stream now.
    pub(super) fn record(&self, stream: RawStream) -> Result<(), NcclError> {
        let library = &self.device.library;
        // SAFETY: the event lives as long as `self`, the stream by its maker's word.
        let code = unsafe { (library.cuda.event_record)(self.event, stream.0) };
        library.check_cuda("cuEventRecord", code)
    }

    /// What comes into the stream from now on waits for this.
    pub(super) fn hold(&self, stream: RawStream) -> Result<(), NcclError> {
        let library = &self.device.library;
        // SAFETY: as above.
        let code = unsafe { (library.cuda.stream_wait)(stream.0, self.event, 0) };
        library.check_cuda("cuStreamWaitEvent", code)
    }

    pub(super) fn has_passed(&self) -> Result<bool, NcclError> {
        let library = &self.device.library;
        // SAFETY: the event lives as long as `self`.
        match unsafe { (library.cuda.event_query)(self.event) } {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            code => library.check_cuda("cuEventQuery", code).map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: made by this; a stream that waits for it goes on.
            let _code = unsafe { (self.device.library.cuda.event_destroy)(self.event) };
        }
    }
}
