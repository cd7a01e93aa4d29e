//! Optimizers on flat tensors. tch has PyTorch's, but neither shows nor takes their state.
//!
//! The arithmetic is PyTorch's (`torch.optim`, the implementation for one tensor), but that each operation is
//! rounded by itself, as IEEE 754 says: on a CPU the results do not depend on the processor, on the number of threads
//! or on where vectors end, and are the same bits on every rank. (libtorch's own square root is not: it is MKL's,
//! which rounds otherwise in every fifth case, and depends on the processor.) On a GPU they are libtorch's
//! operations, the same on all GPUs of one kind.

use tch::{Device, Kind, Tensor};

use super::{TorchError, arena, tensors};
use crate::train::optim::ADAM;
use crate::train::rules::{AdamRule, SgdRule, power};
use crate::train::{BoxError, Layout, Load, Named, Room};

/// How parameters follow their gradients. The defaults are PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    Sgd {
        momentum: f64,
        dampening: f64,
        nesterov: bool,
        weight_decay: f64,
    },
    /// Kingma and Ba: Adam, ICLR 2015. The weight decay is added to the gradient.
    Adam(Adam),
    /// Loshchilov and Hutter: Decoupled Weight Decay Regularization, ICLR 2019.
    AdamW(Adam),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    pub betas: (f64, f64),
    pub epsilon: f64,
    pub weight_decay: f64,
    /// Divides by the largest second moment so far (Reddi et al.: On the Convergence of Adam and Beyond,
    /// ICLR 2018).
    pub amsgrad: bool,
}

impl Rule {
    pub fn sgd() -> Rule {
        Rule::Sgd {
            momentum: 0.0,
            dampening: 0.0,
            nesterov: false,
            weight_decay: 0.0,
        }
    }

    pub fn momentum(momentum: f64) -> Rule {
        Rule::Sgd {
            momentum,
            dampening: 0.0,
            nesterov: false,
            weight_decay: 0.0,
        }
    }

    pub fn adam() -> Rule {
        Rule::Adam(Adam::new(0.0))
    }

    pub fn adam_w() -> Rule {
        Rule::AdamW(Adam::new(0.01))
    }

    /// Tensors of state, each as long as the parameters.
    pub(super) fn moments(&self) -> usize {
        match self {
            Rule::Sgd { momentum, .. } => usize::from(*momentum != 0.0),
            Rule::Adam(adam) | Rule::AdamW(adam) => 2 + usize::from(adam.amsgrad),
        }
    }

    /// PyTorch's names of them.
    fn slots(&self) -> &'static [&'static str] {
        match self {
            Rule::Sgd { .. } => &["momentum_buffer"],
            Rule::Adam(_) | Rule::AdamW(_) => &ADAM,
        }
    }

    fn code(&self) -> u8 {
        match self {
            Rule::Sgd { .. } => 1,
            Rule::Adam(_) => 2,
            Rule::AdamW(_) => 3,
        }
    }
}

impl Adam {
    fn new(weight_decay: f64) -> Adam {
        Adam {
            betas: (0.9, 0.999),
            epsilon: 1e-8,
            weight_decay,
            amsgrad: false,
        }
    }
}

/// A rule with its state, for one flat tensor of parameters.
#[derive(Debug)]
pub struct Optimizer {
    rule: Rule,
    steps: u64,
    moments: Vec<Tensor>,
    len: i64,
    device: Device,
}

const MAGIC: &[u8; 8] = b"MOPTIM 1";

impl Optimizer {
    /// For `len` parameters, in `f32`, on `device`.
    ///
    /// # Errors
    /// The device lacks memory.
    pub fn new(rule: Rule, len: usize, device: Device) -> Result<Optimizer, TorchError> {
        let len = i64::try_from(len).unwrap_or(i64::MAX);
        let moments = (0..rule.moments())
            .map(|_| Tensor::f_zeros([len], (Kind::Float, device)))
            .collect::<Result<_, _>>()?;
        Ok(Optimizer {
            rule,
            steps: 0,
            moments,
            len,
            device,
        })
    }

