//! Collectives between the ranks of one host, through memory that they share.
//!
//! Everything is made of rounds (see [`region`]): write, one wait, read. A large all-reduce is pipelined:
//! in one round each rank gives the others their parts of one chunk, and its own reduced part of the
//! chunk before.

mod region;

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Over;
use super::reduce::Fold;
use super::spin::Spin;
use super::transport::{Call, Transport, Work};
use super::watch::{Fault, Watch};
use super::wire::{HEAD_LEN, Head};
pub(super) use region::Region;
use region::{Port, SLOT, Slots};

/// Up to here every rank reduces everything by itself: one round, and the least work in the caches.
const SMALL: usize = 16 << 10;
/// How long a rank sleeps at most before it looks whether the others live.
const LOOK_AFTER: Duration = Duration::from_millis(5);

/// This rank's end of a host's shared memory.
#[derive(Debug)]
pub(super) struct Local {
    port: Port,
    /// The ranks of the places.
    ranks: Vec<u32>,
    me: usize,
    spin: Spin,
}

impl Local {
    pub(super) fn new(region: Arc<Region>, ranks: Vec<u32>, me: usize, spin: Duration) -> Local {
        Local {
            port: Port::new(region, me),
            ranks,
            me,
            spin: Spin::new(spin),
        }
    }

    fn round(
        &mut self,
        at: &At,
        watch: &mut Watch,
        fill: impl FnOnce(&mut [u8]),
        take: impl FnOnce(Slots<'_>),
    ) -> Result<(), Fault> {
        watch.check_abort()?;
        let written = self.port.write(&at.head, fill);
        debug_assert!(written, "rounds are finished, or the group is over");
        self.wait_all(at.until, watch)?;
        let Some(slots) = self.port.slots() else {
            return Err(Over::Protocol(self.ranks[self.me], "a round out of order").into());
        };
        for (place, rank) in self.ranks.iter().enumerate() {
            let word = Head::word_of(&at.head, &slots.head(place));
            watch.hear(*rank, word.map_err(|what| Over::Protocol(*rank, what))?);
        }
        take(slots);
        self.port.finish();
        Ok(())
    }

    fn wait_all(&mut self, until: Instant, watch: &mut Watch) -> Result<(), Fault> {
        let port = &self.port;
        if self.spin.until(|| port.is_complete()) {
            return Ok(());
        }
        while let Some(missing) = (0..self.ranks.len()).find(|place| !port.is_posted(*place)) {
            watch.check_abort()?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                watch.check()?;
                return Err(watch.overdue(self.ranks[missing]));
            }
            if port.sleep(left.min(LOOK_AFTER)) {
                continue;
            }
            watch.check()?;
            for (place, rank) in self.ranks.iter().enumerate() {
                // Looked at after it was found gone: it may have posted, and left since.
                if let Some(cause) = watch.gone(*rank)
                    && !port.is_posted(place)
                {
                    return Err(Over::Lost(*rank, cause).into());
                }
            }
        }
        Ok(())
    }

    fn all_reduce(
        &mut self,
        at: &At,
        watch: &mut Watch,
        fold: Fold,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), Fault> {
        let (n, me) = (self.ranks.len(), self.me);
        if input.len() <= SMALL {
            let mut done = true;
            self.round(
                at,
                watch,
                |slot| slot[..input.len()].copy_from_slice(input),
                |slots| {
                    let parts: Vec<&[u8]> = (0..n)
                        .map(|place| &slots.slot(place)[..input.len()])
                        .collect();
                    done = fold.run(output, &parts);
                },
            )?;
            return check(done);
        }
        // A slot holds a part for each place, and this place's own reduced part of the chunk before.
        let part = (SLOT / (n + 1)) & !63;
        let chunk = part * n;
        let chunks = input.len().div_ceil(chunk);
        let range = |chunk_at: usize, place: usize| {
            let start = (chunk_at * chunk + place * part).min(input.len());
            start..(start + part).min(input.len())
        };
        let (out, mut done) = (std::cell::RefCell::new(output), true);
        for j in 0..=chunks {
            self.round(
                at,
                watch,
                |slot| {
                    let others = (0..n).filter(|place| *place != me && j < chunks);
                    for place in others {
                        let from = &input[range(j, place)];
                        slot[place * part..place * part + from.len()].copy_from_slice(from);
                    }
                    if let Some(before) = j.checked_sub(1) {
                        let own = &out.borrow()[range(before, me)];
                        slot[n * part..n * part + own.len()].copy_from_slice(own);
                    }
                },
                |slots| {
                    let mut out = out.borrow_mut();
                    if let Some(before) = j.checked_sub(1) {
                        for place in (0..n).filter(|place| *place != me) {
                            let to = &mut out[range(before, place)];
                            to.copy_from_slice(&slots.slot(place)[n * part..n * part + to.len()]);
                        }
                    }
                    if j < chunks {
                        let own = range(j, me);
                        let parts = parts_of(slots, n, me, &input[own.clone()], me * part);
                        done &= fold.run(&mut out[own], &parts);
                    }
                },
            )?;
        }
        check(done)
    }

    fn reduce_scatter(
        &mut self,
        at: &At,
        watch: &mut Watch,
        fold: Fold,
        (input, output): (&[u8], &mut [u8]),
        cuts: &[usize],
    ) -> Result<(), Fault> {
        let (n, me) = (self.ranks.len(), self.me);
        let part = (SLOT / n) & !63;
        let longest = cuts.windows(2).map(|pair| pair[1] - pair[0]).max();
        let mut done = true;
        for j in 0..longest.unwrap_or(0).div_ceil(part).max(1) {
            let range = |place: usize| {
                let start = (cuts[place] + j * part).min(cuts[place + 1]);
                start..(start + part).min(cuts[place + 1])
            };
            self.round(
                at,
                watch,
                |slot| {
                    for place in (0..n).filter(|place| *place != me) {
                        let from = &input[range(place)];
                        slot[place * part..place * part + from.len()].copy_from_slice(from);
                    }
                },
                |slots| {
                    let own = range(me);
                    let to = own.start - cuts[me]..own.end - cuts[me];
                    let parts = parts_of(slots, n, me, &input[own], me * part);
                    done &= fold.run(&mut output[to], &parts);
                },
            )?;
        }
        check(done)
    }

