//! A communicator, as its owner uses it.

use std::ffi::c_int;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cudarc::nccl::sys as nc;

use super::super::element::{DType, Op};
use super::super::vigil::Known;
use super::super::{Aborter, Group};
use super::Config;
use super::elements::{BYTES, Elements, fits, from, number_of, reduction, to};
use super::error::NcclError;
use super::forming::{Own, introduce, share_id};
use super::library::{IN_PROGRESS, Library};
use super::state::{Issued, Phase, Shared, Trouble, trouble_of};
use super::sys::Nccl;
use super::watchdog::Watchdog;
use crate::cuda::sys::{Code, SUCCESS};
use crate::cuda::{Device, Event, Memory, RawStream, Stream};

/// Operations that are in the stream at most; a further one waits for the first of them. The driver holds
/// about a thousand launches, and a call that waits for it would look like one that hangs.
const MOST_ISSUED: u64 = 256;
/// How long a wait for the device goes without sleeping.
const SPIN: Duration = Duration::from_micros(50);
/// The shortest and the longest sleep in a wait.
const NAPS: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));

/// An operation of a communicator, to be waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// All ranks of a group, each with a GPU. See the [module](super).
///
/// All ranks call the same operations with the same sizes in the same order. Dropped while operations are
/// on their way, here or elsewhere, it leaves them undone; [`close`](Self::close) is the orderly end.
#[derive(Debug)]
pub struct Communicator {
    rank: u32,
    world: u32,
    shared: Arc<Shared>,
    known: Arc<Known>,
    bell: Aborter,
    watchdog: Option<JoinHandle<()>>,
    stream: Option<Stream>,
    /// Two elements, for a barrier.
    scratch: Option<Memory>,
}

impl Communicator {
    /// Forms a communicator of all ranks of the group, each on its device of this number.
    ///
    /// # Errors
    /// A rank is lost; two ranks are on one device; a device cannot be used; the versions of NCCL differ;
    /// NCCL fails, or the time is over. Where the control plane can tell, all ranks get the same error.
    pub fn form(
        library: &Arc<Library>,
        ordinal: u32,
        group: &mut Group,
        config: Config,
    ) -> Result<Communicator, NcclError> {
        if group.gave_up() {
            return Err(NcclError::Spoiled);
        }
        let Own {
            device,
            stream,
            scratch,
        } = introduce(library, ordinal, group)?;
        let id = share_id(library, &device, group)?;
        let shared = Shared::new(library, device);
        let bell = Aborter::new()?;
        let place = (group.rank(), group.world());
        let watchdog = Watchdog::start(&shared, group.vigil()?, &bell, config, id, place)?;
        // From here on everything is given back by dropping it.
        let communicator = Communicator {
            rank: group.rank(),
            world: group.world(),
            shared,
            known: group.watch.known.clone(),
            bell,
            watchdog: Some(watchdog),
            stream: Some(stream),
            scratch: Some(scratch),
        };
        let mut state = communicator.shared.state();
        loop {
            match &state.phase {
                Phase::Ready => break,
                Phase::Over(trouble) => return Err(trouble.clone().into()),
                Phase::Forming | Phase::Ending => {}
            }
            let changed = communicator.shared.changed.wait(state);
            state = changed.unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        drop(state);
        Ok(communicator)
    }

    pub fn rank(&self) -> u32 {
        self.rank
    }

    pub fn world(&self) -> u32 {
        self.world
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.shared.device
    }

    /// Whether this group is the one that it was formed of.
    pub fn is_of(&self, group: &Group) -> bool {
        Arc::ptr_eq(&self.known, &group.watch.known)
    }

    /// The reduction of all ranks' inputs, on every rank.
    ///
    /// # Errors
    /// The buffers do not fit, or the communicator is over.
    pub fn all_reduce(
        &mut self,
        op: Op,
        input: Elements,
        output: Elements,
        after: RawStream,
    ) -> Result<Ticket, NcclError> {
        fits("the output of an all-reduce", input, output, input.len)?;
        let (dtype, reduction) = (number_of(input.dtype)?, reduction(op));
        self.launch("an all-reduce", input.len, after, |nccl, comm, stream| {
            // SAFETY: both buffers are of this device and so long, by the word of who made them.
            unsafe {
                (nccl.all_reduce)(
                    from(input),
                    to(output),
                    input.len,
                    dtype,
                    reduction,
                    comm,
                    stream,
                )
            }
        })
    }

    /// This rank's part of the reduction of all ranks' inputs: all parts are as long as each other.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); the input is no multiple of the world size.
    pub fn reduce_scatter(
        &mut self,
        op: Op,
        input: Elements,
        output: Elements,
        after: RawStream,
    ) -> Result<Ticket, NcclError> {
        let part = self.part("the input of a reduce-scatter", input)?;
        fits("the output of a reduce-scatter", input, output, part)?;
        let (dtype, reduction) = (number_of(input.dtype)?, reduction(op));
        self.launch("a reduce-scatter", part, after, |nccl, comm, stream| {
            // SAFETY: as in `all_reduce`; the input is a part for each rank.
            unsafe {
                (nccl.reduce_scatter)(
                    from(input),
                    to(output),
                    part,
                    dtype,
                    reduction,
                    comm,
                    stream,
                )
            }
        })
    }

    /// All ranks' inputs, one after the other in the order of ranks, on every rank.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn all_gather(
        &mut self,
        input: Elements,
        output: Elements,
        after: RawStream,
    ) -> Result<Ticket, NcclError> {
        let all = input.len.saturating_mul(self.world as usize);
        fits("the output of an all-gather", input, output, all)?;
        let bytes = input.len * input.dtype.size();
        self.launch("an all-gather", bytes, after, |nccl, comm, stream| {
            // SAFETY: as in `all_reduce`; the output has room for every rank's input.
            unsafe { (nccl.all_gather)(from(input), to(output), bytes, BYTES, comm, stream) }
        })
    }

