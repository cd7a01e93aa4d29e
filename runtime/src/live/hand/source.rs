//! A connection to one rank that has what is lacked.

use std::io::{self, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use socket2::{Domain, Protocol, Socket, Type};

use super::landing::Part;
use super::{Digest, MAGIC, REQUEST_LEN, SILENCE, TOKEN_LEN, Thing, Want};

/// The most bytes of a thing that is handed over: a bound on what a length from the network may ask for.
const MAX_LEN: u64 = 1 << 40;
/// How long a source that says nothing is waited for before somebody looks whether the copy is still wanted.
const SLICE_MS: u16 = 20;

/// Whether a copy is still wanted.
pub(super) struct Wanted<'a> {
    cancelled: &'a AtomicBool,
    /// The end of patience.
    until: Instant,
    /// It is whole, or never will be.
    done: AtomicBool,
}

impl<'a> Wanted<'a> {
    pub(super) fn new(cancelled: &'a AtomicBool, until: Instant) -> Wanted<'a> {
        Wanted {
            cancelled,
            until,
            done: AtomicBool::new(false),
        }
    }

    /// Nobody waits for a source any more.
    pub(super) fn end(&self) {
        self.done.store(true, Ordering::Release);
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    pub(super) fn is_late(&self) -> bool {
        Instant::now() >= self.until
    }

    pub(super) fn is_over(&self) -> bool {
        self.done.load(Ordering::Acquire) || self.is_cancelled() || self.is_late()
    }

    fn check(&self) -> io::Result<()> {
        if self.is_over() {
            return Err(io::Error::other("it took too long"));
        }
        Ok(())
    }
}

/// A connection to one source. None of its operations outlasts what is [`Wanted`], nor a [`SILENCE`].
pub(super) struct Source<'w> {
    pub(super) at: SocketAddr,
    stream: TcpStream,
    token: [u8; TOKEN_LEN],
    wanted: &'w Wanted<'w>,
}

/// Error for data that a source that answered well does not have, or not any more, or does not send as it said.
pub(super) fn not_right() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

impl<'w> Source<'w> {
    pub(super) fn connect(
        at: SocketAddr,
        token: [u8; TOKEN_LEN],
        wanted: &'w Wanted<'w>,
    ) -> io::Result<Source<'w>> {
        let stream = connect(at, wanted)?;
        let slice = Duration::from_millis(SLICE_MS.into());
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(slice))?;
        stream.set_write_timeout(Some(slice))?;
        Ok(Source {
            at,
            stream,
            token,
            wanted,
        })
    }

    /// Asks; what was asked for is answered in order.
    pub(super) fn ask(
        &mut self,
        thing: Thing,
        want: Want,
        (from, len): (u64, u64),
    ) -> io::Result<()> {
        let (kind, number) = thing.words();
        let mut request = Vec::with_capacity(REQUEST_LEN);
        request.extend_from_slice(&MAGIC);
        request.extend_from_slice(&self.token);
        for word in [kind, number, want as u64, from, len] {
            request.extend_from_slice(&word.to_le_bytes());
        }
        let mut left = &request[..];
        while !left.is_empty() {
            match self.patiently(|stream| stream.write(left))? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                sent => left = left.get(sent..).unwrap_or_default(),
            }
        }
        Ok(())
    }

    /// The whole's length, or `None` when it is not there (yet); what was asked for follows.
    pub(super) fn length(&mut self) -> io::Result<Option<u64>> {
        let mut length = [0; 8];
        self.read_exact(&mut length)?;
        match u64::from_le_bytes(length).checked_sub(1) {
            Some(total) if total > MAX_LEN => Err(not_right()),
            total => Ok(total),
        }
    }

    pub(super) fn read_digest(&mut self) -> io::Result<Digest> {
        let mut digest = Digest::default();
        self.read_exact(&mut digest)?;
        Ok(digest)
    }

    /// The part that was asked for, unchecked; the digest of what came.
    pub(super) fn get(&mut self, total: u64, part: &mut Part<'_>) -> io::Result<Digest> {
        if self.length()? != Some(total) {
            return Err(not_right());
        }
        part.receive(self)
    }

    /// The digest, that was asked for, of this source's own part.
    pub(super) fn digest(&mut self, total: u64) -> io::Result<Digest> {
        if self.length()? != Some(total) {
            return Err(not_right());
        }
        self.read_digest()
    }

    /// Does `io` on the stream once it can. A stream that goes on, however slowly, is ended as one that is silent.
    fn patiently(
        &mut self,
        mut io: impl FnMut(&mut TcpStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let since = Instant::now();
        loop {
            self.wanted.check()?;
            match io(&mut self.stream) {
                Err(error) if is_short_of_time(&error) && since.elapsed() < SILENCE => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                done => return done,
            }
        }
    }
}

impl Read for Source<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.patiently(|stream| stream.read(to))
    }

    fn read_vectored(&mut self, to: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.patiently(|stream| stream.read_vectored(to))
    }
}

fn is_short_of_time(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), WouldBlock | TimedOut | Interrupted)
}

/// Connects, for as long as it is wanted.
fn connect(at: SocketAddr, wanted: &Wanted<'_>) -> io::Result<TcpStream> {
    let kind = Type::STREAM.cloexec();
    let socket = Socket::new(Domain::for_address(at), kind, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    match socket.connect(&at.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {
            let since = Instant::now();
            loop {
                wanted.check()?;
                let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLOUT)];
                match poll(&mut fds, PollTimeout::from(SLICE_MS)) {
                    Ok(0) | Err(Errno::EINTR) if since.elapsed() < SILENCE => {}
                    Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                    Ok(_) => break,
                    Err(error) => return Err(error.into()),
                }
            }
            if let Some(error) = socket.take_error()? {
                return Err(error);
            }
        }
        Err(error) => return Err(error),
    }
    socket.set_nonblocking(false)?;
    let stream = TcpStream::from(socket);
    // Calling a free port of one's own host can connect to oneself (simultaneous open).
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    Ok(stream)
}
