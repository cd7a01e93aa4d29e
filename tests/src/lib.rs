//! Shared code of the tests: the simulation of many agents, the explorer of the consensus core, a
//! sample of every frame, and one door to every decoder.

#![expect(
    clippy::result_large_err,
    reason = "a violation carries what a person wants to know, and ends the run"
)]

pub mod decoders;
pub mod explore;
pub mod fleet;
pub mod golden;
pub mod saves;
pub mod sim;
pub mod usual;
