//! Collectives between the ranks of one generation.
//!
//! Ranks of one host talk through shared memory, hosts over TCP, and a group with several ranks on some
//! of its hosts does both. No operation of a group starts a thread that outlives the call: the calling
//! thread serves all connections, so leaving a group is closing its descriptors. Between GPUs the
//! feature `nccl` has a module of its own, for which the group is the control plane; a [`Vigil`] looks
//! at a group from another thread.
//!
//! - **Out of place**: inputs are never written. After an error an output holds nothing of use.
//! - **The same bits on every rank**, in an order of summation that the [`Layout`] alone decides.
//! - **A lost rank is a value**: [`GroupError::PeerLost`] names it, at once when its process ends, after
//!   [`GroupConfig::op_within`] when it is only silent. The group is then over, and each later call says the
//!   same. [`Aborter`] ends a group from another thread.
//! - All ranks call the same operations with the same sizes in the same order; whoever does not is
//!   [`GroupError::Protocol`].

mod bytes;
mod element;
mod error;
mod flow;
mod formation;
mod handshake;
mod hier;
mod layout;
#[cfg(feature = "nccl")]
pub mod nccl;
mod outgoing;
mod reduce;
mod setup;
mod share;
mod shm;
mod spin;
mod tcp;
mod transport;
mod vigil;
mod watch;
mod wire;
mod words;

use std::ops::Range;
use std::time::{Duration, Instant};

pub use element::{DType, Element, Op};
pub use error::{GroupError, LossCause, Refusal};
pub use layout::Layout;
pub use setup::{GroupConfig, Seat, Sharing, Topology};
pub use vigil::{Seen, Vigil};
pub use watch::Aborter;

use reduce::Fold;
use transport::{Call, Kind, Transport, Work, cut, even_cuts};
use watch::{Fault, Watch};
use wire::Head;

use crate::session::Waits;

/// Ranks that one group has at most.
pub const MAX_WORLD: u32 = 1024;
/// Bytes that operations of unknown length carry at most.
pub const MAX_PAYLOAD: usize = 64 << 20;

/// All ranks of one generation, connected.
#[derive(Debug)]
pub struct Group {
    rank: u32,
    world: u32,
    layout: Layout,
    seq: u32,
    /// `None` in a world of one.
    transport: Option<Box<dyn Transport>>,
    watch: Watch,
    over: Option<Over>,
    waits: Option<Waits>,
    /// Word in the heads of this rank's operations, and since when all ranks have heard all.
    word: u64,
    told: Option<Instant>,
    /// How long operations may take from then on.
    within_once_told: Option<Duration>,
}

/// Why a group is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Over {
    Lost(u32, LossCause),
    Protocol(u32, &'static str),
    /// In this process.
    Aborted,
    AbortedBy(u32),
    /// An error of this process's own ended an operation half-way.
    Broken,
}

impl From<Over> for GroupError {
    fn from(over: Over) -> GroupError {
        match over {
            Over::Lost(rank, cause) => GroupError::PeerLost { rank, cause },
            Over::Protocol(rank, what) => GroupError::Protocol { rank, what },
            Over::Aborted => GroupError::Aborted { by: None },
            Over::AbortedBy(rank) => GroupError::Aborted { by: Some(rank) },
            Over::Broken => GroupError::Internal {
                what: "the group is used after an error of this process",
            },
        }
    }
}

impl Group {
    pub fn rank(&self) -> u32 {
        self.rank
    }

    pub fn world(&self) -> u32 {
        self.world
    }

    /// Which ranks share memory; it decides the order of summation.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// How long each later operation may take.
    pub fn set_op_within(&mut self, within: Duration) {
        self.within_once_told = None;
        self.watch.within = within;
        self.watch.known.set_within(within);
    }

    /// From now on each operation is marked as one in which this rank waits for others: a rank that hangs
    /// elsewhere is told from those.
    pub fn mark_waits(&mut self, waits: Waits) {
        self.waits = Some(waits);
    }

    /// Ends this group from any thread.
    pub fn aborter(&self) -> Aborter {
        self.watch.aborter.clone()
    }

