//! Stores in the cloud: against a small S3 in memory, with faults injected on the way, and against
//! real servers. All on the loopback address.

#[cfg(test)]
mod azurite;
#[cfg(test)]
mod bed;
#[cfg(test)]
mod checkpoints;
#[cfg(test)]
mod fake;
#[cfg(test)]
mod http;
#[cfg(test)]
mod needs_azurite;
#[cfg(test)]
mod needs_rclone;
#[cfg(test)]
mod needs_seaweedfs;
#[cfg(test)]
mod probing;
#[cfg(test)]
mod proxy;
#[cfg(test)]
mod reading;
#[cfg(test)]
mod records;
#[cfg(test)]
mod saving;
#[cfg(test)]
mod server;
#[cfg(test)]
mod tls;
#[cfg(test)]
mod uploads;
