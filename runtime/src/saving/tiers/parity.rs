//! A chunk of a file that nobody holds, out of parity: what is left of the sum without the others' chunks, which are in
//! their nodes' memory.
//!
//! Every chunk is verified by the manifest before it is taken away from a sum, and so is what is left. Bytes that do
//! not verify, are gone or are of something else cost this piece of the sum alone, and the next sum or the next tier is
//! asked; a launcher that fails costs what it holds.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use muster_checkpoint::manifest::DataFile;
use muster_checkpoint::parity::fold;
use muster_protocol::memory::parity::{Parity, Stripe};
use muster_protocol::memory::{Answer, Ask, CHUNK, Name};

use super::{Below, Held, Holder, Known, NAMED, Tiers, held_of, lock};
use crate::memory::{Link, time_for};

/// A launcher's sum of several files.
#[derive(Debug)]
struct Sum {
    holder: usize,
    /// By which the launcher knows it.
    number: u64,
    /// Parts in it: a file's path, and which part of the file. No part: it is of nothing that this checkpoint has.
    parts: Vec<(String, Option<Stripe>)>,
    /// The parts, a bit for each, that cannot be taken away: a piece that they are in is not worth its bytes.
    lacks: AtomicU32,
}

/// One of the sums that a file is in.
#[derive(Debug)]
pub(super) struct Way {
    sum: Arc<Sum>,
    part: u8,
    stripe: Stripe,
    /// Pieces that led to nothing.
    spoiled: Mutex<BTreeSet<u32>>,
}

/// Bytes by the launcher whose parity they came out of, and those whose memory was needed for it.
pub(super) type Rebuilt = BTreeMap<(usize, Vec<usize>), u64>;

/// Why a chunk does not come out.
enum Trouble {
    /// The sum does not come.
    Sum(io::Error),
    /// Something is in it that cannot be, or was not when its launcher was asked.
    Odd,
    /// This is in the sum, and of no file of this checkpoint.
    Foreign(String),
    /// Nobody has this file's chunk, which is in the sum.
    Without(String),
}

impl Known {
    /// Takes in what a launcher holds of this checkpoint. Whether that is anything.
    pub(super) fn add_parity(
        &mut self,
        holder: usize,
        parity: &Parity,
        named: &BTreeMap<Name, DataFile>,
    ) -> bool {
        let files = parity.parts.iter().map(|part| {
            let file = named.get(&parity.name(part))?;
            (file.bytes == part.bytes).then_some(file)
        });
        let files: Vec<Option<&DataFile>> = files.collect();
        let both = || files.iter().zip(&parity.parts);
        let parts = both().map(|(file, part)| match file {
            Some(file) => (file.path.clone(), Some(part.stripe)),
            None => (part.file.clone(), None),
        });
        let foreign = files.iter().zip(0u32..).filter(|(file, _)| file.is_none());
        let foreign = foreign.fold(0, |bits, (_, part)| bits | bit(part));
        let sum = Arc::new(Sum {
            holder,
            number: parity.number,
            parts: parts.collect(),
            lacks: AtomicU32::new(foreign),
        });
        for ((file, part), number) in both().zip(0u8..) {
            if let Some(file) = file {
                held_of(&mut self.held, file).ways.push(Arc::new(Way {
                    sum: sum.clone(),
                    part: number,
                    stripe: part.stripe,
                    spoiled: Mutex::default(),
                }));
            }
        }
        files.iter().any(Option::is_some)
    }

    /// Whether some launcher may still give this.
    fn is_anywhere(&self, held: &Held) -> bool {
        held.copies.iter().any(|copy| self.is_there(copy))
    }
}

impl<S: Below> Tiers<S> {
    /// Whether the chunk that begins here came out of parity, as it has to be.
    pub(super) fn has_rebuilt(
        &self,
        known: &Known,
        path: &str,
        held: &Held,
        at: u64,
        into: &mut [u8],
    ) -> bool {
        let chunk = at / CHUNK;
        if !at.is_multiple_of(CHUNK) || held.length(chunk) != into.len() as u64 {
            return false;
        }
        for way in &held.ways {
            let (Some(piece), Some(holder)) =
                (way.stripe.piece(chunk), known.holders.get(way.sum.holder))
            else {
                continue;
            };
            if lock(&way.spoiled).contains(&piece) || holder.lost.load(Ordering::Relaxed) {
                continue;
            }
            let why = match self.rebuild(known, way, holder, piece, into) {
                Ok(helpers) if held.is_right(chunk, into) => {
                    let mut rebuilt = lock(&self.rebuilt);
                    *rebuilt.entry((way.sum.holder, helpers)).or_default() += into.len() as u64;
                    return true;
                }
                Ok(_) => format!(
                    "{path} does not come out of {}'s parity at byte {at}",
                    holder.name
                ),
                Err(Trouble::Sum(error)) if error.kind() == ErrorKind::NotFound => {
                    format!("{path} is not in {}'s parity at byte {at}", holder.name)
                }
                Err(Trouble::Sum(error)) => {
                    holder.lost.store(true, Ordering::Relaxed);
                    format!("{}'s parity failed: {error}", holder.name)
                }
                Err(Trouble::Odd) => format!("{}'s parity is not what it was", holder.name),
                Err(Trouble::Foreign(other)) => format!(
                    "in {}'s parity at byte {at} of {path} is {other}, which is not of this checkpoint",
                    holder.name
                ),
                Err(Trouble::Without(other)) => {
                    let name = &holder.name;
                    format!(
                        "{path} does not come out of {name}'s parity without {other}, which is in no memory"
                    )
                }
            };
            lock(&way.spoiled).insert(piece);
            self.note(why);
        }
        false
    }

