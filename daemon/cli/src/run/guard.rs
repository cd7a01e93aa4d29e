//! The guard port: a launcher's sign of life, apart from its agent's.
//!
//! Each caller is sent `MGRD`, a version byte, the launcher's id and the port at which it gives what it holds in memory
//! (0: it holds nothing), and the connection is closed; nothing is ever read. So others can tell "the agent is away"
//! from "the node is lost", and that the launcher at an address is the one they mean. A launcher that has ended its
//! workers because no agent is there gives no id (zeros): its node is lost to the job. A thread of its own answers, so
//! that a busy launcher is not taken for a lost one.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muster_protocol::LauncherId;

/// First bytes of the answer.
pub const MAGIC: [u8; 4] = *b"MGRD";
/// Version of the answer, after the magic.
pub const VERSION: u8 = 1;
/// Length in bytes of what says who answers; the port is behind it.
pub const ANSWER: usize = MAGIC.len() + 1 + 8;

/// The bytes that a guard sends.
pub fn answer(id: LauncherId, memory: Option<u16>) -> [u8; ANSWER + 2] {
    let mut out = [0; ANSWER + 2];
    out[..4].copy_from_slice(&MAGIC);
    out[4] = VERSION;
    out[5..ANSWER].copy_from_slice(&id.0);
    out[ANSWER..].copy_from_slice(&memory.unwrap_or(0).to_be_bytes());
    out
}

/// A listening guard. Dropping it closes the port.
#[derive(Debug)]
pub struct Guard {
    addr: SocketAddr,
    listener: Arc<TcpListener>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    done: AtomicBool,
    /// The launcher does not answer for its node.
    withdrawn: AtomicBool,
}

impl Guard {
    /// Listens on a free port of `ip` (unspecified: all addresses). `memory` is the port of the launcher's
    /// [`Server`](super::saves::replicas::Server).
    pub fn open(ip: IpAddr, id: LauncherId, memory: Option<u16>) -> io::Result<Guard> {
        let listener = Arc::new(TcpListener::bind((ip, 0))?);
        let addr = listener.local_addr()?;
        let shared = Arc::new(Shared::default());
        let thread = std::thread::Builder::new().name("guard".into()).spawn({
            let (listener, shared) = (listener.clone(), shared.clone());
            move || serve(&listener, &shared, id, memory)
        })?;
        Ok(Guard {
            addr,
            listener,
            shared,
            thread: Some(thread),
        })
    }

    pub fn port(&self) -> u16 {
        self.addr.port()
    }

