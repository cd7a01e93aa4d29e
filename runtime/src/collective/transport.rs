//! Interface of a transport: one operation among its ranks. The ranks here are places in the transport
//! (of a host's ranks, or of the hosts' first ranks), numbered from 0.

use std::time::Instant;

use super::reduce::Fold;
use super::watch::{Fault, Watch};
use super::wire::Head;

/// The operation of a [`Head`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    AllReduce = 1,
    ReduceScatter,
    AllGather,
    Broadcast,
    AllToAll,
    Barrier,
}

/// One operation's buffers. Lengths are in bytes, whole elements, and right: the caller has checked them.
#[derive(Debug)]
pub(super) enum Work<'a> {
    AllReduce {
        fold: Fold,
        input: &'a [u8],
        output: &'a mut [u8],
    },
    /// `cuts[i]..cuts[i + 1]` of the input is place i's.
    ReduceScatter {
        fold: Fold,
        input: &'a [u8],
        output: &'a mut [u8],
        cuts: &'a [usize],
    },
    /// `cuts[i]..cuts[i + 1]` of the output comes from place i.
    AllGather {
        input: &'a [u8],
        output: &'a mut [u8],
        cuts: &'a [usize],
    },
    /// Only the root's input matters. In shared memory it may be empty, if the root's output holds it.
    Broadcast {
        root: usize,
        input: &'a [u8],
        output: &'a mut [u8],
    },
    /// `to[i]..to[i + 1]` of the input goes to place i, `from[i]..from[i + 1]` of the output comes from
    /// it; `most` is the longest of all such parts, on all places.
    AllToAll {
        input: &'a [u8],
        output: &'a mut [u8],
        to: &'a [usize],
        from: &'a [usize],
        most: usize,
    },
    Barrier,
}

/// One operation, as all places call it.
#[derive(Debug)]
pub(super) struct Call<'a> {
    pub(super) head: Head,
    pub(super) until: Instant,
    pub(super) work: Work<'a>,
}

/// A way to carry collectives. After a fault the transport is not used again.
pub(super) trait Transport: std::fmt::Debug + Send {
    fn run(&mut self, call: Call<'_>, watch: &mut Watch) -> Result<(), Fault>;

    /// Whether in this operation every rank gets the head of every other's: the same answer on every rank.
    fn is_mutual(&self, work: &Work<'_>) -> bool;
}

/// Where part `i` of `n` begins in `len`; all parts are as long as each other, but for one.
pub(super) fn cut(len: usize, n: usize, i: usize) -> usize {
    let (each, more) = (len / n, len % n);
    each * i + more.min(i)
}

/// The beginnings of all parts of `len` elements, and the end, in bytes.
pub(super) fn even_cuts(len: usize, n: usize, size: usize) -> Vec<usize> {
    (0..=n).map(|i| cut(len, n, i) * size).collect()
}

/// The pieces between cuts, each to be written by itself.
pub(super) fn split_mut<'a>(mut rest: &'a mut [u8], cuts: &[usize]) -> Vec<&'a mut [u8]> {
    let mut pieces = Vec::with_capacity(cuts.len());
    for pair in cuts.windows(2) {
        let (piece, after) = rest.split_at_mut(pair[1] - pair[0]);
        pieces.push(piece);
        rest = after;
    }
    pieces
}

/// Bytes that are aligned for every element, for intermediate results.
#[derive(Debug, Default)]
pub(super) struct Scratch(Vec<u64>);

impl Scratch {
    /// At least so many bytes; what they hold is unspecified.
    pub(super) fn bytes(&mut self, len: usize) -> &mut [u8] {
        let words = len.div_ceil(8);
        if self.0.len() < words {
            self.0 = vec![0; words];
        }
        &mut bytemuck::cast_slice_mut(&mut self.0)[..len]
    }
}