    /// The root's input on every rank, itself included. Elsewhere the input is as long, and is not read.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); there is no such rank.
    pub fn broadcast(
        &mut self,
        root: u32,
        input: Elements,
        output: Elements,
        after: RawStream,
    ) -> Result<Ticket, NcclError> {
        let root = self.rank_of(root)?;
        fits("the output of a broadcast", input, output, input.len)?;
        let bytes = input.len * input.dtype.size();
        self.launch("a broadcast", bytes, after, |nccl, comm, stream| {
            // SAFETY: as in `all_reduce`.
            unsafe { (nccl.broadcast)(from(input), to(output), bytes, BYTES, root, comm, stream) }
        })
    }

    /// Each rank's input is one equal part for each rank; the output is the parts that all ranks have for
    /// this one, in the order of ranks.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); the input is no multiple of the world size.
    pub fn all_to_all(
        &mut self,
        input: Elements,
        output: Elements,
        after: RawStream,
    ) -> Result<Ticket, NcclError> {
        let part = self.part("the input of an all-to-all", input)?;
        fits("the output of an all-to-all", input, output, input.len)?;
        let bytes = part * input.dtype.size();
        let world = self.world as usize;
        self.launch("an all-to-all", bytes, after, |nccl, comm, stream| {
            // SAFETY: the calls of a group are collected until its end.
            let mut code = unsafe { (nccl.group_start)() };
            for (peer, rank) in (0..world).zip(0 as c_int..) {
                let at = peer * bytes;
                for send in [true, false] {
                    if code != SUCCESS {
                        break;
                    }
                    // SAFETY: as in `all_reduce`; the part lies within the buffer.
                    code = unsafe {
                        if send {
                            let part = from(input).byte_add(at);
                            (nccl.send)(part, bytes, BYTES, rank, comm, stream)
                        } else {
                            let part = to(output).byte_add(at);
                            (nccl.receive)(part, bytes, BYTES, rank, comm, stream)
                        }
                    };
                    if code == IN_PROGRESS {
                        code = SUCCESS;
                    }
                }
            }
            // SAFETY: always ended, even after an error.
            let end = unsafe { (nccl.group_end)() };
            if code == SUCCESS { end } else { code }
        })
    }

