//! The side that lacks: parts from all sources in parallel, each checked.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{CHUNK, MAGIC, REQUEST_LEN, SILENCE, TOKEN_LEN, Thing, Want, lock};

/// Bytes of one part of a copy.
pub(super) const PART: u64 = 4 << 20;
/// The most bytes of a thing that is handed over: a bound on what a length from the network may ask for.
pub(super) const MAX_LEN: u64 = 1 << 40;
/// How long sources that have nothing yet are left alone.
const AGAIN: Duration = Duration::from_millis(3);
/// How long a source with nothing to do waits for another one's part, which it may have to check or to take over.
const LOOK: Duration = Duration::from_micros(500);

const DIGEST_LEN: usize = 32;

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
    #[error("not wanted any more")]
    Cancelled,
}

/// A connection to one source.
pub(super) struct Source {
    at: SocketAddr,
    pub(super) stream: TcpStream,
    token: [u8; TOKEN_LEN],
}

/// What a source that answered well does not have, or not any more, or does not send as it said.
fn not_right() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

impl Source {
    pub(super) fn connect(at: SocketAddr, token: [u8; TOKEN_LEN]) -> io::Result<Source> {
        let stream = TcpStream::connect_timeout(&at, SILENCE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SILENCE))?;
        stream.set_write_timeout(Some(SILENCE))?;
        Ok(Source { at, stream, token })
    }

    /// The whole's length, or `None` when it is not there (yet); what was asked for follows.
    pub(super) fn ask(
        &mut self,
        thing: Thing,
        want: Want,
        from: u64,
        len: u64,
    ) -> io::Result<Option<u64>> {
        let (kind, number) = thing.words();
        let mut request = Vec::with_capacity(REQUEST_LEN);
        request.extend_from_slice(&MAGIC);
        request.extend_from_slice(&self.token);
        for word in [kind, number, want as u64, from, len] {
            request.extend_from_slice(&word.to_le_bytes());
        }
        self.stream.write_all(&request)?;
        let mut length = [0; 8];
        self.stream.read_exact(&mut length)?;
        match u64::from_le_bytes(length).checked_sub(1) {
            Some(total) if total > MAX_LEN => Err(not_right()),
            total => Ok(total),
        }
    }

    pub(super) fn digest(&mut self) -> io::Result<[u8; DIGEST_LEN]> {
        let mut digest = [0; DIGEST_LEN];
        self.stream.read_exact(&mut digest)?;
        Ok(digest)
    }

    /// Gets a part, and checks it; its digest.
    fn get(
        &mut self,
        thing: Thing,
        total: u64,
        part: &mut Part<'_>,
    ) -> io::Result<[u8; DIGEST_LEN]> {
        if self.ask(thing, Want::Bytes, part.from, part.to.len() as u64)? != Some(total) {
            return Err(not_right());
        }
        let mut hasher = blake3::Hasher::new();
        for chunk in part.to.chunks_mut(CHUNK) {
            self.stream.read_exact(chunk)?;
            hasher.update(chunk);
        }
        let digest = self.digest()?;
        if blake3::Hash::from_bytes(digest) != hasher.finalize() {
            return Err(not_right());
        }
        Ok(digest)
    }

    /// The digest of this source's own part.
    fn other(
        &mut self,
        thing: Thing,
        total: u64,
        (from, len): (u64, u64),
    ) -> io::Result<[u8; DIGEST_LEN]> {
        match self.ask(thing, Want::Digest, from, len)? {
            Some(now) if now == total => self.digest(),
            _ => Err(not_right()),
        }
    }
}

