//! A chunk of a file that nobody holds, out of parity: what is left of the sum without the others' chunks, which are in
//! their nodes' memory.
//!
//! Every chunk is verified by the manifest before it is taken away from a sum, and so is what is left. What does not
//! verify, is gone or late costs its way, and the next one or the next tier is asked.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use muster_checkpoint::manifest::DataFile;
use muster_checkpoint::parity::fold;
use muster_protocol::memory::parity::{Parity, Stripe};
use muster_protocol::memory::{Answer, Ask, CHUNK, MAX_PEERS, Name};

use super::{Below, Held, Holder, Tiers, held_of, lock};
use crate::memory::{Link, time_for};

/// What a launcher holds of several files, added up.
#[derive(Debug)]
struct Sum {
    holder: usize,
    /// By which the launcher knows it.
    number: u64,
    /// The files' paths, and which part of each is in it.
    parts: Vec<(String, Stripe)>,
}

/// One of the sums that a file is in.
#[derive(Debug)]
pub(super) struct Way {
    sum: Arc<Sum>,
    part: u8,
    stripe: Stripe,
    /// It led to nothing.
    spoiled: AtomicBool,
}

/// Bytes by the launcher whose parity they came out of, and those whose memory was needed for it.
pub(super) type Rebuilt = BTreeMap<(usize, Vec<usize>), u64>;

/// Why a chunk does not come out.
enum Trouble {
    /// The sum does not come.
    Sum(io::Error),
    /// Something is in it that cannot be, or was not when its launcher was asked.
    Odd,
    /// Nobody has this file's chunk, which is in the sum.
    Without(String),
}

impl<S: Below> Tiers<S> {
    /// Takes in what a launcher holds of this checkpoint. Whether that is anything.
    pub(super) fn add_parity(
        &mut self,
        holder: usize,
        parity: &Parity,
        named: &BTreeMap<Name, &DataFile>,
    ) -> bool {
        let known = parity.parts.iter().map(|part| {
            let file = named.get(&parity.name(part))?;
            (file.bytes == part.bytes).then_some((part.stripe, *file))
        });
        // Of another checkpoint.
        let Some(known) = known.collect::<Option<Vec<_>>>() else {
            return false;
        };
        let parts = known
            .iter()
            .map(|(stripe, file)| (file.path.clone(), *stripe));
        let sum = Arc::new(Sum {
            holder,
            number: parity.number,
            parts: parts.collect(),
        });
        for ((stripe, file), part) in known.iter().zip(0u8..) {
            held_of(&mut self.held, file).ways.push(Way {
                sum: sum.clone(),
                part,
                stripe: *stripe,
                spoiled: AtomicBool::new(false),
            });
        }
        !sum.parts.is_empty()
    }

    /// Whether the chunk that begins here came out of parity, as it has to be.
    pub(super) fn has_rebuilt(&self, path: &str, held: &Held, at: u64, into: &mut [u8]) -> bool {
        let chunk = at / CHUNK;
        if !at.is_multiple_of(CHUNK) || held.length(chunk) != into.len() as u64 {
            return false;
        }
        for way in &held.ways {
            let (Some(piece), Some(holder)) =
                (way.stripe.piece(chunk), self.holders.get(way.sum.holder))
            else {
                continue;
            };
            if way.spoiled.load(Ordering::Relaxed) || holder.lost.load(Ordering::Relaxed) {
                continue;
            }
            let why = match self.rebuild(way, holder, piece, into) {
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
                Err(Trouble::Without(other)) => {
                    let name = &holder.name;
                    format!(
                        "{path} does not come out of {name}'s parity without {other}, which is in no memory"
                    )
                }
            };
            way.spoiled.store(true, Ordering::Relaxed);
            self.note(why);
        }
        false
    }

    /// What is left of a piece without the other files' chunks. Whose memory was needed for it, ascending.
    fn rebuild(
        &self,
        way: &Way,
        holder: &Holder,
        piece: u32,
        into: &mut [u8],
    ) -> Result<Vec<usize>, Trouble> {
        let number = way.sum.number;
        let unfold = |link: &mut Link| unfold(link, number, way.part, piece, into);
        let mut left = holder.over_link(unfold).map_err(Trouble::Sum)?;
        let mut helpers = Vec::new();
        let mut buffer = Vec::new();
        for ((path, stripe), part) in way.sum.parts.iter().zip(0u8..) {
            let is_in = left & 1 != 0;
            left >>= 1;
            if !is_in || part == way.part {
                continue;
            }
            let without = || Trouble::Without(path.clone());
            let held = self.held.get(path).ok_or_else(without)?;
            let chunk = stripe.chunk(piece);
            // All of it: the manifest has no sum of less.
            buffer.resize(held.length(chunk) as usize, 0);
            if buffer.is_empty() {
                return Err(Trouble::Odd);
            }
            let helper = self.verified(path, held, chunk, &mut buffer);
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

    /// Whose copy of a chunk this is, as it has to be.
    fn verified(&self, path: &str, held: &Held, chunk: u64, into: &mut [u8]) -> Option<usize> {
        while let Some(number) = self.copied(path, held, chunk * CHUNK, into) {
            let copy = held.copies.get(number)?;
            if held.is_right(chunk, into) {
                return Some(copy.holder);
            }
            self.spoil(path, copy, chunk * CHUNK);
        }
        None
    }

    /// What came out of parity, by what people are told that it came from.
    pub(super) fn of_parity(&self) -> Vec<(String, u64)> {
        let rebuilt = lock(&self.rebuilt);
        let mut all: BTreeMap<String, u64> = BTreeMap::new();
        for ((holder, helpers), bytes) in rebuilt.iter() {
            let label = self.label(*holder, helpers).unwrap_or_default();
            *all.entry(label).or_default() += bytes;
        }
        match all.len() > MAX_PEERS {
            true => vec![("parity".to_owned(), all.values().sum())],
            false => all.into_iter().collect(),
        }
    }

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
