//! Both ends of a new connection prove that they know the generation's token, before anything else is
//! said: a hello with a nonce, the listener's proof and nonce, the caller's proof. The token itself
//! never travels.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};
use socket2::{Domain, Protocol, Socket, Type};

use super::error::{GroupError, Refusal, would_block};
use super::watch::{Aborter, prepare, wait_ready};
use super::wire::{
    CARD_LEN, CHALLENGE_LEN, Card, HELLO_LEN, Hello, PROOF_LEN, Purpose, VERDICT_LEN, VERSION,
    decode_challenge, decode_verdict, encode_challenge, encode_verdict, same_secret,
};

/// How long a caller may take to prove itself.
const PROOF_WITHIN: Duration = Duration::from_secs(2);
/// Callers that have not proven themselves; the oldest goes when there are more.
const MOST_PENDING: usize = 64;

/// This rank's identity in a handshake.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) rank: u32,
    pub(super) world: u32,
    generation: [u8; 32],
    key: [u8; 32],
}

impl Place {
    pub(super) fn new(rank: u32, world: u32, token: &[u8; 32], digest: &[u8; 32]) -> Place {
        let secret = [&token[..], &digest[..]].concat();
        Place {
            rank,
            world,
            generation: blake3::derive_key("muster data plane: generation", digest),
            key: blake3::derive_key("muster data plane: token", &secret),
        }
    }

    fn proof(&self, role: &[u8], hello: &[u8], nonce: &[u8; 32], card: &[u8]) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        for part in [role, hello, nonce, card] {
            hasher.update(part);
        }
        *hasher.finalize().as_bytes()
    }

    fn judge(&self, hello: &Hello) -> Option<Refusal> {
        if hello.version != VERSION {
            Some(Refusal::Version)
        } else if !same_secret(&hello.generation, &self.generation) {
            Some(Refusal::Token)
        } else if hello.world != self.world {
            Some(Refusal::World)
        } else if hello.to != self.rank || hello.from == self.rank || hello.from >= self.world {
            Some(Refusal::Rank)
        } else {
            None
        }
    }
}

fn nonce() -> io::Result<[u8; 32]> {
    let mut nonce = [0; 32];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut nonce)?;
    Ok(nonce)
}

/// A caller that has proven itself.
#[derive(Debug)]
pub(super) struct Admitted {
    pub(super) from: u32,
    pub(super) purpose: Purpose,
    pub(super) card: [u8; CARD_LEN],
    pub(super) stream: TcpStream,
}

struct Pending {
    stream: TcpStream,
    bytes: [u8; HELLO_LEN + PROOF_LEN],
    got: usize,
    /// Once the hello was accepted: it, and this side's nonce.
    asked: Option<(Hello, [u8; 32])>,
    until: Instant,
}

/// Where callers wait until they have proven themselves.
pub(super) struct Porch<'a> {
    listener: &'a TcpListener,
    place: &'a Place,
    pending: Vec<Pending>,
}

