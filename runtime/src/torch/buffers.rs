//! What a model keeps beside its parameters: running statistics, which a forward pass moves, and what is fixed.

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::arena::{part, zeros};
use super::{TorchError, tensors};

/// Running statistics (of a batch normalization: mean and variance), in one flat tensor.
///
/// A forward pass moves them. So that a step changes nothing before it is committed, they are put back after each
/// microbatch; by how much they moved, times the microbatch's samples, is summed up over all ranks, and the
/// commit moves them by the mean. So a step moves them once, however many microbatches it has.
#[derive(Debug)]
pub(super) struct Buffers {
    flat: Tensor,
    kept: Tensor,
    /// What is never moved and wants no gradient, by name: frozen variables, and buffers of other kinds.
    fixed: Vec<Tensor>,
}

impl Buffers {
    /// All but the variables that want gradients.
    pub(super) fn new(variables: &VarStore) -> Result<Buffers, TorchError> {
        let device = variables.device();
        let trained = variables.trainable_variables();
        let is_variable =
            |tensor: &Tensor| trained.iter().any(|v| v.data_ptr() == tensor.data_ptr());
        let mut named: Vec<_> = variables.variables().into_iter().collect();
        named.sort_by(|a, b| a.0.cmp(&b.0));
        let (mut moving, mut fixed) = (Vec::new(), Vec::new());
        for (_, tensor) in named {
            if tensor.requires_grad() {
                continue;
            }
            if tensor.kind() == Kind::Float && !is_variable(&tensor) && tensor.numel() > 0 {
                moving.push(tensor);
            } else {
                fixed.push(tensor);
            }
        }
        let _guard = tch::no_grad_guard();
        let flat = zeros(moving.iter().map(Tensor::numel).sum(), device)?;
        let mut at = 0;
        for tensor in &mut moving {
            let size = tensor.size();
            let span = at..at + tensor.numel();
            let mut view = part(&flat, &span)?.f_view(size.as_slice())?;
            view.f_copy_(tensor)?;
            tensor.f_set_data(&view)?;
            at = span.end;
        }
        let mut kept = zeros(flat.numel(), device)?;
        kept.f_copy_(&flat)?;
        Ok(Buffers { flat, kept, fixed })
    }

    pub(super) fn len(&self) -> usize {
        self.flat.numel()
    }

    /// Puts back what a forward pass over so many samples has moved; adds by how much, times the samples.
    pub(super) fn put_back(&mut self, samples: u64, moved: &mut [f64]) -> Result<(), TorchError> {
        if self.len() == 0 {
            return Ok(());
        }
        let _guard = tch::no_grad_guard();
        let (mut now, mut before) = (vec![0.0; self.len()], vec![0.0; self.len()]);
        tensors::read(&self.flat, &mut now)?;
        tensors::read(&self.kept, &mut before)?;
        for ((moved, now), before) in moved.iter_mut().zip(now).zip(before) {
            *moved += (f64::from(now) - f64::from(before)) * samples as f64;
        }
        self.flat.f_copy_(&self.kept)?;
        Ok(())
    }

    /// Moves them by the mean over so many samples.
    pub(super) fn commit(&mut self, samples: u64, moved: &[f64]) -> Result<(), TorchError> {
        if self.len() == 0 || samples == 0 {
            return Ok(());
        }
        let mut values = vec![0.0; self.len()];
        tensors::read(&self.kept, &mut values)?;
        for (value, moved) in values.iter_mut().zip(moved) {
            *value = (f64::from(*value) + moved / samples as f64) as f32;
        }
        self.become_(&values)
    }

    fn become_(&mut self, values: &[f32]) -> Result<(), TorchError> {
        tensors::write(&mut self.flat, values)?;
        tensors::write(&mut self.kept, values)
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) -> Result<(), TorchError> {
        tensors::put(out, &self.kept)?;
        for tensor in &self.fixed {
            let len = bytes_of(tensor);
            let mut bytes = vec![0; len];
            let here = tensor.f_to_device(Device::Cpu)?.f_contiguous()?;
            here.f_copy_data_u8(&mut bytes, tensor.numel())?;
            out.extend_from_slice(&bytes);
        }
        Ok(())
    }

    /// Takes what was encoded off the front.
    pub(super) fn decode<'a>(&self, bytes: &mut &'a [u8]) -> Option<Decoded<'a>> {
        let moving = tensors::take(bytes, self.len())?;
        let mut fixed = Vec::new();
        for tensor in &self.fixed {
            let (here, rest) = bytes.split_at_checked(bytes_of(tensor))?;
            *bytes = rest;
            fixed.push(here);
        }
        Some(Decoded { moving, fixed })
    }

    pub(super) fn restore(&mut self, decoded: &Decoded<'_>) -> Result<(), TorchError> {
        self.become_(&decoded.moving)?;
        let _guard = tch::no_grad_guard();
        for (tensor, bytes) in self.fixed.iter_mut().zip(&decoded.fixed) {
            let from = Tensor::f_from_data_size(bytes, &tensor.size(), tensor.kind())?;
            tensor.f_copy_(&from)?;
        }
        Ok(())
    }
}

#[derive(Debug)]
pub(super) struct Decoded<'a> {
    moving: Vec<f32>,
    fixed: Vec<&'a [u8]>,
}

fn bytes_of(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}
