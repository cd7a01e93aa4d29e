//! One operation's bytes between this rank and its peers, in all directions at once.
//!
//! To and from each peer goes one stream: a head, bytes that are there from the start, and, if they are
//! relayed, this rank's own part as it becomes ready. The calling thread serves all sockets, and waits only
//! when none can go on; a large operation is sent by a second thread.

use std::io::{IoSliceMut, Read};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender as Channel, channel};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};

use super::Over;
use super::error::{GroupError, LossCause, would_block};
use super::outgoing::{GULP, Outgoing, Sender, Unsent};
use super::reduce::Fold;
use super::spin::Spin;
use super::watch::{Fault, Watch, broken};
use super::wire::{HEAD_LEN, Head};

/// Bytes of a chunk from one peer; it is reduced, and relayed, as soon as it has come from everybody.
const CHUNK: usize = 1 << 20;
/// Bytes to send from which a second thread pays.
const MUCH: usize = 2 << 20;

/// Bytes of a chunk with so many peers: smaller with more of them, so that what comes from up to 8 is together no more
/// than [`CHUNK`], and may stay in the cache until it is reduced. Not below an eighth of that, whatever their number.
pub(super) fn chunk(peers: usize) -> usize {
    (CHUNK / peers.max(1)).max(CHUNK / 8) & !63
}

/// The first bytes from a peer, before the bytes for this rank alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum First {
    Nothing,
    /// Its contribution to this rank's part, to be reduced.
    Contribution,
    /// This rank's part, ready.
    Part,
}

/// Incoming bytes of one peer.
#[derive(Debug)]
pub(super) struct Incoming<'a> {
    rank: u32,
    stream: &'a TcpStream,
    pub(super) first: First,
    pub(super) recv: &'a mut [u8],
    /// For contributions: at least a chunk, aligned for every element.
    pub(super) stage: &'a mut [u8],
    got: usize,
    staged: usize,
    head: [u8; HEAD_LEN],
}

impl<'a> Incoming<'a> {
    pub(super) fn new(rank: u32, stream: &'a TcpStream, recv: &'a mut [u8]) -> Incoming<'a> {
        Incoming {
            rank,
            stream,
            first: First::Nothing,
            recv,
            stage: &mut [],
            got: 0,
            staged: 0,
            head: [0; HEAD_LEN],
        }
    }
}

/// This rank's own part: reduced from all contributions, or received, or there from the start.
#[derive(Debug)]
pub(super) struct Own<'a> {
    /// With the place of this rank's contribution among the peers', and the contribution.
    fold: Option<(Fold, usize, &'a [u8])>,
    len: usize,
    /// The chunks that are final; `rest` is not yet.
    chunks: Vec<&'a [u8]>,
    ready: usize,
    rest: &'a mut [u8],
    /// Bytes received into the rest.
    filled: usize,
    /// Bytes of a chunk.
    chunk: usize,
}

impl<'a> Own<'a> {
    /// To be reduced, or, without a reduction, to be received.
    pub(super) fn coming(
        fold: Option<(Fold, usize, &'a [u8])>,
        part: &'a mut [u8],
        chunk: usize,
    ) -> Own<'a> {
        Own {
            fold,
            len: part.len(),
            chunks: Vec::new(),
            ready: 0,
            rest: part,
            filled: 0,
            chunk,
        }
    }

    /// There from the start.
    pub(super) fn there(part: &'a [u8]) -> Own<'a> {
        Own {
            fold: None,
            len: part.len(),
            chunks: vec![part],
            ready: part.len(),
            rest: &mut [],
            filled: 0,
            chunk: CHUNK,
        }
    }

    /// For operations without one.
    pub(super) fn none() -> Own<'a> {
        Own::there(&[])
    }

    /// Bytes of the chunk that comes next; 0 at the end.
    fn next_len(&self) -> usize {
        self.chunk.min(self.len - self.ready)
    }

    /// The next chunk is final.
    fn pass(&mut self, relay: Option<&Channel<&'a [u8]>>) {
        let len = self.next_len();
        let (chunk, rest) = std::mem::take(&mut self.rest).split_at_mut(len);
        self.rest = rest;
        self.ready += len;
        self.filled = 0;
        match relay {
            // A sender that has ended says so by itself.
            Some(relay) => {
                let _ = relay.send(chunk);
            }
            None => self.chunks.push(chunk),
        }
    }
}

/// One operation's traffic.
pub(super) struct Traffic<'a> {
    pub(super) outgoing: Vec<Outgoing<'a>>,
    pub(super) incoming: Vec<Incoming<'a>>,
    pub(super) own: Own<'a>,
    pub(super) head: [u8; HEAD_LEN],
    pub(super) until: Instant,
    pub(super) spin: &'a mut Spin,
}