impl<'a> Porch<'a> {
    pub(super) fn new(
        listener: &'a TcpListener,
        place: &'a Place,
    ) -> Result<Porch<'a>, GroupError> {
        listener.set_nonblocking(true).map_err(GroupError::Socket)?;
        Ok(Porch {
            listener,
            place,
            pending: Vec::new(),
        })
    }

    /// Waits for callers, `also`, or `until`, then lets in whoever has proven itself and is
    /// `wanted`. A stranger gets no answer, and a rank with a wrong hello its refusal.
    pub(super) fn admit(
        &mut self,
        also: &[PollFd<'_>],
        until: Instant,
        mut wanted: impl FnMut(&Hello) -> bool,
        mut enter: impl FnMut(Admitted),
    ) -> Result<(), GroupError> {
        let soonest = self
            .pending
            .iter()
            .map(|p| p.until)
            .fold(until, Instant::min);
        let mut fds = vec![PollFd::new(self.listener.as_fd(), PollFlags::POLLIN)];
        let pending = self.pending.iter();
        fds.extend(pending.map(|p| PollFd::new(p.stream.as_fd(), PollFlags::POLLIN)));
        fds.extend(also.iter().cloned());
        wait_ready(&mut fds, soonest)?;
        drop(fds);
        self.accept()?;
        let now = Instant::now();
        for mut caller in std::mem::take(&mut self.pending) {
            match self.advance(&mut caller, &mut wanted) {
                Ok(None) if now < caller.until => self.pending.push(caller),
                Ok(Some(hello)) => {
                    let mut card = [0; CARD_LEN];
                    card.copy_from_slice(&caller.bytes[HELLO_LEN + 32..]);
                    enter(Admitted {
                        from: hello.from,
                        purpose: hello.purpose,
                        card,
                        stream: caller.stream,
                    });
                }
                Ok(None) | Err(_) => {}
            }
        }
        Ok(())
    }

    fn accept(&mut self) -> Result<(), GroupError> {
        for _ in 0..MOST_PENDING {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if prepare(&stream).is_err() {
                        continue;
                    }
                    if self.pending.len() == MOST_PENDING {
                        self.pending.remove(0);
                    }
                    self.pending.push(Pending {
                        stream,
                        bytes: [0; HELLO_LEN + PROOF_LEN],
                        got: 0,
                        asked: None,
                        until: Instant::now() + PROOF_WITHIN,
                    });
                }
                Err(error) if would_block(&error) => return Ok(()),
                // The other side gave up between the SYN and here.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => return Err(GroupError::Socket(error)),
            }
        }
        Ok(())
    }

    /// Reads what is there. The hello, once proven.
    fn advance(
        &self,
        caller: &mut Pending,
        wanted: &mut impl FnMut(&Hello) -> bool,
    ) -> io::Result<Option<Hello>> {
        loop {
            // Never more than the current message: what follows is not the handshake's.
            let end = match caller.asked {
                None => HELLO_LEN,
                Some(_) => HELLO_LEN + PROOF_LEN,
            };
            while caller.got < end {
                match caller.stream.read(&mut caller.bytes[caller.got..end]) {
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(n) => caller.got += n,
                    Err(error) if would_block(&error) => return Ok(None),
                    Err(error) => return Err(error),
                }
            }
            let (hello_bytes, proof) = caller.bytes.split_at(HELLO_LEN);
            let Some((hello, nonce)) = caller.asked else {
                caller.asked = Some(self.question(&mut caller.stream, hello_bytes, wanted)?);
                continue;
            };
            let (proof, card) = proof.split_at(32);
            let expected = self.place.proof(b"caller", hello_bytes, &nonce, card);
            let proven = proof
                .try_into()
                .is_ok_and(|proof| same_secret(proof, &expected));
            let refusal = if !proven {
                Some(Refusal::Token)
            } else if !wanted(&hello) {
                Some(Refusal::Rank)
            } else {
                None
            };
            // A few bytes into an empty send buffer: never partial, never blocking.
            caller.stream.write_all(&encode_verdict(refusal))?;
            return match refusal {
                None => Ok(Some(hello)),
                Some(_) => Err(io::ErrorKind::PermissionDenied.into()),
            };
        }
    }

    fn question(
        &self,
        stream: &mut TcpStream,
        bytes: &[u8],
        wanted: &mut impl FnMut(&Hello) -> bool,
    ) -> io::Result<(Hello, [u8; 32])> {
        let stranger = || io::Error::from(io::ErrorKind::InvalidData);
        let bytes: &[u8; HELLO_LEN] = bytes.try_into().map_err(|_| stranger())?;
        let hello = Hello::decode(bytes).ok_or_else(stranger)?;
        let unwanted = || (!wanted(&hello)).then_some(Refusal::Rank);
        if let Some(refusal) = self.place.judge(&hello).or_else(unwanted) {
            stream.write_all(&encode_challenge(Some(refusal), &[0; 32], &[0; 32]))?;
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let own = nonce()?;
        let proof = self.place.proof(b"listener", bytes, &own, &[]);
        stream.write_all(&encode_challenge(None, &own, &proof))?;
        Ok((hello, own))
    }
}

