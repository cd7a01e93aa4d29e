//! The agent: one per node.

pub mod net;