impl<'a> Traffic<'a> {
    /// Until everything is sent and received.
    pub(super) fn run(mut self, watch: &mut Watch) -> Result<(), Fault> {
        let part = self.own.len;
        let bytes: usize = self.outgoing.iter().map(|o| o.total(part)).sum();
        if bytes < MUCH || self.incoming.is_empty() {
            return self.go_on(watch, None);
        }
        let (relay, chunks) = channel();
        for chunk in &self.own.chunks {
            let _ = relay.send(*chunk);
        }
        let (end, ended) = UnixStream::pair().map_err(GroupError::Socket)?;
        end.set_nonblocking(true).map_err(GroupError::Socket)?;
        let (aborter, stop) = (watch.aborter.clone(), AtomicBool::new(false));
        let sender = Sender {
            outgoing: std::mem::take(&mut self.outgoing),
            head: self.head,
            part,
            chunks,
            until: self.until,
            aborter: &aborter,
            stop: &stop,
            _ended: ended,
        };
        let until = self.until;
        std::thread::scope(|scope| {
            let sending = std::thread::Builder::new()
                .name("muster-send".to_owned())
                .spawn_scoped(scope, || sender.run())
                .map_err(GroupError::Socket)?;
            let received = self.go_on(watch, Some(relay));
            let received = received.and_then(|()| {
                let fds = [PollFd::new(end.as_fd(), PollFlags::POLLIN)];
                // Past its deadline the sender ends by itself, and says whom it blames.
                while !closed(&end) && Instant::now() < until {
                    watch.wait(&fds, until)?;
                }
                Ok(())
            });
            stop.store(received.is_err(), Ordering::Relaxed);
            let sent = sending.join();
            received?;
            match sent {
                Ok(Ok(Ok(()))) => Ok(()),
                Ok(Ok(Err(unsent))) => Err(blame(unsent, watch)),
                Ok(Err(error)) => Err(error.into()),
                Err(_) => Err(GroupError::Internal {
                    what: "the sending thread panicked",
                }
                .into()),
            }
        })
    }

    /// Sends what is left to this thread, and receives.
    fn go_on(&mut self, watch: &mut Watch, relay: Option<Channel<&'a [u8]>>) -> Result<(), Fault> {
        // While nothing moves: since when, and how long to spin.
        let mut idle: Option<(Instant, Duration)> = None;
        loop {
            watch.check_abort()?;
            let mut moved = false;
            for outgoing in &mut self.outgoing {
                match outgoing.push(&self.head, &self.own.chunks) {
                    Ok(any) => moved |= any,
                    Err(unsent) => return Err(blame(unsent, watch)),
                }
            }
            for incoming in &mut self.incoming {
                moved |= receive(incoming, &mut self.own, &self.head, relay.as_ref(), watch)?;
            }
            moved |= self.reduce(relay.as_ref())?;
            if moved && idle.take().is_some_and(|(_, budget)| !budget.is_zero()) {
                self.spin.learn(true);
            }
            if self.is_done() {
                return Ok(());
            }
            let now = Instant::now();
            if now >= self.until {
                let behind = self.behind();
                return Err(watch.overdue(behind));
            }
            if moved {
                continue;
            }
            let (since, budget) = *idle.get_or_insert_with(|| (now, self.spin.budget()));
            if now - since < budget {
                std::hint::spin_loop();
                continue;
            }
            if !budget.is_zero() {
                self.spin.learn(false);
            }
            idle = None;
            let until = self.until;
            watch.wait(&self.wanted(), until)?;
        }
    }

    /// Reduces the next chunk, if all contributions to it are there.
    fn reduce(&mut self, relay: Option<&Channel<&'a [u8]>>) -> Result<bool, Fault> {
        let Some((fold, place, input)) = self.own.fold else {
            return Ok(false);
        };
        let (at, len) = (self.own.ready, self.own.next_len());
        if len == 0 || self.incoming.iter().any(|incoming| incoming.staged < len) {
            return Ok(false);
        }
        let stages = self.incoming.iter().map(|incoming| &incoming.stage[..len]);
        let mut parts: Vec<&[u8]> = stages.collect();
        parts.insert(place, &input[at..at + len]);
        if !fold.run(&mut self.own.rest[..len], &parts) {
            return Err(Fault::misfit());
        }
        self.own.pass(relay);
        for incoming in &mut self.incoming {
            incoming.staged = 0;
        }
        Ok(true)
    }

    fn is_done(&self) -> bool {
        let part = self.own.len;
        self.own.ready == part
            && self.outgoing.iter().all(|o| o.sent() == o.total(part))
            && self.incoming.iter().all(|i| i.got == i.total(part))
    }