    pub fn rule(&self) -> &Rule {
        &self.rule
    }

    /// Steps that were taken.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// SGD: the velocity, if there is momentum. Adam: the first and second moment, and with `amsgrad` the
    /// largest second one.
    pub fn moments(&self) -> &[Tensor] {
        &self.moments
    }

    /// Moves the parameters by a gradient, with the learning rate `rate`. The gradient is only read.
    ///
    /// # Errors
    /// The tensors do not fit; nothing is changed then. Or the device failed half-way.
    pub fn step(
        &mut self,
        parameters: &Tensor,
        gradient: &Tensor,
        rate: f64,
    ) -> Result<(), TorchError> {
        self.step_parts(parameters, &[(0, gradient.shallow_clone())], rate)
    }

    /// As [`step`](Self::step), with a gradient in parts, each beginning at some element. Elements that no part covers
    /// stay as they are.
    ///
    /// # Errors
    /// As there.
    pub fn step_parts(
        &mut self,
        parameters: &Tensor,
        parts: &[(usize, Tensor)],
        rate: f64,
    ) -> Result<(), TorchError> {
        let shape = |what, tensor: &Tensor, expected| {
            let right = tensor.size() == [expected]
                && tensor.kind() == Kind::Float
                && tensor.device() == self.device;
            if right {
                return Ok(());
            }
            Err(TorchError::Shape {
                what,
                got: format!(
                    "{:?}, {:?}, {:?}",
                    tensor.size(),
                    tensor.kind(),
                    tensor.device()
                ),
                expected: format!("[{expected}], Float, {:?}", self.device),
            })
        };
        shape("a tensor of parameters", parameters, self.len)?;
        let whole = usize::try_from(self.len).unwrap_or(0);
        for (start, part) in parts {
            let room = whole.saturating_sub(*start).min(part.numel());
            shape("a part of a gradient", part, room as i64)?;
        }
        self.steps += 1;
        for (start, part) in parts {
            self.step_part(parameters, *start, part, rate, true)?;
        }
        Ok(())
    }

    /// In memory, if that may be and can be, or else by libtorch's operations.
    pub(super) fn step_part(
        &mut self,
        parameters: &Tensor,
        start: usize,
        part: &Tensor,
        rate: f64,
        in_memory: bool,
    ) -> Result<(), TorchError> {
        let _guard = tch::no_grad_guard();
        let span = start..start + part.numel();
        let parameters = arena::part(parameters, &span)?;
        let moments = self.moments.iter().map(|moment| arena::part(moment, &span));
        let moments = moments.collect::<Result<Vec<_>, _>>()?;
        let apart = || tensors::are_apart(moments.iter().chain([&parameters, part]));
        if in_memory && apart() {
            // SAFETY: none of them shares memory with another, and no other tensor is used before the slices are gone.
            let slices: Option<Vec<&mut [f32]>> = unsafe {
                moments
                    .iter()
                    .map(|moment| tensors::view_mut(moment))
                    .collect()
            };
            // SAFETY: as above.
            let whole = unsafe { tensors::view_mut(&parameters) };
            if let (Some(mut slices), Some(whole), Some(gradient)) =
                (slices, whole, tensors::view(part))
            {
                self.rule
                    .apply(self.steps, rate, whole, gradient, &mut slices);
                return Ok(());
            }
        }
        self.apply(parameters, part, moments, rate)
    }

