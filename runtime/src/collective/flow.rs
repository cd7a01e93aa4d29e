//! One operation's bytes between this rank and its peers, in all directions at once.
//!
//! To and from each peer goes one stream: a head, bytes that are there from the start, and, if they are
//! relayed, this rank's own part as it becomes ready. All sockets are served by the calling thread; it
//! waits only when none can go on.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};

use super::Over;
use super::error::{LossCause, would_block};
use super::reduce::Fold;
use super::spin::Spin;
use super::watch::{Fault, Watch, broken};
use super::wire::{HEAD_LEN, Head};

/// Bytes of a chunk: reduced, and relayed, as soon as it has come from everybody.
pub(super) const CHUNK: usize = 1 << 20;
/// Bytes that one call to the kernel moves at most, so that no peer is served long while others wait.
const GULP: usize = 1 << 20;

/// What comes first from a peer, before the bytes for this rank alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum First {
    Nothing,
    /// Its contribution to this rank's part, to be reduced.
    Contribution,
    /// This rank's part, ready.
    Part,
}

/// The traffic with one peer.
#[derive(Debug)]
pub(super) struct Flow<'a> {
    pub(super) rank: u32,
    pub(super) stream: &'a TcpStream,
    /// Whether anything goes to the peer, and what.
    pub(super) talks: bool,
    pub(super) send: &'a [u8],
    pub(super) relay: bool,
    /// Whether anything comes from it, and where to.
    pub(super) listens: bool,
    pub(super) first: First,
    pub(super) recv: &'a mut [u8],
    /// For contributions: at least a chunk, aligned for every element.
    pub(super) stage: &'a mut [u8],
    sent: usize,
    got: usize,
    staged: usize,
    head: [u8; HEAD_LEN],
}

impl<'a> Flow<'a> {
    /// Sends and receives, with nothing to reduce or relay.
    pub(super) fn exchange(
        rank: u32,
        stream: &'a TcpStream,
        send: &'a [u8],
        recv: &'a mut [u8],
    ) -> Flow<'a> {
        Flow {
            rank,
            stream,
            talks: true,
            send,
            relay: false,
            listens: true,
            first: First::Nothing,
            recv,
            stage: &mut [],
            sent: 0,
            got: 0,
            staged: 0,
            head: [0; HEAD_LEN],
        }
    }
}

/// This rank's own part: reduced from all contributions, or received, or there from the start.
#[derive(Debug)]
pub(super) struct Own<'a> {
    /// With the place of this rank's contribution among the flows', and the contribution.
    pub(super) fold: Option<(Fold, usize, &'a [u8])>,
    pub(super) part: &'a mut [u8],
    /// Bytes of it that are final.
    pub(super) ready: usize,
}

impl Own<'_> {
    /// For operations without one.
    pub(super) fn none() -> Own<'static> {
        Own {
            fold: None,
            part: &mut [],
            ready: 0,
        }
    }
}

/// One operation's traffic.
pub(super) struct Traffic<'a> {
    pub(super) flows: Vec<Flow<'a>>,
    pub(super) own: Own<'a>,
    pub(super) head: [u8; HEAD_LEN],
    pub(super) until: Instant,
    pub(super) spin: &'a mut Spin,
}

enum Moved {
    Nothing,
    Some,
}

impl Traffic<'_> {
    /// Until everything is sent and received.
    pub(super) fn run(mut self, watch: &mut Watch) -> Result<(), Fault> {
        // While nothing moves: since when, and how long to spin.
        let mut idle: Option<(Instant, Duration)> = None;
        loop {
            watch.check_abort()?;
            let mut moved = false;
            for flow in &mut self.flows {
                moved |= send(flow, &self.own, &self.head, watch)?;
                moved |= receive(flow, &mut self.own, &self.head, watch)?;
            }
            moved |= self.reduce()?;
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
            watch.wait(&self.wanted(), self.until)?;
        }
    }

    /// Reduces the next chunk, if all contributions to it are there.
    fn reduce(&mut self) -> Result<bool, Fault> {
        let Some((fold, place, input)) = self.own.fold else {
            return Ok(false);
        };
        let mut any = false;
        loop {
            let ready = self.own.ready;
            let len = CHUNK.min(self.own.part.len() - ready);
            if len == 0 || self.flows.iter().any(|flow| flow.staged < len) {
                return Ok(any);
            }
            let mut parts: Vec<&[u8]> = self.flows.iter().map(|flow| &flow.stage[..len]).collect();
            parts.insert(place, &input[ready..ready + len]);
            if !fold.run(&mut self.own.part[ready..ready + len], &parts) {
                return Err(Fault::misfit());
            }
            self.own.ready += len;
            for flow in &mut self.flows {
                flow.staged = 0;
            }
            any = true;
        }
    }

    fn is_done(&self) -> bool {
        let part = self.own.part.len();
        self.own.ready == part
            && self
                .flows
                .iter()
                .all(|flow| flow.sent == flow.to_send(part) && flow.got == flow.to_receive(part))
    }

    /// The rank to blame at the deadline: whoever sent least of what it owes, or takes least.
    fn behind(&self) -> u32 {
        let part = self.own.part.len();
        let owes = |flow: &&Flow<'_>| flow.got < flow.to_receive(part);
        let takes = |flow: &&Flow<'_>| flow.sent < flow.to_send(part);
        let silent = self.flows.iter().filter(owes).min_by_key(|flow| flow.got);
        let deaf = || self.flows.iter().filter(takes).min_by_key(|flow| flow.sent);
        silent.or_else(deaf).map_or(0, |flow| flow.rank)
    }

    fn wanted(&self) -> Vec<PollFd<'_>> {
        let part = self.own.part.len();
        let mut fds = Vec::with_capacity(self.flows.len() + 8);
        for flow in &self.flows {
            let mut flags = PollFlags::empty();
            if flow.got < flow.to_receive(part) && !flow.is_stage_full(&self.own) {
                flags |= PollFlags::POLLIN;
            }
            if flow.sent < flow.may_send(&self.own) {
                flags |= PollFlags::POLLOUT;
            }
            if !flags.is_empty() {
                fds.push(PollFd::new(flow.stream.as_fd(), flags));
            }
        }
        fds
    }
}

