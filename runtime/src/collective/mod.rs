//! Collectives between the ranks of one generation, over TCP through rank 0.
//!
//! Rank 0 listens at the master address; every operation sends each rank's contribution there,
//! combined **in the order of ranks**, and the one result back: all ranks get the same bits. The
//! traffic is linear in the world size, which suits small payloads and few ranks.
//!
//! A peer that dies is [`GroupError::PeerLost`] on every rank, at once when its connection closes and
//! after [`GroupConfig::op_within`] when it is only silent. An operation that fails leaves the
//! caller's buffers as they were, and the group is over: each later call fails the same way.

mod error;
mod formation;
mod link;
mod wire;

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};

pub use error::{GroupError, LossCause, Refusal};
pub use wire::MAX_PAYLOAD;

use crate::env::WorkerEnv;
use link::{Fault, Incoming, send, wait_ready};
use wire::{Header, Kind};

/// Ranks that one group has at most.
pub const MAX_WORLD: u32 = 1024;

/// How much longer the others wait than rank 0 does, so that rank 0 can name the silent rank.
const PATIENCE: Duration = Duration::from_secs(1);

/// A place in a group to be formed.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    pub rank: u32,
    pub world: u32,
    /// Where rank 0 listens; not needed in a world of one.
    pub master: Option<(String, u16)>,
    /// The generation's digest: ranks with another one are refused.
    pub token: [u8; 32],
    /// How long to wait for all ranks.
    pub form_within: Duration,
    /// How long one operation may take; longer than the longest step of the slowest rank.
    pub op_within: Duration,
}

impl GroupConfig {
    /// The place that the launcher gave, with a minute to form and a minute for each operation.
    pub fn from_env(env: &WorkerEnv) -> GroupConfig {
        GroupConfig {
            rank: env.rank,
            world: env.world,
            master: env.master.clone(),
            token: env.digest.0,
            form_within: Duration::from_secs(60),
            op_within: Duration::from_secs(60),
        }
    }
}

/// All ranks of one generation, connected.
#[derive(Debug)]
pub struct Group {
    rank: u32,
    world: u32,
    op_within: Duration,
    seq: u32,
    /// On rank 0: ranks 1 to world exclusive, in order. Elsewhere: rank 0.
    links: Vec<TcpStream>,
    over: Option<Over>,
}

/// Why a group is over.
#[derive(Clone, Copy, Debug)]
enum Over {
    Lost(u32, LossCause),
    Protocol(u32, &'static str),
}

impl From<Over> for GroupError {
    fn from(over: Over) -> GroupError {
        match over {
            Over::Lost(rank, cause) => GroupError::PeerLost { rank, cause },
            Over::Protocol(rank, what) => GroupError::Protocol { rank, what },
        }
    }
}

impl Group {
    /// Forms the group: returns when every rank is connected.
    ///
    /// # Errors
    /// Not all ranks came within [`GroupConfig::form_within`]; rank 0 refused this one; the address
    /// cannot be used.
    pub fn form(config: &GroupConfig) -> Result<Group, GroupError> {
        if config.rank >= config.world || config.world > MAX_WORLD {
            return Err(GroupError::BadPlace {
                rank: config.rank,
                world: config.world,
                most: MAX_WORLD,
            });
        }
        let until = Instant::now() + config.form_within;
        let links = match &config.master {
            _ if config.world == 1 => Vec::new(),
            None => {
                return Err(GroupError::NoMaster {
                    world: config.world,
                });
            }
            Some(master) if config.rank == 0 => {
                let listener = formation::listen(master, until)?;
                formation::accept_all(config, &listener, until)?
            }
            Some(master) => vec![formation::join(config, master, until)?],
        };
        Ok(Group {
            rank: config.rank,
            world: config.world,
            op_within: config.op_within,
            seq: 0,
            links,
            over: None,
        })
    }

    pub fn rank(&self) -> u32 {
        self.rank
    }

