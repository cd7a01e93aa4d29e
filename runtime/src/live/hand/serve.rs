//! The side that has: a listener, and a thread for each connection.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use twox_hash::XxHash3_128;

use super::{CHUNK, Frozen, MAGIC, REQUEST_LEN, SILENCE, TOKEN_LEN, Thing, Want, digest_of, lock};

/// Connections that are served at once: each has proven the token.
pub(super) const MAX_SERVED: usize = 64;
/// Connections beside those that have not, and how long each has to do so.
pub(super) const MAX_UNPROVEN: usize = 128;
pub(super) const PROOF: Duration = Duration::from_secs(2);
/// How long the listener rests when no connection can be taken.
const REST: Duration = Duration::from_millis(20);

type Offers = Arc<Mutex<BTreeMap<Thing, Arc<dyn Frozen>>>>;

/// Hands out what this rank offers, until it is dropped.
pub(in crate::live) struct Hand {
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
    pub(in crate::live) fn open(ip: IpAddr, token: [u8; TOKEN_LEN]) -> io::Result<Hand> {
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

    pub(in crate::live) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Offers a thing until it is withdrawn. Takes no time, whatever its length.
    pub(in crate::live) fn offer(&self, thing: Thing, bytes: impl Frozen + 'static) {
        lock(&self.offers).insert(thing, Arc::new(bytes));
    }

    /// Offers nothing any more; parts that are being sent are sent to their end.
    pub(in crate::live) fn withdraw_all(&self) {
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
        let mut hashed = XxHash3_128::new();
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
            if want == Want::Bytes {
                stream.write_all(chunk)?;
            } else {
                hashed.write(chunk);
            }
            at += chunk.len();
        }
        if want == Want::Digest {
            stream.write_all(&digest_of(&hashed))?;
        }
    }
}

pub(super) fn parse(
    request: &[u8; REQUEST_LEN],
    token: &[u8; TOKEN_LEN],
) -> Option<(Thing, Want, u64, u64)> {
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
