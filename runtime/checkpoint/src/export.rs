//! A checkpoint as one safetensors file with whole tensors, for other programs.

use std::io;
use std::ops::ControlFlow;

use crate::Pages;
use crate::dir::Dir;
use crate::load::{LoadError, Want, load};
use crate::manifest::{Manifest, Tensor};
use crate::persist::{Options, PersistError, Written, persist};
use crate::shard::{Layout, LayoutError, Part};
use crate::slice::Slice;
use crate::source::Source;

/// Why there is no such file.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    #[error("no tensor matches `{0}`: list the names, or use `*`")]
    Nothing(String),
    #[error(transparent)]
    Layout(#[from] LayoutError),
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

/// Writes the tensors whose names match any of the patterns, whole, to one file. They are in memory
/// at once. Names of padding begin with `__pad_`.
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
    let tensors: Vec<&Tensor> = manifest.matching(patterns).collect();
    if tensors.is_empty() {
        return Err(ExportError::Nothing(patterns.join(", ")));
    }
    let parts: Vec<Part> = (tensors.iter())
        .map(|tensor| Part {
            name: tensor.name.clone(),
            dtype: tensor.dtype,
            slice: Slice::whole(&tensor.shape),
        })
        .collect();
    let layout = Layout::new(&parts)?;
    let memory = |source| ExportError::Memory {
        bytes: layout.bytes,
        source,
    };
    let bytes =
        usize::try_from(layout.bytes).map_err(|_| memory(io::ErrorKind::OutOfMemory.into()))?;
    let mut image = Pages::new(bytes).map_err(memory)?;
    let (header, mut rest) = image.split_at_mut(layout.header.len());
    header.copy_from_slice(&layout.header);

    // The image apart, in the order of its bytes.
    let mut order: Vec<(u64, &Tensor, Slice)> = (layout.at.iter().zip(&tensors).zip(parts))
        .map(|((at, tensor), part)| (*at, *tensor, part.slice))
        .collect();
    order.sort_by_key(|(at, tensor, _)| (*at, tensor.slices.iter().map(|s| s.bytes).sum::<u64>()));
    let mut position = layout.header.len() as u64;
    let mut wants = Vec::with_capacity(order.len());
    for (at, tensor, slice) in order {
        let bytes: u64 = tensor.slices.iter().map(|placed| placed.bytes).sum();
        let (_, from) = std::mem::take(&mut rest).split_at_mut((at - position) as usize);
        let (into, after) = from.split_at_mut(bytes as usize);
        (rest, position) = (after, at + bytes);
        wants.push(Want {
            name: &tensor.name,
            dtype: tensor.dtype,
            shape: &tensor.shape,
            slice,
            into,
        });
    }
    load(manifest, source, &mut wants, options.threads)?;
    let progress = |_| ControlFlow::Continue(());
    Ok(persist(to.0, to.1, &image, options, &progress)?)
}