/// Reads exactly `to`, unless the time is over or the group is aborted.
pub(super) fn read_full(
    mut stream: &TcpStream,
    to: &mut [u8],
    aborter: &Aborter,
    until: Instant,
) -> io::Result<()> {
    let mut got = 0;
    while got < to.len() {
        match stream.read(&mut to[got..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => got += n,
            Err(error) if would_block(&error) => {
                wait_for(stream, PollFlags::POLLIN, aborter, until)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes all of `from`, unless the time is over or the group is aborted.
pub(super) fn write_full(
    mut stream: &TcpStream,
    from: &[u8],
    aborter: &Aborter,
    until: Instant,
) -> io::Result<()> {
    let mut sent = 0;
    while sent < from.len() {
        match stream.write(&from[sent..]) {
            Ok(n) => sent += n,
            Err(error) if would_block(&error) => {
                wait_for(stream, PollFlags::POLLOUT, aborter, until)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn wait_for(
    stream: &impl AsFd,
    flags: PollFlags,
    aborter: &Aborter,
    until: Instant,
) -> io::Result<()> {
    let mut fds = [
        PollFd::new(stream.as_fd(), flags),
        PollFd::new(aborter.bell(), PollFlags::POLLIN),
    ];
    let ready = wait_ready(&mut fds, until).map_err(io::Error::other)?;
    if aborter.is_aborted() {
        return Err(io::ErrorKind::ConnectionAborted.into());
    }
    if ready {
        Ok(())
    } else {
        Err(io::ErrorKind::TimedOut.into())
    }
}

/// Connects; returns as soon as the group is aborted.
fn connect(address: SocketAddr, aborter: &Aborter, until: Instant) -> io::Result<TcpStream> {
    let domain = Domain::for_address(address);
    let socket = Socket::new(domain, Type::STREAM.cloexec(), Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    match socket.connect(&address.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {
            wait_for(&socket, PollFlags::POLLOUT, aborter, until)?;
            if let Some(error) = socket.take_error()? {
                return Err(error);
            }
        }
        Err(error) => return Err(error),
    }
    let stream = TcpStream::from(socket);
    // Calling a free port of one's own host can connect to oneself (simultaneous open).
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    prepare(&stream)?;
    Ok(stream)
}

/// Calls a rank and proves itself; the connection, once it was let in. `card` is made when the local
/// address is known.
pub(super) fn call(
    place: &Place,
    to: u32,
    address: SocketAddr,
    purpose: Purpose,
    card: impl FnOnce(&TcpStream) -> io::Result<Card>,
    aborter: &Aborter,
    until: Instant,
) -> io::Result<Result<TcpStream, Refusal>> {
    let stream = connect(address, aborter, until)?;
    let hello = Hello {
        version: VERSION,
        from: place.rank,
        to,
        world: place.world,
        purpose,
        generation: place.generation,
        nonce: nonce()?,
    }
    .encode();
    write_full(&stream, &hello, aborter, until)?;
    let stranger = || io::Error::other("something else than a rank answers there");
    let mut challenge = [0; CHALLENGE_LEN];
    // A refusal is shorter news than a challenge, but as long.
    read_full(&stream, &mut challenge, aborter, until)?;
    let (theirs, proof) = match decode_challenge(&challenge).ok_or_else(stranger)? {
        Ok(question) => question,
        Err(refusal) => return Ok(Err(refusal)),
    };
    if !same_secret(&proof, &place.proof(b"listener", &hello, &theirs, &[])) {
        return Ok(Err(Refusal::Token));
    }
    let card = card(&stream)?.encode();
    let mut answer = [0; PROOF_LEN];
    answer[..32].copy_from_slice(&place.proof(b"caller", &hello, &theirs, &card));
    answer[32..].copy_from_slice(&card);
    write_full(&stream, &answer, aborter, until)?;
    let mut verdict = [0; VERDICT_LEN];
    read_full(&stream, &mut verdict, aborter, until)?;
    match decode_verdict(&verdict).ok_or_else(stranger)? {
        Ok(()) => Ok(Ok(stream)),
        Err(refusal) => Ok(Err(refusal)),
    }
}
