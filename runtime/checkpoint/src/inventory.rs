//! Whether the ranks of a save hold the same.
//!
//! Every rank plans a save by itself, from what it believes that all hold, and asks nobody. So it leaves with its
//! part what it planned from, as digests ([`Inventory`]), and, of some tensors that others hold as well, what
//! their first bytes hash to. The process that makes the manifest compares them: a save of ranks that differ would be
//! whole by all checksums, and restored wrong.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

use crate::hex::Bytes;
use crate::slice::Slice;

/// The most runs of tensors that are told apart, and so how closely a difference is named.
pub const MAX_RUNS: usize = 32;

/// The most slices of which samples are compared.
pub const MAX_SAMPLES: usize = 64;

/// How much of a slice is looked at, in bytes, from its beginning.
pub const SAMPLE: usize = 4096;

/// The most kinds of ranks that are told apart, and ranks of each that an error names.
const NAMED: usize = 8;

/// The most kinds of ranks that an error names.
const SHOWN: usize = 3;

/// Digests of the tensors, holders and nodes that a rank planned its save from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inventory {
    /// Of everything: tensors, who holds what of them, and nodes.
    pub digest: Bytes<16>,
    /// Of the tensors in order of their names, in at most [`MAX_RUNS`] runs. All but the last are of one length, a
    /// power of two.
    pub runs: Vec<Run>,
    /// The name of the last tensor.
    pub last: String,
    /// Hashes of the slices in [`Plan::sampled`](crate::plan::Plan::sampled), in that order; none where this rank
    /// does not hold the slice, or did not look.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub samples: Vec<Option<Bytes<8>>>,
}

/// Tensors one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// The name of the first.
    pub first: String,
    /// How many there are up to its end, from the very first tensor on.
    pub until: u64,
    /// Of all these.
    pub digest: Bytes<8>,
}

/// Kind of a difference between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Which tensors there are, of which types and shapes, and who holds what.
    Tensors,
    /// Values of a tensor that each of them says it has whole.
    Values,
}

/// Ranks that differ, so that what they saved together is no state of the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    pub what: What,
    /// Two ranks or more by what they have: groups in the order of their first rank.
    pub ranks: Vec<Vec<u32>>,
    /// The first tensor that differs, or the first and last of a run in which one does. None: the tensors are the same.
    pub between: Option<(String, String)>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, ranks) in self.ranks.iter().take(SHOWN).enumerate() {
            f.write_str(if at == 0 { "" } else { " and " })?;
            f.write_str(if ranks.len() == 1 { "rank " } else { "ranks " })?;
            let named: Vec<String> = ranks.iter().take(NAMED).map(u32::to_string).collect();
            f.write_str(&named.join(", "))?;
            if ranks.len() > NAMED {
                write!(f, " and {} more", ranks.len() - NAMED)?;
            }
        }
        if self.ranks.len() > SHOWN {
            f.write_str(" and others")?;
        }
        match self.what {
            What::Tensors => f.write_str(" hold other tensors")?,
            What::Values => f.write_str(" hold other values under one name")?,
        }
        match &self.between {
            Some((first, last)) if first == last => write!(f, ", first at `{first}`")?,
            Some((first, last)) => write!(f, ", first between `{first}` and `{last}`")?,
            None => f.write_str(", in how they are spread over ranks")?,
        }
        f.write_str(match self.what {
            What::Tensors => {
                ": hand over the same names, types and shapes on every rank (an optimizer has state for the parameters alone that had a gradient), and what a rank has alone as a shard"
            }
            What::Values => {
                ": what each rank has for itself is saved as a shard (muster.Shard: of shape (world, …), at offset (rank, 0, …)), or left out"
            }
        })
    }
}

/// Hash of a sample.
pub fn sample(bytes: &[u8]) -> Bytes<8> {
    let start = bytes.get(..SAMPLE).unwrap_or(bytes);
    half(XxHash3_128::oneshot(start))
}

fn half(digest: u128) -> Bytes<8> {
    let [a, b, c, d, e, f, g, h, ..] = digest.to_be_bytes();
    Bytes([a, b, c, d, e, f, g, h])
}

/// Makes the digests of a rank's tensors, which come in order of their names.
pub(crate) struct Listing {
    all: XxHash3_128,
    /// All tensors, and those of a run.
    count: u64,
    length: u64,
    tensors: u64,
    runs: Vec<Run>,
    last: String,
}

impl Listing {
    /// Of so many tensors.
    pub(crate) fn new(tensors: usize) -> Listing {
        Listing {
            all: XxHash3_128::new(),
            count: tensors as u64,
            length: tensors.div_ceil(MAX_RUNS).next_power_of_two() as u64,
            tensors: 0,
            runs: Vec::new(),
            last: String::new(),
        }
    }

