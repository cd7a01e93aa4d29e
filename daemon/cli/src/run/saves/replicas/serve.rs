//! The port at which a launcher tells and gives what it holds in memory, and takes copies or parity.
//!
//! A connection has a thread of its own, and is let in by its proof alone. Each message has a limit and an end in
//! time; a caller that does not read, or not send, loses its connection and disturbs nobody.

use std::io;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muster_checkpoint::slot::Room;
use muster_checkpoint::sum::{CHUNK, crc};
use muster_launcher::slots::shown;
use muster_protocol::memory::parity::MAX_PARTS;
use muster_protocol::memory::{Answer, Ask, Name};
use muster_protocol::{Digest, LauncherId};
use muster_runtime::memory::{Link, SOON, time_for};
use tokio::sync::mpsc::UnboundedSender;

use super::folding::{self, Brought};
use super::freeing::Freeing;
use super::parities::Of;
use super::places::Places;
use super::shelf::{Admission, Shelf};
use super::telling::Complaints;
use crate::run::saves::Done;

/// Connections that have not proven the key, of which one host has half at most, and those that have. All ranks of a
/// node may call at once, each by several threads.
const MAX_UNPROVEN: usize = 256;
const MAX_SERVED: usize = 512;

/// Stripes that arrive at once, each of which has a chunk of memory beyond all budgets: one of each other node of a
/// group, and some that are about to be cut off.
const MAX_FOLDING: usize = 2 * MAX_PARTS;

/// How long a connection may ask for nothing.
const IDLE: Duration = Duration::from_secs(30);

/// After an error of accept that comes back at once.
const REST: Duration = Duration::from_millis(10);

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// State that all connections share.
#[derive(Clone, Debug)]
struct Served {
    /// Which launcher this is, and what people call its node.
    launcher: LauncherId,
    who: String,
    shelf: Arc<Mutex<Shelf>>,
    freeing: Freeing,
    done: UnboundedSender<Done>,
    complaints: Arc<Mutex<Complaints>>,
    unproven: Arc<Places>,
    served: Arc<AtomicUsize>,
    folding: Arc<AtomicUsize>,
}

impl Served {
    /// Tells people, once, what is wrong with what a node sends, or that nothing is.
    fn complain(&self, who: &str, what: Option<String>) {
        let new = lock(&self.complaints).of(who, what);
        if let Some(mut text) = new {
            text.retain(|c| !c.is_control());
            let _over = self.done.send(Done::Said(text));
        }
    }
}

