//! How the ranks of a generation find each other: rank 0 gathers who listens where, and everybody gets
//! the list; then ranks of one host connect among themselves, and the first rank of each host with
//! those of the others. The higher rank calls the lower.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};

use super::error::{GroupError, LossCause, Refusal};
use super::handshake::{Place, Porch, call, read_full, write_full};
use super::watch::Aborter;
use super::wire::{CARD_LEN, Card, Purpose};
use super::{GroupConfig, Seat, Sharing};

const FIRST_RETRY: Duration = Duration::from_millis(5);
const LONGEST_RETRY: Duration = Duration::from_millis(200);
/// How soon a rank stops waiting for the higher ones after a lower one turned out to be lost.
const CALLS_CHECKED: Duration = Duration::from_millis(20);
/// How long one attempt to reach rank 0 may take, before the next of its addresses is tried.
const ATTEMPT: Duration = Duration::from_secs(1);

fn addresses(master: &(String, u16)) -> io::Result<Vec<SocketAddr>> {
    Ok((master.0.as_str(), master.1).to_socket_addrs()?.collect())
}

fn name(master: &(String, u16)) -> String {
    format!("{}:{}", master.0, master.1)
}

/// Ranks with the same key can share memory: one kernel, one view of its processes, one user.
pub(super) fn host_key(rank: u32, sharing: Sharing) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id");
    let processes = std::fs::read_link("/proc/self/ns/pid");
    let user = std::fs::metadata("/proc/self").map(|me| me.uid());
    match (boot, processes, user, sharing) {
        (Ok(boot), Ok(processes), Ok(user), Sharing::Auto | Sharing::Among(_)) => {
            hasher.update(&boot);
            hasher.update(processes.as_os_str().as_encoded_bytes());
            hasher.update(&user.to_le_bytes());
            if let Sharing::Among(number) = sharing {
                hasher.update(&number.to_le_bytes());
            }
        }
        _ => {
            hasher.update(b"alone");
            hasher.update(&rank.to_le_bytes());
        }
    }
    *hasher.finalize().as_bytes()
}

