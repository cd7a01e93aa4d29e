//! How the ranks of a host come to the memory that they share: the first one makes the region and says where it
//! is, the others open it. It has no name in the file system.

use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use super::error::{GroupError, LossCause};
use super::formation::Mesh;
use super::handshake::{read_full, write_full};
use super::shm::Region;
use super::watch::Aborter;
use super::wire::Purpose;

/// Where a region is: a process, a descriptor there, and a nonce.
const OFFER_LEN: usize = 40;
const ACCEPTED: [u8; 1] = [1];
/// Said by whoever cannot open the region, and said back by its maker if that is still there.
const REFUSED: [u8; 1] = [2];

/// Connections to the other ranks of the host, used by one rank until a time.
struct Talk<'a> {
    mesh: &'a Mesh,
    aborter: &'a Aborter,
    until: Instant,
}

/// The region that these ranks of one host share, of which this is one; they are in the order of their places.
///
/// # Errors
/// [`GroupError::SharedMemory`] at a rank that cannot make a region, or cannot open one whose maker is there and says
/// so. A region that is gone because its maker is no longer in this generation is a [`GroupError::PeerLost`], which the
/// next one mends; and so is, to all others, a rank that cannot open it.
pub(super) fn share(
    rank: u32,
    ranks: &[u32],
    mesh: &Mesh,
    aborter: &Aborter,
    until: Instant,
) -> Result<Arc<Region>, GroupError> {
    let talk = Talk {
        mesh,
        aborter,
        until,
    };
    let region = match ranks.split_first() {
        Some((first, _)) if *first != rank => talk.open(*first, ranks.len()),
        Some((_, others)) => talk.make(rank, others),
        None => Err(GroupError::Internal {
            what: "a host has no ranks",
        }),
    };
    region.map(Arc::new)
}

fn unshared(rank: u32, what: &str, source: Option<io::Error>) -> GroupError {
    GroupError::SharedMemory {
        rank,
        what: what.to_owned(),
        source,
    }
}

