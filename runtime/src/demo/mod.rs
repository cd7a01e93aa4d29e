//! The demo's training: handwritten digits, data-parallel, stopped and resumed at will.
//!
//! Its final parameters are the same bits whatever happened on the way and however many ranks
//! there were, so that comparing one hash with [`undisturbed`] shows that no step was lost, done
//! twice, or done wrong.

mod args;
mod data;
mod events;
mod live;
pub(crate) mod model;
mod train;
mod worker;

pub use args::{ArgsError, WorkerArgs};
pub use data::{DataError, Digits, HELD_OUT_EVERY, Sample};
pub use events::{Event, EventLog, Line};
pub use train::{BATCH, MICRO_BATCHES, Outcome, State, StepError, Sums, Trainer};
pub use worker::{Ending, WorkerError, run, worker};

use crate::collective::{Group, GroupConfig};

/// The same training in this process alone: what every disturbed one must end with.
///
/// # Errors
/// The data set in this program is damaged, or the training diverges.
pub fn undisturbed(seed: u64, steps: u64) -> Result<Outcome, WorkerError> {
    let digits = Digits::load()?;
    let mut group = Group::form(&GroupConfig::alone())?;
    let mut trainer = Trainer::new(&digits, State::new(seed))?;
    while trainer.state.step < steps {
        trainer.step(&mut group)?;
    }
    Ok(trainer.state.outcome(&digits))
}

#[cfg(test)]
mod tests;
