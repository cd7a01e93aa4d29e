//! How the ranks of a generation find each other: rank 0 listens, the others knock.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};

use super::GroupConfig;
use super::error::{GroupError, LossCause, Refusal, would_block};
use super::link::{prepare, wait_ready};
use super::wire::{
    ANSWER_LEN, HELLO_LEN, Hello, VERSION, decode_answer, encode_answer, same_token,
};

/// How long a connection may take to say hello.
const HELLO_WITHIN: Duration = Duration::from_secs(2);
/// Connections that have not said hello; the oldest goes when there are more.
const MOST_PENDING: usize = 64;
const FIRST_RETRY: Duration = Duration::from_millis(5);
const LONGEST_RETRY: Duration = Duration::from_millis(200);

fn addresses(master: &(String, u16)) -> io::Result<Vec<SocketAddr>> {
    Ok((master.0.as_str(), master.1).to_socket_addrs()?.collect())
}

pub(super) fn name(master: &(String, u16)) -> String {
    format!("{}:{}", master.0, master.1)
}

/// Listens at the master address. An address that names this host but is on none of its cards (a
/// service name, a translated address) is answered on all cards. A port that is still taken (by the
/// launcher that reserved it, or an ending predecessor) is tried again.
pub(super) fn listen(master: &(String, u16), until: Instant) -> Result<TcpListener, GroupError> {
    let mut retry = FIRST_RETRY;
    loop {
        let source = match try_listen(master) {
            Ok(listener) => return Ok(listener),
            Err(error) => error,
        };
        if source.kind() != io::ErrorKind::AddrInUse || Instant::now() + retry >= until {
            return Err(GroupError::Bind {
                master: name(master),
                source,
            });
        }
        std::thread::sleep(retry);
        retry = (retry * 2).min(LONGEST_RETRY);
    }
}

fn try_listen(master: &(String, u16)) -> io::Result<TcpListener> {
    let addresses = addresses(master)?;
    match TcpListener::bind(addresses.as_slice()) {
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
            if addresses.iter().any(SocketAddr::is_ipv4) {
                TcpListener::bind((Ipv4Addr::UNSPECIFIED, master.1))
            } else {
                TcpListener::bind((Ipv6Addr::UNSPECIFIED, master.1))
            }
        }
        other => other,
    }
}

/// A connection that has not said who it is.
struct Pending {
    stream: TcpStream,
    hello: [u8; HELLO_LEN],
    got: usize,
    until: Instant,
}