    fn apply(
        &self,
        mut parameters: Tensor,
        gradient: &Tensor,
        mut moments: Vec<Tensor>,
        rate: f64,
    ) -> Result<(), TorchError> {
        match self.rule {
            Rule::Sgd {
                momentum,
                dampening,
                nesterov,
                weight_decay,
            } => {
                let gradient = decayed(gradient, &parameters, weight_decay)?;
                let change = match moments.first_mut() {
                    None => gradient.f_mul_scalar(rate)?,
                    Some(velocity) => {
                        if self.steps == 1 {
                            velocity.f_copy_(&gradient)?;
                        } else {
                            let _ = velocity.f_mul_scalar_(momentum)?;
                            let _ = velocity.f_add_(&gradient.f_mul_scalar(1.0 - dampening)?)?;
                        }
                        if nesterov {
                            let mut ahead = velocity.f_mul_scalar(momentum)?;
                            let _ = ahead.f_add_(&gradient)?;
                            ahead.f_mul_scalar_(rate)?
                        } else {
                            velocity.f_mul_scalar(rate)?
                        }
                    }
                };
                let _ = parameters.f_sub_(&change)?;
                Ok(())
            }
            Rule::Adam(adam) => {
                let gradient = decayed(gradient, &parameters, adam.weight_decay)?;
                adam.apply(self.steps, rate, &mut parameters, &gradient, moments)
            }
            Rule::AdamW(adam) => {
                let _ = parameters.f_mul_scalar_(1.0 - rate * adam.weight_decay)?;
                adam.apply(self.steps, rate, &mut parameters, gradient, moments)
            }
        }
    }

    /// For checkpoints and newcomers.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), TorchError> {
        out.extend_from_slice(MAGIC);
        out.push(self.rule.code());
        out.extend_from_slice(&self.steps.to_le_bytes());
        out.extend_from_slice(&self.len.to_le_bytes());
        out.push(u8::try_from(self.moments.len()).unwrap_or(u8::MAX));
        for moment in &self.moments {
            tensors::put(out, moment)?;
        }
        Ok(())
    }

    /// Takes what was encoded off the front of `bytes`. `None`, and nothing is changed, if it is none, or of
    /// another rule or size.
    pub fn decode(&self, bytes: &mut &[u8]) -> Option<State> {
        let rest = bytes.strip_prefix(MAGIC)?;
        let ([code], rest) = rest.split_first_chunk()?;
        let (steps, rest) = rest.split_first_chunk()?;
        let (len, rest) = rest.split_first_chunk()?;
        let ([count], mut rest) = rest.split_first_chunk()?;
        if *code != self.rule.code()
            || i64::from_le_bytes(*len) != self.len
            || usize::from(*count) != self.moments.len()
        {
            return None;
        }
        let len = usize::try_from(self.len).ok()?;
        let moments = (0..*count)
            .map(|_| tensors::take(&mut rest, len))
            .collect::<Option<_>>()?;
        *bytes = rest;
        Some(State {
            steps: u64::from_le_bytes(*steps),
            moments,
        })
    }

    /// State that changes, as tensors: `optim.<name>.<slot>`, the slots by PyTorch's names, and `optim.step`.
    pub(super) fn named<'a>(&'a self, layout: &'a Layout) -> Result<Vec<Named<'a>>, TorchError> {
        let mut all = vec![Named::count("optim.step", self.steps)];
        for (moment, slot) in self.moments.iter().zip(self.rule.slots()) {
            let full = |name: &str| format!("optim.{name}.{slot}");
            all.extend(tensors::named(layout, moment, full)?);
        }
        Ok(all)
    }

    /// Loads those.
    pub(super) fn load(&mut self, layout: &Layout, from: &mut Load<'_>) -> Result<(), BoxError> {
        let mut steps = self.steps.to_le_bytes();
        from.fill(vec![Room::count("optim.step", &mut steps)])?;
        for (moment, slot) in self.moments.iter_mut().zip(self.rule.slots()) {
            let full = |name: &str| format!("optim.{name}.{slot}");
            tensors::load(layout, moment, full, from)?;
        }
        self.steps = u64::from_le_bytes(steps);
        Ok(())
    }

    /// Becomes what was [decoded](Self::decode).
    ///
    /// # Errors
    /// The device failed; then this is of no more use.
    pub fn restore(&mut self, state: &State) -> Result<(), TorchError> {
        for (moment, values) in self.moments.iter_mut().zip(&state.moments) {
            tensors::write(moment, values)?;
        }
        self.steps = state.steps;
        Ok(())
    }
}