/// Listens at the master address. An address that names this host but is on none of its cards (a
/// service name, a translated address) is answered on all cards. A port that is still taken (by the
/// launcher that reserved it, or an ending predecessor) is tried again.
fn listen(
    master: &(String, u16),
    aborter: &Aborter,
    until: Instant,
) -> Result<TcpListener, GroupError> {
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
        pause(&mut retry, aborter)?;
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

fn pause(retry: &mut Duration, aborter: &Aborter) -> Result<(), GroupError> {
    let mut fds = [PollFd::new(aborter.bell(), PollFlags::POLLIN)];
    super::watch::wait_ready(&mut fds, Instant::now() + *retry)?;
    *retry = (*retry * 2).min(LONGEST_RETRY);
    check(aborter)
}

fn check(aborter: &Aborter) -> Result<(), GroupError> {
    if aborter.is_aborted() {
        return Err(GroupError::Aborted { by: None });
    }
    Ok(())
}

/// Every rank's seat in the order of ranks, each with its host's key, and this rank's listener.
pub(super) type Gathered = (Vec<(Seat, [u8; 32])>, TcpListener);

/// Gathers the addresses of all ranks through rank 0.
pub(super) fn gather(
    config: &GroupConfig,
    place: &Place,
    master: &(String, u16),
    aborter: &Aborter,
    until: Instant,
) -> Result<Gathered, GroupError> {
    if config.rank == 0 {
        let listener = listen(master, aborter, until)?;
        let seats = serve(config, place, &listener, aborter, until)?;
        return Ok((seats, listener));
    }
    let mut retry = FIRST_RETRY;
    let mut port = None;
    loop {
        let last = match ask(config, place, master, &mut port, aborter, until) {
            Ok(Ok(gathered)) => return Ok(gathered),
            Ok(Err(refusal)) => return Err(GroupError::Refused { by: 0, refusal }),
            Err(error) => error,
        };
        check(aborter)?;
        if Instant::now() + retry >= until {
            return Err(GroupError::MasterUnreachable {
                master: name(master),
                waited: config.form_within,
                last: last.to_string(),
            });
        }
        pause(&mut retry, aborter)?;
    }
}

/// Rank 0: lets all others in, then tells each who listens where.
fn serve(
    config: &GroupConfig,
    place: &Place,
    listener: &TcpListener,
    aborter: &Aborter,
    until: Instant,
) -> Result<Vec<(Seat, [u8; 32])>, GroupError> {
    let mut porch = Porch::new(listener, place)?;
    let mut joined: BTreeMap<u32, (TcpStream, [u8; CARD_LEN])> = BTreeMap::new();
    while joined.len() + 1 < config.world as usize {
        check(aborter)?;
        if Instant::now() >= until {
            return Err(GroupError::Incomplete {
                missing: (1..config.world)
                    .filter(|rank| !joined.contains_key(rank))
                    .collect(),
                waited: config.form_within,
            });
        }
        let mut came = Vec::new();
        let mut also = vec![PollFd::new(aborter.bell(), PollFlags::POLLIN)];
        // Whoever joined is silent until it is answered: readable means that it went away.
        let streams = joined.values().map(|(stream, _)| stream.as_fd());
        also.extend(streams.map(|stream| PollFd::new(stream, PollFlags::POLLIN)));
        let free = |rank: u32, joined: &BTreeMap<u32, (TcpStream, _)>| {
            joined
                .get(&rank)
                .is_none_or(|(stream, _)| stream.peek(&mut [0]).is_ok_and(|n| n == 0))
        };
        porch.admit(
            &also,
            until,
            |hello| hello.purpose == Purpose::Rendezvous && free(hello.from, &joined),
            |admitted| came.push(admitted),
        )?;
        drop(also);
        joined.retain(|_, (stream, _)| {
            stream
                .peek(&mut [0])
                .is_err_and(|error| super::error::would_block(&error))
        });
        for admitted in came {
            joined.insert(admitted.from, (admitted.stream, admitted.card));
        }
    }
    let own = Card {
        address: None,
        host: host_key(0, config.sharing),
    };
    let mut list = own.encode().to_vec();
    for (_, card) in joined.values() {
        list.extend_from_slice(card);
    }
    for (rank, (stream, _)) in &joined {
        write_full(stream, &list, aborter, until).map_err(|error| {
            check(aborter).err().unwrap_or(GroupError::PeerLost {
                rank: *rank,
                cause: LossCause::Broken(error.kind()),
            })
        })?;
    }
    let here = listener.local_addr().map_err(GroupError::Socket)?;
    read_list(&list, here).ok_or(GroupError::Protocol {
        rank: 0,
        what: "a card that cannot be read",
    })
}

/// The seats in a list of cards; rank 0's address is where it was reached.
fn read_list(list: &[u8], zero: SocketAddr) -> Option<Vec<(Seat, [u8; 32])>> {
    let (cards, rest) = list.as_chunks::<CARD_LEN>();
    if !rest.is_empty() {
        return None;
    }
    (0..)
        .zip(cards)
        .map(|(rank, card)| {
            let card = Card::decode(card)?;
            let address = if rank == 0 { zero } else { card.address? };
            Some((Seat { rank, address }, card.host))
        })
        .collect()
}

/// Elsewhere: tells rank 0 this rank's card, and reads everybody's.
fn ask(
    config: &GroupConfig,
    place: &Place,
    master: &(String, u16),
    port: &mut Option<TcpListener>,
    aborter: &Aborter,
    until: Instant,
) -> io::Result<Result<Gathered, Refusal>> {
    let mut last = io::Error::other("the name has no address");
    for address in addresses(master)? {
        let card = |stream: &TcpStream| {
            // Where rank 0 is reached from is where the others can reach this rank.
            let here = stream.local_addr()?.ip();
            let listener = TcpListener::bind((here, 0))?;
            let address = Some(listener.local_addr()?);
            *port = Some(listener);
            Ok(Card {
                address,
                host: host_key(config.rank, config.sharing),
            })
        };
        let soon = until.min(Instant::now() + ATTEMPT);
        match call(place, 0, address, Purpose::Rendezvous, card, aborter, soon) {
            Ok(Ok(stream)) => {
                let mut list = vec![0; CARD_LEN * config.world as usize];
                read_full(&stream, &mut list, aborter, until)?;
                let unreadable = || io::Error::other("a list that cannot be read");
                let seats = read_list(&list, address).ok_or_else(unreadable)?;
                let listener = port.take().ok_or_else(unreadable)?;
                return Ok(Ok((seats, listener)));
            }
            Ok(Err(refusal)) => return Ok(Err(refusal)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The connections of this rank, by rank and purpose.
pub(super) type Mesh = BTreeMap<(u32, Purpose), TcpStream>;

/// Connects this rank with those in `wanted`: calls the lower ones, and lets the higher ones in.
pub(super) fn connect(
    place: &Place,
    wanted: &[(Seat, Purpose)],
    listener: &TcpListener,
    aborter: &Aborter,
    waited: Duration,
    until: Instant,
) -> Result<Mesh, GroupError> {
    let (lower, higher): (Vec<_>, Vec<_>) =
        wanted.iter().partition(|(seat, _)| seat.rank < place.rank);
    let failed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Both at once: a lower rank may itself be calling, and lets nobody in meanwhile.
        let calls = scope.spawn(|| {
            let called = call_all(place, &lower, aborter, waited, until);
            failed.store(called.is_err(), Ordering::Relaxed);
            called
        });
        let came = let_in(place, &higher, listener, aborter, waited, until, &failed);
        let called = calls
            .join()
            .unwrap_or_else(|_| Err(GroupError::Socket(io::Error::other("a caller panicked"))));
        let mut mesh = called?;
        mesh.extend(came?);
        Ok(mesh)
    })
}

fn call_all(
    place: &Place,
    lower: &[&(Seat, Purpose)],
    aborter: &Aborter,
    waited: Duration,
    until: Instant,
) -> Result<Mesh, GroupError> {
    let mut mesh = Mesh::new();
    for (seat, purpose) in lower {
        let rank = seat.rank;
        let card = |_: &TcpStream| {
            Ok(Card {
                address: None,
                host: [0; 32],
            })
        };
        let called = call(place, rank, seat.address, *purpose, card, aborter, until);
        match called {
            Ok(Ok(stream)) => {
                mesh.insert((rank, *purpose), stream);
            }
            Ok(Err(refusal)) => return Err(GroupError::Refused { by: rank, refusal }),
            Err(error) => {
                check(aborter)?;
                return Err(match error.kind() {
                    io::ErrorKind::TimedOut => GroupError::Incomplete {
                        missing: vec![rank],
                        waited,
                    },
                    // It listened before it was in the list: it is there no more.
                    kind => GroupError::PeerLost {
                        rank,
                        cause: LossCause::Broken(kind),
                    },
                });
            }
        }
    }
    Ok(mesh)
}

fn let_in(
    place: &Place,
    higher: &[&(Seat, Purpose)],
    listener: &TcpListener,
    aborter: &Aborter,
    waited: Duration,
    until: Instant,
    failed: &AtomicBool,
) -> Result<Mesh, GroupError> {
    let mut mesh = Mesh::new();
    let mut porch = Porch::new(listener, place)?;
    let missing = |mesh: &Mesh, rank, purpose| {
        let wanted =
            |(seat, for_what): &&(Seat, Purpose)| (seat.rank, *for_what) == (rank, purpose);
        higher.iter().any(wanted) && !mesh.contains_key(&(rank, purpose))
    };
    while mesh.len() < higher.len() && !failed.load(Ordering::Relaxed) {
        check(aborter)?;
        if Instant::now() >= until {
            let mut ranks: Vec<u32> = higher
                .iter()
                .filter(|(seat, purpose)| missing(&mesh, seat.rank, *purpose))
                .map(|(seat, _)| seat.rank)
                .collect();
            ranks.dedup();
            return Err(GroupError::Incomplete {
                missing: ranks,
                waited,
            });
        }
        let also = [PollFd::new(aborter.bell(), PollFlags::POLLIN)];
        let mut came = Vec::new();
        porch.admit(
            &also,
            until.min(Instant::now() + CALLS_CHECKED),
            |hello| missing(&mesh, hello.from, hello.purpose),
            |admitted| came.push(admitted),
        )?;
        for admitted in came {
            mesh.insert((admitted.from, admitted.purpose), admitted.stream);
        }
    }
    Ok(mesh)
}
