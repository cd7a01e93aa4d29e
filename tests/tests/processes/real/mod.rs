//! On loopback, with a worker that needs no PyTorch.

mod agents;
mod bad_view;
pub(crate) mod buckets;
mod cancel;
mod drill;
mod faults;
mod growth;
mod heirs;
mod keeping;
pub(crate) mod lives;
mod memory;
mod parity;
mod progress;
mod replicas;
mod room;
pub(crate) mod saves;
mod stopped;
mod store_faults;
mod terminated;
mod triggers;
mod two_nodes;
pub(crate) mod unlike;
mod users;
mod waits;
