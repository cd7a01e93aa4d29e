//! A word that each rank says to all others beside the operations that it does anyway, in their heads.

use std::time::{Duration, Instant};

use super::{Group, GroupError};

impl Group {
    /// From now on this rank's operations say this word. Every rank calls it between the same two operations.
    pub(crate) fn say(&mut self, word: u64) {
        self.word = word;
        self.told = None;
    }

    /// Whether every rank talks with every other itself, so that most operations tell all.
    pub(crate) fn is_flat(&self) -> bool {
        let hosts = self.layout.hosts();
        hosts.len() == 1 || hosts.iter().all(|host| host.len() == 1)
    }

    /// Each operation may take so long once all ranks have heard this one's word, and each the others'; until then as
    /// long as now.
    pub(crate) fn set_op_within_once_told(&mut self, within: Duration) {
        self.within_once_told = Some(within);
        if self.told.is_some() {
            self.have_told();
        }
    }

    /// For how long all ranks have heard all.
    pub(crate) fn told_for(&self) -> Option<Duration> {
        self.told.map(|at| at.elapsed())
    }

    /// Every rank has heard every other's word.
    pub(super) fn have_told(&mut self) {
        self.told.get_or_insert_with(Instant::now);
        if let Some(within) = self.within_once_told.take() {
            self.set_op_within(within);
        }
    }

    /// Words of all ranks, in their order; every rank calls it after the same operation. It costs nothing where
    /// every rank has heard from every other in an operation since [`say`](Self::say), and else an all-gather.
    ///
    /// # Errors
    /// A peer is lost or out of step.
    pub(crate) fn words(&mut self) -> Result<Vec<u64>, GroupError> {
        if self.told.is_some() {
            return Ok(self.watch.words.clone());
        }
        let mut words = vec![0; self.world as usize];
        self.all_gather(&[self.word], &mut words)?;
        self.watch.words.copy_from_slice(&words);
        self.have_told();
        Ok(words)
    }
}
