//! The command line of Muster: the launcher (`muster run`), and the commands that ask agents.

pub mod demo;
pub mod kept;
pub mod query;
pub mod run;
mod slurm;
pub mod sockets;
pub mod stores;