/// A listening port. Dropping it closes it; connections end by themselves.
#[derive(Debug)]
pub struct Server {
    listener: Arc<TcpListener>,
    port: u16,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens on a free port; serves nobody before `serve`.
    pub fn open(ip: IpAddr) -> io::Result<Server> {
        let listener = Arc::new(TcpListener::bind((ip, 0))?);
        Ok(Server {
            port: listener.local_addr()?.port(),
            listener,
            over: Arc::default(),
            thread: None,
        })
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub(super) fn serve(
        &mut self,
        launcher: LauncherId,
        who: String,
        (shelf, freeing): (Arc<Mutex<Shelf>>, Freeing),
        done: UnboundedSender<Done>,
    ) -> io::Result<()> {
        let served = Served {
            launcher,
            who,
            shelf,
            freeing,
            done,
            complaints: Arc::default(),
            unproven: Places::new(MAX_UNPROVEN),
            served: Arc::default(),
            folding: Arc::default(),
        };
        let (listener, over) = (self.listener.clone(), self.over.clone());
        let thread = std::thread::Builder::new().name("memory".into());
        self.thread = Some(thread.spawn(move || accept(&listener, &over, &served))?);
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        // SAFETY: the descriptor is open, since the listener is ours. This wakes accept().
        unsafe { libc::shutdown(self.listener.as_raw_fd(), libc::SHUT_RDWR) };
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}

fn accept(listener: &TcpListener, over: &AtomicBool, served: &Served) {
    while !over.load(Ordering::Acquire) {
        match listener.accept() {
            Ok((stream, from)) => serve_apart(stream, from.ip(), served),
            // Too many open files, or a connection that was gone again.
            Err(_) => std::thread::sleep(REST),
        }
    }
}

/// One of so many at most.
struct Seat(Arc<AtomicUsize>);

impl Seat {
    fn of(count: &Arc<AtomicUsize>, most: usize) -> Option<Seat> {
        // Given back by the drop, too many or not.
        let seat = Seat(count.clone());
        (count.fetch_add(1, Ordering::AcqRel) < most).then_some(seat)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn serve_apart(stream: TcpStream, from: IpAddr, served: &Served) {
    let Some(unproven) = served.unproven.take(from) else {
        return;
    };
    let served = served.clone();
    let thread = std::thread::Builder::new().name("memory-out".into());
    // With no thread left the connection is dropped, and its place.
    let _spawned = thread.spawn(move || {
        let Some(key) = lock(&served.shelf).key() else {
            return;
        };
        let Ok(mut link) = Link::accept(stream, &key, served.launcher) else {
            return;
        };
        drop(unproven);
        if let Some(_seat) = Seat::of(&served.served, MAX_SERVED) {
            let _gone = converse(&mut link, &served);
        }
    });
}

/// Answers one question after the other.
fn converse(link: &mut Link, served: &Served) -> io::Result<()> {
    loop {
        let ask: Ask = link.hear(IDLE)?;
        ask.check().map_err(|_| io::ErrorKind::InvalidData)?;
        match ask {
            Ask::List => {
                let list = lock(&served.shelf).list();
                let (who, pid) = (served.who.clone(), std::process::id());
                link.say(&Answer::Held { who, pid, list })?;
            }
            Ask::Read { name, at, len } => read(link, served, &name, at, len)?,
            Ask::Keep {
                generation,
                name,
                bytes,
            } => keep(link, served, generation, &name, bytes)?,
            Ask::Parities { above } => {
                let list = lock(&served.shelf).parities(above);
                link.say(&Answer::Parities { list })?;
            }
            Ask::Fold {
                generation,
                name,
                bytes,
                local,
                stripe,
                over,
                who,
            } => {
                let Some(_seat) = Seat::of(&served.folding, MAX_FOLDING) else {
                    let why = "that node takes in as much as it may at once".into();
                    link.say(&Answer::Refused { why })?;
                    continue;
                };
                let brought = Brought {
                    generation,
                    name,
                    bytes,
                    local,
                    stripe,
                    over,
                    who,
                };
                let tell = |who: &str, what| served.complain(who, what);
                folding::fold(link, &served.shelf, &served.freeing, brought, tell)?;
            }
            Ask::Unfold {
                number,
                part,
                piece,
                len,
            } => folding::unfold(link, &served.shelf, Of { number, part }, piece, len)?,
            Ask::Restored {
                rank,
                step,
                from,
                why,
            } => {
                let _over = served
                    .done
                    .send(Done::Said(restored(rank, step, &from, why)));
                link.say(&Answer::Heard)?;
            }
        }
    }
}

/// For people: what came from where.
fn restored(rank: u32, step: u64, from: &[(String, u64)], why: Option<String>) -> String {
    let parts: Vec<String> = (from.iter())
        .map(|(who, bytes)| format!("{} from {who}", shown(*bytes)))
        .collect();
    let why = why.map_or_else(String::new, |why| format!(" ({why})"));
    let mut text = format!(
        "rank {rank} restored step {step}: {}{why}",
        parts.join(", ")
    );
    text.retain(|c| !c.is_control());
    text
}

fn read(link: &mut Link, served: &Served, name: &Name, at: u64, len: u32) -> io::Result<()> {
    let image = lock(&served.shelf).find(name);
    let part = image.as_ref().and_then(|image| {
        let begin = usize::try_from(at).ok()?;
        let end = begin.checked_add(usize::try_from(len).ok()?)?;
        image.bytes().get(begin..end)
    });
    let Some(part) = part.filter(|_| image.as_ref().is_some_and(super::shelf::Image::is_whole))
    else {
        return link.say(&Answer::Gone);
    };
    link.say(&Answer::Bytes)?;
    // What changes meanwhile does not verify at the other end.
    link.write(part, Instant::now() + time_for(len.into()))
}

/// Room for a copy that arrives; given back when it does not.
struct Coming<'a> {
    shelf: &'a Mutex<Shelf>,
    name: &'a Name,
    room: Option<Room>,
}

impl Drop for Coming<'_> {
    fn drop(&mut self) {
        if let Some(room) = self.room.take() {
            lock(self.shelf).give_up(self.name, room);
        }
    }
}

fn keep(
    link: &mut Link,
    served: &Served,
    generation: Digest,
    name: &Name,
    bytes: u64,
) -> io::Result<()> {
    let admission = lock(&served.shelf).admit(generation, name, bytes);
    let room = match admission {
        Admission::Go(room) => room,
        Admission::Have => return link.say(&Answer::Have),
        Admission::NoRoom(room) => return link.say(&Answer::NoRoom { room }),
        Admission::Refused(why) => return link.say(&Answer::Refused { why: why.into() }),
    };
    let mut coming = Coming {
        shelf: &served.shelf,
        name,
        room: Some(room),
    };
    served.freeing.settle(folding::SETTLES);
    link.say(&Answer::Go)?;
    for chunk in 0..bytes.div_ceil(CHUNK) {
        let (begin, end) = (chunk * CHUNK, bytes.min((chunk + 1) * CHUNK));
        let until = Instant::now() + time_for(end - begin);
        let part = coming.room.as_mut().and_then(|room| room.part(begin, end));
        let part = part.ok_or(io::ErrorKind::InvalidData)?;
        link.read(part, until)?;
        let mut sum = [0; 8];
        // Behind its chunk: it is on the way already.
        let found = {
            link.read(&mut sum, Instant::now() + SOON)?;
            crc(part)
        };
        if found != u64::from_le_bytes(sum) {
            link.say(&Answer::Damaged { chunk })?;
            // More of it is on the way: this connection is of no use any more.
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
    if let Some(room) = coming.room.take() {
        lock(&served.shelf).keep(name, room.seal(bytes));
    }
    link.say(&Answer::Kept)
}
