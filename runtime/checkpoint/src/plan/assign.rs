//! Spreading pieces evenly over ranks and nodes.

use std::collections::BTreeMap;

use crate::plan::Piece;
use crate::slice::Slice;

/// Nothing smaller than this, in bytes, is cut.
const MIN_PIECE: u64 = 4 << 20;

/// A slice, and who could write it.
pub(super) struct Load {
    pub(super) tensor: usize,
    pub(super) slice: Slice,
    pub(super) bytes: u64,
    /// Bytes of an element.
    pub(super) size: u64,
    pub(super) holders: Vec<u32>,
}

/// The pieces of each rank, not yet placed in a file. `nodes` has each rank's node.
///
/// Largest first, each to the holder that it leaves with the least, measured by the fuller of its
/// rank and its node, each relative to its fair share (Graham's longest-processing-time rule on
/// both at once). With ranks spread evenly over nodes and everything replicated, no rank gets more
/// than its share and one piece.
pub(super) fn assign(whole: Vec<Load>, nodes: &[u32]) -> Vec<Vec<Piece>> {
    let total: u64 = whole
        .iter()
        .fold(0, |sum, load| sum.saturating_add(load.bytes));
    let share = total / nodes.len().max(1) as u64;
    // A quarter of a share: what is left uneven is less than that.
    let limit = (share / 4).max(MIN_PIECE);
    let mut pieces: Vec<(Piece, Vec<u32>)> = Vec::new();
    for load in whole {
        cut(load, limit, &mut pieces);
    }
    pieces.sort_by(|(a, _), (b, _)| {
        (b.bytes.cmp(&a.bytes)).then_with(|| (a.tensor, &a.slice).cmp(&(b.tensor, &b.slice)))
    });

    let index: BTreeMap<u32, usize> = {
        let mut distinct = nodes.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        distinct.into_iter().zip(0..).collect()
    };
    let node_of: Vec<usize> = nodes.iter().map(|node| index[node]).collect();
    let mut rank_load = vec![0u64; nodes.len()];
    let mut node_load = vec![0u64; index.len()];
    let mut of_rank = vec![Vec::new(); nodes.len()];
    for (piece, holders) in pieces {
        let cost = |rank: usize| {
            let (mine, nodes_) = (rank_load[rank], node_load[node_of[rank]]);
            let relative = |load: u64, parts: usize| {
                u128::from(load.saturating_add(piece.bytes)) * parts as u128
            };
            let fuller = relative(mine, nodes.len()).max(relative(nodes_, index.len()));
            (fuller, mine, nodes_, rank)
        };
        let Some(rank) = holders
            .iter()
            .map(|rank| *rank as usize)
            .min_by_key(|rank| cost(*rank))
        else {
            continue; // every slice has a holder
        };
        rank_load[rank] = rank_load[rank].saturating_add(piece.bytes);
        let node = &mut node_load[node_of[rank]];
        *node = node.saturating_add(piece.bytes);
        of_rank[rank].push(piece);
    }
    of_rank
}

/// Cuts a slice that several ranks hold along its first dimension of more than 1, so that the
/// pieces are contiguous in it and at most about `limit` bytes.
fn cut(load: Load, limit: u64, pieces: &mut Vec<(Piece, Vec<u32>)>) {
    let Load {
        tensor,
        slice,
        bytes,
        size,
        holders,
    } = load;
    let dim = slice.extent.iter().position(|extent| *extent > 1);
    let rows = dim.map_or(1, |dim| slice.extent[dim]);
    let parts = match holders.len() {
        ..=1 => 1,
        _ => bytes.div_ceil(limit).clamp(1, rows),
    };
    let row_bytes = bytes / rows.max(1);
    debug_assert!(row_bytes.is_multiple_of(size));
    let mut row = 0;
    for part in 0..parts {
        // The first `rows % parts` pieces have a row more.
        let count = rows / parts + u64::from(part < rows % parts);
        let mut of = slice.clone();
        if let Some(dim) = dim {
            of.offset[dim] += row;
            of.extent[dim] = count;
        }
        let piece = Piece {
            tensor,
            slice: of,
            held: slice.clone(),
            skip: row * row_bytes,
            at: 0,
            bytes: count * row_bytes,
        };
        pieces.push((piece, holders.clone()));
        row += count;
    }
}
