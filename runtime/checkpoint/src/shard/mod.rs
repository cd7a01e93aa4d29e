//! Data files: safetensors, laid out for O_DIRECT.
//!
//! ```text
//! 8 bytes      length of the header, little-endian
//! header       JSON: name -> dtype, shape, data_offsets; padded with spaces to the next 4 KiB
//! data         tensors of 64 KiB and more, each at a multiple of 4 KiB, then the others at
//!              multiples of 64 bytes; zeros up to the next 4 KiB
//! ```
//!
//! The format forbids holes, so every gap is a tensor of bytes named `__pad_0`, `__pad_1`, … The
//! format: <https://github.com/huggingface/safetensors#format>.

mod header;
mod layout;

pub use header::{Entry, Header, HeaderError, MAX_HEADER};
pub use layout::{Layout, LayoutError, MAX_NAME, Part, check_name};

/// Prefix of padding's names. No tensor's name may begin with it.
pub const PAD: &str = "__pad_";