/// Accepts ranks 1 to world exclusive; the result is in the order of ranks.
pub(super) fn accept_all(
    config: &GroupConfig,
    listener: &TcpListener,
    until: Instant,
) -> Result<Vec<TcpStream>, GroupError> {
    listener.set_nonblocking(true).map_err(GroupError::Socket)?;
    let mut pending: Vec<Pending> = Vec::new();
    let mut joined: BTreeMap<u32, TcpStream> = BTreeMap::new();
    while joined.len() + 1 < config.world as usize {
        let soonest = pending.iter().map(|p| p.until).fold(until, Instant::min);
        let mut fds = vec![PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        fds.extend(
            pending
                .iter()
                .map(|p| PollFd::new(p.stream.as_fd(), PollFlags::POLLIN)),
        );
        // Whoever joined is silent until it is answered: readable means that it went away.
        fds.extend(
            joined
                .values()
                .map(|stream| PollFd::new(stream.as_fd(), PollFlags::POLLIN)),
        );
        wait_ready(&mut fds, soonest)?;
        let gone: Vec<u32> = joined
            .keys()
            .zip(&fds[1 + pending.len()..])
            .filter(|(_, fd)| fd.revents().is_some_and(|got| !got.is_empty()))
            .map(|(rank, _)| *rank)
            .collect();
        for rank in gone {
            joined.remove(&rank);
        }
        accept_some(listener, &mut pending)?;
        let now = Instant::now();
        for mut knock in std::mem::take(&mut pending) {
            match read_hello(&mut knock) {
                Ok(false) if now < knock.until => pending.push(knock),
                Ok(true) => admit(config, knock, &mut joined),
                Ok(false) | Err(_) => {}
            }
        }
        if now >= until {
            return Err(GroupError::Incomplete {
                missing: (1..config.world)
                    .filter(|rank| !joined.contains_key(rank))
                    .collect(),
                waited: config.form_within,
            });
        }
    }
    for (rank, stream) in &mut joined {
        // Sixteen bytes into an empty send buffer: never partial, never blocking.
        stream
            .write_all(&encode_answer(None))
            .map_err(|error| GroupError::PeerLost {
                rank: *rank,
                cause: LossCause::Broken(error.kind()),
            })?;
    }
    Ok(joined.into_values().collect())
}

fn accept_some(listener: &TcpListener, pending: &mut Vec<Pending>) -> Result<(), GroupError> {
    for _ in 0..MOST_PENDING {
        match listener.accept() {
            Ok((stream, _)) => {
                if prepare(&stream).is_err() {
                    continue;
                }
                if pending.len() == MOST_PENDING {
                    pending.remove(0);
                }
                pending.push(Pending {
                    stream,
                    hello: [0; HELLO_LEN],
                    got: 0,
                    until: Instant::now() + HELLO_WITHIN,
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

fn read_hello(knock: &mut Pending) -> io::Result<bool> {
    while knock.got < HELLO_LEN {
        match knock.stream.read(&mut knock.hello[knock.got..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => knock.got += n,
            Err(error) if would_block(&error) => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

fn admit(config: &GroupConfig, knock: Pending, joined: &mut BTreeMap<u32, TcpStream>) {
    let Some(hello) = Hello::decode(&knock.hello) else {
        return;
    };
    let refusal = if hello.version != VERSION {
        Some(Refusal::Version)
    } else if !same_token(&hello.token, &config.token) {
        Some(Refusal::Token)
    } else if hello.world != config.world {
        Some(Refusal::World)
    } else if !(1..config.world).contains(&hello.rank) || joined.contains_key(&hello.rank) {
        Some(Refusal::Rank)
    } else {
        None
    };
    let mut stream = knock.stream;
    match refusal {
        None => {
            joined.insert(hello.rank, stream);
        }
        // Best effort: whoever is refused and gone does not need to know.
        Some(refusal) => drop(stream.write_all(&encode_answer(Some(refusal)))),
    }
}

/// Knocks at rank 0 until it answers that the group is complete.
pub(super) fn join(
    config: &GroupConfig,
    master: &(String, u16),
    until: Instant,
) -> Result<TcpStream, GroupError> {
    let hello = Hello {
        version: VERSION,
        rank: config.rank,
        world: config.world,
        token: config.token,
    }
    .encode();
    let mut retry = FIRST_RETRY;
    loop {
        let last = match knock(master, &hello, until) {
            Ok((stream, Ok(()))) => return Ok(stream),
            Ok((_, Err(refusal))) => return Err(GroupError::Refused(refusal)),
            Err(error) => error,
        };
        if Instant::now() + retry >= until {
            return Err(GroupError::MasterUnreachable {
                master: name(master),
                waited: config.form_within,
                last: last.to_string(),
            });
        }
        std::thread::sleep(retry);
        retry = (retry * 2).min(LONGEST_RETRY);
    }
}

fn left(until: Instant) -> Duration {
    until
        .saturating_duration_since(Instant::now())
        .max(Duration::from_millis(1))
}

fn knock(
    master: &(String, u16),
    hello: &[u8],
    until: Instant,
) -> io::Result<(TcpStream, Result<(), Refusal>)> {
    let mut last = io::Error::other("the name has no address");
    for address in addresses(master)? {
        match TcpStream::connect_timeout(&address, left(until).min(Duration::from_secs(1))) {
            Ok(stream) => return answer(stream, hello, until),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn answer(
    mut stream: TcpStream,
    hello: &[u8],
    until: Instant,
) -> io::Result<(TcpStream, Result<(), Refusal>)> {
    // Knocking at a free port of one's own host can connect to oneself (simultaneous open).
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    stream.set_read_timeout(Some(left(until)))?;
    stream.write_all(hello)?;
    let mut bytes = [0; ANSWER_LEN];
    stream.read_exact(&mut bytes)?;
    let answer = decode_answer(&bytes)
        .ok_or_else(|| io::Error::other("something else than a rank answers there"))?;
    prepare(&stream)?;
    Ok((stream, answer))
}
