//! Where a job lies in its store, whatever kind of store it is.
//!
//! ```text
//! muster-store            the store's uuid
//! muster-probe/           what a probe makes, and deletes
//! <job>/log/<slot>.json   create-only, never changed, never deleted
//! <job>/beacon            overwritten while a leader lives
//! <job>/data, manifest    checkpoints
//! ```

use std::ffi::OsString;
use std::path::PathBuf;

use muster_store::{Kind, Location, LocationError, Options, Store, StoreError, UUID_NAME};

/// The most bytes of an entry of the log.
pub const MAX_ENTRY: u64 = muster_protocol::storelog::MAX_ENTRY as u64;

/// The leader's beacon (R14), a small object that moves while a leader lives.
pub const BEACON: &str = "beacon";
const MAX_BEACON: u64 = 64;

/// Folders of the store's own.
const RESERVED: [&str; 2] = [UUID_NAME, muster_store::PROBE_FOLDER];

/// A location as it stands on the command line or in the environment. Any path is one, also what is no
/// text; a directory's is absolute, so that a worker with another working directory finds it.
///
/// # Errors
/// It names no kind of store, and why.
pub fn parse(text: OsString) -> Result<Location, LocationError> {
    let location = match text.to_str() {
        Some(text) => text.parse()?,
        None => Location::Directory(PathBuf::from(text)),
    };
    Ok(match location {
        Location::Directory(path) => {
            Location::Directory(std::path::absolute(&path).unwrap_or(path))
        }
        bucket => bucket,
    })
}

/// A job's folder, to read: nothing is written, and nothing probed. Its checkpoints are found and loaded
/// from it as it is ([`muster_checkpoint::newest`]); [`entry`] names what is in its log.
///
/// # Errors
/// The directory is not there, or the environment lacks something. That a bucket or folder does not
/// exist shows when it is read.
pub fn open(location: &Location, job: &str) -> Result<Store, StoreError> {
    Store::open(location, &Options::of_process())?.within(&folder(job))
}

/// A slot of a job's log, in the job's folder. Eight digits keep a listing in order; beyond them
/// names only grow.
pub fn entry(slot: u64) -> String {
    format!("log/{slot:08}.json")
}

/// The beacon that the job's leader wrote last to show that it lives, in the job's folder; none where there is none.
///
/// # Errors
/// The store does not say.
pub fn beacon(job: &Store) -> Result<Option<u64>, StoreError> {
    match job.get(BEACON, MAX_BEACON) {
        // Anything else than a number is a torn one.
        Ok(bytes) => Ok(std::str::from_utf8(&bytes)
            .ok()
            .and_then(|text| u64::from_str_radix(text, 16).ok())),
        Err(error) if matches!(error.kind, Kind::NotFound | Kind::TooLarge) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The folder of a job: its id where that is a plain name and nobody else's, else a digest of it.
pub fn folder(job: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let own = !RESERVED.iter().any(|taken| taken.eq_ignore_ascii_case(job));
    if own && !job.is_empty() && job.chars().all(plain) && !job.starts_with('.') {
        return job.to_owned();
    }
    let hash = blake3::hash(job.as_bytes()).to_hex();
    format!("job-{}", hash.get(..32).unwrap_or_default())
}

/// A job's folder as a worker finds it: the path, or the bucket's location.
pub fn folder_for_workers(location: &Location, job: &str) -> OsString {
    match location {
        Location::Directory(path) => path.join(folder(job)).into(),
        bucket => format!("{bucket}/{}", folder(job)).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_job_has_a_folder_of_the_stores_own() {
        for job in ["train", "a.b-c_1", "muster", "job"] {
            assert_eq!(folder(job), job);
        }
        for job in [
            "muster-store",
            "muster-probe",
            "Muster-Store",
            "a b",
            ".x",
            "é",
            "",
        ] {
            let folder = folder(job);
            assert!(folder.starts_with("job-") && folder.len() == 36, "{folder}");
        }
        assert_ne!(folder("muster-store"), folder("muster-probe"));
    }

    #[test]
    fn locations_are_told_to_workers_as_they_can_be_opened() {
        let told = |text: &str, job: &str| folder_for_workers(&parse(text.into()).unwrap(), job);
        assert_eq!(told("/shared/x", "train"), "/shared/x/train");
        assert_eq!(told("s3://bucket", "train"), "s3://bucket/train");
        assert_eq!(
            told("gs://bucket/a/", "a b"),
            *format!("gs://bucket/a/{}", folder("a b"))
        );
        let here = std::env::current_dir().unwrap();
        assert_eq!(told("x", "train"), here.join("x/train").into_os_string());
        assert!(parse("ftp://x".into()).is_err());
    }
}
