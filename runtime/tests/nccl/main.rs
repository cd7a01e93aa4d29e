//! The NCCL backend over stand-ins for NCCL and CUDA (`tests/standin-nccl`, which cc compiles): no GPU
//! is needed, and nothing is said about the real ones.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test's helpers fail the test"
)]

#[path = "../common/mod.rs"]
mod common;
mod faults;
mod live;
mod misuse;
mod needs_torch;
mod processes;
mod results;
#[path = "../common/standin.rs"]
mod standin;
mod support;
