//! Boxes inside a tensor: an offset and an extent in each dimension, in elements.

use std::fmt;

use serde::de::{Deserializer, Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

/// The most dimensions of a tensor.
pub const MAX_DIMS: usize = 32;

/// A box inside a tensor, in elements, outermost dimension first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slice {
    /// Where it begins in each dimension.
    #[serde(deserialize_with = "dims")]
    pub offset: Vec<u64>,
    /// How far it goes in each dimension.
    #[serde(deserialize_with = "dims")]
    pub extent: Vec<u64>,
}

/// Why slices do not make up a tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SliceError {
    #[error("{0} dimensions, the limit is {MAX_DIMS}")]
    Dims(usize),
    #[error("more elements than fit into 2^63 bytes")]
    TooLarge,
    #[error("slice {slice} does not lie inside the shape {shape:?}")]
    Outside { slice: Box<Slice>, shape: Vec<u64> },
    #[error("slice {0} is empty")]
    Empty(Slice),
    #[error("slices {} and {} overlap", .0.0, .0.1)]
    Overlap(Box<(Slice, Slice)>),
    #[error("the {0} slices of a tensor lie so irregularly that they cannot be compared")]
    Tangled(usize),
    #[error("{covered} of {elements} elements are covered by slices")]
    Hole { covered: u64, elements: u64 },
}

/// Elements of a shape.
///
/// # Errors
/// Too many dimensions, or elements beyond 2^60 (8 bytes each are then still within 2^63).
pub fn elements(shape: &[u64]) -> Result<u64, SliceError> {
    if shape.len() > MAX_DIMS {
        return Err(SliceError::Dims(shape.len()));
    }
    // A zero makes the product zero, whatever the others are.
    if shape.contains(&0) {
        return match shape.iter().all(|extent| *extent < 1 << 60) {
            true => Ok(0),
            false => Err(SliceError::TooLarge),
        };
    }
    shape
        .iter()
        .try_fold(1u64, |product, extent| product.checked_mul(*extent))
        .filter(|product| *product < 1 << 60)
        .ok_or(SliceError::TooLarge)
}

/// Pairs of slices that are compared at most: a second's work.
const MAX_COMPARED: u64 = 1 << 26;

impl Slice {
    /// Whether it is all of a tensor of this shape.
    pub(crate) fn is_whole(&self, shape: &[u64]) -> bool {
        self.extent == shape
    }

    /// Whether they have an element in common. Both lie within one shape.
    fn meets(&self, other: &Self) -> bool {
        let mine = self.offset.iter().zip(&self.extent);
        let theirs = other.offset.iter().zip(&other.extent);
        mine.zip(theirs)
            .all(|((a, la), (b, lb))| *a < b + lb && *b < a + la)
    }

    /// All of a tensor.
    pub fn whole(shape: &[u64]) -> Self {
        Self {
            offset: vec![0; shape.len()],
            extent: shape.to_vec(),
        }
    }

    /// Elements in it.
    ///
    /// # Errors
    /// As [`elements`].
    pub fn elements(&self) -> Result<u64, SliceError> {
        elements(&self.extent)
    }

    /// Elements in it, in bounds.
    ///
    /// # Errors
    /// It does not lie inside the shape.
    pub fn check(&self, shape: &[u64]) -> Result<u64, SliceError> {
        elements(shape)?;
        let inside = self.offset.len() == shape.len()
            && self.extent.len() == shape.len()
            && (self.offset.iter().zip(&self.extent).zip(shape)).all(|((offset, extent), end)| {
                offset.checked_add(*extent).is_some_and(|e| e <= *end)
            });
        if !inside {
            return Err(SliceError::Outside {
                slice: Box::new(self.clone()),
                shape: shape.to_vec(),
            });
        }
        self.elements()
    }

    /// The part that lies in both, if any. Both must lie in one shape.
    pub fn intersect(&self, other: &Self) -> Option<Self> {
        let mut both = Self {
            offset: Vec::with_capacity(self.offset.len()),
            extent: Vec::with_capacity(self.offset.len()),
        };
        let mine = self.offset.iter().zip(&self.extent);
        for ((a, a_len), (b, b_len)) in mine.zip(other.offset.iter().zip(&other.extent)) {
            let begin = *a.max(b);
            let end = (a + a_len).min(b + b_len);
            if begin >= end {
                return None;
            }
            both.offset.push(begin);
            both.extent.push(end - begin);
        }
        Some(both)
    }
}

impl fmt::Display for Slice {
    /// `[0:4, 8:16]`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (at, (offset, extent)) in self.offset.iter().zip(&self.extent).enumerate() {
            let comma = if at == 0 { "" } else { ", " };
            write!(f, "{comma}{offset}:{}", offset.saturating_add(*extent))?;
        }
        f.write_str("]")
    }
}

