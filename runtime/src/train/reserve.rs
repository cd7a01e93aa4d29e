//! Memory for a second state: what newcomers copy lies in it, and what a newcomer copies comes into it.
//!
//! It is kept, and its pages are touched before anybody waits for them: to get a gigabyte from the kernel takes
//! several times as long as to fill one that is there.

use std::collections::TryReserveError;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// For fewer bytes there is no other thread.
const SPAN: usize = 16 << 20;
/// More threads than this do not copy faster: memory is the limit.
const THREADS: usize = 4;

/// The memory of one training.
#[derive(Clone, Debug)]
pub(super) struct Reserve(Arc<Mutex<Kept>>);

struct Kept {
    /// Memory that comes back stays, and is there before it is needed.
    keeps: bool,
    free: Option<Vec<u8>>,
    /// How many are in use.
    lent: usize,
    making: Making,
    /// Somebody waits for what is being made.
    wanted: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Making {
    No,
    Now,
    /// There was not as much memory.
    Failed,
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kept")
            .field("keeps", &self.keeps)
            .field("free", &self.free.as_ref().map(Vec::len))
            .field("lent", &self.lent)
            .field("making", &self.making)
            .field("wanted", &self.wanted)
            .finish()
    }
}

impl Reserve {
    /// `keeps`: whether memory is there before it is needed, and stays when it is not any more.
    pub(super) fn new(keeps: bool) -> Reserve {
        Reserve(Arc::new(Mutex::new(Kept {
            keeps,
            free: None,
            lent: 0,
            making: Making::No,
            wanted: false,
        })))
    }

    /// Has memory made for so many bytes, on a thread of its own, if it is to be there before it is needed.
    pub(super) fn prepare(&self, len: usize) {
        let mut kept = self.kept();
        kept.wanted = false;
        if kept.keeps && kept.lent == 0 {
            self.make(&mut kept, len);
        } else if !kept.keeps {
            // Made for a copy that nobody waits for any more.
            kept.free = None;
        }
    }

    /// Whether memory for so many bytes is there; if not, it is being made.
    pub(super) fn is_ready(&self, len: usize) -> Result<bool, NoMemory> {
        let mut kept = self.kept();
        kept.wanted = true;
        if kept.making == Making::Failed {
            kept.making = Making::No;
            return Err(NoMemory(len));
        }
        Ok(self.make(&mut kept, len))
    }

    /// Whether it is there already.
    fn make(&self, kept: &mut Kept, len: usize) -> bool {
        if kept.free.as_ref().is_some_and(|free| free.len() >= len) {
            return true;
        }
        if kept.making == Making::Now {
            return false;
        }
        kept.free = None;
        let home = Arc::downgrade(&self.0);
        let made = move || {
            let touched = touched(len);
            if let Some(home) = home.upgrade() {
                let mut kept = lock(&home);
                // Where nobody waits for it, it is tried again when somebody does.
                kept.making = match (&touched, kept.wanted) {
                    (None, true) => Making::Failed,
                    _ => Making::No,
                };
                kept.free = touched.filter(|_| kept.keeps || kept.wanted);
            }
        };
        let name = "muster-reserve".to_owned();
        let started = std::thread::Builder::new().name(name).spawn(made);
        kept.making = match started {
            Ok(_) => Making::Now,
            Err(_) if kept.wanted => Making::Failed,
            Err(_) => Making::No,
        };
        false
    }

    /// Memory for so many bytes: what is there, or else new memory, whose pages come as they are written.
    pub(super) fn take(&self, len: usize) -> Result<Buffer, NoMemory> {
        let mut kept = self.kept();
        let bytes = match kept.free.take() {
            Some(bytes) if bytes.len() >= len => bytes,
            // What is too small is of no use any more.
            _ => fresh(len).map_err(|_| NoMemory(len))?,
        };
        kept.lent += 1;
        Ok(Buffer {
            bytes,
            len,
            home: Arc::downgrade(&self.0),
        })
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        lock(&self.0)
    }

    /// How many are in use, and whether one is there.
    #[cfg(test)]
    pub(super) fn counts(&self) -> (usize, bool) {
        let kept = self.kept();
        (kept.lent, kept.free.is_some())
    }
}

fn lock(kept: &Mutex<Kept>) -> MutexGuard<'_, Kept> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

/// There is no memory for so many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoMemory(pub(super) usize);

/// That there is too little is an error, and not the end of the process.
fn fresh(len: usize) -> Result<Vec<u8>, TryReserveError> {
    Vec::<u8>::new().try_reserve_exact(len)?;
    Ok(vec![0; len])
}

/// Memory whose pages are there. Written with something else than zeros, which could be had without a page.
fn touched(len: usize) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).ok()?;
    bytes.resize(len, 0xa5);
    Some(bytes)
}

/// Memory that is in use. It goes back when it is not any more.
pub(super) struct Buffer {
    bytes: Vec<u8>,
    len: usize,
    home: Weak<Mutex<Kept>>,
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

impl Buffer {
    /// Bytes that are there already, and go nowhere.
    pub(super) fn of(bytes: Vec<u8>) -> Buffer {
        Buffer {
            len: bytes.len(),
            bytes,
            home: Weak::new(),
        }
    }

