//! Faults of a job's store while it trains, and between two lives of the job: disks, people, clocks,
//! other leaders, other users. Training goes on where it can, people are told, and what is restored is
//! the newest commit that is whole.

mod clocks;
mod damage;
mod disks;
mod leaders;
mod owners;
