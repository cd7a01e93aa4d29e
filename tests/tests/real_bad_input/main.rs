//! Bad input and faults, given to real agents, launchers and workers on loopback.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test ends by panicking"
)]

#[path = "../ground/mod.rs"]
mod ground;
mod stalling;
mod support;

/// Tests of real processes: one at a time.
mod real {
    mod clocks;
    mod consoles;
    mod crashes;
    mod disks;
    mod founders;
    mod frames;
    mod parameters;
    mod places;
    mod strangers;
    mod workers;
}