    pub fn world(&self) -> u32 {
        self.world
    }

    /// Replaces `values` on every rank by the sum over all ranks, added in the order of ranks.
    ///
    /// # Errors
    /// A peer is lost or out of step; `values` is unchanged.
    pub fn all_reduce_sum_f32(&mut self, values: &mut [f32]) -> Result<(), GroupError> {
        self.all_reduce(
            Kind::SumF32,
            values,
            f32::to_le_bytes,
            f32::from_le_bytes,
            |a, b| a + b,
        )
    }

    /// As [`all_reduce_sum_f32`](Self::all_reduce_sum_f32), in double precision.
    ///
    /// # Errors
    /// A peer is lost or out of step; `values` is unchanged.
    pub fn all_reduce_sum_f64(&mut self, values: &mut [f64]) -> Result<(), GroupError> {
        self.all_reduce(
            Kind::SumF64,
            values,
            f64::to_le_bytes,
            f64::from_le_bytes,
            |a, b| a + b,
        )
    }

    fn all_reduce<T: Copy, const N: usize>(
        &mut self,
        kind: Kind,
        values: &mut [T],
        to: impl Fn(T) -> [u8; N],
        from: impl Fn([u8; N]) -> T,
        add: impl Fn(T, T) -> T,
    ) -> Result<(), GroupError> {
        let own: Vec<u8> = values.iter().flat_map(|value| to(*value)).collect();
        let len = own.len();
        let sum = self.exchange(
            kind,
            &own,
            |_| Size::Exactly(len),
            Size::Exactly(len),
            |parts| {
                let mut sum = own.clone();
                for part in parts.iter().skip(1) {
                    for (total, value) in sum
                        .as_chunks_mut::<N>()
                        .0
                        .iter_mut()
                        .zip(part.as_chunks().0)
                    {
                        *total = to(add(from(*total), from(*value)));
                    }
                }
                sum
            },
        )?;
        for (value, bytes) in values.iter_mut().zip(sum.as_chunks().0) {
            *value = from(*bytes);
        }
        Ok(())
    }

