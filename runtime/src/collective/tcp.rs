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

use super::flow::{First, Incoming, Own, Traffic, chunk};
use super::outgoing::Outgoing;
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

/// Common parts of a whole operation.
struct At<'w> {
    head: Head,
    until: std::time::Instant,
    spin: &'w mut Spin,
    watch: &'w mut Watch,
}

impl At<'_> {
    fn run<'b>(&'b mut self, flows: Flows<'b>, own: Own<'b>) -> Result<(), Fault> {
        let (outgoing, incoming) = flows;
        let traffic = Traffic {
            outgoing,
            incoming,
            own,
            head: self.head.encode(),
            until: self.until,
            spin: &mut *self.spin,
        };
        traffic.run(self.watch)
    }
}

type Peers = [Option<(u32, TcpStream)>];

/// To whom, and from whom.
type Flows<'a> = (Vec<Outgoing<'a>>, Vec<Incoming<'a>>);

/// To every peer what `send` says.
fn to_all<'a>(peers: &'a Peers, send: impl Fn(usize) -> &'a [u8]) -> Vec<Outgoing<'a>> {
    let peers = peers.iter().enumerate();
    peers
        .filter_map(|(place, peer)| {
            let (rank, stream) = peer.as_ref()?;
            Some(Outgoing::new(*rank, stream, send(place)))
        })
        .collect()
}

/// From every peer its own piece of `recv`.
fn from_all<'a>(peers: &'a Peers, recv: Vec<&'a mut [u8]>) -> Vec<Incoming<'a>> {
    let pairs = peers.iter().zip(recv);
    pairs
        .filter_map(|(peer, recv)| {
            let (rank, stream) = peer.as_ref()?;
            Some(Incoming::new(*rank, stream, recv))
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
        return at.run(
            (to_all(peers, |_| own), from_all(peers, pieces)),
            Own::none(),
        );
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
        let (Some(Some(to)), Some(Some(from))) = (peers.get(to), peers.get(from)) else {
            return Err(Fault::misfit());
        };
        let outgoing = vec![Outgoing::new(to.0, &to.1, send)];
        let incoming = vec![Incoming::new(from.0, &from.1, recv)];
        at.run((outgoing, incoming), Own::none())?;
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
    let chunk = chunk(n - 1);
    let stage = chunk.min(part.len());
    // Whole words, so that each stage is aligned.
    let stride = stage.next_multiple_of(64);
    let stages = stages.bytes(n * stride).chunks_mut(stride.max(1));
    let relay = rest.is_some();
    let recv = rest.unwrap_or_else(|| peers.iter().map(|_| &mut [][..]).collect());
    let piece = |place: usize| &input[cuts[place]..cuts[place + 1]];
    let mut outgoing = to_all(peers, piece);
    for outgoing in &mut outgoing {
        outgoing.relay = relay;
    }
    let mut incoming = from_all(peers, recv);
    for (incoming, stage) in incoming.iter_mut().zip(stages) {
        incoming.first = First::Contribution;
        incoming.stage = stage;
    }
    let own = Own::coming(Some((fold, me, piece(me))), part, chunk);
    at.run((outgoing, incoming), own)
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
    if root == me {
        output.copy_from_slice(input);
        let mut outgoing = to_all(peers, piece);
        for outgoing in &mut outgoing {
            outgoing.relay = true;
        }
        return at.run((outgoing, Vec::new()), Own::there(piece(me)));
    }
    let mut pieces = split_mut(output, &cuts);
    let part = std::mem::take(&mut pieces[me]);
    let mut outgoing = to_all(peers, |_| &[]);
    let mut incoming = from_all(peers, pieces);
    // Both are in the order of peers, of which this place is not one.
    let nth = root - usize::from(root > me);
    outgoing.remove(nth);
    for outgoing in &mut outgoing {
        outgoing.relay = true;
    }
    incoming[nth].first = First::Part;
    at.run((outgoing, incoming), Own::coming(None, part, chunk(n - 1)))
}

impl Transport for Net {
    fn is_mutual(&self, work: &Work<'_>) -> bool {
        match work {
            Work::AllReduce { input, .. } if input.len() <= SMALL => self.places() <= DIRECT,
            Work::Barrier => self.places() <= DIRECT,
            Work::AllReduce { .. }
            | Work::ReduceScatter { .. }
            | Work::AllGather { .. }
            | Work::AllToAll { .. } => true,
            Work::Broadcast { .. } => false,
        }
    }

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
                at.run(
                    (to_all(peers, |_| input), from_all(peers, pieces)),
                    Own::none(),
                )
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
                    return at.run((to_all(peers, |_| input), Vec::new()), Own::none());
                };
                let incoming = vec![Incoming::new(*rank, stream, output)];
                at.run((Vec::new(), incoming), Own::none())
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
                at.run((to_all(peers, send), from_all(peers, pieces)), Own::none())
            }
            Work::Barrier => gather_small(at, peers, me, 0, &[], &mut []),
        }
    }
}
