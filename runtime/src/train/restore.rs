//! When no rank holds a state: all load the newest checkpoint that any of them finds, or begin anew.

use std::path::PathBuf;

use super::config::TrainError;
use super::model::{BoxError, Model};
use super::parallel::{Parallel, fault};
use crate::checkpoint;
use crate::collective::{Group, GroupError};
use crate::live::Fault;

/// Bytes that one operation hands out.
const PIECE: usize = 16 << 20;

/// Where states are kept for the day when every rank dies, if the job has no store (`muster run --store`), which does
/// that better. Each rank has its own, which may lead to one place.
pub trait Store: std::fmt::Debug + Send {
    /// The newest state that is whole, and the step that it was saved with.
    ///
    /// # Errors
    /// It cannot be said whether there is one: the training does not begin.
    fn newest(&mut self) -> Result<Option<(u64, Vec<u8>)>, BoxError>;

    /// Keeps a state: when this returns, a crash does not lose it.
    ///
    /// # Errors
    /// It is not kept; older ones are untouched.
    fn save(&mut self, step: u64, state: &[u8]) -> Result<(), BoxError>;
}

/// A directory of small checkpoint files (see [`checkpoint`]): up to 1 GiB each.
#[derive(Clone, Debug)]
pub struct Files(pub PathBuf);

impl Store for Files {
    fn newest(&mut self) -> Result<Option<(u64, Vec<u8>)>, BoxError> {
        let (loaded, _) = checkpoint::load_newest(&self.0)?;
        Ok(loaded.map(|loaded| (loaded.step, loaded.payload)))
    }

    fn save(&mut self, step: u64, state: &[u8]) -> Result<(), BoxError> {
        checkpoint::save(&self.0, step, state)?;
        Ok(())
    }
}

/// The same state on every rank; how many transactions are committed to it.
pub(super) fn restore<M: Model>(
    training: &mut Parallel<M>,
    group: &mut Group,
) -> Result<u64, Fault> {
    training.model.wait().map_err(fault)?;
    if let Some(saves) = &training.saves {
        let checkpoint = saves.checkpoint().map_err(|e| fault(e.into()))?;
        if let Some(checkpoint) = checkpoint {
            let place = (group.rank(), group.world());
            training
                .load_checkpoint(&checkpoint, place)
                .map_err(fault)?;
            // Nobody goes on before all could load it.
            group.barrier()?;
            return Ok(training.progress.transactions);
        }
    }
    let own = match &mut training.store {
        Some(store) if training.saves.is_none() => store
            .newest()
            .map_err(|source| fault(TrainError::Store(source)))?,
        _ => None,
    };
    // What this rank can give: a checkpoint (its step + 2), or else where everybody begins (1). One that has
    // trained in another job holds no beginning.
    let fresh = training.progress.transactions == 0;
    let gives = match &own {
        Some((step, _)) => step.saturating_add(2),
        None => u64::from(fresh),
    };
    let mut all = vec![0; group.world() as usize];
    group.all_gather(&[gives], &mut all)?;
    let best = all.iter().copied().max().unwrap_or(0);
    let owner = (0..).zip(&all).find(|(_, gives)| **gives == best);
    let Some((owner, _)) = owner.filter(|_| best > 0) else {
        return Err(fault(TrainError::Nothing));
    };
    let state = match own.filter(|_| group.rank() == owner) {
        Some((_, state)) => state,
        None if group.rank() == owner => training.whole().map_err(fault)?,
        None => Vec::new(),
    };
    let state = hand_out(group, owner, state)?;
    if training.decode(&state) {
        return Ok(training.progress.transactions);
    }
    Err(fault(TrainError::Foreign {
        step: best.saturating_sub(2),
        rank: owner,
    }))
}

/// Broadcasts the bytes of `root` to every rank, however many there are.
pub(super) fn hand_out(
    group: &mut Group,
    root: u32,
    bytes: Vec<u8>,
) -> Result<Vec<u8>, GroupError> {
    let mut len = [0u64];
    group.broadcast(root, &[bytes.len() as u64], &mut len)?;
    if group.rank() == root {
        for piece in bytes.chunks(PIECE) {
            group.broadcast(root, piece, &mut vec![0; piece.len()])?;
        }
        return Ok(bytes);
    }
    let too_large = GroupError::TooLarge {
        bytes: usize::try_from(len[0]).unwrap_or(usize::MAX),
        limit: isize::MAX as usize,
    };
    let mut out = Vec::new();
    let Ok(len) = usize::try_from(len[0]) else {
        return Err(too_large);
    };
    if out.try_reserve_exact(len).is_err() {
        return Err(too_large);
    }
    out.resize(len, 0);
    for piece in out.chunks_mut(PIECE) {
        group.broadcast(root, &[], piece)?;
    }
    Ok(out)
}
