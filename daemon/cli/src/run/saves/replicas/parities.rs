//! Parity that this launcher holds for others: of each save the stripes of other nodes' images, added up. Knows
//! nothing of what is of use, and of no budget but the room that it is told.

use std::io;
use std::sync::{Arc, Mutex};

use memmap2::MmapMut;
use muster_checkpoint::parity::fold;
use muster_checkpoint::sum::CHUNK;
use muster_protocol::memory::parity::{MAX_LANES, MAX_PARITIES, MAX_PARTS, Parity as Told, Part};

/// Images that are added up with each other: those of one save, of ranks with the same number on their nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Lane {
    pub(super) step: u64,
    /// As in a name.
    pub(super) generation: [u8; 8],
    pub(super) local: u16,
}

/// One chunk of each stripe, added up.
#[derive(Debug)]
pub(super) struct Piece {
    /// As long as a chunk may be; the kernel finds its pages when something is added.
    bytes: Arc<MmapMut>,
    /// Which parts are in it, a bit for each.
    parts: u32,
}

/// Why a chunk is not in a piece.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Busy;

impl Piece {
    fn new() -> io::Result<Piece> {
        let bytes = MmapMut::map_anon(CHUNK as usize)?;
        // No worker needs it, and to copy its page tables would hold up each one that is started.
        bytes.advise(memmap2::Advice::DontFork)?;
        Ok(Piece {
            bytes: Arc::new(bytes),
            parts: 0,
        })
    }

    /// Adds a part's chunk, once.
    pub(super) fn add(&mut self, part: u8, chunk: &[u8]) -> Result<(), Busy> {
        let bit = 1 << part;
        if self.parts & bit == 0 {
            // Who reads it reads what it was: nobody waits for a reader.
            let bytes = Arc::get_mut(&mut self.bytes).ok_or(Busy)?;
            fold(bytes, chunk);
            self.parts |= bit;
        }
        Ok(())
    }

    /// Changes a bit, as memory may.
    #[cfg(test)]
    pub(super) fn flip(&mut self, at: usize) {
        Arc::get_mut(&mut self.bytes).unwrap()[at] ^= 1;
    }

    /// The bytes, and which parts are in them, if this one is.
    pub(super) fn with(&self, part: u8) -> Option<(Arc<MmapMut>, u32)> {
        (self.parts & (1 << part) != 0).then(|| (self.bytes.clone(), self.parts))
    }
}

/// The parity of one lane.
#[derive(Debug)]
struct Parity {
    number: u64,
    lane: Lane,
    /// Only ever added to: a part's place is its bit. With how many of its pieces are in.
    parts: Vec<(Part, u32)>,
    pieces: Vec<Arc<Mutex<Piece>>>,
    /// The longest chunk that is, or may soon be, in each.
    lengths: Vec<u64>,
}

impl Parity {
    fn memory(&self) -> u64 {
        self.lengths.iter().sum()
    }

    fn is_whole(&self, file: &str) -> bool {
        let whole = |(part, have): &(Part, u32)| {
            part.file == file && *have >= part.stripe.pieces(part.bytes)
        };
        self.parts.iter().any(whole)
    }
}

/// Which part of which parity something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Of {
    pub(super) number: u64,
    pub(super) part: u8,
}

/// Answer to a launcher that brings a stripe.
#[derive(Debug)]
pub(super) enum Entry {
    /// From this piece on.
    From(Of, u32),
    Have,
    NoRoom,
    /// There are as many lanes as may be.
    Full,
    Refused(&'static str),
}

/// All of it.
#[derive(Debug, Default)]
pub(super) struct Parities {
    last: u64,
    all: Vec<Parity>,
}

impl Parities {
    /// Bytes of memory that it takes, once all is there that was said to come.
    pub(super) fn memory(&self) -> u64 {
        self.all.iter().map(Parity::memory).sum()
    }

