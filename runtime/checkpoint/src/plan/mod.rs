//! Plan of which rank writes which bytes: the same answer on every rank, from what every rank holds.
//!
//! Computed once per generation, from values that the ranks know already; nothing here talks to
//! anyone. A slice that several ranks hold is written by one of them, so that a replicated tensor
//! is written once, and large ones are cut into pieces so that every rank writes about as much.

mod assign;

use std::collections::BTreeMap;

use crate::Dtype;
use crate::inventory::{Inventory, Listing, MAX_SAMPLES};
use crate::manifest::{Placed, Tensor};
use crate::part::Draft;
use crate::shard::{Layout, LayoutError, Part, check_name};
use crate::slice::{Slice, SliceError, tile};

/// A rank of the generation; its index is its rank.
#[derive(Clone, Copy, Debug)]
pub struct Rank<'a> {
    /// Which node it is on. Ranks on one node share its disk and its network.
    pub node: u32,
    /// Its tensors in memory. Ranks that hold the same may share one list.
    pub held: &'a [Held],
}

/// A tensor, or a part of it, in a rank's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    pub name: String,
    pub dtype: Dtype,
    /// Of the whole tensor, over all ranks.
    pub shape: Vec<u64>,
    /// This rank's parts of it: boxes, each contiguous in memory in C order. Empty ones are ignored.
    pub slices: Vec<Slice>,
}

impl Held {
    /// All of a tensor.
    pub fn whole(name: &str, dtype: Dtype, shape: &[u64]) -> Held {
        Held {
            name: name.to_owned(),
            dtype,
            shape: shape.to_vec(),
            slices: vec![Slice::whole(shape)],
        }
    }
}

/// A plan of which rank writes which bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// One for each rank, in their order.
    pub shards: Vec<Shard>,
    /// Name, type and shape, ascending by name.
    tensors: Vec<(String, Dtype, Vec<u64>)>,
    /// Of what it was made.
    inventory: Inventory,
    sampled: Vec<Sampled>,
}

/// A slice that several ranks hold, and that they are to hold alike.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sampled {
    /// Index into the plan's tensors.
    tensor: usize,
    slice: Slice,
    /// Ascending.
    holders: Vec<u32>,
}

/// One rank's writes: one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// `n<node>-<k>.safetensors`, with k counting the ranks of a node.
    pub file: String,
    /// The file's header, and its length. A rank that writes nothing has a layout of no parts, and
    /// no file.
    pub layout: Layout,
    /// Runs of bytes to copy, and their places in the file.
    pub pieces: Vec<Piece>,
}

/// A run of bytes that a rank copies into its image of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Index into the plan's tensors.
    tensor: usize,
    /// Its part of the tensor.
    pub slice: Slice,
    /// The slice in the rank's memory that it is a part of.
    pub held: Slice,
    /// Where in `held` it begins, in bytes.
    pub skip: u64,
    /// Where in the file it begins.
    pub at: u64,
    /// Its length.
    pub bytes: u64,
}

/// Why there is no plan. Every rank finds the same.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error("there are no ranks")]
    NoRanks,
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error(
        "rank {rank} holds `{name}` with another type or shape than the ranks before it: register the same tensors everywhere"
    )]
    Disagree { name: String, rank: usize },
    #[error("rank {rank} lists slice {slice} of `{name}` twice")]
    Twice {
        name: String,
        slice: Slice,
        rank: usize,
    },
    #[error("tensor `{name}`, over all ranks: {why}")]
    Slices {
        name: String,
        #[source]
        why: SliceError,
    },
}

/// Slices that several ranks hold alike: for each slice of a tensor, its holders in ascending order.
type Holders = BTreeMap<Slice, Vec<u32>>;

/// A tensor's type and shape, and who holds what of it.
struct Known<'a> {
    dtype: Dtype,
    shape: &'a [u64],
    holders: Holders,
}

