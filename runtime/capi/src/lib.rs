//! The runtime's C ABI: `libmuster.so`, for Python by ctypes and for other languages. `include/muster.h` is its
//! documentation; the functions here have the same names, grouped as there.
//!
//! Every entry turns its pointers into references first ([`raw`]), which is all that is unsafe here, then does its
//! work in safe code behind [`outcome::entry`]: a panic never leaves this library, and an error is a number with a
//! text. A handle is a mutex, so that a caller with several threads cannot break it.

pub mod job;
pub mod outcome;
mod raw;
pub mod restore;
pub mod sampler;
pub mod saves;

/// The version of the ABI: changes with everything that does not fit what was compiled before.
pub const ABI: u32 = 2;

const RELEASE: &std::ffi::CStr = match std::ffi::CStr::from_bytes_with_nul(
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes(),
) {
    Ok(release) => release,
    Err(_) => c"unknown",
};

/// The ABI of this library, and its release.
///
/// # Safety
/// `release` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_abi(release: *mut *const std::ffi::c_char) -> u32 {
    // SAFETY: the caller's promise.
    if let Some(release) = unsafe { release.as_mut() } {
        *release = RELEASE.as_ptr();
    }
    ABI
}

#[cfg(test)]
mod tests;
