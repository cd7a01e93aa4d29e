//! The NCCL backend over the stand-ins for NCCL and CUDA in `tests/standin-nccl`: no GPU is needed, and
//! nothing is said about the real ones.
