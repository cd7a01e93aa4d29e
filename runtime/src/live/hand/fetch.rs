//! The side that lacks: who has it, and all of it from them.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::gather::{Gather, Missing};
use super::landing::{Landing, PART, cut};
use super::source::Source;
use super::{TOKEN_LEN, Thing, Want};

/// How long sources that have nothing yet are left alone.
const AGAIN: Duration = Duration::from_millis(3);
/// Connections of a copy, where there are fewer sources: one is hashed on while another is read from.
const STREAMS: usize = 3;

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

/// Gets a thing from these sources, which all have it or will, in parallel: each gives the next part
/// that is missing, so a slow one gives fewer, and the parts of one that is lost come from others. Every part is
/// written to its place as it comes, and checked by the digest of another source, while there is one.
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
    let (until, mut last) = (Instant::now() + within, String::from("nothing"));
    let mut connected: Vec<(SocketAddr, Option<Source>)> =
        sources.iter().map(|at| (*at, None)).collect();
    loop {
        let found = ready_sources(thing, &mut connected, token, &mut last);
        if let Some(((first, total), others)) = found.split_first() {
            if let Some((other, _)) = others.iter().find(|(_, theirs)| theirs != total) {
                let (one, other) = (first.at, other.at);
                return Err(FetchError::Differ { thing, one, other });
            }
            let bytes = *total;
            let mut ready: Vec<Source> = found.into_iter().map(|(source, _)| source).collect();
            if bytes > PART {
                add_streams(&mut ready);
            }
            let places = usize::try_from(bytes).ok().and_then(|n| landing.places(n));
            let Some(parts) = places.and_then(|places| cut(places, bytes)) else {
                return Err(FetchError::NoRoom { thing, bytes });
            };
            match Gather::new(thing, bytes, parts).run(ready, cancelled) {
                Ok(()) => return Ok(()),
                Err(Missing::Differ(one, other)) => {
                    return Err(FetchError::Differ { thing, one, other });
                }
                Err(Missing::Io(error)) => last = error.to_string(),
            }
        }
        if cancelled.load(Ordering::Acquire) {
            return Err(FetchError::Cancelled);
        }
        if Instant::now() >= until {
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

/// More connections with the same sources, if need be and they can be had.
fn add_streams(streams: &mut Vec<Source>) {
    let sources = streams.len();
    for more in 0..STREAMS.saturating_sub(sources) {
        if let Ok(stream) = streams[more % sources].again() {
            streams.push(stream);
        }
    }
}

/// The sources that have the thing, each with its length; the connections with the others are kept.
fn ready_sources(
    thing: Thing,
    all: &mut [(SocketAddr, Option<Source>)],
    token: [u8; TOKEN_LEN],
    last: &mut String,
) -> Vec<(Source, u64)> {
    let mut found = Vec::new();
    for (at, kept) in all {
        let connected = kept.take().map_or_else(|| Source::connect(*at, token), Ok);
        let asked: io::Result<_> = connected.and_then(|mut source| {
            source.ask(thing, Want::Length, (0, 0))?;
            let total = source.length()?;
            Ok((source, total))
        });
        match asked {
            Ok((source, Some(total))) => found.push((source, total)),
            Ok((source, None)) => {
                *last = format!("{at} does not have it yet");
                *kept = Some(source);
            }
            Err(error) => *last = format!("{at}: {error}"),
        }
    }
    found
}