    /// Takes in a stripe, if so many more bytes are enough for it.
    pub(super) fn enter(&mut self, lane: Lane, part: Part, room: u64) -> Entry {
        let at = self.all.iter().position(|parity| parity.lane == lane);
        let known = at.and_then(|at| self.all.get(at));
        let pieces = part.stripe.pieces(part.bytes);
        match known {
            Some(parity) => {
                let of_file = |(other, _): &(Part, u32)| other.file == part.file;
                let place = parity.parts.iter().position(of_file);
                if let Some((place, (same, have))) =
                    place.and_then(|place| Some((place, parity.parts.get(place)?)))
                {
                    return match (*same == part, *have >= pieces) {
                        (true, true) => Entry::Have,
                        (true, false) => Entry::From(of(parity.number, place), *have),
                        (false, _) => Entry::Refused("another stripe of it is there already"),
                    };
                }
                if parity.parts.len() >= MAX_PARTS {
                    return Entry::Refused("it has stripes of as many nodes as it may have");
                }
            }
            None if self.all.len() >= MAX_LANES => return Entry::Full,
            None => {}
        }
        let length = |piece| {
            let range = part.stripe.range(piece, part.bytes);
            range.end - range.start
        };
        let lengths = known.map_or(&[][..], |parity| &parity.lengths);
        let more = (0..pieces).zip(lengths.iter().chain(std::iter::repeat(&0)));
        let more: u64 = more
            .map(|(piece, have)| length(piece).saturating_sub(*have))
            .sum();
        if more > room {
            return Entry::NoRoom;
        }
        let missing = (pieces as usize).saturating_sub(lengths.len());
        let new: io::Result<Vec<_>> = (0..missing)
            .map(|_| Ok(Arc::new(Mutex::new(Piece::new()?))))
            .collect();
        let Ok(new) = new else {
            return Entry::Refused("that node gets no memory from its kernel");
        };
        let parity = match at {
            Some(at) => self.all.get_mut(at),
            None => {
                self.last += 1;
                self.all.push(Parity {
                    number: self.last,
                    lane,
                    parts: Vec::new(),
                    pieces: Vec::new(),
                    lengths: Vec::new(),
                });
                self.all.last_mut()
            }
        };
        let Some(parity) = parity else {
            return Entry::NoRoom;
        };
        parity.lengths.resize(parity.lengths.len() + missing, 0);
        parity.pieces.extend(new);
        for (piece, have) in (0..pieces).zip(&mut parity.lengths) {
            *have = length(piece).max(*have);
        }
        parity.parts.push((part, 0));
        Entry::From(of(parity.number, parity.parts.len() - 1), 0)
    }

    /// A piece, to be added to or read.
    pub(super) fn piece(&self, number: u64, piece: u32) -> Option<Arc<Mutex<Piece>>> {
        let parity = self.all.iter().find(|parity| parity.number == number)?;
        parity.pieces.get(piece as usize).cloned()
    }

    /// So many pieces of a part are in. Whether it is the last one, and of which lane.
    pub(super) fn advance(&mut self, of: Of, pieces: u32) -> Option<Lane> {
        let parity = self.all.iter_mut().find(|p| p.number == of.number)?;
        let (part, have) = parity.parts.get_mut(usize::from(of.part))?;
        *have = pieces.max(*have);
        (*have >= part.stripe.pieces(part.bytes)).then_some(parity.lane)
    }

    /// Older lanes of the same ranks of which this one has every image, whole.
    pub(super) fn older(&self, than: Lane) -> Vec<Lane> {
        let Some(new) = self.all.iter().find(|parity| parity.lane == than) else {
            return Vec::new();
        };
        let replaced = |old: &&Parity| {
            let files = old.parts.iter().map(|(part, _)| &part.file);
            is_before(old.lane, than) && files.into_iter().all(|file| new.is_whole(file))
        };
        self.all
            .iter()
            .filter(replaced)
            .map(|old| old.lane)
            .collect()
    }

    pub(super) fn lanes(&self) -> impl Iterator<Item = Lane> {
        self.all.iter().map(|parity| parity.lane)
    }

    /// Lets the others go; their memory.
    pub(super) fn retain(&mut self, stays: impl Fn(Lane) -> bool) -> Vec<Vec<Arc<Mutex<Piece>>>> {
        let gone = (self.all).extract_if(.., |parity| !stays(parity.lane));
        gone.map(|parity| parity.pieces).collect()
    }

    /// Those whose number is above this one, as many as one answer names.
    pub(super) fn list(&self, above: u64) -> Vec<Told> {
        let told = |parity: &Parity| Told {
            number: parity.number,
            step: parity.lane.step,
            generation: parity.lane.generation,
            parts: parity.parts.iter().map(|(part, _)| part.clone()).collect(),
        };
        // Their numbers ascend.
        let more = self.all.iter().filter(|parity| parity.number > above);
        more.take(MAX_PARITIES).map(told).collect()
    }
}

/// Whether it is of the same ranks, and an earlier step.
pub(super) fn is_before(old: Lane, new: Lane) -> bool {
    (old.generation, old.local) == (new.generation, new.local) && old.step < new.step
}

fn of(number: u64, place: usize) -> Of {
    // One of MAX_PARTS.
    let part = place as u8;
    Of { number, part }
}

#[cfg(test)]
mod tests;
