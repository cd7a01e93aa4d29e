//! Bytes that one rank hands to others of its generation while the training goes on: a frozen state
//! for newcomers, and results for survivors that lack them. Plain TCP on threads of its own, so
//! that a copy disturbs no collective. Every request proves the generation's token first.
//!
//! Nothing is hashed before it is asked for: what is offered is there at once. A part's bytes are hashed as they
//! are sent, the digest follows them, and whoever gets them hashes them as they come. Then another source is
//! asked for the digest of its own, so that no copy is made of two states that differ.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Bytes of one part of a copy.
const PART: u64 = 4 << 20;
/// Bytes that are hashed and sent, or received and hashed, at once: they stay in the second-level cache.
const CHUNK: usize = 256 << 10;
/// The most bytes of a thing that is handed over: a bound on what a length from the network may ask for.
const MAX_LEN: u64 = 1 << 40;
/// Connections that are served at once: each has proven the token.
const MAX_SERVED: usize = 32;
/// Connections beside those that have not, and how long each has to do so.
const MAX_UNPROVEN: usize = 64;
const PROOF: Duration = Duration::from_secs(2);
/// The longest silence on a connection.
const SILENCE: Duration = Duration::from_secs(10);
/// How long sources that have nothing yet are left alone.
const AGAIN: Duration = Duration::from_millis(3);
/// How long a source with nothing to do waits for another one's part, which it may have to check or to take over.
const LOOK: Duration = Duration::from_micros(500);
/// How long the listener rests when no connection can be taken.
const REST: Duration = Duration::from_millis(20);

const MAGIC: [u8; 8] = *b"MUSTERH2";
const TOKEN_LEN: usize = 32;
const REQUEST_LEN: usize = 8 + TOKEN_LEN + 5 * 8;
const DIGEST_LEN: usize = 32;

/// What is handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Thing {
    /// The state at a boundary: so many steps are committed.
    State(u64),
    /// All results of a step.
    Results(u64),
}

impl Thing {
    fn words(self) -> (u64, u64) {
        match self {
            Thing::State(boundary) => (1, boundary),
            Thing::Results(step) => (2, step),
        }
    }

    fn from_words(kind: u64, number: u64) -> Option<Thing> {
        match kind {
            1 => Some(Thing::State(number)),
            2 => Some(Thing::Results(number)),
            _ => None,
        }
    }
}

/// What of a part is asked for. The answer begins with the length of the whole, plus one; 0, if it is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Want {
    /// No more than that.
    Length = 0,
    /// The part's bytes, then their digest.
    Bytes = 1,
    /// The digest alone.
    Digest = 2,
}

impl Want {
    fn from_word(word: u64) -> Option<Want> {
        [Want::Length, Want::Bytes, Want::Digest]
            .into_iter()
            .find(|want| *want as u64 == word)
    }
}

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

/// Bytes that do not change while they are offered; they need not lie in one piece.
pub trait Frozen: Send + Sync {
    /// Bytes of all pieces.
    fn total(&self) -> usize;

    /// What lies in one piece from this byte on: not empty, if there are any more.
    fn piece(&self, byte: usize) -> &[u8];
}

impl Frozen for Vec<u8> {
    fn total(&self) -> usize {
        self.len()
    }

    fn piece(&self, byte: usize) -> &[u8] {
        self.get(byte..).unwrap_or_default()
    }
}

impl Frozen for Box<dyn Frozen> {
    fn total(&self) -> usize {
        (**self).total()
    }

    fn piece(&self, byte: usize) -> &[u8] {
        (**self).piece(byte)
    }
}

type Offers = Arc<Mutex<BTreeMap<Thing, Arc<dyn Frozen>>>>;

