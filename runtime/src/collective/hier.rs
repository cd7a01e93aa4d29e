//! Both ways together: within each host through its shared memory, and between the hosts' first ranks
//! over TCP.

mod exchange;

use std::ops::Range;
use std::time::Instant;

use super::layout::Layout;
use super::shm::Local;
use super::tcp::Net;
use super::transport::{Call, Scratch, Transport, Work};
use super::watch::{Fault, Watch};
use super::wire::Head;
use exchange::Buffers;

/// Bytes that go through all stages before the next ones.
const PIECE: usize = 4 << 20;

/// A rank of a group with several hosts, some with several ranks.
#[derive(Debug)]
pub(super) struct Hier {
    layout: Layout,
    /// Which host this rank is on, and its place there.
    host: usize,
    place: usize,
    /// `None`: this rank is alone on its host.
    local: Option<Local>,
    /// `None`: another rank of this host is the first.
    net: Option<Net>,
    own: Scratch,
    all: Scratch,
    buffers: Buffers,
}

/// An operation's head and deadline, for each of its stages.
struct Stage {
    head: Head,
    until: Instant,
}

impl Stage {
    fn with<'b>(&self, part: u64, work: Work<'b>) -> Call<'b> {
        let mut head = self.head;
        head.part = part;
        Call {
            head,
            until: self.until,
            work,
        }
    }
}

fn run<T: Transport>(
    transport: &mut Option<T>,
    call: Call<'_>,
    watch: &mut Watch,
) -> Result<(), Fault> {
    match transport {
        Some(transport) => transport.run(call, watch),
        None => Ok(()),
    }
}

impl Hier {
    /// None, if the rank is not in the layout.
    pub(super) fn new(
        layout: Layout,
        rank: u32,
        local: Option<Local>,
        net: Option<Net>,
    ) -> Option<Hier> {
        let (host, place) = layout.place(rank)?;
        Some(Hier {
            layout,
            host,
            place,
            local,
            net,
            own: Scratch::default(),
            all: Scratch::default(),
            buffers: Buffers::default(),
        })
    }

    fn members(&self) -> &[u32] {
        &self.layout.hosts()[self.host]
    }
}

/// The pieces of so many bytes; one of no bytes, if there are none.
fn pieces(len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len.div_ceil(PIECE).max(1)).map(move |i| i * PIECE..((i + 1) * PIECE).min(len))
}

/// Where each of `sizes` begins, and the end.
fn cuts_of(sizes: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut cuts = vec![0];
    cuts.extend(sizes.scan(0, |end, size| {
        *end += size;
        Some(*end)
    }));
    cuts
}

impl Hier {
    fn all_reduce(
        &mut self,
        stage: &Stage,
        work: Reduce<'_>,
        watch: &mut Watch,
    ) -> Result<(), Fault> {
        let Reduce {
            fold,
            input,
            output,
        } = work;
        for (part, range) in (0..).zip(pieces(input.len())) {
            let input = &input[range.clone()];
            let output = &mut output[range];
            let sum: &[u8] = match &mut self.local {
                Some(local) => {
                    let sum = self.own.bytes(input.len());
                    let work = Work::AllReduce {
                        fold: fold.partial(),
                        input,
                        output: sum,
                    };
                    local.run(stage.with(part, work), watch)?;
                    sum
                }
                None => input,
            };
            let work = Work::AllReduce {
                fold,
                input: sum,
                output,
            };
            run(&mut self.net, stage.with(part, work), watch)?;
            self.hand_out(stage, part, output, watch)?;
        }
        Ok(())
    }

    /// The first rank's `bytes`, on all ranks of the host.
    fn hand_out(
        &mut self,
        stage: &Stage,
        part: u64,
        bytes: &mut [u8],
        watch: &mut Watch,
    ) -> Result<(), Fault> {
        let work = Work::Broadcast {
            root: 0,
            input: &[],
            output: bytes,
        };
        run(&mut self.local, stage.with(part, work), watch)
    }
}

/// Operands of an all-reduce.
struct Reduce<'a> {
    fold: super::reduce::Fold,
    input: &'a [u8],
    output: &'a mut [u8],
}

