//! What the tests share: the simulation of many agents, the explorer of the consensus core, a
//! sample of every frame, and one door to every decoder.

pub mod decoders;
pub mod explore;
pub mod golden;
pub mod sim;
