//! Bad input and faults, given to real agents, launchers and workers on loopback.

mod support;

/// Tests of real processes: one at a time.
mod real {
    mod clocks;
    mod crashes;
    mod disks;
    mod founders;
    mod frames;
    mod parameters;
    mod places;
    mod strangers;
    mod workers;
}