    /// The rank to blame at the deadline: whoever sent least of what it owes, or takes least.
    fn behind(&self) -> u32 {
        let part = self.own.len;
        let owing = self.incoming.iter().filter(|i| i.got < i.total(part));
        let taking = self.outgoing.iter().filter(|o| o.sent() < o.total(part));
        let silent = owing.min_by_key(|i| i.got).map(|i| i.rank);
        let deaf = || taking.min_by_key(|o| o.sent()).map(|o| o.rank);
        silent.or_else(deaf).unwrap_or(0)
    }

    fn wanted(&mut self) -> Vec<PollFd<'a>> {
        let mut fds: Vec<PollFd<'a>> = Vec::with_capacity(self.incoming.len() + 2);
        for incoming in &self.incoming {
            if incoming.got < incoming.total(self.own.len) && !incoming.is_stage_full(&self.own) {
                fds.push(PollFd::new(incoming.stream.as_fd(), PollFlags::POLLIN));
            }
        }
        for outgoing in &mut self.outgoing {
            if outgoing.is_pending(&self.own.chunks) {
                fds.push(PollFd::new(outgoing.stream.as_fd(), PollFlags::POLLOUT));
            }
        }
        fds
    }
}

/// Whether the other end, which nobody writes to, is closed.
fn closed(mut end: &UnixStream) -> bool {
    matches!(end.read(&mut [0]), Ok(0))
}

fn blame(unsent: Unsent, watch: &mut Watch) -> Fault {
    match unsent {
        Unsent::Ended(rank, cause) => watch.ended(rank, cause),
        Unsent::Overdue(rank) => watch.overdue(rank),
    }
}

impl Incoming<'_> {
    /// Bytes before those for this rank alone.
    fn before(&self, part: usize) -> usize {
        match self.first {
            First::Nothing => 0,
            First::Contribution | First::Part => part,
        }
    }

    fn total(&self, part: usize) -> usize {
        HEAD_LEN + self.before(part) + self.recv.len()
    }

    /// Whether the next bytes have to wait for the other contributions.
    fn is_stage_full(&self, own: &Own<'_>) -> bool {
        self.first == First::Contribution
            && self.got >= HEAD_LEN
            && self.got - HEAD_LEN < own.len
            && self.staged == own.next_len()
    }
}

fn gulp_mut(bytes: &mut [u8]) -> &mut [u8] {
    let len = bytes.len().min(GULP);
    &mut bytes[..len]
}

/// Receives what is there and has a place, a gulp at most. True: anything.
fn receive<'a>(
    incoming: &mut Incoming<'a>,
    own: &mut Own<'a>,
    head: &[u8; HEAD_LEN],
    relay: Option<&Channel<&'a [u8]>>,
    watch: &mut Watch,
) -> Result<bool, Fault> {
    let part = own.len;
    let (total, before) = (incoming.total(part), incoming.before(part));
    let mut any = false;
    while incoming.got < total && !incoming.is_stage_full(own) && (!any || incoming.got <= HEAD_LEN)
    {
        let mut stream = incoming.stream;
        let was = incoming.got;
        let next = own.next_len();
        let result = if was < HEAD_LEN {
            // With what follows it, if that has its place already: small messages come in one call.
            let rest: &mut [u8] = if before == 0 {
                gulp_mut(incoming.recv)
            } else {
                &mut []
            };
            let head = IoSliceMut::new(&mut incoming.head[was..]);
            stream.read_vectored(&mut [head, IoSliceMut::new(rest)])
        } else if was - HEAD_LEN >= before {
            stream.read(gulp_mut(&mut incoming.recv[was - HEAD_LEN - before..]))
        } else if incoming.first == First::Part {
            stream.read(&mut own.rest[own.filled..next])
        } else {
            stream.read(&mut incoming.stage[incoming.staged..next])
        };
        let n = match result {
            Ok(0) => return Err(watch.ended(incoming.rank, LossCause::Closed)),
            Ok(n) => n,
            Err(error) if would_block(&error) => break,
            Err(error) => return Err(watch.ended(incoming.rank, broken(&error))),
        };
        incoming.got += n;
        any = true;
        if was < HEAD_LEN {
            if incoming.got >= HEAD_LEN {
                let word = Head::word_of(head, &incoming.head);
                let word = word.map_err(|what| Over::Protocol(incoming.rank, what))?;
                watch.hear(incoming.rank, word);
            }
        } else if was - HEAD_LEN < before {
            if incoming.first == First::Part {
                own.filled += n;
                if own.filled == next {
                    own.pass(relay);
                }
            } else {
                incoming.staged += n;
            }
        }
    }
    Ok(any)
}
