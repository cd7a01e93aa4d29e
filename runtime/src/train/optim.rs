//! Optimizers on slices: PyTorch's definitions, with state that can be seen and handed over.
//!
//! Each works on a list of parameters, or on parts of one, such as the buckets of a model. Every operation is
//! one of IEEE 754, in an order that is fixed, so ranks that are given the same come to the same bits on any
//! machine.

use std::ops::Range;

use super::bytes::{Fields, put_word};
use super::rules::{AdamRule, SgdRule};
use super::tensors::{Layout, Load, Named};
use crate::saving::LoadError;

/// PyTorch's names of what Adam keeps.
pub(crate) const ADAM: [&str; 3] = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"];

/// Stochastic gradient descent as `torch.optim.SGD` defines it (Sutskever et al.: On the Importance of
/// Initialization and Momentum in Deep Learning, 2013, with the rate outside of the velocity).
#[derive(Clone, Debug, PartialEq)]
pub struct Sgd {
    rule: SgdRule,
    steps: u64,
    /// Empty without momentum.
    velocity: Vec<f32>,
    len: usize,
}

impl Sgd {
    /// Of so many parameters, without momentum and weight decay.
    pub fn new(parameters: usize) -> Sgd {
        let rule = SgdRule {
            momentum: 0.0,
            dampening: 0.0,
            nesterov: false,
            weight_decay: 0.0,
            sign: 1.0,
        };
        Sgd {
            rule,
            steps: 0,
            velocity: Vec::new(),
            len: parameters,
        }
    }

    #[must_use]
    pub fn momentum(mut self, momentum: f32) -> Sgd {
        self.rule.momentum = momentum;
        self.velocity = vec![0.0; if momentum == 0.0 { 0 } else { self.len }];
        self
    }

    /// The part of a gradient that does not enter the velocity.
    #[must_use]
    pub fn dampening(mut self, dampening: f32) -> Sgd {
        self.rule.dampening = dampening;
        self
    }

    /// Looks ahead by the velocity. PyTorch wants a momentum and no dampening with it.
    #[must_use]
    pub fn nesterov(mut self) -> Sgd {
        self.rule.nesterov = true;
        self
    }

    /// Adds so much of each parameter to its gradient.
    #[must_use]
    pub fn weight_decay(mut self, weight_decay: f32) -> Sgd {
        self.rule.weight_decay = weight_decay;
        self
    }

    /// Goes uphill.
    #[must_use]
    pub fn maximize(mut self) -> Sgd {
        self.rule.sign = -1.0;
        self
    }

    /// One step of all parameters.
    pub fn step(&mut self, parameters: &mut [f32], gradient: &[f32], rate: f64) {
        let all = 0..parameters.len();
        self.step_parts(parameters, std::iter::once((all, gradient)), rate);
    }

    /// One step, whose gradient is given in parts: ranges of the parameters, each once. A part that does not
    /// fit its range, or lies outside, is left out.
    pub fn step_parts<'a>(
        &mut self,
        parameters: &mut [f32],
        parts: impl IntoIterator<Item = (Range<usize>, &'a [f32])>,
        rate: f64,
    ) {
        self.steps += 1;
        for (range, gradient) in parts {
            let Some(parameters) = fitting(parameters, &range, gradient) else {
                continue;
            };
            let velocity = match self.velocity.get_mut(range) {
                Some(velocity) => velocity,
                None if self.rule.momentum == 0.0 => &mut [],
                None => continue,
            };
            self.rule
                .apply(self.steps, rate, parameters, gradient, velocity);
        }
    }

    /// State that changes, as tensors: `optim.<name>.momentum_buffer` for each of the layout, if there is momentum, and
    /// `optim.step`.
    pub fn tensors<'a>(&'a self, layout: &'a Layout) -> Vec<Named<'a>> {
        layout.optim(self.steps, [("momentum_buffer", &self.velocity[..])])
    }

    /// Loads those.
    ///
    /// # Errors
    /// One of them is not there, or not what this has. The optimizer is of no use then.
    pub fn load(&mut self, layout: &Layout, from: &mut Load<'_>) -> Result<(), LoadError> {
        let slots = [("momentum_buffer", &mut self.velocity[..])];
        layout.load_optim(&mut self.steps, slots, from)
    }

    /// State that changes, for checkpoints and newcomers; the options are configuration.
    pub fn encode(&self) -> Vec<u8> {
        encode(b"MSGD   1", self.steps, &[&self.velocity])
    }

    /// Becomes that; false, and nothing changed, if it is of other options or another number of parameters.
    pub fn decode(&mut self, bytes: &[u8]) -> bool {
        match decode(b"MSGD   1", bytes, [self.velocity.len()]) {
            Some((steps, [velocity])) => {
                (self.steps, self.velocity) = (steps, velocity);
                true
            }
            None => false,
        }
    }
}

