//! A slot: memory of a rank's own in which its part of a save survives the rank.
//!
//! The launcher creates two for each rank and touches every page, so that a save never waits for
//! the kernel to find memory. The worker copies what it writes into one of them ([`Slot::fill`]),
//! several threads at a time, hashing as it copies, and seals it. From then on the bytes are whatever
//! process still holds the descriptor's: the worker may go on, or die. The process that makes them durable takes the
//! slot ([`Slot::take`]), and gives it back when it has.
//!
//! ```text
//!         fill                 seal                 take                 release
//! Free ---------> Filling ---------------> Sealed ---------> Taken --------------> Free
//!                    |  the worker died: reclaim                ^
//!                    +--> Free                                  | its holder died: reclaim --> Sealed
//! ```
//!
//! A copy that failed leads from Filling to Free at once, if nothing writes to the slot any more. Where that cannot be
//! known ([`SlotError::Abandoned`]) the slot stays with its worker, Filling, until that is dead: whoever else got it,
//! its next filler or the kernel, would find a device writing there.
//!
//! A slot is a memfd that can neither shrink nor grow, so that nobody who maps it can be hit by
//! SIGBUS:
//!
//! ```text
//! 0       one page of words, each a little-endian u64
//! 4096    the image: the bytes of one data file
//! ...     CRC-64/NVME of each of the image's chunks
//! ...     the note: what else its reader needs, in bytes that this module does not look into
//! ```
//!
//! All that is read of a slot is checked, for its writer is another process, and a user's.

mod copy;
mod far;
mod following;
mod region;
mod replica;
mod view;

use std::any::Any;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::hex::{Bytes, Id};
use crate::sum::{CHUNK, chunks_of};
use crate::{PAGE, pool};

use copy::Cursor;
use far::Ending;
pub use far::{Ended, Far, FarError, Span};
pub use following::{Fill, Following};
use region::{Region, Shape, word};
pub use replica::{Replica, Room};
pub use view::{IMAGE_AT, View};

/// The most bytes of a note.
pub const MAX_NOTE: u64 = 64 << 20;

/// A slot, mapped.
#[derive(Debug)]
pub struct Slot {
    /// A value that has to go before the mapping does: fields are dropped in this order.
    tied: OnceLock<Tied>,
    /// One makes what is tied, the others wait.
    tying: Mutex<()>,
    fd: OwnedFd,
    region: Arc<Region>,
    /// Something may be writing to the memory for as long as this process lives.
    abandoned: OnceLock<()>,
}

type Tied = Arc<dyn Any + Send + Sync>;

/// State of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Nothing.
    Free,
    /// Its worker is copying into it.
    Filling,
    /// It holds a whole image that nobody has made durable yet.
    Sealed,
    /// Somebody makes its image durable.
    Taken,
}

impl State {
    const fn code(self) -> u64 {
        match self {
            State::Free => 0,
            State::Filling => 1,
            State::Sealed => 2,
            State::Taken => 3,
        }
    }

    const fn of(word: u64) -> State {
        match word & 3 {
            0 => State::Free,
            1 => State::Filling,
            2 => State::Sealed,
            _ => State::Taken,
        }
    }
}

/// Cost of making a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Made {
    /// Of memory, all of them in use from now on.
    pub bytes: u64,
    pub took: Duration,
}

/// A part of an image, and where in it it begins.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    pub at: u64,
    pub bytes: &'a [u8],
}

/// Contents for a slot.
#[derive(Clone, Copy, Debug)]
pub struct Image<'a> {
    /// Step of the save: the one that is not begun yet.
    pub step: u64,
    /// The digest of the generation that saves.
    pub generation: Id,
    /// Length of the image; what no source covers is zeros.
    pub bytes: u64,
    /// Ascending, and apart from each other.
    pub sources: &'a [Source<'a>],
    pub note: &'a [u8],
}

/// Why a slot cannot be made, mapped, filled or taken.
#[derive(Debug, thiserror::Error)]
pub enum SlotError {
    #[error(
        "{what} a checkpoint slot of {bytes} bytes: {source}{}",
        region::help(source)
    )]
    Io {
        what: &'static str,
        bytes: u64,
        source: io::Error,
    },
    #[error("the descriptor is no checkpoint slot: {0}")]
    Foreign(&'static str),
    #[error(
        "the checkpoint slot has layout {found}, this version knows {known}: use a runtime and a `muster` of the same release"
    )]
    Layout { found: u64, known: u64 },
    #[error("the checkpoint slot is busy: {state:?}, with step {step}")]
    Busy { state: State, step: u64 },
    #[error(
        "the save has {need} bytes of {what}, the checkpoint slot room for {have}: start the job with larger slots"
    )]
    TooSmall {
        what: &'static str,
        need: u64,
        have: u64,
    },
    #[error("the parts of the image are not in order, overlap, or go beyond its end: {0}")]
    Sources(u64),
    #[error("the sealed checkpoint slot is damaged: {0}")]
    Damaged(&'static str),
    #[error("a part of the image could not be copied from where it is, and nothing was sealed")]
    Far(#[source] FarError),
    /// The slot is its worker's, and unusable, until that has ended.
    #[error(
        "a part of the image could not be copied from where it is, and may still be on its way: nothing was sealed, and nobody fills the slot again until this process has ended"
    )]
    Abandoned(#[source] FarError),
}

