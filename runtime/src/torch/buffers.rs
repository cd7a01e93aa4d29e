//! A model's tensors beside its parameters: running statistics, which a forward pass moves, and fixed ones.

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::arena::{part, shape_of, zeros};
use super::{TorchError, tensors};
use crate::saving::Dtype;
use crate::train::{BoxError, Layout, Load, Named, Room};

/// Running statistics (of a batch normalization: mean and variance), in one flat tensor.
///
/// A forward pass moves them. So that a step changes nothing before it is committed, they are put back after each
/// microbatch; by how much they moved, times the microbatch's samples, is summed up over all ranks, and the
/// commit moves them by the mean. So a step moves them once, however many microbatches it has.
#[derive(Debug)]
pub(super) struct Buffers {
    flat: Tensor,
    kept: Tensor,
    /// Names and places of those.
    layout: Layout,
    /// Tensors that never move and want no gradient, by name: frozen variables, and buffers of other kinds.
    fixed: Vec<(String, Tensor)>,
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
        for (name, tensor) in named {
            if tensor.requires_grad() {
                continue;
            }
            if tensor.kind() == Kind::Float && !is_variable(&tensor) && tensor.numel() > 0 {
                moving.push((name, tensor));
            } else {
                fixed.push((name, tensor));
            }
        }
        let _guard = tch::no_grad_guard();
        let flat = zeros(
            moving.iter().map(|(_, tensor)| tensor.numel()).sum(),
            device,
        )?;
        let (mut at, mut layout) = (0, Layout::default());
        for (name, tensor) in &mut moving {
            let size = tensor.size();
            let span = at..at + tensor.numel();
            layout.add(name.clone(), shape_of(tensor), span.clone());
            let mut view = part(&flat, &span)?.f_view(size.as_slice())?;
            view.f_copy_(tensor)?;
            tensor.f_set_data(&view)?;
            at = span.end;
        }
        let mut kept = zeros(flat.numel(), device)?;
        kept.f_copy_(&flat)?;
        Ok(Buffers {
            flat,
            kept,
            layout,
            fixed,
        })
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
        for (_, tensor) in &self.fixed {
            out.extend_from_slice(&bytes_in(tensor)?);
        }
        Ok(())
    }

    /// Takes what was encoded off the front.
    pub(super) fn decode<'a>(&self, bytes: &mut &'a [u8]) -> Option<Decoded<'a>> {
        let moving = tensors::take(bytes, self.len())?;
        let mut fixed = Vec::new();
        for (_, tensor) in &self.fixed {
            let (here, rest) = bytes.split_at_checked(bytes_of(tensor))?;
            *bytes = rest;
            fixed.push(here);
        }
        Some(Decoded { moving, fixed })
    }

    pub(super) fn restore(&mut self, decoded: &Decoded<'_>) -> Result<(), TorchError> {
        self.become_(&decoded.moving)?;
        let _guard = tch::no_grad_guard();
        for ((_, tensor), bytes) in self.fixed.iter_mut().zip(&decoded.fixed) {
            become_bytes(tensor, bytes)?;
        }
        Ok(())
    }

    /// All of them as a checkpoint has them.
    pub(super) fn named(&self) -> Result<Vec<Named<'_>>, TorchError> {
        let mut all = tensors::named(&self.layout, &self.kept, in_model)?;
        for (name, tensor) in &self.fixed {
            all.push(Named {
                name: in_model(name),
                dtype: dtype_of(name, tensor.kind())?,
                shape: shape_of(tensor),
                bytes: bytes_in(tensor)?.into(),
            });
        }
        Ok(all)
    }

    /// Fills them from one.
    pub(super) fn load(&mut self, from: &mut Load<'_>) -> Result<(), BoxError> {
        tensors::load(&self.layout, &mut self.kept, in_model, from)?;
        let _guard = tch::no_grad_guard();
        self.flat.f_copy_(&self.kept).map_err(TorchError::from)?;
        for (name, tensor) in &mut self.fixed {
            let mut bytes = vec![0; bytes_of(tensor)];
            let room = Room {
                name: in_model(name),
                dtype: dtype_of(name, tensor.kind())?,
                shape: shape_of(tensor),
                into: (&mut bytes).into(),
            };
            if from.picks(&room.name) {
                from.fill(vec![room])?;
                become_bytes(tensor, &bytes)?;
            }
        }
        Ok(())
    }
}

fn become_bytes(tensor: &mut Tensor, bytes: &[u8]) -> Result<(), TorchError> {
    let from = Tensor::f_from_data_size(bytes, &tensor.size(), tensor.kind())?;
    Ok(tensor.f_copy_(&from)?)
}

fn bytes_in(tensor: &Tensor) -> Result<Vec<u8>, TorchError> {
    let mut bytes = vec![0; bytes_of(tensor)];
    let here = tensor.f_to_device(Device::Cpu)?.f_contiguous()?;
    here.f_copy_data_u8(&mut bytes, tensor.numel())?;
    Ok(bytes)
}

/// The name of a variable in checkpoints.
pub(super) fn in_model(name: &str) -> String {
    format!("model.{name}")
}

fn dtype_of(name: &str, kind: Kind) -> Result<Dtype, TorchError> {
    Ok(match kind {
        Kind::Bool => Dtype::BOOL,
        Kind::Uint8 => Dtype::U8,
        Kind::Int8 => Dtype::I8,
        Kind::Int16 => Dtype::I16,
        Kind::Int => Dtype::I32,
        Kind::Int64 => Dtype::I64,
        Kind::Half => Dtype::F16,
        Kind::BFloat16 => Dtype::BF16,
        Kind::Float => Dtype::F32,
        Kind::Double => Dtype::F64,
        Kind::ComplexFloat => Dtype::C64,
        kind => {
            let name = name.to_owned();
            return Err(TorchError::NoDtype { name, kind });
        }
    })
}

#[derive(Debug)]
pub(super) struct Decoded<'a> {
    moving: Vec<f32>,
    fixed: Vec<&'a [u8]>,
}

fn bytes_of(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}