/// Adam as `torch.optim.Adam` defines it (Kingma and Ba: Adam, ICLR 2015, algorithm 1), or with
/// [`decoupled`](Self::decoupled) decay `torch.optim.AdamW` (Loshchilov and Hutter: Decoupled Weight Decay
/// Regularization, ICLR 2019, algorithm 2, without the schedule's factor).
#[derive(Clone, Debug, PartialEq)]
pub struct Adam {
    rule: AdamRule,
    steps: u64,
    mean: Vec<f32>,
    square: Vec<f32>,
    /// The largest `square` so far; empty without AMSGrad.
    largest: Vec<f32>,
}

impl Adam {
    /// Of so many parameters, with PyTorch's defaults: betas 0.9 and 0.999, epsilon 1e-8, no decay.
    pub fn new(parameters: usize) -> Adam {
        let rule = AdamRule {
            betas: [0.9, 0.999],
            epsilon: 1e-8,
            weight_decay: 0.0,
            decoupled: false,
            sign: 1.0,
        };
        Adam {
            rule,
            steps: 0,
            mean: vec![0.0; parameters],
            square: vec![0.0; parameters],
            largest: Vec::new(),
        }
    }

    /// AdamW, with PyTorch's default of 0.01.
    pub fn decoupled(parameters: usize) -> Adam {
        let mut adam = Adam::new(parameters).weight_decay(0.01);
        adam.rule.decoupled = true;
        adam
    }

    #[must_use]
    pub fn betas(mut self, first: f64, second: f64) -> Adam {
        self.rule.betas = [first, second];
        self
    }

    #[must_use]
    pub fn epsilon(mut self, epsilon: f32) -> Adam {
        self.rule.epsilon = epsilon;
        self
    }

    #[must_use]
    pub fn weight_decay(mut self, weight_decay: f64) -> Adam {
        self.rule.weight_decay = weight_decay;
        self
    }

    /// Goes uphill.
    #[must_use]
    pub fn maximize(mut self) -> Adam {
        self.rule.sign = -1.0;
        self
    }

    /// Divides by the largest second moment so far (Reddi et al.: On the Convergence of Adam and Beyond,
    /// ICLR 2018, algorithm 2).
    #[must_use]
    pub fn amsgrad(mut self) -> Adam {
        self.largest = vec![0.0; self.square.len()];
        self
    }

    /// One step of all parameters.
    pub fn step(&mut self, parameters: &mut [f32], gradient: &[f32], rate: f64) {
        let all = 0..parameters.len();
        self.step_parts(parameters, std::iter::once((all, gradient)), rate);
    }

    /// One step, whose gradient is given in parts: ranges of the parameters, each once. A part that does not
    /// fit its range, or lies outside, is left out.
    pub fn step_parts<'a>(
        &mut self,
        parameters: &mut [f32],
        parts: impl IntoIterator<Item = (Range<usize>, &'a [f32])>,
        rate: f64,
    ) {
        self.steps += 1;
        for (range, gradient) in parts {
            let (Some(parameters), Some(mean), Some(square)) = (
                fitting(parameters, &range, gradient),
                self.mean.get_mut(range.clone()),
                self.square.get_mut(range.clone()),
            ) else {
                continue;
            };
            let largest = self.largest.get_mut(range).unwrap_or(&mut []);
            let moments = [mean, square, largest];
            self.rule
                .apply(self.steps, rate, parameters, gradient, moments);
        }
    }

    /// State that changes, as tensors: `optim.<name>.exp_avg` and `exp_avg_sq` for each of the layout, with AMSGrad
    /// `max_exp_avg_sq`, and `optim.step`.
    pub fn tensors<'a>(&'a self, layout: &'a Layout) -> Vec<Named<'a>> {
        let slots = [&self.mean, &self.square, &self.largest].map(|slot| &slot[..]);
        layout.optim(self.steps, ADAM.into_iter().zip(slots))
    }

    /// Loads those.
    ///
    /// # Errors
    /// One of them is not there, or not what this has. The optimizer is of no use then.
    pub fn load(&mut self, layout: &Layout, from: &mut Load<'_>) -> Result<(), LoadError> {
        let slots = [&mut self.mean, &mut self.square, &mut self.largest];
        let slots = ADAM.into_iter().zip(slots.map(|slot| &mut slot[..]));
        layout.load_optim(&mut self.steps, slots, from)
    }