    fn all_gather(
        &mut self,
        at: &At,
        watch: &mut Watch,
        (input, output): (&[u8], &mut [u8]),
        cuts: &[usize],
    ) -> Result<(), Fault> {
        let (n, me) = (self.ranks.len(), self.me);
        let longest = cuts.windows(2).map(|pair| pair[1] - pair[0]).max();
        output[cuts[me]..cuts[me + 1]].copy_from_slice(input);
        for j in 0..longest.unwrap_or(0).div_ceil(SLOT).max(1) {
            let range = |place: usize| {
                let start = (cuts[place] + j * SLOT).min(cuts[place + 1]);
                start..(start + SLOT).min(cuts[place + 1])
            };
            self.round(
                at,
                watch,
                |slot| {
                    let own = range(me);
                    let from = &input[own.start - cuts[me]..own.end - cuts[me]];
                    slot[..from.len()].copy_from_slice(from);
                },
                |slots| {
                    for place in (0..n).filter(|place| *place != me) {
                        let to = &mut output[range(place)];
                        to.copy_from_slice(&slots.slot(place)[..to.len()]);
                    }
                },
            )?;
        }
        Ok(())
    }

    fn broadcast(
        &mut self,
        at: &At,
        watch: &mut Watch,
        root: usize,
        (input, output): (&[u8], &mut [u8]),
    ) -> Result<(), Fault> {
        let is_root = root == self.me;
        if is_root && !input.is_empty() {
            output.copy_from_slice(input);
        }
        let len = output.len();
        let out = std::cell::RefCell::new(output);
        for j in 0..len.div_ceil(SLOT).max(1) {
            let range = j * SLOT..((j + 1) * SLOT).min(len);
            self.round(
                at,
                watch,
                |slot| {
                    if is_root {
                        slot[..range.len()].copy_from_slice(&out.borrow()[range.clone()]);
                    }
                },
                |slots| {
                    if !is_root {
                        let from = &slots.slot(root)[..range.len()];
                        out.borrow_mut()[range.clone()].copy_from_slice(from);
                    }
                },
            )?;
        }
        Ok(())
    }

    fn all_to_all(
        &mut self,
        at: &At,
        watch: &mut Watch,
        (input, output): (&[u8], &mut [u8]),
        (to, from): (&[usize], &[usize]),
        most: usize,
    ) -> Result<(), Fault> {
        let (n, me) = (self.ranks.len(), self.me);
        let part = (SLOT / n) & !63;
        output[from[me]..from[me + 1]].copy_from_slice(&input[to[me]..to[me + 1]]);
        for j in 0..most.div_ceil(part).max(1) {
            let range = |cuts: &[usize], place: usize| {
                let start = (cuts[place] + j * part).min(cuts[place + 1]);
                start..(start + part).min(cuts[place + 1])
            };
            self.round(
                at,
                watch,
                |slot| {
                    for place in (0..n).filter(|place| *place != me) {
                        let bytes = &input[range(to, place)];
                        slot[place * part..place * part + bytes.len()].copy_from_slice(bytes);
                    }
                },
                |slots| {
                    for place in (0..n).filter(|place| *place != me) {
                        let bytes = &mut output[range(from, place)];
                        let got = &slots.slot(place)[me * part..me * part + bytes.len()];
                        bytes.copy_from_slice(got);
                    }
                },
            )?;
        }
        Ok(())
    }
}

/// Common parts of all rounds of an operation.
struct At {
    head: [u8; HEAD_LEN],
    until: Instant,
}

/// A piece from every place in order, this place's own from its input.
fn parts_of<'a>(
    slots: Slots<'a>,
    n: usize,
    me: usize,
    own: &'a [u8],
    start: usize,
) -> Vec<&'a [u8]> {
    (0..n)
        .map(|place| {
            if place == me {
                own
            } else {
                &slots.slot(place)[start..start + own.len()]
            }
        })
        .collect()
}

/// A reduction that refused its buffers is a mistake in this module.
fn check(done: bool) -> Result<(), Fault> {
    if done { Ok(()) } else { Err(Fault::misfit()) }
}

impl Transport for Local {
    /// In each round all read the heads of all.
    fn is_mutual(&self, _work: &Work<'_>) -> bool {
        true
    }

    fn run(&mut self, call: Call<'_>, watch: &mut Watch) -> Result<(), Fault> {
        let at = At {
            head: call.head.encode(),
            until: call.until,
        };
        match call.work {
            Work::AllReduce {
                fold,
                input,
                output,
            } => self.all_reduce(&at, watch, fold, input, output),
            Work::ReduceScatter {
                fold,
                input,
                output,
                cuts,
            } => self.reduce_scatter(&at, watch, fold, (input, output), cuts),
            Work::AllGather {
                input,
                output,
                cuts,
            } => self.all_gather(&at, watch, (input, output), cuts),
            Work::Broadcast {
                root,
                input,
                output,
            } => self.broadcast(&at, watch, root, (input, output)),
            Work::AllToAll {
                input,
                output,
                to,
                from,
                most,
            } => self.all_to_all(&at, watch, (input, output), (to, from), most),
            Work::Barrier => self.round(&at, watch, |_| {}, |_| {}),
        }
    }
}
