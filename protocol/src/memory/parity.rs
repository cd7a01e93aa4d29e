//! Parity over several nodes: who shares it with whom, and which part of an image goes to which of them. Pure
//! arithmetic, of which no number from outside makes a panic.
//!
//! A group's nodes cut each of their images into as many stripes as there are others, its chunks in turns, and give
//! each of the others one. A node that gets stripes adds them up (exclusive or), so one stripe's memory holds those of
//! all others: of a node that is lost, each stripe is what one of the others holds, without those of the rest. This is
//! RAID of level 5, whose parity goes round (Patterson, Gibson and Katz, SIGMOD 1988, section 12).
//!
//! Each sum says itself what it is of, so nobody has to agree on groups: a reader needs none of them.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{CHUNK, MAX_FILE, MAX_IMAGE, Name};
use crate::record::Place;

/// Nodes that a parity is over, at least and at most.
pub const MIN_OVER: u8 = 2;
pub const MAX_OVER: u8 = 8;

/// The most stripes that are added up: a group has fewer than twice the nodes that it is to have.
pub const MAX_PARTS: usize = 2 * MAX_OVER as usize;

/// The most parities that a launcher names in one answer, and that it holds.
pub const MAX_PARITIES: usize = 48;
pub const MAX_LANES: usize = 512;

/// Every `of`-th chunk of an image, from the chunk `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stripe {
    pub of: u8,
    pub first: u8,
}

impl Stripe {
    /// Whether there is such a one.
    pub fn is_possible(self) -> bool {
        self.first < self.of && usize::from(self.of) <= MAX_PARTS
    }

    /// How many chunks it has of an image of so many bytes: pieces of parity that it is in.
    pub fn pieces(self, bytes: u64) -> u32 {
        let chunks = bytes.min(MAX_IMAGE).div_ceil(CHUNK);
        let from_first = chunks.saturating_sub(self.first.into());
        from_first.div_ceil(self.of.max(1).into()) as u32
    }

    /// The chunk that is in this piece.
    pub fn chunk(self, piece: u32) -> u64 {
        u64::from(piece) * u64::from(self.of) + u64::from(self.first)
    }

    /// The piece that this chunk is in, if it is in this stripe.
    pub fn piece(self, chunk: u64) -> Option<u32> {
        let behind = chunk.checked_sub(self.first.into())?;
        let of = u64::from(self.of);
        (behind.checked_rem(of)? == 0).then(|| u32::try_from(behind / of).ok())?
    }

    /// The bytes of an image of so many that are in this piece; none where the image ends before.
    pub fn range(self, piece: u32, bytes: u64) -> Range<u64> {
        let begin = (self.chunk(piece).saturating_mul(CHUNK)).min(bytes);
        begin..begin.saturating_add(CHUNK).min(bytes)
    }
}

/// A stripe of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The image's file, in the folder of the save.
    pub file: String,
    /// Of the whole image.
    pub bytes: u64,
    pub stripe: Stripe,
}

/// Parity that a launcher holds of others: the sum of these.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parity {
    /// By which its launcher knows it; of no other that it ever holds.
    pub number: u64,
    pub step: u64,
    /// As in a [`Name`].
    pub generation: [u8; 8],
    pub parts: Vec<Part>,
}

impl Parity {
    /// The image that a part is of.
    pub fn name(&self, part: &Part) -> Name {
        Name {
            step: self.step,
            generation: self.generation,
            file: part.file.clone(),
        }
    }

    pub(super) fn is_possible(&self) -> bool {
        let possible = |part: &Part| {
            part.file.len() <= MAX_FILE
                && self.name(part).is_plain()
                && part.bytes <= MAX_IMAGE
                && part.stripe.is_possible()
        };
        self.parts.len() <= MAX_PARTS && self.parts.iter().all(possible)
    }
}

