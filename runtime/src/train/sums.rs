//! This rank's sums of a step, kept while the step is done again in another world.

use std::ops::Range;

use super::model::Measured;

/// Gradient sums by bucket, with the samples that are in them.
///
/// When a step is done again and the first of this rank's samples are those that are summed already, only
/// the rest is computed: the same additions in the same order, and so the same bits.
#[derive(Debug)]
pub(super) struct Sums {
    pub(super) buffers: Vec<Vec<f32>>,
    pub(super) measured: Measured,
    /// The step, and the epoch of its samples.
    of: (u64, u64),
    /// Places in the epoch's order.
    places: Range<u64>,
}

impl Sums {
    pub(super) fn new(ranges: &[Range<usize>]) -> Sums {
        Sums {
            buffers: ranges.iter().map(|range| vec![0.0; range.len()]).collect(),
            measured: Measured::default(),
            of: (0, 0),
            places: 0..0,
        }
    }

    /// Forgets the samples. The buffers are zeroed by the next [`begin`](Self::begin) that needs it.
    pub(super) fn forget(&mut self) {
        self.places = 0..0;
    }

    /// Of this rank's microbatches, given by their first and last places, the number of those that are summed
    /// already. The sums are zero if it is none.
    pub(super) fn begin(&mut self, step: u64, epoch: u64, micros: &[Range<u64>]) -> usize {
        let start = micros.first().map_or(0, |micro| micro.start);
        let same = self.of == (step, epoch) && self.places.start == start;
        let done = micros
            .iter()
            .position(|micro| micro.end == self.places.end)
            .filter(|_| same && !self.places.is_empty());
        if let Some(last) = done {
            return last + 1;
        }
        for buffer in &mut self.buffers {
            buffer.fill(0.0);
        }
        self.measured = Measured::default();
        self.of = (step, epoch);
        self.places = start..start;
        0
    }

    /// The gradient of the microbatch at these places is added.
    pub(super) fn added(&mut self, places: &Range<u64>, measured: &Measured) {
        self.places.end = places.end;
        self.measured.add(measured);
    }

    /// Samples in the sums.
    pub(super) fn samples(&self) -> u64 {
        self.places.end - self.places.start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn micros(places: Range<u64>, size: usize) -> Vec<Range<u64>> {
        let starts = places.clone().step_by(size);
        starts
            .map(|start| start..places.end.min(start + size as u64))
            .collect()
    }

    fn add(sums: &mut Sums, micros: &[Range<u64>]) {
        for micro in micros {
            sums.buffers[0][0] += micro.clone().sum::<u64>() as f32;
            let samples = micro.end - micro.start;
            let measured = Measured {
                samples,
                ..Measured::default()
            };
            sums.added(micro, &measured);
        }
    }

    #[test]
    fn what_is_summed_and_still_ours_is_not_computed_again() {
        let mut sums = Sums::new(std::slice::from_ref(&(0..1)));
        let four = micros(8..16, 2);
        assert_eq!(sums.begin(3, 0, &four), 0);
        add(&mut sums, &four[..2]);
        // Another world, in which this rank has more; then one in which it has exactly what is there.
        assert_eq!(sums.begin(3, 0, &micros(8..20, 2)), 2);
        assert_eq!(sums.begin(3, 0, &four[..2]), 2);
        assert_eq!(
            (sums.buffers[0][0], sums.samples()),
            (8.0 + 9.0 + 10.0 + 11.0, 4)
        );
        // Fewer than there are, another beginning, another cut, another step, another epoch: anew.
        for (step, epoch, others) in [
            (3, 0, micros(8..10, 2)),
            (3, 0, micros(6..16, 2)),
            (3, 0, micros(8..20, 3)),
            (4, 0, four.clone()),
            (3, 1, four.clone()),
            (3, 0, Vec::new()),
        ] {
            assert_eq!(sums.begin(3, 0, &four[..2]), 2);
            assert_eq!(sums.begin(step, epoch, &others), 0, "{step} {others:?}");
            assert_eq!((sums.buffers[0][0], sums.samples()), (0.0, 0));
            sums.begin(3, 0, &four);
            add(&mut sums, &four[..2]);
        }
        sums.forget();
        assert_eq!(sums.begin(3, 0, &four), 0);
    }
}