/// Gets a thing from these sources, which all have it or will, in parallel: each gives the next part
/// that is missing, so a slow one gives fewer, and the parts of one that is lost come from others. Every part is
/// checked by its digest, and by that of another source, while there is one.
///
/// # Errors
/// No source has it in time, sources contradict each other, or `cancelled` was set.
pub(in crate::live) fn fetch(
    thing: Thing,
    sources: &[SocketAddr],
    token: [u8; TOKEN_LEN],
    within: Duration,
    cancelled: &AtomicBool,
) -> Result<Vec<u8>, FetchError> {
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
            let total = *total;
            let ready: Vec<Source> = found.into_iter().map(|(source, _)| source).collect();
            match gather(thing, ready, total, cancelled) {
                Ok(bytes) => return Ok(bytes),
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
        let asked = connected.and_then(|mut source| {
            let total = source.ask(thing, Want::Length, 0, 0)?;
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

/// A part's place in the whole, and where it is to be written.
struct Part<'a> {
    from: u64,
    to: &'a mut [u8],
}

/// A part that has come, whose digest another source than `by` has to have too.
struct Check {
    part: (u64, u64),
    digest: [u8; DIGEST_LEN],
    by: SocketAddr,
}

enum Missing {
    Differ(SocketAddr, SocketAddr),
    Io(io::Error),
}

/// What is to be done yet by all sources of one copy.
struct Todo<'a> {
    parts: Vec<Part<'a>>,
    checks: Vec<Check>,
    /// Parts that some source is just sending.
    coming: usize,
    failure: Option<Missing>,
}

impl<'a> Todo<'a> {
    fn next_check(&mut self, not_by: SocketAddr) -> Option<Check> {
        let at = self.checks.iter().position(|check| check.by != not_by)?;
        Some(self.checks.swap_remove(at))
    }
}

/// All parts, from whoever gives them.
fn gather(
    thing: Thing,
    sources: Vec<Source>,
    total: u64,
    cancelled: &AtomicBool,
) -> Result<Vec<u8>, Missing> {
    let too_large = || Missing::Io(io::ErrorKind::OutOfMemory.into());
    let len = usize::try_from(total).map_err(|_| too_large())?;
    // That there is as much is an error here and not the end of the process; the pages come as they are written.
    Vec::<u8>::new()
        .try_reserve_exact(len)
        .map_err(|_| too_large())?;
    let mut bytes = vec![0; len];
    let cut = (0..)
        .step_by(PART as usize)
        .zip(bytes.chunks_mut(PART as usize));
    let todo = Mutex::new(Todo {
        parts: cut.map(|(from, to)| Part { from, to }).collect(),
        checks: Vec::new(),
        coming: 0,
        failure: None,
    });
    std::thread::scope(|scope| {
        for source in sources {
            scope.spawn(|| copy_from(source, thing, total, &todo, cancelled));
        }
    });
    let Todo { parts, failure, .. } = todo.into_inner().unwrap_or_else(PoisonError::into_inner);
    match failure {
        Some(Missing::Differ(one, other)) => return Err(Missing::Differ(one, other)),
        failure if !parts.is_empty() => {
            return Err(failure.unwrap_or(Missing::Io(io::ErrorKind::Interrupted.into())));
        }
        // What one source did not give another one did.
        _ => {}
    }
    drop(parts);
    Ok(bytes)
}

/// One source's share of a copy: parts while there are any, and checks of what others gave.
fn copy_from(
    mut source: Source,
    thing: Thing,
    total: u64,
    todo: &Mutex<Todo<'_>>,
    cancelled: &AtomicBool,
) {
    let at = source.at;
    while !cancelled.load(Ordering::Acquire) {
        let mut list = lock(todo);
        if matches!(list.failure, Some(Missing::Differ(..))) {
            return;
        }
        let (part, check) = (list.parts.pop(), list.next_check(at));
        list.coming += usize::from(part.is_some());
        let idle = part.is_none() && check.is_none();
        let over = idle && list.coming == 0;
        drop(list);
        if over {
            return;
        }
        if idle {
            std::thread::sleep(LOOK);
        }
        let mut failed = None;
        if let Some(mut part) = part {
            let got = source.get(thing, total, &mut part);
            let mut list = lock(todo);
            list.coming -= 1;
            match got {
                Ok(digest) => {
                    let part = (part.from, part.to.len() as u64);
                    list.checks.push(Check {
                        part,
                        digest,
                        by: at,
                    });
                }
                Err(error) => {
                    list.parts.push(part);
                    failed = Some(error);
                }
            }
        }
        if let Some(check) = check {
            let theirs = match &failed {
                None => source.other(thing, total, check.part),
                Some(_) => Err(not_right()),
            };
            match theirs {
                Ok(theirs) if theirs == check.digest => {}
                Ok(_) => {
                    lock(todo).failure = Some(Missing::Differ(check.by, at));
                    return;
                }
                Err(error) => {
                    lock(todo).checks.push(check);
                    failed = failed.or(Some(error));
                }
            }
        }
        if let Some(error) = failed {
            let mut list = lock(todo);
            if list.failure.is_none() {
                list.failure = Some(Missing::Io(error));
            }
            return;
        }
    }
}
