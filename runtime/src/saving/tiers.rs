//! Where a checkpoint's bytes come from: memory of this node, memory of others, parity of several, then the store.
//!
//! A launcher's list of what it holds is believed for nothing but where to ask: each chunk is verified by the manifest,
//! and one that does not verify comes from the next tier. Some launchers are asked at once what they hold, before
//! anything is read of any, and the others when something is in nobody's memory as far as is known; a bound in time
//! ends that, and a launcher that fails once is left alone.

mod asking;
mod parity;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;

use muster_checkpoint::hex::Bytes;
use muster_checkpoint::manifest::{DataFile, Manifest};
use muster_checkpoint::nearby::Nearby;
use muster_checkpoint::source::{Readers, Source};
use muster_checkpoint::sum::crc;
use muster_protocol::LauncherId;
use muster_protocol::local::short;
use muster_protocol::memory::{Answer, Ask, CHUNK, Key, Name, Whom};

use self::asking::{Found, Search};
use self::parity::{Rebuilt, Way};
use crate::memory::{Link, time_for};

/// Names of the last tiers, for people.
const DISK: &str = "this node's disk";
const STORE: &str = "the store";

/// Nodes whose memory is named each for itself, and what the rest is called.
const NAMED: usize = 64;
const OTHERS: &str = "other nodes' memory";

/// Bytes by where they came from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origins {
    /// In the order in which they were asked; the store is the last.
    pub from: Vec<(String, u64)>,
    /// Why something did not come from where it was asked for first.
    pub why: Option<String>,
}

/// How a launcher is called.
#[derive(Clone, Copy, Debug)]
struct Call {
    at: SocketAddr,
    key: Key,
    launcher: LauncherId,
}

impl Call {
    fn connect(&self) -> io::Result<Link> {
        Link::connect(self.at, &self.key, self.launcher)
    }
}

/// A launcher that holds something.
#[derive(Debug)]
struct Holder {
    /// Names of its node and of its memory, for people.
    name: String,
    who: String,
    call: Call,
    /// This node's own: its process.
    pid: Option<u32>,
    links: Mutex<Vec<Link>>,
    files: Mutex<BTreeMap<i32, Arc<File>>>,
    lost: AtomicBool,
    bytes: AtomicU64,
}

/// A launcher's copy of a file.
#[derive(Debug)]
struct Copy {
    holder: usize,
    name: Name,
    fd: i32,
    base: u64,
    /// It does not verify, or is not there any more.
    spoiled: AtomicBool,
}

/// A file that launchers hold. A reader that learns of more of it has a new one of these, with shared sums and counts.
#[derive(Clone, Debug)]
struct Held {
    bytes: u64,
    /// CRC-64/NVME of each chunk, by the manifest.
    sums: Arc<[Bytes<8>]>,
    copies: Vec<Arc<Copy>>,
    /// Parity that it is in.
    ways: Vec<Arc<Way>>,
    /// For each chunk which copy it came from last, from 1; 0 is the store.
    served: Arc<[AtomicU8]>,
}

/// Files that launchers have said that they hold. This only ever grows: a number in it stays what it is.
#[derive(Clone, Debug, Default)]
struct Known {
    holders: Vec<Arc<Holder>>,
    held: BTreeMap<String, Held>,
}

