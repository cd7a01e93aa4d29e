//! State that an earlier run of the agent stored, as it is found again.

use super::{Past, Stored};
use crate::codec::CodecError;
use crate::job::Durable;

/// The part of it that can be read, and the part that is lost.
#[derive(Clone, Debug)]
pub struct Restored {
    pub stored: Stored,
    /// The blobs that cannot be read, by the names that they came with.
    pub unreadable: Vec<(String, CodecError)>,
    /// Why votes may be lost: then the agent must count as another voter from now on.
    pub votes_lost: Option<String>,
}

impl Restored {
    /// Reads the jobs' blobs, and what is remembered of those that were forgotten.
    pub fn read(blobs: Vec<(String, Vec<u8>)>, past: Vec<u8>) -> Restored {
        let (mut jobs, mut unreadable) = (Vec::new(), Vec::new());
        for (name, bytes) in blobs {
            match Durable::decode(&bytes) {
                Ok(durable) => jobs.push((durable.key, bytes)),
                Err(error) => unreadable.push((name, error)),
            }
        }
        let lossy = match Past::decode(&past) {
            Ok(known) => known
                .is_lossy()
                .then(|| "more jobs were forgotten than can be remembered".to_owned()),
            Err(error) => Some(error.to_string()),
        };
        let first = unreadable.first().map(|(_, error)| error.to_string());
        let votes_lost = lossy.or(first);
        // What was remembered for the old voter binds the new one no more.
        let past = match votes_lost {
            None => past,
            Some(_) => Vec::new(),
        };
        Restored {
            stored: Stored { jobs, past },
            unreadable,
            votes_lost,
        }
    }
}
