//! The command line of Muster: the launcher (`muster run`), and what the other subcommands need.

pub mod demo;
pub mod run;
mod slurm;
pub mod sockets;