    /// The next one: its type, shape, and who holds what of it.
    pub(crate) fn add(
        &mut self,
        name: &str,
        dtype: &str,
        shape: &[u64],
        holders: &BTreeMap<Slice, Vec<u32>>,
    ) {
        if self.tensors.is_multiple_of(self.length) {
            self.close();
            self.runs.push(Run {
                first: name.to_owned(),
                ..Run::default()
            });
        }
        self.tensors += 1;
        if self.tensors == self.count {
            name.clone_into(&mut self.last);
        }
        // Each list comes with its length, so that no two inventories make the same bytes.
        for text in [name, dtype] {
            self.number(text.len() as u64);
            self.all.write(text.as_bytes());
        }
        self.numbers(shape);
        self.number(holders.len() as u64);
        for (slice, ranks) in holders {
            self.numbers(&slice.offset);
            self.numbers(&slice.extent);
            self.number(ranks.len() as u64);
            for rank in ranks {
                self.all.write(&rank.to_le_bytes());
            }
        }
    }

    fn number(&mut self, number: u64) {
        self.all.write(&number.to_le_bytes());
    }

    fn numbers(&mut self, numbers: &[u64]) {
        self.number(numbers.len() as u64);
        for number in numbers {
            self.number(*number);
        }
    }

    fn close(&mut self) {
        if let Some(run) = self.runs.last_mut() {
            run.until = self.tensors;
            run.digest = half(self.all.finish_128());
        }
    }

    /// The inventory of the listed tensors, by ranks on these nodes.
    pub(crate) fn finish(mut self, nodes: &[u32]) -> Inventory {
        self.close();
        for node in nodes {
            self.all.write(&node.to_le_bytes());
        }
        Inventory {
            digest: Bytes(self.all.finish_128().to_be_bytes()),
            runs: self.runs,
            last: self.last,
            samples: Vec::new(),
        }
    }
}

/// The first tensor that is another one in the two, or the first and last of those among which it is.
fn between(a: &Inventory, b: &Inventory) -> Option<(String, String)> {
    let digest = |of: &Inventory, until| {
        let run = of.runs.iter().find(|run| run.until == until);
        run.map(|run| run.digest)
    };
    let total = |of: &Inventory| of.runs.last().map_or(0, |run| run.until);
    // Up to here they are the same.
    let mut same = 0;
    let common =
        (a.runs.iter()).filter_map(|run| Some((run.until, run.digest, digest(b, run.until)?)));
    let mut next = None;
    for (until, mine, theirs) in common {
        if mine != theirs {
            next = Some(until);
            break;
        }
        same = until;
    }
    if same == total(a) && same == total(b) {
        return None;
    }
    // Where one ends, or their runs end at other places: within the longer run.
    let length = |of: &Inventory| of.runs.first().map_or(1, |run| run.until);
    let end = total(a).max(total(b));
    let next = next.unwrap_or_else(|| (same + length(a).max(length(b))).min(end));
    // The name of the tensor after so many: where a run begins.
    let at = |of: &Inventory, count: u64| {
        let before = of.runs.iter().take_while(|run| run.until <= count).count();
        of.runs.get(before).map(|run| run.first.clone())
    };
    let first = at(a, same).into_iter().chain(at(b, same)).min()?;
    if next == same + 1 {
        return Some((first.clone(), first));
    }
    let last = [a, b].map(|of| at(of, next).unwrap_or_else(|| of.last.clone()));
    Some((first, last.into_iter().max()?))
}

/// Ranks by what they have, in the order of their first.
fn groups<T: PartialEq>(all: impl Iterator<Item = (u32, T)>) -> Vec<(T, Vec<u32>)> {
    let mut groups: Vec<(T, Vec<u32>)> = Vec::new();
    for (rank, what) in all {
        match groups.iter().position(|(known, _)| *known == what) {
            Some(at) => groups[at].1.push(rank),
            // More kinds are not told apart.
            None if groups.len() == NAMED => {}
            None => groups.push((what, vec![rank])),
        }
    }
    groups
}

/// Compares what the ranks left, in their order; `sampled` are the names of the tensors of which there are samples. A
/// rank that left nothing is of an older release, and not looked at.
///
/// # Errors
/// Two differ.
pub fn compare(of_ranks: &[Option<&Inventory>], sampled: &[&str]) -> Result<(), Box<Difference>> {
    let all = || {
        (0u32..)
            .zip(of_ranks)
            .filter_map(|(rank, of)| Some((rank, (*of)?)))
    };
    let mut kinds = groups(all().map(|(rank, of)| (rank, of.digest)));
    if kinds.len() > 1 {
        let at = |group: usize| {
            let rank = *kinds.get(group)?.1.first()?;
            of_ranks.get(rank as usize).copied().flatten()
        };
        return Err(Box::new(Difference {
            what: What::Tensors,
            between: at(0).zip(at(1)).and_then(|(a, b)| between(a, b)),
            ranks: kinds.drain(..).map(|(_, ranks)| ranks).collect(),
        }));
    }
    for (at, name) in sampled.iter().enumerate() {
        let looked = all().filter_map(|(rank, of)| Some((rank, (*of.samples.get(at)?)?)));
        let kinds = groups(looked);
        if kinds.len() > 1 {
            return Err(Box::new(Difference {
                what: What::Values,
                between: Some(((*name).to_owned(), (*name).to_owned())),
                ranks: kinds.into_iter().map(|(_, ranks)| ranks).collect(),
            }));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