    /// The part of `len` elements that a rank gets from [`reduce_scatter`](Self::reduce_scatter): all are
    /// as long as each other, the first ones one longer if it does not come out even.
    pub fn part(&self, len: usize, rank: u32) -> Range<usize> {
        let (n, i) = (self.world as usize, rank.min(self.world - 1) as usize);
        cut(len, n, i)..cut(len, n, i + 1)
    }

    /// The reduction of all ranks' inputs, on every rank.
    ///
    /// # Errors
    /// A peer is lost or out of step; the lengths differ.
    pub fn all_reduce<T: Element>(
        &mut self,
        op: Op,
        input: &[T],
        output: &mut [T],
    ) -> Result<(), GroupError> {
        same_len("the output of an all-reduce", output.len(), input.len())?;
        let fold = Fold::whole(T::DTYPE, op, self.world);
        let work = Work::AllReduce {
            fold,
            input: bytemuck::cast_slice(input),
            output: bytemuck::cast_slice_mut(output),
        };
        let what = (Kind::AllReduce, T::DTYPE as u8, op as u8);
        self.run(what, 0, size_of_val(input), work)
    }

    /// This rank's [`part`](Self::part) of the reduction of all ranks' inputs.
    ///
    /// # Errors
    /// A peer is lost or out of step; the output is not as long as the part.
    pub fn reduce_scatter<T: Element>(
        &mut self,
        op: Op,
        input: &[T],
        output: &mut [T],
    ) -> Result<(), GroupError> {
        let part = self.part(input.len(), self.rank).len();
        same_len("the output of a reduce-scatter", output.len(), part)?;
        let work = Work::ReduceScatter {
            fold: Fold::whole(T::DTYPE, op, self.world),
            input: bytemuck::cast_slice(input),
            output: bytemuck::cast_slice_mut(output),
            cuts: &even_cuts(input.len(), self.world as usize, size_of::<T>()),
        };
        let what = (Kind::ReduceScatter, T::DTYPE as u8, op as u8);
        self.run(what, 0, size_of_val(input), work)
    }

    /// All ranks' inputs, one after the other in the order of ranks, on every rank. All inputs are equally
    /// long.
    ///
    /// # Errors
    /// A peer is lost or out of step; the output is not as long as all inputs.
    pub fn all_gather<T: Element>(
        &mut self,
        input: &[T],
        output: &mut [T],
    ) -> Result<(), GroupError> {
        let counts = vec![input.len(); self.world as usize];
        self.all_gather_uneven(input, &counts, output)
    }

    /// As [`all_gather`](Self::all_gather), of as many elements from each rank as `counts` says, which is the
    /// same on every rank.
    ///
    /// # Errors
    /// As there, and `counts` does not fit the buffers.
    pub fn all_gather_uneven<T: Element>(
        &mut self,
        input: &[T],
        counts: &[usize],
        output: &mut [T],
    ) -> Result<(), GroupError> {
        let world = self.world as usize;
        same_len("the counts of an all-gather", counts.len(), world)?;
        let own = counts.get(self.rank as usize).copied().unwrap_or(0);
        same_len("the input of an all-gather", input.len(), own)?;
        let total = counts.iter().fold(0usize, |sum, n| sum.saturating_add(*n));
        same_len("the output of an all-gather", output.len(), total)?;
        let mut cuts = vec![0];
        for count in counts {
            cuts.push(cuts.last().copied().unwrap_or(0) + count * size_of::<T>());
        }
        let work = Work::AllGather {
            input: bytemuck::cast_slice(input),
            output: bytemuck::cast_slice_mut(output),
            cuts: &cuts,
        };
        let what = (Kind::AllGather, T::DTYPE as u8, 0);
        self.run(what, 0, total * size_of::<T>(), work)
    }

