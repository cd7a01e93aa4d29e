//! The checkpoints of a job as they lie in its store: what is there, whether it is whole, what may go.
//!
//! The launcher looks for its agent, and the commands look for people, by the same code and with their
//! user's rights. Nothing here deletes by itself: what may go is judged against the job's log, by
//! [`muster_protocol::checkpoint::Keeper`].

pub mod again;
pub mod args;
pub mod ledger;
pub mod look;
pub mod place;

pub use ledger::{Ledger, LedgerError, Row};
pub use look::{Reviewed, Rules, Seen, Unknown, Unread, manifest_of, review, whole, words};
pub use place::Folder;

#[cfg(test)]
pub(crate) mod testing;