    /// Completes when every rank has called it, and what was in the caller's stream there is done.
    ///
    /// # Errors
    /// The communicator is over.
    pub fn barrier(&mut self, after: RawStream) -> Result<Ticket, NcclError> {
        let Some(scratch) = &self.scratch else {
            return Err(NcclError::Left);
        };
        // SAFETY: kept until the communicator is over.
        let both = unsafe { scratch.elements(DType::F32) };
        let word = |at: u64| Elements {
            address: both.address + at * DType::F32.size() as u64,
            len: 1,
            dtype: DType::F32,
        };
        let (input, output) = (word(0), word(1));
        let dtype = number_of(DType::F32)?;
        self.launch("a barrier", 1, after, |nccl, comm, stream| {
            // SAFETY: both words are this communicator's own.
            unsafe {
                let sum = nc::ncclRedOp_t::ncclSum;
                (nccl.all_reduce)(from(input), to(output), 1, dtype, sum, comm, stream)
            }
        })
    }

    /// Returns when the operation is complete on the device.
    ///
    /// # Errors
    /// The communicator is over before that. Nothing of it uses the buffers any more.
    pub fn wait(&mut self, ticket: Ticket) -> Result<(), NcclError> {
        let began = Instant::now();
        loop {
            let mut state = self.shared.state();
            if let Err(error) = state.advance() {
                drop(state);
                return Err(self.fail(error));
            }
            if state.completed > ticket.0 {
                return Ok(());
            }
            if let Phase::Over(trouble) = &state.phase {
                return Err(trouble.clone().into());
            }
            let waited = began.elapsed();
            if waited < SPIN {
                drop(state);
                std::thread::yield_now();
            } else {
                // The watchdog wakes it when it is over.
                let nap = (waited / 8).clamp(NAPS.0, NAPS.1);
                drop(self.shared.changed.wait_timeout(state, nap));
            }
        }
    }

