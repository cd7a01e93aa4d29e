//! The cluster secret: where it is, and how it is kept out of logs.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rand::TryRngCore;
use rand::rngs::OsRng;

use super::layers::Layers;
use super::{ConfigError, Inputs, Source, parse};

/// Bytes of a secret, without the line break at its end.
pub const MIN_SECRET: usize = 16;
pub const MAX_SECRET: usize = 4096;

const KEY: &str = "secret_file";
/// The name of the credential in the unit file: `LoadCredential=cluster-secret:...`.
const CREDENTIAL: &str = "cluster-secret";

/// Bytes that only the agents of one cluster know. Never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// The bytes, for a key derivation.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// 32 random bytes.
    pub fn random() -> io::Result<Secret> {
        let mut bytes = vec![0; 32];
        OsRng.try_fill_bytes(&mut bytes).map_err(io::Error::other)?;
        Ok(Secret(bytes))
    }

    /// A secret from elsewhere than a file; `None` when it is too short or too long.
    pub fn new(bytes: Vec<u8>) -> Option<Secret> {
        (MIN_SECRET..=MAX_SECRET)
            .contains(&bytes.len())
            .then_some(Secret(bytes))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Reads the secret that `secret_file` names, else systemd's credential, if there is one.
pub(super) fn find(layers: &mut Layers, inputs: &Inputs) -> Result<Option<Secret>, ConfigError> {
    let path = match layers.optional(KEY, parse::any_path)? {
        Some(path) => path,
        None => {
            let Some(dir) = inputs.environment.get("CREDENTIALS_DIRECTORY") else {
                return Ok(None);
            };
            let path = Path::new(dir).join(CREDENTIAL);
            if !path.exists() {
                return Ok(None);
            }
            layers.put(KEY, path.clone(), Source::Credential);
            path
        }
    };
    let (secret, mode) = read(&path).map_err(|why| ConfigError::Secret {
        path: path.clone(),
        why,
    })?;
    if mode & 0o004 != 0 && !is_kubernetes(inputs) {
        layers.warn(format!(
            "every user of this machine can read the cluster secret: chmod 600 {}",
            path.display()
        ));
    }
    Ok(Some(secret))
}

/// In a pod, the volume of a Secret is readable for all of the pod's own users.
fn is_kubernetes(inputs: &Inputs) -> bool {
    inputs.environment.contains_key("KUBERNETES_SERVICE_HOST")
}

fn read(path: &PathBuf) -> Result<(Secret, u32), String> {
    let cannot = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::NotFound => {
            "there is no such file; create it with: head -c 32 /dev/urandom | base64 > FILE"
                .to_owned()
        }
        std::io::ErrorKind::PermissionDenied => {
            format!("{e}; let the agent's user read it")
        }
        _ => e.to_string(),
    };
    let file = File::open(path).map_err(cannot)?;
    let metadata = file.metadata().map_err(cannot)?;
    if metadata.is_dir() {
        return Err("is a directory: name the file in it".to_owned());
    }
    let mut bytes = Vec::new();
    file.take(MAX_SECRET as u64 + 3)
        .read_to_end(&mut bytes)
        .map_err(cannot)?;
    // Whoever writes it with an editor means the same secret as whoever does not.
    while bytes.last().is_some_and(|b| matches!(b, b'\n' | b'\r')) {
        bytes.pop();
    }
    let have = bytes.len();
    let secret = Secret::new(bytes).ok_or_else(|| match have {
        0 => "the file is empty".to_owned(),
        n if n < MIN_SECRET => format!("has {n} bytes, at least {MIN_SECRET} are needed"),
        _ => format!("has more than {MAX_SECRET} bytes"),
    })?;
    Ok((secret, metadata.mode()))
}