    /// For so many bytes from now on; what they are is not said. False, if there is no memory.
    pub(super) fn resize(&mut self, len: usize) -> bool {
        if self.bytes.len() < len {
            // First, so that both are never there at once.
            self.bytes = Vec::new();
            match fresh(len) {
                Ok(bytes) => self.bytes = bytes,
                Err(_) => return false,
            }
        }
        self.len = len;
        true
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.bytes.get_mut(..self.len).unwrap_or_default()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(home) = self.home.upgrade() else {
            return;
        };
        let mut kept = lock(&home);
        kept.lent -= 1;
        let larger = (kept.free.as_ref()).is_none_or(|free| free.len() < self.bytes.len());
        if kept.keeps && larger {
            kept.free = Some(std::mem::take(&mut self.bytes));
        }
    }
}

/// Copies each of these to its place, on several threads. A pair is of one length.
pub(super) fn copy<'a>(pairs: impl IntoIterator<Item = (&'a mut [u8], &'a [u8])>) {
    let pairs: Vec<_> = pairs.into_iter().collect();
    let bytes: usize = pairs.iter().map(|(_, from)| from.len()).sum();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = cores.min(THREADS).min(bytes / SPAN).max(1);
    // As long as can be: what is long is copied around the cache.
    let span = bytes.div_ceil(threads).max(1);
    let spans: Vec<_> = (pairs.into_iter())
        .flat_map(|(to, from)| to.chunks_mut(span).zip(from.chunks(span)))
        .collect();
    let left = Mutex::new(spans.into_iter());
    let work = || {
        loop {
            let next = left.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((to, from)) = next else { break };
            let len = to.len().min(from.len());
            to[..len].copy_from_slice(&from[..len]);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            let name = "muster-memory".to_owned();
            // With fewer it takes longer.
            let _fewer = std::thread::Builder::new()
                .name(name)
                .spawn_scoped(scope, work);
        }
        work();
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::eventually;

    #[test]
    fn every_byte_of_every_pair_is_copied() {
        let lens = [0, 1, SPAN - 1, 3 * SPAN + 7, 5];
        let byte = |i: usize| (i % 251) as u8;
        let from: Vec<Vec<u8>> = lens.map(|len| (0..len).map(byte).collect()).into();
        let mut to: Vec<Vec<u8>> = lens.map(|len| vec![255; len]).into();
        let places = to.iter_mut().map(Vec::as_mut_slice);
        copy(places.zip(from.iter().map(Vec::as_slice)));
        assert!(to == from);
    }

    #[test]
    fn memory_is_made_ahead_and_comes_back() {
        let reserve = Reserve::new(true);
        reserve.prepare(1000);
        eventually("it is made", || reserve.counts() == (0, true));
        assert_eq!(reserve.is_ready(1000), Ok(true));
        let mut one = reserve.take(900).unwrap();
        assert_eq!((one.len(), reserve.counts()), (900, (1, false)));
        one.fill(7);
        let place = one.as_ptr();
        // While one is in use, no other is made ahead, but more can be had.
        reserve.prepare(1000);
        let two = reserve.take(900).unwrap();
        assert_eq!(reserve.counts(), (2, false));
        drop(one);
        assert_eq!(reserve.counts(), (1, true));
        drop(two);
        // Of two that are free one goes.
        assert_eq!(reserve.counts(), (0, true));
        let again = reserve.take(10).unwrap();
        assert_eq!((again.as_ptr(), again[0]), (place, 7));
        // A larger one takes its place.
        assert_eq!(reserve.is_ready(2000), Ok(false));
        eventually("it is made", || reserve.is_ready(2000) == Ok(true));
        drop(again);
        assert_eq!(reserve.is_ready(2000), Ok(true));
        // Memory may outlive its home.
        let last = reserve.take(2000).unwrap();
        drop(reserve);
        assert_eq!(last.len(), 2000);
    }

    #[test]
    fn nothing_is_kept_that_is_not_to_be() {
        let reserve = Reserve::new(false);
        reserve.prepare(1000);
        assert_eq!(reserve.counts(), (0, false));
        assert_eq!(reserve.is_ready(1000), Ok(false));
        eventually("it is made", || reserve.is_ready(1000) == Ok(true));
        drop(reserve.take(1000).unwrap());
        assert_eq!(reserve.counts(), (0, false));
        // What was made for nothing goes when a generation begins.
        assert_eq!(reserve.is_ready(1000), Ok(false));
        eventually("it is made", || reserve.is_ready(1000) == Ok(true));
        reserve.prepare(1000);
        assert_eq!(reserve.counts(), (0, false));
    }

    #[test]
    fn more_than_there_is_is_an_error() {
        let reserve = Reserve::new(true);
        let much = isize::MAX as usize;
        assert_eq!(reserve.take(much).err(), Some(NoMemory(much)));
        assert_eq!(reserve.is_ready(much), Ok(false));
        eventually("it fails", || reserve.is_ready(much) == Err(NoMemory(much)));
        let mut small = reserve.take(8).unwrap();
        assert!(!small.resize(much) && small.is_empty());
        assert!(small.resize(16) && small.len() == 16);
    }
}