    /// Subtracts the other files' chunks from a piece. Returns the holders whose memory was needed for it, ascending.
    fn rebuild(
        &self,
        known: &Known,
        way: &Way,
        holder: &Holder,
        piece: u32,
        into: &mut [u8],
    ) -> Result<Vec<usize>, Trouble> {
        let sum = &*way.sum;
        let ask = |into: &mut [u8]| {
            let unfold = |link: &mut Link| unfold(link, sum.number, way.part, piece, into);
            holder.over_link(unfold).map_err(Trouble::Sum)
        };
        let lacks = sum.lacks.load(Ordering::Relaxed);
        if lacks != 0 {
            // What it is of comes first: bytes that lead to nothing are not sent.
            let without = ask(&mut [])? & lacks;
            let part = sum.parts.get(without.trailing_zeros() as usize);
            if let Some((path, stripe)) = part {
                return Err(match stripe {
                    None => Trouble::Foreign(path.clone()),
                    Some(_) => Trouble::Without(path.clone()),
                });
            }
        }
        let mut left = ask(into)?;
        let mut helpers = Vec::new();
        let mut buffer = Vec::new();
        for ((path, stripe), part) in sum.parts.iter().zip(0u32..) {
            let is_in = left & 1 != 0;
            left >>= 1;
            if !is_in || part == u32::from(way.part) {
                continue;
            }
            let stripe = stripe.ok_or_else(|| Trouble::Foreign(path.clone()))?;
            let without = || {
                if !known
                    .held
                    .get(path)
                    .is_some_and(|held| known.is_anywhere(held))
                {
                    sum.lacks.fetch_or(bit(part), Ordering::Relaxed);
                }
                Trouble::Without(path.clone())
            };
            let held = known.held.get(path).ok_or_else(without)?;
            let chunk = stripe.chunk(piece);
            // All of it: the manifest has no sum of less.
            buffer.resize(held.length(chunk) as usize, 0);
            if buffer.is_empty() {
                return Err(Trouble::Odd);
            }
            let helper = self.verified(known, path, held, chunk, &mut buffer);
            helpers.push(helper.ok_or_else(without)?);
            fold(into, &buffer);
        }
        if left != 0 {
            return Err(Trouble::Odd);
        }
        helpers.sort_unstable();
        helpers.dedup();
        Ok(helpers)
    }

    /// Reads a chunk that is as it has to be. Returns the holder of the copy.
    fn verified(
        &self,
        known: &Known,
        path: &str,
        held: &Held,
        chunk: u64,
        into: &mut [u8],
    ) -> Option<usize> {
        while let Some(number) = self.copied(known, path, held, chunk * CHUNK, into) {
            let copy = held.copies.get(number)?;
            if held.is_right(chunk, into) {
                return Some(copy.holder);
            }
            self.spoil(known, path, copy, chunk * CHUNK);
        }
        None
    }

    /// Bytes that came out of parity, by the origins that people are told.
    pub(super) fn of_parity(&self, known: &Known) -> Vec<(String, u64)> {
        let rebuilt = lock(&self.rebuilt);
        let mut all: BTreeMap<String, u64> = BTreeMap::new();
        for ((holder, helpers), bytes) in rebuilt.iter() {
            let label = known.label(*holder, helpers).unwrap_or_default();
            *all.entry(label).or_default() += bytes;
        }
        match all.len() > NAMED {
            true => vec![("parity".to_owned(), all.values().sum())],
            false => all.into_iter().collect(),
        }
    }
}

impl Known {
    fn label(&self, holder: usize, helpers: &[usize]) -> Option<String> {
        let name = |at: &usize| Some(self.holders.get(*at)?.name.as_str());
        let of = name(&holder)?;
        Some(match helpers {
            [] => format!("{of}'s parity"),
            [one] => format!("{of}'s parity with {}'s memory", name(one)?),
            [a, b] => format!(
                "{of}'s parity with {}'s and {}'s memory",
                name(a)?,
                name(b)?
            ),
            more => format!("{of}'s parity with the memory of {} nodes", more.len()),
        })
    }
}

/// A part's bit.
fn bit(part: u32) -> u32 {
    1u32.checked_shl(part).unwrap_or(0)
}

/// Asks for the first bytes of a piece; which parts are in it.
fn unfold(link: &mut Link, number: u64, part: u8, piece: u32, into: &mut [u8]) -> io::Result<u32> {
    let len = u32::try_from(into.len()).map_err(|_| ErrorKind::InvalidInput)?;
    let ask = Ask::Unfold {
        number,
        part,
        piece,
        len,
    };
    match link.ask(&ask)? {
        Answer::Folded { parts } => {
            link.read(into, Instant::now() + time_for(len.into()))?;
            Ok(parts)
        }
        Answer::Gone => Err(ErrorKind::NotFound.into()),
        _ => Err(ErrorKind::InvalidData.into()),
    }
}