    /// State that changes, for checkpoints and newcomers; the options are configuration.
    pub fn encode(&self) -> Vec<u8> {
        let lists: [&[f32]; 3] = [&self.mean, &self.square, &self.largest];
        encode(b"MADAM  1", self.steps, &lists)
    }

    /// Becomes that; false, and nothing changed, if it is of other options or another number of parameters.
    pub fn decode(&mut self, bytes: &[u8]) -> bool {
        let lengths = [self.mean.len(), self.square.len(), self.largest.len()];
        match decode(b"MADAM  1", bytes, lengths) {
            Some((steps, [mean, square, largest])) => {
                self.steps = steps;
                (self.mean, self.square, self.largest) = (mean, square, largest);
                true
            }
            None => false,
        }
    }
}

/// The parameters of a range, if the gradient is as long.
fn fitting<'a>(
    parameters: &'a mut [f32],
    range: &Range<usize>,
    gradient: &[f32],
) -> Option<&'a mut [f32]> {
    let parameters = parameters.get_mut(range.clone())?;
    (parameters.len() == gradient.len()).then_some(parameters)
}

fn encode(magic: &[u8; 8], steps: u64, lists: &[&[f32]]) -> Vec<u8> {
    let mut out = magic.to_vec();
    put_word(&mut out, steps);
    for list in lists {
        put_word(&mut out, list.len() as u64);
        out.reserve(size_of_val(*list));
        for value in *list {
            out.extend_from_slice(&value.to_le_bytes());
        }
    }
    out
}

/// Lists of exactly these lengths.
fn decode<const N: usize>(
    magic: &[u8; 8],
    bytes: &[u8],
    lengths: [usize; N],
) -> Option<(u64, [Vec<f32>; N])> {
    let mut fields = Fields(bytes.strip_prefix(magic)?);
    let steps = fields.word()?;
    let mut lists = lengths.map(Vec::with_capacity);
    for (list, len) in lists.iter_mut().zip(lengths) {
        if fields.word()? != len as u64 {
            return None;
        }
        let (values, rest) = fields.0.split_at_checked(len.checked_mul(4)?)?;
        fields.0 = rest;
        let (values, _) = values.as_chunks();
        list.extend(values.iter().map(|value| f32::from_le_bytes(*value)));
    }
    fields.end()?;
    Some((steps, lists))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gradient(step: u64, len: usize) -> Vec<f32> {
        (0..len)
            .map(|i| ((i as f32 + 0.3) * (step as f32 + 1.7)).sin())
            .collect()
    }

    #[test]
    fn in_parts_and_from_a_copy_the_bits_are_the_same() {
        let (mut whole, mut parts) = (vec![0.5f32; 10], vec![0.5f32; 10]);
        let mut a = Adam::decoupled(10).amsgrad();
        let mut b = a.clone();
        let mut c = Sgd::new(10).momentum(0.9).nesterov().weight_decay(0.1);
        let mut other = c.clone();
        for step in 0..5 {
            let g = gradient(step, 10);
            a.step(&mut whole, &g, 0.01);
            c.step(&mut whole, &g, 0.01);
            let cut = || [(6..10, &g[6..]), (0..6, &g[..6])];
            // As after a change of the world.
            let mut copy = Adam::decoupled(10).amsgrad();
            assert!(copy.decode(&b.encode()));
            let mut copied = Sgd::new(10).momentum(0.9).nesterov().weight_decay(0.1);
            assert!(copied.decode(&other.encode()));
            copy.step_parts(&mut parts, cut(), 0.01);
            copied.step_parts(&mut parts, cut(), 0.01);
            (b, other) = (copy, copied);
            assert_eq!(whole, parts);
        }
        assert_eq!((&a, &c), (&b, &other));
    }

    #[test]
    fn another_optimizers_state_is_refused() {
        let sgd = Sgd::new(3).momentum(0.9);
        let adam = Adam::new(3);
        let before = adam.clone();
        let mut refuses = adam;
        for bytes in [
            sgd.encode(),
            Adam::new(4).encode(),
            Adam::new(3).amsgrad().encode(),
            before.encode()[1..].to_vec(),
            before.encode()[..20].to_vec(),
        ] {
            assert!(!refuses.decode(&bytes));
        }
        assert_eq!(refuses, before);
        assert!(!Sgd::new(3).decode(&sgd.encode()));
    }

    #[test]
    fn a_part_that_does_not_fit_is_left_out() {
        let mut p = [1.0; 4];
        let mut sgd = Sgd::new(4);
        sgd.step_parts(
            &mut p,
            [(0..2, &[1.0][..]), (3..9, &[1.0; 6]), (2..3, &[1.0])],
            0.5,
        );
        assert_eq!(p, [1.0, 1.0, 0.5, 1.0]);
    }
}
