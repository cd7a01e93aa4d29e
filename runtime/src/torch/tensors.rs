//! Tensors of `f32` as slices and bytes.

use std::ffi::c_void;
use std::ops::Range;

use bytemuck::cast_slice;
use tch::{Device, Kind, Tensor};

use super::{TorchError, shim};
use crate::saving::{OnDevice, OnDeviceMut};
use crate::train::{BoxError, Layout, Load, Named};

/// The values of a contiguous tensor on a CPU, in its own memory. `None` for any other.
pub(super) fn view(tensor: &Tensor) -> Option<&[f32]> {
    let direct =
        tensor.device() == Device::Cpu && tensor.kind() == Kind::Float && tensor.is_contiguous();
    if !direct {
        return None;
    }
    let (at, len) = (tensor.data_ptr().cast::<f32>(), tensor.numel());
    if len == 0 {
        return Some(&[]);
    }
    // SAFETY: `len` floats at `at` belong to the tensor, which is borrowed; nobody writes them meanwhile: that
    // is what the callers in this module see to.
    Some(unsafe { std::slice::from_raw_parts(at, len) })
}

/// Where the values of a contiguous tensor on one of NVIDIA's GPUs are: the address, how many bytes, and libtorch's
/// current stream there.
fn place(tensor: &Tensor) -> Result<Option<(u64, u64, *mut c_void)>, TorchError> {
    let direct = cfg!(feature = "cuda")
        && matches!(tensor.device(), Device::Cuda(_))
        && tensor.kind() == Kind::Float
        && tensor.is_contiguous();
    if !direct {
        return Ok(None);
    }
    let stream = shim::current_stream(tensor)?;
    let (at, bytes) = (tensor.data_ptr().addr(), size_of::<f32>() * tensor.numel());
    Ok(Some((at as u64, bytes as u64, stream)))
}

/// The values, to be read where they are. Their user waits for the work that libtorch has put into its current stream.
fn on_device(tensor: &Tensor) -> Result<Option<OnDevice<'_>>, TorchError> {
    let Some((at, bytes, stream)) = place(tensor)? else {
        return Ok(None);
    };
    // SAFETY: so many bytes there belong to the tensor, which is borrowed. What libtorch does with them goes through
    // the stream, and the callers in this module put nothing into it meanwhile.
    Ok(Some(unsafe { OnDevice::new(at, bytes, stream) }))
}

/// As [`on_device`], to be filled.
///
/// # Safety
/// Nobody else reads or writes the tensor's memory meanwhile, by another tensor that shares it either, but what is in
/// libtorch's current stream.
unsafe fn on_device_mut(tensor: &mut Tensor) -> Result<Option<OnDeviceMut<'_>>, TorchError> {
    let Some((at, bytes, stream)) = place(tensor)? else {
        return Ok(None);
    };
    // SAFETY: as above, and by the caller's word.
    Ok(Some(unsafe { OnDeviceMut::new(at, bytes, stream) }))
}

/// Whether all of them can be [viewed](view), and none shares memory with another.
pub(super) fn are_apart<'a>(all: impl Iterator<Item = &'a Tensor>) -> bool {
    let spans: Option<Vec<Range<*const f32>>> = all
        .map(|tensor| view(tensor).map(<[f32]>::as_ptr_range))
        .collect();
    let Some(mut spans) = spans else { return false };
    spans.retain(|span| !span.is_empty());
    spans.sort_by_key(|span| span.start);
    spans.is_sorted_by(|one, next| one.end <= next.start)
}

/// As [`view`], to be written.
///
/// # Safety
/// Nobody else reads or writes the tensor's memory while the slice is used, and the tensor lives as long.
pub(super) unsafe fn view_mut(tensor: &Tensor) -> Option<&'static mut [f32]> {
    let values = view(tensor)?;
    if values.is_empty() {
        return Some(&mut []);
    }
    // SAFETY: as promised; the address and the length are those of `view`.
    Some(unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast(), values.len()) })
}

/// The values, wherever they are.
pub(super) fn read(tensor: &Tensor, to: &mut [f32]) -> Result<(), TorchError> {
    match view(tensor) {
        Some(values) if values.len() == to.len() => to.copy_from_slice(values),
        _ => tensor
            .f_to_device(Device::Cpu)?
            .f_contiguous()?
            .f_copy_data(to, to.len())?,
    }
    Ok(())
}

/// The tensor's values become these.
pub(super) fn write(tensor: &mut Tensor, values: &[f32]) -> Result<(), TorchError> {
    let _guard = tch::no_grad_guard();
    let from = Tensor::f_from_slice(values)?;
    tensor.f_copy_(&from.f_view(tensor.size().as_slice())?)?;
    Ok(())
}

/// Lets `fill` change the values, in the tensor's own memory where that can be.
pub(super) fn change<E: From<TorchError>>(
    tensor: &mut Tensor,
    fill: impl FnOnce(&mut [f32]) -> Result<(), E>,
) -> Result<(), E> {
    // SAFETY: the tensor is borrowed for as long, and whoever calls this uses no view into it meanwhile.
    if let Some(values) = unsafe { view_mut(tensor) } {
        return fill(values);
    }
    let mut values = vec![0.0; tensor.numel()];
    read(tensor, &mut values)?;
    fill(&mut values)?;
    Ok(write(tensor, &values)?)
}

/// Tensors by name that lie in this one, wherever it is.
pub(super) fn named<'a>(
    layout: &'a Layout,
    tensor: &'a Tensor,
    full: impl Fn(&str) -> String,
) -> Result<Vec<Named<'a>>, TorchError> {
    if let Some(values) = view(tensor) {
        return Ok(layout.tensors(values, full).collect());
    }
    if let Some(values) = on_device(tensor)? {
        return Ok(layout.there(values, full));
    }
    let mut values = vec![0.0; tensor.numel()];
    read(tensor, &mut values)?;
    Ok(layout.copies(&values, full))
}

/// Fills those from a checkpoint.
pub(super) fn load(
    layout: &Layout,
    tensor: &mut Tensor,
    full: impl Fn(&str) -> String,
    from: &mut Load<'_>,
) -> Result<(), BoxError> {
    // SAFETY: the tensor is borrowed for as long, and whoever calls this uses no view into it meanwhile.
    if let Some(values) = unsafe { on_device_mut(tensor)? } {
        return Ok(from.fill(layout.rooms_there(values, full))?);
    }
    change(tensor, |values| -> Result<(), BoxError> {
        Ok(from.fill(layout.rooms(values, full))?)
    })
}

/// Appends the values.
pub(super) fn put(out: &mut Vec<u8>, tensor: &Tensor) -> Result<(), TorchError> {
    if let Some(values) = view(tensor) {
        put_values(out, values);
        return Ok(());
    }
    let mut values = vec![0.0; tensor.numel()];
    read(tensor, &mut values)?;
    put_values(out, &values);
    Ok(())
}

#[cfg(target_endian = "big")]
compile_error!("states are written as they are in memory, in little endian");

pub(super) fn put_values(out: &mut Vec<u8>, values: &[f32]) {
    out.extend_from_slice(cast_slice(values));
}

/// Takes `len` values off the front.
pub(super) fn take(bytes: &mut &[u8], len: usize) -> Option<Vec<f32>> {
    let (values, rest) = bytes.split_at_checked(len.checked_mul(size_of::<f32>())?)?;
    *bytes = rest;
    let (values, _) = values.as_chunks();
    Some(values.iter().map(|v| f32::from_le_bytes(*v)).collect())
}
