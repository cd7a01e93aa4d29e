//! Stand-ins for NCCL and the CUDA driver, compiled once.

use std::path::PathBuf;
use std::process::Command;

use libloading::os::unix::{Library as Handle, Symbol};

/// The stand-ins for both libraries, in one file.
pub(crate) fn standin() -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/standin-nccl");
    let names = ["standin.h", "cuda.c", "memory.c", "nccl.c"];
    let mut hasher = blake3::Hasher::new();
    for name in names {
        hasher.update(&std::fs::read(folder.join(name)).unwrap());
    }
    let digest = hasher.finalize().to_hex();
    let to = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let library = to.join(format!("libstandin-{}.so", &digest[..16]));
    if !library.exists() {
        // Other tests may do the same at the same time: whoever is first puts it into place.
        let own = tempfile::NamedTempFile::new_in(&to).unwrap();
        let status = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-pthread", "-o"])
            .arg(own.path())
            .args(names[1..].iter().map(|name| folder.join(name)))
            .status()
            .unwrap();
        assert!(status.success(), "cc cannot compile the stand-ins");
        own.persist(&library).unwrap();
    }
    library
}

/// A function of the stand-ins that Muster does not know.
pub(crate) fn own<T>(name: &str) -> Symbol<T> {
    // SAFETY: the stand-ins do nothing when they are loaded; the callers know the types.
    unsafe {
        let handle = Handle::new(standin()).unwrap();
        let symbol = handle.get(name.as_bytes()).unwrap();
        // Loaded for good, as by `library`.
        std::mem::forget(handle);
        symbol
    }
}
