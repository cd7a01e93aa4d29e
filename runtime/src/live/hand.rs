//! Bytes that one rank hands to others of its generation while the training goes on: a frozen state
//! for newcomers, and results for survivors that lack them. Plain TCP on threads of its own, so
//! that a copy disturbs no collective. Every request proves the generation's token first.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes of one part of a copy.
const PART: u64 = 4 << 20;
/// The most bytes of a thing that is handed over: a bound on what a length from the network may ask for.
const MAX_LEN: u64 = 1 << 40;
/// Connections that are served at once.
const MAX_SERVED: usize = 32;
/// The longest silence on a connection.
const SILENCE: Duration = Duration::from_secs(10);
/// How long a source that has nothing yet is left alone.
const AGAIN: Duration = Duration::from_millis(3);
/// How often the listener looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(5);

const MAGIC: [u8; 8] = *b"MUSTERH1";
const REQUEST_LEN: usize = 8 + 32 + 8 + 8 + 8 + 8;
const ANSWER_LEN: usize = 8 + 32;

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
    #[error("the bytes of {thing:?} do not have the digest that their source named")]
    Damaged { thing: Thing },
    #[error("not wanted any more")]
    Cancelled,
}

type Offers = Arc<Mutex<BTreeMap<Thing, Arc<Offer>>>>;

#[derive(Debug)]
struct Offer {
    bytes: Vec<u8>,
    digest: [u8; 32],
}

