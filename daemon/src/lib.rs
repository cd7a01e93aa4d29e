//! The agent: everything that touches a machine on behalf of the pure cores in `muster-protocol`.

pub mod agent;
pub mod clock;
pub mod config;
pub mod console;
pub mod http;
pub mod metrics;
pub mod net;
pub mod notify;
mod seldom;
pub mod serve;
pub mod socket;
pub mod state;

#[cfg(test)]
mod testing;
