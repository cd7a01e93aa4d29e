//! Muster's messages and pure cores.
//!
//! This crate never reads a clock, opens a socket or a file, looks at the environment, or draws a
//! random number: time, bytes and seeds are values that are passed in. Every core has the same
//! verbs (`handle`, `handle_timeout`, `poll_timeout`, `poll_effect`), so that the agent and the
//! simulation drive exactly the same code and a log of events can be replayed.

pub mod agent;
pub mod barrier;
pub mod budget;
pub mod checkpoint;
pub mod clique;
pub mod codec;
pub mod control;
pub mod hang;
pub mod ids;
pub mod job;
pub mod live;
pub mod local;
pub mod membership;
pub mod memory;
pub mod paxos;
pub mod peers;
pub mod ranks;
pub mod record;
pub mod rng;
pub mod spec;
pub mod storelog;
pub mod time;
pub mod wire;

pub use ids::{Boot, Digest, Home, JobKey, LauncherId, NodeId, StateId, StoreUuid};
pub use time::{Span, Time};
