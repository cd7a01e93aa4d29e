//! Collectives between hosts, over TCP: every place is connected with every other.
//!
//! - Small: everybody sends everything to everybody, or, in a large group, gathers it in log2(n) rounds
//!   (Bruck et al. 1997), and each reduces by itself in the order of places. One round trip, or few.
//! - Large: each place owns a part. The others send it their contributions; it reduces them chunk by
//!   chunk in the order of places, and sends each finished chunk to all. As many bytes as a ring moves
//!   (2 (n-1)/n of the vector each way), in two steps instead of 2 (n-1), and with an order of summation
//!   that does not depend on the part.

use std::net::TcpStream;
use std::time::Duration;

use super::flow::{CHUNK, First, Flow, Own, Traffic};
use super::reduce::Fold;
use super::spin::Spin;
use super::transport::{Call, Scratch, Transport, Work, even_cuts, split_mut};
use super::watch::{Fault, Watch};
use super::wire::Head;

/// Bytes up to which an all-reduce or a broadcast is small.
const SMALL: usize = 16 << 10;
/// Places up to which small messages go to everybody directly.
const DIRECT: usize = 8;

/// Whether among so many places each waits for all others itself, and so can name the silent one.
pub(super) fn is_direct(places: u32) -> bool {
    places as usize <= DIRECT
}

/// This place's connections.
#[derive(Debug)]
pub(super) struct Net {
    /// In the order of places; `None` for this one.
    peers: Vec<Option<(u32, TcpStream)>>,
    me: usize,
    spin: Spin,
    scratch: Scratch,
}

impl Net {
    pub(super) fn new(peers: Vec<Option<(u32, TcpStream)>>, me: usize, spin: Duration) -> Net {
        Net {
            peers,
            me,
            spin: Spin::new(spin),
            scratch: Scratch::default(),
        }
    }

    fn places(&self) -> usize {
        self.peers.len()
    }
}

/// What a whole operation has in common.
struct At<'w> {
    head: Head,
    until: std::time::Instant,
    spin: &'w mut Spin,
    watch: &'w mut Watch,
}

impl At<'_> {
    fn run(&mut self, flows: Vec<Flow<'_>>, own: Own<'_>) -> Result<(), Fault> {
        let traffic = Traffic {
            flows,
            own,
            head: self.head.encode(),
            until: self.until,
            spin: &mut *self.spin,
        };
        traffic.run(self.watch)
    }
}

type Peers = [Option<(u32, TcpStream)>];

/// With every peer its own piece of `recv`; `send` says what it gets.
fn exchange<'a>(
    peers: &'a Peers,
    send: impl Fn(usize) -> &'a [u8],
    recv: Vec<&'a mut [u8]>,
) -> Vec<Flow<'a>> {
    let pairs = peers.iter().zip(recv).enumerate();
    pairs
        .filter_map(|(place, (peer, recv))| {
            let (rank, stream) = peer.as_ref()?;
            Some(Flow::exchange(*rank, stream, send(place), recv))
        })
        .collect()
}

/// `blocks` holds this place's block at its place; afterwards everybody's.
fn gather_small(
    at: &mut At<'_>,
    peers: &Peers,
    me: usize,
    len: usize,
    own: &[u8],
    blocks: &mut [u8],
) -> Result<(), Fault> {
    let n = peers.len();
    blocks[me * len..(me + 1) * len].copy_from_slice(own);
    if n <= DIRECT {
        let pieces = split_mut(blocks, &even_cuts(n * len, n, 1));
        return at.run(exchange(peers, |_| own, pieces), Own::none());
    }
    // Rotated, so that this place's block is the first.
    blocks.rotate_left(me * len);
    let mut have = 1;
    while have < n {
        at.head.part = have as u64;
        let count = have.min(n - have);
        let (from, to) = ((me + have) % n, (me + n - have) % n);
        let (held, rest) = blocks.split_at_mut(have * len);
        let (send, recv) = (&held[..count * len], &mut rest[..count * len]);
        let mut flows = Vec::with_capacity(2);
        for (place, peer) in peers.iter().enumerate() {
            let Some((rank, stream)) = peer else { continue };
            if place == to && place != from {
                let mut flow = Flow::exchange(*rank, stream, send, &mut []);
                flow.listens = false;
                flows.push(flow);
            }
        }
        if let Some(Some((rank, stream))) = peers.get(from) {
            let bytes = if from == to { send } else { &[] };
            let mut flow = Flow::exchange(*rank, stream, bytes, recv);
            flow.talks = from == to;
            flows.push(flow);
        }
        at.run(flows, Own::none())?;
        have += count;
    }
    blocks.rotate_right(me * len);
    Ok(())
}