    /// Returns when all operations so far are complete: a step's results are then whole.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn wait_all(&mut self) -> Result<(), NcclError> {
        let launched = self.shared.state().launched;
        match launched.checked_sub(1) {
            Some(last) => self.wait(Ticket(last)),
            None => Ok(()),
        }
    }

    /// Makes what comes into the stream from now on wait for the operation, without waiting here. An
    /// operation that is aborted lets the stream go on as well, with an output that holds nothing of use:
    /// whatever is kept must be waited for.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn join(&self, ticket: Ticket, stream: RawStream) -> Result<(), NcclError> {
        let state = self.shared.state();
        if let Some(ahead) = ticket.0.checked_sub(state.completed)
            && let Some(issued) = state
                .issued
                .get(usize::try_from(ahead).unwrap_or(usize::MAX))
        {
            let _current = self.shared.device.enter()?;
            issued.done.hold(stream)?;
        }
        Ok(())
    }

    /// Asks all ranks, over the group, how far they came, where an error does not say whose fault it is.
    /// All ranks get an error of that kind at about the same time, and all call this. A rank that does
    /// not is named by the group, when the time of its operations is over.
    pub fn blame(&self, error: NcclError, group: &mut Group) -> NcclError {
        let nameless = matches!(
            error,
            NcclError::TimedOut { .. } | NcclError::Late { .. } | NcclError::GivenUp { .. }
        );
        if !nameless || !self.is_of(group) {
            return error;
        }
        let mut counts = vec![0; self.world as usize];
        if let Err(lost) = group.all_gather(&[self.shared.state().launched], &mut counts) {
            return lost.into();
        }
        let most = counts.iter().max().copied().unwrap_or(0);
        let behind = (0..).zip(&counts).min_by_key(|(_, count)| **count);
        match behind {
            Some((rank, count)) if *count < most => NcclError::Behind {
                rank,
                theirs: *count,
                most,
            },
            _ => error,
        }
    }

    /// The orderly end: waits for everything here, and over the group for all ranks. The group may form
    /// another communicator.
    ///
    /// # Errors
    /// An operation failed, or a rank is lost.
    pub fn close(mut self, group: &mut Group) -> Result<(), NcclError> {
        self.wait_all()?;
        // An operation that is complete here may still be sending to another rank.
        group.barrier()?;
        Ok(())
    }

    fn rank_of(&self, rank: u32) -> Result<c_int, NcclError> {
        let world = self.world;
        let number = c_int::try_from(rank).ok().filter(|_| rank < world);
        number.ok_or(NcclError::NoRank { rank, world })
    }

    fn part(&self, what: &'static str, input: Elements) -> Result<usize, NcclError> {
        let world = self.world as usize;
        let part = input.len / world;
        if part * world == input.len {
            return Ok(part);
        }
        Err(NcclError::Length {
            what,
            got: input.len,
            expected: part * world,
        })
    }

    /// Puts an operation into the stream. One of no elements is only counted.
    fn launch(
        &mut self,
        what: &'static str,
        len: usize,
        after: RawStream,
        call: impl FnOnce(&Nccl, nc::ncclComm_t, nc::cudaStream_t) -> Code,
    ) -> Result<Ticket, NcclError> {
        // The watchdog may see it later than whoever dropped the group here.
        if self.known.has_left() {
            return Err(self.end());
        }
        let number = self.shared.state().launched;
        if let Some(first) = number.checked_sub(MOST_ISSUED) {
            self.wait(Ticket(first))?;
        }
        let event = {
            let mut state = self.shared.state();
            match &state.phase {
                Phase::Ready => {}
                Phase::Over(trouble) => return Err(trouble.clone().into()),
                Phase::Forming | Phase::Ending => {
                    drop(state);
                    return Err(self.end());
                }
            }
            state.launched += 1;
            state.calling = Some((what, Instant::now()));
            state.free.pop()
        };
        let call = (len > 0).then_some(call);
        let issued = self.issue(what, event, after, call);
        let mut state = self.shared.state();
        state.calling = None;
        match issued {
            // What was called while the abort began is not in the stream.
            Ok(issued) if matches!(state.phase, Phase::Ready) => {
                state.issued.push_back(issued);
                Ok(Ticket(number))
            }
            Ok(_) => {
                drop(state);
                Err(self.end())
            }
            Err(error) => {
                drop(state);
                Err(self.fail(error))
            }
        }
    }

    fn issue(
        &self,
        what: &'static str,
        event: Option<Event>,
        after: RawStream,
        call: Option<impl FnOnce(&Nccl, nc::ncclComm_t, nc::cudaStream_t) -> Code>,
    ) -> Result<Issued, NcclError> {
        let (shared, library) = (&self.shared, self.shared.library());
        let Some(stream) = &self.stream else {
            return Err(NcclError::Left);
        };
        let stream = stream.raw();
        let _current = shared.device.enter()?;
        let done = match event {
            Some(event) => event,
            None => shared.device.event()?,
        };
        done.record(after)?;
        done.hold(stream)?;
        if let Some(call) = call {
            let _calls = shared.calls();
            if matches!(shared.state().phase, Phase::Ready) {
                let code = call(&library.nccl, shared.comm(), stream.0.cast());
                library.check_nccl(what, code)?;
            }
        }
        // NCCL launches in the background: before that is done, the event would be too early in the
        // stream, and a further call an error.
        let began = Instant::now();
        while !shared.has_settled(what)? {
            if began.elapsed() < SPIN {
                std::thread::yield_now();
            } else {
                std::thread::sleep(NAPS.0);
            }
        }
        done.record(stream)?;
        Ok(Issued {
            what,
            since: Instant::now(),
            done,
        })
    }

    /// Has the watchdog end the communicator for an error of a call; the error.
    fn fail(&self, error: NcclError) -> NcclError {
        {
            let mut state = self.shared.state();
            if matches!(state.phase, Phase::Ready) {
                state.failed.get_or_insert_with(|| trouble_of(error));
            }
        }
        self.bell.abort();
        self.end()
    }

    /// Waits until the communicator is over, as it is about to be; why.
    fn end(&self) -> NcclError {
        let mut state = self.shared.state();
        loop {
            if let Phase::Over(trouble) = &state.phase {
                return trouble.clone().into();
            }
            let changed = self.shared.changed.wait(state);
            state = changed.unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        {
            let mut state = self.shared.state();
            if !matches!(state.phase, Phase::Over(_)) {
                state.failed.get_or_insert(Trouble::Closed);
            }
        }
        self.bell.abort();
        if let Some(watchdog) = self.watchdog.take() {
            let _ended = watchdog.join();
        }
        let stuck = matches!(
            self.shared.state().phase,
            Phase::Over(Trouble::Stuck { .. })
        );
        if stuck {
            // A driver that is stuck would not return from freeing them.
            std::mem::forget((self.stream.take(), self.scratch.take()));
        }
    }
}
