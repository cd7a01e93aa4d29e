//! The parameters of a model in one flat tensor, and where their gradients are.

use std::collections::HashMap;
use std::ops::Range;

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::shim::Hooks;
use super::{TorchError, tensors};
use crate::gradient::compress::Shape;
use crate::train::{Layout, buckets_of};
use crate::wide::widest;

/// Each variable begins at a multiple of so many elements: 64 bytes, a line of the cache.
const ALIGN: usize = 16;

/// A model's trainable variables, in the order in which they were made.
#[derive(Debug)]
pub(super) struct Arena {
    pub(super) device: Device,
    /// All of them, one after the other; the variables are views into it.
    pub(super) flat: Tensor,
    pub(super) variables: Vec<Tensor>,
    /// The variables' names, and where each lies in the flat tensor.
    pub(super) layout: Layout,
    /// Where each variable is, and its number among all that were made, frozen ones included.
    spans: Vec<Range<usize>>,
    made: Vec<usize>,
    pub(super) bucket_of: Vec<usize>,
    pub(super) ranges: Vec<Range<usize>>,
    /// The variables' gradients, whose memory is exchanged.
    gradients: Vec<Tensor>,
    home: Home,
}

/// Where gradients are summed up.
#[derive(Debug)]
enum Home {
    /// In the memory that is reduced: of each bucket its address, and of each variable its part there; both as of
    /// the last backward.
    There {
        bound: Vec<usize>,
        views: Vec<Tensor>,
    },
    /// On the device, and from there by pinned memory. Both as long as the arena.
    Device { gradients: Tensor, pinned: Tensor },
}

impl Arena {
    /// Moves the variables that want gradients into an arena.
    pub(super) fn new(variables: &VarStore, sizes: [usize; 2]) -> Result<Arena, TorchError> {
        let device = variables.device();
        let (mut kept, mut spans, mut lens, mut made) = (vec![], vec![], vec![], vec![]);
        let mut len = 0;
        let mut layout = Layout::default();
        // The list of trainable ones has no names.
        let names: HashMap<usize, String> = (variables.variables().into_iter())
            .map(|(name, variable)| (variable.data_ptr().addr(), name))
            .collect();
        for (number, variable) in variables.trainable_variables().into_iter().enumerate() {
            if !variable.requires_grad() {
                continue;
            }
            check(variables, &variable, device)?;
            let numel = variable.numel();
            spans.push(len..len + numel);
            if let Some(name) = names.get(&variable.data_ptr().addr()).filter(|_| numel > 0) {
                layout.add(name.clone(), shape_of(&variable), len..len + numel);
            }
            lens.push(numel.next_multiple_of(ALIGN));
            len += numel.next_multiple_of(ALIGN);
            made.push(number);
            kept.push(variable);
        }
        let ranges = buckets_of(&lens, sizes);
        let bucket = |span: &Range<usize>| {
            let holds = |range: &Range<usize>| range.contains(&span.start);
            ranges.iter().position(holds).unwrap_or(0)
        };
        let flat = zeros(len, device)?;
        let mut arena = Arena {
            device,
            bucket_of: spans.iter().map(bucket).collect(),
            home: match device {
                Device::Cpu => Home::There {
                    bound: vec![0; ranges.len()],
                    views: kept.iter().map(|_| Tensor::new()).collect(),
                },
                _ => Home::Device {
                    gradients: zeros(len, device)?,
                    pinned: zeros(len, Device::Cpu)?.f_pin_memory(device)?,
                },
            },
            flat,
            gradients: Vec::new(),
            variables: kept,
            layout,
            spans,
            made,
            ranges,
        };
        let _guard = tch::no_grad_guard();
        for (variable, span) in arena.variables.iter_mut().zip(&arena.spans) {
            let mut view = part(&arena.flat, span)?.f_view(variable.size().as_slice())?;
            view.f_copy_(variable)?;
            variable.f_set_data(&view)?;
        }
        arena.make_gradients()?;
        Ok(arena)
    }