impl Slot {
    /// Makes a slot for images and notes of up to so many bytes, every page of it touched by this
    /// process: the memory is charged to it.
    ///
    /// # Errors
    /// No memory, or no descriptor, is left.
    pub fn create(image: u64, note: u64, threads: usize) -> Result<(Arc<Slot>, Made), SlotError> {
        let began = Instant::now();
        let shape = Shape::new(image, note)?;
        let (fd, region) = Region::create(shape)?;
        region.populate(threads)?;
        let slot = Arc::new(Slot::of(fd, region));
        let made = Made {
            bytes: shape.len() as u64,
            took: began.elapsed(),
        };
        Ok((slot, made))
    }

    /// Maps a slot that another process made, and all its pages, so that the first save does not
    /// wait for that either.
    ///
    /// # Errors
    /// The descriptor is no slot of this version, or cannot be mapped.
    pub fn open(fd: OwnedFd, threads: usize) -> Result<Arc<Slot>, SlotError> {
        let region = Region::open(fd.as_fd())?;
        region.populate(threads)?;
        Ok(Arc::new(Slot::of(fd, region)))
    }

    /// Maps a slot whose owners are dead, whoever filled it and whoever wrote from it: what was sealed is sealed, what
    /// was being filled is void. Its pages are there already. Also whether it was being filled: who did that may not
    /// be dead for certain, and could write on, so it is not to be filled again.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn inherit(fd: OwnedFd) -> Result<(Arc<Slot>, bool), SlotError> {
        let region = Region::open(fd.as_fd())?;
        let slot = Slot::of(fd, region);
        let torn = slot.state().0 == State::Filling;
        slot.reclaim();
        slot.keep(false);
        Ok((Arc::new(slot), torn))
    }

    fn of(fd: OwnedFd, region: Region) -> Slot {
        Slot {
            tied: OnceLock::new(),
            tying: Mutex::default(),
            fd,
            region: Arc::new(region),
            abandoned: OnceLock::new(),
        }
    }

    /// Keeps something that belongs to this mapping of the image's memory, such as its registration with a driver, and
    /// drops it right before the memory is unmapped. It is made once; what could not be made is tried again by the next
    /// call. `None` if there is something of another type.
    ///
    /// # Errors
    /// It could not be made.
    pub fn tie<T: Any + Send + Sync, E>(
        &self,
        make: impl FnOnce(*mut [u8]) -> Result<T, E>,
    ) -> Result<Option<&T>, E> {
        if self.tied.get().is_none() {
            let _alone = self.tying.lock().unwrap_or_else(PoisonError::into_inner);
            if self.tied.get().is_none() {
                let made: Tied = Arc::new(make(self.region.image_memory())?);
                // Nobody else sets it: this is behind the lock.
                let _set = self.tied.set(made);
            }
        }
        Ok(self.tied())
    }

    /// The value that is [tied](Self::tie) to it.
    pub fn tied<T: Any + Send + Sync>(&self) -> Option<&T> {
        self.tied.get()?.downcast_ref()
    }

    /// Something may be writing to the memory from now on, and nobody will ever know when it has ended. It stays
    /// mapped, with what is tied to it, for as long as this process lives: that is what the counts that are not given
    /// back do.
    fn abandon(&self) {
        if self.abandoned.set(()).is_ok() {
            std::mem::forget(Arc::clone(&self.region));
            std::mem::forget(self.tied.get().cloned());
        }
    }

    /// Its descriptor, for another process.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The longest image, and the longest note, in bytes.
    pub fn capacity(&self) -> (u64, u64) {
        let shape = self.region.shape();
        (shape.image, shape.note)
    }

    /// Its state and its step.
    pub fn state(&self) -> (State, u64) {
        let state = State::of(self.region.load(word::STATE));
        (state, self.region.load(word::STEP))
    }

    /// Copies an image into the slot and seals it. Returns how long that took: the time for which a
    /// save stalls its rank.
    ///
    /// # Errors
    /// The slot is busy ([`SlotError::Busy`]), too small, or the sources are no image. It is as it was
    /// then.
    pub fn fill(&self, image: &Image<'_>, threads: usize) -> Result<Duration, SlotError> {
        self.fill_with(image, &(), threads)
    }

    /// The same of an image of which a part has to be brought. It is sealed once all of that is there and
    /// hashed; chunks are hashed while later ones are brought.
    ///
    /// # Errors
    /// As [`fill`](Self::fill); or something was not brought ([`SlotError::Far`]): then the slot is free, and
    /// what was in it is gone. Or it may still be on its way ([`SlotError::Abandoned`]): then the slot stays as it is.
    pub fn fill_with(
        &self,
        image: &Image<'_>,
        far: &impl Far,
        threads: usize,
    ) -> Result<Duration, SlotError> {
        let began = Instant::now();
        let shape = self.region.shape();
        let fits = |what, need: u64, have| match need > have {
            true => Err(SlotError::TooSmall { what, need, have }),
            false => Ok(()),
        };
        fits("image", image.bytes, shape.image)?;
        fits("note", image.note.len() as u64, shape.note)?;
        check(image, far.spans())?;
        if self.abandoned.get().is_some() {
            // Also where somebody took this process for dead, and has freed it.
            let before = "an earlier copy may still be on its way";
            return Err(SlotError::Abandoned(before.into()));
        }
        let filling = self.step_on(State::Free, State::Filling)?;
        self.keep(false);
        self.begin_sums(filling, image.bytes);

        if let Err(error) = self.copy(image, far, threads) {
            if self.abandoned.get().is_some() {
                return Err(SlotError::Abandoned(error));
            }
            // It fails when somebody took this process for dead meanwhile, and has freed it.
            let free = after(filling, State::Free);
            let _ = self.region.exchange(word::STATE, filling, free);
            return Err(SlotError::Far(error));
        }
        muster_fault::point("slot.filled");
        self.region.put_note(image.note);
        self.region.store(word::STEP, image.step);
        for (at, bytes) in word::GENERATION
            .into_iter()
            .zip(image.generation.0.as_chunks().0)
        {
            self.region.store(at, u64::from_le_bytes(*bytes));
        }
        self.region.store(word::IMAGE, image.bytes);
        self.region.store(word::NOTE, image.note.len() as u64);
        let head = self.region.head_sum(image.bytes, image.note.len() as u64);
        self.region.store(word::HEAD_SUM, head);
        // Fails only when somebody took this process for dead meanwhile.
        self.region
            .exchange(word::STATE, filling, after(filling, State::Sealed))
            .map_err(|found| self.busy(found))?;
        Ok(began.elapsed())
    }

    /// Copies the image, and writes down the sums of its chunks.
    fn copy(&self, image: &Image<'_>, far: &impl Far, threads: usize) -> Result<(), FarError> {
        // On every way out: who fills the slot next would find a device writing to it.
        let ending = Ending { far, slot: self };
        far.begin()?;
        let chunks = usize::try_from(chunks_of(image.bytes)).unwrap_or(usize::MAX);
        let copied = pool::each(
            threads,
            chunks,
            || Ok::<(), FarError>(()),
            |(), chunk| {
                let begin = chunk as u64 * CHUNK;
                let end = image.bytes.min(begin + CHUNK);
                far.bring(self.region.image_memory(), begin, end)?;
                let room = self.region.image_part(begin, end);
                let cursor = Cursor::new(image.sources, far.spans(), begin, end);
                self.region.put_sum(chunk as u64, cursor.copy_into(room));
                Ok(())
            },
        );
        copied?;
        ending.over()
    }

    /// Takes a sealed slot, to make its image durable; `None` when it is not sealed. The slot is free
    /// again when what is returned is released, and sealed again when it is dropped.
    ///
    /// # Errors
    /// [`SlotError::Damaged`]: what the seal says does not hold. The slot is free then.
    pub fn take(self: &Arc<Self>) -> Result<Option<Sealed>, SlotError> {
        let Ok(taken) = self.step_on(State::Sealed, State::Taken) else {
            return Ok(None);
        };
        match self.read() {
            Ok(head) => Ok(Some(Sealed {
                slot: Arc::clone(self),
                taken,
                step: head.step,
                generation: head.generation,
                bytes: head.bytes,
                sums: head.sums,
                note: head.note,
            })),
            Err(error) => {
                self.region.store(word::STATE, after(taken, State::Free));
                Err(error)
            }
        }
    }

    /// The owner of this slot's present state, worker or writer, is dead: what it was filling is
    /// void, what it was writing is still sealed. Nothing changes in other states.
    pub fn reclaim(&self) {
        let now = self.region.load(word::STATE);
        let then = match State::of(now) {
            State::Filling => after(now, State::Free),
            State::Taken => after(now, State::Sealed),
            State::Free | State::Sealed => return,
        };
        // Somebody else was faster, and it is not ours to reclaim any more.
        let _ = self.region.exchange(word::STATE, now, then);
    }

    /// Reads its last seal.
    fn read(&self) -> Result<Head, SlotError> {
        let shape = self.region.shape();
        let bytes = self.region.load(word::IMAGE);
        let note = self.region.load(word::NOTE);
        if bytes > shape.image || note > shape.note {
            return Err(SlotError::Damaged("it says that it holds more than fits"));
        }
        // Once: it may change below our eyes, and is compared as it was read.
        let sums = self.region.sums(bytes);
        let note = self.region.note(note);
        let step = self.region.load(word::STEP);
        let mut generation = [0; 32];
        for (to, at) in generation.chunks_exact_mut(8).zip(word::GENERATION) {
            to.copy_from_slice(&self.region.load(at).to_le_bytes());
        }
        let generation = Bytes(generation);
        let said = self.region.load(word::HEAD_SUM);
        if region::head_sum(step, &generation, bytes, &sums, &note) != said {
            return Err(SlotError::Damaged("its head does not match its checksum"));
        }
        Ok(Head {
            step,
            generation,
            bytes,
            sums,
            note,
        })
    }

    /// From a state to the next one; the word that is there then.
    fn step_on(&self, from: State, to: State) -> Result<u64, SlotError> {
        let now = self.region.load(word::STATE);
        if State::of(now) != from {
            return Err(self.busy(now));
        }
        let then = after(now, to);
        self.region
            .exchange(word::STATE, now, then)
            .map_err(|found| self.busy(found))?;
        Ok(then)
    }

    fn busy(&self, word: u64) -> SlotError {
        SlotError::Busy {
            state: State::of(word),
            step: self.region.load(word::STEP),
        }
    }
}

