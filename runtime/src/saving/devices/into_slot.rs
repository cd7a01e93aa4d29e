//! From devices into a slot.

use std::collections::BTreeSet;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};

use muster_checkpoint::slot::{Ended, Far, FarError, Span};
use muster_checkpoint::sum::CHUNK;

use super::super::memory::Part;
use super::{Lane, Lost, lock, stream_of};
use crate::cuda::{CudaError, Event, Pinned, RawStream, Stream};

/// Parts of an image whose copies have one event behind them, at most: events cost, too.
const GROUPS: u64 = 256;
/// Groups that are on their way while one is waited for. A driver holds about a thousand launches, and
/// whoever calls one more waits.
const AHEAD: usize = 8;
/// A half of a pinned buffer.
const PIECE: usize = 1 << 20;
/// Bytes of a pinned buffer: one half is filled while the other is emptied.
pub(super) const BOUNCE: usize = 2 * PIECE;

/// A thread's way from a device by pinned memory.
#[derive(Debug)]
pub(super) struct Bounce {
    lane: u32,
    stream: Stream,
    events: [Event; 2],
    memory: ManuallyDrop<Pinned>,
    lost: Arc<Lost>,
}

impl Bounce {
    fn new(lane: &Lane, lost: &Arc<Lost>) -> Result<Bounce, CudaError> {
        Ok(Bounce {
            lane: lane.ordinal,
            stream: lane.device.stream()?,
            events: [lane.device.event()?, lane.device.event()?],
            memory: ManuallyDrop::new(Pinned::new(&lane.device, BOUNCE)?),
            lost: Arc::clone(lost),
        })
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        // A copy that was begun may still be writing to the memory, which stays if nobody knows.
        if !matches!(self.lost.settle(&self.stream), Ended::Unknown(_)) {
            // SAFETY: once, and nobody uses it afterwards.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}

/// Where a span's bytes come from.
#[derive(Clone, Copy, Debug)]
struct Origin {
    lane: usize,
    address: u64,
}

/// The copies of one save.
pub(super) struct Copies<'a> {
    lanes: &'a [Lane],
    bounces: &'a Mutex<Vec<Bounce>>,
    lost: &'a Arc<Lost>,
    spans: Vec<Span>,
    /// Of each span.
    from: Vec<Origin>,
    /// The callers' streams, each with its device.
    callers: Vec<(usize, RawStream)>,
    straight: bool,
    /// Events behind all work in the callers' streams at the beginning.
    ready: OnceLock<Vec<(usize, Event)>>,
    /// Bytes of a group.
    group: u64,
    /// Groups whose copies are in the streams.
    issued: Mutex<usize>,
    /// The events behind each group's copies.
    marks: Vec<OnceLock<Vec<(usize, Event)>>>,
}

impl<'a> Copies<'a> {
    /// Of these parts, ascending; `which` has the lane of each.
    pub(super) fn new(
        lanes: &'a [Lane],
        bounces: &'a Mutex<Vec<Bounce>>,
        lost: &'a Arc<Lost>,
        parts: &[Part<'_>],
        which: &[usize],
        straight: bool,
        image: u64,
    ) -> Copies<'a> {
        let span = |part: &Part<'_>| Span {
            at: part.at,
            bytes: part.from.bytes(),
        };
        let from = |(part, lane): (&Part<'_>, &usize)| Origin {
            lane: *lane,
            address: part.from.there.address,
        };
        let mut callers: Vec<(usize, RawStream)> = Vec::new();
        for (part, lane) in parts.iter().zip(which) {
            let caller = (*lane, stream_of(part.from.there));
            if !callers.contains(&caller) {
                callers.push(caller);
            }
        }
        let group = image.div_ceil(GROUPS).next_multiple_of(CHUNK).max(CHUNK);
        let groups = usize::try_from(image.div_ceil(group)).unwrap_or(usize::MAX);
        Copies {
            lanes,
            bounces,
            lost,
            spans: parts.iter().map(span).collect(),
            from: parts.iter().zip(which).map(from).collect(),
            callers,
            straight,
            ready: OnceLock::new(),
            group,
            issued: Mutex::new(0),
            marks: (0..groups).map(|_| OnceLock::new()).collect(),
        }
    }

    /// The parts of the spans in this range, in order: where, how long, and from where.
    fn within(&self, range: Range<u64>) -> impl Iterator<Item = (u64, u64, Origin)> {
        let first = (self.spans).partition_point(|span| span.at + span.bytes <= range.start);
        let all = self.spans.iter().zip(&self.from).skip(first);
        let inside = all.take_while({
            let end = range.end;
            move |(span, _)| span.at < end
        });
        inside.map(move |(span, from)| {
            let begin = span.at.max(range.start);
            let end = (span.at + span.bytes).min(range.end);
            let address = from.address + (begin - span.at);
            let from = Origin { address, ..*from };
            (begin, end.saturating_sub(begin), from)
        })
    }

    /// Begins the copies of a group; the events behind them.
    fn issue(&self, image: *mut [u8], group: usize) -> Result<Vec<(usize, Event)>, CudaError> {
        let begin = group as u64 * self.group;
        let end = (begin + self.group).min(image.len() as u64);
        let mut used = BTreeSet::new();
        for (at, bytes, from) in self.within(begin..end) {
            let lane = &self.lanes[from.lane];
            let _current = lane.device.enter()?;
            used.insert(from.lane);
            // SAFETY: the slot is ours until `end`, which waits for the stream, and the spans lie in the image, as
            // was checked. The tensor stays until the save has returned, by its owner's word.
            unsafe {
                let to = image.cast::<u8>().add(at as usize);
                lane.stream.to_host(to, from.address, bytes as usize)?;
            }
        }
        let mark = |lane: usize| {
            let event = self.lanes[lane].event()?;
            let _current = self.lanes[lane].device.enter()?;
            event.record(self.lanes[lane].stream.raw())?;
            Ok((lane, event))
        };
        used.into_iter().map(mark).collect()
    }

    /// Straight into the slot.
    fn wait_for(&self, image: *mut [u8], begin: u64) -> Result<(), FarError> {
        let group = (begin / self.group) as usize;
        {
            let mut issued = lock(&self.issued);
            while *issued < self.marks.len().min(group + 1 + AHEAD) {
                let marks = self.issue(image, *issued)?;
                // Nobody else sets it: this is behind the lock.
                let _set = self.marks[*issued].set(marks);
                *issued += 1;
            }
        }
        let marks = self.marks.get(group).and_then(OnceLock::get);
        for (lane, event) in marks.ok_or("a part of the image has no copy")? {
            let _current = self.lanes[*lane].device.enter()?;
            event.synchronize()?;
        }
        Ok(())
    }

    /// By pinned memory.
    fn carry(&self, image: *mut [u8], range: Range<u64>) -> Result<(), FarError> {
        let lanes: BTreeSet<usize> = (self.within(range.clone()))
            .map(|(_, _, from)| from.lane)
            .collect();
        for lane in lanes {
            let ordinal = self.lanes[lane].ordinal;
            let free = {
                let mut bounces = lock(self.bounces);
                let at = bounces.iter().position(|bounce| bounce.lane == ordinal);
                at.map(|at| bounces.swap_remove(at))
            };
            let mut bounce = match free {
                Some(bounce) => bounce,
                None => Bounce::new(&self.lanes[lane], self.lost)?,
            };
            self.bounce(&mut bounce, lane, image, range.clone())?;
            lock(self.bounces).push(bounce);
        }
        Ok(())
    }

    fn bounce(
        &self,
        bounce: &mut Bounce,
        lane: usize,
        image: *mut [u8],
        range: Range<u64>,
    ) -> Result<(), FarError> {
        let _current = self.lanes[lane].device.enter()?;
        for (of, event) in self.ready.get().into_iter().flatten() {
            if *of == lane {
                event.hold(bounce.stream.raw())?;
            }
        }
        let windows: Vec<Range<u64>> = (range.clone())
            .step_by(PIECE)
            .map(|begin| begin..(begin + PIECE as u64).min(range.end))
            .collect();
        let parts = |window: &Range<u64>| {
            let start = window.start;
            self.within(window.clone())
                .filter(move |(_, _, from)| from.lane == lane)
                .map(move |(at, bytes, from)| ((at - start) as usize, at, bytes as usize, from))
        };
        let begin = |number: usize, window: &Range<u64>| -> Result<(), CudaError> {
            let half = number % 2;
            for (within, _, bytes, from) in parts(window) {
                // SAFETY: within this half, which nobody looks at before the event behind the copy has passed; and
                // before it is given back or freed the stream has. The tensor stays until the save has returned.
                unsafe {
                    let to = bounce.memory.as_mut_ptr().add(half * PIECE + within);
                    bounce.stream.to_host(to, from.address, bytes)?;
                }
            }
            bounce.events[half].record(bounce.stream.raw())
        };
        let end = |number: usize, window: &Range<u64>| -> Result<(), CudaError> {
            let half = number % 2;
            bounce.events[half].synchronize()?;
            for (within, at, bytes, _) in parts(window) {
                // SAFETY: the copies to this half are done, and none other is begun before this returns. The slot
                // is ours, and these bytes of it this thread's.
                unsafe {
                    let from = bounce.memory.as_mut_ptr().add(half * PIECE + within);
                    let to = image.cast::<u8>().add(at as usize);
                    to.copy_from_nonoverlapping(from, bytes);
                }
            }
            Ok(())
        };
        for (number, window) in windows.iter().enumerate() {
            if number == 0 {
                begin(0, window)?;
            }
            if let Some(next) = windows.get(number + 1) {
                begin(number + 1, next)?;
            }
            end(number, window)?;
        }
        Ok(())
    }

    /// Its events may be used again: all copies are over.
    pub(super) fn give_back(self) {
        let marks = self.marks.into_iter().filter_map(OnceLock::into_inner);
        for (lane, event) in marks.chain(self.ready.into_inner()).flatten() {
            lock(&self.lanes[lane].spare).push(event);
        }
    }
}

impl Far for Copies<'_> {
    fn spans(&self) -> &[Span] {
        &self.spans
    }