    /// Hooks that tell of its buckets.
    pub(super) fn hooks(&self) -> Result<Hooks, TorchError> {
        let variables = self.variables.iter().map(Tensor::shallow_clone);
        Hooks::new(
            variables.collect(),
            self.bucket_of.clone(),
            self.ranges.len(),
        )
    }

    pub(super) fn len(&self) -> usize {
        self.ranges.iter().map(ExactSizeIterator::len).sum()
    }

    /// The lengths of a bucket's variables, with what lies between them, by their first dimension and the
    /// others together.
    pub(super) fn shapes(&self, bucket: usize) -> Vec<Shape> {
        let mut shapes = Vec::new();
        for ((variable, span), of) in self.variables.iter().zip(&self.spans).zip(&self.bucket_of) {
            if *of != bucket || span.is_empty() {
                continue;
            }
            let first = variable.size().first().copied().unwrap_or(1);
            let rows = usize::try_from(first).unwrap_or(1);
            let columns = span.len() / rows;
            shapes.push(Shape { rows, columns });
            let gap = span.len().next_multiple_of(ALIGN) - span.len();
            if gap > 0 {
                shapes.push(Shape {
                    rows: gap,
                    columns: 1,
                });
            }
        }
        shapes
    }

    /// The first variable of a bucket, by its number among all that were made.
    pub(super) fn first_made(&self, bucket: usize) -> Option<usize> {
        let of_it = self.made.iter().zip(&self.bucket_of);
        of_it
            .filter(|(_, of)| **of == bucket)
            .map(|(made, _)| *made)
            .min()
    }

    /// Gives each variable a gradient, which later ones are added to in place: then this tensor is one's own,
    /// and its memory can be exchanged.
    fn make_gradients(&mut self) -> Result<(), TorchError> {
        for (variable, span) in self.variables.iter().zip(&self.spans) {
            tch::with_grad(|| variable.f_sum(Kind::Float)?.f_backward())?;
            let mut own = variable.f_grad()?;
            if let Home::Device { gradients, .. } = &self.home {
                let view = part(gradients, span)?.f_view(variable.size().as_slice())?;
                own.f_set_data(&view)?;
            }
            self.gradients.push(own);
        }
        self.take_back();
        Ok(())
    }

    /// For one backward, gradients are added to the memory that `at` shows for each bucket, its address and its
    /// length, on a CPU. On a device they begin at zero.
    pub(super) fn lend(
        &mut self,
        mut at: impl FnMut(usize) -> (*mut f32, usize),
    ) -> Result<Lent<'_>, TorchError> {
        let lent = Lent(self);
        let Arena {
            variables,
            spans,
            bucket_of,
            ranges,
            gradients,
            home,
            ..
        } = &mut *lent.0;
        let (bound, views) = match home {
            Home::There { bound, views } => (bound, views),
            Home::Device { gradients, .. } => {
                let _ = gradients.f_zero_()?;
                return Ok(lent);
            }
        };
        for (bucket, (range, bound)) in ranges.iter().zip(bound).enumerate() {
            let (memory, len) = at(bucket);
            if len != range.len() {
                let expected = range.len();
                return Err(TorchError::Bucket { got: len, expected });
            }
            let all = variables.iter().zip(&*spans).zip(gradients.iter_mut());
            let all = all.zip(views.iter_mut()).zip(&*bucket_of);
            for ((((variable, span), gradient), view), _) in all.filter(|(_, of)| **of == bucket) {
                if span.is_empty() {
                    continue;
                }
                if *bound != memory.addr() {
                    let size = variable.size();
                    // SAFETY: the span lies within the bucket, whose memory the caller lends until `Lent` is
                    // dropped; nobody uses this tensor's memory after that.
                    *view = unsafe { blob(memory.add(span.start - range.start), &size)? };
                }
                gradient.f_set_data(view)?;
            }
            *bound = memory.addr();
        }
        Ok(lent)
    }

    /// Gradients are empty between one backward and the next: their memory is others'.
    fn take_back(&mut self) {
        let nothing = Tensor::f_zeros([0], (Kind::Float, Device::Cpu));
        if let (Home::There { .. }, Ok(nothing)) = (&self.home, nothing) {
            for gradient in &mut self.gradients {
                // Cannot fail: both are of one kind, on one device.
                let _done = gradient.f_set_data(&nothing);
            }
        }
    }

    /// A bucket's part of a device's gradients, and the pinned memory for it. `None` on a CPU.
    pub(super) fn device_part(&self, bucket: usize) -> Result<Option<DevicePart>, TorchError> {
        let (Home::Device { gradients, pinned }, Some(range)) =
            (&self.home, self.ranges.get(bucket))
        else {
            return Ok(None);
        };
        Ok(Some(DevicePart {
            gradients: part(gradients, range)?,
            pinned: part(pinned, range)?,
        }))
    }
}