/// Hands out what this rank offers, until it is dropped.
pub(super) struct Hand {
    address: SocketAddr,
    offers: Offers,
    over: Arc<AtomicBool>,
    /// Closed to wake the listener.
    bell: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Hand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hand")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl Hand {
    /// Listens on a free port of an address by which the other ranks reach this one.
    ///
    /// # Errors
    /// The address is not this host's, or no thread can be started.
    pub(super) fn open(ip: IpAddr, token: [u8; TOKEN_LEN]) -> io::Result<Hand> {
        let listener = TcpListener::bind((ip, 0))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let (bell, rung) = UnixStream::pair()?;
        let (offers, over) = (Offers::default(), Arc::new(AtomicBool::new(false)));
        let (theirs, stop) = (offers.clone(), over.clone());
        let thread = std::thread::Builder::new()
            .name("muster-hand".into())
            .spawn(move || accept(&listener, &rung, &theirs, &token, &stop))?;
        Ok(Hand {
            address,
            offers,
            over,
            bell: Some(bell),
            thread: Some(thread),
        })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Offers a thing until it is withdrawn. Takes no time, whatever its length.
    pub(super) fn offer(&self, thing: Thing, bytes: impl Frozen + 'static) {
        lock(&self.offers).insert(thing, Arc::new(bytes));
    }

    /// Offers nothing any more; parts that are being sent are sent to their end.
    pub(super) fn withdraw_all(&self) {
        lock(&self.offers).clear();
    }
}

impl Drop for Hand {
    fn drop(&mut self) {
        // Connections may outlive this; a state must not.
        self.withdraw_all();
        self.over.store(true, Ordering::Release);
        drop(self.bell.take());
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn accept(
    listener: &TcpListener,
    rung: &UnixStream,
    offers: &Offers,
    token: &[u8; TOKEN_LEN],
    over: &Arc<AtomicBool>,
) {
    let counts = Counts::default();
    while !over.load(Ordering::Acquire) {
        match listener.accept() {
            Ok((stream, _)) => serve_apart(stream, &counts, offers, token, over),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let mut fds = [
                    PollFd::new(listener.as_fd(), PollFlags::POLLIN),
                    PollFd::new(rung.as_fd(), PollFlags::POLLIN),
                ];
                if poll(&mut fds, PollTimeout::NONE).is_err() {
                    std::thread::sleep(REST);
                }
            }
            // No descriptor is left, or who came is gone again.
            Err(_) => std::thread::sleep(REST),
        }
    }
}

/// How many connections there are.
#[derive(Clone, Default)]
struct Counts {
    unproven: Arc<AtomicUsize>,
    served: Arc<AtomicUsize>,
}

/// One of so many.
struct Slot(Arc<AtomicUsize>);

impl Slot {
    fn of(count: &Arc<AtomicUsize>, most: usize) -> Option<Slot> {
        // Given back by the drop, too many or not.
        let slot = Slot(count.clone());
        (count.fetch_add(1, Ordering::AcqRel) < most).then_some(slot)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Serves a connection on a thread of its own, or drops it when there are too many.
fn serve_apart(
    stream: TcpStream,
    counts: &Counts,
    offers: &Offers,
    token: &[u8; TOKEN_LEN],
    over: &Arc<AtomicBool>,
) {
    let Some(unproven) = Slot::of(&counts.unproven, MAX_UNPROVEN) else {
        return;
    };
    let (offers, token, over) = (offers.clone(), *token, over.clone());
    let served = counts.served.clone();
    // With no thread left the connection is dropped, and its slot.
    let _spawned = std::thread::Builder::new()
        .name("muster-hand-out".into())
        .spawn(move || {
            let _gone = serve(stream, &offers, &token, &over, (unproven, &served));
        });
}

/// The first request of a connection, whole within [`PROOF`].
fn first_request(stream: &mut TcpStream) -> io::Result<[u8; REQUEST_LEN]> {
    let (until, mut request, mut got) = (Instant::now() + PROOF, [0; REQUEST_LEN], 0);
    while got < REQUEST_LEN {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut request[got..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(len) => got += len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    stream.set_read_timeout(Some(SILENCE))?;
    Ok(request)
}

/// Serves one connection's requests, one after the other.
fn serve(
    mut stream: TcpStream,
    offers: &Offers,
    token: &[u8; TOKEN_LEN],
    over: &AtomicBool,
    (unproven, served): (Slot, &Arc<AtomicUsize>),
) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(SILENCE))?;
    let mut first = Some(first_request(&mut stream)?);
    let mut slots = (Some(unproven), None);
    loop {
        let request = match first.take() {
            Some(request) => request,
            None => {
                let mut request = [0; REQUEST_LEN];
                stream.read_exact(&mut request)?;
                request
            }
        };
        let Some((thing, want, from, len)) = parse(&request, token) else {
            // A stranger, or a worker of another generation: no answer.
            return Ok(());
        };
        if let Some(_unproven) = slots.0.take() {
            slots.1 = Slot::of(served, MAX_SERVED);
            if slots.1.is_none() {
                return Ok(());
            }
        }
        let offer = lock(offers).get(&thing).cloned();
        let total = offer.as_ref().map(|bytes| bytes.total() as u64);
        let length = total.map_or(0, |total| total + 1);
        stream.write_all(&length.to_le_bytes())?;
        let (Some(offer), Some(total)) = (offer, total) else {
            continue;
        };
        if want == Want::Length {
            continue;
        }
        let until = from.saturating_add(len).min(total) as usize;
        let mut at = from.min(total) as usize;
        let mut hasher = blake3::Hasher::new();
        while at < until {
            if over.load(Ordering::Acquire) {
                return Ok(());
            }
            let piece = offer.piece(at);
            let chunk = &piece[..piece.len().min(CHUNK).min(until - at)];
            if chunk.is_empty() {
                // Shorter than it said: this connection is of no use.
                return Err(io::ErrorKind::InvalidData.into());
            }
            hasher.update(chunk);
            if want == Want::Bytes {
                stream.write_all(chunk)?;
            }
            at += chunk.len();
        }
        stream.write_all(hasher.finalize().as_bytes())?;
    }
}

fn parse(request: &[u8; REQUEST_LEN], token: &[u8; TOKEN_LEN]) -> Option<(Thing, Want, u64, u64)> {
    let (magic, rest) = request.split_first_chunk::<8>()?;
    let (theirs, words) = rest.split_first_chunk::<TOKEN_LEN>()?;
    // Compared as a whole, so that the time tells nothing about how much of it was right.
    if *magic != MAGIC || blake3::Hash::from_bytes(*theirs) != blake3::Hash::from_bytes(*token) {
        return None;
    }
    let words: Vec<u64> = words
        .as_chunks()
        .0
        .iter()
        .map(|word| u64::from_le_bytes(*word))
        .collect();
    let [kind, number, want, from, len] = words[..] else {
        return None;
    };
    Some((
        Thing::from_words(kind, number)?,
        Want::from_word(want)?,
        from,
        len,
    ))
}

/// A connection to one source.
struct Source {
    at: SocketAddr,
    stream: TcpStream,
    token: [u8; TOKEN_LEN],
}

/// What a source that answered well does not have, or not any more, or does not send as it said.
fn not_right() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

impl Source {
    fn connect(at: SocketAddr, token: [u8; TOKEN_LEN]) -> io::Result<Source> {
        let stream = TcpStream::connect_timeout(&at, SILENCE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SILENCE))?;
        stream.set_write_timeout(Some(SILENCE))?;
        Ok(Source { at, stream, token })
    }

    /// The whole's length, or `None` when it is not there (yet); what was asked for follows.
    fn ask(&mut self, thing: Thing, want: Want, from: u64, len: u64) -> io::Result<Option<u64>> {
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

    fn digest(&mut self) -> io::Result<[u8; DIGEST_LEN]> {
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
pub(super) fn fetch(
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

#[cfg(test)]
mod tests;
