//! The side that lacks: who has it, and all of it from them.

use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use super::gather::Gather;
use super::landing::Landing;
use super::source::Wanted;
use super::todo::Missing;
use super::{TOKEN_LEN, Thing};

/// How long sources that have nothing yet are left alone.
pub(super) const AGAIN: Duration = Duration::from_millis(3);

/// A thing did not come.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error(
        "{thing:?} did not come from any of {sources} ranks within {waited:?}; the last said: {last}"
    )]
    NotThere {
        thing: Thing,
        sources: usize,
        waited: Duration,
        last: String,
    },
    #[error(
        "ranks at {one} and {other} hold different bytes for {thing:?}: one of them deviates from the rule of the live step; restore a checkpoint"
    )]
    Differ {
        thing: Thing,
        one: SocketAddr,
        other: SocketAddr,
    },
    #[error(
        "there is no place here for {thing:?} of {bytes} bytes: train the same on all ranks, and look how much memory is free"
    )]
    NoRoom { thing: Thing, bytes: u64 },
    #[error("not wanted any more")]
    Cancelled,
}

impl FetchError {
    /// Whether no other generation mends it.
    pub(in crate::live) fn is_final(&self) -> bool {
        matches!(self, FetchError::Differ { .. } | FetchError::NoRoom { .. })
    }
}

/// Gets a thing from these sources, which all have it or will, in parallel: each gives the next part
/// that is missing, so a slow one gives fewer, and the parts of one that is lost come from others. One that has it
/// later joins then. Every part is written to its place as it comes, and checked by the digest of another source,
/// while there is one, or may be.
///
/// # Errors
/// No source has it in time, sources contradict each other, there is no room for it, or `cancelled` was set. Then the
/// landing holds parts of it at most.
pub(in crate::live) fn fetch(
    thing: Thing,
    sources: &[SocketAddr],
    token: [u8; TOKEN_LEN],
    within: Duration,
    cancelled: &AtomicBool,
    landing: &mut dyn Landing,
) -> Result<(), FetchError> {
    let until = Instant::now() + within;
    let mut last = String::from("nothing");
    loop {
        let wanted = Wanted::new(cancelled, until);
        match Gather::new(thing, sources, token, &wanted, &mut *landing).run() {
            Ok(()) => return Ok(()),
            Err(Missing::Differ(one, other)) => {
                return Err(FetchError::Differ { thing, one, other });
            }
            Err(Missing::NoRoom(bytes)) => return Err(FetchError::NoRoom { thing, bytes }),
            Err(Missing::Lost(None)) => {}
            Err(Missing::Lost(Some(said))) => last = said,
        }
        if wanted.is_cancelled() {
            return Err(FetchError::Cancelled);
        }
        if wanted.is_late() {
            return Err(FetchError::NotThere {
                thing,
                sources: sources.len(),
                waited: within,
                last,
            });
        }
        std::thread::sleep(AGAIN);
    }
}
