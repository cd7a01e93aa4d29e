//! Which samples a step trains on: a pure function of the seed and the step, whatever the world.

pub(super) use crate::random::SplitMix;

/// Cuts the endless sequence of shuffled epochs into batches; each sample comes once an epoch.
#[derive(Debug)]
pub(super) struct Sampler {
    seed: u64,
    samples: usize,
    batch: usize,
    /// The epoch whose order is kept: consecutive steps share it.
    kept: Option<(u64, Vec<usize>)>,
}

impl Sampler {
    /// Of `samples` samples, `batch` a step.
    pub(super) fn new(seed: u64, samples: usize, batch: usize) -> Sampler {
        Sampler {
            seed,
            samples,
            batch,
            kept: None,
        }
    }

    /// The samples of a step, by index, in order. A batch may end one epoch and begin the next.
    pub(super) fn batch(&mut self, step: u64) -> Vec<usize> {
        let first = step * self.batch as u64;
        (first..first + self.batch as u64)
            .map(|nth| self.sample(nth))
            .collect()
    }

    fn sample(&mut self, nth: u64) -> usize {
        let samples = self.samples as u64;
        let (epoch, place) = (nth / samples, (nth % samples) as usize);
        match &self.kept {
            Some((kept, order)) if *kept == epoch => order[place],
            _ => {
                let order = shuffled(self.seed, epoch, self.samples);
                let index = order[place];
                self.kept = Some((epoch, order));
                index
            }
        }
    }
}

/// Fisher-Yates, seeded from (seed, epoch).
fn shuffled(seed: u64, epoch: u64, len: usize) -> Vec<usize> {
    let mut random = SplitMix::new(SplitMix::new(seed).next() ^ epoch);
    let mut order: Vec<usize> = (0..len).collect();
    for i in (1..len).rev() {
        order.swap(i, random.below(i as u64 + 1) as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sample_comes_once_an_epoch() {
        let mut sampler = Sampler::new(3, 100, 30);
        // 10 batches of 30 are 3 epochs of 100.
        let all: Vec<usize> = (0..10).flat_map(|step| sampler.batch(step)).collect();
        let epochs: Vec<&[usize]> = all.chunks(100).collect();
        for epoch in &epochs {
            let mut sorted = epoch.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..100).collect::<Vec<_>>());
        }
        assert!(epochs[0] != epochs[1] && epochs[1] != epochs[2]);
    }

    #[test]
    fn a_batch_depends_on_seed_and_step_alone() {
        let mut forth = Sampler::new(3, 100, 30);
        let mut back = Sampler::new(3, 100, 30);
        let a: Vec<_> = (0..10).map(|step| forth.batch(step)).collect();
        let mut b: Vec<_> = (0..10).rev().map(|step| back.batch(step)).collect();
        b.reverse();
        assert_eq!(a, b);
        assert_ne!(Sampler::new(4, 100, 30).batch(0), a[0]);
    }
}
