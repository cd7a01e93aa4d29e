//! The secret of a user's own cluster, made on first use. A home directory that the nodes share makes it the same
//! everywhere; elsewhere it has to be copied, or `MUSTER_SECRET_FILE` names one.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::Secret;

/// `muster/secret` in `XDG_CONFIG_HOME`, else in `~/.config`.
pub(super) fn secret_file(environment: &BTreeMap<String, String>) -> Result<PathBuf, String> {
    let named = |name: &str| environment.get(name).filter(|d| !d.is_empty());
    let base = match (named("XDG_CONFIG_HOME"), named("HOME")) {
        (Some(dir), _) => PathBuf::from(dir),
        (None, Some(home)) => Path::new(home).join(".config"),
        (None, None) => return Err("HOME is not set".into()),
    };
    let path = base.join("muster/secret");
    match path.exists() {
        true => Ok(path),
        false => make(&path)
            .map(|()| path.clone())
            .map_err(|why| format!("{}: {why}", path.display())),
    }
}

/// Written aside and linked: of several launchers that start at once, one makes the secret.
fn make(path: &Path) -> io::Result<()> {
    let dir = path.parent().unwrap_or(path);
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let secret = Secret::random()?;
    let text: String = (secret.bytes().iter())
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let aside = format!(
        ".secret-{}-{}",
        crate::serve::host_name(),
        std::process::id()
    );
    let aside = dir.join(aside);
    let mut options = File::options();
    options.write(true).create_new(true).mode(0o600);
    let mut file = options.open(&aside)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    let linked = fs::hard_link(&aside, path);
    fs::remove_file(&aside)?;
    match linked {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}