    /// Whether the launcher answers for its node.
    pub fn vouch(&self, yes: bool) {
        self.shared.withdrawn.store(!yes, Ordering::Release);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.shared.done.store(true, Ordering::Release);
        // SAFETY: the descriptor is open, since the listener is ours. This wakes accept().
        unsafe { libc::shutdown(self.listener.as_raw_fd(), libc::SHUT_RDWR) };
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(listener: &TcpListener, shared: &Shared, id: LauncherId, memory: Option<u16>) {
    while !shared.done.load(Ordering::Acquire) {
        match listener.accept() {
            Ok((mut peer, _)) => {
                // Fifteen bytes fit the empty send buffer of a new connection: this never waits.
                let _ = peer.set_nonblocking(true);
                let id = match shared.withdrawn.load(Ordering::Acquire) {
                    true => LauncherId::ZERO,
                    false => id,
                };
                let _ = peer.write(&answer(id, memory));
            }
            // Too many open files, or a connection that was gone again: never a reason to stop, but
            // one to pause, for the former comes back at once.
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// Why the launcher at an address is not the one that was meant.
#[derive(Debug, thiserror::Error)]
pub enum GuardError {
    #[error("nothing answers at {addr}: {source}")]
    Unreachable { addr: SocketAddr, source: io::Error },
    #[error("{addr} took the connection but did not answer within {waited:?}")]
    Silent { addr: SocketAddr, waited: Duration },
    #[error("what answers at {addr} is not a launcher's guard port")]
    NotAGuard { addr: SocketAddr },
    #[error(
        "the launcher at {addr} has guard version {theirs}, this one has {VERSION}: run the same Muster on every node"
    )]
    Version { addr: SocketAddr, theirs: u8 },
    #[error(
        "the launcher at {addr} is {found}, expected {expected}: the address is used by another one now"
    )]
    Other {
        addr: SocketAddr,
        expected: LauncherId,
        found: LauncherId,
    },
}

/// Connects to a guard port from this network namespace and checks who answers. Returns the local
/// address that the connection used: the one by which this node reaches that launcher. Blocks for at
/// most `timeout`.
pub fn verify(
    addr: SocketAddr,
    expected: LauncherId,
    timeout: Duration,
) -> Result<IpAddr, GuardError> {
    let unreachable = |source| GuardError::Unreachable { addr, source };
    let deadline = Instant::now() + timeout;
    let mut peer = TcpStream::connect_timeout(&addr, timeout.max(Duration::from_millis(1)))
        .map_err(unreachable)?;
    let local = peer.local_addr().map_err(unreachable)?.ip();
    let mut bytes = [0; ANSWER];
    let mut have = 0;
    while have < ANSWER {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(GuardError::Silent {
                addr,
                waited: timeout,
            });
        }
        peer.set_read_timeout(Some(left)).map_err(unreachable)?;
        match peer.read(&mut bytes[have..]) {
            Ok(0) => return Err(GuardError::NotAGuard { addr }),
            Ok(n) => have += n,
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                ) =>
            {
                return Err(GuardError::Silent {
                    addr,
                    waited: timeout,
                });
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(source) => return Err(unreachable(source)),
        }
    }
    if bytes[..4] != MAGIC {
        return Err(GuardError::NotAGuard { addr });
    }
    if bytes[4] != VERSION {
        return Err(GuardError::Version {
            addr,
            theirs: bytes[4],
        });
    }
    let mut found = LauncherId::ZERO;
    found.0.copy_from_slice(&bytes[5..]);
    if found != expected {
        return Err(GuardError::Other {
            addr,
            expected,
            found,
        });
    }
    Ok(local)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const SECOND: Duration = Duration::from_secs(5);

    #[test]
    fn the_right_launcher_is_known_and_another_is_not() {
        let id = LauncherId([7; 8]);
        let guard = Guard::open(LOOPBACK, id, None).unwrap();
        let addr = SocketAddr::new(LOOPBACK, guard.port());
        assert_eq!(verify(addr, id, SECOND).unwrap(), LOOPBACK);
        assert!(matches!(
            verify(addr, LauncherId([8; 8]), SECOND),
            Err(GuardError::Other { found, .. }) if found == id
        ));
        guard.vouch(false);
        assert!(matches!(
            verify(addr, id, SECOND),
            Err(GuardError::Other { found, .. }) if found == LauncherId::ZERO
        ));
        guard.vouch(true);
        assert!(verify(addr, id, SECOND).is_ok());
        drop(guard);
        assert!(matches!(
            verify(addr, id, SECOND),
            Err(GuardError::Unreachable { .. })
        ));
    }

    #[test]
    fn it_survives_whatever_is_sent() {
        let id = LauncherId([1; 8]);
        let guard = Guard::open(LOOPBACK, id, None).unwrap();
        let addr = SocketAddr::new(LOOPBACK, guard.port());
        let mut kept = Vec::new();
        for round in 0..200u32 {
            let Ok(mut peer) = TcpStream::connect(addr) else {
                continue;
            };
            let _ = peer.write_all(&vec![round as u8; 1 + (round as usize * 997) % 70_000]);
            if round % 3 == 0 {
                kept.push(peer);
            }
        }
        assert!(verify(addr, id, SECOND).is_ok());
    }

    #[test]
    fn what_is_no_guard_is_told_apart() {
        let listener = TcpListener::bind((LOOPBACK, 0)).unwrap();
        let addr = listener.local_addr().unwrap();
        let silent = verify(addr, LauncherId::ZERO, Duration::from_millis(50));
        assert!(matches!(silent, Err(GuardError::Silent { .. })));
        let (_first, _) = listener.accept().unwrap();
        let web = std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().unwrap();
            peer.write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap();
        });
        let other = verify(addr, LauncherId::ZERO, SECOND);
        assert!(matches!(other, Err(GuardError::NotAGuard { .. })));
        web.join().unwrap();
    }
}