impl Talk<'_> {
    fn open(&self, first: u32, places: usize) -> Result<Region, GroupError> {
        let mut offer = [0; OFFER_LEN];
        self.hear(first, &mut offer)?;
        let (numbers, nonce) = offer.split_at(8);
        let number = |at: usize| {
            let bytes = numbers
                .get(at..at + 4)
                .and_then(|four| four.try_into().ok());
            bytes.map_or(0, u32::from_le_bytes)
        };
        let nonce = nonce.try_into().unwrap_or([0; 32]);
        match Region::open(number(0), number(4), places, &nonce) {
            Ok(region) => {
                self.say(first, &ACCEPTED)?;
                Ok(region)
            }
            Err(error) => {
                // Perhaps because its maker has left or died since: only its answer shows that it has not.
                self.say(first, &REFUSED)?;
                self.hear(first, &mut [0])?;
                Err(unshared(first, "cannot open its region", Some(error)))
            }
        }
    }

    fn make(&self, rank: u32, others: &[u32]) -> Result<Region, GroupError> {
        let mut nonce = [0; 32];
        let random = std::fs::File::open("/dev/urandom");
        random
            .and_then(|mut random| io::Read::read_exact(&mut random, &mut nonce))
            .map_err(GroupError::Socket)?;
        let (file, region) = Region::create(others.len() + 1, &nonce)
            .map_err(|error| unshared(rank, "cannot make a region", Some(error)))?;
        let mut offer = [0; OFFER_LEN];
        offer[..4].copy_from_slice(&std::process::id().to_le_bytes());
        offer[4..8].copy_from_slice(&file.as_raw_fd().unsigned_abs().to_le_bytes());
        offer[8..].copy_from_slice(&nonce);
        for other in others {
            self.say(*other, &offer)?;
        }
        // The descriptor stays open until all have opened it, or know that it was there when they could not.
        let mut without = None;
        for other in others {
            let mut answer = [0; 1];
            self.hear(*other, &mut answer)?;
            if answer != ACCEPTED {
                self.say(*other, &REFUSED)?;
                without.get_or_insert(*other);
            }
        }
        match without {
            // It ends, and says why.
            Some(rank) => Err(GroupError::PeerLost {
                rank,
                cause: LossCause::Closed,
            }),
            None => Ok(region),
        }
    }

    fn hear(&self, from: u32, to: &mut [u8]) -> Result<(), GroupError> {
        read_full(self.stream(from)?, to, self.aborter, self.until)
            .map_err(|error| self.lost(from, &error))
    }

    fn say(&self, to: u32, bytes: &[u8]) -> Result<(), GroupError> {
        write_full(self.stream(to)?, bytes, self.aborter, self.until)
            .map_err(|error| self.lost(to, &error))
    }

    fn stream(&self, rank: u32) -> Result<&TcpStream, GroupError> {
        let stream = self.mesh.get(&(rank, Purpose::Control));
        stream.ok_or_else(|| unshared(rank, "not connected", None))
    }

    fn lost(&self, rank: u32, error: &io::Error) -> GroupError {
        if self.aborter.is_aborted() {
            return GroupError::Aborted { by: None };
        }
        let cause = match error.kind() {
            io::ErrorKind::UnexpectedEof => LossCause::Closed,
            kind => LossCause::Broken(kind),
        };
        GroupError::PeerLost { rank, cause }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::time::Duration;

    use super::*;
    use crate::testing::LONG;

    fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        one.set_nonblocking(true).unwrap();
        (one, listener.accept().unwrap().0)
    }

    fn mesh(rank: u32, stream: TcpStream) -> Mesh {
        Mesh::from([((rank, Purpose::Control), stream)])
    }

    /// This rank's way to a region that it shares with these.
    fn shares(rank: u32, ranks: &[u32], mesh: &Mesh) -> Result<Arc<Region>, GroupError> {
        let until = Instant::now() + LONG;
        share(rank, ranks, mesh, &Aborter::new().unwrap(), until)
    }

    fn assert_lost(error: &GroupError, rank: u32) {
        let cause = LossCause::Closed;
        let lost = GroupError::PeerLost { rank, cause };
        assert_eq!(error.to_string(), lost.to_string());
    }

    #[test]
    fn a_region_that_went_with_its_maker_is_a_lost_rank() {
        let (one, mut first) = connected();
        let mesh = mesh(0, one);
        std::thread::scope(|scope| {
            let opens = scope.spawn(|| shares(1, &[0, 1], &mesh));
            let mut offer = [0; OFFER_LEN];
            offer[..4].copy_from_slice(&std::process::id().to_le_bytes());
            offer[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
            first.write_all(&offer).unwrap();
            first.set_read_timeout(Some(LONG)).unwrap();
            let mut answer = [0];
            first.read_exact(&mut answer).unwrap();
            assert_eq!(answer, REFUSED);
            drop(first);
            assert_lost(&opens.join().unwrap().unwrap_err(), 0);
        });
    }

    #[test]
    fn a_region_that_a_rank_cannot_open_ends_that_rank_alone() {
        let (one, first) = connected();
        first.set_nonblocking(true).unwrap();
        let (mine, theirs) = (mesh(1, first), mesh(0, one));
        std::thread::scope(|scope| {
            // It expects a region for three.
            let opens = scope.spawn(|| shares(1, &[0, 1, 2], &theirs));
            assert_lost(&shares(0, &[0, 1], &mine).unwrap_err(), 1);
            let error = opens.join().unwrap().unwrap_err();
            let refused = matches!(error, GroupError::SharedMemory { rank: 0, .. });
            assert!(refused, "{error}");
        });
    }

    #[test]
    fn nobody_waits_for_a_maker_longer_than_it_may() {
        let (one, _first) = connected();
        let until = Instant::now() + Duration::from_millis(20);
        let error = share(1, &[0, 1], &mesh(0, one), &Aborter::new().unwrap(), until).unwrap_err();
        assert!(
            matches!(error, GroupError::PeerLost { rank: 0, .. }),
            "{error}"
        );
    }
}
