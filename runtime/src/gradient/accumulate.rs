//! The sum of microbatches' gradients.

use std::ops::Range;

/// Adds up the gradients of a step's microbatches on one rank, in order.
///
/// It knows which samples it has, by their places in the epoch
/// ([`Plan::positions_of`](crate::data::Plan::positions_of)). When the world changes in the middle of the
/// step, what is finished and still this rank's is kept: see [`begin`](Self::begin). The bits are those of
/// one that was begun anew, because only what comes after the places that are summed is added.
#[derive(Clone, Debug)]
pub struct Accumulator {
    sum: Vec<f32>,
    step: u64,
    epoch: u64,
    places: Range<u64>,
}

/// A gradient was not the next one. The sum is as it was.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OutOfOrder {
    #[error(
        "the gradient of the samples at {got:?} was added to the sum of those at {has:?}; add microbatches in order, without gaps"
    )]
    Place { got: Range<u64>, has: Range<u64> },
    #[error("the gradient has {got} elements, the sum {expected}")]
    Length { got: usize, expected: usize },
}

impl Accumulator {
    /// Of `len` parameters.
    pub fn new(len: usize) -> Accumulator {
        Accumulator {
            sum: vec![0.0; len],
            step: 0,
            epoch: 0,
            places: 0..0,
        }
    }

    /// Begins a step, or goes on with it in another world: this rank's samples are those at `places` of
    /// `epoch`. Returns the ones that are still to be done: all of them, or, if this is the same step and
    /// the first of them are summed already, the rest.
    ///
    /// After a restore, which may go through a step again with other parameters, [`clear`](Self::clear)
    /// first.
    pub fn begin(&mut self, step: u64, epoch: u64, places: Range<u64>) -> Range<u64> {
        let same = (self.step, self.epoch) == (step, epoch)
            && self.places.start == places.start
            && self.places.end <= places.end;
        if !same {
            self.clear();
            (self.step, self.epoch) = (step, epoch);
            self.places = places.start..places.start;
        }
        self.places.end..places.end
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.sum.fill(0.0);
        self.places = 0..0;
    }

    /// Adds the gradient, summed over the samples at `places`, in any precision that `f32` contains.
    ///
    /// # Errors
    /// It is not the one that comes next.
    pub fn add<T: Copy + Into<f32>>(
        &mut self,
        places: Range<u64>,
        gradient: &[T],
    ) -> Result<(), OutOfOrder> {
        if gradient.len() != self.sum.len() {
            return Err(OutOfOrder::Length {
                got: gradient.len(),
                expected: self.sum.len(),
            });
        }
        if places.start != self.places.end || places.end < places.start {
            return Err(OutOfOrder::Place {
                got: places,
                has: self.places.clone(),
            });
        }
        for (sum, value) in self.sum.iter_mut().zip(gradient) {
            *sum += (*value).into();
        }
        self.places.end = places.end;
        Ok(())
    }

    /// Zero, if this rank has no samples.
    pub fn sum(&self) -> &[f32] {
        &self.sum
    }

    /// Samples in the sum. The divisor of the reduced sum is the reduced count.
    pub fn samples(&self) -> u64 {
        self.places.end - self.places.start
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use proptest::prelude::*;

    use super::*;

    fn gradient(place: u64) -> Vec<f32> {
        (0..5).map(|i| ((place * 7 + i) as f32).sin()).collect()
    }

    fn add(sum: &mut Accumulator, places: Range<u64>) {
        for place in places {
            sum.add(place..place + 1, &gradient(place)).unwrap();
        }
    }

    proptest! {
        /// A world that changes in the middle ends with the bits of an undisturbed one.
        #[test]
        fn finished_work_is_kept_or_redone_with_the_same_bits(
            turns in prop::collection::vec((0u64..4, 0u64..12, 0u64..12), 1..8),
        ) {
            let mut sum = Accumulator::new(5);
            let mut done = 0;
            for (start, len, finish) in turns {
                let todo = sum.begin(3, 1, start..start + len);
                prop_assert!(todo.end == start + len || todo.is_empty());
                let until = todo.end.min(todo.start + finish);
                done += until - todo.start;
                add(&mut sum, todo.start..until);
            }
            let rest = sum.begin(3, 1, 2..20);
            prop_assert!(done > 0 || rest.start == 2);
            add(&mut sum, rest);
            let mut fresh = Accumulator::new(5);
            add(&mut fresh, 0..0);
            prop_assert_eq!(fresh.begin(3, 1, 2..20), 2..20);
            add(&mut fresh, 2..20);
            prop_assert_eq!(sum.sum(), fresh.sum());
            prop_assert_eq!(sum.samples(), 18);
        }
    }

    #[test]
    fn another_step_begins_anew() {
        let mut sum = Accumulator::new(5);
        sum.begin(0, 0, 0..4);
        add(&mut sum, 0..2);
        assert_eq!(sum.begin(0, 0, 0..3), 2..3);
        assert_eq!(sum.begin(1, 0, 0..4), 0..4);
        assert_eq!((sum.samples(), sum.sum()), (0, &[0.0; 5][..]));
        add(&mut sum, 0..2);
        assert_eq!(
            sum.begin(1, 0, 0..1),
            0..1,
            "one of them is another rank's now"
        );
    }

    #[test]
    fn gaps_and_wrong_lengths_are_refused() {
        let mut sum = Accumulator::new(2);
        sum.begin(0, 0, 4..8);
        for places in [5..6, 0..1] {
            let error = sum.add(places.clone(), &[1.0f32; 2]).unwrap_err();
            assert_eq!(
                error,
                OutOfOrder::Place {
                    got: places,
                    has: 4..4
                }
            );
        }
        assert!(matches!(
            sum.add(4..5, &[1.0f32]),
            Err(OutOfOrder::Length { .. })
        ));
        assert_eq!(sum.sum(), [0.0; 2]);
    }

    #[test]
    fn sixteen_bit_gradients_are_added_in_f32() {
        let mut sum = Accumulator::new(1);
        sum.begin(0, 0, 0..3);
        sum.add(0..1, &[f16::from_f32(2048.0)]).unwrap();
        sum.add(1..2, &[f16::from_f32(1.0)]).unwrap();
        sum.add(2..3, &[bf16::from_f32(0.5)]).unwrap();
        assert_eq!(sum.sum(), [2049.5]);
    }
}
