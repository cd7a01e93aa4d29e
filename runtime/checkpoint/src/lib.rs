//! Checkpoints on disk: what they look like, who writes what, how they are written and read.
//!
//! A checkpoint is a few data files, each a valid safetensors file ([`shard`]), and one
//! [`manifest`] that says which slice of which tensor lies where and what it must hash to. Before a
//! generation's first save every rank computes the same [`plan`]; at a save each rank fills its
//! image, and [`persist`] makes it a durable file. [`load`] reads what a rank of any other world
//! needs, verifying as it goes; [`newest`] finds what to load; [`retention`] says what may go.
//!
//! This crate knows nothing of jobs, agents or logs: it never decides that a checkpoint is
//! committed. It opens nothing but names below a directory that it was handed as a descriptor
//! ([`dir`]). No input makes it panic.

pub mod dir;
mod dtype;
mod export;
mod glob;
pub mod hex;
pub mod inventory;
pub mod load;
pub mod manifest;
pub mod nearby;
pub mod newest;
mod pages;
pub mod parity;
pub mod part;
pub mod persist;
pub mod place;
pub mod plan;
mod pool;
pub mod reshard;
pub mod retention;
pub mod shard;
pub mod shelf;
pub mod slice;
pub mod slot;
pub mod source;
pub mod sum;
pub mod verify;

pub use dtype::Dtype;
pub use export::{ExportError, export, export_torch};
pub use pages::Pages;
pub use slice::Slice;

/// Unit of alignment, in bytes: what O_DIRECT wants of memory, offset and length on every file
/// system in use, and the page of the machines Muster runs on.
pub const PAGE: usize = 4096;

#[cfg(test)]
mod needs_torch;
#[cfg(test)]
mod testing;
