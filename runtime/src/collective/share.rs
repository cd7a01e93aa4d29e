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
/// [`GroupError::SharedMemory`] only where the other side is there and says so: a region that is gone because its
/// maker is no longer in this generation is a [`GroupError::PeerLost`], which the next generation mends.
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
        // The descriptor stays open until all have opened it.
        for other in others {
            let mut answer = [0; 1];
            self.hear(*other, &mut answer)?;
            if answer != ACCEPTED {
                self.say(*other, &REFUSED)?;
                return Err(unshared(*other, "it cannot open this rank's region", None));
            }
        }
        Ok(region)
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

    /// What rank 1 of a host with two ranks says, if this is rank 0's end of their connection.
    fn second(act: impl FnOnce(TcpStream)) -> GroupError {
        let (one, first) = connected();
        let mesh = mesh(0, one);
        let until = Instant::now() + LONG;
        std::thread::scope(|scope| {
            let opens = scope.spawn(|| share(1, &[0, 1], &mesh, &Aborter::new().unwrap(), until));
            act(first);
            opens.join().unwrap().unwrap_err()
        })
    }

    fn offer(mut to: &TcpStream, fd: u32) {
        let mut offer = [0; OFFER_LEN];
        offer[..4].copy_from_slice(&std::process::id().to_le_bytes());
        offer[4..8].copy_from_slice(&fd.to_le_bytes());
        to.write_all(&offer).unwrap();
    }

    #[test]
    fn a_region_that_went_with_its_maker_is_a_lost_rank() {
        let error = second(|first| {
            offer(&first, u32::MAX);
            first.set_read_timeout(Some(LONG)).unwrap();
            let mut answer = [0];
            (&first).read_exact(&mut answer).unwrap();
            assert_eq!(answer, REFUSED);
        });
        let lost = GroupError::PeerLost {
            rank: 0,
            cause: LossCause::Closed,
        };
        assert_eq!(error.to_string(), lost.to_string());
    }

    #[test]
    fn a_region_that_a_rank_cannot_reach_is_said_on_both_sides() {
        let error = second(|first| {
            offer(&first, u32::MAX);
            first.set_nonblocking(true).unwrap();
            let talk = Talk {
                mesh: &mesh(1, first),
                aborter: &Aborter::new().unwrap(),
                until: Instant::now() + LONG,
            };
            // What this rank makes now is not what the other was told of first.
            let error = talk.make(0, &[1]).unwrap_err();
            assert!(
                matches!(error, GroupError::SharedMemory { rank: 1, .. }),
                "{error}"
            );
        });
        assert!(
            matches!(error, GroupError::SharedMemory { rank: 0, .. }),
            "{error}"
        );
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
