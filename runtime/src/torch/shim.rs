//! Functions that tch does not offer, by the shim in C++ (`shim.cpp`): hooks that run when a gradient is complete, and
//! a device's current stream.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::Tensor;

use super::TorchError;

type Call = extern "C" fn(*const c_void, u32);

unsafe extern "C" {
    fn muster_torch_hook(
        tensor: *mut c_void,
        call: Call,
        context: *const c_void,
        index: u32,
        why: *mut c_char,
        room: usize,
    ) -> c_int;
    fn muster_torch_stream(
        tensor: *mut c_void,
        stream: *mut *mut c_void,
        why: *mut c_char,
        room: usize,
    ) -> c_int;
    fn muster_torch_unhook(tensor: *mut c_void, why: *mut c_char, room: usize) -> c_int;
}

/// Hooks on parameters that are cut into buckets: tells when a bucket's last gradient is there.
#[derive(Debug)]
pub(super) struct Hooks {
    parameters: Vec<Tensor>,
    /// At one place in memory as long as there are hooks: they point to it.
    listener: Box<Listener>,
}

#[derive(Debug)]
struct Listener {
    /// Of each parameter.
    bucket_of: Vec<usize>,
    /// Parameters of each bucket.
    sizes: Vec<usize>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Parameters of each bucket whose gradient is not there yet.
    left: Vec<usize>,
    told: Option<Told>,
}

type Ready<'a> = dyn FnMut(usize) + Send + 'a;

/// The callback that is told, during one backward.
#[derive(Debug)]
struct Told(*mut Ready<'static>);

// SAFETY: what it points to is `Send`, and used behind the lock of `State` alone.
unsafe impl Send for Told {}

impl Hooks {
    /// Puts a hook on each parameter; `bucket_of` says each one's bucket, of `buckets`.
    pub(super) fn new(
        parameters: Vec<Tensor>,
        bucket_of: Vec<usize>,
        buckets: usize,
    ) -> Result<Hooks, TorchError> {
        let mut sizes = vec![0; buckets];
        for bucket in &bucket_of {
            if let Some(size) = sizes.get_mut(*bucket) {
                *size += 1;
            }
        }
        let listener = Box::new(Listener {
            bucket_of,
            sizes,
            state: Mutex::default(),
        });
        let hooks = Hooks {
            parameters,
            listener,
        };
        let context = std::ptr::from_ref(&*hooks.listener).cast::<c_void>();
        for (index, parameter) in (0..).zip(&hooks.parameters) {
            said(|why, room| {
                // SAFETY: the tensor lives as long as `hooks`, whose drop takes the hook off before the
                // listener goes.
                unsafe { muster_torch_hook(raw(parameter), fired, context, index, why, room) }
            })?;
        }
        Ok(hooks)
    }

    /// Runs `backward`; meanwhile `ready` is told of each bucket that is complete, perhaps in another thread.
    pub(super) fn during<R>(&self, ready: &mut Ready<'_>, backward: impl FnOnce() -> R) -> R {
        struct Silence<'a>(&'a Listener);
        impl Drop for Silence<'_> {
            fn drop(&mut self) {
                self.0.lock().told = None;
            }
        }
        let ready: *mut Ready<'_> = ready;
        // SAFETY: only the lifetime changes; `Silence` forgets the pointer before this call returns, in a
        // panic too, and `fired` uses it under the same lock.
        let ready = unsafe { std::mem::transmute::<*mut Ready<'_>, *mut Ready<'static>>(ready) };
        let silence = Silence(&self.listener);
        *self.listener.lock() = State {
            left: self.listener.sizes.clone(),
            told: Some(Told(ready)),
        };
        let result = backward();
        drop(silence);
        result
    }
}

impl Drop for Hooks {
    fn drop(&mut self) {
        for parameter in &self.parameters {
            // SAFETY: the tensor is alive. Taking a hook off cannot fail for one that has it.
            let _gone = said(|why, room| unsafe { muster_torch_unhook(raw(parameter), why, room) });
        }
    }
}

impl Listener {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fired(&self, index: usize) {
        let Some(bucket) = self.bucket_of.get(index) else {
            return;
        };
        let mut state = self.lock();
        let Some(left) = state.left.get_mut(*bucket) else {
            return;
        };
        // At zero already: a second backward within one call, which nobody waits for.
        let last = *left == 1;
        *left = left.saturating_sub(1);
        if let Some(Told(ready)) = state.told.take_if(|_| last) {
            // SAFETY: `during` keeps it alive while it is here, and the lock keeps others away.
            let ready: &mut Ready<'_> = unsafe { &mut *ready };
            ready(*bucket);
            state.told = Some(Told(ready));
        }
    }
}

/// Called by libtorch, which knows no panics: who panicked is told no more, and what was not said to be ready
/// is reduced at the end.
extern "C" fn fired(context: *const c_void, index: u32) {
    // SAFETY: the hook was made with a listener, which outlives it.
    let listener = unsafe { &*context.cast::<Listener>() };
    let _panicked = catch_unwind(AssertUnwindSafe(|| listener.fired(index as usize)));
}

/// The stream that libtorch now uses on the tensor's device, as its driver has it.
pub(super) fn current_stream(tensor: &Tensor) -> Result<*mut c_void, TorchError> {
    let mut stream = std::ptr::null_mut();
    // SAFETY: the tensor is alive, and the pointer is to a live one.
    said(|why, room| unsafe { muster_torch_stream(raw(tensor), &raw mut stream, why, room) })?;
    Ok(stream)
}

fn raw(tensor: &Tensor) -> *mut c_void {
    tensor.as_ptr().cast_mut().cast()
}

fn said(call: impl FnOnce(*mut c_char, usize) -> c_int) -> Result<(), TorchError> {
    let mut why = [0u8; 512];
    if call(why.as_mut_ptr().cast(), why.len()) == 0 {
        return Ok(());
    }
    let why = CStr::from_bytes_until_nul(&why).map_or("unknown".into(), CStr::to_string_lossy);
    Err(TorchError::Shim(why.into_owned()))
}