/// The nodes that share parity with this one, of all at these places in their order: the next one in the group first.
/// A group has `over` + 1 nodes, or more where they do not come out even, or all there are. Nodes of one place are in
/// different groups, as far as there are groups.
pub fn mates(places: &[Place], over: u8, me: usize) -> Vec<usize> {
    let over = over.clamp(MIN_OVER, MAX_OVER);
    let mut order: Vec<usize> = (0..places.len()).collect();
    order.sort_by_key(|at| places.get(*at));
    let groups = (order.len() / (usize::from(over) + 1)).max(1);
    let Some(here) = order.iter().position(|at| *at == me) else {
        return Vec::new();
    };
    // Neighbours in the order go to different groups.
    let group = order.into_iter().skip(here % groups).step_by(groups);
    let mut ring: Vec<usize> = group.collect();
    ring.rotate_left(here / groups);
    ring.retain(|at| *at != me);
    ring
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// For tests a chunk has eight bytes.
    fn part(stripe: Stripe, piece: u32, image: &[u8]) -> &[u8] {
        let begin = (stripe.chunk(piece) as usize * 8).min(image.len());
        &image[begin..(begin + 8).min(image.len())]
    }

    /// As many pieces as an image of so many chunks has.
    fn pieces(stripe: Stripe, image: &[u8]) -> u32 {
        stripe.pieces(image.len().div_ceil(8) as u64 * CHUNK)
    }

    fn add(into: &mut Vec<u8>, bytes: &[u8]) {
        into.resize(into.len().max(bytes.len()), 0);
        into.iter_mut().zip(bytes).for_each(|(a, b)| *a ^= *b);
    }

    fn stripe(group: usize, from: usize, to: usize) -> Stripe {
        let first = (to + group - from - 1) % group;
        Stripe {
            of: group as u8 - 1,
            first: first as u8,
        }
    }

    proptest! {
        /// Images of any lengths, in a group of any size, of which any one is lost.
        #[test]
        fn what_one_node_had_is_what_the_others_hold_without_their_own(
            images in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 2..=MAX_PARTS + 1),
            lost in any::<prop::sample::Index>(),
        ) {
            let group = images.len();
            let lost = lost.index(group);
            let others = |of: usize| (0..group).filter(move |at| *at != of);
            let mut back = vec![0; images[lost].len()];
            for holder in others(lost) {
                let mut held: Vec<Vec<u8>> = Vec::new();
                for from in others(holder) {
                    let stripe = stripe(group, from, holder);
                    prop_assert!(stripe.is_possible());
                    for piece in 0..pieces(stripe, &images[from]) {
                        held.resize(held.len().max(piece as usize + 1), Vec::new());
                        add(&mut held[piece as usize], part(stripe, piece, &images[from]));
                    }
                }
                // No more than a stripe of the longest.
                let longest = images.iter().map(|image| image.len().div_ceil(8)).max().unwrap();
                prop_assert!(held.len() <= longest.div_ceil(group - 1));
                let of_lost = stripe(group, lost, holder);
                for piece in 0..pieces(of_lost, &images[lost]) {
                    let mut sum = held[piece as usize].clone();
                    for other in others(holder).filter(|at| *at != lost) {
                        add(&mut sum, part(stripe(group, other, holder), piece, &images[other]));
                    }
                    let chunk = of_lost.chunk(piece);
                    prop_assert_eq!(of_lost.piece(chunk), Some(piece));
                    let begin = chunk as usize * 8;
                    let end = (begin + 8).min(back.len());
                    back[begin..end].copy_from_slice(&sum[..end - begin]);
                }
            }
            prop_assert_eq!(&back, &images[lost]);
        }

        #[test]
        fn every_node_has_one_group(
            places in proptest::collection::vec(0u8..5, 0..40),
            over in any::<u8>(),
        ) {
            let at = |place: &u8| match place {
                0 => Place::default(),
                other => Place::of("z", &other.to_string()),
            };
            let places: Vec<Place> = places.iter().map(at).collect();
            let nodes = places.len();
            let over_it = usize::from(over.clamp(MIN_OVER, MAX_OVER));
            let groups = (nodes / (over_it + 1)).max(1);
            for me in 0..nodes {
                let others = mates(&places, over, me);
                prop_assert!(others.len() <= MAX_PARTS && !others.contains(&me));
                prop_assert!(others.len() >= over_it.min(nodes - 1));
                // The same group to each, from the next one on.
                for (turn, other) in others.iter().enumerate() {
                    let mut ring: Vec<usize> = others[turn + 1..].to_vec();
                    ring.push(me);
                    ring.extend(&others[..turn]);
                    prop_assert_eq!(mates(&places, over, *other), ring);
                }
                let same = |at: usize| places[at] == places[me] && places[me] != Place::default();
                let of_place = (0..nodes).filter(|at| same(*at)).count();
                if of_place <= groups {
                    prop_assert!(!others.iter().any(|at| same(*at)));
                }
            }
        }
    }

    #[test]
    fn no_number_from_outside_makes_a_panic() {
        for of in [0, 1, 7, 255] {
            for first in [0, 6, 255] {
                let stripe = Stripe { of, first };
                let possible = of > first && usize::from(of) <= MAX_PARTS;
                assert_eq!(stripe.is_possible(), possible);
                for number in [0, 1, u32::MAX] {
                    let bytes = u64::from(number) << 32 | u64::from(number);
                    let range = stripe.range(number, bytes);
                    assert!(range.start <= range.end && range.end <= bytes);
                    let _pieces = stripe.pieces(bytes);
                    let _piece = stripe.piece(bytes);
                }
            }
        }
        assert_eq!(mates(&[], 3, 0), Vec::<usize>::new());
        assert_eq!(mates(&[Place::default()], 3, 7), Vec::<usize>::new());
    }

    #[test]
    fn groups_are_as_large_as_was_asked_for_or_larger() {
        let sizes = |nodes: usize, over| -> Vec<usize> {
            let places = vec![Place::default(); nodes];
            let size = |me| mates(&places, over, me).len() + 1;
            (0..nodes).map(size).collect()
        };
        assert_eq!(sizes(1, 2), [1]);
        assert_eq!(sizes(2, 2), [2, 2]);
        assert_eq!(sizes(3, 2), [3, 3, 3]);
        assert_eq!(sizes(5, 2), [5; 5]);
        assert_eq!(sizes(6, 2), [3; 6]);
        assert_eq!(sizes(7, 2), [4, 3, 4, 3, 4, 3, 4]);
        assert_eq!(sizes(3, 8), [3; 3]);
        assert_eq!(sizes(17, 8), [17; 17]);
    }
}