impl Hier {
    fn broadcast(
        &mut self,
        stage: &Stage,
        root: usize,
        (input, output): (&[u8], &mut [u8]),
        watch: &mut Watch,
    ) -> Result<(), Fault> {
        let rank = u32::try_from(root).unwrap_or(u32::MAX);
        let Some((host, place)) = self.layout.place(rank) else {
            return Err(Fault::misfit());
        };
        if host != self.host {
            let work = Work::Broadcast {
                root: host,
                input: &[],
                output,
            };
            run(&mut self.net, stage.with(0, work), watch)?;
            return self.hand_out(stage, 0, output, watch);
        }
        match &mut self.local {
            Some(local) => {
                let work = Work::Broadcast {
                    root: place,
                    input,
                    output,
                };
                local.run(stage.with(0, work), watch)?;
            }
            None => output.copy_from_slice(input),
        }
        let Some(net) = &mut self.net else {
            return Ok(());
        };
        let copy = self.own.bytes(output.len());
        copy.copy_from_slice(output);
        let work = Work::Broadcast {
            root: host,
            input: copy,
            output,
        };
        net.run(stage.with(0, work), watch)
    }

    fn all_gather(
        &mut self,
        stage: &Stage,
        (input, output): (&[u8], &mut [u8]),
        cuts: &[usize],
        watch: &mut Watch,
    ) -> Result<(), Fault> {
        let size = |rank: &u32| cuts[*rank as usize + 1] - cuts[*rank as usize];
        let within = cuts_of(self.members().iter().map(size));
        let sizes = self.layout.hosts().iter();
        let between = cuts_of(sizes.map(|host| host.iter().map(size).sum()));
        let bytes = within.last().copied().unwrap_or(0);
        let block: &[u8] = match &mut self.local {
            Some(local) => {
                let block = self.own.bytes(bytes);
                let work = Work::AllGather {
                    input,
                    output: block,
                    cuts: &within,
                };
                local.run(stage.with(0, work), watch)?;
                block
            }
            None => input,
        };
        if let Some(net) = &mut self.net {
            // In the order of hosts, from which the ranks are then put into theirs.
            let all = self.all.bytes(output.len());
            let work = Work::AllGather {
                input: block,
                output: all,
                cuts: &between,
            };
            net.run(stage.with(0, work), watch)?;
            let mut rest = &*all;
            for rank in self.layout.hosts().iter().flatten() {
                let (own, after) = rest.split_at(size(rank));
                output[cuts[*rank as usize]..cuts[*rank as usize + 1]].copy_from_slice(own);
                rest = after;
            }
        }
        self.hand_out(stage, 1, output, watch)
    }
}

impl Transport for Hier {
    /// Only the first ranks of two hosts talk with each other.
    fn is_mutual(&self, _work: &Work<'_>) -> bool {
        false
    }

    fn run(&mut self, call: Call<'_>, watch: &mut Watch) -> Result<(), Fault> {
        let (head, until) = (call.head, call.until);
        let stage = Stage { head, until };
        match call.work {
            Work::AllReduce {
                fold,
                input,
                output,
            } => {
                let work = Reduce {
                    fold,
                    input,
                    output,
                };
                self.all_reduce(&stage, work, watch)
            }
            // The parts of a host's ranks need not be neighbours, so the whole is reduced.
            Work::ReduceScatter {
                fold,
                input,
                output,
                cuts,
            } => {
                let mut all = std::mem::take(&mut self.all);
                let whole = all.bytes(input.len());
                let work = Reduce {
                    fold,
                    input,
                    output: &mut *whole,
                };
                let reduced = self.all_reduce(&stage, work, watch);
                let rank = self.members()[self.place] as usize;
                output.copy_from_slice(&whole[cuts[rank]..cuts[rank + 1]]);
                self.all = all;
                reduced
            }
            Work::AllGather {
                input,
                output,
                cuts,
            } => self.all_gather(&stage, (input, output), cuts, watch),
            Work::Broadcast {
                root,
                input,
                output,
            } => self.broadcast(&stage, root, (input, output), watch),
            Work::AllToAll { input, output, .. } => self.all_to_all(&stage, (input, output), watch),
            Work::Barrier => {
                run(&mut self.local, stage.with(0, Work::Barrier), watch)?;
                run(&mut self.net, stage.with(0, Work::Barrier), watch)?;
                run(&mut self.local, stage.with(1, Work::Barrier), watch)
            }
        }
    }
}