/// Hands out what this rank offers, until it is dropped.
#[derive(Debug)]
pub(super) struct Hand {
    address: SocketAddr,
    offers: Offers,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Hand {
    /// Listens on a free port of an address by which the other ranks reach this one.
    ///
    /// # Errors
    /// The address is not this host's, or no thread can be started.
    pub(super) fn open(ip: IpAddr, token: [u8; 32]) -> io::Result<Hand> {
        let listener = TcpListener::bind((ip, 0))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let (offers, over) = (Offers::default(), Arc::new(AtomicBool::new(false)));
        let (theirs, stop) = (offers.clone(), over.clone());
        let thread = std::thread::Builder::new()
            .name("muster-hand".into())
            .spawn(move || accept(&listener, &theirs, &token, &stop))?;
        Ok(Hand {
            address,
            offers,
            over,
            thread: Some(thread),
        })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Offers a thing until it is withdrawn.
    pub(super) fn offer(&self, thing: Thing, bytes: Vec<u8>) {
        let digest = *blake3::hash(&bytes).as_bytes();
        let offer = Arc::new(Offer { bytes, digest });
        lock(&self.offers).insert(thing, offer);
    }

    /// Offers nothing any more; copies under way are cut short.
    pub(super) fn withdraw_all(&self) {
        lock(&self.offers).clear();
    }
}

impl Drop for Hand {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn accept(listener: &TcpListener, offers: &Offers, token: &[u8; 32], over: &Arc<AtomicBool>) {
    let served = Arc::new(AtomicUsize::new(0));
    while !over.load(Ordering::Acquire) {
        let Ok((stream, _)) = listener.accept() else {
            // Nobody there, or no descriptor left: either way, look again a little later.
            std::thread::sleep(LOOK);
            continue;
        };
        if served.fetch_add(1, Ordering::AcqRel) >= MAX_SERVED {
            served.fetch_sub(1, Ordering::AcqRel);
            continue;
        }
        let (offers, token, over) = (offers.clone(), *token, over.clone());
        let count = served.clone();
        let spawned = std::thread::Builder::new()
            .name("muster-hand-out".into())
            .spawn(move || {
                let _gone = serve(stream, &offers, &token, &over);
                count.fetch_sub(1, Ordering::AcqRel);
            });
        if spawned.is_err() {
            served.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// Serves one connection's requests, one after the other.
fn serve(
    mut stream: TcpStream,
    offers: &Offers,
    token: &[u8; 32],
    over: &AtomicBool,
) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE))?;
    stream.set_write_timeout(Some(SILENCE))?;
    loop {
        let mut request = [0; REQUEST_LEN];
        stream.read_exact(&mut request)?;
        let Some((thing, from, len)) = parse(&request, token) else {
            // A stranger, or a worker of another generation: no answer.
            return Ok(());
        };
        let offer = lock(offers).get(&thing).cloned();
        let mut answer = [0; ANSWER_LEN];
        if let Some(offer) = &offer {
            answer[..8].copy_from_slice(&(offer.bytes.len() as u64 + 1).to_le_bytes());
            answer[8..].copy_from_slice(&offer.digest);
        }
        stream.write_all(&answer)?;
        let Some(offer) = offer else { continue };
        let total = offer.bytes.len() as u64;
        let (from, until) = (from.min(total), from.saturating_add(len).min(total));
        for part in offer.bytes[from as usize..until as usize].chunks(256 << 10) {
            if over.load(Ordering::Acquire) {
                return Ok(());
            }
            stream.write_all(part)?;
        }
    }
}

fn parse(request: &[u8; REQUEST_LEN], token: &[u8; 32]) -> Option<(Thing, u64, u64)> {
    let word = |at: usize| {
        let bytes = request.get(at..at + 8)?;
        Some(u64::from_le_bytes(bytes.try_into().ok()?))
    };
    // Compared as a whole, so that the time tells nothing about how much of it was right.
    let theirs = blake3::Hash::from_bytes(request[8..40].try_into().ok()?);
    if request[..8] != MAGIC || theirs != blake3::Hash::from_bytes(*token) {
        return None;
    }
    let thing = Thing::from_words(word(40)?, word(48)?)?;
    Some((thing, word(56)?, word(64)?))
}

/// A connection to one source.
struct Source {
    at: SocketAddr,
    stream: TcpStream,
    token: [u8; 32],
}

impl Source {
    fn connect(at: SocketAddr, token: [u8; 32]) -> io::Result<Source> {
        let stream = TcpStream::connect_timeout(&at, SILENCE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SILENCE))?;
        stream.set_write_timeout(Some(SILENCE))?;
        Ok(Source { at, stream, token })
    }

    /// Asks for a part. The whole's length and digest, or `None` when it is not there (yet).
    fn ask(&mut self, thing: Thing, from: u64, len: u64) -> io::Result<Option<(u64, [u8; 32])>> {
        let (kind, number) = thing.words();
        let mut request = Vec::with_capacity(REQUEST_LEN);
        request.extend_from_slice(&MAGIC);
        request.extend_from_slice(&self.token);
        for word in [kind, number, from, len] {
            request.extend_from_slice(&word.to_le_bytes());
        }
        self.stream.write_all(&request)?;
        let mut answer = [0; ANSWER_LEN];
        self.stream.read_exact(&mut answer)?;
        let mut total = [0; 8];
        total.copy_from_slice(&answer[..8]);
        let mut digest = [0; 32];
        digest.copy_from_slice(&answer[8..]);
        match u64::from_le_bytes(total).checked_sub(1) {
            None => Ok(None),
            Some(total) if total > MAX_LEN => Err(io::ErrorKind::InvalidData.into()),
            Some(total) => Ok(Some((total, digest))),
        }
    }
}

/// Gets a thing from these sources, which all have it or will, in parallel: each gives the next part
/// that is missing, so a slow one gives fewer, and the parts of one that is lost come from others.
///
/// # Errors
/// No source has it in time, sources contradict each other, or `cancelled` was set.
pub(super) fn fetch(
    thing: Thing,
    sources: &[SocketAddr],
    token: [u8; 32],
    within: Duration,
    cancelled: &AtomicBool,
) -> Result<Vec<u8>, FetchError> {
    let (until, mut last) = (Instant::now() + within, String::from("nothing"));
    loop {
        let found = ready_sources(thing, sources, token, &mut last);
        if let Some((one, other)) = differing(&found) {
            return Err(FetchError::Differ { thing, one, other });
        }
        if let Some((_, (total, digest))) = found.first() {
            let (total, digest) = (*total, *digest);
            let ready: Vec<Source> = found.into_iter().map(|(source, _)| source).collect();
            match gather(thing, ready, total, cancelled) {
                Ok(bytes) if *blake3::hash(&bytes).as_bytes() == digest => return Ok(bytes),
                Ok(_) => return Err(FetchError::Damaged { thing }),
                Err(error) => last = error.to_string(),
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

type Found = Vec<(Source, (u64, [u8; 32]))>;

/// The sources that have the thing, each with its length and digest.
fn ready_sources(thing: Thing, at: &[SocketAddr], token: [u8; 32], last: &mut String) -> Found {
    let mut found = Vec::new();
    for at in at {
        let asked = Source::connect(*at, token).and_then(|mut source| {
            let answer = source.ask(thing, 0, 0)?;
            Ok((source, answer))
        });
        match asked {
            Ok((source, Some(whole))) => found.push((source, whole)),
            Ok((_, None)) => *last = format!("{at} does not have it yet"),
            Err(error) => *last = format!("{at}: {error}"),
        }
    }
    found
}

fn differing(found: &Found) -> Option<(SocketAddr, SocketAddr)> {
    let (first, whole) = found.first()?;
    let other = found.iter().find(|(_, other)| other != whole)?;
    Some((first.at, other.0.at))
}

/// All parts, from whoever gives them.
fn gather(
    thing: Thing,
    sources: Vec<Source>,
    total: u64,
    cancelled: &AtomicBool,
) -> io::Result<Vec<u8>> {
    let len = usize::try_from(total).map_err(|_| io::ErrorKind::OutOfMemory)?;
    let mut bytes = Vec::new();
    bytes
        .try_reserve_exact(len)
        .map_err(|_| io::ErrorKind::OutOfMemory)?;
    bytes.resize(len, 0);
    // Parts that nobody has taken yet; one that failed is put back.
    let parts: Mutex<Vec<(u64, &mut [u8])>> = Mutex::new(
        (0..)
            .step_by(PART as usize)
            .zip(bytes.chunks_mut(PART as usize))
            .collect(),
    );
    let failure = Mutex::new(None);
    std::thread::scope(|scope| {
        for mut source in sources {
            let (parts, failure) = (&parts, &failure);
            scope.spawn(move || {
                while !cancelled.load(Ordering::Acquire) {
                    let Some((from, to)) = lock(parts).pop() else {
                        return;
                    };
                    let asked = source.ask(thing, from, to.len() as u64);
                    let read = match asked {
                        Ok(Some((now, _))) if now == total => source.stream.read_exact(to),
                        Ok(_) => Err(io::ErrorKind::NotFound.into()),
                        Err(error) => Err(error),
                    };
                    if let Err(error) = read {
                        lock(parts).push((from, to));
                        lock(failure).replace(error);
                        return;
                    }
                }
            });
        }
    });
    let missing = !lock(&parts).is_empty();
    drop(parts);
    if missing {
        let error = lock(&failure).take();
        return Err(error.unwrap_or_else(|| io::ErrorKind::Interrupted.into()));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: [u8; 32] = [9; 32];
    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
    const SOON: Duration = Duration::from_secs(20);

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 31 % 251) as u8).collect()
    }

    fn get(thing: Thing, from: &[&Hand], within: Duration) -> Result<Vec<u8>, FetchError> {
        let sources: Vec<SocketAddr> = from.iter().map(|h| h.address()).collect();
        fetch(thing, &sources, TOKEN, within, &AtomicBool::new(false))
    }

    #[test]
    fn several_sources_give_one_copy() {
        for len in [0, 1, (PART as usize) - 1, 3 * PART as usize + 7] {
            let hands = [
                Hand::open(HERE, TOKEN).unwrap(),
                Hand::open(HERE, TOKEN).unwrap(),
            ];
            hands
                .iter()
                .for_each(|h| h.offer(Thing::State(5), bytes(len)));
            assert_eq!(
                get(Thing::State(5), &[&hands[0], &hands[1]], SOON).unwrap(),
                bytes(len)
            );
        }
    }

    #[test]
    fn one_that_is_gone_or_late_is_made_up_for() {
        let (gone, here) = (
            Hand::open(HERE, TOKEN).unwrap(),
            Hand::open(HERE, TOKEN).unwrap(),
        );
        let address = gone.address();
        drop(gone);
        let late = std::thread::scope(|scope| {
            let asked = scope.spawn(|| {
                let sources = [address, here.address()];
                fetch(
                    Thing::Results(3),
                    &sources,
                    TOKEN,
                    SOON,
                    &AtomicBool::new(false),
                )
            });
            here.offer(Thing::Results(3), bytes(10));
            asked.join().unwrap()
        });
        assert_eq!(late.unwrap(), bytes(10));
    }

    #[test]
    fn what_differs_is_named_and_what_is_not_there_too() {
        let hands = [
            Hand::open(HERE, TOKEN).unwrap(),
            Hand::open(HERE, TOKEN).unwrap(),
        ];
        hands[0].offer(Thing::State(1), bytes(5));
        hands[1].offer(Thing::State(1), bytes(6));
        let both = [&hands[0], &hands[1]];
        assert!(matches!(
            get(Thing::State(1), &both, SOON),
            Err(FetchError::Differ { .. })
        ));
        let short = Duration::from_millis(20);
        let missing = get(Thing::State(2), &both, short).unwrap_err();
        assert!(
            missing.to_string().contains("does not have it yet"),
            "{missing}"
        );
        hands.iter().for_each(Hand::withdraw_all);
        assert!(matches!(
            get(Thing::State(1), &both, short),
            Err(FetchError::NotThere { .. })
        ));
        let cancelled = AtomicBool::new(true);
        let all = [hands[0].address()];
        let none = fetch(Thing::State(1), &all, TOKEN, SOON, &cancelled);
        assert!(matches!(none, Err(FetchError::Cancelled)));
    }

    #[test]
    fn strangers_and_nonsense_get_no_answer() {
        let hand = Hand::open(HERE, TOKEN).unwrap();
        hand.offer(Thing::State(1), bytes(5));
        let mut wrong = Source::connect(hand.address(), [8; 32]).unwrap();
        assert!(wrong.ask(Thing::State(1), 0, 5).is_err());
        let mut noise = TcpStream::connect(hand.address()).unwrap();
        noise.write_all(&[0xff; REQUEST_LEN]).unwrap();
        assert_eq!(noise.read(&mut [0; 8]).unwrap_or(0), 0);
        // Any part of what is there may be asked for, and nothing beyond it.
        let mut right = Source::connect(hand.address(), TOKEN).unwrap();
        let (total, _) = right.ask(Thing::State(1), 3, u64::MAX).unwrap().unwrap();
        let mut rest = [0; 2];
        right.stream.read_exact(&mut rest).unwrap();
        assert_eq!((total, rest.as_slice()), (5, &bytes(5)[3..]));
        assert_eq!(right.ask(Thing::State(1), 9, 1).unwrap().unwrap().0, 5);
    }
}
