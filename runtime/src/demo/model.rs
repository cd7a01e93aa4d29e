//! The classifier: 64 inputs, 64 rectified hidden units, 10 classes, cross-entropy. Plain `f32`
//! arithmetic in a fixed order, so that the same inputs give the same bits everywhere.

use super::data::Sample;
use crate::random::SplitMix;

pub(super) const INPUTS: usize = 64;
pub(super) const HIDDEN: usize = 64;
pub(super) const CLASSES: usize = 10;

/// Parameters in all: both layers' weights (row by input) and biases.
pub(crate) const PARAMETERS: usize = INPUTS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES;

/// The parts of a parameter vector, or of its gradient.
struct Layers<'a> {
    w1: &'a [[f32; HIDDEN]],
    b1: &'a [f32],
    w2: &'a [[f32; CLASSES]],
    b2: &'a [f32],
}

struct LayersMut<'a> {
    w1: &'a mut [[f32; HIDDEN]],
    b1: &'a mut [f32],
    w2: &'a mut [[f32; CLASSES]],
    b2: &'a mut [f32],
}

fn layers(all: &[f32; PARAMETERS]) -> Layers<'_> {
    let (w1, rest) = all.split_at(INPUTS * HIDDEN);
    let (b1, rest) = rest.split_at(HIDDEN);
    let (w2, b2) = rest.split_at(HIDDEN * CLASSES);
    Layers {
        w1: w1.as_chunks().0,
        b1,
        w2: w2.as_chunks().0,
        b2,
    }
}

fn layers_mut(all: &mut [f32; PARAMETERS]) -> LayersMut<'_> {
    let (w1, rest) = all.split_at_mut(INPUTS * HIDDEN);
    let (b1, rest) = rest.split_at_mut(HIDDEN);
    let (w2, b2) = rest.split_at_mut(HIDDEN * CLASSES);
    LayersMut {
        w1: w1.as_chunks_mut().0,
        b1,
        w2: w2.as_chunks_mut().0,
        b2,
    }
}

/// Uniform weights after Glorot and Bengio (2010), zero biases.
pub(crate) fn initial(seed: u64) -> [f32; PARAMETERS] {
    let mut random = SplitMix::new(seed);
    let mut all = [0.0; PARAMETERS];
    let parts = layers_mut(&mut all);
    let bound = (6.0 / (INPUTS + HIDDEN) as f32).sqrt();
    for weight in parts.w1.as_flattened_mut() {
        *weight = random.signed_unit() * bound;
    }
    let bound = (6.0 / (HIDDEN + CLASSES) as f32).sqrt();
    for weight in parts.w2.as_flattened_mut() {
        *weight = random.signed_unit() * bound;
    }
    all
}

/// to += factor * from, element by element.
fn add_scaled<const N: usize>(to: &mut [f32; N], factor: f32, from: &[f32; N]) {
    for i in 0..N {
        to[i] += factor * from[i];
    }
}

/// Hidden activations and class scores.
fn forward(parts: &Layers<'_>, sample: &Sample) -> ([f32; HIDDEN], [f32; CLASSES]) {
    let mut hidden = [0.0; HIDDEN];
    hidden.copy_from_slice(parts.b1);
    for (pixel, row) in sample.pixels.iter().zip(parts.w1) {
        // A large part of each image is blank.
        if *pixel != 0.0 {
            add_scaled(&mut hidden, *pixel, row);
        }
    }
    for value in &mut hidden {
        *value = value.max(0.0);
    }
    let mut scores = [0.0; CLASSES];
    scores.copy_from_slice(parts.b2);
    for (value, row) in hidden.iter().zip(parts.w2) {
        add_scaled(&mut scores, *value, row);
    }
    (hidden, scores)
}

/// Adds the gradient of the loss, summed over `batch`, to `gradient`; returns the loss, summed.
pub(crate) fn backward(
    parameters: &[f32; PARAMETERS],
    batch: &[&Sample],
    gradient: &mut [f32; PARAMETERS],
) -> f32 {
    let parts = layers(parameters);
    let into = layers_mut(gradient);
    let mut loss = 0.0;
    for sample in batch {
        let (hidden, scores) = forward(&parts, sample);
        let label = usize::from(sample.digit);
        let highest = scores.iter().copied().fold(f32::MIN, f32::max);
        let mut delta = scores.map(|score| (score - highest).exp());
        let total: f32 = delta.iter().sum();
        loss += total.ln() + highest - scores[label];
        for value in &mut delta {
            *value /= total;
        }
        delta[label] -= 1.0;

        let mut back = [0.0; HIDDEN];
        for j in 0..HIDDEN {
            add_scaled(&mut into.w2[j], hidden[j], &delta);
            if hidden[j] > 0.0 {
                back[j] = (0..CLASSES).fold(0.0, |sum, k| sum + parts.w2[j][k] * delta[k]);
            }
        }
        for (to, from) in into.b2.iter_mut().zip(&delta) {
            *to += from;
        }
        for (pixel, row) in sample.pixels.iter().zip(into.w1.iter_mut()) {
            if *pixel != 0.0 {
                add_scaled(row, *pixel, &back);
            }
        }
        for (to, from) in into.b1.iter_mut().zip(&back) {
            *to += from;
        }
    }
    loss
}

/// How many samples are classified correctly: their own class scores highest, alone.
pub(crate) fn correct(parameters: &[f32; PARAMETERS], samples: &[Sample]) -> usize {
    let parts = layers(parameters);
    samples
        .iter()
        .filter(|sample| {
            let (_, scores) = forward(&parts, sample);
            let own = scores[usize::from(sample.digit)];
            scores.iter().filter(|score| **score >= own).count() == 1
        })
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::data::Digits;

    #[test]
    fn the_gradient_agrees_with_finite_differences() {
        let digits = Digits::load().unwrap();
        let batch: Vec<&Sample> = digits.train.iter().take(8).collect();
        let parameters = initial(5);
        let mut gradient = [0.0; PARAMETERS];
        backward(&parameters, &batch, &mut gradient);
        let loss = |parameters: &[f32; PARAMETERS]| {
            f64::from(backward(parameters, &batch, &mut [0.0; PARAMETERS]))
        };
        let mut random = SplitMix::new(1);
        let b1 = INPUTS * HIDDEN;
        let w2 = b1 + HIDDEN;
        let b2 = w2 + HIDDEN * CLASSES;
        // A rectifier that switches within h bends the slope: allowed for a few parameters only.
        let mut bent = 0;
        for part in [0..b1, b1..w2, w2..b2, b2..PARAMETERS] {
            for _ in 0..40 {
                let i = part.start + random.below(part.len() as u64) as usize;
                let h = 2e-3;
                let (mut up, mut down) = (parameters, parameters);
                up[i] += h;
                down[i] -= h;
                let slope = (loss(&up) - loss(&down)) / f64::from(up[i] - down[i]);
                let error = (slope - f64::from(gradient[i])).abs();
                bent += u32::from(error > 1e-2 * slope.abs().max(1.0));
            }
        }
        assert!(bent <= 5, "{bent} of 160 slopes differ from the gradient");
        assert!(gradient.iter().filter(|g| **g != 0.0).count() > PARAMETERS / 4);
    }
}
