//! The command line against real agents in this process: sockets and peers on loopback, the
//! commands as processes.

#[cfg(test)]
mod agents;
#[cfg(test)]
mod asking;
#[cfg(test)]
mod jobs;
#[cfg(test)]
mod stores;