/// Every place's contribution to this place's part, reduced; with `rest`, the reduced parts of the
/// others too.
fn reduce_parts<'a>(
    at: &mut At<'_>,
    peers: &'a Peers,
    me: usize,
    stages: &'a mut Scratch,
    (fold, input, cuts): (Fold, &'a [u8], &[usize]),
    (part, rest): (&'a mut [u8], Option<Vec<&'a mut [u8]>>),
) -> Result<(), Fault> {
    let n = peers.len();
    let stage = CHUNK.min(part.len());
    // Whole words, so that each stage is aligned.
    let stride = stage.next_multiple_of(64);
    let stages = stages.bytes(n * stride).chunks_mut(stride.max(1));
    let relay = rest.is_some();
    let recv = rest.unwrap_or_else(|| peers.iter().map(|_| &mut [][..]).collect());
    let mut flows = exchange(peers, |place| &input[cuts[place]..cuts[place + 1]], recv);
    for flow in &mut flows {
        flow.first = First::Contribution;
        flow.relay = relay;
    }
    for (flow, stage) in flows.iter_mut().zip(stages) {
        flow.stage = stage;
    }
    let own = Own {
        fold: Some((fold, me, &input[cuts[me]..cuts[me + 1]])),
        part,
        ready: 0,
    };
    at.run(flows, own)
}

/// The root gives each place its part, and all relay theirs to the others.
fn broadcast_parts(
    at: &mut At<'_>,
    peers: &Peers,
    me: usize,
    root: usize,
    (input, output): (&[u8], &mut [u8]),
) -> Result<(), Fault> {
    let n = peers.len();
    let cuts = even_cuts(output.len(), n, 1);
    let piece = |place: usize| &input[cuts[place]..cuts[place + 1]];
    let mut pieces = split_mut(output, &cuts);
    let part = std::mem::take(&mut pieces[me]);
    if root == me {
        part.copy_from_slice(piece(me));
        let ready = part.len();
        let none = peers.iter().map(|_| &mut [][..]).collect();
        let mut flows = exchange(peers, piece, none);
        for flow in &mut flows {
            flow.relay = true;
            flow.listens = false;
        }
        let own = Own {
            fold: None,
            part,
            ready,
        };
        at.run(flows, own)?;
        // Its own output is what it sent.
        for (place, to) in pieces.into_iter().enumerate() {
            if place != me {
                to.copy_from_slice(piece(place));
            }
        }
        return Ok(());
    }
    let pairs = peers.iter().zip(pieces).enumerate();
    let flows = pairs.filter_map(|(place, (peer, recv))| {
        let (rank, stream) = peer.as_ref()?;
        let mut flow = Flow::exchange(*rank, stream, &[], recv);
        if place == root {
            flow.talks = false;
            flow.first = First::Part;
        } else {
            flow.relay = true;
        }
        Some(flow)
    });
    let flows = flows.collect();
    let own = Own {
        fold: None,
        part,
        ready: 0,
    };
    at.run(flows, own)
}

impl Transport for Net {
    fn run(&mut self, call: Call<'_>, watch: &mut Watch) -> Result<(), Fault> {
        let (n, me) = (self.places(), self.me);
        let peers = &self.peers;
        let at = &mut At {
            head: call.head,
            until: call.until,
            spin: &mut self.spin,
            watch,
        };
        match call.work {
            Work::AllReduce {
                fold,
                input,
                output,
            } if input.len() <= SMALL => {
                // Each block aligned.
                let len = input.len();
                let blocks = self.scratch.bytes(n * len);
                gather_small(at, peers, me, len, input, blocks)?;
                let parts: Vec<&[u8]> = (0..n).map(|i| &blocks[i * len..(i + 1) * len]).collect();
                if fold.run(output, &parts) {
                    Ok(())
                } else {
                    Err(Fault::misfit())
                }
            }
            Work::AllReduce {
                fold,
                input,
                output,
            } => {
                let size = fold.dtype.size();
                let cuts = even_cuts(input.len() / size, n, size);
                let mut pieces = split_mut(output, &cuts);
                let part = std::mem::take(&mut pieces[me]);
                let what = (fold, input, &cuts[..]);
                reduce_parts(at, peers, me, &mut self.scratch, what, (part, Some(pieces)))
            }
            Work::ReduceScatter {
                fold,
                input,
                output,
                cuts,
            } => {
                let what = (fold, input, cuts);
                reduce_parts(at, peers, me, &mut self.scratch, what, (output, None))
            }
            Work::AllGather {
                input,
                output,
                cuts,
            } => {
                output[cuts[me]..cuts[me + 1]].copy_from_slice(input);
                let pieces = split_mut(output, cuts);
                at.run(exchange(peers, |_| input, pieces), Own::none())
            }
            Work::Broadcast {
                root,
                input,
                output,
            } => {
                // With two places there is nobody to relay to.
                if output.len() > SMALL && n > 2 {
                    return broadcast_parts(at, peers, me, root, (input, output));
                }
                let Some((rank, stream)) = peers.get(root).and_then(Option::as_ref) else {
                    output.copy_from_slice(input);
                    let none = peers.iter().map(|_| &mut [][..]).collect();
                    let mut flows = exchange(peers, |_| input, none);
                    for flow in &mut flows {
                        flow.listens = false;
                    }
                    return at.run(flows, Own::none());
                };
                let mut flow = Flow::exchange(*rank, stream, &[], output);
                flow.talks = false;
                at.run(vec![flow], Own::none())
            }
            Work::AllToAll {
                input,
                output,
                to,
                from,
                most: _,
            } => {
                output[from[me]..from[me + 1]].copy_from_slice(&input[to[me]..to[me + 1]]);
                let pieces = split_mut(output, from);
                let send = |place: usize| &input[to[place]..to[place + 1]];
                at.run(exchange(peers, send, pieces), Own::none())
            }
            Work::Barrier => gather_small(at, peers, me, 0, &[], &mut []),
        }
    }
}