/// The word after this one. It counts, so that nobody mistakes a state for an earlier one like it.
const fn after(word: u64, state: State) -> u64 {
    ((word >> 2).wrapping_add(1) << 2) | state.code()
}

/// That the sources are an image, with what is brought in between.
fn check(image: &Image<'_>, spans: &[Span]) -> Result<(), SlotError> {
    let here = |source: &Source<'_>| (source.at, source.bytes.len() as u64);
    let mut sources = image.sources.iter().map(here).peekable();
    let mut spans = spans.iter().map(|span| (span.at, span.bytes)).peekable();
    let mut end = 0;
    loop {
        let next = match (sources.peek(), spans.peek()) {
            (Some(source), Some(span)) if span < source => spans.next(),
            (Some(_), _) => sources.next(),
            (None, _) => spans.next(),
        };
        let Some((at, bytes)) = next else {
            return Ok(());
        };
        match at.checked_add(bytes) {
            Some(until) if at >= end && until <= image.bytes => end = until,
            _ => return Err(SlotError::Sources(at)),
        }
    }
}

/// Contents of a seal, in one reading.
struct Head {
    step: u64,
    generation: Id,
    bytes: u64,
    sums: Vec<u64>,
    note: Vec<u8>,
}

/// A sealed slot's content, held by who makes it durable.
#[derive(Debug)]
pub struct Sealed {
    slot: Arc<Slot>,
    taken: u64,
    /// The step that the save is of.
    pub step: u64,
    /// The digest of the generation that saved.
    pub generation: Id,
    bytes: u64,
    /// CRC-64/NVME of each chunk, as its worker sealed it: what a file made of it has to have.
    pub sums: Vec<u64>,
    pub note: Vec<u8>,
}

impl Sealed {
    /// The image; it begins at a page. Its writer sealed it, but could still write: what was read of
    /// it counts only if it hashes to [`sums`](Self::sums).
    pub fn image(&self) -> &[u8] {
        self.slot.region.image(self.bytes)
    }

    /// BLAKE3 of all its checksums: names what was sealed.
    pub fn digest(&self) -> Id {
        let mut hash = blake3::Hasher::new();
        for sum in &self.sums {
            hash.update(&sum.to_le_bytes());
        }
        hash.update(&self.note);
        Bytes(*hash.finalize().as_bytes())
    }

    /// The image is safe elsewhere, or nobody wants it: the slot may be filled again.
    pub fn release(self) {
        let free = after(self.taken, State::Free);
        // It fails when this process was taken for dead meanwhile.
        let _ = (self.slot.region).exchange(word::STATE, self.taken, free);
    }
}

impl Drop for Sealed {
    fn drop(&mut self) {
        let sealed = after(self.taken, State::Sealed);
        // It fails after a release, as it should.
        let _ = (self.slot.region).exchange(word::STATE, self.taken, sealed);
    }
}

const _: () = assert!(CHUNK.is_multiple_of(PAGE as u64));

#[cfg(test)]
mod tests;
