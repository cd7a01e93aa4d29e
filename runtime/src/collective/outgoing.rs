//! Bytes that this rank sends in one operation: by the calling thread, or, when it is much, by a thread of its
//! own for as long as the operation lasts, so that sending and receiving use two cores.

use std::io::{IoSlice, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};

use super::error::{GroupError, LossCause, would_block};
use super::watch::{Aborter, broken, wait_ready};
use super::wire::HEAD_LEN;

/// Bytes that one call to the kernel moves at most, so that no peer is served long while others wait.
pub(super) const GULP: usize = 1 << 20;
/// How soon a sender that waits for one peer looks whether there is more for others, or the end.
const LOOK_AFTER: Duration = Duration::from_millis(2);

pub(super) fn gulp(bytes: &[u8]) -> &[u8] {
    &bytes[..bytes.len().min(GULP)]
}

/// Outgoing bytes for one peer: a head, bytes that are there from the start, and, if they are relayed, the
/// chunks of this rank's part as they become ready.
#[derive(Debug)]
pub(super) struct Outgoing<'a> {
    pub(super) rank: u32,
    pub(super) stream: &'a TcpStream,
    pub(super) send: &'a [u8],
    pub(super) relay: bool,
    /// Bytes of the head, and of all; then the piece that is sent now, and how much of it is.
    head: usize,
    sent: usize,
    piece: usize,
    at: usize,
}

/// Why a rank could not be sent to.
#[derive(Clone, Copy, Debug)]
pub(super) enum Unsent {
    Ended(u32, LossCause),
    Overdue(u32),
}

impl<'a> Outgoing<'a> {
    pub(super) fn new(rank: u32, stream: &'a TcpStream, send: &'a [u8]) -> Outgoing<'a> {
        Outgoing {
            rank,
            stream,
            send,
            relay: false,
            head: 0,
            sent: 0,
            piece: 0,
            at: 0,
        }
    }

    /// Bytes in all, with so many in this rank's part.
    pub(super) fn total(&self, part: usize) -> usize {
        HEAD_LEN + self.send.len() + if self.relay { part } else { 0 }
    }

    pub(super) fn sent(&self) -> usize {
        self.sent
    }

    /// The rest of the piece that is sent now; empty if there is none yet, or no more.
    fn next(&mut self, chunks: &[&'a [u8]]) -> &'a [u8] {
        loop {
            let piece = match self.piece.checked_sub(1) {
                None => self.send,
                Some(i) if self.relay && i < chunks.len() => chunks[i],
                Some(_) => return &[],
            };
            if self.at < piece.len() {
                return &piece[self.at..];
            }
            self.piece += 1;
            self.at = 0;
        }
    }

    pub(super) fn is_pending(&mut self, chunks: &[&'a [u8]]) -> bool {
        self.head < HEAD_LEN || !self.next(chunks).is_empty()
    }

    /// One call to the kernel. True: it took something.
    pub(super) fn push(
        &mut self,
        head: &[u8; HEAD_LEN],
        chunks: &[&'a [u8]],
    ) -> Result<bool, Unsent> {
        let bytes = gulp(self.next(chunks));
        let mut stream = self.stream;
        let result = if self.head < HEAD_LEN {
            let head = IoSlice::new(&head[self.head..]);
            stream.write_vectored(&[head, IoSlice::new(bytes)])
        } else if bytes.is_empty() {
            return Ok(false);
        } else {
            stream.write(bytes)
        };
        match result {
            Ok(0) => Err(Unsent::Ended(self.rank, LossCause::Closed)),
            Ok(n) => {
                let of_head = n.min(HEAD_LEN - self.head);
                self.head += of_head;
                self.at += n - of_head;
                self.sent += n;
                Ok(true)
            }
            Err(error) if would_block(&error) => Ok(false),
            Err(error) => Err(Unsent::Ended(self.rank, broken(&error))),
        }
    }
}

/// Sends everything, in a thread of its own.
pub(super) struct Sender<'a, 's> {
    pub(super) outgoing: Vec<Outgoing<'a>>,
    pub(super) head: [u8; HEAD_LEN],
    /// Bytes of this rank's part, and its chunks as they become ready.
    pub(super) part: usize,
    pub(super) chunks: Receiver<&'a [u8]>,
    pub(super) until: Instant,
    pub(super) aborter: &'s Aborter,
    /// Set by the receiver when it gives up.
    pub(super) stop: &'s AtomicBool,
    /// Closed at the end: whoever waits for it sees the other end become readable.
    pub(super) _ended: UnixStream,
}

impl Sender<'_, '_> {
    /// Until everything is sent, or the receiver has given up, for which its own error is the reason.
    pub(super) fn run(mut self) -> Result<Result<(), Unsent>, GroupError> {
        let mut chunks = Vec::new();
        loop {
            if self.stop.load(Ordering::Relaxed) || self.aborter.is_aborted() {
                return Ok(Ok(()));
            }
            chunks.extend(self.chunks.try_iter());
            let mut moved = false;
            for outgoing in &mut self.outgoing {
                match outgoing.push(&self.head, &chunks) {
                    Ok(any) => moved |= any,
                    Err(unsent) => return Ok(Err(unsent)),
                }
            }
            let part = self.part;
            let behind = self.outgoing.iter().filter(|o| o.sent() < o.total(part));
            let Some(behind) = behind.min_by_key(|o| o.sent()).map(|o| o.rank) else {
                return Ok(Ok(()));
            };
            let now = Instant::now();
            if now >= self.until {
                return Ok(Err(Unsent::Overdue(behind)));
            }
            if moved {
                continue;
            }
            let mut fds = Vec::with_capacity(self.outgoing.len() + 1);
            for outgoing in &mut self.outgoing {
                if outgoing.is_pending(&chunks) {
                    fds.push(PollFd::new(outgoing.stream.as_fd(), PollFlags::POLLOUT));
                }
            }
            if fds.is_empty() {
                match self.chunks.recv_timeout(LOOK_AFTER) {
                    Ok(chunk) => chunks.push(chunk),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return Ok(Ok(())),
                }
            } else {
                fds.push(PollFd::new(self.aborter.bell(), PollFlags::POLLIN));
                wait_ready(&mut fds, now + LOOK_AFTER)?;
            }
        }
    }
}
