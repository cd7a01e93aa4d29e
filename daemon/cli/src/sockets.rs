//! Where the sockets of agents lie.

use std::path::PathBuf;

/// The folder for the sockets of agents that are embedded in a launcher:
/// `$XDG_RUNTIME_DIR/muster`, else a folder of the user's own under the temporary directory.
pub fn embedded_dir() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|d| !d.is_empty()) {
        Some(dir) => PathBuf::from(dir).join("muster"),
        None => std::env::temp_dir().join(format!("muster-{}", nix::unistd::getuid())),
    }
}
