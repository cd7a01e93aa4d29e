//! On loopback, with a worker that needs no PyTorch.

mod agents;
mod faults;
mod growth;
mod progress;
mod saves;
mod two_nodes;
mod users;
