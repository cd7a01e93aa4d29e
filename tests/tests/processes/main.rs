//! Muster as its users run it: real agents, launchers and workers as processes, killed, stopped,
//! cut off and brought back. The binaries are those that `cargo build --workspace --lib --bins` leaves
//! beside the tests.

#[cfg(test)]
mod clouds;
#[cfg(test)]
#[path = "../ground/mod.rs"]
mod ground;
#[cfg(test)]
mod harness;
#[cfg(test)]
mod needs_azurite;
#[cfg(test)]
mod needs_libtorch;
#[cfg(test)]
mod needs_netns;
#[cfg(test)]
mod needs_rclone;
#[cfg(test)]
mod needs_seaweedfs;
#[cfg(test)]
mod needs_slurm;
#[cfg(test)]
mod needs_torch;
#[cfg(test)]
mod real;