    fn begin(&self) -> Result<(), FarError> {
        let wait = |(lane, stream): &(usize, RawStream)| -> Result<(usize, Event), CudaError> {
            let of = &self.lanes[*lane];
            let event = of.event()?;
            let _current = of.device.enter()?;
            event.record(*stream)?;
            if self.straight {
                event.hold(of.stream.raw())?;
            }
            Ok((*lane, event))
        };
        let ready = self.callers.iter().map(wait).collect::<Result<_, _>>()?;
        // Called once.
        let _set = self.ready.set(ready);
        Ok(())
    }

    fn bring(&self, image: *mut [u8], begin: u64, end: u64) -> Result<(), FarError> {
        match self.straight {
            true => self.wait_for(image, begin),
            false => self.carry(image, begin..end),
        }
    }

    fn end(&self) -> Ended {
        if !self.straight {
            // No device writes to the slot: its bytes are brought from buffers, which see to themselves.
            return Ended::Well;
        }
        let used: BTreeSet<usize> = self.from.iter().map(|from| from.lane).collect();
        let mut all = Ended::Well;
        for lane in used {
            // Whoever has begun a copy waits for it, in every stream, and the worst counts.
            all = match (all, self.lost.settle(&self.lanes[lane].stream)) {
                (worst @ Ended::Unknown(_), _) | (worst, Ended::Well) => worst,
                (_, ended) => ended,
            };
        }
        all
    }
}