    /// What `root` gives, on every rank. Only `root`'s `payload` matters.
    ///
    /// # Errors
    /// A peer is lost or out of step, or the payload is longer than [`MAX_PAYLOAD`].
    pub fn broadcast(&mut self, root: u32, payload: &[u8]) -> Result<Vec<u8>, GroupError> {
        if root >= self.world {
            return Err(GroupError::BadPlace {
                rank: root,
                world: self.world,
                most: MAX_WORLD,
            });
        }
        let own = if root == self.rank { payload } else { &[] };
        let part = |rank| Size::AtMost(if rank == root { MAX_PAYLOAD } else { 0 });
        self.exchange(
            Kind::Broadcast,
            own,
            part,
            Size::AtMost(MAX_PAYLOAD),
            |parts| {
                parts
                    .get(root as usize)
                    .map_or_else(Vec::new, |part| part.to_vec())
            },
        )
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// A peer is lost or out of step.
    pub fn barrier(&mut self) -> Result<(), GroupError> {
        self.exchange(
            Kind::Barrier,
            &[],
            |_| Size::Exactly(0),
            Size::Exactly(0),
            |_| Vec::new(),
        )?;
        Ok(())
    }

    /// Every rank's bytes, in the order of ranks, on every rank. All together carry at most
    /// [`MAX_PAYLOAD`], each with four bytes of its own.
    ///
    /// # Errors
    /// A peer is lost or out of step, or the bytes are too many.
    pub fn all_gather(&mut self, payload: &[u8]) -> Result<Vec<Vec<u8>>, GroupError> {
        let each = MAX_PAYLOAD / self.world as usize - size_of::<u32>();
        if payload.len() > each {
            return Err(GroupError::TooLarge {
                bytes: payload.len(),
                limit: each,
            });
        }
        let all = self.exchange(
            Kind::Gather,
            payload,
            |_| Size::AtMost(each),
            Size::AtMost(MAX_PAYLOAD),
            |parts| {
                let mut all = Vec::with_capacity(parts.iter().map(|part| part.len() + 4).sum());
                for part in parts {
                    all.extend_from_slice(&(part.len() as u32).to_le_bytes());
                    all.extend_from_slice(part);
                }
                all
            },
        )?;
        split(&all, self.world).ok_or_else(|| {
            let over = Over::Protocol(0, "a gathered list that does not add up");
            self.over = Some(over);
            over.into()
        })
    }

    /// One operation: every rank's bytes to rank 0, `combine`d there in the order of ranks, and
    /// the result to everybody.
    fn exchange(
        &mut self,
        kind: Kind,
        own: &[u8],
        part: impl Fn(u32) -> Size,
        result: Size,
        combine: impl FnOnce(&[&[u8]]) -> Vec<u8>,
    ) -> Result<Vec<u8>, GroupError> {
        if let Some(over) = self.over {
            return Err(over.into());
        }
        if own.len() > MAX_PAYLOAD {
            return Err(GroupError::TooLarge {
                bytes: own.len(),
                limit: MAX_PAYLOAD,
            });
        }
        let seq = self.seq;
        self.seq = self.seq.wrapping_add(1);
        if self.rank == 0 {
            let until = Instant::now() + self.op_within;
            let parts = self.collect(kind, seq, part, until)?;
            let all: Vec<&[u8]> = std::iter::once(own)
                .chain(parts.iter().map(Vec::as_slice))
                .collect();
            let combined = combine(&all);
            self.distribute(kind, seq, &combined, until)?;
            Ok(combined)
        } else {
            let allowed = self.op_within + PATIENCE;
            let until = Instant::now() + allowed;
            let mut reply = result.expect(kind, seq);
            match self.ask(kind, seq, own, &mut reply, until, allowed)? {
                Ok(()) => Ok(reply.into_body()),
                Err(fault) => Err(self.end(0, fault)),
            }
        }
    }

    /// Rank 0: a frame from everybody, whoever comes first.
    fn collect(
        &mut self,
        kind: Kind,
        seq: u32,
        size: impl Fn(u32) -> Size,
        until: Instant,
    ) -> Result<Vec<Vec<u8>>, GroupError> {
        let mut frames: Vec<Incoming> = (1..self.world)
            .map(|rank| size(rank).expect(kind, seq))
            .collect();
        loop {
            let mut waiting = Vec::new();
            for (i, (link, frame)) in self.links.iter().zip(&mut frames).enumerate() {
                match frame.advance(link) {
                    Ok(true) => {}
                    Ok(false) => waiting.push(i),
                    Err(fault) => return Err(self.end(i, fault)),
                }
            }
            let Some(first) = waiting.first().copied() else {
                return Ok(frames.into_iter().map(Incoming::into_body).collect());
            };
            // Also those that are done, and silent until they get the result: they may die while
            // the others still compute.
            let mut fds: Vec<PollFd<'_>> = self
                .links
                .iter()
                .map(|link| PollFd::new(link.as_fd(), PollFlags::POLLIN))
                .collect();
            if !wait_ready(&mut fds, until)? {
                return Err(self.end(first, Fault::silent(self.op_within)));
            }
            let spoke = fds.iter().zip(&frames).position(|(fd, frame)| {
                frame.is_complete() && fd.revents().is_some_and(|got| !got.is_empty())
            });
            drop(fds);
            if let Some(i) = spoke {
                return Err(self.end(i, untimely(&self.links[i])));
            }
        }
    }

    /// Rank 0: the result to everybody, in turn. A frame is sent whole or its link is the one that
    /// failed, so an abort to the others never lands inside a frame.
    fn distribute(
        &mut self,
        kind: Kind,
        seq: u32,
        payload: &[u8],
        until: Instant,
    ) -> Result<(), GroupError> {
        let header = Header {
            kind,
            seq,
            len: payload.len() as u32,
            arg: 0,
        };
        for i in 0..self.links.len() {
            let sent = send(
                &self.links[i],
                &header,
                payload,
                None,
                until,
                self.op_within,
            )?;
            if let Err(fault) = sent {
                return Err(self.end(i, fault));
            }
        }
        Ok(())
    }

    /// Elsewhere: this rank's frame to rank 0, and the reply.
    fn ask(
        &self,
        kind: Kind,
        seq: u32,
        own: &[u8],
        reply: &mut Incoming,
        until: Instant,
        allowed: Duration,
    ) -> Result<Result<(), Fault>, GroupError> {
        let header = Header {
            kind,
            seq,
            len: own.len() as u32,
            arg: 0,
        };
        for link in &self.links {
            if let Err(fault) = send(link, &header, own, Some(reply), until, allowed)? {
                return Ok(Err(fault));
            }
            loop {
                match reply.advance(link) {
                    Ok(true) => break,
                    Ok(false) => {}
                    Err(fault) => return Ok(Err(fault)),
                }
                let mut fds = [PollFd::new(link.as_fd(), PollFlags::POLLIN)];
                if !wait_ready(&mut fds, until)? {
                    return Ok(Err(Fault::silent(allowed)));
                }
            }
        }
        Ok(Ok(()))
    }

    /// The group is over because of the peer behind link `i`: remembers it and, on rank 0, tells
    /// the others.
    fn end(&mut self, i: usize, fault: Fault) -> GroupError {
        let peer = if self.rank == 0 { i as u32 + 1 } else { 0 };
        let over = match fault {
            Fault::Lost(cause) => Over::Lost(peer, cause),
            Fault::Protocol(what) => Over::Protocol(peer, what),
            Fault::Aborted(rank) if self.rank != 0 => Over::Lost(rank, LossCause::Reported),
            Fault::Aborted(_) => Over::Protocol(peer, "an abort, which only rank 0 may send"),
        };
        self.over = Some(over);
        if self.rank == 0 {
            let abort = Header {
                kind: Kind::Abort,
                seq: self.seq,
                len: 0,
                arg: peer,
            };
            for (j, link) in self.links.iter().enumerate().filter(|(j, _)| *j != i) {
                // Best effort, without waiting: whoever does not get it sees the connection close.
                let now = Instant::now();
                let told = send(link, &abort, &[], None, now, Duration::ZERO);
                debug_assert!(told.is_ok(), "no wait, so no failing poll on link {j}");
            }
        }
        over.into()
    }
}

/// What a peer did that had nothing to say: usually, end.
fn untimely(link: &TcpStream) -> Fault {
    match link.peek(&mut [0]) {
        Ok(0) => Fault::Lost(LossCause::Closed),
        Ok(_) => Fault::Protocol("a frame before the result of the last one"),
        Err(error) => Fault::Lost(link::broken(&error)),
    }
}

/// How long a payload may be.
#[derive(Clone, Copy)]
enum Size {
    Exactly(usize),
    AtMost(usize),
}

impl Size {
    fn expect(self, kind: Kind, seq: u32) -> Incoming {
        match self {
            Size::Exactly(len) => Incoming::new(kind, seq, len, true),
            Size::AtMost(len) => Incoming::new(kind, seq, len, false),
        }
    }
}

/// The inverse of the list that rank 0 gathers; `None` if it is not exactly one entry per rank.
fn split(mut all: &[u8], world: u32) -> Option<Vec<Vec<u8>>> {
    let mut parts = Vec::with_capacity(world as usize);
    for _ in 0..world {
        let (len, rest) = all.split_first_chunk()?;
        let len = usize::try_from(u32::from_le_bytes(*len)).ok()?;
        parts.push(rest.get(..len)?.to_vec());
        all = &rest[len..];
    }
    all.is_empty().then_some(parts)
}

#[cfg(test)]
mod tests;
