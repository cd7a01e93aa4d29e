//! Which ranks share a host, and the order of summation that follows from it.

use super::element::{Element, Op};
use super::reduce::Fold;

/// The hosts of a group: each a list of ranks that share memory, in ascending order; the hosts in the
/// order of their first ranks.
///
/// The layout alone, and neither sizes nor timing, decides the order of summation: **the ranks of a host
/// in ascending order, then the hosts in order**. So a single process can compute a collective's result
/// bit for bit ([`reduce`](Self::reduce)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    hosts: Vec<Vec<u32>>,
    world: usize,
}

impl Layout {
    /// `None`, unless every rank from 0 to the number of them is there once, and no host is empty.
    pub fn new(mut hosts: Vec<Vec<u32>>) -> Option<Layout> {
        for host in &mut hosts {
            host.sort_unstable();
        }
        hosts.sort_unstable();
        let mut ranks: Vec<u32> = hosts.iter().flatten().copied().collect();
        ranks.sort_unstable();
        let dense = (0..).zip(&ranks).all(|(i, rank)| i == *rank);
        let world = ranks.len();
        (dense && world > 0 && hosts.iter().all(|host| !host.is_empty()))
            .then_some(Layout { hosts, world })
    }

    pub fn hosts(&self) -> &[Vec<u32>] {
        &self.hosts
    }

    pub fn world(&self) -> usize {
        self.world
    }

    /// The host of a rank, and its place there.
    pub fn place(&self, rank: u32) -> Option<(usize, usize)> {
        self.hosts.iter().enumerate().find_map(|(host, ranks)| {
            let place = ranks.iter().position(|there| *there == rank)?;
            Some((host, place))
        })
    }

    /// Result of an all-reduce of these inputs, in the order of ranks: the same on every rank, bit for bit.
    /// `None`, unless there is one of the same length for each rank.
    pub fn reduce<T: Element>(&self, op: Op, inputs: &[&[T]]) -> Option<Vec<T>> {
        let len = inputs.first()?.len();
        if inputs.len() != self.world || inputs.iter().any(|input| input.len() != len) {
            return None;
        }
        let whole = Fold::whole(T::DTYPE, op, u32::try_from(self.world).ok()?);
        let fold = |fold: Fold, parts: &[&[T]]| {
            let mut out = vec![T::zeroed(); len];
            let parts: Vec<&[u8]> = parts
                .iter()
                .map(|part| bytemuck::cast_slice(part))
                .collect();
            fold.run(bytemuck::cast_slice_mut(&mut out), &parts)
                .then_some(out)
        };
        if self.hosts.len() == 1 {
            return fold(whole, inputs);
        }
        let sums: Option<Vec<Vec<T>>> = self
            .hosts
            .iter()
            .map(|host| {
                let parts: Vec<&[T]> = host.iter().map(|rank| inputs[*rank as usize]).collect();
                fold(whole.partial(), &parts)
            })
            .collect();
        let sums = sums?;
        fold(whole, &sums.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }
}
