//! A checkpoint as one file with whole tensors, for other programs: safetensors, or PyTorch's own.

mod torch;

use std::io;
use std::ops::ControlFlow;

use crate::dir::Dir;
use crate::load::{LoadError, Team, Want, load};
use crate::manifest::{Manifest, Tensor};
use crate::persist::{Options, PersistError, Written, persist};
use crate::shard::{Layout, LayoutError, Part};
use crate::slice::Slice;
use crate::source::Source;
use crate::{Dtype, Pages};

/// Why there is no such file.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    #[error("no tensor matches `{0}`: list the names, or use `*`")]
    Nothing(String),
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error(
        "`{name}` is of type {dtype}, which PyTorch's files cannot have: write safetensors, or leave it out"
    )]
    Type { name: String, dtype: Dtype },
    #[error("not enough memory for {bytes} bytes of tensors: export fewer of them, by name")]
    Memory {
        bytes: u64,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Persist(#[from] PersistError),
}

/// Writes the tensors whose names match any of the patterns, whole, to one safetensors file, and no others: there is no
/// padding. They are in memory at once.
///
/// # Errors
/// The checkpoint is damaged, or the file cannot be written.
pub fn export(
    manifest: &Manifest,
    source: &impl Source,
    patterns: &[&str],
    to: (&Dir, &str),
    options: Options,
) -> Result<Written, ExportError> {
    let tensors = matching(manifest, patterns)?;
    let parts: Vec<Part> = (tensors.iter())
        .map(|tensor| Part {
            name: tensor.name.clone(),
            dtype: tensor.dtype,
            slice: Slice::whole(&tensor.shape),
        })
        .collect();
    let layout = Layout::tight(&parts)?;
    let mut image = image(layout.bytes)?;
    image[..layout.header.len()].copy_from_slice(&layout.header);
    fill(manifest, source, &tensors, &layout.at, &mut image, options)?;
    let progress = |_| ControlFlow::Continue(());
    // The memory goes on to the end of its page.
    let bytes = layout.bytes as usize;
    Ok(persist(to.0, to.1, &image[..bytes], options, &progress)?)
}

/// The same for PyTorch: `torch.load` gives a dictionary of tensors by name, also with
/// `weights_only=True`.
///
/// # Errors
/// As [`export`], or a tensor's type is none of PyTorch's files.
pub fn export_torch(
    manifest: &Manifest,
    source: &impl Source,
    patterns: &[&str],
    to: (&Dir, &str),
    options: Options,
) -> Result<Written, ExportError> {
    let tensors = matching(manifest, patterns)?;
    let archive = torch::Archive::new(&tensors)?;
    let mut image = image(archive.capacity())?;
    fill(manifest, source, &tensors, &archive.at, &mut image, options)?;
    let bytes = archive.finish(&mut image);
    let progress = |_| ControlFlow::Continue(());
    Ok(persist(to.0, to.1, &image[..bytes], options, &progress)?)
}

fn matching<'a>(
    manifest: &'a Manifest,
    patterns: &'a [&'a str],
) -> Result<Vec<&'a Tensor>, ExportError> {
    let tensors: Vec<&Tensor> = manifest.matching(patterns).collect();
    match tensors.is_empty() {
        true => Err(ExportError::Nothing(patterns.join(", "))),
        false => Ok(tensors),
    }
}

fn image(bytes: u64) -> Result<Pages, ExportError> {
    let memory = |source| ExportError::Memory { bytes, source };
    let len = usize::try_from(bytes).map_err(|_| memory(io::ErrorKind::OutOfMemory.into()))?;
    Pages::new(len).map_err(memory)
}

/// Loads the tensors to where they belong in the image, each whole.
fn fill(
    manifest: &Manifest,
    source: &impl Source,
    tensors: &[&Tensor],
    at: &[u64],
    image: &mut [u8],
    options: Options,
) -> Result<(), ExportError> {
    // The image apart, in the order of its bytes.
    let bytes = |tensor: &Tensor| tensor.slices.iter().map(|s| s.bytes).sum::<u64>();
    let mut order: Vec<(u64, &Tensor)> = at.iter().copied().zip(tensors.iter().copied()).collect();
    order.sort_by_key(|(at, tensor)| (*at, bytes(tensor)));
    let (mut rest, mut position) = (image, 0);
    let mut wants = Vec::with_capacity(order.len());
    for (at, tensor) in order {
        let bytes = bytes(tensor);
        let (_, from) = std::mem::take(&mut rest).split_at_mut((at - position) as usize);
        let (into, after) = from.split_at_mut(bytes as usize);
        (rest, position) = (after, at + bytes);
        wants.push(Want {
            name: &tensor.name,
            dtype: tensor.dtype,
            shape: &tensor.shape,
            slice: Slice::whole(&tensor.shape),
            into,
        });
    }
    load(manifest, source, &mut wants, Team::alone(options.threads))?;
    Ok(())
}

#[cfg(test)]
mod needs_torch;
#[cfg(test)]
mod tests;
