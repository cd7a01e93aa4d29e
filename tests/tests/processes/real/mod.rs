//! On loopback, with a worker that needs no PyTorch.

mod two_nodes;