impl Plan {
    /// Of a generation with these ranks. Two slices of a tensor are either the same or apart, and
    /// together they cover it.
    ///
    /// # Errors
    /// The ranks disagree, leave something out, or use names that the format does not allow.
    pub fn new(ranks: &[Rank<'_>]) -> Result<Self, PlanError> {
        if ranks.is_empty() {
            return Err(PlanError::NoRanks);
        }
        let known = gather(ranks)?;
        let nodes: Vec<u32> = ranks.iter().map(|rank| rank.node).collect();
        let mut listing = Listing::new(known.len());
        for (name, tensor) in &known {
            listing.add(name, tensor.dtype.name(), tensor.shape, &tensor.holders);
        }
        let (inventory, sampled) = (listing.finish(&nodes), sampled(&known));
        let mut tensors = Vec::with_capacity(known.len());
        let mut whole = Vec::new();
        for (at, (name, tensor)) in known.into_iter().enumerate() {
            for (slice, holders) in tensor.holders {
                let size = tensor.dtype.size();
                let bytes = slice.elements().map_or(0, |count| count * size);
                whole.push(assign::Load {
                    tensor: at,
                    slice,
                    bytes,
                    size,
                    holders,
                });
            }
            tensors.push((name.to_owned(), tensor.dtype, tensor.shape.to_vec()));
        }
        let mut shards = Vec::with_capacity(ranks.len());
        let mut of_node = BTreeMap::new();
        for (mut pieces, node) in assign::assign(whole, &nodes).into_iter().zip(&nodes) {
            let k = of_node.entry(node).or_insert(0u32);
            let file = format!("n{node}-{k}.safetensors");
            *k += 1;
            pieces.sort_unstable_by(|a, b| (a.tensor, &a.slice).cmp(&(b.tensor, &b.slice)));
            let parts: Vec<Part> = (pieces.iter())
                .map(|piece| Part {
                    name: tensors[piece.tensor].0.clone(),
                    dtype: tensors[piece.tensor].1,
                    slice: piece.slice.clone(),
                })
                .collect();
            let layout = Layout::new(&parts)?;
            for (piece, at) in pieces.iter_mut().zip(&layout.at) {
                piece.at = *at;
            }
            shards.push(Shard {
                file,
                layout,
                pieces,
            });
        }
        Ok(Self {
            shards,
            tensors,
            inventory,
            sampled,
        })
    }

    /// The inventory that it was made from: the same for all ranks of a save.
    pub fn inventory(&self) -> &Inventory {
        &self.inventory
    }

    /// Slices of which samples are compared: at most [`MAX_SAMPLES`], spread over all those that several ranks hold.
    /// Of each its tensor's name; none for one that this rank does not hold.
    pub fn sampled(&self, rank: u32) -> impl Iterator<Item = Option<(&str, &Slice)>> {
        self.sampled.iter().map(move |sampled| {
            sampled.holders.binary_search(&rank).ok()?;
            let (name, ..) = self.tensors.get(sampled.tensor)?;
            Some((name.as_str(), &sampled.slice))
        })
    }

    /// The name of a piece's tensor.
    pub fn name(&self, piece: &Piece) -> &str {
        self.tensors.get(piece.tensor).map_or("", |(name, ..)| name)
    }

    /// The path of a rank's file, in a save's directory; none if the rank writes nothing.
    pub fn path(&self, directory: &str, rank: usize) -> Option<String> {
        let shard = self
            .shards
            .get(rank)
            .filter(|shard| !shard.pieces.is_empty())?;
        Some(format!("{directory}/{}", shard.file))
    }

    /// The manifest of a save by this plan, but for the files' checksums.
    pub fn draft(&self) -> Draft {
        let mut files: Vec<(&Shard, String)> = (self.shards.iter())
            .filter(|shard| !shard.pieces.is_empty())
            .map(|shard| (shard, shard.file.clone()))
            .collect();
        files.sort_unstable_by(|a, b| a.1.cmp(&b.1));
        let mut tensors: Vec<Tensor> = (self.tensors.iter())
            .map(|(name, dtype, shape)| Tensor {
                name: name.clone(),
                dtype: *dtype,
                shape: shape.clone(),
                slices: Vec::new(),
            })
            .collect();
        // There are fewer ranks than 2^32.
        for (file, (shard, _)) in (0u32..).zip(&files) {
            for piece in &shard.pieces {
                tensors[piece.tensor].slices.push(Placed {
                    slice: piece.slice.clone(),
                    file,
                    at: piece.at,
                    bytes: piece.bytes,
                });
            }
        }
        for tensor in &mut tensors {
            tensor.slices.sort_unstable_by(|a, b| a.slice.cmp(&b.slice));
        }
        Draft {
            saved_at: 0,
            files: (files.into_iter())
                .map(|(shard, name)| (name, shard.layout.bytes))
                .collect(),
            tensors,
            sampled: (self.sampled.iter())
                .map(|sampled| sampled.tensor as u64)
                .collect(),
        }
    }
}

fn sampled(known: &BTreeMap<&str, Known<'_>>) -> Vec<Sampled> {
    let shared = || {
        let tensors = known.values().enumerate();
        tensors.flat_map(|(at, tensor)| {
            let shared = tensor.holders.iter().filter(|(_, ranks)| ranks.len() > 1);
            shared.map(move |(slice, holders)| (at, slice, holders))
        })
    };
    let count = shared().count();
    let wanted = count.min(MAX_SAMPLES);
    let mut next = 0;
    let mut taken = Vec::with_capacity(wanted);
    for (at, (tensor, slice, holders)) in shared().enumerate() {
        if next < wanted && at == next * count / wanted {
            next += 1;
            taken.push(Sampled {
                tensor,
                slice: slice.clone(),
                holders: holders.clone(),
            });
        }
    }
    taken
}

fn gather<'a>(ranks: &[Rank<'a>]) -> Result<BTreeMap<&'a str, Known<'a>>, PlanError> {
    let mut known: BTreeMap<&str, Known<'_>> = BTreeMap::new();
    for (number, (rank, at)) in (0u32..).zip(ranks.iter().enumerate().map(|(at, rank)| (rank, at)))
    {
        for held in rank.held {
            let name = &held.name;
            check_name(name)?;
            let tensor = known.entry(name).or_insert_with(|| Known {
                dtype: held.dtype,
                shape: &held.shape,
                holders: BTreeMap::new(),
            });
            if tensor.dtype != held.dtype || tensor.shape != held.shape {
                let name = name.clone();
                return Err(PlanError::Disagree { name, rank: at });
            }
            let empty = held.shape.contains(&0);
            for slice in &held.slices {
                if !empty && slice.extent.contains(&0) {
                    continue;
                }
                let holders = match tensor.holders.get_mut(slice) {
                    Some(holders) => holders,
                    None => tensor.holders.entry(slice.clone()).or_default(),
                };
                if holders.last() == Some(&number) {
                    let (name, slice) = (name.clone(), slice.clone());
                    return Err(PlanError::Twice {
                        name,
                        slice,
                        rank: at,
                    });
                }
                holders.push(number);
            }
        }
    }
    for (name, tensor) in &known {
        let slices: Vec<&Slice> = tensor.holders.keys().collect();
        tile(tensor.shape, &slices).map_err(|why| PlanError::Slices {
            name: (*name).to_owned(),
            why,
        })?;
    }
    Ok(known)
}

#[cfg(test)]
mod tests;