/// Memory, and below it a store.
#[derive(Debug)]
pub(super) struct Tiers<S> {
    store: S,
    rank: u32,
    step: u64,
    own: Option<Call>,
    known: RwLock<Arc<Known>>,
    /// Launchers that were not asked yet.
    search: Mutex<Search>,
    rebuilt: Mutex<Rebuilt>,
    from_store: AtomicU64,
    why: Mutex<Option<String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The source below memory.
pub(super) trait Below: Source {
    /// Bytes that came from this node's own disk.
    fn bytes_of_disk(&self) -> u64;
}

impl<N: Source, F: Source> Below for Nearby<N, F> {
    fn bytes_of_disk(&self) -> u64 {
        self.from_near()
    }
}

impl<S: Below> Tiers<S> {
    /// The store alone, or with what the launchers hold of this checkpoint.
    pub(super) fn new(store: S, manifest: &Manifest, whom: Option<(&Whom, u32)>) -> Tiers<S> {
        let (mut known, mut search) = (Known::default(), Search::default());
        let own = whom.map(|(whom, _)| Call {
            at: SocketAddr::from((Ipv4Addr::LOCALHOST, whom.own)),
            key: whom.key,
            launcher: whom.launcher,
        });
        if let (Some((whom, _)), Some(own)) = (whom, own) {
            search = Search::new(whom, manifest);
            search.first(own, &mut known);
        }
        Tiers {
            store,
            rank: whom.map_or(0, |(_, rank)| rank),
            step: manifest.origin.step,
            own,
            known: RwLock::new(Arc::new(known)),
            search: Mutex::new(search),
            rebuilt: Mutex::default(),
            from_store: AtomicU64::new(0),
            why: Mutex::default(),
        }
    }

    /// The source below memory.
    pub(super) fn below(&self) -> &S {
        &self.store
    }

    /// Bytes that came so far, and verified.
    pub(super) fn origins(&self) -> Origins {
        let load = |bytes: &AtomicU64| bytes.load(Ordering::Relaxed);
        let known = self.known();
        let memory = known
            .holders
            .iter()
            .map(|h| (h.who.clone(), load(&h.bytes)));
        let more = known.holders.iter().skip(NAMED).map(|h| load(&h.bytes));
        let others = (OTHERS.to_owned(), more.sum());
        let memory = memory.take(NAMED).chain([others]);
        let mut from: Vec<(String, u64)> = memory.filter(|(_, bytes)| *bytes > 0).collect();
        from.extend(self.of_parity(&known));
        let (below, disk) = (load(&self.from_store), self.store.bytes_of_disk());
        if disk > 0 {
            from.push((DISK.into(), disk));
        }
        from.push((STORE.into(), below.saturating_sub(disk)));
        let why = lock(&self.why).clone();
        Origins { from, why }
    }

    /// Tells the launcher, for people, what came from where since it was told last.
    pub(super) fn tell(&self, before: &Origins) {
        let Some(own) = &self.own else { return };
        let now = self.origins();
        let known = |who: &str| {
            let known = before.from.iter().find(|(name, _)| name == who);
            known.map_or(0, |(_, bytes)| *bytes)
        };
        let since = (now.from.iter()).map(|(who, bytes)| {
            let bytes = bytes.saturating_sub(known(who));
            (who.clone(), bytes)
        });
        let ask = Ask::Restored {
            rank: self.rank,
            step: self.step,
            from: since.collect(),
            why: now.why,
        };
        // Nobody has to know.
        let _told = own.connect().and_then(|mut link| link.ask(&ask));
    }

    fn known(&self) -> Arc<Known> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        known.clone()
    }

    /// Asks some launchers more what they hold. Whether more may be known now than is known here.
    fn ask_more(&self, known: &Arc<Known>) -> bool {
        let mut search = lock(&self.search);
        // Somebody else has asked meanwhile.
        if !Arc::ptr_eq(known, &self.known()) {
            return true;
        }
        if search.is_over() {
            return false;
        }
        let mut more = Known::clone(known);
        search.next(&mut more);
        if more.holders.len() > known.holders.len() {
            *self.known.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(more);
        }
        if let Some(left) = search.gives_up() {
            self.note(format!(
                "{left} nodes were not asked: those before them took too long"
            ));
        }
        true
    }

    fn note(&self, why: String) {
        lock(&self.why).get_or_insert(short(why));
    }