/// That the slices cover the tensor, each element once. An empty tensor has exactly one slice, the
/// whole of it.
///
/// # Errors
/// The first pair that overlaps, the first slice out of bounds, or how much is missing.
pub fn tile(shape: &[u64], slices: &[&Slice]) -> Result<(), SliceError> {
    let total = elements(shape)?;
    if total == 0 {
        return match slices {
            [one] if one.extent == shape && one.offset.iter().all(|offset| *offset == 0) => Ok(()),
            [] => Err(SliceError::Hole {
                covered: 0,
                elements: 0,
            }),
            [one, ..] => Err(SliceError::Empty((*one).clone())),
        };
    }
    let mut covered = 0u64;
    for slice in slices {
        match slice.check(shape)? {
            0 => return Err(SliceError::Empty((*slice).clone())),
            count => covered = covered.saturating_add(count),
        }
    }
    disjoint(shape.len(), slices)?;
    if covered != total {
        return Err(SliceError::Hole {
            covered,
            elements: total,
        });
    }
    Ok(())
}

/// That no two of these, all within one shape and none empty, overlap.
///
/// Sorted along the dimension in which they differ most, so that a regular grid costs about
/// n log n plus n times the slices beside each other. Somebody's manifest that is made to cost more
/// than [`MAX_COMPARED`] is refused.
fn disjoint(dims: usize, slices: &[&Slice]) -> Result<(), SliceError> {
    if dims == 0 {
        return match slices {
            [a, b, ..] => Err(SliceError::Overlap(Box::new(((*a).clone(), (*b).clone())))),
            _ => Ok(()),
        };
    }
    let distinct = |dim: usize| {
        let mut offsets: Vec<u64> = slices.iter().map(|slice| slice.offset[dim]).collect();
        offsets.sort_unstable();
        offsets.dedup();
        offsets.len()
    };
    let axis = (0..dims).max_by_key(|dim| distinct(*dim)).unwrap_or(0);
    let mut compared = 0u64;
    let mut sorted = slices.to_vec();
    sorted.sort_unstable_by_key(|slice| slice.offset[axis]);
    for (at, a) in sorted.iter().enumerate() {
        let end = a.offset[axis] + a.extent[axis];
        for b in &sorted[at + 1..] {
            if b.offset[axis] >= end {
                break;
            }
            compared += 1;
            if compared > MAX_COMPARED {
                return Err(SliceError::Tangled(slices.len()));
            }
            if a.meets(b) {
                return Err(SliceError::Overlap(Box::new(((*a).clone(), (*b).clone()))));
            }
        }
    }
    Ok(())
}

/// A list of at most [`MAX_DIMS`] numbers; longer ones are refused before they are kept.
pub(crate) fn dims<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
    struct Dims;
    impl<'de> Visitor<'de> for Dims {
        type Value = Vec<u64>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "at most {MAX_DIMS} numbers")
        }
        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            let mut numbers = Vec::new();
            while let Some(number) = seq.next_element()? {
                if numbers.len() == MAX_DIMS {
                    return Err(A::Error::invalid_length(MAX_DIMS + 1, &self));
                }
                numbers.push(number);
            }
            Ok(numbers)
        }
    }
    deserializer.deserialize_seq(Dims)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(offset: &[u64], extent: &[u64]) -> Slice {
        Slice {
            offset: offset.to_vec(),
            extent: extent.to_vec(),
        }
    }

    #[test]
    fn a_tensor_is_covered_once() {
        let shape = [4, 6];
        let (a, b) = (slice(&[0, 0], &[4, 2]), slice(&[0, 2], &[4, 4]));
        assert_eq!(tile(&shape, &[&b, &a]), Ok(()));
        assert_eq!(
            tile(&shape, &[&a]),
            Err(SliceError::Hole {
                covered: 8,
                elements: 24
            })
        );
        assert!(matches!(
            tile(&shape, &[&a, &a, &b]),
            Err(SliceError::Overlap(..))
        ));
        assert!(matches!(
            tile(&shape, &[&slice(&[1, 0], &[4, 6])]),
            Err(SliceError::Outside { .. })
        ));
        // A scalar, an empty tensor.
        assert_eq!(tile(&[], &[&slice(&[], &[])]), Ok(()));
        let none = slice(&[0, 0], &[0, 6]);
        assert_eq!(tile(&[0, 6], &[&none]), Ok(()));
        assert!(tile(&[0, 6], &[]).is_err());
        assert!(tile(&[0, 6], &[&none, &none]).is_err());
    }

    #[test]
    fn numbers_that_overflow_are_refused() {
        let shape = [u64::MAX, u64::MAX];
        assert_eq!(elements(&shape), Err(SliceError::TooLarge));
        assert_eq!(elements(&[0, u64::MAX]), Err(SliceError::TooLarge));
        assert!(slice(&[u64::MAX], &[2]).check(&[4]).is_err());
        assert_eq!(elements(&[1; 33]), Err(SliceError::Dims(33)));
        assert!(
            serde_json::from_str::<Slice>(&format!(
                "{{\"offset\":[{}0],\"extent\":[]}}",
                "0,".repeat(32)
            ))
            .is_err()
        );
    }

    #[test]
    fn slices_that_cannot_be_compared_in_time_are_refused() {
        // All overlap along the first dimension, where each begins elsewhere.
        let side = 128u64;
        let n = side * side;
        let all: Vec<Slice> = (0..n)
            .map(|i| slice(&[i, i / side, i % side], &[n, 1, 1]))
            .collect();
        let shape = [2 * n, side, side];
        let refused = tile(&shape, &all.iter().collect::<Vec<_>>()).unwrap_err();
        assert!(matches!(refused, SliceError::Tangled(_)), "{refused}");
    }
}