/// An optimizer's state, decoded.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    pub steps: u64,
    pub moments: Vec<Vec<f32>>,
}

impl Rule {
    /// One step of parameters in memory, and of their moments.
    fn apply(
        &self,
        step: u64,
        rate: f64,
        parameters: &mut [f32],
        gradient: &[f32],
        moments: &mut [&mut [f32]],
    ) {
        match *self {
            Rule::Sgd {
                momentum,
                dampening,
                nesterov,
                weight_decay,
            } => {
                let rule = SgdRule {
                    momentum: momentum as f32,
                    dampening: dampening as f32,
                    nesterov,
                    weight_decay: weight_decay as f32,
                    sign: 1.0,
                };
                let velocity = moments.first_mut().map_or(&mut [][..], |v| v);
                rule.apply(step, rate, parameters, gradient, velocity);
            }
            Rule::Adam(adam) => adam.go(false, step, rate, parameters, gradient, moments),
            Rule::AdamW(adam) => adam.go(true, step, rate, parameters, gradient, moments),
        }
    }
}

impl Adam {
    fn go(
        &self,
        decoupled: bool,
        step: u64,
        rate: f64,
        parameters: &mut [f32],
        gradient: &[f32],
        moments: &mut [&mut [f32]],
    ) {
        let [mean, square, largest @ ..] = moments else {
            return;
        };
        let rule = AdamRule {
            betas: [self.betas.0, self.betas.1],
            epsilon: self.epsilon as f32,
            weight_decay: self.weight_decay,
            decoupled,
            sign: 1.0,
        };
        let largest = largest.first_mut().map_or(&mut [][..], |l| l);
        let moments = [&mut **mean, &mut **square, largest];
        rule.apply(step, rate, parameters, gradient, moments);
    }

    fn apply(
        &self,
        step: u64,
        rate: f64,
        parameters: &mut Tensor,
        gradient: &Tensor,
        moments: Vec<Tensor>,
    ) -> Result<(), TorchError> {
        let mut moments = moments.into_iter();
        let (Some(mut first), Some(mut second)) = (moments.next(), moments.next()) else {
            return Ok(());
        };
        let (b1, b2) = self.betas;
        let _ = first.f_mul_scalar_(b1)?;
        let _ = first.f_add_(&gradient.f_mul_scalar(1.0 - b1)?)?;
        let _ = second.f_mul_scalar_(b2)?;
        let mut square = gradient.f_mul(gradient)?;
        let _ = second.f_add_(&square.f_mul_scalar_(1.0 - b2)?)?;
        let mut denominator = match moments.next() {
            None => second.f_sqrt()?,
            Some(mut largest) => {
                let larger = largest.f_maximum(&second)?;
                largest.f_copy_(&larger)?;
                larger.f_sqrt()?
            }
        };
        let corrected = (1.0 - power(b2, step)).sqrt();
        let _ = denominator.f_div_scalar_(corrected)?;
        let _ = denominator.f_add_scalar_(self.epsilon)?;
        let mut change = first.f_div(&denominator)?;
        let change = change.f_mul_scalar_(rate / (1.0 - power(b1, step)))?;
        let _ = parameters.f_sub_(&change)?;
        Ok(())
    }
}

fn decayed(
    gradient: &Tensor,
    parameters: &Tensor,
    weight_decay: f64,
) -> Result<Tensor, TorchError> {
    if weight_decay == 0.0 {
        return Ok(gradient.shallow_clone());
    }
    let mut sum = parameters.f_mul_scalar(weight_decay)?;
    let _ = sum.f_add_(gradient)?;
    Ok(sum)
}
