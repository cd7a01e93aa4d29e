//! A small checkpoint file: written atomically, found whole or not at all.
//!
//! For state of a few megabytes that one rank writes. A file is a header, the payload, and BLAKE3
//! over both. It is written beside its place, synced, renamed, and its directory synced: after
//! [`save`] returns, a crash of the machine does not lose it; before, it leaves the older files.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

const MAGIC: [u8; 8] = *b"MUSTERCK";
const VERSION: u32 = 1;
const HEADER_LEN: usize = 32;
const HASH_LEN: usize = 32;

/// Bytes of a payload at most.
pub const MAX_PAYLOAD: usize = 1 << 30;

/// Files that [`save`] keeps: the newest and its predecessors, in case the newest is damaged.
pub const KEPT: usize = 3;

#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("cannot {what} {path}; older checkpoints are untouched")]
    Io {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("a checkpoint of {bytes} bytes is larger than {MAX_PAYLOAD}; nothing was written")]
    TooLarge { bytes: usize },
}

/// A checkpoint that verified.
#[derive(Debug, PartialEq, Eq)]
pub struct Loaded {
    pub step: u64,
    pub payload: Vec<u8>,
}

/// A file that looked like a checkpoint and was passed over.
#[derive(Debug, PartialEq, Eq)]
pub struct Skipped {
    pub path: PathBuf,
    pub why: String,
}

fn context(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    move |source| CheckpointError::Io { what, path, source }
}

fn file_name(step: u64) -> String {
    format!("step-{step:020}.ckpt")
}

/// The step in a checkpoint's file name.
fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-")?.strip_suffix(".ckpt")?;
    (digits.len() == 20).then(|| digits.parse().ok())?
}

/// Writes the state before `step` to `dir`, which is created if need be; the path of the file.
///
/// # Errors
/// The directory or the disk; older checkpoints are untouched.
pub fn save(dir: &Path, step: u64, payload: &[u8]) -> Result<PathBuf, CheckpointError> {
    if payload.len() > MAX_PAYLOAD {
        return Err(CheckpointError::TooLarge {
            bytes: payload.len(),
        });
    }
    fs::create_dir_all(dir).map_err(context("create", dir))?;
    let path = dir.join(file_name(step));
    let temporary = dir.join(format!(".{}.{}", file_name(step), std::process::id()));
    if let Err(source) = write_synced(&temporary, step, payload) {
        // Best effort: a full disk gets its bytes back.
        drop(fs::remove_file(&temporary));
        return Err(context("write", &temporary)(source));
    }
    fs::rename(&temporary, &path).map_err(context("rename", &path))?;
    File::open(dir)
        .and_then(|dir| dir.sync_all())
        .map_err(context("sync", dir))?;
    prune(dir, step);
    Ok(path)
}

fn write_synced(path: &Path, step: u64, payload: &[u8]) -> io::Result<()> {
    let mut header = [0; HEADER_LEN];
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[16..24].copy_from_slice(&step.to_le_bytes());
    header[24..].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    let mut hasher = blake3::Hasher::new();
    hasher.update(&header).update(payload);
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)?;
    file.write_all(&header)?;
    file.write_all(payload)?;
    file.write_all(hasher.finalize().as_bytes())?;
    file.sync_all()
}

/// Steps with a file in the directory, newest first.
fn steps(dir: &Path) -> io::Result<Vec<u64>> {
    let mut steps = Vec::new();
    for entry in fs::read_dir(dir)? {
        if let Some(step) = entry?.file_name().to_str().and_then(step_of) {
            steps.push(step);
        }
    }
    steps.sort_unstable_by(|a, b| b.cmp(a));
    Ok(steps)
}

/// Removes what is older than the newest [`KEPT`] at or below `newest`. Best effort: what cannot
/// be removed now is tried again after the next save.
fn prune(dir: &Path, newest: u64) {
    let old = steps(dir).unwrap_or_default();
    for step in old.into_iter().filter(|step| *step <= newest).skip(KEPT) {
        drop(fs::remove_file(dir.join(file_name(step))));
    }
}

/// The newest checkpoint that verifies, and those passed over on the way to it. A directory that
/// does not exist holds none.
///
/// # Errors
/// The directory cannot be read.
pub fn load_newest(dir: &Path) -> Result<(Option<Loaded>, Vec<Skipped>), CheckpointError> {
    let steps = match steps(dir) {
        Ok(steps) => steps,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(context("list", dir)(error)),
    };
    let mut skipped = Vec::new();
    for step in steps {
        let path = dir.join(file_name(step));
        match read_verified(&path, step) {
            Ok(payload) => return Ok((Some(Loaded { step, payload }), skipped)),
            Err(error) => skipped.push(Skipped {
                path,
                why: error.to_string(),
            }),
        }
    }
    Ok((None, skipped))
}

fn read_verified(path: &Path, step: u64) -> io::Result<Vec<u8>> {
    let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut file = File::open(path)?;
    let mut header = [0; HEADER_LEN];
    file.read_exact(&mut header)?;
    let number = |at: usize| {
        let mut eight = [0; 8];
        eight.copy_from_slice(&header[at..at + 8]);
        u64::from_le_bytes(eight)
    };
    if header[..8] != MAGIC {
        return Err(bad("not a checkpoint"));
    }
    if number(8) != u64::from(VERSION) {
        return Err(bad("written by another version"));
    }
    if number(16) != step {
        return Err(bad("its name and its step differ"));
    }
    let len = usize::try_from(number(24))
        .ok()
        .filter(|len| *len <= MAX_PAYLOAD)
        .ok_or_else(|| bad("its length is impossible"))?;
    if file.metadata()?.len() != (HEADER_LEN + len + HASH_LEN) as u64 {
        return Err(bad("cut short, or longer than it says"));
    }
    let mut payload = vec![0; len];
    file.read_exact(&mut payload)?;
    let mut hash = [0; HASH_LEN];
    file.read_exact(&mut hash)?;
    let mut hasher = blake3::Hasher::new();
    hasher.update(&header).update(&payload);
    if *hasher.finalize().as_bytes() != hash {
        return Err(bad("its checksum differs"));
    }
    Ok(payload)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_that_verifies_is_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("not/yet");
        assert_eq!(load_newest(&place).unwrap(), (None, Vec::new()));
        for step in 1..=5u64 {
            save(&place, step, &[step as u8; 100]).unwrap();
        }
        assert_eq!(steps(&place).unwrap(), [5, 4, 3], "older ones are removed");
        let (loaded, skipped) = load_newest(&place).unwrap();
        assert_eq!((loaded.unwrap().payload, skipped.len()), (vec![5; 100], 0));

        // Every single byte counts, and so does the length.
        let path = place.join(file_name(5));
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&path, &damaged).unwrap();
            let (loaded, skipped) = load_newest(&place).unwrap();
            assert_eq!((loaded.unwrap().step, skipped.len()), (4, 1), "byte {at}");
        }
        for len in [0, 10, whole.len() - 1] {
            fs::write(&path, &whole[..len]).unwrap();
            assert_eq!(
                load_newest(&place).unwrap().0.unwrap().step,
                4,
                "{len} bytes"
            );
        }
        assert!(fs::read_dir(&place).unwrap().all(|entry| {
            !entry
                .unwrap()
                .file_name()
                .to_string_lossy()
                .starts_with('.')
        }));
    }

    #[test]
    fn a_place_that_is_no_directory_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = save(file.path(), 1, &[]).unwrap_err();
        assert!(
            matches!(error, CheckpointError::Io { what: "create", .. }),
            "{error}"
        );
        assert!(load_newest(file.path()).is_err());
    }
}