    /// The root's input on every rank, itself included. Only the root's `input` matters; `output` is equally
    /// long everywhere.
    ///
    /// # Errors
    /// A peer is lost or out of step; there is no such rank; the root's lengths differ.
    pub fn broadcast<T: Element>(
        &mut self,
        root: u32,
        input: &[T],
        output: &mut [T],
    ) -> Result<(), GroupError> {
        if root >= self.world {
            return Err(GroupError::BadPlace {
                rank: root,
                world: self.world,
                most: MAX_WORLD,
            });
        }
        let input = if root == self.rank { input } else { &[] };
        if root == self.rank {
            same_len("the output of a broadcast", output.len(), input.len())?;
        }
        let bytes = size_of_val(output);
        let work = Work::Broadcast {
            root: root as usize,
            input: bytemuck::cast_slice(input),
            output: bytemuck::cast_slice_mut(output),
        };
        let what = (Kind::Broadcast, T::DTYPE as u8, 0);
        self.run(what, root, bytes, work)
    }

    /// Each rank's input is one equal part for each rank; the output is the parts that all ranks have for
    /// this one, in the order of ranks.
    ///
    /// # Errors
    /// A peer is lost or out of step; the lengths differ, or are no multiple of the world size.
    pub fn all_to_all<T: Element>(
        &mut self,
        input: &[T],
        output: &mut [T],
    ) -> Result<(), GroupError> {
        let world = self.world as usize;
        same_len("the output of an all-to-all", output.len(), input.len())?;
        let even = input.len() / world * world;
        same_len("the input of an all-to-all", input.len(), even)?;
        let cuts = even_cuts(input.len(), world, size_of::<T>());
        let work = Work::AllToAll {
            input: bytemuck::cast_slice(input),
            output: bytemuck::cast_slice_mut(output),
            to: &cuts,
            from: &cuts,
            most: size_of_val(input) / world,
        };
        let what = (Kind::AllToAll, T::DTYPE as u8, 0);
        self.run(what, 0, size_of_val(input), work)
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// A peer is lost or out of step.
    pub fn barrier(&mut self) -> Result<(), GroupError> {
        self.run((Kind::Barrier, 0, 0), 0, 0, Work::Barrier)
    }

    fn run(
        &mut self,
        (kind, dtype, op): (Kind, u8, u8),
        root: u32,
        len: usize,
        work: Work<'_>,
    ) -> Result<(), GroupError> {
        if let Some(over) = self.over {
            return Err(over.into());
        }
        if self.watch.aborter.is_aborted() {
            return Err(self.end(Over::Aborted));
        }
        let seq = self.seq;
        self.seq = seq.wrapping_add(1);
        let Some(transport) = &mut self.transport else {
            return alone(work);
        };
        let call = Call {
            head: Head {
                seq,
                kind: kind as u8,
                dtype,
                op,
                root,
                len: len as u64,
                part: 0,
                word: self.word,
            },
            until: Instant::now() + self.watch.within,
            work,
        };
        let mutual = transport.is_mutual(&call.work);
        let outcome = {
            let _waiting = self.waits.as_ref().map(Waits::enter);
            transport.run(call, &mut self.watch)
        };
        match outcome {
            Ok(()) => {
                if mutual {
                    self.watch.hear(self.rank, self.word);
                    self.have_told();
                }
                Ok(())
            }
            Err(Fault::Over(over)) => Err(self.end(over)),
            Err(Fault::Local(error)) => {
                self.end(Over::Broken);
                Err(error)
            }
        }
    }

    /// The group is over: remembers why, and tells the others.
    fn end(&mut self, over: Over) -> GroupError {
        let over = *self.over.get_or_insert(over);
        self.watch.known.set_over(over);
        self.watch.tell(over);
        over.into()
    }
}

/// An operation in a world of one.
fn alone(work: Work<'_>) -> Result<(), GroupError> {
    match work {
        Work::AllReduce {
            fold,
            input,
            output,
        }
        | Work::ReduceScatter {
            fold,
            input,
            output,
            ..
        } => {
            if !fold.run(output, &[input]) {
                return Err(GroupError::Internal {
                    what: "a buffer that does not fit its elements",
                });
            }
        }
        Work::AllGather { input, output, .. }
        | Work::Broadcast { input, output, .. }
        | Work::AllToAll { input, output, .. } => output.copy_from_slice(input),
        Work::Barrier => {}
    }
    Ok(())
}

fn same_len(what: &'static str, got: usize, expected: usize) -> Result<(), GroupError> {
    if got == expected {
        return Ok(());
    }
    Err(GroupError::Length {
        what,
        got,
        expected,
    })
}

#[cfg(test)]
mod tests;
