//! Libraries that are opened while the program runs.

use std::path::Path;

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW, Symbol};

use super::LibraryError;

/// A symbol that a library does not have.
pub(crate) type NotFound = (&'static str, libloading::Error);

pub(crate) fn open(path: &Path) -> Result<Handle, LibraryError> {
    // SAFETY: what such a library does when it is loaded is its maker's affair; NCCL and the driver
    // expect to be loaded so.
    let opened = unsafe { Handle::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
    opened.map_err(|source| LibraryError::Missing {
        path: path.to_owned(),
        source,
    })
}

/// # Safety
/// The symbol is of this type.
pub(crate) unsafe fn named<T>(
    library: &Handle,
    path: &Path,
    name: &'static str,
) -> Result<Symbol<T>, LibraryError> {
    // SAFETY: the caller vouches for it.
    let found = unsafe { library.get(name.as_bytes()) };
    found.map_err(|source| not_found(path, (name, source)))
}

pub(crate) fn not_found(path: &Path, (symbol, source): NotFound) -> LibraryError {
    LibraryError::NoSymbol {
        path: path.to_owned(),
        symbol,
        source,
    }
}