impl Flow<'_> {
    fn to_send(&self, part: usize) -> usize {
        match (self.talks, self.relay) {
            (false, _) => 0,
            (true, false) => HEAD_LEN + self.send.len(),
            (true, true) => HEAD_LEN + self.send.len() + part,
        }
    }

    fn may_send(&self, own: &Own<'_>) -> usize {
        self.to_send(own.ready)
    }

    /// Bytes before those for this rank alone.
    fn before(&self, part: usize) -> usize {
        match self.first {
            First::Nothing => 0,
            First::Contribution | First::Part => part,
        }
    }

    fn to_receive(&self, part: usize) -> usize {
        if self.listens {
            HEAD_LEN + self.before(part) + self.recv.len()
        } else {
            0
        }
    }

    /// Whether the next bytes have to wait for the other contributions.
    fn is_stage_full(&self, own: &Own<'_>) -> bool {
        self.first == First::Contribution
            && self.got >= HEAD_LEN
            && self.got - HEAD_LEN < own.part.len()
            && self.staged == CHUNK.min(own.part.len() - own.ready)
    }
}

fn gulp(bytes: &[u8]) -> &[u8] {
    &bytes[..bytes.len().min(GULP)]
}

fn gulp_mut(bytes: &mut [u8]) -> &mut [u8] {
    let len = bytes.len().min(GULP);
    &mut bytes[..len]
}

fn moved(
    result: io::Result<usize>,
    count: &mut usize,
    rank: u32,
    watch: &mut Watch,
) -> Result<Moved, Fault> {
    match result {
        Ok(0) => Err(watch.ended(rank, LossCause::Closed)),
        Ok(n) => {
            *count += n;
            Ok(Moved::Some)
        }
        Err(error) if would_block(&error) => Ok(Moved::Nothing),
        Err(error) => Err(watch.ended(rank, broken(&error))),
    }
}

/// Sends what the socket takes. True: anything.
fn send(
    flow: &mut Flow<'_>,
    own: &Own<'_>,
    head: &[u8; HEAD_LEN],
    watch: &mut Watch,
) -> Result<bool, Fault> {
    let may = flow.may_send(own);
    let mut any = false;
    while flow.sent < may && (!any || flow.sent <= HEAD_LEN) {
        let mut stream = flow.stream;
        let fixed = HEAD_LEN + flow.send.len();
        let result = if flow.sent < HEAD_LEN {
            stream.write_vectored(&[
                IoSlice::new(&head[flow.sent..]),
                IoSlice::new(gulp(flow.send)),
            ])
        } else if flow.sent < fixed {
            stream.write(gulp(&flow.send[flow.sent - HEAD_LEN..]))
        } else {
            stream.write(gulp(&own.part[flow.sent - fixed..own.ready]))
        };
        match moved(result, &mut flow.sent, flow.rank, watch)? {
            Moved::Some => any = true,
            Moved::Nothing => break,
        }
    }
    Ok(any)
}

/// Receives what is there and has a place. True: anything.
fn receive(
    flow: &mut Flow<'_>,
    own: &mut Own<'_>,
    head: &[u8; HEAD_LEN],
    watch: &mut Watch,
) -> Result<bool, Fault> {
    let part = own.part.len();
    let total = flow.to_receive(part);
    let before = flow.before(part);
    let mut any = false;
    while flow.got < total && !flow.is_stage_full(own) && (!any || flow.got <= HEAD_LEN) {
        let mut stream = flow.stream;
        let was = flow.got;
        let result = if was < HEAD_LEN {
            // With what follows it, if that has its place already: small messages come in one call.
            let rest: &mut [u8] = if before == 0 {
                gulp_mut(flow.recv)
            } else {
                &mut []
            };
            stream.read_vectored(&mut [
                IoSliceMut::new(&mut flow.head[was..]),
                IoSliceMut::new(rest),
            ])
        } else {
            let at = was - HEAD_LEN;
            if at >= before {
                stream.read(gulp_mut(&mut flow.recv[at - before..]))
            } else if flow.first == First::Part {
                stream.read(gulp_mut(&mut own.part[at..]))
            } else {
                let end = CHUNK.min(part - own.ready);
                stream.read(&mut flow.stage[flow.staged..end])
            }
        };
        match moved(result, &mut flow.got, flow.rank, watch)? {
            Moved::Some => any = true,
            Moved::Nothing => break,
        }
        if was < HEAD_LEN {
            if flow.got >= HEAD_LEN
                && let Some(what) = Head::differs(head, &flow.head)
            {
                return Err(Over::Protocol(flow.rank, what).into());
            }
        } else if was - HEAD_LEN < before {
            match flow.first {
                First::Part => own.ready = flow.got - HEAD_LEN,
                _ => flow.staged += flow.got - was,
            }
        }
    }
    Ok(any)
}