    /// From which of a file's copies these bytes came; they are not verified.
    fn copied(
        &self,
        known: &Known,
        path: &str,
        held: &Held,
        at: u64,
        into: &mut [u8],
    ) -> Option<usize> {
        let count = held.copies.len();
        // Its own first; several others give some chunks each.
        let own = held.copies.first().filter(|c| known.is_own(c)).map(|_| 0);
        let turn = (0..count).map(|k| (k + (at / CHUNK) as usize) % count);
        for number in own.into_iter().chain(turn) {
            let copy = held.copies.get(number)?;
            let holder = known.holders.get(copy.holder)?;
            if !known.is_there(copy) {
                continue;
            }
            match holder.read_copy(copy, at, into) {
                Ok(()) => return Some(number),
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    copy.spoiled.store(true, Ordering::Relaxed);
                    self.note(format!("{} has {path} no more", holder.who));
                }
                Err(error) => {
                    holder.lost.store(true, Ordering::Relaxed);
                    self.note(format!("{} failed: {error}", holder.who));
                }
            }
        }
        None
    }

    /// Marks a copy whose bytes there are not as they have to be.
    fn spoil(&self, known: &Known, path: &str, copy: &Copy, at: u64) {
        copy.spoiled.store(true, Ordering::Relaxed);
        if let Some(holder) = known.holders.get(copy.holder) {
            let who = &holder.who;
            self.note(format!(
                "what {who} holds of {path} is damaged at byte {at}"
            ));
        }
    }

    /// Whether memory has these bytes. Of a file that nobody there has, as far as is known, others are asked, and
    /// parity once there are no others.
    fn remembered(&self, path: &str, at: u64, into: &mut [u8]) -> bool {
        let mut known = self.known();
        loop {
            let held = known.held.get(path);
            let number = held.and_then(|held| self.copied(&known, path, held, at, into));
            if let Some(served) = held.and_then(|held| held.served.get((at / CHUNK) as usize)) {
                let number = number.map_or(0, |number| number as u8 + 1);
                served.store(number, Ordering::Relaxed);
            }
            let copy = number.and_then(|number| held?.copies.get(number));
            if let Some(holder) = copy.and_then(|copy| known.holders.get(copy.holder)) {
                holder.bytes.fetch_add(into.len() as u64, Ordering::Relaxed);
                return true;
            }
            if !self.ask_more(&known) {
                return held.is_some_and(|held| self.has_rebuilt(&known, path, held, at, into));
            }
            known = self.known();
        }
    }
}

impl<S: Below> Source for Tiers<S> {
    fn size(&self, path: &str) -> io::Result<u64> {
        match self.known().held.get(path) {
            Some(held) => Ok(held.bytes),
            None => self.store.size(path),
        }
    }

    fn read(&self, path: &str, at: u64, into: &mut [u8], readers: Readers) -> io::Result<()> {
        if self.remembered(path, at, into) {
            return Ok(());
        }
        self.store.read(path, at, into, readers)?;
        self.from_store
            .fetch_add(into.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn refuse(&self, path: &str, at: u64) -> bool {
        let known = self.known();
        let Some(held) = known.held.get(path) else {
            return false;
        };
        let served = held.served.get((at / CHUNK) as usize);
        let number = served.map_or(0, |served| served.load(Ordering::Relaxed));
        let copy = usize::from(number).checked_sub(1);
        let Some(copy) = copy.and_then(|number| held.copies.get(number)) else {
            return false;
        };
        if let Some(holder) = known.holders.get(copy.holder) {
            let bytes = (held.bytes - at).min(CHUNK);
            holder.bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
        self.spoil(&known, path, copy, at);
        true
    }
}

impl Known {
    fn is_own(&self, copy: &Copy) -> bool {
        let holder = self.holders.get(copy.holder);
        holder.is_some_and(|holder| holder.pid.is_some())
    }

    /// Whether it may be asked for, as far as is known.
    fn is_there(&self, copy: &Copy) -> bool {
        let lost = |holder: &Arc<Holder>| holder.lost.load(Ordering::Relaxed);
        let holder = self.holders.get(copy.holder);
        !copy.spoiled.load(Ordering::Relaxed) && !holder.is_none_or(lost)
    }

    /// Takes in what a launcher says that it holds, as far as it is of this checkpoint.
    fn add(&mut self, found: Found, named: &BTreeMap<Name, DataFile>) {
        let number = self.holders.len();
        let mut any = false;
        for entry in found.list {
            let file = named.get(&entry.name);
            let Some(file) = file.filter(|file| file.bytes == entry.bytes) else {
                continue;
            };
            let held = held_of(&mut self.held, file);
            // The number of a copy has one byte.
            if held.copies.len() < usize::from(u8::MAX) {
                any = true;
                held.copies.push(Arc::new(Copy {
                    holder: number,
                    name: entry.name,
                    fd: entry.fd,
                    base: entry.base,
                    spoiled: AtomicBool::new(false),
                }));
            }
        }
        for parity in &found.parities {
            any |= self.add_parity(number, parity, named);
        }
        if any {
            self.holders.push(Arc::new(found.holder));
        }
    }
}

impl Held {
    /// Bytes of a chunk; none behind the last one.
    fn length(&self, chunk: u64) -> u64 {
        let begin = chunk.saturating_mul(CHUNK);
        self.bytes.saturating_sub(begin).min(CHUNK)
    }

    /// Whether these are all bytes of a chunk, by the manifest.
    fn is_right(&self, chunk: u64, bytes: &[u8]) -> bool {
        let sum = self.sums.get(chunk as usize);
        bytes.len() as u64 == self.length(chunk) && sum == Some(&Bytes(crc(bytes).to_be_bytes()))
    }
}

/// The known copies of a file.
fn held_of<'a>(all: &'a mut BTreeMap<String, Held>, file: &DataFile) -> &'a mut Held {
    all.entry(file.path.clone()).or_insert_with(|| Held {
        bytes: file.bytes,
        sums: file.chunks.as_slice().into(),
        copies: Vec::new(),
        ways: Vec::new(),
        served: (file.chunks.iter()).map(|_| AtomicU8::new(0)).collect(),
    })
}

impl Holder {
    /// A copy's bytes, or why they do not come.
    fn read_copy(&self, copy: &Copy, at: u64, into: &mut [u8]) -> io::Result<()> {
        // Its own process may not be open to this one: the port is.
        let direct = self.pid.and_then(|pid| self.open(pid, copy.fd).ok());
        match direct {
            Some(file) => file.read_exact_at(into, copy.base + at),
            None => self.read(&copy.name, at, into),
        }
    }

