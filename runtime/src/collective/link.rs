//! One connection between rank 0 and another rank: non-blocking, waited for with `poll`.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use socket2::{SockRef, TcpKeepalive};

use super::error::{GroupError, LossCause, would_block};
use super::wire::{HEADER_LEN, Header, Kind, MAX_PAYLOAD};

/// Bytes that stay unacknowledged this long end the connection: a cut cable, a frozen host.
const UNACKED_FOR: Duration = Duration::from_secs(5);

/// Prepares a connected stream: no delay, not blocking, and probed by the kernel while idle.
pub(super) fn prepare(stream: &TcpStream) -> io::Result<()> {
    let socket = SockRef::from(stream);
    socket.set_tcp_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(2))
        .with_interval(Duration::from_secs(1))
        .with_retries(3);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_tcp_user_timeout(Some(UNACKED_FOR))?;
    stream.set_nonblocking(true)
}

/// Waits until one of the descriptors is ready, or `until`. False: the time is over.
pub(super) fn wait_ready(fds: &mut [PollFd<'_>], until: Instant) -> Result<bool, GroupError> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        // Rounded up, so that the last millisecond is not spun away.
        let ms = i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX);
        let timeout = PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX);
        match poll(fds, timeout) {
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(errno) => return Err(GroupError::Socket(errno.into())),
        }
    }
}

pub(super) fn broken(error: &io::Error) -> LossCause {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => LossCause::Closed,
        kind => LossCause::Broken(kind),
    }
}

/// What is wrong with a peer or its bytes.
#[derive(Debug)]
pub(super) enum Fault {
    Lost(LossCause),
    Protocol(&'static str),
    /// Rank 0 ends the group because of this rank.
    Aborted(u32),
}

impl Fault {
    pub(super) fn silent(for_: Duration) -> Fault {
        Fault::Lost(LossCause::Silent(for_))
    }
}

/// The frame that is expected next, as far as it has arrived.
#[derive(Debug)]
pub(super) struct Incoming {
    kind: Kind,
    seq: u32,
    most: usize,
    exact: bool,
    head: [u8; HEADER_LEN],
    got: usize,
    sized: bool,
    body: Vec<u8>,
}

impl Incoming {
    /// A frame of this operation with at most (or exactly) so many bytes.
    pub(super) fn new(kind: Kind, seq: u32, most: usize, exact: bool) -> Incoming {
        Incoming {
            kind,
            seq,
            most: most.min(MAX_PAYLOAD),
            exact,
            head: [0; HEADER_LEN],
            got: 0,
            sized: false,
            body: Vec::new(),
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.sized && self.got == HEADER_LEN + self.body.len()
    }

    pub(super) fn into_body(self) -> Vec<u8> {
        self.body
    }

    /// Reads what is there. True: the frame is complete.
    pub(super) fn advance(&mut self, mut stream: &TcpStream) -> Result<bool, Fault> {
        while !self.is_complete() {
            let to = if self.got < HEADER_LEN {
                &mut self.head[self.got..]
            } else {
                &mut self.body[self.got - HEADER_LEN..]
            };
            match stream.read(to) {
                Ok(0) => return Err(Fault::Lost(LossCause::Closed)),
                Ok(n) => self.got += n,
                Err(error) if would_block(&error) => return Ok(false),
                Err(error) => return Err(Fault::Lost(broken(&error))),
            }
            if self.got == HEADER_LEN && !self.sized {
                self.check_header()?;
            }
        }
        Ok(true)
    }

    fn check_header(&mut self) -> Result<(), Fault> {
        let header = Header::decode(&self.head).ok_or(Fault::Protocol("an unknown frame"))?;
        if header.kind == Kind::Abort {
            return Err(Fault::Aborted(header.arg));
        }
        if (header.kind, header.seq) != (self.kind, self.seq) {
            return Err(Fault::Protocol("a frame of another operation"));
        }
        let len = usize::try_from(header.len).unwrap_or(usize::MAX);
        if len > self.most || (self.exact && len != self.most) {
            return Err(Fault::Protocol("a payload of another size"));
        }
        self.body = vec![0; len];
        self.sized = true;
        Ok(())
    }
}

/// Sends one frame. While it cannot go on sending it watches for an abort from the other side, if
/// `replies` is where the answer to this frame goes.
pub(super) fn send(
    mut stream: &TcpStream,
    header: &Header,
    payload: &[u8],
    mut replies: Option<&mut Incoming>,
    until: Instant,
    allowed: Duration,
) -> Result<Result<(), Fault>, GroupError> {
    let head = header.encode();
    let mut sent = 0;
    let total = HEADER_LEN + payload.len();
    while sent < total {
        let rest = if sent < HEADER_LEN {
            &head[sent..]
        } else {
            &payload[sent - HEADER_LEN..]
        };
        match stream.write(rest) {
            Ok(n) => sent += n,
            Err(error) if would_block(&error) => {
                let mut flags = PollFlags::POLLOUT;
                if replies.is_some() {
                    flags |= PollFlags::POLLIN;
                }
                let mut fds = [PollFd::new(stream.as_fd(), flags)];
                if !wait_ready(&mut fds, until)? {
                    return Ok(Err(Fault::silent(allowed)));
                }
                let readable = fds[0]
                    .revents()
                    .is_some_and(|got| got.contains(PollFlags::POLLIN));
                if let Some(replies) = replies.as_mut().filter(|_| readable)
                    && let Err(fault) = replies.advance(stream)
                {
                    return Ok(Err(fault));
                }
            }
            Err(error) => {
                // The other side may have said why before it closed.
                if let Some(Err(fault @ Fault::Aborted(_))) =
                    replies.map(|replies| replies.advance(stream))
                {
                    return Ok(Err(fault));
                }
                return Ok(Err(Fault::Lost(broken(&error))));
            }
        }
    }
    Ok(Ok(()))
}
