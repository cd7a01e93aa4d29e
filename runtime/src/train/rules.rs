//! The arithmetic of a step of SGD and of Adam, on slices.
//!
//! Every operation is one of IEEE 754, rounded by itself, in an order that is fixed: the same bits on any machine.
//! Scalars (rates, betas) are computed in `f64` and used in `f32`, as PyTorch does.

/// SGD as `torch.optim.SGD` defines it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SgdRule {
    pub(crate) momentum: f32,
    pub(crate) dampening: f32,
    pub(crate) nesterov: bool,
    pub(crate) weight_decay: f32,
    /// -1, to maximize.
    pub(crate) sign: f32,
}

impl SgdRule {
    /// One step, counted from 1. The velocity is empty without momentum, else all are of one length.
    pub(crate) fn apply(
        &self,
        step: u64,
        rate: f64,
        parameters: &mut [f32],
        gradient: &[f32],
        velocity: &mut [f32],
    ) {
        let SgdRule { momentum, sign, .. } = *self;
        let (rate, decay) = (rate as f32, self.weight_decay);
        let each = parameters.iter_mut().zip(gradient);
        if velocity.is_empty() {
            each.for_each(|(p, g)| *p -= rate * decayed(sign * g, *p, decay));
            return;
        }
        // The first velocity is the gradient itself.
        let enters = if step == 1 { 1.0 } else { 1.0 - self.dampening };
        for ((p, g), v) in each.zip(velocity) {
            let g = decayed(sign * g, *p, decay);
            *v = momentum * *v + enters * g;
            *p -= rate * if self.nesterov { g + momentum * *v } else { *v };
        }
    }
}

/// Adam as `torch.optim.Adam` and `AdamW` define it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AdamRule {
    pub(crate) betas: [f64; 2],
    pub(crate) epsilon: f32,
    pub(crate) weight_decay: f64,
    /// The decay shrinks the parameters, and is not added to the gradient.
    pub(crate) decoupled: bool,
    /// -1, to maximize.
    pub(crate) sign: f32,
}

impl AdamRule {
    /// One step, counted from 1. The moments are the mean and the square of the gradient, and with AMSGrad the
    /// largest square so far, else empty; all others are of one length.
    pub(crate) fn apply(
        &self,
        step: u64,
        rate: f64,
        parameters: &mut [f32],
        gradient: &[f32],
        [mean, square, largest]: [&mut [f32]; 3],
    ) {
        let corrections = self.betas.map(|beta| 1.0 - power(beta, step));
        let (size, root) = ((rate / corrections[0]) as f32, corrections[1].sqrt() as f32);
        let keeps = self.betas.map(|beta| beta as f32);
        let enters = self.betas.map(|beta| (1.0 - beta) as f32);
        let (added, shrinks) = match self.decoupled {
            true => (0.0, (1.0 - rate * self.weight_decay) as f32),
            false => (self.weight_decay as f32, 1.0),
        };
        let AdamRule { epsilon, sign, .. } = *self;
        let moments = mean.iter_mut().zip(square);
        let each = parameters.iter_mut().zip(gradient).zip(moments);
        let moved = |p: f32, g: f32, m: &mut f32, v: &mut f32| {
            let g = decayed(sign * g, p, added);
            *m = keeps[0] * *m + enters[0] * g;
            *v = keeps[1] * *v + enters[1] * (g * g);
            p * shrinks
        };
        if largest.is_empty() {
            for ((p, g), (m, v)) in each {
                let shrunk = moved(*p, *g, m, v);
                *p = shrunk - size * (*m / (v.sqrt() / root + epsilon));
            }
            return;
        }
        for (((p, g), (m, v)), l) in each.zip(largest) {
            let shrunk = moved(*p, *g, m, v);
            // As PyTorch's maximum: what is not a number stays.
            *l = if *v > *l || v.is_nan() { *v } else { *l };
            *p = shrunk - size * (*m / (l.sqrt() / root + epsilon));
        }
    }
}

#[inline(always)]
fn decayed(gradient: f32, parameter: f32, decay: f32) -> f32 {
    if decay == 0.0 {
        gradient
    } else {
        gradient + decay * parameter
    }
}

/// By multiplications alone: the mathematics library of the host has no part in it.
pub(crate) fn power(mut base: f64, mut exponent: u64) -> f64 {
    let mut product = 1.0;
    while exponent > 0 {
        if exponent % 2 == 1 {
            product *= base;
        }
        base *= base;
        exponent /= 2;
    }
    product
}