/// An arena whose gradients are in memory of others, for one backward.
#[derive(Debug)]
pub(super) struct Lent<'a>(&'a mut Arena);

impl std::ops::Deref for Lent<'_> {
    type Target = Arena;

    fn deref(&self) -> &Arena {
        self.0
    }
}

impl Drop for Lent<'_> {
    /// However the backward ended, whoever holds a variable finds no memory of others in its gradient.
    fn drop(&mut self) {
        self.0.take_back();
    }
}

/// A bucket's gradients on a device.
#[derive(Debug)]
pub(super) struct DevicePart {
    gradients: Tensor,
    pinned: Tensor,
}

impl DevicePart {
    /// Adds the gradients to `sum`, when the device has computed them.
    pub(super) fn add_to(&mut self, sum: &mut [f32]) -> Result<(), TorchError> {
        self.pinned.f_copy_(&self.gradients)?;
        if let Some(values) = tensors::view(&self.pinned) {
            add(sum, values);
        }
        Ok(())
    }
}

widest! {
    /// Adds the values to the sum, one by one.
    fn add(sum: &mut [f32], values: &[f32]) {
        for (sum, value) in sum.iter_mut().zip(values) {
            *sum += value;
        }
    }
}

/// A CPU's tensor of `f32` in memory of others.
///
/// # Safety
/// As many elements as `size` says lie at `memory`, for as long as the tensor, or one that shares its storage, is
/// used.
pub(super) unsafe fn blob(memory: *const f32, size: &[i64]) -> Result<Tensor, TorchError> {
    let mut strides = vec![1; size.len()];
    for i in (1..size.len()).rev() {
        strides[i - 1] = strides[i] * size[i];
    }
    let (memory, kind) = (memory.cast::<u8>(), Kind::Float);
    // SAFETY: as promised.
    Ok(unsafe { Tensor::f_from_blob(memory, size, &strides, kind, Device::Cpu)? })
}

/// A tensor's shape, as checkpoints have it.
pub(super) fn shape_of(tensor: &Tensor) -> Vec<u64> {
    tensor.size().into_iter().map(i64::cast_unsigned).collect()
}

pub(super) fn part(flat: &Tensor, range: &Range<usize>) -> Result<Tensor, TorchError> {
    Ok(flat.f_narrow(0, range.start as i64, range.len() as i64)?)
}

pub(super) fn zeros(len: usize, device: Device) -> Result<Tensor, TorchError> {
    Ok(Tensor::f_zeros([len as i64], (Kind::Float, device))?)
}

fn check(all: &VarStore, variable: &Tensor, device: Device) -> Result<(), TorchError> {
    if variable.device() != device {
        let (got, expected) = (variable.device(), device);
        return Err(TorchError::Device { got, expected });
    }
    if variable.kind() == Kind::Float {
        return Ok(());
    }
    let same = |other: &Tensor| other.data_ptr() == variable.data_ptr();
    let named = all.variables().into_iter().find(|(_, other)| same(other));
    Err(TorchError::Kind {
        name: named.map_or_else(String::new, |(name, _)| name),
        kind: variable.kind(),
    })
}
