//! Events of a training for its user.

use std::io::Write;
use std::time::{Duration, SystemTime};

use muster_protocol::Digest;
use muster_protocol::control::Reason;

use super::model::{BoxError, Model};
use super::report::{Best, Evaluation, Report, Save};

/// This rank's place, at the beginning of a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub rank: u32,
    pub world: u32,
    pub local_rank: u32,
    /// The generation's number; 0 without Muster.
    pub generation: u64,
    /// The generation's name; zeros without Muster. Numbers begin anew where all nodes were lost.
    pub digest: Digest,
    /// Steps that are over; for a newcomer, where its copy begins.
    pub steps: u64,
    /// This process kept its state.
    pub survived: bool,
    /// From the end of the generation before, as this rank saw it.
    pub took: Option<Duration>,
}

/// All ranks stop before a step: a node goes, or others come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boundary {
    pub reason: Reason,
    /// When the process may be killed, if a limit was given.
    pub deadline: Option<SystemTime>,
}

/// Called on every rank, in the training's own thread. An error ends the training on this rank.
#[expect(unused_variables, reason = "the names document what is given")]
pub trait Hooks<M: Model> {
    /// A step is committed.
    ///
    /// # Errors
    /// Whatever the training shall end with.
    fn on_step(&mut self, model: &M, report: &Report) -> Result<(), BoxError> {
        Ok(())
    }

    /// An epoch is over: so many are now. Told once, whatever the world does.
    ///
    /// # Errors
    /// Whatever the training shall end with.
    fn on_epoch(&mut self, model: &M, epochs: u64) -> Result<(), BoxError> {
        Ok(())
    }

    /// The held-out samples were gone through. The result comes with the step after the evaluated one, so
    /// `model` is one step ahead of it.
    ///
    /// # Errors
    /// Whatever the training shall end with.
    fn on_evaluate(&mut self, model: &M, evaluation: &Evaluation) -> Result<(), BoxError> {
        Ok(())
    }

    /// An evaluation was better than all before.
    ///
    /// # Errors
    /// Whatever the training shall end with.
    fn on_best(&mut self, best: &Best) -> Result<(), BoxError> {
        Ok(())
    }

    /// This rank's part of the state is sealed, in a job with a store.
    ///
    /// # Errors
    /// Whatever the training shall end with.
    fn on_save(&mut self, model: &M, save: &Save) -> Result<(), BoxError> {
        Ok(())
    }

    /// The state before this step is not saved: earlier saves are still being written. Unless this is implemented,
    /// the reason is written to stderr.
    ///
    /// # Errors
    /// Whatever the training shall end with.
    fn on_not_saved(&mut self, step: u64, why: &str) -> Result<(), BoxError> {
        // Nobody may be there to read it.
        let _written = writeln!(std::io::stderr(), "muster: step {step} is not saved: {why}");
        Ok(())
    }

    /// A generation begins. Where the model is still being made ([`Parallel::later`](super::Parallel::later)), this is
    /// told when it is there, and not at all if the generation is over by then.
    ///
    /// # Errors
    /// Whatever the training shall end with.
    fn on_regroup(&mut self, model: &M, place: &Place) -> Result<(), BoxError> {
        Ok(())
    }

    /// All ranks have stopped, and the state is saved, if there is a store.
    ///
    /// # Errors
    /// Whatever the training shall end with.
    fn on_boundary(&mut self, model: &M, boundary: &Boundary) -> Result<(), BoxError> {
        Ok(())
    }

    /// The generation is over for this rank, and it waits for the next one: why, and whom it missed first. Unless
    /// this is implemented, the reason is written to stderr: when ranks lose each other and no process dies, nobody
    /// else knows it.
    ///
    /// # Errors
    /// Whatever the training shall end with.
    fn on_ended(&mut self, why: &str, lost: Option<u32>) -> Result<(), BoxError> {
        // Nobody may be there to read it.
        let _written = writeln!(
            std::io::stderr(),
            "muster: the generation is over for this rank: {why}"
        );
        Ok(())
    }

    /// These ranks held another state than the majority, and get its state now.
    ///
    /// # Errors
    /// Whatever the training shall end with.
    fn on_quarantine(&mut self, ranks: &[u32]) -> Result<(), BoxError> {
        Ok(())
    }
}

/// Hears nothing, but for the ends of generations, which stderr hears.
impl<M: Model> Hooks<M> for () {}
