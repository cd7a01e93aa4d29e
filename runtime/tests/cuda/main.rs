//! Checkpoints of tensors on GPUs over a stand-in for the CUDA driver (`tests/standin-nccl`, which cc compiles): no GPU
//! is needed, and nothing is said about a real one.

#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

mod faults;
mod leaks;
mod missing;
#[path = "../common/standin.rs"]
mod standin;
mod support;
mod tensors;