    /// The descriptor of this process, as this one's own.
    fn open(&self, pid: u32, fd: i32) -> io::Result<Arc<File>> {
        let mut files = lock(&self.files);
        if let Some(file) = files.get(&fd) {
            return Ok(file.clone());
        }
        // It may be something else by now, at which nobody is to wait.
        let mut options = File::options();
        options.read(true).custom_flags(libc::O_NONBLOCK);
        let file = options.open(format!("/proc/{pid}/fd/{fd}"))?;
        if !file.metadata()?.is_file() {
            return Err(ErrorKind::NotFound.into());
        }
        let file = Arc::new(file);
        files.insert(fd, file.clone());
        Ok(file)
    }

    fn read(&self, name: &Name, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.over_link(|link| ask_for(link, name, at, into))
    }

    /// Asks by a connection that is there already, if there is one.
    fn over_link<T>(&self, mut ask: impl FnMut(&mut Link) -> io::Result<T>) -> io::Result<T> {
        let kept = lock(&self.links).pop();
        if let Some(mut link) = kept {
            match ask(&mut link) {
                Ok(answer) => {
                    lock(&self.links).push(link);
                    return Ok(answer);
                }
                // It was closed while nobody asked.
                Err(error) if is_closed(&error) => {}
                Err(error) => return Err(error),
            }
        }
        let mut link = self.call.connect()?;
        let answer = ask(&mut link)?;
        lock(&self.links).push(link);
        Ok(answer)
    }
}

fn is_closed(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::UnexpectedEof
            | ErrorKind::BrokenPipe
            | ErrorKind::ConnectionReset
            | ErrorKind::ConnectionAborted
    )
}

fn ask_for(link: &mut Link, name: &Name, at: u64, into: &mut [u8]) -> io::Result<()> {
    let len = u32::try_from(into.len()).map_err(|_| ErrorKind::InvalidInput)?;
    let name = name.clone();
    match link.ask(&Ask::Read { name, at, len })? {
        Answer::Bytes => link.read(into, Instant::now() + time_for(len.into())),
        Answer::Gone => Err(ErrorKind::NotFound.into()),
        _ => Err(ErrorKind::InvalidData.into()),
    }
}
