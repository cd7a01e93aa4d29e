//! What the tests share: the simulation of many agents, the explorer, the golden frames.

pub mod explore;
pub mod golden;
pub mod sim;
