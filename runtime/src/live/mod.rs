//! Live membership: a worker that stays in its process while nodes come and go, and loses no step.
//!
//! A [`Training`] says what a step is; [`Worker`] drives it by the rule of
//! [`muster_protocol::live`]: survivors regroup in place, commit the step in doubt if any of them
//! holds all its results and else do it again, and newcomers copy a frozen state while the others go
//! on. Ranks tell each other in the operations of a step that they are in it, or, where results are
//! large, in one more all-gather of a word.

mod compare;
mod hand;
mod outcome;
mod quarantine;
mod run;
mod seat;
mod training;

#[cfg(test)]
mod tests;

pub use compare::{Comparison, compare};
pub use hand::{FetchError, Frozen, Landing};
pub use outcome::{LiveError, Outcome, Patience};
pub use run::Worker;
pub use seat::{Seat, Watch};
pub(crate) use seat::{read as seated, restore_of};
pub use training::{Fault, Share, Training};

#[cfg(test)]
pub(crate) use seat::tests::assign;
