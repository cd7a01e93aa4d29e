//! Stores in the cloud: against a small S3 in memory, with faults injected on the way, and against
//! real servers. All on the loopback address.

mod bed;
mod checkpoints;
mod fake;
mod http;
mod needs_azurite;
mod needs_rclone;
mod needs_seaweedfs;
mod probing;
mod proxy;
mod reading;
mod records;
mod server;
mod uploads;
